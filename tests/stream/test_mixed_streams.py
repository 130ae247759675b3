"""Mixtures with un-indexed datasets: in each worker, shares to within one sample at every position."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from itertools import count, islice, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shares import assert_shares
from soak import SOAK
from with_torch import DataLoader, ShardDataset, ShardLoader

from tarshards import ArrayLoader, Ledger, Stream, World, readers
from tarshards.epoch.proportions import Quotas, stepwise
from tarshards.errors import SampleError, StateError, WorldError
from tarshards.stream.mixed import mix

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]

WEIGHTS = {"a": 0.5, "b": 0.2, "c": 0.3}


@pytest.fixture
def urls(make_shards) -> dict[str, str]:
    """Shards without indexes: 6 of 7, 4 of 4 and 6 of 5 samples."""
    return {"a": make_shards(6, 7, "a"), "b": make_shards(4, 4, "b"), "c": make_shards(6, 5, "c")}


SIZES = {"a": 42, "b": 16, "c": 30}


def mixed(urls, rank=0, ranks=1, weights=WEIGHTS, kind=ShardDataset, **options):
    datasets = {name: kind(url, shuffle=True, world=World(rank, ranks)) for name, url in urls.items()}
    return mix(datasets, weights=weights, seed=5, **options)


def pairs(samples) -> list[tuple[str, int]]:
    return [(sample["__dataset__"], int(sample["cls"])) for sample in samples]


@pytest.mark.parametrize("kind", [Stream.from_shards, ShardDataset])
@pytest.mark.parametrize("until", ["first", "last", 200])
def test_shares_hold_at_every_prefix(urls, until, kind):
    order = pairs(mixed(urls, until=until, kind=kind))
    assert_shares([name for name, _ in order], WEIGHTS)
    counts = Counter(order)
    seen = {name: len({value for other, value in counts if other == name}) for name in SIZES}
    if until == "first":
        assert max(counts.values()) == 1
        assert any(seen[name] == size for name, size in SIZES.items())
    elif until == "last":
        assert seen == SIZES, "every sample of every dataset came"
        assert min(max(counts[name, i] for i in range(size)) for name, size in SIZES.items()) == 1
        last = order[-1][0]
        assert sum(name == last for name, _ in order) == SIZES[last], "it ends with the last sample of the last"
    else:
        assert len(order) == 200
    for name, size in SIZES.items():
        times = [counts[name, i] for i in range(size)]
        assert max(times) - min(times) <= 1, "no sample comes again before all have come"


def test_it_ends_where_the_planned_mixture_does(urls, make_shards):
    indexed = {name: make_shards(*shape, f"i{name}", index=True) for name, shape in
               {"a": (6, 7), "b": (4, 4), "c": (6, 5)}.items()}  # fmt: skip
    for until in ("first", "last", 77):
        planned = pairs(mixed(indexed, until=until))
        assert Counter(name for name, _ in pairs(mixed(urls, until=until))) == Counter(name for name, _ in planned)


def test_seeds_epochs_and_passes(urls):
    stream = mixed(urls, until=120)
    epochs = [pairs(stream) for _ in range(2)]
    again = mixed(urls, until=120)
    assert [pairs(again) for _ in range(2)] == epochs
    assert epochs[0] != epochs[1]
    passes = [value for name, value in epochs[0] if name == "b"]
    assert sorted(passes[:16]) == list(range(16))
    assert passes[:8] != passes[16:24], "which begins again in another order"


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("ranks", [1, 2])
def test_workers_and_ranks_share_the_shards_of_each_dataset(urls, ranks, workers):
    """In every worker the shares hold, and over all workers each sample comes once where no dataset begins again."""
    weights = {"a": 42, "b": 16, "c": 30}
    loaded, alone = Counter(), Counter()
    for rank in range(ranks):
        loader = ShardLoader(mixed(urls, rank, ranks, weights=weights), 1, num_workers=workers, collate_fn=list)
        batches = [pairs(batch)[0] for batch in loader]
        loaded.update(batches)
        dataset = mixed(urls, rank, ranks, weights=weights)
        samples = list(DataLoader(dataset, batch_size=None, num_workers=workers, collate_fn=None))
        assert sorted(pairs(samples)) == sorted(batches)
        for worker in range(max(1, workers)):
            whole = mixed(urls, rank, ranks, weights=weights)
            own = pairs(whole.iterate(0, World(rank, ranks, worker, max(1, workers))))
            assert_shares([name for name, _ in own], weights)
            alone.update(own)
    assert loaded == alone
    assert max(loaded.values()) == 1
    if ranks * workers <= 1:
        assert len(loaded) == sum(SIZES.values())


def test_a_number_and_an_end_count_in_each_worker(urls):
    dataset = mixed(urls, until=30)
    names = [sample["__dataset__"] for sample in DataLoader(dataset, batch_size=None, num_workers=3, collate_fn=None)]
    assert len(names) == 90
    last = Counter(pairs(DataLoader(mixed(urls, until="last"), batch_size=None, num_workers=2, collate_fn=None)))
    assert len(last) == sum(SIZES.values())


def square(value):
    return {"value": value, "square": value * value}


def odd(value):
    return value % 2 == 1


def test_plain_streams_keep_ops_of_any_kind():
    streams = {
        "squares": Stream(range(50)).filter(odd).map(square).shuffle(8),
        "batches": Stream(count).map(square).batched(4),
        "few": Stream([{"value": -1}, {"value": -2}, {"value": -3}]).take(2).repeat(2),
        "others": Stream(lambda: iter("xyz")),
    }
    given = [{"value": -1}]
    stream = mix(streams | {"given": Stream(given)}, until=60)
    samples = list(stream)
    assert given == [{"value": -1}], "the samples of others are not changed"
    dicts = [sample for sample in samples if isinstance(sample, dict)]
    assert Counter(sample["__dataset__"] for sample in dicts) == dict.fromkeys(
        ["squares", "batches", "few", "given"], 12
    )
    assert [sample for sample in samples if not isinstance(sample, dict)] == list("xyz" * 4)
    batches = [sample["value"].tolist() for sample in dicts if sample["__dataset__"] == "batches"]
    assert batches == [list(range(i, i + 4)) for i in range(0, 48, 4)]
    assert [sample["value"] for sample in dicts if sample["__dataset__"] == "few"] == [-1, -2] * 6
    assert {sample["value"] for sample in dicts if sample["__dataset__"] == "squares"} <= set(range(1, 50, 2))
    assert list(stream) != samples, "the next epoch shuffles anew"
    assert len(mix(streams, until=8).map(str).batched(3).collect()) == 3


def test_plain_and_indexed_and_streamed_shards_mix(urls, make_shards):
    datasets = {
        "plain": Stream([{"cls": -1}, {"cls": -2}]),
        "indexed": ShardDataset(make_shards(2, 6, "indexed", index=True), shuffle=True),
        "streamed": ShardDataset(urls["b"], fields="cls").map(dict),
    }
    stream = mix(datasets, until="last")
    assert isinstance(stream, ShardDataset)
    order = pairs(stream)
    assert_shares([name for name, _ in order], dict.fromkeys(datasets, 1))
    assert len(order) in (46, 47, 48)
    assert {value for name, value in order if name == "indexed"} == set(range(12))
    assert {value for name, value in order if name == "streamed"} == set(range(16))
    with pytest.raises(TypeError, match="only planned epochs have a length"):
        len(stream)
    assert len(list(ShardLoader(mix(datasets, until=20), 5, num_workers=2, collate_fn=list))) == 8


def test_a_mixture_of_mixtures(urls, make_shards):
    inner = mixed({"a": make_shards(2, 8, "ia", index=True), "b": make_shards(2, 8, "ib", index=True)}, weights=None)
    outer = mix({"inner": inner, "c": ShardDataset(urls["c"])}, weights={"inner": 2, "c": 1})
    order = pairs(outer)
    assert_shares([name for name, _ in order], {"inner": 2, "c": 1})
    assert Counter(value for name, value in order if name == "inner") == Counter([*range(16)] * 2)
    nested = mix({"mixed": mixed(urls), "plain": Stream([{"cls": 1}])}, until=40)
    assert Counter(name for name, _ in pairs(nested)) == {"mixed": 20, "plain": 20}
    assert nested.ledger.samples == 40
    assert mix({"only": inner}, until="first").collect()


@pytest.mark.parametrize("until", ["first", "last", 100])
def test_an_empty_dataset_is_an_error_and_no_endless_loop(urls, until, caplog):
    full = ShardDataset(urls["a"])
    for empty in (
        Stream([]),
        Stream(lambda: iter(())),
        Stream(range(10)).filter(lambda _: False),
        ShardDataset(urls["b"]).take(0),
        ShardDataset(urls["b"]).filter(lambda _: False),
    ):
        with pytest.raises(SampleError, match="empty: no samples to mix"):
            list(mix({"full": full, "empty": empty}, until=until))
        names = [name for name, _ in pairs(mix({"full": full, "empty": empty}, weights={"full": 1, "empty": 0}))]
        assert names == ["full"] * 42, "without weight it is not asked"


def test_a_dataset_that_is_empty_when_it_begins_again_is_an_error():
    times = count()
    stream = mix({"once": Stream(lambda: iter([{}] * (3 * (next(times) == 0)))), "more": Stream([{}] * 10)}, until=50)
    with pytest.raises(SampleError, match="once: no samples to mix"):
        list(stream)
    spent = mix({"spent": Stream(iter([{}] * 3)), "more": Stream([{}] * 10)}, until="last")
    with pytest.raises(TypeError, match="an iterator can be streamed only once"):
        list(spent)
    assert len(list(mix({"spent": Stream(iter([{}] * 3)), "more": Stream([{}] * 10)}))) in (6, 7)


def test_a_worker_without_a_shard_of_some_dataset_is_an_error(urls):
    message = "b: 4 shards for 6 workers of all ranks"
    for rank in range(2):
        with pytest.raises(WorldError, match=message):
            next(mixed(urls, rank, 2).iterate(0, World(rank, 2, 0, 3)))
    weights = {"a": 1, "b": 0, "c": 1}
    assert list(mixed(urls, weights=weights).iterate(0, World(0, 1, 4, 5)))
    weights["b"] = {0: 0, 10**6: 1}
    with pytest.raises(WorldError, match="b: 4 shards for 5 workers"):
        next(mixed(urls, weights=weights).iterate(0, World(0, 1, 4, 5)))


@pytest.mark.soak
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("until", ["first", "last", 40])
def test_a_loader_resumes_on_the_same_workers(urls, until, workers):
    expected = [
        pairs(batch) for batch in ShardLoader(mixed(urls, until=until), 3, num_workers=workers, collate_fn=list)
    ]
    steps = range(0, len(expected), 5 if workers else 1)
    for taken in steps if SOAK > 1 else steps[1::2]:
        loader = ShardLoader(mixed(urls, until=until), 3, num_workers=workers, collate_fn=list)
        iterator = iter(loader)
        begun = [pairs(batch) for batch in islice(iterator, taken)]
        state = json.loads(json.dumps(loader.state_dict()))
        del iterator
        resumed = ShardLoader(mixed(urls, until=until), 3, num_workers=workers, collate_fn=list)
        resumed.load_state_dict(state)
        assert begun + [pairs(batch) for batch in resumed] == expected
    with pytest.raises(StateError, match="replayed"):
        ShardLoader(mixed(urls, until=until), 3, num_workers=workers + 1).load_state_dict(state)


@pytest.mark.soak
@pytest.mark.parametrize("weights", [WEIGHTS, {"a": {0: 1, 30: 0}, "b": 1, "c": {0: 0, 30: 1}}])
def test_a_stream_resumes_at_every_step(urls, weights):
    def build():
        datasets = {name: Stream.from_shards(url, shuffle=True) for name, url in urls.items()}
        datasets["a"] = datasets["a"].shuffle(5)
        datasets["b"] = Stream(range(9)).map(lambda value: {"cls": value})
        return mix(datasets, weights=weights, until=60)

    stream = build()
    stream.set_epoch(2)
    expected = pairs(stream)
    for taken in range(0, 60, 1 if SOAK > 1 else 7):
        stream = build()
        stream.set_epoch(2)
        iterator = iter(stream)
        begun = pairs(islice(iterator, taken))
        state = json.loads(json.dumps(stream.state_dict()))
        iterator.close()
        resumed = build()
        resumed.load_state_dict(state)
        assert begun + pairs(resumed) == expected


def test_a_state_of_another_mixture_is_refused(urls, make_shards):
    state = ShardLoader(mixed(urls), 4).state_dict()
    indexed = {name: make_shards(2, 2, f"i{name}", index=True) for name in urls}
    for other in (
        mixed(urls, until="last"),
        mixed(urls, weights={"a": 0.5, "b": 0.3, "c": 0.2}),
        mixed(urls, weights={**WEIGHTS, "a": {0: 0.5, 10: 1}}),
        mix({name: ShardDataset(url) for name, url in urls.items()}, weights=WEIGHTS, seed=5),
        mixed(indexed),
        ShardDataset(urls["a"]),
    ):
        with pytest.raises(StateError):
            ShardLoader(other, 4).load_state_dict(state)


def fail_on_sevens(sample):
    if int(sample["cls"]) % 7 == 0:
        raise ValueError("a multiple of seven")
    return sample


def is_even(sample):
    return int(sample["cls"]) % 2 == 0


@pytest.mark.parametrize("workers", [0, 2])
def test_the_ledger_of_the_mixture_counts_for_all(urls, tmp_path, workers):
    ledger, others, unused = Ledger(max_errors=1000), Ledger(max_errors=1000), Ledger()
    (tmp_path / "c-0003.tar").write_bytes(b"no tar" * 100)
    datasets = {
        "a": ShardDataset(urls["a"], on_error=unused).map(fail_on_sevens),
        "b": ShardDataset(urls["b"]).filter(is_even),
        "c": ShardDataset(urls["c"]).map(fail_on_sevens, on_error=others),
    }
    stream = mix(datasets, until="last", on_error=ledger).filter(is_even)
    samples = list(DataLoader(stream, batch_size=None, num_workers=workers, collate_fn=None))
    assert ledger.samples == len(samples) > 0
    assert ledger.failed > 0
    assert set(ledger.filtered) == {"filter(is_even)"}
    assert {entry.shard for entry in ledger.quarantined if entry.key is None} == {str(tmp_path / "c-0003.tar")}
    assert len(others.quarantined) > 0
    assert unused._total() == Ledger()._total()
    assert stream.ledger is ledger
    ledger.check()
    total = ledger._total()
    assert total.samples == total.delivered + total.filtered.total() + total.failed + total.in_flight


def test_planned_samples_and_streamed_ones_are_told_apart(urls, make_shards):
    datasets = {
        "planned": ShardDataset(make_shards(3, 6, "planned", index=True)),
        "streamed": ShardDataset(urls["b"]),
        "plain": Stream([{"cls": 1}] * 5),
    }
    stream = mix(datasets, until="last")
    delivered = list(stream)
    tally = stream.ledger._total()
    assert stream.ledger.samples == len(delivered)
    counts = Counter(sample["__dataset__"] for sample in delivered)
    assert tally.streamed == counts["streamed"] + counts["plain"]
    stream.ledger.check()
    words = {line.split()[0]: line.split()[1] for line in str(stream.ledger).splitlines()}
    assert (words["planned"], words["streamed"]) == ("18", str(tally.streamed))
    left = mix(datasets, until=7)
    assert len(list(left)) == 7
    left.ledger.check()
    assert left.ledger.unaudited, "of the shards that were begun a part is left"


@pytest.mark.parametrize("taken", [0, 1, 5, 20])
def test_leaving_the_loop_closes_what_is_open_and_counts(urls, taken):
    closed = []

    def forever():
        try:
            yield from ({"cls": i} for i in count())
        finally:
            closed.append(True)

    datasets = {"a": Stream.from_shards(urls["a"]).shuffle(5), "b": Stream(forever), "c": Stream.from_shards(urls["c"])}
    stream = mix(datasets, until="last")
    iterator = iter(stream)
    assert len(list(islice(iterator, taken))) == taken
    iterator.close()
    assert len(closed) == (taken > 2)
    tally = stream.ledger._total()
    assert tally.delivered == taken
    assert tally.in_flight >= (5 if taken > 2 else 0)


@pytest.mark.parametrize("threads", [0, 2])
def test_arrays_of_a_streamed_mixture(urls, threads):
    for rank in range(2):
        stream = mixed(urls, rank, 2, until=40, kind=Stream.from_shards)
        expected = pairs(stream)
        loader = ArrayLoader(
            mixed(urls, rank, 2, until=40, kind=Stream.from_shards),
            6,
            fields={"cls": readers.integer()},
            threads=threads,
        )
        begun = [int(value) for batch in islice(loader, 2) for value in batch["cls"]]
        state = json.loads(json.dumps(loader.state_dict()))
        loader.load_state_dict(state)
        rest = [int(value) for batch in loader for value in batch["cls"]]
        assert begun + rest == [value for _, value in expected]


def test_a_streamed_mixture_is_pickled(urls):
    stream = mixed(urls, weights={"a": {0: 1, 50: 3}, "b": 1, "c": 1}, kind=Stream.from_shards)
    assert pairs(pickle.loads(pickle.dumps(stream))) == pairs(stream)


curve = st.builds(
    lambda first, more: {0: first, **more},
    st.integers(0, 4),
    st.dictionaries(st.integers(1, 300), st.integers(0, 4), max_size=3),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(curve, min_size=1, max_size=5), st.integers(1, 7))
def test_a_schedule_holds_in_each_worker_by_positions_over_all(curves, workers):
    """After n samples of each worker, n x workers samples of the mixture have come."""
    weights = {str(i): weight for i, weight in enumerate([*curves, 1])}
    quotas = Quotas(list(weights.values()))
    stream = mix({name: Stream(lambda name=name: iter([{"x": name}] * 3)) for name in weights}, weights=weights,
                 until=120)  # fmt: skip
    counts = Counter()
    for n, sample in enumerate(stream.iterate(0, World(0, 1, 0, workers)), 1):
        assert sample["x"] == sample["__dataset__"]
        counts[sample["x"]] += 1
        due = [quota / workers for quota in quotas.at(n * workers)]
        assert all(abs(counts[str(i)] - quota) < 1 for i, quota in enumerate(due))
    assert counts.total() == 120


def test_last_does_not_wait_for_a_dataset_whose_weight_has_ended():
    def build(kind, sizes):
        return {name: kind([{"cls": i} for i in range(size)]) for name, size in sizes.items()}

    weights = {"old": {0: 1, 20: 0}, "new": {0: 0, 20: 1}}
    names = [name for name, _ in pairs(mix(build(Stream, {"old": 100, "new": 10}), weights=weights, until="last"))]
    assert names == ["old"] * 20 + ["new"] * 10
    line = {"old": stepwise({0: 1, 20: 0}, 2), "new": stepwise({0: 0, 20: 1}, 2)}
    names = [name for name, _ in pairs(mix(build(Stream, {"old": 100, "new": 10}), weights=line, until="last"))]
    assert 9 <= Counter(names)["old"] <= 11
    assert Counter(names)["new"] == 10
    steps = mix(build(Stream, {"old": 100, "new": 0}), weights=weights, until="last")
    with pytest.raises(SampleError, match="new"):
        list(steps)
    only = mix(build(Stream, {"old": 100, "new": 3}), weights={"old": {0: 1, 20: 0}, "new": 1}, until="last")
    assert len(list(only)) == 20, "until the weight of the other has ended"


def test_positions_of_a_schedule_are_of_all_ranks_and_workers(urls):
    weights = {"a": {0: 1, 20: 0}, "b": 0, "c": {0: 0, 20: 1}}
    begins = []
    for ranks in (1, 2, 4):
        names = [name for name, _ in pairs(mixed(urls, 0, ranks, weights=weights, until=20))]
        changes = [n for n, (before, after) in enumerate(pairwise(names), 1) if before != after]
        begins.append(changes)
    assert begins == [[], [10], [5]]
