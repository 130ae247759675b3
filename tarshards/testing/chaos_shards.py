"""Small copies of shards in three versions, and their samples as read by an independent reader, Python's tarfile."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from tarshards.errors import OpenError
from tarshards.index.build import build_index
from tarshards.parallel.forks import cached_property
from tarshards.storage.location import Location
from tarshards.storage.opening import open_shard

SAMPLES = 40  # samples of a shard that are copied, at most
FIRST, MOST = 1 << 20, 1 << 26  # bytes to read of a shard: at first, and at most until two samples are found
LEAST = 8  # smallest size of a member that other versions change; labels are shorter
END = bytes(1024)

PATTERN = "chaos-%d.tar"

Fields = dict[str, str]  # the digests of the fields of a sample


def digest(data: bytes) -> str:
    return blake2b(data, digest_size=6).hexdigest()


def read_truth(archive: bytes) -> dict[str, Fields]:
    """Return the samples of an archive, by key, as tarfile reads them."""
    found: dict[str, Fields] = {}
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            if (name := _split(member)) is not None:
                file = tar.extractfile(member)
                assert file is not None
                found.setdefault(name[0], {})[name[1]] = digest(file.read())
    return found


def _split(member: tarfile.TarInfo) -> tuple[str, str] | None:
    """Return the key and field of a member, None if it is part of no sample."""
    folder, slash, base = member.name.rpartition("/")
    key, dot, field = base.partition(".")
    return (folder + slash + key, field.lower()) if member.isfile() and dot and key else None


def beginning(url: str) -> bytes:
    """Return the first SAMPLES samples of a shard as an archive, with unchanged bytes."""
    with open_shard(url) as stream:
        data, size = stream.read(FIRST), FIRST
        while True:
            ends, is_whole = _ends(data)
            if len(ends) > 1 or is_whole:
                break
            if size >= MOST:
                raise OpenError(f"fewer than two samples in the first {MOST >> 20} MiB", url=url)
            more = stream.read(size)
            if not more:
                raise OpenError("no whole sample in this shard", url=url)
            data, size = data + more, 2 * size
    return data[: ends[: SAMPLES + 1][-1]] + END


def _ends(data: bytes) -> tuple[list[int], bool]:
    """Return where the samples begin (and the last one ends, if the archive is whole), and whether it is whole."""
    ends: list[int] = []
    last = None
    try:
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            for member in tar:
                name = _split(member)
                if name is not None and name[0] != last:
                    ends.append(member.offset)
                    last = name[0]
            end = tar.offset
    except tarfile.TarError:
        return ends, False
    is_whole = data[end : end + 512] == bytes(512) if end + 512 <= len(data) else False
    return [*ends, end] if is_whole else ends, is_whole


def changed(archive: bytes) -> bytes:
    """Return an archive with the same headers and other data in each member of at least LEAST bytes."""
    data = bytearray(archive)
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            if member.isfile() and member.size >= LEAST:
                data[member.offset_data] ^= 1
    return bytes(data)


def resized(archive: bytes) -> bytes:
    """Return an archive with one more byte in each member of at least LEAST bytes."""
    target = io.BytesIO()
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar, tarfile.open(fileobj=target, mode="w") as out:
        for member in tar:
            if member.isfile():
                file = tar.extractfile(member)
                assert file is not None
                content = file.read() + b"!" * (member.size >= LEAST)
                member.size = len(content)
                member.pax_headers = {name: text for name, text in member.pax_headers.items() if name != "size"}
                out.addfile(member, io.BytesIO(content))
    return target.getvalue()


@dataclass
class ShardCopies:
    """Copies of the beginnings of shards in *folder*, one folder for each version: unchanged, changed, resized."""

    folder: Path
    names: list[str]
    urls: list[str]  # the URLs of the original shards

    @classmethod
    def make(cls, urls: list[str], folder: Path) -> ShardCopies:
        """Copy the shards *urls*, with indexes."""
        copies = cls(folder, [PATTERN % number for number in range(len(urls))], urls)
        archives = [beginning(url) for url in urls]
        versions: list[Callable[[bytes], bytes]] = [bytes, changed, resized]
        for number, version in enumerate(versions):
            (folder / f"{number}").mkdir(parents=True)
            for name, archive in zip(copies.names, archives):
                path = folder / f"{number}" / name
                path.write_bytes(version(archive))
                build_index(str(path)).save(Location.of(path, sync=False))
        return copies

    @cached_property
    def versions(self) -> dict[str, tuple[bytes, bytes, bytes]]:
        """The files of all versions by name, for `UnreliableSite`."""
        names = [path.name for path in sorted((self.folder / "0").iterdir())]
        return {f"/{name}": tuple(self.content(name, number) for number in range(3)) for name in names}  # type: ignore[misc]

    def content(self, name: str, version: int = 0) -> bytes:
        return (self.folder / f"{version}" / name).read_bytes()

    @cached_property
    def truth(self) -> list[dict[str, dict[str, Fields]]]:
        """The samples of each version by shard and key."""
        return [{name: read_truth(self.content(name, number)) for name in self.names} for number in range(3)]

    @cached_property
    def whole(self) -> dict[str, dict[str, Fields]]:
        """The samples of the original shards by shard and key."""
        found = {}
        for url in self.urls:
            with open_shard(url) as stream:
                found[url.rpartition("/")[2]] = read_truth(stream.read())
        return found

    @cached_property
    def fields(self) -> list[str]:
        """The fields that all samples have."""
        every = [set(fields) for shard in self.truth[0].values() for fields in shard.values()]
        return sorted(set.intersection(*every))

    def headers(self, name: str) -> Iterator[int]:
        """Yield where the headers of a shard begin."""
        with tarfile.open(fileobj=io.BytesIO(self.content(name))) as tar:
            for member in tar:
                yield member.offset
