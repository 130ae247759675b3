"""Batches of arrays from one process: threads read, decode and augment into reused buffers."""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from itertools import chain, count, islice
from typing import TYPE_CHECKING, Any, Self, Unpack, overload

import numpy as np

from tarshards.epoch.loop import EpochLoop, Part, growing
from tarshards.epoch.packing import Packing
from tarshards.epoch.permutations import hash_of
from tarshards.epoch.substitutes import Substitutes
from tarshards.errors import SampleError, flag, shortened, whole_number
from tarshards.index.mapped_fields import MappedFields, find_in_samples
from tarshards.index.readahead import LOOKED_UP
from tarshards.loaders.arrays.assembly import (
    AssembledBatch,
    Assembler,
    Memory,
    Substitution,
    Transform,
    UnfinishedBatch,
    has_failed,
)
from tarshards.loaders.arrays.readers.arrays import Ragged
from tarshards.loaders.arrays.readers.reader import ArrayReader, Reader
from tarshards.loaders.batches import BatchMaker
from tarshards.loaders.passes import BatchType, Pass, Passes, ResumableLoader
from tarshards.parallel.calls import settled, shared_map
from tarshards.parallel.forks import cached_property
from tarshards.parallel.host import available_cores
from tarshards.parallel.signals import defer_signals
from tarshards.samples.batch import Failures, SampleBatch
from tarshards.samples.fields import check_mapping
from tarshards.samples.ledger import Ledger, Tally
from tarshards.stream.collate import sequences
from tarshards.stream.following import Count
from tarshards.stream.other_names import explains
from tarshards.stream.replaying import crc_of_results
from tarshards.stream.sources import PlannedSource
from tarshards.stream.stream import Stream, check_dataset

# Samples to locate at once where making batches takes hardly longer than that. More have more neighbours that share
# pages: of 100 million samples half as many take 1.15 x the time (1.3 x when read again), twice as many 0.95 x, and
# twice the memory.
TOGETHER_QUICK = 1 << 17

if TYPE_CHECKING:
    import torch

    from tarshards.loaders.batches import BatchOptions, FieldsBatch

    class ArrayLoaderOptions(BatchOptions, total=False):
        """What does not change the type of a batch."""

        threads: int | None
        prefetch: int


#: Returns the samples of a batch; returns substitutes for some of them.
Locate = tuple[Callable[[], SampleBatch], Substitution | None]


