"""Ray: shards to Ray datasets, Ray datasets to shards, and an executor on a cluster; the only importer of ``ray``.

For example:

    dataset = RaySource("train.shards.json").read()
    dataset.map(resize).write_datasink(RaySink("small-{shard:06d}.tar"))
    map_shards(filter_samples, "in-{000..999}.tar", "out-{000..999}.tar", executor=RayExecutor())
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future
from contextlib import suppress
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from tarshards.engines.tasks import ShardTable, samples_of
from tarshards.samples.codecs.registry import require
from tarshards.storage.location import Location
from tarshards.write.shard_output import ShardOutput

require("ray.data", extra="ray")

import ray  # noqa: E402
from ray.data import Datasink, Datasource, ReadTask  # noqa: E402
from ray.data.block import BlockAccessor, BlockMetadata  # noqa: E402

if TYPE_CHECKING:
    from tarshards.storage.manifest import Shard


class RaySource(Datasource):
    """The samples of indexed shards; ``read()`` is the dataset. The arguments are those of ``ShardTable``.

    A task reads a range of positions, so many tasks can read one large shard. Rows and bytes come from the indexes;
    they are not estimated.
    """

    def __init__(self, urls: Any, **options: Any):
        super().__init__()
        self._table = ShardTable(urls, **options)

    def read(self, tasks: int | None = None) -> ray.data.Dataset:
        """Return the dataset; *tasks* is as for ``ShardTable.ranges``, with the cores of the cluster.

        If ``ray.data.read_datasource`` chose the number, small datasets would be read in tasks or blocks of 1 MiB, and
        Ray would spend several times more CPU on each than reading it takes.
        """
        tasks = tasks or self._table.tasks(_cluster_cores())
        return ray.data.read_datasource(self, override_num_blocks=tasks)

    def get_name(self) -> str:
        return "tarshards"

    def estimate_inmemory_data_size(self) -> int:
        return self._table.size

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
    ) -> list[ReadTask]:
        tasks = []
        for part in self._table.ranges(parallelism):
            about = BlockMetadata(
                num_rows=len(part),
                size_bytes=part.size,
                input_files=[Location(shard.url).name for shard in part.shards],
                exec_stats=None,
            )
            tasks.append(ReadTask(part.read, about, schema=part.schema, per_task_row_limit=per_task_row_limit))
        return tasks


class RaySink(Datasink):
    """Writes rows with a ``__key__`` to shards, for ``write_datasink``; the arguments are those of ``ShardOutput``.

    Each task writes its own shards; with *max_samples*, Ray gives each task at least that many rows.
    """

    def __init__(self, pattern: Any, **options: Any):
        self._output = ShardOutput(pattern, **options)
        self._least = options.get("max_samples")

    def get_name(self) -> str:
        return "tarshards"

    @property
    def min_rows_per_write(self) -> int | None:
        return self._least

    def write(self, blocks: Iterable[Any], ctx: Any) -> tuple[int, list[Shard]]:
        tables = (BlockAccessor.for_block(block).to_arrow() for block in blocks)
        return ctx.task_idx, self._output.write(samples_of(tables))

    def on_write_complete(self, write_result: Any) -> None:
        self._output.commit(shards for _, shards in sorted(write_result.write_returns, key=itemgetter(0)))

    def on_write_failed(self, error: Exception) -> None:
        self._output.abort()


class RayExecutor(Executor):
    """Calls functions on a Ray cluster, for ``map_shards(executor=...)`` and the like.

    The cluster is the one that ``ray.init`` has connected to, else the one in ``RAY_ADDRESS``, else this machine.

    *options* are those of ``ray.remote``, such as ``num_cpus=2``. By default, Ray repeats a call up to three times if
    its worker dies; outputs are atomic, so no sample is missing or duplicated. A cancelled call is interrupted between
    two lines of Python, but not while it waits in C.
    """

    def __init__(self, **options: Any):
        _connect()
        self._call = ray.remote(**options)(_call) if options else ray.remote(_call)
        self._cores = options.get("num_cpus", 1)
        self._futures: set[Future[Any]] = set()

    @property
    def slots(self) -> int:
        """The number of calls that the cluster runs in parallel with its current cores."""
        return max(1, int(_cluster_cores() / self._cores)) if self._cores else 1

    def submit(self, function: Callable[..., Any], /, *args: Any, **named: Any) -> Future[Any]:
        future: Future[Any] = Future()
        reference = self._call.remote(function, args, named)

        def settle(done: Future[Any]) -> None:
            if not future.set_running_or_notify_cancel():
                return
            if (error := done.exception()) is None:
                future.set_result(done.result())
            else:
                future.set_exception(getattr(error, "cause", None) or error)

        def end(future: Future[Any]) -> None:
            self._futures.discard(future)
            if future.cancelled():
                ray.cancel(reference)

        self._futures.add(future)
        future.add_done_callback(end)
        reference.future().add_done_callback(settle)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        for future in list(self._futures):
            if cancel_futures:
                future.cancel()
            elif wait:
                with suppress(Exception):  # the future reports it
                    future.exception()


def _call(function: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    return function(*args, **named)


def _connect() -> None:
    if not ray.is_initialized():
        ray.init(log_to_driver=False, logging_level="WARNING")


def _cluster_cores() -> int:
    _connect()
    return int(ray.cluster_resources().get("CPU", 1))
