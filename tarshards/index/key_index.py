"""Samples by key: a file of sorted hashes of all keys with the numbers of their samples; or a table in memory.

docs/index-format.md describes ``train.shards.keys``. The first hash of each block of entries is held in memory, 1/500
of the file, so a look-up reads one block, and one header of the shard to compare the key itself. Neither keys nor
indexes are loaded. What was read is checked: each block has a checksum.
"""

from __future__ import annotations

import logging
import os
import struct
import tempfile
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack, suppress
from hashlib import blake2b
from itertools import accumulate
from typing import BinaryIO
from zlib import crc32

import numpy as np

from tarshards.errors import ShardIndexError
from tarshards.index.sidecar import DIGEST, Index
from tarshards.parallel.calls import TASKS, bounded_map
from tarshards.parallel.forks import cached_property
from tarshards.samples.keys import split_name
from tarshards.storage.derived import key_index_name
from tarshards.storage.location import Location
from tarshards.storage.manifest import Shard, series_url
from tarshards.storage.ranges import Ranges
from tarshards.storage.streams import temporary
from tarshards.tar.read import BLOCK

log: logging.Logger = logging.getLogger("tarshards")

MAGIC = b"TARKEYS\x03"
HEADER = struct.Struct("<8sQ16s16sI")  # magic, keys, digests of names and of shards, CRC-32 of these
SAMPLE = np.dtype([("shard", "<u4"), ("sample", "<u4"), ("header", "<u4")])  # header: its offset in blocks of 512
ENTRY = np.dtype([("hash", "<u8"), ("sample", SAMPLE)])
HASH = 8  # bytes
SUM = 16  # bytes of a block after its entries: their CRC-32, and zeros
EACH = 204  # entries of a block of 4,096 bytes
PARTS = 256  # parts of the hashes, by their first byte, which are sorted one after the other


def _block_size() -> int:
    return ENTRY.itemsize * EACH + SUM


def hash_keys(keys: Sequence[str]) -> np.ndarray:
    """Return the hashes of keys: BLAKE2b of 8 bytes, little-endian.

    >>> hex(int(hash_keys(["a"])[0]))
    '0x2f42665b399ef840'
    """
    hashed = (blake2b(key.encode(errors="surrogateescape"), digest_size=8).digest() for key in keys)
    return np.frombuffer(b"".join(hashed), "<u8")


def key_index_location(first: Location) -> Location:
    """Return the location of the key index of a series of shards, by its first shard."""
    location = first.described.at(series_url(first.described.url))
    return location.with_base(key_index_name(location.base))


def digest_names(urls: Iterable[str]) -> bytes:
    """Identify shards by their names in their folder."""
    text = repr([Location.of(url).base for url in urls])
    return blake2b(text.encode(errors="surrogateescape"), digest_size=DIGEST).digest()


def digest_shards(digests: Iterable[bytes]) -> bytes:
    """Identify keys and members of shards by the digests in their indexes."""
    return blake2b(b"".join(digests), digest_size=DIGEST).digest()


def build_key_index(shards: Sequence[Shard], *, executor: Executor | None = None, sync: bool = True) -> str:
    """Write the key index of indexed *shards*, in this order; return its name.

    Memory is that of 1/256 of the keys, 20 bytes each, and of some indexes. Raises ShardIndexError for a shard without
    index, with an index that has no digest, and of more than 2 TiB.
    """
    location = Location.of(key_index_location(shards[0].location()), sync=sync)
    location.make_folder()
    tasks = [(number, shard.location()) for number, shard in enumerate(shards)]
    found = map(_entries, tasks) if executor is None else bounded_map(_entries, tasks, executor=executor, window=TASKS)
    with ExitStack() as stack:
        with temporary():
            parts = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(PARTS)]
        count, digests = 0, []
        for digest, entries in found:
            digests.append(digest)
            count += len(entries)
            order = np.argsort(entries["hash"] >> np.uint64(56), kind="stable")
            entries = entries[order]
            ends = np.searchsorted(entries["hash"] >> np.uint64(56), np.arange(PARTS), "right")
            with temporary():
                for part, begin, end in zip(parts, [0, *ends.tolist()], ends.tolist()):
                    if begin < end:
                        part.write(entries[begin:end].tobytes())
        stream = stack.enter_context(location.open("wb"))
        names = digest_names(shard.url for shard in shards)
        head = HEADER.pack(MAGIC, count, names, digest_shards(digests), 0)[:-4]
        stream.write((head + crc32(head).to_bytes(4, "little")).ljust(_block_size(), b"\0"))
        firsts, left = [], np.empty(0, ENTRY)
        for part in parts:
            with temporary():
                part.seek(0)  # also writes buffered data
            entries = np.frombuffer(part.read(), ENTRY)
            entries = entries[np.argsort(entries["hash"], kind="stable")]  # of equal keys the first stays first
            entries = np.concatenate([left, entries])
            whole = len(entries) // EACH * EACH
            firsts.append(_write_blocks(stream, entries[:whole]))
            left = entries[whole:]
            part.truncate(0)
        if len(left):
            padded = np.zeros(EACH, ENTRY)
            padded[: len(left)] = left
            firsts.append(_write_blocks(stream, padded))
        table = np.concatenate(firsts).tobytes()
        stream.write(table + crc32(table).to_bytes(4, "little"))
    return location.name


