"""A source and its ops: fluent, immutable, picklable, and iterable again and again."""

from __future__ import annotations

import copy
import inspect
import random
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Any, NamedTuple, Self

from tarshards import ops
from tarshards.errors import WorldError
from tarshards.ledger import Ledger
from tarshards.samples import Sample, read_shard
from tarshards.urls import expand_urls
from tarshards.world import World


class ShardSource:
    """The samples of a list of shards: which of them, in which order, in which rank and worker."""

    def __init__(
        self,
        urls: Any,
        *,
        shuffle: bool = False,
        seed: int = 0,
        on_error: Callable[[Exception], Any] | None = None,
        allow_pipe: bool = False,
    ):
        self.urls = expand_urls(urls)
        self.shuffle, self.seed, self.allow_pipe = shuffle, seed, allow_pipe
        self.ledger = Ledger.of(on_error)

    def iterate(self, epoch: int, world: World) -> Iterator[Sample]:
        """Yield the samples of one worker, shard after shard."""
        for url in self.share(epoch, world):
            yield from read_shard(url, ledger=self.ledger, allow_pipe=self.allow_pipe)

    def share(self, epoch: int, world: World) -> list[str]:
        """List the shards of one worker: all are permuted by (seed, epoch), then shared out.

        Raises WorldError, on every rank, if some rank would have none.
        """
        if len(self.urls) < world.world_size:
            raise WorldError(
                f"{len(self.urls)} shards for {world.world_size} ranks: every rank needs at least one shard; "
                "write more and smaller shards"
            )
        urls = list(self.urls)
        if self.shuffle:
            random.Random(f"{self.seed}/{epoch}").shuffle(urls)
        return list(world.share(urls))


class IterableSource:
    """Any iterable, or a function without arguments that returns one."""

    ledger = None

    def __init__(self, source: Iterable[Any] | Callable[[], Iterable[Any]]):
        self.source = source
        self.spent = False

    def iterate(self, epoch: int, world: World) -> Iterator[Any]:
        """Iterate from the beginning; raise TypeError where an iterator has been iterated before."""
        if callable(self.source):
            return iter(self.source())
        iterator = iter(self.source)
        if iterator is self.source:
            if self.spent:
                raise TypeError("an iterator can be streamed only once: give Stream a list, or a function to call")
            self.spent = True
        return iterator


class EpochCounter:
    """Counts the epochs of one stream."""

    def __init__(self, epoch: int = 0):
        self.epoch = epoch

    def begin(self, world: World) -> int:
        """Return the epoch that now begins."""
        self.epoch += 1
        return self.epoch - 1

    def set(self, epoch: int) -> None:
        """Let the next epoch be *epoch*."""
        self.epoch = epoch

    def copy(self) -> EpochCounter:
        """Return a counter of its own that goes on from here."""
        return EpochCounter(self.epoch)


class BoundOp(NamedTuple):
    """An op and its arguments; *context* names those that the stream supplies."""

    function: Callable[..., Iterable[Any]]
    args: tuple[Any, ...]
    options: dict[str, Any]
    context: tuple[str, ...]


def _op(function: Callable[..., Iterable[Any]]) -> Callable[..., Any]:
    parameters = inspect.signature(function).parameters
    context = tuple(name for name in ("epoch", "on_error") if name in parameters)

    @wraps(function)
    def method(self: Stream, *args: Any, **options: Any) -> Any:
        inspect.signature(function).bind(None, *args, **options)
        return self._then(BoundOp(function, args, options, context))

    return method


