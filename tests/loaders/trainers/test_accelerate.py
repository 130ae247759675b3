"""Accelerate: prepared loaders deliver the dataset once, step as often as they should, and resume exactly."""

from __future__ import annotations

import json
import socket
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from accelerate import Accelerator
from accelerate.state import GradientState
from accelerate_runs import STEPS, Training, resumed
from our_loaders import OURS, array_loader, shard_loader

pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("ignore")]

SIZES = [100, 3, 150, 0, 80]  # 333 samples
SIZE = 8  # 42 batches, the last one of 5; 11 steps of 4


@pytest.fixture
def urls(make_uneven) -> str:
    return make_uneven(SIZES)


def flat(batches) -> list[int]:
    return sorted(value for batch in batches for value in batch)


@pytest.mark.parametrize("make", OURS)
def test_every_epoch_is_the_dataset_and_its_last_gradients_are_applied(urls, make):
    training = Training(make(urls, SIZE))
    for epoch in range(1, 4):
        training.epoch()
        assert flat(training.seen[42 * (epoch - 1) :]) == list(range(333))
        assert training.steps == epoch * -(-42 // STEPS)
    assert GradientState().active_dataloader is None


@pytest.mark.parametrize("make", OURS)
def test_without_indexes_too_the_last_gradients_are_applied(make_shards, make):
    training = Training(make(make_shards(6, 20), SIZE))
    for epoch in range(1, 3):
        training.epoch()
        batches = len(training.seen) // epoch
        assert flat(training.seen[batches * (epoch - 1) :]) == list(range(120))
        assert training.steps == epoch * -(-batches // STEPS)


@pytest.mark.parametrize("make", OURS)
def test_a_loader_that_is_left_early_is_forgotten(urls, make):
    """Else the loop after it, of another loader, would go by its end."""
    training = Training(make(urls, SIZE))
    training.epoch(stop=3)
    assert GradientState().active_dataloader is None
    outer = iter(training.loader)
    next(outer)
    inner = Training(make(urls, SIZE))
    inner.epoch()
    assert GradientState().active_dataloader is training.loader
    outer.close()
    assert GradientState().active_dataloader is None
    with pytest.raises(ValueError, match="in the loop"):
        raise_in(training.loader)
    assert GradientState().active_dataloader is None


def raise_in(loader) -> None:
    for _ in loader:
        raise ValueError("in the loop")


@pytest.mark.parametrize("make", OURS)
@pytest.mark.parametrize("stop", [20, 42])
def test_a_loaded_state_goes_on_with_the_same_batches(urls, tmp_path, make, stop):
    expected, found = resumed(make, urls, SIZE, tmp_path, stop)
    assert found[: len(expected)] == expected
    assert len(expected) == 42 + 42 - stop


def test_batches_cannot_be_skipped_behind_the_loaders_back(urls):
    with pytest.raises(TypeError, match="load a state"):
        list(Accelerator(cpu=True).skip_first_batches(shard_loader(urls, SIZE), 3))


def test_keys_can_be_gathered(urls):
    accelerator = Accelerator(cpu=True)
    for make in (shard_loader, array_loader):
        batches = [accelerator.gather_for_metrics(batch["__key__"]) for batch in accelerator.prepare(make(urls, SIZE))]
        assert sorted(key for batch in batches for key in batch) == [f"{i:06d}" for i in range(333)]


def test_two_ranks_deliver_the_dataset_and_resume(make_shards, tmp_path, run_program):
    urls = make_shards(8, 500, index=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])

    def run(rank: int) -> dict:
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_PORT": port}
        run_program("accelerate_runs.py", urls, tmp_path, **place)
        return json.loads((tmp_path / f"{rank}.json").read_text())

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(run, range(2))
    for name, orders in first["orders"].items():
        for epoch in range(2):
            half = len(orders) // 2
            batches = [batch for order in (orders, second["orders"][name]) for batch in order[epoch * half :][:half]]
            counts = Counter(flat(batches))
            assert sorted(counts) == list(range(4000)), name
            if name in first["steps"]:
                assert counts.total() == 4000, "what accelerate shares out itself it may fill up"
    assert first["steps"] == second["steps"] == dict.fromkeys(first["steps"], 2 * 20 // STEPS)
    for rank in (first, second):
        for name, (expected, found) in rank["resumed"].items():
            assert found[: len(expected)] == expected, name
            assert len(expected) == 20 + 20 - 7
        for name, refusal in rank["refused"].items():
            assert "world=World()" in refusal, name
