"""Rows of other formats are streamed without shards, divided by files, and are what an import stores."""

from __future__ import annotations

import gzip
import io
import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from with_torch import needs_torch

from tarshards import Ledger, World, import_dataset, read_msgpack, read_rows, read_samples, write_msgpack
from tarshards.errors import SampleError, UrlError, WorldError
from tarshards.formats.catalog import Catalog
from tarshards.formats.importing import row_to_sample
from tarshards.formats.tfrecord import crc32c, masked, parse_example, read_records

ROWS = [{"name": f"n{i}", "cls": i, "x": i / 2} for i in range(6)]


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_lines(name: str, rows) -> str:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return name


def bare(row):
    return {name: value for name, value in row.items() if name != "__url__"}


# One input of each format that needs no package; its rows are ROWS.


def csv(name="a.csv"):
    Path(name).write_text("name,cls,x\n" + "".join("{name},{cls},{x}\n".format(**row) for row in ROWS))
    return name


def jsonl():
    return write_lines("a.jsonl", ROWS)


def msgpack():
    write_msgpack(ROWS[:4], "store/0.gz")
    write_msgpack(ROWS[4:], "store/1.gz")
    return "store"


def length(number: int, data: bytes) -> bytes:
    assert len(data) < 1 << 14
    size = bytes([len(data) & 0x7F | 0x80, len(data) >> 7])
    return bytes([number << 3 | 2]) + size + data


def example(row) -> bytes:
    """A tf.train.Example, built from the description of protobuf's encoding."""
    features = b""
    for name, value in row.items():
        values = value if isinstance(value, list) else [value]
        if isinstance(values[0], bytes):
            feature = length(1, b"".join(length(1, each) for each in values))
        elif isinstance(values[0], float):
            feature = length(2, length(1, struct.pack(f"<{len(values)}f", *values)))
        else:
            feature = length(3, b"".join(bytes([8]) + varint(each) for each in values))
        features += length(1, length(1, name.encode()) + length(2, feature))
    return length(1, features)


def varint(number: int) -> bytes:
    number &= (1 << 64) - 1
    data = b""
    while number >= 0x80:
        data += bytes([number & 0x7F | 0x80])
        number >>= 7
    return data + bytes([number])


def record(data: bytes) -> bytes:
    head = struct.pack("<Q", len(data))
    return head + struct.pack("<I", masked(head)) + data + struct.pack("<I", masked(data))


def tfrecord(name="a.tfrecord"):
    rows = [{**row, "name": row["name"].encode()} for row in ROWS]
    Path(name).write_bytes(b"".join(record(example(row)) for row in rows))
    return name


MDS = [("name", "str", None), ("cls", "int", 8), ("x", "float64", 8)]


def mds(folder="mds", columns=MDS, encode=None):
    """A folder of MDS, written from the description in the package mosaicml-streaming."""
    Path(folder).mkdir()
    shards = []
    for number, rows in enumerate((ROWS[:4], ROWS[4:])):
        samples = []
        for row in rows:
            name = row["name"].encode()
            samples.append(struct.pack("<I", len(name)) + name + struct.pack("<qd", row["cls"], row["x"]))
        begin = 4 + 4 * (len(rows) + 1)
        offsets = [begin + sum(map(len, samples[:row])) for row in range(len(rows) + 1)]
        data = struct.pack(f"<{len(rows) + 2}I", len(rows), *offsets) + b"".join(samples)
        base = f"shard.{number:05d}.mds"
        Path(folder, base).write_bytes(data)
        names, encodings, sizes = zip(*columns)
        about = {"format": "mds", "version": 2, "samples": len(rows), "raw_data": {"basename": base}, "zip_data": None}
        shards.append({**about, "column_names": names, "column_encodings": encodings, "column_sizes": sizes})
    Path(folder, "index.json").write_text(json.dumps({"version": 2, "shards": shards}))
    return folder


def parquet():
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(ROWS), "a.parquet", row_group_size=2)
    return "a.parquet"


def zarr():
    zarr = pytest.importorskip("zarr")
    group = zarr.open_group("a.zarr", mode="w")
    group.create_array("cls", data=np.arange(6), chunks=(4,))
    group.create_array("x", data=np.arange(6) / 2, chunks=(2,))
    return "a.zarr"


