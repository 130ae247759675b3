"""What a stream begins with: shards in a planned order or one after the other, or any iterable."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

from tarshards.epoch.world import World
from tarshards.errors import ShardIndexError, StateError, WorldError
from tarshards.index.options import Opening, field_names
from tarshards.samples.keys import is_reserved
from tarshards.samples.ledger import Ledger
from tarshards.samples.read import Sample, read_shard
from tarshards.storage.expressions import expand_shards
from tarshards.storage.location import Location

if TYPE_CHECKING:
    from tarshards.epoch.loop import Reading
    from tarshards.epoch.plan import EpochPlan, Tail
    from tarshards.index.access import SampleReader

READ_AT_ONCE = 1 << 12  # positions of a plan that are looked up together,
FIRST = 1 << 8  # and those at its beginning
VERSION = 1  # of the states


@dataclass
class Progress:
    """How far one iteration has come: *begun* positions were taken before it, those since *reading* knows.

    *delivered* counts what came out of the ops, where the source does not say how far it is.
    """

    epoch: int
    world: World
    begun: int = 0
    delivered: int = 0
    reading: Reading | None = None

    @property
    def taken(self) -> int:
        """The positions of this rank and worker that are behind."""
        return self.begun + (self.reading.taken if self.reading else 0)


class ShardSource:
    """The samples of a list of shards, shard after shard: which of them, in which order, in which rank and worker."""

    ops: Sequence[Any] = ()

    def __init__(
        self,
        urls: Sequence[str],
        *,
        shuffle: bool = False,
        seed: int = 0,
        fields: frozenset[str] | None = None,
        on_error: Callable[[Exception], Any] | None = None,
        allow_pipe: bool = False,
    ):
        self.urls = urls
        self.shuffle, self.seed, self.fields, self.allow_pipe = shuffle, seed, fields, allow_pipe
        self.ledger = Ledger.of(on_error)

    @property
    def digest(self) -> str:
        """What tells this dataset from others in a state."""
        return _digest(self.urls)

    @property
    def order(self) -> list[Any]:
        """What the order of its samples follows from, beside the epoch."""
        return [self.seed, self.shuffle]

    def iterate(self, progress: Progress) -> Iterator[Sample]:
        """Yield the samples of one worker, shard after shard."""
        for url in self.share(progress.epoch, progress.world):
            samples = read_shard(url, ledger=self.ledger, allow_pipe=self.allow_pipe)
            if self.fields is None:
                yield from samples
            else:
                for sample in samples:
                    yield {name: sample[name] for name in sample if name in self.fields or is_reserved(name)}

    def share(self, epoch: int, world: World) -> list[str]:
        """List the shards of one worker: all are permuted by (seed, epoch), then shared out.

        Raises WorldError, on every rank, if some rank would have none.
        """
        if len(self.urls) < world.world_size:
            raise WorldError(
                f"{len(self.urls)} shards for {world.world_size} ranks: every rank needs at least one shard; "
                "write more and smaller shards, or index them with tarindex"
            )
        urls = list(self.urls)
        if self.shuffle:
            random.Random(f"{self.seed}/{epoch}").shuffle(urls)
        return list(world.share(urls))


class PlannedSource:
    """The samples of indexed shards in the order of an ``EpochPlan``."""

    once = True  # each sample comes once an epoch
    ops: Sequence[Any] = ()  # what its samples have gone through before the stream's ops

    def __init__(
        self,
        shards: SampleReader,
        *,
        shuffle: bool = False,
        seed: int = 0,
        tail: Tail | None = None,
        pool: int | None = None,
        on_error: Callable[[Exception], Any] | None = None,
    ):
        from tarshards.epoch.plan import POOL, block_size

        self.shards, self.shuffle, self.seed, self.tail = shards, shuffle, seed, tail
        self.pool = POOL if pool is None else pool
        self.block = block_size(shards.counts, shards.sizes)
        self.ledger = Ledger.of(on_error)
        self.digest = _digest(shards.urls, shards.counts.astype("<i8").tobytes())
        self.ledger.know(self.digest, shards.names, shards.counts)

    @property
    def order(self) -> list[Any]:
        """What the order of its samples follows from, beside the epoch."""
        return [self.seed, self.shuffle, self.block, self.pool, self.tail]

    def plan(self, epoch: int, ranks: int, state: Mapping[str, Any] | None = None) -> EpochPlan:
        """Return the plan of *epoch*, or what *state* says is left of it."""
        from tarshards.epoch.plan import EpochPlan

        tail = self.tail or ("exact" if ranks == 1 else "pad")
        if state is not None:
            return EpochPlan.restore(self.shards.counts, state, ranks=ranks, tail=tail)
        return EpochPlan(
            self.shards.counts,
            seed=self.seed,
            epoch=epoch,
            ranks=ranks,
            block=self.block,
            pool=self.pool,
            tail=tail,
            shuffle=self.shuffle,
        )

    def joined(self, urls: Any, fields: str | Iterable[str] | None) -> PlannedSource:
        """Return this source with the fields of parallel shards."""
        from tarshards.index.access import IndexedShards
        from tarshards.index.join import JoinedShards

        source = copy.copy(self)
        source.shards = JoinedShards(self.shards, IndexedShards(urls, fields=fields))
        return source

    def samples(self, reading: Reading, positions: range, epoch: int) -> Iterator[Sample]:
        """Yield the samples at *positions* as they go into the stream's ops."""
        return reading.samples(positions)

    def iterate(self, progress: Progress) -> Iterator[Sample]:
        """Yield what is left of one worker's share: every num_workers-th position of its rank."""
        from tarshards.epoch.loop import Reading

        world = progress.world
        plan = self.plan(progress.epoch, world.world_size)
        taken = progress.begun
        share = world.positions(len(plan))[taken:]
        progress.reading = reading = Reading(self, plan, world, [share], whole=not taken)
        parts = growing(share, FIRST, READ_AT_ONCE)
        try:
            yield from chain.from_iterable(self.samples(reading, part, progress.epoch) for part in parts)
            reading.finish()
            self.ledger.audit([reading.tally()])
        finally:
            self.ledger.add(reading.tally())
            self.ledger.report()


