"""Squirrel's msgpack shards: read and written as Squirrel does, and converted to tars and back."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tarshards import Ledger, Stream, export_dataset, import_dataset, read_msgpack, read_samples, write_msgpack
from tarshards.errors import DecodeError, EncodeError, OpenError, SampleError, TarshardsError
from tarshards.formats import msgpack_shards

#: What squirrel-core 0.20.2 writes, before gzip, for the rows below.
GOLDEN = bytes.fromhex(
    "84a5696d61676585c4026e64c3c40474797065a37c7531c4046b696e64c400c4057368617065920203c40464617461c406000102030405"
    "a56c6162656c03a46e616d65a161a573636f726583c4026e64c2c40474797065a33c6634c40464617461c4040000c03f"
    "83a5696d61676585c4026e64c3c404747970659292a161a33c693292a162a33c6634c4046b696e64c40156c4057368617065"
    "9101c40464617461c406010000002040a3726177c401ffa46d65746181a16b9201c0"
)
ROWS = [
    {"image": np.arange(6, dtype=np.uint8).reshape(2, 3), "label": 3, "name": "a", "score": np.float32(1.5)},
    {"image": np.array([(1, 2.5)], [("a", "<i2"), ("b", "<f4")]), "raw": b"\xff", "meta": {"k": [1, None]}},
]


def same(one, other) -> bool:
    """Whether two values are equal, arrays with their types and shapes."""
    if isinstance(one, np.ndarray | np.generic):
        return type(one) is type(other) and one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and (one == other or one != one)


def without_places(samples):
    return [{name: value for name, value in sample.items() if not name.startswith("__")} for sample in samples]


def pack(folder, *objects, name: str = "a.gz") -> str:
    (folder / name).write_bytes(gzip.compress(b"".join(map(msgpack.packb, objects))))
    return str(folder / name)


def test_what_squirrel_writes_is_read(tmp_path):
    (tmp_path / "shard.gz").write_bytes(gzip.compress(GOLDEN))
    first, second = read_msgpack(str(tmp_path / "shard.gz"))
    assert [first["__key__"], second["__key__"]] == ["shard/000000000", "shard/000000001"]
    assert first["__url__"] == str(tmp_path / "shard.gz")
    assert all(map(same, without_places([first, second]), ROWS))
    first["image"][0, 0] = 7  # a copy, not the bytes that were read


def test_what_is_written_is_what_squirrel_writes(tmp_path):
    target = str(tmp_path / "shard.gz")
    assert write_msgpack(ROWS, target) == (2, len(GOLDEN))
    with open(target, "rb") as file:
        assert zlib.decompress(file.read(), 31) == GOLDEN


def test_it_is_a_source_of_streams(tmp_path):
    url = pack(tmp_path, *({"n": number} for number in range(10)))
    stream = Stream(lambda: read_msgpack(url)).filter(lambda sample: sample["n"] % 2).batched(2)
    assert [list(batch["n"]) for batch in stream] == [[1, 3], [5, 7], [9]]


def test_a_record_that_is_refused_costs_no_other(tmp_path):
    evil = {"x": {b"nd": True, b"type": "|O", b"kind": b"O", b"shape": [1], b"data": b"cos\nsystem\n."}}
    objects = {"x": {b"nd": True, b"type": "|O", b"kind": b"", b"shape": [1], b"data": b"12345678"}}
    wrong = {"x": {b"nd": True, b"type": "<f4", b"kind": b"", b"shape": [3], b"data": b"12345678"}}
    odd = {"x": {b"nd": True, b"type": "<f4,<f4", b"kind": b"", b"shape": [1], b"data": b"12345678"}}
    records = [{"n": 0}, evil, objects, wrong, odd, {"x": {b"nd": True}}, [1, 2], {"__key__": 7}, {"n": 8}]
    url = pack(tmp_path, *records)
    ledger = Ledger(max_errors=9)
    assert [sample["n"] for sample in read_msgpack(url, on_error=ledger)] == [0, 8]
    assert [entry.shard for entry in ledger.quarantined] == [f"{url}: record {number}" for number in range(1, 8)]
    reasons = [entry.reason for entry in ledger.quarantined]
    assert reasons[0] == "an array of pickled objects, which could run code"
    assert reasons[-2:] == ["a sample is a dict, not [1, 2]", "__key__ is a str, not 7"]
    assert ledger.samples == 2
    with pytest.raises(SampleError, match="record 1: an array of pickled objects"):
        list(read_msgpack(url))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda data: data[:-9], "a.gz: "),  # of gzip's end
        (lambda data: gzip.compress(gzip.decompress(data)[:-1]), "a.gz: record 3: the file ends within it"),
        (lambda data: gzip.compress(gzip.decompress(data) + b"\xc1" * 9), "a.gz: record 4: "),
        (lambda data: gzip.compress(gzip.decompress(data) + b"\xdd\xff\xff\xff\xff"), "a.gz: record 4: .* exceeds "),
    ],
)
def test_damage_loses_only_what_follows_it(tmp_path, damage, reason):
    path = tmp_path / "a.gz"
    pack(tmp_path, *({"n": number} for number in range(4)))
    path.write_bytes(damage(path.read_bytes()))
    other = pack(tmp_path, {"n": 9}, name="b.gz")
    ledger = Ledger(max_errors=1)
    found = [sample["n"] for sample in read_msgpack([str(path), other], on_error=ledger)]
    assert found[:3] == [0, 1, 2]
    assert found[-1] == 9
    assert len(ledger.quarantined) == 1
    with pytest.raises(TarshardsError, match=reason):
        list(read_msgpack(str(path)))


def test_a_missing_file(tmp_path):
    with pytest.raises(OpenError, match="No such file"):
        list(read_msgpack(str(tmp_path / "a.gz")))


def test_samples_are_limited(tmp_path, monkeypatch):
    monkeypatch.setattr(msgpack_shards, "MOST_BYTES", 1000)
    monkeypatch.setattr(msgpack_shards, "PIECE", 1000)
    url = pack(tmp_path, {"n": 0}, {"x": bytes(2000)})
    ledger = Ledger(max_errors=1)
    assert [sample["n"] for sample in read_msgpack(url, on_error=ledger)] == [0]
    assert "record 1" in ledger.quarantined[0].shard


def test_what_cannot_be_written_names_the_sample(tmp_path):
    rows = [{"__key__": "a", "x": 1}, {"__key__": "b", "x": object()}, {"__key__": "c", "x": np.array([None])}]
    with pytest.raises(EncodeError, match="b: "):
        write_msgpack(rows, str(tmp_path / "a.gz"))
    assert not list(tmp_path.iterdir())
    left = []
    assert write_msgpack(rows, str(tmp_path / "a.gz"), reject=lambda sample, error: left.append(error.key))[0] == 1
    assert left == ["b", "c"]
    assert [sample["__key__"] for sample in read_msgpack(str(tmp_path / "a.gz"))] == ["a"]


NUMBERS = st.sampled_from(["<f4", "<i8", "|u1", "<f2", "|b1", ">i4", "<U3", "<M8[s]"])
ARRAYS = st.builds(lambda dtype, shape: np.ones(shape).astype(dtype), NUMBERS, st.lists(st.integers(0, 3), max_size=3))
LEAVES = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary() | ARRAYS
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3))
COLUMNS = st.sampled_from(["a", "b", "cls", "jpg", "seg.png", "meta.json", "x.npy", "txt", "left.txt"])
DICTS = st.lists(st.dictionaries(COLUMNS, VALUES, min_size=1, max_size=4), min_size=1, max_size=4)


@given(rows=DICTS)
def test_values_come_back(tmp_path_factory, rows):
    url = str(tmp_path_factory.mktemp("rows") / "a.gz")
    write_msgpack(rows, url, sync=False)
    assert all(map(same, without_places(read_msgpack(url)), rows))


@given(rows=DICTS)
def test_converted_to_tar_and_back_values_types_and_order_are_the_same(tmp_path_factory, rows):
    folder = tmp_path_factory.mktemp("rows")
    write_msgpack(rows, str(folder / "a.gz"), sync=False)
    (tar,) = import_dataset(str(folder / "a.gz"), str(folder / "t-%d.tar"), format="msgpack", sync=False)
    (back,) = export_dataset(tar, str(folder / "b-%d.gz"), sync=False)
    assert all(map(same, without_places(read_msgpack(back)), rows))
    assert [sample["__key__"] for sample in read_msgpack(back)] == [f"a/{n:09d}" for n in range(len(rows))]


def test_converted_to_msgpack_and_back_shards_have_the_same_bytes(make_shards, tmp_path):
    shards = make_shards(3)
    packed = export_dataset(shards, str(tmp_path / "store/%03d.gz"))
    assert next(read_msgpack(packed[0]))["txt"] == "text 0"
    tars = import_dataset(packed, str(tmp_path / "back-%03d.tar"), format="msgpack")
    for number, name in enumerate(tars):
        assert (tmp_path / f"set-{number:04d}.tar").read_bytes() == Path(name).read_bytes()


@pytest.mark.parametrize("key", [None, "n{record:03d}"])
def test_the_error_of_an_imported_row_names_its_key_in_the_shard(tmp_path, key):
    rows = [{"__key__": f"k{number}", "a": msgpack.Timestamp(3) if number == 1 else number} for number in range(3)]
    ledger = Ledger(max_errors=1)
    import_dataset(pack(tmp_path, *rows), str(tmp_path / "t-%d.tar"), format="msgpack", key=key, on_error=ledger)
    assert [entry.shard for entry in ledger.quarantined] == [f"{tmp_path}/a.gz: k1"]


def test_a_field_with_bad_msgpack():
    with pytest.raises(DecodeError, match=r"x\.mp: not msgpack"):
        msgpack_shards.unpack("x.mp", b"\xc1")


@pytest.mark.interop
def test_squirrels_store_reads_what_is_written_and_writes_what_is_read(tmp_path, make_shards, squirrel):
    from squirrel.driver import MessagepackDriver
    from squirrel.serialization import MessagepackSerializer
    from squirrel.store import SquirrelStore

    store = SquirrelStore(str(tmp_path / "theirs"), serializer=MessagepackSerializer())
    store.set(ROWS, key="shard")
    found = read_msgpack(str(tmp_path / "theirs/*.gz"))
    assert all(map(same, without_places(found), ROWS))
    write_msgpack(ROWS, str(tmp_path / "ours/a.gz"))
    write_msgpack(ROWS[:1], str(tmp_path / "ours/b.gz"))
    driver = MessagepackDriver(str(tmp_path / "ours"))
    assert sorted(driver.keys()) == ["a", "b"]
    theirs = [{**row, "meta": {"k": [1, None]}} if "meta" in row else row for row in driver.get("a")]
    assert all(map(same, theirs, ROWS))
    assert len(driver.get_iter().collect()) == 3

    export_dataset(make_shards(2), str(tmp_path / "of_tars/%d.gz"))
    stream = MessagepackDriver(str(tmp_path / "of_tars")).get_iter(sorted(["0", "1"]))
    assert {row["txt"] for row in stream} == {f"text {number}" for number in range(6)}
    tars = import_dataset(str(tmp_path / "theirs/*.gz"), str(tmp_path / "t-%d.tar"), format="msgpack")
    assert next(map(sorted, read_samples(tars))) == [
        *("__key__", "__url__", "image.npy", "label.json", "name.txt", "score.npy")
    ]