FOREIGN = [pytest.param(make, marks=pytest.mark.interop) for make in (parquet, zarr)]
INPUTS = [csv, jsonl, msgpack, tfrecord, mds, *FOREIGN]
FORMAT = {msgpack: "msgpack"}


@pytest.mark.parametrize("make", INPUTS)
def test_rows_have_the_stored_values_and_are_those_of_an_import(here, make):
    source, format = make(), FORMAT.get(make)
    rows = list(read_rows(source, format=format))
    assert [row["cls"] for row in rows] == list(range(6))
    assert [row["x"] for row in rows] == [i / 2 for i in range(6)]
    assert len({row["__key__"] for row in rows}) == 6
    samples = read_samples(import_dataset(source, "out-%03d.tar", format=format))
    assert [bare(row_to_sample(bare(row))) for row in rows] == [bare(sample) for sample in samples]


@pytest.mark.parametrize("make", INPUTS)
def test_the_ledger_counts_rows_and_iterating_again_reads_again(here, make):
    stream = read_rows(make(), format=FORMAT.get(make)).map(lambda row: row["cls"])
    assert list(stream) == list(stream) == list(range(6))
    assert stream.ledger.samples == 12


def test_ranks_and_workers_read_only_their_own_files(here):
    for i in range(4):
        write_lines(f"{i}.jsonl", ROWS[i : i + 1])
    opened = []
    for rank in range(2):
        stream = read_rows("?.jsonl", world=World(rank, 2))
        opened.append([row["name"] for row in stream])
        assert stream.ledger.shards == 2
    assert opened == [["n0", "n2"], ["n1", "n3"]]
    with pytest.raises(WorldError, match="4 files for 5 ranks"):
        list(read_rows("?.jsonl", world=World(0, 5)))


@needs_torch
def test_workers_of_a_data_loader_divide_the_files_of_a_store(here):
    from torch.utils.data import DataLoader

    from tarshards import torch_iterable

    msgpack()
    stream = read_rows("store", format="msgpack")
    loader = DataLoader(torch_iterable(stream.map(worker_of)), batch_size=None, num_workers=2)
    assert sorted(loader) == [[0, 0], [0, 1], [0, 2], [0, 3], [1, 4], [1, 5]]
    assert stream.ledger.samples == 6  # each row was read by one worker


def worker_of(row):
    from torch.utils.data import get_worker_info

    return [get_worker_info().id, row["cls"]]


def test_a_state_resumes_in_the_middle(here):
    stream = read_rows(jsonl())
    iterator = iter(stream)
    seen = [next(iterator)["cls"] for _ in range(4)]
    again = read_rows("a.jsonl")
    again.load_state_dict(stream.state_dict())
    assert seen + [row["cls"] for row in again] == list(range(6))


def test_a_store_is_read_by_keys_as_with_squirrel(here):
    stream = read_rows(msgpack(), format="msgpack")
    assert stream.keys() == ["store/0.gz", "store/1.gz"]
    assert [row["cls"] for row in stream.get("store/1.gz")] == [4, 5]
    with pytest.raises(KeyError, match=r"no file '7'; keys\(\)"):
        stream.get("7")


def test_read_msgpack_takes_a_folder(here):
    for name in (msgpack(), "store/", Path("store")):
        assert [sample["cls"] for sample in read_msgpack(name)] == list(range(6))


def test_errors_name_their_row_and_are_counted(here):
    Path("a.csv").write_text("n,m\n1,2\n3\n5,6\n")
    with pytest.raises(SampleError, match=r"a\.csv: row 1: 1 cells for 2 columns"):
        list(read_rows("a.csv"))
    ledger = Ledger(max_errors=1)
    assert [row["m"] for row in read_rows("a.csv", on_error=ledger)] == [2, 6]
    assert (ledger.samples, ledger.failed) == (2, 1)
    with pytest.raises(ValueError, match="types= applies to csv only"):
        read_rows(jsonl(), types={"n": "int"})


