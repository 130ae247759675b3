"""The headers of a plain shard, scanned in one call: the counts that a check needs."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import compress, pairwise
from operator import ne
from typing import Any, NamedTuple

from tarshards.samples.keys import KeyRule, split_name
from tarshards.samples.resync.walking import LARGE, LEAST, MOST, Zeros, is_end
from tarshards.storage.opening import PlainFile
from tarshards.tar.read import BLOCK, MEMBER_LIMIT, walk

LARGEST = 1 << 30  # bytes of a shard whose headers are held in memory


class ScannedShard(NamedTuple):
    """The samples of a shard: the offset of each one's first header, and its form.

    A form is the indexes in *fields*, little-endian uint16, of a sample's fields; if all samples have the same form,
    *forms* has it once. *sizes* counts the sizes of each
    field in bytes. *walked* is the result of ``walk``.
    """

    keys: list[str]
    offsets: list[int]
    forms: list[bytes]
    fields: list[str]
    sizes: list[Counter[int]]
    walked: Any

    def first_of_each_form(self) -> Iterator[tuple[frozenset[str], int]]:
        """Yield the fields and the number of each sample that is the first of its form."""
        count = len(self.forms)
        first = dict(zip(reversed(self.forms), reversed(range(count))))
        for number in sorted(first.values()):
            field_numbers = struct.iter_unpack("<H", self.forms[number])
            yield frozenset(self.fields[field] for (field,) in field_numbers), number


def scan_headers(file: PlainFile, split: KeyRule = split_name) -> ScannedShard | None:
    """Scan the headers of a plain shard; return None for any other shard, which needs an inspection.

    A plain shard is intact and not too large. It contains only samples and one end of archive: no other members, no
    extended headers, and no names that some reader misreads.
    """
    if file.size > LARGEST:
        return None
    found = walk(file.descriptor, file.size, (LEAST, MOST, LARGE), MEMBER_LIMIT, split)
    if found is None or not found[0]:
        return None
    keys, fields, (*arrays, twice, elsewhere), *_ = found
    if twice or elsewhere or len(fields) > 1 << 16 or _is_odd(keys, fields):
        return None
    count, width = len(arrays[0]) // 4, len(fields)
    offsets, sizes = (struct.unpack(f"<{count}Q", data) for data in arrays[2:])
    form = struct.pack(f"<{width}H", *range(width))
    starts: Sequence[int]
    lists: list[Any]
    if len(keys) * width == count and arrays[1] == form * len(keys):  # no field twice, so all fields in each sample
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
    # Members do not overlap, so there is nothing between them if their lengths add up to the end of the last.
    end = offsets[-1] - BLOCK + _length(sizes[-1])
    total = sum(_length(size) * number for each in sizes_of for size, number in each.items())
    if total != end or not is_end(Zeros(end, file.size), 0, file):
        return None
    if any(file.read(end, file.size - end)):  # other members after the last one
        return None
    return ScannedShard(keys, [offsets[start] - BLOCK for start in starts], forms, fields, sizes_of, found)


def _length(size: int) -> int:
    """Return the bytes of a member with its header and padding."""
    return (size + 2 * BLOCK - 1) & -BLOCK


def _is_odd(keys: list[str], fields: list[str]) -> bool:
    """Return whether any name may be one that DALI misreads."""
    text = "\0".join(keys + fields)
    return text.split() != [text] or "" in fields or max(map(len, keys)) + max(map(len, fields)) >= 100
