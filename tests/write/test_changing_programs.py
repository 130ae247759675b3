"""What programs change in our shards is there, nothing else is, and the index of before is refused."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from programs import need

from tarshards import IndexedShards, ShardWriter, read_samples
from tarshards.errors import SampleError, ShardIndexError
from tarshards.index.build import build_index

SHARD = "s-0.tar"
NEW = {"x.txt": b"new"}
COUNTS = [4, 7, 119]  # their ends are one that fills a record, one that leaves most of it, and that of a large shard
TARFILE = "import sys, tarfile; archive = tarfile.open(sys.argv[1], 'a'); archive.add('x.txt'); archive.close()"


@pytest.fixture
def make(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, data in NEW.items():
        Path(name).write_bytes(data)

    def make(count: int) -> dict[str, bytes]:
        with ShardWriter("s-%d.tar") as writer:
            for i in range(count):
                writer.write({"__key__": f"s{i:03d}", "bin": bytes([i]) * 700, "cls": b"%d" % i})
        return members()

    return make


def members() -> dict[str, bytes]:
    with tarfile.open(SHARD) as archive:
        return {info.name: archive.extractfile(info).read() for info in archive if info.isreg()}


def fields(samples) -> dict[str, bytes]:
    return {f"{each['__key__']}.{name}": data for each in samples for name, data in each.items() if name[:2] != "__"}


def run(program: str, *command: str) -> None:
    need(*[program] * (program != "tarfile"))
    subprocess.run(command, check=True, capture_output=True)


DELETE = {
    "GNU tar": ["tar", "--delete", "-f", SHARD],
    "7zz": ["7zz", "d", SHARD],
}
APPEND = {
    "GNU tar": ["tar", "-rf", SHARD, *NEW],
    "GNU tar -u": ["tar", "-uf", SHARD, *NEW],
    "GNU tar -b1": ["tar", "-b1", "-rf", SHARD, *NEW],
    "GNU tar -A": ["tar", "-Af", SHARD, "other.tar"],
    "bsdtar": ["bsdtar", "-rf", SHARD, *NEW],
    "bsdtar -u": ["bsdtar", "-uf", SHARD, *NEW],
    "tarfile": [sys.executable, "-c", TARFILE, SHARD],
    "7zz": ["7zz", "a", SHARD, *NEW],
}


def check(wanted: dict[str, bytes]) -> None:
    """Compare what a shard holds with *wanted*, by tarfile and by our readers, without an index and with a new one."""
    assert members() == fields(read_samples(SHARD)) == wanted
    with pytest.raises(ShardIndexError, match="stale"):
        fields(IndexedShards(SHARD))
    build_index(SHARD).save(SHARD)
    assert fields(IndexedShards(SHARD)) == wanted


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("program", DELETE)
def test_deleted_members(make, program, count):
    """GNU tar lost members of archives that did not end with a record, and its exit code was 0."""
    wanted = make(count)
    for gone in (["s001.bin"], ["s000.bin", "s000.cls"], [f"s{count - 1:03d}.bin", f"s{count - 1:03d}.cls"]):
        run(program, *DELETE[program], *gone)
        wanted = {name: data for name, data in wanted.items() if name not in gone}
        check(wanted)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("program", APPEND)
def test_appended_members(make, program, count):
    with tarfile.open("other.tar", "w") as archive:
        archive.add("x.txt")
    wanted = make(count)
    run(" ".join(program.split()[: 1 + program.startswith("GNU")]), *APPEND[program])
    check(wanted | NEW)


def test_a_member_that_tar_updates_follows_the_others(make):
    """tar -u appends a newer file of the same name; only the last one would be extracted."""
    need("GNU tar")
    make(7)
    Path("s000.bin").write_bytes(b"newer")
    run("GNU tar", "tar", "-uf", SHARD, "s000.bin")
    assert members()["s000.bin"] == b"newer"
    with pytest.raises(SampleError, match="s000: members of this key are not adjacent"):
        fields(read_samples(SHARD))
    with pytest.raises(ShardIndexError, match="stale"):
        fields(IndexedShards(SHARD))


def test_a_renamed_member(make):
    wanted = make(7)
    run("7zz", "7zz", "rn", SHARD, "s001.bin", "s001.raw")
    wanted["s001.raw"] = wanted.pop("s001.bin")
    check(wanted)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("program", ["tar", "bsdtar", "7zz"])
def test_extracted_members_are_those_of_the_shard(make, program, count):
    wanted = make(count)
    Path("out").mkdir()
    command = ["7zz", "x", "-oout", SHARD] if program == "7zz" else [program, "-xf", SHARD, "-C", "out"]
    run("GNU tar" if program == "tar" else program, *command)
    assert {path.name: path.read_bytes() for path in Path("out").iterdir()} == wanted
    run("GNU tar", "tar", "--compare", "--file", SHARD, "--directory", "out")
    run("7zz", "7zz", "t", SHARD)


@pytest.mark.parametrize("count", COUNTS)
def test_what_tar_writes_from_a_shard_is_one(make, count):
    """bsdtar copies members from archive to archive."""
    wanted = make(count)
    run("bsdtar", "bsdtar", "-cf", "copy.tar", f"@{SHARD}", *NEW)
    Path("copy.tar").replace(SHARD)
    check(wanted | NEW)
