"""tarshards, an ArrayLoader's ragged rows: a batch is one array of bytes and where each sample begins in it."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from sets import FIELDS, Data

from tarshards import ArrayLoader, Stream, World
from tarshards.loaders.arrays.readers.arrays import ragged
from tarshards.loaders.arrays.readers.parsed import integer

PACKAGES = ()  # the environment that the suite itself runs in
SYSTEM = ()
OWN = False
BATCH = 64
SIZES = {"raw-110k": 64, "raw-110k-10k": 64, "raw-1m": 16}  # batches of its best size; of small samples 1,024
THREADS = ("stream", "restore")
FORM = {"stream": "rows"}
CANNOT = {
    "arrays": "same as tarshards",
    "decode": "same as tarshards",
    "crop": "same as tarshards",
    "random": "same as tarshards",
    "write": "same as tarshards",
    "index": "same as tarshards",
}


def shards(data: Data) -> Any:
    """The manifest beside the shards, or the shards themselves."""
    manifest = Path(data.urls[0]).with_name(f"{data.name}.shards.json")
    return manifest if manifest.exists() else data.urls


def stream(data: Data, *, shuffled: bool, workers: int) -> ArrayLoader:
    return loader(data, SIZES.get(data.name, 1024), workers, shuffled=shuffled)


def loader(data: Data, size: int, workers: int, *, shuffled: bool) -> ArrayLoader:
    """Data that only need copying are copied fastest by the caller's own thread, the default."""
    threads = None if workers == 1 else workers
    dataset = Stream.from_shards(shards(data), shuffle=shuffled, world=World.detect())
    fields = {field: ragged() for field in FIELDS[data.kind]}
    return ArrayLoader(dataset, size, fields={**fields, "cls": integer()}, threads=threads)


def start(data: Data, *, workers: int) -> tuple[ArrayLoader, Callable[[], bytes]]:
    resumable = loader(data, BATCH, workers, shuffled=True)
    return resumable, lambda: json.dumps(resumable.state_dict()).encode()


def restore(data: Data, state: bytes, *, workers: int) -> Iterator[Any]:
    resumable = loader(data, BATCH, workers, shuffled=True)
    resumable.load_state_dict(json.loads(state))
    return iter(resumable)


def npy(values: Any) -> bytes:
    """The file of an array, whose values a batch has."""
    import numpy as np

    file = io.BytesIO()
    np.save(file, values)
    return file.getvalue()


def plain(task: str, item: dict[str, Any], data: Data) -> Iterator[tuple[bytes, int]]:
    columns = []
    for field in FIELDS[data.kind]:
        values, offsets = item[field]
        to_bytes = npy if field == "npy" else bytes
        columns.append([to_bytes(values[begin:end]) for begin, end in pairwise(offsets.tolist())])
    yield from zip(map(b"".join, zip(*columns)), item["cls"].tolist())


def size(task: str, item: dict[str, Any]) -> int:
    return len(item["cls"])
