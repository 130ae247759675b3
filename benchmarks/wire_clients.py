"""What one process reads from a web server, by a client: ``wire_clients.py NAME`` answers the requests of wire.py.

A client delivers the bytes of shards, or their samples, to a `Sink`, which counts them in the timed part. Before it
small shards are read, so that all is imported, and after it one shard is read again and checked.
"""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

HERE = str(Path(__file__).parent)
sys.path[:] = [folder for folder in sys.path if folder != HERE] + [HERE]  # after the clients' imports

from processes import serve  # noqa: E402

AT_ONCE = 8  # files or ranges of clients that are told how many
RANGE = 8 << 20  # bytes of a range of clients that are told how large
PIECE = 1 << 20  # bytes that are read at once from a stream


class Sink:
    """What receives bytes, or samples, and counts them."""

    def __init__(self) -> None:
        self.count = 0

    def put(self, offset: int, data: Any) -> None:
        """Take bytes of a shard, from an offset of it."""
        self.count += len(data)

    def add(self, sample: Any) -> None:
        self.count += 1


class Checked(Sink):
    """A sink whose `digest` tells all that it received of one shard, in any order."""

    def __init__(self, size: int):
        super().__init__()
        self._bytes, self._samples = bytearray(size), 0

    def put(self, offset: int, data: Any) -> None:
        super().put(offset, data)
        self._bytes[offset : offset + len(data)] = data

    def add(self, sample: Any) -> None:
        super().add(sample)
        self._samples += digest_of(sample["__key__"], {name: sample[name] for name in sample if name[:2] != "__"})

    @property
    def digest(self) -> list[int]:
        return [self.count, self._samples or crc32(self._bytes)]


def digest_of(key: str, fields: dict[str, bytes]) -> int:
    return crc32(b"".join([key.encode(), *(fields[name] for name in sorted(fields))]))


def true_digest(path: Path, kind: str) -> list[int]:
    """Return the digest of a shard, of its bytes or of its samples, which Python's tarfile reads."""
    if kind == "bytes":
        data = path.read_bytes()
        return [len(data), crc32(data)]
    samples: dict[str, dict[str, bytes]] = {}
    with tarfile.open(path) as tar:
        for member in tar:
            key, _, name = member.name.partition(".")
            samples.setdefault(key, {})[name] = tar.extractfile(member).read()
    return [len(samples), sum(digest_of(key, fields) for key, fields in samples.items())]


@dataclass
class Shards:
    """Shards of a server: its URL, their names there and their sizes, and its certificate."""

    site: str
    names: list[str]
    sizes: list[int]
    certificate: str

    @property
    def urls(self) -> list[str]:
        return [f"{self.site}/{name}" for name in self.names]

    def spans(self, size_of_range: int | None) -> list[tuple[str, int, int]]:
        """Return the name, begin and end of all ranges of a size; of None, of all files."""
        return [
            (name, begin, min(begin + (size_of_range or size), size))
            for name, size in zip(self.names, self.sizes)
            for begin in range(0, size, size_of_range or size)
        ]


@dataclass(frozen=True)
class Client:
    """How a client reads, what it delivers ("bytes" or "samples"), the module it needs, and where that may be."""

    read: Callable[[Shards, Sink], None]
    kind: str
    module: str
    environments: tuple[str, ...]  # of the suite; else that of this program


CLIENTS: dict[str, Client] = {}


def client(name: str, kind: str, module: str, *environments: str) -> Callable[[Any], Any]:
    def register(read: Any) -> Any:
        CLIENTS[name] = Client(read, kind, module, environments)
        return read

    return register


# Bytes: of whole files, or of ranges of them.


@client("curl -Z, files", "bytes", "subprocess")
def curl_files(shards: Shards, sink: Sink) -> None:
    run_curl(shards, None, sink)


@client("curl -Z, ranges", "bytes", "subprocess")
def curl_ranges(shards: Shards, sink: Sink) -> None:
    run_curl(shards, RANGE, sink)


def run_curl(shards: Shards, size: int | None, sink: Sink) -> None:
    """Download by one curl; only what is checked is kept."""
    with tempfile.TemporaryDirectory() as folder:
        lines, spans = [], shards.spans(size)
        for number, (name, begin, end) in enumerate(spans):
            output = f"{folder}/{number}" if isinstance(sink, Checked) else "/dev/null"
            lines += [f'url = "{shards.site}/{name}"', f'output = "{output}"', f'cacert = "{shards.certificate}"']
            lines += [f'range = "{begin}-{end - 1}"'] if size else []
            lines += ["fail", r'write-out = "%{size_download}\n"', "next"]
        command = ["curl", "-sS", "--no-progress-meter", "-Z", "--parallel-max", str(AT_ONCE), "-K", "-"]
        told = subprocess.run(command, input="\n".join(lines[:-1]), text=True, check=True, stdout=subprocess.PIPE)
        if not isinstance(sink, Checked):
            sink.count += sum(map(int, told.stdout.split()))
            return
        for number, (_, begin, _) in enumerate(spans):
            sink.put(begin, Path(f"{folder}/{number}").read_bytes())


async def all_of(spans: list[tuple[str, int, int]], fetch: Callable[..., Awaitable[None]]) -> None:
    """Await *fetch* of all spans, AT_ONCE at a time."""
    left = iter(spans)

    async def some() -> None:
        for span in left:
            await fetch(*span)

    await asyncio.gather(*(some() for _ in range(AT_ONCE)))