def test_the_columns_of_csv_become_the_same_without_pyarrow(here):
    Path("a.csv").write_text(
        "a,b,c,d,e,f,g,h\n7,0.50,true,2026-01-02,2026-01-02 03:04:05,007,,x\n-2,1.25,false,,,,inf,é\n"
    )
    code = "import sys; sys.modules['pyarrow'] = None; from tarshards import import_dataset; "
    code += "import_dataset('a.csv', 'bare-%d.tar')"
    subprocess.run([sys.executable, "-c", code], check=True)
    import_dataset("a.csv", "with-%d.tar")
    assert Path("bare-0.tar").read_bytes() == Path("with-0.tar").read_bytes()
    assert json.loads(Path("bare.columns.json").read_text())["order"] == list("abcdefgh")
    first, second = read_rows("a.csv")
    assert (first["a"], first["b"], first["c"], first["d"], first["e"]) == (
        7,
        0.5,
        True,
        "2026-01-02",
        "2026-01-02 03:04:05",
    )
    assert "d" not in second


# TFRecord.


def test_crc32c_is_that_of_rfc_3720(here):
    assert [crc32c(data) for data in (b"", bytes(32), b"\xff" * 32, bytes(range(32)))] == [
        0,
        0x8A9136AA,
        0x62A8AB43,
        0x46DD794E,
    ]


@pytest.mark.interop
def test_crc32c_is_that_of_another_program():
    google = pytest.importorskip("google_crc32c")
    rng = np.random.default_rng(0)
    for size in (1, 63, 64, 127, 128, 129, 1000, 100_003):
        data = rng.bytes(size)
        assert crc32c(data) == google.value(data)


def test_features_of_tf_train_examples():
    row = {"a": [b"x", b"y"], "b": b"\xff\xd8\xff", "c": [0.5, 1.5], "d": [1, -1, 1 << 62], "e": -(1 << 63), "é": 2.0}
    found = parse_example(example(row))
    assert {name: value.tolist() if hasattr(value, "tolist") else value for name, value in found.items()} == row
    assert (found["c"].dtype, found["d"].dtype) == (np.float32, np.int64)
    assert parse_example(b"") == parse_example(length(1, length(1, length(1, b"a")))) == {}
    for bad, reason in [
        (length(2, b""), "a SequenceExample"),
        (b"\x0a\x05a", "ends within a field"),
        (b"\xff" * 11, "more than 64 bits"),
        (b"\x0b", "field 1|wire type"),
    ]:
        with pytest.raises(ValueError, match=reason):
            parse_example(bad)


def test_damage_in_a_tfrecord_costs_its_record_or_the_rest(here):
    data = bytearray(Path(tfrecord()).read_bytes())
    size = len(data) // 6
    data[size + 20] ^= 1
    Path("a.tfrecord").write_bytes(data)
    ledger = Ledger(max_errors=9)
    assert [row["cls"] for row in read_rows("a.tfrecord", on_error=ledger)] == [0, 2, 3, 4, 5]
    assert ledger.failed == 1
    with pytest.raises(SampleError, match=r"a\.tfrecord: record 1: .*do not match their checksum"):
        list(read_rows("a.tfrecord"))
    data[2 * size] ^= 1
    Path("a.tfrecord").write_bytes(data)
    assert [row["cls"] for row in read_rows("a.tfrecord", on_error="skip")] == [0]
    whole = Path(tfrecord()).read_bytes()
    for cut in range(1, size):
        with pytest.raises(EOFError, match="ends within a record"):
            list(read_records(io.BytesIO(whole[: size + cut])))
    assert len(list(read_records(io.BytesIO(whole[:size])))) == 1


def test_files_as_tensorflow_names_them_have_keys_of_their_own(here):
    tfrecord("train.tfrecord-00000-of-00002"), tfrecord("train.tfrecord-00001-of-00002")
    keys = [row["__key__"] for row in read_rows("train.tfrecord-*")]
    assert (keys[0], keys[-1], len(set(keys))) == (
        "train-00000-of-00002/000000000",
        "train-00001-of-00002/000000005",
        12,
    )


@pytest.mark.interop
def test_files_of_another_writer_of_tfrecord(here):
    tfrecord = pytest.importorskip("tfrecord")
    writer = tfrecord.TFRecordWriter("a.tfrecord")
    writer.write({"image": (b"\xff\xd8\xff", "byte"), "cls": (-1, "int"), "box": ([0.5, 1.5], "float")})
    writer.close()
    (row,) = read_rows("a.tfrecord")
    assert (row["image"], row["cls"], row["box"].tolist()) == (b"\xff\xd8\xff", -1, [0.5, 1.5])


