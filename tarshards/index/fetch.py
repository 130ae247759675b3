"""Samples of remote shards: blocks of them are fetched ahead, in the order in which an epoch will use them.

A block is a stretch of consecutive samples, and costs one request. It is asked for before its first sample is needed,
and kept in memory until its last one has been read, as far as that can be foreseen. Of a block that is used in part
only the bytes of those samples are fetched.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING

import numpy as np

from tarshards.errors import OpenError, TarshardsError, visible
from tarshards.index.window import Window
from tarshards.samples.keys import Sample
from tarshards.storage.ahead import fetching_threads
from tarshards.storage.cache import BlockCache

if TYPE_CHECKING:
    from tarshards.index.open import OpenShards

log = logging.getLogger("tarshards")

REQUEST = 1 << 21  # bytes of a block where the samples come in storage order

TOO_LITTLE = (
    "%s: the samples that are shuffled together have %.0f MB, and %.0f MB may be held, so each sample costs a request; "
    "give a smaller pool= or block=, more memory with Remote(ahead=), or a disk with Remote(cache_dir=)"
)

Places = tuple[np.ndarray, np.ndarray]  # shards and samples, int64


class _Block:
    """A block, or the part of one that is used: its *samples*, and how often they will be read."""

    def __init__(self, key: int, shard: int):
        self.key, self.shard = key, shard
        self.samples: list[np.ndarray] = []
        self.left = 0
        self.size = 0  # bytes, about
        self.wanted: set[int] = set()
        self.future: Future[list[Window]] | None = None

    def add(self, samples: np.ndarray) -> None:
        self.samples.append(samples)
        self.left += len(samples)


class BlockFetcher:
    """Reads samples whose blocks are fetched ahead, as *upcoming* says which will be read; threads may share it.

    *block* is the number of samples in a block; None for about 2 MiB of them. A block may be used *reach* samples after
    its first use. At most *budget* bytes are held or under way, more only where one block needs it. Where the blocks
    that are used by turns need more, they are held in the cache; without one, each sample is asked for by itself, which
    a warning says. If the reader *is_alone* on this host, the cache drops what it will not use again.
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
        units = np.maximum(REQUEST / mean, 1) if block is None else np.full(len(mean), block)
        units = np.minimum(units, np.maximum(shards.counts, 1)).astype(np.int64)
        self._uses: Counter[int] | None = None  # of each stored block, those that are known and not yet asked for
        self._stored = units if cache is not None else None  # what a request brings, whatever is used of it
        if block is not None and block > 1:
            by_turns = reach * float(np.average(mean, weights=np.maximum(shards.counts, 1)))
            if by_turns > budget:
                units = np.ones_like(units)
                if cache is not None:
                    cache.reserve(int(by_turns))
                    self._uses = Counter[int]() if is_alone else None
                else:
                    log.warning(TOO_LITTLE, visible(shards.names[0]), by_turns / 1e6, budget / 1e6)
        self._mean, self._unit = mean, units
        self._reach, self._budget = reach, budget
        remote = shards.remote
        self._most = 2 * remote.connections  # blocks under way: one to come for each that is there
        self._threads = fetching_threads(remote.connections)
        self._lock = threading.Lock()
        self._blocks: dict[int, list[_Block]] = {}
        self._queue: deque[_Block] = deque()
        self._scanned = self._taken = self._bytes = self._under_way = 0
        self._is_closed = False

    def read(self, shard: int, sample: int) -> Sample:
        """Return a sample; raise TarshardsError where it cannot be read."""
        with self._lock:
            self._taken += 1
            self._look_ahead()
            block = self._find(shard, sample)
            if block is not None and block.future is None:
                self._submit(block)
            self._fill()
        if block is None or block.future is None:
            return self._shards.use(shard).read(sample)
        try:
            windows = block.future.result()
            return self._shards.use(shard).read(sample, windows)
        except TarshardsError as error:
            raise self._own(error, shard, sample) from error
        finally:
            with self._lock:
                block.left -= 1
                if not block.left:
                    self._release(block)
                    self._fill()

    def _own(self, error: TarshardsError, shard: int, sample: int) -> TarshardsError:
        """Return the error of a sample whose block could not be fetched."""
        index = self._shards.loaded(shard)
        if not isinstance(error, OpenError) or error.key is not None or index is None:
            return error
        key = index.keys[sample]
        return OpenError(error.reason, url=error.url, offset=error.offset, key=key, errno=error.errno)

    def _find(self, shard: int, sample: int) -> _Block | None:
        for block in self._blocks.get(self._key(shard, sample), ()):
            if block.left and (block.future is None or sample in block.wanted):
                return block
        return None

    def _key(self, shard: int, sample: int) -> int:
        return shard << 32 | sample // int(self._unit[shard])

    def _look_ahead(self) -> None:
        """Note the blocks of what will be read next."""
        while self._scanned - self._taken < self._reach:
            places = next(self._upcoming, None)
            if places is None:
                self._reach = 0
                return
            self._note(*places)

    def _note(self, shards: np.ndarray, samples: np.ndarray) -> None:
        self._scanned += len(shards)
        if self._uses is not None and self._stored is not None:
            self._uses.update((shards << 32 | samples // self._stored[shards]).tolist())
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
            if known is not None and known.future is not None and known.wanted.issuperset(part.tolist()):
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
            if block.future is None and block.left:  # another thread may have needed it sooner, and read all of it
                size = self._size(block)
                if self._bytes and self._bytes + size > self._budget:
                    return
                self._submit(block)
            self._queue.popleft()

    def _size(self, block: _Block) -> int:
        shard = block.shard
        samples = min(block.left, self._unit[shard]) if self._stored is None else self._stored[shard]
        return int(samples * self._mean[shard])

    def _submit(self, block: _Block) -> None:
        block.size = self._size(block)
        samples = np.unique(np.concatenate(block.samples))
        block.wanted = set(samples.tolist())
        block.samples.clear()
        self._bytes += block.size
        self._under_way += 1
        # Its thread does what follows: a callback of a fetch that has ended would run here, under the lock.
        block.future = self._threads.submit(self._fetch, block.shard, samples, self._is_used_again(block, samples))

    def _is_used_again(self, block: _Block, samples: np.ndarray) -> bool:
        """Return whether others of the stored block will be asked for, as far as that is known."""
        if self._uses is None or self._stored is None:
            return True
        stored = block.shard << 32 | int(samples[0]) // int(self._stored[block.shard])
        self._uses[stored] -= block.left
        if self._uses[stored] > 0:
            return True
        del self._uses[stored]
        return False

    def _fetch(self, shard: int, samples: np.ndarray, again: bool) -> list[Window]:
        try:
            if self._is_closed:
                return []
            if self._stored is not None:
                unit = int(self._stored[shard])
                begin = int(samples[0]) // unit * unit
                samples = np.arange(begin, min(begin + unit, int(self._shards.counts[shard])))
            return self._shards.use(shard).fetch(samples, again=again)
        finally:
            with self._lock:
                self._under_way -= 1
                self._fill()

    def _release(self, block: _Block) -> None:
        blocks = self._blocks[block.key]
        blocks.remove(block)
        if not blocks:
            del self._blocks[block.key]
        self._bytes -= block.size
        block.future = None

    def close(self) -> None:
        """Fetch no more."""
        with self._lock:
            self._is_closed = True
            futures = [block.future for blocks in self._blocks.values() for block in blocks if block.future is not None]
        for future in futures:
            future.cancel()


def in_parts(shards: np.ndarray, samples: np.ndarray, size: int) -> Iterator[Places]:
    """Yield the places of *size* samples at a time."""
    for begin in range(0, len(shards), size):
        yield shards[begin : begin + size], samples[begin : begin + size]
