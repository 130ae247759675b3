"""Grain over ArrayRecord files: a record of pickled fields a sample; batches by the caller or by worker processes."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Iterator
from io import BytesIO
from itertools import count
from pathlib import Path
from typing import Any

import grain
import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter
from sets import FIELDS, Data, Sample

PACKAGES = ("grain==0.2.18", "array_record==0.8.6", "numpy==2.4.6")
SYSTEM = ()
OWN = True
THREADS = ()
CANNOT = {
    "decode": "has no decoder, and its environment none",
    "crop": "has no decoder, and its environment none",
    "index": "reads no tars",
}
BATCH, SHARDS = 64, 4
READ = grain.ReadOptions(num_threads=0)  # files in the page cache: threads that look ahead only cost time

Row = tuple[bytes, int]


def write(samples: list[Sample], data: Data) -> None:
    """Uncompressed records that are found one by one, which are read fastest."""
    size = -(-len(samples) // SHARDS)
    for shard in range(SHARDS):
        writer = ArrayRecordWriter(f"{data.folder}/{shard:06d}.array_record", "group_size:1,uncompressed")
        for sample in samples[shard * size : (shard + 1) * size]:
            fields = [sample[field] for field in FIELDS[data.kind]]
            writer.write(pickle.dumps((fields if len(fields) > 1 else fields[0], int(sample["cls"]))))
        writer.close()


def source(data: Data) -> grain.sources.ArrayRecordDataSource:
    return grain.sources.ArrayRecordDataSource(sorted(map(str, Path(data.folder).glob("*.array_record"))))


class Epochs:
    """The batches of an epoch for each iteration, in another order each if shuffled."""

    def __init__(self, data: Data, size: int, stack: Callable[..., Any], workers: int, *, shuffled: bool):
        self.rows = grain.MapDataset.source(source(data)).map(pickle.loads)
        rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.share, self.shuffled, self.epochs = slice(rank, None, world), shuffled, count()
        self.size, self.stack, self.workers = size, stack, workers

    def __iter__(self) -> Iterator[Any]:
        rows = self.rows.shuffle(seed=next(self.epochs)) if self.shuffled else self.rows
        batches = rows[self.share].batch(self.size, batch_fn=self.stack).to_iter_dataset(READ)
        if self.workers:
            batches = batches.mp_prefetch(grain.multiprocessing.MultiprocessingOptions(num_workers=self.workers))
        return iter(batches)


def listed(rows: list[Row]) -> tuple[list[bytes], list[int]]:
    return [row[0] for row in rows], [row[1] for row in rows]


def parsed(rows: list[Row]) -> tuple[np.ndarray, list[int]]:
    return np.stack([np.load(BytesIO(row[0])) for row in rows]), [row[1] for row in rows]


def pixels(rows: list[Row]) -> tuple[np.ndarray, list[int]]:
    joined = b"".join(row[0] for row in rows)
    return np.frombuffer(joined, np.uint8).reshape(-1, 32, 32, 3), [row[1] for row in rows]


def stream(data: Data, *, shuffled: bool, workers: int) -> Epochs:
    return Epochs(data, BATCH, listed, workers, shuffled=shuffled)


def arrays(data: Data, *, size: int, workers: int) -> Epochs:
    return Epochs(data, size, parsed if data.kind == "otto" else pixels, workers, shuffled=True)


def places(data: Data) -> Callable[[int], Row]:
    records = source(data)
    return lambda place: pickle.loads(records[place])


def start(data: Data, *, workers: int) -> tuple[Any, Callable[[], bytes]]:
    loader = iter(Epochs(data, BATCH, listed, workers, shuffled=True))
    return loader, lambda: json.dumps(loader.get_state()).encode()


def restore(data: Data, state: bytes, *, workers: int) -> Iterator[Any]:
    loader, _ = start(data, workers=workers)
    loader.set_state(json.loads(state))
    return loader


def plain(task: str, item: Any, data: Data) -> Iterator[tuple[Any, int]]:
    for value, label in [item] if task == "random" else zip(*item):
        yield b"".join(value) if isinstance(value, list) else value, label


def size(task: str, item: Any) -> int:
    return 1 if task == "random" else len(item[1])
