"""The cores and memory of a process are those of its control groups, too: of a container, or a job of Slurm."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tarshards.parallel import host
from tarshards.parallel.host import available_cores, available_memory, total_memory
from tarshards.storage.remote import LEAST_AHEAD, Remote

ALL_CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
ALL_MEMORY = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
FREE = 1 << 29
GROUPS = ["", "/job", "/job/step"]  # this process is in the last
MiB = 1 << 20


@pytest.fixture
def groups(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(host, "GROUPS", str(tmp_path))
    monkeypatch.setattr(host, "OWN_GROUPS", str(tmp_path / "own"))
    monkeypatch.setattr(host, "MEMORY", str(tmp_path / "meminfo"))
    (tmp_path / "meminfo").write_text(f"MemTotal: 9 kB\nMemAvailable:   {FREE >> 10} kB\nHugePages_Total: 0\n")
    return tmp_path


def write(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text + "\n")


def limit(
    root: Path, version: int, group: str, memory: int | None, used: int, unused: int, cores: float | None
) -> None:
    quota = None if cores is None else round(cores * 100_000)
    if version == 2:
        files = {
            "memory.max": "max" if memory is None else f"{memory}",
            "memory.current": f"{used}",
            "memory.stat": f"anon 3\nfile 7\ninactive_file {unused}\nactive_file 5",
            "cpu.max": f"{'max' if quota is None else quota} 100000",
        }
        write(root / group.lstrip("/"), files)
    else:
        files = {
            "memory.limit_in_bytes": f"{9223372036854771712 if memory is None else memory}",
            "memory.usage_in_bytes": f"{used}",
            "memory.stat": f"cache 3\ninactive_file 7\ntotal_inactive_file {unused}\ntotal_active_file 5",
        }
        write(root / f"memory{group}", files)
        files = {"cpu.cfs_quota_us": f"{-1 if quota is None else quota}", "cpu.cfs_period_us": "100000"}
        write(root / f"cpu{group}", files)


@pytest.fixture(params=[1, 2])
def version(request, groups) -> int:
    path = GROUPS[-1]
    lines = [f"9:name=systemd:{path}", f"4:memory:{path}", f"3:cpu,cpuacct:{path}", "0::/"]
    (groups / "own").write_text("\n".join(lines if request.param == 1 else [f"0::{path}"]) + "\n")
    for group in GROUPS:
        limit(groups, request.param, group, None, 1 << 40, 0, None)
    limit(groups, request.param, "/other", 1, 1, 0, 0.01)
    return request.param


@pytest.mark.parametrize("group", GROUPS)
def test_the_least_limit_of_all_groups_holds(groups, version, group):
    assert (total_memory(), available_memory(), available_cores()) == (ALL_MEMORY, FREE, ALL_CORES)
    limit(groups, version, group, 400 * MiB, 300 * MiB, 100 * MiB, 0.5)
    assert (total_memory(), available_memory(), available_cores()) == (400 * MiB, 200 * MiB, 1)
    limit(groups, version, group, 400 * MiB, 500 * MiB, 0, ALL_CORES - 0.5)
    assert (available_memory(), available_cores()) == (0, ALL_CORES)
    assert Remote().budget() == LEAST_AHEAD
    limit(groups, version, group, 1 << 50, 0, 0, 1000)
    assert (total_memory(), available_memory(), available_cores()) == (ALL_MEMORY, FREE, ALL_CORES)


@pytest.mark.parametrize("own", ["", "\n", "memory", "4:memory:", "0::x", "0::/../..", "0::/job (deleted)\n:\n::\n"])
def test_other_words_of_the_kernel(groups, own):
    (groups / "own").write_text(own)
    (groups / "meminfo").write_text("\nMemTotal\nMemAvailable: much\nHugePages_Total: 0\n")
    assert (total_memory(), available_memory(), available_cores()) == (ALL_MEMORY, 0, ALL_CORES)


def test_in_a_container_the_path_on_the_host_does_not_exist(groups):
    (groups / "own").write_text("0::/kubepods/pod1/container\n")
    limit(groups, 2, "", 300 * MiB, 200 * MiB, 100 * MiB, 1)
    assert (total_memory(), available_memory(), available_cores()) == (300 * MiB, 200 * MiB, 1)


def test_a_host_without_control_groups(groups):
    assert (total_memory(), available_memory(), available_cores()) == (ALL_MEMORY, FREE, ALL_CORES)
    (groups / "meminfo").unlink()  # no Linux
    assert available_memory() == 0
    assert Remote().budget() == LEAST_AHEAD


@pytest.fixture
def real_groups() -> Iterator[list[Path]]:
    made = [Path(f"/sys/fs/cgroup/{controller}/tarshards-{os.getpid()}") for controller in ("memory", "cpu")]
    try:
        for folder in made:
            folder.mkdir()
        (made[0] / "memory.limit_in_bytes").write_text(str(256 * MiB))
        (made[1] / "cpu.cfs_quota_us").write_text("50000")
    except OSError as error:
        pytest.skip(f"cannot make control groups of version 1: {error}")
    else:
        yield made
    finally:
        for folder in made:
            if folder.exists():
                folder.rmdir()


def test_a_process_in_real_control_groups(real_groups):
    """A file that was written stays in the memory of its group, which the kernel takes back where it is needed."""
    program = """
import os, sys, tempfile
from pathlib import Path
for group in sys.argv[1:]:
    Path(group, "cgroup.procs").write_text(str(os.getpid()))
from tarshards.parallel.host import available_cores, available_memory, total_memory
print(available_cores(), total_memory(), available_memory())
with tempfile.TemporaryFile(dir="/var/tmp") as file:  # /tmp may be in memory
    file.write(bytes(200 << 20))
    os.fsync(file.fileno())
    print(Path(sys.argv[1], "memory.usage_in_bytes").read_text(), available_memory())
"""
    result = subprocess.run([sys.executable, "-c", program, *map(str, real_groups)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    cores, total, before, used, after = map(int, result.stdout.split())
    assert (cores, total) == (1, 256 * MiB)
    assert 200 * MiB < used < total < after + 50 * MiB
    assert 200 * MiB < before < total
