"""``check_shuffle``: whether seeds, epochs, shards, samples, windows and workers are as independent as promised."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations, pairwise, zip_longest
from typing import Any

from tarshards.testing.chains import Chain, Leg, LoaderFault, check_ends, shown
from tarshards.testing.runs import Tested
from tarshards.testing.setups import Setup

DEGREES = ("seeds", "epochs", "shards", "samples", "windows", "workers")
SHARDS = (6, 6, 6, 6)
#: Pairs of ranks and workers.
TOPOLOGIES = ((1, 0), (1, 2), (2, 0))
#: Standard deviations that a uniform order exceeds once in 1e9 times.
FAR = 6.0

Order = list[int]
Permutation = Sequence[int]


def check_shuffle(
    make_loader: Callable[[Setup], Any],
    *,
    degrees: Sequence[str] = DEGREES,
    window: int | None = None,
    seeds: int = 150,
    **options: Any,
) -> dict[str, float]:
    """Compare a loader's orders with uniform permutations; raise LoaderFault if they are less random than promised.

    For each of this many *seeds*, two epochs of four shards of six samples are delivered: by one rank, by one rank with
    two workers, and by two ranks. The *degrees* of randomness are

    - "seeds", "epochs": the order is independent of that of another seed, or of the previous epoch, and never equal;
    - "shards": the shards come in any order; "samples": the samples of a shard come in any order;
    - "windows": a sample comes anywhere in the epoch; with *window*, samples move by at least a sixth of the window on
      average, compared with reading the shards in order;
    - "workers": the orders of samples within two shards, which different workers or ranks may read, are independent.

    Returns for each degree its largest deviation from the expectation, in standard deviations. The kind of a fault is
    the degree. The other options are those of ``Tested``.
    """
    if wrong := set(degrees) - set(DEGREES):
        raise ValueError(f"degrees are of {', '.join(DEGREES)}, not {', '.join(sorted(wrong))}")
    tested = Tested(make_loader, **options)
    found = dict.fromkeys(degrees, 0.0)
    for ranks, workers in TOPOLOGIES:
        setups = [Setup(SHARDS, ranks, workers, batch_size=2, seed=seed) for seed in range(seeds)]
        orders = [_orders(tested, setup) for setup in setups]
        _check_repeats(setups, orders, degrees)
        for degree in degrees:
            distance = _distance(degree, orders, window, "samples" in degrees)
            if distance > FAR:
                words = f"{distance:.0f} standard deviations from a uniform order, {ranks} ranks, {workers} workers"
                details = "\n".join(f"seed {seed}: {shown([tuple(orders[seed][0])])}" for seed in range(3))
                raise LoaderFault(degree, words, Chain((setups[0],)), details=details)
            found[degree] = max(found[degree], distance)
    return found


def _orders(tested: Tested, setup: Setup) -> list[Order]:
    """The samples of two epochs in their order; several ranks take turns."""
    leg = Leg(setup, tested.run(setup, 2))
    check_ends(leg, Chain((setup,)))
    turns = [zip_longest(*(run.samples(number) for run in leg.runs)) for number in range(2)]
    orders = [[sample for turn in epoch for sample in turn if sample is not None] for epoch in turns]
    for order in orders:
        if sorted(order) != list(range(setup.total)):
            raise LoaderFault("lost", "an epoch is not the dataset; use check_epoch first", Chain((setup,)))
    return orders


def _check_repeats(setups: list[Setup], orders: list[list[Order]], degrees: Sequence[str]) -> None:
    """Raise LoaderFault if two epochs, or two seeds, have the same order."""
    same = [setup for setup, (first, second) in zip(setups, orders) if first == second]
    if "epochs" in degrees and len(same) > len(setups) / 10:
        raise LoaderFault("epochs", f"two have one order, for {len(same)} of {len(setups)} seeds", Chain((same[0],)))
    for degree, some in ("seeds", [first for first, _ in orders]), ("epochs", [o for both in orders for o in both]):
        distinct = len(set(map(tuple, some)))
        if degree in degrees and distinct < (
            0.9 * len(some) if "samples" in degrees else math.factorial(len(SHARDS)) / 2
        ):
            words = f"{len(some)} orders of {len(setups)} seeds, of them {distinct} unlike"
            raise LoaderFault(degree, words, Chain((setups[0],)))


def _distance(degree: str, orders: list[list[Order]], window: int | None, is_within: bool) -> float:
    """Return how far a degree is from uniform, in standard deviations."""
    epochs = [order for both in orders for order in both]
    within = _positions_in_shards if is_within else _positions_of_shards
    if degree == "epochs":
        return excess(p for first, second in orders for p in map(_from_to, within(first), within(second)))
    if degree == "seeds":
        firsts = [first for first, _ in orders]
        return excess(p for one, other in pairwise(firsts) for p in map(_from_to, within(one), within(other)))
    if degree == "shards":
        return excess(p for order in epochs for p in _positions_of_shards(order))
    if degree == "samples":
        return excess(p for order in epochs for p in _positions_in_shards(order))
    if degree == "workers":
        return excess(_from_to(*two) for order in epochs for two in combinations(_positions_in_shards(order), 2))
    if window is None:
        return excess(_inverse(order) for order in epochs)
    moved = [abs(position - due) for order in epochs for position, due in _moves(order)]
    return 0.0 if sum(moved) / len(moved) >= window / 6 else math.inf


def excess(permutations: Iterable[Permutation]) -> float:
    """Return how far permutations of one size are from uniform by a chi-squared test, in standard deviations.

    >>> excess([(0, 1), (1, 0)] * 50) < 0 < 6 < excess([(0, 1)] * 100)
    True
    """
    every = list(permutations)
    size = len(every[0])
    times = Counter((i, value) for permutation in every for i, value in enumerate(permutation))
    due, freedom = len(every) / size, (size - 1) ** 2
    statistic = sum((times[i, j] - due) ** 2 / due for i in range(size) for j in range(size)) * (size - 1) / size
    spread = 2 / (9 * freedom)  # variance of the statistic's cube root, which is about normal (Wilson and Hilferty)
    return ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)


def _inverse(order: Sequence[int]) -> list[int]:
    """The position of each number of an order."""
    positions = [0] * len(order)
    for position, number in enumerate(order):
        positions[number] = position
    return positions


def _from_to(one: Permutation, other: Permutation) -> list[int]:
    """The permutation from positions in one order to positions in the other."""
    return [other[number] for number in _inverse(one)]


def _positions_of_shards(order: Order) -> list[Permutation]:
    """The position of each shard in the order of their mean positions."""
    positions, numbers = _inverse(order), Setup(SHARDS).numbers
    by_mean = sorted(range(len(SHARDS)), key=lambda shard: sum(positions[number] for number in numbers[shard]))
    return [_inverse(by_mean)]


def _positions_in_shards(order: Order) -> list[Permutation]:
    """For each shard, the order of its samples: the rank of each among the samples of the shard."""
    positions = _inverse(order)
    return [_inverse(sorted(range(len(own)), key=lambda i: positions[own[i]])) for own in Setup(SHARDS).numbers]


def _moves(order: Order) -> list[tuple[int, int]]:
    """For each sample, its position, and its position if the shards were read in order."""
    (of_shards,) = _positions_of_shards(order)
    due = sorted(range(len(order)), key=lambda number: (of_shards[number // SHARDS[0]], number))
    return list(zip(_inverse(order), _inverse(due)))
