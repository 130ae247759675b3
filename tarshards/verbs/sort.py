"""Sort or shuffle any number of samples: an external merge sort within a given amount of memory.

The excess is spilled, as sorted runs, to unnamed files, which disappear when the process ends, even if it is killed.
"""

from __future__ import annotations

import os
import pickle
import re
import sys
import tempfile
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

from tarshards.epoch.splitmix import splitmix64
from tarshards.errors import OpenError, SampleError
from tarshards.samples.codecs.basic import decode_text
from tarshards.samples.fields import pick_field
from tarshards.samples.keys import DUPLICATE_FIELD, NO_FIELDS, KeyRule, Sample, split_name, why_skipped
from tarshards.samples.ledger import Ledger, OnError, Reject, reject_or_raise
from tarshards.storage.expressions import find_shards
from tarshards.storage.opening import open_shard
from tarshards.storage.streams import failure, temporary
from tarshards.tar.read import Member, read_members

GIB = 1 << 30
SHARE = 6  # a run gets 1/6 of the memory; the rest is for Python, and for the keys of a large shard
FAN_IN = 64  # at most this many runs are merged at once
RECORD = 170  # bytes of overhead of a record and its sort key: tuple, list, allocator

Record = tuple[Any, bytes]  # a sort key, and the pickled value
LeaveOut = Callable[[str], Any]


class SortKey(NamedTuple):
    """A sort key: a field, or alternatives like ``jpg;png``, and the kind of its values."""

    field: str
    kind: str = "text"


def parse_sort_key(spec: str) -> SortKey:
    """Parse ``FIELD[:text|int|float|natural]``; raise ValueError for another kind.

    >>> parse_sort_key("cls:int"), parse_sort_key("txt")
    (SortKey(field='cls', kind='int'), SortKey(field='txt', kind='text'))
    """
    field, colon, kind = spec.partition(":")
    key = SortKey(field, kind) if colon else SortKey(field)
    if not all(field.split(";")) or key.kind not in KINDS:
        raise ValueError(f"{spec!r} is not a sort key; write FIELD or FIELD:KIND, where KIND is {', '.join(KINDS)}")
    return key


def natural(text: str) -> tuple[Any, ...]:
    """Return a sort key for *text* by which the numbers in it compare as numbers.

    >>> sorted(["b10", "b9", "a"], key=natural)
    ['a', 'b9', 'b10']
    """
    parts: list[Any] = re.split("([0-9]+)", text)
    parts[1::2] = map(int, parts[1::2])
    return tuple(parts)


def _float(text: str) -> float:
    number = float(text)
    if number != number:
        raise ValueError("nan cannot be ordered")
    return number


KINDS: dict[str, Callable[[str], Any]] = {"text": str, "int": int, "float": _float, "natural": natural}


def sort_samples(
    samples: Iterable[Sample],
    *,
    keys: Iterable[str] = ("__key__",),
    reverse: bool = False,
    unique: str | None = None,
    memory: int = GIB,
    tmpdir: str | None = None,
    reject: Reject | None = None,
    leave_out: LeaveOut | None = None,
) -> Iterator[Sample]:
    """Yield *samples* sorted by *keys*, each ``FIELD[:text|int|float|natural]``; equal samples keep their order.

    Text sorts by code points. A sample that lacks a field, or whose value does not parse, raises SampleError, or is
    passed to *reject* with the error and left out. If several samples have the same ``__key__``, *unique* keeps the
    "first" or the "last", or raises SampleError ("error"); *leave_out* is called with "repeated key" for each of the
    others. Uses about *memory* bytes, and spills the rest to *tmpdir*. Raises ValueError for malformed *keys*.

    >>> [sample["__key__"] for sample in sort_samples([{"__key__": "b"}, {"__key__": "a"}])]
    ['a', 'b']
    """
    parsed = [parse_sort_key(key) for key in keys]
    pairs: Iterator[tuple[Any, Sample]]
    if unique is None:
        pairs = _with_keys(((0, sample) for sample in samples), parsed, 0, reject)
    else:
        chosen = _unique(samples, unique, memory, tmpdir, leave_out)
        pairs = _with_keys(chosen, parsed, -1 if reverse else 1, reject)
    return map(itemgetter(1), merge_sort(pairs, reverse=reverse, memory=memory, tmpdir=tmpdir))


