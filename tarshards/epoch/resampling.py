"""An epoch of samples, or of shards, that are drawn with replacement: position -> draw, by a hash of the position."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tarshards.epoch.epoch_options import Tail, check_tail
from tarshards.epoch.permutations import GOLDEN, finalize, fold, hash_of
from tarshards.epoch.plan import POOL, SUBSTITUTES, PlannedEpoch, check_unpacked
from tarshards.errors import StateError

DRAWS = 3  # distinguishes these hashes from those of a plan


class Draws:
    """Shards by *weights*, one for each, drawn for the positions of an epoch; raise ValueError if no shard can be
    drawn.

    >>> Draws([1, 0, 1], seed=0, epoch=0).shards(np.arange(8)).tolist()
    [0, 0, 0, 2, 0, 2, 2, 0]
    """

    def __init__(self, weights: ArrayLike, seed: int, epoch: int):
        weights = np.asarray(weights, np.float64)
        self.ends: NDArray[np.float64] = np.cumsum(weights / weights.max(initial=0)) if weights.any() else weights
        if not weights.any():
            raise ValueError("resample= has no shard to draw: each has a weight of 0 or no samples")
        self.key: NDArray[np.uint64] = hash_of(seed, epoch, DRAWS)

    def words(self, positions: NDArray[np.int64], attempt: ArrayLike = 0) -> NDArray[np.uint64]:
        """Return the random words of *positions*, which differ for each *attempt*."""
        return finalize(fold(self.key, positions) + np.asarray(attempt).astype(np.uint64) * GOLDEN)

    def shards(self, positions: NDArray[np.int64], attempt: ArrayLike = 0) -> NDArray[np.int64]:
        """Return the shards of *positions*."""
        fractions = (self.words(positions, attempt) >> np.uint64(11)).astype(np.float64) * 2.0**-53
        return np.searchsorted(self.ends, fractions * self.ends[-1], "right").astype(np.int64)


class ResampledPlan(PlannedEpoch):
    """The rest, from position *begin*, of an epoch that draws as many samples as there are, with replacement.

    Each position is an independent draw: a shard by *weights*, by default the number of its samples, and one of these.
    """

    def __init__(
        self,
        counts: NDArray[Any],
        weights: NDArray[np.float64] | None,
        *,
        seed: int,
        epoch: int,
        begin: int,
        ranks: int,
        tail: Tail,
    ):
        self.counts: NDArray[np.int64] = counts.astype(np.int64)
        self.weights = weights
        self.seed = seed
        self.epoch = epoch
        self.begin = begin
        self.ranks = ranks
        self.tail: Tail = check_tail(tail)
        whole = int(self.counts.sum())
        self.whole: int = whole
        self.total: int = whole - begin
        self._draws = Draws(self.counts if weights is None else np.where(self.counts > 0, weights, 0), seed, epoch)

    def __getitem__(self, positions: Any) -> Any:
        positions = np.asarray(positions, np.int64)
        rest = positions - self.total
        return self._draw(np.where(rest < 0, positions + self.begin, rest % max(1, self.whole)))

    def _draw(
        self, positions: NDArray[np.int64], attempt: ArrayLike = 0
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        shards = self._draws.shards(positions, attempt)
        words = fold(self._draws.words(positions, attempt), DRAWS)
        return shards, (words % self.counts[shards].astype(np.uint64)).astype(np.int64)

    def substitutes(self, position: int, among: int | None = None) -> Iterator[tuple[int, int]]:
        """Yield further draws of *position*, which are of all samples in any part of the epoch."""
        original = self.begin + position if position < self.total else (position - self.total) % self.whole
        shards, samples = self._draw(np.repeat(original, SUBSTITUTES), np.arange(1, SUBSTITUTES + 1))
        yield from zip(shards.tolist(), samples.tolist())

    @property
    def before(self) -> int:
        return self.begin

    @property
    def block_and_reach(self) -> tuple[int | None, int]:
        return 1, POOL

    @property
    def permuted_by(self) -> tuple[int, int]:
        return self.seed, self.epoch

    def resume(self, position: int, ranks: int, tail: Tail | None = None) -> ResampledPlan:
        """Return the rest, for *ranks*, after all ranks together took *position* positions."""
        begin = self.begin + min(position, self.total)
        options: dict[str, Any] = {"seed": self.seed, "epoch": self.epoch, "ranks": ranks, "tail": tail or self.tail}
        return ResampledPlan(self.counts, self.weights, begin=begin, **options)

    def state(self, taken: int) -> dict[str, Any]:
        """Return, for JSON, the state after *taken* positions."""
        position = self.begin + min(taken, self.total)
        return {"seed": self.seed, "epoch": self.epoch, "resampled": self.name, "position": position}

    @property
    def name(self) -> str:
        """A name that identifies the weights."""
        return "" if self.weights is None else blake2b(self.weights.tobytes(), digest_size=16).hexdigest()

    def restored(self, state: Mapping[str, Any]) -> ResampledPlan:
        """Return the rest of the epoch according to *state*; raise StateError for a state of another kind of epoch."""
        check_unpacked(state)
        if state.get("resampled") != self.name:
            raise StateError("the state was saved with other resample= weights, or without resample=")
        for name in ("seed", "epoch", "position"):
            if type(state.get(name)) is not int:
                raise StateError(f"the state has {name} {state.get(name)!r}")
        if not 0 <= state["position"] <= self.whole:
            raise StateError(f"the state has position {state['position']}, and an epoch has {self.whole} samples")
        options: dict[str, Any] = {"seed": state["seed"], "epoch": state["epoch"], "begin": state["position"]}
        return ResampledPlan(self.counts, self.weights, ranks=self.ranks, tail=self.tail, **options)
