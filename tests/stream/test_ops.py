"""Every op does what its one sentence says."""

from __future__ import annotations

import asyncio
import builtins
import gc
import pickle
import subprocess
import sys
import time
from concurrent.futures import CancelledError, ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from leftovers import Leftovers
from with_torch import ShardDataset, ShardLoader, torch

from tarshards import Ledger, Stream, readers
from tarshards.errors import DecodeError, OpError, SampleError
from tarshards.stream import ops
from tarshards.stream.collate import collate

SAMPLE = {"__key__": "k", "__url__": "u.tar", "jpg": 1, "cls": 2}


def test_map_raises_the_functions_own_error_with_the_place():
    with pytest.raises(ZeroDivisionError) as caught:
        list(ops.map([SAMPLE], lambda sample: 1 / 0))
    assert caught.value.__notes__ == ["u.tar: k: ZeroDivisionError: division by zero"]


@pytest.mark.parametrize("op", [ops.map, ops.filter])
def test_on_error_leaves_the_sample_out(op):
    ledger = Ledger(max_errors=1)
    samples = [{"__key__": str(i), "x": i} for i in range(3)]
    left = list(op(samples, lambda sample: {"x": 1 / (sample["x"] - 1)}, on_error=ledger))
    assert len(left) == 2
    assert [entry.key for entry in ledger.quarantined] == ["1"]
    assert "ZeroDivisionError" in ledger.quarantined[0].reason


def test_on_error_gets_the_cause():
    seen: list[Exception] = []
    list(ops.map([SAMPLE], lambda sample: 1 / 0, on_error=seen.append))
    assert isinstance(seen[0], OpError)
    assert isinstance(seen[0].__cause__, ZeroDivisionError)


def test_errors_of_the_consumer_are_not_the_ops():
    def consume():
        for _ in ops.map([SAMPLE], dict, on_error=lambda error: None):
            raise KeyError

    with pytest.raises(KeyError):
        consume()


def test_no_op_edits_the_callers_sample():
    sample = dict(SAMPLE)
    for stream in (
        ops.map_fields([sample], {"jpg": str}),
        ops.keep_fields([sample], "cls"),
        ops.rename_fields([sample], {"image": "jpg"}),
        ops.decode([{**sample, "cls": b"7"}]),
    ):
        list(stream)
    assert sample == SAMPLE


def test_keep_fields():
    assert list(ops.keep_fields([SAMPLE], "png;jpg")) == [{"__key__": "k", "__url__": "u.tar", "jpg": 1}]
    assert list(ops.keep_fields([SAMPLE], "cls jpg")) == list(ops.keep_fields([SAMPLE], "cls", "jpg"))
    with pytest.raises(SampleError, match=r"u.tar: k: no field png or gif; the sample has jpg, cls"):
        list(ops.keep_fields([SAMPLE], "png;gif"))


def test_rename_fields():
    assert list(ops.rename_fields([SAMPLE], {"cls": "jpg", "jpg": "cls"})) == [
        {"__key__": "k", "__url__": "u.tar", "cls": 1, "jpg": 2}
    ]
    with pytest.raises(SampleError, match="one name"):
        list(ops.rename_fields([SAMPLE], {"cls": "jpg"}))
    with pytest.raises(SampleError, match="no field png"):
        list(ops.rename_fields([SAMPLE], {"image": "png"}))


def test_to_tuple():
    assert list(ops.to_tuple([SAMPLE], "png;jpg cls __key__")) == [(1, 2, "k")]
    with pytest.raises(SampleError, match="no field seg"):
        list(ops.to_tuple([SAMPLE], "seg"))


def test_map_fields_names_a_missing_field():
    with pytest.raises(SampleError, match="no field seg"):
        list(ops.map_fields([SAMPLE], {"seg": str}))


def test_decode_names_the_place():
    sample = {"__key__": "k", "__url__": "u.tar", "cls": b"seven"}
    with pytest.raises(DecodeError) as caught:
        list(ops.decode([sample]))
    assert str(caught.value).startswith("u.tar: k.cls: ")
    ledger = Ledger(max_errors=1)
    assert list(ops.decode([sample, {**sample, "cls": b"7"}], on_error=ledger)) == [{**sample, "cls": 7}]
    assert ledger.quarantined[0][:3] == ("u.tar", "k", "cls")


