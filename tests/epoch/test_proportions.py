"""A mixture has given every source its share, to within one, at every moment."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tarshards.epoch.proportions import Mixture
from tarshards.errors import StateError

numbers = st.one_of(
    st.integers(0, 10),
    st.integers(0, 10**30),
    st.floats(0, 1e6),
    st.fractions(0, 5, max_denominator=1000),
)
mixtures = st.lists(numbers, min_size=1, max_size=8).filter(any)
seeds = st.integers(-(2**70), 2**70)
GOLDEN = "021020103021021020103021"


def share_of(weight):
    return Fraction(str(weight))


@settings(max_examples=250)
@given(mixtures, seeds, st.integers(1, 300))
def test_every_source_has_its_share_at_every_prefix(weights, seed, steps):
    shares = [share_of(weight) for weight in weights]
    sources, total = sum(map(bool, shares)), sum(shares)
    bound = 1 - Fraction(1, max(2 * sources - 2, 1))  # Tijdeman's, which is the best there is
    counts = Counter()
    for n, source in enumerate(Mixture(weights, seed).take(steps), 1):
        counts[source] += 1
        for i, share in enumerate(shares):
            assert abs(share * n / total - counts[i]) <= bound


def test_nothing_drifts_in_a_billion_steps():
    weights = [0.7, 0.2, 0.1]
    counts = [700_000_001, 200_000_000, 99_999_999]
    later = Mixture([7, 2, 1], 0, [700_000_000, 200_000_000, 100_000_000])
    assert later.take(1000) == Mixture(weights, 0).take(1000)
    with pytest.raises(StateError):
        Mixture(weights, 0, counts)


def test_only_the_ratios_of_weights_count():
    first = Mixture([3, 1, 0, 2], 5).take(100)
    for weights in ([0.3, 0.1, 0.0, 0.2], [Fraction(3, 7), Fraction(1, 7), 0, Fraction(2, 7)], np.array([3, 1, 0, 2])):
        assert Mixture(weights, 5).take(100) == first
    assert 2 not in first


def test_the_seed_decides_among_equals_only():
    assert {tuple(Mixture([1, 1, 1], seed).take(3)) for seed in range(100)} == {
        (0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)
    }  # fmt: skip
    assert len({tuple(Mixture([0.5, 0.3, 0.2], seed).take(100)) for seed in range(20)}) < 20


def test_golden_choices():
    assert "".join(map(str, Mixture([5, 3, 3, 1], 1).take(24))) == GOLDEN


@given(st.integers(1, 8), seeds)
def test_equal_weights_take_turns(sources, seed):
    choices = Mixture([0.1] * sources, seed).take(10 * sources)
    assert all(sorted(choices[i : i + sources]) == list(range(sources)) for i in range(0, len(choices), sources))


@pytest.mark.parametrize(
    "weights", [[], [0], [0, 0.0], [1, -1], [1, float("nan")], [float("inf"), 1], [1, -0.5], [None], ["a"], ["1/0"]]
)
def test_bad_weights_are_refused(weights):
    with pytest.raises(ValueError, match=r"^weights must be"):
        Mixture(weights, 0)


@pytest.mark.parametrize("counts", [[1], [1, 1, 1], [0, 2], [-1, 1], [3, 0], [1.0, 0], [True, 0], ["1", 0]])
def test_counts_of_other_mixtures_are_refused(counts):
    with pytest.raises(StateError, match="counts"):
        Mixture([1, 1], 0, counts)


@given(mixtures, seeds)
def test_a_source_of_no_weight_never_comes(weights, seed):
    weights = [0, *weights, 0.0]
    assert all(weights[source] for source in Mixture(weights, seed).take(100))
