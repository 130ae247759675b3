"""Samples of indexed shards in any order: only the bytes that are asked for are read."""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import cached_property
from itertools import islice
from os import PathLike
from threading import Lock
from typing import TYPE_CHECKING, Any, Self, overload

import numpy as np

from tarshards.errors import SampleError, TarshardsError, shortened
from tarshards.index.member_table import read_samples
from tarshards.index.npy_column import Column
from tarshards.index.open import OpenShards
from tarshards.index.readahead import LocalReadahead, Numbers
from tarshards.samples.fields import FieldNames, lazy_fields
from tarshards.samples.keys import Sample
from tarshards.storage.expressions import find_shards
from tarshards.storage.location import are_local
from tarshards.storage.manifest import Shards, collector_paused
from tarshards.storage.remote import Remote, with_index_dir

if TYPE_CHECKING:  # what reads local shards need not load what asks servers
    from tarshards.index.fetch import BlockFetcher

LOOKED_UP = 1 << 12  # samples that are looked up at once


class SampleReader:
    """Reads samples by the number of their shard and their own number in it.

    *urls* are the shards' URLs and *names* those without credentials; *counts* are the samples of each shard, *sizes*
    its bytes, and *remote* says how they are read.
    """

    urls: list[str]
    names: list[str]
    counts: np.ndarray
    sizes: np.ndarray
    remote: Remote
    reserved = 2  # entries of a sample that are not fields: __key__, __url__
    unpaired = 0  # samples of joined shards that are beyond those of the dataset, and so in no sample

    def read(self, shard: int, sample: int) -> Sample:
        """Return a sample; raise TarshardsError where it cannot be read."""
        raise NotImplementedError

    def read_aside(self, shard: int, sample: int) -> Sample:
        """Return a sample that a reader that fetches ahead does not know of, as ``read`` does."""
        return self.read(shard, sample)

    def is_remote(self) -> bool:
        """Return whether reading a sample waits for a network, so that several should be read at once."""
        raise NotImplementedError

    def verify(self) -> None:
        """Raise OpenError if a local shard was written to since it was opened; shards that failed are tried again."""
        raise NotImplementedError

    def announce(self, count: int, fields: FieldNames | None) -> None:
        """Tell a reader given by ``ahead`` that *fields* of the next *count* samples are about to be read from memory.

        ``read_all`` does this for the samples that it reads.
        """

    def read_all(self, shards: np.ndarray, samples: np.ndarray) -> Iterator[Sample | TarshardsError]:
        """Yield many samples as ``read`` returns them; instead of one that cannot be read, the error."""
        return _each(self.read, shards, samples)

    def read_aside_all(self, shards: np.ndarray, samples: np.ndarray) -> Iterator[Sample | TarshardsError]:
        """Yield many samples as ``read_aside`` returns them; instead of one that cannot be read, the error."""
        return _each(self.read_aside, shards, samples)

    @contextmanager
    def ahead(
        self, upcoming: Iterator[Numbers], *, block: int | None, reach: int, processes: int, gap: float
    ) -> Iterator[Self]:
        """Give a reader of the same samples, which fetches remote ones ahead, as *upcoming* says, and local ones, too,
        where their disk is waited for.

        *block* and *reach* are as for ``BlockFetcher``; *processes* on this host share the memory for it. *gap* is
        how many samples are passed over between two stretches that are read.
        """
        yield self


def gap_of(numbers: np.ndarray, total: int) -> float:
    """Return how many of *total* samples are between two stretches of those in *numbers*, which ascend."""
    stretches = 1 + int(np.count_nonzero(np.diff(numbers) != 1))
    return (total - len(numbers)) / stretches if len(numbers) else 0.0


def in_parts(shards: np.ndarray, samples: np.ndarray, size: int) -> Iterator[Numbers]:
    """Yield the numbers of *size* samples at a time."""
    for begin in range(0, len(shards), size):
        yield shards[begin : begin + size], samples[begin : begin + size]


def _each(
    read: Callable[[int, int], Sample], shards: np.ndarray, samples: np.ndarray
) -> Iterator[Sample | TarshardsError]:
    for shard, sample in zip(shards.tolist(), samples.tolist()):
        try:
            result: Sample | TarshardsError = read(shard, sample)
        except TarshardsError as error:
            result = error
        yield result


class Fan:
    """Distributes what is *upcoming* to *count* readers; *choose* returns the numbers that each of them will read."""

    def __init__(self, upcoming: Iterator[Numbers], count: int, choose: Callable[[int, Numbers], Numbers]):
        self._upcoming, self._choose = upcoming, choose
        self._waiting: list[deque[Numbers]] = [deque() for _ in range(count)]
        self._lock = Lock()

    def numbers(self, number: int) -> Iterator[Numbers]:
        """Yield what the reader of this number will read; each may be in a thread of its own."""
        waiting = self._waiting[number]
        while True:
            with self._lock:
                while not waiting:
                    numbers = next(self._upcoming, None)
                    if numbers is None:
                        return
                    for other, queue in enumerate(self._waiting):
                        if len((chosen := self._choose(other, numbers))[0]):
                            queue.append(chosen)
                found = waiting.popleft()
            yield found


