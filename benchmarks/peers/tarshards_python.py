"""tarshards in pure Python, plain tars: as installed without a compiler."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from checks import FIELD
from sets import Data, Sample

from tarshards import kernels

kernels.IS_COMPILED = False  # before a kernel is used, so that the twins in Python are taken

from tarshards import Stream, World, build_index  # noqa: E402
from tarshards.storage.location import Location  # noqa: E402

PACKAGES = ()  # the environment that the suite itself runs in
SYSTEM = ()
OWN = False
THREADS = ()
CANNOT = {
    "arrays": "measured with the kernels only",
    "decode": "measured with the kernels only",
    "crop": "measured with the kernels only",
    "random": "measured with the kernels only",
    "write": "measured with the kernels only",
    "resume": "measured with the kernels only",
    "first": "measured with the kernels only",
}


def stream(data: Data, *, shuffled: bool, workers: int) -> Stream:
    if shuffled or workers:
        raise NotImplementedError("measured with the kernels only")
    return Stream.from_shards(list(data.urls), index=False, world=World.detect())


def index(data: Data) -> None:
    for url in data.urls:
        build_index(url).save(Location.of(data.folder / Path(url).name, sync=False))


def plain(task: str, item: Sample, data: Data) -> Iterator[tuple[bytes, int]]:
    yield item[FIELD[data.kind]], int(item["cls"])
