"""Samples that replace those that filters or faults removed from a batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np

from tarshards.epoch.loop import Part
from tarshards.errors import SampleError
from tarshards.samples.ledger import Tally

ATTEMPTS = 8  # most substitutes to try for a sample


class Substitutes:
    """The samples to try instead of some samples of a *part*: none that is already in it, and none twice.

    They are counted as repeated; their outcomes are counted like those of other samples.
    """

    def __init__(self, part: Part):
        self.part = part
        self._used = set(zip(part.shards.tolist(), part.numbers.tolist()))
        self._drawn: dict[int, Iterator[tuple[int, int]]] = {}
        self._tried = 0
        self._left_out = Tally()

    @contextmanager
    def drawn(self, rows: Iterable[int]) -> Iterator[Part]:
        """Return the part with the next substitutes for the samples at *rows* of the batch, and count them afterwards.

        Raises SampleError, which names the cause, if there is no substitute or 8 have been tried.
        """
        rows = list(rows)
        if self._tried == ATTEMPTS:
            raise self._error(rows[0], f"and so were {ATTEMPTS} others in its place")
        self._tried += 1
        pairs = np.array([self._next(row) for row in rows], np.int64)
        extra = Part(self.part.plan, self.part.positions[rows], pairs[:, 0], pairs[:, 1])
        extra.reader, extra.is_aside = self.part.reader, True
        try:
            yield extra
        finally:
            read = Tally(
                samples=extra.taken - extra.quarantined,
                quarantined_samples=extra.quarantined,
                repeated=extra.taken,
                members=extra.members,
            )
            if extra.left_out is not None:
                read.add(extra.left_out)
                self._left_out.add(extra.left_out)
            self._left_out.quarantined_samples += extra.quarantined
            self.part.leave_out(read)

    def _next(self, row: int) -> tuple[int, int]:
        """Return the shard and number of the next substitute that is not in the batch."""
        if row not in self._drawn:
            self._drawn[row] = self.part.plan.substitutes(int(self.part.positions[row]))
        for pair in self._drawn[row]:
            if pair not in self._used:
                self._used.add(pair)
                return pair
        raise self._error(row, "and all others near it are in the batch already or were left out as well")

    def _error(self, row: int, words: str) -> SampleError:
        left_out = self._left_out
        counts = [f"{name} left out {count}" for name, count in sorted(left_out.filtered.items())]
        others = (left_out.failed, "failed"), (left_out.quarantined_samples, "unread")
        counts += [f"{count} {word}" for count, word in others if count]
        found = f" ({', '.join(counts)})" if counts else ""
        cure = (
            "fill= is for filters that leave out few samples; take a smaller batch, or filter when shards are written"
        )
        position = int(self.part.positions[row])
        return SampleError(f"the sample at position {position} of the epoch was left out, {words}{found}; {cure}")
