"""Sources of streams: shards in a planned order or one after the other, or any iterable."""

from __future__ import annotations

import copy
import logging
import random
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from hashlib import blake2b
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

from tarshards.epoch.epoch_options import EpochOptions
from tarshards.epoch.world import World
from tarshards.errors import (
    OpenError,
    SampleError,
    ShardIndexError,
    StateError,
    TarshardsError,
    WorldError,
    shortened,
    visible,
)
from tarshards.index.inventory import find_indexed, has_ranges
from tarshards.index.opening_options import Opening
from tarshards.samples.keys import Sample, split_of
from tarshards.samples.ledger import ErrorPolicy, Ledger, PassOf
from tarshards.storage.expressions import find_shards
from tarshards.storage.location import Location, identities_of
from tarshards.storage.manifest import Shards, collector_paused
from tarshards.stream import ops
from tarshards.stream.following import Count, follow
from tarshards.stream.op import BoundOp
from tarshards.stream.replaying import Delivered

if TYPE_CHECKING:
    from tarshards.epoch.loop import EpochLoop, Part, Shares
    from tarshards.epoch.plan import PlannedEpoch
    from tarshards.epoch.selection import SampleChoice, Selection
    from tarshards.index.access import SampleReader

VERSION = 2  # of states and their order; in version 1, small datasets were also permuted by blocks
BUFFERED = 3  # the same, for shuffled shards without indexes; before, only the order of the shards was shuffled
SPREAD = 4  # the same, for indexes: pools follow from sizes, and mixtures are permuted, so that each rank sees all
BUFFER = 1000  # samples that a worker mixes if shards have no indexes
LEAST_RUN = 10  # samples per class, on average, from which classes that never return are taken as sorted

log: logging.Logger = logging.getLogger("tarshards")


@dataclass
class Progress:
    """The progress of one iteration: *begun* positions were taken before it, and *loop* counts those taken since.

    For sources without positions, *delivered* are the results of the ops; they are those of a *replayed* state until
    these have been passed over. *version* is that of the state from which the iteration resumes.
    """

    epoch: int
    world: World
    begun: int = 0
    version: int = VERSION
    replayed: Mapping[str, Any] | None = None
    delivered: Delivered = field(default_factory=Delivered)
    loop: EpochLoop | None = None
    within: PassOf | None = None  # the pass that it is a part of

    @property
    def of(self) -> PassOf:
        """The pass of the stream, for the ledger."""
        return self.within or PassOf(self.epoch, int(self.begun > 0), self.world.rank, self.world.world_size)

    @property
    def taken(self) -> int:
        """The number of positions taken by this rank and worker."""
        return self.begun + (self.loop.taken if self.loop else 0)

    def at(self, epoch: int) -> Progress:
        """Return the beginning of another *epoch*, in the order of the same version."""
        return Progress(epoch, self.world, version=self.version, within=self.of)


class OrderedSource(Protocol):
    """The settings of a source that are compared with a state; ``ordered_by`` names the entries of ``order``."""

    @property
    def ordered_by(self) -> Sequence[str]: ...

    @property
    def newest(self) -> int:
        """The version of new states."""

    @property
    def digest(self) -> str: ...

    @property
    def order(self) -> Sequence[Any]: ...

    def as_of(self, version: int) -> OrderedSource:
        """Return this source with the order of states of *version*."""