class IterableSource:
    """Any iterable, or a function without arguments that returns one."""

    ledger = None
    ops: Sequence[Any] = ()
    order: Sequence[Any] = ()

    def __init__(self, source: Iterable[Any] | Callable[[], Iterable[Any]]):
        self.source = source
        self.spent = False

    @property
    def digest(self) -> str:
        """What tells it from others in a state: nothing is known of it."""
        return _digest([])

    def iterate(self, progress: Progress) -> Iterator[Any]:
        """Iterate from the beginning; raise TypeError where an iterator has been iterated before."""
        if callable(self.source):
            return iter(self.source())
        iterator = iter(self.source)
        if iterator is self.source:
            if self.spent:
                raise TypeError("an iterator can be streamed only once: give Stream a list, or a function to call")
            self.spent = True
        return iterator


def open_shards(
    urls: Any,
    *,
    index: bool | Literal["auto"] = "auto",
    shuffle: bool = False,
    seed: int = 0,
    tail: Tail | None = None,
    pool: int | None = None,
    fields: str | Iterable[str] | None = None,
    on_error: Callable[[Exception], Any] | None = None,
    allow_pipe: bool = False,
) -> ShardSource | PlannedSource:
    """Return the source of a shard expression: planned if *index*, or "auto" and all shards have one; else streaming.

    Raises ShardIndexError, which names one without, if only some shards have an index, or none and *index* is True.
    """
    opening = Opening(index, field_names(fields), on_error, allow_pipe)
    shards = expand_shards(urls)
    if opening.uses_index(shards):
        from tarshards.index.access import IndexedShards

        indexed = IndexedShards(shards, fields=opening.fields)
        return PlannedSource(indexed, shuffle=shuffle, seed=seed, tail=tail, pool=pool, on_error=on_error)
    if tail is not None or pool is not None:
        raise ShardIndexError(
            "tail= and pool= are of planned epochs, which need indexes; tarindex makes them",
            url=Location.of(shards[0].url).name,
        )
    return ShardSource(
        [shard.url for shard in shards],
        shuffle=shuffle,
        seed=seed,
        fields=opening.fields,
        on_error=on_error,
        allow_pipe=allow_pipe,
    )


def growing(items: Sequence[Any], first: int, most: int) -> Iterator[Any]:
    """Yield parts of *items*, each of eight times as many as the one before: what comes first is not to wait for all.

    >>> list(growing(range(30), 1, 10))
    [range(0, 1), range(1, 9), range(9, 19), range(19, 29), range(29, 30)]
    """
    begin, size = 0, first
    while begin < len(items):
        yield items[begin : begin + size]
        begin, size = begin + size, min(8 * size, most)


def check_state(state: Mapping[str, Any], digest: str, entries: tuple[str, ...]) -> None:
    """Raise StateError unless *state* is of our version and of the dataset of *digest*, and has these *entries*."""
    if not isinstance(state, Mapping) or state.get("version") != VERSION:
        raise StateError(f"not a state of version {VERSION}, which this tarshards knows")
    if state.get("digest") != digest:
        raise StateError("the state is of another dataset: of other shards, or of other numbers of samples in them")
    for name in entries:
        if name not in state:
            raise StateError(f"the state has no {name}")


def check_order(state: Mapping[str, Any], order: Sequence[Any]) -> None:
    """Raise StateError unless the samples of *state* came in an *order* like ours."""
    if list(state.get("order", ())) != list(order):
        raise StateError("the state is of another order: seed=, shuffle=, pool= and tail= are to be as they were")


def _digest(urls: Sequence[str], counts: bytes = b"") -> str:
    """Hash what a dataset is made of: the names of its shards, wherever they lie, and their counts."""
    names = "\0".join(Location.of(url).identity for url in urls)
    return blake2b(counts + names.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
