"""A source and its ops: fluent, immutable, picklable, and repeatedly iterable."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Generic, Self

from tarshards.epoch.world import World
from tarshards.errors import StateError, check_function, shortened, whole_number
from tarshards.samples.codecs.decoding import Decoding, decoding_of
from tarshards.samples.grouping import closed_at_exit
from tarshards.samples.keys import Sample
from tarshards.samples.ledger import ErrorPolicy, Ledger, PassOf
from tarshards.storage.redaction import redacted
from tarshards.stream import ops
from tarshards.stream.dask import dask_map
from tarshards.stream.following import follow, follow_each, follow_part, is_followed
from tarshards.stream.op import BoundOp
from tarshards.stream.other_names import no_attribute
from tarshards.stream.replaying import TOGETHER, key_of, replay
from tarshards.stream.sample_ops import Item, SampleOps, converting_method_of, method_of
from tarshards.stream.shard_options import ShardOptions, takes
from tarshards.stream.sources import (
    IterableSource,
    PlannedSource,
    Progress,
    check_order,
    check_state,
    open_shards,
    version_of,
)

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from tarshards.epoch.loop import Part


ENDLESS = 1 << 64  # passes in an epoch that repeats forever; more than any iteration, or ``mix``, reaches


class EpochCounter:
    """Counts the epochs of one stream."""

    def __init__(self, epoch: int = 0):
        self.epoch: int = epoch

    def begin(self, world: World, epoch: int | None = None) -> int:
        """Begin the next epoch, or *epoch*, and return its number."""
        if epoch is None:
            epoch = self.epoch
        self.epoch = epoch + 1
        return epoch

    @property
    def next(self) -> int:
        """The number of the next epoch."""
        return self.epoch

    def set(self, epoch: int) -> None:
        """Set the next epoch."""
        self.epoch = epoch

    def copy(self) -> EpochCounter:
        """Return an independent counter that continues from here."""
        return EpochCounter(self.epoch)


class Stream(SampleOps, Generic[Item]):
    """A source and the ops applied to it. Every op returns a new stream; the old one is unchanged.

    Each iteration is the next epoch, which changes the shuffled order; it begins to read when its first sample is
    requested. Leaving an iteration early closes its files. A stream by itself delivers all samples on every rank,
    unless ``world=`` selects a part; loaders find their rank and deliver its part. Loaders use the attributes *source*,
    *ops*, *epochs* and *world*, and ``iterate``, ``read`` and ``report``.

    >>> Stream(range(10)).filter(lambda x: x % 2).map(lambda x: x * x).batched(3).collect()
    [array([ 1,  9, 25]), array([49, 81])]
    """

    def __init__(self, source: Iterable[Item] | Callable[[], Iterable[Item]]):
        is_iterable = callable(source) or hasattr(source, "__iter__") or hasattr(source, "__getitem__")
        if not is_iterable or isinstance(source, str | bytes | os.PathLike):
            advice = "an iterable or a function that returns one; Stream.from_shards(urls) reads shards"
            raise TypeError(f"a Stream is not made of {redacted(shortened(source))} but of {advice}")
        self.source: Any = IterableSource(source)
        self.ops: tuple[BoundOp, ...] = ()
        self.epochs: EpochCounter = EpochCounter()
        self._world: World | None = None
        self._begin_state()

    def _begin_state(self) -> None:
        self._resumed: dict[str, Any] | None = None
        self._progress: Progress | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_progress": None}  # that of a pass under way, which a copy is not part of

    @classmethod
    @takes(ShardOptions)
    def from_shards(cls, given: ShardOptions) -> Stream[Sample]:
        """Stream the samples of *urls*, a shard expression or a list of them.

        With indexes, the epoch is planned: see ``EpochPlan``. Without indexes, shards are read one after the other.
        *world* selects the part of one rank and worker. Without it, the stream delivers all samples on every rank, and
        a loader over it, such as ``ArrayLoader``, the part of its rank. *on_error* also applies to the ops that take
        it.

        Raises UrlError for an expression that matches nothing, and ShardIndexError if a shard lacks an index that is
        required or that other shards have.
        """
        stream: Stream[Sample] = Stream(())
        stream.source = open_shards(given.urls, given.opening, given.epoch)
        stream._world = World.of(given.world)
        return stream

    filter: Final = method_of(ops.filter)
    batched: Final = converting_method_of(ops.batched)
    unbatched: Final = converting_method_of(ops.unbatched)
    sliding: Final = converting_method_of(ops.sliding)
    flatten: Final = converting_method_of(ops.flatten)
    pipe: Final = converting_method_of(ops.pipe)
    shuffle: Final = method_of(ops.shuffle)
    take: Final = method_of(ops.take)
    skip: Final = method_of(ops.skip)
    repeat: Final = method_of(ops.repeat)
    enumerate: Final = converting_method_of(ops.enumerate)
    async_map: Final = converting_method_of(ops.async_map)
    dask_map: Final = converting_method_of(dask_map)
    with_length: Final = method_of(ops.with_length)
    progress: Final = method_of(ops.progress)
    monitor: Final = method_of(ops.monitor)
    fields: Final = method_of(ops.fields)
    rekey: Final = method_of(ops.rekey)

    def compose(self, *functions: Callable[[Any], Any]) -> Any:
        """Apply *functions*, each from a stream to a stream, to this stream, in order, and return the result.

        Raises TypeError for a function that does not return a stream.

        >>> def evens(stream):
        ...     return stream.filter(lambda number: number % 2 == 0)
        >>> Stream(range(6)).compose(evens, lambda stream: stream.take(2)).collect()
        [0, 2]
        """
        stream = self
        for function in functions:
            check_function(function, "compose")
            stream = function(stream)
            if not isinstance(stream, Stream):
                name = getattr(function, "__qualname__", shortened(function))
                raise TypeError(f"compose: {name} returned {shortened(stream)}, and not a stream")
        return stream

    def collect(self) -> list[Item]:
        """Iterate once and return the samples as a list."""
        return list(self)

    @property
    def ledger(self) -> Ledger:
        """The ledger of the stream's shards; raises AttributeError for a stream that has none."""
        if self.source.ledger is None:
            raise AttributeError("ledger")  # `__getattr__` words the message
        return self.source.ledger

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration; later iterations count from there."""
        self.epochs.set(whole_number("epoch", epoch, 0))

    def check_decoding(self) -> None:
        """Log a warning of names in the first ``decode`` that match no field of the first shard, if these are known."""
        for each in (*self.source.ops, *self.ops):
            if each.function is ops.decode and isinstance(found := decoding_of(*each.args, **each.options), Decoding):
                if found.unseen:
                    found.expect(self.source.first_fields())
                return
            if each.traits.leaves_out is None:  # it may rename fields
                return

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(no_attribute(type(self).__name__, name), name=name, obj=self)

    def __getitem__(self, index: Any) -> Any:
        kind = type(self).__name__
        instead = "" if kind == "ShardDataset" else "; torch's DataLoader takes a ShardDataset"
        cure = "IndexedShards(urls)[n] reads sample n of shards, and skip(n) begins there"
        raise TypeError(f"a {kind} is iterated, not indexed: {cure}{instead}")

    def __len__(self) -> int:
        """Return the number of samples that an epoch delivers to this rank, or the value of ``with_length``.

        Raises TypeError if shards or ops leave it unknown.
        """
        for op in reversed(self.ops):
            if op.function is ops.with_length:
                length: int = op.argument("length")
                return length
            if not op.traits.one_for_one:
                raise TypeError(
                    f"{op.name} changes the number of samples, so there is no length; with_length(n) sets one"
                )
        if not isinstance(self.source, PlannedSource):
            cure = "" if self.source.ledger is None else "; index the shards with `tarindex`"
            raise TypeError(f"only planned epochs have a length{cure}")
        for op in self.source.ops:
            if not op.traits.one_for_one:
                raise TypeError(f"{op.name} changes the number of samples, so there is no length")
        world = self.world
        size = len(self.source.plan(0, world.world_size))
        return len(range(world.rank, size, world.world_size))

    def __bool__(self) -> bool:
        return True  # even without a length

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the latest iteration, for ``load_state_dict`` on the same rank and worker."""
        version = version_of(None, self.source)
        progress = self._progress or Progress(self.epochs.next, self.world, version=version)
        if (resumed := self._resumed or progress.replayed) is not None:
            return dict(resumed)
        source = self.source.as_of(progress.version)
        state = {"version": progress.version, "digest": source.digest, "epoch": progress.epoch}
        state["order"] = list(source.order)
        taken = {"taken": progress.taken} if self._is_resumable() else progress.delivered.state()
        saved = [progress.world.rank, progress.world.world_size, progress.world.worker, progress.world.num_workers]
        return state | taken | {"world": saved}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next iteration resume at *state*; raise StateError for the state of another dataset.

        If the shards are indexed and no op holds samples back, reading continues at the position. Otherwise the
        iteration starts over and skips the samples that were delivered.
        """
        check_state(state, self.source, ["epoch"])
        if "world" not in state:
            raise StateError("the state has no world: it is of a loader, and this is a stream of samples")
        check_order(state, self.source)
        count, other = ("taken", "delivered") if self._is_resumable() else ("delivered", "taken")
        if count not in state and other in state:
            raise StateError("the state is of a stream with other ops")
        check_state(state, self.source, [count])
        saved = state["world"]
        if not isinstance(saved, list | tuple) or len(saved) != 4 or not all(type(number) is int for number in saved):
            raise StateError(f"the state has the world {shortened(saved)}, which is not four numbers")
        self._resumed = dict(state)

    def __iter__(self) -> Iterator[Item]:
        self._progress = None
        # A worker begins the epoch now, not at the first sample, so that the states of all workers are of one epoch.
        return closed_at_exit(self._run(None if self.world.iterator is None else self._begin()))

    def _begin(self) -> Progress:
        """Begin the next epoch, or the rest of a loaded state's epoch."""
        world = self.world
        state = self._resumed or {}
        if state:
            _check_world(state["world"], world)
        self._resumed = None
        epoch = self.epochs.begin(world, state.get("epoch"))
        replayed = state if state.get("delivered") else None
        self._progress = Progress(epoch, world, state.get("taken", 0), version_of(state, self.source), replayed)
        return self._progress

    def _is_resumable(self) -> bool:
        """Whether the position of the source is the position of the stream."""
        return isinstance(self.source, PlannedSource) and all(op.traits.resumable for op in self.ops)

    @property
    def world(self) -> World:
        """The rank and worker to deliver to."""
        return self._world or World()

    @property
    def is_bare(self) -> bool:
        """Whether no ``world=`` was given, so that a loader finds its rank."""
        return self._world is None

    def _run(self, progress: Progress | None) -> Generator[Any, None, None]:
        progress = progress or self._begin()
        samples: Iterable[Any] = ()
        try:
            samples = self._iterate(len(self.ops), progress)
            if self._is_resumable():
                yield from samples
            else:
                samples = iter(samples)
                if progress.replayed is not None:
                    progress.delivered = replay(samples, progress.replayed, (*self.source.ops, *self.ops))
                    progress.replayed = None
                is_over = False
                while not is_over:
                    progress.delivered = progress.delivered.together()
                    keys: list[str] = progress.delivered.keys
                    note = keys.append
                    for sample in islice(samples, TOGETHER):
                        try:
                            key = sample["__key__"] if type(sample) is dict else None
                        except KeyError:
                            key = None
                        note(key if type(key) is str else key_of(sample))  # faster than calling it for each
                        yield sample
                    is_over = len(keys) < TOGETHER
            for op in self.ops:
                if op.function is ops.decode and isinstance(found := decoding_of(*op.args, **op.options), Decoding):
                    found.warn()
        finally:
            samples = ()  # without references the generators close, which completes their counts
            self.report()

    def iterate(
        self, epoch: int, world: World, version: int | None = None, within: PassOf | None = None
    ) -> Iterator[Any]:
        """Yield the samples of a whole epoch that one worker delivers; *version* is that of their order.

        The ledger counts them as those of the pass *within* which they are, by default one of its own.
        """
        version = self.source.newest if version is None else version
        return self._iterate(len(self.ops), Progress(epoch, world, version=version, within=within))

    def read(self, part: Part, epoch: int) -> Iterable[Any]:
        """Return the samples of *part* of a planned epoch, after the ops; *part* counts those that ops leave out."""
        source = self.source
        samples = source.read(part, epoch)
        return (
            follow_part(self.ops, samples, epoch, source.seed, source.ledger, part.leave_out) if self.ops else samples
        )

    def read_each(self, part: Part, epoch: int) -> dict[int, Any]:
        """Return the results of ``read`` by the rows of their samples in *part*; all ops must be *per_sample*."""
        source = self.source
        samples = source.read(part, epoch)

        def row() -> int:
            return part.taken - 1

        if not self.ops:
            return {row(): sample for sample in samples}
        return follow_each(self.ops, samples, row, epoch, source.seed, source.ledger, part.leave_out)

    def report(self) -> None:
        """In a worker process: send the counts of all ledgers to the parent process."""
        for ledger in self._ledgers():
            ledger.report()

    def _iterate(self, depth: int, progress: Progress) -> Iterator[Any]:
        """Iterate over the source and the first *depth* ops."""
        if depth == 0:
            return self.source.iterate(progress)
        op, ledger = self.ops[depth - 1], self.source.ledger
        if op.function is ops.repeat:
            times = op.argument("times")
            progress = progress.at(progress.epoch * (ENDLESS if times is None else times))
        elif ledger is not None and depth <= self._followed:
            begin = depth - 1
            while begin and self.ops[begin - 1].function is not ops.repeat:
                begin -= 1
            samples = self._iterate(begin, progress)
            return follow(self.ops[begin:depth], samples, progress.epoch, self.source.seed, ledger, progress.of)
        return iter(op.run(_Upstream(self, depth - 1, progress), progress.epoch, self.source.seed, ledger))

    @property
    def is_followed(self) -> bool:
        """Whether the outcome of each sample in the ops is known, so that the ledger counts it."""
        return self._followed == len(self.ops)

    @property
    def _followed(self) -> int:
        """The number of leading ops in which the ledger counts the outcome of each sample."""
        if not all(
            is_followed(op) and not op.traits.gathers for op in self.source.ops if op.function is not ops.repeat
        ):
            return 0
        for number, op in enumerate(self.ops):
            if op.traits.gathers and is_followed(op):
                return number + 1
            if op.function is not ops.repeat and not is_followed(op):
                return number
        return len(self.ops)

    def join(self, urls: Any, *, fields: str | Iterable[str] | None = None) -> Self:
        """Add to each sample the *fields* (by default all) of the sample with the same key in parallel shards.

        Both datasets need indexes and the same number of shards, which are paired in order. Raises TypeError if this
        stream has no indexes or already has ops, and SampleError for a sample without a partner or a field that both
        have.
        """
        if not isinstance(self.source, PlannedSource):
            raise TypeError("join requires indexed shards; run `tarindex` first")
        if self.ops:
            raise TypeError("join comes before the ops")
        return self._over(self.source.joined(urls, fields))

    def select(
        self,
        where: str | Callable[[Any], Any] | None = None,
        *,
        keys: str | os.PathLike[str] | Iterable[str] | None = None,
        drop: str | os.PathLike[str] | Iterable[str] | None = None,
        fields: str | Iterable[str] | None = None,
        on_error: ErrorPolicy = None,
        executor: Executor | None = None,
    ) -> Self:
        """Return a dataset of the selected samples: an epoch covers only these, and reads no others.

        *where* is a condition (see ``Condition``), or a function of a sample whose fields are bytes. Unless a condition
        names columns, which answer it, all samples are read once, now, but only *fields* of them, in *executor* if
        given. *keys* are the keys of the samples to keep, *drop* of those to leave out: a list, or the name of a file
        with one key per line, as `targrep` writes it. A sample must meet all criteria; a selection can be selected from
        again. Order, equal steps and resuming are as if the shards had only the selected samples.

        Raises TypeError without indexes or after ops, and SampleError if no sample has one of *keys*, or none is left.
        Errors of samples, and of *where*, are raised, or go to *on_error*, and these samples are left out.
        """
        if not isinstance(self.source, PlannedSource):
            raise TypeError("select requires indexed shards; run `tarindex` first")
        if self.ops:
            raise TypeError("select comes before the ops")
        if where is None and keys is None and drop is None:
            raise TypeError("select takes a condition, keys= or drop=")
        from tarshards.epoch.selection import SampleChoice

        return self._over(self.source.selected(SampleChoice(where, keys, drop, fields, on_error, executor)))

    def _over(self, source: Any) -> Self:
        """Return a stream like this one, over another source and without ops."""
        stream = copy.copy(self)
        stream.source, stream.ops, stream.epochs = source, (), type(self.epochs)(self.epochs.next)
        stream._begin_state()
        return stream

    def _then(self, op: BoundOp) -> Stream[Any]:
        stream = copy.copy(self)
        stream.ops = (*self.ops, op)
        stream.epochs = self.epochs.copy()
        stream._begin_state()
        return stream

    def _ledgers(self) -> list[Ledger]:
        handlers = [self.source.ledger, *(op.options.get("on_error") for op in (*self.source.ops, *self.ops))]
        return [handler for handler in handlers if isinstance(handler, Ledger)]


def check_dataset(dataset: Any, loader: str, kind: type[Stream] = Stream) -> None:
    """Raise TypeError, which names the *loader*, unless *dataset* is a *kind* of stream."""
    if not isinstance(dataset, kind):
        words = f"a {kind.__name__}" if kind is not Stream else "a ShardDataset or a Stream"
        raise TypeError(f"{loader} takes {words}, such as ShardDataset(urls), not {redacted(shortened(dataset))}")


class _Upstream:
    """The input of an op; each iteration over it is the next epoch."""

    def __init__(self, stream: Stream, depth: int, progress: Progress):
        self.stream, self.depth, self.progress = stream, depth, progress

    def __iter__(self) -> Iterator[Any]:
        progress, self.progress = self.progress, self.progress.at(self.progress.epoch + 1)
        return self.stream._iterate(self.depth, progress)


def _check_world(saved: list[int], world: World) -> None:
    here = [world.rank, world.world_size, world.worker, world.num_workers]
    if list(saved) != here:
        raise StateError(
            "the state is of rank {} of {}, worker {} of {}, and this is rank {} of {}, worker {} of {}; "
            "ShardLoader resumes on any number".format(*saved, *here)
        )