class ShardSource:
    """The samples of shards that are read one after the other; the shards are divided among ranks and workers."""

    ops: Sequence[Any] = ()

    def __init__(self, shards: Shards, opening: Opening, options: EpochOptions):
        self.shards = shards
        self.opening = opening
        self.options = options
        self.pool: int = BUFFER if options.pool is None else options.pool
        _weights(options, len(shards))
        self.seed: int = options.seed
        self.ledger: Ledger = Ledger.of(opening.on_error)

    @property
    def digest(self) -> str:
        """Identifies the dataset in a state."""
        return dataset_digest(self.shards.urls)

    @property
    def order(self) -> list[Any]:
        """The settings that determine the order of the samples, besides the epoch."""
        resample = self.options.resample
        order: list[Any] = [self.options.seed, self.options.shuffle]
        if resample:
            return [*order, resample if isinstance(resample, bool) else list(resample)]
        return [*order, self.pool] if self._is_mixed and self.options.pool is not None else order

    @property
    def _is_mixed(self) -> bool:
        """Whether samples are mixed in a buffer."""
        return self.options.shuffle and not self.options.resample

    @property
    def newest(self) -> int:
        return BUFFERED if self._is_mixed else VERSION

    @property
    def ordered_by(self) -> Sequence[str]:
        return "seed", "shuffle", "resample" if self.options.resample else "pool"

    def as_of(self, version: int) -> Self:
        return self  # ``iterate`` takes the version

    def with_ledger(self, ledger: Ledger) -> ShardSource:
        """Return this source with another ledger."""
        source = copy.copy(self)
        source.ledger = ledger
        return source

    def iterate(self, progress: Progress) -> Iterator[Sample]:
        """Return the samples of one worker, mixed in a buffer if they are shuffled; see ``_in_turn``."""
        samples = self._in_turn(progress)
        if not self._is_mixed or progress.version < BUFFERED or self.pool == 1:
            return samples
        if progress.world.rank == progress.world.worker == 0:
            samples = _watched(samples, self.pool)
        mixing = BoundOp(ops.shuffle, (self.pool,), {"seed": self.seed})
        return follow([mixing], samples, progress.epoch, self.seed, self.ledger, progress.of)

    def _in_turn(self, progress: Progress) -> Iterator[Sample]:
        """Yield the samples of one worker, shard after shard; raise SampleError if the only worker finds none."""
        world = progress.world
        shards = self.share(progress.epoch, world)
        draws = world.share(range(len(self.shards))) if self.options.resample else None
        samples = self.opening.read(shards, self.ledger, world.processes, draws)
        for sample in samples:
            yield sample
            yield from samples
            return
        is_alone = world.world_size * world.num_workers == 1
        if is_alone and not self.ledger.quarantined:  # with quarantined samples an empty result is no surprise
            raise no_samples(self.shards.urls)

    def share(self, epoch: int, world: World) -> Shards:
        """Return the shards of one worker: all shards are permuted or drawn by (seed, epoch), then divided.

        Raises WorldError, on every rank, if some rank would have none.
        """
        self._check_ranks(world)
        numbers = list(range(len(self.shards)))
        if self.options.resample:
            numbers = self._drawn(epoch)
        elif self.options.shuffle:
            random.Random(f"{self.options.seed}/{epoch}").shuffle(numbers)
        return self.shards.take(world.share(numbers))

    def _check_ranks(self, world: World) -> None:
        world.check_ranks(len(self.shards), "shards", "index them with `tarindex`")

    def check_steps(self, world: World) -> None:
        """Raise WorldError if some ranks have more shards, and so take more steps, unless *tail* is "exact"."""
        self._check_ranks(world)
        ranks = world.world_size
        if ranks == 1 or self.options.tail == "exact":
            return
        if len(self.shards) % ranks:
            raise WorldError(
                f"{len(self.shards)} shards for {ranks} ranks: without indexes some ranks take more steps, and wait "
                'for others forever; steps= sets their number, `tarindex` makes indexes, and tail="exact" accepts it'
            )
        _log_unequal_steps()

    def _drawn(self, epoch: int) -> list[int]:
        """Draw shard numbers with replacement, one per shard."""
        import numpy as np

        from tarshards.epoch.resampling import Draws

        draws = Draws(_weights(self.options, len(self.shards)), self.options.seed, epoch)
        numbers: list[int] = draws.shards(np.arange(len(self.shards))).tolist()
        return numbers


