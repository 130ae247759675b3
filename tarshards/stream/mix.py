"""Several datasets mixed into one, in proportions that hold at every moment, with one order and one state."""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from hashlib import blake2b
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from tarshards.epoch.options import EpochOptions, Tail
from tarshards.epoch.plan import PlannedEpoch
from tarshards.epoch.proportions import Mixture, Until, check_until
from tarshards.errors import StateError, whole_number
from tarshards.index.access import Fan, SampleReader
from tarshards.samples.fields import check_mapping
from tarshards.samples.keys import Sample
from tarshards.samples.ledger import ErrorPolicy, Ledger
from tarshards.stream.following import follow_part
from tarshards.stream.sources import PlannedSource
from tarshards.stream.stream import Stream, check_dataset

if TYPE_CHECKING:
    from tarshards.epoch.loop import Part
    from tarshards.index.fetch import Places

MOST_PARTS = 1 << 20  # of a mixture: the choices of one period, which are held in memory
PASS = 1 << 32  # added to a dataset's epoch each time it begins again within one epoch of the mixture

S = TypeVar("S", bound=Stream)


def mix(
    datasets: Mapping[str, S],
    *,
    weights: Mapping[str, float] | None = None,
    seed: int = 0,
    until: Until = "first",
    tail: Tail | None = None,
    on_error: ErrorPolicy = None,
) -> S:
    """Return one dataset that takes from several by *weights*, by default as many samples of each.

    At every moment, over all ranks together, each has had its share to within one sample; *seed* decides ties. Each
    dataset keeps its order, its fields and its ops; its samples get its name as ``__dataset__``. An epoch ends before
    the first dataset would begin again (*until* "first"), when the last has been read once ("last"), or after *until*
    samples; datasets that end earlier begin again, in another order. *tail* and *on_error* are as for a dataset.

    All datasets need an index. Raises ValueError for weights whose ratios are not those of whole numbers that add up to
    2**20 or less, and TypeError for ops that hold or count samples.
    """
    if not check_mapping(datasets, "mix", "{name: dataset}"):
        raise ValueError("there is nothing to mix")
    seed = whole_number("seed", seed)
    weights = check_mapping(dict.fromkeys(datasets, 1) if weights is None else weights, "weights=", "{name: weight}")
    if weights.keys() != datasets.keys():
        raise ValueError(f"weights are of {sorted(weights)}, and datasets {sorted(datasets)}")
    for name, dataset in datasets.items():
        check_dataset(dataset, "mix")
        if not isinstance(dataset.source, PlannedSource):
            raise TypeError(f"{name}: mixing requires indexed shards; run `tarindex` first")
        for op in dataset.ops:
            if not op.traits.per_sample:
                raise TypeError(f"{name}: {op.name} holds or counts samples; apply it to the mixture")
    shares = [weights[name] for name in datasets]
    source = MixedSource(datasets, shares, seed, check_until(until), tail, on_error)
    return next(iter(datasets.values()))._over(source)


class MixedSource(PlannedSource):
    """The samples of several planned sources, in the order of a ``MixedPlan``."""

    once = False
    ordered_by = ("tail",)

    def __init__(
        self,
        datasets: Mapping[str, Stream],
        weights: Sequence[float],
        seed: int,
        until: Until,
        tail: Tail | None,
        on_error: ErrorPolicy,
    ):
        self.options, self.seed = EpochOptions(seed=seed, tail=tail), seed
        self.sources: list[PlannedSource] = [dataset.source for dataset in datasets.values()]
        self.shards = self.mixed = MixedShards({name: dataset.source.shards for name, dataset in datasets.items()})
        sizes = [int(source.shards.counts.sum()) for source in self.sources]
        self.choices = Choices([str(weight) for weight in weights], seed, sizes, until)
        self.ledger = Ledger.of(on_error)
        orders = [(name, s.digest, s.seed, s.pool, s.options.shuffle) for name, s in zip(datasets, self.sources)]
        settings = repr((orders, list(weights), seed, until))
        self.digest = blake2b(settings.encode(), digest_size=16).hexdigest()
        self.datasets = dict(datasets)
        self.ops = [op for dataset in datasets.values() for op in (*dataset.source.ops, *dataset.ops)]

    @property
    def order(self) -> list[Any]:
        return [self.options.tail]  # the rest is in the digest

    def plan(self, epoch: int, ranks: int, state: Mapping[str, Any] | None = None) -> MixedPlan:
        tail = self.options.tail_for(ranks)
        if state is None:
            return MixedPlan(self, epoch, 0, ranks, tail)
        begun, position = state.get("epoch"), state.get("position")
        if type(begun) is not int or type(position) is not int or not 0 <= position <= self.choices.total:
            raise StateError(f"a mixture's state has epoch {begun!r} and position {position!r}")
        return MixedPlan(self, begun, position, ranks, tail)

    def read(self, part: Part, epoch: int) -> Iterator[Sample]:
        for sample in part.read(self.shards, self.ledger):
            ops = self.datasets[sample["__dataset__"]].ops
            if ops:
                yield from follow_part(ops, [sample], epoch, self.ledger, part.leave_out)
            else:
                yield sample


