"""File systems that lack something, or fail: programs with tests/rigs/file_system.c preloaded."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Callable
from errno import EINTR, EINVAL, EIO, ENODEV, ENOMEM, ENOSYS, ENOTSUP, EPERM
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from programs import COMPILER, need

from tarshards import ShardWriter, Stream, TarWriter
from tarshards.errors import OpenError
from tarshards.storage.opening import open_url

SOURCE = Path(__file__).parents[1] / "rigs" / "file_system.c"
BIN = Path(__file__).parents[2] / "bin"
UNMAPPED = {"mmap": ENODEV, "private": ENODEV}
WARNING = (
    "set-0.tar: cannot be mapped into memory (No such device); it, and files like it, are read instead, which is slower"
)
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def library(tmp_path_factory) -> Path:
    need(COMPILER)
    path = tmp_path_factory.mktemp("rig") / "file_system.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", path, SOURCE, "-ldl"], check=True)
    return path


@pytest.fixture
def run(library, tmp_path) -> Run:
    """Run Python with arguments in the folder of the test; *faults* are errno, or errno and of how many calls one."""

    def start(faults: dict[str, Any], *arguments: Any, **options: Any) -> subprocess.CompletedProcess[str]:
        given = {call: fault if isinstance(fault, tuple) else (fault, 1) for call, fault in faults.items()}
        words = [f"{call}:{error}:{every}" for call, (error, every) in given.items()]
        preloaded = [*filter(None, [os.environ.get("LD_PRELOAD")]), str(library)]
        own = {"LD_PRELOAD": ":".join(preloaded), "FAULTS_BELOW": str(tmp_path), "FAULTS": ",".join(words)}
        command = [sys.executable, *map(str, arguments)]
        env = {**os.environ, **own}
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100, **options)

    return start


@pytest.fixture
def dataset(tmp_path) -> Path:
    with ShardWriter(str(tmp_path / "set-%d.tar"), index=True, max_samples=20) as writer:
        for i in range(50):
            sample = {"__key__": f"{i:04d}", "bin": bytes([i]) * 3000, "cls": i, "x.npy": np.full(4, i, np.float32)}
            writer.write(sample)
    return tmp_path


READING = """
import logging, sys
logging.basicConfig(format="%(message)s")
import numpy as np
from tarshards import ArrayLoader, IndexedShards, Stream, readers
urls = "set-{0..2}.tar"
shards = IndexedShards(urls)
assert [sample["__key__"] for sample in shards] == [f"{i:04d}" for i in range(50)]
assert shards[7]["bin"] == bytes([7]) * 3000 and shards["0030"]["cls"] == b"30"
assert (shards.column("x.npy")[:] == np.arange(50)[:, None]).all()
lazy = IndexedShards(urls, lazy="bin")
assert lazy[45]["bin"].read(5) == bytes([45]) * 5
fields = {"cls": readers.integer(), "x.npy": readers.array()}
loader = ArrayLoader(Stream.from_shards(urls, shuffle=True, seed=1), 8, fields=fields)
for _ in range(2):
    batches = list(loader)
    assert sorted(label for batch in batches for label in batch["cls"].tolist()) == list(range(50))
    for batch in batches:
        assert (batch["x.npy"][:, 0] == batch["cls"]).all()
        assert [int(key) for key in batch["__key__"]] == batch["cls"].tolist()
print(sum(int(sample["cls"]) for sample in Stream.from_shards(urls, shuffle=True, seed=1)))
"""


@pytest.mark.parametrize("error", [ENODEV, ENOMEM])
def test_where_no_file_can_be_mapped_files_are_read_and_one_warning_says_so(dataset, run, error):
    done = run({"mmap": error, "private": error}, "-c", READING)
    assert (done.stdout, done.returncode) == ("1225\n", 0), done.stderr
    assert done.stderr.splitlines() == [WARNING.replace(os.strerror(ENODEV), os.strerror(error))]


FORKING = """
import os, sys
from tarshards import IndexedShards
for _ in range(3):
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0
    else:
        assert len(list(IndexedShards("set-{0..2}.tar"))) == 50
        os._exit(0)
