"""Datasets with more shards than a process can open: all are read, few are open at once, and changes are detected."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from programs import load_kernel
from soak import SOAK
from with_torch import ShardDataset, ShardLoader

from tarshards import ArrayLoader, IndexedShards, ShardWriter, Stream, TarWriter, build_index, readers
from tarshards.errors import OpenError, ShardIndexError
from tarshards.index import open as opening
from tarshards.storage import ranges

SHARDS, MOST = 60, 12


@pytest.fixture
def folder(tmp_path) -> Path:
    with ShardWriter(str(tmp_path / "set-%02d.tar"), max_samples=2) as writer:
        for i in range(2 * SHARDS):
            writer.write({"__key__": f"{i:03d}", "x.npy": np.full(3, i), "cls": i})
    return tmp_path


@pytest.fixture
def few(monkeypatch) -> None:
    """Let a process have few shards open."""
    monkeypatch.setattr(opening, "SMALL", 0)
    monkeypatch.setattr(ranges, "MOST_MAPPED", MOST)


def count_open(folder: Path) -> int:
    """Return how many shards in *folder* this process has mapped, or open."""
    mapped = rb" %b/.*\.tar$" % os.fsencode(re.escape(str(folder)))
    count = len(re.findall(mapped, Path("/proc/self/maps").read_bytes(), re.MULTILINE))
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            name = os.readlink(f"/proc/self/fd/{descriptor}")
            count += name.startswith(str(folder)) and name.endswith(".tar")
    return count


def in_order(spec: str) -> Iterator[int]:
    return (int(sample["cls"]) for sample in IndexedShards(spec))


def shuffled(spec: str) -> Iterator[int]:
    return (int(sample["cls"]) for sample in Stream.from_shards(spec, shuffle=True))


def streamed(spec: str) -> Iterator[int]:
    return (int(sample["cls"]) for sample in Stream.from_shards(spec, index=False, shuffle=True))


def in_a_dataset(spec: str) -> Iterator[int]:
    return (int(sample["cls"]) for sample in ShardDataset(spec, shuffle=True))


def in_batches(spec: str) -> Iterator[int]:
    for batch in ShardLoader(ShardDataset(spec, shuffle=True), 4, num_workers=0):
        yield from map(int, batch["cls"])


def in_arrays(spec: str) -> Iterator[int]:
    loader = ArrayLoader(Stream.from_shards(spec, shuffle=True), 4, fields={"cls": readers.integer()})
    for _ in range(2):
        for batch in loader:
            yield from batch["cls"].tolist()


def in_a_column(spec: str) -> Iterator[int]:
    column = IndexedShards(spec).column("x.npy")
    yield from (int(column[i][0]) for i in range(len(column)))
    yield from column[::-1][:, 0].tolist()


@pytest.mark.soak
@pytest.mark.parametrize("spec", ["set-{00..59}.tar", "set.shards.json"])
@pytest.mark.parametrize(
    "read", [in_order, shuffled, streamed, in_a_dataset, in_batches, in_arrays, in_a_column], ids=lambda f: f.__name__
)
def test_no_more_than_few_shards_are_open_at_once(folder, few, read, spec):
    most, values = 0, []
    for value in read(f"{folder}/{spec}"):
        values.append(value)
        if SOAK > 1 or len(values) % 10 == 0:  # a look takes milliseconds
            most = max(most, count_open(folder))
    assert sorted(set(values)) == list(range(2 * SHARDS))
    assert len(values) % (2 * SHARDS) == 0
    assert most <= MOST + 1  # and the one that is being opened


def test_the_datasets_of_a_process_share_what_may_be_open(folder, few):
    several = [IndexedShards(f"{folder}/set.shards.json") for _ in range(4)]
    for samples in zip(*several):
        assert len({sample["cls"] for sample in samples}) == 1
        assert count_open(folder) <= MOST + len(several)


def test_shards_that_are_used_stay_open(folder, few, monkeypatch):
    shards = IndexedShards(f"{folder}/set.shards.json")
    opened = []
    monkeypatch.setattr(ranges.LocalRanges, "verify", lambda self: None)
    kind = ranges.Mapping
    monkeypatch.setattr(ranges, "Mapping", lambda path, *copied: opened.append(Path(path).name) or kind(path))
    for shard in range(SHARDS):
        assert [int(shards[i]["cls"]) for i in (0, 2 * shard, 1)] == [0, 2 * shard, 1]
    opened = [name for name in opened if name.endswith(".tar")]
    assert opened.count("set-00.tar") == 1
    assert len(opened) == SHARDS


def test_a_shard_that_was_written_to_is_told_of_when_it_has_been_released(folder, few):
    errors: list[Exception] = []
    stream = Stream.from_shards(f"{folder}/set.shards.json", on_error=errors.append)
    for number, _ in enumerate(stream):
        if number == 0:
            os.utime(folder / "set-00.tar", ns=(0, 0))
    assert [(type(error), "set-00.tar: changed while" in str(error)) for error in errors] == [(OpenError, True)]
    assert len(list(stream)) == 2 * SHARDS
    assert len(errors) == 1


@pytest.mark.parametrize("most", [MOST, SHARDS])
def test_shards_that_are_opened_again_and_again_are_told_of_once(folder, monkeypatch, caplog, most):
    monkeypatch.setattr(opening, "most_open", lambda: most)
    shards = IndexedShards(f"{folder}/set.shards.json")
    for _ in range(4):
        assert len([shards[i] for i in (*range(0, 2 * SHARDS, 2), *range(1, 2 * SHARDS, 2))]) == 2 * SHARDS
    said = [record.getMessage() for record in caplog.records if "again and again" in record.getMessage()]
    wanted = f"of {SHARDS} shards a process keeps {MOST} open, so these are opened again and again; make fewer"
    assert [text.partition("others: ")[2].partition(" and larger")[0] for text in said] == [wanted] * (most == MOST)
    for _ in range(4):  # an epoch opens each a few times
        list(Stream.from_shards(f"{folder}/set.shards.json", shuffle=True))
    assert len([record for record in caplog.records if "again and again" in record.getMessage()]) == len(said)


def test_of_more_small_shards_than_may_be_open_none_is_held(folder, monkeypatch):
    load_kernel("tarshards.kernels._mapped")
    monkeypatch.setattr(opening, "most_open", lambda: MOST)
    shards = IndexedShards(f"{folder}/set.shards.json")
    assert [int(sample["cls"]) for sample in shards] == list(range(2 * SHARDS))
    assert count_open(folder) == 0
    assert len(shards.shards._small) == SHARDS
    assert all(shards.shards.loaded(number) is not None for number in range(SHARDS))
    data = (folder / "set-07.tar").read_bytes()
    (folder / "set-07.tar").write_bytes(data.replace(b"015.cls", b"515.cls"))
    with pytest.raises(ShardIndexError, match=r"set-07\.tar.*(stale|differs)"):
        shards[15]
    assert int(shards[14]["cls"]) == 14
    monkeypatch.setattr(opening, "HELD", 5000)
    again = IndexedShards(f"{folder}/set.shards.json")
    assert [int(again[i]["cls"]) for i in range(16, 2 * SHARDS)] == list(range(16, 2 * SHARDS))
    assert 0 < len(again.shards._small) < 5


@pytest.mark.parametrize("small", [1 << 16, 0])
def test_a_stale_index_is_loaded_again_once_it_was_rebuilt(folder, monkeypatch, small):
    load_kernel("tarshards.kernels._mapped")
    monkeypatch.setattr(opening, "SMALL", small)
    monkeypatch.setattr(ranges, "MOST_MAPPED", MOST)
    shards = IndexedShards(f"{folder}/set-{{00..{SHARDS - 1}}}.tar")
    with TarWriter(folder / "other.tar") as writer:
        writer.write({"__key__": "514", "x.npy": np.full(3, 14), "cls": 14})
        writer.write({"__key__": "015", "x.npy": np.full(3, 15), "cls": 15})
    os.replace(folder / "other.tar", folder / "set-07.tar")
    for _ in range(2):
        with pytest.raises(ShardIndexError, match=r"set-07\.tar\.index: stale"):
            shards[14]
    build_index(folder / "set-07.tar").save(folder / "set-07.tar")
    shards.verify()
    assert [shards[number]["__key__"] for number in (14, 15, 16)] == ["514", "015", "016"]


def test_what_is_held_of_a_released_shard_can_be_read(folder, few):
    shards = IndexedShards(f"{folder}/set.shards.json").shards
    first = shards.use(0)
    for number in range(SHARDS):
        shards.use(number)
    assert shards.use(0) is not first
    assert first.read(1)["cls"] == b"1"


def test_an_array_loader_opens_shards_when_their_samples_come(folder):
    load_kernel("tarshards.kernels._mapped")
    stream = Stream.from_shards(f"{folder}/set.shards.json", shuffle=True)
    loader = ArrayLoader(stream, 4, fields={"cls": readers.integer()}, threads=0)
    next(iter(loader))
    assert count_open(folder) < SHARDS
    assert loader.maker.mapped is not None
    values = chain.from_iterable(batch["cls"].tolist() for batch in loader)
    assert sorted(values) == list(range(2 * SHARDS))
    assert count_open(folder) == SHARDS
