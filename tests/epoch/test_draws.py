"""The draws of substitutes and of resampled epochs never change: golden values, and the formulas of docs/order.md."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from tarshards import EpochPlan
from tarshards.epoch.permutations import finalize, fold, hash_of
from tarshards.epoch.resampling import ResampledPlan

COUNTS = np.array([500, 700, 900])
GOLDEN = 0x9E3779B97F4A7C15


def resampled(weights, seed: int) -> ResampledPlan:
    return ResampledPlan(COUNTS, weights, seed=seed, epoch=2, begin=0, ranks=1, tail="exact")


def drawn(plan, count: int = 6) -> list[tuple[int, int]]:
    return [*zip(*(array.tolist() for array in plan[np.arange(count)]))]


def word(key: np.ndarray, number: int, position: int) -> int:
    """hash(fold(key, position), number) as docs/order.md writes it."""
    folded = int(fold(key, np.uint64(position))[0])
    return int(finalize(np.array([(folded + (number + 1) * GOLDEN) % 2**64], np.uint64))[0])


def test_substitutes_are_those_of_ever():
    plan = EpochPlan(COUNTS, seed=7, epoch=2, lanes=6, pool=600, block=10)
    golden = [(2, 574), (0, 498), (2, 69), (0, 491), (1, 511), (0, 158)]
    assert list(islice(plan.substitutes(1234), 6)) == golden
    small = EpochPlan([30, 20], seed=7, epoch=2, block=16)
    assert list(islice(small.substitutes(11), 6)) == [(1, 4), (0, 13), (1, 5), (0, 28), (0, 7), (0, 2)]


def test_substitutes_are_those_of_the_formula():
    plan = EpochPlan([30, 20], seed=7, epoch=2)
    draws = [word(hash_of(7, 2, 2), draw, 11) % 50 for draw in range(6)]
    assert list(islice(plan.substitutes(11), 6)) == [plan[position] for position in draws]


@pytest.mark.parametrize(("total", "pool"), [(4 * 64, 100), (4 * 64, 400), (4 * 1000, 100), (4 * 1000, 1000)])
def test_substitutes_are_of_the_lane_and_of_the_window_or_of_64_samples(total, pool):
    plan = EpochPlan([total], seed=7, epoch=2, lanes=4, pool=pool, block=10)
    lane, width = total // 4, max(pool // 4, 64)
    turn_of = {sample: divmod(position, 4) for position, sample in enumerate(plan)}
    for turn in (0, width - 1, width, lane // 2, lane - 1):
        first = min(turn // width * width, lane - 64)
        last = min(turn // width * width + width, lane)
        turns, lanes = zip(*(turn_of[sample] for sample in plan.substitutes(4 * turn + 3)))
        assert len(turns) == 64
        assert set(lanes) == {3}
        assert first <= min(turns) < first + (last - first) / 4
        assert last - (last - first) / 4 < max(turns) + 1 <= last


def test_substitutes_are_of_the_whole_epoch_where_a_lane_has_fewer_than_64_samples():
    plan = EpochPlan([4 * 64 - 1], seed=7, epoch=2, lanes=4, pool=100, block=10)
    lane_of = {sample: position % 4 for position, sample in enumerate(plan)}
    lanes = [{lane_of[sample] for sample in plan.substitutes(position)} for position in (2, 3)]
    assert lanes == [{2}, {0, 1, 2, 3}]


def test_substitutes_of_a_rest_are_those_of_the_whole():
    plan = EpochPlan(COUNTS, seed=7, epoch=2, lanes=6, pool=600, block=10)
    assert list(plan.resume(1000, 3).substitutes(234)) == list(plan.substitutes(1234))
    seven = plan.resume(1000, 7)
    position = list(plan).index(seven[50])
    assert list(seven.substitutes(50)) == list(plan.substitutes(position))


def test_resampled_epochs_are_those_of_ever():
    weighted = resampled(np.array([1.0, 0, 3]), 7)
    assert drawn(weighted) == [(2, 760), (0, 108), (2, 610), (2, 375), (2, 724), (2, 829)]
    assert drawn(resampled(None, -7)) == [(0, 179), (0, 272), (1, 412), (2, 834), (1, 367), (2, 517)]


def test_resampled_epochs_are_those_of_the_formula():
    plan, key = resampled(None, 3), hash_of(3, 2, 3)
    for position, (shard, sample) in enumerate(drawn(plan, 50)):
        number = word(key, -1, position)
        draw = (number >> 11) / 2**53 * 2100
        assert shard == np.searchsorted(np.cumsum(COUNTS), draw, "right")
        assert sample == int(fold(np.array([number], np.uint64), 3)[0]) % int(COUNTS[shard])
    further = [word(key, draw - 1, 9) for draw in range(1, 4)]
    shards = [np.searchsorted(np.cumsum(COUNTS), (number >> 11) / 2**53 * 2100, "right") for number in further]
    assert [shard for shard, _ in islice(plan.substitutes(9), 3)] == shards
