"""Batches for torch that do not depend on the workers that make them, and a state that resumes anywhere."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset

from tarshards.epoch.loop import Outcome, Part
from tarshards.errors import AuditError, WorldError, did_you_mean, whole_number
from tarshards.loaders.base import Pass, Passes, ResumableLoader
from tarshards.loaders.batches import BatchMaker
from tarshards.loaders.monitor import Stopwatch, Work
from tarshards.loaders.torch.dataset import ShardDataset
from tarshards.parallel import check_function
from tarshards.samples.ledger import Tally
from tarshards.stream import ops
from tarshards.stream.collate import collate
from tarshards.stream.sources import PlannedSource
from tarshards.stream.stream import Stream, check_dataset

MAILBOX = 1 << 16  # bytes of the order to persistent workers

#: What to use in place of the DataLoader's options that a ShardLoader refuses.
_INSTEAD = {
    "batch_sampler": "the plan says what is in a batch",
    "drop_last": 'tail="drop" makes the ranks equal, and only the last batch of an epoch is smaller',
    "in_order": "a state says how many batches came, one after the other",
    "sampler": "the plan is the order; ShardDataset(shuffle=True) permutes it",
    "shuffle": "ShardDataset(shuffle=True) permutes all samples, pool= of them at once",
}

_OPTIONS = [*signature(DataLoader.__init__).parameters][2:]  # without self and dataset


class ShardLoader(ResumableLoader, DataLoader[Any]):
    """A DataLoader whose batches do not depend on its workers, with a state that resumes on any number of ranks.

    Batch g of a rank is its next *batch_size* positions of the plan, made by worker g mod *num_workers*: the samples
    are read, the ops of *dataset* run on them, *collate_fn* (by default ``collate``: numpy arrays and lists) makes the
    batch. A sample that an op leaves out makes its batch shorter, an empty one is ``[]``, so that all ranks take as
    many steps as ``len`` says. At the end of an epoch the counts of all workers are audited (AuditError).

    ``state_dict()`` is the position of the loop over the loader, whatever the workers have made ahead. *options* are
    the DataLoader's. Without indexes, workers batch their own shards, and a state is replayed on equally many
    workers.

    Raises TypeError for ops that hold or count samples across batches, and for wrong arguments.
    """

    def __init__(
        self,
        dataset: ShardDataset,
        batch_size: int,
        *,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] = collate,
        **options: Any,
    ):
        if isinstance(dataset, _Batches):  # Lightning makes loaders anew from their attributes
            dataset, batch_size, collate_fn = dataset.made_of
        check_dataset(dataset, "a ShardLoader", ShardDataset)
        num_workers = whole_number("num_workers", num_workers, 0)
        _check(dataset, options)
        maker = CollatedBatchMaker(dataset, batch_size, collate_fn)
        self.passes = Passes(maker, workers=num_workers)
        self._batches = _Batches(maker, persistent=bool(options.get("persistent_workers")))
        super().__init__(self._batches, batch_size=None, num_workers=num_workers, collate_fn=_same, **options)
        self.sampler.set_epoch = self.passes.announce

    def make_batches(self, this: Pass) -> Generator[Any, None, None]:
        with self._batches.ordered(_PassOrder(this.epoch, this.state, this.world.rank, this.world.world_size)):
            batches = DataLoader.__iter__(self)
        tallies, replayed, arrived = [], this.passed, Tally()
        try:
            for made in batches:
                if isinstance(made, Tally):
                    tallies.append(made)
                    continue
                self._monitor(made)
                if this.plan is not None:
                    made.outcome.settle(arrived)
                if replayed:
                    replayed -= 1
                else:
                    yield made.batch
                if this.plan is None:  # each batch waits for the one after it
                    made.outcome.settle(arrived)
        finally:
            self.ledger.add(arrived)
        if this.plan is not None and len(tallies) < max(1, self.num_workers):
            raise AuditError(f"only {len(tallies)} of {self.num_workers} workers reported what they read")
        if this.plan is not None:
            self.ledger.audit([*tallies, arrived])

    def _monitor(self, made: _Made) -> None:
        monitor = self.monitor
        monitor.threads = max(1, self.num_workers)
        monitor.samples += made.outcome.taken - made.outcome.lost
        monitor.add(made.work)
        if self.num_workers:
            monitor.traffic += made.work.traffic


def _check(dataset: ShardDataset, options: Mapping[str, Any]) -> None:
    """Raise TypeError, which says what to use instead, for an op or an option that a ShardLoader refuses."""
    is_planned = isinstance(dataset.source, PlannedSource)
    for name in options:
        if name not in _OPTIONS:
            raise TypeError(f"a ShardLoader has no option {name}{did_you_mean(name, _OPTIONS)}")
    refused = {name: instead for name, instead in _INSTEAD.items() if options.get(name) is not None}
    if options.get("in_order"):
        del refused["in_order"]
    for op in dataset.ops:
        if op.function is ops.batched or (is_planned and not op.traits.per_sample):
            refused[op.name] = op.traits.instead
    if refused:
        name, instead = next(iter(refused.items()))
        raise TypeError(f"{name} is not for a ShardLoader: {instead}")


def _same(batch: Any) -> Any:
    return batch


class _PassOrder(NamedTuple):
    """What a pass over the loader is to deliver to a rank: an epoch, or what a state says is left of it."""

    epoch: int
    state: Mapping[str, Any] | None
    rank: int
    ranks: int


class _Made(NamedTuple):
    """A batch, what became of its samples, which are in flight until the loader takes it, and how long it took."""

    batch: Any
    outcome: Outcome
    work: Work


class CollatedBatchMaker(BatchMaker):
    """Makes batches of the samples that come out of a stream's ops; without any, a batch is ``[]``."""

    def __init__(self, stream: Stream, size: int, collate_fn: Callable[[list[Any]], Any]):
        check_function(collate_fn, "ShardLoader")
        super().__init__(stream, size)
        self.collate = collate_fn

    def read(self, part: Part, epoch: int) -> Any:
        batch = list(self.stream.read(part, epoch))
        return self.collate(batch) if batch else []


