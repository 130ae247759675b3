"""A shard is mapped, and compared with its index, once in a process, whatever reads it; and again where it changed."""

from __future__ import annotations

import os
import pickle
import tarfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from pathlib import Path

import numpy as np
import pytest
from programs import load_kernel
from rewritten import NAMES, Entry, samples, write
from with_torch import ShardDataset

from tarshards import ArrayLoader, IndexedShards, ShardWriter, Stream, TarWriter, build_index, readers, write_samples
from tarshards.errors import OpenError, ShardIndexError
from tarshards.index import open as opening
from tarshards.index.key_index import KeyTable
from tarshards.index.sidecar import Index
from tarshards.storage import ranges

SHARDS, ROWS = 8, 5


@pytest.fixture
def urls(tmp_path) -> str:
    with ShardWriter(str(tmp_path / "set-%d.tar"), max_samples=ROWS) as writer:
        for i in range(SHARDS * ROWS):
            writer.write({"__key__": f"{i:03d}", "x.npy": np.full(3, i), "cls": i})
    return str(tmp_path / f"set-{{0..{SHARDS - 1}}}.tar")


@pytest.fixture
def opened(monkeypatch) -> Counter[str]:
    """How many files have been mapped, and compared with an index, since."""
    counts: Counter[str] = Counter()

    def count(name, function):
        def counted(*args):
            counts[name] += not str(args[0]).endswith(".index")
            return function(*args)

        return counted

    monkeypatch.setattr(ranges, "Mapping", count("mapped", ranges.Mapping))
    monkeypatch.setattr(Index, "check", count("checked", Index.check))
    return counts


ONCE = {"mapped": SHARDS, "checked": SHARDS}


@pytest.fixture(params=["indexes", "manifest"])
def spec(request, urls, tmp_path) -> str:
    return urls if request.param == "indexes" else str(tmp_path / "set.shards.json")


def test_an_array_loader_opens_a_shard_once(spec, opened):
    dataset = ShardDataset(spec, shuffle=True)
    fields = {"x.npy": readers.array(), "cls": readers.integer()}
    for _ in range(2):
        batches = [batch["cls"].tolist() for batch in ArrayLoader(dataset, 8, fields=fields)]
        assert sorted(chain.from_iterable(batches)) == list(range(SHARDS * ROWS))
    assert opened == ONCE


def test_reading_and_a_column_open_a_shard_once(spec, opened):
    shards = IndexedShards(spec)
    assert [int(sample["cls"]) for sample in shards] == list(range(SHARDS * ROWS))
    assert [int(shards[::-1][i]["cls"]) for i in (0, 30)] == [39, 9]
    assert np.asarray(shards.column("x.npy"))[:, 0].tolist() == list(range(SHARDS * ROWS))
    assert np.asarray(shards[10:30].column("x.npy"))[:, 0].tolist() == list(range(10, 30))
    assert opened == ONCE


def test_a_planned_stream_and_an_array_loader_open_a_shard_once(spec, opened):
    stream = Stream.from_shards(spec, shuffle=True)
    for _ in range(2):
        assert sorted(int(sample["cls"]) for sample in stream) == list(range(SHARDS * ROWS))
    assert len(list(ArrayLoader(stream, 10, fields={"cls": readers.integer()}))) == 4
    assert opened == ONCE


def test_threads_open_a_shard_once(spec, opened):
    shards = IndexedShards(spec)
    with ThreadPoolExecutor(8) as threads:
        assert len(list(threads.map(shards.__getitem__, range(len(shards))))) == SHARDS * ROWS
    assert opened == ONCE


def test_a_pickled_copy_opens_anew(spec, opened):
    shards = IndexedShards(spec)
    list(shards)
    assert len(list(pickle.loads(pickle.dumps(shards)))) == SHARDS * ROWS
    assert opened == {name: 2 * count for name, count in ONCE.items()}