"""


def test_forked_processes_warn_once_together(dataset, run):
    done = run(UNMAPPED, "-c", FORKING)
    assert (done.returncode, done.stderr.splitlines()) == (0, [WARNING])


def test_where_no_shared_mapping_is_possible_private_ones_are_made(dataset, run):
    done = run({"mmap": ENODEV}, "-c", READING)
    assert (done.stdout, done.returncode, done.stderr) == ("1225\n", 0, "")


def test_a_mount_among_others_on_which_nothing_can_be_mapped(dataset, run, tmp_path_factory):
    """A dataset has shards on two file systems, and batches with samples of both."""
    other = tmp_path_factory.mktemp("other")
    for path in (dataset / "set-1.tar", dataset / "set-1.tar.index"):
        path.rename(other / path.name)
        path.symlink_to(other / path.name)
    done = run(UNMAPPED, "-c", READING)
    assert (done.stdout, done.returncode) == ("1225\n", 0), done.stderr
    assert done.stderr.splitlines() == [WARNING]


def test_a_file_that_cannot_be_mapped_may_shrink_or_be_replaced(dataset, run):
    code = """
import os
from tarshards import IndexedShards
shards = IndexedShards("set-{0..2}.tar")
assert shards[0]["cls"] == b"0"
os.rename("set-0.tar", "moved.tar")
assert shards[1]["cls"] == b"1"
os.truncate("moved.tar", 20000)
shards[19]
"""
    done = run(UNMAPPED, "-c", code)
    assert done.stderr.splitlines()[-1].endswith("the file has shrunk since it was opened"), done.stderr


def test_shards_that_cannot_be_mapped_do_not_take_all_descriptors(dataset, run):
    code = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
from tarshards import IndexedShards, ShardWriter
for i in range(50):
    with ShardWriter(f"many-{i:02}-%d.tar", index=True, sync=False) as writer:
        writer.write({"__key__": f"{i}", "bin": bytes(100_000)})
print(sum(len(sample["bin"]) for sample in IndexedShards("many-{00..49}-0.tar")))
"""
    done = run(UNMAPPED, "-c", code)
    assert (done.stdout, done.returncode) == ("5000000\n", 0), done.stderr


@pytest.mark.parametrize(
    "line", ["tarindex set-0.tar", "tarcat set-0.tar -o new.tar", "tarsort set-0.tar -o new.tar",
             "tarcheck set-0.tar", "tarshow set-0.tar", "tarreshard --seed 1 set-{0..2}.tar -o new-%d.tar --shards 2"]
)  # fmt: skip
def test_tools_where_nothing_can_be_mapped(dataset, run, line):
    tool, *arguments = line.split()
    done = run(UNMAPPED, BIN / tool, *arguments)
    assert done.returncode == 0, done.stderr


CALLS = ("mmap", "private", "open", "read", "pread", "write", "pwrite", "fsync", "flock", "ftruncate")
INTERRUPTED = dict.fromkeys(CALLS, (EINTR, 2))


def test_interrupted_calls_are_made_again(dataset, run):
    done = run(INTERRUPTED, "-c", READING)
    assert (done.stdout, done.returncode, done.stderr) == ("1225\n", 0, "")
    done = run(INTERRUPTED | {"private": ENODEV}, "-c", READING)
    assert (done.stdout, done.returncode) == ("1225\n", 0), done.stderr


def test_tools_whose_calls_are_interrupted(dataset, run):
    for line in ("tarindex set-0.tar set-1.tar", "tarcat set-0.tar set-1.tar -o new.tar"):
        tool, *arguments = line.split()
        done = run(INTERRUPTED, BIN / tool, *arguments)
        assert done.returncode == 0, done.stderr


WRITING = """
from tarshards import TarWriter
with TarWriter("new.tar", sync={}) as writer:
    writer.write({{"__key__": "a", "txt": "x"}})
"""


