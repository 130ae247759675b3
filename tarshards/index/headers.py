"""The headers of members, compared with the index before a byte of their data is delivered.

The kernel is C (``_headers.c``), or where that is not compiled, its twin in Python. It knows the plain cases;
``check_header`` decides on the others by reading the headers as the tar reader does.
"""

from __future__ import annotations

from collections.abc import Callable

from tarshards.errors import ShardIndexError
from tarshards.index._headers_py import find_header, has_size
from tarshards.index.member_table import MappedMembers, find_undecided
from tarshards.index.sidecar import Index
from tarshards.tar.read import BLOCK, MEMBER_LIMIT, padding, scan

__all__ = ["NEAR", "MappedMembers", "check_fetched", "check_header", "find_undecided", "first_byte", "first_header"]

NEAR = 1 << 11  # bytes before a header in which the extended headers of a remote member are looked for
EXTENDED = (1 << 20) + BLOCK  # the most bytes of the extended headers before one member
TYPES = b"xXLKg"  # of extended headers


def check_header(read: Callable[[int, int], bytes], index: Index, member: int, *, url: str, low: int = 0) -> None:
    """Raise ShardIndexError, which names the shard *url*, unless the headers of a member say what its index says.

    *read* takes an offset and a size; nothing before the offset *low* is read.
    """
    offset, size = index.place(member)
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
    """Do what ``check_header`` does for bytes that were fetched from the offset *low* on, and that *cut* takes.

    *read* reads what is before *low*, and nothing else: what it reads may be newer than what was fetched.
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
    """Return where to begin to read a remote member: at its headers, and those of the member before if it is small."""
    header = index.place(member)[0] - BLOCK
    if member and header - (before := index.place(member - 1)[0] - BLOCK) <= NEAR:
        return before
    return max(0, header - NEAR)


def _end_before(index: Index, member: int) -> int:
    """Return where the data of the member before ends with its padding, and the headers of this one begin."""
    if not member:
        return 0
    end = sum(index.place(member - 1))
    return end + padding(end)


def _is_whole(read: Callable[[int, int], bytes], index: Index, member: int, low: int) -> bool:
    """Return whether a member has the size in the index, so that the headers of the next one follow its data."""
    offset, size = index.place(member)
    return offset - BLOCK >= low and has_size(read(offset - BLOCK, BLOCK), size)


def first_header(read: Callable[[int, int], bytes], header: int, low: int) -> int:
    """Return where the extended headers before the one at *header* begin; *header* if there are none."""
    low = max(low, header - EXTENDED)
    low += (header - low) % BLOCK
    window = read(low, header - low + BLOCK)
    first = len(window) - BLOCK
    for start in range(first - BLOCK, -1, -BLOCK):
        if window[start + 156] in TYPES:
            found, *_ = scan(window, start, 0, MEMBER_LIMIT)
            if found and found[0][1] == start and found[0][2] == len(window):
                first = start
    return low + first
