"""At every position of a mixture, every source has contributed its share, to within one: weights constant or changing.

The oracle adds the shares up by itself, in fractions.
"""

from __future__ import annotations

import json
import pickle
from fractions import Fraction
from itertools import islice, pairwise
from math import inf

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tarshards.epoch.proportions import FINE, Mixture, Quotas, check_counts, check_until, stepwise
from tarshards.errors import StateError

numbers = st.one_of(
    st.integers(0, 10),
    st.integers(0, 10**30),
    st.floats(0, 1e6),
    st.fractions(0, 5, max_denominator=1000),
)
constants = st.lists(numbers, min_size=1, max_size=8).filter(any)
weight = st.one_of(st.just(0), st.integers(0, 9), st.fractions(0, 3, max_denominator=97), st.floats(1e-6, 100))
knots = st.one_of(st.integers(1, 40), st.integers(1, 1000), st.integers(1, 10**9))
curve = st.builds(lambda first, more: {0: first, **more}, weight, st.dictionaries(knots, weight, max_size=4))
seeds = st.integers(-(2**70), 2**70)
GOLDEN = "021020103021021020103021"


def weights_at(weights, position):
    """The weights at *position*, by the definition."""
    return [Fraction(str(weight[max(knot for knot in weight if knot <= position)])) for weight in weights]


def is_possible(weights):
    return all(any(weights_at(weights, knot)) for knot in {knot for weight in weights for knot in weight})


schedules = st.lists(curve, min_size=1, max_size=6).filter(is_possible)
mixtures = st.one_of(constants, schedules)


def curves(weights):
    return [weight if isinstance(weight, dict) else {0: weight} for weight in weights]


def oracle(weights, positions):
    """The sums of the weights over their sum, from 0 to each of *positions*, ascending."""
    bounds = sorted({knot for weight in weights for knot in weight})
    quotas, begin = [Fraction(0)] * len(weights), 0
    for position in positions:
        while begin < position:
            end = min([position, *(bound for bound in bounds if bound > begin)])
            now = weights_at(weights, begin)
            quotas = [quota + weight * (end - begin) / sum(now) for quota, weight in zip(quotas, now)]
            begin = end
        yield position, list(quotas)


def assert_quotas(weights, seed, steps):
    """Take *steps* choices, and compare every prefix with the sums; the bound is Tijdeman's, the best there is."""
    sources = sum(any(weight.values()) for weight in curves(weights))
    bound = 1 - Fraction(1, max(2 * sources - 2, 1)) + Fraction(1, 2**200)  # quotas where weights change are rounded
    counts = [0] * len(weights)
    choices = Mixture(weights, seed).take(steps)
    for choice, (position, quotas) in zip(choices, oracle(curves(weights), range(1, steps + 1))):
        counts[choice] += 1
        assert max(abs(quota - count) for quota, count in zip(quotas, counts)) <= bound, (position, counts)


@settings(max_examples=75, deadline=None)
@given(mixtures, seeds, st.integers(1, 150))
def test_every_source_has_its_share_at_every_prefix(weights, seed, steps):
    assert_quotas(weights, seed, steps)


@pytest.mark.parametrize(
    "weights",
    [
        [{0: 1, 1000: 0.5}, {0: 1}],
        [{0: 1, 1501: 0}, {0: 0, 700: 0, 1500: 1}],
        [{0: 1}, {0: 0, 333: 0, 334: 5, 777: 0}, {0: 0, 1234: "1/3"}],
        [{0: "1/3", 100: 0, 200: "1/3"}, {0: "1/3"}, {0: "1/3"}, {0: 0.001}, {0: 0, 1999: 1}, {0: 1, 1: 0, 2: 1}],
        [{0: 0.001, 900: 0}, {0: 1, 901: 1000}, {0: 1000, 1801: 0.001}],
        [{0: 1e-9, 3: 1, 900: 1e-9}, {0: 1}],
    ],
)
def test_quotas_hold_to_the_last_change_and_beyond(weights):
    assert_quotas(weights, 7, 2500)


