"""Several datasets mixed into one, in proportions that hold over all ranks, and on each."""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from hashlib import blake2b
from itertools import accumulate, chain, count
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, cast

import numpy as np

from tarshards.epoch.choices import Choices
from tarshards.epoch.epoch_options import EpochOptions, Tail
from tarshards.epoch.plan import PlannedEpoch, check_unpacked
from tarshards.epoch.proportions import Mixture, Quotas, Until, check_until
from tarshards.errors import SampleError, StateError, WorldError, shortened, whole_number
from tarshards.index.access import Fan, SampleReader, SampleSequence
from tarshards.samples.fields import check_mapping
from tarshards.samples.keys import Sample
from tarshards.samples.ledger import ErrorPolicy, Ledger, Tally
from tarshards.stream.following import follow_part
from tarshards.stream.interleave import MixedStream, interleave
from tarshards.stream.sources import VERSION, PlannedSource, Progress, ShardSource, version_of
from tarshards.stream.stream import Stream, check_dataset

if TYPE_CHECKING:
    from tarshards.epoch.loop import Part
    from tarshards.index.readahead import Numbers
    from tarshards.stream.op import BoundOp

TOGETHER = 64  # choices that a worker makes at once: one by one, each takes 0.7 us instead of 0.36
PASS = 1 << 32  # added to a dataset's epoch each time it begins again within one epoch of the mixture

S = TypeVar("S", bound=Stream)


def mix(
    datasets: Mapping[str, S],
    *,
    weights: Mapping[str, float | Mapping[int, float]] | None = None,
    schedule: Literal["steps"] = "steps",
    seed: int = 0,
    until: Until = "first",
    tail: Tail | None = None,
    on_error: ErrorPolicy = None,
) -> S:
    """Return one dataset that takes samples from several in proportion to *weights*, which are equal by default.

    Counted over all ranks, each dataset contributes its share to within one sample in every 2**16 samples and in the
    whole epoch; within these windows, the datasets come in random order by *seed* and epoch, so that each rank and
    worker has a sample of the mixture. Each dataset keeps its order, its fields and its ops; its samples, if they are
    dicts, get its name as ``__dataset__``. An epoch ends before the first dataset would begin again (*until* "first"),
    when all have been read once ("last"), or after *until* samples; datasets that end earlier begin again, in another
    order. *on_error* is as for a dataset; the ledger of the mixture counts for all.

    A weight may change with the position in the epoch: ``{0: 1.0, 10_000: 0.5}``, where positions count samples of the
    mixture over all ranks. Each weight holds until the next position (*schedule* "steps", the only one), and the last
    one to the end; ``stepwise`` makes such steps from a line. At each position only the ratios of the weights matter.
    The epoch ends where the sum of a dataset's shares reaches its size: "first" leaves out at most one sample of that
    dataset, and "last" repeats at most one. For "last", a dataset whose weight stays 0 from some position on counts as
    read from there on.

    If all datasets are indexed, the mixture is planned like one of them: it has a length and a *tail*, and resumes at
    any position. Otherwise, or if one of *datasets* is itself a mixture, it is streamed: every worker reads from each
    dataset what it would read of that dataset alone; the proportions and *until* hold in each worker, for its own
    samples; a state is resumed by replaying, on the same number of ranks and workers; any op is allowed; and shards
    that are unfinished when the epoch ends count as broken off. The result is a ShardDataset if one of *datasets* is.

    Raises ValueError for constant weights whose ratios are not those of whole numbers that add up to 2**20 or less,
    and, if all datasets are indexed, TypeError for ops that hold or count samples. Iterating raises SampleError if a
    dataset with weight has no samples, and WorldError if a dataset without indexes has fewer shards than there are
    workers.
    """
    if not check_mapping(datasets, "mix", "{name: dataset}"):
        raise ValueError("there is nothing to mix")
    if schedule != "steps":
        raise ValueError(f'schedule= must be "steps", not {shortened(schedule)}; stepwise() makes steps of a line')
    seed, until = whole_number("seed", seed), check_until(until)
    weights = check_mapping(dict.fromkeys(datasets, 1) if weights is None else weights, "weights=", "{name: weight}")
    if weights.keys() != datasets.keys():
        raise ValueError(f"weights= names {sorted(weights)}, but the datasets are {sorted(datasets)}")
    for dataset in datasets.values():
        check_dataset(dataset, "mix")
    curves = [weights[name] for name in datasets]
    quotas = Quotas([dict(sorted(each.items())) if isinstance(each, Mapping) else each for each in curves])
    source: MixedSource | MixedStreams
    if all(is_planned(dataset) for dataset in datasets.values()):
        for name, dataset in datasets.items():
            for op in dataset.ops:
                if not op.traits.per_sample:
                    raise TypeError(f"{name}: {op.name} holds or counts samples; apply it to the mixture")
        source = MixedSource(datasets, quotas, seed, until, tail, on_error)
    elif tail is not None:
        names = ", ".join(name for name, dataset in datasets.items() if not is_planned(dataset))
        raise TypeError(f"{names}: tail= requires that all datasets are indexed; run `tarindex` first")
    else:
        source = MixedStreams(datasets, quotas, seed, until, on_error)
    kinds = [dataset for dataset in datasets.values() if type(dataset) is not Stream]
    return (kinds or list(datasets.values()))[0]._over(source)