class _Batches(IterableDataset[Any]):
    """The batches that one worker makes, and after them its tally, for the audit over all workers."""

    def __init__(self, maker: CollatedBatchMaker, persistent: bool):
        self.maker, self.stream = maker, maker.stream
        self._order: _PassOrder | None = None
        # Workers that outlive an epoch have a copy of this from their start; the order reaches them in shared memory.
        self._mailbox = torch.zeros(MAILBOX, dtype=torch.uint8).share_memory_() if persistent else None

    @property
    def made_of(self) -> tuple[Any, int, Callable[[list[Any]], Any]]:
        """The dataset, batch size and collate_fn of the loader."""
        return self.stream, self.maker.size, self.maker.collate

    @contextmanager
    def ordered(self, order: _PassOrder) -> Iterator[None]:
        """Say what an iteration that begins meanwhile delivers, in workers too."""
        self._order = order
        if self._mailbox is not None:
            text = json.dumps(order).encode().ljust(MAILBOX)
            self._mailbox.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        try:
            yield
        finally:
            self._order = None

    def __iter__(self) -> Iterator[Any]:
        if self._order is None:
            raise TypeError(
                "only a ShardLoader makes batches of its dataset; to pass over the first ones, "
                "as accelerate's skip_first_batches does, load a state"
            )
        return self._run(self._order)

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
        plan = self.maker.plan(order.epoch, world.world_size, order.state)
        try:
            if plan is None:
                samples = self.stream.iterate(order.epoch, world)
                for batch in ops.batched(samples, self.maker.size, collate=list):
                    self.stream.ledger.count(in_flight=len(batch))
                    collated = self.maker.collate(batch)
                    yield _Made(collated, Outcome(len(batch), 0, None), stopwatch.take())
                    stopwatch.begin()
            else:
                shares = self.maker.shares(plan, world.rank)[world.worker :: world.num_workers]
                loop = self.stream.source.loop(plan, world, shares, whole=order.state is None, is_ahead=True)
                for batch in loop.run(partial(map, partial(self.maker.read, epoch=order.epoch))):
                    yield _Made(batch, loop.made, stopwatch.take())
                    stopwatch.begin()
                yield loop.tally
        finally:
            self.stream.report()
