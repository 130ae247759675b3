"""What only Linux has is optional: programs run where its functions, constants and /proc are missing, as on macOS."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from programs import warnings_of
from with_torch import needs_torch

import tarshards

ROOT = Path(tarshards.__file__).parents[1]
BIN = Path(__file__).parents[1] / "bin"

#: Python imports this module when it starts. `mypy --platform darwin` names the functions that macOS lacks.
MASKS = """
import builtins, fcntl, mmap, os, resource

LINUX = {
    os: "copy_file_range memfd_create pidfd_open posix_fadvise posix_fallocate sched_getaffinity waitid O_NOATIME",
    fcntl: "F_OFD_SETLK F_SETPIPE_SZ",
    mmap: "MADV_REMOVE",
    resource: "RUSAGE_THREAD",
}
for module, names in LINUX.items():
    for name in names.split():
        delattr(module, name)

def mask(owner, name, answer=None):
    function = getattr(owner, name)
    def masked(path, *args, **options):
        if str(path) != "/dev/shm" and not str(path).startswith(("/proc/", "/sys/")):
            return function(path, *args, **options)
        if answer is None:
            raise FileNotFoundError(2, "No such file or directory", path)
        return answer
    setattr(owner, name, masked)

mask(builtins, "open"), mask(os, "listdir"), mask(os, "statvfs"), mask(os.path, "isdir", False)
"""


@pytest.mark.interop
@pytest.mark.parametrize("target", ["aarch64-macos", "x86_64-macos", "x86_64-linux-musl", "aarch64-linux-musl"])
def test_kernels_compile_for(target, tmp_path):
    """With zig, which has the headers of these systems; nothing runs."""
    pytest.importorskip("ziglang", reason="ziglang is not installed")
    command = [sys.executable, "-m", "ziglang", "cc", "-target", target, "-Wall", "-Wextra", "-Werror"]
    command += ["-DPy_LIMITED_API=0x030B0000", "-isystem", sysconfig.get_path("include")]
    command += ["-c", "-o", tmp_path / "kernel.o"]
    for kernel in sorted((ROOT / "tarshards/kernels").glob("*.c")):
        done = subprocess.run([*command, kernel], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


@pytest.fixture
def run(tmp_path, make_shards):
    """Return a function that runs a command on two shards of three samples, and returns its output."""
    (tmp_path / "masks").mkdir()
    (tmp_path / "masks/sitecustomize.py").write_text(MASKS)

    def run(*command: str, warns: str = "") -> str:
        variables = {**os.environ, "PYTHONPATH": f"{tmp_path / 'masks'}:{ROOT}", "SHARDS": make_shards(2, index=True)}
        done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
        told = warnings_of(done.stderr).splitlines()
        assert bool(told) is bool(warns)
        assert all(warns in line for line in told), done.stderr
        return done.stdout

    return run


#: Writers warn, for without these locks they do not notice each other.
LOCKS = "this system has no such locks; nothing tells whether others write under the same pattern"


def test_the_library(run):
    program = """if True:
        import os
        from tarshards import ArrayLoader, Stream, map_shards, read_samples, readers, reshard, write_samples
        from tarshards.parallel.process_pool import ProcessPool
        shards = os.environ["SHARDS"]
        print(sorted(int(sample["cls"]) for sample in Stream.from_shards(shards, shuffle=True)))
        reshard(shards, "new-{shard}.tar", max_samples=4, shuffle=1)
        print(sorted(int(sample["cls"]) for sample in read_samples("new-{0..1}.tar")))
        stream = Stream.from_shards(shards, shuffle=True)
        print(sum(len(batch["cls"]) for batch in ArrayLoader(stream, 4, fields={"cls": readers.integer()})))
        with ProcessPool() as pool:
            print(*pool.map(str.upper, "ab"))
    """
    numbers = str(list(range(6)))
    assert run(sys.executable, "-c", program, warns=LOCKS).splitlines() == [numbers, numbers, "6", "A B"]


def test_commands_on_samples_and_shards(run):
    for tool in ("tarproc -p 2 -c 'cat sample.cls >sample.old'", "tarproc -p 2 --server cat", "tarcat"):
        line = f'{sys.executable} {BIN}/{tool} "$SHARDS" | tar -t'
        assert "000005.cls" in run("bash", "-euo", "pipefail", "-c", line).split()


@needs_torch
def test_batches_of_workers(run):
    program = """if True:
        import os
        from tarshards import ShardDataset, ShardLoader, readers
        if __name__ == "__main__":
            dataset = ShardDataset(os.environ["SHARDS"], shuffle=True)
            loader = ShardLoader(dataset, 2, num_workers=2, fields={"cls": readers.integer()})
            print(sorted(number for batch in loader for number in batch["cls"].tolist()))
    """
    pickled = "batches from workers are pickled, which takes longer: there is no shared memory"
    assert run(sys.executable, "-c", program, warns=pickled) == f"{list(range(6))}\n"
