"""A shard's headers -> its index."""

from __future__ import annotations

import os
import struct
from collections import deque
from collections.abc import Iterator
from operator import lt
from typing import Any
from zlib import crc32

from tarshards.errors import OpenError, ShardIndexError, TarError
from tarshards.index.members import check_fields
from tarshards.index.sidecar import Index, fingerprint
from tarshards.samples.keys import split_name
from tarshards.storage.compression import find_compression
from tarshards.storage.location import Location
from tarshards.storage.opening import open_shard
from tarshards.storage.ranges import Ranges
from tarshards.storage.streams import failure
from tarshards.tar.read import MEMBER_LIMIT, read_members, scan, walk

# Bytes read at once, at least and at most, and the bytes of a member from which its data is passed over.
LOCAL = 2 << 10, 1 << 19, 1 << 15
REMOTE = 1 << 16, 1 << 22, 1 << 20
NO_FIELDS = {"__key__", "__url__"}  # which have a meaning of their own in a sample
WINDOW = 1 << 22  # bytes read at once for checksums


def build_index(url: str, *, crc: bool = False) -> Index:
    """Return the index of the shard *url*, with *crc* with the checksums of the data.

    Where members are large only their headers are read. What is no sound shard of samples raises the error that
    ``read_samples`` raises; a compressed shard, which has no random access, ShardIndexError; a stream, OpenError.
    """
    location = Location.of(url)
    with FileRanges(location) if location.is_local else location.ranges() as ranges:
        if compression := find_compression(ranges.read(0, min(10, ranges.size))):
            name = location.name
            plain = name[: -len(os.path.splitext(name)[1])].removesuffix(".tar") + ".tar"
            reason = f"compressed ({compression}), so it has no random access; decompress it: tarcat {name} -o {plain}"
            raise ShardIndexError(reason, url=name)
        index = _index(ranges)
        if index is None:
            raise _reason(location)
        if crc:
            index.arrays["crc32"] = struct.pack(f"<{len(index.sample)}I", *_checksums(ranges, index))
    return index


class FileRanges(Ranges):
    """A local file, read by system calls: for headers alone the pages of a mapping cost more than they save."""

    remote = False

    def __init__(self, location: Location):
        self.name = location.name
        self._file: Any = location.open()
        self.descriptor = self._file.fileno()
        self.size = os.fstat(self.descriptor).st_size

    def read(self, offset: int, size: int) -> bytes:
        data = os.pread(self.descriptor, size, offset)
        if len(data) < size:
            raise OpenError(f"{len(data)} of {size} bytes came", url=self.name, offset=offset)
        return data

    def close(self) -> None:
        self._file.close()


def _index(ranges: Ranges) -> Index | None:
    """Return the index of the shard in *ranges*, None where it is no sound shard of samples."""
    source = ranges.descriptor if isinstance(ranges, FileRanges) else ranges.read
    try:
        found = walk(source, ranges.size, REMOTE if ranges.remote else LOCAL, MEMBER_LIMIT, split_name)
    except OSError as error:
        raise failure(error, ranges.name) from error
    if found is None:
        return None
    keys, fields, (sample, field, offset, size) = found
    if not _are_different(keys) or NO_FIELDS & set(fields):
        return None
    check_fields(fields, ranges.name)
    arrays = {"sample": sample, "field": field, "offset": offset, "size": size}
    return Index(ranges.size, fingerprint(ranges, offset), keys, fields, arrays)


def _are_different(keys: list[str]) -> bool:
    """Say whether no key comes twice: sorted ones, the usual case, are told quickly."""
    return all(map(lt, keys, keys[1:])) or len(set(keys)) == len(keys)


def header_offset(ranges: Ranges, start: int, stop: int) -> int:
    """Return where the first header of the member begins whose data begins at *stop*; another ends at *start*."""
    found, *_ = scan(ranges.read(start, stop - start), 0, False, MEMBER_LIMIT)
    return start + found[-1][1]


def _reason(location: Location) -> Exception:
    """Return the error with which reading a damaged shard ends."""
    from tarshards.samples.read import group_members

    name = location.name
    try:
        with open_shard(location) as stream:
            deque(group_members(read_members(stream, url=name), url=name), 0)
    except Exception as error:
        return error
    return TarError("changed while it was indexed", url=name)


def _checksums(ranges: Ranges, index: Index) -> Iterator[int]:
    """Yield the CRC-32 of the data of each member."""
    base, window = 0, memoryview(b"")
    for offset, size in zip(index.offset.tolist(), index.size.tolist()):
        value = 0
        while size:
            if not base <= offset < base + len(window):
                base = offset
                window = memoryview(ranges.read(base, min(WINDOW, index.shard_size - base)))
            part = window[offset - base : offset - base + size]
            value = crc32(part, value)
            offset += len(part)
            size -= len(part)
        yield value