@pytest.mark.parametrize("error", [EINVAL, ENOSYS, ENOTSUP])
def test_a_file_system_that_cannot_flush_names_what_writes_all_the_same(dataset, run, error):
    done = run({"fsync": error}, "-c", WRITING.format(True))
    words = (
        f"new.tar: cannot be flushed to the disk on this file system ({os.strerror(error)}); "
        "write elsewhere, or do not wait (sync=False, --no-sync)"
    )
    assert done.stderr.splitlines()[-1].endswith(words)
    if error != EINVAL:  # the rest does not depend on the error
        return
    assert run({"fsync": error}, "-c", WRITING.format(False)).returncode == 0
    done = run({"fsync": error}, BIN / "tarcat", "set-0.tar", "-o", "cat.tar")
    assert "--no-sync" in done.stderr
    assert run({"fsync": error}, BIN / "tarcat", "set-0.tar", "-o", "cat.tar", "--no-sync").returncode == 0


def test_a_disk_that_fails_to_flush_is_another_error(run):
    done = run({"fsync": EIO}, "-c", WRITING.format(True))
    assert done.stderr.splitlines()[-1].endswith("new.tar: Input/output error")


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("mode", [0o640, 0o600, 0o444, 0o666])
def test_a_file_that_replaces_another_keeps_its_mode(tmp_path, mode):
    path = tmp_path / "a.tar"
    for _ in range(2):
        with TarWriter(path) as writer:
            writer.write({"__key__": "a", "txt": "x"})
        path.chmod(mode)
    with open_url(str(path), "wb") as stream:
        assert mode_of(next(tmp_path.glob(".a.tar.*.tmp"))) == mode, "before it has a byte"
        stream.write(b"x")
    assert mode_of(path) == mode
    link = tmp_path / "link"
    link.symlink_to(path)
    with open_url(str(link), "wb") as stream:
        stream.write(b"y")
    assert (mode_of(path), path.read_bytes(), link.is_symlink()) == (mode, b"y", True)


def test_a_new_file_has_the_mode_of_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        with open_url(str(tmp_path / "new"), "wb") as stream:
            stream.write(b"x")
    finally:
        os.umask(before)
    assert mode_of(tmp_path / "new") == 0o640


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_file_that_replaces_another_keeps_its_owner_and_group(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"x")
    os.chown(path, 1234, 4321)
    path.chmod(0o640)
    with open_url(str(path), "wb") as stream:
        stream.write(b"y")
    assert (path.stat().st_uid, path.stat().st_gid, mode_of(path)) == (1234, 4321, 0o640)


def test_where_no_owner_can_be_kept_the_group_gets_what_others_have(tmp_path, monkeypatch):
    path = tmp_path / "a"
    path.write_bytes(b"x")
    path.chmod(0o664)
    real = os.stat

    def of_another(target: Any, **options: Any) -> os.stat_result:
        found = real(target, **options)
        return os.stat_result([*found[:5], found.st_gid + 1, *found[6:]]) if str(target) == str(path) else found

    def refuse(*_: Any) -> None:
        raise PermissionError(EPERM, os.strerror(EPERM))

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", of_another)
        patch.setattr(os, "fchown", refuse)
        stream = open_url(str(path), "wb")
    with stream:
        stream.write(b"y")
    assert mode_of(path) == 0o644


@pytest.mark.parametrize("length", [240, 250, 255])
def test_a_name_as_long_as_the_file_system_allows(tmp_path, length):
    paths = [tmp_path / f"{'é' * ((length - 6) // 2)}{'x' * (length % 2)}-{i}.tar" for i in range(2)]
    for _ in range(2):
        with TarWriter(paths[0]) as first, TarWriter(paths[1]) as second:
            first.write({"__key__": "a", "txt": "x"})
            second.write({"__key__": "b", "txt": "y"})
    assert len(os.listdir(tmp_path)) == 2
    assert [sample["__key__"] for sample in Stream.from_shards(list(map(str, paths)))] == ["a", "b"]
    with pytest.raises(OpenError, match="File name too long"):
        TarWriter(tmp_path / ("x" * 256))


@pytest.mark.parametrize("faults", [{"flock": ENOTSUP}, {"link": EPERM}, {"fchmod": EPERM}], ids=str)
def test_file_systems_without_locks_links_or_modes(dataset, run, faults):
    (dataset / "new.tar").touch(0o600)
    done = run(faults, "-c", WRITING.format(True))
    assert done.returncode == 0, done.stderr
    done = run(faults, BIN / "tarindex", "set-0.tar")
    assert done.returncode == 0, done.stderr
    assert run(faults, "-c", READING).returncode == 0