class PlannedSource:
    """The samples of indexed shards in the order of an ``EpochPlan``."""

    once = True  # each sample comes once per epoch
    version = newest = SPREAD  # of the order
    ops: Sequence[BoundOp] = ()  # applied to its samples before the stream's ops
    ordered_by: ClassVar[Sequence[str]] = ("seed", "shuffle", "samples a block", "pool", "tail")

    def __init__(self, shards: SampleReader, options: EpochOptions, on_error: ErrorPolicy = None):
        self.shards = shards
        self.options = options
        self.seed: int = options.seed
        self.ledger: Ledger = Ledger.of(on_error)
        self._select(None)

    def _select(self, selection: Selection | None) -> None:
        from tarshards.epoch.plan import block_size

        shards = self.shards
        self.selection = selection
        self.counts: Any = shards.counts
        sizes, chosen = shards.sizes, b""
        if selection is not None:
            self.counts, sizes, chosen = selection.counts, sizes * selection.fractions, selection.digest
        self.block: int = self.options.block or block_size(self.counts, sizes)
        self.sizes: Any = sizes
        self.digest: str = dataset_digest(shards.urls, shards.counts.astype("<i8").tobytes() + chosen)
        self.ledger.know(self.digest, shards.names, self.counts)

    @property
    def pool(self) -> int:
        """The least number of samples that are shuffled together."""
        from tarshards.epoch.plan import POOL, pool_size

        if self.options.pool is not None:
            return self.options.pool
        return POOL if self.version < SPREAD else pool_size(self.counts, self.sizes, self.block)

    @property
    def order(self) -> list[Any]:
        """The settings that determine the order of the samples, besides the epoch."""
        return [self.seed, self.options.shuffle, self.block, self.pool, self.options.tail]

    def plan(self, epoch: int, ranks: int, state: Mapping[str, Any] | None = None) -> PlannedEpoch:
        """Return the plan of *epoch*, or of its rest after *state*; raise SampleError if there are no samples."""
        if not self.counts.any():
            raise no_samples(self.shards.urls) if self.selection is None else nothing_selected()
        plan = self._plan(epoch, ranks, state)
        if self.selection is None:
            return plan
        from tarshards.epoch.selection import SelectedPlan

        return SelectedPlan(plan, self.selection)

    def _plan(self, epoch: int, ranks: int, state: Mapping[str, Any] | None) -> PlannedEpoch:
        """Return the plan over ``counts``, which are those of the selected samples."""
        from tarshards.epoch.plan import EpochPlan

        tail = self.options.tail_for(ranks)
        if state is not None:
            return EpochPlan.restore(self.counts, state, ranks=ranks, tail=tail, unit=self.block)
        return EpochPlan(
            self.counts,
            seed=self.seed,
            epoch=epoch,
            ranks=ranks,
            block=self.block if self.version == 1 else self.options.block,
            unit=self.block,
            pool=self.options.pool if self.version >= SPREAD else self.pool,
            sizes=self.sizes,
            tail=tail,
            shuffle=self.options.shuffle,
        )

    def as_of(self, version: int) -> Self:
        """Return this source with the order of states of *version*."""
        if version == self.version:
            return self
        source = copy.copy(self)
        source.version = version
        return source

    def joined(self, urls: Any, fields: str | Iterable[str] | None) -> PlannedSource:
        """Return this source with the fields of parallel shards."""
        from tarshards.index.access import SampleSequence
        from tarshards.index.joined import JoinedShards

        source = copy.copy(self)
        own = self.shards.sequences[0].shards.named[0]
        shards = find_shards(urls, own.remote, index_dir=own.index_dir)
        source.shards = JoinedShards(self.shards, SampleSequence(shards, fields=fields))
        return source

    def selected(self, choose: SampleChoice) -> PlannedSource:
        """Return this source with only the samples that *choose* selects by their numbers over all shards."""
        import numpy as np

        from tarshards.epoch.selection import Selection

        total = int(self.shards.counts.sum())
        numbers = np.arange(total) if self.selection is None else self.selection.numbers
        source = copy.copy(self)
        source._select(Selection(self.shards.counts, numbers[choose(self.shards, numbers)]))
        return source

    def with_ledger(self, ledger: Ledger) -> PlannedSource:
        """Return this source with another ledger."""
        source = copy.copy(self)
        source.ledger = ledger
        ledger.know(self.digest, self.shards.names, self.counts)
        return source

    def read(self, part: Part, epoch: int) -> Iterator[Sample]:
        """Yield the samples of *part*, before the stream's ops."""
        return part.read(self.shards, self.ledger)

    def loop(self, plan: PlannedEpoch, world: World, shares: Shares, **options: Any) -> EpochLoop:
        """Return the loop of one worker over its shares of *plan*; *options* are those of ``EpochLoop``."""
        from tarshards.epoch.loop import EpochLoop

        return EpochLoop(self, plan, world, shares, **options)

    def first_fields(self) -> set[str]:
        """Return the fields of the first shard, or first ones of several datasets; none if one is not a local file."""
        try:
            sequences = [] if self.shards.is_remote() else self.shards.sequences
            return {field for each in sequences for field in each.shards.use(0).index.fields}
        except TarshardsError:
            return set()

    def warn_of_few_blocks(self, plan: PlannedEpoch, world: World) -> None:
        """Log a warning, once, if a rank mixes too few blocks, by default, for a batch like one of a permutation.

        Only the first rank and worker do.
        """
        from tarshards.epoch.plan import MAX_BLOCKS, MIXED_BLOCKS

        order = plan.order
        if order is None or self.options.pool or self.options.block or world.rank or world.worker:
            return
        total, pool = order.lanes.total, order.window * order.lanes.lanes
        mixed = pool // (plan.ranks * order.block)
        wider = min(MIXED_BLOCKS * plan.ranks * order.block, total)
        is_permuted = order.block == order.window == 1
        if order.shuffle and not is_permuted and mixed < MIXED_BLOCKS and wider <= MAX_BLOCKS:
            mean = float(self.sizes.sum() / self.counts.sum())  # bytes of a sample
            megabytes, now = (round(samples / plan.ranks * mean / 1e6) for samples in (wider, pool))
            _log_few_blocks(plan.ranks, mixed, order.block, wider, megabytes, now)

    def iterate(self, progress: Progress) -> Iterator[Sample]:
        """Yield the rest of one worker's share: every num_workers-th position of its rank."""
        from tarshards.epoch.loop import Part, Shares, growing
        from tarshards.index.readahead import LOOKED_UP

        world = progress.world
        plan = self.as_of(progress.version).plan(progress.epoch, world.world_size)
        self.warn_of_few_blocks(plan, world)
        every = world.positions(len(plan))
        share, begun = every[progress.begun :], bisect_left(every[: progress.begun], plan.total)
        shares = Shares(share, max(1, len(share)))
        progress.loop = loop = self.loop(plan, world, shares, of=progress.of, begun=begun)
        parts = (Part.of(plan, positions) for positions in growing(share, LOOKED_UP))
        for samples in loop.run(partial(map, partial(self.read, epoch=progress.epoch)), parts):
            yield from samples
        self.ledger.audit([loop.tally])


