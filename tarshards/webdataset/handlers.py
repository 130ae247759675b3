"""Helpers for every stage: error handlers, the rank and worker, and the switch for unsafe data; also ``utils``.

A handler receives an error: True continues without the failed sample or shard, False ends the stream of samples there.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, wraps
from itertools import islice
from typing import Any, NoReturn
from zlib import crc32

from tarshards.epoch.world import World
from tarshards.errors import OpError
from tarshards.stream import ops

Handler = Callable[[Exception], Any]
Limit = int | None

#: Set it to True to refuse local files, commands and pickles.
enforce_security = False


def reraise_exception(error: Exception) -> NoReturn:
    """Raise the error."""
    raise error


def ignore_and_continue(error: Exception) -> bool:
    """Continue without the failed sample or shard."""
    return True


def ignore_and_stop(error: Exception) -> bool:
    """End the stream before the failure."""
    return False


def warn_and_continue(error: Exception) -> bool:
    """Issue a warning, and continue without the failed sample or shard."""
    warnings.warn(repr(error), stacklevel=2)
    return True


def warn_and_stop(error: Exception) -> bool:
    """Issue a warning, and end the stream before the failure."""
    warnings.warn(repr(error), stacklevel=2)
    return False


class Stop(Exception):
    """A handler has ended the stream."""


class Asking:
    """The ``on_error`` of ops and readers: records errors in a ledger with *record*, and asks the *handler*."""

    def __init__(self, handler: Handler, record: Callable[[Exception], None] | None = None):
        self.handler = handler
        self.record = record

    def __call__(self, error: Exception) -> None:
        if self.record is not None:
            self.record(error)
        cause = error.__cause__ if isinstance(error, OpError) else None
        if not self.handler(cause if isinstance(cause, Exception) else error):
            raise Stop


@lru_cache(None)
def stoppable(function: Callable[..., Iterable[Any]]) -> Callable[..., Iterator[Any]]:
    """Wrap *function*, an op or another that returns samples, so that its samples end where a handler says so."""

    @wraps(function)
    def run(*args: Any, **options: Any) -> Iterator[Any]:
        try:
            yield from function(*args, **options)
        except Stop:
            return

    return run


class PipelineStage:
    """A user's own stage: its method ``run`` takes an iterator and returns one."""

    run: Callable[..., Any]


def absent(name: str, instead: str) -> Any:
    """Return a class of this *name* that cannot be instantiated: the error says what to use *instead*."""

    def refuse(self: Any, *args: Any, **options: Any) -> None:
        raise NotImplementedError(f"tarshards.webdataset has no {name}: {instead}")

    return type(name, (), {"__init__": refuse, "__doc__": f"Not offered: {instead}."})


def pytorch_worker_info(group: Any = None) -> tuple[int, int, int, int]:
    """Return rank, ranks, worker and workers of this process."""
    world = World.detect()
    return world.rank, world.world_size, world.worker, world.num_workers


def pytorch_worker_seed(group: Any = None) -> int:
    """Return the seed of this worker: different for each worker of each rank, the same in every run."""
    world = World.detect()
    return world.rank * 1000 + world.worker


def identity(x: Any) -> Any:
    """Return *x*."""
    return x


def make_seed(*args: Any) -> int:
    """Return a seed of 31 bits for the arguments: numbers, or anything else with a ``repr``.

    >>> make_seed(1, 2), make_seed("train", 7)
    (33, 699874376)
    """
    seed = 0
    for each in args:  # hash() of a str differs in every process
        seed = (seed * 31 + (hash(each) if isinstance(each, int | float) else crc32(repr(each).encode()))) & 0x7FFFFFFF
    return seed


def guess_batchsize(batch: Any) -> int:
    """Return the number of samples in a batch: the length of its first element."""
    return len(batch[0])


def repeatedly(
    source: Any, nepochs: Limit = None, nbatches: Limit = None, nsamples: Limit = None, batchsize: Any = guess_batchsize
) -> Iterator[Any]:
    """Iterate over *source* repeatedly, until one of the limits is reached."""
    seen = 0
    for batch in islice(ops.repeat(source, nepochs), nbatches):
        yield batch
        if nsamples is not None and (seen := seen + batchsize(batch)) >= nsamples:
            return
