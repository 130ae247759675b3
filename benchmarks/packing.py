"""Benchmark packing: fill and time against the package binpacking, next fit and padding, and ten million lengths."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable

import binpacking
import numpy as np
from measure import machine, record

from tarshards.epoch.packing import WINDOW, best_fit

CAPACITY = 4096
PLANNING = """
import json, resource, time
import numpy as np
from tarshards.epoch.packing import pack
from tarshards.epoch.plan import EpochPlan
lengths = np.clip(np.random.default_rng(0).lognormal(6, 1, 10**7), 16, 4096).astype(np.int32)
counts = np.full(1000, 10**4)
begun = time.perf_counter()
plan = pack(lengths, 4096).plan(counts, lambda state: EpochPlan(counts, seed=0, epoch=0), ranks=1, tail="exact")
seconds = time.perf_counter() - begun
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps({"seconds": seconds, "peak": peak, "fill": int(lengths.sum()) / (4096 * len(plan))}))
"""


def long_tailed(count: int) -> np.ndarray:
    """Lengths of a log-normal mixture with a long tail, from 16 to the capacity."""
    rng = np.random.default_rng(0)
    mixture = np.where(rng.random(count) < 0.7, rng.lognormal(5, 1, count), rng.lognormal(7, 0.8, count))
    return np.clip(mixture, 16, CAPACITY).astype(int)


def next_fit(lengths: np.ndarray) -> int:
    """The bins of lengths that are put one after the other into the last bin, or else into a new one."""
    bins, taken = 1, 0
    for length in lengths.tolist():
        if taken + length > CAPACITY:
            bins, taken = bins + 1, 0
        taken += length
    return bins


def main() -> None:
    lengths = long_tailed(4 * WINDOW)
    windows = lengths.reshape(-1, WINDOW)
    ways: dict[str, Callable[[np.ndarray], int]] = {
        "tarshards.pack": lambda window: int(best_fit(window, CAPACITY).max()) + 1,
        "binpacking": lambda window: len(binpacking.to_constant_volume(dict(enumerate(window.tolist())), CAPACITY)),
        "next fit": next_fit,
        "padding": len,
    }
    lines = [
        machine("numpy", "binpacking"),
        "",
        f"{len(lengths):,} lengths in windows of {WINDOW:,}, measured once:",
        "",
    ]
    lines += ["| | fill | lengths a second |", "|---|---|---|"]
    for name, bins_of in ways.items():
        begun = time.perf_counter()
        bins = sum(map(bins_of, windows))
        seconds = time.perf_counter() - begun
        rate = "" if name == "padding" else f"{len(lengths) / seconds:,.0f}"
        lines.append(f"| {name} | {lengths.sum() / (bins * CAPACITY):.4f} | {rate} |")
    done = subprocess.run([sys.executable, "-c", PLANNING], capture_output=True, text=True, check=True)
    figures = json.loads(done.stdout)
    lines += [
        "",
        f"10,000,000 lengths are planned in {figures['seconds']:.1f} s, with at most {figures['peak']:.0f} MiB;",
    ]
    lines += [f"their bins are filled to {figures['fill']:.4f}."]
    record("Packing", lines)


if __name__ == "__main__":
    main()
