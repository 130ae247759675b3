"""torch Dataset and DataLoader, a file a field in folders, arrays in memory; torchdata's StatefulDataLoader resumes."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peers import _images
from sets import FIELDS, Data, Sample
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

PACKAGES = ("torch==2.13.0", "torchdata==0.11.0", "numpy==2.4.6", "pillow==13.0.0", "simplejpeg==1.9.0")
SYSTEM = ()
OWN = True
THREADS = ()
CANNOT = {"index": "reads no tars"}
DECODERS = ("Pillow", "simplejpeg")
BATCH, FOLDER = 64, 1000


def path(data: Data, place: int, field: str) -> str:
    """At most FOLDER samples share a folder, since large folders are slow."""
    return f"{data.folder}/{place // FOLDER:05d}/{place:08d}.{field}"


def write(samples: list[Sample], data: Data) -> None:
    for place, sample in enumerate(samples):
        if place % FOLDER == 0:
            Path(path(data, place, "cls")).parent.mkdir()
        for field, value in sample.items():
            if field != "__key__":
                with open(path(data, place, field), "wb") as file:
                    file.write(value)


class Files(Dataset[tuple[Any, int]]):
    """Files in folders, read on access."""

    def __init__(self, data: Data, read: Callable[[bytes], Any] = bytes) -> None:
        self.data, self.read = data, read

    def __len__(self) -> int:
        return self.data.count

    def __getitem__(self, place: int) -> tuple[Any, int]:
        payload = [read_file(path(self.data, place, field)) for field in FIELDS[self.data.kind]]
        label = int(read_file(path(self.data, place, "cls")))
        return (self.read(payload[0]) if len(payload) == 1 else payload), label


def read_file(name: str) -> bytes:
    with open(name, "rb") as file:
        return file.read()


class Arrays(Dataset[tuple[np.ndarray, int]]):
    """Arrays in memory, as those of small data sets have them."""

    def __init__(self, data: Data) -> None:
        rows = list(map(Files(data, read_npy if data.kind == "otto" else read_rgb).__getitem__, range(data.count)))
        self.values, self.labels = np.stack([row[0] for row in rows]), [row[1] for row in rows]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, place: int) -> tuple[np.ndarray, int]:
        return self.values[place], self.labels[place]


def read_npy(data: bytes) -> np.ndarray:
    return np.load(io.BytesIO(data))


def read_rgb(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8).reshape(32, 32, 3)


def load(dataset: Dataset[Any], size: int, workers: int, *, shuffled: bool, kind: Any = DataLoader) -> Any:
    options: dict[str, Any] = {"num_workers": workers, "persistent_workers": workers > 0}
    if "WORLD_SIZE" in os.environ:
        ranks, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
        options["sampler"] = DistributedSampler(dataset, ranks, rank, shuffle=shuffled)
    else:
        options["shuffle"] = shuffled
    return kind(dataset, size, **options)


def stream(data: Data, *, shuffled: bool, workers: int) -> Iterable[Any]:
    return load(Files(data), BATCH, workers, shuffled=shuffled)


def arrays(data: Data, *, size: int, workers: int) -> Iterable[Any]:
    return load(Arrays(data), size, workers, shuffled=True)


def decode(data: Data, *, workers: int, decoder: str = "Pillow") -> Iterable[Any]:
    return load(Files(data, partial(_images.decode, decoder=decoder)), BATCH, workers, shuffled=False)


def crop(data: Data, *, workers: int, decoder: str = "Pillow") -> Iterable[Any]:
    return load(Files(data, partial(_images.random_crop, decoder=decoder)), BATCH, workers, shuffled=True)


def places(data: Data) -> Callable[[int], tuple[bytes, int]]:
    return Files(data).__getitem__


def start(data: Data, *, workers: int) -> tuple[Iterable[Any], Callable[[], bytes]]:
    torch.manual_seed(0)
    loader = load(Files(data), BATCH, workers, shuffled=True, kind=StatefulDataLoader)
    return loader, lambda: pickle.dumps(loader.state_dict())


def restore(data: Data, state: bytes, *, workers: int) -> Iterator[Any]:
    loader = load(Files(data), BATCH, workers, shuffled=True, kind=StatefulDataLoader)
    loader.load_state_dict(pickle.loads(state))
    return iter(loader)


def plain(task: str, item: Any, data: Data) -> Iterator[tuple[Any, int]]:
    if task == "random":
        yield item
    else:
        payloads, labels = item
        if data.kind == "five":  # a tuple of each field
            payloads = list(map(b"".join, zip(*payloads)))
        yield from zip(map(np.asarray, payloads) if torch.is_tensor(payloads) else payloads, map(int, labels))


def size(task: str, item: Any) -> int:
    return 1 if task == "random" else len(item[1])
