"""The cache of blocks: each is right or fetched again, fetched once a host, and the budget holds, whatever dies."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from zlib import crc32

import pytest
from cache_worker import data_of, hold, make_block, take
from failing_close import fail_to_close
from leftovers import wait_until
from soak import SOAK

from tarshards.errors import OpenError
from tarshards.storage import cache as module
from tarshards.storage.cache import Block, BlockCache, CacheFolder, MappedBlock, name_of, taken
from tarshards.storage.locks import pauses
from tarshards.storage.remote import LEAST_CACHE, Remote
from tarshards.storage.wire import LOADERS, Steps, Task, drop, pausing, start

HERE = Path(__file__).parent
LENGTH = 1 << 18
SIZE = taken(LENGTH + 128)  # of the file of a block
HELD = LEAST_CACHE // SIZE  # blocks that the smallest cache holds


@pytest.fixture(autouse=True)
def processes_of_their_own(monkeypatch):
    """Give each test its own caches, which end with the test."""
    monkeypatch.setattr(module, "_caches", {})
    yield
    module._leave_all()


def open_cache(folder: Path, budget: int | None = LEAST_CACHE) -> BlockCache:
    cache = BlockCache.of(Remote(cache_dir=folder, cache_bytes=budget))
    assert cache is not None
    return cache


def open_again(folder: Path, budget: int | None = LEAST_CACHE) -> BlockCache:
    """Open a cache as another process would."""
    module._leave_all()
    module._caches.clear()
    return open_cache(folder, budget)


class Fetches:
    """What was fetched; `of` gives the function for a block."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []

    def of(self, block: Block):
        def fetch() -> bytes:
            self.blocks.append(block)
            return data_of(block)

        return fetch

    def take(self, cache: BlockCache, block: Block) -> bool:
        """Take a block, check it, and return whether it was fetched."""
        before = len(self.blocks)
        assert take(cache, block, self.of(block)) == data_of(block)
        return len(self.blocks) > before


@pytest.fixture
def fetches():
    return Fetches()


def never() -> bytes:
    raise AssertionError("the block is there")


def files(folder: Path, pattern: str = "*/*.block") -> list[Path]:
    return sorted(folder.glob(pattern))


def path_of(folder: Path, block: Block) -> Path:
    return Path(CacheFolder(str(folder)).block_path(name_of(block.key), "pinned"))


def check_counts(folder: Path, budget: int) -> None:
    """The counts match the files and are within the budget; only blocks are left."""
    counts = CacheFolder.existing(str(folder)).read_counts()
    held = Counter({"spool" if path.parent.name == "spool" else "pinned": 0 for path in files(folder)})
    for path in files(folder):
        held["spool" if path.parent.name == "spool" else "pinned"] += taken(path.stat().st_size)
    assert (counts["pinned"], counts["spool"]) == (held["pinned"], held["spool"])
    assert held.total() <= budget
    assert os.listdir(folder / "parts") == []


