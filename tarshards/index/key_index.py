"""The file that finds samples by key: sorted hashes of all keys with the places of their samples, mapped into memory.

docs/index-format.md describes ``train.shards.keys``. A look-up estimates where a hash stands, since hashes are spread
evenly, searches around it, and reads one header of the shard to compare the key itself. Neither keys nor indexes are
loaded. What was read is checked: the blocks of entries that an answer depends on have checksums.
"""

from __future__ import annotations

import logging
import os
import struct
import tempfile
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack, suppress
from functools import cached_property
from hashlib import blake2b
from itertools import accumulate
from typing import Any, BinaryIO
from zlib import crc32

import numpy as np

from tarshards.errors import ShardIndexError
from tarshards.index.manifests import series_url
from tarshards.index.sidecar import Index
from tarshards.parallel import bounded_map
from tarshards.samples.keys import split_name
from tarshards.storage.beside import key_index_name
from tarshards.storage.location import Location
from tarshards.storage.manifest import Shard
from tarshards.storage.ranges import Ranges
from tarshards.tar.read import BLOCK

log = logging.getLogger("tarshards")

MAGIC = b"TARKEYS\x01"
HEADER = struct.Struct("<8sQ16sI")  # magic, keys, digest of the shards, CRC-32 of what is before
ENTRY = np.dtype([("hash", "<u8"), ("shard", "<u4"), ("sample", "<u4"), ("header", "<u4")])  # header: in blocks of 512
HASHES, PLACES = 8, 12  # bytes of an entry in each of the two sections
CHECKED = 1 << 10  # entries that one checksum covers
PARTS = 256  # of hashes, by their first byte, that are sorted one after the other
TASKS = 64
GUESSES = 8  # blocks that are looked at before the rest is halved


def hash_keys(keys: Sequence[str]) -> np.ndarray:
    """Return the hashes of keys: BLAKE2b of 8 bytes, little-endian.

    >>> hex(int(hash_keys(["a"])[0]))
    '0x2f42665b399ef840'
    """
    hashed = (blake2b(key.encode(errors="surrogateescape"), digest_size=8).digest() for key in keys)
    return np.frombuffer(b"".join(hashed), "<u8")


def key_index_location(shard_url: str | Location) -> Location:
    """Return the location of the key index of a series of shards, by its first shard."""
    location = Location.of(series_url(Location.of(shard_url).url))
    return location.with_base(key_index_name(location.base))


def digest_of(shards: Sequence[Shard]) -> bytes:
    """Identify shards by their names in their folder, samples and bytes."""
    about = [(Location.of(shard.url).base, shard.samples, shard.size) for shard in shards]
    return blake2b(repr(about).encode(errors="surrogateescape"), digest_size=16).digest()


def build_key_index(shards: Sequence[Shard], *, executor: Executor | None = None, sync: bool = True) -> str:
    """Write the key index of indexed *shards*, in this order; return its name.

    *shards* have their samples and bytes. Memory is that of 1/256 of the keys, 20 bytes each, and of some indexes.
    Raises ShardIndexError for a shard without index, and of more than 2 TiB.
    """
    location = key_index_location(shards[0].url)
    urls = list(enumerate(shard.url for shard in shards))
    found = map(_entries, urls) if executor is None else bounded_map(_entries, urls, executor=executor, window=TASKS)
    with ExitStack() as stack:
        parts = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(PARTS)]
        count = 0
        for entries in found:
            count += len(entries)
            order = np.argsort(entries["hash"] >> np.uint64(56), kind="stable")
            entries = entries[order]
            ends = np.searchsorted(entries["hash"] >> np.uint64(56), np.arange(PARTS), "right")
            for part, begin, end in zip(parts, [0, *ends.tolist()], ends.tolist()):
                if begin < end:
                    part.write(entries[begin:end].tobytes())
        places = stack.enter_context(tempfile.TemporaryFile())
        stream: Any = stack.enter_context(location.open("wb", sync=sync))
        head = HEADER.pack(MAGIC, count, digest_of(shards), 0)[:-4]
        stream.write(head + crc32(head).to_bytes(4, "little"))
        hashes_sums, places_sums = _Checksums(HASHES * CHECKED), _Checksums(PLACES * CHECKED)
        for part in parts:
            part.seek(0)
            entries = np.frombuffer(part.read(), ENTRY)
            entries = entries[np.argsort(entries["hash"], kind="stable")]  # of equal keys the first stays first
            hashes_sums.write(stream, entries["hash"].tobytes())
            rows = entries.view(np.uint8).reshape(-1, ENTRY.itemsize)
            places_sums.write(places, rows[:, HASHES:].tobytes())
            part.truncate(0)
        places.seek(0)
        while data := places.read(1 << 20):
            stream.write(data)
        stream.write(hashes_sums.finish())
        stream.write(places_sums.finish())
    return location.name


