"""A single batch: batch g made alone equals the g-th batch of any loader."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from with_torch import ShardDataset, ShardLoader

from tarshards import ArrayLoader, Ledger, Stream, World, mix, readers

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]

SIZES = [7, 1, 12, 0, 25, 3, 30, 2]  # samples of the shards, 80 in all


@pytest.fixture
def urls(make_uneven) -> str:
    return make_uneven(SIZES)


def odd(sample) -> bool:
    return int(sample["cls"]) % 2 == 1


def add_noise(batch, rng):
    return {**batch, "noise": rng.integers(1000, size=len(batch["cls"]))}


def shard_loader(urls, size, workers, rank=0, ranks=1) -> ShardLoader:
    dataset = ShardDataset(urls, shuffle=True, world=World(rank, ranks)).filter(odd)
    return ShardLoader(dataset, size, num_workers=workers)


def array_loader(urls, size, threads, rank=0, ranks=1) -> ArrayLoader:
    stream = Stream.from_shards(urls, shuffle=True, world=World(rank, ranks))
    return ArrayLoader(stream, size, fields={"cls": readers.integer()}, threads=threads, transforms=[add_noise])


def mixed_loader(urls, size, threads, rank=0, ranks=1) -> ArrayLoader:
    streams = {name: Stream.from_shards(urls, seed=i, world=World(rank, ranks)) for i, name in enumerate("ab")}
    stream = mix(streams, until=100)
    return ArrayLoader(stream, size, fields={"cls": readers.integer()}, threads=threads, transforms=[add_noise])


LOADERS = [shard_loader, array_loader, mixed_loader]


def frozen(batch) -> object:
    """The contents of a batch, for comparison."""
    return batch and {
        name: value.tolist() if isinstance(value, np.ndarray) else list(value) for name, value in batch.items()
    }


@pytest.mark.parametrize("make", LOADERS)
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_batch_g_alone_is_the_gth_of_the_loop(urls, make, workers):
    loader = make(urls, 7, workers)
    loader.set_epoch(2)
    batches = [frozen(batch) for batch in loader]
    maker = make(urls, 7, 0).passes.maker
    for g in reversed(range(len(batches))):
        assert frozen(maker.make(2, None, 0, 1, g)) == batches[g]
    with pytest.raises(IndexError):
        maker.make(2, None, 0, 1, len(batches))


@pytest.mark.parametrize("make", LOADERS)
@given(
    size=st.integers(1, 20),
    before=st.integers(1, 4),
    ranks=st.integers(1, 5),
    taken=st.integers(0, 3),
    data=st.data(),
)
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_after_a_resume_on_other_ranks_too(urls, make, size, before, ranks, taken, data):
    begun = make(urls, size, 0, before - 1, before)
    list(islice(begun, min(taken, len(begun))))
    state = begun.state_dict() if taken else None
    rank = data.draw(st.integers(0, ranks - 1))
    loader = make(urls, size, 0, rank, ranks)
    if state is not None:
        loader.load_state_dict(state)
    epoch = state["epoch"] if state else 0
    batches = [frozen(batch) for batch in loader]
    maker = make(urls, size, 0).passes.maker
    for g, batch in enumerate(batches):
        assert frozen(maker.make(epoch, state, rank, ranks, g)) == batch


@pytest.mark.parametrize("make", LOADERS)
def test_what_a_batch_alone_reads_is_in_no_count(urls, make):
    loader = make(urls, 7, 0)
    loader.passes.maker.make(0, None, 0, 1, 3)
    assert loader.ledger.samples == 0
    loader.ledger.check()
    list(loader)
    loader.ledger.check()


def test_errors_of_a_batch_alone_go_to_the_ledger(urls, tmp_path):
    ledger = Ledger(max_errors=100)
    dataset = ShardDataset(urls, on_error=ledger)
    (tmp_path / "set-0000.tar").unlink()
    batch = ShardLoader(dataset, 10).passes.maker.make(0, None, 0, 1, 0)
    assert [int(value) for value in batch["cls"]] == [7, 8, 9]
    assert len(ledger.quarantined) == 7


def test_batches_alone_require_an_index(make_shards):
    loader = ShardLoader(ShardDataset(make_shards(2)), 2)
    with pytest.raises(TypeError, match="requires indexed shards"):
        loader.passes.maker.make(0, None, 0, 1, 0)
