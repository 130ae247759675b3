"""The members of shards as their sidecars list them, and their headers: the twin of _headers.c.

A member matches if the 512 bytes before its data are the header of a regular file with its name and size, and no
extended header can precede these: the header of the previous member has the size in the index, so its data ends where
the headers of this one begin. tarshards.index.header_checks decides on all other members.

``locate(tables, rank, shards, samples, order, addresses, sizes, members, ends)``, ``fetch(tables, shards, members,
sizes, addresses, arena)`` and ``find_shrunk(tables, shards, ends)`` have no twins: without the kernels no shard is read
by its addresses. Sample ``samples[i]`` is one of ``tables[shards[i]]``, None for a shard that is not there. *rank*
takes the names of its fields and returns int16 of shape (terms, fields): which alternative of each term a field is, 0
the best, or -1. The offset of the best one that the sample has, its size, and the number of its member are written at
``[term, i]``; a number of -1 says that there is none, and -2 that the index has shrunk. Samples are looked up, and then
their headers compared, in *order*, a permutation of their numbers here; comparing ends where a disk is waited for.
Returns whether a member has not been compared, or does not match plainly. Where the last located member of each table
ends is written into *ends*. After members are copied, ``find_shrunk`` returns those of *shards* that no longer reach to
their *ends*.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tarshards.kernels._tar_py import AFTER_END, BLOCK, MAX_SIZE, checksum_is_right, parse_size, scan_headers
from tarshards.parallel.forks import cached_property

REGULAR = b"\x0007"  # the types of regular files
TOGETHER = 32  # samples to read at once
EVERY = 64  # keys from one whose offset a table has to the next
AT_ONCE = 1 << 16  # bytes of headers to read at once
ARRAYS = {"sample": "<u4", "field": "<u2", "offset": "<i8", "size": "<i8"}


def layout(packed: bytes | memoryview) -> dict[str, tuple[int, int]]:
    """Return where each entry of a msgpack map begins and ends; of bytes, where these do, and not their length.

    Raises ValueError unless it is one complete map whose keys are strings.
    """
    import msgpack

    unpacker = msgpack.Unpacker(max_buffer_size=0, unicode_errors="replace")
    unpacker.feed(packed)
    found = {}
    try:
        for _ in range(unpacker.read_map_header()):
            name, begin = unpacker.unpack(), unpacker.tell()
            unpacker.skip()
            begin += {0xC4: 2, 0xC5: 3, 0xC6: 5}.get(packed[begin], 0)
            if not isinstance(name, str):
                raise ValueError("a name that is not a string")
            found[name] = begin, unpacker.tell()
        if unpacker.tell() != len(packed):
            raise ValueError("bytes after the map")
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ValueError("no whole msgpack map") from error
    return found


class MemberTable:
    """The members of a shard of *shard_size* bytes in its *sidecar*: bytes, or a mapping of a file.

    *layout* says where in it the arrays are, *fields* are the names of the fields as bytes, and *end* is the offset of
    the archive's end, -1 if it is not known. Only the offset of each 64th key is copied from the sidecar. Raises
    ValueError if it contradicts itself.

    The kernel's takes *pages*, too: the number of samples, where the first key begins, the number of members of every
    sample (0 if it varies), where the pages end, and what the sidecar has as offsets of keys and as checksums of its
    pages. Then it looks at nothing before it is needed: what reads a page that has another checksum, or contradicts
    itself, raises OSError. That has no twin: without the kernels, a sidecar is read and checked as a whole.
    """

    def __init__(
        self,
        sidecar: bytes | memoryview,
        layout: dict[str, tuple[int, int]],
        fields: tuple[bytes, ...],
        shard_size: int,
        end: int,
    ):
        self._sidecar, self._layout = sidecar, layout
        self.fields: tuple[bytes, ...] = fields
        arrays = {name: sidecar[slice(*layout[name])] for name in ARRAYS}
        lengths = {len(array) / np.dtype(ARRAYS[name]).itemsize for name, array in arrays.items()}
        if len(lengths) > 1 or not next(iter(lengths)).is_integer():
            raise ValueError("arrays of different lengths")
        members = [np.frombuffer(arrays[name], ARRAYS[name]) for name in ARRAYS]
        self.sample: np.ndarray = members[0]
        self.field: np.ndarray = members[1]
        self.offset: np.ndarray = members[2]
        self.size: np.ndarray = members[3]
        self.members: int = len(self.sample)
        if problem := self._inconsistency(shard_size, end):
            raise ValueError(problem)

    def _inconsistency(self, shard_size: int, end: int) -> str | None:
        """Return what is impossible in the arrays, None if nothing is."""
        if type(self.keys) is not list:
            return "a size that is not a number, or names that are not lists"
        if not all(isinstance(key, str) for key in self.keys):
            return "a key or a field that is not a string"
        if not self.members:
            return "keys without members" if self.keys else None
        steps = np.diff(self.sample.astype(np.int64))
        if self.sample[0] != 0 or self.sample[-1] != len(self.keys) - 1 or ((steps < 0) | (steps > 1)).any():
            return "samples out of order"
        if self.field.max() >= len(self.fields):
            return "a field without a name"
        if min(self.offset.min(), self.size.min()) < 0 or max(self.offset.max(), self.size.max()) > shard_size:
            return "a member beyond the shard's end"
        ends = self.offset + self.size
        if ends[-1] > shard_size or self.offset[0] < BLOCK or (ends[:-1] > self.offset[1:]).any():
            return "members that overlap or lie beyond the shard's end"
        return "an end of the archive that is before the last member" if 0 <= end < ends[-1] else None

    @cached_property
    def keys(self) -> list[str]:
        import msgpack

        packed = self._sidecar[slice(*self._layout["keys"])]
        found: list[str] = msgpack.unpackb(packed, unicode_errors="surrogateescape")
        return found

    @cached_property
    def first(self) -> np.ndarray:
        """The number of each sample's first member, then the number of members."""
        return np.searchsorted(self.sample, np.arange(len(self.keys) + 1)).astype(np.int64)

    @property
    def pages(self) -> tuple[int, bytes]:
        """The number of members of every sample, 0 if it varies, and the offset of each 64th key from the first."""
        import msgpack

        counts = {*np.diff(self.first).tolist()}
        unpacker = msgpack.Unpacker(max_buffer_size=0, unicode_errors="surrogateescape")
        unpacker.feed(self._sidecar[slice(*self._layout["keys"])])
        marks, number = [], unpacker.read_array_header()
        begin = unpacker.tell()
        for key in range(number):
            if key % EVERY == 0:
                marks.append(unpacker.tell() - begin)
            unpacker.skip()
        return counts.pop() if len(counts) == 1 else 0, np.array(marks, "<u4").tobytes()

    def __len__(self) -> int:
        return len(self.keys)

    def rest_on(self, mapping: Any) -> None:
        """Use a *mapping* of the same bytes from now on; raise ValueError if its length differs."""
        if len(mapping) != len(self._sidecar):
            raise ValueError("a sidecar of another size")

    def key(self, sample: int) -> str:
        """Return the key of a sample; raise OSError if the file of a mapped sidecar was written to."""
        return self.keys[_checked("sample", sample, len(self))]

    def span(self, sample: int) -> tuple[int, int]:
        """Return the first member of a sample, and the one after its last."""
        sample = _checked("sample", sample, len(self))
        return int(self.first[sample]), int(self.first[sample + 1])

    def entry(self, member: int) -> tuple[int, int, int, int]:
        """Return the sample, field, offset and size of a member."""
        member = _checked("member", member, self.members)
        return int(self.sample[member]), int(self.field[member]), int(self.offset[member]), int(self.size[member])

    def read_firsts(self, samples: np.ndarray, out: np.ndarray) -> None:
        """Write the first member of each of *samples* into *out*; both are int64."""
        if len(samples) and not 0 <= samples.min() <= samples.max() <= len(self):
            raise IndexError("a number out of range")
        out[:] = self.first[samples]

    def read_entries(self, members: np.ndarray, out: np.ndarray) -> None:
        """Write the sample, field, offset and size of each of *members* into the rows of *out*; both are int64."""
        if len(members) and not 0 <= members.min() <= members.max() < self.members:
            raise IndexError("a number out of range")
        arrays = (self.sample, self.field, self.offset, self.size)
        out[:] = np.stack([array[members].astype(np.int64) for array in arrays], 1)


