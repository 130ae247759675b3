"""Shuffling shards without indexes: one program for indexed and other shards, and no order by class without a word."""

from __future__ import annotations

import json
import os
import re
from itertools import islice

import numpy as np
import pytest
from with_torch import ShardDataset, ShardLoader

from tarshards import ArrayLoader, Ledger, ShardWriter, Stream, World, expand_urls, readers
from tarshards.errors import ShardIndexError, StateError, WorldError
from tarshards.stream import sources

CLASSES = {"cls": readers.integer()}


def classes(samples) -> list[int]:
    return [int(sample["cls"]) for sample in samples]


def of_loader(loader) -> list[int]:
    return [int(number) for batch in loader for number in batch["cls"]]


def in_processes(dataset, **options):
    return ShardLoader(dataset, 16, **options)


def in_threads(dataset, **options):
    return ArrayLoader(dataset, 16, fields=CLASSES, **options)


@pytest.fixture(autouse=True)
def logged_anew():
    sources._log_sorted_classes.cache_clear()
    sources._log_unequal_steps.cache_clear()


@pytest.fixture
def urls(make_shards):
    return make_shards(4, 50)


def test_samples_are_mixed_and_come_once(urls):
    stream = Stream.from_shards(urls, shuffle=True)
    first, second = classes(stream), classes(stream)
    assert sorted(first) == sorted(second) == list(range(200))
    assert first != second
    assert max(np.diff(np.flatnonzero(np.diff(first) != 1))) < 10, "no stretch in the order of the shards"
    assert classes(Stream.from_shards(urls, shuffle=True)) == first
    assert classes(Stream.from_shards(urls, shuffle=True, seed=1)) != first
    assert stream.ledger.samples == 400
    stream.ledger.check()


def test_pool_is_the_size_of_the_buffer(urls):
    whole = classes(Stream.from_shards(urls, shuffle=True, pool=1))
    assert [np.diff(whole[i : i + 50]).tolist() for i in range(0, 200, 50)] == [[1] * 49] * 4
    near = classes(Stream.from_shards(urls, shuffle=True, pool=10))
    assert near != whole
    assert max(abs(i - whole.index(number)) for i, number in enumerate(near[:-10])) < 150
    assert set(near[:50]) <= set(whole[:60])
    with pytest.raises(ShardIndexError, match="tail=, block= require indexed shards"):
        Stream.from_shards(urls, block=4)


def test_an_epoch_that_is_left_counts_what_was_in_the_buffer(urls):
    stream = Stream.from_shards(urls, shuffle=True)
    assert len(list(islice(stream, 30))) == 30
    assert re.search(r"delivered +30 samples, \d{3} in flight", str(stream.ledger))


def test_a_state_resumes_and_knows_the_buffer(urls):
    stream = Stream.from_shards(urls, shuffle=True)
    iterator = iter(stream)
    first = classes(islice(iterator, 70))
    resumed = Stream.from_shards(urls, shuffle=True)
    resumed.load_state_dict(stream.state_dict())
    assert sorted(first + classes(resumed)) == list(range(200))
    with pytest.raises(StateError, match=r"the order .*, and this dataset .* 10"):
        Stream.from_shards(urls, shuffle=True, pool=10).load_state_dict(stream.state_dict())


def test_a_state_of_before_there_was_a_buffer_resumes_without(urls):
    state = Stream.from_shards(urls, shuffle=True).state_dict()
    del state["keys"]
    state |= {"version": 2, "order": state["order"][:2], "delivered": 70}
    resumed = Stream.from_shards(urls, shuffle=True)
    resumed.load_state_dict(state)
    assert classes(resumed) == classes(Stream.from_shards(urls, shuffle=True, pool=1))[70:]


@pytest.mark.parametrize("make", [in_processes, in_threads])
def test_loaders_mix_too(urls, make):
    found = of_loader(make(ShardDataset(urls, shuffle=True)))
    assert sorted(found) == list(range(200))
    assert found != classes(Stream.from_shards(urls, shuffle=True, pool=1))


@pytest.mark.parametrize("is_indexed", [True, False])
@pytest.mark.parametrize("options", [{}, {"fields": {"cls": int}}])
def test_one_program_serves_indexed_and_other_shards(make_shards, is_indexed, options):
    dataset = ShardDataset(make_shards(4, 50, index=is_indexed), shuffle=True).shuffle(100)
    loader = ShardLoader(dataset, 16, **options)
    first, second = of_loader(loader), of_loader(loader)
    assert sorted(first) == sorted(second) == list(range(200))
    assert first != second
    assert loader.ledger.samples == 400
    state = loader.state_dict()
    resumed = ShardLoader(dataset, 16, **options)
    resumed.load_state_dict(state)
    third = of_loader(resumed)
    loader.set_epoch(2)
    assert of_loader(loader) == third


