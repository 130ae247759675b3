"""Loaders of a few lines, right ones and mutants of them, each with one fault that loaders have had."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

from tarshards.testing import Setup

Batches = Iterator[list[int]]


class Planned:
    """The epoch is one permutation; rank r of R takes every R-th of it, whatever the workers. A state is a position."""

    def __init__(self, setup: Setup):
        self.setup, self.epoch, self.position = setup, 0, 0

    def keeps(self, number: int) -> bool:
        return True

    def order(self) -> list[int]:
        order = list(range(self.setup.total))
        random.Random(f"{self.setup.seed}/{self.epoch}").shuffle(order)
        return order

    def share(self, rest: list[int]) -> list[int]:
        return rest[self.setup.rank :: self.setup.ranks]

    def count(self, taken: list[int], left: list[int]) -> int:
        """How far a batch takes the position."""
        return self.setup.batch_size * self.setup.ranks

    def end(self) -> None:
        self.epoch, self.position = self.epoch + 1, 0

    def __iter__(self) -> Batches:
        size, share = self.setup.batch_size, self.share(self.order()[self.position :])
        for start in range(0, len(share), size):
            taken = share[start : start + size]
            left = [number for number in taken if self.keeps(number)]
            self.position += self.count(taken, left)
            yield left
        self.end()

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]


class Filtered(Planned):
    def keeps(self, number: int) -> bool:
        return number % 3 != 1


class Streamed:
    """Shards are divided among ranks and workers, and each worker mixes its samples in its own buffer.

    A state is that of the buffers, for the same ranks and workers.
    """

    BUFFER = 30

    def __init__(self, setup: Setup):
        self.setup, self.epoch = setup, 0
        self.begin()

    def begin(self) -> None:
        workers = max(1, self.setup.workers)
        own = [list(range(shard, len(self.setup.shards), self.setup.ranks * workers)) for shard in self.lanes(workers)]
        self.randoms = [self.random(worker) for worker in range(workers)]
        self.sources = []
        for shards, rng in zip(own, self.randoms):
            rng.shuffle(shards)
            self.sources.append([number for shard in shards for number in self.setup.numbers[shard]])
        self.buffers: list[list[int]] = [[] for _ in own]
        self.turn = 0

    def lanes(self, workers: int) -> list[int]:
        return [self.setup.rank + self.setup.ranks * worker for worker in range(workers)]

    def random(self, worker: int) -> random.Random:
        return random.Random(f"{self.setup.seed}/{self.epoch}/{self.setup.rank}/{worker}")

    def take(self, worker: int) -> list[int]:
        source, buffer, rng = self.sources[worker], self.buffers[worker], self.randoms[worker]
        batch: list[int] = []
        while len(batch) < self.setup.batch_size and (source or buffer):
            while source and len(buffer) < self.BUFFER:
                buffer.append(source.pop(0))
            batch.append(buffer.pop(rng.randrange(len(buffer))))
        return batch

    def __iter__(self) -> Batches:
        while any(self.sources) or any(self.buffers):
            batch = self.take(self.turn)
            self.turn = (self.turn + 1) % len(self.sources)
            if batch:
                yield batch
        self.epoch += 1
        self.begin()

    def state_dict(self) -> dict[str, Any]:
        kept = {name: getattr(self, name) for name in ("epoch", "sources", "buffers", "turn")}
        return kept | {"randoms": [rng.getstate() for rng in self.randoms]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if len(state["sources"]) != len(self.sources):
            raise ValueError("a state of another number of workers")
        for name in ("epoch", "sources", "buffers", "turn"):
            setattr(self, name, state[name])
        for rng, saved in zip(self.randoms, state["randoms"]):
            rng.setstate(saved)


# The mutants.


class DropsTheTail(Planned):
    def share(self, rest: list[int]) -> list[int]:
        share = super().share(rest)
        return share[: len(share) // self.setup.batch_size * self.setup.batch_size]


class PadsSilently(Planned):
    def share(self, rest: list[int]) -> list[int]:
        return super().share(rest + rest[: -len(rest) % self.setup.ranks])


class WrongRankSlice(Planned):
    def share(self, rest: list[int]) -> list[int]:
        each = len(rest) // self.setup.ranks
        return rest[self.setup.rank * each : (self.setup.rank + 1) * each]


class UnevenSteps(Planned):
    def share(self, rest: list[int]) -> list[int]:
        own = [n for shard in self.setup.numbers[self.setup.rank :: self.setup.ranks] for n in shard]
        return [number for number in rest if number in own]


class WrongLength(Planned):
    def __len__(self) -> int:
        return self.setup.total // self.setup.ranks // self.setup.batch_size


class RepeatsAfterResume(Planned):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.position = max(0, self.position - self.setup.ranks)


class ResumesOneBatchLate(Planned):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.position += self.setup.batch_size * self.setup.ranks * (self.position > 0)


class LosesStateOnSecondResume(Planned):
    loaded = 0

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.loaded = self.position

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "position": max(0, self.position - self.loaded)}


class ReordersWithWorkers(Planned):
    def share(self, rest: list[int]) -> list[int]:
        share = super().share(rest)
        return share[::-1] if self.setup.workers > 1 and self.position else share


class DropsFilteredCounts(Filtered):
    def count(self, taken: list[int], left: list[int]) -> int:
        return len(left) * self.setup.ranks


class SkipsAnEpoch(Planned):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.epoch += self.position == 0 and self.epoch > 0


class HangsAtTheEnd(Planned):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.is_stuck = self.position >= self.setup.total

    def __iter__(self) -> Batches:
        while getattr(self, "is_stuck", False):
            time.sleep(0.01)
        return super().__iter__()


class RefusesOtherRanks(Planned):
    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"ranks": self.setup.ranks}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["ranks"] != self.setup.ranks:
            raise ValueError("a state of other ranks")
        super().load_state_dict(state)


class HasNoEnd(Planned):
    def end(self) -> None:
        self.position = 0

    def __iter__(self) -> Batches:
        while True:
            yield from super().__iter__()


class BufferLost(Streamed):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict({**state, "buffers": [[] for _ in state["buffers"]]})


class SharesASeedBetweenWorkers(Streamed):
    def random(self, worker: int) -> random.Random:
        return random.Random(f"{self.setup.seed}/{self.epoch}")


class IgnoresTheEpoch(Planned):
    def order(self) -> list[int]:
        order = list(range(self.setup.total))
        random.Random(self.setup.seed).shuffle(order)
        return order


class IgnoresTheSeed(Planned):
    def order(self) -> list[int]:
        order = list(range(self.setup.total))
        random.Random(self.epoch).shuffle(order)
        return order


class AddsTheEpochToTheSeed(Planned):
    """Epoch 1 of a seed is epoch 0 of the next."""

    def order(self) -> list[int]:
        order = list(range(self.setup.total))
        random.Random(self.setup.seed + self.epoch).shuffle(order)
        return order


class RotatesInsteadOfShuffling(Planned):
    def order(self) -> list[int]:
        start = random.Random(f"{self.setup.seed}/{self.epoch}").randrange(self.setup.total)
        return [(start + i) % self.setup.total for i in range(self.setup.total)]


class SmallBuffer(Streamed):
    BUFFER = 3