class ResampledSource(PlannedSource):
    """The samples of a ``ResampledPlan``; each has the number of its draw in ``__draw__``."""

    once = False
    ordered_by: ClassVar[Sequence[str]] = ("seed", "weights", "tail")

    def __init__(self, shards: SampleReader, options: EpochOptions, on_error: ErrorPolicy = None):
        import numpy as np

        super().__init__(shards, options, on_error)
        self.weights: Any = (
            None if options.resample is True else np.array(_weights(options, len(shards.urls)), np.float64)
        )

    @property
    def order(self) -> list[Any]:
        weights = None if self.weights is None else self.weights.tolist()
        return [self.seed, weights, self.options.tail]

    def _plan(self, epoch: int, ranks: int, state: Mapping[str, Any] | None) -> PlannedEpoch:
        from tarshards.epoch.resampling import ResampledPlan

        tail = self.options.tail_for(ranks)
        counts, weights = self.counts, self.weights
        plan = ResampledPlan(counts, weights, seed=self.seed, epoch=epoch, begin=0, ranks=ranks, tail=tail)
        return plan if state is None else plan.restored(state)

    def read(self, part: Part, epoch: int) -> Iterator[Sample]:
        begin = part.plan.unpacked.state(0)["position"]
        for sample in part.read(self.shards, self.ledger):
            sample["__draw__"] = begin + int(part.sample_positions[part.taken - 1])
            yield sample


