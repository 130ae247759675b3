"""Scan the headers of a plain shard in one call, for the counts that a check needs."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import compress, pairwise
from operator import ne
from typing import Any, NamedTuple

from tarshards.kernels._tar_py import READS
from tarshards.samples.keys import KeyRule, split_name
from tarshards.samples.resync.walking import Zeros, is_end
from tarshards.storage.opening import PlainFile
from tarshards.tar.read import BLOCK, MEMBER_LIMIT, walk

LARGEST = 1 << 30  # bytes of a shard whose headers are held in memory


class ScannedShard(NamedTuple):
    """The samples of a plain shard: the key, the offset of the first header, and the form of each.

    A form is the fields of a sample, as their indexes in *fields* (little-endian uint16); if all samples have the same
    form, *forms* has it once. *sizes* counts, for each of *fields*, its sizes in bytes. *walked* is the result of
    ``walk``.
    """

    keys: list[str]
    offsets: list[int]
    forms: list[bytes]
    fields: list[str]
    sizes: list[Counter[int]]
    walked: Any

    def first_of_each_form(self) -> Iterator[tuple[frozenset[str], int]]:
        """Yield, for each form, its fields and the number of the first sample that has it."""
        count = len(self.forms)
        first = dict(zip(reversed(self.forms), reversed(range(count))))
        for number in sorted(first.values()):
            field_numbers = struct.iter_unpack("<H", self.forms[number])
            yield frozenset(self.fields[field] for (field,) in field_numbers), number


def scan_headers(file: PlainFile, split: KeyRule = split_name) -> ScannedShard | None:
    """Scan the headers of a plain shard; return None for any other shard, which must be inspected sample by sample.

    A plain shard is intact and has at most LARGEST bytes. It contains only samples and one end of archive: no other
    members, no extended headers, no decompression bombs, and no names that DALI may misread.
    """
    if file.size > LARGEST:
        return None
    found = walk(file.descriptor, file.size, READS, MEMBER_LIMIT, split)
    if found is None or not found[0]:
        return None
    keys, fields, (*arrays, twice, elsewhere), *_ = found
    if twice or elsewhere or len(fields) > 1 << 16 or _may_be_misread(keys, fields):
        return None
    count, width = len(arrays[0]) // 4, len(fields)
    offsets, sizes = (struct.unpack(f"<{count}Q", data) for data in arrays[2:])
    if file.bomb(max(sizes), max(sizes)):
        return None
    form = struct.pack(f"<{width}H", *range(width))
    starts: Sequence[int]
    lists: list[Any]
    if len(keys) * width == count and arrays[1] == form * len(keys):  # no field twice in a sample, so all in each
        starts, forms = range(0, count, width), [form]
        lists = [sizes[number::width] for number in range(width)]
    else:
        samples, numbers = struct.unpack(f"<{count}I", arrays[0]), struct.unpack(f"<{count}H", arrays[1])
        starts = [0, *compress(range(1, count), map(ne, samples, samples[1:]))]
        forms = [arrays[1][2 * start : 2 * stop] for start, stop in pairwise([*starts, count])]
        lists = [[] for _ in fields]
        for number, size in zip(numbers, sizes):
            lists[number].append(size)
    sizes_of: list[Counter[int]] = list(map(Counter, lists))
    # Members do not overlap, so nothing lies between them if their lengths add up to the end of the last.
    end = offsets[-1] - BLOCK + _length(sizes[-1])
    total = sum(_length(size) * number for each in sizes_of for size, number in each.items())
    if total != end or not is_end(Zeros(end, file.size), 0, file):
        return None
    if any(file.read(end, file.size - end)):  # other members after the last one
        return None
    return ScannedShard(keys, [offsets[start] - BLOCK for start in starts], forms, fields, sizes_of, found)


def _length(size: int) -> int:
    """Return the bytes that a member of *size* bytes takes with its header and padding."""
    return (size + 2 * BLOCK - 1) & -BLOCK


def _may_be_misread(keys: list[str], fields: list[str]) -> bool:
    """Return whether DALI may misread any of the names."""
    text = "\0".join(keys + fields)
    return text.split() != [text] or "" in fields or max(map(len, keys)) + max(map(len, fields)) >= 100
