"""Where fields of samples lie in memory, in mapped shards or in bytes that were read; for many samples at a time."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from mmap import PAGESIZE
from typing import Any, ClassVar, NamedTuple, overload
from weakref import WeakSet

import numpy as np

from tarshards.errors import SampleError, TarshardsError
from tarshards.index import memory
from tarshards.index.access import IndexedShards, SampleReader
from tarshards.index.headers import MappedMembers, find_undecided
from tarshards.index.memory import Buffers, Payloads
from tarshards.index.open import OpenShard
from tarshards.index.sidecar import Index
from tarshards.samples.fields import Term, find_field, no_field, pick_field
from tarshards.samples.member_file import MemberFile
from tarshards.storage.ranges import most_open
from tarshards.tar.read import BLOCK

SOON = 1 << 12  # shards that are opened before the first batch is made
ASKED = 1 << 8  # shards of a look-up, up to which each is checked for changes every time
MOST_SAMPLES = 1 << 25  # whose places are held
MOST_TOUCHED = 1 << 30  # bytes of shards that are read into memory ahead of their use
SMALL = 1 << 14  # bytes of a sample for which a disk needs about as long as for a place further on
NEAR = np.uint64(1 << 11)  # bytes before a member that have its headers, and those of a small one before it
TOUCHED = 1 << 10  # pages of these that are touched by one call

Failures = dict[int, TarshardsError]  # by position among the samples that were asked for


class BatchKeys(Sequence[str]):
    """The keys of a batch, equal to a list of them; each is looked up when it is needed.

    ``type(keys)(items)``, by which programs rebuild a sequence, gives a list.
    """

    def __new__(cls, table: Any, numbers: np.ndarray | None = None) -> Any:
        return list(table) if numbers is None else super().__new__(cls)

    def __init__(self, table: np.ndarray, numbers: np.ndarray):
        self._table, self._numbers = table, numbers

    @overload
    def __getitem__(self, place: int) -> str: ...
    @overload
    def __getitem__(self, place: slice | np.ndarray) -> BatchKeys: ...
    def __getitem__(self, place: Any) -> Any:
        numbers = self._numbers[place]
        return BatchKeys(self._table, numbers) if isinstance(numbers, np.ndarray) else self._table[numbers]

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[str]:
        return iter(self._table[self._numbers].tolist())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (list, BatchKeys)) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))

    def __reduce__(self) -> Any:
        return list, (list(self),)


class Headers(NamedTuple):
    """The headers of the fields of samples in mapped shards; *numbers* are those of the samples over all shards."""

    mapped: MappedPlaces
    shards: np.ndarray
    numbers: np.ndarray

    def part(self, begin: int, end: int) -> Headers:
        """Return those of the samples from *begin* to *end*."""
        return Headers(self.mapped, self.shards[begin:end], self.numbers[begin:end])


class Places(NamedTuple):
    """The keys of samples, their payloads of each field, and the errors of those that lack one.

    Where payloads lie in mapped shards, their *headers* are not compared with the index until ``check`` is called.
    """

    keys: BatchKeys
    payloads: list[Payloads]
    failures: Failures
    headers: Headers | None = None

    def check(self) -> Failures:
        """Return the failures, with those of samples whose headers differ from the index."""
        return self.failures if self.headers is None else self.headers.mapped.find_stale(self.headers) | self.failures

    def ask(self, begin: int, end: int) -> None:
        """Let the system read the samples from *begin* to *end* into memory, with what their check needs."""
        lows, ends = [], []
        for payloads in self.payloads:
            address = payloads.addresses[begin:end]
            lows.append(np.maximum(address - NEAR, payloads.buffers.addresses[payloads.number[begin:end]]))
            ends.append(address + payloads.sizes[begin:end].astype(np.uint64))
        if self.headers is not None:
            lows += self.headers.mapped.headers_before(self.headers.part(begin, end))
            ends += [low + np.uint64(BLOCK) for low in lows[len(ends) :]]
        low, stop = np.concatenate(lows), np.concatenate(ends)
        order = np.argsort(low)
        memory.ask(low[order], (stop - low)[order].astype(np.int64))

    def part(self, begin: int, end: int) -> Places:
        """Return the places of the samples from *begin* to *end*."""
        failures = {i - begin: error for i, error in self.failures.items() if begin <= i < end}
        headers = self.headers and self.headers.part(begin, end)
        return Places(self.keys[begin:end], [payloads[begin:end] for payloads in self.payloads], failures, headers)

    def keep(self, kept: np.ndarray) -> Places:
        """Return the places of the samples *kept*, which have not failed and whose headers have been compared."""
        return Places(self.keys[kept], [payloads[kept] for payloads in self.payloads], {})


class MappedPlaces:
    """The places of some fields of all samples of local shards, which stay mapped.

    A shard that cannot be opened is *broken*: its samples fail when they are looked for. Where a shard is truncated
    while places are in use, reading what is gone raises OSError (see ``Payloads``).
    """

    _all: ClassVar[WeakSet[MappedPlaces]] = WeakSet()  # of this process

    def __init__(self, shards: IndexedShards, terms: Sequence[Term]):
        self.names, self.terms, self._fields = shards.names, terms, shards.fields
        self._shards: dict[int, OpenShard] = {}
        self.broken: dict[int, TarshardsError] = {}
        self._first = np.concatenate(([0], np.cumsum(shards.counts)))
        self._faults: dict[int, SampleError] = {}  # by the number of the sample
        total = int(self._first[-1])
        self._keys = np.full(total, "", object)
        starts, sizes = np.zeros((len(terms), total), np.int64), np.full((len(terms), total), -1)
        self._members = np.full((len(terms), total), -1, np.int64)  # their numbers in their shards
        self._compared = np.zeros(total, bool)  # whether all headers of a sample have matched
        self._sound = np.zeros(len(shards.urls))  # when each shard was last found not to have been written to
        self._mapped: list[MappedMembers | None] = [None] * len(shards.urls)
        buffers: list[Any] = [b""] * len(shards.urls)
        for number in range(len(shards.urls)):
            try:
                shard = shards.shards.open(number)
                self._add(number, shard.index, shards.fields, starts, sizes)
                self._shards[number], buffers[number], self._mapped[number] = shard, shard.buffer, shard.members
            except TarshardsError as error:
                self.broken[number] = error
        self._buffers = Buffers(buffers)
        self._missing = [missing if missing.any() else None for missing in sizes < 0]
        shard_of = np.repeat(np.arange(len(shards.urls)), shards.counts)
        self._table = np.empty((total, len(terms), 2), np.int64)  # a row is all that is looked up of a sample
        for i, rows in enumerate(zip(starts, np.maximum(sizes, 0))):
            payloads = Payloads(self._buffers, shard_of, *rows)
            self._table[:, i] = np.stack([payloads.addresses.view(np.int64), payloads.sizes], axis=1)
        self._all.add(self)

    def _add(self, number: int, index: Index, fields: Any, starts: np.ndarray, sizes: np.ndarray) -> None:
        begin, end = self._first[number], self._first[number + 1]
        self._keys[begin:end] = index.keys
        self._faults |= {int(begin) + sample: index.fault(sample, self.names[number]) for sample in index.faults}
        for start, size, member, term in zip(starts, sizes, self._members, self.terms):
            for field in reversed(term.alternatives):
                if fields is None or find_field(fields, [field]) is not None:
                    members = index.members_of(field)
                    samples = begin + index.sample[members].astype(np.int64)
                    start[samples], size[samples] = index.offset[members], index.size[members]
                    member[samples] = members

    @classmethod
    def of(cls, shards: SampleReader, terms: Sequence[Term]) -> MappedPlaces | None:
        """Return the places in *shards*, None where they cannot be mapped or are too many.

        Thousands of shards are mapped when they have been read once: until then a batch would wait for all of them.
        """
        if not isinstance(shards, IndexedShards) or shards.is_remote():
            return None
        held = sum(len(places.names) for places in cls._all)
        if held + len(shards.urls) > most_open() // 2 or int(shards.counts.sum()) > MOST_SAMPLES:
            return None
        if len(shards.urls) > SOON and not shards.shards.are_loaded():
            return None
        try:
            places = cls(shards, terms)
        except TypeError:  # without the compiled kernels, shards have no buffer
            return None
        return None if any(shard.index.elsewhere for shard in places._shards.values()) else places

    def are_small(self) -> bool:
        """Return whether the shards are read into memory as a whole sooner than the samples, one here and one there."""
        size = int(self._buffers.lengths.sum())
        return size <= min(MOST_TOUCHED, SMALL * max(1, len(self._keys)))

    @contextmanager
    def touching(self) -> Iterator[None]:
        """Let a thread read every page into memory meanwhile, in file order, in which disks are quickest.

        It compares the headers, too; those that differ are found again when they are needed.

        The thread has ended when this returns.
        """
        over = threading.Event()
        thread = threading.Thread(target=self._touch, args=(over,), name="tarshards-touch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            if not sys.is_finalizing():  # when daemon threads never run again
                thread.join()

    def _touch(self, over: threading.Event) -> None:
        for shard, (address, length) in enumerate(zip(self._buffers.addresses, self._buffers.lengths)):
            pages = address + np.arange(0, length, PAGESIZE, dtype=np.uint64)
            for i in range(0, len(pages), TOUCHED):
                if over.is_set():
                    return
                part, after = pages[i : i + TOUCHED], pages[i + TOUCHED : i + 2 * TOUCHED]
                if len(after):
                    memory.ask(after[:1], np.array([after[-1] - after[0]], np.int64))
                with suppress(OSError):  # the shard has shrunk: whoever needs what is gone finds out
                    memory.gather(np.empty((len(part), 1), np.uint8), part, b"")
            for members in self._members[:, self._first[shard] : self._first[shard + 1]]:
                find_undecided(self._mapped, np.full(len(members), shard, np.int64), members)

    def find(self, shards: np.ndarray, samples: np.ndarray) -> Places:
        """Find samples; those of a shard that has been written to since it was opened fail, and are not read."""
        number = self._first[shards] + samples
        failures: Failures = {}
        for shard in self._doubtful(np.flatnonzero(np.bincount(shards))):
            error = self.broken.get(shard) or self._change(shard)
            if error is None:
                self._sound[shard] = time.monotonic()
            else:
                failures |= dict.fromkeys(np.flatnonzero(shards == shard).tolist(), error)
        keys = BatchKeys(self._keys, number)
        for term, missing in zip(self.terms, self._missing):
            for i in () if missing is None else np.flatnonzero(missing[number]).tolist():
                if i not in failures:
                    fault = self._faults.get(int(number[i]))
                    failures[i] = fault or self._missing_field(int(shards[i]), int(samples[i]), term)
        rows = self._table.take(number, axis=0).transpose(1, 2, 0).copy()
        known = (Payloads.known(self._buffers, shards, start.view(np.uint64), size) for start, size in rows)
        headers = None if self._compared[number].all() else Headers(self, shards, number)
        return Places(keys, list(known), failures, headers)

    def _doubtful(self, shards: np.ndarray) -> list[int]:
        """Return those of *shards* that may have been written to; many are asked for at most once a second."""
        if len(shards) > ASKED:
            shards = shards[self._sound[shards] < time.monotonic() - 1]
        return list(shards.tolist())

    def _missing_field(self, shard: int, sample: int, term: Term) -> SampleError:
        index = self._shards[shard].index
        known = [field for field in index.fields_of(sample) if self._fields is None or field in self._fields]
        return SampleError(no_field(term.alternatives, known), url=self.names[shard], key=index.keys[sample])

    def find_stale(self, headers: Headers) -> Failures:
        """Compare headers with the indexes, those that were not compared before; return the errors of the samples."""
        failures: Failures = {}
        places = np.flatnonzero(~self._compared[headers.numbers])
        if not len(places):
            return failures
        shards, numbers = headers.shards[places], headers.numbers[places]
        for members in self._members.take(numbers, axis=1):
            for i in find_undecided(self._mapped, shards, members):
                error = self._shards[int(shards[i])].decide(int(members[i]))
                if error is not None:
                    failures.setdefault(int(places[i]), error)
        self._compared[numbers] = True
        self._compared[headers.numbers[list(failures)]] = False
        return failures

    def headers_before(self, headers: Headers) -> list[np.ndarray]:
        """Return for each field the addresses of the headers before those of the samples, which are compared, too."""
        found = []
        for members in self._members.take(headers.numbers, axis=1):
            address = np.zeros(len(members), np.uint64)
            for shard in np.unique(headers.shards).tolist():
                here = (headers.shards == shard) & (members > 0)
                if here.any():
                    offset = self._shards[shard].index.offset[members[here] - 1]
                    address[here] = self._buffers.addresses[shard] + offset - np.uint64(BLOCK)
            found.append(address[address > 0])
        return found

    def changes(self) -> Iterator[TarshardsError]:
        """Yield an error for each shard that has been written to since it was opened."""
        return (error for shard in self._shards if (error := self._change(shard)) is not None)

    def _change(self, shard: int) -> TarshardsError | None:
        try:
            self._shards[shard].ranges.verify()
        except TarshardsError as error:
            return error
        return None


def find_in_bytes(results: Sequence[dict[str, Any] | TarshardsError], terms: Sequence[Term]) -> Places:
    """Find the fields of samples that were read; *results* has an error in place of one that could not be.

    Lazy fields are read here.
    """
    failures: Failures = {i: result for i, result in enumerate(results) if isinstance(result, TarshardsError)}
    columns: list[list[bytes]] = [[b""] * len(results) for _ in terms]
    keys = np.full(len(results), "", object)
    for i, sample in enumerate(results):
        if isinstance(sample, dict):
            keys[i] = sample["__key__"]
            try:
                for column, term in zip(columns, terms):
                    value = sample[pick_field(sample, term.alternatives)]
                    column[i] = bytes(value) if type(value) is MemberFile else value
            except TarshardsError as error:
                failures[i] = error
    return Places(BatchKeys(keys, np.arange(len(keys))), [Payloads.of(column) for column in columns], failures)