class IterableSource:
    """Any iterable, or a function without arguments that returns one; its samples are counted if it has a ledger.

    *names* identify the dataset in a state; by default all iterables are the same.
    """

    ledger: Ledger | None = None
    newest = VERSION
    seed = 0
    ops: Sequence[Any] = ()
    order: Sequence[Any] = ()
    ordered_by: ClassVar[Sequence[str]] = ()
    names: Sequence[str] = ()

    def __init__(self, source: Iterable[Any] | Callable[[], Iterable[Any]]):
        self.source = source
        self.spent: bool = False

    @property
    def digest(self) -> str:
        """Identifies the dataset in a state."""
        return dataset_digest([*self.names])

    def as_of(self, version: int) -> Self:
        return self

    def with_ledger(self, ledger: Ledger) -> Self:
        """Return this source with a ledger."""
        source = copy.copy(self)
        source.ledger = ledger
        return source

    def iterate(self, progress: Progress) -> Iterator[Any]:
        """Iterate over the part of a worker; raise TypeError for an iterator that was iterated before."""
        samples = progress.world.share_iterator(self._begin())
        return samples if self.ledger is None else self._counted(samples, self.ledger)

    def _counted(self, samples: Iterator[Any], ledger: Ledger) -> Iterator[Any]:
        count = Count()
        try:
            yield from count.over(samples)
        finally:
            ledger.count(samples=int(count), streamed=int(count))

    def _begin(self) -> Iterator[Any]:
        if callable(self.source):
            return iter(self.source())
        iterator = iter(self.source)
        if iterator is self.source:
            if self.spent:
                raise TypeError("an iterator can be streamed only once: give Stream a list, or a function to call")
            self.spent = True
        return iterator


@collector_paused()
def open_shards(urls: Any, opening: Opening, options: EpochOptions) -> ShardSource | PlannedSource:
    """Return the source of a shard expression: planned if opened through indexes, else streaming.

    Raises ShardIndexError, which names a shard, if indexes are required and that shard has none.
    """
    opening.connect(urls)
    shards = opening.find_shards(urls)
    indexed = _indexed(shards, opening, options)
    if indexed is None:
        return ShardSource(shards, opening, options)
    from tarshards.index.access import SampleSequence

    import_module("tarshards.epoch.loop")  # needed for iterating; imported while the collector is paused
    samples = SampleSequence(indexed, fields=opening.fields, lazy=opening.lazy)
    kind = ResampledSource if options.resample else PlannedSource
    return kind(samples, options, opening.on_error)


def _indexed(shards: Shards, opening: Opening, options: EpochOptions) -> Shards | None:
    """Return *shards*, with the counts in their indexes, if an epoch of them is planned; None if they are streamed.

    With index="auto" they are planned if indexes are found, made by the rule for names that *opening* has, and if the
    first shard can be read in parts. Raises ShardIndexError or OpenError if *options* require a planned epoch that
    these shards do not allow.
    """
    rule = split_of(opening.rule)
    ruled = shards.split_by(rule)
    if opening.index and opening.index != "auto":
        return ruled
    is_sought = opening.index == "auto" and rule is not None
    found = find_indexed(ruled, opening.names, opening.lazy_names) if is_sought else None
    first = shards[0].location()
    if found is not None and (opening.lazy is not None or has_ranges(first)):
        return found
    if found is not None:
        if options.needs_index or options.pool or options.shuffle or options.resample:
            reason = "the server serves no ranges, which shuffling samples, tail=, pool= and block= require"
            raise OpenError(f"{reason}; index=False streams shards whole", url=first.name)
        log.warning("%s: the server serves no ranges, so shards are streamed whole, as with index=False", first.name)
    elif is_sought:
        words = "%s: no indexes found, so shards are streamed whole; create them with `tarindex`"
        log.info(words, visible(first.name))
    if options.needs_index:
        first.check_there()
        raise ShardIndexError("tail=, block= require indexed shards; run `tarindex` first", url=first.name)
    return None


def _weights(options: EpochOptions, shards: int) -> Sequence[float]:
    """Return the weights of the shards in ``resample=``; raise ValueError unless there is one for each."""
    if isinstance(options.resample, bool):
        return [1.0] * shards
    if len(options.resample) != shards:
        raise ValueError(f"resample= has {len(options.resample)} weights, and there are {shards} shards")
    return options.resample


def _watched(samples: Iterator[Sample], pool: int) -> Iterator[Sample]:
    """Yield *samples*; log a warning if they are sorted by class, so that a buffer of *pool* samples mixes few classes.

    They count as sorted if no class returns after another one in more than twice *pool* samples.
    """
    seen: set[bytes] = set()
    last, run = None, 0
    for number, sample in enumerate(samples):
        yield sample
        label = sample.get("cls")
        if label == last:
            run += 1
            if run == LEAST_RUN and len(seen) > 1 and number > max(2 * pool, LEAST_RUN * len(seen)):
                _log_sorted_classes(pool)
                break
        elif not isinstance(label, bytes) or label in seen:
            break
        else:
            seen.add(label)
            last, run = label, 1
    yield from samples