class IndexedShards(SampleReader, Sequence[Sample]):
    """The samples of indexed shards, one after the other, as a sequence: ``[i]``, ``["key"]``, slices, ``len``.

    A sample is read when it is asked for: only its bytes, and of these only *fields* (a list of names, or words in one
    string) if given. Those that *lazy* names are each a ``MemberFile``, which reads only what is asked for.
    Nothing is cached. A slice is again a sequence of samples. Local shards are mapped; remote ones
    are read by range requests, several at once for ``read_all`` and for the batches of a DataLoader. The object can be
    pickled, inherited by forked processes and shared by threads. *index_dir* and *remote* are as for ``Opening``.

    A sample at fault, such as one with a duplicate field, has its number, but reading it raises SampleError. ``find``
    and ``locate`` give the number of the first sample of a key, which may be at fault; ``["key"]`` raises SampleError
    for a key that several samples have.

    Raises ShardIndexError where a shard has no index, or is compressed, or if a local one has another size than its
    index says. Indexes are loaded, and compared with their shards, when first needed: a stale one is a ShardIndexError
    then. For a manifest (``train.shards.json``), which gives the number of samples, all of this is seen when first
    needed. A shard in which no sample has one of *fields* raises SampleError, without a manifest the first at once.
    """

    @collector_paused()
    def __init__(
        self,
        urls: Any,
        *,
        fields: str | Iterable[str] | None = None,
        lazy: str | Iterable[str] | None = None,
        remote: Remote | None = None,
        index_dir: str | PathLike[str] | None = None,
    ):
        remote = with_index_dir(remote, index_dir)
        shards = urls if isinstance(urls, Shards) else find_shards(urls, remote)
        self.shards = OpenShards(shards, FieldNames.of(fields), remote, lazy_fields(lazy, fields))
        self.urls, self.names, self.fields = self.shards.urls, self.shards.names, self.shards.fields
        self.counts, self.sizes, self.remote = self.shards.counts, self.shards.sizes, self.shards.remote
        self._ends: list[int] = np.cumsum(self.counts).tolist()
        self._range = range(self._ends[-1])
        self._fetcher: BlockFetcher | None = None
        self._readahead: LocalReadahead | None = None

    def __len__(self) -> int:
        return len(self._range)

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: str) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> IndexedShards: ...
    def __getitem__(self, index: int | str | slice) -> Sample | IndexedShards:
        if isinstance(index, str):
            index = self._only(index)
        if isinstance(index, slice):
            part = copy.copy(self)
            part._range = self._range[index]
            return part
        return self.read(*self._numbers(index))

    def __getitems__(self, numbers: Iterable[int]) -> list[Sample]:
        """Return several samples, as DataLoaders ask for them."""
        pairs = np.array([self._numbers(number) for number in numbers], np.int64).reshape(-1, 2)
        return [_raised(result) for result in self.read_all(pairs[:, 0], pairs[:, 1])]

    def __iter__(self) -> Iterator[Sample]:
        for result in self.read_numbers(np.array(self._range, np.int64)):
            yield _raised(result)

    def read_numbers(self, numbers: np.ndarray) -> Iterator[Sample | TarshardsError]:
        """Yield the samples of these numbers over all shards, sliced or not, as ``read_all`` does."""
        numbers = numbers.astype(np.int64)
        shards = np.searchsorted(self._ends, numbers, "right")
        starts = np.array(self._ends, np.int64) - self.counts
        return self._read_ahead(shards, numbers - starts[shards], gap_of(numbers, self._ends[-1]))

    def _numbers(self, index: int) -> tuple[int, int]:
        """Return the number of the shard that has a sample of this sequence, and the sample's number in it."""
        try:
            number = self._range[index]
        except IndexError:
            raise IndexError(f"there is no sample {index} of {len(self)}, which are numbered from 0") from None
        except TypeError:
            given = f"{shortened(index)}; __getitems__ takes several numbers"
            raise TypeError(f"samples are named by a number, a key or a slice, not {given}") from None
        shard = bisect_right(self._ends, number)
        return shard, number - (self._ends[shard] - int(self.counts[shard]))

    def _only(self, key: str) -> int:
        """Return the number of the sample with this key; raise KeyError for none, and SampleError for several."""
        first = self.find(key)
        if len(found := sorted(self.places(key))) > 1:
            shards = " and ".join(dict.fromkeys(self.names[self._numbers(each)[0]] for each in found[:2]))
            cure = f"[{found[0]}] and [{found[1]}] read the first two, and places(key) gives all"
            raise SampleError(f"{len(found)} samples have this key, in {shards}: {cure}", key=key)
        return first

    @property
    def keys(self) -> list[str]:
        """The keys of the samples, in their order; every index is loaded for them."""
        if self._range == range(len(self._range)):
            return list(islice(self.shards.each_key(), len(self._range)))
        keys = [""] * len(self._range)
        for number, key in enumerate(self.shards.each_key()):
            if number in self._range:
                keys[self._range.index(number)] = key
        return keys

    def locate(self, keys: Iterable[str]) -> np.ndarray:
        """Return for each of *keys* the number of the first sample that has it, -1 where none does; int64, one axis.

        They are looked up in the key index (`tarindex --key-index`) if there is one. Otherwise every index is loaded,
        and 16 bytes a sample are kept for the next look-up.
        """
        if isinstance(keys, str):
            raise TypeError(f"keys are a list of str, not one str {shortened(keys)}")
        return np.fromiter((min(self.places(key), default=-1) for key in keys), np.int64)

    def places(self, key: str) -> list[int]:
        """Return the numbers of all samples with this key, as ``locate`` does."""
        if not isinstance(key, str):
            raise TypeError(f"a key is a str, not {shortened(key)}")
        own = self._range
        return [own.index(number) for number in self.shards.table.numbers(key) if number in own]

    def find(self, key: str) -> int:
        """Return the number of the first sample with this key; raise KeyError where there is none."""
        number = min(self.places(key), default=None)
        if number is None:
            raise KeyError(key)
        return number

    def repeated_key(self) -> str | None:
        """Return a key that several samples of the shards have, None where all keys differ."""
        return self.shards.table.repeated()

    def has_faults(self) -> bool:
        """Return whether samples of the shards are at fault, so that reading them raises; every index is loaded."""
        return any(self.shards.index(number).faults for number in range(len(self.urls)))

    def column(self, field: str) -> Column:
        """Return the ``.npy`` *field* of these samples as one read-only array; see ``Column``."""
        return Column(self.shards, field, self._range)

    def read(self, shard: int, sample: int) -> Sample:
        if self._fetcher is not None:
            return self._fetcher.read(shard, sample)
        return (self.shards.in_use.get(shard) or self.shards.use(shard)).read(sample)

    def read_aside(self, shard: int, sample: int) -> Sample:
        if self._fetcher is not None:
            return self._fetcher.read_aside(shard, sample)
        return self.read(shard, sample)

    def read_all(self, shards: np.ndarray, samples: np.ndarray) -> Iterator[Sample | TarshardsError]:
        if (fetcher := self._fetcher) is not None:
            return fetcher.read_kept(shards, samples) if fetcher.are_kept else _each(fetcher.read, shards, samples)
        return self._read_ahead(shards, samples) if self.is_remote() else self._read_local(shards, samples)

    def announce(self, count: int, fields: FieldNames | None) -> None:
        if self._readahead is not None:
            self._readahead.take(count, fields)

    def _read_local(self, shards: np.ndarray, samples: np.ndarray) -> Iterator[Sample | TarshardsError]:
        step = max(1, len(shards)) if self._readahead is None else self._readahead.every
        for begin in range(0, len(shards), step):
            part, numbers = (np.ascontiguousarray(array[begin : begin + step]) for array in (shards, samples))
            if self._readahead is not None:
                self._readahead.take(len(part))
            done = 0
            while done < len(part):
                found = read_samples(self.shards.tables, part, numbers, done)
                for i, result in enumerate(found, done):
                    yield result or self._read_alone(int(part[i]), int(numbers[i]))
                done += len(found)

    def _read_alone(self, shard: int, sample: int) -> Sample | TarshardsError:
        try:
            return self.read(shard, sample)
        except TarshardsError as error:
            return error

    def _read_ahead(
        self, shards: np.ndarray, samples: np.ndarray, gap: float = 0.0
    ) -> Iterator[Sample | TarshardsError]:
        upcoming = in_parts(shards, samples, LOOKED_UP)
        with self.ahead(upcoming, block=None, reach=len(shards), gap=gap) as reader:
            yield from reader.read_all(shards, samples)

    @contextmanager
    def ahead(
        self,
        upcoming: Iterator[Numbers],
        *,
        block: int | None,
        reach: int,
        processes: int = 1,
        gap: float = 0.0,
    ) -> Iterator[IndexedShards]:
        self.shards.begin()
        reader = copy.copy(self)
        if not self.is_remote():
            with closing(LocalReadahead(self.shards, upcoming, gap=gap)) as reader._readahead:
                yield reader
            return
        from tarshards.index.fetch import BlockFetcher

        budget = self.shards.remote.budget(processes)
        fetcher = BlockFetcher(self.shards, upcoming, block=block, reach=reach, budget=budget, is_alone=processes == 1)
        with closing(fetcher) as reader._fetcher:
            yield reader

    @cached_property
    def _is_remote(self) -> bool:
        return not are_local(self.urls)

    def is_remote(self) -> bool:
        return self._is_remote

    def verify(self) -> None:
        self.shards.verify()


def _raised(result: Sample | TarshardsError) -> Sample:
    if isinstance(result, TarshardsError):
        raise result
    return result