def warnings_of(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# What is stored, and for how long.


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_download_that_is_dropped_leaves_its_block_to_others(tmp_path, fetches, has_begun):
    cache, block = open_cache(tmp_path / "cache"), make_block(0)

    def forever() -> Steps[bytes]:
        yield from pausing(3600)
        return b""

    work = start(cache.fill(block, forever))
    if has_begun:
        wait_until(lambda: any((tmp_path / "cache/parts").iterdir()))
    drop(work)
    with pytest.raises(CancelledError):
        work.result(30)
    assert fetches.take(cache, block)
    assert not fetches.take(cache, block)
    wait_until(lambda: not any((tmp_path / "cache/parts").iterdir()))


def test_a_block_is_fetched_once(tmp_path, fetches):
    cache = open_cache(tmp_path / "new/cache")
    block = make_block(0)
    assert fetches.take(cache, block)
    assert not fetches.take(cache, block)
    assert not fetches.take(open_again(tmp_path / "new/cache"), block)
    check_counts(tmp_path / "new/cache", LEAST_CACHE)


def test_few_blocks_are_known_to_be_whole(tmp_path, fetches, monkeypatch):
    """Each takes memory; the others are checked again."""
    monkeypatch.setattr(module, "MOST_VERIFIED", 3)
    cache = open_cache(tmp_path)
    for number in range(8):
        assert fetches.take(cache, make_block(number))
        assert len(cache._verified) <= 3
    assert not any(fetches.take(cache, make_block(number)) for number in range(8))
    assert len(cache._verified) <= 3


def test_without_a_folder_there_is_no_cache():
    assert BlockCache.of(Remote()) is None


def test_a_process_has_one_cache_for_a_folder_and_budget(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "cache")
    assert open_cache(tmp_path / "cache") is open_cache(tmp_path / "link")
    assert open_cache(tmp_path / "cache") is not open_cache(tmp_path / "cache", 2 * LEAST_CACHE)


@pytest.mark.parametrize(
    "other",
    [
        make_block(0)._replace(url="http://host/b.tar"),
        make_block(0, validator='"v2"'),
        make_block(0)._replace(size=1 << 41),
        make_block(1),
        make_block(0, LENGTH - 1),
        make_block(0)._replace(digest="0123"),
    ],
)
def test_blocks_differ_in_each_part_of_their_keys(tmp_path, fetches, other):
    cache = open_cache(tmp_path)
    assert fetches.take(cache, make_block(0))
    assert fetches.take(cache, other)
    assert not fetches.take(cache, make_block(0))


@pytest.mark.parametrize("is_verified", [False, True])
def test_blocks_of_an_earlier_version_are_removed_and_never_read(tmp_path, fetches, is_verified):
    """Their keys did not tell all files apart."""
    cache, block = open_cache(tmp_path), make_block(0)
    assert fetches.take(cache, block)
    module._leave_all()
    (path,) = files(tmp_path)
    key = json.dumps(list(block[:5]), separators=(",", ":")).encode()
    name = name_of(key)
    earlier = tmp_path / name[:2] / f"{name[2:]}.block"
    earlier.parent.mkdir(exist_ok=True)
    earlier.write_bytes(module.header_of(key, crc32(data_of(block)), "") + data_of(block))
    path.unlink()
    counts = tmp_path / "tarshards-cache"
    counts.write_bytes(counts.read_bytes().replace(b'"tarshards cache":2', b'"tarshards cache":1'))
    if is_verified:
        assert list(CacheFolder.existing(str(tmp_path)).verify()) == []
    cache = open_again(tmp_path)
    assert fetches.take(cache, block)
    assert files(tmp_path) == [path]
    check_counts(tmp_path, LEAST_CACHE)


def test_a_url_keeps_its_secrets(tmp_path):
    cache = open_cache(tmp_path)
    for url in "http://host/a.tar?token=secret", "https://me:secret@host/a.tar":
        with pytest.raises(ValueError, match="without query and userinfo"):
            take(cache, make_block(0)._replace(url=url), never)
    with pytest.raises(ValueError, match="has a validator"):
        take(cache, make_block(0)._replace(validator=""), never)
    assert files(tmp_path) == []


def test_files_tell_what_they_are_and_their_data_is_aligned(tmp_path, fetches):
    block = make_block(0)._replace(url="http://host/tête-\udce9.tar")
    fetches.take(open_cache(tmp_path), block)
    (path,) = files(tmp_path)
    raw = path.read_bytes()
    start = raw.index(data_of(block))
    assert start % 64 == 0
    (stored,) = CacheFolder.existing(str(tmp_path)).entries()
    assert (stored.block, stored.path) == (block, str(path))


def test_the_first_blocks_stay(tmp_path, fetches):
    cache = open_cache(tmp_path)
    blocks = [make_block(i) for i in range(2 * HELD)]
    for _ in range(2):
        fetched = [fetches.take(cache, block) for block in blocks]
    assert fetched == [False] * HELD + [True] * HELD
    check_counts(tmp_path, LEAST_CACHE)


def test_a_budget_that_is_too_small_names_the_least(tmp_path):
    with pytest.raises(ValueError, match=f"cache_bytes must be at least {LEAST_CACHE}, not"):
        Remote(cache_dir=tmp_path, cache_bytes=LEAST_CACHE - 1)


def test_a_block_larger_than_the_budget_is_not_stored(tmp_path, fetches):
    cache = open_cache(tmp_path)
    assert [fetches.take(cache, make_block(0, LEAST_CACHE)) for _ in range(2)] == [True, True]
    check_counts(tmp_path, 0)


def test_the_default_budget_is_a_share_of_the_disk(tmp_path, fetches):
    disk = os.statvfs(tmp_path)
    cache = open_cache(tmp_path, None)
    assert 0.8 < cache.budget / (disk.f_bavail * disk.f_frsize) < 1


def test_spooled_blocks_go_after_their_last_use(tmp_path, fetches):
    cache = open_cache(tmp_path)
    assert cache.reserve(4 * SIZE) == 4 * SIZE
    pinned, spooled = [make_block(i) for i in range(HELD - 4)], [make_block(100 + i) for i in range(4)]
    for block in pinned + spooled:
        assert fetches.take(cache, block)
    assert len(files(tmp_path, "spool/*.block")) == 4
    assert fetches.take(cache, make_block(200)), "in memory, where the budget is full"
    for block in pinned + spooled:
        assert not fetches.take(cache, block)
    for left, block in zip((3, 2, 1, 0), spooled):
        assert not fetches.take(cache, block)
        cache.drop(block)
        assert len(files(tmp_path, "spool/*.block")) == left
    for block in pinned:
        cache.drop(block)
        assert not fetches.take(cache, block), "pinned blocks stay for the next epoch"
    check_counts(tmp_path, LEAST_CACHE)


def test_pinned_blocks_make_way_for_what_is_reserved(tmp_path, fetches):
    cache = open_cache(tmp_path)
    blocks = [make_block(i) for i in range(HELD)]
    for number, block in enumerate(blocks):
        fetches.take(cache, block)
        os.utime(path_of(tmp_path, block), (10**9 + (number % 7) * 100, 10**9))
    assert cache.reserve(1 << 60) == LEAST_CACHE
    assert files(tmp_path) == []
    check_counts(tmp_path, 0)
    assert cache.reserve(0) == 0
    for number, block in enumerate(blocks):
        assert fetches.take(cache, block)
        os.utime(path_of(tmp_path, block), (10**9 + (number % 7) * 100, 10**9))
    assert cache.reserve(LEAST_CACHE // 2) == LEAST_CACHE // 2
    left = [number % 7 for number, block in enumerate(blocks) if path_of(tmp_path, block).exists()]
    assert len(left) == HELD // 2
    assert min(left) >= 3, "those used last are left"
    check_counts(tmp_path, LEAST_CACHE // 2)
    other = open_cache(tmp_path, 2 * LEAST_CACHE)
    assert other.reserve(1 << 60) == 2 * LEAST_CACHE - LEAST_CACHE // 2, "what one has reserved is not another's"


def test_a_smaller_budget_removes_what_was_used_longest_ago(tmp_path, fetches):
    cache = open_cache(tmp_path, 2 * LEAST_CACHE)
    blocks = [make_block(i) for i in range(2 * HELD)]
    for number, block in enumerate(blocks):
        fetches.take(cache, block)
        os.utime(path_of(tmp_path, block), (10**9 - number, 10**9))
    cache = open_again(tmp_path)
    assert [path_of(tmp_path, block).exists() for block in blocks] == [True] * HELD + [False] * HELD
    check_counts(tmp_path, LEAST_CACHE)


# Fetching.


def test_what_a_fetch_raises_passes_through_and_nothing_is_left(tmp_path, fetches):
    cache = open_cache(tmp_path)
    for error in OpenError("no answer", url="http://host/a.tar"), KeyboardInterrupt(), OSError(errno.ENOSPC, "x"):

        def fail(error: BaseException = error) -> bytes:
            raise error

        with pytest.raises(type(error)) as caught:
            take(cache, make_block(0), fail)
        assert caught.value is error
        check_counts(tmp_path, 0)
    assert fetches.take(cache, make_block(0))


@pytest.mark.parametrize("change", ["replaced", "written to"])
@pytest.mark.parametrize("way", ["verify", "purge", "trim"])
def test_a_file_that_has_changed_since_it_was_looked_at_is_not_removed(tmp_path, fetches, monkeypatch, way, change):
    blocks = [make_block(number) for number in range(3)]
    cache = open_cache(tmp_path)
    for block in blocks:
        fetches.take(cache, block)
    path, folder = path_of(tmp_path, blocks[1]), CacheFolder(str(tmp_path))
    whole = path.read_bytes()
    path.write_bytes(b"?" + whole[1:])  # so that it is to be removed
    unlink = CacheFolder.unlink

    def unlink_later(folder, counts, name, kind, status, size=None):
        """Remove a file; another process has stored that of the second block again meanwhile."""
        if name == str(path):
            if change == "replaced":
                path.with_name("new").write_bytes(whole)
                path.with_name("new").replace(path)
            else:
                path.write_bytes(whole)
                os.utime(path, ns=(1, 1))
        return unlink(folder, counts, name, kind, status, size)

    monkeypatch.setattr(CacheFolder, "unlink", unlink_later)
    if way == "verify":
        list(folder.verify())
        left = 3
    elif way == "purge":
        folder.purge()
        left = 1
    else:
        with folder.counts() as counts:
            folder.trim(counts, 0)
        left = 1
    assert path.read_bytes() == whole
    assert len(files(tmp_path)) == left
    check_counts(tmp_path, LEAST_CACHE)


@pytest.mark.parametrize("length", [LENGTH - 1, LENGTH + 1, 0])
def test_a_fetch_of_another_length_is_an_error(tmp_path, fetches, length):
    cache = open_cache(tmp_path)
    with pytest.raises(OpenError, match=rf"a\.tar: offset 0: read {length} bytes instead of {LENGTH}"):
        take(cache, make_block(0), lambda: bytes(length))
    check_counts(tmp_path, 0)
    assert fetches.take(cache, make_block(0))


@pytest.mark.parametrize("stored", [True, False])
def test_threads_that_ask_for_a_block_at_once_share_one_fetch(tmp_path, fetches, stored):
    cache = open_cache(tmp_path)
    if not stored:
        for i in range(HELD):
            fetches.take(cache, make_block(i))
    block, asked, calls = make_block(1000), threading.Event(), []

    def fetch() -> bytes:
        calls.append(1)
        assert asked.wait(60)
        return data_of(block)

    with ThreadPoolExecutor(8) as executor:
        futures = [executor.submit(take, cache, block, fetch) for _ in range(8)]
        wait_until(lambda: calls and len(cache._flights[block].done._waiters) == 7)
        asked.set()
        assert all(future.result() == data_of(block) for future in futures)
    assert len(calls) == 1


def test_another_thread_goes_on_where_a_fetch_fails(tmp_path, fetches):
    cache, block, begun, failing = open_cache(tmp_path), make_block(0), threading.Event(), threading.Event()

    def fail() -> bytes:
        begun.set()
        assert failing.wait(60)
        raise OpenError("no answer")

    with ThreadPoolExecutor(2) as executor:
        first = executor.submit(take, cache, block, fail)
        assert begun.wait(60)
        second = executor.submit(take, cache, block, fetches.of(block))
        wait_until(second.running)
        failing.set()
        assert second.result(60) == data_of(block)
        with pytest.raises(OpenError, match="no answer"):
            first.result(60)
    check_counts(tmp_path, LEAST_CACHE)


def test_nobody_waits_for_a_block_that_will_not_be_stored(tmp_path, fetches):
    cache, block = open_cache(tmp_path), make_block(1000)
    for i in range(HELD):
        fetches.take(cache, make_block(i))
    other = BlockCache(str(tmp_path), LEAST_CACHE)  # as one of another process
    begun, fetching = threading.Event(), threading.Event()

    def fetch() -> bytes:
        begun.set()
        assert fetching.wait(60)
        return data_of(block)

    with ThreadPoolExecutor(2) as executor:
        first = executor.submit(take, cache, block, fetch)
        assert begun.wait(60)
        assert executor.submit(fetches.take, other, block).result(60)
        fetching.set()
        assert first.result(60) == data_of(block)
    other.leave()


def test_the_budget_includes_what_is_being_fetched(tmp_path, fetches):
    cache, block = open_cache(tmp_path), make_block(1000)
    for i in range(HELD - 1):
        fetches.take(cache, make_block(i))
    begun, fetching = threading.Event(), threading.Event()

    def fetch() -> bytes:
        begun.set()
        assert fetching.wait(60)
        return data_of(block)

    with ThreadPoolExecutor(1) as executor:
        first = executor.submit(take, cache, block, fetch)
        assert begun.wait(60)
        assert fetches.take(cache, make_block(2000))
        assert len(files(tmp_path)) == HELD - 1
        fetching.set()
        first.result(60)
    assert not fetches.take(cache, block)
    check_counts(tmp_path, LEAST_CACHE)


# Several processes.


class Workers:
    """Processes of cache_worker.py; the blocks that they fetch are in the file *log*, what they say in *errors*."""

    def __init__(self, folder: Path, log: Path, python: str):
        self.folder, self.log, self.errors, self.running = folder, log, log.with_name("errors"), []
        self.python = python

    def start(self, seed: int, **options) -> subprocess.Popen:
        given = {"folder": str(self.folder), "log": str(self.log), "seed": seed, "threads": 3, "budget": LEAST_CACHE}
        command = [self.python, str(HERE / "cache_worker.py"), json.dumps({**given, **options})]
        path = os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
        with open(self.errors, "ab") as errors:  # a pipe would be full of warnings, and nobody reads it meanwhile
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, env={**os.environ, "PYTHONPATH": path}
            )
        self.running.append(process)
        return process

    def finish(self) -> str:
        """Wait until all have ended, without an error, and return what they said."""
        for process in self.running:
            process.communicate(timeout=100)
        told = self.errors.read_text()
        self.errors.unlink()
        assert {process.returncode for process in self.running} <= {0, -signal.SIGKILL}, told
        self.running.clear()
        return told

    def fetched(self) -> Counter[int]:
        return Counter(map(int, self.log.read_text().split()))


@pytest.fixture
def workers(tmp_path, python_with_torch):
    workers = Workers(tmp_path / "cache", tmp_path / "log", python_with_torch)
    yield workers
    for process in workers.running:
        process.kill()
        with process:
            pass


def test_each_block_is_fetched_once_a_host(tmp_path, workers):
    for seed in range(3):
        workers.start(seed, blocks=HELD - 4)
    assert workers.finish() == ""
    assert workers.fetched() == dict.fromkeys(range(HELD - 4), 1)
    check_counts(tmp_path / "cache", LEAST_CACHE)
    assert os.listdir(tmp_path / "cache/owners") == []


@pytest.mark.soak
def test_processes_are_killed_at_any_moment(tmp_path, workers, fetches):
    """Processes of 3 threads, on a cache that is smaller than the data, with spooled blocks."""
    rng, folder, blocks = random.Random(0), tmp_path / "cache", 2 * HELD
    options = {"blocks": blocks, "epochs": 50, "again": 0.5, "reserve": LEAST_CACHE // 10}
    count, workers.python = (4 if SOAK > 1 else 3), sys.executable
    running = [workers.start(seed, **options) for seed in range(count)]
    for seed in range(count, count + 2 * SOAK):
        victim = rng.randrange(count)
        running[victim].stdout.read(rng.randrange(1, 400))  # of the numbers of the blocks that it has taken
        running[victim].kill()
        running[victim] = workers.start(seed, **options)
    for process in running:
        process.stdout.read(100)
        process.kill()
    assert workers.finish() == ""
    cache = open_cache(folder)
    check_counts(folder, LEAST_CACHE)
    assert files(folder, "spool/*.block") == []
    assert len(os.listdir(folder / "owners")) == 1
    assert all(is_whole for _, is_whole in cache.folder.verify())
    for number in range(blocks):
        fetches.take(cache, make_block(number))
    assert len(files(folder)) == HELD
    check_counts(folder, LEAST_CACHE)


def test_what_a_killed_process_has_spooled_goes_and_that_of_a_living_one_stays(tmp_path, workers):
    folder = tmp_path / "cache"
    cache, fetches = open_cache(folder), Fetches()
    cache.reserve(LEAST_CACHE // 2)
    for number in range(HELD // 2 + 4):
        fetches.take(cache, make_block(1000 + number))
    ours = files(folder, "spool/*.block")
    assert len(ours) == 4
    killed = workers.start(1, blocks=4, threads=1, epochs=1000)
    killed.stdout.read(100)
    assert len(files(folder, "spool/*.block")) == 8
    killed.kill()
    killed.wait(60)
    open_cache(folder, 2 * LEAST_CACHE)
    assert files(folder, "spool/*.block") == ours
    check_counts(folder, LEAST_CACHE)


HOLDER = """
import os, sys, time
from cache_worker import data_of, make_block, take
from tarshards.storage.cache import BlockCache
from tarshards.storage.remote import Remote
from tarshards.storage.wire import LOADERS, Steps, Task, drop, pausing, start
cache = BlockCache.of(Remote(cache_dir=sys.argv[1], cache_bytes=1 << 24))

def fetch():
    if sys.argv[2] == "fork" and os.fork() == 0:  # in a thread, as a fork of another thread would see it
        os.write(1, b"%d\\n" % os.getpid())
        time.sleep(1000)
    os.write(1, b"fetching\\n")
    sys.stdin.read()
    return data_of(make_block(0))

take(cache, make_block(0), fetch)
"""


@pytest.fixture
def holder(tmp_path):
    """Return a function that starts a process which fetches block 0 until its stdin is closed."""
    started = []

    def start(way: str) -> subprocess.Popen:
        path = os.pathsep.join([str(HERE.parents[1]), str(HERE)])
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", HOLDER, str(tmp_path), way],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with process:
            pass


@pytest.fixture
def waited(monkeypatch):
    """The pauses of this process in which another one held the lock of a block."""
    found: list[float] = []

    def noted() -> Iterator[float]:
        for pause in pauses():
            yield pause
            found.append(pause)

    monkeypatch.setattr(module, "pauses", noted)
    return found


@pytest.mark.parametrize("way", ["plain", "fork"])
def test_another_process_takes_over_from_one_that_is_killed(tmp_path, holder, fetches, waited, way):
    """Also if that has a child, which was forked while it held the lock."""
    process = holder(way)
    while process.stdout.readline() != b"fetching\n":
        pass
    cache = open_cache(tmp_path)
    with ThreadPoolExecutor(1) as executor:
        taking = executor.submit(fetches.take, cache, make_block(0))
        wait_until(lambda: waited)
        process.kill()
        assert taking.result(60), "it was fetched here"
    assert not fetches.take(open_again(tmp_path), make_block(0))
    check_counts(tmp_path, LEAST_CACHE)


def test_another_process_waits_for_the_one_that_fetches(tmp_path, holder, waited):
    process = holder("plain")
    assert process.stdout.readline() == b"fetching\n"
    cache = open_cache(tmp_path)
    with ThreadPoolExecutor(1) as executor:
        taking = executor.submit(take, cache, make_block(0), never)
        wait_until(lambda: waited)
        process.stdin.close()
        assert taking.result(60) == data_of(make_block(0))
    assert process.wait(60) == 0


def test_a_stopped_process_is_passed_by_after_the_timeout(tmp_path, holder, fetches, caplog):
    process = holder("plain")
    assert process.stdout.readline() == b"fetching\n"
    process.send_signal(signal.SIGSTOP)
    cache = BlockCache.of(Remote(cache_dir=tmp_path, cache_bytes=LEAST_CACHE, timeout=1.5))
    begun = time.monotonic()
    assert fetches.take(cache, make_block(0)), "it was fetched here"
    assert 1.5 <= time.monotonic() - begun < 10
    assert "locked for 1.5 s by another process, which may be stopped" in warnings_of(caplog)[0]
    begun = time.monotonic()
    assert fetches.take(cache, make_block(0))
    assert time.monotonic() - begun < 1.35, "it is not awaited as long again"
    assert [fetches.take(cache, make_block(1)) for _ in range(2)] == [True, False]  # others are stored
    assert len(warnings_of(caplog)) == 1
    process.send_signal(signal.SIGCONT)
    process.stdin.close()
    assert process.wait(60) == 0
    assert not fetches.take(cache, make_block(0)), "it has stored the block"


def test_a_process_that_is_stopped_while_it_changes_the_counts_is_passed_by(tmp_path, fetches, caplog):
    """It holds the lock that all need who store a block, or begin to use the cache."""
    fetches.take(open_cache(tmp_path), make_block(0))
    cache = BlockCache.of(Remote(cache_dir=tmp_path, cache_bytes=LEAST_CACHE, timeout=0.5))
    late = BlockCache(str(tmp_path), LEAST_CACHE, 0.5)
    descriptor = os.open(tmp_path / "tarshards-cache", os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    new = BlockCache(str(tmp_path), LEAST_CACHE, 0.5)
    for each in cache, late, new:
        begun = time.monotonic()
        assert [fetches.take(each, make_block(number)) for number in (0, 1, 2, 1, 2)] == [False, *[True] * 4]
        assert time.monotonic() - begun < 10
        assert each.reserve(1 << 20) == 0
    assert len(warnings_of(caplog)) == 3
    with pytest.raises(TimeoutError, match="which may be stopped"):
        CacheFolder(str(tmp_path), 0.1).purge()
    os.close(descriptor)
    for each in cache, late, new:
        fetches.take(each, make_block(1))
    assert not fetches.take(new, make_block(1))


@pytest.mark.forks
@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_fork_while_threads_hold_blocks_and_fetch(tmp_path, fetches):
    cache = open_cache(tmp_path)
    held = take(cache, make_block(0), fetches.of(make_block(0)))
    begun, fetching = threading.Event(), threading.Event()

    def fetch() -> bytes:
        begun.set()
        assert fetching.wait(60)
        return data_of(make_block(1))

    with ThreadPoolExecutor(1) as executor:
        taking = executor.submit(take, cache, make_block(1), fetch)
        assert begun.wait(60)
        child = os.fork()
        if child == 0:
            signal.alarm(90)  # no test leaves a process that waits for ever
            code = 1
            with suppress(BaseException):
                fine = held == data_of(make_block(0))
                mine = Fetches()
                fine = fine and open_cache(tmp_path) is cache and not mine.take(cache, make_block(0))
                fine = fine and mine.take(cache, make_block(2)) and not mine.take(cache, make_block(2))
                fine = fine and not mine.take(cache, make_block(1))  # waits for its parent
                code = 0 if fine else 2
            os._exit(code)
        wait_until(lambda: (tmp_path / "parts").exists() and path_of(tmp_path, make_block(2)).exists())
        fetching.set()
        assert taking.result(60) == data_of(make_block(1))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert held == data_of(make_block(0))
    assert not fetches.take(cache, make_block(2))
    open_again(tmp_path)
    check_counts(tmp_path, LEAST_CACHE)


@pytest.mark.forks
def test_processes_that_fetch_blocks_for_each_other_do_not_wait_for_each_other(tmp_path):
    """Each needs what the other fetches, for more blocks than there are threads for the disk."""
    count = 2 * LOADERS + 4
    context = multiprocessing.get_context("fork")
    results, half_begun = context.SimpleQueue(), context.Barrier(2)

    def work(numbers: list[int]) -> None:
        cache = BlockCache.of(Remote(cache_dir=tmp_path, cache_bytes=LEAST_CACHE, timeout=5))
        fetched = []

        def begin(number: int) -> Task[memoryview]:
            block = make_block(number, 1000)

            def fetch() -> Steps[bytes]:
                fetched.append(number)
                yield from pausing(0.5)
                return data_of(block)

            return start(cache.fill(block, fetch))

        works = [begin(number) for number in numbers[: count // 2]]
        while len(fetched) < count // 2:
            time.sleep(0.01)
        half_begun.wait()
        works += [begin(number) for number in numbers[count // 2 :]]
        are_right = [work.result() == data_of(make_block(number, 1000)) for number, work in zip(numbers, works)]
        results.put((all(are_right), len(fetched)))

    numbers = list(range(count))
    workers = [context.Process(target=work, args=(order,)) for order in (numbers, numbers[::-1])]
    for worker in workers:
        worker.start()
    assert [results.get() for _ in workers] == [(True, count // 2)] * 2
    for worker in workers:
        worker.join()


def test_a_mapped_block(tmp_path, fetches):
    """It is mapped as soon as it is stored, and is no longer current once its file is written to, or gone."""
    cache, block = open_cache(tmp_path), make_block(0)
    held = hold(cache, block, fetches.of(block))
    assert isinstance(held, MappedBlock)
    assert held.mapping.read(held.start, block.length) == data_of(block)
    assert held.mapping.is_current()
    with open(path_of(tmp_path, block), "r+b") as file:
        file.seek(held.start + 7)
        file.write(b"?")
    assert not held.mapping.is_current()
    again = hold(cache, block, fetches.of(block))
    assert len(fetches.blocks) == 2
    assert again.mapping.read(again.start, block.length) == data_of(block)
    path_of(tmp_path, block).unlink()
    assert not again.mapping.is_current()
    for number in range(1, 2 * HELD):
        last = hold(cache, make_block(number), fetches.of(make_block(number)))
    assert last == data_of(make_block(2 * HELD - 1)), "in memory where the budget is full"


def test_two_processes_with_different_budgets(tmp_path, workers, fetches):
    """Each stores within its own budget, so that the larger one holds for both."""
    folder = tmp_path / "cache"
    smaller = workers.start(0, blocks=2 * HELD, threads=1)
    smaller.stdout.readline()  # opened later, it would make the cache smaller
    workers.start(1, blocks=3 * HELD, threads=2, budget=2 * LEAST_CACHE)
    assert workers.finish() == ""
    check_counts(folder, 2 * LEAST_CACHE)
    assert len(files(folder)) == 2 * HELD
    cache = open_cache(folder)
    check_counts(folder, LEAST_CACHE)
    for number in range(3 * HELD):
        fetches.take(cache, make_block(number))
    check_counts(folder, LEAST_CACHE)


@pytest.mark.soak
def test_purges_at_the_same_time(tmp_path, workers):
    folder = tmp_path / "cache"
    processes = [workers.start(seed, blocks=HELD, epochs=2 * SOAK, again=0.5) for seed in range(2)]
    processes[0].stdout.readline()
    while any(process.poll() is None for process in processes):
        CacheFolder.existing(str(folder)).purge()
        for process in processes:
            process.stdout.read(400)
    assert workers.finish() == ""
    open_cache(folder)
    check_counts(folder, LEAST_CACHE)


# Damage.


def flip(path: Path, rng: random.Random) -> None:
    with open(path, "r+b") as file:
        place = rng.randrange(os.fstat(file.fileno()).st_size)
        file.seek(place)
        byte = file.read(1)
        file.seek(place)
        file.write(bytes([byte[0] ^ 1 << rng.randrange(8)]))


def test_a_block_that_is_truncated_while_it_is_read_is_fetched_again(tmp_path, fetches, monkeypatch):
    """Linux sets the size, fills the last page with zeros, and sets the time last; what is read meanwhile has zeros."""
    cache, block, pread = open_cache(tmp_path), make_block(0), os.pread
    fetches.take(cache, block)
    path = path_of(tmp_path, block)

    def read(descriptor: int, size: int, offset: int) -> bytes:
        data = pread(descriptor, size, offset)
        if size == len(data) == path.stat().st_size:
            os.truncate(path, size - 10)
            os.utime(path, ns=(0, time_of_change))
            data = data[:-10] + bytes(10)
        return data

    time_of_change = path.stat().st_mtime_ns
    monkeypatch.setattr(os, "pread", read)
    assert fetches.take(cache, block), "and is right, as take() checks"


@pytest.mark.soak
@pytest.mark.parametrize("opened_again", [True, False])
def test_any_flipped_bit_and_truncation_is_noticed(tmp_path, fetches, caplog, opened_again):
    cache, block, rng = open_cache(tmp_path), make_block(0, 300), random.Random(0)
    path = path_of(tmp_path, block)
    fetches.take(cache, block)
    size = path.stat().st_size
    for cut in [*range(0, size, 40 // min(SOAK, 40)), size - 1, "longer", *["flip"] * 20 * SOAK]:
        if isinstance(cut, int):
            os.truncate(path, cut)
        elif cut == "flip":
            flip(path, rng)
        else:
            path.write_bytes(path.read_bytes() + b"x")
        if opened_again:
            cache = open_again(tmp_path)
        caplog.clear()
        whole = not fetches.take(cache, block)
        assert not whole or cut == "flip", "only a bit of the zeros, or of the owner, does not count"
        assert warnings_of(caplog) == (
            [] if whole else [f"{path}: a damaged block of http://host/a.tar is fetched again"]
        )
        assert not fetches.take(cache, block)
        check_counts(tmp_path, LEAST_CACHE)


def test_a_change_in_the_tick_of_the_clock_in_which_a_block_was_checked_is_noticed(tmp_path, fetches):
    """A file system gives the same time to two writes within some milliseconds."""
    cache, block = open_cache(tmp_path), make_block(0)
    fetches.take(cache, block)
    path = path_of(tmp_path, block)
    now = path.stat().st_mtime_ns + 10**12
    os.utime(path, ns=(now, now))
    assert not fetches.take(cache, block)
    with open(path, "r+b") as file:
        file.seek(1000)
        file.write(b"xx")
    os.utime(path, ns=(now, now))
    assert fetches.take(cache, block)


def test_a_block_that_is_there_takes_no_lock_and_no_scan(tmp_path, fetches, monkeypatch):
    cache = open_cache(tmp_path)
    fetches.take(cache, make_block(0))
    os.utime(path_of(tmp_path, make_block(0)), (10**9, 10**9))
    assert not fetches.take(cache, make_block(0)), "checked, for the first time in this process"
    used = []
    with monkeypatch.context() as patch:
        for owner, name in (fcntl, "flock"), (os, "scandir"), (os, "listdir"), (module, "crc32"):
            patch.setattr(owner, name, lambda *_, name=name: used.append(name))
        assert not fetches.take(cache, make_block(0))
    assert used == []


@pytest.mark.soak
def test_files_are_damaged_while_processes_read(tmp_path, workers):
    folder, rng = tmp_path / "cache", random.Random(0)
    processes = [workers.start(seed, blocks=HELD // 2, epochs=1000) for seed in range(2)]
    processes[0].stdout.readline()
    damaged = 0
    while damaged < 25 * SOAK or max(workers.fetched().values()) < 3:
        for path in rng.sample(found := files(folder), min(4, len(found))):
            with suppress(FileNotFoundError):
                flip(path, rng) if rng.random() < 0.5 else os.truncate(path, rng.randrange(LENGTH))
                damaged += 1
        for process in processes:
            process.stdout.read(200)
    for process in processes:
        process.kill()
    workers.finish()  # with 3, if a wrong block was delivered
    list(open_cache(folder).folder.verify())
    check_counts(folder, LEAST_CACHE)


def test_counts_that_were_being_changed_are_made_again(tmp_path, fetches):
    cache = open_cache(tmp_path)
    for number in range(3):
        fetches.take(cache, make_block(number))
    path = tmp_path / "tarshards-cache"
    right = path.read_bytes()
    for wrong in (
        re.sub(rb'^ (.*?"pinned":)\d+', rb"!\g<1>5", right),
        right[:40],
        b"",
        b"!",
        bytes(len(right)),
    ):
        path.write_bytes(wrong)
        fetches.take(cache, make_block(3))
        check_counts(tmp_path, LEAST_CACHE)
        path_of(tmp_path, make_block(3)).unlink()
    path.unlink()
    assert fetches.take(cache, make_block(4))
    check_counts(tmp_path, LEAST_CACHE)


def test_files_that_a_power_loss_has_emptied_are_counted_after_the_next_boot(tmp_path, fetches):
    cache = open_cache(tmp_path)
    for number in range(3):
        fetches.take(cache, make_block(number))
    os.truncate(path_of(tmp_path, make_block(1)), 0)
    module._leave_all()
    path = tmp_path / "tarshards-cache"
    path.write_bytes(path.read_bytes().replace(json.loads(path.read_bytes())["boot"].encode(), b"x" * 36))
    cache = open_again(tmp_path)
    check_counts(tmp_path, LEAST_CACHE)
    assert [fetches.take(cache, make_block(number)) for number in range(3)] == [False, True, False]


# Files of others.


def test_files_of_others_stay_and_are_named_once(tmp_path, fetches, caplog):
    cache = open_cache(tmp_path)
    fetches.take(cache, make_block(0))
    subfolder = path_of(tmp_path, make_block(0)).parent
    precious = [tmp_path / "mine.tar", subfolder / "notes", subfolder / f"{'0' * 30}.block"]
    precious += [tmp_path / f"spool/{'1' * 32}.block", tmp_path / f"parts/{'2' * 32}", tmp_path / "parts/x"]
    precious += [tmp_path / "owners/1-0000000f", tmp_path / "owners/x"]
    for path in precious:
        path.write_bytes(b"precious")
    (subfolder / f"{'3' * 30}.block").symlink_to(tmp_path / "mine.tar")
    (subfolder / f"{'4' * 30}.block").mkdir()
    caplog.clear()
    cache = open_again(tmp_path)
    (warning,) = warnings_of(caplog)
    assert warning.endswith(" more: not of the cache in this folder, so left as it is")
    cache.reserve(1 << 60)
    folder = CacheFolder.existing(str(tmp_path))
    fetches.take(cache, make_block(0))
    assert [is_whole for _, is_whole in folder.verify()] == [True]
    assert folder.purge()[0] == 1
    module._leave_all()
    assert {str(path) for path in precious} - {f"{tmp_path}/owners/1-0000000f"} <= folder.foreign | cache.folder.foreign
    assert all(path.read_bytes() == b"precious" for path in precious)
    assert (subfolder / f"{'3' * 30}.block").is_symlink()
    assert (subfolder / f"{'4' * 30}.block").is_dir()
    assert len(warnings_of(caplog)) == 1


def test_no_link_is_followed(tmp_path, fetches):
    (tmp_path / "mine").write_bytes(b"precious")
    block = make_block(0)
    cache = open_cache(tmp_path / "cache")
    path = path_of(tmp_path / "cache", block)
    path.parent.mkdir()
    path.symlink_to(tmp_path / "mine")
    (tmp_path / "cache/parts" / name_of(block.key)).symlink_to(tmp_path / "mine")
    assert fetches.take(cache, block)
    assert (tmp_path / "mine").read_bytes() == b"precious"


def test_a_file_of_counts_that_is_not_ours_is_an_error(tmp_path):
    (tmp_path / "tarshards-cache").write_text("precious")
    with pytest.raises(OpenError, match="tarshards-cache: not a file of a cache; use another folder"):
        open_cache(tmp_path)
    assert (tmp_path / "tarshards-cache").read_text() == "precious"


@pytest.mark.parametrize("counts", [bytes(200), b"!" + bytes(199), b" " + bytes(199), b"!", b""])
def test_counts_that_a_power_loss_has_made_zeros_are_counted_again(tmp_path, fetches, counts):
    block = make_block(0)
    fetches.take(open_cache(tmp_path), block)
    module._leave_all()
    (tmp_path / "tarshards-cache").write_bytes(counts)
    cache = BlockCache(str(tmp_path), LEAST_CACHE)
    assert cache.folder.read_counts()["pinned"] > 0
    cache.leave()


# Disks that store nothing.


@pytest.fixture
def mounted(tmp_path):
    """Return a function that mounts a file system of some MiB on a folder, or mounts it again with other options."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounts = []

    def mount(options: str) -> Path:
        if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(folder)]).returncode:
            pytest.skip("only root can mount a file system of some MiB")
        mounts.append(options)
        return folder

    yield mount
    module._leave_all()
    for _ in mounts:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_block_that_could_not_be_closed_is_not_stored(tmp_path, fetches, caplog, monkeypatch):
    cache = open_cache(tmp_path)
    with monkeypatch.context() as patched:
        fail_to_close(patched, f"/parts/{name_of(make_block(0).key)}")
        assert fetches.take(cache, make_block(0))
    assert files(tmp_path) == os.listdir(tmp_path / "parts") == []
    assert [warning.count("Disk quota exceeded") for warning in warnings_of(caplog)] == [1]


def test_a_disk_that_becomes_full(mounted, fetches, caplog):
    folder = mounted("size=4m")
    cache = open_cache(folder)
    blocks = [make_block(number) for number in range(20)]
    fetched = [fetches.take(cache, block) for _ in range(2) for block in blocks]
    assert 10 < fetched.count(False) < 20
    assert warnings_of(caplog) == [
        f"{folder}: No space left on device; blocks that are not in this cache are read without storing them"
    ]
    assert os.listdir(folder / "parts") == []
    assert [is_whole for _, is_whole in cache.folder.verify()] == [True] * fetched.count(False)


@pytest.mark.parametrize("left", [0, 1 << 20])
def test_a_disk_that_is_full_from_the_beginning(mounted, fetches, caplog, left):
    folder = mounted("size=4m")
    with suppress(OSError), open(folder / "filler", "wb", buffering=0) as file:
        file.write(bytes((4 << 20) - left))
        file.write(bytes(4 << 20 if not left else 0))
    cache = open_cache(folder / "cache", None)
    assert [fetches.take(cache, make_block(0)) for _ in range(2)] == [True, True]
    (warning,) = warnings_of(caplog)
    assert "cache: No space left on device; blocks that are not" in warning
    assert cache.reserve(1) == 0


def test_a_folder_that_is_read_only(mounted, fetches, caplog):
    folder = mounted("size=30m")
    fetches.take(open_cache(folder), make_block(0))
    fetches.take(open_cache(folder), make_block(1))
    os.truncate(path_of(folder, make_block(1)), 100)
    module._leave_all()
    module._caches.clear()
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
    cache = open_cache(folder)
    assert [fetches.take(cache, make_block(number)) for number in (0, 1, 2, 0, 1, 2)] == [False, True, True] * 2
    (warning,) = warnings_of(caplog)
    assert warning == (
        f"{folder}: Read-only file system; blocks that are not in this cache are read without storing them"
    )
    subprocess.run(["mount", "-o", "remount,rw", str(folder)], check=True)


def test_a_file_system_without_locks(tmp_path, fetches, caplog, monkeypatch):
    fetches.take(open_cache(tmp_path), make_block(0))
    module._leave_all()
    module._caches.clear()

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    before = os.listdir("/proc/self/fd")
    cache = open_cache(tmp_path)
    assert [fetches.take(cache, make_block(number)) for number in (0, 1, 0, 1)] == [False, True, False, True]
    (warning,) = warnings_of(caplog)
    assert "No locks available; blocks that are not in this cache are read without storing them" in warning
    assert len(os.listdir("/proc/self/fd")) <= len(before)


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OpenError, match="file/cache: Not a directory"):
        open_cache(tmp_path / "file/cache")
