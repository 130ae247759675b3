"""Many samples at once: packed as they are in a tar, or by field, as loaders, columns and imports use them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from tarshards.errors import OpenError, TarshardsError
from tarshards.samples.keys import Sample
from tarshards.storage.streams import words

if TYPE_CHECKING:  # what writes single samples needs no numpy
    import numpy as np

    from tarshards.samples.payloads import Payloads

Failures = dict[int, TarshardsError]  # by row


class PackedSamples(NamedTuple):
    """The members of whole samples with these *keys*, as ``pack_members`` packs them, from the shard *url*."""

    keys: list[str]
    members: memoryview
    url: str


@dataclass
class SampleBatch:
    """The keys of samples, the payloads of each field by its name, and the *failures* of some of them by row.

    *numbers* seed the random draws of samples, and are those of the rows of a file. *shards* are the indices of their
    URLs in *names*. Of samples that are split, a row of *pieces* has the element that a piece begins at, the most that
    it has, and how many the sample has to have. If payloads are in mapped shards, their *headers* are not compared with
    the index until ``check`` is called, and copies of the payloads are valid if ``check_copied`` is called afterwards.
    """

    keys: Any  # BatchKeys or a list
    columns: dict[str, Payloads]
    failures: Failures
    numbers: Any  # int64 or uint64, or any sequence of the numbers of rows
    shards: np.ndarray
    names: Sequence[str]
    headers: Any = None  # as ``index.mapped_fields`` has them
    pieces: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.numbers)

    def sample(self, row: int) -> Sample:
        """Return a copy of one sample, with the fields that it has."""
        sample: Sample = {"__key__": self.keys[row], "__url__": self.names[self.shards[row]]}
        for field, payloads in self.columns.items():
            if payloads.sizes[row] >= 0:
                sample[field] = payloads[row]
        return sample

    def check(self) -> Failures:
        """Return the failures, with those of samples whose headers differ from the index."""
        if self.headers is None or not self.headers.are_new:
            return self.failures
        if self.headers.are_called:
            self.headers.fetch(self.columns)
        return self.headers.find_stale() | self.failures

    def check_copied(self) -> None:
        """Raise OSError unless copies of the payloads that were made before are valid: no mapped shard has shrunk."""
        if self.headers is not None:
            self.headers.check(self.shards)

    def copy(self, column: str, row: int) -> Any:
        """Return a copy of one payload; raise OSError if it is in a mapped shard that has shrunk."""
        payloads = self.columns[column]
        data = payloads[row]
        if self.headers is not None and len(data):
            self.headers.check_end(int(self.shards[row]), int(payloads.addresses[row]) + len(data))
        return data

    def part(self, begin: int, end: int) -> SampleBatch:
        """Return the samples from *begin* to *end*."""
        failures = {i - begin: error for i, error in self.failures.items() if begin <= i < end}
        headers = self.headers
        if headers is not None and headers.are_new:
            headers = headers.part(begin, end)
        return self._rows(slice(begin, end), failures, headers)

    def keep(self, kept: np.ndarray) -> SampleBatch:
        """Return those of the samples *kept*, which have not failed and whose headers have been compared."""
        return self._rows(kept, {}, None)

    def _rows(self, rows: Any, failures: Failures, headers: Any) -> SampleBatch:
        columns = {name: payloads[rows] for name, payloads in self.columns.items()}
        pieces = None if self.pieces is None else self.pieces[rows]
        own = self.numbers[rows], self.shards[rows], self.names
        return SampleBatch(self.keys[rows], columns, failures, *own, headers, pieces)

    def copied(self) -> tuple[SampleBatch, Failures]:
        """Return the samples with copies of their payloads, and the errors of those whose shard has shrunk."""
        shrunk: Failures = {}
        copies = {
            name: type(payloads).of([self._copy(name, row, shrunk) for row in range(len(self))])
            for name, payloads in self.columns.items()
        }
        return replace(self, columns=copies, headers=None), shrunk

    def _copy(self, column: str, row: int, shrunk: Failures) -> Any:
        try:
            return self.copy(column, row)
        except OSError as error:
            shrunk[row] = self.unreadable(row, error)
            return b""

    def unreadable(self, row: int, error: OSError) -> OpenError:
        """Return the error of a sample whose shard has shrunk."""
        named = OpenError(words(error), url=self.names[self.shards[row]], key=self.keys[row])
        named.__cause__ = error
        return named

    def replaced(self, at: list[int], others: SampleBatch) -> SampleBatch:
        """Return the samples, copied before, with copies of *others* instead of those *at* some rows."""
        keys, (numbers, shards) = list(self.keys), (array.copy() for array in (self.numbers, self.shards))
        numbers[at], shards[at] = others.numbers, others.shards + len(self.names)
        for row, key in zip(at, others.keys):
            keys[row] = key
        columns = {}
        for name, own in self.columns.items():
            datas = list(own)
            for row, data in zip(at, others.columns[name]):
                datas[row] = data
            columns[name] = type(own).of(datas)
        names = [*self.names, *others.names]
        return SampleBatch(type(self.keys).of(keys), columns, {}, numbers, shards, names, None, self.pieces)