def test_batches():
    batches = list(ops.batched([{"__key__": str(i), "x": i, "a": np.full(2, i)} for i in range(5)], 2))
    assert [batch["__key__"] for batch in batches] == [["0", "1"], ["2", "3"], ["4"]]
    assert batches[0]["x"].tolist() == [0, 1]
    assert batches[1]["a"].shape == (2, 2)
    assert len(list(ops.batched(range(5), 2, partial=False))) == 2
    assert list(ops.batched(range(4), 2, collate=sum)) == [1, 5]
    assert list(ops.batched([], 2)) == []
    with pytest.raises(ValueError, match="at least 1"):
        ops.batched([], 0)


def test_collate_kinds():
    assert collate([1.5, 2]).dtype == np.float64
    assert collate([True, False]).dtype == np.bool_
    assert collate(["a", "b"]) == ["a", "b"]
    assert collate([b"a", None]) == [b"a", None]
    tensors = collate([(torch.zeros(2), "a"), (torch.ones(2), "b")])
    assert isinstance(tensors[0], torch.Tensor)
    assert tensors[0].shape == (2, 2)


def test_collate_refuses_what_makes_no_batch():
    with pytest.raises(ValueError, match=r"a: .* of shape \(2,\) in sample 0 and .*\(3,\) in sample 1 make no batch"):
        collate([{"a": np.zeros(2)}, {"a": np.zeros(3)}])
    with pytest.raises(ValueError, match="NoneType"):
        collate([{"a": np.zeros(2)}, {"a": None}])
    with pytest.raises(SampleError, match=r"^u: k: sample 0 has .* a, and sample k has the fields a, b, which"):
        collate([{"a": 1}, {"a": 1, "b": 2, "__key__": "k", "__url__": "u"}])


@given(st.integers(0, 60), st.integers(1, 20), st.none() | st.integers(1, 20), st.integers(0, 3), st.integers(0, 3))
def test_shuffle_is_a_permutation_of_its_seed_and_epoch(count, size, initial, seed, epoch):
    once = list(ops.shuffle(range(count), size, initial=initial, seed=seed, epoch=epoch))
    assert sorted(once) == list(range(count))
    assert once == list(ops.shuffle(range(count), size, initial=initial, seed=seed, epoch=epoch))


def test_shuffle_differs_by_seed_and_epoch():
    orders = {tuple(ops.shuffle(range(50), 50, seed=s, epoch=e)) for s in range(5) for e in range(5)}
    assert len(orders) == 25


def test_shuffle_is_uniform_within_its_buffer():
    firsts = [next(ops.shuffle(range(4), 4, seed=seed)) for seed in range(4000)]
    assert all(900 < firsts.count(i) < 1100 for i in range(4))


def test_shuffle_starts_at_initial_and_grows():
    taken: list[int] = []

    def source():
        for i in range(100):
            taken.append(i)
            yield i

    shuffled = ops.shuffle(source(), 50, initial=10)
    next(shuffled)
    assert len(taken) <= 11
    for _ in range(60):
        next(shuffled)
    assert len(taken) == 100


def test_take_and_skip():
    assert list(ops.take("abc", 0)) == []
    assert list(ops.take("abc", None)) == ["a", "b", "c"]
    assert list(ops.skip("abc", 5)) == []


def test_repeat_ends_on_nothing():
    assert list(ops.repeat([])) == []
    assert list(ops.take(ops.repeat([1, 2]), 5)) == [1, 2, 1, 2, 1]


def test_enumerate_and_flatten():
    assert list(ops.enumerate("ab", start=3)) == [(3, "a"), (4, "b")]
    assert list(ops.flatten([[1], [], [2, 3]])) == [1, 2, 3]


def _slow_square(x: int) -> int:
    time.sleep(0.02 if x % 3 == 0 else 0)
    return x * x