def test_a_buffer_alone_is_an_error_that_names_what_serves_both(make_shards):
    with pytest.raises(TypeError, match=r"shuffle is not for a ShardLoader: ShardDataset\(shuffle=True\) permutes"):
        ShardLoader(ShardDataset(make_shards(2, index=True)).shuffle(100), 16)


def test_planned_order_is_not_changed_by_the_op(make_shards):
    urls = make_shards(4, 50, index=True)
    plain, buffered = ShardDataset(urls, shuffle=True), ShardDataset(urls, shuffle=True).shuffle(9)
    assert of_loader(ShardLoader(plain, 16)) == of_loader(ShardLoader(buffered, 16))


@pytest.mark.parametrize("make", [in_processes, in_threads])
def test_ranks_that_do_not_divide_the_shards(make_shards, make):
    urls = make_shards(3, 40)
    for rank in range(2):
        loader = make(ShardDataset(urls, world=World(rank, 2)))
        with pytest.raises(WorldError, match=r"3 shards for 2 ranks: .* steps= .* `tarindex` .* tail=\"exact\""):
            next(iter(loader))
    with pytest.raises(WorldError, match="3 shards for 4 ranks: every rank needs at least one; write more"):
        next(iter(make(ShardDataset(urls, world=World(0, 4)))))
    assert len(list(make(ShardDataset(urls, world=World(1, 2)), steps=3))) == 3
    exact = [of_loader(make(ShardDataset(urls, world=World(rank, 2), tail="exact"))) for rank in range(2)]
    assert sorted(exact[0] + exact[1]) == list(range(120))
    assert [len(of_loader(make(ShardDataset(urls, world=World(rank, 3))))) for rank in range(3)] == [40] * 3


def test_ranks_may_still_differ_in_samples_which_is_said_once(make_shards, caplog):
    urls = make_shards(2, 40)
    for _ in range(2):
        of_loader(ShardLoader(ShardDataset(urls, world=World(0, 2)), 16))
    assert caplog.text.count("without indexes ranks may take different numbers of steps") == 1


@pytest.fixture
def by_class(tmp_path):
    """Return a function that writes samples of these classes, one shard after the other."""

    def make(labels) -> str:
        with ShardWriter(tmp_path / "c-%03d.tar", max_samples=100, index=False) as writer:
            for i, label in enumerate(labels):
                writer.write({"__key__": f"{i:06d}", "cls": int(label)})
        return str(tmp_path / "c-*.tar")

    return make


@pytest.mark.parametrize(
    ("labels", "is_said"),
    [
        (np.repeat(range(4), 100), True),
        (np.repeat(range(20), 20), True),
        (np.repeat([0, 1], 200), True),
        (np.arange(400) % 4, False),
        (np.random.default_rng(0).integers(0, 300, 400), False),
        (np.zeros(400), False),
        (np.random.default_rng(0).random(400) < 0.01, False),
    ],
)
def test_sorted_classes_are_told(by_class, caplog, labels, is_said):
    urls = by_class(labels)
    for _ in range(2):
        assert len(classes(Stream.from_shards(urls, shuffle=True, pool=50))) == 400
    assert caplog.text.count("come one after the other") == is_said
    if is_said:
        assert "`tarindex`" in caplog.text


def test_classes_in_order_are_told_only_where_they_should_be_shuffled(by_class, caplog):
    urls = by_class(np.repeat(range(4), 100))
    classes(Stream.from_shards(urls))
    classes(Stream.from_shards(urls, shuffle=True))  # the buffer holds them all
    assert not caplog.text


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("make", [None, in_processes, in_threads])
def test_a_shard_that_is_damaged_before_a_state_is_replayed_is_an_error(make_shards, shuffle, make):
    """Without it, as many samples would be skipped as before, and those of sound shards would be missing."""

    def loader():
        dataset = ShardDataset if make is in_processes else Stream.from_shards
        stream = dataset(urls, shuffle=shuffle, on_error=Ledger(max_errors=9))
        return stream if make is None else make(stream)

    urls = make_shards(3, 40)
    begun = loader()
    iterator = iter(begun)
    for _ in range(60 if make is None else 4):
        next(iterator)
    state = json.loads(json.dumps(begun.state_dict()))
    resumed = loader()
    resumed.load_state_dict(state)
    assert len(list(resumed)) > 0
    for url in [*expand_urls(urls)][:2]:
        os.truncate(url, 5 * 1536)
    resumed = loader()
    resumed.load_state_dict(state)
    with pytest.raises(StateError, match="a shard has changed, or is damaged"):
        list(resumed)
