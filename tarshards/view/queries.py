"""Which samples a page shows, and in which order: filters, sorting, duplicates, and batches of an epoch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from threading import RLock
from time import monotonic
from typing import Any

import numpy as np

from tarshards.errors import ShardIndexError, TarshardsError
from tarshards.index.sidecar import Index
from tarshards.index.where import by_columns
from tarshards.samples.conditions import Condition
from tarshards.samples.fields import find_field
from tarshards.view.epoch_batches import EpochBatches
from tarshards.view.viewed_shards import ViewedShards, parse_number

AT_ONCE = 1 << 10  # samples tested between two checks of the time
MOST = 10_000_000  # most samples in the result of a query
HELD = 8  # queries whose results are kept


@dataclass(frozen=True)
class Query:
    """A query, as in the address of the page; "" is no restriction.

    - *match*: a part of the key; *field*: a field that samples must have; *where*: a condition
    - *sizes*: ``FIELD:LEAST-MOST``, the bytes of a field; *shard*: the number of a shard
    - *duplicates*: "key" or "content" (by the checksums in indexes) for samples that occur more than once
    - *order*: "key", "size", "size:FIELD" or a column, with "-" before it for descending values
    - *step*: a batch of the epoch that *epoch*, as JSON, describes; see ``EpochBatches``

    A search with malformed values raises ValueError.
    """

    match: str = ""
    field: str = ""
    where: str = ""
    sizes: str = ""
    shard: str = ""
    duplicates: str = ""
    order: str = ""
    step: str = ""
    epoch: str = ""

    @classmethod
    def of(cls, parameters: Mapping[str, str]) -> Query:
        return cls(**{each.name: parameters[each.name] for each in fields(cls) if parameters.get(each.name)})

    def __bool__(self) -> bool:
        return self != Query()


class Found:
    """The samples that match a *query*; the search proceeds only as far as requested.

    ``numbers`` are the samples found so far. *searched* counts the tested samples, *failed* those that could not be
    tested, and *reason* is the first error. Threads may share the object.
    """

    def __init__(self, viewed: ViewedShards, query: Query, epochs: EpochBatches):
        self.viewed = viewed
        self.query = query
        self.epochs = epochs
        self.is_done: bool = False
        self.searched: int = 0
        self.failed: int = 0
        self.reason: str = ""
        self.about: dict[str, Any] = {}  # further data for the page, such as the number of batches in the epoch
        self._parts: list[np.ndarray] = []
        self._total = 0
        self._error: Exception | None = None
        self._lock = RLock()
        self._search = self._begin()

    @property
    def numbers(self) -> np.ndarray:
        with self._lock:
            if len(self._parts) != 1:
                self._parts = [np.concatenate([np.zeros(0, np.int64), *self._parts])]
            return self._parts[0]

    def advance(self, samples: int, seconds: float) -> None:
        """Search until this many *samples* are found or *seconds* have passed.

        An error ends the search; each later call raises it again.
        """
        with self._lock:
            if self._error is not None:
                raise self._error.with_traceback(None)
            try:
                self._advance(samples, monotonic() + seconds)
            except Exception as error:
                self._error = error
                raise

    def _advance(self, samples: int, end: float) -> None:
        while not self.is_done and self._total < samples and monotonic() < end:
            part = next(self._search, None)
            if part is not None and self._total < MOST:
                self._parts.append(part)
                self._total += len(part)
                continue
            if self.query.duplicates:
                self._parts = [self._repeated(self.numbers)]
            if self.query.order:
                self._parts = [self._ordered(self.numbers)]
            self.is_done = True

    # The search.

    def _begin(self) -> Iterator[np.ndarray]:
        if self.query.step:
            numbers, self.about = self.epochs.find(self.query.epoch, self.query.step)
            return iter([numbers])
        return self._judged()

    def _judged(self) -> Iterator[np.ndarray]:
        viewed, query = self.viewed, self.query
        condition = Condition(query.where) if query.where else None
        meeting: np.ndarray | None = None  # by the columns of all samples
        if condition is not None and viewed.sequence is not None:
            meeting = by_columns(viewed.sequence, condition, on_error=self._fail)
        chosen: Iterable[int] = range(len(viewed.shards))
        if query.shard:
            chosen = [parse_number("shard", query.shard, len(viewed.shards))]
        for shard in chosen:
            while viewed.known_shards <= shard:
                viewed.extend(viewed.total + 1)
            count, begin = viewed.count(shard), viewed.begin(shard)
            if not count:
                continue
            try:
                index = viewed.index(shard)
            except TarshardsError as error:
                self._fail(error, count)
                continue
            kept = self._by_index(shard, index, np.ones(count, np.bool_))
            for at in range(0, count, AT_ONCE):
                some = at + np.flatnonzero(kept[at : at + AT_ONCE])
                if query.match:
                    some = some[[query.match in index.key(sample) for sample in some.tolist()]] if len(some) else some
                found = begin + some
                if meeting is not None:
                    found = found[meeting[found]]
                elif condition is not None and len(found):
                    found = self._meets(condition, found)
                self.searched += min(AT_ONCE, count - at)
                yield found

    def _by_index(self, shard: int, index: Index, kept: np.ndarray) -> np.ndarray:
        """Return which of the *kept* samples have the field, in the range of sizes."""
        name, least, most = parse_sizes(self.query.sizes) if self.query.sizes else (self.query.field, 0, 1 << 62)
        for field in {self.query.field, name} - {""}:
            members = members_of(self.viewed, shard, index, field)
            if field == name:
                members = members[(members[:, 3] >= least) & (members[:, 3] <= most)]
            mask = np.zeros(len(kept), np.bool_)
            mask[members[:, 0]] = True
            kept = kept & mask
        return kept

    def _meets(self, condition: Condition, numbers: np.ndarray) -> np.ndarray:
        """Return the samples that meet a condition, which needs more than columns."""
        mask = np.zeros(len(numbers), np.bool_)
        for at, sample in enumerate(self.viewed.read(numbers, condition.fields())):
            try:
                if isinstance(sample, TarshardsError):
                    raise sample
                mask[at] = condition(sample)
            except TarshardsError as error:
                self._fail(error)
        return numbers[mask]

    def _fail(self, error: Exception, samples: int = 1) -> None:
        self.failed += samples
        self.reason = self.reason or str(error)

    # Orders and filters that require the whole result.

    def _repeated(self, numbers: np.ndarray) -> np.ndarray:
        """Return the samples that occur more than once, with equal ones side by side."""
        value_of = {"key": self._key, "content": self._content}.get(self.query.duplicates)
        if value_of is None:
            raise ValueError(f'duplicates are found by "key" or "content", not {self.query.duplicates!r}')
        values = [value_of(number) for number in numbers.tolist()]
        counts = Counter(values)
        repeated = [(value, number) for value, number in zip(values, numbers.tolist()) if counts[value] > 1]
        return np.array([number for _, number in sorted(repeated)], np.int64)

    def _key(self, number: int) -> Any:
        shard, sample = self.viewed.address(number)
        return self.viewed.index(shard).key(sample)

    def _content(self, number: int) -> Any:
        shard, sample = self.viewed.address(number)
        index = self.viewed.index(shard)
        if index.crc32 is None:
            raise ShardIndexError("the index has no checksums; add them with `tarindex --crc`", url=index.url)
        members = slice(*index.span(sample))
        names = [index.fields[field] for field in index.field[members].tolist()]
        return tuple(sorted(zip(names, index.size[members].tolist(), index.crc32[members].tolist())))

    def _ordered(self, numbers: np.ndarray) -> np.ndarray:
        word = self.query.order.removeprefix("-")
        kind, _, field = word.partition(":")
        if word == "key":
            keys = [self._key(number) for number in numbers.tolist()]
            order = np.array(sorted(range(len(keys)), key=keys.__getitem__), np.int64)
        elif kind == "size":
            order = np.argsort(self._sizes(numbers, field), kind="stable")
        else:
            values = column_of(self.viewed, word)[numbers]
            order = np.argsort(values, kind="stable")
        return numbers[order[::-1] if self.query.order.startswith("-") else order]

    def _sizes(self, numbers: np.ndarray, field: str) -> np.ndarray:
        """Return the sizes in bytes of samples, or of one of their fields."""
        sizes = np.zeros(len(numbers), np.int64)
        shards = np.array([self.viewed.address(number).shard for number in numbers.tolist()], np.int64)
        for shard in np.unique(shards).tolist():
            index, mine = self.viewed.index(shard), np.flatnonzero(shards == shard)
            members = members_of(self.viewed, shard, index, field) if field else self.viewed.members(shard)
            each = np.bincount(members[:, 0], weights=members[:, 3], minlength=len(index))
            sizes[mine] = each[numbers[mine] - self.viewed.begin(shard)]
        return sizes


def parse_sizes(text: str) -> tuple[str, int, int]:
    """Return the field and the range of bytes that ``FIELD:LEAST-MOST`` names; raise ValueError for other text.

    >>> parse_sizes("seg.png:0-1023")
    ('seg.png', 0, 1023)
    """
    field, _, bounds = text.rpartition(":")
    least, _, most = bounds.partition("-")
    if not field or not least.isdigit() or not most.isdigit():
        raise ValueError(f"sizes are written as FIELD:LEAST-MOST, not {text!r}")
    return field, int(least), int(most)


def members_of(viewed: ViewedShards, shard: int, index: Index, field: str) -> np.ndarray:
    """Return the sample, field, offset and size of each member of *field* in a shard."""
    found = find_field(index.fields, [field])
    members = viewed.members(shard)
    return members[members[:, 1] == (-1 if found is None else index.fields.index(found))]


def column_of(viewed: ViewedShards, name: str) -> np.ndarray:
    """Return a column of all samples as an array; raise ShardIndexError if there is none of this name."""
    from tarshards.index.columns import load_columns

    table = load_columns(viewed.indexed(), [name])
    if table is None:
        raise ShardIndexError(f"no column {name}; add it with `tarindex --columns`", url=viewed.name)
    values = table.column(name).to_numpy()
    return values if values.dtype.kind in "biuf" else np.array(["" if each is None else str(each) for each in values])


class Queries:
    """The queries of a page; keeps the results of the latest ones."""

    def __init__(self, viewed: ViewedShards):
        self.viewed = viewed
        self.epochs: EpochBatches = EpochBatches(viewed)
        self._found: dict[Query, Found] = {}
        self._lock = RLock()

    def find(self, query: Query) -> Found:
        with self._lock:
            found = self._found.pop(query, None) or Found(self.viewed, query, self.epochs)
            self._found[query] = found
            while len(self._found) > HELD:
                self._found.pop(next(iter(self._found)))
        return found

    def rows(self, query: Query, begin: int, count: int, seconds: float = 0.5) -> dict[str, Any]:
        """Return *count* matching samples, starting with number *begin*, and the number of known ones."""
        viewed = self.viewed
        if not query:
            viewed.extend(begin + count + 1)
            numbers: Any = range(begin, min(begin + count, viewed.total))
            return {"total": viewed.total, "done": viewed.is_complete, "rows": viewed.rows(numbers)}
        found = self.find(query)
        needs_all = bool(query.order or query.duplicates)
        found.advance(MOST if needs_all else begin + count + 1, seconds)
        numbers = found.numbers
        if needs_all and not found.is_done:  # the order is not yet known
            numbers = numbers[:0]
        return {
            "total": len(numbers),
            "done": found.is_done,
            "searched": found.searched,
            "failed": found.failed,
            "reason": found.reason,
            "about": found.about,
            "rows": viewed.rows(numbers[begin : begin + count].tolist()),
        }

    def all(self, query: Query) -> np.ndarray:
        """Return the numbers of all samples of a query."""
        if not query:
            self.viewed.extend(MOST)
            return np.arange(min(self.viewed.total, MOST))
        found = self.find(query)
        found.advance(MOST, float("inf"))
        return found.numbers
