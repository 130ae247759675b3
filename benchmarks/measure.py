"""What the benchmarks share: interleaved runs, their medians and spread, and the page that keeps the results."""

from __future__ import annotations

import os
import platform
import re
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from statistics import median

RESULTS = Path(__file__).with_name("RESULTS.md")
DATA = Path(__file__).parents[1] / "data" / "benchmarks"


def interleave(works: dict[str, Callable[[], object]], *, runs: int = 7) -> dict[str, list[float]]:
    """Time every work once a round, *runs* rounds after one warm-up; return the seconds of each."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for round_ in range(runs + 1):
        for name, work in works.items():
            begun = time.perf_counter()
            work()
            if round_:
                seconds[name].append(time.perf_counter() - begun)
    return seconds


def rates(seconds: dict[str, list[float]], count: int, ours: str) -> list[str]:
    """Table rows: median rate, slowest and fastest run, and how many times as fast *ours* is (median of the rounds)."""
    rows = []
    for name, times in seconds.items():
        ratio = median(theirs / mine for theirs, mine in zip(times, seconds[ours], strict=True))
        low, middle, high = (count / value for value in (max(times), median(times), min(times)))
        rows.append(f"| {name} | {middle:,.0f} | {low:,.0f} to {high:,.0f} | {ratio:.1f} |")
    return rows


def machine(*packages: str) -> str:
    """One line on the machine and the versions in use."""
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    versions = ", ".join(f"{package} {version(package)}" for package in packages)
    cores = os.cpu_count()
    return (
        f"{cores} cores ({model[1] if model else platform.machine()}), {memory:.0f} GiB, "
        f"Python {sys.version.split()[0]}, {versions}; {time.strftime('%Y-%m-%d')}"
    )


def record(title: str, lines: list[str]) -> None:
    """Print a section, and put it into RESULTS.md in place of the section of that title."""
    section = "\n".join([f"## {title}", "", *lines, ""])
    print(section)
    page = RESULTS.read_text() if RESULTS.exists() else "# Results\n\nMade by `make bench`.\n"
    pattern = re.compile(rf"^## {re.escape(title)}\n.*?(?=^## |\Z)", re.DOTALL | re.MULTILINE)
    page = pattern.sub("", page).rstrip() + "\n\n" + section
    RESULTS.write_text(page)
