"""tarshards, an ArrayLoader's ragged rows: a batch is one array of bytes and where each sample begins in it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from checks import FIELD
from sets import Data

from tarshards import ArrayLoader, Stream, World
from tarshards.readers import integer, ragged

PACKAGES = ()  # the environment that the suite itself runs in
SYSTEM = ()
OWN = False
THREADS = ("stream",)
CANNOT = {
    "arrays": "as of tarshards",
    "decode": "as of tarshards",
    "crop": "as of tarshards",
    "random": "as of tarshards",
    "write": "as of tarshards",
    "index": "as of tarshards",
    "resume": "as of tarshards",
}


def stream(data: Data, *, shuffled: bool, workers: int) -> ArrayLoader:
    """What is but copied is best copied by the caller's own thread, as it is by default."""
    dataset = Stream.from_shards(list(data.urls), shuffle=shuffled, world=World.detect())
    fields = {FIELD[data.kind]: ragged(), "cls": integer()}
    return ArrayLoader(
        dataset, 64 if data.name == "raw-110k" else 256, fields=fields, threads=None if workers == 1 else workers
    )


def plain(task: str, item: dict[str, Any], data: Data) -> Iterator[tuple[bytes, int]]:
    values, offsets = item[FIELD[data.kind]]
    whole = values.tobytes()
    yield from zip((whole[begin:end] for begin, end in pairwise(offsets.tolist())), item["cls"].tolist())


def size(task: str, item: dict[str, Any]) -> int:
    return len(item["cls"])
