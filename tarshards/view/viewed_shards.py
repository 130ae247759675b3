"""The samples of shards by number; shards without indexes are indexed in memory as samples are requested."""

from __future__ import annotations

import re
from base64 import b64encode
from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import RLock
from typing import Any, NamedTuple

import numpy as np

from tarshards.errors import SampleError, ShardIndexError, TarError, TarshardsError, shortened
from tarshards.index.build import build_index
from tarshards.index.inventory import find_indexed
from tarshards.index.open import OpenShard
from tarshards.index.sidecar import Index
from tarshards.samples.fields import find_field
from tarshards.samples.keys import Sample
from tarshards.samples.member_file import MemberFile
from tarshards.storage.expressions import common_name, find_shards, spec_name
from tarshards.storage.location import Location
from tarshards.storage.manifest import Shard, Shards
from tarshards.stream.indexed_shards import IndexedShards
from tarshards.view.media_types import has_media

HEAD = 256  # bytes of a field, enough for a line
TOGETHER = 1 << 22  # most bytes of consecutive samples whose heads one request fetches


class SampleAddress(NamedTuple):
    """A sample: the number of its shard, and its number in the shard."""

    shard: int
    sample: int


class ViewedShards:
    """The samples of *urls*, numbered over all shards; the options are those of ``find_shards``.

    With indexes, all samples are known from the start, in ``sequence``. Otherwise ``extend`` indexes one shard after
    the other in memory, and ``total`` grows; a damaged shard past its damage. *problems* are the errors of these, and
    of shards that cannot be indexed, which count as empty.
    """

    def __init__(self, urls: Any, **how: Any):
        self.shards: Shards = find_shards(urls, **how).split_by("first")
        if isinstance(urls, str):
            self.name: str = spec_name(urls)
        else:
            self.name = common_name([Location(url).name for url in self.shards.urls])
        self.sequence: IndexedShards | None = self._find_indexed()
        self.problems: list[TarshardsError] = []
        self._made: list[Index | None] = []  # indexes built in memory
        self._ends: list[int] = []  # for each shard, the number of samples up to its end
        if self.sequence is not None:
            self._ends = np.cumsum(self.sequence.counts, dtype=np.int64).tolist()
        self._readers: dict[frozenset[str], IndexedShards] = {}
        first = self.shards[0].location()
        self._is_remote = not first.is_local
        self._threads = ThreadPoolExecutor(first.remote.connections)
        self._lock = RLock()

    def _find_indexed(self) -> IndexedShards | None:
        try:
            found = find_indexed(self.shards)
        except ShardIndexError:  # only some shards have an index, or it is of the other rule for names
            found = None
        if found is None:
            self.shards[0].location().check_there()
            return None
        return IndexedShards(found)

    @property
    def total(self) -> int:
        """The number of known samples."""
        return self._ends[-1] if self._ends else 0

    @property
    def is_complete(self) -> bool:
        """Whether all samples are known."""
        return len(self._ends) == len(self.shards)

    @property
    def known_shards(self) -> int:
        """The number of shards whose samples are known."""
        return len(self._ends)

    def extend(self, samples: int) -> None:
        """Index shards until this many samples are known, or all."""
        with self._lock:
            while not self.is_complete and self.total < samples:
                shard = self.shards[len(self._made)]
                try:
                    index = build_index(
                        shard.location(),
                        concatenated=shard.concatenated,
                        end=shard.end,
                        split=shard.split,  # type: ignore[arg-type]
                        on_damage="resync",
                    )
                    self.problems += [_damage(gap, index, shard) for gap in index.gaps[:1]]
                except TarshardsError as error:
                    self.problems.append(error)
                    index = None
                self._made.append(index)
                self._ends.append(self.total + (0 if index is None else len(index)))

    def indexed(self) -> IndexedShards:
        """Return the samples of indexed shards; raise ShardIndexError without indexes."""
        if self.sequence is None:
            raise ShardIndexError("this requires indexed shards; run `tarindex` first", url=self.name)
        return self.sequence

    def begin(self, shard: int) -> int:
        """Return the number of the first sample of a shard."""
        return self._ends[shard - 1] if shard else 0

    def count(self, shard: int) -> int:
        """Return the number of samples of a shard."""
        return self._ends[shard] - self.begin(shard)

    def address(self, number: int) -> SampleAddress:
        """Return the shard of a sample and its number in it; raise SampleError if there is no sample *number*."""
        self.extend(number + 1)
        if not 0 <= number < self.total:
            raise SampleError(f"there is no sample {number} of {self.total}, which are numbered from 0")
        shard = bisect_right(self._ends, number)
        return SampleAddress(shard, number - self.begin(shard))

    def index(self, shard: int) -> Index:
        """Return the index of a shard whose samples are known."""
        if self.sequence is not None:
            return self.sequence.shards.index(shard)
        index = self._made[shard]
        if index is None:
            raise ShardIndexError("this shard could not be indexed", url=self.shards[shard].location().name)
        return index

    def members(self, shard: int) -> np.ndarray:
        """Return the sample, field, offset and size of each member of a shard: int64, a row each."""
        index = self.index(shard)
        return index.entries(np.arange(index.members))

    def open(self, shard: int) -> OpenShard:
        """Open a shard."""
        if self.sequence is not None:
            return self.sequence.shards.open(shard)
        return OpenShard(self.shards[shard].location(), self.index(shard))

    def read(self, numbers: np.ndarray, names: Collection[str] | None) -> Iterator[Sample | TarshardsError]:
        """Yield samples with at least the fields *names* (None: all), or the error for a sample that cannot be read."""
        if self.sequence is not None:
            yield from self._reader(frozenset(names or ())).read_numbers(numbers)
            return
        opened: tuple[int, OpenShard] | None = None
        for shard, sample in map(self.address, numbers.tolist()):
            try:
                if opened is None or opened[0] != shard:
                    opened = shard, self.open(shard)
                yield opened[1].read(sample)
            except TarshardsError as error:
                yield error

    def _reader(self, names: frozenset[str]) -> IndexedShards:
        """Return a reader of the fields *names* if the first shard has all of these, else of whole samples."""
        whole = self.indexed()
        known = self.index(0).fields
        wanted = sorted(names - {"key", "shard"})
        if not wanted or not all(find_field(known, [name]) for name in wanted):
            return whole
        if names not in self._readers:
            self._readers[names] = IndexedShards(whole.shards.named, fields=wanted)
        return self._readers[names]

    def file(self, number: int, field: str) -> MemberFile:
        """Return a field of a sample as a file; raise SampleError if the sample has no such field."""
        shard, sample = self.address(number)
        opened = self.open(shard)
        names = opened.index.fields_of(sample)
        found = find_field(names, [field])
        if found is None:
            raise SampleError(f"no field {field}", url=opened.name, key=opened.index.key(sample))
        return opened.file(opened.index.span(sample)[0] + names.index(found))

    # Samples as rows of the page.

    def rows(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        """Return the keys, shards and fields of samples, with the first bytes of fields that are shown as text.

        The *gaps* of a damaged shard are in the row of the sample before which or in which they are, or, behind the
        last one, in its row.
        """
        addresses = {number: self.address(number) for number in dict.fromkeys(numbers)}
        runs = list(self._runs(addresses))
        apply = map if not self._is_remote or len(runs) == 1 else self._threads.map
        rows = {row["number"]: row for found in apply(self._describe, runs) for row in found}
        return [rows[number] for number in numbers]

    def _runs(self, addresses: dict[int, SampleAddress]) -> Iterator[list[SampleAddress]]:
        """Yield consecutive samples of one shard, of at most TOGETHER bytes."""
        run: list[SampleAddress] = []
        begin = 0
        for shard, sample in sorted(addresses.values()):
            try:
                index = self.index(shard)
            except TarshardsError:
                yield [SampleAddress(shard, sample)]  # its row gives the error
                continue
            first, end = index.span(sample)
            follows = bool(run) and (shard, sample - 1) == run[-1]
            if run and not (follows and sum(index.data_range(end - 1)) - begin <= TOGETHER):
                yield run
                run = []
            if not run:
                begin = index.data_range(first)[0]
            run.append(SampleAddress(shard, sample))
        if run:
            yield run

    def _describe(self, run: list[SampleAddress]) -> list[dict[str, Any]]:
        shard = run[0].shard
        try:
            opened = self.open(shard)
        except TarshardsError as error:
            return [self._unread(address, error) for address in run]
        index = opened.index
        rows = [self._row(address, index, opened.name) for address in run]
        begin, end = index.span(run[0].sample)[0], index.span(run[-1].sample)[1]
        held: list[Any] = []
        if opened.ranges.remote and sum(index.data_range(end - 1)) - index.data_range(begin)[0] <= TOGETHER:
            try:
                held = opened.fetch([address.sample for address in run])
            except TarshardsError as error:
                return [row | {"error": str(error)} for row in rows]
        for address, row in zip(run, rows):
            for member, field in zip(range(*index.span(address.sample)), row["fields"]):
                if has_media(field["name"]):
                    continue
                try:
                    data = self._head(opened, member, held)
                except (TarshardsError, OSError) as error:
                    field["error"] = getattr(error, "reason", str(error))
                else:
                    field["head"] = b64encode(data).decode()
        return rows

    def _row(self, address: SampleAddress, index: Index, shard: str) -> dict[str, Any]:
        members = range(*index.span(address.sample))
        fields = [
            {"name": index.fields[index.entry(member)[1]], "size": index.content_size(member)} for member in members
        ]
        row: dict[str, Any] = {"number": self.begin(address.shard) + address.sample, "key": index.key(address.sample)}
        row |= {"shard": shard, "fields": fields}
        if address.sample in index.faults:
            row["error"] = index.faults[address.sample].reason
        if gaps := [gap for gap in index.gaps if _sample_at(index, gap.start) == address.sample]:
            row["gaps"] = [gap._asdict() for gap in gaps]
        return row

    def _unread(self, address: SampleAddress, error: TarshardsError) -> dict[str, Any]:
        """Return the row for a sample whose shard or index cannot be opened."""
        name = self.shards[address.shard].location().name
        row = {"number": self.begin(address.shard) + address.sample, "key": "", "shard": name, "fields": []}
        with suppress(TarshardsError):
            row = self._row(address, self.index(address.shard), name)
        return row | {"error": str(error)}

    def _head(self, opened: OpenShard, member: int, held: list[Any]) -> bytes:
        if held and member not in opened.index.elsewhere:
            members = next(each for each in held if each.begin <= member < each.end)
            data: bytes = members.take(member)
            return data[:HEAD]
        return opened.file(member).read(HEAD)


def _damage(gap: Any, index: Index, shard: Shard) -> TarError:
    """Return what is to be said of a damaged shard, whose first *gap* this is."""
    whole = len(index) - len(index.faults)
    reason = f"{gap.reason} (gaps: {len(index.gaps)}, whole samples: {whole})"
    return TarError(reason, url=shard.location().name, offset=gap.start)


def _sample_at(index: Index, offset: int) -> int:
    """Return the sample of the first member whose data begins behind *offset*, or else the last one."""
    member = min(int(np.searchsorted(index.offset, offset)), index.members - 1)
    return index.entry(member)[0]


def parse_number(name: str, text: str, end: int | None = None) -> int:
    """Return the whole number from 0 in *text*; raise ValueError for other text, and for a number from *end* on.

    >>> parse_number("shard", "5", 3)
    Traceback (most recent call last):
    ValueError: there is no shard 5 of 3, which are numbered from 0
    """
    if not re.fullmatch("[0-9]{1,18}", text):
        raise ValueError(f"{name}= is a whole number from 0, not {shortened(text)}")
    if end is not None and int(text) >= end:
        raise ValueError(f"there is no {name} {int(text)} of {end}, which are numbered from 0")
    return int(text)
