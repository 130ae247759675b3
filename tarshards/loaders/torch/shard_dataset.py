"""Tar shards for torch: the one importer of torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from mmap import mmap
from multiprocessing import parent_process
from multiprocessing.context import get_spawning_popen
from typing import Any, Self

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from tarshards.epoch.world import World
from tarshards.errors import StateError, WorldError
from tarshards.stream.op import BoundOp
from tarshards.stream.shard_options import ShardOptions, takes
from tarshards.stream.sources import Progress, open_shards
from tarshards.stream.stream import EpochCounter, Stream, check_dataset


class TorchStream(Stream, IterableDataset):
    """A ``Stream`` that torch's DataLoader takes; ranks and the DataLoader's workers each read their own part."""

    _spawned_by: tuple[int, World] | None = None

    def __getstate__(self) -> dict[str, Any]:
        is_spawning = get_spawning_popen() is not None
        if is_spawning:
            self._refuse_second_sharding()
        return {**self.__dict__, "_progress": None, "_spawned_by": (os.getpid(), self.world) if is_spawning else None}

    def __iter__(self) -> Iterator[Any]:
        self._refuse_second_sharding()
        return super().__iter__()

    def _begin(self) -> Progress:
        progress = super()._begin()
        if self._world is None:
            progress.world.check_announced(progress.epoch)
        return progress

    @property
    def is_bare(self) -> bool:
        return False

    @property
    def world(self) -> World:
        ranks, parent = self._world, parent_process()
        if ranks is None and self._spawned_by is not None and parent is not None and parent.pid == self._spawned_by[0]:
            ranks = self._spawned_by[1]  # a spawned worker has no process group
        here = World.detect(ranks)
        if here.seed is None:
            return self._world or World.detect()
        if self._world is not None and self._world.num_workers > 1:
            raise WorldError("world= names a worker, and the DataLoader has workers of its own")
        return here

    def _refuse_second_sharding(self) -> None:
        """Raise WorldError if a loader prepared by accelerate divides the part of a rank again."""
        state = sys.modules.get("accelerate.state")
        if state is None or self.world.world_size == 1:
            return
        info = get_worker_info()  # of a worker that may have begun before its loader was iterated
        is_wrapped = info is not None and type(info.dataset).__module__.startswith("accelerate.")
        part = info.dataset if is_wrapped else state.GradientState().active_dataloader
        while (part := getattr(part, "dataset", None)) is not None:
            if part is self:
                raise WorldError(
                    "accelerate's prepare() divides the samples that this dataset delivers to one rank again: "
                    "give the dataset world=World(), or use a ShardLoader"
                )

    def _over(self, source: Any) -> Self:
        return super()._over(source)._shared()

    def _then(self, op: BoundOp) -> Self:
        return super()._then(op)._shared()

    def _shared(self) -> Self:
        """Share the ledgers with workers; return this dataset."""
        for ledger in self._ledgers():
            ledger.share()
        return self


class ShardDataset(TorchStream):
    """The samples of tar shards as an IterableDataset, with the ops of ``Stream`` as methods.

    *urls* is a shard expression or a list of them. Ranks and the DataLoader's workers each read their own part:
    together they deliver every sample exactly once an epoch. The other options are those of ``Stream.from_shards``.
    Through indexes the epoch is planned: ``len`` is exact, and there may be more ranks and workers than shards.
    Without indexes, whole shards are divided among them.

    Epochs increase with each iteration, also in workers; ``set_epoch`` sets the next. *on_error* also gets the errors
    of ops; see ``Ledger``, and ``ledger`` for the counts over all workers. *world* replaces the rank that
    ``World.detect()`` finds when an iteration begins; ``World()`` reads everything, for code that divides samples
    itself. ``state_dict`` is for torchdata's StatefulDataLoader, which calls it in its workers; ``ShardLoader`` has its
    own.

    Raises ShardIndexError if only some shards have an index; iterating raises WorldError, on every rank, if there are
    fewer shards than ranks and no indexes.
    """

    @takes(ShardOptions)
    def __init__(self, given: ShardOptions):
        self.source: Any = open_shards(given.urls, given.opening, given.epoch)
        self.source.ledger.share()
        self.ops: tuple[BoundOp, ...] = ()
        self.epochs: SharedEpochCounter = SharedEpochCounter()
        self._world = World.of(given.world)
        self._begin_state()


def torch_iterable(stream: Stream, *, world: World | None = None) -> TorchStream:
    """Return *stream* as an IterableDataset for torch's DataLoader, with the same source, ops and epoch.

    For shards it is a ``ShardDataset``: ranks and the DataLoader's workers each read their own part of every epoch, and
    a ``ShardLoader`` also accepts it. Position p of another iterable belongs to rank p mod R and there to worker (p div
    R) mod W: each iterates over all of it, runs the ops on its own part, and together they deliver every item once, if
    all get the same items. *world* replaces the rank that ``World.detect()`` finds; ``World()`` is for an iterable that
    differs between ranks. This is not a method of ``Stream``, which works without torch.

    Raises TypeError unless *stream* is a Stream. A ShardDataset is returned unchanged, unless *world* is given.

    >>> from torch.utils.data import DataLoader
    >>> stream = Stream(range(6)).map(lambda number: number * number)
    >>> sorted(DataLoader(torch_iterable(stream), batch_size=None))
    [0, 1, 4, 9, 16, 25]
    """
    check_dataset(stream, "torch_iterable")
    if isinstance(stream, TorchStream) and world is None:
        return stream
    kind = TorchStream if stream.source.ledger is None else ShardDataset
    dataset = kind.__new__(kind)
    dataset.source, dataset.ops = stream.source, stream.ops
    dataset.epochs = SharedEpochCounter(stream.epochs.next)
    dataset._world = World.of(world) or stream._world
    dataset._begin_state()
    return dataset._shared()


class SharedEpochCounter(EpochCounter):
    """Counts the epochs of one dataset over all its copies in worker processes.

    A table in shared memory records, for each of the last epochs, for which pass over a DataLoader each worker began
    it. A worker that begins a pass joins the first epoch that others have begun for this pass and it has not; otherwise
    it begins the next one. Workers that begin at the same time get the same result, so no lock is needed: an entry is
    one 64-bit word, epoch + 1 in the high bits and the pass in the low bits. The last word is the first epoch.
    """

    EPOCHS, WORKERS, PASS_BITS = 8, 256, 40

    def __init__(self, epoch: int = 0):
        # An anonymous mapping, which forked children inherit; torch shares it when a copy is sent to another process.
        self._words = torch.frombuffer(mmap(-1, 8 * (self.EPOCHS * self.WORKERS + 1)), dtype=torch.int64)
        self._words[-1] = epoch
        self._passes = 0

    @property
    def _table(self) -> np.ndarray:
        return self._words.numpy()[:-1].reshape(self.EPOCHS, self.WORKERS)

    def begin(self, world: World, epoch: int | None = None) -> int:
        """Return the epoch that begins now in this worker, the same for all workers of one pass; or *epoch*."""
        if world.worker >= self.WORKERS:
            raise WorldError(f"worker {world.worker}: there can be {self.WORKERS} at most")
        if epoch is not None and epoch >= 1 << (62 - self.PASS_BITS):
            raise StateError(
                f"the state has epoch {epoch}, and workers share numbers below {1 << (62 - self.PASS_BITS)}"
            )
        self._passes += 1
        mask = (1 << self.PASS_BITS) - 1
        this_pass = hash((world.seed, self._passes, os.urandom(8) if world.seed is None else 0)) & mask
        table = self._snapshot()
        rows, workers = np.nonzero((table != 0) & (table & mask == this_pass))
        epochs = (table[rows, workers] >> self.PASS_BITS) - 1
        own = epochs[workers == world.worker].max(initial=-1)
        if epoch is None:
            epoch = int(epochs[epochs > own].min(initial=self._next(table)))
        else:  # later epochs that other passes have begun are invalid
            self._table[(table >> self.PASS_BITS > epoch) & (table & mask != this_pass)] = 0
        self._table[epoch % self.EPOCHS, world.worker] = (epoch + 1) << self.PASS_BITS | this_pass
        return epoch

    def _snapshot(self) -> np.ndarray:
        """Return a consistent snapshot of the table: concurrent writes must not be seen partially."""
        earlier, table = None, self._table.copy()
        while earlier is None or (table != earlier).any():
            earlier, table = table, self._table.copy()
        return table

    def _next(self, table: np.ndarray) -> int:
        return int(table.max() >> self.PASS_BITS or self._words[-1])

    @property
    def next(self) -> int:
        """The epoch that would begin now."""
        return self._next(self._table)

    def set(self, epoch: int) -> None:
        """Set the next epoch, also in persistent workers."""
        self._words.zero_()
        self._words[-1] = epoch

    def copy(self) -> SharedEpochCounter:
        """Return an independent counter that continues from here."""
        return SharedEpochCounter(self.next)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._words.share_memory_()  # shares again a copy that came by value; shared memory stays shared