# MDS.


def test_pickles_paths_and_other_columns_in_mds_are_refused(here):
    mds()
    index = json.loads(Path("mds/index.json").read_text())
    for key, value, reason in [
        ("column_encodings", ["pkl", "int", "float64"], "pkl is not supported: pickles could run code"),
        ("raw_data", {"basename": "../a"}, r"'\.\./a' is not the name of a file beside it"),
        ("column_names", ["a"], "not an index of MDS"),
        ("format", "json", "files of 'json', not mds"),
    ]:
        changed = {**index, "shards": [{**index["shards"][0], key: value}]}
        Path("mds/index.json").write_text(json.dumps(changed))
        with pytest.raises(UrlError, match=reason):
            read_rows("mds")


def test_damage_of_mds_is_an_error(here):
    mds()
    path = Path("mds/shard.00000.mds")
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(SampleError, match=r"shard\.00000\.mds: not a file of MDS: 4 samples"):
        list(read_rows("mds"))
    broken = bytearray(data)
    broken[4 + 4 * 5] = 99  # the size of the first name
    path.write_bytes(broken)
    assert [row["cls"] for row in read_rows("mds", on_error="skip")] == [1, 2, 3, 4, 5]


@pytest.mark.interop
@pytest.mark.parametrize("of", ["bytes", "struct"])
def test_webdataset_in_parquet(here, of):
    """The columns that Hugging Face makes of webdatasets, and img2dataset's parquet."""
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    jpeg = b"\xff\xd8\xff\xe0"
    image = jpeg if of == "bytes" else {"bytes": jpeg, "path": "a/0.jpg"}
    rows = [
        {"__key__": f"a/{i}", "__url__": "x.tar", "jpg": image, "json": {"w": i}, "cls": i, "txt": "t"}
        for i in range(3)
    ]
    pq.write_table(pa.Table.from_pylist(rows), "a.parquet")
    found = list(read_rows("a.parquet"))
    assert [(row["__key__"], row["jpg"], row["json"], row["cls"], row["txt"]) for row in found] == [
        (f"a/{i}", jpeg, {"w": i}, i, "t") for i in range(3)
    ]
    sample = next(read_samples(import_dataset("a.parquet", "o-%d.tar")))
    assert sorted(sample) == ["__key__", "__url__", "cls", "jpg", "json", "txt"]


@pytest.mark.interop
def test_groups_of_zarr_are_samples_as_squirrel_writes_them(here):
    zarr = pytest.importorskip("zarr")
    root = zarr.open_group("s", mode="w")
    for name in "ab":
        group = root.create_group(name)
        group.create_array("x", data=np.ones(3))
        group.attrs["label"] = name
    rows = list(read_rows("s", format="zarr"))
    assert [(row["__key__"], row["label"], row["x"].tolist()) for row in rows] == [
        ("a", "a", [1] * 3),
        ("b", "b", [1] * 3),
    ]
    other = zarr.open_group("t", mode="w")
    other.create_array("x", data=np.ones(3)), other.create_array("y", data=np.ones(4))
    with pytest.raises(SampleError, match="arrays have different lengths"):
        read_rows("t")


def jsonl_store() -> str:
    """Return the name of a folder as Squirrel's JsonlDriver stores it."""
    Path("store").mkdir()
    Path("store/0.gz").write_bytes(gzip.compress(Path(jsonl()).read_bytes()))
    return "store"


@pytest.mark.parametrize(
    ("driver", "make"), [("csv", csv), ("jsonl", jsonl), ("jsonl", jsonl_store), ("messagepack", msgpack)]
)
def test_a_source_of_a_catalog_of_squirrel_streams(here, driver, make):
    source = make()
    Path("c.yaml").write_text(
        f"!YamlCatalog\nversion: 0.16.0\nsources:\n- !YamlSource\n  identifier: c\n  driver_name: {driver}\n"
        f"  driver_kwargs:\n    url: {source}\n  version: 1\n"
    )
    stream = Catalog.load("c.yaml").stream("c", on_error=Ledger(max_errors=1))
    assert [row["name"] for row in stream] == [row["name"] for row in ROWS]
    assert (stream.ledger.samples, os.path.basename(stream.keys()[0])) == (
        6,
        "0.gz" if os.path.isdir(source) else source,
    )
