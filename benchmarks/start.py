"""Benchmark --help of the installed tools against the bare interpreter."""

from __future__ import annotations

import subprocess
from pathlib import Path
from statistics import median

from measure import KEEPING, install, interleave, machine, record

BIN = Path(__file__).parents[1] / "bin"
BARE = "python -c pass"


def measure(tools: list[str], runs: int) -> dict[str, list[float]]:
    """Time --help of *tools*, and the bare interpreter of the same installation."""
    folder = install()

    def run(program: str, *arguments: str):
        return lambda: subprocess.run([folder / program, *arguments], check=True, capture_output=True, env=KEEPING)

    works = {BARE: run("python", "-c", "pass")} | {f"{tool} --help": run(tool, "--help") for tool in tools}
    return interleave(works, runs=runs)


def ratios(seconds: dict[str, list[float]]) -> dict[str, float]:
    """Return the start time of each tool as a multiple of the bare interpreter's."""
    return {name: median(a / b for a, b in zip(times, seconds[BARE])) for name, times in seconds.items()}


def main() -> None:
    seconds = measure(sorted(tool.name for tool in BIN.iterdir()), runs=15)
    longer = ratios(seconds)
    rows = [f"| {name} | {1000 * median(times):.0f} | {longer[name]:.1f} |" for name, times in seconds.items()]
    record("Start", [machine("click"), "", "| | ms, median of 15 | x the interpreter |", "|---|---|---|", *rows])


if __name__ == "__main__":
    main()
