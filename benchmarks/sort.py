"""Benchmark tarsort of a million small samples: seconds and peak memory."""

from __future__ import annotations

import random
import re
import subprocess
import sys
import time
from pathlib import Path

from measure import DATA, machine, record

from tarshards import TarWriter

FOLDER = DATA / "sort"
COUNT = 1_000_000
MEMORY = "200MB"
WORKS = {
    "by key": "",
    "by a text field": "--sort bin",
    "shuffled": "--shuffle",
    "by key, one of each": "--unique first",
    "regrouped": "--regroup",
}
# Runs the tool in this process, which then prints its peak memory.
PROGRAM = """import sys
from tarshards.cli.tarsort import main
main(standalone_mode=False)
sys.stderr.write(open("/proc/self/status").read())
"""


def make_shard(name: str, order: list[int]) -> Path:
    path = FOLDER / f"{name}.tar"
    if not path.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        rng = random.Random(0)
        with TarWriter(str(path)) as writer:
            for i in order:
                writer.write({"__key__": f"{i:08d}", "bin": rng.randbytes(50).hex().encode()})
    return path


def run(arguments: list[str]) -> tuple[float, float]:
    """Return the seconds of tarsort, and its peak of resident memory in MB."""
    begun = time.perf_counter()
    command = [sys.executable, "-c", PROGRAM, *arguments]
    done = subprocess.run(command, check=True, stderr=subprocess.PIPE, text=True)
    peak = re.search(r"VmHWM:\s+(\d+) kB", done.stderr)
    assert peak is not None
    return time.perf_counter() - begun, int(peak[1]) * 1024 / 1e6


def main() -> None:
    order = list(range(COUNT))
    random.Random(0).shuffle(order)
    shard, output = make_shard("million", order), FOLDER / "out.tar"
    rows = []
    for name, options in WORKS.items():
        arguments = [*options.split(), "-q", "--no-sync", "-M", MEMORY, "--tmpdir", str(FOLDER)]
        seconds, peak = run([*arguments, str(shard), "-o", str(output), "--overwrite"])
        rows.append(f"| {name} | `{f'tarsort {options}'.strip()}` | {seconds:.1f} | {peak:.0f} |")
        print(rows[-1], flush=True)
    output.unlink()
    record(
        f"tarsort of {COUNT:,} samples within -M {MEMORY}",
        [
            f"One shard of 1 GB, one member of 100 bytes a sample, keys in random order. {machine('click')}.",
            "",
            "| order | command | seconds | peak resident memory, MB |",
            "|---|---|---|---|",
            *rows,
        ],
    )


if __name__ == "__main__":
    main()