def test_a_shard_that_was_replaced_is_opened_again(urls, tmp_path, opened):
    shards = IndexedShards(urls)
    assert len(list(islice(shards, 2 * ROWS))) == 2 * ROWS
    whole = Path(tmp_path / "set-0.tar").read_bytes()
    for number in (0, 3):
        os.unlink(tmp_path / f"set-{number}.tar")
        Path(tmp_path / f"set-{number}.tar").write_bytes(whole)
    assert shards.column("x.npy")[4][0] == 4
    assert opened == {"mapped": 2 + 1, "checked": 2 + 1}
    with pytest.raises(ShardIndexError, match=r"set-3\.tar\.index: stale"):
        shards[3 * ROWS]


def test_a_change_of_a_shard_that_is_released_is_an_error_of_the_pass(urls, tmp_path, monkeypatch):
    """And of this pass alone; a shard that nobody writes to is released without a word."""
    monkeypatch.setattr(opening, "SMALL", 0)
    monkeypatch.setattr(opening, "most_open", lambda: 2)
    shards = IndexedShards(urls).shards
    first = shards.use(0)
    with open(tmp_path / "set-0.tar", "ab") as file:
        file.write(bytes(512))
    for number in range(1, SHARDS):
        shards.use(number)
    assert first not in shards.in_use.values()
    with pytest.raises(OpenError, match=r"set-0\.tar: .*changed"):
        shards.verify()
    for number in range(1, SHARDS):
        shards.use(number)
    shards.verify()


def test_slices_share_what_is_held(urls, opened):
    shards = IndexedShards(urls)
    assert len(list(shards[5:20])) + len(list(shards[::-2])) == 35
    assert opened == ONCE
    assert shards[3:].shards is shards.shards


def test_keys_are_located_in_any_order_and_in_slices(urls):
    shards = IndexedShards(urls)
    assert shards.locate(["031", "nobody", "000", "031"]).tolist() == [31, -1, 0, 31]
    assert shards[30:0:-3].locate(["000", "030", "029", "003", "039"]).tolist() == [-1, 0, -1, 9, -1]
    assert shards.locate([]).tolist() == []
    assert shards.locate(shards.keys).tolist() == list(range(SHARDS * ROWS))
    assert shards.repeated_key() is None
    assert IndexedShards([urls, urls]).repeated_key() in shards.keys


class Alike(str):
    """Texts that all have one hash."""

    __slots__ = ()

    def __hash__(self) -> int:
        return 7


def test_keys_of_one_hash_are_told_apart():
    keys = [Alike(text) for text in "abcab"]
    table = KeyTable(keys, len(keys), keys.__getitem__)
    assert [table.numbers(Alike(text)) for text in "abcd"] == [[0, 3], [1, 4], [2], []]
    assert table.repeated() in ("a", "b")
    assert KeyTable(keys[:3], 3, keys.__getitem__).repeated() is None


def test_an_index_that_was_rewritten_is_told_apart_from_a_wrong_manifest(urls, tmp_path):
    """A set without a manifest is counted by its indexes."""
    from_indexes = IndexedShards(urls)
    os.unlink(tmp_path / "set.shards.json")
    (tmp_path / "set-3.tar.index").write_bytes(Index.pack(_shorter(tmp_path / "set-3.tar")))
    with pytest.raises(ShardIndexError, match=f"{ROWS - 1} samples, but {ROWS} when the dataset was opened; open it"):
        from_indexes[3 * ROWS]
    with pytest.raises(ShardIndexError, match="when the dataset was opened"):
        pickle.loads(pickle.dumps(from_indexes))[3 * ROWS]


