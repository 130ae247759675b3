"""The index of a shard, made while it is written."""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import accumulate, chain, count, repeat
from zlib import crc32

from tarshards.errors import SampleError, ShardIndexError
from tarshards.index.sidecar import FORMATS, Index
from tarshards.kernels._tar_py import READS
from tarshards.samples.keys import DOTS, have_dots_in_key, key_rule
from tarshards.storage.location import Location
from tarshards.tar.read import BLOCK, END, MEMBER_LIMIT, padding, walk

MAX_FIELDS = 1 << 16
ARRAYS = ("sample", "field", "offset", "size")


class Members:
    """The members of a shard that is being written, and their index."""

    def __init__(self) -> None:
        self.keys: list[str] = []
        self.fields: defaultdict[str, int] = defaultdict(count().__next__)
        self.arrays: dict[str, bytearray] = {name: bytearray() for name in ARRAYS}
        # The members that the arrays do not have yet, and the offset of the first; the others follow without gaps.
        self.begin: int = 0
        self.numbers: dict[tuple[str, ...], tuple[int, ...]] = {}  # field numbers by the fields of a sample
        self.members: list[tuple[int, ...]] = []  # the fields of the members of each sample, by number
        self.sizes: array[int] = array("Q")  # the size of each member's data
        self.longer: dict[int, int] = {}  # member -> bytes of its header, if more than one block
        self.first: bytes = b""  # the header of the first member, without its pax header
        self.last: tuple[bytes, int] = b"", 0  # the bytes that contain the last member's header, and where it ends

    def check_room(self, key: str, fields: tuple[str, ...], url: str) -> None:
        """Raise SampleError for a sample that is not written yet, and would give the shard *url* too many fields."""
        new = [field for field in fields if field not in self.fields]
        if len(self.fields) + len(new) > MAX_FIELDS:
            reason = f"{_too_many([*self.fields, *new])}; pass index=False to write without"
            raise SampleError(reason, url=Location.of(url).name, key=key, field=new[0])

    def add_written(
        self, key: str, fields: tuple[str, ...], values: list[bytes], packed: list[bytes], offset: int
    ) -> None:
        """Add the members of a sample, *packed* as ``pack_members`` does, which were written at *offset*."""
        if not self.members:
            self.begin = offset
        if not self.keys:
            self.first = packed[0][:BLOCK] if len(packed) == 1 else packed[0][-BLOCK:]
        self.keys.append(key)
        if fields not in self.numbers:
            self.numbers[fields] = tuple(self.fields[field] for field in fields)
        self.members.append(self.numbers[fields])
        if len(packed) > 1:
            lengths = enumerate(map(len, packed[::3]), len(self.sizes))
            self.longer.update((number, length) for number, length in lengths if length > BLOCK)
        self.sizes.extend(map(len, values))
        if len(packed) > 1:
            self.last = packed[-3], len(packed[-3])
        else:
            self.last = packed[0], len(packed[0]) - len(values[-1]) - padding(len(values[-1]))

    def add_rows(self, keys: list[str], arrays: tuple[bytes, ...], packed: bytes, offset: int) -> None:
        """Add samples with known fields, with the *arrays* of their members, *packed* in one at *offset*."""
        if self.members:
            self._settle()
        self.keys += keys
        for array_, more in zip(self.arrays.values(), arrays):
            array_ += more
        self.last = packed, int.from_bytes(arrays[2][-8:], "little") - offset

    def add_packed(self, parts: list[bytes], offset: int) -> None:
        """Add samples, one or more whole ones in each of *parts*, which were written at *offset*."""
        import numpy as np

        pieces = [*parts, END]
        ends = list(accumulate(map(len, pieces)))

        def read(begin: int, size: int) -> bytes:
            data, number = b"", bisect_right(ends, begin)
            while len(data) < size and number < len(pieces):
                at = begin + len(data) - ends[number] + len(pieces[number])
                data += pieces[number][at : at + size - len(data)]
                number += 1
            return data

        found = walk(read, ends[-1], READS, MEMBER_LIMIT, key_rule("first"))
        if found is None:
            raise ValueError("not whole samples")
        keys, fields, (sample, field, offsets, size, *_), *_ = found
        if self.members:
            self._settle()
        samples = np.frombuffer(sample, "<u4") + np.uint32(len(self.keys))
        numbers = np.array([self.fields[name] for name in fields], "<u2")[np.frombuffer(field, "<u2")]
        begins = np.frombuffer(offsets, "<u8")
        if not self.keys:
            self.first = read(int(begins[0]) - BLOCK, BLOCK)
        self.last = read(int(begins[-1]) - BLOCK, BLOCK), BLOCK
        self.keys += keys
        arrays = (samples, numbers, begins + np.uint64(offset), np.frombuffer(size, "<u8"))
        for array_, more in zip(self.arrays.values(), arrays):
            array_ += more.tobytes()

    def _settle(self) -> None:
        """Put the members that were added one by one into the arrays."""
        columns: tuple[Iterable[int], ...] = (
            chain.from_iterable(map(repeat, count(len(self.keys) - len(self.members)), map(len, self.members))),
            chain.from_iterable(self.members),
            self._offsets(),
            self.sizes,
        )
        total = len(self.sizes)
        for (name, array_), numbers in zip(self.arrays.items(), columns):
            array_ += struct.pack(f"<{total}{FORMATS[name][1]}", *numbers)
        self.members = []
        self.sizes = array("Q")
        self.longer = {}

    def _offsets(self) -> Iterator[int]:
        """Yield the offset of the data of each member that the arrays do not have yet."""
        end, longer = self.begin, self.longer
        for number, size in enumerate(self.sizes):
            begin = end + longer.get(number, BLOCK)
            yield begin
            end = begin + size + (-size % BLOCK)

    def index(self, members_end: int, shard_size: int, url: str) -> Index:
        """Return the index of the shard *url*, whose members end at *members_end*."""
        check_fields(list(self.fields), Location.of(url).name)
        self._settle()
        packed, end = self.last
        arrays = {name: bytes(array_) for name, array_ in self.arrays.items()}
        value = crc32(self.first + packed[max(end - BLOCK, 0) : end])
        return Index(shard_size, value, self.keys, list(self.fields), arrays, end=members_end)


def check_fields(fields: list[str], url: str) -> None:
    """Raise ShardIndexError if there are more fields than an index can hold."""
    if len(fields) > MAX_FIELDS:
        raise ShardIndexError(_too_many(fields), url=url)


def _too_many(fields: list[str]) -> str:
    dots = f"; as in {fields[-1]}, {DOTS}" if have_dots_in_key(fields) else ""
    return f"{len(fields)} different fields, but an index holds at most {MAX_FIELDS}{dots}"
