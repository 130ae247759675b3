"""Benchmark tarmerge of two shards with a million keys each: seconds and peak memory."""

from __future__ import annotations

import random
import re
import subprocess
import sys
import time
from pathlib import Path

from measure import DATA, machine, record

from tarshards import ShardWriter

FOLDER = DATA / "merge"
COUNT = 1_000_000
WORKS = {"in the same order": "same", "in another order: sorted": "other", "in another order: by index": "indexed"}
MEMORY = {"indexed": "400MB"}  # and 200MB for the others
# Runs the tool in this process, which then prints its peak memory, with and without mapped files.
PROGRAM = """import sys, threading, time
from pathlib import Path
from tarshards.cli.tarmerge import main

def memory():
    return [int(line.split()[1]) for line in Path("/proc/self/status").open() if line.startswith(("VmHWM", "RssAnon"))]

def watch():
    while True:
        peaks.append(memory()[1])
        time.sleep(0.05)

peaks = []
threading.Thread(target=watch, daemon=True).start()
main(standalone_mode=False)
sys.stderr.write(f"peak {memory()[0]} {max(peaks)}")
"""


def make_shard(name: str, order: list[int], *, index: bool) -> Path:
    path = FOLDER / f"{name}-0.tar"
    if not path.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        with ShardWriter(str(FOLDER / f"{name}-%d.tar"), max_samples=None, max_bytes=None, index=index) as writer:
            for i in order:
                writer.write({"__key__": f"{i:08d}", name.partition("-")[0]: b"%050d" % i})
    return path


def run(*inputs: Path, memory: str) -> tuple[float, float, float]:
    """Return the seconds of tarmerge, and its peaks in MB: of resident memory, and without mapped files."""
    begun = time.perf_counter()
    options = ["-q", "--no-sync", "-M", memory, "-o", str(FOLDER / "out.tar"), "--overwrite"]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, inputs), *options], check=True, stderr=subprocess.PIPE, text=True
    )
    peak = re.search(r"peak (\d+) (\d+)", done.stderr)
    assert peak is not None
    return time.perf_counter() - begun, int(peak[1]) * 1024 / 1e6, int(peak[2]) * 1024 / 1e6


def main() -> None:
    order = list(range(COUNT))
    mixed = random.Random(0).sample(order, COUNT)
    left = make_shard("left", order, index=False)
    rows = []
    for name, kind in WORKS.items():
        right = make_shard(f"right-{kind}", order if kind == "same" else mixed, index=kind == "indexed")
        memory = MEMORY.get(kind, "200MB")
        seconds, peak, own = run(left, right, memory=memory)
        rows.append(f"| {name} | {memory} | {seconds:.0f} | {peak:.0f} | {own:.0f} |")
        print(rows[-1], flush=True)
    record(
        f"tarmerge of {COUNT:,} keys with as many",
        [
            f"Two shards of 1 GB, one member of 50 bytes a sample, within -M of the table. {machine('click')}.",
            "With an index, the second shard is mapped; the kernel can reclaim these pages.",
            "",
            "| the second input | -M | seconds | peak resident memory, MB | of it no mapped file |",
            "|---|---|---|---|---|",
            *rows,
        ],
    )
    (FOLDER / "out.tar").unlink()


if __name__ == "__main__":
    main()