@settings(max_examples=50, deadline=None)
@given(schedules, st.lists(st.integers(0, 2 * 10**9), min_size=1, max_size=8), st.integers(1, 7))
def test_quotas_are_the_sums_of_the_shares(weights, positions, stride):
    quotas = Quotas(weights, stride=stride)
    for position, expected in oracle(weights, sorted(position * stride for position in positions)):
        found = quotas.at(position // stride)
        assert sum(found) == position // stride
        assert max(abs(q - e / stride) for q, e in zip(found, expected)) <= Fraction(1, 10**30)


@settings(max_examples=100, deadline=None)
@given(mixtures, st.integers(1, 5))
def test_quotas_never_fall_and_phases_follow_each_other(weights, stride):
    phases = Quotas(weights, stride=stride).phases
    assert phases[0].begin == 0
    assert phases[-1].end == inf
    for phase in phases:
        assert min(phase.growth) >= 0
        assert sum(phase.growth) == phase.unit
    for phase, following in pairwise(phases):
        assert phase.begin < phase.end == following.begin
        assert following.at(phase.end) == phase.at(phase.end)


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


def test_golden_choices():
    assert "".join(map(str, Mixture([5, 3, 3, 1], 1).take(24))) == GOLDEN


def test_only_the_ratios_of_weights_count():
    first = Mixture([3, 1, 0, 2], 5).take(100)
    for weights in ([0.3, 0.1, 0.0, 0.2], [Fraction(3, 7), Fraction(1, 7), 0, Fraction(2, 7)], np.array([3, 1, 0, 2])):
        assert Mixture(weights, 5).take(100) == first
    assert 2 not in first


@settings(max_examples=50)
@given(st.lists(st.sampled_from([0, 1, 2, 3, 0.5, 0.25]), min_size=1, max_size=6).filter(any), seeds)
def test_weights_that_never_change_are_constant(weights, seed):
    scheduled = [{0: weight, 50: weight, 60: weight} for weight in weights]
    assert Mixture(scheduled, seed).take(200) == Mixture(weights, seed).take(200)


def test_a_number_among_weights_that_change_is_a_constant():
    assert Quotas([{0: 1, 10: 2}, 0.5]).phases == Quotas([{0: 1, 10: 2}, {0: 0.5}]).phases


def test_the_seed_decides_among_equals_only():
    assert {tuple(Mixture([1, 1, 1], seed).take(3)) for seed in range(100)} == {
        (0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)
    }  # fmt: skip
    assert len({tuple(Mixture([0.5, 0.3, 0.2], seed).take(100)) for seed in range(20)}) < 20


def test_of_two_that_are_due_at_once_the_seed_decides():
    assert {tuple(Mixture([1, 3], seed).take(4)) for seed in range(20)} == {(1, 0, 1, 1), (1, 1, 0, 1)}


@given(st.integers(1, 8), seeds)
def test_equal_weights_take_turns(sources, seed):
    choices = Mixture([0.1] * sources, seed).take(10 * sources)
    assert all(sorted(choices[i : i + sources]) == list(range(sources)) for i in range(0, len(choices), sources))


@settings(max_examples=50, deadline=None)
@given(mixtures, seeds)
def test_a_source_comes_only_where_it_has_weight(weights, seed):
    choices = Mixture(weights, seed).take(200)
    for source, weight in enumerate(curves(weights)):
        knots = sorted(weight)
        begin = next((i for i, knot in enumerate(knots) if weight[knot]), None)
        if begin is None:
            assert source not in choices
        else:
            assert source not in choices[: knots[begin]]
        if not weight[knots[-1]]:
            assert choices[knots[-1] :].count(source) <= 1, "what it was due before"


@settings(max_examples=100, deadline=None)
@given(mixtures, seeds, st.lists(st.integers(0, 60), max_size=5))
def test_a_mixture_goes_on_from_its_counts_and_in_chunks_of_any_size(weights, seed, chunks):
    whole = Mixture(weights, seed).take(sum(chunks) + 20)
    quotas = pickle.loads(pickle.dumps(Quotas(weights)))
    running, restored, taken = Mixture(quotas, seed), Mixture(weights, seed), []
    for chunk in chunks:
        part = running.take(chunk)
        assert restored.take(chunk) == part
        taken += part
        counts = json.loads(json.dumps(running.counts))
        assert counts == [taken.count(i) for i in range(len(weights))]
        restored = Mixture(Quotas(weights), seed, counts)
    later = [next(restored), *islice(restored, 19)]
    assert restored.counts == [whole.count(i) for i in range(len(weights))], "none are taken ahead"
    assert taken + later == whole == taken + pickle.loads(pickle.dumps(running)).take(20)


def test_nothing_drifts_in_a_billion_steps():
    weights = [0.7, 0.2, 0.1]
    counts = [700_000_001, 200_000_000, 99_999_999]
    later = Mixture([7, 2, 1], 0, [700_000_000, 200_000_000, 100_000_000])
    assert later.take(1000) == Mixture(weights, 0).take(1000)
    with pytest.raises(StateError):
        Mixture(weights, 0, counts)


def test_a_mixture_begins_anywhere_at_once():
    weights = [{0: 1, 10**9: 0.25}, {0: 0.5}, {0: 0, 2 * 10**9: 3}]
    quotas = Quotas(weights)
    position = 1_234_567_890
    floors = [int(quota) for quota in quotas.at(position)]
    for extra in range(3):  # one of these is near enough to the quotas
        counts = list(floors)
        for source in range(position - sum(floors)):
            counts[(source + extra) % 3] += 1
        try:
            mixture = Mixture(quotas, 0, counts)
            break
        except StateError:
            continue
    choices = mixture.take(3000)
    for n in (1000, 2000, 3000):
        expected = [after - before for before, after in zip(quotas.at(position), quotas.at(position + n))]
        assert max(abs(e - choices[:n].count(i)) for i, e in enumerate(expected)) < 2


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


@settings(max_examples=50, deadline=None)
@given(schedules, st.integers(0, 10**9))
@example([{0: 1, 10: 0}, {0: 1}], 10)
def test_the_first_position_with_a_quota(mixture, quota):
    quotas = Quotas(mixture)
    for source in range(len(mixture)):
        for beyond in (False, True):
            found = quotas.first(source, quota, beyond=beyond)
            if found is None:
                due = quotas.at(10**15)[source]
                assert due <= quota if beyond else due < quota
                assert not mixture[source][max(mixture[source])]
                continue
            due, before = quotas.at(found)[source], quotas.at(found - 1)[source] if found else -1
            assert due > quota if beyond else due >= quota
            assert before <= quota if beyond else before < quota


def test_from_where_on_a_source_has_no_weight():
    weights = [{0: 1, 10: 0}, {0: 1}, {0: 0, 5: 1, 9: 0, 12: 0}, {0: 1, 3: 0, 20: 2}, {0: 0}]
    assert Quotas(weights).ends == {0: 10, 1: inf, 2: 9, 3: inf}
    assert Quotas(weights, stride=3).ends == {0: 4, 1: inf, 2: 3, 3: inf}
    assert Quotas([1, 0, 2]).ends == {0: inf, 2: inf}


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


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ([{1: 1}], r"^weights that change need one at position 0, not {1: 1}$"),
        ([{}], "need one at position 0"),
        ([{0: 1, 10: 0}], "all 0 at position 10"),
        ([{0: 0}, {0: 0, 5: 1}], "all 0 at position 0"),
        ([{0: 1, 10: -1}], "weights must be positive"),
        ([{0: 1, 10: float("nan")}], "weights must be finite"),
        ([{0: 1, -5: 1}], "at least 0"),
        ([{0: 1, 5: 1e-16}], "differ by 1e15 at most"),
        ([{0: 1, 2**61: 2}], "positions up to 2"),
    ],
)
def test_bad_schedules_are_refused(weights, words):
    with pytest.raises(ValueError, match=words):
        Quotas(weights)


