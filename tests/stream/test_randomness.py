"""map(rng=True): random values depend only on the seed, the epoch and the sample."""

from __future__ import annotations

import random

import numpy as np
import pytest
from with_torch import DataLoader, ShardDataset, ShardLoader

from tarshards import Stream, World

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]


def draw(sample, rng) -> dict:
    return {"__key__": sample["__key__"], "draw": rng.random(), "more": rng.integers(1 << 30)}


def jitter(value, rng) -> float:
    return int(value) + rng.random()


def drawn(samples) -> dict[str, tuple]:
    return {sample["__key__"]: (sample["draw"], sample["more"]) for sample in samples}


@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_draws_are_the_same_on_any_workers(make_shards, index, workers):
    urls = make_shards(4, 5, index=True)
    expected = drawn(Stream.from_shards(urls, index=index, seed=3).map(draw, rng=True))
    assert len(expected) == len(set(expected.values())) == 20
    data = ShardDataset(urls, index=index, shuffle=True, seed=3).map(draw, rng=True)
    assert drawn(DataLoader(data, batch_size=None, num_workers=workers)) == expected
    batches = ShardLoader(data, 3, num_workers=workers, collate_fn=list)
    batches.set_epoch(0)
    assert drawn(sample for batch in batches for sample in batch) == expected


def test_draws_are_the_same_on_any_ranks_and_after_a_resume(make_shards):
    urls = make_shards(4, 5, index=True)

    def stream(**options):
        return Stream.from_shards(urls, shuffle=True, **options).map(draw, rng=True)

    expected = drawn(stream())
    parts = [drawn(stream(world=World(rank, 3), tail="exact")) for rank in range(3)]
    assert {key: value for part in parts for key, value in part.items()} == expected
    first, rest = stream(), stream()
    iterator = iter(first)
    taken = drawn(next(iterator) for _ in range(7))
    rest.load_state_dict(first.state_dict())
    assert taken | drawn(rest) == expected


def test_draws_differ_by_epoch_and_by_seed(make_shards):
    urls = make_shards(2, index=True)
    stream = Stream.from_shards(urls).map(draw, rng=True)
    first, second = drawn(stream), drawn(stream)
    other = drawn(Stream.from_shards(urls, seed=1).map(draw, rng=True))
    assert len({*first.values(), *second.values(), *other.values()}) == 18
    stream.set_epoch(0)
    assert drawn(stream) == first


def test_draws_do_not_depend_on_where_the_shards_lie(make_shards, tmp_path):
    urls = make_shards(2)
    expected = drawn(Stream.from_shards(urls).map(draw, rng=True))
    (tmp_path / "elsewhere").mkdir()
    for path in tmp_path.glob("*.tar"):
        path.rename(tmp_path / "elsewhere" / path.name)
    moved = str(tmp_path / "elsewhere" / "set-{0000..0001}.tar")
    assert drawn(Stream.from_shards(moved).map(draw, rng=True)) == expected


def test_fields_of_a_sample_draw_one_after_the_other(make_shards):
    urls = make_shards(1)
    both = Stream.from_shards(urls).map_fields({"cls": jitter, "txt": lambda value, rng: rng.random()}, rng=True)
    plain = drawn(
        Stream.from_shards(urls).map(lambda s, rng: {**s, "draw": rng.random(), "more": rng.random()}, rng=True)
    )
    for sample in both:
        assert (sample["cls"] % 1, sample["txt"]) == pytest.approx(plain[sample["__key__"]])


def test_state_that_a_function_leaves_behind_does_not_matter(make_shards):
    def normals(sample, rng):
        rng.integers(256, dtype="u1")  # which keeps the other bits for later
        return {**sample, "draw": rng.normal(), "more": rng.integers(1 << 30, dtype="u4")}

    stream = Stream.from_shards(make_shards(3)).map(normals, rng=True)
    samples = list(stream)
    stream.set_epoch(0)
    order = random.Random(0).sample(range(9), 9)
    again = Stream([samples[i] for i in order]).map(normals, rng=True)
    assert drawn(again) == drawn(samples)


def test_draws_look_random(make_shards):
    samples = [{"__key__": str(i), "__url__": "a.tar"} for i in range(20_000)]
    values = np.array([sample["draw"] for sample in Stream(samples).map(draw, rng=True)])
    counts, _ = np.histogram(values, 20, (0, 1))
    assert ((counts - 1000) ** 2 / 1000).sum() < 50  # chi squared of 19 degrees: p < 0.0002
    assert abs(np.corrcoef(values[1:], values[:-1])[0, 1]) < 0.03


def test_samples_without_keys_are_named():
    with pytest.raises(TypeError, match="__key__"):
        Stream([(1, 2)]).map(draw, rng=True).collect()
    with pytest.raises(TypeError, match="rng"):
        Stream([]).map(draw, rng="yes")
