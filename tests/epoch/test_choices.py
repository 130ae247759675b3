"""Mixtures on ranks: each rank's share of each dataset follows the weights, whatever the stride of ranks."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from hashlib import blake2b

import numpy as np
import pytest
from forked import in_child
from hypothesis import given, settings
from hypothesis import strategies as st
from soak import SOAK, some

from tarshards.epoch import choices as choosing
from tarshards.epoch.choices import Choices, by_lanes
from tarshards.epoch.proportions import Mixture, Quotas, stepwise

RANKS = [1, 2, 3, 4, 5, 8, 64, 512]
WEIGHTINGS = {
    "1:1": [1, 1],
    "8 equal": [1] * 8,
    "3:1": [3, 1],
    "1:3": [1, 3],
    ".5/.3/.2": [0.5, 0.3, 0.2],
    "1:511": [1, 511],
    "rare among many": [100, 50, 25, 12, 6, 3, 1],
    "1/3": [0.3333, 0.6667],
    "steps": [{0: 1, 20_000: 3, 100_000: 1}, {0: 3, 50_000: 1}],
    "a rare one in short steps": [stepwise({0: 1 / 512, 10**6: 2 / 512}, 250), 1],
}
TOTAL = 2 * choosing.WINDOW + 12_345


def choices_of(weights, sizes=None, until=TOTAL, seed=0, lanes=None):
    sizes = sizes or [10**9] * len(weights)
    return Choices(Quotas(weights), seed, sizes, until, lanes or [1] * len(weights))


def rates_of(quotas, window=512):
    """The rate of each dataset at every position: that of the 512 positions around it."""
    edges = np.arange(0, TOTAL + window, window)
    due = np.array([[float(quota) for quota in quotas.at(int(edge))] for edge in edges])
    return np.repeat(np.diff(due, axis=0) / window, window, axis=0)[:TOTAL]


def sums(rows, parts, number):
    """The sums of *rows* over each of *number* parts."""
    return np.stack([np.bincount(parts, column, number) for column in rows.T], axis=1)


def assert_samples(order, rates, parts):
    """Assert that the datasets in each of *parts*, a number for each position, are a sample by *rates*."""
    number = int(parts.max()) + 1
    counts, expected = sums(np.eye(rates.shape[1])[order], parts, number), sums(rates, parts, number)
    spread = np.sqrt(sums(rates * (1 - rates), parts, number))
    assert (np.abs(counts - expected) <= np.where(spread**2 >= 5, 5 * spread, 6 * spread + 3)).all()
    expected = np.maximum(expected, 1e-9)
    chi_square, freedom = ((counts - expected) ** 2 / expected).sum(), number * (rates.shape[1] - 1)
    assert chi_square <= freedom + 5 * np.sqrt(2 * freedom + (1 / expected).sum())


@pytest.mark.parametrize("weights", list(WEIGHTINGS.values()), ids=list(WEIGHTINGS))
def test_each_rank_has_a_sample_of_the_mixture(weights):
    rates = rates_of(Quotas(weights))
    order, _ = choices_of(weights).look_up(3, np.arange(TOTAL))
    for ranks in RANKS:
        assert_samples(order, rates, np.arange(TOTAL) % ranks)


@pytest.mark.parametrize("weights", [[1, 1], [0.5, 0.3, 0.2], [1, 511]], ids=str)
def test_each_worker_has_a_sample_of_the_mixture(weights):
    rates = rates_of(Quotas(weights))
    order, _ = choices_of(weights).look_up(0, np.arange(TOTAL))
    for ranks, batch, workers in [(1, 1, 2), (2, 32, 2), (8, 32, 4), (3, 17, 5)]:
        turn, rank = np.divmod(np.arange(TOTAL), ranks)
        assert_samples(order, rates, rank * workers + turn // batch % workers)


@pytest.mark.parametrize("weights", list(WEIGHTINGS.values()), ids=list(WEIGHTINGS))
def test_shares_are_exact_where_windows_end(weights):
    quotas, choices = Quotas(weights), choices_of(weights)
    order, numbers = choices.look_up(1, np.arange(TOTAL))
    for end in [choosing.WINDOW, 2 * choosing.WINDOW, TOTAL]:
        counts = np.bincount(order[:end], minlength=len(weights))
        assert all(abs(count - quota) < 1 for count, quota in zip(counts, quotas.at(end)))
    for i in range(len(weights)):
        assert (numbers[order == i] == np.arange((order == i).sum())).all()
    # Inside a window, the deviation is that of a sample without replacement: half a window has the largest.
    for n in range(0, TOTAL, 8000):
        counts = np.bincount(order[:n], minlength=len(weights))
        for count, quota in zip(counts, quotas.at(n)):
            share = float(quota) / max(n, 1)
            assert abs(count - float(quota)) <= 5 * np.sqrt(choosing.WINDOW * share * (1 - share)) / 2 + 5


def test_epochs_seeds_and_windows_differ():
    choices = choices_of([1, 1])
    rows = [choices.look_up(epoch, np.arange(2 * choosing.WINDOW))[0] for epoch in (0, 1)]
    rows.append(choices_of([1, 1], seed=1).look_up(0, np.arange(2 * choosing.WINDOW))[0])
    rows = [half for row in rows for half in np.split(row, 2)]
    for i, row in enumerate(rows):
        assert all(0.45 < (row == other).mean() < 0.55 for other in rows[:i])


def test_a_dataset_of_weight_0_does_not_come():
    weights = [{0: 1, 700: 0, 5000: 1}, {0: 1, 900: 2}, {0: 0, 4000: 1}]
    order, _ = choices_of(weights).look_up(0, np.arange(10_000))
    assert (order[700:5000] != 0).all()
    assert (order[:4000] != 2).all()
    shares = [(order[begin:end] == i).mean() for i, begin, end in [(0, 0, 700), (1, 700, 4000), (2, 5000, 10_000)]]
    assert np.allclose(shares, [1 / 2, 1, 1 / 4], atol=0.06)


def test_shares_follow_weights_that_change_within_a_window():
    weights = [stepwise({0: 1, 60_000: 0.1}, 500), 1]
    quotas = Quotas(weights)
    order, _ = choices_of(weights).look_up(0, np.arange(60_000))
    for begin in range(0, 60_000, 5000):
        due = float(quotas.at(begin + 5000)[0] - quotas.at(begin)[0])
        assert abs((order[begin : begin + 5000] == 0).sum() - due) < 5 * np.sqrt(due)


@pytest.mark.parametrize("ranks", [2, 64, 96])
def test_a_rank_reads_lanes_of_its_own(ranks):
    order, numbers = choices_of([1, 1, 2], sizes=[10**6] * 3, lanes=[192, 1, 192]).look_up(0, np.arange(TOTAL))
    for i, is_own in [(0, True), (1, False), (2, True)]:
        positions = np.flatnonzero(order == i)
        own = (numbers[positions] % 192 % ranks == positions % ranks).mean()
        assert own > 0.9 if is_own else own < 1.5 / ranks
        assert (np.sort(numbers[positions]) == np.arange(len(positions))).all()
        for end in (choosing.WINDOW, TOTAL):
            taken = numbers[positions[positions < end]]
            assert set(taken.tolist()) == set(range(len(taken)))


def test_a_pass_ends_before_the_next_begins():
    size = 70_000
    order, numbers = choices_of([3, 1], sizes=[size, size], lanes=[192, 192]).look_up(0, np.arange(TOTAL))
    own = numbers[order == 0]
    assert set(own[:size].tolist()) == set(range(size))
    assert own[size:].min() == size


def test_a_small_dataset_with_lanes_is_repeated_many_times_in_a_window():
    order, numbers = choices_of([1, 1], sizes=[20, 10**6], lanes=[192, 192]).look_up(0, np.arange(choosing.WINDOW))
    own = numbers[order == 0]
    assert (np.sort(own) == np.arange(len(own))).all()
    assert (own // 20 == np.arange(len(own)) // 20).all()


def test_orders_are_those_of_earlier_releases():
    """Of constant and changing weights, seeds, ends, lanes and states, also before version 4: states depend on them."""
    found = blake2b(digest_size=8)
    changing = [{0: 1, 8: 0}, {0: 1, 16: 3}, 1], [stepwise({0: 1, 2000: 0.1}, 50), 1]
    for weights in [[1, 1], [1] * 8, [0.5, 0.3, 0.2], [3, 40], [1, 0, 2], [7], ["1/3", 1, "0.25"], *changing]:
        quotas, sizes = Quotas(weights), [40 + 37 * i for i in range(len(weights))]
        lanes = [5, *[1] * (len(weights) - 1)]
        for seed, until in [(0, "first"), (-5, "last"), (2**40, 3000), (1, 0)]:
            choices = Choices(quotas, seed, sizes, until, lanes)
            found.update(repr((choices.total, choices.due)).encode())
            for each in (choices, choices.unpermuted()):
                begin = choices.total // 3
                state = each.state(begin)
                found.update(json.dumps(state).encode())
                positions = np.arange(begin, choices.total)
                for rows in (*each.look_up(seed, positions), *each.resumed(begin, state).look_up(3, positions)):
                    found.update(rows.astype("<i8").tobytes())
    assert found.hexdigest() == "318c9dec9f7d2569"


@given(st.lists(st.integers(0, 6), max_size=30), st.data())
def test_lanes_are_taken_where_they_are_wanted(wanted, data):
    offered = data.draw(st.lists(st.integers(0, 6), min_size=len(wanted), max_size=len(wanted)))
    taken = by_lanes(np.array(wanted, np.int64), np.array(offered, np.int64), 7)
    assert sorted(taken.tolist()) == list(range(len(wanted)))
    equal = sum(lane == offered[i] for lane, i in zip(wanted, taken.tolist()))
    assert equal == (Counter(wanted) & Counter(offered)).total()


curve = st.dictionaries(st.integers(1, 300), st.integers(0, 4), max_size=3).flatmap(
    lambda more: st.integers(0, 4).map(lambda first: {0: first, **more})
)


@st.composite
def schedules(draw):
    """Quotas of 2 to 6 sources, and the sizes of these."""
    number = draw(st.integers(2, 6))
    weights = [draw(curve) for _ in range(number - 1)] + [{0: 1, draw(st.integers(1, 300)): draw(st.integers(1, 5))}]
    return Quotas(weights), [draw(st.integers(1, 60)) for _ in weights]


@settings(max_examples=50, deadline=None)
@given(schedules(), st.integers(0, 9), st.data(), st.booleans())
def test_positions_of_a_schedule_are_looked_up_in_any_order(schedule, seed, data, is_permuted):
    quotas, sizes = schedule
    base = Mixture(quotas, seed).take(400)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choosing, "WINDOW", data.draw(st.sampled_from([1, 7, 64, 500])))
        patch.setattr(choosing, "KEPT", data.draw(st.integers(1, 3)))
        choices = Choices(quotas, seed, sizes, 400, [1] * len(sizes))
        choices = choices if is_permuted else choices.unpermuted()
        expected, number_of = choices.look_up(2, np.arange(400))
        if not is_permuted:
            assert expected.tolist() == base
        for i in range(len(sizes)):
            assert (number_of[expected == i] == np.arange(base.count(i))).all()
        for _ in range(4):
            begin = data.draw(st.integers(0, 400))
            state = json.loads(json.dumps(choices.state(begin)))
            resumed = Choices(quotas, seed, sizes, 400, [1] * len(sizes))
            resumed = (resumed if is_permuted else resumed.unpermuted()).resumed(begin, state)
            for one in (choices, resumed, pickle.loads(pickle.dumps(resumed))):
                least = 0 if one is choices else begin
                positions = np.array(data.draw(st.lists(st.integers(min(least, 399), 399), max_size=20)), np.int64)
                dataset, number = one.look_up(2, positions)
                assert dataset.tolist() == expected[positions].tolist()
                assert number.tolist() == number_of[positions].tolist()


@settings(max_examples=75, deadline=None)
@given(schedules(), st.integers(0, 9))
def test_where_a_schedule_ends(schedule, seed):
    """An epoch leaves out ("first") or repeats ("last") one sample of the dataset that ends it, at most."""
    quotas, sizes = schedule
    totals = [Choices(quotas, seed, sizes, until, [1] * len(sizes)).total for until in ("first", "last")]
    first, last = totals
    counts = Counter(Mixture(quotas, seed).take(first))
    assert all(counts[i] <= size for i, size in enumerate(sizes))
    assert any(counts[i] >= sizes[i] - 1 for i in quotas.sources)
    counts = Counter(Mixture(quotas, seed).take(last))
    assert all(counts[i] >= sizes[i] or quotas.ends[i] <= last for i in quotas.sources)
    assert any(counts[i] <= sizes[i] + 1 or quotas.ends[i] == last for i in quotas.sources)


def test_a_schedule_begins_anywhere_at_once(monkeypatch):
    quotas = Quotas([stepwise({0: 1, 10**10: 0.1}, 10**8), 1])
    position = 6 * 10**9 + 12345
    whole = Choices(quotas, 0, [10**12, 10**12], 10**12, [1, 1])
    begin = whole._resumed_from(position)
    most = int(quotas.at(begin)[0]) + 1
    counts = next([n, begin - n] for n in (most - 1, most) if abs(quotas.at(begin)[0] - n) <= 0.5)
    taken = []
    take = Mixture.take
    monkeypatch.setattr(Mixture, "take", lambda self, count: taken.append(count) or take(self, count))
    choices = whole.resumed(position, {"counts": counts})
    _, number = choices.look_up(0, np.arange(position, position + 100_000))
    assert number.min() >= min(counts)
    assert sum(taken) <= 3 * choosing.WINDOW


@pytest.mark.forks
def test_a_schedule_is_looked_up_after_a_fork_while_a_thread_looks_up():
    choices = Choices(Quotas([{0: 1, 100: 3}, 1]), 0, [10, 10], 10**6, [1, 1])
    expected = choices.look_up(0, np.arange(50))[0].tolist()
    with choices._lock():
        assert in_child(lambda: choices.look_up(0, np.arange(50))[0].tolist() == expected) == 0


@pytest.mark.soak
def test_each_of_many_ranks_has_a_sample_of_the_mixture():
    for weights in some(list(WEIGHTINGS.values()), 5):
        rates, choices = rates_of(Quotas(weights)), choices_of(weights)
        for epoch in range(SOAK):
            order, _ = choices.look_up(epoch, np.arange(TOTAL))
            for ranks in (7, 48, 100, 192, 500, 1000):
                assert_samples(order, rates, np.arange(TOTAL) % ranks)
