"""Inside the pool the order is statistically a permutation, for any number of samples, ranks and batches."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache
from itertools import permutations, product
from pathlib import Path

import numpy as np
import pytest
from soak import some

from tarshards import EpochPlan, Stream, TarWriter, bucket, build_index, mix, pack
from tarshards.epoch.plan import POOL, PlannedEpoch
from tarshards.epoch.selection import SelectedPlan, Selection

CLASSES = 10
ENOUGH, MANY = 50_000, 250  # samples of several epochs, and epochs, from which a mean is taken
SIZES = [2, 3, 7, 10, 40, 100, 191, 193, 1000, 3071, 3073, 10_000, 20_000]
RANKS = [1, 7, 8, 64]

Plans = Callable[[int], PlannedEpoch]  # the plan of an epoch


def delivered(plan: PlannedEpoch, first: np.ndarray) -> list[np.ndarray]:
    """Return the samples of each rank in their order, as numbers over all shards."""
    shards, numbers = plan.unpacked[plan.sample_positions(np.arange(len(plan)))]
    samples = first[shards] + numbers
    if plan.sizes is not None:
        ends = np.cumsum(plan.sizes)[:-1]
        bins = np.split(samples, ends)
        return [np.concatenate(bins[rank :: plan.ranks]) for rank in range(min(plan.ranks, len(bins)))]
    return [samples[rank :: plan.ranks] for rank in range(plan.ranks)]


def epochs(plans: Plans, total: int, counts) -> list[np.ndarray]:
    """Return the samples of each rank in several epochs."""
    first = np.cumsum(counts) - counts
    many = min(MANY, max(1, ENOUGH // total))
    return [samples for epoch in range(many) for samples in delivered(plans(epoch), first) if len(samples)]


def check_classes(orders: list[np.ndarray], total: int, *, batch: int = 10, chosen: np.ndarray | None = None) -> None:
    """Compare the classes a batch of *total* samples, sorted by their classes, with those of a true permutation."""
    found, expected = 0, 0.0
    for samples in orders:
        ranks = samples if chosen is None else np.searchsorted(chosen, samples)
        size = min(batch, len(samples))
        whole = np.sort((ranks * CLASSES // total)[: len(samples) // size * size].reshape(-1, size))
        found += int((1 + (np.diff(whole) != 0).sum(axis=1)).sum())
        expected += len(whole) * classes_of_a_permutation(total, size)
    assert found == pytest.approx(expected, rel=0.03)


@cache
def classes_of_a_permutation(total: int, batch: int) -> float:
    sizes = Counter(number * CLASSES // total for number in range(total)).values()
    return sum(1 - math.comb(total - size, batch) / math.comb(total, batch) for size in sizes)


def check_neighbours(orders: list[np.ndarray], total: int) -> None:
    """Compare how many samples come one after the other that are near each other in storage."""
    near = max(1, total // 100)
    pairs = sum(total - apart for apart in range(1, near + 1)) / math.comb(total, 2)
    found = sum(int((np.abs(np.diff(samples)) <= near).sum()) for samples in orders)
    expected = pairs * sum(len(samples) - 1 for samples in orders)
    assert abs(found - expected) <= max(0.07 * expected, 4 * math.sqrt(expected))


def in_shards(total: int) -> list[int]:
    """The counts of shards of unlike sizes."""
    counts, left = [], total
    while left:
        counts.append(min(left, 1 + 97 * len(counts) % 1500))
        left -= counts[-1]
    return counts


@pytest.mark.soak
@pytest.mark.parametrize(("total", "ranks"), some([*product(SIZES, RANKS)], 3))
def test_batches_and_neighbours_are_those_of_a_permutation(total, ranks):
    counts = in_shards(total)

    def plans(epoch: int) -> EpochPlan:
        return EpochPlan(counts, seed=total, epoch=epoch, ranks=ranks)

    orders = epochs(plans, total, counts)
    check_classes(orders, total)
    check_classes(orders, total, batch=32)
    check_neighbours(orders, total)


@pytest.mark.parametrize("total", [2, 3, 4])
@pytest.mark.parametrize("ranks", [1, 3])
def test_all_permutations_are_equally_frequent(total, ranks):
    """By a chi-squared test over seeds, whose statistic a uniform order exceeds once in a thousand times."""
    each = 60
    seeds = each * math.factorial(total)
    orders = Counter(tuple(EpochPlan([1, total - 1], seed=s, epoch=0, ranks=ranks)) for s in range(seeds))
    assert len(orders) == math.factorial(total) == len(list(permutations(range(total))))
    assert sum((count - each) ** 2 / each for count in orders.values()) < {2: 10.8, 3: 20.5, 4: 49.7}[total]


@pytest.mark.parametrize("ranks", [1, 8])
def test_every_sample_comes_anywhere_equally_often(ranks):
    total, seeds = 60, 1200
    times = np.zeros((total, total))
    for seed in range(seeds):
        shards, numbers = EpochPlan([25, 35], seed=seed, epoch=1, ranks=ranks)[:]
        times[np.arange(total), shards * 25 + numbers] += 1
    due = seeds / total
    freedom = (total - 1) ** 2
    assert abs(((times - due) ** 2 / due).sum() - freedom) < 4 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("ranks", [1, 8])
def test_the_largest_pool_is_one_permutation(ranks):
    counts = np.full(POOL // 1024, 1024)
    check_classes(epochs(lambda epoch: EpochPlan(counts, seed=5, epoch=epoch, ranks=ranks), POOL, counts), POOL)


@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize("number", [100, 1000])
def test_selections(number, ranks):
    counts = np.full(20, 1000)
    chosen = np.sort(np.random.default_rng(0).permutation(20_000)[:number])
    selection = Selection(counts, chosen)

    def plans(epoch: int) -> SelectedPlan:
        return SelectedPlan(EpochPlan(selection.counts, seed=3, epoch=epoch, ranks=ranks), selection)

    check_classes(epochs(plans, number, counts), number, chosen=chosen)


@pytest.mark.parametrize("ranks", [3, 7, 8])
def test_what_a_resume_leaves(ranks):
    counts = in_shards(2000)

    def plans(epoch: int) -> EpochPlan:
        return EpochPlan(counts, seed=0, epoch=epoch).resume(1333, 5).resume(10, ranks)

    check_classes(epochs(plans, 2000, counts), 2000)


@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize("kind", ["pack", "bucket"])
def test_bins(kind, ranks):
    """Lengths that do not depend on the classes leave the classes mixed."""
    counts = in_shards(1000)
    lengths = np.random.default_rng(1).integers(1, 9, 1000)
    packing = pack(lengths, 16) if kind == "pack" else bucket(lengths, budget=16)

    def plans(epoch: int) -> PlannedEpoch:
        def whole(state) -> EpochPlan:
            return EpochPlan(counts, seed=1, epoch=epoch)

        return packing.plan(counts, whole, ranks=ranks, tail="exact")

    check_classes(epochs(plans, 1000, counts), 1000)


# The same laws for streams over indexed shards, from which loaders take their plans.


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Shards of 300, 500 and 200 samples of 10 bytes, and one of 40 of 100 KB."""
    folder = tmp_path_factory.mktemp("law")
    for number, (count, size) in enumerate([(300, 10), (500, 10), (200, 10), (40, 100_000)]):
        path = str(folder / f"{number}.tar")
        with TarWriter(path) as writer:
            for i in range(count):
                writer.write({"__key__": f"{number}{i:05d}", "bin": bytes(size)})
        build_index(path).save(path)
    return folder


