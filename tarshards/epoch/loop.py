"""The loop over a planned epoch: takes the positions of one worker in parts, reads, counts and audits the samples."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from hashlib import blake2b
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar, overload

import numpy as np

from tarshards.epoch.plan import PlannedEpoch
from tarshards.epoch.world import World
from tarshards.errors import AuditError, TarshardsError
from tarshards.index.access import SampleReader
from tarshards.index.readahead import LOOKED_UP
from tarshards.samples.batch import SampleBatch
from tarshards.samples.keys import Sample
from tarshards.samples.ledger import Ledger, PassOf, Tally

T = TypeVar("T")


class Shares(Sequence[range]):
    """The batches of a rank or worker as slices of its *positions*, each *size* long, that begin at *starts*.

    *dropped* are positions of the rank that are in no batch.

    >>> shares = Shares(range(1, 20, 2), 4, range(0, 10, 4))
    >>> [list(share) for share in shares[1:]], shares[1:].together()
    ([[9, 11, 13, 15], [17, 19]], array([ 9, 11, 13, 15, 17, 19]))
    """

    def __init__(self, positions: range, size: int, starts: range | None = None, dropped: range = range(0)):
        self.positions = positions
        self.size = size
        self.dropped = dropped
        self.starts: range = range(0, len(positions), size) if starts is None else starts  # there may be many millions

    def __len__(self) -> int:
        return len(self.starts)

    @overload
    def __getitem__(self, number: int) -> range: ...
    @overload
    def __getitem__(self, number: slice) -> Shares: ...
    def __getitem__(self, number: int | slice) -> range | Shares:
        if isinstance(number, slice):
            return Shares(self.positions, self.size, self.starts[number], self.dropped)
        start = self.starts[number]
        return self.positions[start : start + self.size]

    @property
    def total(self) -> int:
        """The positions of all shares."""
        return (len(self) - 1) * self.size + len(self[-1]) if self else 0

    def together(self) -> np.ndarray:
        """Return the positions of all shares, end to end."""
        numbers = np.add.outer(np.arange(self.starts.start, self.starts.stop, self.starts.step), np.arange(self.size))
        return self.positions.start + self.positions.step * numbers.ravel()[: self.total]

    def bounds(self, sizes: np.ndarray | None) -> list[int]:
        """Return where each share begins among the samples of all, and where the last ends.

        *sizes* are the samples of each position of the plan, None for one each.
        """
        begins = [*range(0, self.total, self.size), self.total]
        if sizes is None:
            return begins
        return np.concatenate(([0], np.cumsum(sizes[self.together()])))[begins].tolist()


class Outcome(NamedTuple):
    """The outcomes of the samples of a part; *taken*, *quarantined* and *left_out* are as in ``Part``.

    *keys* is a CRC-32 of their keys where no plan numbers them.
    """

    taken: int
    quarantined: int
    left_out: Tally | None
    keys: int = 0

    def settle(self, tally: Tally) -> None:
        """Count the samples in *tally*, which has them in flight."""
        tally.samples -= self.quarantined
        tally.quarantined_samples += self.quarantined
        tally.in_flight -= self.taken
        if self.left_out is not None:
            tally.add(self.left_out)


class Part:
    """Some positions of a *plan*, the shards and numbers of their samples, and the counts of what has been read.

    *sample_positions* are the positions in the plan of single samples, where those of the plan are bins. *begins* are
    the elements at which they begin, where bins have pieces of samples.

    The first *taken* samples were read or could not be read; *quarantined* of these could not, and the others had
    *members*. *left_out* counts samples that were read and then left out.
    """

    def __init__(
        self,
        plan: PlannedEpoch,
        positions: np.ndarray,
        shards: np.ndarray,
        numbers: np.ndarray,
        sample_positions: np.ndarray | None = None,
        begins: np.ndarray | None = None,
    ):
        self.plan = plan
        self.positions = positions
        self.shards = shards
        self.numbers = numbers
        self.sample_positions: Any = positions if sample_positions is None else sample_positions
        self.begins = begins
        self.taken: int = 0
        self.quarantined: int = 0
        self.members: int = 0
        self.left_out: Tally | None = None
        self.reader: SampleReader | None = None  # the prefetching reader, if the loop has one
        self.is_aside = False  # whether that reader does not expect these samples
        self.located: SampleBatch | None = None  # the fields of the samples, where they have been found

    @classmethod
    def of(cls, plan: PlannedEpoch, positions: range | np.ndarray) -> Part:
        """Look up *positions*; a bin's stands for each of its samples."""
        positions = np.asarray(positions, np.int64)
        sample_positions = plan.sample_positions(positions)
        shards, numbers = plan.unpacked[sample_positions]
        begins = plan.begins(positions)
        if plan.sizes is not None:
            positions = np.repeat(positions, plan.sizes[positions])
        return cls(plan, positions, shards, numbers, sample_positions, begins)

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def outcome(self) -> Outcome:
        """The outcomes of the samples so far."""
        return Outcome(self.taken, self.quarantined, self.left_out)

    def leave_out(self, tally: Tally) -> None:
        """Count samples that were read and then left out, by *tally*."""
        if self.left_out is None:
            self.left_out = tally
        else:
            self.left_out.add(tally)

    def split(self, bounds: list[int]) -> Iterator[Part]:
        """Yield the parts between *bounds*."""
        for begin, end in pairwise(bounds):
            yield self.cut(begin, end)

    def cut(self, begin: int, end: int) -> Part:
        """Return the part of the positions from the *begin*-th to the *end*-th."""
        cut = slice(begin, end)
        begins = None if self.begins is None else self.begins[cut]
        own = self.positions[cut], self.shards[cut], self.numbers[cut], self.sample_positions[cut]
        part = Part(self.plan, *own, begins)
        part.reader = self.reader
        if self.located is not None:
            part.located = self.located.part(begin, end)
        return part

    def read_all(self, reader: SampleReader) -> Iterator[Sample | TarshardsError]:
        """Yield the samples as *reader* returns them, or the error for a sample that cannot be read."""
        return (reader.read_aside_all if self.is_aside else reader.read_all)(self.shards, self.numbers)

    def read(self, reader: SampleReader, on_error: Callable[[Exception], Any]) -> Iterator[Sample]:
        """Yield the samples, by the loop's reader or else by *reader*; errors of samples go to *on_error*.

        Raises AuditError, which names the shards, if *reader* yields fewer samples than requested.
        """
        reader = self.reader or reader
        names = reader.names
        due = [names[shard] for shard in self.shards.tolist()]
        came: list[str] = []
        note, entries = came.append, 0
        try:
            for result in self.read_all(reader):
                self.taken += 1
                if isinstance(result, dict):
                    entries += len(result)
                    note(result["__url__"])
                    yield result
                else:
                    self.quarantined += 1
                    note(due[len(came)])
                    on_error(result)
        finally:
            self.members = entries - reader.reserved * (self.taken - self.quarantined)
        if came != due and (missed := Counter(due) - Counter(came)):
            words = ", ".join(f"{name} ({count})" for name, count in missed.items())
            raise AuditError(f"planned samples were not read: {words}")


