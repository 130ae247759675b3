"""Batches for torch that do not depend on the number of workers, and a state that resumes on any topology."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from inspect import signature
from threading import RLock
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, TypeVar, Unpack, overload

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from tarshards.epoch.loop import Outcome, Part
from tarshards.epoch.packing import Packing
from tarshards.epoch.substitutes import Substitutes
from tarshards.errors import AuditError, WorldError, check_function, did_you_mean, flag, whole_number
from tarshards.loaders.arrays.after_ops import FieldsBatchMaker
from tarshards.loaders.arrays.assembly import Transform
from tarshards.loaders.arrays.readers.reader import ArrayReader, Reader
from tarshards.loaders.batches import BatchMaker
from tarshards.loaders.monitor import Stopwatch
from tarshards.loaders.passes import BatchType, Pass, Passes, ResumableLoader
from tarshards.loaders.tensors import tensors
from tarshards.loaders.torch.handover import KEPT, ArenaMemory, Arenas, Made, PlanTables
from tarshards.loaders.torch.shard_dataset import ShardDataset
from tarshards.parallel.forks import PerProcess
from tarshards.samples.ledger import PassOf, Tally
from tarshards.stream import ops
from tarshards.stream.collate import collate_packed, collate_ragged, cut_arrays
from tarshards.stream.other_names import OPTIONS, explains
from tarshards.stream.replaying import crc_of_results
from tarshards.stream.sample_ops import Item
from tarshards.stream.sources import PlannedSource, version_of
from tarshards.stream.stream import Stream, check_dataset

if TYPE_CHECKING:
    from multiprocessing.context import BaseContext

    from tarshards.epoch.plan import PlannedEpoch
    from tarshards.loaders.batches import BatchOptions, FieldsBatch

    class DataLoaderOptions(TypedDict, total=False):
        """The options of torch's DataLoader that a ShardLoader takes, besides *num_workers* and *collate_fn*."""

        pin_memory: bool
        pin_memory_device: str
        timeout: float
        worker_init_fn: Callable[[int], None] | None
        multiprocessing_context: BaseContext | str | None
        generator: torch.Generator | None
        prefetch_factor: int | None
        persistent_workers: bool

    class ShardLoaderOptions(BatchOptions, DataLoaderOptions, total=False):
        """What does not change the type of a batch."""

        num_workers: int


Collated = TypeVar("Collated")

MAILBOX = 1 << 16  # bytes of the message to persistent workers

#: Alternatives to the DataLoader's options that a ShardLoader refuses.
_INSTEAD = {
    "batch_sampler": "the plan says what is in a batch",
    "in_order": "a state says how many batches came, one after the other",
    "sampler": "the plan is the order; ShardDataset(shuffle=True) permutes it",
    "shuffle": "ShardDataset(shuffle=True) permutes all samples, pool= of them at once",
}

_OPTIONS = [*signature(DataLoader.__init__).parameters][2:]  # without self and dataset


