"""Benchmark a plan of a billion samples in a million shards: time, memory, and the rate of looking up positions."""

from __future__ import annotations

import json
import subprocess
import sys

from measure import machine, record

PLANNING = """
import json, re, time
from pathlib import Path
import numpy as np
from tarshards.epoch.plan import EpochPlan

def seconds(work):
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun

def first_batch():
    global plan
    plan = EpochPlan(counts, seed=0, epoch=0, ranks=8)
    plan[np.arange(0, 2048, 8)]

def steps(ranks):
    for first in range(0, 1000 * 256 * ranks, 256 * ranks):
        plan[np.arange(first, first + 256 * ranks, ranks)]

def round_trip():
    global rest
    state = json.dumps(plan.state(10**8))
    rest = EpochPlan.restore(counts, json.loads(state), ranks=7, tail="pad")

counts = np.full(10**6, 1000)
figures = {"first": seconds(first_batch)}
figures["peak"] = int(re.search("VmHWM: *([0-9]+)", Path("/proc/self/status").read_text().replace("\\t", ""))[1]) / 1024
figures |= {ranks: 256_000 / seconds(lambda: steps(ranks)) for ranks in (1, 8)}
figures["trip"] = 1000 * seconds(round_trip)
figures["bytes"] = len(json.dumps(rest.state(10**6)))
plan = rest
figures["again"] = seconds(lambda: plan[np.arange(0, 1792, 7)])
figures["rest"] = 256_000 / seconds(lambda: steps(7))
print(json.dumps(figures))
"""


def measure() -> dict[str, float]:
    """Return the results of a plan made in a separate process."""
    done = subprocess.run([sys.executable, "-c", PLANNING], capture_output=True, text=True, check=True)
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def main() -> None:
    figures = measure()
    lines = [
        machine("numpy"),
        "",
        "1,000,000 shards of 1,000 samples, measured once in a separate process:",
        "",
        "| | |",
        "|---|---|",
        f"| a plan and its first batch of 256 | {figures['first']:.2f} s |",
        f"| memory of the process at most | {figures['peak']:.0f} MiB |",
        f"| positions a second, in batches of 256 of rank 0 of 1 | {figures['1']:,.0f} |",
        f"| of rank 0 of 8 | {figures['8']:,.0f} |",
        f"| of rank 0 of 7, resumed in mid-epoch | {figures['rest']:,.0f} |",
        f"| state to JSON and back to a plan | {figures['trip']:.1f} ms |",
        f"| the first batch of that plan | {figures['again']:.2f} s |",
        f"| the state of a run that was resumed once | {figures['bytes']} bytes |",
    ]
    record("Planning", lines)


if __name__ == "__main__":
    main()