def test_an_index_of_other_samples_contradicts_the_manifest(urls, tmp_path):
    """Also one of as many samples and bytes."""
    path, manifest = str(tmp_path / "set-3.tar"), tmp_path / "set.shards.json"
    described = manifest.read_bytes()
    with TarWriter(path) as writer:
        for i in range(ROWS):
            writer.write({"__key__": f"x{i:02d}", "x.npy": np.full(3, i), "cls": 10 + i})
    index = build_index(path)
    index.save(path)
    manifest.write_bytes(described)
    samples = IndexedShards(str(manifest))
    assert (len(index), index.shard_size) == (samples.shards.counts[3], samples.shards.sizes[3])
    assert samples[2 * ROWS]["__key__"] == "010"
    with pytest.raises(ShardIndexError, match=r"set-3\.tar\.index: other keys or members than the manifest"):
        samples[3 * ROWS]


def _shorter(path: Path) -> Index:
    """Write a shard again with a sample less, and return its index."""
    with TarWriter(str(path)) as writer:
        for i in range(ROWS - 1):
            writer.write({"__key__": f"{i}", "cls": i})
    return build_index(str(path))


def test_a_shard_that_failed_is_tried_again_by_the_next_pass(urls, tmp_path):
    """Also where the error has ended the one before."""
    shard, aside = tmp_path / "set-3.tar", tmp_path / "aside"
    stream = Stream.from_shards(str(tmp_path / "set.shards.json"), index=True)
    shard.rename(aside)
    with pytest.raises(OpenError):
        list(stream)
    aside.rename(shard)
    assert len(list(stream)) == SHARDS * ROWS


def test_an_index_without_samples_is_loaded_once(tmp_path):
    with TarWriter(str(tmp_path / "a.tar")):
        pass
    build_index(str(tmp_path / "a.tar")).save(str(tmp_path / "a.tar"))
    shards = IndexedShards(str(tmp_path / "a.tar")).shards
    assert shards.index(0) is shards.index(0)
    assert shards.use(0).index is shards.loaded(0)


def test_a_replaced_shard_is_no_longer_in_use_if_its_new_version_cannot_be_opened(tmp_path):
    path, other = str(tmp_path / "a.tar"), str(tmp_path / "b.tar")
    write_samples([{"__key__": "0", "cls": 7}], path)
    build_index(path).save(path)
    write_samples([{"__key__": "0", "cls": 8}, {"__key__": "1", "cls": 9}], other)
    shards = IndexedShards(path).shards
    held = shards.use(0)
    os.replace(other, path)
    for find in shards.open, shards.use:
        with pytest.raises(ShardIndexError, match="stale"):
            find(0)
        assert (shards.in_use, shards.tables) == ({}, [None])
    assert held.read(0)["cls"] == b"7"
    build_index(path).save(path)
    with pytest.raises(ShardIndexError, match="2 samples, but 1 when the dataset was opened"):
        shards.open(0)


def read_by_calls(monkeypatch, held: int) -> None:
    """Let any shards be read by calls, with *held* of them held open."""
    load_kernel("tarshards.kernels._mapped")
    monkeypatch.setattr(opening, "total_memory", lambda: -1)
    monkeypatch.setattr(opening, "FAR", 0)
    monkeypatch.setattr(opening, "most_held", lambda: held)


@pytest.fixture(params=[1 << 10, 0], ids=["held", "opened"])
def called(request, monkeypatch) -> None:
    read_by_calls(monkeypatch, request.param)


def everything(url: str) -> list[object]:
    """What all ways to read say of a shard's samples, and the keys of their errors."""
    errors: list[Exception] = []
    found: list[object] = [list(Stream.from_shards(url, index=True, shuffle=True, on_error=errors.append))]
    for fields in {"cls": readers.integer()}, {"x.npy": readers.array(), "txt": readers.ragged()}:
        stream = Stream.from_shards(url, index=True, shuffle=True, on_error=errors.append)
        for _ in range(2):
            loader = ArrayLoader(stream, 4, fields=fields)
            found += [{name: str(value) for name, value in batch.items()} for batch in loader]
    shards = IndexedShards(url)
    for i in range(len(shards)):
        try:
            found.append(shards[i])
        except ShardIndexError as error:
            errors.append(error)
    return [found, sorted(str(error) for error in errors)]


