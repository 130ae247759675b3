"""Deep Lake, its own dataset on local disk: columns read by slices in order, by lists of rows shuffled."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from io import BytesIO
from itertools import count
from typing import Any

import deeplake
import numpy as np
from checks import FIELD
from deeplake import types
from peers import _torchvision  # noqa: F401 - before what imports torchvision
from PIL import Image
from sets import Data, Sample
from torch.utils.data import DataLoader
from torchvision.transforms import Compose, RandomHorizontalFlip, RandomResizedCrop

PACKAGES = ("deeplake==4.7.4", "torch==2.13.0", "torchvision==0.28.0")
SYSTEM = ()
OWN = True
THREADS = ()
DECODERS = ("of its own",)
CANNOT = {"index": "reads no tars", "resume": "its columns and batches have no state"}
TYPES = {
    "raw": types.Bytes(),
    "text": types.Bytes(),
    "otto": types.Array("float32", shape=[93]),
    "cifar": types.Array("uint8", shape=[32, 32, 3]),
    "jpeg": types.Image(sample_compression="jpeg"),
}

Batch = tuple[Any, list[int]]


def write(samples: list[Sample], data: Data) -> None:
    values: Any = [sample[FIELD[data.kind]] for sample in samples]
    if data.kind == "otto":
        values = np.stack([np.load(BytesIO(value)) for value in values])
    elif data.kind == "cifar":
        values = np.frombuffer(b"".join(values), np.uint8).reshape(-1, 32, 32, 3)
    dataset = deeplake.create(f"file://{data.folder}/set", schema={"x": TYPES[data.kind], "y": types.Int64()})
    dataset.append({"x": values, "y": [int(sample["cls"]) for sample in samples]})
    dataset.commit()


class Batches:
    """This rank's batches of a dataset, by row numbers or slices of its columns."""

    transform: Callable[[Any], Any] | None = None

    def __init__(self, data: Data, size: int, *, shuffled: bool = True):
        self.dataset = dataset = deeplake.open_read_only(f"file://{data.folder}/set")  # its columns do not keep it
        self.x, self.y, self.size, self.shuffled, self.epochs = dataset["x"], dataset["y"], size, shuffled, count()
        rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.rows = range(len(dataset) * rank // world, len(dataset) * (rank + 1) // world)

    def __iter__(self) -> Iterator[slice | list[int]]:
        """Yield the rows of each batch, in another order each epoch if shuffled."""
        order = list(self.rows)
        if self.shuffled:
            random.Random(next(self.epochs)).shuffle(order)
        for start in range(0, len(order), self.size):
            rows = order[start : start + self.size]
            yield rows if self.shuffled else slice(rows[0], rows[-1] + 1)

    def __getitem__(self, rows: slice | list[int]) -> Batch:
        values, labels = self.x[rows], self.y[rows]
        return (values if self.transform is None else self.transform(values)), labels

    def loader(self, workers: int) -> DataLoader:
        options = {"num_workers": workers, "persistent_workers": workers > 0, "collate_fn": untouched}
        return DataLoader(self, sampler=self, batch_size=None, **options)


def untouched(batch: Batch) -> Batch:
    return batch


def stream(data: Data, *, shuffled: bool, workers: int) -> DataLoader:
    return Batches(data, 64, shuffled=shuffled).loader(workers)


def arrays(data: Data, *, size: int, workers: int) -> DataLoader:
    return Batches(data, size).loader(workers)


def decode(data: Data, *, workers: int) -> DataLoader:
    return Batches(data, 64).loader(workers)


def crop(data: Data, *, workers: int) -> DataLoader:
    """Decoded by Deep Lake, cropped by torchvision."""
    batches, cropped = Batches(data, 64), Compose([RandomResizedCrop(224), RandomHorizontalFlip()])
    batches.transform = lambda images: np.stack([np.asarray(cropped(Image.fromarray(image))) for image in images])
    return batches.loader(workers)


def places(data: Data) -> Callable[[int], tuple[bytes, int]]:
    dataset = deeplake.open_read_only(f"file://{data.folder}/set")
    return lambda i, x=dataset["x"], y=dataset["y"], keep=dataset: (x[i], y[i])


def plain(task: str, item: Any, data: Data) -> Iterator[tuple[Any, int]]:
    if task == "random":
        yield item[0], int(item[1])
    else:
        yield from ((value, int(label)) for value, label in zip(*item))


def size(task: str, item: Any) -> int:
    return 1 if task == "random" else len(item[1])