def join_parts(samples: Iterable[Sample]) -> Iterator[Sample]:
    """Yield *samples*, which are sorted by key; those of a key and a shard that share no field become one.

    >>> parts = [{"__key__": "a", "__url__": "x", "txt": b""}, {"__key__": "a", "__url__": "x", "cls": b""}]
    >>> [sorted(sample) for sample in join_parts(parts)]
    [['__key__', '__url__', 'cls', 'txt']]
    """
    held: Sample | None = None
    for sample in samples:
        if held is not None and _are_parts(held, sample):
            held |= sample
            continue
        if held is not None:
            yield held
        held = sample
    if held is not None:
        yield held


def _are_parts(one: Sample, other: Sample) -> bool:
    same = one["__key__"] == other["__key__"] and one["__url__"] == other["__url__"]
    return same and one.keys() & other.keys() == NO_FIELDS


def shuffle_samples(
    samples: Iterable[Sample],
    *,
    seed: int = 0,
    unique: str | None = None,
    memory: int = GIB,
    tmpdir: str | None = None,
    leave_out: LeaveOut | None = None,
) -> Iterator[Sample]:
    """Yield *samples* in a uniformly random order, which depends only on *seed* and the number of samples.

    *unique*, *memory*, *tmpdir* and *leave_out* are as in ``sort_samples``.
    """
    if unique is not None:
        samples = map(itemgetter(1), _unique(samples, unique, memory, tmpdir, leave_out))
    start = splitmix64(seed)
    pairs = ((splitmix64(start + index), sample) for index, sample in enumerate(samples))
    return map(itemgetter(1), merge_sort(pairs, memory=memory, tmpdir=tmpdir))


def regroup_members(
    members: Iterable[tuple[str, Member]],
    *,
    ledger: Ledger | None = None,
    split: KeyRule = split_name,
    memory: int = GIB,
    tmpdir: str | None = None,
) -> Iterator[Sample]:
    """Yield one sample for all members of a key, adjacent or not, in the order of the keys' first members.

    *members* are pairs of a shard's URL and a member. A sample with a duplicate field is left out, and a SampleError
    raised, or passed to *ledger*. *memory* and *tmpdir* are as in ``sort_samples``.

    >>> members = [("x.tar", Member(name, b"", 0)) for name in ("b.jpg", "a.jpg", "b.cls")]
    >>> [(sample["__key__"], len(sample) - 2) for sample in regroup_members(members)]
    [('b', 2), ('a', 1)]
    """
    ledger = Ledger() if ledger is None else ledger
    by_key = merge_sort(_keyed(members, split, ledger), memory=memory, tmpdir=tmpdir)
    groups = ([value for _, value in group] for _, group in groupby(by_key, key=itemgetter(0)))
    firsts = ((group[0][0], sample) for group in groups if (sample := _join(group, ledger)) is not None)
    for _, sample in merge_sort(firsts, memory=memory, tmpdir=tmpdir):
        ledger.count(samples=1, members=len(sample) - 2)
        yield sample


def read_loose_members(urls: Any, *, ledger: Ledger) -> Iterator[tuple[str, Member]]:
    """Yield the shard's URL and the member, for each member of all shards.

    Every error is raised, since after a skipped one samples would lack members.
    """
    for shard in find_shards(urls):
        location = shard.location()
        name = location.name
        try:
            with open_shard(location) as stream:
                members = read_members(
                    stream,
                    url=name,
                    end=shard.end,
                    concatenated=shard.concatenated,
                    ledger=ledger,
                    keep_headers=shard.keep_headers,
                )
                for member in members:
                    yield name, member
        except OpenError:
            raise
        except OSError as error:
            raise failure(error, name) from error
        ledger.count(shards=1)


