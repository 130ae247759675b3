"""The epoch as a sequence: position -> (shard, sample); lanes, windows, tails, resume. Pure arithmetic, no I/O."""

from __future__ import annotations

import copy
import operator
import threading
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tarshards.epoch.epoch_options import Tail, check_tail
from tarshards.epoch.permutations import CHUNK, fold, hash_of, hashes, permutations
from tarshards.errors import StateError, whole_number
from tarshards.parallel.forks import PerProcess, cached_property

LANES = 192
POOL = 2**18  # samples: an epoch of no more is permuted whole, and larger ones at least within so many
POOL_BYTES = 2**32  # of the samples that are mixed: as much as a reader of remote files may hold on a host of 16 GiB
POOL_BLOCKS = 360  # of a lane; a rank of 64 has three lanes
MIXED_BLOCKS = 3 * POOL_BLOCKS  # a batch of 256 from so many has 0.9 times the classes of a permutation, of 1,000
MAX_BLOCK, BLOCK_BYTES, MAX_BLOCKS = 16, 2**20, 10**7
MAX_LANES, ALL_LANES = 2**20, 2**23  # of a stage, and of all stages of a state; a lane of an earlier one takes 16 bytes
SUBSTITUTES, AROUND = 64, 64  # number of draws for a position, and the least number of samples to draw from


