"""Samples of indexed shards in any order; only the requested bytes are read."""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import islice
from threading import Lock
from typing import TYPE_CHECKING, Any, Self, overload

import numpy as np

from tarshards import kernels
from tarshards.errors import SampleError, TarshardsError, shortened
from tarshards.index.mapped_fields import MappedFields
from tarshards.index.npy_column import Column
from tarshards.index.open import OpenShards
from tarshards.index.readahead import LOOKED_UP, LocalReadahead, Numbers, in_parts
from tarshards.samples.fields import FieldNames, Term, lazy_fields
from tarshards.samples.keys import Sample
from tarshards.storage.manifest import Shards, collector_paused

if TYPE_CHECKING:  # what reads local shards need not load what asks servers
    from tarshards.index.fetch import BlockFetcher


class SampleReader:
    """Reads samples by the number of their shard and their number in the shard.

    *urls* are the shards' URLs and *names* the same without credentials; *counts* has the number of samples of each
    shard, and *sizes* its bytes.
    """

    urls: list[str]
    names: list[str]
    counts: np.ndarray
    sizes: np.ndarray
    reserved = 2  # entries of a sample that are not fields: __key__, __url__
    unpaired = 0  # samples of joined shards that are beyond those of the dataset, and so in no sample

    def read(self, shard: int, sample: int) -> Sample:
        """Return a sample; raise TarshardsError if it cannot be read."""
        raise NotImplementedError

    def read_aside(self, shard: int, sample: int) -> Sample:
        """Return a sample as ``read`` does, also one that a prefetching reader does not expect."""
        return self.read(shard, sample)

    @property
    def sequences(self) -> list[SampleSequence]:
        """The sequences that have these samples, end to end."""
        raise NotImplementedError

    def is_remote(self) -> bool:
        """Return whether reading a sample waits for a network, so that several should be read at once."""
        raise NotImplementedError

    def verify(self) -> None:
        """Raise OpenError if a local shard was written to since it was opened; shards that failed are tried again."""
        raise NotImplementedError

    def announce(self, count: int, fields: FieldNames | None) -> None:
        """Tell a reader returned by ``ahead`` that *fields* of the next *count* samples will be read from memory.

        ``read_all`` does this for the samples that it reads.
        """

    def mapped(self, terms: Sequence[Term]) -> MappedFields | None:
        """Return an object that finds fields in the shards; None if they cannot be mapped, or not all at once."""
        return None

    def read_all(self, shards: np.ndarray, samples: np.ndarray) -> Iterator[Sample | TarshardsError]:
        """Yield many samples as ``read`` returns them, or the error for a sample that cannot be read."""
        return _each(self.read, shards, samples)

    def read_aside_all(self, shards: np.ndarray, samples: np.ndarray) -> Iterator[Sample | TarshardsError]:
        """Yield many samples as ``read_aside`` returns them, or the error for a sample that cannot be read."""
        return _each(self.read_aside, shards, samples)

    @contextmanager
    def ahead(
        self, upcoming: Iterator[Numbers], *, block: int | None, reach: int, processes: int, gap: float
    ) -> Iterator[Self]:
        """Give a reader of the same samples, which fetches remote ones ahead, as *upcoming* says, and local ones, too,
        where their disk is waited for.

        *block* and *reach* are as for ``BlockFetcher``; *processes* on this host share the memory for it. *gap* is the
        number of samples that are skipped between two stretches to read.
        """
        yield self


def gap_of(numbers: np.ndarray, total: int) -> float:
    """Return how many of *total* samples are between two stretches of those in *numbers*, which ascend."""
    stretches = 1 + int(np.count_nonzero(np.diff(numbers) != 1))
    return (total - len(numbers)) / stretches if len(numbers) else 0.0


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


