"""One ``.npy`` field of all samples as an array, copied out of the shards as it is indexed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tarshards import kernels
from tarshards.errors import DecodeError, SampleError
from tarshards.index.memory import Payloads, address_of
from tarshards.index.open import OpenShard, OpenShards
from tarshards.parallel.forks import cached_property
from tarshards.samples.codecs.npy import ArrayHeader, parse_header
from tarshards.samples.fields import check_name, no_field
from tarshards.storage.ranges import Ranges, most_open
from tarshards.storage.streams import failure

TOGETHER = 1 << 10  # shards to keep open, and to copy arrays from, at once


@dataclass
class _Arrays:
    """The arrays in a shard, its *members*; *starts* are the offsets of their elements."""

    shard: OpenShard
    members: np.ndarray
    starts: np.ndarray


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
        self._ends = np.cumsum(shards.counts)
        self._arrays: dict[int, _Arrays] = {}
        if not len(samples):
            raise SampleError(f"no samples, so dtype and shape of {field} are unknown", url=shards.names[0])
        self._header = self._first()
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
        order = np.argsort(numbers, kind="stable")
        shards, begins = np.unique(numbers[order], return_index=True)
        together = _together()
        if len(shards) <= together:
            self._fill(out, samples, numbers, shards.tolist())
            return out
        for first in range(0, len(shards), together):
            end = begins[first + together] if first + together < len(shards) else len(order)
            here = order[begins[first] : end]
            part = np.empty((len(here), *self._header.shape), self.dtype)
            self._fill(part, samples[here], numbers[here], shards[first : first + together].tolist())
            out[here] = part
        return out

    def _fill(self, out: np.ndarray, samples: np.ndarray, numbers: np.ndarray, shards: list[int]) -> None:
        """Copy the arrays at *samples*, in shards of these *numbers*, into *out*; *shards* are these, each once."""
        addresses = np.empty(len(samples), np.uint64)
        held: list[Payloads] = []  # they own what is copied
        ends: list[tuple[Ranges, int]] = []
        for number in shards:
            here = np.flatnonzero(numbers == number)
            payloads = self._payloads(number, samples[here] - (self._ends[number] - self._shards.counts[number]))
            addresses[here] = payloads.addresses
            held.append(payloads)
            if (shard := self._arrays[number].shard).buffer is not None:
                end = int(payloads.addresses.max()) - address_of(shard.buffer) + self._size
                ends.append((shard.ranges, end))
        try:
            kernels.rows.gather(out, addresses, b"")
        except OSError as error:
            _check(ends)
            raise failure(error, self._shards.names[int(numbers[0])]) from error  # it is as long as it was again
        _check(ends)

    def _payloads(self, number: int, samples: np.ndarray) -> Payloads:
        """Return the elements of the arrays of some samples of a shard."""
        arrays, size = self._arrays_of(number), self._size
        arrays.shard.ranges.verify()
        if arrays.shard.buffer is not None:
            return Payloads.within(arrays.shard.buffer, arrays.starts[samples], np.full(len(samples), size))
        head = len(self._header.prefix)
        datas = [arrays.shard.take(member) for member in arrays.members[samples].tolist()]
        for sample, data in zip(samples.tolist(), datas):
            if not data.startswith(self._header.prefix):
                raise self._other(number, sample)
        return Payloads.of([memoryview(data)[head:] for data in datas])

    @property
    def _size(self) -> int:
        return self.dtype.itemsize * int(np.prod(self._header.shape, dtype=np.int64))

    def _arrays_of(self, number: int) -> _Arrays:
        arrays = self._arrays.get(number)
        if arrays is None:
            arrays = self._arrays[number] = self._find_arrays(number)
            for oldest in list(self._arrays)[: max(0, len(self._arrays) - _together())]:
                self._arrays.pop(oldest, None)
        return arrays

    def _first(self) -> ArrayHeader:
        first = int(self._samples[0])
        number = int(np.searchsorted(self._ends, first, "right"))
        shard, members = members_of(self._shards, number, [self._field])
        sample = first - int(self._ends[number] - self._shards.counts[number])
        try:
            return parse_header(shard.take(int(members[sample])))
        except DecodeError as error:
            key = shard.index.key(sample)
            raise DecodeError(error.reason, url=shard.name, key=key, field=self._field) from error.__cause__

    def _find_arrays(self, number: int) -> _Arrays:
        shard, members = members_of(self._shards, number, [self._field])
        offsets, sizes = (array[members].astype(np.int64) for array in (shard.index.offset, shard.index.size))
        head = len(self._header.prefix)
        others = np.flatnonzero(sizes != head + self._size)
        if len(others):
            raise self._other(number, int(others[0]))
        arrays = _Arrays(shard, members, offsets + head)
        if shard.buffer is None:
            return arrays
        for error in shard.find_stale(members).values():
            raise error
        try:
            payloads = Payloads.within(shard.buffer, offsets, sizes)
            other = kernels.rows.find_other(payloads.addresses, self._header.prefix)
        except OSError as error:
            raise failure(error, shard.name) from error
        shard.ranges.check(int(offsets.max(initial=0)) + head)
        if other >= 0:
            raise self._other(number, other)
        return arrays

    def _other(self, number: int, sample: int) -> DecodeError:
        return DecodeError(
            f"its .npy header differs from that of the first sample, {self.dtype} of shape {self._header.shape}",
            url=self._shards.names[number],
            key=self._shards.index(number).key(sample),
            field=self._field,
        )


def members_of(shards: OpenShards, number: int, fields: list[str], hint: str = "") -> tuple[OpenShard, np.ndarray]:
    """Return a shard, and the member of each of its samples that is of the first of *fields* that the sample has.

    Raises SampleError, which ends in *hint*, for a sample that has none of them.
    """
    shard = shards.open(number)
    index = shard.index
    members = index.members_of(fields[0])
    for field in fields[1:]:
        others = index.members_of(field)
        members = np.concatenate([members, others[~np.isin(index.sample[others], index.sample[members])]])
    members = members[np.argsort(index.sample[members], kind="stable")]
    if elsewhere := index.elsewhere and index.elsewhere.keys() & set(members.tolist()):
        raise index.not_plain(min(elsewhere), shard.name)
    if len(members) < len(index):
        missing = int(np.setdiff1d(np.arange(len(index)), index.sample[members])[0])
        if missing in index.faults:
            raise index.fault(missing, shard.name)
        reason = no_field(fields, index.fields_of(missing)) + hint
        raise SampleError(reason, url=shard.name, key=index.key(missing))
    return shard, members


def _check(ends: list[tuple[Ranges, int]]) -> None:
    """Raise OpenError, which names the shard, if one no longer has its bytes up to the end of what was copied."""
    for ranges, end in ends:
        ranges.check(end)


def _together() -> int:
    return max(1, min(TOGETHER, most_open() // 4))
