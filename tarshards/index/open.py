"""Open shards: a process maps each once, or opens it for range requests, and compares it with its index."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from itertools import chain
from mmap import PAGESIZE
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import ref

import numpy as np

from tarshards import kernels
from tarshards.errors import OpenError, ShardIndexError, TarshardsError, visible
from tarshards.index.header_checks import NEAR, HeldMembers, check_fetched, check_header, first_byte, first_header
from tarshards.index.inventory import COUNTS, for_some_shards, read_head, with_counts
from tarshards.index.key_index import KeyIndex, KeyTable
from tarshards.index.sidecar import MISSING, MOST_READ, OTHER, REBUILD, Hold, Index, index_location, refuse_compressed
from tarshards.parallel.forks import PerProcess, cached_property
from tarshards.parallel.host import total_memory
from tarshards.samples.fields import FieldNames
from tarshards.samples.keys import Sample
from tarshards.samples.member_file import MemberFile, MemberHeaders
from tarshards.samples.payloads import address_of
from tarshards.storage import tuning
from tarshards.storage.compression import bomb
from tarshards.storage.location import Location, names_of
from tarshards.storage.manifest import Shard, Shards
from tarshards.storage.ranges import LocalRanges, Ranges, most_held, most_open
from tarshards.storage.remote import LEAST_AHEAD, Remote
from tarshards.storage.streams import keep_memory
from tarshards.tar.elsewhere import SpecialMembers, UnresolvedError
from tarshards.tar.read import BLOCK

if TYPE_CHECKING:
    from tarshards.storage.shared import SharedBytes
    from tarshards.storage.wire import Steps

T = TypeVar("T")
Fetched = Callable[[], Any]
FetchedMembers = tuple[int, int, int, Any]  # begin and end of members, where their bytes begin in the shard, and these

SMALL = 1 << 16  # shards of up to this many bytes are read, not mapped, if there are too many to keep mapped
HELD = 1 << 27  # most bytes of indexes of such shards that are kept
MOST_WHOLE = 1 << 30  # bytes of shards up to which all of them, and of their indexes, is read soon
FAR = 1 << 20  # bytes of a sample that takes a page table nearly alone; each is of 2 MiB, and takes 4 KiB
TOO_MANY = (
    "%s and others: of %d shards a process keeps %d open, so these are opened again and again; "
    "make fewer and larger ones with `tarreshard`"
)
DO_NOT_FIT = (
    "%s: the indexes of the shards take more than the %.0f MB that may be held, so some are fetched again for every "
    "use; give more memory with Remote(ahead=), or a disk with Remote(cache_dir=)"
)
LOCKS = 1 << 10  # locks for all shards of a process: few shards that are opened at the same time share one


log: logging.Logger = logging.getLogger("tarshards")


class OpenShard:
    """An open shard, verified to be the one that *index* describes.

    *ranges* reads its bytes at any offset. *fields* names the fields that ``read`` puts into samples (None: all); those
    in *lazy* are ``MemberFile`` objects. Raises OpenError if the shard cannot be opened, ShardIndexError if the index
    is stale, and SampleError if no sample has one of *fields* or *lazy*. Every method that takes a member first
    compares its header with the index, and raises ShardIndexError if it differs. With *scattered*, the system reads
    only the requested bytes of a local shard. With *calls*, a local shard is read by system calls, and its file is held
    open for them if *calls* is true.
    """

    def __init__(
        self,
        location: Location,
        index: Index,
        fields: FieldNames | None = None,
        lazy: FieldNames | None = None,
        *,
        scattered: bool = False,
        calls: bool | None = None,
        ranges: Ranges | None = None,
    ):
        self.location = location
        self.name: str = location.name
        self.index = index
        self.ranges: Ranges = location.ranges(index.shard_size) if ranges is None else ranges
        self._scattered = False
        self.scatter(scattered)
        local = self.ranges if isinstance(self.ranges, LocalRanges) else None
        if local is not None:
            if calls is not None:
                local.mapping.read_by_calls(calls)
            index.check(local)
        self._fields = _named(index, fields, self.name)
        self._lazy: list[str | None] | None = None
        if lazy is not None:
            self._lazy = [name and field for name, field in zip(self._fields, _named(index, lazy, self.name))]
            self._fields = [None if file else field for file, field in zip(self._lazy, self._fields)]
        # None for a remote shard, and for one that is not mapped
        self.members: kernels.headers.MappedMembers | None = None
        mapping = None if local is None or local.mapping.unmapped else local.mapping
        if mapping is not None and (index.faults or index.elsewhere or lazy is not None):
            self.members = kernels.headers.MappedMembers(mapping, index.table)
        elif mapping is not None:
            self.members = kernels.headers.MappedMembers(mapping, index.table, url=self.name, names=self._fields)
        # Cached blocks that stay mapped, by the key that a reader gives them.
        self.kept: dict[int, list[HeldMembers]] = {}
        # Samples that need special treatment: faulty ones, and those with links or sparse members.
        self._special: Collection[int] = ()
        if index.faults or index.elsewhere:
            self._special = index.faults.keys() | {index.entry(member)[0] for member in index.elsewhere}

    @property
    def _check(self) -> Callable[[Callable[[int, int], bytes], int, int], None]:
        """``_check_fetched`` for this shard, without the shard, which may hold who calls it."""
        return partial(_check_fetched, self.index, self.location, self.ranges.read)

    @cached_property
    def buffer(self) -> memoryview | None:
        """All bytes of a mapped shard, for kernels only; None for another shard, and without compiled kernels."""
        if not kernels.IS_COMPILED or not isinstance(self.ranges, LocalRanges):
            return None
        try:
            return memoryview(self.ranges.mapping)
        except TypeError:
            return None

    def read(self, sample: int, held: Sequence[HeldMembers] | None = None) -> Sample:
        """Return the sample with this number; raise OpenError, which names it, if it cannot be read.

        A sample of a remote shard is taken from *held*, if given, or else fetched. Raises SampleError for a sample that
        the index marks as faulty.
        """
        fields = self._fields
        if self._special and sample in self._special:
            fields = self._plain_fields(sample)
        result: Sample = {"__key__": "", "__url__": self.name}
        try:
            members = self.members
            if members is None:
                held = self.fetch([sample]) if held is None else held
                if len(held) != 1 or not held[0].fill(result, fields, sample):
                    self._take(result, sample, held, fields)
            else:
                undecided = members.fill(result, fields, sample, 0)
                while undecided >= 0:
                    self._decide(undecided)
                    undecided = members.fill(result, fields, sample, undecided + 1)
            if self._special or self._lazy:
                self._complete(result, sample)
        except OSError as error:
            raise self._failure(error, sample) from error
        except MemoryError:
            raise MemoryError(f"{self.name}: {visible(self.index.key(sample))}: does not fit into memory") from None
        return result

    def _failure(self, error: OSError, sample: int) -> TarshardsError:
        """Return the error for a sample that cannot be read, or for the index if it has been written to."""
        try:
            key, header = self.index.look_up(sample)
        except ShardIndexError as broken:
            return broken
        offset = getattr(error, "offset", None) or header
        return OpenError(error.strerror or str(error), url=self.name, offset=offset, key=key, errno=error.errno)

    def _plain_fields(self, sample: int) -> list[str | None]:
        """Return the fields to read of a special sample, without links and sparse members; raise if it is faulty."""
        if sample in self.index.faults:
            raise self.index.fault(sample, self.name)
        fields = list(self._fields)
        for member in range(*self.index.span(sample)):
            if member in self.index.elsewhere:
                fields[self.index.entry(member)[1]] = None
        return fields

    def _content(self, member: int, leave: Callable[[int, int], Any] | None = None) -> Any:
        """Return the content of a link or sparse member, after comparing its headers and those of its target."""
        self._check_size()
        ranges = self.ranges

        def begins(header: int, start: int) -> bool:
            low = max(0, start - BLOCK - NEAR) if ranges.remote else 0
            return first_header(ranges.read_up_to, start - BLOCK, low) >= header

        try:
            contents = SpecialMembers(ranges.read_up_to, bomb=partial(bomb, max_ratio=self.location.remote.max_ratio))
            return contents.read(self.index.elsewhere[member], leave, begins)
        except UnresolvedError as error:
            key, field = self.index.named(member)
            raise ShardIndexError(f"stale index: {error}; {REBUILD}", url=self.name, key=key, field=field) from error

    def _take(
        self,
        result: Sample,
        sample: int,
        held: Sequence[HeldMembers],
        fields: list[str | None],
        *,
        again: bool = True,
    ) -> None:
        result["__key__"] = self.index.key(sample)
        if len(held) > 1:
            begin, end = self.index.span(sample)
            held = [members for members in held if members.begin < end and members.end > begin]
        for members in held:
            if not members.fill(result, fields, sample):
                found = self._fetch_again(sample, members) if again else self.fetch([sample], mapped=False)
                return self._take(result, sample, found, fields, again=False)
        return None

    def find_kept(self, key: int) -> list[HeldMembers] | None:
        """Return the block with this key if it is mapped and unchanged."""
        kept = self.kept.get(key)
        return kept if kept is not None and all(members.is_current() for members in kept) else None

    def _fetch_again(self, sample: int, members: HeldMembers) -> list[HeldMembers]:
        """Fetch *sample* again because the file of *members* is gone; a block that stays cached is mapped again."""
        for key, kept in list(self.kept.items()):
            if members in kept:
                first, last = (self.index.entry(member)[0] for member in (kept[0].begin, kept[-1].end - 1))
                found = self.fetch(np.arange(first, last + 1))
                self.keep(key, found)
                return found
        return self.fetch([sample], mapped=False)

    def keep(self, key: int, held: list[HeldMembers]) -> bool:
        """Keep a block mapped if it stays in the cache; return whether it does."""
        stays = all(members.stays for members in held)
        if stays:
            self.kept[key] = held
        else:
            self.kept.pop(key, None)
        return stays

    def _complete(self, result: Sample, sample: int) -> None:
        """Add the lazy fields, links and sparse members of a sample to *result*."""
        for member in range(*self.index.span(sample)):
            number = self.index.entry(member)[1]
            if self._lazy and (field := self._lazy[number]) is not None:
                result[field] = self.file(member)
            elif member in self.index.elsewhere and (field := self._fields[number]) is not None:
                result[field] = self.take(member)

    def file(self, member: int) -> MemberFile:
        """Return a member as a file; a remote member's header is compared at the first read."""
        index, head = self.index, None
        offset, size = index.data_range(member)
        name = ".".join(index.named(member))
        if member in index.elsewhere:
            content = self._content(member, lambda *found: found)
            if isinstance(content, bytes):
                return MemberFile.of(content, name=name, url=self.name)
            offset, size = content
        elif self.members is None:
            low = first_byte(index, member)
            head = MemberHeaders(offset - low, partial(self._check_head, member, low))
        elif error := self.find_stale(np.array([member])).get(0):
            raise error
        return MemberFile(self.location, self.ranges, offset, size, name=name, head=head)

    def _check_head(self, member: int, low: int, head: bytes) -> None:
        """Raise ShardIndexError unless *head*, bytes of a remote shard that begin at *low*, has a member's headers."""
        self._check_size()
        self._check_end(member + 1, self.ranges.read_up_to)
        self._check(lambda at, size: head[at - low : at - low + size], low, member)

    def take(self, member: int) -> bytes:
        """Return the content of one member."""
        if member in self.index.elsewhere:
            return self._content(member)
        if self.members is None:
            low = first_byte(self.index, member)
            data = self._fetch(low, self._stop(member + 1) - low, mapped=False)
            return self._hold(member, member + 1, low, data).take(member)
        if error := self.find_stale(np.array([member])).get(0):
            raise error
        return self.ranges.read(*self.index.data_range(member))

    def find_stale(self, members: np.ndarray) -> dict[int, TarshardsError]:
        """Compare the headers of many *members* (int64) of a local shard; return the errors by position.

        A member that has matched is not compared again: it matches until the file is written to, which
        ``Ranges.verify`` detects.
        """
        undecided = kernels.headers.find_undecided([self.members], np.zeros(len(members), np.int64), members)
        decided = ((i, self.decide(int(members[i]))) for i in undecided)
        return {i: error for i, error in decided if error is not None}

    def decide(self, member: int) -> TarshardsError | None:
        """Compare a local member that the kernel could not decide on; return its error, or None."""
        assert self.members is not None
        try:
            self._decide(member)
        except TarshardsError as error:
            return error
        self.members.settle(member)
        return None

    def _decide(self, member: int) -> None:
        if member in self.index.elsewhere:  # the bytes after its header are not its content
            raise self.index.not_plain(member, self.name)
        check_header(self.ranges.read, self.index, member, url=self.name)

    def fetch(self, samples: Sequence[int] | np.ndarray, *, mapped: bool = True) -> list[HeldMembers]:
        """Return the members of *samples*, in ascending order, of a remote shard; nearby samples share a request.

        With *mapped*, blocks on the disk of a cache are mapped instead of read.
        """
        held = []
        for begin, end, low, size in self._ranges_of(np.asarray(samples, np.int64)):
            held.append(self._hold(begin, end, low, self._fetch(low, size, mapped=mapped)))
        return held

    def take_ahead(self, samples: np.ndarray) -> Steps[list[FetchedMembers]]:
        """Fetch the members of *samples*, in ascending order, of a remote shard; ``hold`` makes use of them."""
        fetched = []
        for begin, end, low, size in self._ranges_of(samples):
            try:
                data = yield from self.ranges.take(low, size)
            except OpenError as error:
                raise self._refused(error) from error
            fetched.append((begin, end, low, data))
        return fetched

    def hold(self, fetched: list[FetchedMembers]) -> list[HeldMembers]:
        """Return fetched members."""
        self._check_size()
        return [self._hold(*each) for each in fetched]

    def _fetch(self, low: int, size: int, *, mapped: bool) -> Any:
        """Return *size* bytes of a remote shard, starting at *low*."""
        try:
            data = self.ranges.hold(low, size) if mapped else self.ranges.read(low, size)
        except OpenError as error:
            raise self._refused(error) from error
        self._check_size()
        return data

    def _refused(self, error: OpenError) -> OpenError:
        """Return *error*, with what to do if the server has no ranges."""
        from tarshards.storage.requests import NO_RANGES

        if error.reason != NO_RANGES:
            return error
        return OpenError(f"{NO_RANGES}; index=False streams shards whole", url=self.name)

    def _hold(self, begin: int, end: int, low: int, data: Any) -> HeldMembers:
        """Return members of a remote shard; if the last one is among them, first compare the end of the archive."""
        members = HeldMembers(self.index, begin, end, low, data, self._check)
        is_here = (self.index.archive_end or 0) + BLOCK <= self._stop(end)
        self._check_end(end, members.cut if is_here else self.ranges.read_up_to)
        return members

    def _check_end(self, end: int, read: Callable[[int, int], bytes]) -> None:
        """Raise ShardIndexError if *end* is behind the last member of a remote shard, but other members follow now."""
        if end == self.index.members and (last := self.index.archive_end) is not None:
            self.index.check_end(read(last, BLOCK))

    def _stop(self, end: int) -> int:
        """Return the offset where a read of the members before *end* stops; it may include the end of the archive."""
        stop = sum(self.index.data_range(end - 1))
        last = self.index.archive_end
        if end == self.index.members and last is not None and last + BLOCK - stop <= tuning.FIRST_BYTES // 8:
            stop = min(last + BLOCK, self.index.shard_size)
        return stop

    def ask(self, samples: np.ndarray, fields: FieldNames | None = None) -> None:
        """Let the system read *samples* (ascending) of a mapped shard into memory, with the headers to compare.

        It reads *fields*, or by default the fields that ``read`` returns.
        """
        if self.buffer is None:
            return
        begin = address_of(self.buffer)
        lows, sizes = [], []
        for first, _, low, size in self._ranges_of(samples, fields):
            if first and (before := self.index.data_range(first - 1)[0] - BLOCK) < low:  # compared too
                lows.append(before)
                sizes.append(BLOCK)
            lows.append(low)
            sizes.append(size)
        kernels.rows.ask(np.array(lows, np.uint64) + np.uint64(begin), np.array(sizes, np.int64))

    def scatter(self, flag: bool) -> None:
        """Tell the system whether reads of a local shard are scattered, so that it does not read ahead."""
        if flag != self._scattered and isinstance(self.ranges, LocalRanges):
            self.ranges.scatter(flag)
            self._scattered = flag

    def drop(self, samples: Sequence[int] | np.ndarray) -> None:
        """Let a cache remove the members of *samples*, fetched together before, if it keeps them for one use only."""
        for _, _, low, size in self._ranges_of(np.asarray(samples, np.int64)):
            self.ranges.drop(low, size)

    def _ranges_of(self, samples: np.ndarray, fields: FieldNames | None = None) -> list[tuple[int, int, int, int]]:
        """Return the requests for *samples*: begin and end of the members, the first byte, and the number of bytes."""
        ranges = []
        for begin, end in self._members_of(samples, fields):
            low = first_byte(self.index, begin)
            ranges.append((begin, end, low, self._stop(end) - low))
        return ranges

    def _members_of(self, samples: np.ndarray, fields: FieldNames | None) -> list[tuple[int, int]]:
        """Return the members of *samples* whose fields are read: a begin and an end for each request."""
        index, are_read = self.index, np.array([name is not None for name in self._fields], np.bool_)
        if fields is not None:
            are_read &= np.array([name in fields for name in index.fields], np.bool_)
        is_whole = bool(are_read.all())
        if not len(samples):
            return []
        if is_whole and samples[-1] - samples[0] + 1 == len(samples):
            begin, end = index.firsts(np.array([samples[0], samples[-1] + 1])).tolist()
            return [(begin, end)]
        begins, ends = index.firsts(np.concatenate((samples, samples + 1))).reshape(2, -1)
        members = np.concatenate([np.arange(begin, end) for begin, end in zip(begins.tolist(), ends.tolist())])
        entries = index.entries(members)
        if not is_whole:
            kept = are_read[entries[:, 1]]
            members, entries = members[kept], entries[kept]
        if not len(members):
            return []
        begins = np.array([first_byte(self.index, member) for member in members.tolist()])
        ends = entries[:, 2] + entries[:, 3]
        cuts = np.flatnonzero(begins[1:] - ends[:-1] > tuning.FIRST_BYTES // 8) + 1
        return [(int(part[0]), int(part[-1]) + 1) for part in np.split(members, cuts)]

    def _check_size(self) -> None:
        """Raise ShardIndexError if an answer shows that the length of a remote shard has changed."""
        if self.ranges.size != self.index.shard_size:
            self.index.check_size(self.ranges.size)


def _named(index: Index, names: FieldNames | None, url: str) -> list[str | None]:
    """Return the fields of an index, with None for those not in *names* (None: all are in it)."""
    if names is None:
        return index.fields  # type: ignore[return-value]
    names.check(index.fields, url)
    return [field if field in names else None for field in index.fields]


class HeldIndexes:
    """Indexes by the numbers of their shards, the first to be released first, and the *bytes* that they take."""

    def __init__(self) -> None:
        self._indexes: dict[int, Index] = {}
        self.bytes: int = 0

    def __len__(self) -> int:
        return len(self._indexes)

    def find(self, number: int) -> Index | None:
        return self._indexes.get(number)

    def add(self, number: int, index: Index) -> None:
        self.remove(number)
        self._indexes[number] = index
        self.bytes += index.nbytes

    def remove(self, number: int) -> None:
        if (index := self._indexes.pop(number, None)) is not None:
            self.bytes -= index.nbytes

    def remove_oldest(self) -> int:
        """Release the index that was added first; return the number of its shard."""
        oldest = next(iter(self._indexes))
        self.remove(oldest)
        return oldest


class OpenShards:
    """The shards of a dataset: a process loads an index, and opens a shard, once, at the first use.

    Indexes are mapped, and kept with their shards. A process keeps up to ``most_open`` local shards; before one more is
    opened, one that has not been used recently is released. Objects that refer to a released shard can still read it.
    In a dataset with more shards than that, small shards are not kept, but their indexes are, up to 128 MiB.

    Threads that need the same shard wait for the one that opens it. A forked process inherits the open shards; a
    pickled copy has none.

    Indexes of remote shards are mapped from the cache, or are in memory shared with processes that are forked later. If
    they need too much memory, the oldest are released, and a warning says so.

    *counts* has the number of samples of each shard and *sizes* its bytes, from the manifest or else from the beginning
    of its index. Raises ShardIndexError if there is no index; a stale index is detected when its shard is opened.

    What is held of a shard, if anything, follows from its state:

    - *loaded*: its index is in one table: in ``_local``, whose length is limited, or in ``_small`` or ``_remote``,
      whose bytes are. A small shard goes no further: it is opened for each use, and not held.
    - *open*, of local shards only: ``_local`` has the open shard instead of its index.
    - *in use*: it is open, and in ``in_use``, with its members in ``tables``, where readers find it without a lock.

    A local shard that is put in use comes last in ``_local``. When half of those that may be held are in use, none is
    any more, and each returns at its next use. So the first that is not in use has not been used for longest: it is
    released before others. A remote shard is released with its index.
    """

    def __init__(self, shards: Shards, fields: FieldNames | None, lazy: FieldNames | None = None):
        self.names: list[str] = names_of(shards.urls)
        self.fields = fields
        self.lazy = lazy
        uncounted = shards.uncounted  # shards whose counts come from their indexes
        self._uncounted: Collection[int] = range(len(shards)) if len(uncounted) == len(shards) else frozenset(uncounted)
        named, missing = with_counts(shards, uncounted, fields, lazy)
        self.named: Shards = named
        if missing:
            location = shards[missing[0]].location()
            load_index(location)  # its error says more
            raise ShardIndexError(MISSING, url=index_location(location).name)
        self._reset()
        self.counts: np.ndarray
        self.sizes: np.ndarray
        self.counts, self.sizes = (np.array(self.named.column(name), np.int64) for name in COUNTS)

    def _reset(self) -> None:
        keep_memory()
        first = self.named[0].location()
        self.remote: Remote = first.remote  # its limits hold for all shards
        self._are_many = kernels.IS_COMPILED and len(self.names) > most_open()
        self._local: dict[int, OpenShard | Index] = {}
        self._small, self._remote = HeldIndexes(), HeldIndexes()
        self.in_use: dict[int, OpenShard] = {}  # always the same dict: loops over samples refer to it
        self.tables: list[kernels.headers.MappedMembers | None] = [None] * len(self.names)
        self._has_warned_of_memory = False
        self._opened = 0  # number of shards opened since the last ``verify``
        self._has_warned_of_opening = False
        self._failed: dict[int, TarshardsError] = {}
        self._changed: TarshardsError | None = None  # a shard had changed when it was released
        self.scattered: bool = False  # whether the samples being read are far apart
        # Memory for indexes of remote shards that processes forked later share; a cache is shared anyway.
        self._shared: SharedBytes | None = None
        if kernels.IS_COMPILED and self.remote.cache_dir is None and not first.is_local:
            from tarshards.storage.shared import SharedBytes

            self._shared = SharedBytes.of(len(self.names), self.remote)

    def index(self, number: int, fetched: Fetched | None = None) -> Index:
        """Return the index of a shard; raise ShardIndexError if it contradicts the manifest.

        If it is not loaded, *fetched* returns the bytes of its sidecar, or raises the error of fetching them.
        """
        with self._lock(number):
            if (index := self.loaded(number)) is not None:
                return index
            shard = self.named[number]
            return self._load(number, shard, shard.location(), fetched)

    def ahead(self, function: Callable[[int, Fetched | None], T], number: int) -> Steps[T]:
        """Return what *function*, ``index`` or ``use``, does of a remote shard; no thread waits for its sidecar."""
        from tarshards.storage.transfer import hold_ahead  # which is loaded only if there are remote shards
        from tarshards.storage.wire import drop, loading, start

        fetched, shared, sidecar = None, self._shared, index_location(self.named[number].location())
        is_known = self.loaded(number) is not None or number in self._failed or sidecar.path is not None
        if not is_known and (shared is None or (yield from shared.claim(number))):
            try:
                fetched = start(hold_ahead(sidecar, MOST_READ))
                yield fetched
                return (yield from loading(function, number, fetched.result))
            finally:
                if fetched is not None:
                    drop(fetched)
                if shared is not None:
                    shared.leave(number)
        return (yield from loading(function, number, None))

    def _load(self, number: int, shard: Shard, location: Location, fetched: Fetched | None = None) -> Index:
        """Load and hold the index of a shard."""
        hold: Hold | None = None if self._shared is None or location.is_local else partial(self._shared.hold, number)
        if fetched is not None:
            hold = partial(_held, fetched, hold)
        try:
            copied = SMALL if self._is_small(number, location) else PAGESIZE
            index = load_index(location, copied, hold, whole=not self._are_large)
            index.check_split(shard.split)
            if problem := self._contradiction(number, index, shard.digest):
                raise ShardIndexError(problem, url=index.url)
        except ShardIndexError:
            if self._shared is not None:
                self._shared.drop(number)
            raise
        self._hold(number, location, index)
        return index

    @cached_property
    def _are_large(self) -> bool:
        """Whether too much time would pass until all that there is of the shards and their indexes is read."""
        return int(self.sizes.sum()) > MOST_WHOLE

    @cached_property
    def are_called(self) -> bool:
        """Whether the shards are read by calls: they do not fit into memory, and their page tables would be many."""
        size = int(self.sizes.sum())
        is_mapped = kernels.IS_COMPILED and self.named.is_local
        return is_mapped and size >= FAR * int(self.counts.sum()) and size > total_memory()

    def _hold(self, number: int, location: Location, index: Index) -> None:
        """Hold a loaded index; release others if there are too many of its kind."""
        with _holding():
            if not location.is_local:
                self._hold_remote(number, index)
            elif self._is_small(number, location):
                self._small.add(number, index)
                while self._small.bytes > HELD:
                    self._small.remove_oldest()
            else:
                self._hold_local(number, index)

    def _hold_local(self, number: int, held: OpenShard | Index) -> None:
        """Hold an index or shard, as the last to be released, instead of what was held of it."""
        if self._local.pop(number, None) is None:
            _make_space(self)
        self._local[number] = held

    def _hold_remote(self, number: int, index: Index) -> None:
        held, most = self._remote, LEAST_AHEAD
        held.add(number, index)
        if held.bytes > most:
            most = max(most, self.remote.held() - (0 if self._shared is None else self._shared.taken))
        while len(held) > 1 and (held.bytes > most or len(held) > most_open()):
            if held.bytes > most and not self._has_warned_of_memory:
                self._has_warned_of_memory = True
                log.warning(DO_NOT_FIT, visible(self.names[0]), self.remote.held() / 1e6)
            self.in_use.pop(held.remove_oldest(), None)

    def _contradiction(self, number: int, index: Index, known: str | None) -> str | None:
        """Describe how an index contradicts the manifest, or its state when the dataset was opened, or None."""
        found, expected = (len(index), index.shard_size), (self.counts[number], self.sizes[number])
        for mine, its, unit in zip(found, expected, ("samples", "bytes")):
            if mine != its and number in self._uncounted:
                return f"{mine} {unit}, but {its} when the dataset was opened; open it again"
            if mine != its:
                return f"{mine} {unit}, but {its} in the manifest; write both again with `tarindex`"
        return None if index.digest is None or known is None or index.digest.hex() == known else OTHER

    def loaded(self, number: int) -> Index | None:
        """Return the index of a shard if it is loaded."""
        held = self._local.get(number)
        if held is None:
            held = self._small.find(number)
        if held is None:
            held = self._remote.find(number)
        return held.index if isinstance(held, OpenShard) else held

    def _find_open(self, number: int) -> OpenShard | None:
        held = self.in_use.get(number) or self._local.get(number)
        return held if isinstance(held, OpenShard) else None

    def open(self, number: int) -> OpenShard:
        """Return the current version of a shard; raise TarshardsError if it cannot be opened or its index is stale.

        An open shard is returned unless its file has been replaced or written to; then it is released.
        """
        with self._lock(number):
            shard = self._find_open(number)
            if shard is None:
                return self._open(number)
            if shard.ranges.remote or shard.ranges.is_current():
                return shard
            with _holding():
                self._local.pop(number, None)
                self.in_use.pop(number, None)
                self.tables[number] = None
            self._note_change(shard)
            return self._open(number)

    def _with(self, location: Location, index: Index, ranges: Ranges | None = None) -> OpenShard:
        calls = len(self._local) < most_held() if self.are_called else None
        return OpenShard(location, index, self.fields, self.lazy, scattered=self.scattered, calls=calls, ranges=ranges)

    def _open(self, number: int, fetched: Fetched | None = None) -> OpenShard:
        """Open a shard, and put it in use, except for small shards of a dataset with too many shards."""
        entry = self.named[number]
        location = entry.location()
        self._opened += 1
        if self._opened > 2 * len(self.names) > 2 * most_open() and not self._has_warned_of_opening:
            self._has_warned_of_opening = True
            log.warning(TOO_MANY, visible(location.name), len(self.names), most_open())
        is_small = self._is_small(number, location)
        ranges = LocalRanges(str(location.path), location.name, SMALL) if is_small else None
        try:
            index = self.loaded(number)
            if index is None:
                index = self._load(number, entry, location, fetched)
            shard = self._with(location, index, ranges)
        except ShardIndexError:
            with _holding():  # the next try loads the index again
                self._local.pop(number, None)
                self._small.remove(number)
            raise
        return shard if is_small else self._enter(number, shard)

    def _is_small(self, number: int, location: Location) -> bool:
        return self._are_many and self.sizes[number] <= SMALL and location.is_local

    def use(self, number: int, fetched: Fetched | None = None) -> OpenShard:
        """Return a shard for reading samples: the same one until it is released, even if its file is replaced.

        If opening it has failed, the error is raised again until ``begin`` or ``verify`` is called. *fetched* is as for
        ``index``.
        """
        with self._lock(number):
            if (shard := self.in_use.get(number)) is not None:
                return shard
            if number in self._failed:
                raise self._failed[number].with_traceback(None)
            if (shard := self._find_open(number)) is not None:
                return self._enter(number, shard)
            try:
                return self._open(number, fetched)
            except TarshardsError as error:
                self._failed[number] = error
                raise

    def scatter(self, flag: bool) -> None:
        """Set whether shards are read at scattered offsets; False also applies to those already open."""
        self.scattered = flag
        if not flag:
            for shard in self._open_local():
                shard.scatter(False)

    def begin(self) -> None:
        """Begin a pass: try shards that failed to open again, since the error may have ended the previous pass."""
        self._failed.clear()

    def verify(self) -> None:
        """Raise OpenError if a local shard in use has been written to; shards that failed to open are tried again."""
        self._failed.clear()
        self._opened = 0
        if self._changed is not None:
            error, self._changed = self._changed, None
            raise error
        for shard in self._open_local():
            shard.ranges.verify()

    def _open_local(self) -> list[OpenShard]:
        return [held for held in list(self._local.values()) if isinstance(held, OpenShard)]

    def indexes(self) -> Iterator[Index]:
        """Yield the index of each shard, several loaded in parallel."""
        if self.named.is_local:
            yield from chain.from_iterable(for_some_shards(lambda some: list(map(self.index, some)), self.named))
            return
        from tarshards.storage.wire import results

        steps = (self.ahead(self.index, number) for number in range(len(self.named)))
        yield from results(steps, 2 * self.remote.connections)

    def each_key(self) -> Iterator[str]:
        """Yield the keys of all samples; loads every index, several in parallel."""
        for index in self.indexes():
            yield from index.keys

    def key(self, sample: int) -> str:
        """Return the key of the sample with this number over all shards."""
        number, own = map(int, self.in_shards(sample))
        return self.index(number).key(own)

    def in_shards(self, samples: Any) -> tuple[Any, Any]:
        """Return the shards of the samples of these numbers over all shards, and their numbers in them."""
        shards = np.searchsorted(self._ends, samples, "right")
        return shards, samples - (self._ends - self.counts)[shards]

    @cached_property
    def _ends(self) -> np.ndarray:
        """The cumulative numbers of samples."""
        return np.cumsum(self.counts)

    @cached_property
    def key_index(self) -> KeyIndex | None:
        """The file with the numbers of all samples by key, if these shards have one."""
        locations = self.named.locations()
        return KeyIndex.open(locations, self.counts.tolist(), lambda number: self.index(number).keys, self._digests)

    def _digests(self) -> list[bytes | None]:
        """Return the digest of each shard from its index, or for remote shards from the manifest if it has one."""

        def find(number: int) -> bytes | None:
            shard = self.named[number]
            location = shard.location()
            if shard.digest is not None and not location.is_local:
                return bytes.fromhex(shard.digest)
            index = self.loaded(number)
            return read_head(location).digest if index is None else index.digest

        return list(chain.from_iterable(for_some_shards(lambda some: list(map(find, some)), self.named)))

    @cached_property
    def table(self) -> KeyIndex | KeyTable:
        """The numbers of all samples by key."""
        return self.key_index or KeyTable(self.each_key(), int(self.counts.sum()), self.key)

    @staticmethod
    def _lock(number: int) -> threading.RLock:
        return _opening()[number % LOCKS]

    def _enter(self, number: int, shard: OpenShard) -> OpenShard:
        """Put an opened shard in use, and return it."""
        with _holding():
            if isinstance(shard.ranges, LocalRanges):
                if len(self.in_use) >= max(1, most_open()) // 2:
                    self._end_use()
                self._hold_local(number, shard)
            self.in_use[number] = shard
            self.tables[number] = shard.members
        return shard

    def _release(self) -> bool:
        """Release the first local shard that is not in use, after which those before it come last; False for none."""
        for _ in range(len(self._local)):
            number = next(iter(self._local))
            held = self._local.pop(number)
            if number not in self.in_use:
                if isinstance(held, OpenShard):
                    self._note_change(held)
                return True
            self._local[number] = held
        return False

    def _end_use(self) -> None:
        """End the use of all local shards."""
        for number in [number for number in self.in_use if number in self._local]:
            del self.in_use[number]
            self.tables[number] = None

    def _note_change(self, used: OpenShard) -> None:
        """Record the error if a shard that is being released was written to while it was in use."""
        try:
            used.ranges.verify()
        except TarshardsError as error:
            self._changed = error

    def __getstate__(self) -> dict[str, Any]:
        names = "named", "names", "fields", "lazy", "counts", "sizes", "_uncounted"
        return {name: self.__dict__[name] for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()


_all_shards: list[ref[OpenShards]] = []  # all in this process that have opened local shards


def _make_space(shards: OpenShards) -> None:
    """Make space for one more local shard: if the process has reached its limit, release the first of a dataset."""
    every = [each for reference in _all_shards if (each := reference()) is not None]
    if shards not in every:
        every.append(shards)
        _all_shards[:] = map(ref, every)
    while sum(len(each._local) for each in every) >= max(1, most_open()):
        if not any(each._release() for each in [shards, *every]):
            for each in every:
                each._end_use()


_holding = PerProcess(threading.RLock)  # protects the tables of what is held
_opening = PerProcess(lambda: [threading.RLock() for _ in range(LOCKS)])  # protect the opening of shards


def _held(fetched: Fetched, hold: Hold | None, _: object) -> Any:
    """Return the bytes that were fetched, in shared memory if there is any."""
    return fetched() if hold is None else hold(lambda allocate: fetched())


def _check_fetched(
    index: Index,
    location: Location,
    read: Callable[[int, int], bytes],
    cut: Callable[[int, int], bytes],
    low: int,
    member: int,
) -> None:
    """Raise ShardIndexError unless the fetched bytes, which begin at *low* and *cut* returns, have its headers.

    The fetched bytes are compared, not those that the server has now: a cache may contain earlier bytes.
    """
    if member in index.elsewhere:
        raise index.not_plain(member, location.name)
    try:
        check_fetched(cut, low, read, index, member, url=location.name)
    except ShardIndexError as error:
        if location.remote.cache_dir is None:
            raise
        reason = f"{error.reason}, or remove older blocks from the cache with `tarcache purge`"
        raise ShardIndexError(
            reason, url=location.name, offset=error.offset, key=error.key, field=error.field
        ) from error


def load_index(location: Location, copied: int = PAGESIZE, hold: Hold | None = None, *, whole: bool = True) -> Index:
    """Load the index of a shard; if it is missing because the shard is compressed, the error says so."""
    try:
        return Index.load(location, check=False, whole=whole, copied=copied, hold=hold)
    except ShardIndexError as error:
        if error.reason != MISSING:
            raise
        with location.ranges() as ranges:
            refuse_compressed(ranges, location)
        raise
