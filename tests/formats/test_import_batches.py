"""Rows packed together give the same bytes and errors as rows written one by one."""

from __future__ import annotations

import gzip
import shutil
from pathlib import Path
from unittest.mock import patch

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from inline import Inline

from tarshards import Ledger, TarWriter, import_dataset, read_samples
from tarshards.errors import TarshardsError
from tarshards.formats.naming import rows_batch
from tarshards.samples.payloads import Payloads
from tarshards.tar.read import LARGE

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ImportError:
    pa = None

pytestmark = [pytest.mark.interop, pytest.mark.skipif(pa is None, reason="pyarrow is not installed")]


def one_by_one(writer, batch, members=None):
    return map(batch.sample, range(len(batch.keys)))


HEADS = [b"\xff\xd8\xff", b"\x89PNG\r\n", b"RIFFxxxxWAVE", b"RIFF", b"ID3", b"", b"?"]
DATA = st.builds(lambda head, size: head + bytes(size), st.sampled_from(HEADS), st.sampled_from([0, 5, 512, LARGE]))
KEYS = st.sampled_from(["a", "b", "x.y/a", "x/a", "a__", "__a__", "n" * 95, "ü", "", "a/", "a.b", "a\0"]) | st.text(
    "abc/._", max_size=6
)


def columns():
    """The type and the values of each column."""
    return {
        "__key__": (pa.string(), KEYS),
        "image": (pa.binary(), DATA),
        "clip.jpg": (pa.large_binary(), DATA),
        "file": (
            pa.struct({"bytes": pa.binary(), "path": pa.string()}),
            st.fixed_dictionaries(
                {"bytes": st.none() | DATA, "path": st.none() | st.sampled_from(["a.JPG", "b.txt", "c"])}
            ),
        ),
        "cls": (pa.int64(), st.integers(-9, 9)),
        "score": (pa.float64(), st.floats()),
        "text": (pa.string(), st.text("aü", max_size=3)),
        "list": (pa.list_(pa.float32()), st.lists(st.floats(width=32), max_size=2)),
        "meta": (pa.struct({"a": pa.int64()}), st.fixed_dictionaries({"a": st.none() | st.integers(0, 3)})),
        "ü": (pa.string(), st.just("name")),
        "t" * 90: (pa.string(), st.just("long")),
        "nothing": (pa.null(), st.none()),
    }


@st.composite
def tables(draw):
    known = columns()
    names = draw(st.lists(st.sampled_from(list(known)), unique=True, min_size=1))
    rows = draw(st.integers(1, 12))
    arrays = []
    for name in names:
        of, values = known[name]
        values = values if draw(st.booleans()) and name != "nothing" else st.none() | values
        arrays.append(pa.array(draw(st.lists(values, min_size=rows, max_size=rows)), of))
    return pa.table(arrays, names)


def imported(source: Path, target: Path, **options) -> tuple[dict[str, bytes], list[str]]:
    """Return the bytes of all files that an import writes, and its errors."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    errors = []
    ledger = Ledger(max_errors=float("inf"), on_error=lambda error: errors.append(f"{type(error).__name__}: {error}"))
    try:
        import_dataset(source, target / "a-%d.tar", executor=Inline(), sync=False, on_error=ledger, **options)
    except TarshardsError as error:
        errors.append(f"raised {error}")
    return {path.name: path.read_bytes() for path in target.iterdir()}, errors


def check(source: Path, target: Path, **options) -> None:
    together = imported(source, target, **options)
    with patch.object(TarWriter, "write_batch", one_by_one):
        assert together == imported(source, target, **options)


def check_table(folder: Path, table: pa.Table, batch: int) -> None:
    pq.write_table(table, folder / "a.parquet", row_group_size=7)
    with patch("tarshards.formats.pieces.MOST_ROWS", batch):
        check(folder / "a.parquet", folder / "out")
    shutil.rmtree(folder)


@settings(deadline=None)
@given(table=tables(), batch=st.sampled_from([1, 3, 4096]))
def test_rows_of_parquet(tmp_path_factory, table, batch):
    check_table(tmp_path_factory.mktemp("batches"), table, batch)


def test_the_field_of_a_row_of_nulls_is_the_same(tmp_path):
    check_table(tmp_path, pa.table({"clip.jpg": [None, b"\xff\xd8\xff"]}), batch=3)


VALUES = st.one_of(
    st.text("aü\udc80", max_size=2), st.integers(-(2**60), 2**60), st.booleans(), DATA, st.floats(), st.none()
)
ALIKE = st.fixed_dictionaries({"image": DATA, "cls": st.integers(0, 9), "text": st.text("aü", max_size=3)})
RECORDS = st.lists(ALIKE) | st.lists(st.dictionaries(st.sampled_from(["image", "cls", "Cls", "text"]), VALUES))


@settings(deadline=None)
@given(records=RECORDS, broken=st.booleans(), batch=st.sampled_from([1, 3, 256]))
def test_records_of_msgpack(tmp_path_factory, records, broken, batch):
    folder = tmp_path_factory.mktemp("records")
    packed = [msgpack.packb(record, unicode_errors="surrogateescape") for record in records]
    if broken:
        packed.insert(len(packed) // 2, msgpack.packb(["no dict"]))
    (folder / "a.gz").write_bytes(gzip.compress(b"".join(packed)))
    with patch("tarshards.formats.pieces.FEW_ROWS", batch):
        check(folder / "a.gz", folder / "out", format="msgpack")
    shutil.rmtree(folder)


def test_all_rows_of_plain_names_are_packed_together(tmp_path):
    table = pa.table({"image": [b"\xff\xd8\xff", None] * 500, "text": ["a"] * 1000})
    pq.write_table(table, tmp_path / "a.parquet")
    with patch.object(TarWriter, "write_members", autospec=True, side_effect=TarWriter.write_members) as write:
        import_dataset(tmp_path / "a.parquet", tmp_path / "o-%d.tar", executor=Inline())
    assert write.call_count == 1  # the first, by which the index knows the fields
    assert len(list(read_samples(tmp_path / "o-0.tar"))) == 1000


def test_a_key_of_an_earlier_batch_is_refused(tmp_path):
    columns = {"txt": Payloads.joined([b"1", b"2"])}
    batches = [rows_batch(keys, columns, {}, range(2), "u") for keys in (["a", "b"], ["c", "a"])]
    with TarWriter(tmp_path / "a.tar") as writer:
        assert list(writer.write_batch(batches[0])) == []
        assert [sample["__key__"] for sample in writer.write_batch(batches[1])] == ["c", "a"]
