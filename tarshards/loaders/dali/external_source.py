"""Batches of encoded samples for ``fn.external_source``."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from itertools import pairwise, repeat
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from tarshards.loaders.batches import BatchMaker
from tarshards.loaders.dali.image_check import BadImagePolicy, EncodedSample, ImageCheck, ImageGuard
from tarshards.loaders.passes import Pass, Passes, ResumableLoader
from tarshards.parallel.calls import bounded_map
from tarshards.samples.codecs.npy import is_npy
from tarshards.samples.keys import Sample
from tarshards.samples.ledger import Tally
from tarshards.stream import ops
from tarshards.stream.stream import Stream

if TYPE_CHECKING:
    from tarshards.epoch.loop import Part

LastBatch = Literal["partial", "pad", "drop"]

AHEAD = 2  # batches that a thread reads while the pipeline works on others


def batch_source(
    urls_or_dataset: Any,
    batch_size: int,
    *,
    fields: str | Iterable[str] = ("jpg", "cls"),
    on_bad: BadImagePolicy = "drop",
    check: ImageCheck = "header",
    last_batch: LastBatch = "partial",
) -> BatchSource:
    """Return an iterable of batches for ``fn.external_source(source, num_outputs=source.num_outputs)``.

    Numbers and ``.npy`` come decoded, images and everything else as encoded bytes. The options are those of
    ``dali_loader``. With *on_bad* "mask" or *last_batch* "pad" there is one more output, ``valid``: False where a black
    image replaces a bad one, and in rows that only fill the last batch. Batches without samples are skipped. Each
    iteration is one epoch of the dataset, in its order and with its ledger. The source itself has no state;
    ``dali_loader`` has one that is exact to the batch.
    """
    guard = ImageGuard(fields, on_bad=on_bad, check=check)
    return BatchSource(open_dataset(urls_or_dataset, guard), batch_size, guard, last_batch)


def open_dataset(urls_or_dataset: Any, guard: ImageGuard) -> Stream:
    """Return a dataset unchanged, and for a shard expression a dataset with the fields that *guard* takes."""
    if isinstance(urls_or_dataset, Stream):
        return urls_or_dataset
    names = [";".join(alternatives) for alternatives in guard.fields]
    return Stream.from_shards(urls_or_dataset, fields=names)


class EncodedBatch(NamedTuple):
    """The samples of one batch; those from *real* on are repeats that fill it."""

    samples: list[EncodedSample]
    real: int

    @property
    def valid(self) -> np.ndarray:
        """Which entries are neither masked nor repeats."""
        return np.array([sample.valid and i < self.real for i, sample in enumerate(self.samples)])

    def columns(self) -> list[Any]:
        """Return DALI's input for each field: one array of numbers, or a list of arrays."""
        columns = [list(column) for column in zip(*(sample.arrays for sample in self.samples))]
        return [np.array(column) if column[0].ndim == 0 else column for column in columns]


class EncodedBatchMaker(BatchMaker):
    """Makes batches of encoded samples; *last_batch* says how to treat a partial last batch."""

    def __init__(self, stream: Stream, size: int, guard: ImageGuard, last_batch: LastBatch):
        if last_batch not in ("partial", "pad", "drop"):
            raise ValueError(f'last_batch is "partial", "pad" or "drop", not {last_batch!r}')
        super().__init__(stream, size, drop_last=last_batch == "drop")
        for op in stream.ops:
            if op.function is ops.batched or (self.is_planned and not op.traits.per_sample):
                raise TypeError(f"DALI sources support only ops that see one sample at a time, not {op.name}")
        self.guard = guard
        self.last_batch = last_batch

    def read(self, part: Part, epoch: int) -> EncodedBatch:
        samples = list(self.stream.read(part, epoch))
        batch = self.encode(samples, len(part))
        if failed := len(samples) - batch.real:
            part.leave_out(Tally(failed=failed))
        return batch

    def encode(self, samples: Iterable[Any], planned: int) -> EncodedBatch:
        """Encode the samples of a batch, after *planned* were read for it, and fill it if it is the last."""
        encoded = list(self.guard.encode(samples, self.stream.ledger.fail))
        missing = self.size - len(encoded) if planned < self.size and self.last_batch == "pad" else 0
        return EncodedBatch(encoded + encoded[-1:] * missing, len(encoded))


def read_ahead(batches: Generator[EncodedBatch, None, None]) -> Generator[EncodedBatch, None, None]:
    """Yield *batches* while a thread reads the next ones."""
    with closing(batches), ThreadPoolExecutor(1, "tarshards-read") as thread:
        for batch in bounded_map(lambda _: next(batches, None), repeat(None), executor=thread, window=AHEAD + 1):
            if batch is None:
                return
            yield batch


class RestartingIterator:
    """An iterator that begins a new epoch after its StopIteration.

    DALI calls ``iter`` only once unless ``cycle=`` is set, so that any other iterator would end after one epoch.
    """

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


