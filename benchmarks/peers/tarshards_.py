"""tarshards, plain tars with indexes: samples planned, from mapped shards; processes for bytes, threads for arrays."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgpack  # noqa: F401 - which the index imports late
from checks import FIELD
from sets import FIELDS, Data, Sample

from tarshards import ArrayLoader, IndexedShards, ShardDataset, ShardLoader, ShardWriter, Stream, World, build_index
from tarshards.index.manifests import write_manifest
from tarshards.loaders.arrays.readers.arrays import array
from tarshards.loaders.arrays.readers.images import image
from tarshards.loaders.arrays.readers.parsed import integer
from tarshards.storage.location import Location
from tarshards.storage.manifest import Shard

PACKAGES = ()  # the environment that the suite itself runs in
SYSTEM = ()
OWN = False
THREADS = ("arrays", "decode", "crop")
DECODERS = ("libjpeg-turbo",)
CANNOT = {}
BATCH, SHARDS, CROP = 64, 4, 224
SIDES = {"photos256": (256, 256), "photos500": (375, 500)}


def manifest(data: Data) -> Path:
    return data.folder / "shards.json"


def shards(data: Data) -> Any:
    """The manifest of the shards that index() has indexed, or the shards themselves."""
    return manifest(data) if manifest(data).exists() else data.urls


def index(data: Data) -> None:
    """What tarindex does; by links to the shards, so that the indexes beside them are in this peer's folder."""
    indexed = []
    for url in data.urls:
        link = data.folder / Path(url).name
        if not link.is_symlink():
            link.symlink_to(Path(url).absolute())
        index = build_index(str(link))
        index.save(Location.of(link, sync=False))  # as its peers, here and below
        indexed.append(Shard(str(link), len(index), index.shard_size))
    write_manifest(Location(str(manifest(data)), sync=False), indexed)


def write(samples: list[Sample], data: Data) -> None:
    with ShardWriter(f"{data.folder}/{{shard:06d}}.tar", max_samples=-(-len(samples) // SHARDS), sync=False) as writer:
        for sample in samples:
            writer.write(sample)


def stream(data: Data, *, shuffled: bool, workers: int) -> Iterable[Any]:
    return batches(data, shuffled=shuffled, workers=workers) if workers else samples(data, shuffled=shuffled)


def samples(data: Data, *, shuffled: bool) -> Stream:
    return Stream.from_shards(shards(data), shuffle=shuffled, world=World.detect())


def batches(data: Data, *, shuffled: bool, workers: int) -> Any:
    if workers == 0:
        return samples(data, shuffled=shuffled).batched(BATCH)
    dataset = ShardDataset(shards(data), shuffle=shuffled)
    return ShardLoader(dataset, BATCH, num_workers=workers, persistent_workers=workers > 0)


def loader(data: Data, size: int, threads: int | None, **fields: Any) -> ArrayLoader:
    dataset = samples(data, shuffled=True)
    return ArrayLoader(dataset, size, fields={**fields, "cls": integer()}, threads=threads)


def arrays(data: Data, *, size: int, workers: int) -> ArrayLoader:
    """Data that only need copying are copied fastest by the caller's own thread, the default."""
    reader = array() if data.kind == "otto" else image(shape=(32, 32, 3))
    return loader(data, size, None if workers == 1 else workers, **{FIELD[data.kind]: reader})


def decode(data: Data, *, workers: int) -> ArrayLoader:
    return loader(data, BATCH, workers, jpg=image(SIDES[data.name]))


def crop(data: Data, *, workers: int) -> ArrayLoader:
    return loader(data, BATCH, workers, jpg=image(CROP, crop="random_resized", flip=0.5))


def places(data: Data) -> Callable[[int], Sample]:
    return IndexedShards(shards(data)).__getitem__


def start(data: Data, *, workers: int) -> tuple[Any, Callable[[], bytes]]:
    resumable = batches(data, shuffled=True, workers=workers)
    return resumable, lambda: json.dumps(resumable.state_dict()).encode()


def restore(data: Data, state: bytes, *, workers: int) -> Iterator[Any]:
    resumable = batches(data, shuffled=True, workers=workers)
    resumable.load_state_dict(json.loads(state))
    return iter(resumable)


def plain(task: str, item: dict[str, Any], data: Data) -> Iterator[tuple[Any, int]]:
    payloads, labels = [item[field] for field in FIELDS[data.kind]], item["cls"]
    if isinstance(labels, bytes):
        yield b"".join(payloads), int(labels)
    else:
        yield from zip(payloads[0] if len(payloads) == 1 else map(b"".join, zip(*payloads)), map(int, labels))


def pair(batch: dict[str, Any]) -> tuple[Any, Any]:
    return batch["jpg"], batch["cls"]


def size(task: str, item: dict[str, Any]) -> int:
    return 1 if isinstance(item["cls"], bytes) else len(item["cls"])
