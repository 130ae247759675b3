"""Files mapped into memory, and what happens when they shrink."""

from __future__ import annotations

import itertools
import mmap
import os
import random
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress

import numpy as np
import pytest
from forked import in_child
from leftovers import Leftovers
from programs import load_kernel
from soak import rounds
from with_torch import needs_torch

from tarshards import ShardWriter

SIZE = 1 << 20


@pytest.fixture
def mapping_type(mapped):
    return mapped.Mapping


@pytest.fixture
def path(tmp_path) -> str:
    (tmp_path / "file").write_bytes(os.urandom(SIZE))
    return str(tmp_path / "file")


def test_reads_what_is_in_the_file(mapping_type, path):
    with open(path, "rb") as file:
        data = file.read()
    for mapping in mapping_type(path), mapping_type(path, SIZE):
        assert len(mapping) == SIZE
        for offset, size in ((0, 0), (0, 1), (5, 100), (7, 70_000), (0, SIZE), (SIZE - 1, 1), (SIZE, 0)):
            assert mapping.read(offset, size) == data[offset : offset + size]


def test_what_is_dropped_leaves_memory_and_reads_as_before(mapping_type, path):
    mapping = mapping_type(path)
    with open(path, "rb") as file:
        data = file.read()
    assert mapping.read(0, SIZE) == data
    mapping.drop(5000, SIZE - 5000)
    with open("/proc/self/smaps") as file:
        resident = re.findall(rf"{path}\n(?:.*\n)*?Rss: +(\d+) kB", file.read())
    assert [int(size) <= 8 for size in resident] in ([], [True])  # the twin in Python maps nothing
    assert mapping.read(0, SIZE) == data
    mapping.drop(SIZE, 0)
    for place in ((-1, 1), (0, -1), (0, SIZE + 1), (SIZE, 1)):
        with pytest.raises(ValueError, match="bytes at offset"):
            mapping.drop(*place)


@pytest.mark.parametrize("change", ["written", "removed", "replaced"])
@pytest.mark.parametrize("is_held", [False, True])
def test_is_not_current_after_a_change_before_or_after_it_is_held_open(mapping_type, path, tmp_path, change, is_held):
    mapping = mapping_type(path)
    (tmp_path / "other").write_bytes(bytes(SIZE))
    if is_held:
        mapping.hold_open()
        mapping.hold_open()
        assert mapping.is_current()
    if change == "written":
        then = os.stat(path).st_mtime_ns
        with open(path, "r+b") as file:
            file.write(b"?")
        os.utime(path, ns=(then, then + 1))
    elif change == "removed":
        os.unlink(path)
    else:
        os.replace(tmp_path / "other", path)
    assert not mapping.is_current()
    mapping.hold_open()
    assert not mapping.is_current()


def test_is_current_until_its_path_is_of_another_file_or_written_to(mapping_type, path, tmp_path):
    mapping = mapping_type(path)
    assert mapping.is_current()
    status = os.stat(path)
    with open(path, "r+b") as file:
        file.write(b"?")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert not mapping.is_current()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert mapping.is_current()
    os.rename(path, tmp_path / "moved")
    assert not mapping.is_current()
    (tmp_path / "file").write_bytes(b"?" * SIZE)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert not mapping.is_current()


@pytest.mark.parametrize("is_held", [False, True])
def test_is_not_current_once_it_is_shorter_though_its_time_is_as_it_was(mapping_type, path, is_held):
    """Linux sets the size, fills the last page with zeros, and sets the time last."""
    mapping, status = mapping_type(path), os.stat(path)
    if is_held:
        mapping.hold_open()
    os.truncate(path, SIZE - 1)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert not mapping.is_current()


@pytest.mark.parametrize("place", [(-1, 1), (0, -1), (SIZE, 1), (0, SIZE + 1), (2**62, 2**62), (1, 2**63 - 1)])
def test_refuses_places_outside(mapping_type, path, place):
    with pytest.raises(ValueError, match="bytes at offset"):
        mapping_type(path).read(*place)


@pytest.mark.parametrize("arguments", [(), (1,), (1, 2, 3), ("a", 1), (None, 1), (1.0, 1)])
def test_refuses_other_arguments(mapping_type, path, arguments):
    with pytest.raises(TypeError):
        mapping_type(path).read(*arguments)


