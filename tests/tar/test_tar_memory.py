"""Large members are read into memory that the process keeps, not into newly zeroed pages."""

import io
import os
import subprocess
import sys

import pytest
from tar_corpus import pack

from tarshards.tar.read import END, read_members

SIZE, COUNT = 1_000_000, 30
READ = """
import sys
from resource import RUSAGE_SELF, getrusage
from tarshards import read_samples
for epoch in range(2):
    before = getrusage(RUSAGE_SELF).ru_minflt
    sizes = [len(sample["bin"]) for sample in read_samples(sys.argv[1])]
print(getrusage(RUSAGE_SELF).ru_minflt - before, len(sizes))
"""


def faults(path, **environment):
    """Return the number of pages that the second epoch, in a separate process, has zeroed."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_", "LD_PRE"))}
    command = [sys.executable, "-c", READ, str(path)]
    done = subprocess.run(command, env=kept | environment, capture_output=True, text=True, check=True)
    pages, samples = map(int, done.stdout.split())
    assert samples == COUNT
    return pages


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    if "glibc" not in os.confstr("CS_GNU_LIBC_VERSION"):
        pytest.skip("another malloc")
    path = tmp_path_factory.mktemp("large") / "a.tar"
    path.write_bytes(pack([(f"{i:03d}.bin", bytes(SIZE + 1000 * i)) for i in range(COUNT)]) + END)
    return path


def test_pages_are_not_zeroed_for_each_large_member(path):
    assert faults(path) < 20 * COUNT  # a member has 244 pages


def test_a_threshold_of_the_environment_takes_precedence(path):
    assert faults(path, MALLOC_MMAP_THRESHOLD_=str(128 << 10)) > 100 * COUNT


class Small(io.BytesIO):
    """A file whose large members do not fit into memory."""

    def read(self, size=-1):
        if size > 300_000 and self.tell():
            raise MemoryError
        return super().read(min(size, 1 << 16))


def test_a_member_that_does_not_fit_into_memory_is_named():
    archive = Small(pack([("a.txt", b"x"), ("b.bin", bytes(900_000))]) + END)
    members = read_members(archive, url="u.tar")
    assert next(members).name == "a.txt"
    with pytest.raises(MemoryError, match=r"^u\.tar: offset 1024: b\.bin, 900,000 bytes, does not fit into memory$"):
        next(members)
