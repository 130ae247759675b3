"""Parquet, CSV and Hugging Face's datasets: values, types and order come back, and damage names its row."""

from __future__ import annotations

import datetime
import decimal
import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tarshards import Ledger, export_dataset, import_dataset, read_samples, write_samples
from tarshards.errors import OpenError, SampleError, TarshardsError, UrlError
from tarshards.formats.exporting import LOOKED_AT

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ImportError:
    pa = None

pytestmark = [pytest.mark.interop, pytest.mark.skipif(pa is None, reason="pyarrow is not installed")]


def read_back(names) -> pa.Table:
    table = pa.concat_tables([pq.read_table(name) for name in names])
    return table.drop_columns("__key__")


def equal(one: pa.Table, other: pa.Table) -> bool:
    """Whether tables have the same types and values, NaN being equal to itself."""
    if one.schema != other.schema:
        return False
    sink = [pa.BufferOutputStream() for _ in range(2)]
    for table, stream in zip((one, other), sink):
        with pa.ipc.new_stream(stream, table.schema) as writer:
            writer.write_table(table.combine_chunks())
    return repr(one.to_pylist()) == repr(other.to_pylist())


def round_trip(folder: Path, table: pa.Table, rows: int = 3, max_bytes: int = 1) -> pa.Table:
    pq.write_table(table, folder / "a.parquet", row_group_size=rows)
    shards = import_dataset(str(folder / "a.parquet"), str(folder / "o-%d.tar"), max_bytes=max_bytes, sync=False)
    keys = [sample["__key__"] for sample in read_samples(shards)]
    assert keys == [f"a/{number:09d}" for number in range(table.num_rows)]
    return read_back(export_dataset(shards, str(folder / "b-%02d.parquet"), sync=False))


DAY = datetime.datetime(2026, 11, 23, 1, 2, 3, 456789)


def columns():
    """A column of each type, each with values that are hard to keep."""
    yield pa.array([1, None, -128], pa.int8())
    yield pa.array([2**64 - 1, None, 0], pa.uint64())
    yield pa.array([0.1, float("nan"), float("-inf")], pa.float32())
    yield pa.array([1e300, None, -0.0], pa.float64())
    yield pa.array([np.float16(0.1), None, np.float16(2)], pa.float16())
    yield pa.array([True, None, False])
    yield pa.array(["", None, "ü\n"])
    yield pa.array(["a", None, "b"], pa.large_string())
    yield pa.array([b"", None, b"\xff\xd8\xff\0"])
    yield pa.array([b"ab", None, b"cd"], pa.binary(2))
    yield pa.array([DAY, None, DAY], pa.timestamp("us"))
    yield pa.array([DAY, None, DAY], pa.timestamp("ns", "Europe/Berlin"))
    yield pa.array([DAY.date(), None, DAY.date()], pa.date32())
    yield pa.array([DAY.time(), None, DAY.time()], pa.time64("us"))
    yield pa.array([5, None, -7], pa.duration("ms"))
    yield pa.array([decimal.Decimal("1.230"), None, decimal.Decimal("-9.999")], pa.decimal128(7, 3))
    yield pa.array(["x", None, "x"]).dictionary_encode()
    yield pa.array([[1.5, 2.5], None, []], pa.list_(pa.float32()))
    yield pa.array([[1, None], None, [3]], pa.list_(pa.int16()))
    yield pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int64(), 2))
    yield pa.array([[True], None, [False, True]], pa.large_list(pa.bool_()))
    yield pa.array([["a", None], None, []], pa.list_(pa.string()))
    yield pa.array([[[1], []], None, [[2, 3]]], pa.list_(pa.list_(pa.int32())))
    yield pa.array([{"a": 1, "b": [None]}, None, {"a": None, "b": None}])
    yield pa.array([{"a": b"\xff", "t": DAY}, None, {"a": None, "t": None}])
    yield pa.array([{"a": float("nan")}, None, {"a": 1.0}])
    yield pa.array([[("k", 1)], None, []], pa.map_(pa.string(), pa.int32()))
    yield pa.nulls(3)


@pytest.mark.parametrize("column", list(columns()) if pa else [], ids=lambda column: str(column.type))
def test_each_type_comes_back(tmp_path, column):
    table = pa.table({"n": [0, 1, 2], "X": column})
    assert equal(round_trip(tmp_path, table, rows=2), table)