class ShardLoader(ResumableLoader[BatchType], DataLoader[Any]):
    """A DataLoader whose batches do not depend on its workers, with a state that resumes on any number of ranks.

    Batch g of a rank is its next *batch_size* positions of the plan, made by worker g mod *num_workers*: the samples
    are read, the ops of *dataset* run on them, and *collate_fn* makes the batch: by default torch tensors from numbers
    and arrays, like torch's ``default_collate``, and lists from strings, bytes and arrays that differ in shape. With
    ``collate_fn=tarshards.collate`` they are numpy arrays.

    *fields* makes the batch instead, as in an ``ArrayLoader``: ``{field: tensor, ..., "__key__": [...]}`` of these
    fields alone, each made by a reader, one of ``tarshards.readers`` or any function, and then by *transforms*,
    functions ``(batch, rng)`` of the arrays, which may also return a tuple. Crops and other random choices are those of
    an ``ArrayLoader``, whatever ops come before. A function gets the value that ops have made of its field; readers
    take bytes alone. A sample that lacks a field or does not decode raises an error, or goes to the ledger as failed.

    At the end of an epoch the counts of all workers are audited (AuditError).

    A sample that an op leaves out makes its batch shorter, so all ranks take ``len`` steps; an empty batch is ``[]``,
    or has empty tensors of *fields*. With *fill* it is replaced by another sample of the epoch, drawn by (seed, epoch,
    position) from those that are read at about the same time and are not in the batch; the ledger counts the substitute
    as repeated. After 8 substitutes that are also left out it raises SampleError. Without indexes batches are always
    full, but ranks may differ in their number. With *drop_last* there is no smaller batch at the end of an epoch; the
    ledger counts its samples as dropped.

    With *packing*, from ``pack`` or ``bucket``, a batch has the samples of *batch_size* bins. ``pack`` concatenates the
    arrays of its samples, with ``cu_seqlens`` (int32) and ``position_ids``; *collate_fn* replaces this.

    With *steps* a pass over the loader, and its ``len``, is that many batches; the next one continues where it ended,
    in the same epoch of the dataset or the next.

    Batches of workers come through shared memory: large arrays and tensors are views of it, for as long as anything
    refers to them or to views of them; all else is copied. You may keep batches and write to them. *reuse*, which an
    ``ArrayLoader`` has too, makes no difference.

    ``state_dict()`` is the position of the loop over the loader; prefetched batches do not count. *options* are the
    DataLoader's. Without indexes, workers batch their own shards, and a state is replayed on the same number of
    workers.

    Raises TypeError for ops that hold or count samples across batches, and for wrong arguments; ``shuffle`` is left out
    where the plan permutes all samples. Iterating raises WorldError if there are no indexes and the ranks do not
    divide the shards, unless *steps* or ``tail="exact"`` is given.
    """

    @overload
    def __init__(
        self: ShardLoader[Item],
        dataset: ShardDataset[Item],
        batch_size: int,
        *,
        fields: None = None,
        **options: Unpack[ShardLoaderOptions],
    ) -> None: ...
    @overload
    def __init__(
        self: ShardLoader[Collated],
        dataset: ShardDataset[Any],
        batch_size: int,
        *,
        collate_fn: Callable[[list[Any]], Collated],
        **options: Unpack[ShardLoaderOptions],
    ) -> None: ...
    @overload
    def __init__(
        self: ShardLoader[FieldsBatch[torch.Tensor]],
        dataset: ShardDataset[Any],
        batch_size: int,
        *,
        fields: Mapping[str, ArrayReader],
        **options: Unpack[ShardLoaderOptions],
    ) -> None: ...
    @overload
    def __init__(
        self: ShardLoader[FieldsBatch],
        dataset: ShardDataset[Any],
        batch_size: int,
        *,
        fields: Mapping[str, Reader | Callable[[Any], Any]],
        **options: Unpack[ShardLoaderOptions],
    ) -> None: ...
    @overload
    def __init__(
        self: ShardLoader[Any],
        dataset: ShardDataset[Any],
        batch_size: int,
        *,
        fields: Mapping[str, Reader | Callable[[Any], Any]],
        transforms: Iterable[Transform],
        **options: Unpack[ShardLoaderOptions],
    ) -> None: ...
    @explains
    def __init__(
        self,
        dataset: ShardDataset[Any],
        batch_size: int,
        *,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] = collate_ragged,
        fields: Mapping[str, Reader | Callable[[Any], Any]] | None = None,
        transforms: Iterable[Transform] = (),
        fill: bool = False,
        drop_last: bool = False,
        steps: int | None = None,
        reuse: bool = False,
        packing: Packing | None = None,
        **options: Unpack[DataLoaderOptions],
    ):
        if isinstance(dataset, _Batches):  # Lightning recreates loaders from their attributes
            (dataset, batch_size, collate_fn, fields, transforms, fill, drop_last, steps, reuse, packing) = (
                dataset.made_of
            )
        check_dataset(dataset, "a ShardLoader", ShardDataset)
        dataset = _without_buffers(dataset)
        num_workers = whole_number("num_workers", num_workers, 0)
        needs_rows = flag("fill", fill) or (getattr(packing, "overlong", "") == "split")
        _check(dataset, options, fill, fields is not None, needs_rows)
        given: dict[str, Any] = {"fill": fill, "drop_last": drop_last, "packing": packing}
        maker: CollatedBatchMaker | FieldsBatchMaker
        if fields is None:
            if transforms:
                raise TypeError("transforms= requires fields=; without, functions of samples are ops: dataset.map(...)")
            maker = CollatedBatchMaker(dataset, batch_size, collate_fn, **given)
        else:
            if collate_fn is not collate_ragged:
                raise TypeError("fields= makes the batches instead of collate_fn=; transforms= takes functions of them")
            maker = FieldsBatchMaker(dataset, batch_size, fields, transforms, kept=KEPT, ring=False, **given)
            transforms = maker.assembler.transforms
        self.passes: Passes = Passes(maker, steps, workers=num_workers)
        persistent = bool(options.get("persistent_workers"))
        reuse = flag("reuse", reuse)
        made_of = dataset, batch_size, collate_fn, fields, transforms, fill, drop_last, steps, reuse, packing
        self._batches = _Batches(maker, persistent=persistent, made_of=made_of)
        super().__init__(self._batches, batch_size=None, num_workers=num_workers, collate_fn=_same, **options)
        self.sampler.set_epoch = self.passes.announce

    def make_batches(self, this: Pass) -> Generator[Any, None, None]:
        return self.finished(self._received(this))

    def _received(self, this: Pass) -> Generator[Any, None, None]:
        """Yield the batches of a pass as the workers made them."""
        if this.plan is not None:
            self._batches.maker.open()  # once, for all workers
        if this.plan is not None and not this.world.rank:
            self.passes.stream.check_decoding()  # here, once: workers have few samples each
        order = _PassOrder(this.epoch, this.state, this.world.rank, this.world.world_size)
        with _beginning():
            own = self._apart() if self._batches.is_taken else self
            with own._batches.ordered(order, this.plan, own._arenas) as arenas:
                messages = DataLoader.__iter__(own)
            own._batches.is_taken = own.persistent_workers
        all_made = messages if arenas is None else arenas.receive(messages)
        tallies, arrived = [], Tally()
        try:
            for made in all_made:
                if isinstance(made, Tally):
                    tallies.append(made)
                    continue
                self._monitor(made)
                if this.plan is not None:
                    made.outcome.settle(arrived)
                if this.is_new(made.outcome.keys, made.held[0]):
                    yield made.held.pop()
                if this.plan is None and self.passes.stream.is_followed:  # each batch waits for the next
                    made.outcome.settle(arrived)
        finally:
            own._batches.is_taken = False
            this.count(self.ledger, arrived)
        if this.plan is not None and len(tallies) < max(1, self.num_workers):
            raise AuditError(f"only {len(tallies)} of {self.num_workers} workers reported what they read")
        if this.plan is not None:
            self.ledger.audit([*tallies, arrived])

    def _apart(self) -> ShardLoader:
        """Return a loader with workers of its own, for a pass that begins while another one has the persistent ones."""
        other = copy.copy(self)
        batches = other._batches = copy.copy(self._batches)
        batches._mailbox, batches._arenas, batches.is_taken = None, None, False
        other.__dict__.update(dataset=batches, persistent_workers=False, _iterator=None)  # torch refuses to set them
        return other

    def _arenas(self) -> Arenas | None:
        """Return shared memory for the workers, if there are any."""
        if not self.num_workers:
            return None
        return Arenas(self.num_workers, self.prefetch_factor, pinned=self._is_pinned)

    @property
    def _is_pinned(self) -> bool:
        return self.pin_memory and torch.cuda.is_available()

    def finished(self, batches: Generator[Any, None, None]) -> Generator[Any, None, None]:
        makes_tensors, pinned = self._batches.maker.makes_arrays, self._is_pinned
        with closing(batches):
            for batch in batches:
                yield tensors(batch, pinned=pinned) if makes_tensors else batch

    def _monitor(self, made: Made) -> None:
        monitor = self.monitor
        monitor.threads = max(1, self.num_workers)
        monitor.samples += made.outcome.taken - made.outcome.quarantined
        monitor.add(made.seconds, made.traffic)
        if self.num_workers:
            monitor.traffic += made.traffic