class Choices:
    """The dataset of each position, and how many of its samples came before; choices repeat after a period.

    *total* is the length of an epoch over datasets of these *sizes*.
    """

    def __init__(self, weights: list[str], seed: int, sizes: list[int], until: Until):
        mixture = Mixture(weights, seed)
        if mixture.period > MOST_PARTS:
            raise ValueError(f"weights {', '.join(weights)} have no ratios of whole numbers up to {MOST_PARTS} in all")
        self.period = mixture.period
        self.dataset = np.array(mixture.take(self.period), np.int64)
        self.shares = np.array(mixture.counts, np.int64)
        self.number = np.empty(self.period, np.int64)  # of the sample among its dataset's in the period
        for i, share in enumerate(self.shares):
            self.number[self.dataset == i] = np.arange(share)
        self.total = until if isinstance(until, int) else self._end(sizes, until)
        for i, size in enumerate(sizes):
            if not size and self.shares[i] and self.total:
                raise ValueError(f"dataset {i} of the mixture has no samples")

    def _end(self, sizes: list[int], until: str) -> int:
        """The length of an epoch until the first dataset would begin again, or the last has been read."""
        first, ends = until == "first", []
        for i, size in enumerate(sizes):
            if self.shares[i]:
                periods, rest = divmod(size if first else size - 1, int(self.shares[i]))
                ends.append(periods * self.period + int(np.flatnonzero(self.dataset == i)[rest]) + (not first))
        return max(0, (min if first else max)(ends))

    def look_up(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the datasets of *positions*, and the numbers of the samples among all that have come of theirs."""
        periods, place = positions // self.period, positions % self.period
        dataset = self.dataset[place]
        return dataset, periods * self.shares[dataset] + self.number[place]


class MixedPlan(PlannedEpoch):
    """What is left of a mixture's epoch from the position *begin* on; the shards are those of all datasets, in turn."""

    def __init__(self, source: MixedSource, epoch: int, begin: int, ranks: int, tail: Tail):
        self.source, self.epoch, self.begin, self.ranks, self.tail = source, epoch, begin, ranks, tail
        self.total = source.choices.total - begin
        self._plans: dict[tuple[int, int], PlannedEpoch] = {}

    def __getitem__(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        positions = np.asarray(positions, np.int64)
        every = max(1, self.source.choices.total)  # what is past the end repeats the epoch's start
        rest = positions - self.total
        positions = np.where(rest < 0, positions + self.begin, rest % every)
        dataset, number = self.source.choices.look_up(positions)
        shards, samples = np.empty_like(positions), np.empty_like(positions)
        for i in np.unique(dataset):
            size = int(self.source.sources[i].shards.counts.sum())
            here = np.flatnonzero(dataset == i)
            for again in np.unique(number[here] // size):
                these = here[number[here] // size == again]
                shard, sample = self._plan(int(i), int(again))[number[these] % size]
                shards[these], samples[these] = shard + self.source.mixed.starts[i], sample
        return shards, samples

    def _plan(self, dataset: int, again: int) -> PlannedEpoch:
        plan = self._plans.get((dataset, again))
        if plan is None:
            plan = self.source.sources[dataset].plan(self.epoch + again * PASS, 1)
            self._plans = {pair: old for pair, old in self._plans.items() if pair[0] != dataset or pair[1] == again - 1}
            self._plans[dataset, again] = plan
        return plan

    def resume(self, position: int, ranks: int, tail: Tail | None = None) -> MixedPlan:
        """Return what is left, for *ranks*, after all ranks together took *position* positions."""
        begin = self.begin + min(position, self.total)
        return MixedPlan(self.source, self.epoch, begin, ranks, tail or self.tail)

    def state(self, taken: int) -> dict[str, Any]:
        """Return, for JSON, the state after *taken* positions."""
        return {"epoch": self.epoch, "position": self.begin + min(taken, self.total)}


class MixedShards(SampleReader):
    """The shards of several datasets, one after the other; *starts* says where those of each begin."""

    reserved = 3  # with __dataset__

    def __init__(self, parts: Mapping[str, SampleReader]):
        self.parts = list(parts.items())
        self.starts = list(accumulate((len(part.names) for part in parts.values()), initial=0))
        self.urls = [url for part in parts.values() for url in part.urls]
        self.names = [name for part in parts.values() for name in part.names]
        self.counts = np.concatenate([part.counts for part in parts.values()])
        self.sizes = np.concatenate([part.sizes for part in parts.values()])

    @contextmanager
    def ahead(
        self, upcoming: Iterator[Places], *, block: int | None, reach: int, processes: int
    ) -> Iterator[MixedShards]:
        def choose(number: int, places: Places) -> Places:
            shards, samples = places
            own = (shards >= self.starts[number]) & (shards < self.starts[number + 1])
            return shards[own] - self.starts[number], samples[own]

        fan = Fan(upcoming, len(self.parts), choose)
        reader = copy.copy(self)
        reader.parts = []
        with ExitStack() as stack:
            for number, (name, part) in enumerate(self.parts):
                ahead = part.ahead(fan.places(number), block=block, reach=reach, processes=processes * len(self.parts))
                reader.parts.append((name, stack.enter_context(ahead)))
            yield reader

    def read(self, shard: int, sample: int) -> Sample:
        number = bisect_right(self.starts, shard) - 1
        name, part = self.parts[number]
        result = part.read(shard - self.starts[number], sample)
        result["__dataset__"] = name
        return result

    def is_remote(self) -> bool:
        return any(part.is_remote() for _, part in self.parts)

    def verify(self) -> None:
        for _, part in self.parts:
            part.verify()
