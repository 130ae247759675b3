"""The index of a shard, made while it is written."""

from __future__ import annotations

import struct
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import chain, count, repeat
from zlib import crc32

from tarshards.errors import ShardIndexError
from tarshards.index.sidecar import FORMATS, Index
from tarshards.storage.location import Location
from tarshards.tar.read import BLOCK, padding

MAX_FIELDS = 1 << 16


class Members:
    """The members of a shard that is being written, and their index."""

    def __init__(self) -> None:
        self.keys: list[str] = []
        self.fields: defaultdict[str, int] = defaultdict(count().__next__)
        self.begin = 0  # offset of the first member; the others follow without gaps
        self.numbers: dict[tuple[str, ...], tuple[int, ...]] = {}  # of the fields that samples have together
        self.members: list[tuple[int, ...]] = []  # the fields of the members of each sample, by number
        self.sizes = array("Q")  # of the data of each member
        self.longer: dict[int, int] = {}  # member -> bytes of its header, where that is more than one block
        self.first = b""  # the header of the first member, without its pax header
        self.last: tuple[list[bytes], int] = [b""], 0  # the last sample, and the size of its last member

    def add_written(
        self, key: str, fields: tuple[str, ...], values: list[bytes], packed: list[bytes], offset: int
    ) -> None:
        """Add the members of a sample, *packed* as ``pack_members`` does, which were written at *offset*."""
        if not self.keys:
            self.begin = offset
            self.first = packed[0][:BLOCK] if len(packed) == 1 else packed[0][-BLOCK:]
        self.keys.append(key)
        if fields not in self.numbers:
            self.numbers[fields] = tuple(self.fields[field] for field in fields)
        self.members.append(self.numbers[fields])
        if len(packed) > 1:
            lengths = enumerate(map(len, packed[::3]), len(self.sizes))
            self.longer.update((number, length) for number, length in lengths if length > BLOCK)
        self.sizes.extend(map(len, values))
        self.last = packed, len(values[-1])

    def _offsets(self) -> Iterator[int]:
        """Yield the offset of the data of each member."""
        end, longer = self.begin, self.longer
        for number, size in enumerate(self.sizes):
            begin = end + longer.get(number, BLOCK)
            yield begin
            end = begin + size + (-size % BLOCK)

    def _last_header(self) -> bytes:
        packed, size = self.last
        if len(packed) > 1:
            return packed[-3][-BLOCK:]
        end = len(packed[0]) - size - padding(size)
        return packed[0][end - BLOCK : end]

    def index(self, shard_size: int, url: str) -> Index:
        """Return the index of the shard *url*."""
        check_fields(list(self.fields), Location.of(url).name)
        columns: dict[str, Iterable[int]] = {
            "sample": chain.from_iterable(map(repeat, count(), map(len, self.members))),
            "field": chain.from_iterable(self.members),
            "offset": self._offsets(),
            "size": self.sizes,
        }
        total = len(self.sizes)
        arrays = {name: struct.pack(f"<{total}{FORMATS[name][1]}", *numbers) for name, numbers in columns.items()}
        return Index(shard_size, crc32(self.first + self._last_header()), self.keys, list(self.fields), arrays)


def check_fields(fields: list[str], url: str) -> None:
    """Raise ShardIndexError where there are more fields than an index can hold."""
    if len(fields) > MAX_FIELDS:
        raise ShardIndexError(f"{len(fields)} different fields, but an index holds at most {MAX_FIELDS}", url=url)
