"""Batches that do not depend on the workers, states that resume anywhere, and an audit of every epoch."""

from __future__ import annotations

import gc
import json
from collections import Counter
from itertools import chain, islice

import pytest
import torch
from soak import SOAK
from torch.utils.data import DataLoader

from tarshards import Ledger, ShardDataset, World, mix
from tarshards.epoch.loop import Part
from tarshards.errors import AuditError, DecodeError, OpError, StateError
from tarshards.index.access import SampleSequence
from tarshards.loaders.torch.shard_loader import ShardLoader
from tarshards.samples.codecs import decoding

pytestmark = [
    pytest.mark.usefixtures("quick_spawn"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
]

SIZES = [7, 1, 12, 0, 25, 3, 30, 2]  # samples of the shards, 80 in all


@pytest.fixture
def uneven(make_uneven) -> str:
    return make_uneven(SIZES)


def planned(urls: str, rank: int = 0, ranks: int = 1, **options) -> ShardDataset:
    return ShardDataset(urls, **{"shuffle": True, "seed": 3, "world": World(rank, ranks)} | options)


def load(dataset: ShardDataset, size: int = 8, workers: int = 0, method: str = "fork", **options) -> ShardLoader:
    if workers:
        options["multiprocessing_context"] = method
    return ShardLoader(dataset, size, num_workers=workers, **options)


def classes(batches) -> list[list[int]]:
    return [[int(value) for value in batch["cls"]] if batch else [] for batch in batches]


def flat(batches) -> list[int]:
    return [value for batch in classes(batches) for value in batch]


def exhaust(loader: ShardLoader) -> None:
    """Iterate over a loader that fails, and wait for its workers to end."""
    try:
        list(loader)
    finally:
        gc.collect()


def odd(sample) -> bool:
    return int(sample["cls"]) % 2 == 1


def never(sample) -> bool:
    return False


def shout(sample):
    return {**sample, "txt": sample["txt"].upper()}


def fail_on_tens(sample):
    if int(sample["cls"]) % 10 == 0:
        raise ValueError("a ten")
    return sample


def test_batches_are_the_same_for_any_workers(uneven):
    epochs = [classes(loader) for loader in [load(planned(uneven))] for _ in range(2)]
    assert [sorted(chain(*epoch)) for epoch in epochs] == [list(range(80))] * 2
    assert epochs[0] != epochs[1]
    assert [len(batch) for batch in epochs[0]] == [8] * 10
    for workers in (1, 2, 3, 4) if SOAK > 1 else (1, 3):
        loader = load(planned(uneven), workers=workers)
        assert [classes(loader) for _ in range(2)] == epochs


@pytest.mark.parametrize("persistent", [False, True])
def test_spawned_workers(uneven, persistent):
    expected = load(planned(uneven))
    loader = load(planned(uneven), workers=2, method="spawn", persistent_workers=persistent)
    if persistent:
        assert [classes(loader) for _ in range(2)] == [classes(expected) for _ in range(2)]
    loader.set_epoch(1)
    expected.set_epoch(1)
    assert classes(loader) == classes(expected)


def test_persistent_workers_are_told_every_epoch(uneven):
    expected, loader = load(planned(uneven)), load(planned(uneven), workers=2, persistent_workers=True)
    first = classes(expected)
    assert classes(loader) == first
    assert classes(loader) == classes(expected)
    iterator = iter(loader)
    taken = classes(islice(iterator, 3))
    state = loader.state_dict()
    assert classes(loader) != first, "breaking off begins the next epoch"
    loader.load_state_dict(state)
    expected.set_epoch(2)
    assert taken + classes(loader) == classes(expected)
    loader.set_epoch(0)
    assert classes(loader) == first


def test_more_workers_than_batches_and_shards(make_shards):
    loader = load(planned(make_shards(1, 5, index=True)), 4, workers=4)
    assert len(loader) == 2
    assert sorted(flat(loader)) == list(range(5))


@pytest.mark.parametrize("workers", [0, 2])
def test_ops_run_on_each_batch(uneven, workers):
    dataset = planned(uneven).filter(odd).decode().async_map(shout, workers=2).select_fields("cls words:txt")
    loader = load(dataset, workers=workers)
    batches = list(loader)
    assert len(batches) == len(loader) == 10
    assert sorted(flat(batches)) == list(range(1, 80, 2))
    assert {"cls", "words"} <= batches[0].keys()
    assert all(word.startswith("TEXT") for batch in batches for word in batch["words"])


@pytest.mark.parametrize("workers", [0, 2])
def test_empty_batches_are_steps_too(uneven, workers):
    assert list(load(planned(uneven).filter(never), workers=workers)) == [[]] * 10


@pytest.mark.parametrize("workers", [0, 3])
def test_a_quarantined_sample_makes_its_batch_shorter(uneven, workers):
    ledger = Ledger(max_errors=100)
    loader = load(planned(uneven, on_error=ledger).map(fail_on_tens), workers=workers)
    batches = classes(loader)
    assert len(batches) == 10
    assert sum(len(batch) < 8 for batch in batches) >= 1
    assert sorted(chain(*batches)) == [i for i in range(80) if i % 10]
    assert (ledger.samples, ledger.failed, len(ledger.quarantined)) == (72, 8, 8), "counted after the ops"
    assert not ledger.unaudited
    ledger.check()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_shard_that_is_gone_is_quarantined(uneven, tmp_path, workers):
    ledger = Ledger(max_errors=100)
    dataset = planned(uneven, on_error=ledger)
    (tmp_path / "set-0004.tar").unlink()
    batches = classes(load(dataset, workers=workers))
    assert len(batches) == 10
    assert sorted(chain(*batches)) == [*range(20), *range(45, 80)]
    assert len(ledger.quarantined) == 25
    assert {entry.shard for entry in ledger.quarantined} == {str(tmp_path / "set-0004.tar")}
    ledger.check()
    with pytest.raises(Exception, match=r"set-0004\.tar.*No such file"):
        exhaust(load(planned(uneven), workers=workers))


def test_an_error_of_an_op_comes_as_itself(uneven):
    loader = load(planned(uneven).map(fail_on_tens), workers=2)
    with pytest.raises(OpError, match=r"set-000\d\.tar: 0000\d0: ValueError: a ten"):
        exhaust(loader)
    assert loader.state_dict()["epoch"] == 0, "what was delivered before it can be resumed"
    with pytest.raises(DecodeError, match=r"set-000\d\.tar: \d+\.cls"):
        exhaust(load(planned(uneven).map_fields({"cls": lambda data: b"x"}).decode(), workers=0))


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_a_state_after_any_batch_resumes_on_any_workers(uneven, workers):
    reference = load(planned(uneven), 7)
    expected, following = classes(reference), classes(reference)
    loader = load(planned(uneven), 7, workers=workers)
    for stop, _ in enumerate(loader, 1):
        state = json.loads(json.dumps(loader.state_dict()))
        other = load(planned(uneven), 7, workers=[0, 2][stop % 2] if stop in (1, 5) else 0)
        other.load_state_dict(state)
        assert other.state_dict() == state
        assert len(other) == len(expected), "of the epoch, whatever was delivered before"
        assert classes(other) == (expected[stop:] or following), "at the last batch: the next epoch"
        assert len(other) == len(expected)


def test_the_epoch_after_a_resumed_one_is_the_next(uneven):
    loader = load(planned(uneven))
    next(iter(loader))
    state = loader.state_dict()
    epochs = [classes(loader) for _ in range(3)]
    loader.load_state_dict(state)
    assert len(classes(loader)) == 9
    assert classes(loader) == epochs[0]
    assert epochs[0] != epochs[1]


def test_states_at_the_ends(uneven):
    loader = load(planned(uneven))
    epochs = [classes(loader) for _ in range(2)]
    fresh = load(planned(uneven))
    fresh.load_state_dict(fresh.state_dict())
    assert classes(fresh) == epochs[0], "before anything"
    resumed = load(planned(uneven))
    resumed.load_state_dict(fresh.state_dict())
    assert classes(resumed) == epochs[1], "after the loop: the next epoch"
    for _ in (loop := iter(fresh)):
        state = fresh.state_dict()
    resumed.load_state_dict(state)
    following = classes(resumed)
    resumed.load_state_dict(fresh.state_dict())
    assert classes(resumed) == following, "at the last batch of the loop as after it: the next epoch"
    del loop


def test_a_resumed_epoch_can_be_saved_again(uneven):
    expected = classes(load(planned(uneven)))
    loader = load(planned(uneven))
    delivered = []
    for _ in range(5):
        delivered += classes(islice(loader, 2))
        state = loader.state_dict()
        loader = load(planned(uneven))
        loader.load_state_dict(state)
    assert delivered == expected
    assert loader.state_dict()["epoch"] == 1


CHAINS = [
    [(1, 0, 8), (2, 0, 4), (3, 0, 5), (1, 2, 6)],
    [(4, 0, 3), (3, 0, 2), (2, 1, 7), (5, 0, 1)],
    [(5, 0, 2), (7, 0, 1), (6, 0, 1), (4, 0, 4)],
]


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("shuffle", [True, False])
def test_chains_of_other_ranks_workers_and_batch_sizes(uneven, chain, shuffle):
    """Every topology takes two batches a rank, and the last one all that is left: no repeat and no miss."""
    state, seen = None, []
    for number, (ranks, workers, size) in enumerate(chain):
        states = []
        for rank in range(ranks):
            tail = "exact" if number == len(chain) - 1 else None
            loader = load(planned(uneven, rank, ranks, tail=tail, shuffle=shuffle, pool=40), size, workers)
            if state is not None:
                loader.load_state_dict(state)
            seen += flat(loader if tail else islice(loader, 2))
            states.append(loader.state_dict())
        assert all(other == states[0] for other in states) or tail
        state = json.loads(json.dumps(states[0]))
        assert len(json.dumps(state)) < 2048
    assert sorted(seen) == list(range(80))


@pytest.mark.parametrize("tail", ["pad", "drop"])
@pytest.mark.parametrize("ranks", [3, 6, 7])
def test_every_rank_takes_the_same_steps(make_uneven, tail, ranks):
    urls = make_uneven([10, 11, *[1] * 44])
    tallies, parts = [], []
    for rank in range(ranks):
        dataset = planned(urls, rank, ranks, tail=tail)
        loader = load(dataset, 4)
        parts.append(classes(loader))
        assert len(parts[-1]) == len(loader)
        tallies.append(dataset.ledger._total())
    dataset.ledger.audit(tallies, all_ranks=True)
    assert len({len(part) for part in parts}) == 1
    counts = Counter(value for part in parts for batch in part for value in batch)
    whole = -(-65 // ranks) if tail == "pad" else 65 // ranks
    assert counts.total() == whole * ranks
    assert len(counts) == min(65, whole * ranks)
    assert max(counts.values()) <= 2


def test_a_state_of_another_dataset_or_version(uneven, make_shards):
    loader = load(planned(uneven))
    state = loader.state_dict()
    with pytest.raises(StateError, match="another dataset"):
        load(planned(make_shards(4, 20, "other", index=True))).load_state_dict(state)
    with pytest.raises(StateError, match="version"):
        loader.load_state_dict({**state, "version": 99})
    for broken in ({}, None, [1], {**state, "position": 81}, {**state, "lanes": "x"}, {**state, "before": None}):
        with pytest.raises(StateError):
            loader.load_state_dict(broken)
    without = {name: value for name, value in state.items() if name != "epoch"}
    with pytest.raises(StateError, match="epoch"):
        loader.load_state_dict(without)
    assert len(flat(loader)) == 80, "a refused state changes nothing"


def test_what_is_refused(uneven):
    dataset = planned(uneven)
    for name, call in {
        "shuffle": planned(uneven, shuffle=False).shuffle(10),
        "batched": dataset.batched(4),
        "take": dataset.take(3),
        "skip": dataset.skip(3),
        "enumerate": dataset.enumerate(),
        "repeat": dataset.repeat(2),
        "flatten": dataset.flatten(),
        "progress": dataset.progress(),
        "monitor": dataset.monitor(print),
    }.items():
        with pytest.raises(TypeError, match=rf"^{name} is not for a ShardLoader: \w+"):
            load(call)
    for option in ({"shuffle": True}, {"sampler": []}, {"batch_sampler": []}, {"in_order": False}):
        with pytest.raises(TypeError, match="is not for a ShardLoader"):
            load(dataset, **option)
    with pytest.raises(ValueError, match="at least 1"):
        load(dataset, 0)


def test_two_loops_at_once_are_two_epochs(uneven):
    expected = load(planned(uneven))
    epochs = [classes(expected) for _ in range(2)]
    loader = load(planned(uneven))
    pairs = list(zip(iter(loader), iter(loader)))
    assert [classes(part) for part in zip(*pairs)] == epochs


def test_a_loader_is_true_and_says_why_it_has_no_length(make_shards):
    loader = load(ShardDataset(make_shards(2)))
    assert loader
    assert loader.passes.stream
    with pytest.raises(TypeError, match="tarindex"):
        len(loader)


@pytest.mark.parametrize("workers", [0, 2])
def test_without_an_index_a_state_is_replayed(make_shards, workers):
    urls = make_shards(5, 7)

    def fresh(seed=0, workers=workers, size=4):
        return load(ShardDataset(urls, shuffle=True, seed=seed).shuffle(10), size, workers)

    expected = classes(fresh())
    assert sorted(chain(*expected)) == list(range(35))
    loader = fresh()
    delivered = classes(islice(loader, 3))
    state = json.loads(json.dumps(loader.state_dict()))
    resumed = fresh()
    resumed.load_state_dict(state)
    assert delivered + classes(resumed) == expected
    for other, word in ((fresh(workers=1), "workers"), (fresh(size=5), "batch_size"), (fresh(seed=1), "order")):
        with pytest.raises(StateError, match=word):
            other.load_state_dict(state)


def lose_one(self, shards, samples):
    for i, result in enumerate(self.__class__.__mro__[1].read_all(self, shards, samples)):
        if i != 3:
            yield result


@pytest.mark.parametrize("workers", [0, 2])
def test_a_reader_that_loses_a_sample_is_found(make_shards, monkeypatch, workers):
    monkeypatch.setattr(SampleSequence, "read_all", lose_one)
    with pytest.raises(AuditError, match=r"set-0000\.tar"):
        exhaust(load(planned(make_shards(1, 20, index=True)), 20, workers))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_that_is_not_read_is_found(uneven, monkeypatch, workers):
    read = Part.read
    monkeypatch.setattr(Part, "read", lambda self, *args: iter(()) if self.positions[0] == 8 else read(self, *args))
    with pytest.raises(AuditError, match=r"80 samples planned, 72 delivered.*set-0006\.tar \(\d+ of 30\)"):
        exhaust(load(planned(uneven), workers=workers))


def test_a_batch_can_be_pinned_and_collated_by_torch(uneven):
    dataset = planned(uneven).decode().to_tuple("cls", "txt")
    loader = load(dataset, workers=1, collate_fn=torch.utils.data.default_collate, pin_memory=True)
    assert sorted(value for cls, _ in loader for value in cls.tolist()) == list(range(80))


def test_a_joined_and_a_narrowed_dataset(make_shards):
    left, right = make_shards(3, 10, "left", index=True), make_shards(3, 10, "right", index=True)
    loader = load(planned(left, fields="txt").join(right, fields="cls"), workers=2)
    assert sorted(flat(loader)) == list(range(30))


def test_a_plain_loader_of_a_planned_dataset_differs_only_in_batches(uneven):
    plain = DataLoader(planned(uneven), batch_size=None)
    assert [int(sample["cls"]) for sample in plain] == flat(load(planned(uneven)))


class TestNamesInDecodeThatNoFieldHas:
    """A loader logs them once, before its workers begin, which have few samples each."""

    @pytest.fixture(autouse=True)
    def forget(self):
        decoding._decoding.cache_clear()

    def told(self, caplog, dataset, **options) -> list[str]:
        for _ in range(2):
            assert sum(len(batch["__key__"]) for batch in load(dataset, 4, **options))
        return [record.getMessage() for record in caplog.records if "decode" in record.getMessage()]

    @pytest.mark.parametrize("workers", [0, 2])
    def test_once_for_all_epochs(self, make_shards, caplog, workers):
        dataset = ShardDataset(make_shards(2, index=True)).filter(bool).decode(jsn=len)
        words = "decode: no sample of the first shard has a field jsn; they have "
        assert [text.startswith(words) for text in self.told(caplog, dataset, workers=workers)] == [True]

    def test_first_ranks_alone(self, make_shards, caplog):
        worlds = [World(rank, 2) for rank in (1, 0)]
        for world, count in zip(worlds, (0, 1)):
            dataset = ShardDataset(make_shards(2, index=True), world=world).decode(jsn=len)
            assert len(self.told(caplog, dataset)) == count

    def test_not_of_fields_that_are_made_or_there(self, make_shards, caplog):
        dataset = ShardDataset(make_shards(2, index=True))
        assert not self.told(caplog, dataset.rename_fields({"jsn": "cls"}).decode(jsn=len))
        assert not self.told(caplog, dataset.decode({"jsn;cls": len}, only="cls"))
        assert not self.told(caplog, dataset.decode())

    def test_in_any_dataset_of_a_mixture(self, make_shards, caplog):
        mixed = mix({name: ShardDataset(make_shards(1, index=True)) for name in "ab"})
        assert not self.told(caplog, mixed.decode(cls=len))
        assert len(self.told(caplog, mixed.decode(jsn=len))) == 1
