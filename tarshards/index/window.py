"""Members of a remote shard in memory, each taken after its headers were compared with the index."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tarshards.errors import ShardIndexError
from tarshards.index.headers import MappedMembers, check_header
from tarshards.index.sidecar import Index
from tarshards.tar.read import BLOCK


class Window:
    """The members from *begin* to *end* of the shard *name*, whose bytes from offset *low* on are *data*.

    *decide* is called for a member whose headers may begin before the window; it raises where they differ.
    """

    def __init__(
        self, name: str, index: Index, begin: int, end: int, low: int, data: bytes, decide: Callable[[int], object]
    ):
        self.begin, self.end, self.low, self.data = begin, end, low, data
        self._name, self._index, self._decide = name, index, decide
        has_before = begin > 0 and int(index.offset[begin - 1]) - BLOCK >= low
        self._base = begin - has_before  # the first member of the table
        self._is_begun = has_before or begin == 0  # whether the headers of the first member are known to begin here
        sample = index.sample[self._base : end].astype(np.int64)
        self._sample = int(sample[0])
        count = int(sample[-1]) - self._sample + 1
        self._members = MappedMembers(
            _Bytes(data) if MappedMembers.__module__.endswith("_py") else data,
            index.keys[self._sample : self._sample + count],
            index.fields,
            np.searchsorted(sample, np.arange(self._sample, self._sample + count + 1)).astype("<i8"),
            (sample - self._sample).astype("<u4"),
            np.ascontiguousarray(index.field[self._base : end]),
            (index.offset[self._base : end] - np.uint64(low)).astype("<u8"),
            np.ascontiguousarray(index.size[self._base : end]),
        )

    def fill(self, result: dict[str, Any], names: list[str | None], sample: int) -> None:
        """Put the bytes of the members of *sample* that are here into *result*, under their *names* unless None.

        Raises ShardIndexError for a member whose headers differ from the index.
        """
        settled = 0
        if not self._is_begun and self._index.sample[self.begin] == sample:
            if names[self._index.field[self.begin]] is not None:
                self.check(self.begin)
                self._is_begun = True
            settled = 1
        undecided = self._members.fill(result, names, sample - self._sample, settled)
        while undecided >= 0:
            self.check(undecided + self._base)
            undecided = self._members.fill(result, names, sample - self._sample, undecided + 1)

    def check(self, member: int) -> None:
        """Raise ShardIndexError unless the headers of *member* say what the index says."""
        try:
            check_header(self._cut, self._index, member, url=self._name, low=self.low)
        except ShardIndexError:  # extended headers may begin before the window
            self._decide(member)

    def take(self, member: int) -> bytes:
        """Return the data of *member*; raise ShardIndexError where its headers differ from the index."""
        self.check(member)
        return self._cut(int(self._index.offset[member]), int(self._index.size[member]))

    def _cut(self, offset: int, size: int) -> bytes:
        """Return the *size* bytes at *offset* of the shard."""
        return bytes(self.data[offset - self.low : offset - self.low + size])


class _Bytes:
    """Bytes as the twin in Python reads a mapped file."""

    def __init__(self, data: bytes):
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def read(self, offset: int, size: int) -> bytes:
        return bytes(self._data[offset : offset + size])
