"""The members of samples as they are written -> the index they make."""

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
    """The members of a shard as they are written, and the index they make."""

    def __init__(self) -> None:
        self.keys: list[str] = []
        self.fields: defaultdict[str, int] = defaultdict(count().__next__)
        self.begin = 0  # where the first member was written; the others follow without a gap
        self.members = array("I")  # of each sample
        self.field = array("I")  # of each member
        self.lengths = array("Q")  # of each member's header, data and padding
        self.first = self.last = b""  # the headers of the first and the last member

    def add_written(self, key: str, members: list[tuple[str, bytes]], packed: list[bytes], offset: int) -> None:
        """Append the *members* of a sample, each *packed* as header, data and padding, as written at *offset*."""
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
        headers = self.first[-BLOCK:] + self.last[-BLOCK:]  # proper, without those for pax
        return Index(shard_size, crc32(headers), self.keys, list(self.fields), arrays)


def check_fields(fields: list[str], url: str) -> None:
    """Raise ShardIndexError for more fields than an index holds."""
    if len(fields) > MAX_FIELDS:
        raise ShardIndexError(f"{len(fields)} different fields; an index holds {MAX_FIELDS}", url=url)
