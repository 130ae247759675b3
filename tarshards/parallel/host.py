"""The cores and the memory of this host that this process may use: containers and jobs of Slurm have a part of both.

On Linux a process is in a control group, and that in others; each may have limits (cgroups(7), of both versions).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from math import ceil

GROUPS = "/sys/fs/cgroup"  # in a container, its own control group
OWN_GROUPS = "/proc/self/cgroup"
MEMORY = "/proc/meminfo"


def available_cores() -> int:
    """Return the number of cores that this process may use: of its affinity and the quotas of its control groups."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for group in _groups("cpu"):
        v1 = _read(f"{group}/cpu.cfs_quota_us") + _read(f"{group}/cpu.cfs_period_us")
        match (_read(f"{group}/cpu.max") or v1).split():
            case [quota, period] if quota.isdecimal():  # otherwise "max" or -1
                cores = min(cores, max(1, ceil(int(quota) / int(period))))
    return cores


def total_memory() -> int:
    """Return the bytes of memory of this host or of a control group of this process, whichever has least."""
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([host, *(limit for _, limit in _memory_limits())])


def available_memory() -> int:
    """Return the bytes of memory that this process may still use, of its host and of its control groups.

    Files that a group has in memory but does not use count as available, as in the working set of Kubernetes.
    """
    free = _numbers(MEMORY).get("MemAvailable:")
    found = [] if free is None else [free << 10]
    for group, limit in _memory_limits():
        used = int(_read(f"{group}/memory.current") or _read(f"{group}/memory.usage_in_bytes") or limit)
        stat = _numbers(f"{group}/memory.stat")
        found.append(max(0, limit - used + stat.get("total_inactive_file", stat.get("inactive_file", 0))))
    return min(found, default=0)


def _memory_limits() -> Iterator[tuple[str, int]]:
    """Yield the control groups whose memory is limited, and the limits in bytes."""
    for group in _groups("memory"):
        limit = _read(f"{group}/memory.max") or _read(f"{group}/memory.limit_in_bytes")
        if limit.strip().isdecimal():  # otherwise "max"
            yield group, int(limit)


def _groups(controller: str) -> Iterator[str]:
    """Yield the folders of the control group of this process that limits its cpu or memory, and of those it is in."""
    for line in _read(OWN_GROUPS).splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")  # version 2 has no controllers
        if controllers and controller not in controllers.split(","):
            continue
        root = f"{GROUPS}/{controller}" if controllers else GROUPS
        while len(path) > 1:
            yield root + path
            path = os.path.dirname(path)
        yield root


def _read(path: str) -> str:
    with suppress(OSError), open(path, errors="surrogateescape") as file:
        return file.read()
    return ""


def _numbers(path: str) -> dict[str, int]:
    """Return the numbers of a file that begins each of its lines with a name and a number."""
    return {name: int(number) for name, number in re.findall(r"^(\S+) +(\d+)", _read(path), re.MULTILINE)}