def _entries(numbered: tuple[int, str]) -> np.ndarray:
    """Return the entries of the samples of one shard."""
    number, url = numbered
    index = Index.load(url)
    blocks = index.offset[index.first[:-1]] // BLOCK - 1
    if len(blocks) and int(blocks[-1]) >= 1 << 32:
        raise ShardIndexError("a key index holds places of shards up to 2 TiB", url=Location.of(url).name)
    entries = np.empty(len(index), ENTRY)
    entries["hash"], entries["shard"] = hash_keys(index.keys), number
    entries["sample"], entries["header"] = np.arange(len(index)), blocks
    return entries


class _Checksums:
    """The CRC-32 of each *size* bytes that are written."""

    def __init__(self, size: int):
        self._size, self._sums = size, bytearray()
        self._sum = self._taken = 0

    def write(self, stream: BinaryIO, data: bytes) -> None:
        stream.write(data)
        view = memoryview(data)
        while view:
            part = view[: self._size - self._taken]
            self._sum, self._taken = crc32(part, self._sum), self._taken + len(part)
            view = view[len(part) :]
            if self._taken == self._size:
                self._end()

    def _end(self) -> None:
        self._sums += self._sum.to_bytes(4, "little")
        self._sum = self._taken = 0

    def finish(self) -> bytes:
        if self._taken:
            self._end()
        return bytes(self._sums)


