"""A source for ``fn.external_source(parallel=True)``: any sample of an epoch by its number, in any worker process."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from tarshards.errors import ShardIndexError, TarshardsError
from tarshards.loaders.dali.guard import Check, Guard, Row
from tarshards.loaders.dali.sources import guarded
from tarshards.stream.sources import READ_AT_ONCE, PlannedSource
from tarshards.stream.stream import PER_SAMPLE, Stream

if TYPE_CHECKING:
    from tarshards.epoch.plan import EpochPlan


class IndexedSource:
    """The samples of one rank by DALI's ``SampleInfo``; it holds no place, and can be pickled."""

    def __init__(self, dataset: Stream, guard: Guard):
        if not isinstance(dataset._source, PlannedSource):
            raise ShardIndexError("an indexed source needs indexed shards; tarindex makes indexes")
        for op in dataset._ops:
            if op.function not in PER_SAMPLE:
                raise TypeError(f"{op.function.__name__} is not for DALI's sources: their ops see one sample at a time")
        self.dataset, self.guard = dataset, guard
        self.world = dataset._here()
        self.first_epoch = dataset._epochs.next
        self._plan: tuple[int, EpochPlan] | None = None
        self._part: tuple[tuple[int, int], Any] = ((-1, -1), None)
        self._last: Row | None = None

    @property
    def num_outputs(self) -> int:
        """What ``fn.external_source`` is to be told as ``num_outputs``."""
        return len(self.guard.fields) + 1

    def __call__(self, info: Any) -> tuple[Any, ...]:
        epoch, number = self.first_epoch + info.epoch_idx, info.idx_in_epoch
        share = self._share(epoch)
        if number - info.idx_in_batch >= len(share):
            raise StopIteration
        row = self._read(epoch, min(number, len(share) - 1), share)
        return (*row.arrays, np.array(row.valid and number < len(share)))

    def _share(self, epoch: int) -> range:
        if self._plan is None or self._plan[0] != epoch:
            self._plan = epoch, self.dataset._source.plan(epoch, self.world.world_size)
        return range(self.world.rank, len(self._plan[1]), self.world.world_size)

    def _read(self, epoch: int, number: int, share: range) -> Row:
        part, place = divmod(number, READ_AT_ONCE)
        if self._part[0] != (epoch, part):
            positions = np.array(share[part * READ_AT_ONCE : (part + 1) * READ_AT_ONCE])
            assert self._plan is not None
            self._part = (epoch, part), [numbers.tolist() for numbers in self._plan[1][positions]]
        shard, sample = (numbers[place] for numbers in self._part[1])
        ledger = self.dataset.ledger
        try:
            samples = [self.dataset._source.shards.read(shard, sample)]
        except TarshardsError as error:
            ledger(error)
            samples = []
        row = next(self.guard.rows(self.dataset.through_ops(samples, epoch, ledger), ledger), None)
        if row is None:
            ledger.report()
            if self._last is None:
                raise TarshardsError("the first sample that is asked for cannot be read, and there is none to repeat")
            return self._last._replace(valid=False)
        if not row.valid:
            ledger.report()
        self._last = row
        return row

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_plan": None, "_part": ((-1, -1), None), "_last": None}


def indexed_source(
    urls_or_dataset: Any, *, fields: str | Iterable[str] = ("jpg", "cls"), check: Check = "header"
) -> IndexedSource:
    """Return a callable for ``fn.external_source(source, num_outputs=..., batch=False, parallel=True)``.

    Worker processes (``py_num_workers``) each read their samples by the index, in the order of the dataset's epochs,
    and by DALI's own checkpoints such a source resumes. The last output is ``valid``: false where a black image stands
    for a bad one, another sample for one that cannot be read, and where the last sample is repeated to fill its batch.
    What is bad goes to the dataset's ledger, as often as it is read; it does not count what is delivered.
    """
    dataset, guard = guarded(urls_or_dataset, fields, "mask", check)
    dataset.ledger.share()
    return IndexedSource(dataset, guard)
