"""tarshards, plain tars without indexes: samples streamed shard after shard."""

from __future__ import annotations

from collections.abc import Iterator

from checks import FIELD
from sets import Data, Sample

from tarshards import Stream, World

PACKAGES = ()  # the environment that the suite itself runs in
SYSTEM = ()
OWN = False
THREADS = ()
CANNOT = {
    "arrays": "measured with indexes",
    "decode": "measured with indexes",
    "crop": "measured with indexes",
    "random": "measured with indexes",
    "write": "measured with indexes",
    "index": "measured with indexes",
    "resume": "measured with indexes",
    "first": "measured with indexes",
    "cold": "measured with indexes",
}


def stream(data: Data, *, shuffled: bool, workers: int) -> Stream:
    if shuffled or workers:
        raise NotImplementedError("measured with indexes")
    return Stream.from_shards(list(data.urls), index=False, world=World.detect())


def plain(task: str, item: Sample, data: Data) -> Iterator[tuple[bytes, int]]:
    yield item[FIELD[data.kind]], int(item["cls"])
