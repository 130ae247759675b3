"""The members of samples as they are written -> the index they make."""

from __future__ import annotations

import struct
from zlib import crc32

from tarshards.errors import ShardIndexError
from tarshards.index.sidecar import FORMATS, Index
from tarshards.tar import BLOCK, padding

MAX_FIELDS = 1 << 16


class Members:
    """The members of a shard as they are written, and the index they make."""

    def __init__(self) -> None:
        self.keys: list[str] = []
        self.fields: dict[str, int] = {}
        self.sample: list[int] = []
        self.field: list[int] = []
        self.offset: list[int] = []
        self.size: list[int] = []
        self.blocks: list[bytes] = []  # the headers proper of the first and the last member

    def add_written(self, key: str, members: list[tuple[str, bytes]], packed: list[bytes], offset: int) -> None:
        """Append the *members* of a sample, each *packed* as header, data and padding, as written at *offset*."""
        for (name, data), header in zip(members, packed[::3]):
            offset += len(header)
            self._add(key, name[len(key) + 1 :], offset, len(data))
            offset += len(data) + padding(len(data))
            block = header[-BLOCK:]
            self.blocks = [self.blocks[0] if self.blocks else block, block]

    def _add(self, key: str, field: str, offset: int, size: int) -> None:
        """Append a member whose data lies at *offset*; one of another *key* than the last begins a sample."""
        if not self.keys or key != self.keys[-1]:
            self.keys.append(key)
        self.sample.append(len(self.keys) - 1)
        self.field.append(self.fields.setdefault(field, len(self.fields)))
        self.offset.append(offset)
        self.size.append(size)

    def index(self, shard_size: int, url: str) -> Index:
        """Return the index of the shard *url*."""
        check_fields(list(self.fields), url)
        arrays = {
            name: struct.pack(f"<{len(numbers)}{FORMATS[name][1]}", *numbers)
            for name, numbers in [
                ("sample", self.sample),
                ("field", self.field),
                ("offset", self.offset),
                ("size", self.size),
            ]
        }
        return Index(shard_size, crc32(b"".join(self.blocks)), self.keys, list(self.fields), arrays)


def check_fields(fields: list[str], url: str) -> None:
    """Raise ShardIndexError for more fields than an index holds."""
    if len(fields) > MAX_FIELDS:
        raise ShardIndexError(f"{len(fields)} different fields; an index holds {MAX_FIELDS}", url=url)
