"""The index of a shard, made while it is written."""

from __future__ import annotations

import struct
from array import array
from collections import defaultdict
from collections.abc import Iterable
from itertools import accumulate, chain, count, islice, repeat
from zlib import crc32

from tarshards.errors import ShardIndexError
from tarshards.index.sidecar import FORMATS, Index
from tarshards.storage.location import Location
from tarshards.tar.read import BLOCK

MAX_FIELDS = 1 << 16


class Members:
    """The members of a shard that is being written, and their index."""

    def __init__(self) -> None:
        self.keys: list[str] = []
        self.fields: defaultdict[str, int] = defaultdict(count().__next__)
        self.begin = 0  # offset of the first member; the others follow without gaps
        self.members = array("I")  # the number of members of each sample
        self.field = array("I")  # the field of each member
        self.lengths = array("Q")  # of the header, data and padding of each member
        self.first = self.last = b""  # the headers of the first and the last member

    def add_written(self, key: str, members: list[tuple[str, bytes]], packed: list[bytes], offset: int) -> None:
        """Add the *members* of a sample, *packed* as header, data and padding each, which were written at *offset*."""
        if not self.keys:
            self.begin, self.first = offset, packed[0]
        self.last = packed[-3]
        self.keys.append(key)
        self.members.append(len(members))
        before = len(key) + 1
        for name, _ in members:
            self.field.append(self.fields[name[before:]])
        self.lengths.extend(map(len, packed))

    def index(self, shard_size: int, url: str) -> Index:
        """Return the index of the shard *url*."""
        check_fields(list(self.fields), Location.of(url).name)
        columns: dict[str, Iterable[int]] = {
            "sample": chain.from_iterable(map(repeat, count(), self.members)),
            "field": self.field,
            "offset": islice(accumulate(self.lengths, initial=self.begin), 1, None, 3),
            "size": self.lengths[1::3],
        }
        total = len(self.field)
        arrays = {name: struct.pack(f"<{total}{FORMATS[name][1]}", *numbers) for name, numbers in columns.items()}
        headers = self.first[-BLOCK:] + self.last[-BLOCK:]  # the members' own, without pax headers
        return Index(shard_size, crc32(headers), self.keys, list(self.fields), arrays)


def check_fields(fields: list[str], url: str) -> None:
    """Raise ShardIndexError where there are more fields than an index can hold."""
    if len(fields) > MAX_FIELDS:
        raise ShardIndexError(f"{len(fields)} different fields, but an index holds at most {MAX_FIELDS}", url=url)
