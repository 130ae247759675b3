"""Which dataset of a mixture comes at each position of an epoch, and which of its samples. Pure arithmetic, no I/O.

::

    positions | 0 1 2 3 4 5 6 7 | 8 9 ...        windows; within each, the choices are permuted by (seed, epoch, window)
    datasets  | A B A A A B A A | B A ...        the shares are exact where windows end
    numbers   | 0 0 1 2 3 1 4 5 | 2 6 ...        of the samples, in the order of their dataset
"""

from __future__ import annotations

import copy
import math
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tarshards.epoch.permutations import fold, hash_of, hashes, permutations
from tarshards.epoch.proportions import Mixture, Quotas, Until, check_counts
from tarshards.parallel.forks import PerProcess

MOST_PARTS = 1 << 20  # choices in a period of a mixture, which are held in memory
WINDOW = 1 << 16  # choices that are permuted together; a rank of 512 takes 128 of them
KEPT = 8  # windows, of 10 bytes a choice
LEVEL = 4  # of the permutation of choices, after those of blocks, windows, substitutes and bins


class Choices:
    """The dataset of each position of an epoch, by *quotas* over datasets of these *sizes*.

    At first, every dataset has its share of any first n positions to within one sample. These choices are then permuted
    within windows by *seed* and epoch, so that each rank and worker has a sample of them. A window ends after 2**16
    positions, and where a weight becomes 0 or positive. In a window in which weights change, a choice comes at a random
    one of the positions of its dataset's choices, or between them: the shares follow the weights there, too.

    The samples of a dataset keep their order. Where the dataset has *lanes*, position p takes a sample of lane p modulo
    *lanes* if its window has one left: a rank then reads a block of its own.

    ``total`` is the number of samples in an epoch. Raises ValueError for constant weights with too long a period, and
    for a chosen dataset without samples.
    """

    def __init__(self, quotas: Quotas, seed: int, sizes: Sequence[int], until: Until, lanes: Sequence[int]):
        self.quotas = quotas
        self.seed = seed
        self.sizes: list[int] = list(sizes)
        self._lanes: list[int] = list(lanes)
        self._is_permuted: bool = True
        self._table: NDArray[Any] | None = None  # of one period
        if len(quotas.phases) == 1:
            if quotas.period > MOST_PARTS:
                weights = ", ".join(map(str, quotas.weights))
                raise ValueError(f"weights {weights} have no ratios of whole numbers up to {MOST_PARTS} in all")
            self._table = np.array(Mixture(quotas, seed).take(quotas.period), np.min_scalar_type(len(sizes)))
        self.total: int = until if isinstance(until, int) else self._end(until == "first")
        due = quotas.at(self.total)
        self.due: list[int] = list(map(math.floor, due))  # at least as many come in an epoch, and at most one more
        for i, size in enumerate(sizes):
            if not size and due[i]:
                raise ValueError(f"dataset {i} of the mixture has no samples")
        self._begins: list[int] = _stretches(quotas)
        self._know((0, [0] * len(sizes)))

    def _know(self, *known: tuple[int, list[int]]) -> None:
        self._known = list(known)  # positions, and how often each dataset was chosen before them
        self._windows: dict[tuple[int, int], tuple[NDArray[Any], NDArray[np.int64]]] = {}
        self._lock = PerProcess(threading.Lock)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_windows", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._know(*self._known)

    def _end(self, is_first: bool) -> int:
        """Return the length of an epoch that ends before the first dataset begins again, or when all were read."""
        ends: list[float] = []
        for i in self.quotas.sources:
            size = self.sizes[i]
            if self._table is not None:
                share = self.quotas.phases[0].growth[i]
                periods, rest = divmod(size if is_first else size - 1, share)
                end: float = periods * self.quotas.period + int(np.flatnonzero(self._table == i)[rest])
                ends.append(end if is_first else end + 1)
                continue
            due = self.quotas.first(i, size, beyond=is_first)
            if not is_first:
                ends.append(min(math.inf if due is None else due, self.quotas.ends[i]))
            elif due is not None:
                ends.append(due - 1)
        return max(0, int((min if is_first else max)(ends)))

    def unpermuted(self) -> Choices:
        """Return the choices of states before version 4: each at its position, and samples numbered in this order."""
        choices = copy.copy(self)
        choices._is_permuted, choices._lanes = False, [1] * len(self.sizes)
        choices._know(*self._known)
        return choices

    def look_up(self, epoch: int, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the dataset of each of *positions*, and the number of its sample, counted over its passes."""
        datasets, numbers = np.empty_like(positions), np.empty_like(positions)
        begins = self._begin_of(positions)
        for begin in np.unique(begins).tolist():
            here = np.flatnonzero(begins == begin)
            dataset, number = self._window(epoch, begin)
            datasets[here], numbers[here] = dataset[positions[here] - begin], number[positions[here] - begin]
        return datasets, numbers

    def state(self, position: int) -> dict[str, Any]:
        """Return the entries of a state besides its position: for weights that change, the counts at its window."""
        if self._table is not None:
            return {}
        return {"counts": self._counts(self._resumed_from(position))}

    def resumed(self, position: int, state: Mapping[str, Any]) -> Choices:
        """Return the choices that continue from *state*; raise StateError if its counts do not match these quotas."""
        if self._table is not None:
            return self
        counts = state.get("counts")
        begin = self._resumed_from(position)
        check_counts(self.quotas, counts, begin)
        choices = copy.copy(self)
        if begin not in choices._begins:
            choices._begins = sorted([*self._begins, begin])
        choices._know(self._known[0], (begin, list(counts or ())))
        return choices

    def _begin_of(self, positions: Any) -> Any:
        """Return where the window of each of *positions* begins."""
        stretch = np.array(self._begins)[np.searchsorted(self._begins, positions, "right") - 1]
        return stretch + (positions - stretch) // WINDOW * WINDOW

    def _resumed_from(self, position: int) -> int:
        """Return the position whose counts a state has: where the window begins, if it is permuted as a whole."""
        return int(self._begin_of(position)) if self._is_permuted else position

    def _end_of(self, begin: int) -> int:
        """Return where the window that begins at *begin* ends, if the epoch does not end before."""
        following = bisect_right(self._begins, begin)
        return min([begin + WINDOW, *self._begins[following : following + 1]])

    def _counts(self, position: int) -> list[int]:
        """Return how often each dataset was chosen before *position*."""
        with self._lock():
            begin = int(self._begin_of(position))
            base, before = self._chosen(begin, position)
        return [int(count) for count in before + np.bincount(base, minlength=len(self.sizes))]

    def _window(self, epoch: int, begin: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Return the datasets of the positions of a window, and the numbers of their samples."""
        with self._lock():
            if (epoch, begin) not in self._windows:
                while len(self._windows) >= KEPT:
                    del self._windows[next(iter(self._windows))]
                self._windows[epoch, begin] = self._make(epoch, begin, min(self._end_of(begin), self.total))
            return self._windows[epoch, begin]

    def _make(self, epoch: int, begin: int, end: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
        datasets, before = self._chosen(begin, end)
        if self._is_permuted:
            key = fold(hash_of(self.seed, epoch, LEVEL), begin)
            if any(begin < phase.begin < end for phase in self.quotas.phases):
                times = _times(datasets, hashes(key, end - begin))
                datasets = datasets[np.argsort(times, kind="stable")]
            else:
                datasets = datasets[permutations(key, [end - begin], end - begin)[0].astype(np.int64)]
        datasets = datasets.astype(np.min_scalar_type(len(self.sizes)))
        numbers = np.empty(end - begin, np.int64)
        counts = np.bincount(datasets, minlength=len(self.sizes))
        together = np.split(np.argsort(datasets, kind="stable"), np.cumsum(counts)[:-1])
        for i in np.flatnonzero(counts).tolist():
            numbers[together[i]] = self._number(i, begin + together[i], int(before[i]))
        return datasets, numbers

    def _number(self, i: int, positions: NDArray[np.int64], first: int) -> NDArray[np.int64]:
        """Return the numbers of the samples of dataset *i* at *positions*: from *first* on, pass after pass."""
        size, lanes = self.sizes[i], self._lanes[i]
        numbers = np.arange(first, first + len(positions))
        if lanes > 1:
            for begin in range(-(first % size), len(numbers), size):  # of each pass
                own = slice(max(begin, 0), begin + size)
                wanted, offered = positions[own] % lanes, numbers[own] % size % lanes
                numbers[own] = numbers[own][by_lanes(wanted, offered, lanes)]
        return numbers

    def _chosen(self, begin: int, end: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the datasets from *begin* to *end* before they are permuted, and how often each was chosen before."""
        if self._table is not None:
            period, shares = len(self._table), self.quotas.phases[0].growth
            periods, phase = divmod(begin, period)
            before = periods * np.array(shares) + np.bincount(self._table[:phase], minlength=len(shares))
            return self._table[np.arange(phase, phase + end - begin) % period].astype(np.int64), before
        while True:
            known, counts = self._known[bisect_right(self._known, begin, key=itemgetter(0)) - 1]
            mixture = Mixture(self.quotas, self.seed, counts)
            until = end if known == begin else min(self._end_of(known), begin)
            chosen = np.array(mixture.take(until - known), np.int64)
            following = bisect_left(self._known, until, key=itemgetter(0))
            if self._known[following : following + 1] != [(until, mixture.counts)]:
                self._known.insert(following, (until, mixture.counts))
            if known == begin:
                return chosen, np.array(counts)


def by_lanes(wanted: NDArray[np.int64], offered: NDArray[np.int64], lanes: int) -> NDArray[np.int64]:
    """Return which of the *offered* lanes each of the *wanted* ones takes: an equal one, as long as there are any.

    Each is taken once, in order. The rest takes, in order, what is left.

    >>> by_lanes(np.array([0, 0, 1, 0]), np.array([0, 1, 2, 0]), 3)
    array([0, 3, 1, 2])
    """
    both = np.minimum(np.bincount(wanted, minlength=lanes), np.bincount(offered, minlength=lanes))
    pairs = []
    for values in (wanted, offered):
        order = np.argsort(values.astype(np.min_scalar_type(lanes)), kind="stable")  # few bits are sorted by radix
        counts = np.bincount(values, minlength=lanes)
        rank = np.arange(len(values)) - np.repeat(np.cumsum(counts) - counts, counts)
        has_equal = rank < both[values[order]]
        pairs.append(np.concatenate([order[has_equal], np.sort(order[~has_equal])]))
    taken = np.empty_like(wanted)
    taken[pairs[0]] = pairs[1]
    return taken


def _times(datasets: NDArray[np.int64], words: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return a time for each choice, by its random word: as dense, for each dataset, as its choices are.

    The a choices of a dataset share the window out, each up to the middle between it and the next one. The upper half
    of the word, as a fraction of a, is one of these shares and a place in it. Times count 2**-33 positions.
    """
    times = np.empty(len(datasets), np.int64)
    counts = np.bincount(datasets)
    for own in np.split(np.argsort(datasets, kind="stable"), np.cumsum(counts)[:-1]):
        edges = np.concatenate(([0], own[:-1] + own[1:] + 1, [2 * len(datasets)]))  # in halves of positions
        share, place = np.divmod((words[own] >> np.uint64(32)).astype(np.int64) * len(own), 1 << 32)
        times[own] = (edges[share] << 32) + place * (edges[share + 1] - edges[share]) if len(own) else 0
    return times


def _stretches(quotas: Quotas) -> list[int]:
    """Return the positions at which windows begin because a weight becomes 0 or positive."""
    return [0] + [
        after.begin
        for before, after in pairwise(quotas.phases)
        if list(map(bool, before.growth)) != list(map(bool, after.growth))
    ]
