"""Laws of the passes of every loader: where an epoch begins and ends, its length, its rank, and what trainers set."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import chain, islice
from typing import Any

import pytest
from with_torch import DataLoader, ShardDataset, ShardLoader

from tarshards import ArrayLoader, Ledger, Stream, World, readers
from tarshards.errors import StateError, WorldError

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]

SIZES = [30, 3, 47, 0, 20]  # 100 samples
SIZE = 8  # batches are of 8, so that 13 are an epoch, the last with 4


def shard_loader(data: Any, size: int = SIZE, workers: int = 0, **options: Any) -> ShardLoader:
    return ShardLoader(data, size, num_workers=workers, **options)


def with_workers(data: Any, size: int = SIZE) -> ShardLoader:
    return shard_loader(data, size, workers=2)


def array_loader(data: Any, size: int = SIZE) -> ArrayLoader:
    return ArrayLoader(data, size, fields={"cls": readers.integer()})


def dali_loader(data: Any, size: int = SIZE) -> Any:
    pytest.importorskip("nvidia.dali")
    from tarshards import dali

    return dali.dali_loader(data, lambda cls: cls, batch_size=size, fields="cls", device="cpu", arrays="numpy")


LOADERS: list[Any] = [
    shard_loader,
    with_workers,
    array_loader,
    pytest.param(dali_loader, marks=pytest.mark.interop),
]
every_loader = pytest.mark.parametrize("make", LOADERS)
Make = Callable[..., Any]


@pytest.fixture
def urls(make_uneven) -> str:
    return make_uneven(SIZES)


@pytest.fixture
def bare(make_shards) -> str:
    """Five shards without indexes, 100 samples."""
    return make_shards(5, 20)


@pytest.fixture
def data(urls) -> Callable[..., ShardDataset]:
    return lambda **options: ShardDataset(urls, **{"shuffle": True, "seed": 3} | options)


def classes(batches) -> list[list[int]]:
    return [[int(value) for value in batch["cls"]] for batch in batches]


def flat(batches) -> list[int]:
    return [value for batch in classes(batches) for value in batch]


def epochs_of(make: Make, data: Any, count: int) -> list[list[list[int]]]:
    """The batches of the first epochs; those of workers are made without them, and are the same."""
    loader = (shard_loader if make is with_workers else make)(data())
    return [classes(loader) for _ in range(count)]


@every_loader
def test_an_epoch_begins_when_its_first_batch_is_asked_for(data, make):
    expected = epochs_of(make, data, 2)
    loader = make(data())
    for _ in range(3):
        iter(loader)
    unused = iter(loader)
    assert loader.state_dict()["epoch"] == 0
    assert [classes(loader) for _ in range(2)] == expected
    assert classes(unused) not in expected, "it begins now"


@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize("over", [Stream.from_shards, ShardDataset])
def test_an_epoch_of_a_stream_begins_when_its_first_sample_is_asked_for(make_shards, over, index):
    urls = make_shards(5, 20, index=index)
    expected, stream = over(urls, shuffle=True), over(urls, shuffle=True)
    for _ in range(2):
        iter(stream), iter(stream)
        assert stream.state_dict()["epoch"] == expected.state_dict()["epoch"]
        assert list(stream) == list(expected)
        iter(expected)


@every_loader
def test_passes_that_begin_at_once_are_of_different_epochs(data, make):
    """The second one begins while the first is looking up its plan."""
    dataset = data()
    one, other = make(dataset), make(dataset)
    plan, batches = one.passes.maker.plan, []

    def plan_late(*args):
        one.passes.maker.plan = plan
        batches.append(next(other_batches))
        return plan(*args)

    one.passes.maker.plan, other_batches = plan_late, iter(other)
    epochs = [classes(one), classes([*batches, *other_batches])]
    assert epochs[0] != epochs[1]
    assert [sorted(chain.from_iterable(each)) for each in epochs] == [list(range(100))] * 2
    assert one.state_dict()["epoch"] == 2


@every_loader
@pytest.mark.parametrize("size", [SIZE, 10])  # the last batch is short, or as long as others
def test_who_counts_the_batches_has_an_audited_epoch(data, make, size):
    ledger = Ledger()
    loader = make(data(on_error=ledger), size)
    batches = iter(loader)
    counted = flat(islice(batches, len(loader)))
    assert sorted(counted) == list(range(100))
    assert (ledger.samples, ledger.unaudited) == (100, False)
    ledger.check()
    assert (loader.state_dict()["epoch"], loader.state_dict()["position"]) == (1, 0)
    assert next(batches, None) is None


@every_loader
def test_without_indexes_too_the_last_batch_comes_after_the_end(bare, make):
    ledger = Ledger()
    loader = make(ShardDataset(bare, on_error=ledger))
    length = len(list(loader))
    assert flat(islice(iter(loader), length))
    assert (ledger.samples, ledger.unaudited) == (200, False)
    assert (loader.state_dict()["epoch"], loader.state_dict()["delivered"]) == (2, 0)


@every_loader
def test_the_length_is_that_of_the_epoch_before_and_after_a_resume(data, make):
    loader = make(data())
    batches = iter(loader)
    lengths = [len(loader)] + [len(loader) for _ in batches]
    assert lengths == [13] * 14
    for _ in islice(loader, 5):
        state = loader.state_dict()
    resumed = make(data())
    resumed.load_state_dict(state)
    assert len(resumed) == 13
    rest = iter(resumed)
    assert [len(resumed) for _ in rest] == [13] * 8
    assert len(resumed) == 13


@every_loader
def test_a_state_counts_the_batches_before_it_whatever_their_size(data, make):
    loader = make(data())
    batches = iter(loader)
    before = flat(islice(batches, 5))
    resumed = make(data(), 20)
    resumed.load_state_dict(loader.state_dict())
    assert len(resumed) == 5, "as an epoch has here"
    some = iter(resumed)
    before += flat(islice(some, 1))
    again = make(data(), 7)
    again.load_state_dict(resumed.state_dict())
    assert (len(again), again.state_dict()["batches"]) == (15, 6)
    assert sorted(before + flat(again)) == list(range(100))


@every_loader
def test_a_state_without_a_count_has_the_batches_as_they_are_made_here(data, make):
    loader = make(data())
    batches = iter(loader)
    next(batches), next(batches)
    state = {name: value for name, value in loader.state_dict().items() if name != "batches"}
    resumed = make(data())
    resumed.load_state_dict(state)
    rest = iter(resumed)
    next(rest)
    assert resumed.state_dict()["batches"] == 3
    assert (len(resumed), len(classes(rest))) == (13, 10)
    for wrong in (-1, 2.0, "2", None):
        with pytest.raises(StateError, match="batches"):
            resumed.load_state_dict({**state, "batches": wrong})


@every_loader
def test_setting_the_epoch_of_a_loaded_state_keeps_it(data, make):
    first, second, third = epochs_of(make, data, 3)
    loader = make(data())
    loader.set_epoch(1)
    batches = iter(loader)
    next(batches), next(batches)
    state = loader.state_dict()
    resumed = make(data())
    resumed.load_state_dict(state)
    resumed.set_epoch(1)
    resumed.set_epoch(1)
    assert resumed.state_dict() == state
    assert classes(resumed) == second[2:]
    assert classes(resumed) == third
    resumed.load_state_dict(state)
    resumed.set_epoch(0)
    assert classes(resumed) == first, "another epoch is one from its beginning"


@every_loader
def test_a_trainer_sets_the_epoch_by_the_sampler(data, make):
    expected = epochs_of(make, data, 4)
    loader = make(data())
    orders = []
    for epoch in (2, 0, 0, 3):
        loader.sampler.set_epoch(epoch)
        orders.append(classes(loader))
    assert orders == [expected[epoch] for epoch in (2, 0, 0, 3)]
    loader.sampler.set_epoch(1)
    state = [loader.state_dict() for _ in islice(iter(loader), 4)][-1]
    resumed = make(data())
    resumed.load_state_dict(state)
    for epoch in (1, 2):
        resumed.sampler.set_epoch(epoch)
        orders.append(classes(resumed))
    assert orders[-2:] == [expected[1][4:], expected[2]]


@every_loader
def test_a_trainer_that_counts_from_its_own_start_goes_on_after_a_loaded_state(data, make):
    expected = epochs_of(make, data, 4)
    loader = make(data())
    loader.set_epoch(1)
    batches = iter(loader)
    next(batches)
    resumed = make(data())
    resumed.load_state_dict(loader.state_dict())
    orders = []
    for epoch in range(3):
        resumed.sampler.set_epoch(epoch)
        orders.append(classes(resumed))
    assert orders == [expected[1][1:], *expected[2:]]


@every_loader
def test_a_trainer_that_counts_to_fewer_batches_than_there_are_is_refused(data, make):
    """As Lightning does, which asks for the length before it loads a state."""
    loader = make(data())
    batches = iter(loader)
    next(batches), next(batches)
    larger = make(data(), 20)
    assert len(larger) == 5
    larger.load_state_dict(loader.state_dict())
    with pytest.raises(StateError, match="counts to 5 batches, but the epoch has 7 with those"):
        larger.sampler.set_epoch(0)
    larger.set_epoch(0)
    assert len(list(larger)) == 5, "a loop that asks to the end has all"


@every_loader
def test_an_epoch_that_is_set_while_it_is_under_way_keeps_its_state(data, make):
    """Lightning asks for a batch ahead of setting the epoch where there is no length, and repeats a validation."""
    first, second = epochs_of(make, data, 2)
    loader = make(data())
    batches = iter(loader)
    taken = classes(islice(batches, 2))
    loader.sampler.set_epoch(0)
    resumed = make(data())
    resumed.load_state_dict(loader.state_dict())
    assert taken + classes(resumed) == first
    assert classes(batches) == first[2:]
    assert loader.state_dict()["epoch"] == 1
    batches = iter(loader)
    next(batches)
    loader.sampler.set_epoch(1)
    assert classes(loader) == second, "the next iteration is the epoch that was set"


@every_loader
@pytest.mark.parametrize("index", [True, False])
def test_the_end_is_known_at_the_last_batch(make_shards, make, index):
    loader = make(ShardDataset(make_shards(5, 20, index=index)))
    for _ in range(2):
        known = [loader.end_of_dataloader for _ in loader]
        assert known == [False] * (len(known) - 1) + [True]
    next(iter(loader))
    assert not loader.end_of_dataloader


@every_loader
def test_a_loader_without_a_length_says_what_lightning_misses(bare, make, caplog):
    loader = make(ShardDataset(bare))
    with caplog.at_level(logging.WARNING, "tarshards"):
        for epoch in range(2):
            loader.sampler.set_epoch(epoch)
    assert [record.message for record in caplog.records if "one batch ahead" in record.message] != []
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("make", "over"),
    [
        *((make, ShardDataset) for make in (shard_loader, with_workers, array_loader)),
        (array_loader, Stream.from_shards),
        *(pytest.param(dali_loader, over, marks=pytest.mark.interop) for over in (ShardDataset, Stream.from_shards)),
    ],
)
def test_a_loader_finds_its_rank_when_it_is_iterated(make_uneven, monkeypatch, make, over):
    urls = make_uneven([90, 10, 100])
    loaders = [make(over(urls, shuffle=True)) for _ in range(2)]
    assert len(loaders[0]) == 25
    monkeypatch.setenv("WORLD_SIZE", "2")
    parts = []
    for rank, loader in enumerate(loaders):
        monkeypatch.setenv("RANK", str(rank))
        assert len(loader) == 13
        parts.append(flat(loader))
    assert [len(part) for part in parts] == [100, 100]
    assert sorted(parts[0] + parts[1]) == list(range(200))


@pytest.mark.parametrize("index", [True, False])
def test_a_stream_by_itself_is_whole_and_one_with_a_world_keeps_it(make_shards, monkeypatch, index):
    urls = make_shards(4, 10, index=index)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    stream = Stream.from_shards(urls)
    assert sorted(int(sample["cls"]) for sample in stream) == list(range(40))
    given = Stream.from_shards(urls, world=World())
    assert sorted(flat(array_loader(given))) == list(range(40))
    first = Stream.from_shards(urls, world=World(0, 2))
    assert sorted(flat(array_loader(first)) + flat(array_loader(stream))) == list(range(40))


@pytest.mark.interop
def test_dali_over_shards_by_name_finds_its_rank_when_it_is_iterated(make_uneven, monkeypatch):
    loader = dali_loader(make_uneven([60, 40]))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert sorted(flat(loader)) == list(range(1, 100, 2))


def test_workers_of_another_world_than_their_loaders_are_an_error(data, monkeypatch):
    """Persistent workers, which began before the rank was known."""
    loader = shard_loader(data(), workers=1, persistent_workers=True, multiprocessing_context="fork")
    assert sorted(flat(loader)) == list(range(100))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(WorldError, match="rank 0 of 1, and its loader of rank 1 of 2"):
        list(loader)


def test_the_batches_of_a_shard_loader_are_its_own(data):
    """As accelerate's skip_first_batches would take them: the tallies of the workers are among them."""
    loader = shard_loader(data())
    with pytest.raises(TypeError, match="ShardLoader"):
        list(DataLoader(loader.dataset, batch_size=None))
    next(iter(loader))
    with pytest.raises(TypeError, match="ShardLoader"):
        list(DataLoader(loader.dataset, batch_size=None))


def test_keys_are_rebuilt_as_a_list(data):
    keys = next(iter(array_loader(data())))["__key__"]
    rebuilt = type(keys)(list(keys))
    assert type(rebuilt) is list
    assert rebuilt == keys
    assert type(type(keys)(key for key in keys)) is list
    assert type(type(keys)(keys)) is list
