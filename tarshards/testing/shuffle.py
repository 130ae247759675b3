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
#: Ranks and workers.
TOPOLOGIES = ((1, 0), (1, 2), (2, 0))
#: Standard deviations: a uniform order is farther off once in 1e9 times.
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
    """Compare the orders of a loader with true permutations; raise LoaderFault if they are not as random as promised.

    Two epochs of four shards of six samples are delivered for each of so many *seeds*: by one rank, by one with two
    workers, and by two ranks. Of the *degrees*

    - "seeds", "epochs": an order is independent of that of another seed, and of the epoch before it, and never the
      same;
    - "shards": the shards come in any order; "samples": the samples of a shard come in any order;
    - "windows": a sample comes anywhere in the epoch; with *window* the samples move by at least a sixth of so many on
      average, from where they are if the shards are read one after the other in their order;
    - "workers": the orders of the samples of two shards, which other workers or ranks may read, are independent.

    Returns by how many standard deviations each degree is from its expectation, at most. The kind of a fault is the
    degree. The other options are those of ``Tested``.
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
    """The samples of two epochs in their order; of several ranks in turn."""
    leg = Leg(setup, tested.run(setup, 2))
    check_ends(leg, Chain((setup,)))
    turns = [zip_longest(*(run.samples(number) for run in leg.runs)) for number in range(2)]
    orders = [[sample for turn in epoch for sample in turn if sample is not None] for epoch in turns]
    for order in orders:
        if sorted(order) != list(range(setup.total)):
            raise LoaderFault("lost", "an epoch is not the dataset; use check_epoch first", Chain((setup,)))
    return orders


def _check_repeats(setups: list[Setup], orders: list[list[Order]], degrees: Sequence[str]) -> None:
    """Raise LoaderFault if epochs have the order of others, or seeds that of others."""
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
    """How far a degree is from uniform, in standard deviations."""
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
    """By how many standard deviations a chi-squared test finds permutations of one size not uniform.

    >>> excess([(0, 1), (1, 0)] * 50) < 0 < 6 < excess([(0, 1)] * 100)
    True
    """
    every = list(permutations)
    size = len(every[0])
    times = Counter((i, value) for permutation in every for i, value in enumerate(permutation))
    due, freedom = len(every) / size, (size - 1) ** 2
    statistic = sum((times[i, j] - due) ** 2 / due for i in range(size) for j in range(size)) * (size - 1) / size
    spread = 2 / (9 * freedom)  # of the statistic's cube root, which is about normal (Wilson and Hilferty)
    return ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)


def _inverse(order: Sequence[int]) -> list[int]:
    """The position of each number of an order."""
    positions = [0] * len(order)
    for position, number in enumerate(order):
        positions[number] = position
    return positions


def _from_to(one: Permutation, other: Permutation) -> list[int]:
    """The permutation that leads from the positions in one order to those in the other."""
    return [other[number] for number in _inverse(one)]


def _positions_of_shards(order: Order) -> list[Permutation]:
    """The position of each shard in the order of their mean positions."""
    positions, numbers = _inverse(order), Setup(SHARDS).numbers
    by_mean = sorted(range(len(SHARDS)), key=lambda shard: sum(positions[number] for number in numbers[shard]))
    return [_inverse(by_mean)]


def _positions_in_shards(order: Order) -> list[Permutation]:
    """For each shard the position of each of its samples among them."""
    positions = _inverse(order)
    return [_inverse(sorted(range(len(own)), key=lambda i: positions[own[i]])) for own in Setup(SHARDS).numbers]


def _moves(order: Order) -> list[tuple[int, int]]:
    """For each sample its position, and the one it would have if the shards were read one after the other."""
    (of_shards,) = _positions_of_shards(order)
    due = sorted(range(len(order)), key=lambda number: (of_shards[number // SHARDS[0]], number))
    return list(zip(_inverse(order), _inverse(due)))