class SampleSequence(SampleReader, Sequence[Sample]):
    """The samples of indexed shards, one after the other, as a sequence of dicts of bytes.

    ``IndexedShards``, which adds ops, describes how it is indexed and what it raises.
    """

    @collector_paused()
    def __init__(
        self,
        shards: Shards,
        *,
        fields: str | Iterable[str] | None = None,
        lazy: str | Iterable[str] | None = None,
    ):
        self.shards: OpenShards = OpenShards(shards, FieldNames.of(fields), lazy_fields(lazy, fields))
        self.urls: list[str] = self.shards.named.urls
        self.names: list[str] = self.shards.names
        self.fields: FieldNames | None = self.shards.fields
        self.counts: np.ndarray = self.shards.counts
        self.sizes: np.ndarray = self.shards.sizes
        self._ends: list[int] = np.cumsum(self.counts).tolist()
        self._own: range | np.ndarray = range(self._ends[-1])  # the numbers of these samples over all shards
        self._fetcher: BlockFetcher | None = None
        self._readahead: LocalReadahead | None = None

    @property
    def sequences(self) -> list[SampleSequence]:
        return [self]

    def __len__(self) -> int:
        return len(self._own)

    @overload
    def __getitem__(self, index: int | str) -> Sample: ...
    @overload
    def __getitem__(self, index: slice | Sequence[int] | np.ndarray) -> Self: ...
    def __getitem__(self, index: Any) -> Sample | Self:
        if isinstance(index, str):
            index = self._only(index)
        elif not isinstance(index, int) and (not hasattr(index, "__index__") or getattr(index, "ndim", None)):
            part = copy.copy(self)
            part._own = self._own[index] if isinstance(index, slice) else self._picked(index)
            return part
        return self.read(*self._numbers(index))

    def _picked(self, index: Any) -> np.ndarray:
        """Return the numbers of the samples that a list or array of numbers, or a mask, selects."""
        given = np.asarray(index if isinstance(index, Sequence) or hasattr(index, "__array__") else None)
        if isinstance(index, tuple | bytes) or (given.dtype.kind not in "biu" and given.size):
            if given.dtype.kind == "U":
                words = f"a list names samples by numbers, not {shortened(index)}"
                raise TypeError(f"{words}; locate(keys) gives the numbers of keys")
            named = "by a number, a key, a slice, or a list or array of numbers or of True and False"
            raise TypeError(f"samples are named {named}, not {shortened(index)}")
        if given.ndim != 1:
            raise TypeError(f"samples are named by a list or array of one axis, not of {given.ndim}")
        if given.dtype.kind == "b" and len(given) != len(self):
            raise IndexError(f"a mask of {len(given)} for {len(self)} samples")
        chosen = np.flatnonzero(given) if given.dtype.kind == "b" else given.astype(np.int64)
        outside = (chosen < -len(self)) | (chosen >= len(self))
        if outside.any():
            raise self._no_sample(int(chosen[outside][0]))
        own = self._own
        if isinstance(own, range) and len(own):
            return own.start + own.step * (chosen % len(own))
        return np.asarray(own, np.int64)[chosen]

    def _no_sample(self, index: Any) -> IndexError:
        return IndexError(f"there is no sample {index} of {len(self)}, which are numbered from 0")

    def __getitems__(self, numbers: Iterable[int]) -> list[Sample]:
        """Return several samples, as DataLoaders ask for them."""
        return [_raised(result) for result in self.read_all(*self.shards.in_shards(self._picked([*numbers])))]

    def __iter__(self) -> Iterator[Sample]:
        for result in self.read_numbers(np.asarray(self._own, np.int64)):
            yield _raised(result)

    def read_numbers(self, numbers: np.ndarray) -> Iterator[Sample | TarshardsError]:
        """Yield the samples of these numbers over all shards, sliced or not, as ``read_all`` does."""
        return self._read_ahead(*self.shards.in_shards(numbers.astype(np.int64)), gap_of(numbers, self._ends[-1]))

    def _numbers(self, index: int) -> tuple[int, int]:
        """Return the number of the shard that has a sample of this sequence, and the sample's number in it."""
        try:
            number = int(self._own[index])
        except IndexError:
            raise self._no_sample(index) from None
        shard = bisect_right(self._ends, number)
        return shard, number - (self._ends[shard - 1] if shard else 0)

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
        """The keys of the samples, in order; loads every index."""
        if isinstance(self._own, range) and self._own == range(len(self)):
            return list(islice(self.shards.each_key(), len(self)))
        keys = [""] * len(self)
        order = np.argsort(self._own, kind="stable").tolist()
        numbers, at = np.asarray(self._own)[order].tolist(), 0
        for number, key in enumerate(self.shards.each_key()):
            while at < len(order) and numbers[at] == number:
                keys[order[at]], at = key, at + 1
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
        numbers, own = self.shards.table.numbers(key), self._own
        if isinstance(own, range):
            return [own.index(number) for number in numbers if number in own]
        return np.flatnonzero(np.isin(own, numbers)).tolist()

    def find(self, key: str) -> int:
        """Return the number of the first sample with this key; raise KeyError if there is none."""
        number = min(self.places(key), default=None)
        if number is None:
            raise KeyError(key)
        return number

    def repeated_key(self) -> str | None:
        """Return a key that several samples of the shards have, None if all keys differ."""
        return self.shards.table.repeated()

    def has_faults(self) -> bool:
        """Return whether samples of the shards are at fault, so that reading them raises; every index is loaded."""
        return any(self.shards.index(number).faults for number in range(len(self.urls)))

    def mapped(self, terms: Sequence[Term]) -> MappedFields | None:
        return None if self.is_remote() else MappedFields.of(self.shards, terms, self.fields)

    def column(self, field: str) -> Column:
        """Return the ``.npy`` *field* of these samples as one read-only array; see ``Column``."""
        return Column(self.shards, field, self._own)

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
                found = kernels.headers.read_samples(self.shards.tables, part, numbers, done)
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
    ) -> Iterator[SampleSequence]:
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

    def is_remote(self) -> bool:
        return not self.shards.named.is_local

    def verify(self) -> None:
        self.shards.verify()


def _raised(result: Sample | TarshardsError) -> Sample:
    if isinstance(result, TarshardsError):
        raise result
    return result
