"""Mapped shards that are truncated while they are in use: what reads them raises or has a copy, and no process dies."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from programs import load_kernel

from tarshards import ShardWriter

# Each case runs in a separate child process, so that a crash is detected.
PROGRAM = """
import json, os, sys, traceback
import numpy as np
from tarshards import IndexedShards, ShardWriter, Stream
from tarshards.errors import OpenError, ShardIndexError, TarError
from tarshards.index.build import build_index
from tarshards.index.mapped_fields import MappedFields
from tarshards.samples.fields import parse_terms
from tarshards.storage.location import Location

def shrink(known=False):
    # Truncate the shard; unless *known*, restore its times, so that only the missing bytes reveal the truncation.
    status = os.stat(path)
    os.truncate(path, 4096)
    if not known:
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

def cut_within(number, cut=1):
    # Truncate the shard in the page in which the data of a sample's last member end, *cut* bytes before that end.
    index = shards.shards.index(0)
    begin, size = index.data_range(index.table.span(number)[1] - 1)
    end = begin + size
    size = end - cut
    assert end - 1 - (end - 1) % 4096 <= size
    status = os.stat(path)
    os.truncate(path, size)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

def last_fields(number):
    return {"txt": b"t" * 600, "cls": str(number).encode()}

def fails(function):
    # Return what the OpenError says that *function* raises.
    try:
        value = function()
    except (OpenError, TarError) as error:
        assert path in str(error) and "\\n" not in str(error), error
        return True
    return value

for number, case in enumerate(json.loads(sys.argv[2])):
    if os.fork() == 0:
        path = f"{sys.argv[1]}/{number}/set-0.tar"
        shards = IndexedShards(path)
        try:
            exec(case, globals())
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.wait()[1]))
"""

CASES = {
    "a slice that is held": """
rows = shards.column("x.npy")[3:30:2]
before = rows.copy()
shrink(known=True)
assert (rows == before).all() and len(rows) == 14
""",
    "a row that is held": """
row = shards.column("x.npy")[30]
total = row.sum()
shrink(known=True)
assert row.sum() == total
""",
    "a slice, a row, several and all": """
column = shards.column("x.npy")
column[0]
shrink()
for index in slice(3, 30), slice(30, 3, -1), 39, [5, 39]:
    assert fails(lambda: column[index]) is True, index
assert fails(lambda: np.asarray(column)) is True
""",
    "a slice, known to be truncated": """
column = shards.column("x.npy")
column[0]
shrink(known=True)
assert fails(lambda: column[:]) is True
""",
    "the .npy headers of a column": """
column = shards.column("x.npy")
shard = shards.shards.open(0)
shard.find_stale(np.arange(len(shard.index.size)))  # all have been compared
shard.ranges.is_current = lambda: True  # it was, just before
shrink()
assert fails(lambda: column[0]) is True
""",
    "a sample": """
shards[0]
shrink()
for number in 20, 39, -1:
    assert fails(lambda: shards[number]) is True
assert fails(lambda: list(shards)) is True
assert fails(lambda: shards.__getitems__([1, 30])) is True
""",
    "the headers of samples": """
mapped = shards.mapped(parse_terms("txt"))
compared = mapped.find(np.zeros(4, np.int64), *2 * [np.arange(30, 34)])
shrink()
found = mapped.find(np.zeros(40, np.int64), *2 * [np.arange(40)])
failures = found.check()
assert len(failures) > 30 and all(isinstance(error, OpenError) for error in failures.values()), failures
assert compared.check() == {}  # as they were
for number in range(4):
    try:
        next(iter(compared.columns.values()))[number]
    except OSError:
        continue
    raise AssertionError(number)
""",
    "an index": """
with ShardWriter(f"{sys.argv[1]}/{number}/large-%d.tar", index=True) as writer:
    for sample in range(1000):
        writer.write({"__key__": f"{sample:04d}", "txt": "t"})
shards = IndexedShards(f"{sys.argv[1]}/{number}/large-0.tar")
mapped = shards.mapped(parse_terms("txt"))
before = mapped.find(np.zeros(2, np.int64), *2 * [np.array([5, 999])])
index = f"{sys.argv[1]}/{number}/large-0.tar.index"
os.truncate(index, 100)
after = mapped.find(np.zeros(2, np.int64), *2 * [np.array([5, 999])])
assert before.check() == {}  # compared when they were found
assert len(after.failures) == 2
assert all(isinstance(error, ShardIndexError) and index in str(error) for error in after.failures.values())
try:
    list(before.keys)
except ShardIndexError as error:
    assert index in str(error)
else:
    raise AssertionError
