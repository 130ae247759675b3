"""One ``.npy`` field of all samples as an array, copied out of the shards as it is indexed."""

from __future__ import annotations

from typing import Any

import numpy as np

from tarshards import kernels
from tarshards.errors import DecodeError, SampleError
from tarshards.index.mapped_fields import MappedFields
from tarshards.index.open import OpenShard, OpenShards
from tarshards.parallel.forks import cached_property
from tarshards.samples.batch import SampleBatch
from tarshards.samples.codecs.npy import ArrayHeader, parse_header
from tarshards.samples.fields import Term, check_name, find_field, no_field
from tarshards.samples.keys import Sample
from tarshards.storage.ranges import most_open
from tarshards.storage.streams import failure


class Column:
    """A ``.npy`` field of indexed shards as a read-only array of shape (samples, ...); its bytes stay in the shards.

    All members must be arrays of one dtype and shape, those of the first. An int, a slice, a list or an array of ints
    or bools gives a new array with copies of these samples only, and ``np.asarray`` copies everything: copies do not
    change, whatever happens to the files. A shard is opened, and its members' headers are compared, when it is first
    needed.

    Raises SampleError or DecodeError, which name the sample, for a member that is missing or another kind of array, and
    for a sample at fault; OpenError for a shard that cannot be read, or was written to since it was opened.
    """

    def __init__(self, shards: OpenShards, field: str, samples: range | np.ndarray):
        self._shards, self._field, self._samples = shards, check_name(field), samples
        if not len(samples):
            raise SampleError(f"no samples, so dtype and shape of {field} are unknown", url=shards.names[0])
        self._ends = np.cumsum(shards.counts)
        self._opened = set[int]()
        self._fields = MappedFields(shards, [Term(None, [field])], None, self._read_alone)
        sample = np.array([samples[0]], np.int64)
        number = np.searchsorted(self._ends, sample, "right")
        first = self._located(sample, number, number)
        try:
            self._header: ArrayHeader = parse_header(first.copy(field, 0))
        except DecodeError as error:
            raise DecodeError(error.reason, url=first.names[0], key=first.keys[0], field=field) from error.__cause__
        self.dtype: Any = self._header.dtype
        self.shape: tuple[int, ...] = (len(samples), *self._header.shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, tuple):
            raise TypeError("a column is indexed by samples only; index the array that it returns")
        if isinstance(index, (int, np.integer)):
            return self._gather(np.array([self._samples[index]], np.int64))[0]
        if isinstance(index, slice):
            return self._gather(np.array(self._samples[index], np.int64))
        return self._gather(self._all[index])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("a column cannot become an array without a copy")
        return self._gather(self._all).astype(self.dtype if dtype is None else dtype, copy=False)

    def __repr__(self) -> str:
        return f"<Column {self._field} of shape {self.shape}, {self.dtype}>"

    @cached_property
    def _all(self) -> np.ndarray:
        return np.array(self._samples, np.int64)

    def _gather(self, samples: np.ndarray) -> np.ndarray:
        if samples.ndim != 1:
            raise IndexError("a column is indexed by ints, slices, and one-dimensional lists or arrays")
        out = np.empty((len(samples), *self._header.shape), self.dtype)
        numbers = np.searchsorted(self._ends, samples, "right")
        shards, together = np.flatnonzero(np.bincount(numbers)), max(1, most_open() // 4)
        if len(shards) <= together:
            self._fill(out, samples, numbers, shards)
            return out
        for first in range(0, len(shards), together):
            several = shards[first : first + together]
            here = np.flatnonzero(np.isin(numbers, several))
            part = np.empty((len(here), *self._header.shape), self.dtype)
            self._fill(part, samples[here], numbers[here], several)
            out[here] = part
        return out

    def _fill(self, out: np.ndarray, samples: np.ndarray, numbers: np.ndarray, shards: np.ndarray) -> None:
        """Copy the arrays at *samples*, in shards of these *numbers*, into *out*; *shards* are these, each once."""
        located = self._located(samples, numbers, shards)
        payloads, prefix = located.columns[self._field], self._header.prefix
        size = len(prefix) + self.dtype.itemsize * int(np.prod(self._header.shape, dtype=np.int64))
        others = np.flatnonzero(payloads.sizes != size)
        try:
            other = int(others[0]) if len(others) else kernels.rows.gather(out, payloads.addresses, prefix)
        except OSError as error:
            located.check_copied()
            raise failure(error, located.names[0]) from error  # it is as long as it was again
        located.check_copied()
        if other >= 0:
            raise DecodeError(
                f"its .npy header differs from that of the first sample, {self.dtype} of shape {self._header.shape}",
                url=located.names[located.shards[other]],
                key=located.keys[other],
                field=self._field,
            )

    def _located(self, samples: np.ndarray, numbers: np.ndarray, shards: np.ndarray) -> SampleBatch:
        """Find the arrays of *samples*; raise the first error of these."""
        for number in shards.tolist():
            if number not in self._opened:
                self._shards.open(number)  # as it is now
                self._opened.add(number)
        located = self._fields.find(numbers, samples - (self._ends - self._shards.counts)[numbers], samples)
        if failures := located.check():
            raise failures[min(failures)]
        return located

    def _read_alone(self, shard: OpenShard, sample: int) -> Sample:
        """Return a sample of a shard that is not mapped with the field of the column alone."""
        if sample in shard.index.faults:
            raise shard.index.fault(sample, shard.name)
        key, fields = shard.index.key(sample), shard.index.fields_of(sample)
        if (name := find_field(fields, [self._field])) is None:
            raise SampleError(no_field([self._field], fields), url=shard.name, key=key)
        member = shard.index.span(sample)[0] + fields.index(name)
        return {"__key__": key, name: shard.take(member)}