@pytest.mark.parametrize("held", [1 << 10, 0])
@pytest.mark.parametrize("name", NAMES)
def test_shards_that_are_read_by_calls_give_the_same(tmp_path, monkeypatch, name, held):
    path = tmp_path / "a.tar"
    entries = [*samples(12, name), Entry("z.cls", b"1"), Entry("z.txt", b"t" * 20_000), Entry("z.x.npy", b"")]
    write(path, entries, "pax")
    build_index(str(path)).save(str(path))
    data = bytearray(path.read_bytes())
    header = int(build_index(str(path)).offset[7]) - 512
    data[header : header + 512] = os.urandom(512)  # a stale member
    path.write_bytes(data)
    mapped = everything(str(path))
    assert mapped[1]
    read_by_calls(monkeypatch, held)
    assert everything(str(path)) == mapped


@pytest.mark.usefixtures("called")
def test_what_is_read_by_calls_is_compared_each_time(tmp_path):
    path = tmp_path / "a.tar"
    write(path, [Entry(f"{i}.cls", b"%d" % i) for i in range(9)])
    build_index(str(path)).save(str(path))
    indexed = IndexedShards(str(path))
    assert [int(sample["cls"]) for sample in indexed] == list(range(9))
    write(tmp_path / "b.tar", [Entry(f"{i}.cls", b"%d" % i) for i in (0, 2, 1, 3, 4, 5, 6, 7, 8)])
    with open(path, "r+b") as file:
        file.write((tmp_path / "b.tar").read_bytes())
    assert [int(indexed[i]["cls"]) for i in (0, 3, 8)] == [0, 3, 8]
    for i in 1, 2:
        with pytest.raises(ShardIndexError, match="stale index"):
            indexed[i]


@pytest.mark.usefixtures("called")
def test_what_is_missing_for_calls_is_an_error_and_what_was_replaced_is_still_read(tmp_path):
    path = tmp_path / "a.tar"
    write(path, [Entry(f"{i}.cls", b"%d" % i * 5000) for i in range(9)])
    build_index(str(path)).save(str(path))
    indexed = IndexedShards(str(path))
    loader = ArrayLoader(Stream.from_shards(str(path), index=True), 9, fields={"cls": readers.ragged()})
    assert indexed[0]["cls"] == b"0" * 5000
    assert len(next(iter(loader))["__key__"]) == 9
    os.link(path, tmp_path / "b.tar")
    os.replace(tmp_path / "b.tar", tmp_path / "c.tar")
    path.unlink()
    write(path, [Entry("other.cls", b"7")])
    assert indexed[8]["cls"] == b"8" * 5000  # the file that was opened
    os.truncate(tmp_path / "c.tar", 20_000)
    with pytest.raises(OpenError, match="shrunk"):
        indexed[7]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="page tables are counted on Linux")
@pytest.mark.usefixtures("called")
def test_calls_take_no_page_tables(tmp_path):
    def tables() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmPTE"))

    path, far, count = tmp_path / "a.tar", 1 << 22, 400
    with open(path, "wb") as file:
        for i in range(count):
            for name, size in (("txt", 600), ("pad", far - 2560)):
                info = tarfile.TarInfo(f"{i:04d}.{name}")
                info.size = size
                file.write(info.tobuf())
                file.write(b"t" * 600 if name == "txt" else b"")
                file.seek(-file.tell() % 512 if name == "txt" else size + -size % 512, 1)
        file.write(bytes(1024))
    build_index(str(path)).save(str(path))
    shards = IndexedShards(str(path), fields="txt")
    stream = Stream.from_shards(str(path), index=True, fields="txt", shuffle=True)
    before = tables()
    assert {shards[i]["txt"] for i in range(count)} == {b"t" * 600}
    batches = list(ArrayLoader(stream, 50, fields={"txt": readers.ragged()}))
    assert sum(len(batch["__key__"]) for batch in batches) == count
    assert tables() - before < 4 * count / 4  # of 4 KiB, which each sample would take
