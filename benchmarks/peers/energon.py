"""Megatron Energon, plain tars: prepared by the function behind `energon prepare`, then read as crude samples."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from checks import FIELD
from megatron.energon import (
    Cooker,
    DefaultTaskEncoder,
    Sample,
    SampleDecoder,
    SavableDataLoader,
    WorkerConfig,
    basic_sample_keys,
    edataclass,
    get_loader,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
    stateless,
)
from megatron.energon.epathlib import EPath
from megatron.energon.flavors.webdataset.itar_reader import SqliteITarEntryReader
from megatron.energon.flavors.webdataset.prepare import WebdatasetPreparator
from peers import _torchvision  # noqa: F401 - before what imports torchvision
from sets import Data
from torchvision.transforms import Compose, RandomHorizontalFlip, RandomResizedCrop

PACKAGES = ("megatron-energon==7.4.1", "torch==2.13.0", "torchvision==0.28.0")
SYSTEM = ()
OWN = False
THREADS = ()
DECODERS = ("Pillow",)
CANNOT = {"write": "has no writer of its own"}


def index(data: Data) -> None:
    if "://" in data.urls[0]:
        raise NotImplementedError("opens no http URLs: its preparation writes beside the shards")
    for url in data.urls:
        (data.folder / Path(url).name).symlink_to(Path(url).resolve())
    names = [Path(url).name for url in data.urls]
    WebdatasetPreparator.prepare_dataset(
        data.folder, names, split_parts_ratio=[("train", 1.0)], shuffle_seed=None, workers=os.cpu_count() or 1
    )
    lines = "__module__: megatron.energon\n__class__: CrudeWebdataset\n"
    (data.folder / ".nv-meta" / "dataset.yaml").write_text(lines)


@edataclass
class Pair(Sample):
    payload: Any
    label: int


class Encoder(DefaultTaskEncoder):
    """Make samples from a set's members, and batches from the samples."""

    def __init__(self, data: Data, *, raw: bool, transform: Callable[[Any], Any] | None = None):
        super().__init__()
        self.kind, self.raw, self.transform = data.kind, raw, transform
        self.decoder = SampleDecoder(image_decode="pilrgb") if transform else None
        self.cookers = [Cooker(self.cook)]

    @stateless
    def cook(self, sample: dict[str, Any]) -> Pair:
        payload = sample[FIELD[self.kind]]
        if self.transform:
            payload = np.asarray(self.transform(payload))
        elif self.kind == "otto" and not self.raw:
            payload = np.load(BytesIO(payload))
        return Pair(**basic_sample_keys(sample), payload=payload, label=int(sample["cls"]))

    @stateless
    def batch(self, samples: list[Pair]) -> dict[str, Any]:
        payloads: Any = [sample.payload for sample in samples]
        if self.kind == "cifar" and not self.raw:
            payloads = np.frombuffer(b"".join(payloads), np.uint8).reshape(-1, 32, 32, 3)
        elif not self.raw:
            payloads = np.stack(payloads)
        return {"payload": payloads, "label": [sample.label for sample in samples]}


def dataset(data: Data, encoder: Encoder, size: int, workers: int, *, shuffled: bool = True) -> Any:
    """One epoch of the set; the buffer is of its documentation's size."""
    if "://" in data.urls[0]:
        raise NotImplementedError("opens no http URLs: its preparation writes beside the shards")
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    options = {
        "split_part": "train",
        "worker_config": WorkerConfig(rank=rank, world_size=world, num_workers=workers),
        "batch_size": size,
        "task_encoder": encoder,
    }
    if not shuffled:
        return get_val_dataset(data.folder, **options)
    return get_train_dataset(
        data.folder, **options, shuffle_buffer_size=1000, max_samples_per_sequence=100, repeat=False
    )


def stream(data: Data, *, shuffled: bool, workers: int) -> Any:
    return get_loader(dataset(data, Encoder(data, raw=True), 64, workers, shuffled=shuffled))


def arrays(data: Data, *, size: int, workers: int) -> Any:
    return get_loader(dataset(data, Encoder(data, raw=False), size, workers))


def decode(data: Data, *, workers: int) -> Any:
    return get_loader(dataset(data, Encoder(data, raw=False, transform=np.asarray), 64, workers))


def crop(data: Data, *, workers: int) -> Any:
    transform = Compose([RandomResizedCrop(224), RandomHorizontalFlip()])
    return get_loader(dataset(data, Encoder(data, raw=False, transform=transform), 64, workers))


def places(data: Data) -> Callable[[int], Any]:
    reader = SqliteITarEntryReader(EPath(data.folder), key_is_full_entryname=False)
    return lambda i: reader[f"{i:08d}"]


def savable(data: Data, workers: int) -> SavableDataLoader:
    return get_savable_loader(dataset(data, Encoder(data, raw=True), 64, workers))


def start(data: Data, *, workers: int) -> tuple[SavableDataLoader, Callable[[], bytes]]:
    loader = savable(data, workers)
    return loader, lambda: pickle.dumps(loader.save_state_rank())


def restore(data: Data, state: bytes, *, workers: int) -> Iterator[Any]:
    loader = savable(data, workers)
    loader.restore_state_rank(pickle.loads(state))
    return iter(loader)


def plain(task: str, item: dict[str, Any], data: Data) -> Iterator[tuple[Any, int]]:
    if task == "random":
        yield item[FIELD[data.kind]], int(item["cls"])
    else:
        payloads = item["payload"]  # arrays come as tensors
        yield from zip(payloads if isinstance(payloads, list) else np.asarray(payloads), item["label"])


def size(task: str, item: dict[str, Any]) -> int:
    return 1 if task == "random" else len(item["label"])
