"""One worker's way through a planned epoch: which samples were due, which came, and the account of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np

from tarshards.epoch.world import World
from tarshards.errors import AuditError, TarshardsError
from tarshards.samples.ledger import Tally

if TYPE_CHECKING:
    from tarshards.epoch.plan import EpochPlan


class Reading:
    """One worker's way through its *shares* of a plan, and its account; *taken* positions are behind it.

    All shares but the last are of one length.
    """

    def __init__(self, source: Any, plan: EpochPlan, world: World, shares: Sequence[range], *, whole: bool):
        self.source, self.plan, self.taken = source, plan, 0
        count = (len(shares) - 1) * len(shares[0]) + len(shares[-1]) if shares else 0
        repeated = int(count > 0 and shares[-1][-1] >= plan.total)  # no rank has more than one
        self._tally = Tally(planned=count - repeated, repeated=repeated, broken_off=1)
        self._read = np.zeros(len(source.shards.names), np.int64)  # by shard
        if world.worker == 0:
            order = repr((plan.state(0), plan.tail))
            self._tally.epochs[f"{source.digest} {blake2b(order.encode(), digest_size=16).hexdigest()}"] = 1
            self._tally.parts = 0 if whole and source.once else 1
            if world.rank < plan.dropped:
                (shard,), _ = plan.resume(len(plan), 1, "exact")[[world.rank]]
                self._read[shard] += 1
                self._tally.planned += 1
                self._tally.dropped += 1

    def samples(self, positions: range) -> Iterator[dict[str, Any]]:
        """Yield the samples at *positions*; what cannot be read goes to the ledger."""
        order = np.arange(positions.start, positions.stop, positions.step)
        shards, numbers = self.plan[order]
        names = self.source.shards.names
        due: list[str] = [names[shard] for shard in shards.tolist()]
        came: list[str] = []
        begun, lost, entries = self.taken, 0, 0
        note = came.append
        try:
            for result in self.source.shards.read_all(shards, numbers):
                self.taken += 1
                if isinstance(result, dict):
                    entries += len(result)
                    note(result["__url__"])
                    yield result
                else:
                    lost += 1
                    note(due[len(came)])
                    self.source.ledger(result)
            if came != due and (missed := Counter(due) - Counter(came)):
                told = ", ".join(f"{name} ({count})" for name, count in missed.items())
                raise AuditError(f"samples were to be read and did not come: {told}")
        finally:
            taken = self.taken - begun
            self.count(order[:taken], shards[:taken], lost, entries - self.source.shards.reserved * (taken - lost))

    def count(self, positions: np.ndarray, shards: np.ndarray, lost: int, members: int) -> None:
        """Count positions that were taken, all of which but the *lost* were delivered, with so many members in all."""
        np.add.at(self._read, shards[positions < self.plan.total], 1)
        self._tally.samples += len(positions) - lost
        self._tally.members += members

    def finish(self) -> None:
        """Say that all of the share was taken; what has changed under the reading goes to the ledger."""
        self._tally.broken_off = 0
        try:
            self.source.shards.verify()
        except TarshardsError as error:
            self.source.ledger(error)

    def tally(self) -> Tally:
        """Return the account."""
        names, read = self.source.shards.names, Counter[str]()
        for shard in self._read.nonzero()[0]:
            read[names[shard]] += int(self._read[shard])  # a mixture may have a shard twice
        return replace(self._tally, read=read)
