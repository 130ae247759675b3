"""One ``.npy`` field of all samples as an array: a view into each mapped shard, gathered over several."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from tarshards.errors import DecodeError, SampleError
from tarshards.index import memory
from tarshards.index.memory import Buffers, Payloads
from tarshards.samples.codecs.npy import Header, parse_header
from tarshards.storage.ranges import Ranges

if TYPE_CHECKING:
    from tarshards.index.access import IndexedShards


@dataclass
class _Part:
    """The elements of one shard: *starts* are their offsets; *view* is all of them, if they lie at equal distances."""

    ranges: Ranges
    starts: np.ndarray
    buffers: Buffers | None
    view: np.ndarray | None


class Column:
    """A ``.npy`` field of indexed shards as a read-only array of shape (samples, ...), its bytes where they are.

    All members must be arrays of one dtype and shape; the first says which. Ints and slices give what cannot be
    written to: a view, without a copy, where the samples lie in one local shard at equal distances, as members of
    constant size do. Lists and arrays of ints or bools give a new array, and ``np.asarray`` gathers all. A shard is
    opened, and its members' headers are compared, when it is first asked for. While views of a shard are in use, it
    must not be cut short.

    Raises SampleError or DecodeError, with the place, for a member that is not there or is another kind of array.
    """

    def __init__(self, shards: IndexedShards, field: str, places: range):
        self._shards, self._field, self._places = shards, field, places
        self._ends = np.cumsum(shards.counts)
        self._parts: dict[int, _Part] = {}
        if not places:
            raise SampleError(f"no sample, of which {field} would tell what the array is like", url=shards.names[0])
        self._header = self._first()
        self.dtype, self.shape = self._header.dtype, (len(places), *self._header.shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, tuple):
            raise TypeError("a column is indexed by samples; what that gives is an array")
        if isinstance(index, (int, np.integer)):
            place = self._places[index]
            return self._rows(range(place, place + 1))[0]
        if isinstance(index, slice):
            return self._rows(self._places[index])
        return self._gather(self._all[index])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("a column is not one array in memory; slices within a shard are")
        return self._gather(self._all).astype(self.dtype if dtype is None else dtype, copy=False)

    def __repr__(self) -> str:
        return f"<Column {self._field} of shape {self.shape}, {self.dtype}>"

    @cached_property
    def _all(self) -> np.ndarray:
        return np.array(self._places, np.int64)

    def _rows(self, places: range) -> np.ndarray:
        """Return the elements of a range: a view, if they lie in one shard."""
        if places:
            first, last = (int(np.searchsorted(self._ends, place, "right")) for place in (places[0], places[-1]))
            if first == last and (view := self._part(first).view) is not None:
                begin = int(self._ends[first]) - len(view)
                low, high = sorted((places[0] - begin, places[-1] - begin))
                self._parts[first].ranges.verify()
                rows = view[low : high + 1 : abs(places.step)]
                return rows[::-1] if places.step < 0 else rows
        rows = self._gather(np.array(places, np.int64))
        rows.flags.writeable = False  # as that of a view
        return rows

    def _gather(self, places: np.ndarray) -> np.ndarray:
        if places.ndim != 1:
            raise IndexError("a column is indexed by ints, slices, and lists or arrays of one axis")
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
        """The elements of samples of a shard, without their headers."""
        part, size = self._part(number), self._size
        part.ranges.verify()
        if part.buffers is not None:
            return Payloads(part.buffers, 0 * samples, part.starts[samples], np.full(len(samples), size))
        head = len(self._header.prefix)
        datas = [part.ranges.read(start - head, head + size) for start in part.starts[samples].tolist()]
        for sample, data in zip(samples.tolist(), datas):
            if not data.startswith(self._header.prefix):
                raise self._other(number, sample)
        return Payloads.of([memoryview(data)[head:] for data in datas])

    @property
    def _size(self) -> int:
        return self.dtype.itemsize * int(np.prod(self._header.shape, dtype=np.int64))

    def _part(self, number: int) -> _Part:
        part = self._parts.get(number)
        if part is None:
            part = self._parts[number] = self._open(number)
        return part

    def _members(self, number: int) -> tuple[Any, Ranges, np.ndarray, np.ndarray]:
        """Return the index and the bytes of a shard, and where the field of each of its samples lies."""
        index, ranges = self._shards.open_shard(number)
        name = index.fields.index(self._field) if self._field in index.fields else -1
        members = np.flatnonzero(index.field == name)
        if len(members) < len(index):
            missing = np.setdiff1d(np.arange(len(index)), index.sample[members])[0]
            raise SampleError(f"no field {self._field}", url=self._shards.names[number], key=index.keys[missing])
        return index, ranges, index.offset[members].astype(np.int64), index.size[members].astype(np.int64)

    def _first(self) -> Header:
        place = self._places[0]
        number = int(np.searchsorted(self._ends, place, "right"))
        index, ranges, offsets, sizes = self._members(number)
        sample = place - int(self._ends[number]) + len(index)
        try:
            return parse_header(memoryview(ranges.read(int(offsets[sample]), int(sizes[sample]))))
        except DecodeError as error:
            where = {"url": self._shards.names[number], "key": index.keys[sample], "field": self._field}
            raise DecodeError(error.reason, **where) from error.__cause__

    def _open(self, number: int) -> _Part:
        _, ranges, offsets, sizes = self._members(number)
        head = len(self._header.prefix)
        others = np.flatnonzero(sizes != head + self._size)
        if len(others):
            raise self._other(number, int(others[0]))
        starts = offsets + head
        try:
            mapping = memoryview(ranges.mapping)  # type: ignore[attr-defined]
        except (AttributeError, TypeError):  # remote, or the twin of _mapped.c
            return _Part(ranges, starts, None, None)
        buffers = Buffers([mapping])
        other = memory.find_other(Payloads(buffers, 0 * offsets, offsets, sizes).addresses, self._header.prefix)
        if other >= 0:
            raise self._other(number, other)
        strides = np.unique(np.diff(starts))
        if len(strides) > 1 or not self._size:
            return _Part(ranges, starts, buffers, None)
        one = np.empty(self._header.shape, self.dtype)
        shape, stride = (len(starts), *one.shape), int(strides[0]) if len(strides) else 0
        view = np.ndarray(shape, self.dtype, mapping, int(starts[0]), (stride, *one.strides))
        return _Part(ranges, starts, buffers, view)

    def _other(self, number: int, sample: int) -> DecodeError:
        url, key = self._shards.names[number], self._shards.keys_of(number)[sample]
        return DecodeError(
            f"not of the first one's kind, {self.dtype} of shape {self._header.shape}",
            url=url,
            key=key,
            field=self._field,
        )
