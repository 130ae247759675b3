"""How long the tools' --help takes beside the bare interpreter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from statistics import median

from measure import interleave, machine, record

BIN = Path(__file__).parents[1] / "bin"


def main() -> None:
    def run(*command: str):
        return lambda: subprocess.run([sys.executable, *command], check=True, capture_output=True)

    works = {"python -c pass": run("-c", "pass")}
    works |= {f"{tool.name} --help": run(str(tool), "--help") for tool in sorted(BIN.iterdir())}
    seconds = interleave(works, runs=15)
    bare = seconds["python -c pass"]
    rows = [
        f"| {name} | {1000 * median(times):.0f} | {median(a / b for a, b in zip(times, bare)):.1f} |"
        for name, times in seconds.items()
    ]
    record("Start", [machine("click"), "", "| | ms, median of 15 | x the interpreter |", "|---|---|---|", *rows])


if __name__ == "__main__":
    main()