class KeyIndex:
    """Finds the samples of *shards*, each of as many samples as *counts* says, by the file *ranges* of their keys.

    *keys_of* returns the keys of a shard by its number, for what a header does not say.
    """

    def __init__(
        self, ranges: Ranges, shards: Sequence[Location], counts: Sequence[int], keys_of: Callable[[int], list[str]]
    ):
        self._ranges, self._shards, self._keys_of = ranges, shards, keys_of
        self._starts = [0, *accumulate(counts)]
        self._count = self._starts[-1]
        self._blocks = -(-self._count // CHECKED)
        if ranges.size != self._start(PLACES, self._count) + 8 * self._blocks:
            raise self._damaged(f"{ranges.size} bytes for {self._count} keys")

    @classmethod
    def open(
        cls, shards: Sequence[Shard], locations: Sequence[Location], keys_of: Callable[[int], list[str]]
    ) -> KeyIndex | None:
        """Return the key index of *shards*, in their order; None if there is none, or it is of other shards.

        Raises ShardIndexError for a damaged one.
        """
        if not shards or locations[0].is_stream:
            return None
        location = key_index_location(locations[0])
        if not location.is_taken():
            return None
        ranges = location.ranges()
        head = bytes(ranges.read(0, min(HEADER.size, ranges.size)))
        if len(head) < HEADER.size or head[:8] != MAGIC or crc32(head[:-4]) != int.from_bytes(head[-4:], "little"):
            raise ShardIndexError("damaged, or not a key index of this version", url=location.name)
        _, _, digest, _ = HEADER.unpack(head)
        if digest != digest_of(shards):
            log.info("%s: of other shards; rebuild it with `tarindex --key-index`", location.name)
            return None
        return cls(ranges, locations, [shard.samples or 0 for shard in shards], keys_of)

    def places(self, key: str) -> list[int]:
        """Return the numbers of the samples with this key, over all shards, ascending."""
        (wanted,) = hash_keys([key]).tolist()
        found = []
        for at in self._equal(wanted):
            shard, sample, header = self._place(at)
            if self._has(shard, sample, header, key):
                found.append(self._starts[shard] + sample)
        return found

    def repeated(self) -> str | None:
        """Return a key that several samples have, None where all keys differ."""
        before = -1
        for block in range(self._blocks):
            for value in self._hashes(block):
                if value == before:
                    places = (self._place(at) for at in self._equal(value))
                    keys = [self._keys_of(shard)[sample] for shard, sample, _ in places]
                    for key in keys:
                        if keys.count(key) > 1:
                            return key
                before = value
        return None

    def _equal(self, wanted: int) -> Iterator[int]:
        """Yield the numbers of the entries with this hash."""
        at = self._search(wanted)
        while at < self._count:
            hashes = self._hashes(at // CHECKED)
            for value in hashes[at % CHECKED :]:
                if value != wanted:
                    return
                yield at
                at += 1

    def _search(self, wanted: int) -> int:
        """Return the number of the first entry whose hash is not below *wanted*.

        The next block to look at is where the hash would be if those between were spread evenly.
        """
        low, high, guess = 0, self._blocks - 1, (wanted * self._count >> 64) // CHECKED
        looked = 0
        while low <= high:
            looked += 1
            block = (low + high) // 2 if looked > GUESSES else min(max(guess, low), high)
            hashes = self._hashes(block)
            if hashes[0] >= wanted:
                high = block - 1
            elif hashes[-1] < wanted:
                low = block + 1
            else:
                return block * CHECKED + bisect_left(hashes, wanted)
            guess = (block * CHECKED + ((wanted - hashes[0]) * self._count >> 64)) // CHECKED
        return min(low * CHECKED, self._count)

    def _hashes(self, block: int) -> memoryview:
        return memoryview(self._read(HASHES, block)).cast("Q")

    def _start(self, section: int, entry: int) -> int:
        """Return where an entry of a section begins."""
        if section == HASHES:
            return HEADER.size + HASHES * entry
        return HEADER.size + HASHES * self._count + PLACES * entry

    def _read(self, section: int, block: int) -> bytes:
        """Return the entries of a block, after comparing their checksum."""
        begin, end = block * CHECKED, min(self._count, (block + 1) * CHECKED)
        data = bytes(self._ranges.read(self._start(section, begin), section * (end - begin)))
        if crc32(data) != int.from_bytes(self._sums[section][4 * block : 4 * block + 4], "little"):
            raise self._damaged(f"wrong checksum of the entries from {begin}")
        return data

    @cached_property
    def _sums(self) -> dict[int, bytes]:
        """The checksums of the blocks, by section."""
        start, size = self._start(PLACES, self._count), 4 * self._blocks
        found = bytes(self._ranges.read(start, 2 * size))
        return {HASHES: found[:size], PLACES: found[size:]}

    def _place(self, at: int) -> tuple[int, int, int]:
        """Return shard, sample and header of an entry."""
        shard, sample, header = struct.unpack_from("<III", self._read(PLACES, at // CHECKED), PLACES * (at % CHECKED))
        if shard >= len(self._shards) or sample >= self._starts[shard + 1] - self._starts[shard]:
            raise self._damaged(f"entry {at} is of no sample")
        return shard, sample, header

    def _has(self, shard: int, sample: int, header: int, key: str) -> bool:
        """Return whether a sample has a key: by the header of its first member or, where that differs, its index."""
        path = self._shards[shard].path
        if path is not None:
            with suppress(OSError), open(path, "rb", buffering=0) as file:
                if _key_in(os.pread(file.fileno(), BLOCK, header * BLOCK)) == key:
                    return True
        return self._keys_of(shard)[sample] == key

    def _damaged(self, what: str) -> ShardIndexError:
        return ShardIndexError(f"damaged: {what}; rebuild it with `tarindex --key-index`", url=self._ranges.name)


def _key_in(header: bytes) -> str | None:
    """Return the key of the member with this header, as far as the name fits into it."""
    name = header[:100].rstrip(b"\0")
    if header[257:263] == b"ustar\0" and (prefix := header[345:500].rstrip(b"\0")):
        name = prefix + b"/" + name
    found = split_name(name.decode(errors="surrogateescape"))
    return None if found is None else found[0]
