"""Samples of remote shards: blocks of them are fetched ahead, in the order in which an epoch will use them.

A block is a stretch of consecutive samples, and costs one request. It is asked for before its first sample is needed,
and kept in memory until its last one has been read, as far as that can be foreseen. Of a block that is used in part
only the bytes of those samples are fetched.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from tarshards.errors import OpenError, TarshardsError, visible
from tarshards.index.header_checks import Window
from tarshards.index.member_table import IS_COMPILED
from tarshards.samples.keys import Sample
from tarshards.storage import traffic
from tarshards.storage.cache import BlockCache
from tarshards.storage.connections import connect_ahead, fetching_threads
from tarshards.storage.location import Location
from tarshards.storage.ranges import most_held

if TYPE_CHECKING:
    from tarshards.index.open import OpenShard, OpenShards

log = logging.getLogger("tarshards")

REQUEST = 1 << 21  # bytes of a block where the plan does not say how large they are
SOON = 64  # the samples at the beginning whose shards' indexes are asked for before any others
ALONE, PART = 256, 64  # the samples at the beginning that are asked for by themselves, at most, and a 64th of all
SLOW = 1 << 18  # bytes of a block that takes longer than a sample
MOST_KEPT = 1 << 14  # blocks that stay mapped: a process has 65,530 mappings

TOO_LITTLE = (
    "%s: the samples that are shuffled together have %.0f MB, and %.0f MB may be held, so each sample costs a request; "
    "give a smaller pool= or block=, more memory with Remote(ahead=), or a disk with Remote(cache_dir=)"
)

Places = tuple[np.ndarray, np.ndarray]  # shards and samples, int64


def connect(location: Location, count: int) -> None:
    """Open idle connections to the server of *location* until there are *count*, but where a cache may need none."""
    remote, cache = location.remote, BlockCache.of(location.remote)
    if cache is not None and not cache.is_empty():
        return
    with suppress(TarshardsError):  # raised again when it is read
        if (address := location.address()) is not None:
            connect_ahead(address.place, count, connections=remote.connections, timeout=remote.timeout)


class _Block:
    """A block, or the part of one that is used: its *samples*, and how often they will be read."""

    def __init__(self, key: int, shard: int):
        self.key, self.shard = key, shard
        self.samples: list[np.ndarray] = []
        self.left = 0
        self.size = 0  # bytes, about
        self.is_first = False  # one of those that the first batch waits for
        self.wanted: set[int] | range = set()
        self.future: Future[list[Window]] | None = None
        self.found: tuple[OpenShard, list[Window]] | None = None  # when it is here

    def add(self, samples: np.ndarray) -> None:
        self.samples.append(samples)
        self.left += len(samples)


class BlockFetcher:
    """Reads samples whose blocks are fetched ahead, as *upcoming* says which will be read; threads may share it.

    *block* is the number of samples in a block; None for about 2 MiB of them. A block may be used *reach* samples after
    its first use. At most *budget* bytes are held or under way, more only where one block needs it. Blocks that a cache
    has on its disk are mapped, and count as none. Samples that fit into *budget* all together, or into the cache, come
    in blocks of 2 MiB. Where those that are used by turns need more than *budget*, the cache keeps space for them;
    without one, or where it is too small, each sample is asked for by itself, which a warning says. If the reader
    *is_alone* on this host, the cache drops what was kept for it after its use.

    The indexes of the first samples are asked for while it is computed what else will be read, and no others before the
    blocks of these are here. Of a shuffled epoch, the first samples are asked for by themselves, so that a batch comes
    soon. Up to 16,384 blocks that a cache keeps stay mapped for the epochs that follow, which then take samples from
    them as from local shards; their files are held open, too, as far as ``most_held`` allows.
    """

    def __init__(
        self,
        shards: OpenShards,
        upcoming: Iterable[Places],
        *,
        block: int | None,
        reach: int,
        budget: int,
        is_alone: bool = False,
    ):
        self._shards, self._upcoming = shards, iter(upcoming)
        mean = np.maximum(shards.sizes, 1) / np.maximum(shards.counts, 1)
        cache = BlockCache.of(shards.remote)
        is_shuffled = block is not None
        if shards.sizes.sum() <= max(budget, 0 if cache is None else cache.capacity()):
            block = None
        units = np.maximum(REQUEST / mean, 1) if block is None else np.full(len(mean), block)
        units = np.minimum(units, np.maximum(shards.counts, 1)).astype(np.int64)
        mean = mean * shards.fraction
        self._drops = False
        if block is not None and block > 1:
            by_turns = int(reach * float(np.average(mean, weights=np.maximum(shards.counts, 1))))
            if by_turns > budget:
                if cache is None or not IS_COMPILED or cache.reserve(by_turns) < by_turns:
                    units, cache = np.ones_like(units), None
                    log.warning(TOO_LITTLE, visible(shards.names[0]), by_turns / 1e6, budget / 1e6)
                else:
                    self._drops = is_alone
        self._is_whole = cache is not None  # whether a block is fetched as a whole, whatever is used of it
        is_slow = is_shuffled and not self._is_whole and float((units * mean).max(initial=0)) > SLOW
        self._left_alone = min(ALONE, int(shards.counts.sum()) // PART) if is_slow else 0  # that are still to come
        self._alone: dict[tuple[int, int], int] = {}  # the keys of their blocks
        self._mean, self._unit, self._units = mean, units, units.tolist()
        kept = sum(len(shard.kept) for shard in shards.in_use.values())
        self._may_keep = MOST_KEPT - kept if self._is_whole and not self._drops else 0
        self._may_hold = most_held()
        self._reach, self._budget = reach, budget
        self.are_kept = self._is_whole and self._find_all_kept()  # then ``read_kept`` is quicker than ``read``
        remote = shards.remote
        self._most = 2 * remote.connections  # blocks under way: one to come for each that is there
        self._threads = fetching_threads(remote.connections)
        self._lock = threading.Lock()
        self._blocks: dict[int, list[_Block]] = {}
        self._queue: deque[_Block] = deque()
        self._scanned = self._taken = self._bytes = self._under_way = 0
        self._is_begun = False
        self._more, self._first = SOON, 0  # the first blocks: those that are to be asked for, and those under way
        self._is_closed = False

    def read_kept(self, shards: np.ndarray, samples: np.ndarray) -> Iterator[Sample | TarshardsError]:
        """Yield many samples of blocks that *are_kept*; instead of one that cannot be read, the error."""
        in_use, use = self._shards.in_use, self._shards.use
        keys = _kept_key(samples, self._unit[shards]).tolist()
        for shard, sample, key in zip(shards.tolist(), samples.tolist(), keys):
            try:
                opened = in_use.get(shard) or use(shard)
                result: Sample | TarshardsError = opened.read(sample, opened.kept.get(key))
            except TarshardsError as error:
                result = error
            yield result

    def read(self, shard: int, sample: int) -> Sample:
        """Return a sample; raise TarshardsError where it cannot be read."""
        with self._lock:
            self._taken += 1
            if self._scanned - self._taken < self._reach:
                self._look_ahead()
            block = self._find(shard, sample)
            if block is not None and block.future is None:
                if self._is_whole and self._bytes and self._bytes + self._size(block) > self._budget:
                    block.left -= 1  # the cache has no space for what is held: it is full of something else
                    block = None
                else:
                    self._submit(block)
            if self._queue:
                self._fill()
            found = None if block is None or self._drops else block.found
            if block is not None and found is not None:
                self._leave(block)
        if found is not None:
            opened, windows = found
            return opened.read(sample, windows)
        if block is None or block.future is None:
            return self._shards.use(shard).read(sample)
        try:
            with nullcontext() if block.future.done() else traffic.waiting():
                windows = block.future.result()
            return self._shards.use(shard).read(sample, windows)
        except TarshardsError as error:
            raise self._own(error, shard, sample) from error
        finally:
            with self._lock:
                self._leave(block)

    def _begin(self, shards: np.ndarray, samples: np.ndarray) -> None:
        """Load the indexes of the first samples; more connections are opened meanwhile than these need."""
        self._is_begun = True
        first = [shard for shard in dict.fromkeys(shards[:SOON].tolist()) if self._shards.loaded(shard) is None]
        remote = self._shards.remote
        if 0 < len(first) < remote.connections:
            blocks = len(np.unique(shards << 32 | samples // self._unit[shards]))
            connect(self._shards.location(first[0]), min(blocks, remote.connections))
        self._threads.submit_all(self._load, first)

    def _load(self, shard: int) -> None:
        with suppress(TarshardsError):  # raised again when it is read
            if not self._is_closed:
                self._shards.use(shard)

    def _find_all_kept(self) -> bool:
        """Return whether all blocks of all shards are mapped since an earlier epoch."""
        counts = self._shards.counts
        blocks = int((-(-counts // self._unit)).sum())
        if blocks > min(MOST_KEPT, self._reach):  # for a few samples it would take longer than these
            return False
        for shard, (count, unit) in enumerate(zip(counts.tolist(), self._units)):
            opened = self._shards.in_use.get(shard)
            keys = (_kept_key(sample, unit) for sample in range(0, count, unit))
            if not all(opened is not None and opened.find_kept(key) for key in keys):
                return False
        traffic.count("cache_hits", blocks)
        return True

    def _leave(self, block: _Block) -> None:
        """Count that a sample of a block has been taken."""
        block.left -= 1
        if not block.left:
            self._release(block)
            self._fill()

    def read_aside(self, shard: int, sample: int) -> Sample:
        """Return a sample that was not upcoming, from a block that is at hand or else by a request of its own."""
        with self._lock:
            blocks = self._blocks.get(self._key(shard, sample), ())
            found = next((block.found for block in blocks if block.found and sample in block.wanted), None)
        opened, windows = found or (self._shards.use(shard), None)
        if windows is None and self._is_whole:
            windows = opened.kept.get(_kept_key(sample, self._units[shard]))
        return opened.read(sample, windows)

    def _own(self, error: TarshardsError, shard: int, sample: int) -> TarshardsError:
        """Return the error of a sample whose block could not be fetched."""
        index = self._shards.loaded(shard)
        if not isinstance(error, OpenError) or error.key is not None or index is None:
            return error
        key = index.key(sample)
        return OpenError(error.reason, url=error.url, offset=error.offset, key=key, errno=error.errno)

    def _find(self, shard: int, sample: int) -> _Block | None:
        key = self._alone.pop((shard, sample), None) if self._alone else None
        for block in self._blocks.get(self._key(shard, sample) if key is None else key, ()):
            if block.left and (block.future is None or sample in block.wanted):
                return block
        return None

    def _key(self, shard: int, sample: int) -> int:
        return shard << 32 | sample // self._units[shard]

    def _look_ahead(self) -> None:
        """Note the blocks of what will be read next, all at once: each has several samples of them."""
        parts: list[Places] = []
        while self._scanned - self._taken < self._reach:
            places = next(self._upcoming, None)
            if places is None:
                self._reach = 0
                break
            self._scanned += len(places[0])
            if not self._is_begun:
                self._begin(*places)
            parts.append(places)
        if parts:
            shards, samples = map(np.concatenate, zip(*parts))
            if self._left_alone:
                shards, samples = self._note_alone(shards, samples)
            if len(shards):
                self._note(shards, samples)

    def _note_alone(self, shards: np.ndarray, samples: np.ndarray) -> Places:
        """Note the first samples, each as a block of its own, and return the others."""
        rest = []
        soon = min(self._left_alone, len(shards))
        for place, (shard, sample) in enumerate(zip(shards[:soon].tolist(), samples[:soon].tolist())):
            key = -1 - len(self._alone)
            if self._alone.setdefault((shard, sample), key) != key:
                rest.append(place)
                continue
            block = _Block(key, shard)
            block.add(samples[place : place + 1])
            self._blocks[key] = [block]
            self._queue.append(block)
        left = np.concatenate((np.array(rest, np.int64), np.arange(soon, len(shards))))
        self._left_alone = 0
        return shards[left], samples[left]

    def _note(self, shards: np.ndarray, samples: np.ndarray) -> None:
        keys = shards << 32 | samples // self._unit[shards]
        order = np.argsort(keys, kind="stable")
        keys, samples = keys[order], samples[order]
        begins = np.flatnonzero(np.concatenate(([True], keys[1:] != keys[:-1])))
        ends = np.append(begins[1:], len(keys))
        for group in np.argsort(order[begins], kind="stable").tolist():  # in the order of their first samples
            begin, end = int(begins[group]), int(ends[group])
            key = int(keys[begin])
            blocks = self._blocks.setdefault(key, [])
            part = samples[begin:end]
            known = blocks[-1] if blocks else None
            if known is not None and known.future is not None and all(map(known.wanted.__contains__, part.tolist())):
                known.left += len(part)
                continue
            if known is None or known.future is not None:
                known = _Block(key, key >> 32)
                blocks.append(known)
                self._queue.append(known)
            known.add(part)

    def _fill(self) -> None:
        """Ask for the next blocks, as far as the budget allows."""
        while self._queue and self._under_way < self._most and not self._is_closed:
            block = self._queue[0]
            if self._first and not self._more and self._shards.loaded(block.shard) is None:
                return
            if block.future is None and block.left:  # another thread may have needed it sooner, and read all of it
                size = self._size(block)
                if self._bytes and self._bytes + size > self._budget:
                    return
                self._submit(block)
            elif block.future is None and block in self._blocks.get(block.key, ()):  # its samples were read directly
                self._release(block)
            self._queue.popleft()

    def _size(self, block: _Block) -> int:
        unit = int(self._unit[block.shard])
        return int((unit if self._is_whole else min(block.left, unit)) * self._mean[block.shard])

    def _submit(self, block: _Block) -> None:
        block.size = self._size(block)
        samples = np.unique(np.concatenate(block.samples))
        if self._is_whole:
            samples = self._all_samples(block)
            block.wanted = range(int(samples[0]), int(samples[-1]) + 1)
        else:
            block.wanted = set(samples.tolist())
        block.samples.clear()
        if self._more:
            block.is_first = True
            self._more, self._first = self._more - 1, self._first + 1
        self._bytes += block.size
        self._under_way += 1
        # Its thread does what follows: a callback of a fetch that has ended would run here, under the lock.
        block.future = self._threads.submit(self._fetch, block, samples)

    def _all_samples(self, block: _Block) -> np.ndarray:
        unit = int(self._unit[block.shard])
        begin = (block.key & (1 << 32) - 1) * unit
        return np.arange(begin, min(begin + unit, int(self._shards.counts[block.shard])))

    def _fetch(self, block: _Block, samples: np.ndarray) -> list[Window]:
        windows: list[Window] = []
        found = None
        try:
            if not self._is_closed:
                opened = self._shards.use(block.shard)
                windows = self._fetch_or_keep(opened, block, samples)
                found = opened, windows
            return windows
        finally:
            with self._lock:
                self._under_way -= 1
                self._first -= block.is_first
                block.found = found
                if windows and all(window.is_mapped for window in windows):
                    self._bytes -= block.size
                    block.size = 0
                self._fill()

    def _fetch_or_keep(self, opened: OpenShard, block: _Block, samples: np.ndarray) -> list[Window]:
        if not self._is_whole:
            return opened.fetch(samples)
        key = _kept_key(int(samples[0]), self._units[block.shard])
        kept = opened.find_kept(key)
        if kept is not None:
            traffic.count("cache_hits")
            return kept
        windows = opened.fetch(samples)
        if self._may_keep > 0 and opened.keep(key, windows):
            self._may_keep -= 1
            if MOST_KEPT - self._may_keep <= self._may_hold:
                for window in windows:
                    window.hold_open()
        return windows

    def _release(self, block: _Block) -> None:
        blocks = self._blocks[block.key]
        blocks.remove(block)
        if not blocks:
            del self._blocks[block.key]
        self._bytes -= block.size
        block.size, block.future, block.found = 0, None, None
        if self._drops and not blocks:
            self._threads.submit(self._drop, block)

    def _drop(self, block: _Block) -> None:
        with suppress(TarshardsError):  # the reader reports it
            self._shards.use(block.shard).drop(self._all_samples(block))

    def close(self) -> None:
        """Fetch no more."""
        with self._lock:
            self._is_closed = True
            futures = [block.future for blocks in self._blocks.values() for block in blocks if block.future is not None]
        for future in futures:
            future.cancel()


def _kept_key(sample: Any, unit: Any) -> Any:
    """Return the key of a sample's block in its shard, where blocks of other lengths may be kept, too; or of many."""
    return sample // unit << 32 | unit