def block_size(counts: ArrayLike, sizes: ArrayLike | None = None) -> int:
    """Return the samples of a block for shards of *counts* samples and *sizes* bytes: about 1 MiB, from 1 to 16.

    Larger blocks are used if there would be more than 10 million.

    >>> block_size([1000, 1000], [80e6, 80e6]), block_size([1000, 1000])
    (13, 16)
    """
    counts = np.asarray(counts, np.int64)
    block = MAX_BLOCK
    if sizes is not None and (total := int(np.sum(sizes))):
        block = min(max(BLOCK_BYTES * int(counts.sum()) // total, 1), MAX_BLOCK)
    choices = range(block, max(block, int(counts.max(initial=0))))
    return block + bisect_left(choices, True, key=lambda size: int(np.sum(-(-counts // size))) <= MAX_BLOCKS)


def pool_size(counts: ArrayLike, sizes: ArrayLike | None, block: int) -> int:
    """Return the least number of samples that are shuffled together, in *block*s, of shards of *sizes* bytes.

    They are 360 blocks, of at most 16 samples, of each of 192 lanes, but not more than 4 GiB, unless these are less
    than 2**18 samples.

    >>> pool_size([5_000_000], [5_000_000 * 2560], 16), pool_size([5_000_000], [5_000_000 * 110_000], 9)
    (1105920, 262144)
    """
    pool, total = LANES * POOL_BLOCKS * min(block, MAX_BLOCK), 0 if sizes is None else int(np.sum(sizes))
    return max(POOL, min(pool, POOL_BYTES * int(np.sum(counts)) // total) if total else pool)


class Stage(NamedTuple):
    """A stretch of the epoch: how many lanes it ran in, and the position that it reached in them."""

    lanes: int
    position: int


class Lanes(NamedTuple):
    """A line of *total* samples, cut into *lanes* that are equal within one, long ones first."""

    total: int
    lanes: int

    def start(self, lane: Any) -> Any:
        return lane * (self.total // self.lanes) + np.minimum(lane, self.total % self.lanes)

    def length(self, lane: Any) -> Any:
        return self.total // self.lanes + (lane < self.total % self.lanes)


class Recut:
    """The positions of *old* lanes from *position* on, each lane's end to end, cut into *lanes* new ones."""

    def __init__(self, old: Lanes, position: int, lanes: int):
        lane = np.arange(old.lanes)
        self.old = old
        self.new: Lanes = Lanes(old.total - position, lanes)
        self.taken: NDArray[np.int64] = position // old.lanes + (lane < position % old.lanes)
        left = old.length(lane) - self.taken
        self.end: NDArray[Any] = np.cumsum(left)
        self.taken -= self.end - left  # so that index + taken is the sample's number in its lane

    def __call__(self, position: NDArray[np.int64]) -> NDArray[np.int64]:
        index = self.new.start(position % self.new.lanes) + position // self.new.lanes
        lane = np.searchsorted(self.end, index, "right")
        return (index + self.taken[lane]) * self.old.lanes + lane


class Order:
    """The order of a whole epoch: permuted blocks end to end, cut into lanes, permuted within windows."""

    def __init__(self, counts: NDArray[Any], lanes: int, block: int, pool: int, shuffle: bool, seeds: tuple[int, int]):
        self.counts = counts
        self.block: int = min(block, 2**32) if shuffle else 2**32
        self.shuffle = shuffle
        self.lanes: Lanes = Lanes(int(counts.sum()), lanes)
        self.window: int = max(1, min(pool // lanes, int(self.lanes.length(0)))) if shuffle else 1
        self.block_key: Any = hash_of(*seeds, 0)
        self.window_key: Any = hash_of(*seeds, 1)
        self.substitute_key: Any = hash_of(*seeds, 2)

    @cached_property
    def first_block(self) -> NDArray[np.int64]:
        """The number of each shard's first block, and of all blocks."""
        return np.concatenate(([0], np.cumsum(-(-self.counts.astype(np.int64) // self.block))))

    def make_tables(self) -> tuple[NDArray[Any], ...]:
        """Make the tables in which the line is looked up: 8 bytes per sample if blocks and windows have one sample.

        Otherwise 4 bytes per block, and 12 for each shorter block, such as the last one of a shard.
        """
        return (self._line(),) if self.block == self.window == 1 else self._blocks()

    @cached_property
    def tables(self) -> Sequence[NDArray[Any]]:
        return self.make_tables()

    def _blocks(self) -> tuple[NDArray[Any], NDArray[Any], NDArray[np.int64]]:
        """The blocks in the order of the line; which of them come first or follow a short one; where those begin."""
        total = int(self.first_block[-1])
        kind = np.uint32 if total < 2**32 else np.int64
        if self.shuffle:
            order: NDArray[Any] = permutations(self.block_key, [total], total)[0].astype(kind)
        else:
            order = np.arange(total, dtype=kind)
        lacking = -self.counts.astype(np.int64) % self.block  # samples of each shard's last block
        are_short = np.zeros(total, np.bool_)
        are_short[self.first_block[1:][lacking > 0] - 1] = True
        short = np.zeros(0, np.int64)
        if are_short.any():
            parts = (i + np.flatnonzero(are_short[order[i : i + CHUNK]]) for i in range(0, total, CHUNK))
            short = np.concatenate([*parts])
        absent = np.cumsum(lacking[self._shard_of(order[short])])
        after = np.concatenate(([0], short + 1))
        return order, after.astype(kind), after * self.block - np.concatenate(([0], absent))

    def _shard_of(self, blocks: NDArray[Any]) -> NDArray[np.int64]:
        """Which shard each block is of."""
        return np.searchsorted(self.first_block, blocks.astype(np.int64), "right") - 1

    def _block_at(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Which block of the line has each of *indices*."""
        _, after, begin = self.tables
        i = np.searchsorted(begin, indices, "right") - 1
        return after[i] + (indices - begin[i]) // self.block

    def _begin_of(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """The index in the line where each block of it begins."""
        _, after, begin = self.tables
        i = np.searchsorted(after, numbers, "right") - 1
        found: NDArray[np.int64] = begin[i] + (numbers - after[i]) * self.block
        return found

    def _line(self) -> NDArray[np.uint64]:
        """Shards and samples of the whole line, each pair in one number, where a block is one sample."""
        counts, total = self.counts.astype(np.int64), self.lanes.total
        pairs = np.empty((total, 2), np.uint32)
        pairs[:, 0] = np.repeat(np.arange(len(counts)), counts)
        pairs[:, 1] = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
        order = permutations(self.block_key, [total], total)[0]
        return pairs.view(np.uint64).ravel().take(order.view(np.int64))

    def locate(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Shard and sample of indices in the line, where windows are of one sample."""
        if self.block == 1:
            (line,) = self.tables
            shards, samples = line.take(indices).view(np.uint32).reshape(-1, 2).T.astype(np.int64)
            return shards, samples
        if len(indices) and (np.diff(indices) == 1).all():
            located = self.locate_runs(indices[:1], np.array([len(indices)])).astype(np.int64)
            return located[:, 0], located[:, 1]
        i = self._block_at(indices)
        block = self.tables[0][i]
        shard = self._shard_of(block)
        return shard, (block - self.first_block[shard]) * self.block + indices - self._begin_of(i)

    def windows(self, lane: NDArray[np.int64], window: NDArray[np.int64]) -> NDArray[np.uint32]:
        """Shards and samples of whole windows in their order: an array of (windows, samples, 2)."""
        first = window * self.window
        sizes = np.minimum(self.window, self.lanes.length(lane) - first)
        keys = fold(fold(self.window_key, lane), window)
        order = permutations(keys, sizes, self.window).view(np.int64)
        np.minimum(order, sizes[:, None] - 1, out=order)
        order += (np.cumsum(sizes) - sizes)[:, None]
        located = self.locate_runs(self.lanes.start(lane) + first, sizes)
        return located.view(np.uint64).ravel().take(order).view(np.uint32).reshape(*order.shape, 2)

    def locate_runs(self, first: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.uint32]:
        """Shards and samples of the *sizes* indices in the line from each *first* on, run after run: an array of pairs.

        Only the blocks in them are searched for, which is faster than ``locate`` by about their size.
        """
        low = self._block_at(first)
        counts = self._block_at(first + sizes - 1) + 1 - low  # of the blocks in each run
        run = np.repeat(np.arange(len(first)), counts)
        i = np.arange(len(run)) + (low - np.cumsum(counts) + counts)[run]
        begin = self._begin_of(i)
        start = np.maximum(begin, first[run])
        out = start + (np.cumsum(sizes) - sizes - first)[run]  # where each begins in the result
        block = self.tables[0][i]
        shard = self._shard_of(block)
        sample = (block - self.first_block[shard]) * self.block + start - begin
        total = int(sizes.sum())
        lengths = np.diff(out, append=total)
        located = np.empty((total, 2), np.uint32)
        located[:, 0] = np.repeat(shard.astype(np.uint32), lengths)
        located[:, 1] = np.arange(total, dtype=np.uint32)
        located[:, 1] += np.repeat((sample - out).astype(np.uint32), lengths)  # modulo 2**32
        return located


class Windows:
    """A cache of windows: for every lane, the even and the odd window that were used last."""

    def __init__(self, order: Order, lanes: int):
        self.order = order
        self.lock: threading.Lock = threading.Lock()
        self.ways = 2 if order.window < order.lanes.length(0) else 1
        self.tags: NDArray[np.int64] = np.full(self.ways * lanes, -1)
        self.rows: NDArray[np.uint32] = np.empty((self.ways * lanes, order.window, 2), np.uint32)

    def look_up(self, position: NDArray[np.int64], lane: NDArray[np.int64]) -> NDArray[np.uint32]:
        """Shards and samples of positions of the whole epoch; *lane* says in which lane's windows to keep them."""
        lanes, width = self.order.lanes.lanes, self.order.window
        turn = position // lanes
        window = turn // width
        column = turn - window * width
        row, tag = self.ways * lane + window % self.ways, window * lanes + position - turn * lanes
        found = np.empty((len(row), 2), np.uint32)
        todo = np.arange(len(row))
        with self.lock:
            while True:
                here = self.tags[row[todo]] == tag[todo]
                if len(todo) == len(row) and here.all():
                    pairs = self.rows.view(np.uint64).ravel()  # both numbers at once
                    return pairs.take(row * width + column).view(np.uint32).reshape(-1, 2)
                found[todo[here]] = self.rows[row[todo[here]], column[todo[here]]]
                todo = todo[~here]
                if not len(todo):
                    return found
                first = np.full(len(self.tags), -1)
                first[row[todo[::-1]]] = todo[::-1]
                rows = np.flatnonzero(first >= 0)
                self._fill(rows, tag[first[rows]])

    def _fill(self, rows: NDArray[np.int64], tags: NDArray[np.int64]) -> None:
        step = max(1, 4 * CHUNK // self.order.window)
        for i in range(0, len(rows), step):
            window, lane = np.divmod(tags[i : i + step], self.order.lanes.lanes)
            self.tags[rows[i : i + step]] = -1  # until the row is whole
            self.rows[rows[i : i + step]] = self.order.windows(lane, window)
            self.tags[rows[i : i + step]] = tags[i : i + step]


class PlannedEpoch(ABC):
    """An epoch as a sequence of *total* samples, in which rank r of *ranks* takes the positions r, r + ranks, ...

    For a length that is a multiple of *ranks*, *tail* "pad" repeats samples from the start and "drop" leaves out the
    last ones.
    """

    total: int
    ranks: int
    tail: Tail

    @property
    @abstractmethod
    def before(self) -> int:
        """The samples of the epoch that come before position 0, of all ranks; each counts an equal share of them."""

    @property
    def sizes(self) -> NDArray[np.int64] | None:
        """The samples of each position where these are bins; None if each is one sample."""
        return None

    @property
    def unpacked(self) -> PlannedEpoch:
        """The plan of single samples from which the bins are made, or this plan."""
        return self

    @property
    def permuted_by(self) -> tuple[int, int] | None:
        """The seed and the epoch that determine the order; None in storage order."""
        return None

    def sample_positions(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the positions in ``unpacked`` of all samples at *positions*."""
        return positions

    @property
    def further(self) -> NDArray[np.int64] | None:
        """How many pieces at each position are not the first of their sample; None if samples are whole."""
        return None

    def begins(self, positions: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """Return the elements at which the pieces of samples at *positions* begin; None if samples are whole."""
        return None

    @property
    def overlong(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The shards and numbers of samples that are too long for any bin, and are dropped."""
        return np.zeros(0, np.int64), np.zeros(0, np.int64)

    def __len__(self) -> int:
        remainder = self.total % self.ranks
        if self.tail == "pad":
            return self.total + -remainder % self.ranks
        return self.total - remainder if self.tail == "drop" else self.total

    @property
    def repeated(self) -> int:
        """The samples from the start of the epoch that are repeated at its end."""
        return max(0, len(self) - self.total)

    @property
    def dropped(self) -> int:
        """The samples that are left out at the end."""
        return max(0, self.total - len(self))

    @property
    def block_and_reach(self) -> tuple[int | None, int]:
        """The samples of a block (None: any number), and the approximate number of positions over which it is used."""
        return MAX_BLOCK, POOL

    @property
    def gap(self) -> float:
        """The average number of samples outside the epoch between two stretches of samples in it."""
        return 0.0

    @property
    def order(self) -> Order | None:
        """The order in which positions are looked up, for a plan of one dataset; its tables may be shared."""
        return None

    def apart(self) -> PlannedEpoch:
        """Return the same plan with separate caches, for looking up positions far from those of other users."""
        return self

    @abstractmethod
    def __getitem__(self, positions: Any) -> Any:
        """Return the shards of the samples at *positions*, and their numbers in them."""

    @abstractmethod
    def substitutes(self, position: int, among: int | None = None) -> Iterator[tuple[int, int]]:
        """Yield the shards and numbers of samples to try instead of the one at *position*, some of them repeatedly.

        They are drawn by the seed, the epoch and the position in the whole epoch: neither ranks nor a resume matter.
        They come at the first *among* positions of the whole epoch, by default at any.
        """

    @abstractmethod
    def resume(self, position: int, ranks: int, tail: Tail | None = None) -> PlannedEpoch:
        """Return the rest, for *ranks*, after all ranks together took *position* positions."""

    @abstractmethod
    def state(self, taken: int) -> dict[str, Any]:
        """Return, for JSON, the state after *taken* positions."""


def check_unpacked(state: Mapping[str, Any]) -> None:
    """Raise StateError for a state of bins."""
    if "packing" in state:
        raise StateError("the state is of packed samples, and requires the packing= that it was saved with")


class EpochPlan(PlannedEpoch, Sequence[Any]):
    """The epoch as a sequence: ``plan[p]`` is the (shard, sample) that comes p-th, by counts, seed and epoch alone.

    *counts* are the samples of every shard. A position gives two ints, an array or slice of positions two int64 arrays.
    Rank r of *ranks* takes the positions r, r + ranks, ...::

        shards   |0 0 0 0 0 0 0 0 0 0|1 1 1 1 1|2 2 2 2 2 2 2 2 2|       blocks of consecutive samples,
        blocks   |  a  |  b  |  c  |d|  e  | f |  g  |  h  |  i  |       read at one go

        line     |  g  |  c  | f |  i  |  a  |d|  h  |  e  |  b  |       blocks permuted by (seed, epoch)
        lanes    |      0      |      1      |     2     |    3    |     equal within one sample

        lane 0   | window 0 | window 1 | ...          a window is pool / lanes samples, permuted
        lane 1   | window 0 | window 1 | ...          by (seed, epoch, lane, window)
        ...
        epoch    position p is sample p div lanes of lane p mod lanes, so that a rank has lanes
                 of its own, and a block is read by one rank (by two where lanes meet)

    *lanes* is a multiple of *ranks*, by default 192 or the least above it. Where all samples fit into *pool*, by
    default 2**18, the line is by default a permutation of single samples: *block* and *pool* are 1, and *unit* is the
    number of consecutive samples that are read at one go, by default what ``block_size`` says of shards of *sizes*
    bytes. Otherwise a block is *unit* samples, fewer in shards of up to 4 GiB whose lanes would have less than 360
    blocks; and *pool* is by default what ``pool_size`` says, or up to twice as much, so that the windows of a lane are
    equal in length. For a length that is a multiple of *ranks*, *tail* "pad" repeats from the epoch's start and "drop"
    leaves out its end. Without *shuffle* position p is sample p in storage order. Raises ValueError for arguments out
    of range.

    >>> plan = EpochPlan([3, 2], seed=0, epoch=0, ranks=2, tail="pad")
    >>> len(plan), plan.repeated, sorted(set(plan))
    (6, 1, [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)])
    >>> rest = plan.resume(2, ranks=1)
    >>> list(rest) == list(plan)[2:5]
    True
    """

    def __init__(
        self,
        counts: ArrayLike,
        *,
        seed: int,
        epoch: int,
        ranks: int = 1,
        block: int | None = None,
        unit: int | None = None,
        lanes: int | None = None,
        pool: int | None = None,
        sizes: ArrayLike | None = None,
        tail: Tail = "exact",
        shuffle: bool = True,
    ):
        counts = _check_counts(counts)
        self.seed: int = whole_number("seed", seed)
        self.epoch: int = whole_number("epoch", epoch)
        ranks = _at_least_one("ranks", ranks, MAX_LANES)
        lanes = _multiple(ranks, LANES) if lanes is None else _at_least_one("lanes", lanes, MAX_LANES)
        if lanes % ranks:
            raise ValueError(f"lanes must be a multiple of the {ranks} ranks, not {lanes}")
        self.unit: int = block_size(counts, sizes) if unit is None else _at_least_one("unit", unit)
        self.block: int = self.unit if block is None else _at_least_one("block", block)
        self.pool: int = POOL if pool is None else _at_least_one("pool", pool)
        self.shuffle: bool = bool(shuffle)
        if block is None and self.shuffle and int(counts.sum()) <= min(self.pool, MAX_BLOCKS):
            self.block = self.pool = 1  # windows would add nothing to a permutation of single samples
        elif pool is None and self.shuffle:
            longest = -(-int(counts.sum()) // lanes)
            if block is None and (sizes is None or np.sum(sizes) <= POOL_BYTES):
                self.block = min(self.unit, max(1, longest // POOL_BLOCKS))
            windows = max(1, longest * lanes // pool_size(counts, sizes, self.block))
            self.pool = -(-longest // windows) * lanes
        stage = Stage(lanes if shuffle else 1, 0)
        self._order = Order(counts, stage.lanes, self.block, self.pool, self.shuffle, (self.seed, self.epoch))
        self._stand((stage,), ranks, tail)

    def _stand(self, stages: tuple[Stage, ...], ranks: int, tail: Tail) -> None:
        """Begin after *stages*; the last one is still under way."""
        self._stages = stages
        self.ranks: int = ranks
        self.tail: Tail = check_tail(tail)
        self.lanes: int = stages[-1].lanes
        self._begin = stages[-1].position
        self._recuts = []
        cut = self._order.lanes
        for before, after in pairwise(stages):
            self._recuts.append(Recut(cut, before.position, after.lanes))
            cut = self._recuts[-1].new
        self.total: int = cut.total - self._begin
        self._windows = self._make_windows()

    @property
    def before(self) -> int:
        return self._order.lanes.total - self.total

    @property
    def block_and_reach(self) -> tuple[int | None, int]:
        if not self.shuffle:
            return None, CHUNK
        if self.block == self.pool == 1:
            return self.unit, self.total
        return self.block, self.pool + 2 * self.lanes * self.block

    @property
    def order(self) -> Order:
        return self._order

    def _make_windows(self) -> PerProcess[Windows]:
        return PerProcess(partial(Windows, self._order, self.lanes))

    def apart(self) -> EpochPlan:
        other = copy.copy(self)
        other._windows = self._make_windows()
        return other

    @overload
    def __getitem__(self, index: int) -> tuple[int, int]: ...
    @overload
    def __getitem__(self, index: slice | ArrayLike) -> tuple[NDArray[np.int64], NDArray[np.int64]]: ...
    def __getitem__(self, index: Any) -> Any:
        size = len(self)
        if isinstance(index, slice):
            return self._look_up(np.arange(*index.indices(size)))
        positions = np.asarray(index)
        if (positions.size and positions.dtype.kind not in "iu") or positions.ndim > 1:
            raise TypeError("a position must be an int, a slice, or a list or array of ints")
        if ((positions < -size) | (positions >= size)).any():
            raise IndexError(f"position out of range of a plan of {size}")
        positions = positions.astype(np.int64)
        shards, samples = self._look_up(np.atleast_1d(np.where(positions < 0, positions + size, positions)))
        return (shards, samples) if positions.ndim else (int(shards[0]), int(samples[0]))

    def __iter__(self) -> Iterator[tuple[int, int]]:
        for i in range(0, len(self), 4096):
            shards, samples = self[i : i + 4096]
            yield from zip(shards.tolist(), samples.tolist())

    def _look_up(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        if len(positions) > CHUNK:
            parts = [self._look_up(positions[i : i + CHUNK]) for i in range(0, len(positions), CHUNK)]
            return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])
        if not len(positions):
            return positions, positions
        return self._locate(*self._originals(positions))

    def _originals(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the positions in the whole epoch for *positions*, and their lanes in this plan."""
        original = self._begin + np.minimum(positions, self.total - 1)
        lane = original - original // self.lanes * self.lanes  # numpy divides much faster than it takes remainders
        for recut in reversed(self._recuts):
            original = recut(original)
        if self.repeated:
            original = np.where(positions < self.total, original, (positions - self.total) % self._order.lanes.total)
        return original, lane

    def _locate(
        self, original: NDArray[np.int64], lane: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        order = self._order
        if order.window == 1:
            return order.locate(order.lanes.start(original % order.lanes.lanes) + original // order.lanes.lanes)
        found = self._windows().look_up(original, lane).astype(np.int64)
        return found[:, 0], found[:, 1]

    def substitutes(self, position: int, among: int | None = None) -> Iterator[tuple[int, int]]:
        """Yield samples of the lane and the window of *position*; their blocks are in memory when it is read.

        If a lane has fewer than 64 samples, they are drawn from the whole epoch, or from its first *among* positions.
        """
        lanes = self._order.lanes if among is None else Lanes(among, self._order.lanes.lanes)
        if not lanes.total:
            return
        (original,), lane = self._originals(np.array([position]))
        order = self._order
        draws = hashes(fold(order.substitute_key, original), SUBSTITUTES)
        turn, own = divmod(int(original), lanes.lanes)
        length = int(lanes.length(own))
        if length < AROUND:
            others = (draws % np.uint64(lanes.total)).astype(np.int64)
        else:
            width = max(order.window, AROUND)
            first = min(turn // width * width, length - AROUND)
            last = min(turn // width * width + width, length)
            turns = first + (draws % np.uint64(last - first)).astype(np.int64)
            others = turns * lanes.lanes + own
        shards, samples = self._locate(others, np.repeat(lane, SUBSTITUTES))
        yield from zip(shards.tolist(), samples.tolist())

    @property
    def permuted_by(self) -> tuple[int, int] | None:
        return (self.seed, self.epoch) if self.shuffle else None

    def resume(self, position: int, ranks: int, tail: Tail | None = None) -> EpochPlan:
        """Return the rest of this plan for *ranks* ranks, after all of them together took *position* positions.

        Raises ValueError if *position* is not between 0 and the length.
        """
        stages = (*self._stages[:-1], Stage(self.lanes, self._position(position)))
        return self._rest(stages, ranks, self.tail if tail is None else tail)

    def _rest(self, stages: tuple[Stage, ...], ranks: int, tail: Tail) -> EpochPlan:
        ranks = _at_least_one("ranks", ranks, MAX_LANES)
        if self.shuffle and stages[-1].lanes % ranks:
            begun = stages[:-1] if stages[-1].position == 0 and len(stages) > 1 else stages
            stages = (*begun, Stage(_multiple(ranks, stages[0].lanes), 0))
        rest = object.__new__(type(self))
        vars(rest).update(vars(self))  # the order is shared
        rest._stand(stages, ranks, tail)
        return rest

    def _position(self, taken: int) -> int:
        if not 0 <= taken <= len(self):
            raise ValueError(f"position must be between 0 and the plan's length of {len(self)}, not {taken}")
        return self._begin + min(operator.index(taken), self.total)

    def state(self, taken: int) -> dict[str, Any]:
        """Return the state after *taken* positions of this plan, for JSON; ``restore`` makes the rest from it."""
        return {
            "seed": self.seed,
            "epoch": self.epoch,
            "lanes": self.lanes,
            "block": self.block,
            "pool": self.pool,
            "shuffle": self.shuffle,
            "position": self._position(taken),
            "before": [list(stage) for stage in self._stages[:-1]],
        }

    @classmethod
    def restore(
        cls, counts: ArrayLike, state: Mapping[str, Any], *, ranks: int, tail: Tail, unit: int | None = None
    ) -> EpochPlan:
        """Return the rest of the epoch after *state*, for *ranks* ranks; raise StateError if the state does not fit."""
        check_unpacked(state)
        counts = _check_counts(counts)
        stages = _check_state(state, int(counts.sum()))
        plan = cls(
            counts,
            seed=state["seed"],
            epoch=state["epoch"],
            block=state["block"],
            unit=unit,
            lanes=stages[0].lanes,
            pool=state["pool"],
            shuffle=state["shuffle"],
        )
        return plan._rest(tuple(stages), ranks, tail)

    def __reduce__(self) -> Any:
        restore = partial(type(self).restore, ranks=self.ranks, tail=self.tail, unit=self.unit)
        return restore, (self._order.counts, self.state(0))


def _multiple(ranks: int, least: int) -> int:
    return -(-least // ranks) * ranks


def _at_least_one(name: str, value: int, most: int | None = None) -> int:
    number = whole_number(name, value)
    if number < 1 or (most and number > most):
        raise ValueError(f"{name} must be at least 1{f' and at most {most}' if most else ''}, not {number}")
    return number


def _check_counts(counts: ArrayLike) -> NDArray[Any]:
    """The counts in the smallest sufficient type, since they are part of every pickled plan."""
    counts = np.asarray(counts)
    if not counts.size:
        return np.zeros(0, np.uint8)
    if counts.ndim != 1 or counts.dtype.kind not in "iu" or counts.min() < 0 or counts.max() >= 2**32:
        raise ValueError("counts must be a whole number of samples for each shard, from 0 to 2**32 - 1")
    return counts.astype(np.min_scalar_type(counts.max()))


def _check_state(state: Mapping[str, Any], total: int) -> list[Stage]:
    """The stages of a state that fits a dataset of *total* samples."""
    types = {"seed": int, "epoch": int, "lanes": int, "block": int, "pool": int, "position": int}
    for name, kind in {**types, "shuffle": bool, "before": list}.items():
        if not isinstance(state, Mapping) or name not in state:
            raise StateError(f"a plan's state has no {name}")
        if type(state[name]) is not kind:
            raise StateError(f"a plan's state has {name} {state[name]!r}, which is not of type {kind.__name__}")
    try:
        stages = [Stage(*stage) for stage in [*state["before"], (state["lanes"], state["position"])]]
        for lanes, position in stages:
            if type(lanes) is not int or type(position) is not int or not 1 <= lanes <= MAX_LANES:
                raise StateError(f"a plan's state has {lanes!r} lanes up to position {position!r}")
            if not 0 <= position <= total:
                raise StateError(f"a plan's state has position {position}, but {total} samples are left of the epoch")
            total -= position
        if (lanes := sum(stage.lanes for stage in stages)) > ALL_LANES:
            raise StateError(f"a plan's state has {lanes} lanes in {len(stages)} stages, and may have {ALL_LANES}")
    except TypeError as error:
        raise StateError(f"a plan's state has before {state['before']!r}, which are not lanes and positions") from error
    if min(state["block"], state["pool"]) < 1 or not (state["shuffle"] or [stage.lanes for stage in stages] == [1]):
        raise StateError("a plan's state has a block or pool below 1, or lanes without shuffle")
    return stages