def _checked(what: str, number: int, limit: int) -> int:
    if not 0 <= number < limit:
        raise IndexError(f"{what} {number}")
    return number


class MappedMembers:
    """The members of *table* from *begin* to *end* in *shard*, a mapping or bytes that begin at the offset *low* of it.

    ``read_samples`` reads samples of those that have *names* for their fields, of the shard *url*.
    """

    def __init__(
        self,
        shard: Any,
        table: MemberTable,
        low: int = 0,
        begin: int = 0,
        end: int = -1,
        url: str = "",
        names: list[str | None] | None = None,
    ):
        end = table.members if end < 0 else end
        if not (low >= 0 and 0 <= begin <= end <= table.members):
            raise ValueError("not members of the table")
        self.shard: Any = shard
        self.table: MemberTable = table
        self.low: int = low
        self.begin: int = begin
        self.end: int = end
        self.url: str = url
        self.names: list[str | None] | None = names
        self.compared: bytearray = bytearray(end - begin)

    def fill(self, result: dict[str, Any], names: Sequence[str | None], sample: int, settled: int) -> int:
        """Put the key of *sample* and the bytes of its members, under their *names*, into *result*; return -1.

        Members whose name is None or missing are left out. Members before *settled* are not compared. If another one
        does not match, its number is returned, and nothing is put into *result*. Raises OSError if a file has
        shrunk, or an index was written to.
        """
        table = self.table
        members = range(*table.span(sample))
        members = range(max(members.start, self.begin), min(members.stop, self.end))
        taken = [member for member in members if names[table.field[member]] is not None]
        for member in taken:
            if not self._is_here(member):
                return member
        for member in taken:
            if member >= settled and not self._matches(member, sample, before=member - 1 in taken):
                return member
        data = [self._read(int(table.offset[member]), int(table.size[member])) for member in taken]
        result["__key__"] = table.key(sample)
        for member, value in zip(taken, data):
            result[names[table.field[member]]] = value
        return -1

    def settle(self, member: int) -> None:
        """Note that a member matches, for ``find_undecided``."""
        if not self.begin <= member < self.end:
            raise IndexError(f"member {member}")
        self.compared[member - self.begin] = 1

    def compare(self, member: int) -> bool:
        """Return whether a member matches, or did before."""
        before = member > self.begin and self._is_compared(member - 1)
        return self._is_compared(member) or self._matches(member, int(self.table.sample[member]), before=before)

    def _is_compared(self, member: int) -> bool:
        return self.begin <= member < self.end and bool(self.compared[member - self.begin])

    def _read(self, offset: int, size: int) -> bytes:
        data: bytes = self.shard.read(offset - self.low, size)
        return data

    def _is_here(self, member: int) -> bool:
        """Return whether the header and the data of a member are in the bytes of the shard that are here."""
        offset, size = int(self.table.offset[member]) - self.low, int(self.table.size[member])
        return offset >= BLOCK and offset + size <= len(self.shard)

    def _matches(self, member: int, sample: int, *, before: bool) -> bool:
        """Return whether a member matches; *before* says that the one before it does."""
        table = self.table
        if not self._is_here(member):
            return False
        key, field = _encoded(table.keys[sample]), table.fields[table.field[member]]
        offset, size = int(table.offset[member]), int(table.size[member])
        begin = int(table.offset[member - 1] + table.size[member - 1]) + BLOCK - 1 & -BLOCK if member else 0
        if begin < self.low:
            return False
        if member and not before and not self._is_compared(member) and not self._has_its_size(member - 1):
            return False
        if begin == offset - BLOCK:
            same = _is_header(self._read(begin, BLOCK), key, field, size)
        else:
            found = find_header(self._read, begin, offset, trusts=True)
            same = found is not None and found[1] == size and _is_name(_encoded(found[0]), key, field)
        if same:
            self.compared[member - self.begin] = 1
        return same

    def _has_its_size(self, member: int) -> bool:
        return self._is_here(member) and has_size(
            self._read(int(self.table.offset[member]) - BLOCK, BLOCK), int(self.table.size[member])
        )