class EpochLoop:
    """The loop of one worker over its *shares* of a *plan* of a ``PlannedSource``.

    Its tally goes to the ledger of the *source* as *of* a pass; the caller that runs the loop audits it. *begun* are
    samples of this worker before its shares, besides those before the plan. If the loop *is_ahead* of the consumer, all
    that was taken counts as in flight; the consumer counts the outcomes of the samples with each result.
    """

    def __init__(
        self,
        source: Any,
        plan: PlannedEpoch,
        world: World,
        shares: Shares,
        *,
        of: PassOf,
        begun: int = 0,
        is_ahead: bool = False,
    ):
        self.plan = plan
        self.reader: SampleReader = source.shards
        self.ledger: Ledger = source.ledger
        self.shares = shares
        self._begun: deque[Part] = deque()
        self._world = world
        self._is_ahead = is_ahead
        self._counted = 0
        self._repeats = len(shares) > 0 and shares[-1][-1] >= plan.total  # no rank has more than one
        self._samples = _samples(plan, shares)
        repeated = (1 if plan.sizes is None else int(plan.sizes[shares[-1][-1]])) if self._repeats else 0
        if plan.further is not None and len(shares):
            counted = shares.together()
            repeated += int(plan.further[counted[counted < plan.total]].sum())
        self._of = of
        whole = source.once and not plan.before and not begun
        if world.worker == 0:
            begun += len(range(world.rank, plan.before, plan.ranks))
        self._tally = Tally(planned=self._samples - repeated, before=begun, broken_off=1)
        self._read = np.zeros(len(self.reader.names), np.int64)  # by shard
        if world.worker == 0:
            order = repr((plan.state(0), plan.tail))
            self._tally.epochs[f"{source.digest} {blake2b(order.encode(), digest_size=16).hexdigest()}"] = 1
            self._tally.parts = 0 if whole else 1
            self._tally.unpaired = self.reader.unpaired if whole and world.rank == 0 else 0
        dropped = shares.dropped if world.worker == 0 else ()
        self._dropped = [position for position in dropped if position < plan.total]

    @property
    def taken(self) -> int:
        """The positions that have been taken so far."""
        return self._counted + (self._begun[0].taken if self._begun else 0)

    @property
    def made(self) -> Outcome:
        """The outcomes of the samples of the latest result."""
        return self._begun[0].outcome

    @property
    def tally(self) -> Tally:
        """The counts so far."""
        names, read = self.reader.names, Counter[str]()
        for shard in self._read.nonzero()[0]:
            read[names[shard]] += int(self._read[shard])  # a mixture may have a shard twice
        return replace(self._tally, read=read)

    def parts(self) -> Iterator[Part]:
        """Yield the part of each share; several parts are looked up together, which is faster."""
        for shares in growing(self.shares, max(1, LOOKED_UP // self.shares.size)):
            yield from Part.of(self.plan, shares.together()).split(shares.bounds(self.plan.sizes))

    def run(
        self, read: Callable[[Iterable[Part]], Iterable[T]], parts: Iterable[Part] | None = None
    ) -> Generator[T, None, None]:
        """Yield the results of *read* for the parts (default: those of the shares): one for each part, in order.

        *read* counts in each part the samples that it took, and may take parts ahead. A part is counted when its result
        has been consumed, or the loop is left. At the end errors of shards that changed while they were read go to the
        ledger.
        """
        is_out = False
        try:
            with self._ahead() as reader:
                for result in read(self._begin(self.parts() if parts is None else parts, reader)):
                    is_out = True
                    yield result
                    is_out = False
                    self._count(self._begun.popleft())
            self._finish()
        finally:
            if self._begun:
                self._count(self._begun.popleft(), is_out)
            self.ledger.add(self.tally.within(self._of))

    def _ahead(self) -> AbstractContextManager[SampleReader]:
        """Return a reader that prefetches the samples of the loop."""
        block, reach = self.plan.block_and_reach
        own = self._samples
        reach = max(1, min(own, round(reach * self.shares.total / max(1, len(self.plan)))))
        return self.reader.ahead(
            self._upcoming(),
            block=block,
            reach=reach,
            processes=self._world.processes,
            gap=self.plan.gap,
        )

    def _upcoming(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        plan = self.plan.apart()
        together = max(1, LOOKED_UP // self.shares.size)
        for begin in range(0, len(self.shares), together):
            shares = self.shares[begin : begin + together]
            positions = shares.together() if together > 1 else shares[0]
            for first in range(0, len(positions), LOOKED_UP):
                yield plan[np.asarray(positions[first : first + LOOKED_UP], np.int64)]

    def _begin(self, parts: Iterable[Part], reader: SampleReader) -> Iterator[Part]:
        for part in parts:
            part.reader = reader
            self._begun.append(part)
            yield part

    def _count(self, part: Part, is_out: bool = True) -> None:
        """Count the samples read from *part*; without *is_out*, the loop was left before its result."""
        shards, tally = part.shards[: part.taken], self._tally
        if self._repeats or part.begins is not None:
            first = part.positions[: part.taken] < self.plan.total
            shards = shards[first if part.begins is None else first & (part.begins[: part.taken] == 0)]
            tally.repeated += part.taken - len(shards)
        np.add.at(self._read, shards, 1)
        self._counted += part.taken
        tally.members += part.members
        tally.samples += part.taken
        tally.in_flight += part.taken
        if not self._is_ahead:
            before = tally.delivered
            part.outcome.settle(tally)
            if not is_out:
                tally.in_flight += tally.delivered - before

    def _finish(self) -> None:
        # What is dropped is looked up now: a plan by a schedule comes to its last positions by way of all others.
        if self._world.worker == 0 and self._world.rank < self.plan.dropped:
            self._drop(self.plan.resume(len(self.plan), 1, "exact"), [self._world.rank])
        if self._dropped:
            self._drop(self.plan, self._dropped)
        if self._world.worker == self._world.rank == 0:
            self._count_dropped(self.plan.overlong[0])
        self._tally.broken_off = 0
        try:
            self.reader.verify()
        except TarshardsError as error:
            self.ledger(error)

    def _drop(self, plan: PlannedEpoch, positions: list[int]) -> None:
        part = Part.of(plan, np.asarray(positions, np.int64))
        self._count_dropped(part.shards if part.begins is None else part.shards[part.begins == 0])

    def _count_dropped(self, shards: np.ndarray) -> None:
        np.add.at(self._read, shards, 1)
        self._tally.planned += len(shards)
        self._tally.dropped += len(shards)


def _samples(plan: PlannedEpoch, shares: Shares) -> int:
    """The samples of all *shares* of a plan."""
    if plan.sizes is None or not shares:
        return shares.total
    return int(plan.sizes[shares.together()].sum())


def growing(items: Sequence[Any], most: int) -> Iterator[Any]:
    """Yield slices of *items*, each eight times as long as the one before, so that the first comes soon.

    >>> list(growing(range(30), 10))
    [range(0, 1), range(1, 9), range(9, 19), range(19, 29), range(29, 30)]
    """
    begin, size = 0, 1
    while begin < len(items):
        yield items[begin : begin + size]
        begin, size = begin + size, min(8 * size, most)
