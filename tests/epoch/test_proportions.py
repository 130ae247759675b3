"""At every position of a mixture, every source has contributed its share, to within one."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tarshards.epoch.proportions import FINE, Mixture, Quotas, check_counts, check_until
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


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ([0, 0.0], r"positive or 0, and not all 0, not \[0, 0.0\]"),
        ([1, -1], r"positive or 0, and not all 0, not \[1, -1\]"),
        ([1, None], r"finite numbers, not \[1, None\]"),
        ([{0: 0}, {0: 0, 5: 1}], r"positive or 0, and not all 0 at position 0, not \[{0: 0}, {0: 0, 5: 1}\]"),
    ],
)
def test_an_error_names_the_weights(weights, said):
    with pytest.raises(ValueError, match=f"^weights must be {said}$"):
        Quotas(weights)


@pytest.mark.parametrize("counts", [[1], [1, 1, 1], [0, 2], [-1, 1], [3, 0], [1.0, 0], [True, 0], ["1", 0]])
def test_counts_of_other_mixtures_are_refused(counts):
    with pytest.raises(StateError, match="counts"):
        Mixture([1, 1], 0, counts)


@given(mixtures, seeds)
def test_a_source_of_no_weight_never_comes(weights, seed):
    weights = [0, *weights, 0.0]
    assert all(weights[source] for source in Mixture(weights, seed).take(100))


def test_counts_far_from_the_start_are_exact():
    """Beyond 2**53, where floats are not."""
    begun = Mixture([2, 1], 0, [2 * 10**17, 10**17])
    assert begun.take(300) == Mixture([2, 1], 0).take(300)
    assert Quotas([1, 1]).first(0, 10**17 + 1, beyond=True) == 2 * 10**17 + 3


def test_where_a_source_is_due():
    quotas = Quotas([{0: 1, 10: 0}, {0: 1}])
    assert [quotas.phase(0, 5).begin, quotas.phase(0, 5, beyond=True).begin] == [0, 10]
    assert [quotas.first(0, 5), quotas.first(0, 5, beyond=True), quotas.first(0, 6)] == [10, None, None]
    assert [quotas.first(1, 5), quotas.first(1, 5, beyond=True)] == [10, 11]
    assert Quotas([{0: 0, 10: 1}, {0: 1}]).first(0, 0) == 0


def test_of_two_that_are_due_at_once_the_seed_decides():
    assert {tuple(Mixture([1, 3], seed).take(4)) for seed in range(20)} == {(1, 0, 1, 1), (1, 1, 0, 1)}


def slowly(weights, seed: int, steps: int) -> list[int]:
    """The choices by the definition: among sources that are due, the one that would be late first."""
    mixture = Mixture(weights, seed)
    quotas, order = mixture.quotas, mixture._sources
    part = Fraction(1, quotas.parts)
    table = [quotas.at(position) for position in range(2 * steps + 200)]
    counts = [0] * len(quotas.weights)
    chosen = []

    def late(source, step):
        most = counts[source] + 1 - part
        return next((n for n in range(step, len(table)) if table[n][source] > most), len(table))

    for step in range(1, steps + 1):
        due = [source for source in order if table[step][source] - counts[source] >= part]
        chosen.append(min(due, key=lambda source: late(source, step)))
        counts[chosen[-1]] += 1
    return chosen


@pytest.mark.parametrize(
    "weights",
    [
        [5, 2, 1],
        [1, 1, 1, 1],
        [7],
        [{0: 1, 10: 0}, {0: 1}],
        [{0: 3, 7: 1, 20: 5}, {0: 1}, {0: 0, 11: 4, 40: 0}, {0: 2, 13: 1}],
        [{0: 1, 3: 9, 5: 1, 9: 0, 12: 2}, {0: 2, 30: 1}, {0: 5, 8: 1}],
        [{0: 0.1, 6: 3}, {0: 1, 5: 0, 25: 1}, {0: 0.7, 15: 0.2}],
    ],
)
def test_the_source_that_would_be_late_first_comes(weights):
    for seed in range(3):
        assert Mixture(weights, seed).take(60) == slowly(weights, seed, 60)


def test_quotas_of_many_changes_have_few_bits():
    weights = [{n: 1 + n * n % 97 for n in range(0, 300, 3)}, {n: 1 + n * n % 89 for n in range(0, 300, 3)}, {0: 1}]
    many = [{n: 1 + n**5 % 1_000_003 for n in range(0, 300, 3)}, {0: 10**6}, {0: 1, 7: 0}]
    for quotas in (Quotas(weights), Quotas(many)):
        assert max(phase.unit.bit_length() for phase in quotas.phases) <= 2 * FINE
        assert all(sum(quotas.at(position)) == position for position in range(400))
    shares = Fraction(0)
    for position in range(299):
        now = many[0][position // 3 * 3]
        shares += Fraction(now, now + 10**6 + (position < 7))
    assert abs(Quotas(many).at(299)[0] - shares) < Fraction(1, 2**240)
    assert Quotas(many).at(299)[2] == Quotas(many).at(7)[2]


@pytest.mark.parametrize(
    ("counts", "position", "said"),
    [
        ([1], None, r"counts \[1\] are not those of 2 sources"),
        ([-1, 1], 0, r"counts \[-1, 1\] are not those of position 0"),
        ([1, 1], 3, r"counts \[1, 1\] are not those of position 3"),
        ([3, 0], 3, r"counts \[3, 0\] are not those of a mixture by these weights"),
    ],
)
def test_an_error_names_the_counts(counts, position, said):
    with pytest.raises(StateError, match=f"^{said}$"):
        check_counts(Quotas([1, 1]), counts, position)
    assert check_counts(Quotas([1, 1]), [1, 2], 3) == 3


def test_when_a_mixture_ends():
    assert [check_until(until) for until in ("first", "last", 0, 9)] == ["first", "last", 0, 9]
    for until in ("First", -1, True, 1.0, None):
        with pytest.raises(ValueError, match=rf'^until= is "first", "last" or a number of samples, not {until!r}$'):
            check_until(until)