class EncodedSource:
    """Encoded batches of *passes*, read ahead by a thread; a subclass defines in ``_batches`` where they come from."""

    def __init__(self, passes: Passes, guard: ImageGuard, *, has_valid: bool):
        self.passes = passes
        self.guard = guard
        self.has_valid = has_valid
        self._made = self._arrived = 0  # samples: counted by a thread, and by the consumer

    @contextmanager
    def counted(self, this: Pass) -> Iterator[None]:
        """Count at the end of *this* pass the samples of batches that did not ``arrive`` as in flight."""
        self._made = self._arrived = 0
        try:
            yield
        finally:
            if self.passes.stream.is_followed:  # otherwise batches do not count samples
                this.count(self.passes.stream.ledger, Tally(in_flight=self._made - self._arrived))

    def arrive(self, batch: EncodedBatch) -> None:
        """Record that the consumer gets *batch*."""
        self._arrived += batch.real

    def batches(self, this: Pass) -> Generator[EncodedBatch, None, None]:
        """Yield the batches of one pass, also those without samples."""
        return read_ahead(self._counted(self._batches(this)))

    def _counted(self, batches: Generator[EncodedBatch, None, None]) -> Generator[EncodedBatch, None, None]:
        with closing(batches):
            for batch in batches:
                self._made += batch.real
                yield batch

    def _batches(self, this: Pass) -> Generator[EncodedBatch, None, None]:
        raise NotImplementedError


class BatchSource(EncodedSource):
    """Batches of a dataset as tuples of one entry per field, and ``valid`` if there is one; see ``batch_source``."""

    def __init__(self, dataset: Stream, batch_size: int, guard: ImageGuard, last_batch: LastBatch):
        self.maker: EncodedBatchMaker = EncodedBatchMaker(dataset, batch_size, guard, last_batch)
        super().__init__(Passes(self.maker), guard, has_valid=guard.on_bad == "mask" or last_batch == "pad")

    @property
    def num_outputs(self) -> int:
        """The ``num_outputs`` of ``fn.external_source``."""
        return len(self.guard.fields) + self.has_valid

    def __len__(self) -> int:
        return len(self.passes)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return RestartingIterator(self._epoch)

    def _epoch(self) -> Iterator[tuple[Any, ...]]:
        this = self.passes.begin()
        with self.counted(this), closing(self.batches(this)) as batches:
            for batch, _ in self.passes.deliver(this, batches):
                self.arrive(batch)
                if batch.samples:
                    yield (*batch.columns(), batch.valid) if self.has_valid else tuple(batch.columns())

    def _batches(self, this: Pass) -> Generator[EncodedBatch, None, None]:
        try:
            yield from self._streamed(this) if this.plan is None else self._planned(this)
        finally:
            self.maker.stream.report()

    def _planned(self, this: Pass) -> Iterator[EncodedBatch]:
        loop = self.passes.loop(this)
        yield from loop.run(partial(map, partial(self.maker.read, epoch=this.epoch)))
        self.maker.stream.ledger.audit([loop.tally])

    def _streamed(self, this: Pass) -> Iterator[EncodedBatch]:
        maker = self.maker
        for chunk in self.passes.new_samples(this):
            if len(chunk) == maker.size or not maker.drop_last:
                batch = maker.encode(chunk, len(chunk))
                maker.stream.ledger.count(failed=len(chunk) - batch.real)
                yield batch
            else:
                maker.stream.ledger.count(discarded=len(chunk))


class LoaderSource(EncodedSource):
    """Batches of another loader, whose samples the *guard* takes from the rows of its arrays and lists."""

    def __init__(self, loader: ResumableLoader, guard: ImageGuard):
        super().__init__(loader.passes, guard, has_valid=guard.on_bad == "mask")
        self._loader = loader

    def _batches(self, this: Pass) -> Generator[EncodedBatch, None, None]:
        ledger = self._loader.ledger
        with closing(self._loader.make_batches(this)) as batches:
            for batch in self._loader.measured(batches):
                samples = samples_of(batch)
                encoded = list(self.guard.encode(samples, ledger.fail))
                this.count(ledger, Tally(failed=len(samples) - len(encoded)))
                yield EncodedBatch(encoded, len(encoded))


def samples_of(batch: Any) -> list[Sample]:
    """Return the samples of a batch that has a row for each, bytes where the column is a ragged one of raw bytes."""
    if isinstance(batch, list) and not batch:  # a ShardLoader's without samples
        return []
    if not isinstance(batch, dict):
        raise TypeError(f"DALI takes loaders whose batches are dicts of fields, not {type(batch).__name__}")
    columns = {name: _rows(name, value) for name, value in batch.items()}
    return [dict(zip(columns, row)) for row in zip(*columns.values(), strict=True)]


def _rows(name: str, column: Any) -> Iterable[Any]:
    if not isinstance(column, tuple):
        return column
    values, offsets = (np.asarray(part) for part in column)
    rows = [values[begin:end] for begin, end in pairwise(offsets.tolist())]
    is_raw = values.dtype == np.uint8 and values.ndim == 1 and not is_npy(name)
    return [row.tobytes() for row in rows] if is_raw else rows
