"""Lance, its own columns on local disk: Arrow batches, scanned in order or taken by row numbers, by its own threads."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from io import BytesIO
from itertools import count
from typing import Any

import lance
import numpy as np
import pyarrow as pa
from sets import FIELDS, Data, Sample

PACKAGES = ("pylance==14.0.2", "pyarrow==26.0.1", "numpy==2.4.6")
SYSTEM = ()
OWN = True
THREADS = ("stream", "arrays")
FORM = {"stream": "rows"}
CANNOT = {
    "decode": "stores encoded images; has no decoder",
    "crop": "stores encoded images; has no decoder",
    "index": "reads no tars",
    "resume": "its scanner has no state; an epoch starts again",
}
BATCHES = {"raw-110k": 64, "raw-1m": 16}  # its best; of small samples 1,024
SHAPES = {"otto": (93,), "cifar": (32, 32, 3)}


def write(samples: list[Sample], data: Data) -> None:
    columns: dict[str, Any] = {"cls": pa.array([int(sample["cls"]) for sample in samples])}
    for field in FIELDS[data.kind]:
        values = [sample[field] for sample in samples]
        if data.kind == "otto":
            rows = np.stack([np.load(BytesIO(value)) for value in values])
            columns[field] = pa.FixedSizeListArray.from_arrays(pa.array(rows.ravel()), rows.shape[1])
        elif data.kind == "cifar":
            pixels = pa.array(np.frombuffer(b"".join(values), np.uint8))
            columns[field] = pa.FixedSizeListArray.from_arrays(pixels, len(values[0]))
        else:
            columns[field] = pa.array(values, pa.large_binary())
    lance.write_dataset(pa.table(columns), f"{data.folder}/set.lance", mode="overwrite")


class Batches:
    """This rank's Arrow batches; shuffled ones have row numbers that are drawn in each epoch."""

    def __init__(self, data: Data, size: int, ahead: int, *, shuffled: bool):
        self.dataset = lance.dataset(f"{data.folder}/set.lance")
        rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.begin, self.end = data.count * rank // world, data.count * (rank + 1) // world
        self.size, self.ahead, self.shuffled, self.epochs = size, ahead, shuffled, count()

    def __iter__(self) -> Iterator[Any]:
        if not self.shuffled:
            yield from self.dataset.to_batches(
                batch_size=self.size, batch_readahead=self.ahead, offset=self.begin, limit=self.end - self.begin
            )
            return
        order = list(range(self.begin, self.end))
        random.Random(next(self.epochs)).shuffle(order)
        for start in range(0, len(order), self.size):
            yield self.dataset.take(order[start : start + self.size])


def stream(data: Data, *, shuffled: bool, workers: int) -> Batches:
    return Batches(data, BATCHES.get(data.name, 1024), workers, shuffled=shuffled)


class Arrays(Batches):
    """The same batches as arrays of numbers, with their labels."""

    def __init__(self, data: Data, size: int, ahead: int):
        super().__init__(data, size, ahead, shuffled=True)
        self.field, self.shape = FIELDS[data.kind][0], SHAPES[data.kind]

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for batch in super().__iter__():
            values = batch[self.field].combine_chunks().flatten().to_numpy()
            yield values.reshape(-1, *self.shape), batch["cls"].to_numpy()


def arrays(data: Data, *, size: int, workers: int) -> Arrays:
    return Arrays(data, size, workers)


def places(data: Data) -> Callable[[int], Any]:
    dataset = lance.dataset(f"{data.folder}/set.lance")
    return lambda place: dataset.take([place])


def plain(task: str, item: Any, data: Data) -> Iterator[tuple[Any, int]]:
    if isinstance(item, tuple):
        yield from zip(*item)
        return
    columns = (item[field].to_pylist() for field in FIELDS[data.kind])
    yield from zip(map(b"".join, zip(*columns)), item["cls"].to_pylist())


def size(task: str, item: Any) -> int:
    return len(item[1]) if isinstance(item, tuple) else item.num_rows