def _without_buffers(dataset: ShardDataset) -> ShardDataset:
    """Return *dataset* without the op ``shuffle`` where its plan permutes all samples."""
    source = dataset.source
    if not isinstance(source, PlannedSource) or not (source.options.shuffle or source.options.resample):
        return dataset
    without = copy.copy(dataset)
    without.ops = tuple(op for op in dataset.ops if op.function is not ops.shuffle)
    return without


def _check(dataset: ShardDataset, options: Mapping[str, Any], fill: bool, has_fields: bool, needs_rows: bool) -> None:
    """Raise TypeError, which says what to use instead, for an op or an option that a ShardLoader refuses."""
    is_planned = isinstance(dataset.source, PlannedSource)
    for name in options:
        if name not in _OPTIONS:
            cure = f": here it is {OPTIONS[name]}" if name in OPTIONS else did_you_mean(name, _OPTIONS)
            raise TypeError(f"a ShardLoader has no option {name}{cure}")
    refused = {name: instead for name, instead in _INSTEAD.items() if options.get(name) is not None}
    if options.get("in_order"):
        del refused["in_order"]
    if fill and has_fields and not is_planned:
        raise TypeError("fill= requires indexed shards where fields= makes the batches; run `tarindex` first")
    for op in (*dataset.source.ops, *dataset.ops) if (needs_rows or has_fields) and is_planned else ():
        if op.is_unordered:
            name = "fill=" if fill else "fields=" if has_fields else 'overlong="split"'
            raise TypeError(f"{name} needs to know which sample each result is of: {op.name} takes ordered=True for it")
    for op in dataset.ops:
        if has_fields and op.function in (ops.to_tuple, ops.map_tuple):
            refused[op.name] = "fields= takes samples that are dicts; a function in transforms= may return a tuple"
        elif op.function is ops.batched or (is_planned and not op.traits.per_sample):
            refused[op.name] = op.traits.instead
    if refused:
        name, instead = next(iter(refused.items()))
        raise TypeError(f"{name} is not for a ShardLoader: {instead}")


