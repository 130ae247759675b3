"""Bins of samples of variable length, as the positions of an epoch: packed rows, and batches of similar length.

The unit of position is the bin. A ``PackedPlan`` is a ``PlannedEpoch`` whose position b is not one sample but all
samples of the b-th bin: ranks take the bins r, r + ranks, ..., ``tail`` repeats or drops bins, and a state is the
number of the next bin. Everything else is unchanged: ``Shares`` cuts bins into batches, the loop reads their samples,
counts and audits them, and ``Passes`` saves and resumes the position.

::

    epoch    | window 0: 4,096 positions | window 1 | ...            of the EpochPlan, always made for one rank
    bins     | 0 | 1 | 2 | ... | 1,017   | 1,018 | ...               best fit, longest first, then permuted by
    ranks      0   1   0   1               ...                       (seed, epoch, window)

The bins depend on the dataset, its lengths, seed and epoch, not on ranks, workers or where a run was resumed: a window
is packed whole, wherever the state stands in it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tarshards.epoch.epoch_options import Tail, check_tail
from tarshards.epoch.permutations import CHUNK, fold, hash_of, permutations
from tarshards.epoch.plan import PlannedEpoch
from tarshards.errors import SampleError, StateError, whole_number
from tarshards.parallel.forks import cached_property

Overlong = Literal["error", "drop", "split"]
WINDOW = 4096
LEVEL = 3  # of the permutation of bins, after those of blocks, windows and substitutes
PARTS = 10**6  # of a unit: lengths that are fractions, such as seconds, are rounded to these


class Bins(NamedTuple):
    """The bins of a whole epoch: positions in *order*, bin b from *starts* [b] on; *overlong* ones are in no bin.

    Where samples are split, a bin has pieces of them, which begin at the elements *begins*.
    """

    order: NDArray[np.int64]
    starts: NDArray[np.int64]
    overlong: NDArray[np.int64]
    begins: NDArray[np.int64] | None = None


def best_fit(lengths: NDArray[Any], capacity: int) -> NDArray[np.int64]:
    """Return the number of the bin of each length: best fit decreasing, each bin of at most *capacity* in all.

    >>> best_fit(np.array([3, 6, 5, 4]), 9)
    array([0, 0, 1, 1])
    """
    order = np.argsort(-lengths, kind="stable")
    sizes = lengths[order].tolist()
    least = sizes[-1] if sizes else 0
    left: list[int] = []  # capacity that is left << 32 | bin, ascending
    bins, count = [], 0
    for size in sizes:
        i = bisect_left(left, size << 32)
        if i < len(left):
            code = left.pop(i) - (size << 32)
        else:
            code, count = (capacity - size) << 32 | count, count + 1
        bins.append(code & 0xFFFFFFFF)
        if code >> 32 >= least:
            insort(left, code)
    result = np.empty(len(lengths), np.int64)
    result[order] = bins
    return result


def alike(lengths: NDArray[Any], budget: int) -> NDArray[np.int64]:
    """Return the number of the batch of each length: similar lengths, the longest times their number within *budget*.

    >>> alike(np.array([2, 5, 3, 5]), 10)
    array([1, 0, 1, 0])
    """
    order = np.argsort(-lengths, kind="stable")
    sizes = lengths[order]
    result = np.empty(len(lengths), np.int64)
    begin = number = 0
    while begin < len(sizes):
        end = begin + (budget // int(sizes[begin]))
        result[order[begin:end]] = number
        begin, number = end, number + 1
    return result


@dataclass(eq=False)
class Packing:
    """How samples of variable *lengths*, in the dataset's order, are put together; see ``pack`` and ``bucket``.

    Where *lengths* names a field or a column, a loader makes a Packing ``with_lengths``.

    Raises ValueError for lengths that are not numbers of at least 1, or fractions above 0, and for arguments out of
    range.
    """

    lengths: NDArray[Any] | str
    capacity: float
    window: int = WINDOW
    overlong: Overlong = "error"
    is_packed: bool = True  # False: batches of similar length
    _last: tuple[Any, Bins] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        name = "capacity" if self.is_packed else "budget"
        given: Any = self.capacity
        if not isinstance(given, float | np.floating):
            self.capacity = whole_number(name, given, 1)
        elif not given >= 1 / PARTS:
            raise ValueError(f"{name} must be at least {1 / PARTS}, not {given}")
        self.window = whole_number("window", self.window, 1)
        if self.overlong not in get_args(Overlong):
            raise ValueError(f"overlong must be one of {', '.join(get_args(Overlong))}, not {self.overlong!r}")
        if self.overlong == "split" and not self.is_packed:
            raise ValueError('overlong="split" is for pack; bucket takes "error" or "drop"')
        if not self.capacity < 2**31:
            raise ValueError(f"{name} must be below 2**31, not {self.capacity}")
        if isinstance(self.lengths, str):
            return
        lengths = np.asarray(self.lengths)
        is_whole = lengths.dtype.kind in "iu" or not lengths.size
        if lengths.ndim != 1 or not (is_whole or lengths.dtype.kind == "f"):
            raise ValueError(f"lengths must be a number for each sample, not {lengths.ndim} axes of {lengths.dtype}")
        if not (lengths >= 1 if is_whole else lengths > 0).all():
            raise ValueError("lengths must be numbers of at least 1, or fractions above 0")
        if is_whole and isinstance(self.capacity, int):
            self.lengths = np.minimum(lengths, 2**31 - 1).astype(np.int32)
        elif self.overlong == "split":
            raise ValueError('overlong="split" takes lengths and a capacity that are whole numbers of elements')
        else:
            self.lengths = np.minimum(lengths, 2**31 - 1).astype(np.float64)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_last": None}

    def with_lengths(self, lengths: NDArray[Any]) -> Packing:
        """Return this packing of samples of these *lengths*; one that is empty counts as the least length."""
        least = 1 / PARTS if lengths.dtype.kind == "f" else 1
        return Packing(np.maximum(lengths, least), self.capacity, self.window, self.overlong, self.is_packed)

    @property
    def known(self) -> NDArray[Any]:
        """The lengths, as numbers."""
        assert not isinstance(self.lengths, str), "a loader looks the lengths up"
        return self.lengths

    @property
    def is_whole(self) -> bool:
        """Whether lengths and capacity count elements; otherwise they may be fractions, such as seconds."""
        return self.known.dtype.kind == "i"

    @cached_property
    def identity(self) -> dict[str, Any]:
        """The description of the packing in a state."""
        digest = blake2b(self.known.astype("<i4" if self.is_whole else "<f8").tobytes(), digest_size=16).hexdigest()
        how = "pack" if self.is_packed else "bucket"
        return {
            "how": how,
            "capacity": self.capacity,
            "window": self.window,
            "overlong": self.overlong,
            "lengths": digest,
        }

    def plan(
        self,
        counts: ArrayLike,
        make: Callable[[Mapping[str, Any] | None], PlannedEpoch],
        *,
        ranks: int,
        tail: Tail,
        state: Mapping[str, Any] | None = None,
        dataset: str = "",
    ) -> PackedPlan:
        """Return the bins of the epoch of a plan, or those that remain according to *state*.

        *make* returns the plan for one rank: of an epoch, or of the part that remains according to a state. *counts*
        are the samples of the shards of *dataset*, its digest. Raises StateError for a state of other lengths or
        options, and SampleError for a sample that is overlong.
        """
        begin: Any = 0
        if state is None:
            whole = make(None)
        else:
            if state.get("packing") != self.identity:
                raise StateError("the state is of an epoch with other lengths or another packing=, or without any")
            begin = state.get("position")
            whole = make(_unpacked(state) | {"position": 0})
        bins = self.bins(np.asarray(counts, np.int64), whole, dataset)
        most = len(bins.starts) - 1
        if type(begin) is not int or not 0 <= begin <= most:
            raise StateError(f"the state has position {begin!r}, and the epoch {most} bins")
        return PackedPlan(whole, self, bins, ranks=ranks, tail=tail, begin=begin)

    def bins(self, counts: NDArray[np.int64], plan: PlannedEpoch, dataset: str) -> Bins:
        """Return the bins of the epoch of *plan*; those of the last one are kept."""
        key = dataset, repr(plan.state(0))
        if self._last is None or self._last[0] != key:
            self._last = key, self._bins(counts, plan)
        return self._last[1]

    def _bins(self, counts: NDArray[np.int64], plan: PlannedEpoch) -> Bins:
        if int(counts.sum()) != len(self.known):
            raise ValueError(f"lengths are of {len(self.known)} samples, and the dataset has {int(counts.sum())}")
        first = np.cumsum(counts) - counts
        key = None if plan.permuted_by is None else hash_of(*plan.permuted_by, LEVEL)
        put, parts = best_fit if self.is_packed else alike, 1 if self.is_whole else PARTS
        capacity = round(self.capacity * parts)
        is_split = self.overlong == "split"
        orders, sizes, overlong, begins = [], [], [], []
        together = max(1, CHUNK // self.window) * self.window
        for begin in range(0, plan.total, together):
            shards, numbers = plan[np.arange(begin, min(begin + together, plan.total))]
            lengths = self.known[first[shards] + numbers]
            for offset in range(0, len(lengths), self.window):
                window = lengths[offset : offset + self.window]
                if is_split:
                    fits, pieces = _pieces(window, capacity)
                else:
                    fits = np.flatnonzero(window <= self.capacity)
                    pieces = np.zeros_like(fits)
                if not is_split and len(fits) < len(window):
                    beyond = offset + np.flatnonzero(window > self.capacity)
                    if self.overlong == "error":
                        i = int(beyond[0])
                        raise SampleError(
                            f"the sample at position {begin + i} of the epoch, number {numbers[i]} of shard "
                            f"{shards[i]}, has length {lengths[i]}, more than {self.capacity}; "
                            'overlong="drop" leaves such samples out'
                        )
                    overlong.append(begin + beyond)
                if not len(fits):
                    continue
                units = window[fits] - pieces
                if not self.is_whole:
                    units = np.maximum(np.rint(units * PARTS).astype(np.int64), 1)
                bins = put(np.minimum(units, capacity), capacity)
                count = int(bins.max()) + 1
                if key is not None:
                    turn = permutations(fold(key, np.array([(begin + offset) // self.window])), [count], count)[0]
                    bins = np.asarray(turn).astype(np.int64)[bins]
                order = np.argsort(bins, kind="stable")
                orders.append(begin + offset + fits[order])
                begins.append(pieces[order])
                sizes.append(np.bincount(bins, minlength=count))
        empty = [np.zeros(0, np.int64)]
        starts = np.cumsum(np.concatenate([np.zeros(1, np.int64), *sizes]))
        order, beyond, pieces = (np.concatenate(each or empty) for each in (orders, overlong, begins))
        return Bins(order, starts, beyond, pieces if is_split else None)


def _pieces(lengths: NDArray[Any], capacity: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the pieces of at most *capacity*: which of *lengths* each is of, and where it begins.

    >>> _pieces(np.array([3, 10, 4]), 4)
    (array([0, 1, 1, 1, 2]), array([0, 0, 4, 8, 0]))
    """
    counts = -(-lengths.astype(np.int64) // capacity)
    ends = np.cumsum(counts)
    numbers = np.repeat(np.arange(len(lengths)), counts)
    return numbers, capacity * (np.arange(len(numbers)) - np.repeat(ends - counts, counts))


def pack(lengths: ArrayLike | str, capacity: float, *, window: int = WINDOW, overlong: Overlong = "error") -> Packing:
    """Pack samples of *lengths* into rows of at most *capacity*: best fit, longest first, within windows of the epoch.

    *lengths* has one for each sample of the shards, selected or not, shard after shard; or it names a column that has
    them, also by what it was made from (``"duration:wav;flac"``), or else a field, or alternatives (``"txt;text"``),
    whose lengths are the rows of ``.npy``, the elements that ``readers.ragged`` makes, or else bytes. Lengths and the
    *capacity* may be fractions, such as seconds, which are compared in millionths. The *window* is that of positions of
    the epoch, the same on any number of ranks. A sample longer than the capacity raises SampleError, which names its
    position; with ``overlong="drop"`` such samples are left out, and the ledger counts them as dropped. With
    ``overlong="split"`` they are cut into pieces of the capacity, each in a separate row, and a last one that is packed
    like a sample; the ledger counts a sample's further pieces as repeated. Raises ValueError for arguments out of
    range.
    """
    return Packing(lengths if isinstance(lengths, str) else np.asarray(lengths), capacity, window, overlong)


def bucket(lengths: ArrayLike | str, *, budget: float, window: int = WINDOW, overlong: Overlong = "error") -> Packing:
    """Put samples of similar length together: batches that, padded to their longest, have at most *budget* tokens.

    The arguments are those of ``pack``; samples are not split.
    """
    given = lengths if isinstance(lengths, str) else np.asarray(lengths)
    return Packing(given, budget, window, overlong, is_packed=False)


class PackedPlan(PlannedEpoch):
    """An epoch of bins: ``plan[b]`` are the shards and numbers of all samples of its b-th bin.

    Rank r of *ranks* takes the bins r, r + ranks, ...; *total* and the length count bins.

    >>> from tarshards import EpochPlan
    >>> whole = EpochPlan([4], seed=0, epoch=0, shuffle=False)
    >>> plan = pack([3, 6, 5, 4], 9).plan([4], lambda state: whole, ranks=1, tail="exact")
    >>> [plan[b][1].tolist() for b in range(len(plan))]
    [[0, 1], [2, 3]]
    """

    def __init__(self, plan: PlannedEpoch, packing: Packing, bins: Bins, *, ranks: int, tail: Tail, begin: int = 0):
        self._unpacked = plan
        self.packing = packing
        self.bins = bins
        self.ranks: int = whole_number("ranks", ranks, 1)
        self.tail: Tail = check_tail(tail)
        self.begin = begin
        self.total: int = len(bins.starts) - 1 - begin

    @property
    def unpacked(self) -> PlannedEpoch:
        return self._unpacked

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        return np.diff(self.bins.starts)[self._numbers(np.arange(len(self)))]

    @cached_property
    def further(self) -> NDArray[np.int64] | None:
        if self.bins.begins is None:
            return None
        so_far = np.concatenate(([0], np.cumsum(self.bins.begins > 0)))[self.bins.starts]
        return np.diff(so_far)[self._numbers(np.arange(len(self)))]

    @property
    def before(self) -> int:
        end = int(self.bins.starts[self.begin])
        return end if self.bins.begins is None else end - int(np.count_nonzero(self.bins.begins[:end]))

    @property
    def overlong(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        return self.unpacked[self.bins.overlong]

    @property
    def block_and_reach(self) -> tuple[int | None, int]:
        block, reach = self.unpacked.block_and_reach
        return block, reach + self.packing.window

    @property
    def gap(self) -> float:
        return self.unpacked.gap

    def apart(self) -> PackedPlan:
        return PackedPlan(
            self.unpacked.apart(), self.packing, self.bins, ranks=self.ranks, tail=self.tail, begin=self.begin
        )

    def __getitem__(self, positions: Any) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        return self.unpacked[self.sample_positions(np.atleast_1d(np.asarray(positions, np.int64)))]

    def sample_positions(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        return self.bins.order[self._entries(positions)]

    def begins(self, positions: NDArray[np.int64]) -> NDArray[np.int64] | None:
        return None if self.bins.begins is None else self.bins.begins[self._entries(positions)]

    def _entries(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where the contents of bins are in ``order``."""
        numbers = self._numbers(positions)
        first = self.bins.starts[numbers]
        sizes = self.bins.starts[numbers + 1] - first
        ends = np.cumsum(sizes)
        return np.repeat(first - ends + sizes, sizes) + np.arange(sizes.sum())

    def _numbers(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the numbers of bins in the whole epoch."""
        if positions.size and not 0 <= positions.min() <= positions.max() < len(self):
            raise IndexError(f"position out of range of a plan of {len(self)}")
        every = max(1, len(self.bins.starts) - 1)  # positions past the end repeat the epoch's start
        return np.where(positions < self.total, self.begin + positions, (positions - self.total) % every)

    def substitutes(self, position: int, among: int | None = None) -> Iterator[tuple[int, int]]:
        """Yield none: another sample may not fit into the bin."""
        return iter(())

    def resume(self, position: int, ranks: int, tail: Tail | None = None) -> PackedPlan:
        """Return the rest, for *ranks*, after all ranks together took *position* bins."""
        begin, tail = self._position(position), self.tail if tail is None else tail
        return PackedPlan(self.unpacked, self.packing, self.bins, ranks=ranks, tail=tail, begin=begin)

    def _position(self, taken: int) -> int:
        if not 0 <= taken <= len(self):
            raise ValueError(f"position must be between 0 and the plan's length of {len(self)}, not {taken}")
        return self.begin + min(taken, self.total)

    def state(self, taken: int) -> dict[str, Any]:
        """Return the state after *taken* bins, for JSON."""
        return self.unpacked.state(0) | {"position": self._position(taken), "packing": self.packing.identity}


def _unpacked(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name != "packing"}