@client("obstore, files", "bytes", "obstore", "litdata_")
def obstore_files(shards: Shards, sink: Sink) -> None:
    from obstore import get_async

    store = obstore_of(shards)

    async def fetch(name: str, begin: int, end: int) -> None:
        offset = 0
        async for data in await get_async(store, name):
            sink.put(offset, data)
            offset += len(data)

    asyncio.run(all_of(shards.spans(None), fetch))


@client("obstore, ranges", "bytes", "obstore", "litdata_")
def obstore_ranges(shards: Shards, sink: Sink) -> None:
    from obstore import get_range_async

    store = obstore_of(shards)

    async def fetch(name: str, begin: int, end: int) -> None:
        sink.put(begin, await get_range_async(store, name, start=begin, end=end))

    asyncio.run(all_of(shards.spans(RANGE), fetch))


def obstore_of(shards: Shards) -> Any:
    from obstore.store import HTTPStore

    # It cannot be told of another authority of certificates.
    options = {"allow_http": True, "allow_invalid_certificates": True, "timeout": "300s"}
    return HTTPStore.from_url(shards.site, client_options=options)


@client("aiohttp, files", "bytes", "aiohttp")
def aiohttp_files(shards: Shards, sink: Sink) -> None:
    run_aiohttp(shards, None, sink)


@client("aiohttp, ranges", "bytes", "aiohttp")
def aiohttp_ranges(shards: Shards, sink: Sink) -> None:
    run_aiohttp(shards, RANGE, sink)


def run_aiohttp(shards: Shards, size: int | None, sink: Sink) -> None:
    import aiohttp

    async def main() -> None:
        async with aiohttp.ClientSession() as session:

            async def fetch(name: str, begin: int, end: int) -> None:
                headers = {"Range": f"bytes={begin}-{end - 1}"} if size else {}
                async with session.get(f"{shards.site}/{name}", headers=headers, raise_for_status=True) as response:
                    async for data in response.content.iter_any():
                        sink.put(begin, data)
                        begin += len(data)

            await all_of(shards.spans(size), fetch)

    asyncio.run(main())


@client("s3torchconnector, files", "bytes", "s3torchconnector", "streaming_")
def s3torchconnector(shards: Shards, sink: Sink) -> None:
    from s3torchconnector import S3ClientConfig, S3IterableDataset

    config = S3ClientConfig(unsigned=True, force_path_style=True)
    places = [f"s3://{name}" for name in shards.names]
    for reader in S3IterableDataset.from_objects(
        places, region="us-east-1", endpoint=shards.site, s3client_config=config
    ):
        offset = 0
        while data := reader.read(PIECE):
            sink.put(offset, data)
            offset += len(data)


@client("tarshards, `open_url`", "bytes", "tarshards")
def open_url(shards: Shards, sink: Sink) -> None:
    import tarshards

    for url in shards.urls:
        offset = 0
        with tarshards.open_url(url) as stream:
            while data := stream.read(PIECE):
                sink.put(offset, data)
                offset += len(data)


# Samples.


@client("webdataset, `pipe:curl`", "samples", "webdataset", "webdataset_")
def webdataset(shards: Shards, sink: Sink) -> None:
    from webdataset import WebDataset

    urls = [f"pipe:curl -sSf --cacert {shards.certificate} {url}" for url in shards.urls]
    for sample in WebDataset(urls, shardshuffle=False):
        sink.add(sample)


@client("tarshards, `Stream`, un-indexed", "samples", "tarshards")
def unindexed(shards: Shards, sink: Sink) -> None:
    read_stream(shards, sink, index=False)


@client("tarshards, `Stream`, shuffled", "samples", "tarshards")
def shuffled(shards: Shards, sink: Sink) -> None:
    read_stream(shards, sink, index=True, shuffle=True)


def read_stream(shards: Shards, sink: Sink, **options: Any) -> None:
    from tarshards import Stream

    for sample in Stream.from_shards(shards.urls, **options):
        sink.add(sample)


class Reader:
    """A client in this process; each method is a call that wire.py can request."""

    def __init__(self, name: str):
        self.client = CLIENTS[name]

    def prepare(self, cores: list[int], shards: dict[str, Any]) -> None:
        """Use these cores only, and read small shards."""
        os.sched_setaffinity(0, cores)
        self.client.read(Shards(**shards), Sink())

    def read(self, shards: dict[str, Any]) -> dict[str, float]:
        """Read shards; return when that was, how many bytes or samples came, and the CPU seconds and page faults."""
        sink, given = Sink(), Shards(**shards)
        cpu, faults, begun = *spent(), time.monotonic()
        self.client.read(given, sink)
        ended, (cpu_after, faults_after) = time.monotonic(), spent()
        return {
            "begun": begun,
            "ended": ended,
            "count": sink.count,
            "cpu": cpu_after - cpu,
            "faults": faults_after - faults,
        }

    def check(self, shards: dict[str, Any]) -> list[int]:
        """Read one shard; return its digest."""
        sink = Checked(shards["sizes"][0])
        self.client.read(Shards(**shards), sink)
        return sink.digest


def spent() -> tuple[float, int]:
    """Return the CPU seconds, and the page faults that need no disk, of this process and its ended children."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used), sum(each.ru_minflt for each in used)


if __name__ == "__main__":
    serve(lambda: Reader(sys.argv[1]))
