"""Open shards: each is mapped or opened for range requests, and compared with its index, once in a process."""

from __future__ import annotations

import os
import threading
from functools import cache, cached_property
from typing import Any

import numpy as np

from tarshards.errors import OpenError, ShardIndexError, TarshardsError
from tarshards.index.lookup import KeyTable
from tarshards.index.sidecar import MISSING, Index, for_each_shard, index_location, refuse_compressed
from tarshards.samples.keys import Sample
from tarshards.storage.location import Location
from tarshards.storage.manifest import Shard
from tarshards.storage.ranges import LocalRanges

HELD = 1 << 22  # members of the shards that are held at once
KEPT = 1 << 12  # shards that stay open from the check of their indexes to their first use
GAP = 1 << 15  # bytes between two members of a remote shard that cost less than another request
LOCKS = 64  # shared by all shards of a process


class OpenShard:
    """One shard, open and verified to be the one that *index* describes.

    *ranges* reads its bytes at any offset. *fields* names the fields that ``read`` puts into samples; None means all.
    Raises OpenError where the shard cannot be opened, ShardIndexError where the index is stale.
    """

    def __init__(self, url: str, index: Index, fields: frozenset[str] | None = None):
        location = Location.of(url)
        self.name, self.index, self.keys = location.name, index, index.keys
        self.ranges = location.ranges()
        index.check(self.ranges, url=index_location(url).name)
        self._fields = [field if fields is None or field in fields else None for field in index.fields]
        self._fill = self.ranges.mapping.fill if isinstance(self.ranges, LocalRanges) else self._fetch
        self._members: Any = None

    @cached_property
    def buffer(self) -> memoryview | None:
        """All bytes of a mapped shard; None for a remote one, and without the compiled kernel."""
        try:
            return memoryview(self.ranges.mapping) if isinstance(self.ranges, LocalRanges) else None  # type: ignore[arg-type]
        except TypeError:
            return None

    def read(self, sample: int) -> Sample:
        """Return the sample of this number; raise OpenError, which names it, where it cannot be read."""
        if self._members is None:
            self._find_members()
        result: Sample = {"__key__": self.keys[sample], "__url__": self.name}
        try:
            self._fill(result, self._fields, self._members, self._first[sample], self._first[sample + 1])
        except (OSError, OpenError) as error:
            offset = getattr(error, "offset", None) or int(self._members[self._first[sample], 1])
            reason = getattr(error, "reason", None) or str(error)
            raise OpenError(reason, url=self.name, offset=offset, key=self.keys[sample]) from error
        return result

    def _find_members(self) -> None:
        """Make the tables for ``read``; they are plain attributes because cached properties are slower to read."""
        members = np.empty((len(self.index.sample), 3), np.int64)
        for column, values in enumerate((self.index.field, self.index.offset, self.index.size)):
            members[:, column] = values
        self._first = self.index.first.data  # items of a memoryview are ints, which take less time than numpy's
        self._members = members

    def _fetch(self, result: Sample, fields: list[str | None], members: np.ndarray, begin: int, end: int) -> None:
        """Fill *result* with the members from *begin* to *end*; members close to each other share a request."""
        wanted = [(fields[field], start, start + size) for field, start, size in members[begin:end].tolist()]
        parts: list[tuple[int, int]] = []
        for name, start, stop in wanted:
            if name is not None and parts and start - parts[-1][1] <= GAP:
                parts[-1] = parts[-1][0], stop
            elif name is not None:
                parts.append((start, stop))
        data = [(start, self.ranges.read(start, stop - start)) for start, stop in parts]
        for name, start, stop in wanted:
            if name is not None:
                offset, part = next(pair for pair in reversed(data) if pair[0] <= start)
                result[name] = part[start - offset : stop - offset]


