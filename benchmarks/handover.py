"""Benchmark how batches come from two worker processes: through our shared memory, pickled, and as torch does."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from measure import DATA, interleave, machine, record
from torch.utils.data import DataLoader

from tarshards import ShardDataset, ShardLoader, ShardWriter
from tarshards.loaders.tensors import tensors
from tarshards.stream.collate import collate_ragged

FOLDER, WORKERS, ROUNDS = DATA / "handover", 2, 9
PIXELS = np.random.default_rng(0).integers(0, 256, (3, 224, 224), dtype=np.uint8)
FLOATS = PIXELS.astype(np.float32)


def pixels(sample: dict[str, Any]) -> dict[str, Any]:
    return {"x": PIXELS}


def floats(sample: dict[str, Any]) -> dict[str, Any]:
    return {"x": FLOATS}


def ragged(sample: dict[str, Any]) -> dict[str, Any]:
    return {"x": FLOATS[0, 0, : 80 + int(sample["__key__"]) % 40]}


WORKS: dict[str, tuple[int, int, int, Callable[..., Any] | None]] = {  # samples, their bytes, the batch size, an op
    "64 of 2 KB, bytes": (20_000, 2_000, 64, None),
    "64 of 110 KB, bytes": (2_000, 110_000, 64, None),
    "64 x 3 x 224 x 224, uint8": (5_000, 8, 64, pixels),
    "64 x 3 x 224 x 224, float32": (2_000, 8, 64, floats),
    "120 arrays of 80 to 119 float32": (20_000, 8, 120, ragged),
}


def shards(count: int, size: int) -> str:
    manifest = FOLDER / f"{size}-{count}.shards.json"
    if not manifest.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        rng = np.random.default_rng(0)
        with ShardWriter(str(FOLDER / f"{size}-{count}-%02d.tar"), max_samples=count // 4) as writer:
            for i in range(count):
                writer.write({"__key__": f"{i:07d}", "bin": rng.bytes(size), "cls": i % 10})
    return str(manifest)


def to_tensors(samples: list[Any]) -> Any:
    return tensors(collate_ragged(samples))


def same(batch: Any) -> Any:
    return batch


def epochs(name: str) -> dict[str, list[float]]:
    """Return the seconds of an epoch in each way, workers running."""
    count, size, batch, op = WORKS[name]
    dataset = ShardDataset(shards(count, size))
    dataset = dataset if op is None else dataset.map(op)
    options: dict[str, Any] = {"num_workers": WORKERS, "persistent_workers": True}
    plain: dict[str, Any] = {"batch_size": None, "collate_fn": same} | options
    loaders: dict[str, Iterable[Any]] = {
        "no workers": ShardLoader(dataset, batch),
        "shared memory": ShardLoader(dataset, batch, **options),
        "arrays pickled": DataLoader(dataset.batched(batch, collate=collate_ragged), **plain),
        "tensors by torch": DataLoader(dataset.batched(batch, collate=to_tensors), **plain),
    }
    return interleave({way: partial(deque, loader, maxlen=0) for way, loader in loaders.items()}, runs=ROUNDS)


def main() -> None:
    torch.set_num_threads(1)
    lines = []
    for name, (count, _, batch, _) in WORKS.items():
        seconds = epochs(name)
        batches = -(-count // batch)
        spread = [
            [value / batches * 1e3 for value in (median(times), min(times), max(times))] for times in seconds.values()
        ]
        cells = ("{:.2f} ({:.2f} to {:.2f})".format(*each) for each in spread)
        lines = lines or [f"| batches | {' | '.join(seconds)} |", f"|---|{'---|' * len(seconds)}"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    about = (
        f"Milliseconds a batch, and those of the fastest and slowest of {ROUNDS} interleaved epochs. Those through "
        f"shared memory are of a ShardLoader with {WORKERS} workers, the last two of torch's DataLoader with as many."
    )
    record("Batches from worker processes", [about, "", *lines, "", machine("numpy", "torch")])


if __name__ == "__main__":
    main()
