"""Squirrel, its messagepack stores (gzip): streams of shards, torch's DataLoader for the workers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from io import BytesIO
from typing import Any

import numpy as np
import torch
from checks import FIELD
from peers import _images
from sets import Data, Sample, read_samples
from squirrel.driver import MessagepackDriver
from squirrel.iterstream import Composable, IterableSource
from squirrel.iterstream.iterators import shuffle_
from squirrel.iterstream.torch_composables import SplitByRank, SplitByWorker
from torch.utils.data import DataLoader

PACKAGES = ("squirrel-core==0.20.2", "torch==2.13.0", "pillow==13.0.0", "simplejpeg==1.9.0")
SYSTEM = ()
OWN = True
THREADS = ()
DECODERS = ("Pillow", "simplejpeg")
CANNOT = {"index": "reads no tars", "resume": "a stream has no state; it starts again"}
SHARDS, BUFFER = 16, 1000

torch.set_num_threads(1)
if "RANK" in os.environ:  # it splits by the group of processes alone
    torch.distributed.init_process_group("gloo")


def rows(samples: list[Sample], kind: str) -> Iterator[dict[str, Any]]:
    for sample in samples:
        value: Any = sample[FIELD[kind]]
        if kind == "otto":
            value = np.load(BytesIO(value))
        elif kind == "cifar":
            value = np.frombuffer(value, np.uint8).reshape(32, 32, 3)
        yield {"x": value, "y": int(sample["cls"])}


def write(samples: list[Sample], data: Data) -> None:
    store = MessagepackDriver(str(data.folder / "shards")).store
    shards = IterableSource(rows(samples, data.kind)).batched(-(-len(samples) // SHARDS), drop_last_if_not_full=False)
    named = shards.zip_index(pad_length=6)
    named.async_map(lambda shard: store.set(shard[1], key=shard[0]), max_workers=2).join()  # gzip frees the lock


def samples_of(data: Data, *, shuffled: bool) -> Composable:
    """Its shards, split over ranks and workers before they are shuffled: otherwise each would draw its own order."""
    driver = MessagepackDriver(str(data.folder / "shards"))
    hooks = [SplitByRank, SplitByWorker, *([partial(shuffle_, bufsize=SHARDS)] if shuffled else [])]
    keys, pool = sorted(driver.keys()), BUFFER if shuffled else 1
    return driver.get_iter(keys_iterable=keys, key_hooks=hooks, max_workers=0, shuffle_item_buffer=pool)


def load(stream: Composable, workers: int) -> DataLoader:
    dataset = stream.to_torch_iterable()
    return DataLoader(dataset, batch_size=None, num_workers=workers, persistent_workers=workers > 0)


def stream(data: Data, *, shuffled: bool, workers: int) -> Any:
    items = samples_of(data, shuffled=shuffled)
    return load(items.batched(64, drop_last_if_not_full=False), workers) if workers else items


def arrays(data: Data, *, size: int, workers: int) -> Any:
    batches = samples_of(data, shuffled=True).batched(size, stack, drop_last_if_not_full=False)
    return load(batches, workers) if workers else batches


def stack(items: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    return {"x": np.stack([item["x"] for item in items]), "y": np.array([item["y"] for item in items])}


def images(data: Data, transform: Callable[[bytes], np.ndarray], workers: int) -> Any:
    def decoded(item: dict[str, Any]) -> dict[str, Any]:
        return {"x": transform(item["x"]), "y": item["y"]}

    batches = samples_of(data, shuffled=True).map(decoded).batched(64, stack, drop_last_if_not_full=False)
    return load(batches, workers) if workers else batches


def decode(data: Data, *, workers: int, decoder: str = "Pillow") -> Any:
    return images(data, partial(_images.decode, decoder=decoder), workers)


def crop(data: Data, *, workers: int, decoder: str = "Pillow") -> Any:
    return images(data, partial(_images.random_crop, decoder=decoder), workers)


def places(data: Data) -> Callable[[int], Any]:
    """Access by key is to whole shards, so that this needs a store with a key for each sample."""
    driver = MessagepackDriver(str(data.folder / "samples"))
    if not (data.folder / "samples").exists():
        for place, row in enumerate(rows(list(read_samples(data.urls)), data.kind)):
            driver.store.set(row, key=str(place))
    return lambda place: next(iter(driver.get(str(place))))


def plain(task: str, item: Any, data: Data) -> Iterator[tuple[Any, int]]:
    if isinstance(item, dict) and isinstance(item["y"], int):
        yield item["x"], item["y"]
    elif isinstance(item, dict):
        yield from zip(np.asarray(item["x"]), item["y"].tolist())
    else:
        yield from ((one["x"], one["y"]) for one in item)


def size(task: str, item: Any) -> int:
    if isinstance(item, list):
        return len(item)
    return 1 if isinstance(item["y"], int) else len(item["y"])
