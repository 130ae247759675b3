"""Programs on the real engines: read shards, change the samples, and write them, while a worker is killed.

``python engine_programs.py ENGINE SHARDS PATTERN`` writes the keys that it reads, and a digest of each sample, to the
file "read". The change kills its own process at one sample, unless the file "killed" exists.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from hashlib import sha256
from typing import Any

SAMPLES, KILLS, LIMIT = 4000, "000700", 150  # samples of a shard that is written
MORE = {"__key__": "more", "bin": b"appended"[::-1], "cls": b"1"}  # a sample that is appended


def change(killed: str, key: str, data: bytes) -> bytes:
    """Return the bytes of a sample backwards; die at one of them, the first time."""
    if key == KILLS and not os.path.exists(killed):
        open(killed, "x").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return data[::-1]


def tell(rows: Iterable[Any]) -> None:
    with open("read", "w") as file:
        for row in rows:
            print(row["__key__"], sha256(row["bin"] + b"\0" + row["cls"]).hexdigest(), file=file)


def on_ray(shards: str, pattern: str, changed: Callable[[str, bytes], bytes]) -> None:
    import ray

    from tarshards.engines.ray import RaySink, RaySource

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    dataset = RaySource(shards).read(5)
    tell(dataset.iter_rows())

    def change_row(row: dict[str, Any]) -> dict[str, Any]:
        return {**row, "bin": changed(row["__key__"], row["bin"])}

    dataset.map(change_row).write_datasink(RaySink(pattern, max_samples=LIMIT))
    ray.data.from_items([MORE]).write_datasink(RaySink(pattern, mode="append"))


def on_spark(shards: str, pattern: str, changed: Callable[[str, bytes], bytes]) -> None:
    import pyarrow as pa
    from pyspark.sql import SparkSession

    from tarshards.engines.spark import SparkSource

    builder = SparkSession.builder.master("local[2,4]").config("spark.ui.enabled", "false")
    spark = builder.config("spark.driver.memory", "512m").getOrCreate()
    spark.dataSource.register(SparkSource)
    frame = spark.read.format("tarshards").option("tasks", 5).load(shards)
    tell(frame.collect())

    def change_batches(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            keys, data = batch.column("__key__").to_pylist(), batch.column("bin").to_pylist()
            column = pa.array(map(changed, keys, data), pa.binary())
            yield batch.set_column(batch.column_names.index("bin"), "bin", column)

    mapped = frame.mapInArrow(change_batches, frame.schema)
    mapped.write.format("tarshards").mode("overwrite").option("max_samples", LIMIT).save(pattern)
    more = spark.createDataFrame([MORE], "__key__ string, bin binary, cls binary")
    more.write.format("tarshards").mode("append").save(pattern)
    spark.stop()


def on_daft(shards: str, pattern: str, changed: Callable[[str, bytes], bytes]) -> None:
    import daft

    from tarshards.engines.daft import DaftSink, DaftSource

    frame = DaftSource(shards, tasks=5).read()
    tell(frame.iter_rows())

    @daft.func(return_dtype=daft.DataType.binary())
    def change_one(key: str, data: bytes) -> bytes:
        return changed(key, data)

    frame = frame.with_column("bin", change_one(frame["__key__"], frame["bin"]))
    frame.write_sink(DaftSink(pattern, max_samples=LIMIT))
    daft.from_pylist([MORE]).write_sink(DaftSink(pattern, mode="append"))


if __name__ == "__main__":
    engine, shards, pattern = sys.argv[1:]
    {"ray": on_ray, "spark": on_spark, "daft": on_daft}[engine](
        shards, pattern, partial(change, os.path.abspath("killed"))
    )
