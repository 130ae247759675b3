"""Python tarfile, plain tars: the standard library's own reader and writer, a member at a time."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Iterator

from sets import Data, Sample, read_samples

PACKAGES = ()
SYSTEM = ()
OWN = False
THREADS = ()
CANNOT = {
    "arrays": "knows members, not arrays or batches",
    "decode": "knows members, not images",
    "crop": "knows members, not images",
    "resume": "has no state",
}
PAYLOAD = {"raw": "bin", "text": "txt"}
SHARDS = 4


class Samples:
    """The samples of all shards, grouped by adjacent members."""

    def __init__(self, urls: tuple[str, ...]):
        self.urls = urls

    def __iter__(self) -> Iterator[Sample]:
        return read_samples(self.urls)


def stream(data: Data, *, shuffled: bool, workers: int) -> Samples:
    if shuffled:
        raise NotImplementedError("reads in archive order only")
    if workers:
        raise NotImplementedError("has no workers")
    if "://" in data.urls[0]:
        raise NotImplementedError("reads no URLs")
    return Samples(data.urls)


def places(data: Data) -> Callable[[int], Sample]:
    samples: dict[str, list[tuple[str, tarfile.TarFile, tarfile.TarInfo]]] = {}
    for url in data.urls:
        tar = tarfile.open(url)  # noqa: SIM115 - its members are read later
        for member in tar.getmembers():
            key, _, field = member.name.partition(".")
            samples.setdefault(key, []).append((field, tar, member))
    keys = list(samples)
    return lambda i: {field: tar.extractfile(member).read() for field, tar, member in samples[keys[i]]}


def index(data: Data) -> None:
    """There is no index format, so the members are only listed."""
    for url in data.urls:
        with tarfile.open(url) as tar:
            tar.getmembers()


def write(samples: list[Sample], data: Data) -> None:
    for shard in range(SHARDS):
        with tarfile.open(data.folder / f"{shard}.tar", "w") as tar:
            for sample in samples[shard * len(samples) // SHARDS : (shard + 1) * len(samples) // SHARDS]:
                for field, value in sample.items():
                    if field != "__key__":
                        member = tarfile.TarInfo(f"{sample['__key__']}.{field}")
                        member.size = len(value)
                        tar.addfile(member, io.BytesIO(value))


def plain(task: str, item: Sample, data: Data) -> Iterator[tuple[bytes, int]]:
    yield item[PAYLOAD[data.kind]], int(item["cls"])