def is_planned(dataset: Stream) -> bool:
    """Return whether a mixture can look up the samples of *dataset* by number."""
    return isinstance(dataset.source, PlannedSource) and not isinstance(dataset.source, MixedSource)


class MixedSource(PlannedSource):
    """The samples of several planned sources, in the order of a ``MixedPlan``."""

    once = False
    ordered_by: ClassVar[Sequence[str]] = ("tail",)

    def __init__(
        self,
        datasets: Mapping[str, Stream],
        quotas: Quotas,
        seed: int,
        until: Until,
        tail: Tail | None,
        on_error: ErrorPolicy,
    ):
        self.quotas: Quotas = quotas
        self.until: Until = until
        self.options: EpochOptions = EpochOptions(seed=seed, tail=tail)
        self.seed: int = seed
        self.sources: list[PlannedSource] = [dataset.source for dataset in datasets.values()]
        self.shards: MixedShards = MixedShards({name: dataset.source.shards for name, dataset in datasets.items()})
        self.starts: list[int] = self.shards.starts
        self.counts: np.ndarray = self.shards.counts
        self.sizes: list[int] = [int(source.counts.sum()) for source in self.sources]
        lanes = [1 if not size else lanes_of(source.plan(0, 1)) for size, source in zip(self.sizes, self.sources)]
        self.choices: Choices = Choices(quotas, seed, self.sizes, until, lanes)
        self.ledger: Ledger = Ledger.of(on_error)
        self.draws: bool = any(map(draws, self.sources))  # then all samples get __draw__, since they share batches
        self.datasets: dict[str, Stream] = dict(datasets)
        self.ops: list[BoundOp] = [op for dataset in datasets.values() for op in (*dataset.source.ops, *dataset.ops)]
        self.digest: str = self.digest_with("steps")

    def digest_with(self, schedule: str) -> str:
        """Return the digest in a state of this mixture, if weights change by this *schedule*."""
        orders = [
            (name, s.digest, s.seed, s.pool, s.options.shuffle, *filter(None, [s.options.resample]))
            for name, s in zip(self.datasets, self.sources)
        ]
        return digest_of(self, schedule, orders)

    def selected(self, choose: Any) -> PlannedSource:
        raise TypeError("select from the datasets, and mix the selections")

    @property
    def order(self) -> list[Any]:
        return [self.options.tail]  # the rest is in the digest

    def as_of(self, version: int) -> MixedSource:
        source = super().as_of(version)
        if source is not self:
            source.sources = [each.as_of(version) for each in self.sources]
            source.choices = self.choices.unpermuted()
            source.digest = source.digest_with("steps")
        return source

    def plan(self, epoch: int, ranks: int, state: Mapping[str, Any] | None = None) -> MixedPlan:
        tail = self.options.tail_for(ranks)
        if state is None:
            return MixedPlan(self, self.choices, epoch, 0, ranks, tail)
        check_unpacked(state)
        begun, position = state.get("epoch"), state.get("position")
        if type(begun) is not int or type(position) is not int or not 0 <= position <= self.choices.total:
            raise StateError(f"a mixture's state has epoch {begun!r} and position {position!r}")
        source = self.as_of(version_of(state, self))
        return MixedPlan(source, source.choices.resumed(position, state), begun, position, ranks, tail)

    def read(self, part: Part, epoch: int) -> Iterator[Sample]:
        passes = numbers = np.empty(0, np.int64)
        for sample in part.read(self.shards, self.ledger):
            dataset = self.datasets[sample["__dataset__"]]
            if not dataset.ops and not self.draws:
                yield sample
                continue
            if not len(passes):
                passes, numbers = cast(MixedPlan, part.plan.unpacked).passes(part.sample_positions)
            own = part.taken - 1  # the row of the sample
            if self.draws:
                sample["__draw__"] = int(numbers[own])
            begun, seed = epoch + int(passes[own]) * PASS, dataset.source.seed
            if dataset.ops:
                yield from follow_part(dataset.ops, [sample], begun, seed, self.ledger, part.leave_out)
            else:
                yield sample


