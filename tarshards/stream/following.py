"""Count what happens to samples in ops, for the ledger: each sample is counted in one class."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, compress, repeat
from operator import length_hint
from typing import Any

from tarshards.errors import AuditError
from tarshards.samples.ledger import Ledger, PassOf, Tally, warn_of_nothing
from tarshards.stream.op import BoundOp


def is_followed(op: BoundOp) -> bool:
    """Return whether the ledger can count each sample that *op* takes, as yielded or as left out."""
    return op.traits.one_for_one or op.traits.leaves_out is not None


def follow(
    ops: Sequence[BoundOp], samples: Iterable[Any], epoch: int, seed: int, ledger: Ledger, of: PassOf
) -> Iterator[Any]:
    """Yield the results of *ops* for the samples of an epoch.

    *ledger* receives the errors, and counts the samples that are left out, as *of* a pass. *epoch* and *seed* seed
    random ops. Raises AuditError if an op lost samples or yielded too many, and logs a warning if the ops left out all
    samples.
    """
    passage = Passage(ops, ledger)
    upstream = iter(samples)
    try:
        yield from passage.run(upstream, epoch, seed)
        passage.verify()
        passage.warn()
    finally:
        if hasattr(upstream, "close"):
            upstream.close()  # now, even if a traceback still refers to it
        if passage.entered != passage.delivered:
            ledger.add(passage.tally().within(of))


def follow_part(
    ops: Sequence[BoundOp],
    samples: Iterable[Any],
    epoch: int,
    seed: int,
    ledger: Ledger,
    leave_out: Callable[[Tally], Any],
) -> list[Any]:
    """Return the results of *ops* for a few samples of an epoch, like ``follow``; *leave_out* gets the counts."""
    passage = Passage(ops, ledger)
    try:
        results = list(passage.run(samples, epoch, seed))
        passage.verify()
        return results
    finally:
        if passage.entered != passage.delivered:
            leave_out(passage.tally())


def follow_each(
    ops: Sequence[BoundOp],
    samples: Iterable[Any],
    row: Callable[[], int],
    epoch: int,
    seed: int,
    ledger: Ledger,
    leave_out: Callable[[Tally], Any],
) -> dict[int, Any]:
    """Return the results of *ops* for a few samples of an epoch, like ``follow_part``, by the rows of the samples.

    *ops* must process each sample separately, and yield their results in order. *row* returns the row of the sample
    that *samples* yielded last.
    """
    passage = Passage(ops, ledger)
    results = {}
    try:
        for result in passage.run(samples, epoch, seed, row):
            results[passage.row()] = result
        passage.verify()
        return results
    finally:
        if passage.entered != passage.delivered:
            leave_out(passage.tally())


class Passage:
    """One run of *ops* over samples; counts the samples that each op takes, fails on, and yields.

    The last op may gather samples into batches.
    """

    def __init__(self, ops: Sequence[BoundOp], ledger: Ledger):
        self.row: Callable[[], int]
        self._stages = [_Stage(op, ledger) for op in ops]
        self._counts = [Count() for _ in range(len(ops) + 1)]  # before each op, and after the last

    def run(self, samples: Iterable[Any], epoch: int, seed: int, row: Callable[[], int] | None = None) -> Iterator[Any]:
        """Yield the results of the ops.

        If *row* is given, which returns the row of the sample that *samples* yielded last, ``self.row()`` returns the
        row of the sample of the last result.
        """
        samples = self._counts[0].over(samples)
        for stage, count in zip(self._stages, self._counts[1:]):
            if row is not None:
                samples = stage.numbered(samples, row)
            results = stage.run(samples, epoch, seed)
            if row is not None:
                results, row = stage.traced(results), stage.row
            samples = count.over(results)
        self.row = row or (lambda: -1)
        return samples

    @property
    def entered(self) -> int:
        """The number of samples that went into the first op."""
        return int(self._counts[0])

    @property
    def delivered(self) -> int:
        """The number of samples that came out of the last op, by themselves or in batches."""
        return self._came_out(len(self._stages) - 1)

    def _came_out(self, number: int) -> int:
        count, size = int(self._counts[number + 1]), self._stages[number].size
        return count if size is None else min(count * size, int(self._counts[number]))

    def _missing(self) -> Iterator[tuple[_Stage, int, bool]]:
        """Yield each op, the number of its samples that neither failed nor came out, and whether it has ended."""
        for number, stage in enumerate(self._stages):
            missing = int(self._counts[number]) - stage.failed - self._came_out(number)
            yield stage, missing, self._counts[number + 1].has_ended

    def tally(self) -> Tally:
        """Return the counts of the samples that have not come out."""
        tally = Tally(failed=sum(stage.failed for stage in self._stages))
        for stage, missing, has_ended in self._missing():
            leaves_out = stage.op.traits.leaves_out
            if leaves_out is None or (stage.size is not None and not has_ended):
                tally.in_flight += missing
            elif leaves_out == "discarded":
                tally.discarded += missing
            elif missing:
                tally.filtered[stage.op.label] += missing
        return tally

    def verify(self) -> None:
        """Raise AuditError if an op that has ended did not yield all samples that it took."""
        for stage, missing, has_ended in self._missing():
            if has_ended and missing and stage.op.traits.leaves_out is None:
                words = f"{missing} samples that it took" if missing > 0 else f"{-missing} samples more than it took"
                raise AuditError(f"{stage.op.label} {'lost' if missing > 0 else 'yielded'} {words}")

    def warn(self) -> None:
        """Log a warning if the ops have left out all samples."""
        if not self.delivered:
            tally = self.tally()
            tally.samples = self.entered
            warn_of_nothing(tally)


class _Stage:
    """An op of a passage; ``failed`` counts the samples on which it failed, ``size`` is the number that it gathers."""

    def __init__(self, op: BoundOp, ledger: Ledger):
        self.op, self.ledger, self.failed = op, ledger, 0
        self.size: int | None = op.argument(op.traits.gathers) if op.traits.gathers else None
        self._handler: Any = None
        self._rows: deque[int] = deque()  # of the samples that have gone in but not come out
        self._row = -1

    def run(self, samples: Iterable[Any], epoch: int, seed: int) -> Iterable[Any]:
        op, handler = self.op, self.op.options.get("on_error", self.ledger)
        if "on_error" not in op.traits.context or handler is None:
            return op.run(samples, epoch, seed, handler)
        self._handler = self.ledger.fail if handler is self.ledger else handler
        return op._replace(options={**op.options, "on_error": self._fail}).run(samples, epoch, seed, self._fail)

    def row(self) -> int:
        """Return the row of the last result's sample."""
        return self._row

    def numbered(self, samples: Iterable[Any], row: Callable[[], int]) -> Iterator[Any]:
        """Yield *samples*, and record the row of each."""
        for sample in samples:
            self._rows.append(row())
            yield sample

    def traced(self, results: Iterable[Any]) -> Iterator[Any]:
        """Yield *results*, and record the row of each one's sample.

        It is the sample taken last; if the op reads ahead, it is the first one taken that neither failed nor came out.
        """
        for result in results:
            if not self.op.traits.reads_ahead:
                while len(self._rows) > 1:
                    self._rows.popleft()
            self._row = self._rows.popleft()
            yield result

    def _fail(self, error: Exception) -> None:
        self.failed += 1
        if self._rows and self.op.traits.reads_ahead:
            self._rows.popleft()
        self._handler(error)


class Count:
    """Counts the items taken from an iterator, without running Python code for each."""

    def __init__(self) -> None:
        self._ticks = repeat(True, sys.maxsize)
        self.has_ended: bool = False

    def over(self, samples: Iterable[Any]) -> Iterator[Any]:
        """Yield *samples*, counted."""
        return compress(chain(samples, self._end()), self._ticks)

    def _end(self) -> Iterator[Any]:
        self.has_ended = True
        yield from ()

    def __int__(self) -> int:
        return sys.maxsize - length_hint(self._ticks)
