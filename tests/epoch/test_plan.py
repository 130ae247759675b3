"""The epoch is a sequence: every sample once, in an order independent of ranks, workers and restarts."""

from __future__ import annotations

import json
import multiprocessing
import pickle
import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tarshards.epoch.permutations import hash_of, permutations
from tarshards.epoch.plan import EpochPlan, block_size
from tarshards.errors import StateError

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15
TAILS = ("exact", "pad", "drop")

datasets = st.lists(st.integers(0, 50), min_size=1, max_size=40)
seeds = st.integers() | st.integers(-(2**200), 2**200)


@st.composite
def options(draw):
    """Arguments of a plan; few lanes, so that small datasets have many windows."""
    ranks = draw(st.integers(1, 8))
    return {
        "seed": draw(seeds),
        "epoch": draw(st.integers(0, 3)),
        "ranks": ranks,
        "block": draw(st.none() | st.integers(1, 20)),
        "lanes": draw(st.none() | st.integers(1, 6).map(lambda n: n * ranks)),
        "pool": draw(st.integers(1, 2000)),
        "tail": draw(st.sampled_from(TAILS)),
    }


# The oracle: the plan as the documentation tells it, in lists and Python's ints.


def splitmix64(state):
    z = (state + GOLDEN) & MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return z ^ z >> 31


def slow_key(key, *numbers):
    for number in numbers:
        limbs = (abs(number).bit_length() + 63) // 64
        for word in [2 * limbs + (number < 0)] + [abs(number) >> 64 * i & MASK for i in range(limbs)]:
            key = splitmix64(key ^ word)
    return key


def slow_permutation(key, size, width):
    bits = (width - 1).bit_length()
    return sorted(range(size), key=lambda i: (splitmix64(key + i * GOLDEN & MASK) >> bits, i))


def cut(line, lanes):
    short, long = divmod(len(line), lanes)
    lengths = [short + (lane < long) for lane in range(lanes)]
    return [line[sum(lengths[:lane]) :][: lengths[lane]] for lane in range(lanes)]


def interleave(lanes):
    return [lane[i] for i in range(len(lanes[0])) for lane in lanes if i < len(lane)]


