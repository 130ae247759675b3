"""Make the index of a shard by reading its headers."""

from __future__ import annotations

import os
import struct
from collections import deque
from collections.abc import Iterator
from functools import partial
from operator import lt
from typing import TYPE_CHECKING, Any, TypeAlias
from zlib import crc32

from tarshards.errors import OpenError, TarError
from tarshards.index.members import check_fields
from tarshards.index.sidecar import Fault, Index, fingerprint, refuse_compressed
from tarshards.kernels._tar_py import READS
from tarshards.samples.keys import Split, key_rule, why_refused
from tarshards.storage.compression import bomb, without_pixz_index
from tarshards.storage.location import Location
from tarshards.storage.manifest import ArchiveEnd, Shard, check_end
from tarshards.storage.opening import open_shard
from tarshards.storage.ranges import Ranges
from tarshards.storage.streams import failure
from tarshards.tar.elsewhere import SpecialMembers, Step, UnresolvedError
from tarshards.tar.read import MEMBER_LIMIT, RECORD, Grouper, padding, read_members, scan_through, walk, warn_of_zeros

if TYPE_CHECKING:
    from tarshards.samples.grouping import OnDamage

REMOTE = 1 << 16, 1 << 22, 1 << 20  # READS of remote shards
Walked: TypeAlias = tuple[list[str], list[str], tuple[bytes, ...], int, int]  # the result of ``walk`` for a sound shard


def build_index(
    url: str | Location,
    *,
    crc: bool = False,
    concatenated: bool = False,
    end: ArchiveEnd = "required",
    split: Split = "first",
    on_damage: OnDamage = "end",
    walked: Walked | None = None,
) -> Index:
    """Return the index of the shard *url*; with *crc* it has the checksums of the members' data.

    With *concatenated* the shard may consist of several archives, which the index counts; with *end* "optional" it may
    end after any member, without zeros. Names are split into key and field at the *split*, the "first" or "last" dot of
    their base name. Only the headers of large members are read. Samples that ``read_samples`` refuses become
    ``faults``. *walked* is the result of ``walk`` for this shard, if it has just been called.

    With *on_damage* "resync" a damaged shard gets the index of all samples that are found past its damage, which is
    not to be saved: those that may lack members are ``faults``, and bytes that are no members ``gaps``; a remote shard
    is then copied. Otherwise this raises the error that ``read_samples`` raises for a damaged shard. Raises
    ShardIndexError for a compressed one, which has no random access, and OpenError for a stream.
    """
    location = Location.of(url)
    check_end(end)
    if on_damage != "end":
        from tarshards.samples.grouping import check_reading

        check_reading("skip", on_damage, end)
    shard = Shard.of(location)._replace(concatenated=concatenated, end=end, split=split)
    with FileRanges(location) if location.is_local else location.ranges() as ranges:
        refuse_compressed(ranges, location)
        index = _index(ranges, shard, walked)
        if index is None and on_damage == "resync":
            from tarshards.index.past_damage import index_past_damage

            index = index_past_damage(shard)
        if index is None:
            raise _reason(location, shard)
        if crc:
            index.arrays["crc32"] = struct.pack(f"<{len(index.sample)}I", *_checksums(ranges, index))
    return index


class FileRanges(Ranges):
    """A local file, read by system calls: for headers alone, mapping pages costs more than it saves."""

    remote = False

    def __init__(self, location: Location):
        self.name: str = location.name
        self._file: Any = location.open()
        self.descriptor: Any = self._file.fileno()
        self.size: int = os.fstat(self.descriptor).st_size

    def read(self, offset: int, size: int) -> bytes:
        data = os.pread(self.descriptor, size, offset)
        if len(data) < size:
            raise OpenError(f"read {len(data)} bytes instead of {size}", url=self.name, offset=offset)
        return data

    def close(self) -> None:
        self._file.close()


