"""Members of a remote shard in memory, each taken after its headers were compared with the index."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tarshards.errors import ShardIndexError
from tarshards.index.member_table import IS_COMPILED, MappedMembers
from tarshards.index.sidecar import Index

if TYPE_CHECKING:
    from tarshards.storage.cache import MappedBlock

Check = Callable[[Callable[[int, int], bytes], int, int], object]


class Window:
    """The members from *begin* to *end* of a shard, whose bytes from offset *low* on are *data*.

    These are in memory, or mapped. *check* is called for a member on whose headers the kernel does not decide, and with
    what reads the bytes from *low* on; it raises where they differ from the index.
    """

    def __init__(self, index: Index, begin: int, end: int, low: int, data: Any, check: Check):
        self.begin, self.end, self.low = begin, end, low
        self._mapped: MappedBlock | None = None if isinstance(data, (bytes, bytearray, memoryview)) else data
        self._buffer: Any = data if self._mapped is None else self._mapped.mapping
        self._is_current: Callable[[], bool] | None = None if self._mapped is None else self._mapped.mapping.is_current
        self._zero = low if self._mapped is None else low - self._mapped.start  # where its first byte is in the shard
        self._index, self._check = index, check
        start = 0 if self._mapped is None else self._mapped.start  # headers are to begin at multiples of 512 from there
        held = memoryview(self._buffer)[start:] if IS_COMPILED else _Bytes(self.cut, low, len(self._buffer) - start)
        self._members = MappedMembers(held, index.table, low, begin, end)

    @property
    def is_mapped(self) -> bool:
        """Whether its data take no memory."""
        return self._mapped is not None

    def hold_open(self) -> None:
        """Hold the file of what is mapped open if it can be, so that ``is_current`` is quicker."""
        if self._mapped is not None:
            self._mapped.mapping.hold_open()

    def is_current(self) -> bool:
        """Return whether its data are as they were: what is mapped may have been removed, or written to."""
        return self._is_current is None or self._is_current()

    @property
    def stays(self) -> bool:
        """Whether its data lie on the disk for later epochs, too, and may stay mapped for them."""
        return IS_COMPILED and self._mapped is not None and self._mapped.stays

    def fill(self, result: dict[str, Any], names: list[str | None], sample: int) -> bool:
        """Put the bytes of the members of *sample* that are here into *result*, under their *names* unless None.

        Returns whether they are right: False where what is mapped was removed, or written to, meanwhile. Raises
        ShardIndexError for a member whose headers differ from the index.
        """
        try:
            undecided = self._members.fill(result, names, sample, 0)
            while undecided >= 0:
                self.check(undecided)
                self._members.settle(undecided)
                undecided = self._members.fill(result, names, sample, undecided + 1)
        except (OSError, ShardIndexError):
            if self.is_current():
                raise
            return False
        return self._is_current is None or self._is_current()

    def check(self, member: int) -> None:
        """Raise ShardIndexError unless the headers of *member* say what the index says."""
        self._check(self.cut, self.low, member)

    def take(self, member: int) -> bytes:
        """Return the data of *member*; raise ShardIndexError where its headers differ from the index."""
        self.check(member)
        return self.cut(*self._index.place(member))

    def cut(self, offset: int, size: int) -> bytes:
        """Return the *size* bytes at *offset* of the shard."""
        if self._mapped is None:
            return bytes(self._buffer[offset - self._zero : offset - self._zero + size])
        size = min(size, len(self._buffer) - (offset - self._zero))
        data: bytes = self._buffer.read(offset - self._zero, size)
        return data


class _Bytes:
    """The *size* bytes of a shard from *low* on, which *cut* returns, as the twin in Python reads a mapped file."""

    def __init__(self, cut: Callable[[int, int], bytes], low: int, size: int):
        self.cut, self._low, self._size = cut, low, size

    def __len__(self) -> int:
        return self._size

    def read(self, offset: int, size: int) -> bytes:
        return self.cut(self._low + offset, size)