def _keyed(
    members: Iterable[tuple[str, Member]], split: KeyRule, ledger: Ledger
) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield the key of each member with its index in the input, URL, key, field, offset and data."""
    for index, (url, member) in enumerate(members):
        parts = split(member.name)
        if parts is None:
            ledger.skip(why_skipped(member.name))
        else:
            yield parts[0], (index, url, *parts, member.offset, member.data)


def _join(group: list[tuple[Any, ...]], on_error: OnError) -> Sample | None:
    """Return the sample of *group*, the members of one key; None if a field is duplicate and *on_error* returns."""
    _, url, key, *_ = group[0]
    sample: Sample = {"__key__": key, "__url__": url}
    for _, url, _, field, offset, data in group:
        if field in sample:
            on_error(SampleError(DUPLICATE_FIELD, url=url, offset=offset, key=key, field=field))
            return None
        sample[field] = data
    return sample


def _with_keys(
    numbered: Iterable[tuple[int, Sample]], keys: list[SortKey], direction: int, reject: Reject | None
) -> Iterator[tuple[Any, Sample]]:
    """Yield the sort key of each sample, and the sample; its number times *direction*, unless 0, breaks ties."""
    for number, sample in numbered:
        try:
            values = [_sort_value(sample, key) for key in keys]
        except SampleError as error:
            reject_or_raise(reject, sample, error)
        else:
            if direction:
                values.append(direction * number)
            yield values[0] if len(values) == 1 else tuple(values), sample


def _sort_value(sample: Sample, key: SortKey) -> Any:
    field = pick_field(sample, key.field.split(";"))
    value = sample[field]
    try:
        return KINDS[key.kind](decode_text(value) if isinstance(value, bytes) else str(value))
    except ValueError as error:
        raise SampleError(f"not a sortable {key.kind}: {error}", field=field).at(sample) from error


def _unique(
    samples: Iterable[Sample], keep: str, memory: int, tmpdir: str | None, leave_out: LeaveOut | None
) -> Iterator[tuple[int, Sample]]:
    """Yield one sample for each ``__key__``, with its number, sorted by key; *keep* is the *unique* of the callers."""
    if keep not in ("first", "last", "error"):
        raise ValueError(f'unique is "first", "last" or "error", not {keep!r}')
    pairs = ((sample["__key__"], (index, sample)) for index, sample in enumerate(samples))
    for key, group in groupby(merge_sort(pairs, memory=memory, tmpdir=tmpdir), key=itemgetter(0)):
        chosen: Any = None
        for _, numbered in group:
            if chosen is not None and keep == "error":
                raise SampleError("duplicate key", url=numbered[1].get("__url__"), key=key)
            if chosen is not None and leave_out is not None:
                leave_out("repeated key")
            if chosen is None or keep == "last":
                chosen = numbered
        yield chosen


def merge_sort(
    pairs: Iterable[tuple[Any, Any]], *, reverse: bool = False, memory: int = GIB, tmpdir: str | None = None
) -> Iterator[tuple[Any, Any]]:
    """Yield *pairs* of a sort key and a value, sorted by key; the sort is stable, even with *reverse*.

    Values beyond about *memory* bytes are pickled to files in *tmpdir*. Raises OpenError if these cannot be written.

    >>> list(merge_sort([(2, "b"), (1, "a"), (2, "c")], reverse=True))
    [(2, 'b'), (2, 'c'), (1, 'a')]
    """
    budget = memory // SHARE
    spill: _Spill | None = None
    run: list[Record] = []
    used = 0
    try:
        for key, value in pairs:
            record = pickle.dumps(value, 5)
            run.append((key, record))
            used += len(record) + RECORD + _sizeof(key)
            if used > budget:
                spill = spill or _Spill(tmpdir, budget)
                run.sort(key=itemgetter(0), reverse=reverse)
                spill.add(run)
                run, used = [], 0
        run.sort(key=itemgetter(0), reverse=reverse)
        if spill is None:
            run.reverse()
            while run:  # popping frees the memory of each record after use
                key, record = run.pop()
                yield key, pickle.loads(record)
            return
        spill.add(run)
        del run
        while len(spill.runs) > (fan_in := max(2, min(FAN_IN, budget // (spill.largest + 1)))):
            with spill:
                spill = spill.merged(fan_in, reverse)
        for key, record in spill.merge(spill.runs, reverse):
            yield key, pickle.loads(record)
    finally:
        if spill is not None:
            spill.close()


def _sizeof(key: Any) -> int:
    return sys.getsizeof(key) + (sum(map(_sizeof, key)) if isinstance(key, tuple) else 0)


class _Spill:
    """A file of sorted runs, each in chunks; a chunk is a pickled list of records.

    ``largest`` is the size of the largest chunk in bytes.
    """

    def __init__(self, tmpdir: str | None, budget: int):
        self.tmpdir, self.budget = tmpdir, budget
        self.chunk_bytes = min(max(budget // FAN_IN, 1 << 12), 1 << 18)  # bytes of records at which a chunk is written
        self.runs: list[array[int]] = []  # for each run, the offsets of its chunks, and the end of the last
        self.largest = 0
        with temporary(tmpdir):
            self.file = tempfile.TemporaryFile(dir=tmpdir, prefix="tarsort-")  # noqa: SIM115 (closed by close)
        self._pickler = pickle.Pickler(self.file, 5)
        self._pickler.fast = True  # no object occurs twice in a chunk

    def add(self, run: Iterable[Record]) -> None:
        """Append a run: records that are sorted by key."""
        begin = self.file.tell()
        offsets = array("Q", [begin])
        chunk: list[Record] = []
        size = 0
        with temporary(self.tmpdir):
            for record in run:
                chunk.append(record)
                size += len(record[1])
                if size >= self.chunk_bytes:
                    self._write(chunk, offsets)
                    chunk, size = [], 0
            if chunk:
                self._write(chunk, offsets)
            self.file.flush()
        if len(offsets) > 1:
            self.runs.append(offsets)

    def _write(self, chunk: list[Record], offsets: array[int]) -> None:
        self._pickler.dump(chunk)
        offsets.append(self.file.tell())
        self.largest = max(self.largest, offsets[-1] - offsets[-2])

    def merged(self, fan_in: int, reverse: bool) -> _Spill:
        """Return a new spill in which each run merges *fan_in* consecutive runs of this one."""
        spill = _Spill(self.tmpdir, self.budget)
        try:
            for first in range(0, len(self.runs), fan_in):
                spill.add(self.merge(self.runs[first : first + fan_in], reverse))
        except BaseException:
            spill.close()
            raise
        return spill

    def merge(self, runs: list[array[int]], reverse: bool) -> Iterator[Record]:
        """Yield the records of *runs* in order; among equal keys, those of an earlier run come first.

        Each step yields the records that precede all unread chunks: those up to the first of the last keys of the
        chunks in memory. Sorting them merges the runs, since Python's sort detects sorted runs.
        """
        sources = [map(self._read, run, run[1:]) for run in runs]
        held = [next(source, []) for source in sources]
        while left := [number for number, chunk in enumerate(held) if chunk]:
            shortest = (max if reverse else min)(left, key=lambda number: held[number][-1][0])
            end = held[shortest][-1][0]
            certain: list[Record] = []
            for number in left:
                chunk = held[number]
                size = _count_before(chunk, end, reverse, equal=number <= shortest)
                certain += chunk[:size]
                held[number] = chunk[size:] or next(sources[number], [])
            certain.sort(key=itemgetter(0), reverse=reverse)
            yield from certain

    def _read(self, begin: int, end: int) -> list[Record]:
        records: list[Record] = pickle.loads(os.pread(self.file.fileno(), end - begin, begin))
        return records

    def close(self) -> None:
        """Close the file, which deletes it."""
        with suppress(OSError):  # a full disk, which has been reported
            self.file.close()

    def __enter__(self) -> _Spill:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _count_before(chunk: list[Record], key: Any, reverse: bool, *, equal: bool) -> int:
    """Return how many records of a sorted chunk precede *key*; records with this key count if *equal*."""
    if reverse:
        return len(chunk) - (bisect_left if equal else bisect_right)(chunk[::-1], key, key=itemgetter(0))
    return (bisect_right if equal else bisect_left)(chunk, key, key=itemgetter(0))
