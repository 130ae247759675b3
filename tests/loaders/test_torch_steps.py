"""The default batches of a ShardLoader, and passes with any number of steps."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
import torch
from soak import some
from torch.utils.data import default_collate

import tarshards
from tarshards import ArrayLoader, Ledger, ShardDataset, ShardLoader, ShardWriter, Stream, World, mix, readers
from tarshards.errors import StateError

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]

WORKERS = pytest.mark.parametrize("workers", [0, 2])


@pytest.fixture
def urls(tmp_path) -> str:
    rng = np.random.default_rng(0)
    with ShardWriter(str(tmp_path / "set-%d.tar"), max_samples=5, index=True) as writer:
        for i in range(10):
            arrays = {"x.npy": rng.normal(size=(2, 3)).astype("f4"), "big.npy": np.array([i, 1], ">i8")}
            ragged = {"ragged.npy": np.arange(i % 3 + 1)}
            writer.write({"__key__": f"{i:02d}", "cls": i, "score.json": i / 2, "txt": f"text {i}", **arrays, **ragged})
    return str(tmp_path / "set-{0..1}.tar")


def same(ours, theirs) -> bool:
    if isinstance(theirs, torch.Tensor):
        return isinstance(ours, torch.Tensor) and ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    return type(ours) is type(theirs) and ours == theirs


@WORKERS
@pytest.mark.parametrize("index", [True, False])
def test_batches_are_those_of_default_collate(urls, workers, index):
    data = ShardDataset(urls, index=index).decode().keep_fields("x.npy", "cls", "score.json", "txt")
    expected = default_collate(list(islice(iter(data), 4)))
    batch = next(iter(ShardLoader(data, 4, num_workers=workers)))
    assert batch.keys() == expected.keys()
    for field, value in batch.items():
        assert same(value, expected[field]), field
    pairs = next(iter(ShardLoader(data.to_tuple("x.npy", "cls"), 4, num_workers=workers)))
    assert isinstance(pairs, tuple)
    assert all(map(same, pairs, (expected["x.npy"], expected["cls"])))
    loss = torch.nn.functional.cross_entropy(pairs[0].flatten(1), pairs[1].clamp(max=5))
    assert loss.isfinite()


@WORKERS
def test_what_does_not_stack_is_a_list(urls, workers):
    data = ShardDataset(urls).decode()
    batch = next(iter(ShardLoader(data, 4, num_workers=workers)))
    assert [tensor.tolist() for tensor in batch["ragged.npy"]] == [[0], [0, 1], [0, 1, 2], [0]]
    assert batch["big.npy"].dtype == torch.int64
    assert batch["__key__"] == ["00", "01", "02", "03"]
    raw = next(iter(ShardLoader(ShardDataset(urls), 2, num_workers=workers)))
    assert raw["txt"] == [b"text 0", b"text 1"]


def test_read_only_arrays_are_copied(urls):
    data = ShardDataset(urls).map(lambda sample: {"x": np.frombuffer(sample["txt"], np.uint8)})
    batch = next(iter(ShardLoader(data.map(lambda sample: {"x": sample["x"][: len(sample["x"]) % 3 + 1]}), 4)))
    first = batch["x"][0]
    first += 1  # as of what torch may write to
    assert all(isinstance(tensor, torch.Tensor) for tensor in batch["x"])


@WORKERS
def test_arrays_on_request(urls, workers):
    loader = ShardLoader(
        ShardDataset(urls).decode(images=None).keep_fields("cls"), 4, num_workers=workers, collate_fn=tarshards.collate
    )
    assert type(next(iter(loader))["cls"]) is np.ndarray


@WORKERS
@pytest.mark.parametrize("index", [True, False])
def test_drop_last_leaves_out_the_smaller_batch(urls, workers, index):
    loader = ShardLoader(ShardDataset(urls, index=index), 4, num_workers=workers, drop_last=True)
    sizes = [len(batch["cls"]) for batch in loader]
    assert sizes == [4, 4] if index or not workers else [4]
    loader.ledger.check()
    tally = loader.ledger._total()
    assert tally.delivered == sum(sizes)
    assert tally.dropped + tally.discarded == 10 - sum(sizes)
    if index:
        assert len(loader) == 2


@pytest.mark.parametrize("index", [True, False])
def test_drop_last_of_arrays(urls, index):
    stream = Stream.from_shards(urls, index=index)
    loader = ArrayLoader(stream, 4, fields={"cls": readers.integer()}, drop_last=True)
    assert [batch["cls"].tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    loader.ledger.check()
    tally = loader.ledger._total()
    assert (tally.delivered, tally.dropped + tally.discarded, tally.in_flight) == (8, 2, 0)


def classes(batches) -> list[list[int]]:
    return [list(map(int, batch["cls"])) for batch in batches]


def shard_loader(urls, steps=None, *, workers=0, size=4, world=None, **options):
    data = ShardDataset(urls, shuffle=True, seed=5, world=world, **{"on_error": Ledger()} | options).decode()
    persistent = {"persistent_workers": True} if workers else {}
    return ShardLoader(data.keep_fields("cls"), size, num_workers=workers, steps=steps, **persistent)


def array_loader(urls, steps=None, *, workers=0, size=4, world=None, **options):
    stream = Stream.from_shards(urls, shuffle=True, seed=5, world=world, **options)
    return ArrayLoader(stream, size, fields={"cls": readers.integer()}, threads=workers, steps=steps)


LOADERS = pytest.mark.parametrize("make", [shard_loader, array_loader])


def epochs(make, urls, count, **options) -> list[list[int]]:
    loader = make(urls, **options)
    return [batch for _ in range(count) for batch in classes(loader)]


@pytest.mark.soak
@LOADERS
@WORKERS
@pytest.mark.parametrize("steps", some([1, 2, 3, 5, 7], 3))
@pytest.mark.parametrize("index", [True, False])
def test_a_pass_of_steps_goes_on_where_the_last_one_ended(urls, make, workers, steps, index):
    if not index and make is shard_loader and workers:
        workers = 1
    expected = epochs(make, urls, 6, workers=workers, index=index)
    loader = make(urls, steps, workers=workers, index=index)
    assert len(loader) == steps
    passes = [classes(loader) for _ in range(len(expected) // steps)]
    assert [len(each) for each in passes] == [steps] * len(passes)
    assert [batch for each in passes for batch in each] == expected[: len(passes) * steps]


@LOADERS
@pytest.mark.parametrize("index", [True, False])
def test_a_pass_that_is_left_early_ends_there(urls, make, index):
    expected = epochs(make, urls, 4, index=index)
    loader = make(urls, 5, index=index)
    assert classes(islice(loader, 2)) == expected[:2]
    assert classes(loader) == expected[2:7]


@LOADERS
@WORKERS
def test_steps_resume_at_every_one(urls, make, workers):
    expected = epochs(make, urls, 8)
    loader = make(urls, 4, workers=workers)
    states, seen = [loader.state_dict()], 0
    for _ in range(3):
        for batch in loader:
            seen += 1
            assert classes([batch]) == expected[seen - 1 : seen]
            states.append(loader.state_dict())
    for step, state in enumerate(states):
        resumed = make(urls, 4)
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
        assert classes(resumed) == expected[step : (step // 4 + 1) * 4]
        assert classes(resumed) == expected[(step // 4 + 1) * 4 : (step // 4 + 2) * 4]


@LOADERS
def test_steps_resume_on_other_ranks(urls, make):
    ranks = [make(urls, 3, size=2, world=World(rank, 2), tail="drop") for rank in range(2)]
    first = [classes(loader) for loader in ranks]
    assert ranks[0].state_dict() == ranks[1].state_dict()
    alone = make(urls, 3, size=4, tail="drop")
    whole = classes(alone)
    assert [[*sum(zip(*pair), ())] for pair in zip(*first)] == whole[:3]
    rest = make(urls, 3, size=4, tail="drop")
    rest.load_state_dict(ranks[0].state_dict())
    assert classes(rest) == classes(alone)


@LOADERS
def test_set_epoch_counts_passes_of_steps(urls, make):
    loader = make(urls, 4)
    passes = [classes(loader) for _ in range(6)]
    for number in (3, 0, 5, 5, 1):
        again = make(urls, 4)
        again.set_epoch(number)
        assert classes(again) == passes[number]
        loader.set_epoch(number)
        assert classes(loader) == passes[number]
    loader.set_epoch(2)  # which is next: nothing changes
    assert classes(loader) == passes[2]


def test_steps_of_a_mixture(urls):
    def mixture(**options):
        parts = {name: ShardDataset(urls, shuffle=True, seed=seed) for name, seed in (("a", 1), ("b", 2))}
        return ShardLoader(mix(parts, until=12).decode().keep_fields("cls"), 4, **options)

    loader, whole = mixture(steps=2), mixture()
    expected = [batch for _ in range(2) for batch in classes(whole)]
    assert [batch for _ in range(3) for batch in classes(loader)] == expected


def test_steps_of_nothing_are_an_error(urls):
    loader = ShardLoader(ShardDataset(urls, index=False).filter(lambda sample: False), 4, steps=2)
    with pytest.raises(tarshards.SampleError, match="steps="):
        next(iter(loader))


@pytest.mark.parametrize("state", [{"pass": -1}, {"step": "1"}])
def test_states_of_steps_are_checked(urls, state):
    loader = shard_loader(urls, 2)
    with pytest.raises(StateError, match=next(iter(state))):
        loader.load_state_dict(loader.state_dict() | state)


@pytest.mark.parametrize("steps", [0, -1])
def test_steps_are_a_number(urls, steps):
    with pytest.raises(ValueError, match="steps"):
        shard_loader(urls, steps)