def _entries(numbered: tuple[int, Location]) -> tuple[bytes, np.ndarray]:
    """Return the digest of one shard, and the entries of its samples."""
    number, location = numbered
    index = Index.load(location)
    blocks = index.offset[index.first[:-1]] // BLOCK - 1
    if len(blocks) and int(blocks[-1]) >= 1 << 32:
        raise ShardIndexError("a key index supports shards of at most 2 TiB", url=location.name)
    entries = np.empty(len(index), ENTRY)
    entries["hash"] = hash_keys(index.keys)
    for name, values in ("shard", number), ("sample", np.arange(len(index))), ("header", blocks):
        entries["sample"][name] = values
    return index.known_digest(location), entries


def _write_blocks(stream: BinaryIO, entries: np.ndarray) -> np.ndarray:
    """Write the blocks of *entries*, which fill them; return the first hash of each."""
    rows = entries.reshape(-1, EACH)
    for row in rows:
        data = row["hash"].tobytes() + row["sample"].tobytes()
        stream.write(data + crc32(data).to_bytes(4, "little").ljust(SUM, b"\0"))
    return rows["hash"][:, 0]


class KeyIndex:
    """Finds the samples of *shards*, each of as many samples as *counts* says, by the file *ranges* of their keys.

    *keys_of* returns the keys of a shard by its number, for keys that a header does not contain.
    """

    def __init__(
        self, ranges: Ranges, shards: Sequence[Location], counts: Sequence[int], keys_of: Callable[[int], list[str]]
    ):
        self._ranges, self._shards, self._keys_of = ranges, shards, keys_of
        self._starts = [0, *accumulate(counts)]
        self._count = self._starts[-1]
        self._block_size = _block_size()
        blocks = -(-self._count // EACH)
        self._end = (1 + blocks) * self._block_size
        if ranges.size != self._end + 8 * blocks + 4:
            raise self._damaged(f"{ranges.size} bytes for {self._count} keys")

    @classmethod
    def open(
        cls,
        shards: Sequence[Location],
        counts: Sequence[int],
        keys_of: Callable[[int], list[str]],
        digests: Callable[[], list[bytes | None]],
    ) -> KeyIndex | None:
        """Return the key index of *shards*, in their order; None if there is none, or it is of other shards.

        *digests* returns those of the shards; if they have changed since it was made, a warning says so. Raises
        ShardIndexError for a damaged one.
        """
        if not shards or shards[0].is_stream:
            return None
        location = key_index_location(shards[0])
        if not location.is_taken():
            return None
        ranges = location.ranges()
        head = bytes(ranges.read(0, min(HEADER.size, ranges.size)))
        if len(head) < HEADER.size or head[:8] != MAGIC or crc32(head[:-4]) != int.from_bytes(head[-4:], "little"):
            raise ShardIndexError(
                "damaged, or not a key index of this version; rebuild it with `tarindex --key-index`", url=location.name
            )
        _, _, names, contents, _ = HEADER.unpack(head)
        if names != digest_names(shard.url for shard in shards):
            log.info("%s: of other shards; rebuild it with `tarindex --key-index`", location.name)
            return None
        found = digests()
        if contents != digest_shards(digest or b"" for digest in found):
            reason = "shards have changed since it was made" if None not in found else "indexes have no digests"
            log.warning("%s: not used: %s; rebuild it with `tarindex --key-index`", location.name, reason)
            return None
        return cls(ranges, shards, counts, keys_of)

    def numbers(self, key: str) -> list[int]:
        """Return the numbers of the samples with this key, over all shards, ascending."""
        try:
            (wanted,) = hash_keys([key]).tolist()
        except UnicodeEncodeError:  # a lone surrogate, which no name in a tar has
            return []
        found = []
        for shard, sample, header in self._equal(wanted):
            if self._has(shard, sample, header, key):
                found.append(self._starts[shard] + sample)
        return found

    def repeated(self) -> str | None:
        """Return a key that several samples have, None if all keys differ."""
        before = np.zeros(0, np.uint64)
        for number in range(len(self._firsts)):
            hashes = np.concatenate([before, self._hashes(self._block(number), number)])
            for value in np.unique(hashes[1:][hashes[1:] == hashes[:-1]]).tolist():
                keys = [self._keys_of(shard)[sample] for shard, sample, _ in self._equal(value)]
                for key in keys:
                    if keys.count(key) > 1:
                        return key
            before = hashes[-1:]
        return None

    def _equal(self, wanted: int) -> Iterator[tuple[int, int, int]]:
        """Yield shard, sample and header of the entries with this hash."""
        for number in range(max(0, bisect_left(self._firsts, wanted) - 1), len(self._firsts)):
            if self._firsts[number] > wanted:
                return
            block = self._block(number)
            hashes = self._hashes(block, number)
            for at in range(bisect_left(hashes, wanted), len(hashes)):
                if hashes[at] != wanted:
                    return
                yield self._sample(block, at)

    @cached_property
    def _firsts(self) -> memoryview:
        """The first hash of each block."""
        data = bytes(self._ranges.read(self._end, self._ranges.size - self._end))
        if crc32(data[:-4]) != int.from_bytes(data[-4:], "little"):
            raise self._damaged("wrong checksum of the first hashes")
        return memoryview(data[:-4]).cast("Q")

    def _block(self, number: int) -> bytes:
        """Return a block, after comparing its checksum."""
        data = bytes(self._ranges.read((1 + number) * self._block_size, self._block_size))
        end = ENTRY.itemsize * EACH
        if crc32(data[:end]) != int.from_bytes(data[end : end + 4], "little"):
            raise self._damaged(f"wrong checksum of the entries from {number * EACH}")
        return data

    def _hashes(self, block: bytes, number: int) -> memoryview:
        return memoryview(block)[: HASH * min(EACH, self._count - number * EACH)].cast("Q")

    def _sample(self, block: bytes, at: int) -> tuple[int, int, int]:
        """Return shard, sample and header of an entry of a block."""
        shard, sample, header = struct.unpack_from("<III", block, HASH * EACH + SAMPLE.itemsize * at)
        if shard >= len(self._shards) or sample >= self._starts[shard + 1] - self._starts[shard]:
            raise self._damaged(f"no sample {sample} in shard {shard}")
        return shard, sample, header

    def _has(self, shard: int, sample: int, header: int, key: str) -> bool:
        """Return whether a sample has a key: by the header of its first member or, if that differs, by its index."""
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


class KeyTable:
    """The numbers of samples by *count* *keys*: sorted hashes, 16 bytes a key. *key_of* returns the key of a sample.

    >>> keys = ["a", "b", "a"]
    >>> table = KeyTable(keys, 3, keys.__getitem__)
    >>> table.numbers("a"), table.numbers("c"), table.repeated()
    ([0, 2], [], 'a')
    """

    def __init__(self, keys: Iterable[str], count: int, key_of: Callable[[int], str]):
        hashes = np.fromiter(map(hash, keys), np.int64, count)
        order = np.argsort(hashes, kind="stable")  # of equal keys the first stays first
        self._key_of = key_of
        self._hashes, self._numbers = hashes[order].data, order.data  # memoryviews: their items are ints

    def numbers(self, key: str) -> list[int]:
        """Return the numbers of the samples with *key*, ascending."""
        hashes, wanted = self._hashes, hash(key)
        at, found = bisect_left(hashes, wanted), []
        while at < len(hashes) and hashes[at] == wanted:
            number: int = self._numbers[at]
            if self._key_of(number) == key:
                found.append(number)
            at += 1
        return found

    def repeated(self) -> str | None:
        """Return a key that several samples have, or None."""
        hashes = np.asarray(self._hashes)
        for at in (np.flatnonzero(hashes[1:] == hashes[:-1]) + 1).tolist():
            number = self._numbers[at]
            key = self._key_of(number)
            if self.numbers(key)[0] != number:
                return key
        return None
