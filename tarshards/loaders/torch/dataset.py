"""Tar shards for torch: the one importer of torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from mmap import mmap
from multiprocessing import parent_process
from multiprocessing.context import get_spawning_popen
from typing import Any, Literal, Self

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from tarshards.epoch.epoch_options import EpochOptions, Tail
from tarshards.epoch.world import World
from tarshards.errors import StateError, WorldError
from tarshards.index.shard_options import Opening
from tarshards.samples.fields import FieldNames, lazy_fields
from tarshards.samples.keys import KeyRule, Split, split_name
from tarshards.samples.ledger import ErrorPolicy
from tarshards.samples.read import OnDamage
from tarshards.storage.remote import Remote
from tarshards.stream.op import BoundOp
from tarshards.stream.sources import open_shards
from tarshards.stream.stream import EpochCounter, Stream, check_dataset
from tarshards.tar.read import ArchiveEnd


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

    @property
    def is_bare(self) -> bool:
        return False

    @property
    def world(self) -> World:
        ranks, parent = self._world, parent_process()
        if ranks is None and self._spawned_by is not None and parent is not None and parent.pid == self._spawned_by[0]:
            ranks = self._spawned_by[1]  # a spawned worker has no process group to ask
        here = World.detect(ranks)
        if here.seed is None:
            return self._world or World.detect()
        if self._world is not None and self._world.num_workers > 1:
            raise WorldError("world= names a worker, and the DataLoader has workers of its own")
        return here

    def _refuse_second_sharding(self) -> None:
        """Raise WorldError if a loader that accelerate has prepared shares out the part of a rank again."""
        state = sys.modules.get("accelerate.state")
        if state is None or self.world.world_size == 1:
            return
        info = get_worker_info()  # of a worker that may have begun before its loader was iterated
        is_wrapped = info is not None and type(info.dataset).__module__.startswith("accelerate.")
        part = info.dataset if is_wrapped else state.GradientState().active_dataloader
        while (part := getattr(part, "dataset", None)) is not None:
            if part is self:
                raise WorldError(
                    "accelerate's prepare() shares out what this dataset delivers to one rank: "
                    "give the dataset world=World(), or use a ShardLoader"
                )

    def _over(self, source: Any) -> Self:
        return super()._over(source)._shared()

    def _then(self, op: BoundOp) -> Self:
        return super()._then(op)._shared()

    def _shared(self) -> Self:
        """Let the ledgers count what workers read; return this dataset."""
        for ledger in self._ledgers():
            ledger.share()
        return self


class ShardDataset(TorchStream):
    """The samples of tar shards as an IterableDataset, with the ops of ``Stream`` as methods.

    *urls* is a shard expression or a list of them. Ranks and the DataLoader's workers each read their own part:
    together they deliver every sample exactly once an epoch. ``Opening`` documents *index*, *index_dir*, *fields*,
    *lazy*, *on_error*, *on_damage*, *split*, *end*, *concatenated*, *allow_pipe* and *remote*, ``EpochOptions``
    *shuffle*, *seed*, *tail*, *pool*, *block* and *resample*.
    Through indexes the epoch is planned: ``len`` is exact, and there may be more ranks and workers than shards.
    Without, whole shards are shared out.

    Epochs count up by themselves, also in workers; ``set_epoch`` sets the next. *on_error* also gets the errors of
    ops; see ``Ledger``, and ``ledger`` for the counts over all workers. *world* replaces what ``World.detect()`` says
    of the rank when an iteration begins; ``World()`` reads everything, for what shares samples out itself.
    ``state_dict`` is for torchdata's StatefulDataLoader, which calls it in its workers; ``ShardLoader`` has its own.

    Raises ShardIndexError where only some shards have an index; iterating raises WorldError, on every rank, where there
    are fewer shards than ranks and no index.
    """

    def __init__(
        self,
        urls: Any,
        *,
        index: bool | Literal["auto"] = "auto",
        index_dir: str | os.PathLike[str] | None = None,
        shuffle: bool = False,
        seed: int = 0,
        tail: Tail | None = None,
        pool: int | None = None,
        block: int | None = None,
        resample: bool | Sequence[float] = False,
        fields: str | Iterable[str] | None = None,
        lazy: str | Iterable[str] | None = None,
        on_error: ErrorPolicy = None,
        on_damage: OnDamage = "end",
        split: KeyRule | Split = split_name,
        end: ArchiveEnd = "required",
        concatenated: bool = False,
        allow_pipe: bool = False,
        remote: Remote | None = None,
        world: World | None = None,
    ):
        names = FieldNames.of(fields)
        files = lazy_fields(lazy, names)
        opening = Opening(
            index, names, on_error, allow_pipe, on_damage, split, end, concatenated, remote, files, index_dir
        )
        self.source = open_shards(urls, opening, EpochOptions(shuffle, seed, tail, pool, block, resample))
        self.source.ledger.share()
        self.ops = ()
        self.epochs = SharedEpochCounter()
        self._world = World.of(world)
        self._begin_state()


def torch_iterable(stream: Stream, *, world: World | None = None) -> TorchStream:
    """Return *stream* as an IterableDataset for torch's DataLoader, with the same source, ops and epoch.

    Over shards it is a ``ShardDataset``: ranks and the DataLoader's workers each read their own part of every epoch,
    and a ``ShardLoader`` takes it too. Of another iterable, position p belongs to rank p mod R and there to worker
    (p div R) mod W: each iterates over all of it, runs the ops on its own part, and together they deliver every item
    once, if the iterable gives the same to each. *world* replaces the rank that ``World.detect()`` finds;
    ``World()`` is for an iterable that differs from rank to rank. This is no method of ``Stream``, which works without
    torch.

    Raises TypeError for what is no Stream. A ShardDataset is returned as it is, unless *world* is given.

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

    A table in shared memory says, for each of the last epochs, which pass over a DataLoader each worker began it for.
    A worker that begins a pass joins the first epoch that others have begun for this pass and it has not; or else it
    begins the next one. Workers that begin at the same moment come to the same answer, so that no lock is needed:
    an entry is one 64-bit word, epoch + 1 above and the pass below. The last word is the epoch to begin with.
    """

    EPOCHS, WORKERS, PASS_BITS = 8, 256, 40

    def __init__(self, epoch: int = 0):
        # An anonymous map, which children have too that are forked; torch shares it where a copy is sent to another.
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
        else:  # what other passes have begun after it is no longer so
            self._table[(table >> self.PASS_BITS > epoch) & (table & mask != this_pass)] = 0
        self._table[epoch % self.EPOCHS, world.worker] = (epoch + 1) << self.PASS_BITS | this_pass
        return epoch

    def _snapshot(self) -> np.ndarray:
        """Return the table as it was at one moment: what is written meanwhile must not count by halves."""
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
        """Let the next epoch be *epoch*, in persistent workers too."""
        self._words.zero_()
        self._words[-1] = epoch

    def copy(self) -> SharedEpochCounter:
        """Return a counter of its own that goes on from here."""
        return SharedEpochCounter(self.next)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._words.share_memory_()  # what came by value is shared again; what is shared stays
