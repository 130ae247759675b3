"""Remote bytes are received into memory that is used again, and into huge pages where the system has them."""

import os
import subprocess
import sys
from mmap import PAGESIZE
from pathlib import Path

import pytest

from tarshards.storage import transfer
from tarshards.storage.transfer import HUGE, MOST_FREE, memory

COUNT = 40
TAKE = """
import sys
from resource import RUSAGE_SELF, getrusage
from tarshards.storage.transfer import memory
size, count = map(int, sys.argv[1:])
held = []
for each in range(3):
    before = getrusage(RUSAGE_SELF).ru_minflt
    for _ in range(count):
        held.append(memory(size))
        held[-1][::4096] = bytes(len(held[-1][::4096]))
        bytes(1 << 20)  # of a reader, which frees it at once
    print(getrusage(RUSAGE_SELF).ru_minflt - before)
    held.clear()
"""
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def faults(size, before=""):
    """Return the page faults of a process that takes memory, and then takes it again, twice."""
    if "glibc" not in os.confstr("CS_GNU_LIBC_VERSION"):
        pytest.skip("another malloc")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_", "LD_PRE"))}
    done = subprocess.run(
        [sys.executable, "-c", before + TAKE, str(size), str(COUNT)],
        env=kept,
        capture_output=True,
        text=True,
        check=True,
    )
    return list(map(int, done.stdout.split()))


@pytest.mark.parametrize("size", [100_000, 1_000_000, HUGE, HUGE + 100_000])
def test_memory_is_used_again(size):
    again = faults(size)[1:]
    assert max(again) < 0.3 * COUNT * size / PAGESIZE


#: Mappings lie anywhere, as those of Linux before 6.7 do.
ANYWHERE = """
import mmap
class Anywhere(mmap.mmap):
    def __new__(cls, number, size, *flags):
        return super().__new__(cls, number, size + mmap.PAGESIZE, *flags)
mmap.mmap = Anywhere
"""


@pytest.mark.parametrize("before", ["", ANYWHERE], ids=["aligned", "anywhere"])
def test_the_memory_of_a_request_is_a_huge_page(before):
    if not HUGE_PAGES.exists() or "[never]" in HUGE_PAGES.read_text():
        pytest.skip("the system has no huge pages")
    assert faults(HUGE - 50_000, before)[0] < COUNT * HUGE / PAGESIZE / 4


def pieces(count, size=HUGE):
    held = [memory(size) for _ in range(count)]
    for number, each in enumerate(held):
        each[:] = bytes([number % 251]) * size
    return held


def test_memory_in_use_is_no_other_ones_memory():
    held = pieces(MOST_FREE // 2) + pieces(3, HUGE + 5)
    parts = [each[10:20] for each in held]
    del held  # the parts still refer to it
    pieces(MOST_FREE)
    assert [part[0] for part in parts] == [*range(MOST_FREE // 2), 0, 1, 2]


def test_few_pieces_are_kept_and_not_too_many_made(monkeypatch):
    monkeypatch.setattr(transfer, "_free", free := [None] * (MOST_FREE + 3))
    monkeypatch.setattr(transfer._Piece.__del__, "__defaults__", (free, MOST_FREE))
    held = pieces(MOST_FREE + 3)
    assert not free
    held += pieces(2)  # other memory
    held.clear()
    assert (free.count(None), len(free)) == (3, MOST_FREE + 3)
    assert None not in free[3:], "those that were used are used first"
