"""tarshards, a ShardLoader: transforms in Python, in worker processes, instead of an ArrayLoader's in threads."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from peers import _images
from peers.tarshards_rows import shards
from sets import Data

from tarshards import ShardDataset, ShardLoader

PACKAGES = ()  # the environment that the suite itself runs in
SYSTEM = ()
OWN = False
THREADS = ()
FORM = {"crop": "transforms in Python"}
DECODERS = ("Pillow", "simplejpeg")
CANNOT = {
    "stream": "same as tarshards",
    "arrays": "same as tarshards",
    "random": "same as tarshards",
    "write": "same as tarshards",
    "index": "same as tarshards",
    "resume": "same as tarshards",
    "first": "same as tarshards",
    "cold": "same as tarshards",
}


def load(data: Data, decoded: Any, workers: int, *, shuffled: bool) -> ShardLoader:
    dataset = ShardDataset(shards(data), shuffle=shuffled).to_tuple("jpg", "cls").map_tuple(decoded, int)
    return ShardLoader(dataset, 64, num_workers=workers, persistent_workers=workers > 0)


def decode(data: Data, *, workers: int, decoder: str = "Pillow") -> ShardLoader:
    return load(data, partial(_images.decode, decoder=decoder), workers, shuffled=False)


def crop(data: Data, *, workers: int, decoder: str = "Pillow") -> ShardLoader:
    return load(data, partial(_images.random_crop, decoder=decoder), workers, shuffled=True)


def plain(task: str, item: Any, data: Data) -> Iterator[tuple[np.ndarray, int]]:
    yield from zip(map(np.asarray, item[0]), map(int, item[1]))


def size(task: str, item: Any) -> int:
    return len(item[1])
