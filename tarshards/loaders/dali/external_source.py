"""Batches of encoded samples for ``fn.external_source``."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from itertools import pairwise, repeat
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from tarshards.loaders.arrays import readers
from tarshards.loaders.arrays.array_loader import ArrayBatchMaker
from tarshards.loaders.batches import BatchMaker
from tarshards.loaders.dali.image_check import (
    DECODED,
    BadImagePolicy,
    EncodedBatch,
    FieldRows,
    ImageCheck,
    ImageGuard,
)
from tarshards.loaders.passes import Pass, Passes, ResumableLoader
from tarshards.parallel.calls import bounded_map
from tarshards.samples.codecs.basic import INTEGERS
from tarshards.samples.codecs.image import IMAGES
from tarshards.samples.fields import pick_field
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
    """Return an iterable of batches for ``fn.external_source(source, num_outputs=source.num_outputs, no_copy=True)``.

    Numbers and ``.npy`` come decoded, images and everything else as encoded bytes. DALI need not copy them: their
    memory is reused only after DALI has released it. The options are those of ``dali_loader``. With *on_bad* "mask" or
    *last_batch* "pad" there is one more output, ``valid``: False where a black image replaces a bad one, and in rows
    that only fill the last batch. Batches without samples are skipped. Each iteration is one epoch of the dataset, in
    its order and with its ledger. The source itself has no state; ``dali_loader`` has one that is exact to the batch.
    """
    guard = ImageGuard(fields, on_bad=on_bad, check=check)
    return BatchSource(open_dataset(urls_or_dataset, guard), batch_size, guard, last_batch)


def open_dataset(urls_or_dataset: Any, guard: ImageGuard) -> Stream:
    """Return a dataset unchanged, and for a shard expression a dataset with the fields that *guard* takes."""
    if isinstance(urls_or_dataset, Stream):
        return urls_or_dataset
    names = [";".join(alternatives) for alternatives in guard.fields]
    return Stream.from_shards(urls_or_dataset, fields=names)


class EncodedBatchMaker(BatchMaker):
    """Makes batches of encoded samples; *last_batch* says how to treat a partial last batch.

    The fields of indexed samples without ops are found, copied and parsed for a whole batch at a time.
    """

    def __init__(self, stream: Stream, size: int, guard: ImageGuard, last_batch: LastBatch):
        if last_batch not in ("partial", "pad", "drop"):
            raise ValueError(f'last_batch is "partial", "pad" or "drop", not {last_batch!r}')
        super().__init__(stream, size, drop_last=last_batch == "drop")
        for op in stream.ops:
            if op.function is ops.batched or (self.is_planned and not op.traits.per_sample):
                raise TypeError(f"DALI sources support only ops that see one sample at a time, not {op.name}")
        self.guard = guard
        self.last_batch = last_batch
        self._arrays: ArrayBatchMaker | None = None
        made_by = [reader_of(alternatives) for alternatives in guard.fields]
        if self.is_planned and not stream.ops and not stream.source.ops and None not in made_by:
            terms = [f"{name}:{';'.join(own)}" for name, own in zip(guard.names, guard.fields)]
            kept = 2 * AHEAD  # as many are in the pipeline
            self._arrays = ArrayBatchMaker(stream, size, dict(zip(terms, made_by)), (), kept=kept, ring=False)

    def open(self) -> None:
        if self._arrays is not None:
            self._arrays.open()

    def read(self, part: Part, epoch: int) -> EncodedBatch:
        if self._arrays is not None:
            came, batch = self._read_arrays(self._arrays, part, epoch)
        else:
            samples = list(self.stream.read(part, epoch))
            came, batch = len(samples), self.encode(samples)
        if failed := came - batch.real:
            part.leave_out(Tally(failed=failed))
        return self.filled(batch, len(part))

    def encode(self, samples: Iterable[Any]) -> EncodedBatch:
        """Encode samples that were read."""
        return self.guard.encode_samples(samples, self.stream.ledger.fail)

    def _read_arrays(self, arrays: ArrayBatchMaker, part: Part, epoch: int) -> tuple[int, EncodedBatch]:
        """Return how many samples of *part* have all fields, and the batch of those that are not bad."""
        if arrays.mapped is not None and part.reader is not None:
            part.reader.announce(len(part), arrays.mapped.read_fields)
        made = arrays.assemble(partial(arrays.locate, part), epoch)
        arrays.count(part, made.failures)
        arrays.report(made)
        rows = np.delete(np.arange(len(part)), [*made.failures])
        names = self.stream.source.shards.names
        urls = [names[shard] for shard in part.shards[rows].tolist()]
        columns = [
            FieldRows([";".join(own)] * len(rows), np.full(len(rows), IMAGES.has(own[0].lower())), made.batch[name])
            for name, own in zip(self.guard.names, self.guard.fields)
        ]
        return len(rows), self.guard.encode([*made.batch["__key__"]], urls, columns, self.stream.ledger.fail)

    def filled(self, batch: EncodedBatch, planned: int) -> EncodedBatch:
        """Return a batch, for which *planned* samples were read; where the last is to be padded, with repeats."""
        if self.last_batch != "pad" or planned == self.size or not batch.real:
            return batch
        return batch.take(range(batch.real), fill=self.size - batch.real)


def reader_of(alternatives: Sequence[str]) -> Any:
    """Return the reader of a field that has one of these names; None if the names are of several kinds."""
    extensions = {name.lower().rpartition(".")[2] for name in alternatives}
    if extensions <= {*INTEGERS}:
        return readers.integer()
    if extensions == {"npy"}:
        return readers.decoded()
    if extensions & DECODED or len({*map(IMAGES.has, extensions)}) > 1:
        return None
    return readers.ragged("u1")


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
                if batch.real:
                    yield (*batch.inputs(), batch.valid) if self.has_valid else tuple(batch.inputs())

    def _batches(self, this: Pass) -> Generator[EncodedBatch, None, None]:
        try:
            yield from self._streamed(this) if this.plan is None else self._planned(this)
        finally:
            self.maker.stream.report()

    def _planned(self, this: Pass) -> Iterator[EncodedBatch]:
        loop = self.passes.loop(this)
        if len(loop.plan):
            self.maker.open()
        yield from loop.run(partial(map, partial(self.maker.read, epoch=this.epoch)))
        self.maker.stream.ledger.audit([loop.tally])

    def _streamed(self, this: Pass) -> Iterator[EncodedBatch]:
        maker = self.maker
        for chunk in self.passes.new_samples(this):
            if len(chunk) == maker.size or not maker.drop_last:
                batch = maker.encode(chunk)
                maker.stream.ledger.count(failed=len(chunk) - batch.real)
                yield maker.filled(batch, len(chunk))
            else:
                maker.stream.ledger.count(discarded=len(chunk))


class LoaderSource(EncodedSource):
    """Batches of another loader, whose columns the *guard* takes."""

    def __init__(self, loader: ResumableLoader, guard: ImageGuard):
        super().__init__(loader.passes, guard, has_valid=guard.on_bad == "mask")
        self._loader = loader

    def _batches(self, this: Pass) -> Generator[EncodedBatch, None, None]:
        ledger = self._loader.ledger
        with closing(self._loader.make_batches(this)) as batches:
            for batch in self._loader.measured(batches):
                keys, columns = columns_of(batch, self.guard.fields)
                encoded = self.guard.encode(keys, [None] * len(keys), columns, ledger.fail)
                this.count(ledger, Tally(failed=len(keys) - encoded.real))
                yield encoded


def columns_of(batch: Any, fields: Sequence[list[str]]) -> tuple[Sequence[Any], list[FieldRows]]:
    """Return the keys of a loader's batch, and copies of its columns, since the loader may reuse its memory.

    A ragged column of raw bytes stays as it is, of others the rows become a list.
    """
    if isinstance(batch, list) and not batch:  # a ShardLoader's without samples
        return [], []
    if not isinstance(batch, dict):
        raise TypeError(f"DALI takes loaders whose batches are dicts of fields, not {type(batch).__name__}")
    keys, columns = list(batch["__key__"]), []
    for alternatives in fields:
        name = pick_field(dict.fromkeys(batch), alternatives)
        values, extension = batch[name], name.rpartition(".")[2]
        if isinstance(values, tuple):
            data, offsets = (np.asarray(part).copy() for part in values)
            rows = [data[begin:end] for begin, end in pairwise(offsets.tolist())]
            if data.dtype != np.uint8 or data.ndim > 1 or extension == "npy":
                values = rows
            else:
                values = [row.tobytes() for row in rows] if extension in INTEGERS else (data, offsets)
        elif not isinstance(values, Sequence):
            values = np.asarray(values).copy()
        columns.append(FieldRows([name] * len(keys), np.full(len(keys), IMAGES.has(name)), values))
    return keys, columns