def orders(plans: Iterable[PlannedEpoch]) -> list[list[tuple[int, int]]]:
    return [list(zip(*(array.tolist() for array in plan[np.arange(len(plan))]))) for plan in plans]


@pytest.mark.parametrize("ranks", [1, 7, 8])
def test_streams(folder, ranks):
    counts = [300, 500, 200]
    stream = Stream.from_shards(str(folder / "{0..2}.tar"), shuffle=True, seed=1)
    check_classes(epochs(lambda epoch: stream.source.plan(epoch, ranks), 1000, counts), 1000)
    chosen = np.arange(5, 1000, 10)
    keys = [key for i, key in enumerate(stream.source.shards.keys) if i in set(chosen.tolist())]
    some = stream.select(keys=keys)
    check_classes(epochs(lambda epoch: some.source.plan(epoch, ranks), 100, counts), 100, chosen=chosen)


def test_each_dataset_of_a_mixture(folder):
    datasets = {name: Stream.from_shards(str(folder / f"{name}.tar"), shuffle=True) for name in "03"}
    mixture = mix(datasets, weights={"0": 3, "3": 1}, until="last").source
    plans = [mixture.plan(epoch, 1)[np.arange(300)] for epoch in range(100)]
    for shard, total in ((0, 300), (1, 40)):
        check_classes([numbers[shards == shard][:total] for shards, numbers in plans], total)


def test_the_sizes_of_samples_do_not_change_the_order_inside_the_pool(folder):
    """They decide how many samples are read at one go, and how many a block has where the pool is smaller."""
    large = Stream.from_shards(str(folder / "3.tar"), shuffle=True)
    plan = large.source.plan(0, 1)
    assert orders([plan]) == orders([EpochPlan([40], seed=0, epoch=0)])
    assert plan.block_and_reach == (10, 40)
    assert large.source.plan(0, 1, plan.state(8)).block_and_reach == (10, 32)
    small_pool = Stream.from_shards(str(folder / "3.tar"), shuffle=True, pool=39).source.plan(0, 1)
    assert (small_pool.state(0)["block"], small_pool.state(0)["pool"]) == (10, 39)


def test_a_block_or_a_pool_that_is_asked_for_is_used(folder):
    stream = Stream.from_shards(str(folder / "{0..2}.tar"), shuffle=True, block=16)
    assert orders([stream.source.plan(0, 1)]) == orders([EpochPlan([300, 500, 200], seed=0, epoch=0, block=16)])
    state = Stream.from_shards(str(folder / "{0..2}.tar"), shuffle=True, pool=500).source.plan(0, 1).state(0)
    assert (state["block"], state["pool"]) == (16, 500)