def test_an_empty_file(mapping_type, tmp_path):
    (tmp_path / "empty").touch()
    mapping = mapping_type(tmp_path / "empty")
    assert (len(mapping), mapping.read(0, 0)) == (0, b"")
    with pytest.raises(ValueError, match="1 bytes at offset 0 of 0"):
        mapping.read(0, 1)


def test_what_is_no_file(mapping_type, tmp_path):
    with pytest.raises(FileNotFoundError):
        mapping_type(tmp_path / "nobody")
    with pytest.raises(OSError, match=r"directory|No such device"):
        mapping_type(tmp_path)


def test_it_stays_when_the_file_is_removed_or_replaced(mapping_type, path):
    mapping = mapping_type(path)
    before = mapping.read(0, SIZE)
    with open(f"{path}.new", "wb") as file:
        file.write(b"new")
    os.replace(f"{path}.new", path)
    assert mapping.read(0, SIZE) == before
    os.unlink(path)
    assert mapping.read(0, SIZE) == before


@pytest.mark.parametrize("size", [10, SIZE // 2])
def test_a_file_that_shrinks_is_an_error(mapping_type, path, size):
    mapping = mapping_type(path)
    os.truncate(path, 5000)
    for _ in range(3):
        with pytest.raises(OSError, match="the file has shrunk since it was opened"):
            mapping.read(SIZE // 2, size)
    os.truncate(path, SIZE)
    assert mapping.read(SIZE // 2, size) == bytes(size), "it can be read again when it is as long as it was"


def tail_of(kind: str) -> bytes:
    """The end of a file from the middle of its last page but one."""
    return {"random": os.urandom(5000), "zeros": bytes(5000), "zeros at the end": os.urandom(3000) + bytes(2000)}[kind]


@pytest.mark.parametrize("kind", ["random", "zeros", "zeros at the end"])
@pytest.mark.parametrize("change", ["", "removed", "replaced", "renamed"])
def test_a_file_that_shrinks_within_a_page_is_an_error_where_bytes_are_gone(mapping_type, tmp_path, kind, change):
    whole = os.urandom(3 * 4096) + os.urandom(4096 - 904) + tail_of(kind)
    for size in range(0, len(whole), 600):
        path = tmp_path / f"{size}"
        path.write_bytes(whole)
        mapping = mapping_type(path)
        with open(path, "r+b") as file:
            if change == "removed":
                path.unlink()
            elif change == "replaced":
                (tmp_path / "new").write_bytes(whole)
                (tmp_path / "new").replace(path)
            elif change == "renamed":
                path.rename(tmp_path / "old")
            file.truncate(size)
            for begin, end in itertools.pairwise([0, 100, 4096, 5000, *range(8192, len(whole), 512), len(whole)]):
                sure = size if not change else size // mmap.PAGESIZE * mmap.PAGESIZE  # nothing has its size
                with suppress(OSError) if end > sure else nullcontext():
                    for one in (
                        mapping.kernel,
                        mapping.twin,
                    ):  # the kernel gives zeros that were zeros, and the twin none
                        assert one.read(begin, end - begin) == whole[begin:end], (size, begin, end)


def test_a_mapping_answers_the_same_whatever_happens_to_its_file(mapped, tmp_path):
    path = str(tmp_path / "file")
    for seed in range(rounds(150)):
        rng = random.Random(seed)
        size = rng.choice([0, 1, 4096, 10_000, 20_000])
        with open(path, "wb") as file:
            file.write(rng.randbytes(size))
        mapping, is_changed = mapped.Mapping(path), False
        assert mapping.unmapped == 0
        assert mapping.modified == os.stat(path).st_mtime_ns
        for _ in range(20):
            change = rng.choice(["none", "none", "none", "hold", "time", "write", "truncate", "grow", "replace"])
            if change == "hold":
                mapping.hold_open()
            elif change == "time":
                os.utime(path, ns=(0, rng.choice([0, mapping.modified])))
            elif change == "write":
                with open(path, "r+b") as file:
                    file.write(rng.randbytes(min(100, os.path.getsize(path))))
            elif change == "truncate":
                os.truncate(path, rng.randrange(os.path.getsize(path) + 1) // 4096 * 4096)
            elif change == "grow":
                os.truncate(path, size + rng.randrange(2))
            elif change == "replace" and not is_changed:  # the kernel does not know the size of a file without a path
                (tmp_path / "other").write_bytes(rng.randbytes(size))
                os.replace(tmp_path / "other", path)
            is_changed |= change in ("write", "truncate", "grow")
            offset, length = (
                rng.choice([-1, 0, 1, rng.randrange(size + 2)]),
                rng.choice([-1, 0, 1, rng.randrange(size + 2)]),
            )
            for call in mapping.read, mapping.drop:
                with suppress(OSError, ValueError):
                    call(offset, length)
            with suppress(OSError):
                mapping.check(rng.randrange(size + 1))
            mapping.scatter(rng.random() < 0.5)
            mapping.is_current()
            mapping.was_written()


def test_what_is_checked_after_a_copy(mapping_type, path):
    mapping = mapping_type(path)
    mapping.check(SIZE)
    os.truncate(path, SIZE - 300)
    mapping.check(SIZE - 300)
    mapping.check(0)
    for _ in range(2):
        with pytest.raises(OSError, match="the file has shrunk since it was opened"):
            mapping.check(SIZE - 299)


READING = """
import mmap, os, random, resource, sys, threading, time
import numpy as np
from tarshards import IndexedShards
from tarshards.samples.payloads import Payloads
from tarshards.storage.ranges import Mapping

path, way = sys.argv[1:]
if way == "fill":
    shards = IndexedShards(path)
    shards.shards.scatter(True)
    read, count = shards.__getitem__, len(shards)
elif way == "read":
    mapping = Mapping(path)
    mapping.scatter(True)
    read, count = lambda number: mapping.read(number << 14, 1 << 14), len(mapping) >> 14
else:
    mapping = Mapping(path)
    mapping.scatter(True)
    count = len(mapping) >> 14
    each = np.arange(count)
    read = Payloads.within(mapping, each << 14, np.full(count, 1 << 14)).__getitem__
order = random.Random(0).sample(range(count), 200)

def evict():
    with open(path, "rb") as file:
        os.fdatasync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

def turns_of_another_thread():
    # How often it gets the GIL meanwhile, which only releasing the GIL gives it, as the interpreter switches never.
    global turns
    turns, before = 0, resource.getrusage(resource.RUSAGE_THREAD).ru_majflt
    for number in order:
        read(number)
    return turns, resource.getrusage(resource.RUSAGE_THREAD).ru_majflt - before

def take_turns():
    global turns
    while not is_over:
        turns += 1
        time.sleep(0)

turns, is_over = 0, False
sys.setswitchinterval(1000)
thread = threading.Thread(target=take_turns)
thread.start()
for _ in range(30):  # a fast disk, or a busy machine, may leave it too little time to take its turn
    evict()
    cold = turns_of_another_thread()
    if cold[0]:
        break
turns_of_another_thread()
warm = turns_of_another_thread()
is_over = True
print(*cold, *warm)
"""


@pytest.mark.parametrize("way", ["read", "fill", "rows"])
def test_small_copies_let_other_threads_run_while_they_wait_for_a_disk(disk, way):
    load_kernel("tarshards.kernels._mapped")
    path = str(disk / "set-0.tar")
    with ShardWriter(str(disk / "set-%d.tar"), index=True) as writer:
        for number in range(1000):
            writer.write({"__key__": f"{number:04d}", "bin": os.urandom(1 << 14)})
    done = subprocess.run([sys.executable, "-c", READING, path, way], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    turns, waits, turns_without_waits, waits_left = map(int, done.stdout.split())
    if waits < 150 or waits_left:
        pytest.skip("needs a file system whose pages can be dropped")
    assert turns
    assert turns_without_waits == 0


def test_nothing_stays_open(mapping_type, path):
    before = Leftovers()
    mappings = [mapping_type(path) for _ in range(20)]
    del mappings
    assert not before.files()


def test_shrinking_under_many_threads(mapped, path):
    mapping, reading, shrunk = mapped.kernel.Mapping(path), threading.Barrier(5), threading.Event()

    def work() -> list[object]:
        outcomes: list[object] = []
        for i in itertools.count():
            late = shrunk.is_set()
            try:
                outcomes.append(len(mapping.read(i * 4096 % (SIZE // 2), SIZE // 2)))
            except OSError as error:
                outcomes.append(str(error))
            if i == 0:
                reading.wait(60)
            if late:
                return outcomes
        raise AssertionError

    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(work) for _ in range(4)]
        reading.wait(60)
        os.truncate(path, 100)
        shrunk.set()
        threads = [future.result(60) for future in futures]
    for outcomes in threads:
        assert set(outcomes) <= {SIZE // 2, "the file has shrunk since it was opened"}
        assert outcomes[0] == SIZE // 2
        assert outcomes[-1] == "the file has shrunk since it was opened"


PROLOGUE = """
import faulthandler, mmap, os, signal, sys
from tarshards.kernels._mapped import Mapping
def shrink():
    mapping = Mapping(sys.argv[1])
    mapping.read(0, 10)
    os.truncate(sys.argv[1], 0)
    return mapping
def fails(mapping):
    try:
        mapping.read(100_000, 70_000)
    except OSError as error:
        return "shrunk" in str(error)
"""
CASES = {
    "faulthandler before": "faulthandler.enable(); print(fails(shrink()))",
    "faulthandler after the first read": "mapping = shrink(); faulthandler.enable(); print(fails(mapping))",
    "a forked child": """
mapping = shrink()
child = os.fork()
if child == 0:
    os._exit(0 if fails(mapping) and fails(mapping) else 1)
print(os.waitpid(child, 0)[1] == 0 and fails(mapping))
""",
    "a torch worker": """
import warnings; warnings.simplefilter("ignore")
from torch.utils.data import DataLoader
class Failing(list):
    def __getitem__(self, i):
        return fails(mapping)
mapping = shrink()
print(all(DataLoader(Failing(range(4)), num_workers=2, batch_size=None, multiprocessing_context="fork")))
""",
}


def run(code: str, path: str, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    return subprocess.run([python, "-c", PROLOGUE + code, path], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("case", [pytest.param(case, marks=needs_torch if "torch" in case else ()) for case in CASES])
def test_no_process_dies(case, path, python_with_torch):
    load_kernel("tarshards.kernels._mapped")
    done = run(CASES[case], path, python_with_torch if "torch" in case else sys.executable)
    assert (done.stdout, done.returncode) == ("True\n", 0), done.stderr


def test_another_sigbus_is_still_the_end(path):
    load_kernel("tarshards.kernels._mapped")
    code = """
mapping = shrink()
assert fails(mapping)
file = open(sys.argv[1], "r+b"); file.truncate(8192)
foreign = mmap.mmap(file.fileno(), 8192); file.truncate(0)
foreign[0]
"""
    for prefix in ("", "faulthandler.enable()\n"):
        with open(path, "wb") as file:
            file.write(bytes(SIZE))
        done = run(prefix + code, path)
        assert done.returncode == -signal.SIGBUS
        assert ("Fatal Python error: Bus error" in done.stderr) == bool(prefix)


def test_a_word_is_replaced_if_it_is_as_expected(mapped):
    replace_word = mapped.replace_word
    words = np.array([5, -1, 1 << 62])
    assert not replace_word(words, 1, 5, 7)
    assert replace_word(words, 1, -1, -(1 << 63))
    assert replace_word(words, 2, 1 << 62, 0)
    assert words.tolist() == [5, -(1 << 63), 0]
    for number in (-1, 3, 1 << 60):
        with pytest.raises(IndexError, match=f"word {number}"):
            replace_word(words, number, 5, 6)
    with pytest.raises(TypeError):
        replace_word(bytes(8), 0, 0, 1)


def test_flushing_early_is_a_hint(mapped, path):
    with open(path, "rb") as file:
        assert mapped.begin_flush(file.fileno(), 0, SIZE) is None
    assert mapped.begin_flush(-1, 0, 1) is None


@pytest.mark.forks
def test_processes_replace_a_word_one_after_the_other():
    replace_word = load_kernel("tarshards.kernels._mapped").replace_word
    word = np.frombuffer(mmap.mmap(-1, 8), np.int64)

    def count() -> bool:
        done = 0
        while done < 2000:
            before = int(word[0])
            done += replace_word(word, 0, before, before + 1)
        return True

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(in_child, [count] * 3)) == [0, 0, 0]
    assert word[0] == 6000
