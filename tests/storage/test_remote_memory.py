"""Remote bytes are received into memory that is used again."""

import os
import subprocess
import sys
from mmap import PAGESIZE

import pytest

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


def faults(size):
    """Return the page faults of a process that takes memory, and then takes it again, twice."""
    if "glibc" not in os.confstr("CS_GNU_LIBC_VERSION"):
        pytest.skip("another malloc")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_", "LD_PRE"))}
    done = subprocess.run(
        [sys.executable, "-c", TAKE, str(size), str(COUNT)], env=kept, capture_output=True, text=True, check=True
    )
    return list(map(int, done.stdout.split()))


@pytest.mark.parametrize("size", [100_000, 300_000])
def test_memory_is_used_again(size):
    again = faults(size)[1:]
    assert max(again) < 0.3 * COUNT * size / PAGESIZE
