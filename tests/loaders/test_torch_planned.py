"""Planned datasets in torch's own DataLoader and in torchdata's: exactly once, epochs agree, resumed in mid-epoch."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import warnings
from itertools import islice, product

import pytest
from soak import SOAK
from torch.utils.data import DataLoader

from tarshards import Ledger, ShardDataset, World
from tarshards.errors import AuditError, StateError
from tarshards.index.access import SampleSequence

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchdata.stateful_dataloader import StatefulDataLoader

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
]

SIZES = [13, 0, 40, 1, 22]  # 76 samples


@pytest.fixture
def urls(make_uneven) -> str:
    return make_uneven(SIZES)


def classes(samples) -> list[int]:
    return [int(sample["cls"]) for sample in samples]


def exhaust(loader) -> None:
    try:
        list(loader)
    finally:
        gc.collect()


@pytest.mark.soak
@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (3, 0), (1, 3), (2, 2), *[(1, 1), (3, 1), (3, 3)] * (SOAK > 1)])
def test_every_sample_once_over_ranks_and_workers(urls, ranks, workers):
    parts, ledgers = [], []
    for rank in range(ranks):
        dataset = ShardDataset(urls, shuffle=True, world=World(rank, ranks), tail="exact")
        loader = DataLoader(dataset, batch_size=None, num_workers=workers)
        assert len(loader) == len(dataset)
        epochs = [classes(loader) for _ in range(2)]
        assert [len(epoch) for epoch in epochs] == [len(dataset)] * 2
        parts.append(epochs)
        ledgers.append(dataset.ledger)
        dataset.ledger.check()
        assert dataset.ledger.samples == 2 * len(dataset)
    for epoch in range(2):
        assert sorted(value for part in parts for value in part[epoch]) == list(range(76))
    for ledger in ledgers[1:]:
        ledgers[0].merge(ledger)
    ledgers[0].check()


def test_epochs_are_those_of_one_process(urls):
    alone, served = (ShardDataset(urls, shuffle=True) for _ in range(2))
    loader = DataLoader(served, batch_size=None, num_workers=1, persistent_workers=True)
    assert [classes(alone) for _ in range(3)] == [classes(loader) for _ in range(3)]


def test_worker_w_has_every_wth_position(urls):
    expected = classes(ShardDataset(urls, shuffle=True))
    parts = [classes(ShardDataset(urls, shuffle=True, world=World(0, 1, worker, 3))) for worker in range(3)]
    assert parts == [expected[worker::3] for worker in range(3)]


@pytest.mark.usefixtures("quick_spawn")
def test_spawned_workers_account_for_what_they_read(urls):
    dataset = ShardDataset(urls, shuffle=True)
    loader = DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context="spawn")
    assert sorted(classes(loader)) == list(range(76))
    assert dataset.ledger.samples == 76
    dataset.ledger.check()


def test_a_worker_that_loses_a_sample_is_found(urls, monkeypatch):
    read_all = SampleSequence.read_all
    monkeypatch.setattr(SampleSequence, "read_all", lambda *numbers: islice(read_all(*numbers), 1, None))
    with pytest.raises(AuditError, match=r"set-000\d\.tar \(1\)"):
        exhaust(DataLoader(ShardDataset(urls, shuffle=True), batch_size=None, num_workers=2))


def test_a_dataset_pickled_in_mid_epoch_begins_the_next(urls):
    dataset = ShardDataset(urls, shuffle=True)
    iterator = iter(dataset)
    next(iterator)
    copy = pickle.loads(pickle.dumps(dataset))
    expected = ShardDataset(urls, shuffle=True)
    expected.set_epoch(1)
    assert classes(copy) == classes(expected)


def holding(dataset):
    return dataset.shuffle(10)


def lazy(dataset):
    return dataset.decode().filter(is_odd)


def is_odd(sample) -> bool:
    return sample["cls"] % 2 == 1


@pytest.mark.parametrize(
    ("workers", "ops", "index"),
    [
        *product([0], [lazy, holding], [True, False]),
        (2, holding, False),
        *[
            pytest.param(2, *more, marks=pytest.mark.soak)
            for more in product([lazy, holding], [True, False])
            if SOAK > 1 and more != (holding, False)
        ],
    ],
)
def test_torchdatas_loader_resumes_in_mid_epoch(urls, index, ops, workers):
    def fresh():
        dataset = ops(ShardDataset(urls, index=index, shuffle=True, seed=1))
        return StatefulDataLoader(dataset, batch_size=None, num_workers=workers)

    reference = fresh()
    epochs = [classes(reference) for _ in range(3)]
    loader = fresh()
    assert classes(loader) == epochs[0]
    for stop in (1, 12) if SOAK > 1 or not workers else (12,):
        iterator = iter(loader)
        delivered = classes(islice(iterator, stop))
        state = json.loads(json.dumps(loader.state_dict()))
        del iterator
        loader = fresh()
        loader.load_state_dict(state)
        assert delivered + classes(loader) == epochs[1]
        assert classes(loader) == epochs[2], "the next epoch is whole"
        loader = fresh()
        classes(loader)


def test_torchdatas_loader_between_epochs(urls):
    def fresh():
        return StatefulDataLoader(ShardDataset(urls, shuffle=True), batch_size=None, num_workers=2)

    reference = fresh()
    epochs = [classes(reference) for _ in range(2)]
    loader = fresh()
    assert classes(loader) == epochs[0]
    state = loader.state_dict()
    resumed = fresh()
    resumed.load_state_dict(state)
    parts = [classes(resumed) for _ in range(2)]
    assert epochs[1] in parts


def test_torchdatas_loader_on_other_workers_is_refused(urls):
    loader = StatefulDataLoader(ShardDataset(urls), batch_size=None, num_workers=2)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    del iterator
    other = StatefulDataLoader(ShardDataset(urls), batch_size=None, num_workers=3)
    other.load_state_dict(state)
    with pytest.raises((StateError, AssertionError), match="2"):
        exhaust(other)


def _share_one_ledger(urls: str, queue) -> None:
    warnings.simplefilter("ignore")
    ledger = Ledger()
    datasets = [ShardDataset(urls, shuffle=True, seed=seed, on_error=ledger) for seed in range(2)]
    loaders = [DataLoader(dataset, batch_size=None, num_workers=2) for dataset in datasets]
    pairs = list(zip(*loaders, strict=True))
    ledger.check()
    queue.put((len(pairs), ledger.samples))


@pytest.mark.forks
def test_two_datasets_on_one_ledger_at_once_in_workers(urls):
    queue = multiprocessing.get_context("fork").SimpleQueue()
    process = multiprocessing.get_context("fork").Process(target=_share_one_ledger, args=(urls, queue))
    process.start()
    process.join()
    assert queue.get() == (76, 152)


INTERRUPTED = """
import os, sys, time, warnings
from tarshards import ShardDataset
from tarshards.loaders.torch.shard_loader import ShardLoader
warnings.simplefilter("ignore")
loader = ShardLoader(ShardDataset(sys.argv[1]), 1, num_workers=2)
print(os.getpgrp(), flush=True)
try:
    for batch in loader:
        print("step", flush=True)
        time.sleep(0.1)
except KeyboardInterrupt:
    state = loader.state_dict()
    loader.load_state_dict(state)
    print("left", len(loader) - state["batches"], len(list(loader)), flush=True)
"""


def test_an_interrupted_loop_can_be_resumed(urls, python_with_torch):
    """Ctrl-C reaches the workers too."""
    command = [python_with_torch, "-c", INTERRUPTED, urls]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0)
    group = int(process.stdout.readline())
    for _ in range(3):  # not while workers are forked: Python loses an interrupt that comes in a hook of fork()
        assert process.stdout.readline() == "step\n"
    os.killpg(group, signal.SIGINT)
    words, errors = process.communicate(timeout=60)
    said, delivered = words.partition("left")[2].split()
    assert said == delivered, errors
