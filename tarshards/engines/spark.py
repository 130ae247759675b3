"""Spark: shards as data frames of the format "tarshards"; the only importer of ``pyspark``.

For example:

    spark.dataSource.register(SparkSource)
    frame = spark.read.format("tarshards").load("train-{000..146}.tar")
    frame.write.format("tarshards").mode("overwrite").save("/shared/copy-{shard:06d}.tar")
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tarshards.engines.tasks import KEY, ShardTable, samples_of
from tarshards.samples.codecs.registry import require
from tarshards.write.shard_output import ShardOutput

require("pyspark.sql.datasource", extra="spark")

from pyspark.sql.datasource import (  # noqa: E402
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.types import BinaryType, StringType, StructField, StructType  # noqa: E402

if TYPE_CHECKING:
    import pyarrow as pa

    from tarshards.engines.tasks import SampleRange
    from tarshards.storage.manifest import Shard


class SparkSource(DataSource):
    """The format "tarshards": a column ``__key__`` and a binary column for each field.

    ``load`` takes a shard expression; the options are ``fields``, names in one string, and ``tasks``, the number of
    ranges of positions that are read. ``save`` takes a pattern, and the options ``max_samples`` and ``max_bytes`` of a
    shard; "overwrite" begins with shard 0, "append" takes numbers that no shard has.
    """

    @classmethod
    def name(cls) -> str:
        return "tarshards"

    def schema(self) -> StructType:
        fields = self._table().schema.names[1:]
        return StructType([StructField(KEY, StringType()), *(StructField(each, BinaryType()) for each in fields)])

    def _table(self) -> ShardTable:
        return ShardTable(self.options["path"], fields=self.options.get("fields"))

    def reader(self, schema: StructType) -> _SparkReader:
        tasks = self.options.get("tasks")
        return _SparkReader(self._table(), schema.names, tasks and int(tasks))

    def writer(self, schema: StructType, overwrite: bool) -> _SparkWriter:
        limits: Any = {name: int(self.options[name]) for name in ("max_samples", "max_bytes") if name in self.options}
        return _SparkWriter(ShardOutput(self.options["path"], mode="overwrite" if overwrite else "append", **limits))


class _SparkReader(DataSourceReader):
    def __init__(self, table: ShardTable, columns: list[str], tasks: int | None):
        self.table, self.columns, self.tasks = table, columns, tasks

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(part) for part in self.table.ranges(self.tasks)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        part: SampleRange = partition.value
        for table in part.read():
            yield from table.select(self.columns).to_batches()


@dataclass
class _Written(WriterCommitMessage):
    shards: list[Shard]


class _SparkWriter(DataSourceArrowWriter):
    def __init__(self, output: ShardOutput):
        self.output = output

    def write(self, iterator: Iterator[pa.RecordBatch]) -> _Written:
        return _Written(self.output.write(samples_of(iterator)))

    def commit(self, messages: list[Any]) -> None:
        self.output.commit(message.shards for message in messages if message is not None)

    def abort(self, messages: list[Any]) -> None:
        self.output.abort()