def read_samples(
    tables: Sequence[MappedMembers | None], shards: np.ndarray, samples: np.ndarray, begin: int
) -> list[dict[str, Any] | None]:
    """Return some samples, starting with the one at *begin*; None for each that needs a second check.

    Sample ``samples[i]`` is one of ``tables[shards[i]]``; both arrays are int64. None are those that do
    not match, and those of shards without a table or names.
    """
    result: list[dict[str, Any] | None] = []
    for shard, sample in zip(shards[begin : begin + TOGETHER].tolist(), samples[begin : begin + TOGETHER].tolist()):
        own, found = tables[shard], None
        if own is not None and own.names is not None and 0 <= sample < len(own.table):
            found = {"__key__": "", "__url__": own.url}
            try:
                found = found if own.fill(found, own.names, sample, 0) < 0 else None
            except OSError:
                found = None
        result.append(found)
    return result


def find_keys(tables: Sequence[MappedMembers | None], shards: np.ndarray, samples: np.ndarray) -> list[str]:
    """Return the keys of samples; that of one without a table is empty."""
    if len(shards) != len(samples):
        raise ValueError("shards and samples differ in length")
    found = ((tables[shard], sample) for shard, sample in zip(shards.tolist(), samples.tolist()))
    return ["" if members is None else members.table.key(sample) for members, sample in found]


