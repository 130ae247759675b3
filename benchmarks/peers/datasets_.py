"""Hugging Face datasets, its webdataset builder: streamed from plain tars, or converted into Arrow files of its cache.

stream reads the tars; arrays, decode, crop, random and resume read the Arrow files, made when they are first opened.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import datasets
import numpy as np
from checks import FIELD
from datasets.distributed import split_dataset_by_node
from peers import _torchvision  # noqa: F401 - before what imports torchvision
from sets import Data, Sample
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader
from torchvision.transforms import Compose, RandomHorizontalFlip, RandomResizedCrop

PACKAGES = ("datasets==5.2.0", "aiohttp==3.14.5", "torch==2.13.0", "torchdata==0.11.0", "torchvision==0.28.0")
SYSTEM = ()
OWN = False
THREADS = ()
DECODERS = ("Pillow",)
CANNOT = {"index": "reads tars in order, or converts them; it has no index of them"}
TYPES = {
    "raw": datasets.Value("binary"),
    "text": datasets.Value("string"),
    "otto": datasets.List(datasets.Value("float32"), length=93),
    "cifar": datasets.Value("binary"),
    "jpeg": datasets.Image(mode="RGB"),
}
SHARDS, BUFFER = 16, 1000  # of a shuffled epoch over the Arrow files; samples of its buffer
datasets.disable_progress_bars()


def load(data: Data, **options: Any) -> Any:
    features = {FIELD[data.kind]: TYPES[data.kind], "cls": datasets.Value("int64")}
    features |= {"__key__": datasets.Value("string"), "__url__": datasets.Value("string")}
    return datasets.load_dataset(
        "webdataset",
        data_files={"train": list(data.urls)},
        split="train",
        features=datasets.Features(features),
        cache_dir=str(data.folder),
        **options,
    )


class Epochs:
    """A loader that passes each epoch to its dataset."""

    def __init__(self, dataset: Any, loader: Any):
        self.dataset, self.loader, self.epochs = dataset, loader, count()

    def __iter__(self) -> Iterator[Any]:
        self.dataset.set_epoch(next(self.epochs))
        return iter(self.loader)


def stream(data: Data, *, shuffled: bool, workers: int) -> Epochs:
    dataset = load(data, streaming=True)
    if "RANK" in os.environ:
        dataset = split_dataset_by_node(dataset, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    if shuffled:
        dataset = dataset.shuffle(seed=0, buffer_size=BUFFER)
    if not workers:
        return Epochs(dataset, dataset)
    options = {"num_workers": workers, "persistent_workers": True, "collate_fn": list}
    return Epochs(dataset, DataLoader(dataset, batch_size=64, **options))


def pieces(data: Data) -> Any:
    """The Arrow files as an iterable dataset, which reads them in runs, much faster than row by row."""
    columns = load(data).select_columns([FIELD[data.kind], "cls"])
    return columns.to_iterable_dataset(num_shards=SHARDS).shuffle(seed=0, buffer_size=BUFFER)


def numbers(batch: dict[str, Any]) -> tuple[np.ndarray, Any]:
    if "x.npy" in batch:
        return np.asarray(batch["x.npy"], np.float32), batch["cls"]
    return np.frombuffer(b"".join(batch["rgb"]), np.uint8).reshape(-1, 32, 32, 3), batch["cls"]


def arrays(data: Data, *, size: int, workers: int) -> Epochs:
    dataset = pieces(data).with_format("numpy").batch(size)
    options = {"num_workers": workers, "persistent_workers": workers > 0, "collate_fn": numbers}
    return Epochs(dataset, DataLoader(dataset, batch_size=None, **options))


def stacked(samples: list[dict[str, Any]]) -> tuple[np.ndarray, list[int]]:
    return np.stack([np.asarray(sample["jpg"]) for sample in samples]), [sample["cls"] for sample in samples]


def decode(data: Data, *, workers: int) -> DataLoader:
    options = {"num_workers": workers, "persistent_workers": workers > 0, "collate_fn": stacked}
    return DataLoader(load(data), batch_size=64, shuffle=True, **options)


def crop(data: Data, *, workers: int) -> DataLoader:
    transform = Compose([RandomResizedCrop(224), RandomHorizontalFlip()])

    def transformed(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        return rows | {"jpg": [transform(image) for image in rows["jpg"]]}

    options = {"num_workers": workers, "persistent_workers": workers > 0, "collate_fn": stacked}
    return DataLoader(load(data).with_transform(transformed), batch_size=64, shuffle=True, **options)


def places(data: Data) -> Callable[[int], dict[str, Any]]:
    return load(data).__getitem__


def write(samples: list[Sample], data: Data) -> None:
    field = FIELD[data.kind]
    columns = {"__key__": [sample["__key__"] for sample in samples], field: [sample[field] for sample in samples]}
    columns["cls"] = [int(sample["cls"]) for sample in samples]
    datasets.Dataset.from_dict(columns).save_to_disk(data.folder / "set")


def start(data: Data, *, workers: int) -> tuple[StatefulDataLoader, Callable[[], bytes]]:
    loader = StatefulDataLoader(pieces(data), batch_size=64, num_workers=workers, collate_fn=list)
    return loader, lambda: pickle.dumps(loader.state_dict())


def restore(data: Data, state: bytes, *, workers: int) -> Iterator[Any]:
    loader, _ = start(data, workers=workers)
    loader.load_state_dict(pickle.loads(state))
    return iter(loader)


def plain(task: str, item: Any, data: Data) -> Iterator[tuple[Any, int]]:
    if isinstance(item, tuple):
        yield from zip(*item)
        return
    for sample in item if isinstance(item, list) else [item]:
        payload = sample[FIELD[data.kind]]
        yield payload.encode() if isinstance(payload, str) else payload, int(sample["cls"])


def size(task: str, item: Any) -> int:
    if isinstance(item, tuple):
        return len(item[1])
    return len(item) if isinstance(item, list) else 1