def lanes_of(plan: PlannedEpoch) -> int:
    """Return the lanes in which *plan* reads blocks; 1 if it reads single samples, or in storage order."""
    order = plan.order
    return 1 if order is None or order.block == order.window == 1 else order.lanes.lanes


def draws(source: Any) -> bool:
    """Return whether *source* draws samples with replacement; these have the number of the draw in ``__draw__``."""
    if isinstance(source, MixedSource | MixedStreams):
        return source.draws
    return isinstance(source, PlannedSource | ShardSource) and bool(source.options.resample)


def digest_of(mixture: MixedSource | MixedStreams, schedule: str, *settings: Any) -> str:
    """Return a hash of *settings* and all others that the order of *mixture* depends on.

    *schedule* says how weights change between positions.
    """
    weights = mixture.quotas.weights
    if any(isinstance(weight, Mapping) for weight in weights):
        weights = [*weights, schedule]
    order = repr((*settings, weights, mixture.seed, mixture.until))
    return blake2b(order.encode(), digest_size=16).hexdigest()


class MixedPlan(PlannedEpoch):
    """The rest of a mixture's epoch from the position *begin* on; its shards are those of ``MixedShards``."""

    def __init__(self, source: MixedSource, choices: Choices, epoch: int, begin: int, ranks: int, tail: Tail):
        self.source = source
        self.choices = choices
        self.epoch = epoch
        self.begin = begin
        self.ranks = ranks
        self.tail: Tail = tail
        self.total: int = choices.total - begin
        self._plans: dict[tuple[int, int], PlannedEpoch] = {}

    def __getitem__(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        dataset, again, number = self._look_up(positions)
        shards, samples = np.empty_like(number), np.empty_like(number)
        for i in np.unique(dataset):
            here = np.flatnonzero(dataset == i)
            for passed in np.unique(again[here]):
                these = here[again[here] == passed]
                shard, sample = self._plan(int(i), int(passed))[number[these]]
                shards[these], samples[these] = shard + self.source.starts[i], sample
        return shards, samples

    @property
    def before(self) -> int:
        return self.begin

    @property
    def block_and_reach(self) -> tuple[int | None, int]:
        ways = [self._plan(i, 0).block_and_reach for i, size in enumerate(self.source.sizes) if size]
        blocks = [block for block, _ in ways if block is not None]
        return max(blocks, default=None), max((reach for _, reach in ways), default=1)

    @property
    def permuted_by(self) -> tuple[int, int] | None:
        is_permuted = any(source.options.shuffle or source.options.resample for source in self.source.sources)
        return (self.source.seed, self.epoch) if is_permuted else None

    def substitutes(self, position: int, among: int | None = None) -> Iterator[tuple[int, int]]:
        """Yield samples of the dataset of *position*, drawn by its own plan from those that come in this epoch."""
        (dataset,), (again,), (number,) = self._look_up(np.array([position], np.int64))
        start = self.source.starts[dataset]
        come = min(self.choices.due[dataset], self.source.sizes[dataset])
        for shard, sample in self._plan(int(dataset), int(again)).substitutes(int(number), come):
            yield start + shard, sample

    def passes(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return, for each of *positions*, the passes that its dataset has completed, and the position in this pass."""
        return self._look_up(positions)[1:]

    def _look_up(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the dataset of each of *positions*, and the results of ``passes``."""
        positions = np.asarray(positions, np.int64)
        every = max(1, self.choices.total)  # positions past the end repeat the epoch's start
        rest = positions - self.total
        dataset, number = self.choices.look_up(self.epoch, np.where(rest < 0, positions + self.begin, rest % every))
        return dataset, *np.divmod(number, np.maximum(1, self.source.sizes)[dataset])

    def _plan(self, dataset: int, again: int) -> PlannedEpoch:
        plan = self._plans.get((dataset, again))
        if plan is None:
            plan = self.source.sources[dataset].plan(self.epoch + again * PASS, 1)
            self._plans = {pair: old for pair, old in self._plans.items() if pair[0] != dataset or pair[1] == again - 1}
            self._plans[dataset, again] = plan
        return plan

    def resume(self, position: int, ranks: int, tail: Tail | None = None) -> MixedPlan:
        """Return the plan of the rest, for *ranks* ranks, after all ranks together took *position* positions."""
        begin = self.begin + min(position, self.total)
        return MixedPlan(self.source, self.choices, self.epoch, begin, ranks, tail or self.tail)

    def state(self, taken: int) -> dict[str, Any]:
        """Return the state after *taken* positions, as JSON's types."""
        position = self.begin + min(taken, self.total)
        return {"epoch": self.epoch, "position": position, **self.choices.state(position)}


class MixedStreams:
    """The samples of several streams in proportion, in each worker separately."""

    order: Sequence[Any] = ()  # in the digest
    ordered_by: ClassVar[Sequence[str]] = ()

    def __init__(self, datasets: Mapping[str, Stream], quotas: Quotas, seed: int, until: Until, on_error: ErrorPolicy):
        self.quotas: Quotas = quotas
        self.seed: int = seed
        self.until: Until = until
        self.ops: list[BoundOp] = [op for dataset in datasets.values() for op in (*dataset.source.ops, *dataset.ops)]
        self.newest: int = max(dataset.source.newest for dataset in datasets.values())
        self.draws: bool = any(draws(dataset.source) for dataset in datasets.values())
        self._count(datasets, Ledger.of(on_error))
        self.digest: str = self.digest_with("steps", self.newest)

    def as_of(self, version: int) -> MixedStreams:
        source = copy.copy(self)
        source.digest = self.digest_with("steps", version)
        return source

    def digest_with(self, schedule: str, version: int = VERSION) -> str:
        """Return the digest in a state of *version* of this mixture, if weights change by this *schedule*."""
        orders = []
        for name, dataset in self.datasets.items():
            source = dataset.source.as_of(version)
            digest = source.digest_with(schedule) if isinstance(source, MixedSource | MixedStreams) else source.digest
            orders.append((name, digest, source.order))
        return digest_of(self, schedule, "streamed", orders)

    def _count(self, datasets: Mapping[str, Stream], ledger: Ledger) -> None:
        self.ledger = ledger
        self.datasets: dict[str, Stream] = {name: copy.copy(dataset) for name, dataset in datasets.items()}
        for dataset in self.datasets.values():
            dataset.source = dataset.source.with_ledger(ledger)

    def with_ledger(self, ledger: Ledger) -> MixedStreams:
        """Return this source with another ledger."""
        source = copy.copy(self)
        source._count(self.datasets, ledger)
        return source

    def iterate(self, progress: Progress) -> Iterator[Any]:
        """Yield the samples of one worker; raise WorldError if some worker would have no shard of a chosen dataset."""
        workers = progress.world.world_size * progress.world.num_workers
        quotas = Quotas(self.quotas.weights, stride=workers)
        mixture = Mixture(quotas, self.seed)
        choices = chain.from_iterable(mixture.take(TOGETHER) for _ in count())
        for number, (name, dataset) in enumerate(self.datasets.items()):
            if number in quotas.ends:
                check_shards(name, dataset.source, workers)
        streams = [self._stream(name, dataset, progress) for name, dataset in self.datasets.items()]
        try:
            yield from interleave(streams, choices, quotas.ends, self.until)
        finally:
            if held := sum(stream.holds_sample() for stream in streams):
                self.ledger.add(Tally(in_flight=held).within(progress.of))

    def _stream(self, name: str, dataset: Stream, progress: Progress) -> MixedStream:
        """Return the stream of one dataset; its samples get ``__dataset__``, and ``__draw__`` if any dataset draws."""
        numbers = count()

        def begin(passes: int) -> Generator[Any, None, None]:
            epoch = progress.epoch + passes * PASS
            for sample, number in zip(dataset.iterate(epoch, progress.world, progress.version, progress.of), numbers):
                if not isinstance(sample, dict):
                    yield sample
                elif self.draws:
                    yield {"__draw__": number, **sample, "__dataset__": name}
                else:
                    yield {**sample, "__dataset__": name}

        empty = SampleError(f"{name}: no samples to mix: the dataset is empty, or its ops leave none")
        return MixedStream(begin, empty)


def check_shards(name: str, source: Any, workers: int) -> None:
    """Raise WorldError if one of *workers* would have no shard of the dataset *name*."""
    if isinstance(source, ShardSource) and len(source.shards) < workers:
        raise WorldError(
            f"{name}: {len(source.shards)} shards for {workers} workers of all ranks, and each needs one "
            "in a mixture: write more and smaller shards, index all with `tarindex`, or use fewer workers"
        )


class MixedShards(SampleReader):
    """The shards of several datasets, one after the other; ``starts`` has the number of each dataset's first shard."""

    reserved = 3  # with __dataset__

    def __init__(self, parts: Mapping[str, SampleReader]):
        self.parts: list[tuple[str, SampleReader]] = list(parts.items())
        self.starts: list[int] = list(accumulate((len(part.names) for part in parts.values()), initial=0))
        self.urls: list[str] = [url for part in parts.values() for url in part.urls]
        self.names: list[str] = [name for part in parts.values() for name in part.names]
        self.counts: np.ndarray = np.concatenate([part.counts for part in parts.values()])
        self.sizes: np.ndarray = np.concatenate([part.sizes for part in parts.values()])
        self.unpaired: int = sum(part.unpaired for part in parts.values())

    @property
    def sequences(self) -> list[SampleSequence]:
        return [each for _, part in self.parts for each in part.sequences]

    @contextmanager
    def ahead(
        self, upcoming: Iterator[Numbers], *, block: int | None, reach: int, processes: int, gap: float
    ) -> Iterator[MixedShards]:
        def choose(number: int, numbers: Numbers) -> Numbers:
            shards, samples = numbers
            own = (shards >= self.starts[number]) & (shards < self.starts[number + 1])
            return shards[own] - self.starts[number], samples[own]

        fan = Fan(upcoming, len(self.parts), choose)
        reader = copy.copy(self)
        reader.parts = []
        with ExitStack() as stack:
            for number, (name, part) in enumerate(self.parts):
                ahead = part.ahead(
                    fan.numbers(number),
                    block=block,
                    reach=reach,
                    processes=processes * len(self.parts),
                    gap=0.0,
                )
                reader.parts.append((name, stack.enter_context(ahead)))
            yield reader

    def read(self, shard: int, sample: int) -> Sample:
        number = bisect_right(self.starts, shard) - 1
        name, part = self.parts[number]
        result = part.read(shard - self.starts[number], sample)
        result["__dataset__"] = name
        return result

    def read_aside(self, shard: int, sample: int) -> Sample:
        number = bisect_right(self.starts, shard) - 1
        name, part = self.parts[number]
        return {**part.read_aside(shard - self.starts[number], sample), "__dataset__": name}

    def is_remote(self) -> bool:
        return any(part.is_remote() for _, part in self.parts)

    def verify(self) -> None:
        for _, part in self.parts:
            part.verify()
