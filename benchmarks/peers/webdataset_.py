"""webdataset, plain tars: a pipeline of generators; where there are workers, batched in them, as its guide says."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
from checks import FIELD
from peers import _images
from sets import FIELDS, Data, Sample
from webdataset import ShardWriter, WebDataset, WebLoader, split_by_node
from wids import ShardListDataset
from wids.wids import compute_num_samples

PACKAGES = ("webdataset==1.0.2", "wids==0.1.11", "torch==2.13.0", "pillow==13.0.0", "simplejpeg==1.9.0")
SYSTEM = ()
OWN = False
THREADS = ()
FORM = {"crop": "transforms in Python"}
DECODERS = ("Pillow", "simplejpeg")
CANNOT = {"resume": "has no state; its author recommends resampling shards instead"}
BATCH, SHARDS, POOL = 64, 4, 1000


def open_shards(data: Data, *, shuffled: bool) -> WebDataset:
    shards = 100 if shuffled else False
    dataset = WebDataset(list(data.urls), shardshuffle=shards, nodesplitter=split_by_node)
    return dataset.shuffle(POOL) if shuffled else dataset


def load(dataset: WebDataset, workers: int) -> Iterable[Any]:
    return WebLoader(dataset, batch_size=None, num_workers=workers, persistent_workers=workers > 0)


def stream(data: Data, *, shuffled: bool, workers: int) -> Iterable[Any]:
    dataset = open_shards(data, shuffled=shuffled)
    return load(dataset.batched(BATCH, collation_fn=list), workers) if workers else dataset


def batches(data: Data, read: Callable[[bytes], np.ndarray], size: int, workers: int, *, shuffled: bool) -> WebLoader:
    dataset = open_shards(data, shuffled=shuffled).to_tuple(FIELD[data.kind], "cls").map_tuple(read, int)
    return load(dataset.batched(size), workers)


def read_npy(data: bytes) -> np.ndarray:
    return np.load(io.BytesIO(data))


def read_rgb(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8).reshape(32, 32, 3)


def arrays(data: Data, *, size: int, workers: int) -> WebLoader:
    return batches(data, read_npy if data.kind == "otto" else read_rgb, size, workers, shuffled=True)


def decode(data: Data, *, workers: int, decoder: str = "Pillow") -> WebLoader:
    return batches(data, partial(_images.decode, decoder=decoder), BATCH, workers, shuffled=False)


def crop(data: Data, *, workers: int, decoder: str = "Pillow") -> WebLoader:
    return batches(data, partial(_images.random_crop, decoder=decoder), BATCH, workers, shuffled=True)


def places(data: Data) -> Callable[[int], dict[str, Any]]:
    """Use wids, the indexed part of webdataset, which first copies the shards into its cache."""
    manifest, cache = str(data.folder / "shards.json"), str(data.folder / "cache")
    return ShardListDataset(manifest, cache_dir=cache, transformations=[]).__getitem__


def index(data: Data) -> None:
    """What `wids_index create` does, without its copies and MD5 sums of the shards."""
    shards = [
        {"url": url, "nsamples": compute_num_samples(url), "filesize": os.path.getsize(url)}
        for url in map(os.path.abspath, data.urls)
    ]
    manifest = {"__kind__": "wids-shard-index-v1", "wids_version": 1, "shardlist": shards}
    (data.folder / "shards.json").write_text(json.dumps(manifest))


def write(samples: list[Sample], data: Data) -> None:
    with ShardWriter(f"{data.folder}/%06d.tar", maxcount=-(-len(samples) // SHARDS), verbose=0) as writer:
        for sample in samples:
            writer.write(sample)


def plain(task: str, item: Any, data: Data) -> Iterator[tuple[Any, int]]:
    if task == "random":
        yield item[f".{FIELD[data.kind]}"].read(), int(item[".cls"].read())
    elif task == "stream":
        for sample in item if isinstance(item, list) else [item]:
            yield b"".join(sample[field] for field in FIELDS[data.kind]), int(sample["cls"])
    else:
        yield from zip(map(np.asarray, item[0]), map(int, item[1]))


def size(task: str, item: Any) -> int:
    if isinstance(item, dict):
        return 1
    return len(item) if task == "stream" else len(item[1])
