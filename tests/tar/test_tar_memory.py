"""Members are read into memory that the process keeps, not into newly zeroed pages."""

import os
import subprocess
import sys

import pytest
from tar_corpus import pack

from tarshards import build_index
from tarshards.tar.read import END

SIZE, COUNT = 1_000_000, 30
READ = """
import sys
from resource import RUSAGE_SELF, getrusage
from tarshards import IndexedShards, Stream, read_samples
way, path = sys.argv[1:]
for epoch in range(4):
    before = getrusage(RUSAGE_SELF).ru_minflt
    if way == "streamed":
        sizes = [len(sample["bin"]) for sample in read_samples(path)]
    elif way == "planned":
        sizes = [len(sample["bin"]) for sample in Stream.from_shards(path, index=True)]
    else:  # a data loader's batch
        sizes = [len(sample["bin"]) for sample in IndexedShards(path).__getitems__(range(30))]
print(getrusage(RUSAGE_SELF).ru_minflt - before, len(sizes))
"""


def faults(path, way="streamed", **environment):
    """Return the number of pages that the last epoch, in a separate process, has zeroed."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_", "LD_PRE"))}
    command = [sys.executable, "-c", READ, way, str(path)]
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
    build_index(str(path)).save(str(path))
    return path


@pytest.mark.parametrize("way", ["streamed", "planned", "together"])
def test_pages_are_not_zeroed_for_each_large_member(path, way):
    assert faults(path, way) < 20 * COUNT  # a member has 244 pages; one fault maps 16 of a file


def test_a_threshold_of_the_environment_takes_precedence(path):
    assert faults(path, MALLOC_MMAP_THRESHOLD_=str(128 << 10)) > 100 * COUNT
