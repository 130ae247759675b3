"""resample=: samples or shards drawn with replacement, by (seed, epoch, position) alone."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import numpy as np
import pytest
from soak import some
from with_torch import DataLoader, ShardDataset, ShardLoader

from tarshards import ArrayLoader, Ledger, Stream, World, mix, readers
from tarshards.errors import StateError

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]

INDEX = pytest.mark.parametrize("index", [True, False])


def classes(samples) -> list[int]:
    return [int(sample["cls"]) for sample in samples]


def draw(sample, rng) -> dict:
    return {"__key__": sample["__key__"], "draw": rng.random()}


def stream(urls, **options):
    return Stream.from_shards(urls, **{"resample": True, "seed": 1} | options)


def test_samples_are_drawn_uniformly(make_uneven):
    urls = make_uneven([10, 0, 30, 60])
    each = stream(urls)
    assert len(each) == 100
    counts = np.bincount([value for _ in range(40) for value in classes(each)], minlength=100)
    assert counts.sum() == 4000
    assert ((counts - 40) ** 2 / 40).sum() < 160  # chi squared of 99 degrees: p < 0.0001
    assert len(set(classes(each))) < 75, "with replacement: about 63 differ"
    each.ledger.check()
    assert each.ledger.samples == 4100


@INDEX
def test_shards_are_drawn_by_weights(make_shards, index):
    urls = make_shards(5, 20, index=index)
    each = stream(urls, index=index, resample=[1, 0, 3, 0, 1])
    shards = Counter(value // 20 for _ in range(40) for value in classes(each))
    assert shards.keys() == {0, 2, 4}
    assert shards[2] == pytest.approx(2400, rel=0.25)
    assert shards[0] == pytest.approx(800, rel=0.5)


@INDEX
def test_an_epoch_is_a_function_of_seed_and_epoch(make_shards, index):
    urls = make_shards(6, 5, index=index)
    first, again = stream(urls, index=index), stream(urls, index=index)
    epochs = [classes(first) for _ in range(3)]
    assert [classes(again) for _ in range(3)] == epochs
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert classes(stream(urls, index=index, seed=2)) not in epochs
    again.set_epoch(1)
    assert classes(again) == epochs[1]


@INDEX
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_workers_and_ranks_share_the_draws(make_shards, index, workers):
    urls = make_shards(6, 5, index=index)
    expected = sorted(classes(stream(urls, index=index)))
    parts = []
    for rank in range(2):
        data = ShardDataset(urls, index=index, resample=True, seed=1, world=World(rank, 2), on_error=Ledger())
        parts += classes(DataLoader(data, batch_size=None, num_workers=workers))
        data.ledger.check()
    assert sorted(parts) == expected


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_state_is_a_position(make_shards, ranks):
    urls = make_shards(6, 5, index=True)
    expected = classes(stream(urls))
    for step in some(range(0, 31, 5), 3):
        one = ShardLoader(ShardDataset(urls, resample=True, seed=1), 5)
        taken = [value for batch in islice(one, step // 5) for value in map(int, batch["cls"])]
        assert taken == expected[:step]
        state = one.state_dict()
        if step in (0, 30):
            continue
        rest = []
        for rank in range(ranks):
            data = ShardDataset(urls, resample=True, seed=1, world=World(rank, ranks), tail="exact")
            loader = ShardLoader(data, 3, num_workers=2)
            loader.load_state_dict(state)
            rest.append([value for batch in loader for value in map(int, batch["cls"])])
        assert [value for turn in range(30) for part in rest for value in part[turn : turn + 1]] == expected[step:]


def test_repeated_samples_draw_other_numbers(make_shards):
    urls = make_shards(1, 4, index=True)
    drawn = [(sample["__key__"], sample["draw"]) for sample in stream(urls).map(draw, rng=True)]
    assert len({key for key, _ in drawn}) < 4, "some sample came twice"
    assert len(set(drawn)) == len(drawn) == 4


def test_a_shard_that_is_drawn_twice_draws_other_numbers(make_shards):
    each = stream(make_shards(4, 2), index=False).map(draw, rng=True)
    keys = [(sample["__key__"], sample["draw"]) for sample in each]
    assert len(keys) == 8
    assert len({key for key, _ in keys}) < 8, "some shard came twice"
    assert len(set(keys)) == 8


def test_arrays_are_resampled(make_shards):
    urls = make_shards(6, 5, index=True)
    loader = ArrayLoader(stream(urls), 7, fields={"cls": readers.integer()}, steps=3)
    expected = [value for epoch in range(2) for value in classes(stream(urls)) if not epoch]
    values = [value for batch in loader for value in batch["cls"].tolist()]
    assert values == expected[:21]


def test_filters_are_filled_by_further_draws(make_shards):
    urls = make_shards(6, 50, index=True)
    data = ShardDataset(urls, resample=True, on_error=Ledger()).filter(lambda sample: int(sample["cls"]) % 3)
    loader = ShardLoader(data, 10, fill=True)
    batches = [list(map(int, batch["cls"])) for batch in loader]
    assert [len(batch) for batch in batches] == [10] * 30
    assert all(value % 3 for batch in batches for value in batch)
    loader.ledger.check()


def test_a_mixture_of_resampled_datasets(make_shards):
    parts = {name: stream(make_shards(2, 10, name, index=True)) for name in "ab"}
    values = Counter(sample["__dataset__"] for sample in mix(parts, weights={"a": 3, "b": 1}, until=40))
    assert values == {"a": 30, "b": 10}


def test_what_does_not_fit_is_named(make_shards):
    urls = make_shards(2, index=True)
    for wrong, words in ((1, "True, or a list"), ("ab", "True, or a list"), ([1, "x"], "True, or a list")):
        with pytest.raises(TypeError, match=words):
            stream(urls, resample=wrong)
    for wrong, words in (([1, -1], "positive"), ([0, 0], "all 0"), ([1, float("inf")], "finite"), ([1], "1 weights")):
        with pytest.raises(ValueError, match=words):
            stream(urls, resample=wrong)
    with pytest.raises(ValueError, match="pool"):
        stream(urls, pool=10)
    one, other = ShardLoader(ShardDataset(urls, resample=True), 2), ShardLoader(ShardDataset(urls, resample=[1, 2]), 2)
    for loader in (other, ShardLoader(ShardDataset(urls, shuffle=True), 2)):
        with pytest.raises(StateError):
            loader.load_state_dict(one.state_dict())
        with pytest.raises(StateError):
            one.load_state_dict(loader.state_dict())