def _index(ranges: Ranges, shard: Shard, walked: Walked | None) -> Index | None:
    """Return the index of the *shard* in *ranges*, None if it is damaged."""
    split = shard.split or "first"
    source = ranges.descriptor if isinstance(ranges, FileRanges) else ranges.read
    try:
        options = _reads(ranges), MEMBER_LIMIT, key_rule(split), shard.concatenated
        found, length = walked or walk(source, ranges.size, *options), ranges.size
        if found is None and (length := without_pixz_index(length, ranges.read)) < ranges.size:
            found = walk(source, length, *options)
    except OpenError:
        raise
    except OSError as error:
        raise failure(error, ranges.name) from error
    if found is None:
        return None
    keys, fields, (sample, field, offset, size, twice, elsewhere), archives, end = found
    if not size and length == RECORD:
        warn_of_zeros(ranges.name)
    if end == length and (shard.end == "required" or length < ranges.size):
        return None
    check_fields(fields, ranges.name)
    arrays = {"sample": sample, "field": field, "offset": offset, "size": size}
    index = Index(ranges.size, fingerprint(ranges, offset), keys, fields, arrays, archives, end=end)
    index.split = split
    if not elsewhere and not twice and _are_different(keys):
        return index
    steps: dict[int, list[Step]] = {}
    unresolved: dict[int, UnresolvedError] = {}
    contents = SpecialMembers(ranges.read_up_to, bomb=partial(bomb, max_ratio=shard.location().remote.max_ratio))
    for member, header in struct.iter_unpack("<IQ", elsewhere):
        try:
            steps[member] = contents.find(header, whole=True)
        except UnresolvedError as error:
            unresolved[member] = error
    if folders := {member for member, found in steps.items() if not found}:  # links to them are in no sample
        index, kept = _without(index, folders)
        index.fingerprint = fingerprint(ranges, index.arrays["offset"])
        index.split = split
        steps = {number: steps[member] for number, member in enumerate(kept) if member in steps}
        unresolved = {number: unresolved[member] for number, member in enumerate(kept) if member in unresolved}
    index.elsewhere = steps
    index.faults = _faults(index, unresolved, ranges)
    return index


def _without(index: Index, left_out: set[int]) -> tuple[Index, list[int]]:
    """Return an index without some members, and the numbers of its members in *index*."""
    keys: list[str] = []
    samples: list[int] = []
    kept: list[int] = []
    for member, sample in enumerate(index.sample.tolist()):
        if member in left_out:
            continue
        if not keys or keys[-1] != index.keys[sample]:
            keys.append(index.keys[sample])
        samples.append(len(keys) - 1)
        kept.append(member)
    arrays = {name: getattr(index, name)[kept].tobytes() for name in index.arrays}
    arrays["sample"] = struct.pack(f"<{len(samples)}I", *samples)
    return Index(index.shard_size, 0, keys, index.fields, arrays, index.archives, end=index.end), kept


def _faults(index: Index, unresolved: dict[int, UnresolvedError], ranges: Ranges) -> dict[int, Fault]:
    """Return the samples that reading refuses; *unresolved* are the members without content, and why.

    The members are grouped as for reading: by their keys and fields, with their numbers as offsets, and without data.
    """
    samples = index.sample.tolist()
    names = ((index.keys[sample], index.fields[field]) for sample, field in zip(samples, index.field.tolist()))
    members = ((name, None if member in unresolved else b"", member) for member, name in enumerate(names))
    split: Any = tuple  # the names are already split
    grouper: Any = Grouper("", split, False)
    faults = {}
    while (found := grouper.next(members)) is not None:
        for *_, field, member in found[1]:
            start = int(index.offset[member - 1] + index.size[member - 1]) if member else 0
            header = header_offset(ranges, start + padding(start), int(index.offset[member]))
            faults[samples[member]] = Fault(why_refused(field, unresolved.get(member)), header, field)
    return faults


def _are_different(keys: list[str]) -> bool:
    """Return whether no key comes twice; quick for sorted keys, the usual case."""
    return all(map(lt, keys, keys[1:])) or len(set(keys)) == len(keys)


def header_offset(ranges: Ranges, start: int, stop: int) -> int:
    """Return the offset of the first header of the member after *start* whose data begins at *stop*."""
    found, *_ = scan_through(ranges.read(start, stop - start), 0, MEMBER_LIMIT)
    return start + found[-1][1]


def _reason(location: Location, shard: Shard) -> Exception:
    """Return the error that reading a damaged shard raises."""
    name = location.name
    try:
        with open_shard(location) as stream:
            marks: Any = {"concatenated": shard.concatenated, "end": shard.end}
            deque(read_members(stream, url=name, select=lambda _: False, **marks), 0)
    except Exception as error:
        return error
    return TarError("changed while it was being indexed", url=name)


def _reads(ranges: Ranges) -> tuple[int, int, int]:
    """Return how a shard is read: see READS."""
    return REMOTE if ranges.remote else READS


def _checksums(ranges: Ranges, index: Index) -> Iterator[int]:
    """Yield the CRC-32 of the data of each member."""
    base, data, most = 0, memoryview(b""), _reads(ranges)[1]
    for offset, size in zip(index.offset.tolist(), index.size.tolist()):
        value = 0
        while size:
            if not base <= offset < base + len(data):
                base = offset
                data = memoryview(ranges.read(base, min(most, index.shard_size - base)))
            part = data[offset - base : offset - base + size]
            value = crc32(part, value)
            offset += len(part)
            size -= len(part)
        yield value
