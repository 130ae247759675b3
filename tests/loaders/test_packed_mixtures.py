"""Bins over mixtures, selections and draws: positions of the mixture are packed like those of one dataset."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from with_torch import ShardDataset, ShardLoader

from tarshards import ArrayLoader, Ledger, ShardWriter, World, bucket, mix, pack, readers
from tarshards.errors import StateError
from tarshards.loaders.batches import BatchMaker

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

CAPACITY = 40
LENGTHS = np.random.default_rng(5).integers(1, CAPACITY, 90)  # of a, then of b
EVERY_THIRD = [f"a{i:02d}" for i in range(0, 50, 3)]


@pytest.fixture(scope="module")
def urls(tmp_path_factory):
    """Shards of two datasets, a of 50 samples and b of 40; the values of sample i of both together are all i."""
    folder = tmp_path_factory.mktemp("mixed")
    for name, numbers in (("a", range(50)), ("b", range(50, 90))):
        with ShardWriter(str(folder / (name + "-{shard}.tar")), max_samples=20) as writer:
            for at, i in enumerate(numbers):
                writer.write({"__key__": f"{name}{at:02d}", "ids": np.full(LENGTHS[i], i, "<i4").tobytes()})
    return {"a": str(folder / "a-{0..2}.tar"), "b": str(folder / "b-{0..1}.tar")}


WEIGHTS = st.sampled_from([{"a": 1, "b": 1}, {"a": 3, "b": 1}, {"a": {0: 1.0, 30: 0.1}, "b": 1}])


def mixture(urls, weights, until, *, selected=False, resample=False, shuffle=True, world=None):
    options = {"shuffle": shuffle, "seed": 4, "world": world}
    first = ShardDataset(urls["a"], **options)
    datasets = {
        "a": first.select(keys=EVERY_THIRD) if selected else first,
        "b": ShardDataset(urls["b"], **{**options, "shuffle": shuffle and not resample}, resample=resample),
    }
    return mix(datasets, weights=weights, until=until, seed=9, on_error=Ledger(max_errors=0))


@st.composite
def cases(draw):
    """Options of a mixture, and a packing of its samples."""
    how = draw(st.sampled_from([pack, lambda lengths, size, window: bucket(lengths, budget=size, window=window)]))
    options = {
        "weights": draw(WEIGHTS),
        "until": draw(st.sampled_from(["first", "last", 70])),
        "selected": draw(st.booleans()),
        "resample": draw(st.booleans()),
        "shuffle": draw(st.booleans()),
    }
    return options, how(LENGTHS, CAPACITY, window=draw(st.integers(1, 60)))


def planned(urls, case, ranks=1, state=None):
    options, packing = case
    return BatchMaker(mixture(urls, **options), 1, packing=packing).plan(2, ranks, state)


def bins_of(plan):
    return [tuple(zip(*(part.tolist() for part in plan[b]))) for b in range(len(plan))]


@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_bins_hold_the_positions_of_the_mixture(urls, case):
    options, packing = case
    plan = planned(urls, case)
    alone = BatchMaker(mixture(urls, **options), 1).plan(2, 1)
    positions = plan.sample_positions(np.arange(len(plan)))
    assert sorted(positions.tolist()) == list(range(len(alone)))
    assert [part.tolist() for part in plan.unpacked[positions]] == [part.tolist() for part in alone[positions]]
    windows = positions // packing.window
    assert (np.diff(windows) >= 0).all()  # so that proportions hold in each
    first = np.array([0, 20, 40, 50, 70])  # the number of each shard's first sample
    for b in range(len(plan)):
        shards, numbers = plan[b]
        own = LENGTHS[first[shards] + numbers]
        assert 0 < (own.sum() if packing.is_packed else own.max() * len(own)) <= CAPACITY


@settings(max_examples=40, deadline=None)
@given(case=cases(), chain=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6)), max_size=4))
def test_ranks_and_resumes_share_the_same_bins(urls, case, chain):
    whole, came, state = bins_of(planned(urls, case)), [], None
    for ranks, steps in chain:
        rest = planned(urls, case, ranks, state)
        taken = min(steps * ranks, rest.total)
        came += bins_of(rest)[:taken]
        state = rest.state(taken)
    assert came + bins_of(planned(urls, case, 1, state)) == whole


def samples_of(batch):
    ids, ends = np.asarray(batch["ids"]), np.asarray(batch["cu_seqlens"])
    parts = np.split(ids, ends[1:-1])
    assert [part.tolist() for part in parts] == [[part[0]] * LENGTHS[part[0]] for part in parts]
    return [int(part[0]) for part in parts]


def decode(sample):
    return {"ids": np.frombuffer(sample["ids"], "<i4")}


def torch_loader(mixed, packing, workers=0):
    return ShardLoader(mixed.map(decode), 1, num_workers=workers, packing=packing)


def array_loader(mixed, packing, workers=0):
    return ArrayLoader(mixed, 1, fields={"ids": readers.ragged("<i4")}, threads=workers, packing=packing)


SCHEDULED = {"a": {0: 1.0, 30: 0.1}, "b": 1}


@pytest.mark.parametrize("make", [torch_loader, array_loader])
@pytest.mark.parametrize("workers", [0, 2])
def test_loaders_deliver_every_sample_of_the_mixture(make, workers, urls):
    options = {"weights": SCHEDULED, "until": 60, "selected": True}
    loader = make(mixture(urls, **options), pack(LENGTHS, CAPACITY, window=30), workers)
    rows = [samples_of(row) for row in loader]
    due = [int.from_bytes(sample["ids"][:4], "little") for sample in mixture(urls, **options)]
    assert Counter(i for row in rows for i in row) == Counter(due)
    assert loader.ledger._total().planned == loader.ledger._total().delivered == 60


@pytest.mark.parametrize("make", [torch_loader, array_loader])
def test_loaders_resume_on_other_ranks(make, urls):
    packing, came, state = pack(LENGTHS, CAPACITY, window=30), [], None
    for ranks, steps in ((2, 3), (3, 2), (1, 1000)):
        loaders = [
            make(mixture(urls, SCHEDULED, 60, selected=True, world=World(rank, ranks)), packing)
            for rank in range(ranks)
        ]
        states = []
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
            rows = iter(loader)
            for _, row in zip(range(steps), rows):
                came += samples_of(row)
            states.append(loader.state_dict())
            rows.close()
        assert all(each == states[0] for each in states)
        state = states[0]
    alone = torch_loader(mixture(urls, SCHEDULED, 60, selected=True, world=World()), packing)
    assert Counter(came) == Counter(i for row in alone for i in samples_of(row))


def test_a_sample_that_is_drawn_twice_has_the_numbers_of_its_draws(urls):
    draws = []

    def note(sample):
        draws.append(sample["__draw__"])
        return decode(sample)

    loader = ShardLoader(ShardDataset(urls["a"], resample=True).map(note), 1, packing=pack(LENGTHS[:50], CAPACITY))
    assert len([*loader]) < 50
    assert sorted(draws) == list(range(50))


def test_lengths_are_of_all_datasets(urls):
    with pytest.raises(ValueError, match="lengths are of 50 samples, and the dataset has 90"):
        next(iter(torch_loader(mixture(urls, SCHEDULED, 60), pack(LENGTHS[:50], CAPACITY))))


@pytest.mark.parametrize("options", [{}, {"resample": True}])
def test_a_state_of_bins_requires_its_packing(options, urls):
    packed = torch_loader(mixture(urls, SCHEDULED, 60, **options), pack(LENGTHS, CAPACITY))
    state = packed.state_dict()
    with pytest.raises(StateError, match="requires the packing="):
        torch_loader(mixture(urls, SCHEDULED, 60, **options), None).load_state_dict(state)
    drawn = ShardDataset(urls["a"], resample=True)
    with pytest.raises(StateError, match="requires the packing="):
        ShardLoader(drawn, 1).load_state_dict(ShardLoader(drawn, 1, packing=pack(LENGTHS[:50], CAPACITY)).state_dict())
