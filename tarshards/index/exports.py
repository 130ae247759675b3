"""Indexes in the formats of other programs: DALI's, and the ``.tar.idx`` of Energon."""

from __future__ import annotations

import re

import numpy as np

from tarshards.errors import ShardIndexError
from tarshards.index.build import header_offset
from tarshards.index.manifests import TO_DISK, Writing
from tarshards.index.sidecar import Index
from tarshards.storage.location import Location
from tarshards.storage.ranges import Ranges
from tarshards.tar.read import BLOCK


def pack_dali(index: Index, url: str) -> str:
    """Return the text that DALI's ``wds2idx`` 1.2 writes: a line per sample, ``field offset size name`` per member.

    Raises ShardIndexError for a name that DALI would misread: one with white space, or without a field.
    """
    lines: list[list[str]] = [[] for _ in index.keys]
    columns = (index.sample.tolist(), index.field.tolist(), index.offset.tolist(), index.size.tolist())
    for sample, number, offset, size in zip(*columns):
        key, field = index.keys[sample], index.fields[number]
        name = f"{key}.{field}"
        if not field or re.search(r"\s", name):
            reason = "DALI misreads names with white space or a dot at the end; rename with `tarcat --rekey`"
            raise ShardIndexError(reason, url=Location.of(url).name, key=key, field=field)
        lines[sample].append(f"{field} {offset} {size} {name}")
    return "".join(f"{line}\n" for line in [f"v1.2 {len(index)}", *map(" ".join, lines)])


def pack_offsets(index: Index, ranges: Ranges) -> bytes:
    """Return the content of a ``.tar.idx``: the offset of each sample and of the end, as little-endian uint64."""
    return sample_bounds(index, ranges).astype("<u8").tobytes()


def sample_bounds(index: Index, ranges: Ranges) -> np.ndarray:
    """Return the offset of each sample's first header, then the end of the last member with its padding; int64."""
    if not len(index):
        return np.zeros(1, np.int64)
    ends = (index.offset + index.size + np.uint64(BLOCK - 1)).astype(np.int64) // BLOCK * BLOCK
    first = index.first[:-1]
    starts = index.offset[first].astype(np.int64) - BLOCK
    before = np.concatenate([[0], ends[first[1:] - 1]])
    for sample in np.flatnonzero(before < starts).tolist():  # extended headers, or members outside samples
        starts[sample] = header_offset(ranges, int(before[sample]), int(starts[sample]) + BLOCK)
    return np.append(starts, ends[-1])


def write_dali(index: Index, shard: str | Location, folder: str | None, how: Writing = TO_DISK) -> str:
    """Write DALI's index of *shard* beside it or into *folder*: ``a.tar`` gets ``a.idx``; return its name."""
    location = Location.of(shard)
    target = location.with_base(location.base.removesuffix(".tar") + ".idx")
    return how.write(_inside(folder, target), pack_dali(index, location.url).encode("utf-8", "surrogateescape"))


def write_offsets(index: Index, shard: str | Location, folder: str | None, how: Writing = TO_DISK) -> str:
    """Write the ``.tar.idx`` of *shard* beside it or into *folder*; return its name."""
    location = Location.of(shard)
    with location.ranges() as ranges:
        return how.write(_inside(folder, location.sibling(".idx")), pack_offsets(index, ranges))


def _inside(folder: str | None, file: Location) -> Location:
    """Return *file*, or the one of its name in *folder*."""
    return file if folder is None else file.at(f"{folder.rstrip('/')}/{file.base}")