@pytest.mark.parametrize("executor", [None, ThreadPoolExecutor, ProcessPoolExecutor])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_async_map_keeps_order(executor):
    expected = [x * x for x in range(20)]
    if executor is None:
        assert list(ops.async_map(range(20), _slow_square, workers=3)) == expected
        assert sorted(ops.async_map(range(20), _slow_square, workers=3, ordered=False)) == expected
    else:
        with executor(2) as pool:
            assert list(ops.async_map(range(20), _slow_square, executor=pool)) == expected
            assert sorted(ops.async_map(range(20), _slow_square, executor=pool, ordered=False)) == expected


def test_async_map_is_bounded():
    taken: list[int] = []

    def source():
        for i in range(1000):
            taken.append(i)
            yield i

    results = ops.async_map(source(), lambda x: x, workers=4)
    next(results)
    assert len(taken) <= 8
    results.close()
    assert len(taken) <= 8


def test_async_map_leaves_no_thread_behind():
    before = Leftovers()
    results = ops.async_map(range(1000), lambda x: x, workers=4)
    next(results)
    assert before.threads()
    results.close()
    assert not before.threads()


def test_async_map_raises_the_first_error():
    results = ops.async_map(range(10), lambda x: 1 // (x - 3), workers=2)
    assert [next(results) for _ in range(3)] == [-1, -1, -1]
    with pytest.raises(ZeroDivisionError):
        next(results)
    with pytest.raises(ValueError, match="at least 1"):
        ops.async_map([], str, workers=0)


def test_progress_writes_to_a_terminal_only(capsys):
    assert list(ops.progress(range(5), total=5)) == [0, 1, 2, 3, 4]
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


def test_monitor_counts_samples_and_bytes():
    rates = []
    samples = [{"__key__": "k" * 100, "x": b"12345", "y": np.zeros(2), "z": ["ab", (b"c",)]}] * 10
    assert len(list(ops.monitor(samples, rates.append, interval=1e9))) == 10
    assert len(rates) == 1
    assert (rates[0].samples, rates[0].bytes) == (10, 10 * (5 + 16 + 2 + 1))
    list(ops.monitor(samples, rates.append, interval=0))
    assert len(rates) == 12
    assert all(rate.samples_per_second > 0 for rate in rates[:-1])


def test_builtins_are_not_hidden_by_the_ops_own_names():
    assert builtins.map is not ops.map


async def _slow_cube(x: int) -> int:
    await asyncio.sleep(0.02 if x % 3 == 0 else 0)
    return x**3


class Cube:
    async def __call__(self, x: int) -> int:
        return await _slow_cube(x)

    async def method(self, x: int) -> int:
        return await _slow_cube(x)


async def _power(x: int, *, exponent: int) -> int:
    return x**exponent


COROUTINE_FUNCTIONS = {
    "async def": _slow_cube,
    "object": Cube(),
    "method": Cube().method,
    "partial": partial(_power, exponent=3),
    "partial of a partial": partial(partial(_power), exponent=3),
    "partial of an object": partial(Cube()),
}


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("function", COROUTINE_FUNCTIONS)
def test_async_map_awaits_coroutines(function, ordered):
    before = Leftovers()
    results = list(ops.async_map(range(20), COROUTINE_FUNCTIONS[function], workers=3, ordered=ordered))
    assert (results if ordered else sorted(results)) == [x**3 for x in range(20)]
    assert not before.threads()


def test_async_map_runs_as_many_coroutines_at_once_as_it_has_workers():
    under_way, most, taken = 0, 0, []

    async def function(x: int) -> int:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.001)
        under_way -= 1
        return x

    def source():
        for i in range(100):
            taken.append(i)
            yield i

    results = ops.async_map(source(), function, workers=4)
    assert next(results) == 0
    assert len(taken) <= 8
    assert list(results) == list(range(1, 100))
    assert most == 4


def test_leaving_async_map_early_cancels_its_coroutines(caplog):
    begun, ended = [], []

    async def function(x: int) -> int:
        begun.append(x)
        try:
            await asyncio.sleep(100 if x else 0)
        finally:
            await asyncio.sleep(0.01)
            ended.append(x)
        return x

    before = Leftovers()
    for workers in 1, 4:
        results = ops.async_map(range(1000), function, workers=workers)
        assert next(results) == 0
        results.close()
        assert not before.threads()
        assert sorted(begun) == sorted(ended), "what began has cleaned up"
        begun.clear(), ended.clear()
    gc.collect()  # a coroutine that was never awaited would warn, a pending task would log
    assert not caplog.records