def test_rows_of_nulls_come_back(tmp_path):
    table = pa.table({"a": pa.array([None, 1], pa.int32()), "b": pa.array([None, "x"])})
    assert equal(round_trip(tmp_path, table), table)


def test_tensors_come_back(tmp_path):
    tensor = pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(12, dtype="f4").reshape(3, 2, 2))
    table = pa.table({"x": tensor})
    assert equal(round_trip(tmp_path, table), table)
    assert np.load(open_first(tmp_path / "o-0.tar", "x.npy")).shape == (2, 2)


def open_first(path: Path, field: str):
    from io import BytesIO

    return BytesIO(next(iter(read_samples(str(path))))[field])


TYPES = {
    "i": (lambda: pa.int32(), st.integers(-(2**31), 2**31 - 1)),
    "f": (lambda: pa.float64(), st.floats()),
    "s": (lambda: pa.string(), st.text()),
    "b": (lambda: pa.binary(), st.binary() | st.sampled_from([b"\x89PNG\r\n", b"\xff\xd8\xff"])),
    "l": (lambda: pa.list_(pa.int64()), st.lists(st.none() | st.integers(-(2**63), 2**63 - 1), max_size=3)),
    "d": (lambda: pa.struct({"x": pa.float32(), "y": pa.list_(pa.binary())}), None),
    "cls": (lambda: pa.int64(), st.integers(0, 9)),
}
STRUCTS = st.fixed_dictionaries(
    {"x": st.none() | st.floats(width=32), "y": st.none() | st.lists(st.binary(), max_size=2)}
)


@st.composite
def tables(draw):
    names = draw(st.lists(st.sampled_from(sorted(TYPES)), unique=True, min_size=1))
    rows = draw(st.integers(1, 9))
    arrays = {}
    for name in names:
        of, values = TYPES[name]
        values = st.lists(st.none() | (STRUCTS if values is None else values), min_size=rows, max_size=rows)
        arrays[name.upper() if draw(st.booleans()) else name] = pa.array(draw(values), of())
    return pa.table(arrays)


@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_tables_come_back(tmp_path_factory, data):
    table = data.draw(tables())
    folder = tmp_path_factory.mktemp("tables")
    pieces = data.draw(st.sampled_from([1, 10**6]))
    assert equal(round_trip(folder, table, rows=data.draw(st.integers(1, 5)), max_bytes=pieces), table)


def test_a_damaged_row_group_names_its_rows_and_costs_no_other(tmp_path):
    table = pa.table({"x": [bytes([n]) * 1000 for n in range(30)]})
    path = tmp_path / "a.parquet"
    pq.write_table(table, path, row_group_size=10, compression="none", use_dictionary=False, write_page_checksum=True)
    data = path.read_bytes().replace(bytes([15]) * 1000, bytes([15]) * 999 + b"!")
    path.write_bytes(data)
    with pytest.raises(TarshardsError, match=r"a\.parquet: row 10: rows 10 to 19 cannot be read"):
        import_dataset(str(path), str(tmp_path / "o-%d.tar"))
    ledger = Ledger(max_errors=1)
    shards = import_dataset(str(path), str(tmp_path / "o-%d.tar"), on_error=ledger, overwrite=True)
    found = [sample["x.bin"][0] for sample in read_samples(shards)]
    assert found == [*range(10), *range(20, 30)]
    assert (ledger.samples, ledger.failed) == (20, 10)


def test_parquet_cannot_make_an_import_read_other_files(tmp_path):
    (tmp_path / "secret").write_bytes(b"secret")
    of = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    rows = [{"bytes": b"1", "path": "a.PNG"}, {"bytes": None, "path": str(tmp_path / "secret")}]
    pq.write_table(pa.table({"image": pa.array(rows, of)}), tmp_path / "a.parquet")
    ledger = Ledger(max_errors=1)
    shards = import_dataset(str(tmp_path / "a.parquet"), str(tmp_path / "o-%d.tar"), on_error=ledger)
    assert [sample["image.png"] for sample in read_samples(shards)] == [b"1"]
    (lost,) = ledger.quarantined
    assert (lost.shard, lost.field) == (f"{tmp_path / 'a.parquet'}: row 1", "image")
    assert "no bytes, only a path" in lost.reason