@cache
def _log_sorted_classes(pool: int) -> None:
    """Log, once per process, that a buffer does not mix the classes."""
    log.warning(
        "the classes of these shards come one after the other, which a buffer of %d samples does not mix: "
        "create indexes with `tarindex`, by which shuffle=True permutes all samples, or rewrite the shards with "
        "`tarreshard`; pool= enlarges the buffer",
        pool,
    )


@cache
def _log_few_blocks(ranks: int, mixed: int, block: int, wider: int, megabytes: int, now: int) -> None:
    log.warning(
        "each of %d ranks mixes only %d blocks of %d neighbouring samples at a time: if the shards are sorted, a batch "
        "has fewer classes than one of a permutation; pool=%d mixes well, and each rank then reads from %d MB at a "
        "time, instead of %d MB",
        *(ranks, mixed, block, wider, megabytes, now),
    )


@cache
def _log_unequal_steps() -> None:
    """Log, once per process, that ranks may differ in their steps."""
    log.warning(
        "without indexes ranks may take different numbers of steps, and wait for each other forever at the end: "
        "create indexes with `tarindex`, or give steps="
    )


def no_samples(urls: Sequence[str]) -> SampleError:
    """Return the error for a dataset without samples."""
    more = f" nor in {len(urls) - 1} more" if len(urls) > 1 else ""
    return SampleError(
        f"no samples in this shard{more}; `tarcheck` says what is in them", url=Location.of(urls[0]).name
    )


def nothing_selected() -> SampleError:
    """Return the error for a selection without samples."""
    return SampleError("no sample is selected")


def version_of(state: Mapping[str, Any] | None, source: OrderedSource) -> int:
    """Return the version of the order that *state* resumes; without a state, that of new states of *source*."""
    version: int = (state or {}).get("version", source.newest)
    return version


def check_state(state: Any, source: OrderedSource, counts: Sequence[str]) -> None:
    """Raise StateError unless *state* has a known version, the digest of *source*, and numbers for all *counts*."""
    if not isinstance(state, Mapping) or "version" not in state:
        raise StateError(f"not a state from state_dict(): {shortened(state)}")
    if (version := state["version"]) not in range(1, SPREAD + 1):
        raise StateError(f"a state of version {shortened(version)}; only versions 1 to {SPREAD} can be loaded")
    source = source.as_of(version)
    if state.get("digest") != source.digest:
        differ = "the state is of another dataset: its shards have other names or counts, or others were selected"
        if isinstance(source, ShardSource) and not isinstance(state.get("delivered"), int):
            differ += ", or were read through their indexes (index=True)"
        elif isinstance(source, PlannedSource) and state.get("digest") == dataset_digest(source.shards.urls):
            differ = "the state is of shards that were read without their indexes (index=False)"
        elif hasattr(source, "digest_with") and state.get("digest") == source.digest_with("linear"):
            differ = (
                "the state was saved by a mixture with a linear schedule, which no longer exists: begin an epoch with "
                "weights of stepwise(), or end this one with the release that began it"
            )
        raise StateError(differ)
    for name in counts:
        if name not in state:
            raise StateError(f"the state has no {name}")
        if type(state[name]) is not int or not 0 <= state[name] < 1 << 63:
            raise StateError(f"the state has {name} {shortened(state[name])}")


def check_order(state: Mapping[str, Any], source: OrderedSource) -> None:
    """Raise StateError, which names the differences, unless *state* has the settings in ``source.order``."""
    theirs, ours = state.get("order", ()), list(source.as_of(version_of(state, source)).order)
    if not isinstance(theirs, list | tuple) or len(theirs) != len(ours):
        raise StateError(f"the state has the order {shortened(theirs)}, and this dataset {shortened(ours)}")
    pairs = list(zip(source.ordered_by, theirs, ours))
    if differ := [(f"{name}={old!r}", f"{name}={new!r}") for name, old, new in pairs if old != new]:
        before, now = (", ".join(words) for words in zip(*differ))
        raise StateError(f"the state was saved with {before}, and this dataset has {now}, which gives another order")


def dataset_digest(urls: list[str], counts: bytes = b"") -> str:
    """Return a hash that identifies a dataset: of the names of its shards, without their folders, and their counts."""
    names = "\0".join(identities_of(urls))
    return blake2b(counts + names.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