@pytest.mark.parametrize("is_async", [True, False])
def test_failures_of_async_map_are_those_of_map(is_async):
    def fail(sample):
        return {**sample, "x": 1 // (sample["x"] - 2)}

    async def fail_later(sample):
        return fail(sample)

    samples = [{"__key__": str(i), "__url__": "u.tar", "x": i} for i in range(6)]
    function = fail_later if is_async else fail
    with pytest.raises(ZeroDivisionError) as caught:
        list(ops.async_map(samples, function))
    assert caught.value.__notes__ == ["u.tar: 2: ZeroDivisionError: integer division or modulo by zero"]
    ledger = Ledger(max_errors=1)
    left = list(ops.async_map(samples, function, on_error=ledger))
    assert left == list(ops.map(samples, fail, on_error=lambda error: None))
    assert [(entry.shard, entry.key) for entry in ledger.quarantined] == [("u.tar", "2")]


def test_async_map_says_what_it_cannot_run():
    async def generator(x):
        yield x

    with ThreadPoolExecutor(1) as pool, pytest.raises(TypeError, match="leave out executor="):
        ops.async_map(range(3), _slow_cube, executor=pool)
    with pytest.raises(TypeError, match="async generator"):
        ops.async_map(range(3), generator)
    with pytest.raises(TypeError, match="returned a coroutine; give async_map the async function itself"):
        list(ops.async_map(range(3), lambda x: _slow_cube(x)))


def test_an_executor_that_cancels_its_calls_does_not_hang():
    with ThreadPoolExecutor(1) as pool:
        results = ops.async_map(range(100), _slow_square, executor=pool)
        next(results)
        pool.shutdown(wait=False, cancel_futures=True)
        with pytest.raises((CancelledError, RuntimeError)):
            list(results)


@pytest.mark.parametrize("function", COROUTINE_FUNCTIONS)
def test_what_does_not_await_refuses_async_functions(make_shards, function):
    shards = make_shards(2)
    function = COROUTINE_FUNCTIONS[function]
    calls = {
        "map": lambda: ops.map([1], function),
        "filter": lambda: ops.filter([1], function),
        "map_fields": lambda: ops.map_fields([{"x": 1}], {"x": function}),
        "batched": lambda: ops.batched([1], 1, collate=function),
        "monitor": lambda: ops.monitor([1], function),
        "on_error=": lambda: ops.map([1], str, on_error=function),
        "on_error= ": lambda: ops.async_map([1], str, on_error=function),
        "on_error=  ": lambda: ops.decode([{}], on_error=function),
        "on_error=   ": lambda: Stream.from_shards(shards, on_error=function),
        "on_error=    ": lambda: Ledger(on_error=function),
        "a reader": lambda: readers.using(function),
        "ShardLoader": lambda: ShardLoader(ShardDataset(shards), 2, collate_fn=function),
    }
    for name, call in calls.items():
        with pytest.raises(TypeError, match=rf"^{name.strip()} .*async_map\(\)"):
            list(call())


async def _label(sample):
    await asyncio.sleep(0)
    return {"cls": int(sample["cls"])}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("index", [True, False])
def test_coroutines_run_in_the_workers_of_loaders(make_shards, workers, index):
    dataset = ShardDataset(make_shards(4, index=index)).async_map(_label)
    assert pickle.loads(pickle.dumps(dataset)).collect() == [{"cls": i} for i in range(12)]
    batches = list(ShardLoader(dataset, 2, num_workers=workers))
    assert sorted(int(label) for batch in batches for label in batch["cls"]) == list(range(12))
    loader = torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=workers)
    assert sorted(sample["cls"] for sample in loader) == list(range(12))


def test_an_abandoned_async_map_lets_the_interpreter_exit():
    program = """
import asyncio
from tarshards.stream import ops
async def forever(x):
    await asyncio.sleep(100 if x else 0)
results = ops.async_map(range(100), forever)
next(results)
"""
    run = subprocess.run([sys.executable, "-X", "dev", "-c", program], capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
