"""The kernel copies large members of plain local files: the same bytes, errors and counts as when they are read."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import tempfile
from pathlib import Path

import pytest
from programs import need

from tarshards import TarWriter, read_samples
from tarshards.cli import tarcat, tarsplit
from tarshards.errors import OpenError, TarError
from tarshards.index.sidecar import Index
from tarshards.storage import streams
from tarshards.storage.opening import open_url
from tarshards.storage.streams import PIECE, FileRange
from tarshards.tar.read import BLOCK, end_of, padding

SIZES = [3 * PIECE, PIECE + 1, 200_000, 1000, 2 * PIECE, 70_000]  # of the large fields


def data_of(number: int, size: int) -> bytes:
    return bytes([number]) + os.urandom(size - 1)


@pytest.fixture
def shard(tmp_path) -> Path:
    path = tmp_path / "in.tar"
    with TarWriter(path) as writer:
        for number, size in enumerate(SIZES):
            writer.write({"__key__": f"{number:03d}", "bin": data_of(number, size), "cls": number})
    return path


@pytest.fixture
def foreign(tmp_path, shard) -> Path:
    """The same samples as GNU tar writes them, with other headers, and other fields first."""
    need("GNU tar")
    folder = tmp_path / "tree"
    folder.mkdir()
    names = []
    for sample in read_samples(shard):
        for field in ("cls", "bin"):
            names.append(f"{sample['__key__']}.{field}")
            (folder / names[-1]).write_bytes(sample[field])
    subprocess.run(["tar", "-cf", tmp_path / "foreign.tar", "-C", folder, *names], check=True)
    return tmp_path / "foreign.tar"


@pytest.fixture
def run(path_with_tools):
    """Return a function that runs a shell line, in which TARCAT, TARSORT and TARSPLIT are the tools, with -q."""
    environment = {**os.environ, "PATH": path_with_tools}

    def run(line: str, folder: Path) -> subprocess.CompletedProcess[bytes]:
        line = re.sub("TAR[A-Z]+", lambda tool: f"{tool[0].lower()} -q", line)
        command = ["bash", "-c", f"set -o pipefail; {line}"]
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True)

    return run


@pytest.fixture
def copied(monkeypatch) -> list[int]:
    """The numbers of bytes that the system copied at once."""
    counts: list[int] = []

    def counting(copy):
        def call(*arguments):
            count = copy(*arguments)
            counts.append(count)
            return count

        return call

    monkeypatch.setattr(streams, "_COPIES", [counting(copy) for copy in streams._COPIES])
    return counts


def cat(*arguments: str | Path) -> None:
    tarcat.main.main(["-q", *map(str, arguments)], standalone_mode=False)


def test_members_that_follow_one_another_are_copied_together(shard, tmp_path, copied):
    cat(shard, "-o", tmp_path / "out.tar")
    assert (tmp_path / "out.tar").read_bytes() == shard.read_bytes()
    first, rest = copied  # up to a multiple of 64 KiB, and what follows
    assert first < 1 << 16
    assert rest > sum(SIZES[:5]) - first


def test_a_copy_has_our_headers_and_the_order_of_fields(foreign, shard, tmp_path, copied):
    cat(foreign, "-o", tmp_path / "out.tar")
    assert (tmp_path / "out.tar").read_bytes() == shard.read_bytes()
    assert sum(copied) >= SIZES[0] + SIZES[1]


def test_splitting_copies_too(shard, tmp_path, copied):
    options = ["-q", "-n", "4", "-o", f"{tmp_path}/part-%03d.tar", "--index"]
    tarsplit.main.main([*options, str(shard)], standalone_mode=False)
    parts = [tmp_path / f"part-{number:03d}.tar" for number in range(2)]
    packed = b"".join(part.read_bytes()[: Index.load(part).end] for part in parts)
    assert packed + end_of(len(packed)) == shard.read_bytes()
    assert len(copied) == 4  # two for each shard, the first up to a multiple of 64 KiB


# Another file system than that of tmp_path.
ELSEWHERE = "/var/tmp" if tempfile.gettempdir() == "/dev/shm" else "/dev/shm"

LINES = {
    "file": "TARCAT in.tar >out.tar",
    "named": "TARCAT in.tar -o out.tar",
    "pipe": "TARCAT in.tar | cat >out.tar",
    "appended": "TARCAT in.tar >>out.tar",
    "stdin": "TARCAT <in.tar >out.tar",
    "not from its beginning": "(cat one; cat in.tar) >two; (head -c 3 >/dev/null; TARCAT) <two >out.tar",
    "read from a pipe": "cat in.tar | TARCAT >out.tar",
    "skipping": "TARCAT in.tar --skip 0 --slice 0: -f '*' >out.tar",
    "shuffled": "TARCAT in.tar --shuffle 1 >out.tar",
    "shuffled and sorted": "TARCAT in.tar --shuffle 9 | TARSORT >out.tar",
    "interleaved": "TARCAT in.tar --interleave 2 >out.tar",
    "compressed": "TARCAT in.tar -o c.tar.gz && gzip -dc c.tar.gz >out.tar",
    "split by a field": "TARSPLIT in.tar --by cls -o 's-{cls}-%d.tar' && TARCAT 's-{0..5}-0.tar' >out.tar",
    "another file system": f"TARCAT in.tar >{ELSEWHERE}/$$.tar; mv {ELSEWHERE}/$$.tar out.tar",
}


@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_wherever_it_goes_and_comes_from_the_bytes_are_the_same(shard, line, run):
    (shard.parent / "one").write_bytes(b"abc")
    done = run(line, shard.parent)
    assert (done.returncode, done.stderr) == (0, b"")
    assert (shard.parent / "out.tar").read_bytes() == shard.read_bytes()


@pytest.mark.parametrize("reader", ["tar", "bsdtar"])
def test_other_programs_extract_what_was_put_in(foreign, tmp_path, reader, run):
    need("GNU tar" if reader == "tar" else reader)
    (tmp_path / "x").mkdir()
    done = run(f"TARCAT foreign.tar | {reader} -xf - -C x && diff -r tree x", tmp_path)
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EBADF, errno.EIO])
@pytest.mark.parametrize("after", [0, 100_000])
def test_what_the_system_does_not_copy_is_read_and_written(monkeypatch, shard, tmp_path, number, after):
    left = after

    def copy(output, descriptor, offset, size):
        nonlocal left
        if not left:
            raise OSError(number, os.strerror(number))
        size, left = min(size, left), 0
        return os.write(output, os.pread(descriptor, size, offset))

    monkeypatch.setattr(streams, "_COPIES", [copy])
    cat(shard, "-o", tmp_path / "out.tar")
    assert (tmp_path / "out.tar").read_bytes() == shard.read_bytes()


def test_short_copies_go_on(monkeypatch, shard, tmp_path):
    def copy(output, descriptor, offset, size):
        return os.write(output, os.pread(descriptor, min(size, 70_001), offset))

    monkeypatch.setattr(streams, "_COPIES", [copy])
    cat(shard, "-o", tmp_path / "out.tar")
    assert (tmp_path / "out.tar").read_bytes() == shard.read_bytes()


def test_a_file_that_shrinks_meanwhile_is_an_error_that_names_it(tmp_path):
    (tmp_path / "a").write_bytes(bytes(1000))
    with open(tmp_path / "a", "rb", buffering=0) as file:
        output = open_url(tmp_path / "b", "wb")
        output.copy(FileRange(file.fileno(), "a.tar", 500, 500))
        os.truncate(tmp_path / "a", 700)
        with pytest.raises(OpenError) as caught:
            output.close()
    assert str(caught.value) == "a.tar: offset 700: the file has shrunk since it was opened"
    assert os.listdir(tmp_path) == ["a"]


def test_bytes_that_differ_from_those_between_are_written(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * 30)
    with open(tmp_path / "a", "rb", buffering=0) as file, open_url(tmp_path / "b", "wb") as output:
        for between in (b"x" * 5, b"x" * 4 + b"y", b"", b"x" * 6):
            output.copy(FileRange(file.fileno(), "a", 0, 10))
            output.write(between)
            output.copy(FileRange(file.fileno(), "a", 15, 10))
    expected = b"".join(b"x" * 10 + between + b"x" * 10 for between in (b"x" * 5, b"xxxxy", b"", b"x" * 6))
    assert (tmp_path / "b").read_bytes() == expected


@pytest.mark.parametrize("cut", [BLOCK + 1, BLOCK + 3 * PIECE - 1])
def test_a_sample_that_is_cut_is_not_delivered(shard, tmp_path, cut, run):
    (whole,) = re.finditer(rb"004\.bin\0", shard.read_bytes())
    data = shard.read_bytes()[: whole.start() + (cut if cut < PIECE else BLOCK + SIZES[4] - 1)]
    (tmp_path / "cut.tar").write_bytes(data)
    with pytest.raises(TarError) as caught:
        cat(tmp_path / "cut.tar", "-o", tmp_path / "out.tar")
    assert (caught.value.offset, caught.value.reason) == (whole.start(), "truncated in this member")
    assert not (tmp_path / "out.tar").exists()
    done = run("TARCAT cut.tar --on-error skip >out.tar; cat cut.tar | TARCAT --on-error skip >piped.tar", tmp_path)
    assert done.returncode == 0
    assert [sample["__key__"] for sample in read_samples(tmp_path / "out.tar")] == ["000", "001", "002"]
    assert (tmp_path / "out.tar").read_bytes() == (tmp_path / "piped.tar").read_bytes()


def test_damage_behind_a_large_member_is_found(shard, tmp_path):
    data = bytearray(shard.read_bytes())
    header = BLOCK + SIZES[0] + padding(SIZES[0])
    data[header + 10] ^= 1
    (tmp_path / "bad.tar").write_bytes(data)
    with pytest.raises(TarError) as caught:
        cat(tmp_path / "bad.tar", "-o", tmp_path / "out.tar")
    assert (caught.value.offset, caught.value.reason) == (header, "bad header checksum")


def test_a_reader_that_goes_away_ends_it_quietly(shard, run):
    done = run("TARCAT in.tar | head -c 1000000 >/dev/null; echo ${PIPESTATUS[0]}", shard.parent)
    assert (done.stdout, done.stderr) == (b"141\n", b"")


def test_a_full_device_is_named(shard, run):
    done = run("TARCAT in.tar >/dev/full", shard.parent)
    assert done.returncode == 1
    assert done.stderr == b"tarcat: -: No space left on device\n"


def test_a_file_that_may_grow_no_more_leaves_nothing(shard, run):
    done = run("ulimit -f 1000; TARCAT in.tar -o out.tar", shard.parent)
    assert done.returncode == 1
    assert b"out.tar: File too large" in done.stderr
    assert os.listdir(shard.parent) == ["in.tar"]


@pytest.mark.parametrize(
    ("module", "name", "most"), [(streams, "AT_ONCE", 1), (streams, "AT_ONCE", 10**6), (streams, "PIECE", 600)]
)
def test_runs_end_where_they_are_long_or_much_is_between(monkeypatch, shard, tmp_path, copied, module, name, most):
    monkeypatch.setattr(module, name, most)
    cat(shard, "-o", tmp_path / "out.tar")
    assert (tmp_path / "out.tar").read_bytes() == shard.read_bytes()
    assert len(copied) > 1
