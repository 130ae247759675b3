"""Samples of indexed shards in any order, reading only the bytes that are asked for."""

from __future__ import annotations

import copy
import os
import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, cached_property
from typing import Any, overload

import numpy as np

from tarshards.errors import OpenError, ShardIndexError, TarshardsError
from tarshards.index.column import Column
from tarshards.index.options import field_names
from tarshards.index.sidecar import MISSING, Index, for_each_shard, index_url
from tarshards.parallel import bounded_map
from tarshards.samples.read import Sample
from tarshards.storage.compression import find_compression
from tarshards.storage.expressions import Shard, expand_shards
from tarshards.storage.opening import room_of
from tarshards.storage.ranges import LocalRanges, Ranges, open_ranges
from tarshards.storage.streams import public

HELD = 1 << 22  # members of which the places are held at once
FETCHES = 16  # reads of remote shards at once
GAP = 1 << 15  # bytes between two members of a remote shard that are rather read than asked around


class SampleReader:
    """What reads samples by their shard's number and their own within it.

    *names* are the shards' URLs as people may see them; *counts* are their samples, *sizes* their bytes.
    """

    urls: list[str]
    names: list[str]
    counts: np.ndarray
    sizes: np.ndarray
    reserved = 2  # entries of a sample that are no fields: __key__, __url__

    def read(self, shard: int, sample: int) -> Sample:
        """Return a sample; raise TarshardsError where it cannot be read."""
        raise NotImplementedError

    def is_remote(self) -> bool:
        """Whether a sample is waited for, so that several are better read at once."""
        raise NotImplementedError

    def verify(self) -> None:
        """Raise OpenError if a local shard was written to since it was opened; forget what failed to open."""
        raise NotImplementedError

    def read_all(self, shards: np.ndarray, samples: np.ndarray) -> Iterator[Sample | TarshardsError]:
        """Yield many samples as ``read`` returns them, or in place of one the error that reading it ended with."""
        pairs = zip(shards.tolist(), samples.tolist())
        if not self._waits:
            return map(self._try, pairs)
        return bounded_map(self._try, pairs, executor=_threads(os.getpid()), window=4 * FETCHES)

    def _try(self, place: tuple[int, int]) -> Sample | TarshardsError:
        try:
            return self.read(*place)
        except TarshardsError as error:
            return error

    @cached_property
    def _waits(self) -> bool:
        return self.is_remote()


@cache
def _threads(process: int) -> ThreadPoolExecutor:
    """The threads that wait for remote shards; a forked process has none of its parent's."""
    return ThreadPoolExecutor(FETCHES, "tarshards-fetch")


@cache
def _gates(process: int) -> list[threading.RLock]:
    """Locks by which threads open a shard once only, the first for what is held of all; none that a fork left shut."""
    return [threading.RLock() for _ in range(4 * FETCHES)]


