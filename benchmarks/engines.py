"""Benchmark shards in Ray Data: the CPU of a sample by our source, beside Ray's own reader of webdataset tars."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable
from statistics import median
from typing import Any

import ray
import ray.data
from checks import make
from measure import DATA, machine, record
from processes import cpu_seconds
from sets import data_of

from tarshards.engines.ray import RaySource

ROOT, ROUNDS = DATA / "suite", 7
SETS = {"raw-2k": "2 KB", "raw-110k": "110 KB", "five": "five fields, 2.5 KB"}


def epoch(read: Callable[[], Any]) -> tuple[float, int]:
    """Return the CPU seconds of all processes of Ray for an epoch, and its samples."""
    begun = cpu_seconds()
    samples = sum(batch.num_rows for batch in read().iter_batches(batch_size=None, batch_format="pyarrow"))
    return cpu_seconds() - begun, samples


def measure(name: str) -> list[list[float]]:
    """Return microseconds of CPU a sample by our source, and by Ray's reader, in turn."""
    logging.getLogger("ray").setLevel(logging.ERROR)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    urls = list(data_of(name, ROOT, "tarshards")[0].urls)
    reads = [
        lambda: RaySource(urls).read(),
        lambda: ray.data.read_webdataset(urls, decoder=None),
        lambda: ray.data.read_webdataset(urls, decoder=None, override_num_blocks=len(urls)),
    ]
    counts = [epoch(read)[1] for read in reads]
    assert len(set(counts)) == 1
    return [[1e6 * epoch(read)[0] / counts[0] for read in reads] for _ in range(ROUNDS)]


def main() -> None:
    lines = ["| samples | tarshards, µs | read_webdataset, µs | in four blocks, µs | times | times |"]
    lines += ["|---|---|---|---|---|---|"]
    for name, about in SETS.items():
        make(name, ROOT)
        command = [sys.executable, __file__, name]  # in a session whose processes are those of one cluster
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, start_new_session=True)
        rounds = json.loads(done.stdout.splitlines()[-1])
        cells = [f"{median(each):,.0f} ({min(each):,.0f} to {max(each):,.0f})" for each in zip(*rounds)]
        cells += [f"{median(each[i] / each[0] for each in rounds):.1f}" for i in (1, 2)]
        lines.append(f"| {' | '.join([about, *cells])} |")
    about = (
        "CPU of a sample that Ray Data reads and delivers as Arrow batches, all processes of a local cluster of two "
        "cores together: by RaySource (indexed shards), by Ray's own reader, which makes a block for each MiB, and by "
        f"the same in as few blocks as shards. Nothing is decoded. Medians of {ROUNDS} epochs, in turn."
    )
    record("Ray Data", [about, "", *lines, "", machine("ray", "pyarrow")])


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(measure(sys.argv[1])))
    else:
        main()
