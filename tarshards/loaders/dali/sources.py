"""Sources for ``fn.external_source``: batches, samples, or arrays that were decoded before."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from tarshards.epoch.loop import Reading
from tarshards.epoch.world import World
from tarshards.loaders.base import Pass, Passes, Shares
from tarshards.loaders.dali.guard import BadImage, Check, Guard, Row
from tarshards.samples.ledger import Tally
from tarshards.stream import ops
from tarshards.stream.sources import Progress
from tarshards.stream.stream import PER_SAMPLE, Stream

if TYPE_CHECKING:
    from tarshards.epoch.plan import EpochPlan

LastBatch = Literal["partial", "pad", "drop"]

AHEAD = 2  # batches that are read while others are on their way through the pipeline


def guarded(urls_or_dataset: Any, fields: str | Iterable[str], on_bad: BadImage, check: Check) -> tuple[Stream, Guard]:
    """Return a dataset, as it is or that of a shard expression for this rank, and what guards its samples."""
    guard = Guard(fields, on_bad=on_bad, check=check)
    if isinstance(urls_or_dataset, Stream):
        return urls_or_dataset, guard
    wanted = [name for alternatives in guard.fields for name in alternatives]
    return Stream.from_shards(urls_or_dataset, fields=wanted, world=World.detect()), guard


class Batch(NamedTuple):
    """The rows of one batch; those from *real* on only fill it up."""

    rows: list[Row]
    real: int

    @property
    def valid(self) -> np.ndarray:
        """Which rows are samples as they came from their shard."""
        return np.array([row.valid and place < self.real for place, row in enumerate(self.rows)])

    def columns(self) -> list[Any]:
        """Return what DALI is fed: an array of numbers, or a list of arrays, for each field."""
        columns = [list(column) for column in zip(*(row.arrays for row in self.rows))]
        return [np.array(column) if column[0].ndim == 0 else column for column in columns]


class BatchPasses(Passes):
    """The passes over batches of which the last may be left out."""

    def __init__(self, stream: Stream, size: int, last_batch: LastBatch):
        if last_batch not in ("partial", "pad", "drop"):
            raise ValueError(f'last_batch is "partial", "pad" or "drop", not {last_batch!r}')
        super().__init__(stream, size)
        for op in stream._ops:
            if op.function not in PER_SAMPLE and (self.is_planned or op.function is ops.batched):
                name = op.function.__name__
                raise TypeError(f"{name} is not for DALI's sources: they take ops that see one sample at a time")
        self.last_batch = last_batch

    def shares(self, plan: EpochPlan, world: World) -> Shares:
        shares = super().shares(plan, world)
        partial = shares and len(shares[-1]) < self.size
        return shares[:-1] if partial and self.last_batch == "drop" else shares


def read_ahead(batches: Generator[Batch, None, None]) -> Generator[Batch, None, None]:
    """Yield *batches*, of which a thread makes the next ones meanwhile."""
    with closing(batches), ThreadPoolExecutor(1, "tarshards-read") as thread:
        pending = deque(thread.submit(next, batches, None) for _ in range(AHEAD))
        try:
            while (batch := pending.popleft().result()) is not None:
                pending.append(thread.submit(next, batches, None))
                yield batch
        finally:
            thread.shutdown(cancel_futures=True)


class Epochs:
    """An iterator that begins again after its StopIteration: else DALI, unless told ``cycle=``, has one epoch of it."""

    def __init__(self, epoch: Callable[[], Iterator[Any]]):
        self._epoch = epoch
        self._current: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self._current = self._current or self._epoch()
        try:
            return next(self._current)
        except StopIteration:
            self._current = None
            raise


class BatchSource:
    """Whole batches of a dataset, an epoch an iteration: a tuple of one entry a field, and of ``valid`` if there is."""

    def __init__(self, dataset: Stream, batch_size: int, guard: Guard, last_batch: LastBatch):
        self.passes = BatchPasses(dataset, batch_size, last_batch)
        self.guard = guard
        self.tells_valid = guard.on_bad == "mask" or last_batch == "pad"

    @property
    def num_outputs(self) -> int:
        """What ``fn.external_source`` is to be told as ``num_outputs``."""
        return len(self.guard.fields) + self.tells_valid

    def __len__(self) -> int:
        return len(self.passes)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return Epochs(self._epoch)

    def _epoch(self) -> Iterator[tuple[Any, ...]]:
        this = self.passes.begin()
        with closing(self.batches(this)) as batches:
            for batch in batches:
                if batch.rows:
                    yield (*batch.columns(), batch.valid) if self.tells_valid else tuple(batch.columns())
        self.passes.end(this)

    def batches(self, this: Pass) -> Generator[Batch, None, None]:
        """Yield the batches of one pass, also those of which nothing is left."""
        return read_ahead(self._batches(this))

    def _batches(self, this: Pass) -> Generator[Batch, None, None]:
        try:
            yield from self._streamed(this) if this.plan is None else self._planned(this, this.plan)
        finally:
            for ledger in self.passes.stream._ledgers():
                ledger.report()

    def _planned(self, this: Pass, plan: EpochPlan) -> Iterator[Batch]:
        stream, shares = self.passes.stream, self.passes.shares(plan, this.world)
        source = stream._source
        reading = Reading(source, plan, this.world, shares, whole=this.state is None)
        left_out = Tally()
        try:
            for share in shares:
                samples = source.samples(reading, share, this.epoch)
                rows = self.guard.rows(stream.through_ops(samples, this.epoch, stream.ledger), stream.ledger)
                yield self._filled(list(rows), len(share))
            left_out = self._left_out(this.world, plan, sum(map(len, shares)))
            reading.finish()
        finally:
            stream.ledger.add(reading.tally())
            stream.ledger.add(left_out)
        left_out.add(reading.tally())
        stream.ledger.audit([left_out])

    def _left_out(self, world: World, plan: EpochPlan, taken: int) -> Tally:
        """Account for what is left out with the last batch."""
        positions = np.arange(world.rank, len(plan), world.world_size)[taken:]
        planned = positions[positions < plan.total]
        if not len(planned):
            return Tally()
        shards, _ = plan[planned]
        read = Counter(self.passes.stream._source.shards.names[shard] for shard in shards.tolist())
        return Tally(planned=len(planned), dropped=len(planned), read=read)

    def _streamed(self, this: Pass) -> Iterator[Batch]:
        stream, size = self.passes.stream, self.passes.size
        samples = iter(stream._iterate(len(stream._ops), Progress(this.epoch, this.world)))
        for _ in islice(samples, this.passed * size):
            pass
        while chunk := list(islice(samples, size)):
            if len(chunk) == size or self.passes.last_batch != "drop":
                yield self._filled(list(self.guard.rows(chunk, stream.ledger)), len(chunk))

    def _filled(self, rows: list[Row], planned: int) -> Batch:
        missing = self.passes.size - len(rows) if planned < self.passes.size else 0
        if self.passes.last_batch == "pad" and rows:
            return Batch(rows + rows[-1:] * missing, len(rows))
        return Batch(rows, len(rows))


class SampleSource:
    """Single samples of a dataset, an epoch until each StopIteration: a tuple of an array a field, and ``valid``.

    DALI throws away the samples of a batch that does not get full. So the last sample is repeated until it is, and not
    ``valid`` there.
    """

    def __init__(self, dataset: Stream, guard: Guard):
        self.dataset, self.guard = dataset, guard
        self._rows: Iterator[Row] | None = None
        self._last: Row | None = None

    @property
    def num_outputs(self) -> int:
        """What ``fn.external_source`` is to be told as ``num_outputs``."""
        return len(self.guard.fields) + 1

    def __call__(self, info: Any) -> tuple[Any, ...]:
        if self._rows is None:
            self._rows, self._last = self.guard.rows(iter(self.dataset), self.dataset.ledger), None
        row = next(self._rows, None)
        if row is None:
            if info.idx_in_batch == 0 or self._last is None:
                self._rows = None
                raise StopIteration
            return (*self._last.arrays, np.array(False))
        self._last = row
        return (*row.arrays, np.array(row.valid))


class ArraySource:
    """The batches of a loader, which are dicts of arrays, an epoch an iteration: a tuple of one entry a field."""

    def __init__(self, batches: Iterable[dict[str, Any]], fields: tuple[str, ...]):
        self.loader, self.fields = batches, fields

    @property
    def num_outputs(self) -> int:
        """What ``fn.external_source`` is to be told as ``num_outputs``."""
        return len(self.fields)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return Epochs(self._epoch)

    def _epoch(self) -> Iterator[tuple[Any, ...]]:
        for batch in self.loader:
            if len(batch) and len(batch[self.fields[0]]):
                yield tuple(batch[field] for field in self.fields)


def batch_source(
    urls_or_dataset: Any,
    batch_size: int,
    *,
    fields: str | Iterable[str] = ("jpg", "cls"),
    on_bad: BadImage = "drop",
    check: Check = "header",
    last_batch: LastBatch = "partial",
) -> BatchSource:
    """Return an iterable of batches for ``fn.external_source(source, num_outputs=source.num_outputs)``.

    Numbers and ``.npy`` come decoded, images and everything else as encoded bytes; ``Guard`` says what it does with bad
    images. With *on_bad* "mask" or *last_batch* "pad" there is one more output, ``valid``: false where an image is
    blank or a row only fills up the last batch. A batch of which nothing is left is passed over. Each iteration is an
    epoch of the dataset, in its order and with its ledger; a state that is exact to the batch the ``dali_loader`` has.
    """
    dataset, guard = guarded(urls_or_dataset, fields, on_bad, check)
    return BatchSource(dataset, batch_size, guard, last_batch)


def sample_source(
    urls_or_dataset: Any,
    *,
    fields: str | Iterable[str] = ("jpg", "cls"),
    on_bad: BadImage = "drop",
    check: Check = "header",
) -> SampleSource:
    """Return a callable for ``fn.external_source(source, num_outputs=source.num_outputs, batch=False)``.

    As ``batch_source``, but sample by sample, which is slower. The last output is always ``valid``: DALI drops a batch
    that is not full, so that the last sample is repeated to the end of its batch.
    """
    dataset, guard = guarded(urls_or_dataset, fields, on_bad, check)
    return SampleSource(dataset, guard)


def array_source(batches: Iterable[dict[str, Any]], *, fields: str | Iterable[str]) -> ArraySource:
    """Return an iterable of *fields* of *batches*, for ``fn.external_source(source, num_outputs=...)``.

    *batches* is an ``ArrayLoader`` or ``ShardLoader``, or any iterable of dicts of arrays: numpy's, or those of a GPU
    (cupy, torch), for which ``external_source`` is told ``device="gpu"``. ``layout="HWC"`` tells DALI what images are.
    """
    return ArraySource(batches, tuple(fields.split() if isinstance(fields, str) else fields))