class ArrayBatchMaker(BatchMaker):
    """Makes batches of arrays of a stream of shards.

    *kept* batches have their memory kept for those after them, in turn if it is a *ring*; see ``Memory``.
    """

    def __init__(
        self,
        stream: Stream,
        size: int,
        fields: Mapping[str, Reader | Callable[[bytes], Any]],
        transforms: Iterable[Transform],
        *,
        kept: int,
        ring: bool,
        packing: Packing | None = None,
        **options: Any,
    ):
        super().__init__(stream, size, **options)
        if not check_mapping(fields, "fields=", '{field: reader}, such as {"cls": readers.integer()}'):
            raise ValueError("fields= names no field")
        if not isinstance(transforms, Iterable):
            raise TypeError(f"transforms= takes a list of functions (batch, rng), not {shortened(transforms)}")
        self.assembler: Assembler = Assembler(fields, transforms, size, kept, ring)
        self.mapped: MappedFields | None = None
        self._idle: list[Assembler] = []  # those of passes that have ended
        self._is_open = False
        self.pack(packing)

    def unit(self, field: str) -> int:
        for term, reader in zip(self.assembler.terms, self.assembler.readers):
            if isinstance(reader, Ragged) and field.lower() in map(str.lower, term.alternatives):
                return reader.dtype.itemsize
        return 1

    def open(self) -> None:
        """Map the shards if that is possible, and open the readers by the first sample."""
        if self.mapped is not None and not self.mapped.retry():
            return
        shards = self.stream.source.shards
        self.mapped, self._is_open = self.mapped or self._map(), True
        ends = np.cumsum(shards.counts)
        begin, end, total = 0, 1, int(ends[-1])
        while begin < total and not self.assembler.is_open:  # by the dataset's first, whatever the order
            numbers = np.arange(begin, min(end, total))
            number = np.searchsorted(ends, numbers, "right")
            self.assembler.open(self._locate(number, numbers - (ends - shards.counts)[number], numbers))
            begin, end = end, end + min(end, LOOKED_UP)

    def for_thread(self, ledger: Ledger) -> Self:
        own = super().for_thread(ledger)
        own.assembler = copy.copy(own.assembler)
        own.assembler.memory = Memory(len(own.assembler.terms), own.size, 4, False)  # not a ring
        return own

    def _map(self) -> MappedFields | None:
        return self.stream.source.shards.mapped(self.assembler.terms)

    def locate(self, part: Part) -> SampleBatch:
        """Find the fields of the samples of *part*, or read them where shards are not mapped; then they are taken."""
        if part.located is not None:
            part.taken = len(part)
            return part.located
        source = self.stream.source
        if source.once:
            numbers = self._starts[part.shards] + part.numbers
        else:  # a sample may come several times in a mixture's epoch, never alike
            numbers = part.plan.unpacked.state(0)["position"] + part.sample_positions
        located = self._locate(part.shards, part.numbers, numbers, part)
        part.taken = len(part)
        if part.begins is None or self.packing is None:
            return located
        begins, lengths = np.asarray(part.begins, np.int64), self.planned_lengths(part, self.packing)
        return replace(located, pieces=np.stack([begins, np.full_like(begins, self.packing.capacity), lengths], axis=1))

    def substitution(self, part: Part) -> Substitution | None:
        """Return what gives substitutes for samples of *part*, None if they are not to be replaced."""
        if not self.fill:
            return None
        substitutes = Substitutes(part)

        @contextmanager
        def drawn(rows: list[int]) -> Iterator[tuple[SampleBatch, Failures]]:
            failures: Failures = {}
            with substitutes.drawn(rows) as extra:
                yield self.locate(extra), failures
                self.count(extra, failures)

        return drawn

    def count(self, part: Part, failures: Failures) -> None:
        """Count the outcomes of the samples of *part*."""
        failed = sum(map(has_failed, failures.values()))
        part.quarantined = len(failures) - failed
        part.members = (len(part) - len(failures)) * len(self.assembler.terms)
        if failed:
            part.leave_out(Tally(failed=failed))

    def read(self, part: Part, epoch: int) -> dict[str, Any]:
        if not self._is_open or self.mapped is not None:
            self.open()
        if self.mapped is not None and part.reader is not None:
            part.reader.announce(len(part), self.mapped.read_fields)
        located, substitution = partial(self.locate, part), self.substitution(part)
        assembled = self.assemble(located, epoch, substitution)
        self.count(part, assembled.failures)
        self.report(assembled)
        return self.packed(assembled.batch)

    def assemble(
        self, locate: Callable[[], SampleBatch], epoch: int, substitution: Substitution | None = None
    ) -> AssembledBatch:
        """Assemble the next batch, of the samples of an epoch that *locate* returns."""
        assembler = self.assembler = self.assembler.at(epoch)
        assembler.number += 1
        key = hash_of(self.stream.source.seed, epoch)
        return assembler.assemble(locate, key, assembler.number - 1, substitution)

    @contextmanager
    def pass_of(self, epoch: int) -> Iterator[Assembler]:
        """Make a pass over an *epoch* by an assembler that no other live pass has: that of one that has ended."""
        try:
            assembler = self._idle.pop()
        except IndexError:
            assembler = self.assembler.for_a_pass()
        assembler = assembler.at(epoch)
        try:
            yield assembler
        finally:
            self._idle.append(assembler)

    def packed(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return *batch* with the values of ragged fields as packed rows, if there is packing into rows."""
        if self.packing is None or not self.packing.is_packed:
            return batch
        ragged = {name: value for name, value in batch.items() if isinstance(value, tuple)}
        offsets = [own for _, own in ragged.values()]
        if not offsets or any(not np.array_equal(own, offsets[0]) for own in offsets):
            raise SampleError(
                "packing= takes fields of readers.ragged that have equal lengths in each sample; here are "
                f"{', '.join(ragged) or 'none'}"
            )
        row = batch | {name: values for name, (values, _) in ragged.items()} | sequences(offsets[0])
        return self.checked(row, self.packing)

    def report(self, assembled: AssembledBatch) -> None:
        """Give the errors of a batch to the ledger: of samples that failed, and of those that could not be read."""
        for error in assembled.errors:
            (self.stream.ledger.fail if has_failed(error) else self.stream.ledger)(error)

    def _locate(
        self, shards: np.ndarray, samples: np.ndarray, numbers: np.ndarray, part: Part | None = None
    ) -> SampleBatch:
        reader = self.stream.source.shards
        if self.mapped is not None:
            return self.mapped.find(shards, samples, numbers)
        results = reader.read_all(shards, samples) if part is None else part.read_all(part.reader or reader)
        return find_in_samples(list(results), self.assembler.terms, numbers)

    @cached_property
    def _starts(self) -> np.ndarray:
        counts = self.stream.source.shards.counts
        return np.cumsum(counts) - counts


class ArrayLoader(ResumableLoader[BatchType]):
    """Batches ``{field: array, ..., "__key__": [...]}`` of a stream of shards, in its order, made by threads.

    *fields* gives each field its reader, one of ``tarshards.readers`` or any function of bytes; ``image:jpg;png`` names
    the first of the two that a sample has, as image. *transforms*, functions ``(batch, rng)``, run
    on the batch: see ``tarshards.augment``. What is random is drawn from (seed, epoch, sample), so that batches are
    the same for any number of *threads*: by default one a core, or the caller's own (0) where batches are but copied.

    *dataset* is a ``ShardDataset`` or ``Stream.from_shards(...)`` without ops; order, tail, seed and ledger are its
    own. Batches are numpy's, or torch's on *device*; you may keep them, and buffers that you have released are reused.
    With *reuse* buffers are reused in turn: a batch is valid until the second batch after it is requested. *prefetch*
    batches are made ahead by threads, besides those under way. ``state_dict()`` is the position of the loop, as for
    ``ShardLoader``; ``monitor`` shows where the time is spent. *drop_last* and *steps* are as of ``ShardLoader``.
    Batches with *packing* are also as of ``ShardLoader``; fields of ``readers.ragged`` come as values alone, with
    ``cu_seqlens`` and ``position_ids``.

    A sample that does not decode raises DecodeError, or goes to the ledger and is missing in its batch; with *fill* it
    is replaced as in a ``ShardLoader``, which requires indexed shards.
    """

    @overload
    def __init__(
        self: ArrayLoader[FieldsBatch[np.ndarray]],
        dataset: Stream,
        batch_size: int,
        *,
        fields: Mapping[str, ArrayReader],
        device: None = None,
        **options: Unpack[ArrayLoaderOptions],
    ) -> None: ...
    @overload
    def __init__(
        self: ArrayLoader[FieldsBatch[torch.Tensor]],
        dataset: Stream,
        batch_size: int,
        *,
        fields: Mapping[str, ArrayReader],
        device: str,
        **options: Unpack[ArrayLoaderOptions],
    ) -> None: ...
    @overload
    def __init__(
        self: ArrayLoader[FieldsBatch],
        dataset: Stream,
        batch_size: int,
        *,
        fields: Mapping[str, Reader | Callable[[bytes], Any]],
        device: str | None = None,
        **options: Unpack[ArrayLoaderOptions],
    ) -> None: ...
    @overload
    def __init__(
        self: ArrayLoader[dict[str, Any]],
        dataset: Stream,
        batch_size: int,
        *,
        fields: Mapping[str, Reader | Callable[[bytes], Any]],
        transforms: Iterable[Transform],
        device: str | None = None,
        **options: Unpack[ArrayLoaderOptions],
    ) -> None: ...
    @explains
    def __init__(
        self,
        dataset: Stream,
        batch_size: int,
        *,
        fields: Mapping[str, Reader | Callable[[bytes], Any]],
        threads: int | None = None,
        prefetch: int = 2,
        device: str | None = None,
        reuse: bool = False,
        transforms: Iterable[Transform] = (),
        fill: bool = False,
        drop_last: bool = False,
        steps: int | None = None,
        packing: Packing | None = None,
    ):
        check_dataset(dataset, "an ArrayLoader")
        if dataset.ops or dataset.source.ops:
            raise TypeError("an ArrayLoader takes shards without ops; fields= and transforms= do their work")
        if dataset.source.ledger is None:
            raise TypeError("an ArrayLoader takes shards: a ShardDataset, or Stream.from_shards(...)")
        prefetch = whole_number("prefetch", prefetch, 0)
        threads = None if threads is None else whole_number("threads", threads, 0)
        most = available_cores() if threads is None else threads
        self._threads = max(1, most)
        is_planned = isinstance(dataset.source, PlannedSource)
        self._held = 2 if is_planned else 3  # batches of the consumer: without a plan each waits for the next
        if flag("fill", fill) and not is_planned:
            raise TypeError("fill= requires indexed shards in an ArrayLoader; run `tarindex` first")
        is_gpu = device is not None and not str(device).startswith("cpu")
        ring = flag("reuse", reuse) and not is_gpu  # where batches are copied: for how long, only events tell
        self.maker: ArrayBatchMaker = ArrayBatchMaker(
            dataset,
            batch_size,
            fields,
            transforms,
            kept=1 + self._held,
            ring=ring,
            fill=fill,
            drop_last=drop_last,
            packing=packing,
        )
        self.passes: Passes = Passes(self.maker, steps)
        self.threads = threads
        self.prefetch = prefetch
        self.device = device

    def make_batches(self, this: Pass) -> Generator[dict[str, Any], None, None]:
        return self._streamed(this) if this.plan is None else self._planned(this)

    def finished(self, batches: Generator[Any, None, None]) -> Generator[Any, None, None]:
        if self.device is None:
            return batches
        from tarshards.loaders.tensors import move

        return move(batches, self.device)

    @contextmanager
    def _target(self) -> Iterator[Any]:
        """Give what makes the tensors of a pass, None if arrays are delivered."""
        if self.device is None:
            yield None
            return
        from tarshards.loaders.tensors import on_device

        with closing(on_device(self.device)) as target:
            yield target

    def _planned(self, this: Pass) -> Generator[dict[str, Any], None, None]:
        maker, loop = self.maker, self.passes.loop(this)
        if len(loop.plan):
            maker.open()
        mapped = maker.mapped
        with maker.pass_of(this.epoch) as assembler:
            parts = self._located(loop, TOGETHER_QUICK if assembler.is_quick else LOOKED_UP) if mapped else None
            with closing(loop.run(partial(self._read, this, assembler), parts)) as batches:
                yield from batches
        for error in mapped.changes() if mapped else ():
            self.ledger(error)
        self.ledger.audit([loop.tally])

    def _located(self, loop: EpochLoop, most: int) -> Iterator[Part]:
        """Yield the parts of *loop*; in mapped shards, to locate *most* samples together takes less time."""
        for shares in growing(loop.shares, max(1, most // self.maker.size)):
            begun = time.perf_counter()
            together = Part.of(loop.plan, shares.together())
            together.located = self.maker.locate(together)
            self.monitor.reading += time.perf_counter() - begun
            yield from together.split(shares.bounds(loop.plan.sizes))

    def _read(self, this: Pass, assembler: Assembler, parts: Iterable[Part]) -> Iterator[dict[str, Any]]:
        """Yield the batches of *parts*, which threads make ahead."""
        ahead: deque[Part] = deque()
        mapped = self.maker.mapped

        def locates() -> Iterator[Locate]:
            for part in parts:
                if mapped is not None and part.reader is not None:
                    part.reader.announce(len(part), mapped.read_fields)
                ahead.append(part)
                yield partial(self.maker.locate, part), self.maker.substitution(part)

        with closing(self._in_order(locates(), this, assembler)) as results:
            for assembled in results:
                self.maker.count(ahead.popleft(), assembled.failures)
                assembler.number += 1
                yield assembled.batch
                del assembled

    def _streamed(self, this: Pass) -> Generator[dict[str, Any], None, None]:
        with self.maker.pass_of(this.epoch) as assembler:
            yield from self._read_in_turn(this, assembler)

    def _read_in_turn(self, this: Pass, assembler: Assembler) -> Generator[dict[str, Any], None, None]:
        samples = self.passes.samples(this)
        read, failed, delivered, discarded = Count(), 0, 0, 0
        counted, keys = read.over(samples), deque[int]()

        def next_samples() -> list[dict[str, Any]]:
            results = list(islice(counted, self.maker.size))
            keys.append(crc_of_results(results))
            return results

        def locate(raw: Future[list[dict[str, Any]]]) -> SampleBatch:
            results = raw.result()
            numbers = np.array([number_of(sample["__key__"]) for sample in results], np.uint64)
            return find_in_samples(results, assembler.terms, numbers)

        def locates(thread: ThreadPoolExecutor) -> Iterator[Locate]:
            while True:
                with defer_signals():
                    raw = thread.submit(next_samples)
                # Always the first batch opens it, whichever thread is quicker.
                if not assembler.is_open and settled(raw).exception() is None:
                    assembler.open(locate(raw))
                yield partial(locate, raw), None

        with ThreadPoolExecutor(1, "tarshards-read") as thread:
            try:
                with closing(self._in_order(locates(thread), this, assembler)) as results:
                    for assembled in results:
                        if not assembled.samples:
                            break
                        failed += len(assembled.failures)
                        if self.maker.drop_last and assembled.samples < self.maker.size:
                            discarded = assembled.samples - len(assembled.failures)
                            break
                        if this.is_new(keys.popleft(), assembled.batch):
                            yield assembled.batch
                        delivered += assembled.samples - len(assembled.failures)  # a batch waits for the next
                        assembler.number += 1
            finally:
                thread.shutdown(cancel_futures=True)
                samples.close()
                in_flight = int(read) - failed - delivered - discarded
                counts = Tally(failed=failed, discarded=discarded, in_flight=in_flight)
                this.count(self.ledger, counts)
                self.ledger.report()

    def _in_order(
        self, locates: Iterator[Locate], this: Pass, assembler: Assembler
    ) -> Generator[AssembledBatch, None, None]:
        """Assemble batches by threads, some ahead; yield them in order, their failures having gone to the ledger."""
        numbers = count(assembler.number)
        key = hash_of(self.maker.stream.source.seed, this.epoch)
        first = list(islice(locates, 1))  # after which it is known whether batches are quick
        threads = 0 if self.threads is None and assembler.is_quick else self.threads
        threads = self._threads if threads is None else threads
        with self._target() as target:
            works = (
                DeliveredBatch(self.maker, target, assembler, locate, key, next(numbers), substitution)
                for locate, substitution in chain(first, locates)
            )
            window = self.prefetch + assembler.under_way(threads) if threads else 1
            assembler.memory.keep(window + self._held, target and target.empty)
            with closing(_made(works, threads, window)) as results:
                for assembled in results:
                    if target is not None:
                        assembled.batch, assembled.begun = target.end(assembled.begun), None
                    self.maker.report(assembled)
                    monitor = self.monitor  # of the pass that the batch is for
                    monitor.threads = max(1, threads)
                    monitor.samples += assembled.rows
                    monitor.bytes += assembled.bytes
                    monitor.reading += assembled.reading
                    monitor.decoding += assembled.decoding
                    yield assembled
                    del assembled


def _made(works: Iterator[UnfinishedBatch], threads: int, window: int) -> Generator[AssembledBatch, None, None]:
    """Yield the batches, in order: made by *threads*, up to *window* at once, or by none when asked for."""
    if not threads:
        yield from (work.alone() for work in works)
        return
    with ThreadPoolExecutor(threads, "tarshards-make") as pool:
        yield from shared_map(works, executor=pool, threads=threads, window=window)


class DeliveredBatch(UnfinishedBatch):
    """A batch of *maker* in the form in which it is delivered, whose way to *target* begins when it is finished."""

    def __init__(self, maker: ArrayBatchMaker, target: Any, *arguments: Any):
        super().__init__(*arguments)
        self._maker, self._target = maker, target

    def finish(self) -> AssembledBatch:
        assembled = super().finish()
        assembled.batch = self._maker.packed(assembled.batch)
        if self._target is not None:
            assembled.begun = self._target.begin(assembled.batch)
        return assembled


def number_of(key: str) -> int:
    """A number that distinguishes a sample from others without a count of samples."""
    return int.from_bytes(blake2b(key.encode("utf-8", "surrogateescape"), digest_size=8).digest(), "little")
