"""One ``.npy`` field of all samples as an array: a view of each mapped shard, copied together from several."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from tarshards.errors import DecodeError, SampleError
from tarshards.index import memory
from tarshards.index.memory import Buffers, Payloads
from tarshards.index.open import OpenShard, OpenShards
from tarshards.samples.codecs.npy import ArrayHeader, parse_header


@dataclass
class _Arrays:
    """The arrays in a shard, its *members*; *starts* are the offsets of their elements.

    *view* is all arrays, if evenly spaced; *buffers* is None where the shard is not mapped.
    """

    shard: OpenShard
    members: np.ndarray
    starts: np.ndarray
    buffers: Buffers | None
    view: np.ndarray | None


class Column:
    """A ``.npy`` field of indexed shards as a read-only array of shape (samples, ...); its bytes stay in the shards.

    All members must be arrays of one dtype and shape, those of the first. An int or a slice gives an array that cannot
    be written to: a view, without a copy, where the samples lie in one local shard at equal distances, as members of
    constant size do. A list or an array of ints or bools gives a new array, and ``np.asarray`` copies everything. A
    shard is opened, and its members' headers are compared, when it is first needed. While views of a shard are in use,
    its file must not be truncated.

    Raises SampleError or DecodeError, which name the sample, for a member that is missing or another kind of array,
    and for a sample at fault.
    """

    def __init__(self, shards: OpenShards, field: str, places: range):
        self._shards, self._field, self._places = shards, field, places
        self._ends = np.cumsum(shards.counts)
        self._arrays: dict[int, _Arrays] = {}
        if not places:
            raise SampleError(f"no samples, so dtype and shape of {field} are unknown", url=shards.names[0])
        self._header = self._first()
        self.dtype, self.shape = self._header.dtype, (len(places), *self._header.shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, tuple):
            raise TypeError("a column is indexed by samples only; index the array that it returns")
        if isinstance(index, (int, np.integer)):
            place = self._places[index]
            return self._rows(range(place, place + 1))[0]
        if isinstance(index, slice):
            return self._rows(self._places[index])
        return self._gather(self._all[index])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("a column cannot become an array without a copy; slices within one shard can")
        return self._gather(self._all).astype(self.dtype if dtype is None else dtype, copy=False)

    def __repr__(self) -> str:
        return f"<Column {self._field} of shape {self.shape}, {self.dtype}>"

    @cached_property
    def _all(self) -> np.ndarray:
        return np.array(self._places, np.int64)

    def _rows(self, places: range) -> np.ndarray:
        """Return the arrays at a range of places: a view, if they lie in one shard."""
        if places:
            first, last = (int(np.searchsorted(self._ends, place, "right")) for place in (places[0], places[-1]))
            if first == last and (view := self._arrays_of(first).view) is not None:
                begin = int(self._ends[first]) - len(view)
                low, high = sorted((places[0] - begin, places[-1] - begin))
                self._arrays[first].shard.ranges.verify()
                rows = view[low : high + 1 : abs(places.step)]
                return rows[::-1] if places.step < 0 else rows
        rows = self._gather(np.array(places, np.int64))
        rows.flags.writeable = False  # like a view
        return rows

    def _gather(self, places: np.ndarray) -> np.ndarray:
        if places.ndim != 1:
            raise IndexError("a column is indexed by ints, slices, and one-dimensional lists or arrays")
        out = np.empty((len(places), *self._header.shape), self.dtype)
        addresses = np.empty(len(places), np.uint64)
        numbers = np.searchsorted(self._ends, places, "right")
        held = []
        for number in np.unique(numbers).tolist():
            here = np.flatnonzero(numbers == number)
            payloads = self._payloads(number, places[here] - (self._ends[number] - self._shards.counts[number]))
            addresses[here] = payloads.addresses
            held.append(payloads)
        memory.gather(out, addresses, b"")
        return out

    def _payloads(self, number: int, samples: np.ndarray) -> Payloads:
        """Return the elements of the arrays of some samples of a shard."""
        arrays, size = self._arrays_of(number), self._size
        arrays.shard.ranges.verify()
        if arrays.buffers is not None:
            return Payloads(arrays.buffers, 0 * samples, arrays.starts[samples], np.full(len(samples), size))
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
        return arrays

    def _members(self, number: int) -> tuple[OpenShard, np.ndarray]:
        """Return a shard, and the member of each of its samples that is of the field."""
        shard = self._shards.open(number)
        index = shard.index
        members = index.members_of(self._field)
        if len(members) < len(index):
            missing = int(np.setdiff1d(np.arange(len(index)), index.sample[members])[0])
            if missing in index.faults:
                raise index.fault(missing, shard.name)
            raise SampleError(f"no field {self._field}", url=shard.name, key=index.keys[missing])
        return shard, members

    def _first(self) -> ArrayHeader:
        place = self._places[0]
        number = int(np.searchsorted(self._ends, place, "right"))
        shard, members = self._members(number)
        sample = place - int(self._ends[number] - self._shards.counts[number])
        try:
            return parse_header(memoryview(shard.take(int(members[sample]))))
        except DecodeError as error:
            key = shard.keys[sample]
            raise DecodeError(error.reason, url=shard.name, key=key, field=self._field) from error.__cause__

    def _find_arrays(self, number: int) -> _Arrays:
        shard, members = self._members(number)
        offsets, sizes = (array[members].astype(np.int64) for array in (shard.index.offset, shard.index.size))
        head = len(self._header.prefix)
        others = np.flatnonzero(sizes != head + self._size)
        if len(others):
            raise self._other(number, int(others[0]))
        starts = offsets + head
        if shard.buffer is None:
            return _Arrays(shard, members, starts, None, None)
        for error in shard.find_stale(members).values():
            raise error
        buffers = Buffers([shard.buffer])
        other = memory.find_other(Payloads(buffers, 0 * offsets, offsets, sizes).addresses, self._header.prefix)
        if other >= 0:
            raise self._other(number, other)
        strides = np.unique(np.diff(starts))
        if len(strides) > 1 or not self._size:
            return _Arrays(shard, members, starts, buffers, None)
        one = np.empty(self._header.shape, self.dtype)
        shape, stride = (len(starts), *one.shape), int(strides[0]) if len(strides) else 0
        view = np.ndarray(shape, self.dtype, shard.buffer, int(starts[0]), (stride, *one.strides))
        return _Arrays(shard, members, starts, buffers, view)

    def _other(self, number: int, sample: int) -> DecodeError:
        return DecodeError(
            f"differs from the first sample's, {self.dtype} of shape {self._header.shape}",
            url=self._shards.names[number],
            key=self._shards.index(number).keys[sample],
            field=self._field,
        )
