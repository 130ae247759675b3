"""How a batch of arrays is assembled: open the readers, read the fields into memory, leave out failures, transform."""

from __future__ import annotations

import copy
import sys
import threading
import time
from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from tarshards.epoch.permutations import fold
from tarshards.errors import DecodeError, SampleError, TarshardsError, check_function
from tarshards.loaders.arrays.readers import reader_of
from tarshards.loaders.arrays.readers.arrays import Ragged
from tarshards.loaders.arrays.readers.reader import Reader
from tarshards.samples.batch import Failures, SampleBatch
from tarshards.samples.fields import Term, parse_terms
from tarshards.samples.payloads import Payloads
from tarshards.stream.collate import not_as_long

Transform = Callable[[dict[str, Any], np.random.Generator], dict[str, Any]]

#: Gives the next substitutes for the samples in some rows of a batch, and counts them afterwards, by the failures that
#: were put into the dict.
Substitution = Callable[[list[int]], AbstractContextManager[tuple[SampleBatch, Failures]]]

_one = [object()]
ALONE = sys.getrefcount(_one[0])  # the count of an object that only a list refers to


@dataclass
class AssembledBatch:
    """A batch, of how many samples it was made, and what failed of them; *bytes* read, and seconds of the stages."""

    batch: dict[str, Any]
    samples: int
    failures: Failures
    bytes: int = 0
    reading: float = 0.0
    decoding: float = 0.0
    substituted: list[TarshardsError] = field(default_factory=list)  # what failed of the samples instead of others

    @property
    def errors(self) -> list[TarshardsError]:
        """What failed, in the order of the samples."""
        return [*(self.failures[row] for row in sorted(self.failures)), *self.substituted]