def test_schedules_at_the_bounds_are_allowed():
    assert Quotas([{0: 1, 2**61 - 1: 1e-15}, {0: 1}]).sources == [0, 1]
    with pytest.raises(ValueError, match=r"^weights have positions up to 2\*\*61, and differ by 1e15 at most, not \[{"):
        Quotas([{0: 1, 5: 2, 2**61: 1}])


@pytest.mark.parametrize("knot", [1.5, "10", True, None])
def test_knots_are_whole_numbers(knot):
    with pytest.raises(TypeError, match="a position of weights must be a whole number"):
        Quotas([{0: 1, knot: 1}])


@pytest.mark.parametrize("weights", [[1, 1], [{0: 1, 10: 0.5}, {0: 1}]])
@pytest.mark.parametrize(
    "counts", [[1], [1, 1, 1], [0, 2], [0, 9], [-1, 1], [3, 0], [1.0, 0], [True, 0], ["1", 0], [0, 1 << 63]]
)
def test_counts_of_other_mixtures_are_refused(weights, counts):
    with pytest.raises(StateError, match="counts"):
        Mixture(weights, 0, counts)


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


def test_steps_follow_a_line():
    assert stepwise({0: 0, 100: 1, 130: 1}, every=40) == {0: 0.2, 40: 0.6, 80: 0.9, 100: 1, 130: 1}
    assert stepwise({0: "1/3"}, every=5) == {0: 1 / 3}
    assert stepwise({10: 0, 0: 1}, every=100) == {0: 0.5, 10: 0}


@given(st.dictionaries(st.integers(1, 500), st.integers(0, 20), max_size=4), st.integers(1, 600))
def test_the_sums_over_steps_and_line_are_equal(line, every):
    line = {0: 3, **line}
    steps = stepwise(line, every)
    assert list(steps) == sorted(steps)
    knots = sorted(line)
    for begin, end in pairwise(knots):
        total = sum(steps[max(step for step in steps if step <= n)] for n in range(begin, end))
        assert total == pytest.approx((line[begin] + line[end]) / 2 * (end - begin))
    assert steps[knots[-1]] == line[knots[-1]]


@pytest.mark.parametrize("every", [0, -1])
def test_steps_have_a_length(every):
    with pytest.raises(ValueError, match="every must be at least 1"):
        stepwise({0: 1, 10: 2}, every)


@pytest.mark.parametrize(
    ("line", "words"), [({1: 1}, "one at position 0"), ({0: -1}, "positive"), ({0: float("nan")}, "finite")]
)
def test_lines_that_are_none_are_refused(line, words):
    with pytest.raises(ValueError, match=words):
        stepwise(line, 10)