class OpenShards:
    """The shards of a dataset: indexes are loaded, and shards opened, when first asked for and once in a process.

    Shards of up to 4 million members are held; above that the oldest are released. Threads that ask for the same shard
    wait for the one that opens it. A forked process inherits what is open, a pickled copy opens anew.

    *counts* are the samples of each shard and *sizes* its bytes, as the manifest says, or else its index, which is then
    loaded and compared with the shard at once. Raises ShardIndexError where there is none, or it is stale.
    """

    def __init__(self, shards: list[Shard], fields: frozenset[str] | None):
        self.urls = [shard.url for shard in shards]
        self.names = [Location.of(url).name for url in self.urls]
        self.fields = fields
        self._reset()
        self.counts, self.sizes = self._count(shards)

    def _reset(self) -> None:
        self._indexes: dict[int, Index] = {}
        self._held = 0  # their members
        self._open: dict[int, OpenShard] = {}
        self.in_use: dict[int, OpenShard] = {}  # the open ones that samples have been read from
        self._failed: dict[int, TarshardsError] = {}

    def _count(self, shards: list[Shard]) -> tuple[np.ndarray, np.ndarray]:
        known = [(shard.samples, shard.size) for shard in shards]
        unknown = [number for number, pair in enumerate(known) if None in pair]
        for number, shard in zip(unknown, for_each_shard(self._load_and_open, [self.urls[i] for i in unknown])):
            known[number] = len(shard.index), shard.index.shard_size
            self._hold(number, shard.index)
            if len(self._open) < KEPT:
                self._open[number] = shard
        counts, sizes = np.array(known, np.int64).T
        return counts, sizes

    def _load_and_open(self, url: str) -> OpenShard:
        return OpenShard(url, load_index(url), self.fields)

    def index(self, number: int) -> Index:
        """Return the index of a shard; raise ShardIndexError where it contradicts the manifest."""
        with self._lock(number):
            index = self._indexes.get(number)
            if index is None:
                index = load_index(self.urls[number])
                found, told = (len(index), index.shard_size), (self.counts[number], self.sizes[number])
                for mine, its, unit in zip(found, told, ("samples", "bytes")):
                    if mine != its:
                        reason = f"{mine} {unit}, but {its} in the manifest"
                        raise ShardIndexError(reason, url=index_location(self.urls[number]).name)
                self._hold(number, index)
            return index

    def open(self, number: int) -> OpenShard:
        """Return a shard as it is now; raise TarshardsError where it cannot be opened, or its index is stale.

        The one that is open is returned, unless its file has been replaced or written to.
        """
        with self._lock(number):
            index, shard = self.index(number), self._open.get(number)
            if shard is None or not shard.ranges.is_current():
                shard = OpenShard(self.urls[number], index, self.fields)
                if number in self._indexes:  # another thread may have released it
                    self._open[number] = shard
            return shard

    def use(self, number: int) -> OpenShard:
        """Return a shard to read samples from: the same one until it is released, even if its file is replaced.

        Where opening it failed, the error is raised again until ``verify`` is called.
        """
        with self._lock(number):
            if number in self.in_use:
                return self.in_use[number]
            if number in self._failed:
                raise self._failed[number].with_traceback(None)
            try:
                shard = self.open(number)
            except TarshardsError as error:
                self._failed[number] = error
                raise
            if number in self._indexes:
                self.in_use[number] = shard
            return shard

    def verify(self) -> None:
        """Raise OpenError if a local shard in use has been written to; shards that failed to open are tried again."""
        self._failed.clear()
        for shard in list(self.in_use.values()):
            shard.ranges.verify()

    @cached_property
    def keys(self) -> list[str]:
        """The keys of all samples; every index is loaded for them."""
        return [key for number in range(len(self.urls)) for key in self.index(number).keys]

    @cached_property
    def table(self) -> KeyTable:
        """The places of all samples by key."""
        return KeyTable(self.keys)

    @staticmethod
    def _lock(number: int) -> threading.RLock:
        locks = _locks(os.getpid())
        return locks[1 + number % (LOCKS - 1)]

    def _hold(self, number: int, index: Index) -> None:
        """Hold an index, and release the oldest shards where those held have too many members."""
        with _locks(os.getpid())[0]:
            self._indexes[number] = index
            self._held += len(index.sample)
            while self._held > HELD and len(self._indexes) > 1:
                oldest = next(iter(self._indexes))
                self._held -= len(self._indexes.pop(oldest).sample)
                self._open.pop(oldest, None)
                self.in_use.pop(oldest, None)

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in ("urls", "names", "fields", "counts", "sizes")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()


@cache
def _locks(process: int) -> list[threading.RLock]:
    """The locks of one process, the first for what is held; a forked process must not wait for its parent's threads."""
    return [threading.RLock() for _ in range(LOCKS)]


def load_index(url: str) -> Index:
    """Load the index of a shard; where there is none because the shard is compressed, the error says so."""
    try:
        return Index.load(url, check=False)
    except ShardIndexError as error:
        if error.reason != MISSING:
            raise
        location = Location.of(url)
        with location.ranges() as ranges:
            refuse_compressed(ranges, location)
        raise