class IndexedShards(SampleReader, Sequence[Sample]):
    """The samples of indexed shards, one after the other, as a sequence: ``[i]``, slices, ``len``.

    A sample is read when it is asked for: only its bytes, and only those of *fields* (names, or words in one text) if
    they are given; each call reads anew. A slice is again a sequence of samples. Local shards are mapped; remote ones
    are read by range requests, several at once for ``read_all`` and for the batches of a DataLoader. It can be pickled
    and forked, and be read by several threads.

    Raises ShardIndexError where a shard has no index, a stale one, or is compressed; a manifest in place of the shards
    (``train.shards.json``) says how many samples they have, and their indexes are read when they are needed.
    """

    def __init__(self, urls: Any, *, fields: str | Iterable[str] | None = None):
        shards: list[Shard] = urls if _are_expanded(urls) else expand_shards(urls)
        self.urls = [shard.url for shard in shards]
        self.names = [public(url) for url in self.urls]
        self.fields = field_names(fields)
        self._open_shards: dict[int, _OpenShard] = {}
        self._indexes: dict[int, Index] = {}
        self._held = 0
        self._failed: dict[int, TarshardsError] = {}
        self.counts, self.sizes = self._count(shards)
        self._ends: list[int] = np.cumsum(self.counts).tolist()
        self._range = range(self._ends[-1])

    def _count(self, shards: list[Shard]) -> tuple[np.ndarray, np.ndarray]:
        """Return the samples and the bytes of each shard, from the manifest or else from its index."""
        known = [(shard.samples, shard.size) for shard in shards]
        unknown = [number for number, pair in enumerate(known) if None in pair]
        for number, index in zip(unknown, for_each_shard(_load, [self.urls[number] for number in unknown])):
            known[number] = len(index), index.shard_size
            self._hold(number, index)
        counts, sizes = np.array(known, np.int64).T
        return counts, sizes

    def __len__(self) -> int:
        return len(self._range)

    @overload
    def __getitem__(self, place: int) -> Sample: ...
    @overload
    def __getitem__(self, place: slice) -> IndexedShards: ...
    def __getitem__(self, place: int | slice) -> Sample | IndexedShards:
        if isinstance(place, slice):
            part = copy.copy(self)
            part._range = self._range[place]
            return part
        return self.read(*self._locate(self._range[place]))

    def __getitems__(self, places: Iterable[int]) -> list[Sample]:
        """Return several samples, as DataLoaders ask for them."""
        pairs = np.array([self._locate(self._range[place]) for place in places], np.int64).reshape(-1, 2)
        return [_raised(result) for result in self.read_all(pairs[:, 0], pairs[:, 1])]

    def __iter__(self) -> Iterator[Sample]:
        places = np.array(self._range, np.int64)
        shards = np.searchsorted(self._ends, places, "right")
        starts = np.array(self._ends, np.int64) - self.counts
        for result in self.read_all(shards, places - starts[shards]):
            yield _raised(result)

    def _locate(self, place: int) -> tuple[int, int]:
        shard = bisect_right(self._ends, place)
        return shard, place - (self._ends[shard] - int(self.counts[shard]))

    @property
    def keys(self) -> list[str]:
        """The keys of the samples, in their order; all indexes are read for them."""
        return [self._keys[place] for place in self._range]

    def find(self, key: str) -> int:
        """Return the place of the first sample with this key; raise KeyError where there is none."""
        try:
            return self._range.index(self._places[key])
        except ValueError:
            raise KeyError(key) from None

    def column(self, field: str) -> Column:
        """Return the ``.npy`` *field* of these samples as one read-only array; see ``Column``."""
        return Column(self, field, self._range)

    @cached_property
    def _keys(self) -> list[str]:
        return [key for number in range(len(self.urls)) for key in self._index(number).keys]

    @cached_property
    def _places(self) -> dict[str, int]:
        keys = self._keys
        return dict(zip(reversed(keys), range(len(keys) - 1, -1, -1)))

    def read(self, shard: int, sample: int) -> Sample:
        return (self._open_shards.get(shard) or self._open(shard)).read(sample)

    def read_all(self, shards: np.ndarray, samples: np.ndarray) -> Iterator[Sample | TarshardsError]:
        return super().read_all(shards, samples) if self._waits else self._read_local(shards, samples)

    def _read_local(self, shards: np.ndarray, samples: np.ndarray) -> Iterator[Sample | TarshardsError]:
        opened = self._open_shards
        for shard, sample in zip(shards.tolist(), samples.tolist()):
            try:
                result: Sample | TarshardsError = (opened.get(shard) or self._open(shard)).read(sample)
            except TarshardsError as error:
                result = error
            yield result

    def is_remote(self) -> bool:
        return any(room_of(url) != "local" for url in self.urls)

    def keys_of(self, shard: int) -> list[str]:
        """The keys of one shard's samples."""
        return self._index(shard).keys

    def open_shard(self, number: int) -> tuple[Index, Ranges]:
        """Return the index of a shard and its bytes; raise TarshardsError where they do not belong together."""
        index, ranges = self._index(number), open_ranges(self.urls[number])
        index.check(ranges, url=public(index_url(self.urls[number])))
        return index, ranges

    def _open(self, number: int) -> _OpenShard:
        with self._gate(number):
            if number in self._open_shards:
                return self._open_shards[number]
            if number in self._failed:
                raise self._failed[number].with_traceback(None)
            try:
                shard = _OpenShard(self.names[number], *self.open_shard(number), self.fields)
            except TarshardsError as error:
                self._failed[number] = error
                raise
            if number in self._indexes:  # not yet let go by another thread
                self._open_shards[number] = shard
            return shard

    def _index(self, number: int) -> Index:
        with self._gate(number):
            index = self._indexes.get(number)
            if index is None:
                index = _load(self.urls[number], check=False)
                found, told = (len(index), index.shard_size), (self.counts[number], self.sizes[number])
                for mine, its, unit in zip(found, told, ("samples", "bytes")):
                    if mine != its:
                        reason = f"{mine} {unit}, and {its} in the manifest"
                        raise ShardIndexError(reason, url=public(index_url(self.urls[number])))
                self._hold(number, index)
            return index

    @staticmethod
    def _gate(number: int) -> threading.RLock:
        gates = _gates(os.getpid())
        return gates[1 + number % (len(gates) - 1)]

    def _hold(self, number: int, index: Index) -> None:
        """Keep an index, and let go of the oldest where they are too many."""
        with _gates(os.getpid())[0]:
            self._indexes[number] = index
            self._held += len(index.sample)
            while self._held > HELD and len(self._indexes) > 1:
                oldest = next(iter(self._indexes))
                self._held -= len(self._indexes.pop(oldest).sample)
                self._open_shards.pop(oldest, None)

    def verify(self) -> None:
        self._failed.clear()
        for shard in list(self._open_shards.values()):
            shard.ranges.verify()

    def __getstate__(self) -> dict[str, Any]:
        own = {"_open_shards": {}, "_indexes": {}, "_held": 0, "_failed": {}}
        return self.__dict__ | own


