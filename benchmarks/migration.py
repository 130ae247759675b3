"""The speed of ``tarshards.webdataset`` over that of ``ShardDataset`` on the same pipeline: alternating runs.

    python benchmarks/migration.py [SAMPLES] [RUNS]

Each pipeline reads the same local shards in one process: raw samples, with and without indexes, and samples that are
decoded and made tuples and batches. The figures are medians of CPU time.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any

import tarshards
import tarshards.webdataset as wds

SIZE = 2000  # bytes of a sample


def write(folder: Path, samples: int, *, index: bool) -> str:
    """Write shards of 5,000 samples of two fields, and return their expression."""
    with tarshards.ShardWriter(folder / "set-{shard:03d}.tar", max_samples=5000, index=index, sync=False) as writer:
        for number in range(samples):
            writer.write({"__key__": f"{number:08d}", "bin": bytes(SIZE), "cls": number % 1000})
    return str(folder / "set-*.tar")


def raw(make: Callable[[str], Iterable[Any]], urls: str) -> Iterable[Any]:
    return make(urls)


def tuples(make: Callable[[str], Any], urls: str) -> Iterable[Any]:
    return make(urls).decode().to_tuple("bin", "cls").batched(64)


def seconds(pipeline: Callable[..., Iterable[Any]], kind: Callable[[str], Any], urls: str) -> float:
    """Return the CPU time that it takes to open the shards and go through them: other programs do not change it."""
    begun = time.process_time()
    for _ in pipeline(kind, urls):
        pass
    return time.process_time() - begun


def main(samples: int = 50_000, runs: int = 5) -> None:
    print(f"{samples} samples of {SIZE} bytes, medians of {runs} alternating runs")
    for index in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            urls = write(Path(folder), samples, index=index)
            for pipeline in (raw, tuples):
                kinds: list[Callable[[str], Any]] = [tarshards.ShardDataset, wds.WebDataset]
                for kind in kinds:
                    seconds(pipeline, kind, urls)
                times = [[seconds(pipeline, kind, urls) for kind in kinds] for _ in range(runs)]
                native, ours = (median(column) for column in zip(*times))
                name = f"{pipeline.__name__}, {'with' if index else 'without'} indexes"
                words = f"ShardDataset {samples / native:8.0f} samples/s, WebDataset {samples / ours:8.0f}"
                print(f"{name:24} {words}, ratio of times {ours / native:.2f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
