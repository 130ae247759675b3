"""The addresses of fields of samples, in mapped shards or in bytes that were read; for many samples at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any, ClassVar, NamedTuple
from weakref import WeakSet

import numpy as np

from tarshards import kernels
from tarshards.errors import SampleError, ShardIndexError, TarshardsError, shortened
from tarshards.index.open import OpenShard, OpenShards
from tarshards.index.sidecar import DAMAGED, REBUILD
from tarshards.samples.batch import Failures, SampleBatch
from tarshards.samples.fields import FieldNames, Term, find_field, no_field, pick_field
from tarshards.samples.keys import Sample
from tarshards.samples.member_file import MemberFile
from tarshards.samples.payloads import BatchKeys, Payloads, address_of
from tarshards.storage.ranges import most_open

ASKED = 1 << 8  # in a look-up of up to this many shards, each is checked for changes every time
FEW = 16  # up to this many shards, whose indexes stay in the cache of the processor, sorting takes longer than it saves
GONE, ELSEWHERE = -2, -3  # for the number of a member: its index has shrunk; its content was read


class Headers(NamedTuple):
    """The members of mapped shards that are the fields of samples, whose headers are compared with the index.

    Sample i is number *samples[i]* of *shards[which[i]]*, whose members are *tables[which[i]]*; *members* are the
    numbers of those of each field, negative where the sample lacks it, or it was read. They *are_new* if some have not
    been compared. The last of them in each shard ends at an offset in *ends*. If they *are_called*, they are to be read
    by calls, not where they are mapped.
    """

    shards: list[OpenShard | None]
    tables: list[kernels.headers.MappedMembers | None]
    which: np.ndarray
    samples: np.ndarray
    members: np.ndarray
    are_new: bool
    ends: np.ndarray
    are_called: bool

    def part(self, begin: int, end: int) -> Headers:
        """Return the part for the samples from *begin* to *end*."""
        part = slice(begin, end)
        return self._replace(which=self.which[part], samples=self.samples[part], members=self.members[:, part])

    def find_keys(self, indices: np.ndarray) -> list[str]:
        """Return the keys of the samples with these *indices*."""
        which, samples = self.which[indices], self.samples[indices]
        try:
            keys = kernels.headers.find_keys(self.tables, which, samples)
            for number, shard in enumerate(self.shards):
                if shard is not None and shard.buffer is None:  # it is not mapped
                    for i in np.flatnonzero(which == number).tolist():
                        keys[i] = shard.index.key(int(samples[i]))
            return keys
        except OSError:
            for shard, sample in zip(map(self._shard, which.tolist()), samples.tolist()):
                shard.index.key(sample)  # raises an error that names the index
            raise  # the index is intact again

    def fetch(self, columns: dict[str, Payloads]) -> None:
        """Replace the payloads in *columns*, which are all in mapped shards, by copies that are read by calls."""
        for (name, payloads), members in zip(columns.items(), self.members):
            arena = np.empty(int(payloads.sizes[members >= 0].sum()), np.uint8)
            addresses = payloads.addresses.copy()
            kernels.headers.fetch(self.tables, self.which, members, payloads.sizes, addresses, arena)
            columns[name] = Payloads((payloads.held, arena), addresses, payloads.sizes)

    def find_stale(self) -> Failures:
        """Compare headers with the indexes, those that were not compared before; return the errors of the samples."""
        failures: Failures = {}
        for members in self.members:
            for i in kernels.headers.find_undecided(self.tables, self.which, members):
                shard = self._shard(int(self.which[i]))
                if (error := shard.decide(int(members[i]))) is not None:
                    failures.setdefault(i, error)
        return failures

    def check(self, which: np.ndarray) -> None:
        """Raise OSError if one of *which* shards has shrunk, so that earlier copies of members may be wrong."""
        for number in kernels.headers.find_shrunk(self.tables, which, self.ends):
            self._shard(number).ranges.check(int(self.ends[number]))

    def check_end(self, which: int, address: int) -> None:
        """Raise OSError if a shard has shrunk so that bytes before *address*, where it is mapped, may be missing."""
        buffer = self._shard(which).buffer
        if buffer is not None and 0 <= (end := address - address_of(buffer)) <= len(buffer):
            self._shard(which).ranges.check(end)

    def _shard(self, number: int) -> OpenShard:
        shard = self.shards[number]
        assert shard is not None
        return shard


class MappedFields:
    """Finds *fields* of samples in shards, which are mapped with their indexes when they are first needed.

    A sample of a shard that is not mapped is read, by ``read(shard, sample)``. A shard that cannot be opened is
    *broken*: its samples fail when they are looked up. If a shard is truncated while in use, reading the missing bytes
    raises OSError (see ``Payloads``).
    """

    _all: ClassVar[WeakSet[MappedFields]] = WeakSet()  # of this process

    def __init__(
        self,
        shards: OpenShards,
        terms: Sequence[Term],
        fields: FieldNames | None,
        read: Callable[[OpenShard, int], Sample] = OpenShard.read,
    ):
        self.names: list[str] = shards.names
        self.terms = terms
        self.kept: int = 0  # shards that stay mapped
        self._fields, self._shards, self._read_sample = fields, shards, read
        self.broken: set[int] = set()
        self.read_fields: FieldNames | None = FieldNames.of([field for term in terms for field in term.alternatives])
        self._sound = np.zeros(len(shards.named))  # when each shard was last found not to have been written to
        self._begin()

    def _begin(self) -> None:
        self._ranks = cache(partial(_rank_fields, self.terms, self._fields))
        self._all.add(self)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_ranks"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin()

    @classmethod
    def of(cls, shards: OpenShards, terms: Sequence[Term], fields: FieldNames | None) -> MappedFields | None:
        """Return an object that finds *fields* in local *shards*, which stay mapped; None if they cannot all be."""
        kept = len(shards.named)
        if not kernels.IS_COMPILED or sum(each.kept for each in cls._all) + kept > most_open():
            return None
        mapped = cls(shards, terms, fields)
        mapped.kept = kept
        return mapped

    def find(self, shards: np.ndarray, samples: np.ndarray, numbers: np.ndarray) -> SampleBatch:
        """Find *samples* of *shards*; *numbers* are those of ``SampleBatch``.

        Those of a shard that has been written to since it was opened fail, and are not read.
        """
        counts = np.bincount(shards)
        each = np.flatnonzero(counts)
        which = (np.cumsum(counts > 0) - 1)[shards]  # of these each sample's shard is
        used: list[Any] = list(map(self._shards.in_use.get, each.tolist()))
        failures: Failures = {}

        def fail(number: int, error: TarshardsError) -> None:
            failures.update(dict.fromkeys(np.flatnonzero(which == number).tolist(), error))

        for i in [i for i, shard in enumerate(used) if shard is None] if None in used else ():
            shard = self._open(int(each[i]))
            if isinstance(shard, TarshardsError):
                fail(i, shard)
            else:
                used[i] = shard
        for i in self._doubtful(each):
            if used[i] is not None and (error := _change(used[i])) is not None:
                fail(i, error)
            else:
                self._sound[each[i]] = time.monotonic()
        tables = [shard.members if shard is not None and shard.buffer is not None else None for shard in used]
        samples = np.ascontiguousarray(samples, np.int64)
        members, sizes = np.full((2, len(self.terms), len(which)), -1, np.int64)
        addresses, ends = np.empty(members.shape, np.uint64), np.empty(len(tables), np.int64)
        order = np.arange(len(which))
        if len(each) > FEW:
            order = np.argsort(which << 32 | samples)  # neighbours share pages of indexes and shards
        found = addresses, sizes, members, ends
        is_mapped = any(table is not None for table in tables)
        are_new = is_mapped and kernels.headers.locate(tables, self._ranks, which, samples, order, *found)
        are_called = self._shards.are_called
        headers = Headers(used, tables, which, samples, members, are_new or are_called, ends, are_called)
        contents = self._special(headers, addresses, sizes, failures)
        for term, row in zip(self.terms, members) if members.min(initial=0) < 0 else ():
            for i in np.flatnonzero(row < 0).tolist():
                if i not in failures and row[i] != ELSEWHERE:
                    shard, sample = used[which[i]], int(samples[i])
                    failures[i] = (
                        unreadable(shard, sample) if row[i] == GONE else self._missing_field(shard, sample, term)
                    )
        np.maximum(sizes, 0, out=sizes)
        held = used, contents  # the objects that own the bytes
        columns = {term.column: Payloads(held, *row) for term, *row in zip(self.terms, addresses, sizes)}
        keys, names = BatchKeys(headers.find_keys, np.arange(len(which))), [self.names[number] for number in each]
        return SampleBatch(keys, columns, failures, numbers, which, names, headers if is_mapped else None)

    def _open(self, number: int) -> OpenShard | TarshardsError:
        try:
            return self._shards.use(number)
        except TarshardsError as error:
            self.broken.add(number)
            return error

    def retry(self) -> bool:
        """Try to open broken shards again; return whether one was opened."""
        opened = []
        for number in sorted(self.broken):
            with suppress(TarshardsError):  # its samples get the error
                self._shards.open(number)
                opened.append(number)
        self.broken.difference_update(opened)
        return bool(opened)

    def _doubtful(self, numbers: np.ndarray) -> list[int]:
        """Return which shards may have been written to; if there are many, check at most once a second."""
        if len(numbers) <= ASKED:
            return list(range(len(numbers)))
        return list(np.flatnonzero(self._sound[numbers] < time.monotonic() - 1).tolist())

    def _read(
        self,
        shard: OpenShard,
        rows: np.ndarray,
        headers: Headers,
        addresses: np.ndarray,
        sizes: np.ndarray,
        failures: Failures,
    ) -> list[Payloads]:
        """Read the samples of some rows, which are of a shard that is not mapped, and return their contents."""
        results: list[Any] = []
        for row in rows.tolist():
            try:
                results.append(self._read_sample(shard, int(headers.samples[row])))
            except TarshardsError as error:
                results.append(error)
        found = find_in_samples(results, self.terms, rows)
        failures.update((int(rows[i]), error) for i, error in found.failures.items() if rows[i] not in failures)
        contents = list(found.columns.values())
        for term, payloads in enumerate(contents):
            addresses[term, rows], sizes[term, rows] = payloads.addresses, payloads.sizes
        headers.members[:, rows] = ELSEWHERE
        return contents

    def _special(
        self, headers: Headers, addresses: np.ndarray, sizes: np.ndarray, failures: Failures
    ) -> list[Payloads]:
        """Read the links and sparse members, whose bytes are not after their headers, and return their contents.

        All samples of shards that are not mapped are read. Samples at fault fail.
        """
        contents: list[Payloads] = []
        for number, shard in enumerate(headers.shards):
            if shard is not None and shard.buffer is None:
                contents += self._read(
                    shard, np.flatnonzero(headers.which == number), headers, addresses, sizes, failures
                )
                continue
            if shard is None or not (shard.index.faults or shard.index.elsewhere):
                continue
            for i in np.flatnonzero(headers.which == number).tolist():
                if i not in failures and (sample := int(headers.samples[i])) in shard.index.faults:
                    failures[i] = shard.index.fault(sample, shard.name)
            for term, row in enumerate(headers.members):
                for i in np.flatnonzero((headers.which == number) & (row >= 0)).tolist():
                    if row[i] not in shard.index.elsewhere:
                        continue
                    if i not in failures:
                        try:
                            content = Payloads.of([shard.take(int(row[i]))])
                        except TarshardsError as error:
                            failures[i] = error
                        else:
                            addresses[term, i], sizes[term, i] = content.addresses[0], content.sizes[0]
                            contents.append(content)
                    row[i] = ELSEWHERE
        return contents

    def _missing_field(self, shard: OpenShard, sample: int, term: Term) -> SampleError:
        index = shard.index
        known = [field for field in index.fields_of(sample) if self._fields is None or field in self._fields]
        return SampleError(no_field(term.alternatives, known), url=shard.name, key=index.key(sample))

    def changes(self) -> Iterator[TarshardsError]:
        """Yield an error for each shard that has been written to since it was opened."""
        shards = list(self._shards.in_use.values())
        return (error for shard in shards if (error := _change(shard)) is not None)


def _change(shard: OpenShard) -> TarshardsError | None:
    try:
        shard.ranges.verify()
    except TarshardsError as error:
        return error
    return None


def _rank_fields(terms: Sequence[Term], allowed: FieldNames | None, names: tuple[bytes, ...]) -> bytes:
    """Return the rank of each field in each of *terms*, int16: 0 for the first alternative, -1 for none."""
    known = [name.decode("utf-8", "surrogateescape") for name in names]
    ranks = np.full((len(terms), len(known)), -1, np.int16)
    for row, term in zip(ranks, terms):
        for rank, field in reversed(list(enumerate(term.alternatives))):
            name = find_field(known, [field])
            if name is not None and (allowed is None or find_field(allowed, [field]) is not None):
                row[known.index(name)] = rank
    return ranks.tobytes()


def unreadable(shard: OpenShard, sample: int) -> ShardIndexError:
    """Return the error of a sample that was not located: its index is damaged there, or was truncated."""
    try:
        shard.index.look_up(sample)
    except ShardIndexError as error:
        if DAMAGED in error.reason:
            return error
    return ShardIndexError(f"truncated since it was opened; {REBUILD}", url=shard.index.url)


def find_in_samples(
    results: Sequence[Sample | TarshardsError],
    terms: Sequence[Term],
    numbers: np.ndarray,
    kinds: Sequence[Any] = (),
) -> SampleBatch:
    """Find the fields of samples that were read; *results* has an error instead of one that could not be.

    The *numbers* are those of ``SampleBatch``. ``kind.of(values)`` returns what holds the values of a field: by default
    ``Payloads``, of bytes, which are read here if the field is lazy, or what *kinds* has for the field. Raises
    TypeError for other values than the kind takes.
    """
    failures: Failures = {i: result for i, result in enumerate(results) if isinstance(result, TarshardsError)}
    kinds = kinds or [Payloads] * len(terms)
    columns: list[list[Any]] = [[b""] * len(results) for _ in terms]
    keys, urls = [""] * len(results), [""] * len(results)
    for i, sample in enumerate(results):
        if isinstance(sample, dict):
            keys[i], urls[i] = sample["__key__"], sample.get("__url__", "")
            try:
                for column, term, kind in zip(columns, terms, kinds):
                    column[i] = _value(sample, pick_field(sample, term.alternatives), kind)
            except TarshardsError as error:
                failures[i] = error
    made = {term.column: kind.of(column) for term, kind, column in zip(terms, kinds, columns)}
    return SampleBatch(BatchKeys.of(keys), made, failures, numbers, np.arange(len(urls)), urls)


def _value(sample: Sample, field: str, kind: Any) -> Any:
    value = sample[field]
    if type(value) is bytes:
        return value
    if type(value) is MemberFile:
        return bytes(value)
    if kind is not Payloads or isinstance(value, bytes | bytearray | memoryview):
        return value
    made = f"an op has made {shortened(value)} of the field {field} of sample {sample['__key__']}"
    cure = "leave the field as it is in the shards, or give a function of the value, such as int, instead of a reader"
    raise TypeError(f"readers take bytes, and {made}; {cure}")
