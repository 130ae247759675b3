"""Parse and create tar headers, and group members, in Python: equivalent to _tar.c, with identical results.

Formats: POSIX.1-2017, pax, "ustar Interchange Format" and "pax Header Block"; GNU tar manual, "Basic Tar Format".
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from typing import Any
from zlib import adler32

BLOCK = 512
MAX_EXTENDED = 1 << 20  # bytes of the long names and pax headers before one member
MAX_SIZE = (2**63 - 1) // 4
MAX_END = (1 << 16) + BLOCK  # bytes of zeros at the end of an archive: the most that `tar -b128` writes
MAX_RECORD = 1 << 20  # bytes of a record that `tar -b2048` fills with zeros: larger ones are not known
EMPTY = 2 * BLOCK  # the least bytes of an archive without members
RECORD = 20 * BLOCK  # those of GNU tar and Python's tarfile; most writers fill the last such record with zeros
ZEROS = bytes(BLOCK)
OCTAL = re.compile(rb" *([0-7]+)(?:[\0 ].*)?", re.DOTALL)
RECORD_LENGTH = re.compile(rb"([0-9]{1,7}) ")
SIZE = re.compile(rb"[0-9]{1,18}")

KINDS = {
    0x00: "",
    0x30: "",  # "0"
    0x37: "",  # "7"
    0x31: "hard link",
    0x32: "symbolic link",
    0x33: "character device",
    0x34: "block device",
    0x35: "directory",
    0x36: "fifo",
    0x53: "sparse member",  # "S", GNU's
    0x44: "directory",  # "D", GNU's with a list of its contents
    0x56: "volume label",  # "V"
}
WIDE_MARKS = (b"\xff\xfe", b"\xfe\xff", b"\0\0\xfe\xff")  # byte order marks of UTF-16 and UTF-32
AFTER_END = "members after the end of the archive"
CONTINUED = "continued members of multi-volume archives are not supported"
GLOBAL_PLACE = "a global pax header that sets path, size, linkpath or a sparse map is not supported"
LINKS, SPARSE = ("hard link", "symbolic link"), "sparse member"
ELSEWHERE = frozenset((*LINKS, SPARSE))  # content that is not the bytes after the headers

#: How headers are read without data: the least and most bytes at once, and the size of members whose data is skipped.
READS = 2 << 10, 1 << 19, 1 << 15

ENTRIES = ("__key__", "__url__")  # of samples, besides their fields

ScannedMember = tuple[str, int, int, int, str]

#: A column for ``plain_rows``: field, number, addresses, sizes.
PlainColumn = tuple[str, int, Any, Any]

#: An event of ``Grouper``: the number of samples before it, kind, name, field and offset.
Event = tuple[int, str | None, Any, Any, int]


def bytes_ahead(reads: tuple[int, int, int], ahead: int, members: int, length: int, need: int) -> int:
    """Return how many bytes to read next.

    In the last *ahead* bytes, ``scan`` found *members* members, which take *length* bytes, and needs *need* more.
    """
    least, most, large = reads
    if members and length > large * members:
        return least
    return max(need, min(2 * ahead, most if length else 2 * ahead))  # many extended headers before a member


def is_apart(found: ScannedMember, size: int) -> bool:
    """Return whether the content of a member is not completely in a buffer of *size* bytes, or is elsewhere."""
    return found[3] > size or found[4] in ELSEWHERE


def scan(
    buffer: bytes, position: int, zeros: int, limit: int, stops: bool = False
) -> tuple[list[ScannedMember], int, int, int, str | None]:
    """Parse the headers in *buffer* from *position* up to its end.

    *zeros* is the number of blocks before *position* that contain only zeros; *limit* is the maximum size of a member.
    Returns ``(members, position, need, zeros, problem)``. A member is ``(name, header, start, end, kind)``: the offsets
    in the buffer of its first header block and of the start and end of its data. The data of the last member may end
    beyond the buffer. The returned *position* is where parsing must continue, which may also be beyond the buffer; the
    next call needs at least *need* bytes from there. *kind* is "" for a regular file, else it names the type. *problem*
    is None, or describes the fault at *position*. A header after zeros is also a problem: in concatenated archives,
    parsing can continue there with *zeros* 0. With *stops*, parsing stops after a link or a sparse member.
    """
    if position < 0 or zeros < 0 or limit < 0:
        raise ValueError("position, zeros and limit must not be negative")
    return scan_headers(buffer, position, zeros, limit, stops, trusts=False)


def scan_headers(
    buffer: bytes, position: int, zeros: int, limit: int, stops: bool = False, *, trusts: bool
) -> tuple[list[ScannedMember], int, int, int, str | None]:
    """Do the same as ``scan``; with *trusts*, header checksums are not verified."""
    members: list[ScannedMember] = []
    problem = None
    need, at, length = BLOCK, position, len(buffer)
    path: bytes | None = None
    size_record, is_sparse, is_named = None, False, False
    while at <= length - BLOCK:
        block = buffer[at : at + BLOCK]
        if block[0] == 0 and block == ZEROS:
            if at != position:
                problem = "an extended header without a member"
                break
            zeros += 1
            position = at = at + BLOCK
            continue
        if not trusts and not checksum_is_right(block):
            problem = "junk after the end of the archive" if zeros else "bad header checksum"
            break
        if zeros:
            problem = AFTER_END
            break
        kind_code = block[156]
        size = parse_size(block[124:136])
        if kind_code in b"xXgLK":
            if not 0 <= size <= MAX_EXTENDED - (at - position):
                problem = "an extended header with a bad size"
                break
            following = at + BLOCK + (size + 511 & ~511)
            if following > length:
                need = following - position
                break
            body = buffer[at + BLOCK : at + BLOCK + size]
            if kind_code == 0x4C:  # "L"
                path = body.split(b"\0", 1)[0] if path is None else path
            elif kind_code != 0x4B:  # "K"
                records, problem = _parse_pax(body, kind_code == 0x67, is_named)
                if problem:
                    break
                if b"GNU.sparse.name" in records:
                    path, is_named = records[b"GNU.sparse.name"], True
                elif not is_named:
                    path = records.get(b"path", path)
                is_sparse = is_sparse or any(record.startswith(b"GNU.sparse") for record in records)
                size_record = records.get(b"size", size_record)
            at = following
            if kind_code == 0x67 and path is None and size_record is None:
                position = at
            need = at - position + BLOCK
            continue
        if kind_code == 0x4D:  # "M"
            problem = CONTINUED
            break
        start = at + BLOCK
        more = kind_code == 0x53 and block[482] != 0  # more blocks of a sparse member's map
        while more and start <= length - BLOCK:
            more = buffer[start + 504] != 0
            start += BLOCK
        if more:
            need = start + BLOCK - position
            problem = "an extended header with a bad size" if need > MAX_EXTENDED else None
            break
        raw_name = path
        if raw_name is None:
            raw_name = block[:100].split(b"\0", 1)[0]
            if block[345] and block[257:263] == b"ustar\0":
                raw_name = block[345:500].split(b"\0", 1)[0] + b"/" + raw_name
        kind = KINDS.get(kind_code)
        if kind == "" and kind_code != 0x37 and raw_name.endswith(b"/"):
            kind = "directory"
        if kind == "" and is_sparse:
            kind = "sparse member"
        if kind_code not in b"\x0007DS":
            size = 0
        elif size_record is not None:
            size = int(size_record)
        if kind is None:
            problem = "a member of an unknown type"
        elif not raw_name:
            problem = "a member without a name"
        elif size < 0:
            problem = "a size that is not a number"
        elif size > limit:
            problem = "a member larger than the limit"
        if problem:
            break
        members.append((raw_name.decode("utf-8", "surrogateescape"), position, start, start + size, kind or ""))
        path, size_record, is_sparse, is_named = None, None, False, False
        position = at = start + (size + 511 & ~511)
        need = BLOCK
        if stops and kind in ELSEWHERE:
            break
    return members, at if problem else position, need, zeros, problem


def cut(buffer: bytes, scanned: list[ScannedMember], base: int, type: type) -> list[Any]:
    """Return a *type* of (name, data, offset) for every regular file in *scanned*.

    *buffer* is the buffer that was scanned, and *base* its offset in the archive. Raises ValueError for a member
    outside the buffer.
    """
    make = tuple.__new__  # twice as fast as the __new__ of a named tuple
    members: list[Any] = []
    for name, header, start, end, kind in scanned:
        if not kind:
            if not 0 <= start <= end <= len(buffer):
                raise ValueError("a member that lies outside the buffer")
            members.append(make(type, (name, buffer[start:end], base + header)))
    return members


class Grouper:
    """Groups the members of an archive into samples: dicts of ``__key__``, ``__url__`` and fields.

    *split* splits a name into key and field, or returns None. With *is_default*, it is not called for names of a plain
    key and a known field; ``walk`` describes its contract.

    Adjacent members with the same key form a sample, which is complete when another key, or ``end()``, follows. Events
    report members outside samples, each with the number of samples before it: ``(before, kind, name, field, offset)``.

    - A *kind*: a member that is not a regular file, or "" for one without a key.
    - None: a fault. The sample of the key *name* is left out, with the adjacent members of that key: its *field*
      occurs a second time, or, if *field* is None, its key occurred before, in another sample.

    With *packs*, some samples whose members are as ``plain_members`` makes them are passed over: in place of adjacent
    ones, ``read`` returns a tuple of the list of their keys, the offsets in the buffer where their members begin and
    end, and the number of these members. This twin passes over none.

    With *splits*, members of a key that occurred before form another sample of this key, after the event.
    """

    def __init__(
        self,
        url: str,
        split: Callable[[str], tuple[str, str] | None],
        is_default: bool,
        packs: bool = False,
        splits: bool = False,
    ):
        self._url, self._split, self._splits = url, split, splits
        self._key = ""
        self._sample: dict[str, Any] = {}
        self._earlier: list[str] | set[str] = []  # keys; a list while they are sorted, which needs no look-up

    def read(
        self, buffer: bytes, position: int, zeros: int, limit: int, base: int
    ) -> tuple[list[dict[str, Any]], list[Event], int, int, int, str | BaseException | None, ScannedMember | None]:
        """Group the members in *buffer* from *position*, as ``scan`` finds them; *base* is its offset in the archive.

        Returns ``(samples, events, position, need, zeros, problem, last)``. *last* is None, or the member at which
        grouping ended without adding it, as ``scan`` returns it: its data continues beyond the buffer, or it is a link
        or a sparse member. *problem* is that of ``scan``, or an exception that *split* raised: grouping ended there,
        and *position*, *need* and *zeros* are meaningless.
        """
        scanned, position, need, zeros, problem = scan(buffer, position, zeros, limit, True)
        last = scanned.pop() if scanned and is_apart(scanned[-1], len(buffer)) else None
        samples: list[dict[str, Any]] = []
        events: list[Event] = []
        for name, header, start, end, kind in scanned:
            if kind:
                events.append((len(samples), kind, name, None, base + header))
                continue
            try:
                self._add(name, buffer[start:end], base + header, samples, events)
            except BaseException as error:
                return samples, events, position, need, zeros, error, None
        return samples, events, position, need, zeros, problem, last

    def next(self, members: Iterator[tuple[str, Any, int]]) -> tuple[list[dict[str, Any]], list[Event]] | None:
        """Group *members*, each (name, data, offset), until one completes a sample or causes an event.

        A member whose data is None is a fault of its sample, like a duplicate field.

        Returns the samples and events, at most one each; None at the end of *members*.
        """
        samples: list[dict[str, Any]] = []
        events: list[Event] = []
        for name, data, offset in members:
            self._add(name, data, offset, samples, events)
            if samples or events:
                return samples, events
        return None

    def _add(self, name: str, data: Any, offset: int, samples: list[dict[str, Any]], events: list[Event]) -> None:
        parts = self._split(name)
        if parts is None:
            events.append((len(samples), "", name, None, offset))
            return
        if parts[0] != self._key or not self._sample:
            if self._sample:
                samples += self.end()
                if isinstance(self._earlier, list):
                    self._earlier.append(self._key)
                    if parts[0] < self._key:
                        self._earlier = set(self._earlier)
                else:
                    self._earlier.add(self._key)
            elif isinstance(self._earlier, set) and parts[0] == self._key:
                return  # another member of a sample that is left out
            self._key = parts[0]
            if isinstance(self._earlier, set) and self._key in self._earlier:
                events.append((len(samples), None, self._key, None, offset))
                if not self._splits:
                    return
            self._sample = {"__key__": self._key, "__url__": self._url}
        if parts[1] not in self._sample and data is not None:
            self._sample[parts[1]] = data
            return
        self._sample = {}
        if isinstance(self._earlier, list):
            self._earlier = set(self._earlier)
        self._earlier.add(self._key)
        events.append((len(samples), None, self._key, parts[1], offset))

    def end(self) -> list[dict[str, Any]]:
        """Return a list with the open sample, or an empty list if there is none."""
        sample, self._sample = self._sample, {}
        return [sample] if sample else []


def may_contain(sample: dict[str, Any], text: bytes, fields: list[list[str]] | None) -> bool:
    """Return whether a field contains *text*, or may do so as it begins with a byte order mark of UTF-16 or UTF-32.

    *fields* are lists of alternatives: the first that the sample has counts. It may also contain the text if it is not
    bytes, and if the sample has none of the alternatives. By default all fields count that are bytes.
    """
    if fields is None:
        values: Iterable[Any] = (data for data in sample.values() if isinstance(data, bytes))
    else:
        values = (next((sample[name] for name in names if name in sample), None) for names in fields)
    return any(not isinstance(data, bytes) or text in data or data.startswith(WIDE_MARKS) for data in values)


def most_end(size: int) -> int:
    """Return the most bytes of zeros that a writer leaves at the end of an archive of *size* bytes.

    It fills a record, whose size is a power of two; a record of more than 64 KiB must divide the archive.

    >>> most_end(10240), most_end(3 << 17), most_end(1 << 30)
    (66048, 131584, 1049088)
    """
    return max(MAX_END, min(size & -size, MAX_RECORD) + BLOCK)


def walk(
    source: int | Callable[[int, int], bytes],
    size: int,
    reads: tuple[int, int, int],
    limit: int,
    split: Callable[[str], tuple[str, str] | None],
    concatenated: bool = False,
) -> tuple[list[str], list[str], tuple[bytes, bytes, bytes, bytes, bytes, bytes], int, int] | None:
    """Find the members of samples in an archive of *size* bytes, skipping the data of large members.

    *source* is a file descriptor, or a function that takes an offset and a size and returns bytes. *reads* gives the
    minimum and maximum bytes per read, and the member size above which data is skipped rather than read. *limit* is the
    maximum size of a member; *split* splits a name into key and field, or returns None. With *concatenated*, other
    archives may follow the first.

    Returns ``(keys, fields, (sample, field, offset, size, twice, elsewhere), archives, end)``; *archives* is their
    number, and *end* the offset of the zeros at the end of the last: *size* if there are none, which the caller may
    refuse. Adjacent members with the same key form a sample.
    The arrays have one little-endian number per member: uint32, the position of its sample in *keys*; uint16, the low
    bits of the position of its field in *fields*; uint64, the offset of its data; uint64, its size in bytes. *twice*
    lists, as uint32, the numbers of the members whose field their sample already has: it occurred before in the sample,
    or is ``__key__`` or ``__url__``, which all samples have. *elsewhere* lists links, which have no data, and sparse
    members: uint32, the number; uint64, the offset of the first header. Returns None for a damaged archive.

    *split* is not called for names of a plain key and a known field. It must therefore split at the first dot of the
    last component, or at the last, so that no known field has a dot; keep lower-case fields unchanged; and return None
    only for empty keys, for components with "__" in the key, and for fields that end with "__".
    """
    read = partial(_pread, source) if isinstance(source, int) else source
    if size < 0 or limit < 0 or reads[0] < 1 or not 0 <= reads[2] < 1 << 32:
        raise ValueError("sizes and limits must not be negative, and reads must not be empty")
    keys: list[str] = []
    numbers: dict[str, int] = {}
    plain: dict[str, int] = {}  # known fields: names that end with them need no call of *split*
    latest: dict[int, int] = {}  # field -> number of samples when it last occurred
    members: list[tuple[int, int, int, int]] = []
    position, zeros, ahead, last, archives, data_end = 0, 0, reads[0], None, 1, 0
    twice: list[int] = []
    elsewhere: list[tuple[int, int]] = []
    while position < size:
        ahead = min(ahead, size - position)
        data = read(position, ahead)
        if len(data) != ahead:
            return None
        found, length, need, zeros, problem = scan(data, 0, zeros, limit)
        while problem == AFTER_END and concatenated:
            archives += 1
            more, length, need, zeros, problem = scan(data, length, 0, limit)
            found += more
        for name, header, start, end, kind in found:
            data_end = position + end
            if kind and kind not in ELSEWHERE:
                continue
            key, _dot, field = name.partition(".")
            number = plain.get(field)
            if number is None or (key != last and ("__" in key or not key or key[-1] == "/")):
                parts = split(name)
                if parts is None:
                    continue
                key, field = parts
                number = numbers.setdefault(field, len(numbers))
                if field and not field.endswith("__"):
                    plain[field] = number
            if key != last:
                keys.append(key)
                last = key
            if latest.get(number) == len(keys) or field in ENTRIES:
                twice.append(len(members))
            latest[number] = len(keys)
            if kind:
                elsewhere.append((len(members), position + header))
            members.append((len(keys) - 1, number & 0xFFFF, position + start, end - start))
        if problem:
            return None
        position += length
        if length <= reads[2] * len(found) and position + need > size:
            break
        ahead = bytes_ahead(reads, ahead, len(found), length, need)
    if position > size if zeros else (position < size or data_end > size or not size):
        return None
    position = min(position, size)  # the padding may be cut off
    archive_end = position - zeros * BLOCK
    padding = size - archive_end
    if (size > EMPTY and size != RECORD) if padding == size else (padding > most_end(size) and not concatenated):
        return None
    rest = read(position, size - position)
    if len(rest) != size - position or any(rest):
        return None
    columns = zip(*members) if members else [()] * 4
    arrays = [struct.pack(f"<{len(members)}{code}", *column) for code, column in zip("IHQQ", columns)]
    arrays.append(struct.pack(f"<{len(twice)}I", *twice))
    arrays.append(b"".join(struct.pack("<IQ", *entry) for entry in elsewhere))
    return keys, list(numbers), tuple(arrays), archives, archive_end  # type: ignore[return-value]


def _pread(descriptor: int, offset: int, size: int) -> bytes:
    parts = []
    while size and (part := os.pread(descriptor, size, offset)):
        parts.append(part)
        offset += len(part)
        size -= len(part)
    return b"".join(parts)


def checksum_is_right(block: bytes) -> bool:
    """Return whether the checksum in a header matches its bytes."""
    stored = _parse_octal(block[148:156])
    if stored < 0:
        return False  # otherwise a signed sum of -1 would match a missing number
    # The low half of Adler-32 is 1 plus the sum of the bytes; the sum of 256 bytes stays below its modulus, 65521.
    total = (adler32(block[:256]) & 0xFFFF) + (adler32(block[256:]) & 0xFFFF) - 2
    total += 8 * 0x20 - sum(block[148:156])
    if stored == total:
        return True
    high = sum(byte >> 7 for byte in block) - sum(byte >> 7 for byte in block[148:156])
    return stored == total - 256 * high


def _parse_octal(field: bytes) -> int:
    match = OCTAL.fullmatch(field)
    return int(match[1], 8) if match else -1


def parse_size(field: bytes) -> int:
    """Read the 12 bytes of a size; return -1 if they are not a number."""
    if field[0] < 0x80:
        return _parse_octal(field)
    size = int.from_bytes(field[1:], "big")
    return size if field[0] == 0x80 and size <= MAX_SIZE else -1


def _parse_pax(body: bytes, is_global: bool, is_named: bool) -> tuple[dict[bytes, bytes], str | None]:
    records: dict[bytes, bytes] = {}
    position = 0
    while position < len(body):
        match = RECORD_LENGTH.match(body, position)
        end = position + int(match[1]) if match else 0
        if not match or match.end() >= end or end > len(body) or body[end - 1] != 0x0A:
            return {}, "bad pax header"
        key, equals, value = body[match.end() : end - 1].partition(b"=")
        if not equals:
            return {}, "bad pax header"
        if key == b"GNU.volume.offset":
            return {}, CONTINUED
        if is_global and (key in (b"path", b"size", b"linkpath") or key.startswith(b"GNU.sparse")):
            return {}, GLOBAL_PLACE
        if key == b"GNU.sparse.name" or (key == b"path" and not is_named):
            if b"\0" in value:
                return {}, "bad pax header"
            is_named = key != b"path"
        if key == b"size" and not SIZE.fullmatch(value):
            return {}, "bad pax header"
        records[key] = value
        position = end
    return records, None


MODE_AND_OWNER = b"0000644\x000000000\x000000000\x00"
TIME = b"00000000000\x00"
AFTER_CHECKSUM = b"0" + bytes(100) + b"ustar\x0000" + bytes(247)
AFTER_CHECKSUM_SUM = sum(AFTER_CHECKSUM) + sum(b" " * 8)


def plain_header(name: str, size: int) -> bytes | None:
    """Return the ustar header of a regular file, or None if ustar cannot hold the name or the size.

    Time, owner and mode are fixed. Raises ValueError for a negative size.
    """
    if size < 0:
        raise ValueError("a size must not be negative")
    if len(name) > 100 or not name.isascii() or size >= 1 << 33:
        return None
    before = name.encode().ljust(100, b"\0") + _before_checksum(size)
    # The low half of Adler-32 is 1 plus the sum of the bytes, modulo 65521, which 148 bytes of ASCII do not reach.
    return before + _from_checksum(adler32(before) & 0xFFFF)


def plain_members(key: str, fields: tuple[str, ...], values: list[bytes], limit: int) -> bytes | None:
    """Return the headers, data and padding of a sample's members as one bytes object; names are key, dot, field.

    Returns None if ``plain_header`` is None for one of them, if one of *values* has *limit* bytes or more or is of a
    class derived from bytes, or if there are no fields. Raises ValueError unless there are as many values as fields.
    """
    if len(fields) != len(values):
        raise ValueError("there must be as many values as fields")
    parts: list[bytes] = []
    for field, value in zip(fields, values):
        size = len(value)
        header = plain_header(f"{key}.{field}", size) if size < limit and type(value) is bytes else None
        if header is None:
            return None
        parts += header, value, ZEROS[: -size % BLOCK]
    return b"".join(parts) or None


def plain_rows(
    keys: list[str], columns: list[PlainColumn], row: int, stop: int, limit: int, most: int, offset: int, sample: int
) -> tuple[int, bytes, tuple[bytes, bytes, bytes, bytes]]:
    """Return the members of the samples in rows *row* to *stop* of *columns*, as one bytes object.

    A column is the field, its number, and the addresses (uint64) and sizes (int64) of its bytes in each row, which are
    trusted and in no mapped file; a row with a negative size has no such field. Ends before *stop* at the first row
    without a plain key or for which ``plain_members`` is None, and before exceeding *most* bytes, except for a single
    row.

    Returns ``(end, members, (sample, field, offset, size))``: the row where it ended, and arrays like those of ``walk``
    with an entry for each member, where *sample* is the number of the first sample and *offset* that of the first
    header.
    """
    from ctypes import string_at

    if row < 0 or stop > len(keys):
        raise ValueError("there must be as many keys as rows")
    opened = [(field, number, memoryview(addresses), memoryview(sizes)) for field, number, addresses, sizes in columns]
    if any(min(len(addresses), len(sizes)) < stop for _, _, addresses, sizes in opened):
        raise ValueError("a column must have as many addresses and sizes as there are rows")
    parts: list[bytes] = []
    entries: list[tuple[int, int, int, int]] = []
    total, end = 0, row
    while end < stop:
        key, fields, values, numbers = keys[end], [], [], []
        for field, number, addresses, sizes in opened:
            if sizes[end] >= 0:
                fields.append(field)
                values.append(string_at(addresses[end], min(sizes[end], limit)))  # at the limit it is too large
                numbers.append(number)
        if not key or key[-1] == "/" or "." in key or "__" in key or "\0" in key:
            break
        members = plain_members(key, tuple(fields), values, limit)
        if members is None or (total and total + len(members) > most):
            break
        at = offset + total
        for number, value in zip(numbers, values):
            entries.append((sample, number & 0xFFFF, at + BLOCK, len(value)))
            at += BLOCK + len(value) + -len(value) % BLOCK
        parts.append(members)
        total, end, sample = total + len(members), end + 1, sample + 1
    arrays = [
        struct.pack(f"<{len(entries)}{code}", *each) for code, each in zip("IHQQ", list(zip(*entries)) or [()] * 4)
    ]
    return end, b"".join(parts), tuple(arrays)  # type: ignore[return-value]


@lru_cache(4096)
def _before_checksum(size: int) -> bytes:
    return b"%b%011o\0%b" % (MODE_AND_OWNER, size, TIME)


@lru_cache(4096)
def _from_checksum(adler: int) -> bytes:
    return b"%06o\0 %b" % (adler - 1 + AFTER_CHECKSUM_SUM, AFTER_CHECKSUM)