def test_files_with_other_columns_or_none_are_refused(tmp_path):
    pq.write_table(pa.table({"x": [1]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"y": [1]}), tmp_path / "b.parquet")
    with pytest.raises(SampleError, match=r"b\.parquet: its columns differ from those of"):
        import_dataset(str(tmp_path / "*.parquet"), str(tmp_path / "o-%d.tar"))
    (tmp_path / "b.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(OpenError, match=r"b\.parquet: not a parquet file"):
        import_dataset(str(tmp_path / "b.parquet"), str(tmp_path / "o-%d.tar"))
    with pytest.raises(OpenError, match="No such file"):
        import_dataset(str(tmp_path / "c.parquet"), str(tmp_path / "o-%d.tar"))
    pq.write_table(pa.table({"x": [1], "X": [1]}), tmp_path / "d.parquet")
    with pytest.raises(SampleError, match="'x' and 'X' would both become"):
        import_dataset(str(tmp_path / "d.parquet"), str(tmp_path / "o-%d.tar"))


def test_keys_are_of_a_column_or_a_template(tmp_path):
    pq.write_table(pa.table({"__key__": ["a", "b"], "n": [7, 8]}), tmp_path / "a.parquet")
    shards = import_dataset(str(tmp_path / "a.parquet"), str(tmp_path / "o-%d.tar"))
    assert [sample["__key__"] for sample in read_samples(shards)] == ["a", "b"]
    assert pq.read_table(export_dataset(shards, str(tmp_path / "b-%d.parquet"))[0]).to_pydict() == {
        "__key__": ["a", "b"],
        "n": [7, 8],
    }
    pq.write_table(pa.table({"n": [7, 8]}), tmp_path / "c.parquet")
    shards = import_dataset(str(tmp_path / "c.parquet"), str(tmp_path / "c-%d.tar"), key="{file}{n:03d}")
    assert [sample["__key__"] for sample in read_samples(shards)] == ["c007", "c008"]
    with pytest.raises(SampleError, match="no column 'm' for the key"):
        import_dataset(str(tmp_path / "c.parquet"), str(tmp_path / "d-%d.tar"), key="{m}")


def test_shards_of_others_get_columns_by_their_first_samples(tmp_path):
    x = np.arange(4, dtype="<i2").reshape(2, 2)
    samples = [
        {"__key__": "a", "jpg": b"\xff\xd8", "cls": 3, "txt": "hé", "json": {"a": [1]}, "x.npy": x, "foo": b"1"},
        {"__key__": "b", "jpg": b"\xff\xd9", "cls": -1, "txt": "", "json": [], "x.npy": -x, "foo": b"2"},
    ]
    write_samples(samples, str(tmp_path / "a.tar"))
    (name,) = export_dataset(str(tmp_path / "a.tar"), str(tmp_path / "b-%d.parquet"))
    table = pq.read_table(name)
    assert table.schema.names == ["__key__", "cls", "foo", "jpg", "json", "txt", "x.npy"]
    assert table["cls"].to_pylist() == [3, -1]
    assert table["json"].to_pylist() in (['{"a": [1]}', "[]"], [b'{"a": [1]}', b"[]"])
    (again,) = import_dataset(name, str(tmp_path / "c-%d.tar"))
    theirs, ours = list(read_samples(str(tmp_path / "a.tar"))), list(read_samples(again))
    for one, other in zip(theirs, ours, strict=True):
        assert {**one, "__url__": ""} == {
            "__url__": "",
            **{n.removesuffix(".bin"): other[n] for n in other if n != "__url__"},
        }


def test_a_value_that_does_not_fit_names_shard_and_key(tmp_path):
    samples = [{"__key__": f"{n:04d}", "cls": b"7"} for n in range(150)]
    samples[120]["cls"] = b"seven"
    samples[130]["txt"] = b"more"
    samples[140]["cls"] = b"9" * 30
    write_samples(samples, str(tmp_path / "a.tar"))
    with pytest.raises(TarshardsError, match=r"a\.tar: 0120\.cls: .*not a decimal integer"):
        export_dataset(str(tmp_path / "a.tar"), str(tmp_path / "b-%d.parquet"))
    ledger = Ledger(max_errors=3)
    (name,) = export_dataset(str(tmp_path / "a.tar"), str(tmp_path / "b-%d.parquet"), on_error=ledger, overwrite=True)
    assert [entry.key for entry in ledger.quarantined] == ["0120", "0130", "0140"]
    assert pq.read_metadata(name).num_rows == 147


CSV = 'id,Name,score,when\n1,"a, ""b""\n",0.5,2026-01-01\n2,,,\n3,c,1000.0,2026-01-03\n'


def test_rows_of_csv_come_back(tmp_path):
    (tmp_path / "a.csv").write_text(CSV)
    (tmp_path / "b.tsv").write_text("x\ty\n1\ta b\n")
    shards = import_dataset(str(tmp_path / "a.csv"), str(tmp_path / "o-%d.tar"), max_bytes=1)
    assert len(shards) == 3
    first, second, _ = read_samples(shards)
    assert first["name.txt"] == b'a, "b"\n'
    assert (first["id"], first["when.json"]) == (b"1", b'"2026-01-01"')
    assert sorted(second) == ["__key__", "__url__", "id", "name.txt"]
    table = read_back(export_dataset(shards, str(tmp_path / "b-%d.parquet")))
    import pyarrow.csv

    options = pyarrow.csv.ParseOptions(newlines_in_values=True)
    assert equal(table, pyarrow.csv.read_csv(str(tmp_path / "a.csv"), parse_options=options))
    (shard,) = import_dataset(str(tmp_path / "b.tsv"), str(tmp_path / "t-%d.tar"))
    assert next(iter(read_samples(shard)))["y.txt"] == b"a b"


@settings(max_examples=30)
@given(
    rows=st.lists(st.tuples(st.integers(), st.text('ab", \n', min_size=1)), min_size=1, max_size=9),
    max_bytes=st.integers(1, 40),
)
def test_csv_is_cut_only_between_rows(tmp_path_factory, rows, max_bytes):
    import csv

    folder = tmp_path_factory.mktemp("csv")
    with open(folder / "a.csv", "w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([("n", "t"), *rows])
    shards = import_dataset(str(folder / "a.csv"), str(folder / "o-%d.tar"), max_bytes=max_bytes, sync=False)
    samples = list(read_samples(shards))
    assert [sample["t.txt"].decode() for sample in samples] == [text for _, text in rows]
    assert [sample["__key__"] for sample in samples] == [f"a/{number:09d}" for number in range(len(rows))]


EXACT = """__key__,zip,id,price,version,odd,whole,flag,day,n,mixed,empty
007,007,12345678901234567890,0.50,1.9,1e3,-7,True,2026-01-02,1,1,
008,012,22345678901234567890,12.25,1.10,2,0,False,2026-01-03,,2.5,
"""


def test_cells_of_csv_stay_text_unless_another_type_gives_back_all_of_a_column(tmp_path):
    (tmp_path / "a.csv").write_text(EXACT)
    (shard,) = import_dataset(str(tmp_path / "a.csv"), str(tmp_path / "o-%d.tar"))
    first, second = read_samples(shard)
    assert {name: value for name, value in first.items() if name != "__url__"} == {
        "__key__": "007",
        "zip.txt": b"007",
        "id.txt": b"12345678901234567890",
        "price.json": b"0.5",
        "version.txt": b"1.9",
        "odd.txt": b"1e3",
        "whole.json": b"-7",
        "flag.json": b"true",
        "day.json": b'"2026-01-02"',
        "n.json": b"1",
        "mixed.json": b"1.0",
        "empty.txt": b"",
    }
    assert (second["version.txt"], second["mixed.json"], "n.json" in second) == (b"1.10", b"2.5", False)


def test_a_column_of_csv_is_looked_at_to_its_end_in_all_files(tmp_path):
    (tmp_path / "a.csv").write_text("n,m\n" + "1,1\n" * 5000)
    (tmp_path / "b.csv").write_text("n,m\n" + "1,1\n" * 5000 + "07,1\n")
    shards = import_dataset(str(tmp_path / "?.csv"), str(tmp_path / "o-%d.tar"))
    assert {(sample["n.txt"], sample["m.json"]) for sample in read_samples(shards)} == {(b"1", b"1"), (b"07", b"1")}


CELLS = st.sampled_from(["1", "01", "-2", "1.5", "1.50", "2.25", "1e3", "0.1", "nan", "NA", "true", "True", "x", ""])
CELLS |= st.integers().map(str) | st.floats().map(repr) | st.dates().map(str)


@settings(max_examples=50, deadline=None)
@given(st.lists(CELLS, min_size=1, max_size=6))
def test_different_cells_of_csv_never_become_one_value(tmp_path_factory, cells):
    folder = tmp_path_factory.mktemp("csv")
    (folder / "a.csv").write_text("n,x\n" + "".join(f"{n},{cell}\n" for n, cell in enumerate(cells)))
    shards = import_dataset(str(folder / "a.csv"), str(folder / "o-%d.tar"), sync=False)
    values: dict[str, set] = {}
    for cell, sample in zip(cells, read_samples(shards), strict=True):
        found = {name: value for name, value in sample.items() if name.startswith("x.")}
        values.setdefault(repr(found), set()).add(cell)
    assert all(len(same) == 1 for same in values.values())


def test_columns_of_csv_have_the_types_that_are_asked_for(tmp_path):
    (tmp_path / "a.csv").write_text("a,b,c,t\n007,1,NA,x\n8,2,2.50,y\n")
    source, pattern = str(tmp_path / "a.csv"), str(tmp_path / "o-%d.tar")
    types = {"a": "int", "b": "text", "c": "float"}
    first, second = read_samples(import_dataset(source, pattern, types=types))
    assert (first["a.json"], first["b.txt"], "c.json" in first, second["c.json"]) == (b"7", b"1", False, b"2.5")
    for wrong, reason in [
        ({"d": "int"}, r"a\.csv: no column 'd' to give a type; there are a, b, c, t"),
        ({"a": "integer"}, "one of text, int, float, bool, date, timestamp, not 'integer'"),
        ({"t": "int"}, r"a\.csv: row 0: t: 'x' is not int"),
        (["a"], r"types= takes a dict of columns and types"),
    ]:
        with pytest.raises((ValueError, TypeError), match=reason):
            import_dataset(source, pattern, types=wrong, overwrite=True)
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(ValueError, match="types= applies to csv only"):
        import_dataset(str(tmp_path / "a.jsonl"), pattern, types={"a": "int"}, overwrite=True)


def test_keys_of_csv_are_the_text_of_their_cells(tmp_path):
    (tmp_path / "a.csv").write_text("name,n,price\n007,7,1.50\n")
    shards = import_dataset(str(tmp_path / "a.csv"), str(tmp_path / "o-%d.tar"), key="{name}-{n:03d}")
    assert [sample["__key__"] for sample in read_samples(shards)] == ["007-007"]
    shards = import_dataset(str(tmp_path / "a.csv"), str(tmp_path / "p-%d.tar"), key="{price}/0")
    assert [sample["__key__"] for sample in read_samples(shards)] == ["1.50/0"]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_csv_in_the_encoding_of_its_byte_order_mark(tmp_path, encoding):
    (tmp_path / "a.csv").write_bytes("n,ü\n1,ß\n2,é\n3,x\n".encode(encoding))
    shards = import_dataset(str(tmp_path / "a.csv"), str(tmp_path / "o-%d.tar"), max_bytes=1)
    assert len(shards) == (3 if encoding.startswith("utf-8") else 1)
    samples = list(read_samples(shards))
    assert [sample["ü.txt"].decode() for sample in samples] == ["ß", "é", "x"]
    assert [sample["n.json"] for sample in samples] == [b"1", b"2", b"3"]
    assert samples[2]["__key__"] == "a/000000002"


def test_errors_of_csv_name_the_file(tmp_path):
    pattern = str(tmp_path / "o-%d.tar")
    for name, data, reason in [
        ("dup.csv", b"a,a\n1,2\n", "two columns have the same name: a, a"),
        ("none.csv", b"a\n", "no samples: no row became one"),
        ("cut.csv", "a\n1\n".encode("utf-16")[:-1], "row 0: not in the encoding of its byte order mark"),
    ]:
        (tmp_path / name).write_bytes(data)
        with pytest.raises(TarshardsError, match=f"{name}: {reason}"):
            import_dataset(str(tmp_path / name), pattern)
    (tmp_path / "a.csv").write_text("a\n1\n")
    with pytest.raises(SampleError, match=r"a\.csv: no column 'b' for the key"):
        import_dataset(str(tmp_path / "a.csv"), pattern, key="{b}")


@pytest.mark.parametrize("of", [pa.int64(), pa.uint8(), pa.bool_(), pa.float16()] if pa else [], ids=str)
def test_lists_of_one_length_beside_a_null_keep_their_type(tmp_path, of):
    values = {"int64": [2**62 + 1, 2], "bool": [True, False]}.get(str(of), [1, 2])
    table = pa.table({"x": pa.array([values, None], pa.list_(of, 2))})
    assert equal(round_trip(tmp_path, table), table)
    assert np.load(open_first(tmp_path / "o-0.tar", "x.npy")).dtype == of.to_pandas_dtype()


def test_arrays_that_a_column_does_not_hold_are_refused(tmp_path):
    arrays = [np.array([0.1], "f4")] * LOOKED_AT + [np.array([0.1], "f8"), np.array([0.5], "f2")]
    write_samples([{"__key__": f"{n:03d}", "npy": array} for n, array in enumerate(arrays)], str(tmp_path / "a.tar"))
    with pytest.raises(TarshardsError, match=r"a\.tar: 100\.npy: not list<.*float.*>: an array of float64"):
        export_dataset(str(tmp_path / "a.tar"), str(tmp_path / "b-%d.parquet"))
    ledger = Ledger(max_errors=1)
    (name,) = export_dataset(str(tmp_path / "a.tar"), str(tmp_path / "b-%d.parquet"), on_error=ledger, overwrite=True)
    assert pq.read_table(name)["npy"].to_pylist()[-2:] == [arrays[0].tolist(), [0.5]]


def test_a_bad_row_of_csv_names_its_number_and_costs_no_other(tmp_path):
    rows = [f"{n},{n}" for n in range(40)]
    rows[20], rows[30], rows[35] = "20", "30,thirty", "35,35,35"
    (tmp_path / "a.csv").write_text("\n".join(["x,y", *rows, ""]))
    source, pattern = str(tmp_path / "a.csv"), str(tmp_path / "o-%d.tar")
    (tmp_path / "b.csv").write_text("\n".join(["x,y", *rows[:20], ""]))
    with pytest.raises(SampleError, match=r"a\.csv: row 20: 1 cells for 2 columns"):
        import_dataset([str(tmp_path / "b.csv"), source], pattern)
    ledger = Ledger(max_errors=3)
    files = [str(tmp_path / "b.csv"), source]
    shards = import_dataset(files, pattern, types={"y": "int"}, on_error=ledger, overwrite=True)
    found = [int(sample["x.json"]) for sample in read_samples(shards[1])]
    assert found == [n for n in range(40) if n not in (20, 30, 35)]
    assert [sample["__key__"] for sample in read_samples(shards[1])] == [f"a/{n:09d}" for n in found]
    assert sorted(entry.shard for entry in ledger.quarantined) == [f"{source}: row {n}" for n in (20, 30, 35)]


def test_rows_that_are_no_csv_cost_no_other(tmp_path):
    rows = [
        b"0,a",
        b'1,"a"b',
        b"2,\xff",
        b"",
        b'3,"two\nlines"',
        b"4," + b"x" * 200_000,
        b'5,mid"dle',
        b'6,"open',
        b"7,a",
    ]
    (tmp_path / "a.csv").write_bytes(b"\n".join([b"x,y", *rows, b""]))
    ledger = Ledger(max_errors=3)
    shards = import_dataset(str(tmp_path / "a.csv"), str(tmp_path / "o-%d.tar"), on_error=ledger)
    samples = list(read_samples(shards))
    assert [sample["x.json"] for sample in samples] == [b"0", b"3", b"4", b"5"]
    assert [sample["__key__"] for sample in samples] == [f"a/{n:09d}" for n in (0, 3, 4, 5)]
    assert samples[1]["y.txt"] == b"two\nlines"
    assert [entry.shard for entry in ledger.quarantined] == [f"{tmp_path}/a.csv: row {n}" for n in (1, 2, 6)]
    words = ["',' expected", "not UTF-8", "unexpected end"]
    assert all(word in entry.reason for word, entry in zip(words, ledger.quarantined, strict=True))


def test_rows_have_the_same_numbers_however_a_file_is_cut(tmp_path):
    (tmp_path / "a.csv").write_bytes(b'x,y\r\n\r\n0,a\r\n\r\n\r\n1,"\r\n\r\n"\r\n2,c\r\n')
    for size in (1, 10**9):
        shards = import_dataset(str(tmp_path / "a.csv"), str(tmp_path / f"o{size}-%d.tar"), max_bytes=size)
        samples = list(read_samples(shards))
        assert [sample["__key__"] for sample in samples] == [f"a/{n:09d}" for n in range(3)]
        assert [sample["y.txt"] for sample in samples] == [b"a", b"\r\n\r\n", b"c"]


def test_damage_of_a_file_of_csv_costs_what_follows(tmp_path):
    rows = b"x,y\n" + b"".join(b"%d,%d\n" % (n, n) for n in range(10))
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(rows)[:-8])
    (tmp_path / "b.csv").write_bytes(b"x,y\n10,10\n")
    ledger = Ledger(max_errors=1)
    shards = import_dataset(str(tmp_path / "*.csv*"), str(tmp_path / "o-%d.tar"), on_error=ledger)
    assert [sample["x.json"] for sample in read_samples(shards)] == [b"%d" % n for n in range(11)]
    assert ledger.quarantined[0].shard == str(tmp_path / "a.csv.gz")


def needs_datasets():
    return pytest.importorskip("datasets")


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The datasets library, which keeps its files in tmp_path."""
    datasets = needs_datasets()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    datasets.disable_progress_bars()
    return datasets


PNG = b"\x89PNG\r\n\x1a\n"


def a_dataset(datasets, folder: Path):
    (folder / "cat.jpg").write_bytes(b"\xff\xd8\xff cat")
    features = {
        "image": datasets.Image(),
        "label": datasets.ClassLabel(names=["cat", "dog"]),
        "Caption": datasets.Value("string"),
        "box": datasets.Array2D((2, 2), "float32"),
        "embedding": datasets.List(datasets.Value("float32")),
        "meta": {"width": datasets.Value("int32"), "tags": datasets.List(datasets.Value("string"))},
    }
    rows = {
        "image": [{"bytes": PNG + b"%d" % n, "path": None} for n in range(11)]
        + [{"bytes": None, "path": str(folder / "cat.jpg")}],
        "label": [n % 2 for n in range(12)],
        "Caption": [None if n == 3 else f"text {n}" for n in range(12)],
        "box": [[[n, 1.5], [2, 3]] for n in range(12)],
        "embedding": [[0.1] * (n % 3) for n in range(12)],
        "meta": [{"width": n, "tags": ["a", "ü"]} for n in range(12)],
    }
    return datasets.Dataset.from_dict(rows, features=datasets.Features(features))


def undecoded(datasets, dataset) -> list:
    return list(dataset.cast_column("image", datasets.Image(decode=False)))


def test_a_hugging_face_dataset_comes_back(tmp_path, hub):
    dataset = a_dataset(hub, tmp_path)
    shards = import_dataset(dataset, str(tmp_path / "o-%d.tar"), max_bytes=700)
    assert len(shards) > 1
    samples = list(read_samples(shards))
    assert [sample["__key__"] for sample in samples] == [f"{n:09d}" for n in range(12)]
    assert sorted(samples[0]) == [
        *("__key__", "__url__", "box.npy", "caption.txt", "embedding.npy", "image.png", "label.cls", "meta.json")
    ]
    assert samples[-1]["image.jpg"] == b"\xff\xd8\xff cat"
    back = export_dataset(shards, str(tmp_path / "b-%d.parquet"))
    found = hub.load_dataset("parquet", data_files=back, split="train").remove_columns("__key__")
    assert found.features == dataset.features
    rows = undecoded(hub, dataset)
    rows[-1]["image"] = {"bytes": b"\xff\xd8\xff cat", "path": None}
    assert undecoded(hub, found) == rows


def test_datasets_on_disk_and_streamed_ones(tmp_path, hub):
    dataset = a_dataset(hub, tmp_path).select(range(8))
    dataset.save_to_disk(tmp_path / "saved")
    hub.DatasetDict({"train": dataset}).save_to_disk(tmp_path / "splits")
    direct = import_dataset(dataset, str(tmp_path / "o-%d.tar"))
    for source, options in ((tmp_path / "saved", {}), (tmp_path / "splits", {"split": "train"})):
        shards = import_dataset(source, str(tmp_path / "d-%d.tar"), overwrite=True, **options)
        assert Path(shards[0]).read_bytes() == Path(direct[0]).read_bytes()
    with pytest.raises(UrlError, match="the dataset has several splits; name one: train"):
        import_dataset(tmp_path / "splits", str(tmp_path / "e-%d.tar"))
    streamed = dataset.to_iterable_dataset(num_shards=3)
    shards = import_dataset(streamed, str(tmp_path / "s-%d.tar"))
    assert len(shards) == 3
    fields = [{n: v for n, v in sample.items() if n[0] != "_"} for sample in read_samples(shards)]
    assert fields == [{n: v for n, v in sample.items() if n[0] != "_"} for sample in read_samples(direct)]


def test_an_image_that_is_gone_costs_its_row(tmp_path, hub):
    dataset = a_dataset(hub, tmp_path)
    (tmp_path / "cat.jpg").unlink()
    ledger = Ledger(max_errors=1)
    shards = import_dataset(dataset, str(tmp_path / "o-%d.tar"), on_error=ledger)
    assert len(list(read_samples(shards))) == 11
    assert (ledger.quarantined[0].shard, ledger.quarantined[0].field) == ("dataset: row 11", "image")


def a_jpeg(shade: int) -> bytes:
    from io import BytesIO

    from PIL import Image

    Image.new("L", (8, 8), shade).save(stream := BytesIO(), "jpeg")
    return stream.getvalue()


def test_hugging_faces_builder_reads_our_shards(tmp_path, hub):
    pq.write_table(
        pa.table(
            {
                "jpg": [a_jpeg(n) for n in range(6)],
                "cls": list(range(6)),
                "meta": [{"a": n} for n in range(6)],
            }
        ),
        tmp_path / "a.parquet",
        row_group_size=3,
    )
    shards = import_dataset(str(tmp_path / "a.parquet"), str(tmp_path / "o-%d.tar"), max_bytes=1)
    theirs = hub.load_dataset("webdataset", data_files={"train": shards}, split="train")
    theirs = theirs.cast_column("jpg", hub.Image(decode=False))
    assert [row["__key__"] for row in theirs] == [f"a/{n:09d}" for n in range(6)]
    assert [(row["jpg"]["bytes"], row["cls"], row["meta.json"]) for row in theirs] == [
        (a_jpeg(n), n, {"a": n}) for n in range(6)
    ]
    streamed = hub.load_dataset("webdataset", data_files={"train": shards}, split="train", streaming=True)
    assert len(list(streamed.remove_columns("jpg"))) == 6


def test_killed_by_a_signal_the_tool_goes_on_to_the_same_bytes(tmp_path):
    table = pa.table({"x": [os.urandom(50_000) for _ in range(400)]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=10)
    tool = str(Path(__file__).parents[2] / "bin/tarimport")

    def command(folder: Path):
        folder.mkdir(exist_ok=True)
        return [
            sys.executable,
            tool,
            "-q",
            "-s",
            "500k",
            "-j",
            "2",
            str(tmp_path / "a.parquet"),
            "-o",
            str(folder / "o-%03d.tar"),
        ]

    subprocess.run(command(tmp_path / "whole"), check=True)
    out = tmp_path / "out"
    process = subprocess.Popen(command(out))
    while len(list(out.glob("*.done"))) < 5:
        assert process.poll() is None
    process.kill()
    process.wait()
    subprocess.run(command(out), check=True)
    assert {p.name: p.read_bytes() for p in out.iterdir()} == {
        p.name: p.read_bytes() for p in (tmp_path / "whole").iterdir()
    }


@pytest.mark.parametrize(
    ("name", "hidden", "extra"),
    [("a.parquet", "pyarrow", "arrow"), ("a.zarr", "zarr", "zarr"), ("saved", "datasets", "datasets")],
)
def test_what_is_missing_is_named(tmp_path, name, hidden, extra):
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved/state.json").write_text(json.dumps({}))
    (tmp_path / "a.parquet").touch()
    (tmp_path / "a.zarr").mkdir()
    (tmp_path / "a.zarr/zarr.json").write_text("{}")
    code = f"import sys; sys.modules[{hidden!r}] = None; from tarshards import import_dataset; "
    code += f"import_dataset({str(tmp_path / name)!r}, 'o-%d.tar')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert f"pip install 'tarshards[{extra}]'" in done.stderr.splitlines()[-1]
