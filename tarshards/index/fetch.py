"""Samples of remote shards: their blocks are prefetched in the order in which an epoch uses them.

A block is a run of consecutive samples and costs one request. It is fetched before its first sample is needed and stays
in memory until its last one was read, as far as the plan is known. If only some of its samples are used, only their
bytes are fetched.

``Blocks`` decides what to fetch, ``FetchQueue`` when, and ``KeptBlocks`` which blocks of a cache stay mapped.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from weakref import WeakSet, ref

import numpy as np

from tarshards import kernels
from tarshards.errors import OpenError, TarshardsError, visible
from tarshards.index.header_checks import HeldMembers
from tarshards.index.readahead import Numbers, in_parts
from tarshards.samples.keys import Sample
from tarshards.storage import traffic, tuning
from tarshards.storage.ahead import Fetch, FetchQueue
from tarshards.storage.cache import BlockCache
from tarshards.storage.connections import connect_ahead
from tarshards.storage.location import Location
from tarshards.storage.ranges import most_held
from tarshards.storage.wire import Steps, Task, drop, load_soon, loading, start

if TYPE_CHECKING:
    from tarshards.index.open import FetchedMembers, OpenShard, OpenShards

log: logging.Logger = logging.getLogger("tarshards")

MOST_KEPT = 1 << 14  # blocks that stay mapped; a process may have 65,530 mappings

TOO_LITTLE = (
    "%s: the samples that are shuffled together have %.0f MB, and %.0f MB may be held, so blocks are requested in "
    "parts; give a smaller pool= or block=, more memory with Remote(ahead=), or a disk with Remote(cache_dir=)"
)

Found = tuple["OpenShard", list[HeldMembers]]  # a shard, and members of it in memory or mapped
Fetched = tuple["OpenShard", "list[FetchedMembers] | list[HeldMembers]"]


def connect(location: Location, count: int, indexes: int = 0) -> None:
    """Open idle connections to the server of *location* until there are *count*, unless a cache may need none.

    The next *indexes* that are loaded share them.
    """
    remote, cache = location.remote, BlockCache.of(location.remote)
    if cache is not None and not cache.is_empty():
        return
    with suppress(TarshardsError):  # raised again when it is read
        if (address := location.address()) is not None:
            connect_ahead(address.read_url, count, files=indexes, timeout=remote.timeout)


def samples_a_block(counts: np.ndarray, means: np.ndarray, block: int | None) -> np.ndarray:
    """Return how many samples a block of each shard has: *block*, or if that is None about 2 MiB of them.

    *counts* are the samples of each shard, *means* their bytes on average.
    """
    units = np.maximum(tuning.REQUEST_BYTES / means, 1) if block is None else np.full(len(means), block)
    return np.minimum(units, counts).astype(np.int64)


def _fraction_read(shards: OpenShards) -> float:
    """Return the fraction of bytes that are not in lazy fields, by the index of the first shard."""
    lazy = shards.lazy
    if lazy is None:
        return 1.0
    index = shards.index(0)
    are_lazy = np.array([field in lazy for field in index.fields], np.bool_)[index.field]
    return 1 - float(index.size[are_lazy].sum()) / index.shard_size


class SampleBlock(Fetch):
    """The samples of one block of *shard* that will be read, fetched together.

    *left* reads of them are still expected, and *readers* wait for them now. While it *is_open*, others may join.
    """

    left: int = 0
    readers: int = 0
    found: Found | None = None  # set when the block has arrived

    def __init__(self, key: int, shard: int, samples: set[int] | range | None = None):
        self.key = key
        self.shard = shard
        self.samples: set[int] | range = set() if samples is None else samples
        self.is_open: bool = samples is None

    def takes(self, samples: np.ndarray) -> bool:
        """Return whether the block includes *samples*, or they can join it."""
        return self.is_open or all(map(self.samples.__contains__, samples.tolist()))

    def add(self, samples: np.ndarray) -> None:
        self.left += len(samples)
        if isinstance(self.samples, set):
            self.samples.update(samples.tolist())

    def settle(self) -> None:
        self.is_open = False

    @property
    def numbers(self) -> np.ndarray:
        """Its samples in ascending order, once settled."""
        return np.array(sorted(self.samples), np.int64)


class Blocks:
    """The blocks of upcoming samples, in the order of their first use; nothing is read here.

    *counts* are the samples of each shard, *units* those of its blocks, and *means* the bytes of one sample. With
    *are_whole* a block is fetched whole, even if only some of its samples are used. The first *singles* samples are
    blocks of their own.
    """

    def __init__(self, counts: np.ndarray, units: np.ndarray, means: np.ndarray, *, are_whole: bool, singles: int = 0):
        self.counts = counts
        self.units = units
        self._means = means
        self._units = units.tolist()
        self._are_whole, self._singles = are_whole, singles
        self._blocks: dict[int, list[SampleBlock]] = {}  # by their keys, those of the first samples first
        self._queue: deque[SampleBlock] = deque()

    def keys(self, shards: np.ndarray, samples: np.ndarray) -> np.ndarray:
        """Return the keys of the blocks that have *samples*."""
        return shards << 32 | samples // self.units[shards]

    def add(self, shards: np.ndarray, samples: np.ndarray) -> None:
        """Add the samples that will be read next; with more samples at once, fewer blocks are fetched in parts."""
        keys = self.keys(shards, samples)
        if self._singles:
            left = self._add_singles(keys[: self._singles], samples)
            self._singles = 0
            keys, samples = keys[left], samples[left]
        if not len(keys):
            return
        order = np.argsort(keys, kind="stable")
        keys, samples = keys[order], samples[order]
        begins = np.flatnonzero(np.concatenate(([True], keys[1:] != keys[:-1])))
        ends = np.append(begins[1:], len(keys))
        for group in np.argsort(order[begins], kind="stable").tolist():  # in the order of their first samples
            begin, end = int(begins[group]), int(ends[group])
            self._add(int(keys[begin]), samples[begin:end])

    def _add_singles(self, keys: np.ndarray, samples: np.ndarray) -> np.ndarray:
        """Add the first samples, one for each of *keys*, as blocks; return the positions of the other samples."""
        singles: dict[tuple[int, int], int] = {}
        for position, (key, sample) in enumerate(zip(keys.tolist(), samples.tolist())):
            if singles.setdefault((key, sample), position) == position:
                self._enter(SampleBlock(key, key >> 32, {sample})).left = 1
        return np.delete(np.arange(len(samples)), list(singles.values()))

    def _add(self, key: int, samples: np.ndarray) -> None:
        blocks, shard = self._blocks.get(key), key >> 32
        if blocks and blocks[-1].takes(samples):
            block = blocks[-1]
        else:
            block = self._enter(SampleBlock(key, shard, self._whole(key) if self._are_whole else None))
        block.add(samples)
        if block.is_open:
            block.size = int(min(block.left, self._units[shard]) * self._means[shard])

    def _whole(self, key: int) -> range:
        shard, number = key >> 32, key & (1 << 32) - 1
        begin, unit = number * self._units[shard], self._units[shard]
        return range(begin, min(begin + unit, int(self.counts[shard])))

    def _enter(self, block: SampleBlock) -> SampleBlock:
        block.size = int((self._units[block.shard] if self._are_whole else 1) * self._means[block.shard])
        self._blocks.setdefault(block.key, []).append(block)
        self._queue.append(block)
        return block

    def next(self) -> SampleBlock | None:
        """Return the next block to fetch; None if there is none."""
        return self._queue.popleft() if self._queue else None

    def at(self, shard: int, sample: int) -> Sequence[SampleBlock]:
        """Return the parts of a sample's block to read."""
        return self._blocks.get(shard << 32 | sample // self._units[shard], ())

    def find(self, shard: int, sample: int) -> SampleBlock | None:
        """Return the part for the next read of a sample; None if no read of it was added."""
        for block in self.at(shard, sample):
            if block.left and sample in block.samples:
                return block
        return None

    def remove(self, block: SampleBlock) -> bool:
        """Remove a part, and return whether it was the last of its block."""
        blocks = self._blocks[block.key]
        blocks.remove(block)
        if not blocks:
            del self._blocks[block.key]
        return not blocks


class KeptBlocks:
    """Cached blocks that stay mapped, so that later epochs take samples from them as from local shards.

    A process keeps at most *most*, and holds the files of ``most_held`` open. *units* are the samples of a block of
    each shard.
    """

    def __init__(self, shards: OpenShards, units: np.ndarray, most: int):
        self._shards, self._unit, self._units, self._most = shards, units, units.tolist(), most
        self._count = sum(len(shard.kept) for shard in shards.in_use.values())
        self._may_hold = most_held()

    def find(self, opened: OpenShard, shard: int, sample: int) -> list[HeldMembers] | None:
        """Return the block of a sample if it is mapped."""
        return opened.kept.get(_kept_key(sample, self._units[shard]))

    def find_block(self, opened: OpenShard, block: SampleBlock) -> list[HeldMembers] | None:
        """Return a block if it is mapped and unchanged."""
        kept = opened.find_kept(self._key(block))
        if kept is not None:
            traffic.count("cache_hits")
        return kept

    def keep(self, opened: OpenShard, block: SampleBlock, held: list[HeldMembers]) -> None:
        """Keep a block if it stays in the cache."""
        if self._count < self._most and opened.keep(self._key(block), held):
            self._count += 1
            for members in held:
                if len(_held_open) < self._may_hold:  # the datasets of a process share its descriptors
                    _held_open.add(members)
                    members.hold_open()

    def _key(self, block: SampleBlock) -> Any:
        return _kept_key(min(block.samples), self._units[block.shard])

    def has_all(self, reach: int) -> bool:
        """Return whether all blocks of all shards are mapped; False for fewer samples, *reach*, than blocks."""
        counts = self._shards.counts
        blocks = int((-(-counts // self._unit)).sum())
        if blocks > min(self._most, reach):  # looking them up would take longer than reading
            return False
        for shard, (count, unit) in enumerate(zip(counts.tolist(), self._units)):
            opened = self._shards.in_use.get(shard)
            keys = (_kept_key(sample, unit) for sample in range(0, count, unit))
            if not all(opened is not None and opened.find_kept(key) for key in keys):
                return False
        traffic.count("cache_hits", blocks)
        return True

    def read(self, shards: np.ndarray, samples: np.ndarray) -> Iterator[Sample | TarshardsError]:
        """Yield samples of mapped blocks, or the error for a sample that cannot be read."""
        in_use, use = self._shards.in_use, self._shards.use
        keys = _kept_key(samples, self._unit[shards]).tolist()
        for shard, sample, key in zip(shards.tolist(), samples.tolist(), keys):
            try:
                opened = in_use.get(shard) or use(shard)
                result: Sample | TarshardsError = opened.read(sample, opened.kept.get(key))
            except TarshardsError as error:
                result = error
            yield result


_held_open: WeakSet[HeldMembers] = WeakSet()  # of all datasets of this process


def _kept_key(sample: Any, unit: Any) -> Any:
    """Return the key of the block of a sample, or of many, among blocks of several lengths that a shard may keep."""
    return sample // unit << 32 | unit


class BlockFetcher:
    """Reads samples from prefetched blocks; *upcoming* yields the numbers of the samples that will be read.

    *block* is the number of samples in a block, None for about 2 MiB of them. A block may be used up to *reach* samples
    after its first use. At most *budget* bytes are held or in transfer, more only if one block requires it. Mapped
    blocks of a cache are not counted. Several threads may read.

    If all shards fit into *budget* or into the cache, blocks have 2 MiB. If the samples that are shuffled together
    exceed *budget*, the cache reserves space for them. Without a cache, or if that is too small, blocks are fetched in
    parts, because *reach* is limited, and a warning says so. If the reader *is_alone* on this host, the cache drops a
    block of this space after its last use.

    The indexes of the first samples are loaded while the rest of the epoch is looked up. The first samples of a
    shuffled epoch are fetched one by one, so that a first batch arrives soon.
    """

    def __init__(
        self,
        shards: OpenShards,
        upcoming: Iterable[Numbers],
        *,
        block: int | None,
        reach: int,
        budget: int,
        is_alone: bool = False,
    ):
        self._shards, self._upcoming, self._reach = shards, iter(upcoming), reach
        self._furthest = 0  # the reach, if it is limited
        remote, cache = shards.remote, BlockCache.of(shards.remote)
        counts, total = np.maximum(shards.counts, 1), int(shards.sizes.sum())
        means = np.maximum(shards.sizes, 1) / counts
        fits = total <= max(budget, 0 if cache is None else cache.capacity())
        units = samples_a_block(counts, means, None if fits else block)
        means *= _fraction_read(shards)
        self._drops = False  # whether the cache drops blocks after their use
        # Bytes of the samples that are shuffled together.
        by_turns = int(reach * float(np.average(means, weights=counts)))
        if not fits and block is not None and block > 1 and by_turns > budget:
            if cache is not None and kernels.IS_COMPILED and cache.reserve(by_turns) >= by_turns:
                self._drops = is_alone
            else:
                half = max(1, reach * budget // by_turns // 2)  # as many again are added when so many are left
                cache, self._reach, self._furthest = None, half, reach
                self._upcoming = (part for numbers in upcoming for part in in_parts(*numbers, half))
                log.warning(TOO_LITTLE, visible(shards.names[0]), by_turns / 1e6, budget / 1e6)
        is_slow = block is not None and cache is None and float((units * means).max(initial=0)) > tuning.WINDOW_BYTES
        samples = int(shards.counts.sum())
        singles = min(4 * tuning.SOON_SAMPLES, samples // tuning.SOON_SAMPLES, total // tuning.REQUEST_BYTES)
        self._blocks = Blocks(shards.counts, units, means, are_whole=cache is not None, singles=is_slow * singles)
        self._kept = None if cache is None else KeptBlocks(shards, units, 0 if self._drops else MOST_KEPT)
        # If they are, ``read_kept`` is faster than ``read``.
        self.are_kept: bool = self._kept is not None and self._kept.has_all(reach)
        self._queue = FetchQueue(remote.connections, budget, upcoming=self._blocks.next, run=self._weak_fetch())
        self._opening: dict[int, Task[OpenShard]] = {}  # used by the thread that makes steps
        self._scanned = self._taken = 0  # samples: of *upcoming*, and those that have been read
        self._is_begun = False

    def read_kept(self, shards: np.ndarray, samples: np.ndarray) -> Iterator[Sample | TarshardsError]:
        """Yield samples if all blocks *are_kept*, or the error for a sample that cannot be read."""
        assert self._kept is not None
        return self._kept.read(shards, samples)

    def read(self, shard: int, sample: int) -> Sample:
        """Return a sample; raise TarshardsError if it cannot be read."""
        found, waits = None, False
        with self._queue.lock:
            self._taken += 1
            if self._scanned - self._taken < self._reach:
                self._look_ahead(self._reach)
            block = self._blocks.find(shard, sample)
            # Threads may need samples that come later than those which may be held.
            while block is None and self._reach and (ahead := self._scanned - self._taken) < self._furthest:
                self._look_ahead(ahead + 1)
                block = self._blocks.find(shard, sample)
            if block is not None:
                block.left -= 1
                if not self._drops:
                    found = block.found
                # If the cache is full of other blocks, a sample whose block exceeds the budget is read by itself.
                waits = found is None and (self._kept is None or block.work is not None or self._queue.fits(block))
                block.readers += waits
                self._leave(block)
        if found is not None:
            opened, held = found
            return opened.read(sample, held)
        if block is None or not waits:
            return self._shards.use(shard).read(sample)
        try:
            opened, held = self._hold(block, *self._queue.take(block))
            return opened.read(sample, held)
        except TarshardsError as error:
            raise self._named(error, shard, sample) from error
        finally:
            with self._queue.lock:
                block.readers -= 1
                self._leave(block)

    def read_aside(self, shard: int, sample: int) -> Sample:
        """Return a sample that was not upcoming, from a block in memory or by a separate request."""
        with self._queue.lock:
            blocks = self._blocks.at(shard, sample)
            found = next((each.found for each in blocks if each.found and sample in each.samples), None)
        opened, held = found or (self._shards.use(shard), None)
        if held is None and self._kept is not None:
            held = self._kept.find(opened, shard, sample)
        return opened.read(sample, held)

    def _look_ahead(self, reach: int) -> None:
        """Add the next *reach* samples that will be read, all at once, because a block has several of them."""
        parts: list[Numbers] = []
        while self._scanned - self._taken < reach:
            numbers = next(self._upcoming, None)
            if numbers is None:
                self._reach = 0
                break
            self._scanned += len(numbers[0])
            if not self._is_begun:
                self._begin(*numbers)
            parts.append(numbers)
        if parts:
            shards, samples = map(np.concatenate, zip(*parts))
            self._blocks.add(shards, samples)
            self._queue.extend()

    def _begin(self, shards: np.ndarray, samples: np.ndarray) -> None:
        """Load the indexes of the first samples, and open the connections that their blocks need."""
        self._is_begun = True
        first = [
            shard
            for shard in dict.fromkeys(shards[: tuning.SOON_SAMPLES].tolist())
            if self._shards.loaded(shard) is None
        ]
        if first:
            blocks = len(set(self._blocks.keys(shards, samples).tolist()))
            connect(self._shards.named[first[0]].location(), min(blocks, self._shards.remote.connections), len(first))
        start(self._open_first(first))

    def _open_first(self, shards: list[int]) -> Steps[None]:
        """Begin to open shards, all before anything else is requested; an error is raised again by a reader."""
        yield from ()
        for shard in shards:
            start(self._open(shard))

    def _open(self, shard: int) -> Steps[OpenShard]:
        """Return a shard that is ready for use; blocks that need one at the same time wait for the same index."""
        if (opened := self._shards.in_use.get(shard)) is not None:
            return opened
        work = self._opening.get(shard)
        if work is None:
            steps = self._shards.ahead(self._shards.use, shard)
            work = self._opening[shard] = start(steps, lambda _: self._opening.pop(shard, None))
        yield work
        return work.result()

    def _weak_fetch(self) -> Callable[[SampleBlock], Steps[Any]]:
        """Return ``_fetch`` for the queue, which would otherwise be a cycle that holds all blocks and shards."""
        fetcher = ref(self)

        def fetch(block: SampleBlock) -> Steps[Any]:
            alive = fetcher()
            return None if alive is None else (yield from alive._fetch(block))

        return fetch

    def _fetch(self, block: SampleBlock) -> Steps[Any]:
        opened = yield from self._open(block.shard)
        if self._kept is None:
            return opened, (yield from opened.take_ahead(block.numbers))
        held = yield from loading(self._kept.find_block, opened, block)
        if held is None:
            fetched = yield from opened.take_ahead(block.numbers)
            held = yield from loading(self._keep, self._kept, opened, block, fetched)
        block.found = opened, held
        if all(members.is_mapped for members in held):
            self._queue.release(block)  # its bytes are on the disk
        return block.found

    def _keep(self, kept: KeptBlocks, opened: OpenShard, block: SampleBlock, fetched: Any) -> list[HeldMembers]:
        held = opened.hold(fetched)
        kept.keep(opened, block, held)
        return held

    def _hold(self, block: SampleBlock, opened: OpenShard, fetched: Any) -> Found:
        """Return the members that were fetched of a block; several threads may do so at once."""
        found = block.found
        if found is None:
            found = block.found = opened, fetched if self._kept is not None else opened.hold(fetched)
        return found

    def _leave(self, block: SampleBlock) -> None:
        """Release a block if that was its last read."""
        if block.left or block.readers:
            return
        is_last = self._blocks.remove(block)
        self._queue.release(block)
        block.work = block.found = None  # the queue may still hold the block
        if self._drops and is_last:
            load_soon(self._drop, block)

    def _drop(self, block: SampleBlock) -> None:
        with suppress(TarshardsError):  # the reader reports it
            self._shards.use(block.shard).drop(block.numbers)

    def _named(self, error: TarshardsError, shard: int, sample: int) -> TarshardsError:
        """Return the error of a block, with the key of the requested sample."""
        index = self._shards.loaded(shard)
        if not isinstance(error, OpenError) or error.key is not None or index is None:
            return error
        key = index.key(sample)
        return OpenError(error.reason, url=error.url, offset=error.offset, key=key, errno=error.errno)

    def close(self) -> None:
        """Fetch no more."""
        self._queue.close()
        for work in list(self._opening.values()):
            drop(work)
