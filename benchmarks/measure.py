"""Functions shared by the benchmarks: interleaved runs, medians and spread, and the page of results."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median

RESULTS = Path(__file__).with_name("RESULTS.md")
DATA = Path(__file__).parents[1] / "data" / "benchmarks"
SCATTER = 0.2  # of a median: rows with rounds that differ from it by more are marked
KEEPING = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}  # for programs that cache bytecode, as for users


def install() -> Path:
    """Install the package as users do, with bytecode and not editable, and return the folder of its tools.

    Its dependencies come from the environment of this program.
    """
    folder = DATA / "environments" / "installed"
    python = folder / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", folder], check=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    (site / "peers.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    command = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps"]
    subprocess.run([*command, "--no-build-isolation", "--force-reinstall", DATA.parents[1]], check=True, env=KEEPING)
    return python.parent


def about(values: Sequence[float]) -> str:
    """Return "~", which marks a median from which a round differs by more than 20 %, or nothing.

    >>> about([9, 10, 11]), about([7, 10, 11])
    ('', '~')
    """
    middle = median(values)
    return "~" if max(max(values) - middle, middle - min(values)) > SCATTER * middle else ""


def interleave(works: dict[str, Callable[[], object]], *, runs: int = 7) -> dict[str, list[float]]:
    """Time every work once per round, for *runs* rounds after a warm-up; return the seconds of each."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for round_ in range(runs + 1):
        for name, work in works.items():
            begun = time.perf_counter()
            work()
            if round_:
                seconds[name].append(time.perf_counter() - begun)
    return seconds


def rates(seconds: dict[str, list[float]], count: int, ours: str) -> list[str]:
    """Return table rows: median rate, slowest and fastest run, and how many times as fast *ours* is (median)."""
    rows = []
    for name, times in seconds.items():
        ratio = median(theirs / mine for theirs, mine in zip(times, seconds[ours], strict=True))
        low, middle, high = (count / value for value in (max(times), median(times), min(times)))
        mark = about([count / value for value in times])
        rows.append(f"| {name} | {mark}{middle:,.0f} | {low:,.0f} to {high:,.0f} | {ratio:.1f} |")
    return rows


def machine(*packages: str) -> str:
    """Return one line on the machine and the versions in use."""
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    versions = ", ".join(f"{package} {version(package)}" for package in packages)
    cores = os.cpu_count()
    return (
        f"{cores} cores ({model[1] if model else platform.machine()}), {memory:.0f} GiB, "
        f"Python {sys.version.split()[0]}, {versions}; {time.strftime('%Y-%m-%d')}"
    )


def drop_pages(folder: Path) -> None:
    """Let the files of a folder be read from the disk again."""
    os.sync()
    for path in folder.iterdir():
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def record(title: str, lines: list[str], page: Path = RESULTS) -> None:
    """Print a section, and replace the section of that title in a page."""
    print("\n".join([f"## {title}", "", *lines, ""]))
    put({title: lines}, page)


def kept_lines(page: Path, title: str, names: Iterable[str], item: str) -> dict[str, list[str]]:
    """Return the lines that a section has of each name: its rows of tables, and the items that begin "- NAME" + *item*.

    Names without a row are left out.
    """
    text = page.read_text()
    section = text[text.index(f"## {title}") :] if f"## {title}" in text else ""
    return {
        name: re.findall(rf"^(?:\| {name} \||- {name}{item}).*$", section, re.MULTILINE)
        for name in names
        if f"\n| {name} |" in section
    }


def put(sections: dict[str, list[str]], page: Path = RESULTS, *, first: bool = False) -> None:
    """Replace the sections of the same titles in a page; *first* puts them above all others, in this order."""
    text = page.read_text() if page.exists() else f"# {page.stem.capitalize()}\n\nMade by `make bench`.\n"
    head, *parts = re.split(r"^## ", text, flags=re.MULTILINE)
    kept = dict(part.split("\n", 1) for part in parts)
    new = {title: "\n" + "\n".join(lines) for title, lines in sections.items()}
    kept = new | {title: kept[title] for title in kept if title not in new} if first else kept | new
    page.write_text("\n".join([head.rstrip() + "\n", *(f"## {title}\n{kept[title].rstrip()}\n" for title in kept)]))