""",
    "a sample in the page in which the shard ends now": """
before = [dict(sample) for sample in shards]
streams = [Stream.from_shards(path), Stream.from_shards(path, shuffle=True)]
[next(iter(stream)) for stream in streams]
cut_within(20, 1)
assert shards[19] == before[19]
for read in (
    lambda: shards[20],
    lambda: list(shards),
    lambda: shards.__getitems__([1, 20]),
    lambda: list(streams[0]),
    lambda: list(streams[1]),
):
    assert fails(read) is True
assert fails(lambda: shards[20]) is True
""",
    "a lazy field in the page in which the shard ends now": """
shards = IndexedShards(path, lazy="txt")
files = [shards[number]["txt"] for number in range(40)]
read = [bytes(file) for file in files[:20]]
cut_within(20, 1)
assert fails(lambda: bytes(files[20])) is True
assert fails(lambda: files[20].read(600)) is True
""",
    "rows of arrays in the page in which the shard ends now": """
column = shards.column("x.npy")
column[0]
shard = shards.shards.open(0)
begin, size = shard.index.data_range(shard.index.members_of("x.npy")[20])
shard.ranges.verify = lambda: None  # it was not written to, just before
os.truncate(path, begin + size - 7)
assert (column[19] == 19).all()
assert fails(lambda: column[20]) is True
assert fails(lambda: column[10:21]) is True
""",
    "an index, within its last page": """
with ShardWriter(f"{sys.argv[1]}/{number}/large-%d.tar", index=True) as writer:
    for sample in range(1000):
        writer.write({"__key__": f"{sample:04d}", "txt": "t"})
shards = IndexedShards(f"{sys.argv[1]}/{number}/large-0.tar")
mapped = shards.mapped(parse_terms("txt"))
every = np.zeros(1000, np.int64), *2 * [np.arange(1000)]
assert mapped.find(*every).check() == {}
index = f"{sys.argv[1]}/{number}/large-0.tar.index"
os.truncate(index, os.path.getsize(index) - 100)
found = mapped.find(*every)
assert len(found.failures) == 1000  # which of them lie beyond the end is not known
for error in found.failures.values():
    assert isinstance(error, ShardIndexError) and index in str(error) and "truncated" in str(error), error
for function in lambda: shards[999], lambda: list(shards), lambda: shards.shards.index(0).key(3):
    try:
        function()
    except (OpenError, ShardIndexError, OSError) as error:
        assert "shrunk" in str(error), error
    else:
        raise AssertionError
""",
    "pages that are read ahead": """
from tarshards.index.readahead import LocalReadahead
opened = shards.shards.use(0)
shrink()
LocalReadahead(shards.shards, iter(()))._touch(opened)
""",
    "what is read of a shard in any order": """
ranges = Location.of(path).ranges()
shrink()
assert fails(lambda: ranges.read(20_000, 10)) is True
""",
    "the checksums of an index that is built": """
from tarshards.index import build
index = build_index(path)
opened = Location.of(path).ranges()
shrink()
assert fails(lambda: list(build._checksums(opened, index))) is True
""",
    "batches for DALI, and one that is held": """
from tarshards.loaders.dali.external_source import batch_source
source = iter(batch_source(Stream.from_shards(path), 8, fields="txt cls x.npy"))
held = next(source)
before = [np.array(column) for column in held]
shrink()
assert all((np.array(column) == old).all() for column, old in zip(held, before))
assert fails(lambda: list(source)) is True
""",
}

MAPPED = (
    "an index, within its last page",
    "rows of arrays in the page in which the shard ends now",
    "the .npy headers of a column",
    "the headers of samples",
    "an index",
    "pages that are read ahead",
)


@pytest.fixture(scope="module")
def codes(tmp_path_factory):
    """How the process of each case ended."""
    folder = tmp_path_factory.mktemp("cases")
    for number in range(len(CASES)):
        (folder / str(number)).mkdir()
        with ShardWriter(str(folder / str(number) / "set-%d.tar"), index=True) as writer:
            for sample in range(40):
                fields = {"x.npy": np.full(100, sample), "txt": "t" * 600, "cls": sample}
                writer.write({"__key__": f"{sample:03d}", **fields})
    command = [sys.executable, "-c", PROGRAM, str(folder), json.dumps(list(CASES.values()))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    print(done.stderr)
    return dict(zip(CASES, map(int, done.stdout.split()), strict=True))


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.interop if "DALI" in case else ()) for case in CASES]
)
def test_no_process_dies(codes, case):
    if case in MAPPED:
        load_kernel("tarshards.kernels._mapped")
    assert codes[case] == 0
