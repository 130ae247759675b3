"""Members as they are read or written -> the index they make."""

from __future__ import annotations

from collections.abc import Iterable
from zlib import crc32

import numpy as np

from tarshards._tar_py import ScannedMember
from tarshards.errors import ShardIndexError
from tarshards.index.sidecar import Index
from tarshards.keys import split_name
from tarshards.tar import BLOCK, padding

MAX_FIELDS = 1 << 16


class Members:
    """The members of a shard as they come, and the index they make."""

    def __init__(self) -> None:
        self.keys: list[str] = []
        self.fields: dict[str, int] = {}
        self.known: dict[str, int] = {}  # those that a plain name may end with
        self.first: list[int] = []
        self.field: list[int] = []
        self.offset: list[int] = []
        self.size: list[int] = []
        self.blocks: list[bytes] = []  # the headers proper of the first and the last member

    def add(self, key: str, field: str, offset: int, size: int) -> None:
        """Append a member whose data lies at *offset*; one of another *key* than the last begins a sample."""
        if not self.keys or key != self.keys[-1]:
            self.keys.append(key)
            self.first.append(len(self.field))
        if field not in self.fields:
            self.fields[field] = len(self.fields)
            if field and not field.endswith("__"):
                self.known[field] = self.fields[field]
        self.field.append(self.fields[field])
        self.offset.append(offset)
        self.size.append(size)

    def extend(self, pieces: Iterable[tuple[int, list[ScannedMember]]]) -> None:
        """Append what ``scan`` found in *pieces* of the shard, each after the offset of the piece.

        Most names are a plain word, a dot and a field as it was seen before: those are split here, all others by the
        rule, which takes four times as long.
        """
        known, field, offset, size = self.known, self.field, self.offset, self.size
        last = self.keys[-1] if self.keys else ""
        for base, found in pieces:
            for name, _header, start, end, kind in found:
                key, _dot, rest = name.partition(".")
                number = known.get(rest)
                if number is None or kind or (key != last and ("__" in key or not key or key[-1] == "/")):
                    if not kind and (parts := split_name(name)):
                        self.add(*parts, base + start, end - start)
                        last = parts[0]
                    continue
                if key != last:
                    self.keys.append(key)
                    self.first.append(len(field))
                    last = key
                field.append(number)
                offset.append(base + start)
                size.append(end - start)

    def add_written(self, key: str, members: list[tuple[str, bytes]], packed: list[bytes], offset: int) -> None:
        """Append the *members* of a sample, each *packed* as header, data and padding, as written at *offset*."""
        for (name, data), header in zip(members, packed[::3]):
            offset += len(header)
            self.add(key, name[len(key) + 1 :], offset, len(data))
            offset += len(data) + padding(len(data))
            block = header[-BLOCK:]
            self.blocks = [self.blocks[0] if self.blocks else block, block]

    def index(self, shard_size: int, url: str) -> Index:
        """Return the index of the shard *url*; its fingerprint is right where the members were added as written."""
        if len(self.fields) > MAX_FIELDS:
            raise ShardIndexError(f"{len(self.fields)} different fields; an index holds {MAX_FIELDS}", url=url)
        first = np.array([*self.first, len(self.field)], np.int64)
        return Index(
            shard_size,
            crc32(b"".join(self.blocks)),
            self.keys,
            list(self.fields),
            sample=np.repeat(np.arange(len(self.keys), dtype=np.uint32), first[1:] - first[:-1]),
            field=np.array(self.field, np.uint16),
            offset=np.array(self.offset, np.uint64),
            size=np.array(self.size, np.uint64),
        )
