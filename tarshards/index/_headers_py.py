"""Take members of local shards, each after its header was compared with the index: the twin of _headers.c.

A member matches where the 512 bytes before its data are the header of a regular file with its name and size, and no
extended header can stand before these: the header of the member before it has the size that the index says, so its
data ends where this one's headers begin. What does not match in this way is left to tarshards.index.headers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tarshards.tar._tar_py import AFTER_END, BLOCK, MAX_SIZE, checksum_is_right, parse_size, scan_headers

REGULAR = b"\x0007"  # the types of regular files
WINDOW = 1 << 16  # bytes of headers that are read at once


class MappedMembers:
    """The members of the shard that *mapping* reads, as an index places them.

    *first* (int64) are the numbers of the samples' first members, and of all members; *sample* (uint32), *field*
    (uint16), *offset* and *size* (uint64) are the arrays of the index. Raises ValueError where these contradict each
    other, or name a member outside the shard.
    """

    def __init__(
        self,
        mapping: Any,
        keys: list[str],
        fields: list[str],
        first: Any,
        sample: Any,
        field: Any,
        offset: Any,
        size: Any,
    ):
        self.mapping, self.keys = mapping, [_encoded(key) for key in keys]
        self.fields = [_encoded(field) for field in fields]
        arrays = [(first, "<i8"), (sample, "<u4"), (field, "<u2"), (offset, "<i8"), (size, "<i8")]
        self.first, self.sample, self.field, self.offset, self.size = (np.frombuffer(*pair) for pair in arrays)
        members = len(self.size)
        if not (len(self.offset) == len(self.field) == len(self.sample) == members) or len(self.first) != len(keys) + 1:
            raise ValueError("arrays of different lengths")
        if self.first[0] != 0 or self.first[-1] != members or (np.diff(self.first) < 0).any():
            raise ValueError("samples out of order")
        rest = len(mapping) - self.offset
        if members and not ((self.offset >= BLOCK) & (self.size >= 0) & (self.size <= rest)).all():
            raise ValueError("a member beyond the shard's end")
        if members and (self.field.max() >= len(fields) or self.sample.max() >= len(keys)):
            raise ValueError("a field without a name, or a sample without a key")
        self.compared = bytearray(members)

    def fill(self, result: dict[str, Any], names: list[str | None], sample: int, settled: int) -> int:
        """Put the bytes of the members of *sample* into *result* under their *names*, but those named None; return -1.

        Members before *settled* are taken as they are. Of the others, the number of the first one that does not match
        is returned, and nothing is put into *result*. Raises OSError where the file has shrunk.
        """
        if not 0 <= sample < len(self.keys):
            raise IndexError(f"sample {sample}")
        members = range(self.first[sample], self.first[sample + 1])
        taken = [member for member in members if names[self.field[member]] is not None]
        for member in taken:
            if member >= settled and not self._matches(member, sample, before=member - 1 in taken):
                return member
        data = [self.mapping.read(int(self.offset[member]), int(self.size[member])) for member in taken]
        for member, value in zip(taken, data):
            result[names[self.field[member]]] = value
        return -1

    def settle(self, member: int) -> None:
        """Note that a member matches, for ``find_undecided``."""
        if not 0 <= member < len(self.size):
            raise IndexError(f"member {member}")
        self.compared[member] = 1

    def compare(self, member: int) -> bool:
        """Return whether a member matches, or did before."""
        before = member > 0 and bool(self.compared[member - 1])
        return bool(self.compared[member]) or self._matches(member, int(self.sample[member]), before=before)

    def _matches(self, member: int, sample: int, *, before: bool) -> bool:
        """Return whether a member matches; *before* says that the one before it does."""
        key, field = self.keys[sample], self.fields[self.field[member]]
        offset, size = int(self.offset[member]), int(self.size[member])
        begin = int(self.offset[member - 1] + self.size[member - 1]) + BLOCK - 1 & -BLOCK if member else 0
        if member and not before and not self.compared[member] and not self._has_its_size(member - 1):
            return False
        if begin == offset - BLOCK:
            same = _is_header(self.mapping.read(begin, BLOCK), key, field, size)
        else:
            found = find_header(self.mapping.read, begin, offset, trusts=True)
            same = found is not None and found[1] == size and _is_name(_encoded(found[0]), key, field)
        if same:
            self.compared[member] = 1
        return same

    def _has_its_size(self, member: int) -> bool:
        return has_size(self.mapping.read(int(self.offset[member]) - BLOCK, BLOCK), int(self.size[member]))


def find_undecided(tables: Sequence[MappedMembers | None], shards: np.ndarray, members: np.ndarray) -> list[int]:
    """Compare members with their headers; return the places of those that do not match.

    Member ``members[i]`` is one of ``tables[shards[i]]``; where it is negative or there is no table, nothing is done. A
    member that has matched is not compared again. Both arrays are int64. Raises ValueError for other members.
    """
    if len(shards) != len(members):
        raise ValueError("shards and members differ in length")
    undecided = []
    for place, (shard, member) in enumerate(zip(shards.tolist(), members.tolist())):
        table = tables[shard]
        if member < 0 or table is None:
            continue
        if member >= len(table.size):
            raise ValueError("not a member of a mapped shard")
        try:
            matches = table.compare(member)
        except OSError:  # the shard has shrunk: whoever decides on this member finds out
            matches = False
        if not matches:
            undecided.append(place)
    return undecided


def find_header(read: Any, begin: int, offset: int, *, trusts: bool = False) -> tuple[str, int] | None:
    """Follow the headers from *begin* on; return name and size of the regular file whose data begins at *offset*.

    Returns None where the headers do not lead there. *read* takes an offset and a size. If it *trusts* that a header is
    at *begin*, checksums are not verified.
    """
    zeros = 0
    need = BLOCK
    while begin + need <= offset:
        window = read(begin, min(max(need, WINDOW), offset - begin))
        found, position, need, zeros, problem = scan_headers(window, 0, zeros, MAX_SIZE, trusts=trusts)
        for name, _header, start, end, kind in found:
            if begin + start == offset:
                return None if kind else (name, end - start)
        if problem == AFTER_END:  # the index may be of concatenated archives
            zeros = 0
        elif problem:
            return None
        begin += position
    return None


def has_size(block: bytes, size: int) -> bool:
    """Return whether *block* is the header of a regular file of *size* bytes."""
    if block[156] not in REGULAR or parse_size(block[124:136]) != size:
        return False
    return block[257:262] == b"ustar" or checksum_is_right(block)


def _is_header(block: bytes, key: bytes, field: bytes, size: int) -> bool:
    name = block[:100].split(b"\0", 1)[0]
    if block[345] and block[257:263] == b"ustar\0":
        name = block[345:500].split(b"\0", 1)[0] + b"/" + name
    return block[156] in REGULAR and parse_size(block[124:136]) == size and _is_name(name, key, field)


def _is_name(name: bytes, key: bytes, field: bytes) -> bool:
    """Return whether a name splits into a key and a field; the index has the field in lower case."""
    found = name[len(key) + 1 :]
    return name.startswith(key + b".") and (found == field or found.lower() == field)


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