def slow_epoch(counts, seed, epoch, lanes, block, pool):
    """The lanes of an epoch."""
    blocks = [
        [(shard, sample) for sample in range(first, min(first + block, count))]
        for shard, count in enumerate(counts)
        for first in range(0, count, block)
    ]
    permutation = slow_permutation(slow_key(0, seed, epoch, 0), len(blocks), len(blocks))
    result = cut([sample for i in permutation for sample in blocks[i]], lanes)
    width = max(1, min(pool // lanes, len(result[0])))
    for number, lane in enumerate(result):
        windows = [lane[i : i + width] for i in range(0, len(lane), width)]
        lane.clear()
        for w, window in enumerate(windows):
            key = splitmix64(splitmix64(slow_key(0, seed, epoch, 1) ^ number) ^ w)
            lane += [window[i] for i in slow_permutation(key, len(window), width)]
    return result


def slow_rest(lanes, position, ranks, least):
    """The lanes of the rest after *position*, concatenated and cut again if *ranks* do not divide them."""
    taken = Counter(p % len(lanes) for p in range(position))
    rest = [lane[taken[number] :] for number, lane in enumerate(lanes)]
    return cut(list(chain(*rest)), -(-least // ranks) * ranks)


def slow_tail(samples, epoch, ranks, tail):
    if tail == "drop":
        return samples[: len(samples) // ranks * ranks]
    missing = -len(samples) % ranks if tail == "pad" else 0
    return samples + [epoch[i % len(epoch)] for i in range(missing)]


def everything(counts):
    return [(shard, sample) for shard, count in enumerate(counts) for sample in range(count)]


def pairs(arrays):
    return list(zip(*(array.tolist() for array in arrays)))


# The law of the order.


@settings(max_examples=100)
@given(datasets, options())
def test_the_plan_is_what_the_documentation_says(counts, options):
    plan = EpochPlan(counts, **options)
    epoch = interleave(slow_epoch(counts, plan.seed, plan.epoch, plan.lanes, plan.block, plan.pool))
    assert list(plan) == slow_tail(epoch, epoch, plan.ranks, plan.tail)


@settings(max_examples=250)
@given(datasets, options())
def test_every_sample_comes_once_and_every_rank_takes_as_many_steps(counts, options):
    plan = EpochPlan(counts, **options)
    total, ranks, tail = sum(counts), plan.ranks, plan.tail
    taken = Counter(plan)
    assert plan.total == total
    assert len(plan) == total + plan.repeated - plan.dropped == taken.total()
    assert 0 <= plan.repeated < ranks
    assert 0 <= plan.dropped < ranks
    steps = {len(range(rank, len(plan), ranks)) for rank in range(ranks)}
    assert len(steps) == 1 or tail == "exact"
    if tail == "exact":
        assert plan.repeated == plan.dropped == 0
    if tail == "drop":
        assert plan.repeated == 0
        assert max(taken.values(), default=0) <= 1
        assert len(taken) == total - plan.dropped
    else:
        assert set(taken) == set(everything(counts))
        assert taken.total() - len(taken) == plan.repeated


def batches_of_rank(plan, rank, batch_size, workers):
    """The batches of a rank, worker by worker: worker g mod workers makes batch g."""
    positions = range(rank, len(plan), plan.ranks)
    made = [
        [plan[list(positions[i : i + batch_size])] for i in range(w * batch_size, len(positions), workers * batch_size)]
        for w in range(workers)
    ]
    return [pairs(batch) for batch in interleave(made)]


@settings(max_examples=100)
@given(datasets, options(), st.integers(1, 17))
def test_batches_are_equal_for_every_number_of_workers(counts, options, batch_size):
    rank = options["ranks"] // 2
    plan = EpochPlan(counts, **options)
    alone = pairs(plan[rank :: plan.ranks])
    one = [alone[i : i + batch_size] for i in range(0, len(alone), batch_size)]
    for workers in (1, 2, 3, 5):
        assert batches_of_rank(plan, rank, batch_size, workers) == one


@settings(max_examples=100)
@given(datasets, options(), st.sampled_from([12, 24, 192]))
def test_the_order_is_equal_for_all_ranks_that_divide_the_lanes(counts, options, lanes):
    options = {**options, "lanes": lanes, "tail": "exact"}
    one = list(EpochPlan(counts, **{**options, "ranks": 1}))
    for ranks in (2, 3, 4, 6):
        assert list(EpochPlan(counts, **{**options, "ranks": ranks})) == one


def test_the_order_differs_by_epoch_and_by_seed_and_is_the_same_by_both():
    def order(seed, epoch):
        return tuple(EpochPlan([50] * 40, seed=seed, epoch=epoch))

    seeds = (0, 1, -1, 2, 2**64, 2**64 + 1, -(2**64), 10**40)
    assert len({order(seed, epoch) for seed in seeds for epoch in range(5)}) == len(seeds) * 5
    assert order(10**40, 3) == order(10**40, 3)


# The law of resuming.


@settings(max_examples=250)
@given(
    datasets,
    options(),
    st.lists(st.tuples(st.floats(0, 1), st.integers(1, 8), st.sampled_from(TAILS)), min_size=3, max_size=3),
)
def test_a_chain_of_resumes_repeats_and_misses_nothing(counts, options, stops):
    plan = EpochPlan(counts, **options)
    least = plan.lanes
    lanes = slow_epoch(counts, plan.seed, plan.epoch, plan.lanes, plan.block, plan.pool)
    epoch, begun, delivered = interleave(lanes), 0, []
    for part, ranks, tail in stops:
        taken = round(part * len(plan))
        delivered += list(plan)[: min(taken, plan.total)]
        state = json.loads(json.dumps(plan.state(taken)))
        begun += min(taken, plan.total)
        if len(lanes) % ranks:
            lanes, begun = slow_rest(lanes, begun, ranks, least), 0
        resumed = plan.resume(taken, ranks, tail)
        plan = EpochPlan.restore(counts, state, ranks=ranks, tail=tail)
        assert list(plan) == list(resumed) == slow_tail(interleave(lanes)[begun:], epoch, ranks, tail)
        assert plan.state(0) == resumed.state(0)
        assert (plan.lanes, plan.total, plan.ranks, plan.tail) == (len(lanes), resumed.total, ranks, tail)
    delivered += list(plan.resume(0, 1, "exact"))
    assert sorted(delivered) == everything(counts)


@settings(max_examples=100)
@given(datasets, options(), st.data())
def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(counts, options, data):
    plan = EpochPlan(counts, **options)
    position = data.draw(st.integers(0, len(plan) // plan.ranks)) * plan.ranks
    assert list(plan.resume(position, plan.ranks)) == list(plan)[position:]
    others = [ranks for ranks in range(1, 9) if plan.lanes % ranks == 0]
    ranks = data.draw(st.sampled_from(others))
    rest = plan.resume(position, ranks, "exact")
    assert rest.state(0)["before"] == []
    assert list(rest) == list(plan.resume(0, 1, "exact"))[position:]


def test_resuming_again_and_again_without_a_step_keeps_the_state_short():
    plan = EpochPlan([50] * 40, seed=0, epoch=0).resume(100, 7)
    for ranks in (8, 7, 5, 7, 8, 7):
        plan = plan.resume(0, ranks)
    assert len(plan.state(0)["before"]) == 1
    assert len(plan) == 1900


def test_a_rest_resumed_at_its_end_is_empty():
    plan = EpochPlan([5], seed=0, epoch=0, ranks=3, tail="pad")
    assert len(plan) == 6
    for ranks in (1, 3, 5):
        assert list(plan.resume(6, ranks)) == []
    assert len(EpochPlan([5], seed=0, epoch=0, ranks=3, tail="drop").resume(3, 1)) == 2


@settings(max_examples=50)
@given(datasets, st.integers(1, 8), st.sampled_from(TAILS), st.data())
def test_without_shuffle_the_order_is_that_of_storage(counts, ranks, tail, data):
    plan = EpochPlan(counts, seed=0, epoch=0, ranks=ranks, tail=tail, shuffle=False)
    stored = everything(counts)
    assert list(plan) == slow_tail(stored, stored, ranks, tail)
    position = data.draw(st.integers(0, len(plan)))
    state = json.loads(json.dumps(plan.state(position)))
    for rest in (plan.resume(position, 7, "exact"), EpochPlan.restore(counts, state, ranks=7, tail="exact")):
        assert list(rest) == stored[position:]


# The sequence.


@settings(max_examples=100)
@given(datasets, options(), st.data())
def test_positions_arrays_and_slices_agree(counts, options, data):
    plan = EpochPlan(counts, **options)
    if data.draw(st.booleans()):
        plan = plan.resume(len(plan) // 3, 7)
    whole, size = list(plan), len(plan)
    assert all(type(number) is int for pair in whole[:3] for number in pair)
    some = data.draw(st.lists(st.integers(-size, size - 1), max_size=20)) if size else []
    assert [plan[p] for p in some] == [whole[p] for p in some] == pairs(plan[np.array(some, int)]) == pairs(plan[some])
    assert all(type(number) is int for p in some for number in plan[p])
    part = data.draw(st.slices(size))
    assert pairs(plan[part]) == whole[part]
    assert [array.dtype for array in plan[part]] == [np.int64, np.int64]


@pytest.mark.parametrize(("counts", "short"), [([160] * 500, 0), ([160, 157] * 250, 250), ([1, 0, 5] * 500, 1000)])
def test_a_block_takes_4_bytes_and_a_short_one_12_more(counts, short):
    plan = EpochPlan(counts, seed=0, epoch=0, block=16, pool=100)
    blocks = sum(-(-count // 16) for count in counts)
    assert sum(table.nbytes for table in plan.order.tables) == 4 * blocks + 12 * (short + 1)
    assert sorted(plan) == everything(counts)


def test_in_storage_order_a_shard_takes_16_bytes():
    plan = EpochPlan([160, 0, 157], seed=0, epoch=0, shuffle=False)
    assert sum(table.nbytes for table in plan.order.tables) == 16 * 2 + 12


def test_a_sample_takes_8_bytes_where_all_fit_into_the_pool():
    assert [table.nbytes for table in EpochPlan([160, 0, 157], seed=0, epoch=0).order.tables] == [8 * 317]


@pytest.mark.parametrize(
    ("counts", "pool", "samples"),
    [([2000], 400, 800), ([2000], 2000, 2000), ([2000], 9999, 2000), ([2001], 2000, 4000)],
)
def test_the_windows_of_a_process_take_8_bytes_a_sample_and_are_two_of_a_lane(counts, pool, samples):
    plan = EpochPlan(counts, seed=0, epoch=0, block=16, lanes=4, pool=pool)
    assert sorted(plan) == everything(counts)
    assert plan._windows().rows.nbytes == 8 * samples


def test_windows_are_computed_once():
    plan = EpochPlan([50] * 40, seed=0, epoch=0, block=16, lanes=4, pool=400)
    computed = []

    def windows(lane, window):
        computed.extend(zip(lane.tolist(), window.tolist()))
        return type(plan.order).windows(plan.order, lane, window)

    plan.order.windows = windows
    assert sorted(plan[p] for p in range(2000)) == everything([50] * 40)
    assert sorted(computed) == [(lane, window) for lane in range(4) for window in range(5)]


class Interrupted(np.ndarray):
    """An array that is interrupted when it has been written to."""

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        raise KeyboardInterrupt


def test_after_an_interrupt_no_window_is_taken_for_another():
    plan = EpochPlan([50] * 40, seed=0, epoch=0, block=16, lanes=4, pool=400)
    whole, windows = list(plan), plan._windows()
    windows.rows = windows.rows.view(Interrupted)
    for position in (0, 1, 400, 401, 800, 801):
        with pytest.raises(KeyboardInterrupt):
            plan[position]
    windows.rows = windows.rows.view(np.ndarray)
    assert list(plan) == whole == list(plan.apart())
    assert [plan[position] for position in range(1200, 2000)] == whole[1200:]


def test_a_plan_apart_has_the_same_order_and_windows_of_its_own():
    plan = EpochPlan([50] * 40, seed=0, epoch=0, block=16, lanes=4, pool=400)
    other = plan.apart()
    first = plan[:4]
    before = plan._windows().tags.copy()
    assert list(other) == list(plan.resume(0, 1))
    assert (plan._windows().tags == before).all()
    assert pairs(plan[:4]) == pairs(first)


@pytest.mark.parametrize(
    ("counts", "dtype"),
    [([], np.uint8), ([255, 0], np.uint8), ([256], np.uint16), ([2**16], np.uint32), ([2**32 - 1, 1], np.uint32)],
)
def test_counts_are_kept_in_the_least_type(counts, dtype):
    plan = EpochPlan(counts, seed=0, epoch=0)
    assert (plan.order.counts.dtype, plan.order.counts.tolist()) == (dtype, counts)


def test_long_arrays_in_any_order():
    plan = EpochPlan([1000] * 300, seed=1, epoch=2, pool=20_000)
    whole = np.stack(plan[:])
    assert len(np.unique(whole, axis=1).T) == 300_000
    shuffled = np.random.default_rng(0).permutation(150_000)
    assert (np.stack(plan[shuffled]) == whole[:, shuffled]).all()


def test_positions_out_of_range_and_of_other_types_are_refused():
    plan = EpochPlan([3, 4], seed=0, epoch=0)
    for p in (7, -8, [0, 7], np.array([2**64 - 1], np.uint64)):
        with pytest.raises(IndexError, match="out of range of a plan of 7"):
            plan[p]
    for p in ("a", 1.0, [1.5], [True], None, [[1]]):
        with pytest.raises(TypeError, match=r"^a position must be an int, a slice, or a list or array of ints$"):
            plan[p]


def test_threads_may_share_a_plan():
    plan = EpochPlan([1000] * 50, seed=0, epoch=0, pool=4000)
    expected = pairs(plan[:])
    shared = pickle.loads(pickle.dumps(plan))
    with ThreadPoolExecutor(8) as pool:
        batches = list(pool.map(lambda i: pairs(shared[i : i + 100]), range(0, 50_000, 100)))
    assert list(chain(*batches)) == expected


@pytest.mark.forks
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_process_forked_while_a_thread_reads_the_plan_reads_it_too():
    plan = EpochPlan([1000] * 50, seed=0, epoch=0)
    expected = pairs(plan[:100])
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    with plan._windows().lock:
        child = context.Process(target=lambda: sender.send(pairs(plan[:100])))
        child.start()
    assert receiver.poll(100)
    assert receiver.recv() == expected
    child.join()


def test_a_pickled_plan_is_small_and_the_same():
    plan = EpochPlan(np.full(10_000, 1000), seed=-5, epoch=1, ranks=3, tail="pad").resume(999, 7)
    data = pickle.dumps(plan)
    assert len(data) < 21_000
    other = pickle.loads(data)
    positions = np.arange(0, len(plan), 9973)
    assert (np.stack(other[positions]) == np.stack(plan[positions])).all()
    assert (other.ranks, other.tail, other.state(5)) == (plan.ranks, plan.tail, plan.state(5))


@pytest.mark.parametrize("counts", [[], [0], [0, 0, 0]])
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("shuffle", [True, False])
def test_an_empty_dataset_is_an_empty_plan(counts, tail, shuffle):
    plan = EpochPlan(counts, seed=0, epoch=0, ranks=4, tail=tail, shuffle=shuffle)
    assert list(plan) == list(plan.resume(0, 5)) == []
    assert [len(array) for array in plan[:]] == [0, 0]


def test_fewer_samples_than_ranks():
    def plan(tail):
        return EpochPlan([2], seed=0, epoch=0, ranks=5, tail=tail)

    first, second = plan("exact")
    assert list(plan("pad")) == [first, second, first, second, first]
    assert list(plan("drop")) == []
    assert plan("drop").dropped == 2


# What no release may change.

GOLDEN_KEYS = ["0xe220a8397b1dcdaf", "0xe06dd043328bd285", "0xec4c5bee627011b3", "0xc59fb0f53f0362c4"]
GOLDEN_PERMUTATION = [6, 4, 7, 0, 1, 9, 8, 3, 2, 5]
GOLDEN_ORDER = "2:1 3:0 0:1 2:0 3:2 2:5 3:3 3:1 0:2 2:2 2:3 0:0 0:3 2:4 2:6 0:4"
GOLDEN_REST = "2:2 3:1 2:4 0:0 0:3 2:3 0:2 2:6 0:4"
GOLDEN_WIDE = [(1215, 251), (390, 80), (474, 675), (973, 385), (614, 240)]
GOLDEN_LARGE = [(1092, 984), (907, 434), (474, 675), (699, 1), (1005, 825)]


def test_golden_permutations():
    assert [hex(int(hash_of(seed)[0])) for seed in (0, 1, -1, 2**64)] == GOLDEN_KEYS
    assert permutations(hash_of(7), [10], 10).tolist() == [GOLDEN_PERMUTATION]


def test_golden_orders():
    plan = EpochPlan([5, 0, 7, 4], seed=1, epoch=2, block=3, lanes=3, pool=12)
    assert [f"{shard}:{sample}" for shard, sample in plan] == GOLDEN_ORDER.split()
    rest = plan.resume(7, 2)
    assert [f"{shard}:{sample}" for shard, sample in rest] == GOLDEN_REST.split()
    large = EpochPlan(np.full(1281, 1000), seed=0, epoch=0, pool=2**18)
    assert pairs(large[[0, 1, 2, 10**6, -1]]) == GOLDEN_LARGE
    wide = EpochPlan(np.full(1281, 1000), seed=0, epoch=0)
    assert pairs(wide[[0, 1, 2, 10**6, -1]]) == GOLDEN_WIDE


def test_the_page_on_the_order_shows_what_runs():
    page = (Path(__file__).parents[2] / "docs/order.md").read_text()
    space = {}
    exec(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1], space)
    assert (space["shards"][0], space["samples"][0]) == space["plan"][3]
    assert len(space["rest"]) == 1_281_000 - 2048 + 4


# Arguments and states.


def test_blocks_are_about_a_mebibyte_and_at_most_ten_million():
    assert block_size([1000] * 5, [1000 * 110_000] * 5) == 9
    assert block_size([1000], [1000 * 300_000]) == 3
    assert block_size([1000], [1000 * 5_000_000]) == 1
    assert block_size([1000], [2_000_000]) == block_size([1000]) == block_size([]) == block_size([0], [0]) == 16
    assert block_size(np.full(10**6, 1000)) == 100
    assert block_size(np.full(10**6, 160)) == 16
    assert block_size(np.full(10**6, 161)) == block_size(np.full(1_100_000, 145)) == 17


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"counts": [1, -1]}, "counts must be a whole number of samples for each shard, from 0 to 2.*32 - 1"),
        ({"counts": [1.5]}, "counts must be .*"),
        ({"counts": [2**32]}, "counts must be .*"),
        ({"counts": [[1]]}, "counts must be .*"),
        ({"tail": "wrap"}, "tail must be one of exact, pad, drop, not 'wrap'"),
        ({"ranks": 0}, "ranks must be at least 1 and at most 1048576, not 0"),
        ({"ranks": 2**20 + 1}, "ranks must be at least 1 and at most 1048576, not 1048577"),
        ({"unit": 0}, "unit must be at least 1, not 0"),
        ({"block": 0}, "block must be at least 1, not 0"),
        ({"pool": 0}, "pool must be at least 1, not 0"),
        ({"lanes": 0}, "lanes must be at least 1 and at most 1048576, not 0"),
        ({"lanes": 2**20 + 1}, "lanes must be at least 1 and at most 1048576, not 1048577"),
        ({"lanes": 10, "ranks": 4}, "lanes must be a multiple of the 4 ranks, not 10"),
    ],
)
def test_bad_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        EpochPlan(**{"counts": [3, 4], "seed": 0, "epoch": 0, **options})


@pytest.mark.parametrize("name", ["seed", "epoch", "ranks", "unit", "block", "pool", "lanes"])
def test_arguments_that_are_no_whole_numbers_are_refused(name):
    with pytest.raises(TypeError, match=f"^{name} must be a whole number, not 1.5$"):
        EpochPlan(**{"counts": [3, 4], "seed": 0, "epoch": 0, name: 1.5})


def test_bad_positions_to_resume_at_are_refused():
    plan = EpochPlan([3, 4], seed=0, epoch=0)
    for position in (-1, 8):
        with pytest.raises(ValueError, match=f"position must be between 0 and the plan's length of 7, not {position}"):
            plan.resume(position, 1)
        with pytest.raises(ValueError, match="position"):
            plan.state(position)
    for ranks in (0, 2**20 + 1):
        with pytest.raises(ValueError, match=f"^ranks must be at least 1 and at most 1048576, not {ranks}$"):
            plan.resume(0, ranks)
    with pytest.raises(ValueError, match="tail"):
        plan.resume(0, 1, "wrap")
    with pytest.raises(ValueError, match="ranks"):
        EpochPlan.restore([3, 4], plan.state(0), ranks=0, tail="pad")


STATE = EpochPlan([3, 4], seed=0, epoch=0).resume(2, 5).state(1)


@pytest.mark.parametrize("name", STATE)
def test_a_state_without_an_entry_is_refused(name):
    with pytest.raises(StateError, match=f"no {name}"):
        EpochPlan.restore([3, 4], {key: value for key, value in STATE.items() if key != name}, ranks=1, tail="pad")


@pytest.mark.parametrize("name", STATE)
@pytest.mark.parametrize("value", [None, "1", 1.0, {}])
def test_a_state_of_other_types_is_refused(name, value):
    with pytest.raises(StateError, match=f"has {name}"):
        EpochPlan.restore([3, 4], {**STATE, name: value}, ranks=1, tail="pad")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"position": 6}, "position 6, but 5 samples are left of the epoch"),
        ({"position": -1}, "position -1, but 5 samples are left of the epoch"),
        ({"position": True}, "position True, which is not of type int"),
        ({"lanes": 0}, "0 lanes up to position 1"),
        ({"lanes": 2**20 + 1}, "1048577 lanes up to position 1"),
        ({"lanes": 10**18}, "1000000000000000000 lanes up to position 1"),
        ({"block": 0}, "a block or pool below 1, or lanes without shuffle"),
        ({"pool": -1}, "a block or pool below 1, or lanes without shuffle"),
        ({"shuffle": False}, "a block or pool below 1, or lanes without shuffle"),
        ({"shuffle": False, "before": []}, "a block or pool below 1, or lanes without shuffle"),
        ({"before": [[192, 7]]}, "position 1, but 0 samples are left of the epoch"),
        ({"before": [[192, -1]]}, "position -1, but 7 samples are left of the epoch"),
        ({"before": [[0, 1]]}, "0 lanes up to position 1"),
        ({"before": [192, 1]}, r"before \[192, 1\], which are not lanes and positions"),
        ({"before": [[192]]}, r"before \[\[192\]\], which are not lanes and positions"),
        ({"before": [[192, "1"]]}, "192 lanes up to position '1'"),
        ({"before": [[192, True]]}, "192 lanes up to position True"),
        ({"before": [[True, 1]]}, "True lanes up to position 1"),
        ({"before": [[2**20, 0]] * 8}, f"{2**23 + 195} lanes in 9 stages, and may have {2**23}"),
        ({"before": [[192, 1, 1]]}, r"before \[\[192, 1, 1\]\], which are not lanes and positions"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(change, message):
    assert len(EpochPlan.restore([3, 4], STATE, ranks=1, tail="exact")) == 4
    with pytest.raises(StateError, match=f"^a plan's state has {message}$"):
        EpochPlan.restore([3, 4], {**STATE, **change}, ranks=1, tail="pad")


@pytest.mark.parametrize(
    "change",
    [
        {"lanes": 2**20},
        {"lanes": 1},
        {"position": 5},
        {"position": 0},
        {"before": [[2**20, 2]]},
        {"block": 1},
        {"pool": 1},
        {"before": [], "shuffle": False, "lanes": 1},
    ],
)
def test_a_state_at_the_bounds_fits(change):
    state = {**STATE, **change}
    left = 7 - sum(position for _, position in state["before"]) - state["position"]
    assert len(EpochPlan.restore([3, 4], state, ranks=1, tail="exact")) == left


def test_a_state_of_bins_is_refused():
    message = "^the state is of packed samples, and requires the packing= that it was saved with$"
    with pytest.raises(StateError, match=message):
        EpochPlan.restore([3, 4], {**STATE, "packing": {}}, ranks=1, tail="pad")


def test_a_unit_of_reading_is_not_part_of_a_state_and_is_kept_by_a_pickle():
    plan = EpochPlan([30, 40], seed=0, epoch=0, unit=5, ranks=2, tail="pad")
    assert plan.block_and_reach == pickle.loads(pickle.dumps(plan)).block_and_reach == (5, 70)
    assert plan.resume(10, 3).block_and_reach == (5, 60)
    assert EpochPlan.restore([30, 40], plan.state(10), ranks=1, tail="pad", unit=7).block_and_reach == (7, 60)
    assert EpochPlan.restore([30, 40], plan.state(10), ranks=1, tail="pad").block_and_reach == (16, 60)


def test_single_samples_are_permuted_where_all_fit_into_the_pool():
    def made(counts, **options):
        plan = EpochPlan(counts, seed=0, epoch=0, **options)
        return plan.state(0)["block"], plan.state(0)["pool"]

    assert made([60, 40], pool=100) == made([60, 40]) == made([10**7], pool=10**8) == (1, 1)
    assert made([60, 40], pool=99) == (16, 99)
    assert made([60, 40], pool=99, unit=5) == (5, 99)
    assert made([10**7 + 1], pool=10**8) == (16, 10**8)
    assert made([60, 40], pool=100, block=7) == (7, 100)
    assert made([60, 40], pool=100, shuffle=False) == (16, 100)


def test_how_far_a_block_is_used():
    """Over a window of each lane, and the blocks that reach into it at both ends."""
    plan = EpochPlan([300, 400], seed=0, epoch=0, block=5, lanes=4, pool=100)
    assert plan.block_and_reach == (5, 100 + 2 * 4 * 5)
    assert EpochPlan([300, 400], seed=0, epoch=0, shuffle=False).block_and_reach == (None, 2**16)
    assert EpochPlan([300, 400], seed=0, epoch=0, block=5, pool=700).block_and_reach[0] == 5
    assert EpochPlan([300, 400], seed=0, epoch=0, unit=5, pool=699).block_and_reach[0] == 5


def test_a_state_is_short():
    plan = EpochPlan(np.full(10**6, 1000), seed=2**64 - 1, epoch=100)
    for ranks in (7, 11, 13, 8):
        plan = plan.resume(10**8 + 3, ranks)
    assert len(json.dumps(plan.state(10**8))) < 400
    with pytest.raises(StateError, match="a plan's state has no seed"):
        EpochPlan.restore([3], [], ranks=1, tail="exact")
