"""Daft: shards as a data frame, and data frames to shards; the only importer of ``daft``.

For example:

    frame = DaftSource("train-{000..146}.tar").read()
    frame.write_sink(DaftSink("copy-{shard:06d}.tar"))
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

from tarshards.engines.tasks import ShardTable, samples_of
from tarshards.samples.codecs.registry import require
from tarshards.storage.location import Location
from tarshards.write.shard_output import ShardOutput

require("daft", extra="daft")

from daft import DataType, Schema  # noqa: E402
from daft.io import DataSink, DataSource, DataSourceTask  # noqa: E402
from daft.io.sink import WriteResult  # noqa: E402
from daft.recordbatch import MicroPartition, RecordBatch  # noqa: E402

if TYPE_CHECKING:
    from tarshards.engines.tasks import SampleRange
    from tarshards.storage.manifest import Shard


class DaftSource(DataSource):
    """The samples of indexed shards; ``read()`` is the data frame. The arguments are those of ``ShardTable``.

    *tasks* is the number of ranges of positions that are read, as for ``ShardTable.ranges``.
    """

    def __init__(self, urls: Any, *, tasks: int | None = None, **options: Any):
        self._table, self._tasks = ShardTable(urls, **options), tasks

    @property
    def name(self) -> str:
        return "tarshards"

    @property
    def schema(self) -> Schema:
        return Schema.from_pyarrow_schema(self._table.schema)

    async def get_tasks(self, pushdowns: Any) -> AsyncIterator[DataSourceTask]:
        for part in self._table.ranges(self._tasks):
            yield _DaftTask(part)


class _DaftTask(DataSourceTask):
    def __init__(self, part: SampleRange):
        self._part = part

    @property
    def schema(self) -> Schema:
        return Schema.from_pyarrow_schema(self._part.schema)

    async def read(self) -> AsyncIterator[RecordBatch]:
        for table in self._part.read():
            yield RecordBatch.from_arrow_table(table)


class DaftSink(DataSink[list[Any]]):
    """Writes rows with a ``__key__`` to shards, for ``write_sink``; the arguments are those of ``ShardOutput``.

    Each partition that Daft writes becomes at least one shard; ``frame.into_batches(n)`` makes larger partitions.
    """

    def __init__(self, pattern: Any, **options: Any):
        self._output = ShardOutput(pattern, **options)

    def name(self) -> str:
        return "tarshards"

    def schema(self) -> Schema:
        return Schema.from_pydict({"shard": DataType.string(), "samples": DataType.int64()})

    def write(self, micropartitions: Iterator[MicroPartition]) -> Iterator[WriteResult[list[Shard]]]:
        for partition in micropartitions:
            shards = self._output.write(samples_of([partition.to_arrow()]))
            yield WriteResult(
                shards, sum(shard.size or 0 for shard in shards), sum(shard.samples or 0 for shard in shards)
            )

    def finalize(self, write_results: list[WriteResult[list[Shard]]]) -> MicroPartition:
        shards = self._output.commit(each.result for each in write_results)
        names = [Location(shard.url).name for shard in shards]
        rows = {"shard": names, "samples": [shard.samples for shard in shards]}
        return MicroPartition.from_pydict(rows)