class Assembler:
    """Assembles batches of up to *size* samples of *fields*; see ``Memory`` for *kept* and *ring*.

    *number* is that of the next batch to deliver: its buffers of a ring come after those of the batches before it.
    """

    def __init__(self, fields: Mapping[str, Any], transforms: Iterable[Transform], size: int, kept: int, ring: bool):
        self.terms: list[Term] = [_term(name) for name in fields]
        self.names: list[str] = [term.column for term in self.terms]
        if len({*self.names, "__key__"}) <= len(self.names):
            raise ValueError(f"two fields of one name: {' '.join(self.names)}")
        self.readers: list[Reader] = [reader_of(reader) for reader in fields.values()]
        self.transforms: tuple[Transform, ...] = tuple(transforms)
        self.is_open: bool = False
        for transform in self.transforms:
            check_function(transform, "transforms=")
            if hasattr(transform, "forward") and hasattr(transform, "state_dict"):
                cure = "partial(augment.module, field='jpg', module=...) applies a module of torch to a field"
                raise TypeError(f"transforms= takes functions (batch, rng); {cure}")
        self.memory: Any = Memory(len(fields), size, kept, ring)
        self.number: int = 0
        self._origin: Assembler | None = None  # which opens the readers of this one, of a pass over an epoch
        self._epoch = 0
        self._opening = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_opening": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _opening=threading.Lock())

    @property
    def is_quick(self) -> bool:
        """Whether a batch is a few copies, which one thread makes as fast as several."""
        return all(reader.is_quick for reader in self.readers) and not self.transforms

    def open_by_names(self) -> None:
        """Open the readers now, unless one has to learn from a payload what its field is like."""
        names = [term.alternatives[0].lower() for term in self.terms]
        if not any(reader.learns(name) for reader, name in zip(self.readers, names)):
            self.readers = [reader.open(name, b"") for reader, name in zip(self.readers, names)]
            self.is_open = True

    def open(self, samples: SampleBatch) -> Failures:
        """Let the readers determine the form of their fields from the first sample that they can read.

        Returns what failed before it.
        """
        if self._origin is not None:
            failures = self._origin.open(samples)
            if self._origin.is_open:
                self.readers = [reader.at(self._epoch) for reader in self._origin.readers]
                self.is_open = True
            return failures
        failures = dict(samples.check())
        with self._opening:
            for row in range(0 if self.is_open else len(samples)):
                if row in failures:
                    continue
                opened = []
                for reader, term in zip(self.readers, self.terms):
                    try:
                        opened.append(reader.open(term.alternatives[0].lower(), samples.copy(term.column, row)))
                    except DecodeError as error:
                        failures[row] = _located(error, samples, row, term.column)
                        break
                    except OSError as error:
                        failures[row] = samples.unreadable(row, error)
                        break
                else:
                    self.readers = opened
                    self.is_open = True
                    break
        return failures

    def for_a_pass(self) -> Assembler:
        """Return an assembler with memory of its own, for a pass beside others; both have the same readers."""
        own = copy.copy(self)
        own.memory, own.number, own._origin = copy.copy(self.memory), 0, self  # a copy of a Memory has no buffers
        return own

    def at(self, epoch: int) -> Assembler:
        """Return the assembler of batches of this *epoch*: another one if readers make images of another size."""
        opened = self if self._origin is None or self.is_open else self._origin
        own, readers = self, [reader.at(epoch) for reader in opened.readers]
        if any(now is not before for now, before in zip(readers, self.readers)):
            own = copy.copy(self)
            own.readers, own.is_open, own.memory = readers, opened.is_open, copy.copy(self.memory)
        if own._origin is not None:
            own._epoch = epoch
        return own

    def assemble(
        self,
        locate: Callable[[], SampleBatch],
        key: np.ndarray,
        number: int,
        substitution: Substitution | None = None,
    ) -> AssembledBatch:
        """Assemble the *number*-th batch, of the samples that *locate* returns; *key* is what its epoch draws from.

        With *substitution* others are taken instead of those that fail.
        """
        begun = time.perf_counter()
        samples = locate()
        failures = samples.check() if self.is_open else self.open(samples)
        draws = self._draws(key, samples.numbers)
        between = time.perf_counter()
        batch, read, failures = self._batch(samples, failures, draws, number)
        missing, substituted = failures, list[TarshardsError]()
        while missing and substitution is not None:
            samples, shrunk = samples.copied()
            failures, missing = shrunk | failures, shrunk | missing  # where a mapped shard has shrunk since
            at = sorted(missing)
            with substitution(at) as (others, left):
                found = others.check() if self.is_open else self.open(others)
                samples = samples.replaced(at, others)
                missing = {at[i]: error for i, error in found.items()}
                draws = self._draws(key, samples.numbers)
                batch, read, missing = self._batch(samples, missing, draws, number)
                left.update(missing)
                substituted += missing.values()
        if self.transforms and read is not None:
            rng = np.random.default_rng([int(draws[0]), 1])
            for transform in self.transforms:
                batch = transform(batch, rng)
        size = sum(int(payloads.sizes.sum()) for payloads in read.columns.values()) if read is not None else 0
        times = between - begun, time.perf_counter() - between
        return AssembledBatch(batch, len(samples), failures, size, *times, substituted)

    def _batch(
        self, samples: SampleBatch, failures: Failures, draws: np.ndarray, number: int
    ) -> tuple[dict[str, Any], SampleBatch | None, Failures]:
        """Return what ``_read_batch`` does, also where a mapped shard has shrunk."""
        try:
            return self._read_batch(samples, failures, draws, number)
        except OSError:  # what is still there is read from copies
            samples, shrunk = samples.copied()
            return self._read_batch(samples, shrunk | failures, draws, number)

    def _read_batch(
        self, samples: SampleBatch, failures: Failures, draws: np.ndarray, number: int
    ) -> tuple[dict[str, Any], SampleBatch | None, Failures]:
        """Return the batch without the *failures*, its samples (None if there are none to read), and all failures.

        Raises OSError if a mapped shard has shrunk.
        """
        if len(failures) == len(samples):
            return self._nothing(), None, failures
        read, kept = samples, np.arange(len(samples))
        if failures:
            kept = np.delete(kept, list(failures))
            read, draws = samples.keep(kept), draws[kept]
        columns, failed = self._read(read.columns.values(), draws, number)
        if read.pieces is not None:
            self._cut(columns, read, read.pieces, failed)
        if failed:
            located = {int(kept[i]): _located(error, read, i, column) for i, (column, error) in failed.items()}
            failures = {**failures, **located}
            good = np.delete(np.arange(len(kept)), list(failed))
            read, columns = read.keep(good), [_keep(column, good) for column in columns]
        batch = {
            name: reader.join_in(column, partial(self.memory.empty, i, number))
            for i, (name, reader, column) in enumerate(zip(self.names, self.readers, columns))
        }
        samples.check_copied()
        batch["__key__"] = read.keys
        return batch, read, failures

    def _read(
        self, payloads: Iterable[Payloads], draws: np.ndarray, number: int
    ) -> tuple[list[Any], dict[int, tuple[str, DecodeError]]]:
        """Read the columns of a batch; of each row that failed, return the first column where it did, and why."""
        columns: list[Any] = []
        failed: dict[int, tuple[str, DecodeError]] = {}
        for i, (reader, part) in enumerate(zip(self.readers, payloads)):
            column = self.memory.take(i, reader, len(part), number)
            for row, error in reader.read(column, part, draws).items():
                failed.setdefault(row, (self.names[i], error))
            columns.append(column)
        return columns, failed

    def _cut(self, columns: list[Any], samples: SampleBatch, pieces: np.ndarray, failed: Container[int]) -> None:
        """Cut the ragged columns to the *pieces* of samples; raise SampleError for one of another length."""
        begins, most, lengths = pieces.T
        for reader, column in zip(self.readers, columns):
            if not isinstance(reader, Ragged):
                continue
            counts = reader.counts(column)
            for i in np.flatnonzero(np.maximum(counts, 1) != lengths).tolist():
                if i not in failed:
                    url, key = samples.names[samples.shards[i]], samples.keys[i]
                    raise SampleError(not_as_long(int(counts[i]), int(lengths[i])), url=url, key=key)
            reader.cut(column, begins, most)

    def _draws(self, key: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        return np.zeros(len(numbers), np.uint64) if self.is_quick else fold(key, numbers)

    def _nothing(self) -> dict[str, Any]:
        """A batch without samples."""
        columns = [reader.join(reader.make(0)) if self.is_open else [] for reader in self.readers]
        return {**dict(zip(self.names, columns)), "__key__": []}


def _located(error: TarshardsError, samples: SampleBatch, row: int, column: str) -> TarshardsError:
    url, key = samples.names[samples.shards[row]], samples.keys[row]
    located = DecodeError(error.reason, url=url, key=key, field=column)
    located.__cause__ = error.__cause__
    return located


def has_failed(error: Exception) -> bool:
    """Say whether *error* is of a sample that was read, and then lacked a field or did not decode."""
    return isinstance(error, (DecodeError, SampleError))


class Memory:
    """The buffers for batches of *size* rows, *kept* for each column; one is reused when nothing else refers to it.

    In a *ring* they are reused in turn, whatever refers to them. Columns whose elements have no common size have other
    buffers beside, which grow to the largest batch.
    """

    def __init__(self, columns: int, size: int, kept: int, ring: bool):
        self._options = columns, size, kept, ring
        self._size, self._ring, self._lock = size, ring, threading.Lock()
        self._arrays: list[list[Any]] = [[None] * kept for _ in range(columns)]
        self._bytes: list[list[Any]] = [[None] * kept for _ in range(columns)]

    def __reduce__(self) -> Any:
        return Memory, self._options

    def take(self, column: int, reader: Reader, count: int, number: int) -> Any:
        """Return what *reader* reads *count* samples of a column of the *number*-th batch into."""
        arrays = self._arrays[column]
        if count > self._size:  # of bins, which have several samples each
            return reader.make(count)
        with self._lock:
            for i in [number % len(arrays)] if self._ring else range(len(arrays)):
                if arrays[i] is None and count == self._size:  # those of an epoch's end are not worth keeping
                    arrays[i] = reader.make(count)
                    return arrays[i][:]  # a view keeps a reference to the array
                if arrays[i] is not None and (self._ring or sys.getrefcount(arrays[i]) == ALONE):
                    return arrays[i][:count]
        return reader.make(count)

    def empty(self, column: int, number: int, count: int, dtype: np.dtype) -> np.ndarray:
        """Return an array of *count* elements for the joined values of a column of the *number*-th batch."""
        buffers, size = self._bytes[column], count * dtype.itemsize
        with self._lock:
            for i in [number % len(buffers)] if self._ring else range(len(buffers)):
                if buffers[i] is None or self._ring or sys.getrefcount(buffers[i]) == ALONE:
                    if buffers[i] is None or len(buffers[i]) < size:
                        buffers[i] = np.empty(size + size // 8, np.uint8)  # the next batch may be a little larger
                    return buffers[i][:size].view(dtype)
        return np.empty(count, dtype)


def _term(name: str) -> Term:
    terms = parse_terms(name)
    if len(terms) != 1 or terms[0].alternatives == ["*"]:
        raise ValueError(f"{name!r} is not one field; write it like jpg, jpg;png or image:jpg;png")
    return terms[0]


def _keep(column: Any, kept: np.ndarray) -> Any:
    return column[kept] if isinstance(column, np.ndarray) else [column[row] for row in kept]
