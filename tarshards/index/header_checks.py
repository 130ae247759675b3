"""The headers of members, compared with the index before a byte of their data is delivered; members in memory."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tarshards import kernels
from tarshards.errors import ShardIndexError
from tarshards.index.sidecar import Index
from tarshards.kernels._headers_py import find_header, has_size
from tarshards.kernels._tar_py import MAX_EXTENDED, checksum_is_right, parse_size
from tarshards.tar.read import BLOCK, MEMBER_LIMIT, padding, scan

if TYPE_CHECKING:
    from tarshards.storage.cache import MappedBlock

NEAR = 1 << 11  # bytes before a remote member's header in which its extended headers are looked for
TYPES = b"xXLKg"  # the types of extended headers


def check_header(read: Callable[[int, int], bytes], index: Index, member: int, *, url: str, low: int = 0) -> None:
    """Raise ShardIndexError, which names the shard *url*, unless the headers of a member agree with the index.

    *read* takes an offset and a size; nothing before the offset *low* is read.
    """
    offset, size = index.data_range(member)
    key, field = index.named(member)
    begin = _end_before(index, member)
    if begin < low or (member and not _is_whole(read, index, member - 1, low)):
        begin = first_header(read, offset - BLOCK, low)
    found = find_header(read, begin, offset)
    if found is not None and found[1] == size and _is_named(found[0], key, field):
        return
    there = "no sound header" if found is None else f"{found[0]!r} of {found[1]} bytes"
    reason = f"stale index: it says {size} bytes, and here is {there}; rebuild it with `tarindex`"
    raise ShardIndexError(reason, url=url, offset=offset - BLOCK, key=key, field=field)


def check_fetched(
    cut: Callable[[int, int], bytes],
    low: int,
    read: Callable[[int, int], bytes],
    index: Index,
    member: int,
    *,
    url: str,
) -> None:
    """Do what ``check_header`` does for fetched bytes, which begin at the offset *low* and which *cut* returns.

    *read* is used only for bytes before *low*, since it may return newer bytes than those that were fetched.
    """
    try:
        check_header(cut, index, member, url=url, low=low)
    except ShardIndexError:
        if not low:
            raise

        def joined(at: int, size: int) -> bytes:
            before = read(at, min(size, low - at)) if at < low else b""
            return before + cut(at + len(before), size - len(before))

        check_header(joined, index, member, url=url)  # extended headers may begin before


def _is_named(name: str, key: str, field: str) -> bool:
    """Return whether a name is that of *key* and *field*, by whatever rule it was split."""
    return name.startswith(f"{key}.") and name[len(key) + 1 :].lower() == field


def first_byte(index: Index, member: int) -> int:
    """Return the offset from which to read a remote member: its headers, or the previous member if that is small."""
    header = index.data_range(member)[0] - BLOCK
    if member and header - (before := index.data_range(member - 1)[0] - BLOCK) <= NEAR:
        return before
    return max(0, header - NEAR)


def _end_before(index: Index, member: int) -> int:
    """Return where the data of the member before, its padding and a gap end, and the headers of this one begin."""
    end = sum(index.data_range(member - 1)) if member else 0
    gaps = bisect_right(index.gaps, index.data_range(member)[0] - BLOCK, key=lambda gap: gap.end)
    return max(end + padding(end), index.gaps[gaps - 1].end if gaps else 0)


def _is_whole(read: Callable[[int, int], bytes], index: Index, member: int, low: int) -> bool:
    """Return whether a member has the size in the index, so that the headers of the next one follow its data."""
    offset, size = index.data_range(member)
    return offset - BLOCK >= low and has_size(read(offset - BLOCK, BLOCK), size)


def first_header(read: Callable[[int, int], bytes], header: int, low: int) -> int:
    """Return where the extended headers before the one at *header* begin; *header* if there are none."""
    low = max(low, header - MAX_EXTENDED - BLOCK)
    low += (header - low) % BLOCK
    headers = read(low, header - low + BLOCK)
    last = len(headers) - BLOCK
    chain = [last]  # the offsets from which extended headers lead to the last one, descending
    leading = {last}
    for start in range(last - BLOCK, -1, -BLOCK):
        block = headers[start : start + BLOCK]
        if block[156] not in TYPES or (size := parse_size(block[124:136])) < 0:
            continue
        if start + BLOCK + size + padding(size) in leading and checksum_is_right(block):
            leading.add(start)
            chain.append(start)
    while len(chain) > 1:
        found, position, _, _, problem = scan(headers, chain[-1], 0, MEMBER_LIMIT)
        if found and found[0][2] == len(headers):
            return low + found[0][1]
        while chain and chain[-1] <= (position if problem else last):  # none of these leads to it
            chain.pop()
    return low + last


Check = Callable[[Callable[[int, int], bytes], int, int], object]


class HeldMembers:
    """The members from *begin* to *end* of a shard; *data* has the bytes of the shard, starting at offset *low*.

    These are in memory, or mapped. *check* is called for a member whose headers the kernel does not decide on, with a
    function that returns the bytes; it raises if they differ from the index.
    """

    def __init__(self, index: Index, begin: int, end: int, low: int, data: Any, check: Check):
        self.begin = begin
        self.end = end
        self.low = low
        self._mapped: MappedBlock | None = None if isinstance(data, (bytes, bytearray, memoryview)) else data
        self._buffer: Any = data if self._mapped is None else self._mapped.mapping
        self._is_current: Callable[[], bool] | None = None if self._mapped is None else self._mapped.mapping.is_current
        self._zero = low if self._mapped is None else low - self._mapped.start  # where its first byte is in the shard
        self._index, self._check = index, check
        start = 0 if self._mapped is None else self._mapped.start  # headers are to begin at multiples of 512 from there
        held = (
            memoryview(self._buffer)[start:]
            if kernels.IS_COMPILED
            else _Bytes(self.cut, low, len(self._buffer) - start)
        )
        self._members = kernels.headers.MappedMembers(held, index.table, low, begin, end)

    @property
    def is_mapped(self) -> bool:
        """Whether its data uses no memory of the process."""
        return self._mapped is not None

    def hold_open(self) -> None:
        """Keep the mapped file open if possible, so that ``is_current`` is faster."""
        if self._mapped is not None:
            self._mapped.mapping.hold_open()

    def is_current(self) -> bool:
        """Return whether its data is unchanged: a mapped file may have been removed, or written to."""
        return self._is_current is None or self._is_current()

    @property
    def stays(self) -> bool:
        """Whether its data stays on the disk for later epochs, and may stay mapped for them."""
        return kernels.IS_COMPILED and self._mapped is not None and self._mapped.stays

    def fill(self, result: dict[str, Any], names: list[str | None], sample: int) -> bool:
        """Put the bytes of the members of *sample* that are here into *result*, under their *names* unless None.

        Returns whether they are valid: False if the mapped file has been removed, or written to. Raises ShardIndexError
        for a member whose headers differ from the index.
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
        """Raise ShardIndexError unless the headers of *member* agree with the index."""
        self._check(self.cut, self.low, member)

    def take(self, member: int) -> bytes:
        """Return the data of *member*; raise ShardIndexError if its headers differ from the index."""
        self.check(member)
        return self.cut(*self._index.data_range(member))

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