class _OpenShard:
    """One shard of which samples are read."""

    def __init__(self, name: str, index: Index, ranges: Ranges, fields: frozenset[str] | None):
        self.name, self.ranges, self.keys = name, ranges, index.keys
        self.fields = [field if fields is None or field in fields else None for field in index.fields]
        self.first = index.first.data  # entries of a memoryview are Python's ints, and quicker to get than numpy's
        self.members = np.empty((len(index.sample), 3), np.int64)
        for column, values in enumerate((index.field, index.offset, index.size)):
            self.members[:, column] = values
        self._fill = ranges.mapping.fill if isinstance(ranges, LocalRanges) else self._fetch

    def read(self, sample: int) -> Sample:
        result: Sample = {"__key__": self.keys[sample], "__url__": self.name}
        try:
            self._fill(result, self.fields, self.members, self.first[sample], self.first[sample + 1])
        except (OSError, OpenError) as error:
            offset = getattr(error, "offset", None) or int(self.members[self.first[sample], 1])
            reason = getattr(error, "reason", None) or str(error)
            raise OpenError(reason, url=self.name, offset=offset, key=self.keys[sample]) from error
        return result

    def _fetch(self, result: Sample, fields: list[str | None], members: np.ndarray, begin: int, end: int) -> None:
        """Fill *result* with the members from *begin* to *end*, by as few requests as are sensible."""
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


def _raised(result: Sample | TarshardsError) -> Sample:
    if isinstance(result, TarshardsError):
        raise result
    return result


def _load(url: str, *, check: bool = True) -> Index:
    """Load the index of a shard; where it has none because it is compressed, say so."""
    try:
        return Index.load(url, check=check)
    except ShardIndexError as error:
        if error.reason != MISSING:
            raise
        with open_ranges(url) as ranges:
            compression = find_compression(ranges.read(0, min(10, ranges.size)))
        if compression is None:
            raise
        reason = f"compressed ({compression}), so it has no random access; tarcat -o writes it plain"
        raise ShardIndexError(reason, url=public(url)) from error


def _are_expanded(urls: Any) -> bool:
    return isinstance(urls, list) and bool(urls) and all(isinstance(url, Shard) for url in urls)
