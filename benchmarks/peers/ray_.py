"""Ray Data, plain tars: its reader of webdataset shards, in the tasks of a local cluster; batches as Arrow tables."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import ray
import ray.data
from sets import FIELDS, Data

PACKAGES = ("ray[data]==2.60.0", "numpy==2.4.6")
SYSTEM = ()
OWN = False
THREADS = ("stream",)  # the cluster's processes always run, so 0 workers is not possible
FORM = {"stream": "rows"}
CANNOT = {
    "arrays": "measured as a stream only: the overhead of its tasks prevails",
    "decode": "measured as a stream only: the overhead of its tasks prevails",
    "crop": "measured as a stream only: the overhead of its tasks prevails",
    "cold": "measured as a stream only: the overhead of its tasks prevails",
    "random": "its datasets deliver epochs; no access by number",
    "write": "measured as a stream only: the overhead of its tasks prevails",
    "index": "has no index",
    "resume": "its iterator has no state; an epoch starts again",
    "first": "measured as a stream only: its cluster alone takes seconds to start",
}
POOL = 1000
BATCHES = {"raw-110k": 64}  # of small samples 1,024

logging.getLogger("ray").setLevel(logging.ERROR)
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=1 << 30)
ray.data.DataContext.get_current().enable_progress_bars = False


class Batches:
    """An epoch for each iteration: shards in another order, and samples by way of a pool, if shuffled."""

    def __init__(self, data: Data, workers: int, *, shuffled: bool):
        if "://" in data.urls[0]:
            raise NotImplementedError("measured with local shards only")
        options = {"shuffle": "files"} if shuffled else {}
        self.dataset = ray.data.read_webdataset(list(data.urls), decoder=None, concurrency=workers, **options)
        self.size, self.pool = BATCHES.get(data.name, 1024), POOL if shuffled else None

    def __iter__(self) -> Iterator[Any]:
        options = {"local_shuffle_buffer_size": self.pool} if self.pool else {}
        return iter(self.dataset.iter_batches(batch_size=self.size, batch_format="pyarrow", **options))


def stream(data: Data, *, shuffled: bool, workers: int) -> Batches:
    return Batches(data, workers, shuffled=shuffled)


def plain(task: str, item: Any, data: Data) -> Iterator[tuple[bytes, int]]:
    columns = (item[field].to_pylist() for field in FIELDS[data.kind])
    yield from zip(map(b"".join, zip(*columns)), map(int, item["cls"].to_pylist()))


def size(task: str, item: Any) -> int:
    return item.num_rows
