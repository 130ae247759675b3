"""How a batch of arrays is assembled: open the readers, read the fields into memory, leave out failures, transform."""

from __future__ import annotations

import copy
import sys
import threading
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
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
from tarshards.stream.collate import not_as_long

# Samples of a part of a batch, at least: of half as many, images take 1.4 x the time under the GIL.
LEAST = 64

Transform = Callable[[dict[str, Any], np.random.Generator], dict[str, Any]]

#: Gives the next substitutes for the samples in some rows of a batch, and counts them afterwards, by the failures that
#: were put into the dict.
Substitution = Callable[[list[int]], AbstractContextManager[tuple[SampleBatch, Failures]]]

_one = [object()]
ALONE = sys.getrefcount(_one[0])  # the count of an object that only a list refers to


@dataclass
class AssembledBatch:
    """A batch, of how many samples it was made, and what failed of them; *bytes* read, and seconds of the stages.

    *rows* samples are in it, before transforms. *begun* is its copy to a device, which may have begun.
    """

    batch: dict[str, Any]
    samples: int
    failures: Failures
    bytes: int = 0
    reading: float = 0.0
    decoding: float = 0.0
    substituted: list[TarshardsError] = field(default_factory=list)  # what failed of the samples instead of others
    rows: int = 0
    begun: Any = None

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
        self.size = size
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
        """Assemble the *number*-th batch in this thread; the arguments are those of ``UnfinishedBatch``."""
        return UnfinishedBatch(self, locate, key, number, substitution).alone()

    def parts(self, count: int, most: int) -> int:
        """Return into how many parts, up to *most*, threads share a batch of *count* samples."""
        if most == 1:
            return 1
        slow = [reader for reader in self.readers if not reader.is_quick]
        are_rows = any(isinstance(reader.make(0), np.ndarray) for reader in slow)
        return max(1, min(most, count // LEAST)) if are_rows else 1

    def under_way(self, threads: int) -> int:
        """Return how many batches *threads* have under way: each its own where transforms, which none shares, run."""
        return threads if self.transforms else -(-threads // self.parts(self.size, threads))

    def draws(self, key: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """Return the draws of the samples with these *numbers*: 0 where readers need none."""
        return np.zeros(len(numbers), np.uint64) if self.is_quick else fold(key, numbers)

    def nothing(self) -> dict[str, Any]:
        """A batch without samples."""
        columns = [reader.join(reader.make(0)) if self.is_open else [] for reader in self.readers]
        return {**dict(zip(self.names, columns)), "__key__": []}


class UnfinishedBatch:
    """The *number*-th batch, of the samples that *locate* returns, while threads assemble it in parts.

    *key* is what its epoch draws from. With *substitution* others are taken instead of the samples that fail.
    """

    def __init__(
        self,
        assembler: Assembler,
        locate: Callable[[], SampleBatch],
        key: np.ndarray,
        number: int,
        substitution: Substitution | None = None,
    ):
        self._assembler, self._locate, self._key, self._number = assembler, locate, key, number
        self._substitution = substitution
        self._shrunk: OSError | None = None  # of a mapped shard
        self._reading = 0.0
        self._decoding: list[float] = []  # the seconds of each part: threads append to it at once

    def begin(self, most: int) -> int:
        """Find the samples, and take memory for them; return the number of parts to read, at *most* as many."""
        begun = time.perf_counter()
        assembler = self._assembler
        self._samples = samples = self._locate()
        self._failures = samples.check() if assembler.is_open else assembler.open(samples)
        self._draws = assembler.draws(self._key, samples.numbers)
        self._rows = BatchRows(assembler, samples, self._failures, self._draws, self._number)
        count = self._rows.count
        parts = assembler.parts(count, most)
        self._bounds = [count * part // parts for part in range(parts + 1)]
        self._reading = time.perf_counter() - begun
        return parts

    def read(self, part: int) -> None:
        """Read a part."""
        begun = time.perf_counter()
        try:
            self._rows.read(self._bounds[part], self._bounds[part + 1])
        except OSError as error:
            self._shrunk = error
        self._decoding.append(time.perf_counter() - begun)

    def finish(self) -> AssembledBatch:
        """Return the batch, without the samples that failed or with substitutes, after the transforms."""
        begun = time.perf_counter()
        assembler, samples, draws = self._assembler, self._samples, self._draws
        batch, read, failures = self._joined()
        missing, substituted = failures, list[TarshardsError]()
        while missing and self._substitution is not None:
            samples, shrunk = samples.copied()
            failures, missing = shrunk | failures, shrunk | missing  # where a mapped shard has shrunk since
            at = sorted(missing)
            with self._substitution(at) as (others, left):
                found = others.check() if assembler.is_open else assembler.open(others)
                samples = samples.replaced(at, others)
                missing = {at[i]: error for i, error in found.items()}
                draws = assembler.draws(self._key, samples.numbers)
                batch, read, missing = self._read_alone(samples, missing, draws)
                left.update(missing)
                substituted += missing.values()
        if assembler.transforms and read is not None:
            rng = np.random.default_rng([int(draws[0]), 1])
            for transform in assembler.transforms:
                batch = transform(batch, rng)
        size = sum(int(payloads.sizes.sum()) for payloads in read.columns.values()) if read is not None else 0
        times = self._reading, sum(self._decoding) + time.perf_counter() - begun
        rows = len(read.keys) if read is not None else 0
        return AssembledBatch(batch, len(samples), failures, size, *times, substituted, rows)

    def alone(self) -> AssembledBatch:
        """Assemble the batch in this thread."""
        self.begin(1)
        self.read(0)
        return self.finish()

    def _joined(self) -> tuple[dict[str, Any], SampleBatch | None, Failures]:
        """Return what ``BatchRows.join`` does of the rows that were read in parts."""
        rows = self._rows
        del self._rows  # so that the memory is free as soon as the batch is let go
        if self._shrunk is None:
            with suppress(OSError):
                return rows.join()
        return self._read_alone(self._samples, self._failures, self._draws)

    def _read_alone(
        self, samples: SampleBatch, failures: Failures, draws: np.ndarray
    ) -> tuple[dict[str, Any], SampleBatch | None, Failures]:
        """Read all rows in this thread, of copies if a mapped shard has shrunk; return what ``BatchRows.join`` does."""
        try:
            return BatchRows(self._assembler, samples, failures, draws, self._number).whole()
        except OSError:
            samples, shrunk = samples.copied()
            return BatchRows(self._assembler, samples, shrunk | failures, draws, self._number).whole()


class BatchRows:
    """The columns of the *number*-th batch, of *samples* without the *failures*, in memory that is taken for them.

    Parts may be read by several threads at once, until ``join``. Both raise OSError if a mapped shard has shrunk.
    """

    def __init__(self, assembler: Assembler, samples: SampleBatch, failures: Failures, draws: np.ndarray, number: int):
        self._assembler, self._samples, self._failures, self._number = assembler, samples, failures, number
        self._read = samples
        self._kept: Sequence[int] = range(len(samples))
        if failures:
            kept = np.delete(np.arange(len(samples)), list(failures))
            self._read, self._kept, draws = samples.keep(kept), kept.tolist(), draws[kept]
        self._draws = draws
        self.count: int = len(self._read)
        readers = assembler.readers if self.count else []
        self._columns = [assembler.memory.take(i, reader, self.count, number) for i, reader in enumerate(readers)]
        self._failed: list[dict[int, DecodeError]] = [{} for _ in self._columns]

    def read(self, begin: int, end: int) -> None:
        """Read the rows from *begin* to *end* of all columns; of a column that is a list, all with the first rows."""
        columns = zip(self._assembler.readers, self._columns, self._read.columns.values(), self._failed)
        part, is_whole = slice(begin, end), end - begin == self.count
        for reader, column, payloads, failed in columns:
            if isinstance(column, np.ndarray) and not is_whole:
                errors = reader.read(column[part], payloads[part], self._draws[part])
                failed.update((begin + row, error) for row, error in errors.items())
            elif begin == 0:
                failed.update(reader.read(column, payloads, self._draws))

    def whole(self) -> tuple[dict[str, Any], SampleBatch | None, Failures]:
        """Read all rows, and join them."""
        self.read(0, self.count)
        return self.join()

    def join(self) -> tuple[dict[str, Any], SampleBatch | None, Failures]:
        """Return the batch without what failed, its samples (None if there are none to read), and all failures."""
        assembler, read, columns, failures = self._assembler, self._read, self._columns, self._failures
        if not self.count:
            return assembler.nothing(), None, failures
        failed: dict[int, tuple[str, DecodeError]] = {}  # by row: the first column where it did, and why
        for name, errors in zip(assembler.names, self._failed):
            for row, error in errors.items():
                failed.setdefault(row, (name, error))
        if read.pieces is not None:
            self._cut(read.pieces, failed)
        if failed:
            located = {self._kept[i]: _located(error, read, i, name) for i, (name, error) in failed.items()}
            failures = {**failures, **located}
            good = np.delete(np.arange(self.count), list(failed))
            read, columns = read.keep(good), [_keep(column, good) for column in columns]
        batch = {
            name: reader.join_in(column, partial(assembler.memory.empty, i, self._number))
            for i, (name, reader, column) in enumerate(zip(assembler.names, assembler.readers, columns))
        }
        self._samples.check_copied()
        batch["__key__"] = read.keys
        return batch, read, failures

    def _cut(self, pieces: np.ndarray, failed: Container[int]) -> None:
        """Cut the ragged columns to the *pieces* of samples; raise SampleError for one of another length."""
        begins, most, lengths = pieces.T
        samples = self._read
        for reader, column in zip(self._assembler.readers, self._columns):
            if not isinstance(reader, Ragged):
                continue
            counts = reader.counts(column)
            for i in np.flatnonzero(np.maximum(counts, 1) != lengths).tolist():
                if i not in failed:
                    url, key = samples.names[samples.shards[i]], samples.keys[i]
                    raise SampleError(not_as_long(int(counts[i]), int(lengths[i])), url=url, key=key)
            reader.cut(column, begins, most)


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
        self._columns, self._size, self._ring, self._lock = columns, size, ring, threading.Lock()
        self.keep(kept)

    def __reduce__(self) -> Any:
        return Memory, (self._columns, self._size, self._kept, self._ring)

    def keep(self, kept: int, empty: Callable[[tuple[int, ...], np.dtype], np.ndarray] | None = None) -> None:
        """Keep the buffers of *kept* batches from now on, in memory from *empty*; those of another number are freed."""
        self._empty = empty
        if kept == getattr(self, "_kept", None):
            return
        self._kept = kept
        self._arrays: list[list[Any]] = [[None] * kept for _ in range(self._columns)]
        self._bytes: list[list[Any]] = [[None] * kept for _ in range(self._columns)]

    def _make(self, reader: Reader, count: int) -> Any:
        """Return what *reader* makes for a batch, in our memory if that is an array."""
        if self._empty is None or not isinstance(form := reader.make(0), np.ndarray):
            return reader.make(count)
        return self._empty((count, *form.shape[1:]), form.dtype)

    def take(self, column: int, reader: Reader, count: int, number: int) -> Any:
        """Return what *reader* reads *count* samples of a column of the *number*-th batch into."""
        arrays = self._arrays[column]
        if count > self._size:  # of bins, which have several samples each
            return reader.make(count)
        with self._lock:
            for i in [number % len(arrays)] if self._ring else range(len(arrays)):
                if arrays[i] is None and count == self._size:  # those of an epoch's end are not worth keeping
                    arrays[i] = self._make(reader, count)
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
                    if buffers[i] is None or len(buffers[i]) < size:  # the next batch may be a little larger
                        buffers[i] = (self._empty or np.empty)((size + size // 8,), np.dtype(np.uint8))
                    return buffers[i][:size].view(dtype)
        return np.empty(count, dtype)


def _term(name: str) -> Term:
    terms = parse_terms(name)
    if len(terms) != 1 or terms[0].alternatives == ["*"]:
        raise ValueError(f"{name!r} is not one field; write it like jpg, jpg;png or image:jpg;png")
    return terms[0]


def _keep(column: Any, kept: np.ndarray) -> Any:
    return column[kept] if isinstance(column, np.ndarray) else [column[row] for row in kept]
