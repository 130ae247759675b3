"""LitData, its optimized chunks: local, mapped, read through StreamingDataset and its StreamingDataLoader."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from io import BytesIO
from typing import Any

import numpy as np
import torch
from checks import FIELD
from litdata import StreamingDataLoader, StreamingDataset
from litdata.streaming.writer import BinaryWriter
from peers import _images
from sets import FIELDS, Data, Sample

PACKAGES = ("litdata==0.2.76", "torch==2.13.0", "pillow==13.0.0", "simplejpeg==1.9.0")
SYSTEM = ()
OWN = True
THREADS = ()
FORM = {"crop": "transforms in Python"}
DECODERS = ("Pillow", "simplejpeg")
CANNOT = {"index": "reads no tars"}

torch.set_num_threads(1)
if "RANK" in os.environ:  # it splits by the group of processes alone
    torch.distributed.init_process_group("gloo")


def write(samples: list[Sample], data: Data) -> None:
    writer = BinaryWriter(str(data.folder), chunk_bytes="64MB")
    for place, sample in enumerate(samples):
        value: Any = sample[FIELD[data.kind]]
        if data.kind == "otto":
            value = np.load(BytesIO(value))
        elif data.kind == "cifar":
            value = np.frombuffer(value, np.uint8).reshape(32, 32, 3)
        values = [value] if data.kind != "five" else [sample[field] for field in FIELDS[data.kind]]
        writer.add_item(place, (*values, int(sample["cls"])))
    writer.done()
    writer.merge(1)


class Epochs:
    """A dataset without a loader, which would otherwise set the epoch and so the order."""

    def __init__(self, dataset: StreamingDataset) -> None:
        self.dataset, self.epoch = dataset, 0

    def __iter__(self) -> Iterator[Any]:
        self.epoch += 1
        self.dataset.set_epoch(self.epoch)
        return iter(self.dataset)


def listed(items: list[tuple[memoryview, int]]) -> tuple[list[bytes], list[int]]:
    """Views are mapped memory, which no process can send to another, and which torch would collate byte for byte."""
    return [bytes(value) for value, _ in items], [label for _, label in items]


def load(dataset: StreamingDataset, size: int, workers: int, collate: Callable[..., Any] | None = None) -> Any:
    options = {"num_workers": workers, "persistent_workers": workers > 0, "collate_fn": collate}
    return StreamingDataLoader(dataset, batch_size=size, **options)


def stream(data: Data, *, shuffled: bool, workers: int) -> Any:
    dataset = StreamingDataset(str(data.folder), shuffle=shuffled)
    return load(dataset, 64, workers, listed) if workers else Epochs(dataset)


def arrays(data: Data, *, size: int, workers: int) -> StreamingDataLoader:
    return load(StreamingDataset(str(data.folder), shuffle=True), size, workers)


def images(data: Data, transform: Callable[[bytes], np.ndarray], workers: int) -> StreamingDataLoader:
    def decoded(item: tuple[bytes, int]) -> tuple[np.ndarray, int]:
        return transform(item[0]), item[1]

    return load(StreamingDataset(str(data.folder), shuffle=True, transform=decoded), 64, workers)


def decode(data: Data, *, workers: int, decoder: str = "Pillow") -> StreamingDataLoader:
    return images(data, partial(_images.decode, decoder=decoder), workers)


def crop(data: Data, *, workers: int, decoder: str = "Pillow") -> StreamingDataLoader:
    return images(data, partial(_images.random_crop, decoder=decoder), workers)


def places(data: Data) -> Callable[[int], Any]:
    return StreamingDataset(str(data.folder)).__getitem__


def start(data: Data, *, workers: int) -> tuple[StreamingDataLoader, Callable[[], bytes]]:
    loader = load(StreamingDataset(str(data.folder), shuffle=True, seed=0), 64, workers, listed)
    return loader, lambda: json.dumps(loader.state_dict()).encode()


def restore(data: Data, state: bytes, *, workers: int) -> Iterator[Any]:
    loader, _ = start(data, workers=workers)
    loader.load_state_dict(json.loads(state))
    return iter(loader)


def plain(task: str, item: Any, data: Data) -> Iterator[tuple[Any, int]]:
    *parts, labels = item
    values = parts[0]
    if isinstance(labels, int):
        yield b"".join(map(bytes, parts)), labels
    elif isinstance(values, torch.Tensor):
        yield from zip(values.numpy(), labels.tolist())
    else:
        yield from zip(values, labels)


def size(task: str, item: Any) -> int:
    return 1 if isinstance(item[-1], int) else len(item[-1])
