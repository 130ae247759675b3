"""How long the tools' --help takes beside the bare interpreter, installed as users have them."""

from __future__ import annotations

import subprocess
from pathlib import Path
from statistics import median

from measure import KEEPING, install, interleave, machine, record

BIN = Path(__file__).parents[1] / "bin"


def main() -> None:
    folder = install()

    def run(program: str, *arguments: str):
        return lambda: subprocess.run([folder / program, *arguments], check=True, capture_output=True, env=KEEPING)

    works = {"python -c pass": run("python", "-c", "pass")}
    works |= {f"{tool.name} --help": run(tool.name, "--help") for tool in sorted(BIN.iterdir())}
    seconds = interleave(works, runs=15)
    bare = seconds["python -c pass"]
    rows = [
        f"| {name} | {1000 * median(times):.0f} | {median(a / b for a, b in zip(times, bare)):.1f} |"
        for name, times in seconds.items()
    ]
    record("Start", [machine("click"), "", "| | ms, median of 15 | x the interpreter |", "|---|---|---|", *rows])


if __name__ == "__main__":
    main()
