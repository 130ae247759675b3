"""Map functions over samples on a Dask cluster, or with Dask's local schedulers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from itertools import islice
from typing import Any

from tarshards.errors import OpenError, check_function
from tarshards.parallel.calls import EACH, bounded_map
from tarshards.stream.op import op

MISSING = "Dask needs a package that is not installed: pip install 'tarshards[dask]'"


def dask_executor(client: Any = None) -> Executor:
    """Return an executor on the cluster of *client*, a ``distributed.Client``; by default the current one.

    Identical calls all run, as in other executors; Dask would run them only once. Raises ValueError if there is no
    client, and OpenError if Dask is missing.
    """
    client = client or _current_client()
    if client is None:
        raise ValueError("there is no Dask client: begin with distributed.Client()")
    executor: Executor = client.get_executor(pure=False)
    return executor


def _current_client() -> Any:
    try:
        from distributed import get_client
    except ImportError as error:
        raise OpenError(MISSING) from error
    try:
        return get_client()
    except ValueError:
        return None


@op(one_for_one=True, instead="map() runs in the workers of the loader; dask_map() is for a Stream")
def dask_map(
    samples: Iterable[Any], function: Callable[[Any], Any], *, client: Any = None, ordered: bool = True
) -> Iterator[Any]:
    """Map *function* on the workers of a Dask cluster, in order unless *ordered* is False.

    *client* is as in ``dask_executor``. At most four samples per thread of the cluster are in flight. Closing the
    iterator cancels calls that have not begun.

    Without a client, Dask's local scheduler maps groups of four samples per thread, one group after the other, in
    order. It uses threads of this process unless ``dask.config`` names another scheduler, such as "processes". Raises
    OpenError if Dask is missing.
    """
    check_function(function, "dask_map")
    return _dask_map(samples, function, client, ordered)


def _dask_map(samples: Iterable[Any], function: Callable[[Any], Any], client: Any, ordered: bool) -> Iterator[Any]:
    client = client or _current_client()
    if client is None:
        yield from _local_map(samples, function)
        return
    window = EACH * max(1, sum(client.nthreads().values()))
    yield from bounded_map(function, samples, executor=dask_executor(client), window=window, ordered=ordered)


def _local_map(samples: Iterable[Any], function: Callable[[Any], Any]) -> Iterator[Any]:
    import dask
    from dask.system import CPU_COUNT

    window = EACH * (dask.config.get("num_workers", None) or CPU_COUNT)
    iterator = iter(samples)
    while part := list(islice(iterator, window)):
        calls = [dask.delayed(_SettledCall(function, sample), pure=False, traverse=False)() for sample in part]
        for result, error in dask.compute(*calls, traverse=False):
            if error is not None:
                raise error
            yield result


class _SettledCall:
    """A call that returns (result, None) or (None, error), so that the results before an error are delivered.

    It also prevents Dask from searching the sample for Dask collections.
    """

    def __init__(self, function: Callable[[Any], Any], sample: Any):
        self.function, self.sample = function, sample

    def __call__(self) -> tuple[Any, Exception | None]:
        try:
            return self.function(self.sample), None
        except Exception as error:
            return None, error
