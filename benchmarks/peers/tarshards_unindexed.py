"""tarshards, plain tars without indexes: samples streamed shard after shard."""

from __future__ import annotations

from collections.abc import Iterator

from sets import FIELDS, Data, Sample

from tarshards import Stream, World

PACKAGES = ()  # the environment that the suite itself runs in
SYSTEM = ()
OWN = False
THREADS = ()
POOL = 1000
CANNOT = {
    "arrays": "measured with indexes",
    "decode": "measured with indexes",
    "crop": "measured with indexes",
    "random": "measured with indexes",
    "write": "measured with indexes",
    "index": "measured with indexes",
    "resume": "measured with indexes",
}


def stream(data: Data, *, shuffled: bool, workers: int) -> Stream:
    """Without indexes shuffling is by shards and a pool, as webdataset's."""
    if workers:
        raise NotImplementedError("measured with indexes")
    stream = Stream.from_shards(list(data.urls), index=False, shuffle=shuffled, world=World.detect())
    return stream.shuffle(POOL) if shuffled else stream


def plain(task: str, item: Sample, data: Data) -> Iterator[tuple[bytes, int]]:
    yield b"".join(item[field] for field in FIELDS[data.kind]), int(item["cls"])
