"""Positions are bins instead of samples: each sample is in one bin, with the same bins for any ranks and restarts."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tarshards.epoch.packing import bucket, pack
from tarshards.epoch.plan import EpochPlan
from tarshards.errors import SampleError, StateError

CAPACITY = 20

datasets = st.lists(st.integers(0, 30), min_size=1, max_size=12)


@st.composite
def packings(draw):
    """Counts, lengths, and a function that plans their bins for some ranks."""
    counts = draw(datasets)
    lengths = np.array(draw(st.lists(st.integers(1, CAPACITY), min_size=sum(counts), max_size=sum(counts))), int)
    window = draw(st.integers(1, 60))
    if draw(st.booleans()):
        packing = pack(lengths, CAPACITY, window=window)
    else:
        packing = bucket(lengths, budget=CAPACITY, window=window)
    seed, shuffle = draw(st.integers(0, 5)), draw(st.booleans())

    def plan(ranks=1, tail="exact", state=None):
        def make(state):
            if state is not None:
                return EpochPlan.restore(counts, state, ranks=1, tail="exact")
            return EpochPlan(counts, seed=seed, epoch=1, block=3, lanes=2, pool=40, shuffle=shuffle)

        return packing.plan(counts, make, ranks=ranks, tail=tail, state=state)

    return counts, lengths, packing, plan


def bins_of(plan):
    """The samples of every bin, as sets of pairs."""
    return [tuple(zip(*(part.tolist() for part in plan[b]))) for b in range(len(plan))]


def everything(counts):
    return Counter((shard, number) for shard, count in enumerate(counts) for number in range(count))


def lengths_of(samples, counts, lengths):
    first = np.cumsum(counts) - counts
    return [int(lengths[first[shard] + number]) for shard, number in samples]


@settings(max_examples=100, deadline=None)
@given(packings())
def test_every_sample_is_in_one_bin_and_no_bin_is_too_long(case):
    counts, lengths, packing, plan = case
    bins = bins_of(plan())
    assert Counter(sample for samples in bins for sample in samples) == everything(counts)
    for samples in bins:
        own = lengths_of(samples, counts, lengths)
        assert 0 < (sum(own) if packing.is_packed else max(own) * len(own)) <= CAPACITY


@settings(max_examples=100, deadline=None)
@given(packings(), st.integers(1, 7), st.sampled_from(["exact", "pad", "drop"]))
def test_any_ranks_share_the_same_bins_in_equal_steps(case, ranks, tail):
    *_, plan = case
    whole, shared = bins_of(plan()), plan(ranks, tail)
    bins = bins_of(shared)
    kept = len(whole) // ranks * ranks if tail == "drop" else len(whole)
    assert bins[:kept] == whole[:kept]
    repeated = bins[kept:]
    assert len(repeated) == (-len(whole) % ranks if tail == "pad" else 0)
    assert all(samples in whole for samples in repeated)
    steps = {len(range(rank, len(shared), ranks)) for rank in range(ranks)}
    assert len(steps) == 1 or tail == "exact"
    assert max(steps) - min(steps) <= 1
    assert shared.sizes.tolist() == [len(samples) for samples in bins]


@settings(max_examples=100, deadline=None)
@given(packings(), st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6)), max_size=4))
def test_resumes_on_other_ranks_repeat_and_miss_nothing(case, chain):
    *_, plan = case
    whole, came, state = bins_of(plan()), [], None
    for ranks, steps in chain:
        rest = plan(ranks, "drop", state)
        taken = min(steps * ranks, len(rest))
        came += bins_of(rest)[:taken]
        state = rest.state(taken)
    assert came + bins_of(plan(1, "exact", state)) == whole


@settings(max_examples=50, deadline=None)
@given(packings(), st.data())
def test_a_window_is_one_of_the_epoch_and_its_bins_come_together(case, data):
    _, _, packing, plan = case
    packed = plan()
    order = list(packed.unpacked)
    window = {sample: i // packing.window for i, sample in enumerate(order)}
    numbers = [{window[sample] for sample in samples} for samples in bins_of(packed)]
    assert all(len(each) == 1 for each in numbers)
    flat = [each.pop() for each in numbers]
    assert flat == sorted(flat)


def long_tailed(count):
    rng = np.random.default_rng(0)
    mixture = np.where(rng.random(count) < 0.7, rng.lognormal(5, 1, count), rng.lognormal(7, 0.8, count))
    return np.clip(mixture, 16, 4096).astype(int)


def test_windows_of_4096_are_filled_to_98_percent():
    lengths = long_tailed(2**16)
    plan = pack(lengths, 4096).plan([2**16], lambda state: EpochPlan([2**16], seed=0, epoch=0), ranks=1, tail="exact")
    assert lengths.sum() / (len(plan) * 4096) >= 0.98


def test_a_sample_that_is_too_long_is_named():
    packing = pack([3, 4, 30, 2], 20)
    whole = EpochPlan([1, 3], seed=0, epoch=0, shuffle=False)
    with pytest.raises(SampleError, match="position 2 of the epoch, number 1 of shard 1, has length 30, more than 20"):
        packing.plan([1, 3], lambda state: whole, ranks=1, tail="exact")


def test_a_sample_that_is_too_long_is_left_out_where_that_is_asked_for():
    packing = pack([3, 4, 30, 2], 20, overlong="drop")
    whole = EpochPlan([1, 3], seed=0, epoch=0, shuffle=False)
    plan = packing.plan([1, 3], lambda state: whole, ranks=1, tail="exact")
    assert sorted(sample for samples in bins_of(plan) for sample in samples) == [(0, 0), (1, 0), (1, 2)]
    assert [part.tolist() for part in plan.overlong] == [[1], [1]]


def test_a_state_is_of_its_lengths_and_its_packing():
    whole = EpochPlan([4], seed=0, epoch=0)
    state = pack([3, 4, 5, 6], 9).plan([4], lambda state: whole, ranks=1, tail="exact").state(1)
    for other in (pack([3, 4, 5, 7], 9), pack([3, 4, 5, 6], 10), bucket([3, 4, 5, 6], budget=9)):
        with pytest.raises(StateError, match="other lengths or another packing="):
            other.plan([4], lambda state: whole, ranks=1, tail="exact", state=state)
    with pytest.raises(StateError, match="requires the packing="):
        EpochPlan.restore([4], state, ranks=1, tail="exact")
    with pytest.raises(StateError, match="without any"):
        pack([3, 4, 5, 6], 9).plan([4], lambda state: whole, ranks=1, tail="exact", state=whole.state(1))


@pytest.mark.parametrize("lengths", [[0, 2], [[1]], [-3], [0.0, 1.5], [float("nan")], ["a"], [None], [True]])
def test_lengths_are_numbers_above_0(lengths):
    with pytest.raises(ValueError, match=r"lengths must be (a number for each sample|numbers of at least 1)"):
        pack(lengths, 10)


@pytest.mark.parametrize("capacity", [0, 0.0, -1.5, float("nan"), 1e-9, 2.0**31, float("inf")])
def test_a_capacity_is_above_0(capacity):
    with pytest.raises(ValueError, match=r"(capacity|budget) must be"):
        pack([1.5], capacity)
    with pytest.raises(ValueError, match="budget must be"):
        bucket("duration", budget=capacity)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 2000), min_size=1, max_size=50), st.integers(2000, 9000), st.sampled_from([1, 4, 100]))
def test_fractions_are_packed_as_whole_numbers_of_their_parts(lengths, capacity, parts):
    counts = [len(lengths)]

    def bins(make):
        plan = EpochPlan(counts, seed=1, epoch=0)
        return bins_of(make.plan(counts, lambda state: plan, ranks=1, tail="exact"))

    whole, fractions = np.array(lengths), np.array(lengths) / parts
    assert bins(pack(whole, capacity)) == bins(pack(fractions, capacity / parts))
    assert bins(bucket(whole, budget=capacity)) == bins(bucket(fractions, budget=capacity / parts))


def test_fractions_fill_a_bin_exactly():
    plan = EpochPlan([10], seed=0, epoch=0)
    for packing in (pack([0.1] * 10, 1), bucket([0.1] * 10, budget=1), bucket([1] * 10, budget=10.5)):
        assert len(packing.plan([10], lambda state: plan, ranks=1, tail="exact")) == 1


def test_fractions_are_not_split():
    for lengths, capacity in (([1.5], 1), ([3], 1.5)):
        with pytest.raises(ValueError, match="whole numbers of elements"):
            pack(lengths, capacity, overlong="split")


def test_a_sound_that_is_too_long_is_named():
    with pytest.raises(SampleError, match=r"number 1 of shard 0, has length 2\.5, more than 2\.25"):
        bucket([1.5, 2.5], budget=2.25).plan(
            [2], lambda state: EpochPlan([2], seed=0, epoch=0, shuffle=False), ranks=1, tail="exact"
        )


def test_there_is_a_length_for_each_sample():
    with pytest.raises(ValueError, match="lengths are of 2 samples, and the dataset has 3"):
        pack([1, 2], 10).plan([3], lambda state: EpochPlan([3], seed=0, epoch=0), ranks=1, tail="exact")
