"""MosaicML Streaming, its MDS files: local, read through StreamingDataset and torch's DataLoader."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from io import BytesIO
from typing import Any

import numpy as np
import torch
from peers import _torchvision  # noqa: F401 - before what imports torchvision
from PIL import Image
from sets import FIELDS, Data, Sample
from streaming import MDSWriter, StreamingDataLoader, StreamingDataset
from torchvision.transforms import Compose, RandomHorizontalFlip, RandomResizedCrop

PACKAGES = (
    "mosaicml-streaming==0.13.0",
    "torch==2.13.0",
    "torchvision==0.28.0",
    "s3torchconnector==1.5.0",  # for remote_peers.py
)
SYSTEM = ()
OWN = True
THREADS = ()
FORM = {"crop": "transforms in Python"}
DECODERS = ("Pillow",)
CANNOT = {"index": "reads no tars"}
PREDOWNLOAD = 1 << 16  # nothing is downloaded, so the threads that look ahead can be done at once

torch.set_num_threads(1)

ENCODINGS = {"otto": "ndarray:float32:93", "cifar": "ndarray:uint8:32,32,3"}


def write(samples: list[Sample], data: Data) -> None:
    fields = FIELDS[data.kind]
    columns = dict.fromkeys(fields, ENCODINGS.get(data.kind, "bytes")) | {"y": "int"}
    with MDSWriter(out=str(data.folder), columns=columns) as writer:
        for sample in samples:
            values: dict[str, Any] = {field: sample[field] for field in fields}
            if data.kind == "otto":
                values = {"x.npy": np.load(BytesIO(values["x.npy"]))}
            elif data.kind == "cifar":
                values = {"rgb": np.frombuffer(values["rgb"], np.uint8).reshape(32, 32, 3)}
            writer.write({**values, "y": int(sample["cls"])})


class Images(StreamingDataset):
    """Its samples, decoded by Pillow and transformed."""

    def __init__(self, transform: Callable[[Image.Image], Image.Image] | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.transform = transform

    def __getitem__(self, place: int) -> tuple[np.ndarray, int]:
        sample = super().__getitem__(place)
        image = Image.open(BytesIO(sample["jpg"])).convert("RGB")
        return np.asarray(image if self.transform is None else self.transform(image)), sample["y"]


def load(dataset: StreamingDataset, size: int, workers: int) -> StreamingDataLoader:
    return StreamingDataLoader(dataset, batch_size=size, num_workers=workers, persistent_workers=workers > 0)


def stream(data: Data, *, shuffled: bool, workers: int) -> Any:
    dataset = StreamingDataset(local=str(data.folder), shuffle=shuffled, batch_size=64, predownload=PREDOWNLOAD)
    return load(dataset, 64, workers) if workers else dataset


def arrays(data: Data, *, size: int, workers: int) -> StreamingDataLoader:
    return load(StreamingDataset(local=str(data.folder), shuffle=True, batch_size=size), size, workers)


def decode(data: Data, *, workers: int) -> StreamingDataLoader:
    return load(Images(local=str(data.folder), shuffle=True, batch_size=64), 64, workers)


def crop(data: Data, *, workers: int) -> StreamingDataLoader:
    transform = Compose([RandomResizedCrop(224), RandomHorizontalFlip()])
    return load(Images(transform, local=str(data.folder), shuffle=True, batch_size=64), 64, workers)


def places(data: Data) -> Callable[[int], Any]:
    return StreamingDataset(local=str(data.folder), batch_size=64).__getitem__


def start(data: Data, *, workers: int) -> tuple[StreamingDataLoader, Callable[[], bytes]]:
    loader = load(StreamingDataset(local=str(data.folder), shuffle=True, shuffle_seed=0, batch_size=64), 64, workers)
    return loader, lambda: json.dumps(loader.state_dict()).encode()


def restore(data: Data, state: bytes, *, workers: int) -> Iterator[Any]:
    loader, _ = start(data, workers=workers)
    loader.load_state_dict(json.loads(state))
    return iter(loader)


def plain(task: str, item: Any, data: Data) -> Iterator[tuple[Any, int]]:
    parts = [item[field] for field in FIELDS[data.kind]] if isinstance(item, dict) else item[:-1]
    values, labels = parts[0], item["y"] if isinstance(item, dict) else item[-1]
    if isinstance(labels, int):
        yield b"".join(parts), labels
    elif isinstance(values, torch.Tensor):
        yield from zip(values.numpy(), labels.tolist())
    else:
        yield from zip(values, labels.tolist())


def size(task: str, item: Any) -> int:
    labels = item[1] if isinstance(item, list) else item["y"]
    return 1 if isinstance(labels, int) else len(labels)
