"""A single batch: its positions in an epoch, and the batch made from them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self, TypedDict, overload

import numpy as np

from tarshards.errors import SampleError, flag, shortened, whole_number
from tarshards.samples.ledger import Ledger
from tarshards.stream.sources import PlannedSource, check_state
from tarshards.stream.stream import Stream

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    from tarshards.epoch.loop import Part, Shares
    from tarshards.epoch.packing import Packing
    from tarshards.epoch.plan import PlannedEpoch

    Column = TypeVar("Column", default=Any)

    class FieldsBatch(dict[str, Column]):
        """The batch of a loader with ``fields=``, for type checkers; it is a dict."""

        @overload
        def __getitem__(self, field: Literal["__key__"]) -> list[str]: ...
        @overload
        def __getitem__(self, field: str) -> Column: ...
        def __getitem__(self, field: str) -> Any: ...

    class BatchOptions(TypedDict, total=False):
        """What ``ShardLoader`` and ``ArrayLoader`` both take, and which does not change the type of a batch."""

        fill: bool
        drop_last: bool
        steps: int | None
        reuse: bool
        packing: Packing | None


class BatchMaker:
    """Makes batches of *size* samples of a stream; a subclass defines in ``read`` what a batch is.

    Batch g of a rank is made from the g-th *size* positions that it has in the plan. With *fill* a sample that is left
    out, or unreadable, is replaced: see ``Substitutes``. With *drop_last* there is no smaller batch at the end. With
    *packing* the positions are bins, and a batch has the samples of *size* bins. Raises TypeError for anything but a
    stream, a *size* that is not an integer, and *packing* without indexes or with *fill*, and ValueError for a size
    below 1.
    """

    def __init__(
        self, stream: Stream, size: int, *, fill: bool = False, drop_last: bool = False, packing: Packing | None = None
    ):
        self.stream = stream
        self.size: int = whole_number("batch_size", size, 1)
        self.fill: bool = flag("fill", fill)
        self.drop_last: bool = flag("drop_last", drop_last)
        self.packing: Packing | None = None
        self.pack(packing)
        self._planned: tuple[Any, PlannedEpoch] | None = None

    def pack(self, packing: Packing | None) -> None:
        """Make batches of bins by *packing*; look up the lengths if it names a field or a column."""
        if packing is None:
            return
        _check_packing(packing, self.stream, self.fill)
        if isinstance(packing.lengths, str):
            from tarshards.index.lengths import lengths_of

            lengths = lengths_of(self.stream.source.shards, packing.lengths, self.unit)
            packing = packing.with_lengths(lengths)
        self.packing = packing

    def open(self) -> None:
        """Prepare what all batches need, once for all threads or worker processes that make them."""

    def for_thread(self, ledger: Ledger) -> Self:
        """Return a maker for one thread beside others: errors go to *ledger*, and batches stay as they were made."""
        own = copy.copy(self)
        own.stream = copy.copy(self.stream)
        own.stream.source = self.stream.source.with_ledger(ledger)
        return own

    def unit(self, field: str) -> int:
        """Return the bytes of an element of raw arrays in *field*, by which packing counts; 1 where it is unknown."""
        return 1

    def planned_lengths(self, part: Part, packing: Packing) -> np.ndarray:
        """Return the lengths of the samples of *part* that *packing* has."""
        counts = self.stream.source.shards.counts
        lengths: np.ndarray = packing.known[(np.cumsum(counts) - counts)[part.shards] + part.numbers]
        return lengths

    @property
    def is_planned(self) -> bool:
        return isinstance(self.stream.source, PlannedSource)

    def make(self, epoch: int, state: Mapping[str, Any] | None, rank: int, ranks: int, g: int) -> Any:
        """Make batch *g* of the rest of an epoch after *state* (None: the whole epoch), without the batches before it.

        A loader delivers the same batch as its g-th, on any number of workers or threads. Errors of its samples go to
        the ledger. Raises TypeError without indexes, StateError for a *state* of another dataset, and IndexError if
        there is no such batch.
        """
        return self.read(self.part(epoch, state, rank, ranks, g), epoch)

    def part(self, epoch: int, state: Mapping[str, Any] | None, rank: int, ranks: int, g: int) -> Part:
        """Return the part that ``make`` reads; ``read`` counts in it what became of its samples."""
        from tarshards.epoch.loop import Part

        key, planned = (epoch, ranks, repr(state)), self._planned
        if planned is None or planned[0] != key:
            if state is not None:
                check_state(state, self.stream.source, ["epoch"])
            plan = self.plan(epoch, ranks, state)
            if plan is None:
                raise TypeError("a batch alone requires indexed shards; run `tarindex` first")
            planned = self._planned = key, plan
        plan = planned[1]
        return Part.of(plan, self.shares(plan, rank)[g])

    def read(self, part: Part, epoch: int) -> Any:
        """Read the batch of a part of a planned epoch."""
        raise NotImplementedError

    def plan(self, epoch: int, ranks: int, state: Mapping[str, Any] | None = None) -> PlannedEpoch | None:
        """Return the plan of an epoch, or of its rest after *state*; None without indexes."""
        if not self.is_planned:
            return None
        source = self.stream.source
        if self.packing is None:
            return source.plan(epoch, ranks, state)
        tail = source.options.tail_for(ranks)
        make = partial(source.plan, epoch, 1)
        options: Any = {"ranks": ranks, "tail": tail, "state": state, "dataset": source.digest}
        return self.packing.plan(source.shards.counts, make, **options)

    def shares(self, plan: PlannedEpoch, rank: int) -> Shares:
        """Return the positions of each batch of a rank, for any worker."""
        from tarshards.epoch.loop import Shares

        positions = range(rank, len(plan), plan.ranks)
        if not self.drop_last:
            return Shares(positions, self.size)
        end = len(positions) // self.size * self.size
        return Shares(positions, self.size, range(0, end, self.size), positions[end:])

    def checked(self, row: dict[str, Any], packing: Packing) -> dict[str, Any]:
        """Return a packed row; raise SampleError if it is longer than its bins, because the lengths were wrong."""
        length = int(row["cu_seqlens"][-1])
        if packing.is_whole and length > self.size * packing.capacity:
            raise SampleError(
                f"a packed row has {length} elements, and {self.size} x {packing.capacity} fit: the samples are longer "
                "than the lengths that packing= was given"
            )
        return row


def _check_packing(packing: Any, stream: Stream, fill: bool) -> None:
    from tarshards.epoch.packing import Packing

    if not isinstance(packing, Packing):
        raise TypeError(f"packing= takes what pack() or bucket() returns, not {shortened(packing)}")
    if not isinstance(stream.source, PlannedSource):
        raise TypeError("packing= requires indexed shards; run `tarindex` first")
    if fill:
        raise TypeError("fill= is not for packed samples: another sample may not fit into the bin")
