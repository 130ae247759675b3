"""Tar shards for torch: the one importer of torch."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterator
from mmap import mmap
from multiprocessing import parent_process
from multiprocessing.context import get_spawning_popen
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from tarshards import kernels
from tarshards.epoch.world import World
from tarshards.errors import StateError, WorldError
from tarshards.parallel.forks import PerProcess
from tarshards.stream.op import BoundOp
from tarshards.stream.sample_ops import Item, ItemOfShards
from tarshards.stream.shard_options import ShardOptions, takes
from tarshards.stream.sources import Progress, open_shards
from tarshards.stream.stream import EpochCounter, Stream, check_dataset

log: logging.Logger = logging.getLogger("tarshards")


class TorchStream(Stream[Item], IterableDataset[Item]):
    """A ``Stream`` that torch's DataLoader takes; ranks and the DataLoader's workers each read their own part."""

    _spawned_by: tuple[int, World] | None = None
    _has_warned = False  # of a length that its DataLoader does not have

    def __getstate__(self) -> dict[str, Any]:
        is_spawning = get_spawning_popen() is not None
        if is_spawning:
            self._refuse_second_sharding()
        return super().__getstate__() | {"_spawned_by": (os.getpid(), self.world) if is_spawning else None}

    def __iter__(self) -> Iterator[Item]:
        self._refuse_second_sharding()
        return super().__iter__()

    def _begin(self) -> Progress:
        progress = super()._begin()
        if self._world is None:
            progress.world.check_announced(progress.epoch)
        return progress

    def __len__(self) -> int:
        length = super().__len__()
        loader = sys._getframe(1).f_locals.get("self")
        if isinstance(loader, DataLoader) and loader.batch_size is not None and not self._has_warned:
            self._warn_of_short_batches(loader, loader.batch_size, length)
        return length

    def _warn_of_short_batches(self, loader: DataLoader[Any], size: int, length: int) -> None:
        """Log a warning, once, if the workers of *loader* make other than the batches that a trainer counts to."""
        workers, over = loader.num_workers, 0 if loader.drop_last else size - 1
        made = sum((len(range(worker, length, workers)) + over) // size for worker in range(workers))
        if workers and made != (counted := (length + over) // size):
            self._has_warned = True
            log.warning(
                "%d workers of a DataLoader make %d batches of this dataset, as each ends with a short one%s, and its "
                "length is %d, where trainers stop: use ShardLoader(dataset, %d, num_workers=%d), which makes as many "
                "as it says",
                *(workers, made, " and drops it" if loader.drop_last else "", counted, size, workers),
            )

    @property
    def is_bare(self) -> bool:
        return False

    @property
    def world(self) -> World:
        ranks, parent = self._world, parent_process()
        if ranks is None and self._spawned_by is not None and parent is not None and parent.pid == self._spawned_by[0]:
            ranks = self._spawned_by[1]  # a spawned worker has no process group
        here = World.detect(ranks)
        if here.iterator is None:
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

    def _then(self, op: BoundOp) -> TorchStream[Any]:
        stream: Any = super()._then(op)
        return stream._shared()

    def _shared(self) -> Self:
        """Share the ledgers with workers; return this dataset."""
        for ledger in self._ledgers():
            ledger.share()
        return self


class ShardDataset(TorchStream[ItemOfShards]):
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

    if TYPE_CHECKING:

        def _then(self, op: BoundOp) -> ShardDataset[Any]: ...

    @takes(ShardOptions)
    def __init__(self, given: ShardOptions):
        self.source: Any = open_shards(given.urls, given.opening, given.epoch)
        self.source.ledger.share()
        self.ops: tuple[BoundOp, ...] = ()
        self.epochs: SharedEpochCounter = SharedEpochCounter()
        self._world = World.of(given.world)
        self._begin_state()


def torch_iterable(stream: Stream[Item], *, world: World | None = None) -> TorchStream[Item]:
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

    A ring of words in shared memory has the last passes in the order in which they began. The first worker of a pass
    that begins it adds a word, and the others find it there. They know the pass by the iterator that they belong to,
    and by how many passes they have begun for it. A word has a bit that changes with each turn of the ring, the number
    of the epoch after the pass, and the pass, or 0 if nobody will look for it. A word is only written over the one that
    was read there, so all processes have the same order, however they interleave.
    """

    PASSES, TURN, EPOCH_BITS, PASS_BITS = 1024, 62, 30, 32

    def __init__(self, epoch: int = 0):
        # An anonymous mapping, which forked children inherit, until a process is spawned.
        self._words = torch.frombuffer(mmap(-1, 8 * self.PASSES), dtype=torch.int64)
        self._words[0] = 1 << self.TURN
        self._begun = 0  # passes, by this worker
        self._lock = PerProcess(threading.Lock)
        self.set(epoch)

    def begin(self, world: World, epoch: int | None = None) -> int:
        """Return the epoch that begins now in this worker, the same for all workers of one pass; or *epoch*."""
        this_pass = 0
        if world.iterator is not None:
            self._begun += 1
            this_pass = 1 + hash((world.iterator, self._begun)) % ((1 << self.PASS_BITS) - 1)
        while True:
            words, last = self._read()
            if this_pass:
                epochs = self._after(words[words & (1 << self.PASS_BITS) - 1 == this_pass]) - 1
                if len(found := epochs if epoch is None else epochs[epochs == epoch]):
                    return int(found[0])
            begun = int(self._after(words[last])) if epoch is None else epoch
            if self._add(words, last, begun + 1, this_pass):
                return begun

    def _read(self) -> tuple[np.ndarray, int]:
        """Return the words, and where the last one is.

        Of those written meanwhile some may be missing; ``_add`` then fails, as the place of the first is taken.
        """
        with self._lock():
            words = self._words.numpy().copy()
        turns = words >> self.TURN
        return words, (int((turns != turns[0]).argmax()) or self.PASSES) - 1

    def _after(self, words: Any) -> Any:
        """Return the numbers of the epochs after the passes of *words*."""
        return words >> self.PASS_BITS & (1 << self.EPOCH_BITS) - 1

    def _add(self, words: np.ndarray, last: int, after: int, this_pass: int) -> bool:
        """Add a word to those that were read; return False if another process has added one meanwhile."""
        if after >> self.EPOCH_BITS:
            raise StateError(f"epoch {after - 1}: workers share numbers below {(1 << self.EPOCH_BITS) - 1}")
        place, turn = (last + 1) % self.PASSES, int(words[last]) >> self.TURN
        word = (turn ^ (place == 0)) << self.TURN | after << self.PASS_BITS | this_pass
        with self._lock():
            return kernels.mapped.replace_word(self._words.numpy(), place, int(words[place]), word)

    @property
    def next(self) -> int:
        """The epoch that would begin now."""
        words, last = self._read()
        return int(self._after(words[last]))

    def set(self, epoch: int) -> None:
        """Set the next epoch, also in persistent workers."""
        while not self._add(*self._read(), epoch, 0):
            pass

    def copy(self) -> SharedEpochCounter:
        """Return an independent counter that continues from here."""
        return SharedEpochCounter(self.next)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a spawned process, which shares the words, or for an independent copy.

        torch would move the words to memory that can be sent, even while another thread reads them.
        """
        with self._lock():
            words = self._words if self._words.is_shared() else self._words.clone()
            if get_spawning_popen() is not None:
                self._words = words.share_memory_()
            elif words is self._words:
                words = words.clone()
        return {"_words": words, "_begun": self._begun}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=PerProcess(threading.Lock))
        if not self._words.is_shared():  # a copy that came by value, and is independent
            self.__init__(self.next)  # type: ignore[misc]
