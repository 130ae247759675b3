"""Functions on a Dask cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from typing import Any

from tarshards.errors import OpenError
from tarshards.parallel import bounded_map
from tarshards.stream.op import op


def dask_executor(client: Any = None) -> Executor:
    """Return an executor on the cluster of *client*, a ``distributed.Client``; by default the one that is current.

    Equal calls each run, as in other executors, rather than once.
    """
    if client is None:
        try:
            from distributed import get_client
        except ImportError as error:
            raise OpenError("Dask needs a package that is not installed: pip install 'tarshards[dask]'") from error
        try:
            client = get_client()
        except ValueError as error:
            raise ValueError("there is no Dask client: begin with distributed.Client()") from error
    executor: Executor = client.get_executor(pure=False)
    return executor


@op(one_for_one=True, instead="map() runs in the workers of the loader; dask_map() is for a Stream")
def dask_map(
    samples: Iterable[Any], function: Callable[[Any], Any], *, client: Any = None, ordered: bool = True
) -> Iterator[Any]:
    """Map *function* by the workers of a Dask cluster, in order unless told otherwise.

    *client* is as in ``dask_executor``. At most four samples a thread of the cluster are under way. Breaking off
    cancels what has not begun.
    """
    executor: Any = dask_executor(client)
    threads = sum(executor._client.nthreads().values()) if client is None else sum(client.nthreads().values())
    yield from bounded_map(function, samples, executor=executor, window=4 * max(1, threads), ordered=ordered)
