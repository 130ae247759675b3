"""Batches of arrays of the samples that come out of a stream's ops, made where these run: in a worker process."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np

from tarshards.epoch.loop import Part
from tarshards.errors import TarshardsError, shortened
from tarshards.index.mapped_fields import MappedFields, find_in_samples
from tarshards.loaders.arrays.array_loader import ArrayBatchMaker, number_of
from tarshards.loaders.arrays.assembly import AssembledBatch, has_failed
from tarshards.samples.batch import Failures, SampleBatch
from tarshards.samples.ledger import Ledger, Tally
from tarshards.samples.payloads import Payloads

#: Stands for the error of a sample that did not come out of the ops, which have counted it.
LEFT_OUT = TarshardsError("left out by an op, or not read")


class FieldsBatchMaker(ArrayBatchMaker):
    """Makes batches as an ``ArrayLoader`` does, of samples that have gone through the ops of their stream.

    Where there are no ops, fields are found in mapped shards as there, if they can be.

    What is random is drawn for each sample as there, whichever ops come before: planned, by its number in the dataset.
    A function among the readers gets the value that ops have made of a field, other readers take bytes alone.
    """

    makes_arrays = True

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.assembler.open_by_names()

    def _map(self) -> MappedFields | None:
        return None if self.stream.ops or self.stream.source.ops else super()._map()

    def _locate(
        self, shards: np.ndarray, samples: np.ndarray, numbers: np.ndarray, part: Part | None = None
    ) -> SampleBatch:
        if self.mapped is not None:  # there are no ops
            return super()._locate(shards, samples, numbers, part)
        stream, epoch = self.stream, 0
        if part is None:  # to open the readers: what fails now is counted when its turn comes
            stream = copy.copy(stream)
            stream.source = stream.source.with_ledger(Ledger(max_errors=float("inf")))
            part = Part(stream.source.plan(0, 1), np.zeros_like(samples), shards, samples)
        else:
            epoch = part.plan.unpacked.state(0)["epoch"]
        results = stream.read_each(part, epoch)
        return self._find([results.get(row, LEFT_OUT) for row in range(len(part))], numbers)

    def _find(self, results: Sequence[Any], numbers: np.ndarray) -> SampleBatch:
        """Find the fields of the results of the ops; ``LEFT_OUT`` if there is no result."""
        for sample in results:
            if sample is not LEFT_OUT and not (isinstance(sample, dict) and "__key__" in sample):
                raise TypeError(f"fields= takes samples that are dicts with __key__, not {shortened(sample)}")
        kinds = [Values if reader.takes_values else Payloads for reader in self.assembler.readers]
        return find_in_samples(results, self.assembler.terms, numbers, kinds)

    def collated(self, samples: list[Any], epoch: int) -> tuple[dict[str, Any], Tally | None]:
        """Return the batch of *samples* that no plan numbers, and what was left out of it."""
        located = self._find(samples, np.empty(0, np.uint64))
        located.numbers = np.array([number_of(key) for key in located.keys], np.uint64)
        assembled = self.assemble(lambda: located, epoch)
        self.report(assembled)
        return assembled.batch, Tally(failed=len(assembled.failures)) if assembled.failures else None

    def count(self, part: Part, failures: Failures) -> None:
        """Count in *part*, which knows what was read of it, the samples that failed after the ops."""
        if self.mapped is not None:
            super().count(part, failures)
        elif failed := sum(error is not LEFT_OUT for error in failures.values()):
            part.leave_out(Tally(failed=failed))

    def report(self, assembled: AssembledBatch) -> None:
        """Give the errors of a batch to the ledger, and free the batch of them."""
        ledger = self.stream.ledger
        for error in assembled.errors:
            if error is not LEFT_OUT:
                (ledger.fail if self.mapped is None or has_failed(error) else ledger)(error)
                _forget_frames(error)


def _forget_frames(error: BaseException | None) -> None:
    """Drop the tracebacks of an error that was counted: they refer to the batch until garbage is collected."""
    while error is not None:
        error.__traceback__, error = None, error.__cause__ or error.__context__


class Values(list[Any]):
    """What ops have made of one field of several samples, instead of ``Payloads``."""

    sizes: np.ndarray = np.zeros(0, np.int64)

    @classmethod
    def of(cls, values: Sequence[Any]) -> Values:
        """Return *values*."""
        return cls(values)

    def __getitem__(self, index: Any) -> Any:
        """Return one value; for an array of indices, Values."""
        if isinstance(index, np.ndarray):
            return Values([self[i] for i in index.tolist()])
        return super().__getitem__(index)