class Stream:
    """A source and the ops applied to it. Every op returns a new stream; the old one is unchanged.

    Each iteration begins at the source again and is an epoch further, which reorders what is shuffled. Breaking one
    off closes what it opened.

    >>> Stream(range(10)).filter(lambda x: x % 2).map(lambda x: x * x).batched(3).collect()
    [array([ 1,  9, 25]), array([49, 81])]
    """

    def __init__(self, source: Iterable[Any] | Callable[[], Iterable[Any]]):
        self._source: Any = IterableSource(source)
        self._ops: tuple[BoundOp, ...] = ()
        self._epochs = EpochCounter()
        self._world = World()

    @staticmethod
    def from_shards(
        urls: Any,
        *,
        shuffle: bool = False,
        seed: int = 0,
        on_error: Callable[[Exception], Any] | None = None,
        world: World | None = None,
        allow_pipe: bool = False,
    ) -> Stream:
        """Stream the samples of a shard expression, or of a list of them.

        *shuffle* permutes the shards by (*seed*, epoch). Errors of a shard, and of the ops that take ``on_error``, are
        raised or given to *on_error*. *world* picks the shards of one rank and worker (by default all);
        *allow_pipe* lets ``pipe:`` URLs run their commands. Raises UrlError for an expression that stands for nothing.
        """
        stream = Stream(())
        stream._source = ShardSource(urls, shuffle=shuffle, seed=seed, on_error=on_error, allow_pipe=allow_pipe)
        stream._world = world or World()
        return stream

    map = _op(ops.map)
    filter = _op(ops.filter)
    map_fields = _op(ops.map_fields)
    keep_fields = _op(ops.keep_fields)
    rename_fields = _op(ops.rename_fields)
    select_fields = _op(ops.select_fields)
    to_tuple = _op(ops.to_tuple)
    decode = _op(ops.decode)
    batched = _op(ops.batched)
    flatten = _op(ops.flatten)
    shuffle = _op(ops.shuffle)
    take = _op(ops.take)
    skip = _op(ops.skip)
    repeat = _op(ops.repeat)
    enumerate = _op(ops.enumerate)
    async_map = _op(ops.async_map)
    progress = _op(ops.progress)
    monitor = _op(ops.monitor)

    def collect(self) -> list[Any]:
        """Iterate once and return the samples as a list."""
        return list(self)

    @property
    def ledger(self) -> Ledger:
        """The account of the stream's shards; raises TypeError for a stream that has none."""
        if self._source.ledger is None:
            raise TypeError("this stream does not come from shards and keeps no ledger")
        return self._source.ledger

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be *epoch*; those after it count on."""
        self._epochs.set(epoch)

    def __iter__(self) -> Iterator[Any]:
        return self._run(self._epochs.begin(self._here()))

    def _here(self) -> World:
        """The rank and worker to deliver to."""
        return self._world

    def _run(self, epoch: int) -> Iterator[Any]:
        try:
            yield from self._iterate(len(self._ops), epoch)
        finally:
            for ledger in self._ledgers():
                ledger.report()

    def _iterate(self, depth: int, epoch: int) -> Iterator[Any]:
        """Iterate over the source and the first *depth* ops."""
        if depth == 0:
            return self._source.iterate(epoch, self._here())
        function, args, options, context = self._ops[depth - 1]
        if function is ops.repeat:
            epoch *= inspect.signature(ops.repeat).bind(None, *args, **options).arguments.get("times") or 1
        supplied = {"epoch": epoch, "on_error": self._source.ledger}
        options = {**{name: supplied[name] for name in context}, **options}
        return iter(function(_Upstream(self, depth - 1, epoch), *args, **options))

    def _then(self, op: BoundOp) -> Self:
        stream = copy.copy(self)
        stream._ops = (*self._ops, op)
        stream._epochs = self._epochs.copy()
        return stream

    def _ledgers(self) -> list[Ledger]:
        handlers = [self._source.ledger] + [op.options.get("on_error") for op in self._ops]
        return [handler for handler in handlers if isinstance(handler, Ledger)]


class _Upstream:
    """What an op is given to iterate over; each iteration of it is one epoch further."""

    def __init__(self, stream: Stream, depth: int, epoch: int):
        self.stream, self.depth, self.epoch = stream, depth, epoch

    def __iter__(self) -> Iterator[Any]:
        self.epoch += 1
        return self.stream._iterate(self.depth, self.epoch - 1)
