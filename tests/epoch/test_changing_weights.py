"""Changing weights: in every prefix the count of each source equals the sum of its shares, to within one.

The oracle adds the shares up by itself, in fractions.
"""

from __future__ import annotations

import json
import pickle
from fractions import Fraction
from itertools import islice, pairwise
from math import inf

import pytest
import test_proportions
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tarshards.epoch.proportions import Mixture, Quotas, stepwise
from tarshards.errors import StateError

weight = st.one_of(st.just(0), st.integers(0, 9), st.fractions(0, 3, max_denominator=97), st.floats(1e-6, 100))
knots = st.one_of(st.integers(1, 40), st.integers(1, 1000), st.integers(1, 10**9))
curve = st.builds(lambda first, more: {0: first, **more}, weight, st.dictionaries(knots, weight, max_size=4))
seeds = st.integers(-(2**70), 2**70)


def weights_at(weights, position):
    """The weights at *position*, by the definition."""
    return [Fraction(str(weight[max(knot for knot in weight if knot <= position)])) for weight in weights]


def is_possible(weights):
    return all(any(weights_at(weights, knot)) for knot in {knot for weight in weights for knot in weight})


def mixtures(least=1):
    return st.lists(curve, min_size=least, max_size=6).filter(is_possible)


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


def assert_quotas(weights, mixture, begin, steps):
    """Take *steps* choices, and compare every prefix with the sums."""
    most = Fraction(0)
    choices = mixture.take(steps)
    counts = list(mixture.counts)
    for choice in choices:
        counts[choice] -= 1
    positions = oracle(weights, range(begin + 1, begin + steps + 1))
    for choice, (position, quotas) in zip(choices, positions):
        counts[choice] += 1
        most = max([most, *(abs(quota - count) for quota, count in zip(quotas, counts))])
        assert most < 1, (position, [*map(float, quotas)], counts)


@settings(max_examples=75, deadline=None)
@given(mixtures(), seeds, st.integers(1, 150))
def test_every_source_has_its_quota_at_every_prefix(mixture, seed, steps):
    assert_quotas(mixture, Mixture(mixture, seed), 0, steps)


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
    assert_quotas(weights, Mixture(weights, 7), 0, 2500)


@settings(max_examples=50, deadline=None)
@given(mixtures(), st.lists(st.integers(0, 2 * 10**9), min_size=1, max_size=8), st.integers(1, 7))
def test_quotas_are_the_sums_of_the_shares(weights, positions, stride):
    quotas = Quotas(weights, stride=stride)
    for position, expected in oracle(weights, sorted(position * stride for position in positions)):
        found = quotas.at(position // stride)
        assert sum(found) == position // stride
        assert max(abs(q - e / stride) for q, e in zip(found, expected)) <= Fraction(1, 10**30)


@settings(max_examples=100, deadline=None)
@given(mixtures(), st.integers(1, 5))
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


@settings(max_examples=100, deadline=None)
@given(st.one_of(mixtures(), test_proportions.mixtures), seeds, st.lists(st.integers(0, 60), max_size=5))
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
    assert taken + list(islice(restored, 20)) == whole == taken + pickle.loads(pickle.dumps(running)).take(20)


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


@settings(max_examples=50)
@given(st.lists(st.sampled_from([0, 1, 2, 3, 0.5, 0.25]), min_size=1, max_size=6).filter(any), seeds)
def test_weights_that_never_change_are_constant(weights, seed):
    scheduled = [{0: weight, 50: weight, 60: weight} for weight in weights]
    assert Mixture(scheduled, seed).take(200) == Mixture(weights, seed).take(200)


@settings(max_examples=50, deadline=None)
@given(mixtures(2), seeds)
def test_a_source_comes_only_where_it_has_weight(mixture, seed):
    choices = Mixture(mixture, seed).take(200)
    for source, weight in enumerate(mixture):
        knots = sorted(weight)
        begin = next((i for i, knot in enumerate(knots) if weight[knot]), None)
        if begin is None:
            assert source not in choices
        else:
            assert source not in choices[: knots[begin]]
        if not weight[knots[-1]]:
            assert choices[knots[-1] :].count(source) <= 1, "what it was due before"


@settings(max_examples=50, deadline=None)
@given(mixtures(), st.integers(0, 10**9))
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


def test_a_number_among_weights_that_change_is_a_constant():
    assert Quotas([{0: 1, 10: 2}, 0.5]).phases == Quotas([{0: 1, 10: 2}, {0: 0.5}]).phases


def test_from_where_on_a_source_has_no_weight():
    weights = [{0: 1, 10: 0}, {0: 1}, {0: 0, 5: 1, 9: 0, 12: 0}, {0: 1, 3: 0, 20: 2}, {0: 0}]
    assert Quotas(weights).ends == {0: 10, 1: inf, 2: 9, 3: inf}
    assert Quotas(weights, stride=3).ends == {0: 4, 1: inf, 2: 3, 3: inf}
    assert Quotas([1, 0, 2]).ends == {0: inf, 2: inf}


@pytest.mark.parametrize("knot", [1.5, "10", True, None])
def test_knots_are_whole_numbers(knot):
    with pytest.raises(TypeError, match="a position of weights must be a whole number"):
        Quotas([{0: 1, knot: 1}])


@pytest.mark.parametrize(
    "counts", [[1], [1, 1, 1], [0, 9], [-1, 1], [9, 0], [1.0, 0], [True, 0], ["1", 0], [0, 1 << 63]]
)
def test_counts_of_other_schedules_are_refused(counts):
    with pytest.raises(StateError, match="counts"):
        Mixture(Quotas([{0: 1, 10: 0.5}, {0: 1}]), 0, counts)


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
