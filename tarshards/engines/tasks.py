"""What the tasks of an engine read and write as Arrow tables: ranges of positions, and samples for ``ShardOutput``."""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from tarshards.errors import SampleError, TarshardsError
from tarshards.formats.arrow import Tables, arrow
from tarshards.formats.exporting import LOOKED_AT
from tarshards.formats.naming import Columns
from tarshards.formats.pieces import BATCH
from tarshards.index.sidecar import Index
from tarshards.parallel.forks import cached_property
from tarshards.parallel.host import available_cores
from tarshards.samples.keys import Sample
from tarshards.storage.location import Location
from tarshards.storage.manifest import Shard, Shards
from tarshards.storage.remote import Remote
from tarshards.stream.indexed_shards import IndexedShards

if TYPE_CHECKING:
    import pyarrow as pa

KEY = "__key__"
TASK = 1 << 27  # bytes of fields of a task: the size of a block or partition in Ray and Spark


class ShardTable:
    """The samples of indexed shards as rows: the column ``__key__``, text, and a column of bytes for each field.

    A sample without a field has a null. *fields* names those to read (a list of names, or words in one string). With
    *decoded*, columns are what ``export_dataset`` makes of the first 100 samples: text, numbers, lists and tensors;
    JSON is text, and images stay bytes. *remote* and *index_dir* are as for ``Opening``.

    Raises ShardIndexError if a shard has no index.
    """

    def __init__(
        self,
        urls: Any,
        *,
        fields: str | Iterable[str] | None = None,
        decoded: bool = False,
        remote: Remote | None = None,
        index_dir: str | os.PathLike[str] | None = None,
    ):
        self.decoded = decoded
        if index_dir is not None:  # tasks may run in another folder
            index_dir = Location.of(index_dir).expanduser().absolute().url
        self.samples: IndexedShards = IndexedShards(urls, fields=fields, remote=remote, index_dir=index_dir)
        self.fields: tuple[str, ...] | None = None if self.samples.fields is None else tuple(self.samples.fields)

    def __len__(self) -> int:
        return len(self.samples)

    @cached_property
    def _described(self) -> tuple[list[str], list[Shard], list[int]]:
        """The fields of all shards, the shards, and the bytes to read of each; loads every index."""
        shards = self.samples.shards
        fields: dict[str, None] = {}
        found, sizes = [], []
        for shard, index in zip(shards.named, shards.indexes()):
            fields |= dict.fromkeys(filter(self._is_read, index.fields))
            found.append(index.shard(shard._replace(url=shard.location().absolute().url)))
            sizes.append(self._size(index, 0, len(index)))
        return list(fields), found, sizes

    def _is_read(self, field: str) -> bool:
        return self.samples.fields is None or field in self.samples.fields

    def _size(self, index: Index, begin: int, end: int) -> int:
        """Return the bytes of the fields to read of the samples from *begin* to *end* of a shard."""
        first, last = index.firsts(np.array([begin, end])).tolist()
        are_read = np.array([*map(self._is_read, index.fields)], np.bool_)
        _, fields, _, sizes = index.entries(np.arange(first, last)).T
        size = int(sizes[are_read[fields]].sum())
        for member in index.elsewhere:
            if first <= member < last and are_read[index.entry(member)[1]]:
                size += index.content_size(member) - index.data_range(member)[1]
        return size

    @property
    def size(self) -> int:
        """The bytes of the fields of all samples."""
        _, _, sizes = self._described
        return sum(sizes)

    @cached_property
    def schema(self) -> pa.Schema:
        """The schema of the tables."""
        pa = arrow()
        if self.decoded:
            return Tables(Columns({}, []), self.samples[:LOOKED_AT]).schema
        fields, _, _ = self._described
        return pa.schema([(KEY, pa.string()), *((field, pa.binary()) for field in fields)])

    def tasks(self, cores: int) -> int:
        """Return the number of tasks for this number of cores."""
        return max(2 * cores, -(-self.size // TASK))

    def ranges(self, tasks: int | None = None) -> list[SampleRange]:
        """Return at most *tasks* ranges of equal length that together cover all samples in order.

        By default a range has at most about 128 MiB, and there are at least two for each core of this machine.
        """
        _, shards, sizes = self._described
        tasks = tasks or self.tasks(available_cores())
        ends = np.cumsum([0, *self.samples.counts]).tolist()
        found = []
        for begin, end in pairwise(sorted({len(self) * number // tasks for number in range(tasks + 1)})):
            first = bisect_right(ends, begin) - 1
            last = bisect_left(ends, end)
            size = 0
            for number in range(first, last):
                part = max(begin, ends[number]) - ends[number], min(end, ends[number + 1]) - ends[number]
                is_whole = part == (0, ends[number + 1] - ends[number])
                size += sizes[number] if is_whole else self._size(self.samples.shards.index(number), *part)
            own = begin - ends[first], end - ends[first]
            found.append(SampleRange(shards[first:last], *own, size, self.schema, self.fields, self.decoded))
        return found


@dataclass(frozen=True)
class SampleRange:
    """The samples from *begin* to *end* of *shards*, read by one task; *size* is the bytes of their fields."""

    shards: list[Shard]
    begin: int
    end: int
    size: int
    schema: pa.Schema
    fields: tuple[str, ...] | None
    decoded: bool

    def __len__(self) -> int:
        return self.end - self.begin

    def read(self) -> Iterator[pa.Table]:
        """Yield the samples as tables of about 2 MiB; raise TarshardsError for a faulty sample."""
        samples = IndexedShards(Shards.of(self.shards), fields=self.fields)
        block: list[Sample] = []
        size = 0
        for sample in samples[self.begin : self.end]:
            block.append(sample)
            size += sum(map(len, sample.values()))
            if size >= BATCH:
                yield self._table(block)
                block, size = [], 0
        if block:
            yield self._table(block)

    def _table(self, samples: list[Sample]) -> pa.Table:
        if self.decoded:
            tables = Tables(Columns({}, [], self.schema.serialize().to_pybytes()), ())
            return tables.table([row for row, _ in tables.rows(samples, _refuse)])
        pa = arrow()
        columns = [pa.array([sample.get(field.name) for sample in samples], field.type) for field in self.schema]
        return pa.Table.from_arrays(columns, schema=self.schema)


def _refuse(sample: Sample, error: TarshardsError) -> None:
    raise error.at(sample) from error


def samples_of(tables: Iterable[pa.Table | pa.RecordBatch]) -> Iterator[Sample]:
    """Yield the rows of *tables* as samples, without fields that are null.

    Raises SampleError if there is no column ``__key__``.
    """
    for table in tables:
        names = table.column_names
        if KEY not in names:
            raise SampleError(f"a row needs a column {KEY}; there are {', '.join(names)}")
        for row in zip(*map(_values, names, table.columns)):
            yield {name: value for name, value in zip(names, row) if value is not None}


def _values(name: str, column: Any) -> list[Any]:
    """Return the values of a column as codecs take them: lists and tensors of ``.npy`` fields as arrays."""
    pa, shape = arrow(), [-1]
    if isinstance(column.type, pa.FixedShapeTensorType):
        shape = column.type.shape
        column = column.cast(column.type.storage_type)
    elif name.rpartition(".")[2] != "npy" or not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
        values: list[Any] = column.to_pylist()
        return values
    return [each.values.to_numpy(zero_copy_only=False).reshape(shape) if each.is_valid else None for each in column]