def find_undecided(tables: Sequence[MappedMembers | None], shards: np.ndarray, members: np.ndarray) -> list[int]:
    """Compare members with their headers; return the indices of those that do not match.

    Member ``members[i]`` is one of ``tables[shards[i]]``; where it is negative or there is no table, nothing is done. A
    member that has matched is not compared again. Both arrays are int64. Raises ValueError for other members.
    """
    if len(shards) != len(members):
        raise ValueError("shards and members differ in length")
    undecided = []
    for i, (shard, member) in enumerate(zip(shards.tolist(), members.tolist())):
        own = tables[shard]
        if member < 0 or own is None:
            continue
        if not own.begin <= member < own.end:
            raise ValueError("not a member of a mapped shard")
        try:
            matches = own.compare(member)
        except OSError:  # the shard has shrunk; the decision on this member will raise the error
            matches = False
        if not matches:
            undecided.append(i)
    return undecided


def find_header(read: Any, begin: int, offset: int, *, trusts: bool = False) -> tuple[str, int] | None:
    """Follow the headers, starting at *begin*; return name and size of the regular file whose data begins at *offset*.

    Returns None if the headers do not lead there. *read* takes an offset and a size. If it *trusts* that a header is
    at *begin*, checksums are not verified.
    """
    zeros = 0
    need, ahead = BLOCK, AT_ONCE
    while begin + need <= offset:
        data = read(begin, min(max(need, ahead), offset - begin))
        found, position, need, zeros, problem = scan_headers(data, 0, zeros, MAX_SIZE, trusts=trusts)
        for name, _header, start, end, kind in found:
            if begin + start == offset:
                return None if kind else (name, end - start)
        if problem == AFTER_END:  # the index may be of concatenated archives
            zeros = 0
        elif problem:
            return None
        begin += position
        ahead = AT_ONCE if position else 2 * len(data)
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