def _same(batch: Any) -> Any:
    return batch


class _PassOrder(NamedTuple):
    """The task of a pass over the loader for a rank: an epoch, or its rest after a state.

    *tables* are those of its plan, if shared.
    """

    epoch: int
    state: Mapping[str, Any] | None
    rank: int
    ranks: int
    tables: Sequence[Any] | None = None


#: Held while a pass begins: its order is an attribute of what torch copies to workers, also for threads of one loader.
_beginning: PerProcess[Any] = PerProcess(RLock)


class CollatedBatchMaker(BatchMaker):
    """Makes batches of the samples after a stream's ops; without any, a batch is ``[]``."""

    def __init__(self, stream: Stream, size: int, collate_fn: Callable[[list[Any]], Any], **options: Any):
        check_function(collate_fn, "ShardLoader")
        super().__init__(stream, size, **options)
        is_packed = self.packing is not None and self.packing.is_packed and collate_fn is collate_ragged
        self.collate: Callable[[list[Any]], Any] = collate_packed if is_packed else collate_fn
        self.makes_arrays: bool = self.collate in (collate_ragged, collate_packed)

    def read(self, part: Part, epoch: int) -> Any:
        if self.fill:
            batch = self._filled(part, epoch)
        elif part.begins is not None and self.packing is not None:
            batch = self._cut(part, epoch, self.packing)
        else:
            batch = list(self.stream.read(part, epoch))
        if not batch:
            return []
        made = self.collate(batch)
        return made if self.packing is None or self.collate is not collate_packed else self.checked(made, self.packing)

    def _cut(self, part: Part, epoch: int, packing: Packing) -> list[Any]:
        """Return the pieces of the samples of *part*."""
        begins, lengths = np.asarray(part.begins).tolist(), self.planned_lengths(part, packing).tolist()
        results, capacity = self.stream.read_each(part, epoch), int(packing.capacity)
        return [cut_arrays(results[row], begins[row], capacity, lengths[row]) for row in sorted(results)]

    def collated(self, samples: list[Any], epoch: int) -> tuple[Any, Tally | None]:
        """Return the batch of *samples* that no plan numbers, and what was left out of it."""
        return self.collate(samples), None

    def _filled(self, part: Part, epoch: int) -> list[Any]:
        """Return the results for the samples of *part*, in order, with substitutes for samples that were left out."""
        results = self.stream.read_each(part, epoch)
        substitutes = Substitutes(part)
        while missing := [row for row in range(len(part)) if row not in results]:
            with substitutes.drawn(missing) as extra:
                found = self.stream.read_each(extra, epoch)
            results |= {missing[row]: result for row, result in found.items()}
        return [results[row] for row in range(len(part))]


