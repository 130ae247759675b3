"""What is asked for ahead: the samples that come next, with what their check needs, and only where disks are slow."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections import deque
from itertools import count, islice
from pathlib import Path

import numpy as np
import pytest
from programs import load_kernel

from tarshards import ArrayLoader, ShardWriter, Stream, kernels, readers
from tarshards.index import readahead
from tarshards.index.access import SampleSequence, gap_of
from tarshards.samples.payloads import address_of
from tarshards.storage.expressions import find_shards
from tarshards.storage.ranges import LocalRanges
from tarshards.tar.read import BLOCK

SAMPLES, SIZE = 300, 5000


@pytest.fixture
def spec(tmp_path) -> str:
    load_kernel("tarshards.kernels._mapped")
    with ShardWriter(str(tmp_path / "set-%d.tar"), max_samples=100) as writer:
        for i in range(SAMPLES):
            writer.write({"__key__": f"{i:03d}", "bin": bytes([i % 251]) * SIZE})
    return str(tmp_path / "set-{0..2}.tar")


@pytest.fixture
def asked(monkeypatch) -> list[tuple[int, int]]:
    """The stretches of memory that are asked for from now on."""
    stretches: list[tuple[int, int]] = []

    def note(addresses: np.ndarray, sizes: np.ndarray) -> None:
        assert addresses.dtype == np.uint64
        assert sizes.dtype == np.int64
        stretches.extend(zip(addresses.tolist(), (addresses.astype(np.int64) + sizes).tolist()))

    monkeypatch.setattr(kernels.rows, "ask", note)
    return stretches


@pytest.fixture
def cold(monkeypatch) -> None:
    """Count waits for the disk all the time, for samples that are not small."""
    monkeypatch.setattr(readahead, "_waits", count().__next__)
    monkeypatch.setattr(readahead, "SMALL", 0)
    monkeypatch.setattr(readahead, "EVERY", 16)


def is_covered(stretches: list[tuple[int, int]], low: int, high: int) -> bool:
    return any(begin <= low and high <= end for begin, end in stretches)


def stretches_of(shards: SampleSequence, number: int) -> list[tuple[int, int]]:
    """Return where a sample lies in memory with its header, and the header before it, which is compared as well."""
    shard, sample = divmod(number, 100)
    opened = shards.shards.use(shard)
    begin, offset = address_of(opened.buffer), opened.index.offset.astype(np.int64)
    stretches = [(begin + offset[sample] - BLOCK, begin + offset[sample] + SIZE)]
    if sample:
        stretches.append((begin + offset[sample - 1] - BLOCK, begin + offset[sample - 1]))
    return stretches


@pytest.mark.parametrize("shuffle", [False, True])
def test_where_disks_are_slow_samples_are_asked_for_before_they_are_read(spec, asked, cold, shuffle):
    stream = Stream.from_shards(spec, shuffle=shuffle)
    shards = stream.source.shards
    for taken, sample in enumerate(stream):
        if taken >= 2 * 16:
            assert all(is_covered(asked, *stretch) for stretch in stretches_of(shards, int(sample["__key__"])))
    assert taken == SAMPLES - 1


@pytest.mark.parametrize("shuffle", [False, True])
def test_so_are_those_of_arrays(spec, asked, cold, shuffle):
    stream = Stream.from_shards(spec, shuffle=shuffle)
    loader = ArrayLoader(stream, 8, fields={"bin": readers.array("u1", (SIZE,))}, threads=0)
    for number, batch in enumerate(loader):
        for key in batch["__key__"] if number >= 2 * 16 // 8 else ():
            assert all(is_covered(asked, *stretch) for stretch in stretches_of(stream.source.shards, int(key)))
    assert number == -(-SAMPLES // 8) - 1


@pytest.mark.parametrize("arrays", [False, True])
def test_only_the_fields_that_are_read_are_asked_for(tmp_path, asked, cold, arrays):
    load_kernel("tarshards.kernels._mapped")
    with ShardWriter(str(tmp_path / "set-%d.tar")) as writer:
        for i in range(SAMPLES):
            writer.write({"__key__": f"{i:03d}", "a": bytes(100), "bin": bytes(100_000)})
    stream = Stream.from_shards(str(tmp_path / "set-0.tar"), fields=None if arrays else "a")
    read = ArrayLoader(stream, 1, fields={"A": readers.ragged()}) if arrays else stream
    assert len(list(read)) == SAMPLES
    assert 0 < sum(end - begin for begin, end in asked) < 3 * BLOCK * 3 * SAMPLES


@pytest.mark.parametrize("arrays", [False, True])
def test_small_samples_come_with_their_whole_shards(many, monkeypatch, arrays):
    monkeypatch.setattr(readahead, "_waits", count(0, 100).__next__)
    stream = Stream.from_shards(many, shuffle=True)
    urls = stream.source.shards.urls
    most = sum(os.path.getsize(url) // mmap.PAGESIZE * mmap.PAGESIZE for url in urls)
    read = iter(ArrayLoader(stream, 256, fields={"bin": readers.ragged()}) if arrays else stream)
    deque(islice(read, 4 if arrays else 1024), 0)
    for _ in range(1000):
        if bytes_here(urls) >= most:
            break
        time.sleep(0.01)
    assert bytes_here(urls) >= most
    read.close()
    assert "tarshards-readahead" not in {thread.name for thread in threading.enumerate()}


def test_a_loop_that_is_left_ends_the_reading_of_whole_shards(many, monkeypatch):
    """At the range that is being read."""
    asked, is_reading, is_left, join = [], threading.Event(), threading.Event(), threading.Thread.join

    def ask(addresses: np.ndarray, sizes: np.ndarray) -> None:
        asked.append(addresses)
        is_reading.set()
        assert is_left.wait(30)

    def leave(thread: threading.Thread, timeout: float | None = None) -> None:
        is_left.set()
        join(thread, timeout)

    monkeypatch.setattr(kernels.rows, "ask", ask)
    monkeypatch.setattr(threading.Thread, "join", leave)
    monkeypatch.setattr(readahead, "PIECE", mmap.PAGESIZE)
    monkeypatch.setattr(readahead, "_waits", count(0, 100).__next__)
    read = iter(Stream.from_shards(many, shuffle=True))
    deque(islice(read, 1024), 0)
    assert is_reading.wait(30)
    read.close()
    assert len(asked) == 1


def test_where_nothing_is_waited_for_nothing_is_asked(spec, asked, monkeypatch):
    monkeypatch.setattr(readahead, "_waits", lambda: 7)
    stream = Stream.from_shards(spec, shuffle=True)
    assert len(list(stream)) == SAMPLES
    assert len(list(ArrayLoader(stream, 8, fields={"bin": readers.ragged()}))) == -(-SAMPLES // 8)
    assert asked == []


def test_a_wait_counts_for_a_while(monkeypatch):
    every = 3 * readahead.FEW
    numbers = iter([5, 8, 12, 12, 16, *[20] * (1 + readahead.LASTS)])  # 3 waits say nothing, nor 4 only once
    monkeypatch.setattr(readahead, "_waits", numbers.__next__)
    waits = readahead.Waits(every)
    assert [waits.come() for _ in range(5 + readahead.LASTS)] == [False] * 4 + [True] * readahead.LASTS + [False]


def test_what_is_asked_for_comes_into_memory(disk):
    load_kernel("tarshards.kernels._rows")
    path, size = disk / "file", 16 << 20
    path.write_bytes(os.urandom(size))
    with path.open("r+b") as file:
        os.fdatasync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        mapped = mmap.mmap(file.fileno(), size)
    begin = address_of(memoryview(mapped))
    left = pages_here(begin, size)
    if left > size // 10:
        pytest.skip("needs a file system whose pages can be dropped")
    kernels.rows.ask(np.array([begin, begin + (4 << 20)], np.uint64), np.array([3 << 20, 5 << 20], np.int64))
    for _ in range(1000):
        if pages_here(begin, 3 << 20) + pages_here(begin + (4 << 20), 5 << 20) == 8 << 20:
            break
        time.sleep(0.01)
    assert pages_here(begin, 3 << 20) == 3 << 20
    assert pages_here(begin + (4 << 20), 5 << 20) == 5 << 20
    assert pages_here(begin + (12 << 20), 4 << 20) <= left


@pytest.fixture
def many(disk) -> str:
    """Eight shards of 2.2 MB, whose pages are not in memory."""
    load_kernel("tarshards.kernels._mapped")
    with ShardWriter(str(disk / "many-%d.tar"), max_samples=200) as writer:
        for i in range(1600):
            writer.write({"__key__": f"{i:04d}", "bin": bytes([i % 251]) * 10_000})
    for path in writer.shards:
        with open(path, "rb") as file:
            os.fdatasync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if bytes_here(writer.shards) > 1 << 20:
        pytest.skip("needs a file system whose pages can be dropped")
    return str(disk / "many.shards.json")


def bytes_here(shards: list[str]) -> int:
    """Return how many bytes of files are in memory."""
    here = 0
    for path in shards:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE) as mapped:
            here += pages_here(ctypes.addressof(ctypes.c_char.from_buffer(mapped)), len(mapped))
    return here


@pytest.mark.parametrize("shuffle", [False, True])
def test_of_scattered_samples_nothing_else_is_read(many, shuffle):
    stream = Stream.from_shards(many, shuffle=shuffle).select(keys=[f"{i:04d}" for i in range(7, 1600, 50)])
    assert len(list(stream)) == 32
    assert bytes_here(stream.source.shards.urls) < 32 * 5 * mmap.PAGESIZE + 8 * 2 * mmap.PAGESIZE + (1 << 18)


def test_of_runs_little_else_is_read(many):
    chosen = [f"{200 * shard + i:04d}" for shard in range(8) for i in range(50, 90)]
    stream = Stream.from_shards(many).select(keys=chosen)
    assert len(list(stream)) == len(chosen)
    assert bytes_here(stream.source.shards.urls) < 1.15 * len(chosen) * 10_752 + 8 * 2 * mmap.PAGESIZE


def test_the_numbers_of_samples_are_read_alike(many):
    shards = SampleSequence(find_shards(many))
    found = list(shards.read_numbers(np.arange(3, 1600, 100)))
    assert [sample["__key__"] for sample in found] == [f"{i:04d}" for i in range(3, 1600, 100)]
    assert bytes_here(shards.urls) < 1 << 20


@pytest.mark.parametrize("apart", [True, False])
def test_the_system_is_told_where_samples_are_scattered_and_when_no_more(spec, monkeypatch, apart):
    flags: list[tuple[str, bool]] = []
    monkeypatch.setattr(LocalRanges, "scatter", lambda self, flag: flags.append((self.name[-5], flag)))
    monkeypatch.setattr(readahead, "APART", 1 << 10 if apart else 1 << 30)
    stream = Stream.from_shards(spec).select(keys=["005", "205"])
    loop = iter(stream)
    assert next(loop)["__key__"] == "005"
    loop.close()
    if not apart:
        assert flags == []
        return
    assert {name for name, _ in flags} == {"0", "2"}
    assert dict(flags) == {"0": False, "2": False}
    assert not stream.source.shards.shards.scattered


def test_so_it_is_of_shards_that_were_opened_without_being_asked_for(spec, monkeypatch):
    flags: list[tuple[str, bool]] = []
    monkeypatch.setattr(LocalRanges, "scatter", lambda self, flag: flags.append((self.name[-5], flag)))
    monkeypatch.setattr(readahead, "APART", 1 << 10)
    monkeypatch.setattr(readahead.LocalReadahead, "_ask", lambda *_: None)
    stream = Stream.from_shards(str(Path(spec).with_name("set.shards.json"))).select(keys=["005", "205"])
    assert [sample["__key__"] for sample in stream] == ["005", "205"]
    assert flags == [("0", True), ("2", True), ("0", False), ("2", False)]


def test_gaps():
    chosen = [[], [3], [3, 4, 5], [0, 2, 3, 9], range(10)]
    assert [gap_of(np.array(numbers), 10) for numbers in chosen] == [0, 9, 7, 2, 0]


def test_samples_are_scattered_where_their_gap_takes_longer_than_a_read(spec, monkeypatch):
    flags: list[bool] = []
    shards = SampleSequence(find_shards(spec))
    monkeypatch.setattr(shards.shards, "scatter", flags.append)
    many = readahead.APART / (float(shards.sizes.sum()) / SAMPLES)
    for gap in (0, many - 1, many + 1):
        readahead.LocalReadahead(shards.shards, iter(()), gap=gap)
    assert flags == [True]


def pages_here(begin: int, size: int) -> int:
    """Return how many bytes from the address *begin* on are in memory (mincore(2))."""
    pages = (ctypes.c_ubyte * (size // mmap.PAGESIZE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(begin), ctypes.c_size_t(size), pages) == 0
    return sum(page & 1 for page in pages) * mmap.PAGESIZE