class _Batches(IterableDataset[Any]):
    """The batches that one worker makes, and after them its tally, for the audit over all workers."""

    def __init__(self, maker: CollatedBatchMaker | FieldsBatchMaker, *, persistent: bool, made_of: tuple[Any, ...]):
        self.maker, self.stream = maker, maker.stream
        self.made_of = made_of  # the loader's arguments
        self._order: _PassOrder | None = None
        self._arenas: Arenas | None = None  # of workers that begin now, or persist
        self.is_taken = False  # whether a pass that is alive has the workers that persist
        # Persistent workers have a copy of this from their start; each pass's order reaches them in shared memory.
        self._mailbox = torch.zeros(MAILBOX, dtype=torch.uint8).share_memory_() if persistent else None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ if self._order else self.__dict__ | {"_arenas": None}

    @contextmanager
    def ordered(
        self, order: _PassOrder, plan: PlannedEpoch | None, make_arenas: Callable[[], Arenas | None]
    ) -> Iterator[Arenas | None]:
        """Set the order of iterations that begin in the with-block, also in workers; yield the arenas for batches."""
        self._arenas = self._arenas or make_arenas()
        if self._arenas is not None:
            self._arenas.restart()
            if plan is not None and plan.order is not None:
                order = order._replace(tables=self._arenas.share(plan.order.make_tables()))
        self._order = order
        if self._mailbox is not None:
            text = json.dumps(order).encode().ljust(MAILBOX)
            self._mailbox.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        try:
            yield self._arenas
            if self._arenas is not None:
                self._arenas.release()
        finally:
            self._order = None
            if self._mailbox is None:
                self._arenas = None

    def __iter__(self) -> Iterator[Any]:
        if self._order is None:
            raise TypeError(
                "only a ShardLoader makes batches of its dataset; to pass over the first ones, "
                "as accelerate's skip_first_batches does, load a state"
            )
        made = self._run(self._order)
        if self._arenas is None:
            return made
        if isinstance(self.maker, FieldsBatchMaker):
            self.maker.assembler.memory = ArenaMemory(self._arenas)
        return self._arenas.send(made)

    def _run(self, order: _PassOrder) -> Iterator[Any]:
        if self._mailbox is not None:
            order = _PassOrder(*json.loads(self._mailbox.numpy().tobytes()))
        world = self.stream.world
        if (world.rank, world.world_size) != (order.rank, order.ranks):
            raise WorldError(
                f"this worker is of rank {world.rank} of {world.world_size}, and its loader of rank {order.rank} of "
                f"{order.ranks}: workers began before init_process_group(); iterate after it"
            )
        stopwatch = Stopwatch()
        samples: Iterable[Any] = ()
        plan = self.maker.plan(order.epoch, world.world_size, order.state)
        if plan is not None and plan.order is not None and self._arenas is not None and order.tables is not None:
            plan.order.tables = self._arenas.shared(PlanTables(*order.tables))
        try:
            if plan is None:
                samples = self.stream.iterate(order.epoch, world, version_of(order.state, self.stream.source))
                for batch in ops.batched(samples, self.maker.size, collate=list):
                    counted = len(batch) if self.stream.is_followed else 0  # samples that the ledger counts
                    if len(batch) < self.maker.size and self.maker.drop_last:
                        self.stream.ledger.count(discarded=counted)
                        break
                    self.stream.ledger.count(in_flight=counted)
                    keys = crc_of_results(batch)
                    *held, left_out = self.maker.collated(batch, order.epoch)
                    yield Made(held, Outcome(len(batch), 0, left_out, keys), *stopwatch.take())
                    stopwatch.begin()
            else:
                shares = self.maker.shares(plan, world.rank)[world.worker :: world.num_workers]
                of = PassOf(order.epoch, plan.before, order.rank, order.ranks)
                loop = self.stream.source.loop(plan, world, shares, of=of, is_ahead=True)
                for held in loop.run(partial(map, lambda part: [self.maker.read(part, order.epoch)])):
                    yield Made(held, loop.made, *stopwatch.take())
                    stopwatch.begin()
                yield loop.tally
        finally:
            samples = ()  # closed, they have counted all
            self.stream.report()
