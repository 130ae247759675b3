"""Several datasets as one: shares to within one sample, one order, one state, one ledger.

Indexed datasets are planned: shares are exact over all ranks where windows end. Others are streamed: shares hold in
each worker at every position, and states are replayed.
"""

from __future__ import annotations

import json
import pickle
from collections import Counter
from itertools import count, islice, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from range_server import serving
from soak import SOAK
from with_torch import DataLoader, ShardDataset, ShardLoader

from tarshards import ArrayLoader, Ledger, Stream, World, pack, readers
from tarshards.epoch import choices as choosing
from tarshards.epoch.choices import Choices
from tarshards.epoch.proportions import Quotas, stepwise
from tarshards.errors import AuditError, SampleError, StateError, WorldError
from tarshards.index import fetch
from tarshards.storage import remote
from tarshards.stream.mixed import PASS, mix
from tarshards.stream.op import BoundOp, op

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]

SHARDS = {"a": [13, 9, 20], "b": [9, 1, 6], "c": [30]}
SIZES = {name: sum(sizes) for name, sizes in SHARDS.items()}
WEIGHTS = {"a": 0.5, "b": 0.2, "c": 0.3}
CHANGING = {"a": {0: 1, 37: 0}, "b": 0.5, "c": {0: 0, 37: 1}}


@pytest.fixture
def urls(make_uneven) -> dict[str, str]:
    """Indexed shards, of several sizes."""
    return {name: make_uneven(sizes, name) for name, sizes in SHARDS.items()}


@pytest.fixture
def unindexed(make_shards) -> dict[str, str]:
    """The same numbers of samples in 6, 4 and 6 shards without indexes."""
    return {"a": make_shards(6, 7, "ua"), "b": make_shards(4, 4, "ub"), "c": make_shards(6, 5, "uc")}


@pytest.fixture(params=["urls", "unindexed"])
def either(request) -> dict[str, str]:
    return request.getfixturevalue(request.param)


def mixed(
    urls,
    rank=0,
    ranks=1,
    weights=WEIGHTS,
    seed=5,
    until="first",
    tail=None,
    kind=ShardDataset,
    **options,
):
    datasets = {name: kind(url, shuffle=True, world=World(rank, ranks), **options) for name, url in urls.items()}
    return mix(datasets, weights=weights, seed=seed, until=until, tail=tail)


def pairs(samples) -> list[tuple[str, int]]:
    return [(sample["__dataset__"], int(sample["cls"])) for sample in samples]


def batch_pairs(batches) -> list[tuple[str, int]]:
    return [(name, int(value)) for batch in batches if batch for name, value in zip(batch["__dataset__"], batch["cls"])]


def assert_whole(order) -> None:
    """The shares of a whole epoch are exact to within one."""
    counts = Counter(name for name, _ in order)
    assert all(abs(counts[name] - len(order) * weight) < 1 for name, weight in WEIGHTS.items())


def assert_shares(names, weights: dict[str, float]) -> None:
    """At every prefix each dataset has had its share to within one."""
    counts, total = Counter(), sum(weights.values())
    for step, name in enumerate(names, 1):
        counts[name] += 1
        for other, weight in weights.items():
            assert abs(counts[other] - step * weight / total) < 1, (step, counts)


def global_order(parts: list[list]) -> list:
    """Return the sequence from the parts of the ranks: rank r has every len(parts)-th sample."""
    return [part[i] for i in range(max(map(len, parts))) for part in parts if i < len(part)]


@pytest.mark.parametrize("kind", [Stream.from_shards, ShardDataset])
@pytest.mark.parametrize("until", ["first", "last", 200])
def test_the_shares_of_an_epoch(either, until, kind):
    stream = mixed(either, until=until, kind=kind)
    order = pairs(stream)
    assert_whole(order)
    is_streamed = "/ua-" in either["a"]
    if is_streamed:
        assert_shares([name for name, _ in order], WEIGHTS)
    else:
        assert len(order) == len(stream)
    counts = Counter(order)
    seen = {name: len({value for other, value in counts if other == name}) for name in SIZES}
    if until == "first":
        assert max(counts.values()) == 1
        assert any(seen[name] == size for name, size in SIZES.items())
    elif until == "last":
        assert seen == SIZES, "every sample of every dataset came"
        assert min(max(counts[name, i] for i in range(size)) for name, size in SIZES.items()) == 1
        if is_streamed:
            last = order[-1][0]
            assert sum(name == last for name, _ in order) == SIZES[last], "it ends with the last sample of the last"
    else:
        assert len(order) == 200
    for name, size in SIZES.items():
        times = [counts[name, i] for i in range(size)]
        assert max(times) - min(times) <= 1, "no sample comes again before all have come"


@pytest.mark.parametrize("until", ["first", "last", 77])
def test_planned_and_streamed_mixtures_end_alike(urls, unindexed, until):
    names = [Counter(name for name, _ in pairs(mixed(each, until=until))) for each in (urls, unindexed)]
    assert names[0] == names[1]


def test_seeds_epochs_and_passes(either):
    stream = mixed(either, until=120)
    epochs = [pairs(stream) for _ in range(2)]
    again = mixed(either, until=120)
    assert [pairs(again) for _ in range(2)] == epochs
    assert epochs[0] != epochs[1] != pairs(mixed(either, until=120, seed=6))
    assert Counter(name for name, _ in epochs[0]) == Counter(name for name, _ in epochs[1])
    passes = [value for name, value in epochs[0] if name == "b"]
    assert sorted(passes[:16]) == list(range(16))
    assert passes[:8] != passes[16:24], "which begins again in another order"
    assert pairs(mix({name: Stream.from_shards(url) for name, url in either.items()}))[0][1] == 0


def test_the_datasets_of_a_planned_mixture_come_in_another_order_in_each_epoch_and_with_each_seed(urls):
    stream = mixed(urls)
    orders = [pairs(each) for each in (stream, stream, mixed(urls, seed=6))]
    assert len({tuple(name for name, _ in order) for order in orders}) == 3


def tag(sample):
    return {**sample, "tag": "tagged"}


def even(sample):
    return int(sample["cls"]) % 2 == 0


def square(value):
    return {"value": value, "square": value * value}


def odd(value):
    return value % 2 == 1


# Planned mixtures


@pytest.mark.parametrize("weights", [WEIGHTS, CHANGING], ids=["constant", "changing"])
@pytest.mark.parametrize(("ranks", "workers"), [(2, 0), pytest.param(3, 2, marks=pytest.mark.soak)])
def test_the_global_order_does_not_depend_on_ranks_and_workers(urls, weights, ranks, workers):
    expected = pairs(mixed(urls, until=90, weights=weights))
    parts, arrays = [], []
    for rank in range(ranks):
        dataset = mixed(urls, rank, ranks, until=90, weights=weights)
        parts.append(batch_pairs(ShardLoader(dataset, 7, num_workers=workers)))
        dataset = mixed(urls, rank, ranks, until=90, weights=weights, kind=Stream.from_shards)
        batches = ArrayLoader(dataset, 7, fields={"cls": readers.integer()}, threads=workers)
        arrays.append([int(value) for batch in batches for value in batch["cls"]])
    assert global_order(parts) == expected
    assert global_order(arrays) == [value for _, value in expected]


@pytest.mark.parametrize(
    ("weights", "until"),
    [(WEIGHTS, "first"), (CHANGING, 100), pytest.param(WEIGHTS, "last", marks=pytest.mark.soak)],
    ids=["first", "changing", "last"],
)
def test_resume_again_and_again_on_other_ranks_in_both_loaders(urls, weights, until):
    expected = pairs(mixed(urls, until=until, weights=weights))
    delivered, state, taken = [], None, 0
    for ranks, size, loads_arrays, workers in ((2, 3, 0, 0), (3, 2, 1, 2), (1, 5, 0, 2), (4, 1, 1, 0), (5, 1, 0, 0)):
        parts, states = [], []
        for rank in range(ranks):
            kind = Stream.from_shards if loads_arrays else ShardDataset
            dataset = mixed(urls, rank, ranks, until=until, weights=weights, kind=kind)
            if loads_arrays:
                loader = ArrayLoader(dataset, size, fields={"cls": readers.integer()}, threads=workers)
            else:
                loader = ShardLoader(dataset, size, num_workers=workers)
            if state is not None:
                loader.load_state_dict(state)
            parts.append([int(value) for batch in islice(loader, 2) for value in batch["cls"]])
            states.append(loader.state_dict())
        assert all(other == states[0] for other in states)
        delivered += global_order(parts)
        state = json.loads(json.dumps(states[0]))
        assert len(json.dumps(state)) < 2048
        taken += 2 * ranks * size
        assert state["position"] == taken
        if weights is CHANGING:
            counts = Counter(name for name, _ in expected[: 0 if taken < 37 else 37])  # where a has no weight any more
            assert state["counts"] == [counts[name] for name in weights]
        else:
            assert "counts" not in state
    loader = ShardLoader(mixed(urls, until=until, weights=weights), 8)
    loader.load_state_dict(state)
    assert delivered + [value for _, value in batch_pairs(loader)] == [value for _, value in expected]


@pytest.mark.soak
@pytest.mark.parametrize(("until", "chunk"), [("first", 8), ("last", 8), (40, 1 << 14)])
def test_resume_a_schedule_at_every_step_on_other_ranks(urls, until, chunk, monkeypatch):
    monkeypatch.setattr(choosing, "WINDOW", chunk)
    monkeypatch.setattr(choosing, "KEPT", 2)
    expected = pairs(mixed(urls, until=until, weights=CHANGING))
    loader = ShardLoader(mixed(urls, until=until, weights=CHANGING), 1)
    for taken, _ in enumerate(islice(loader, len(expected) - 1), 1):
        if SOAK == 1 and taken % 3:  # a third of the steps has every number of ranks and every size
            continue
        state = json.loads(json.dumps(loader.state_dict()))
        ranks, parts = 1 + taken % 4, []
        for rank in range(ranks):
            resumed = ShardLoader(mixed(urls, rank, ranks, until=until, weights=CHANGING, tail="exact"), 1 + taken % 5)
            resumed.load_state_dict(state)
            parts.append(batch_pairs(resumed))
        assert global_order(parts) == expected[taken:], taken


@pytest.mark.parametrize("tail", ["pad", "drop", "exact"])
@pytest.mark.parametrize("weights", [WEIGHTS, CHANGING], ids=["constant", "changing"])
def test_tails(urls, weights, tail):
    ranks, ledger, parts = 4, Ledger(), []
    for rank in range(ranks):
        dataset = mixed(urls, rank, ranks, until=50, tail=tail, weights=weights)
        parts.append(batch_pairs(ShardLoader(dataset, 5)))
        ledger.merge(dataset.ledger)
    expected = pairs(mixed(urls, until=50, weights=weights))
    assert global_order(parts) == {"pad": expected + expected[:2], "drop": expected[:48], "exact": expected}[tail]
    ledger.check()


def test_a_state_of_another_mixture_is_refused(urls):
    state = ShardLoader(mixed(urls), 4).state_dict()
    for other in (
        mixed(urls, seed=6),
        mixed(urls, until="last"),
        mixed(urls, weights={"a": 0.5, "b": 0.3, "c": 0.2}),
        mixed(urls, seed=5, pool=100),
        mixed({"a": urls["a"], "b": urls["b"], "x": urls["c"]}, weights={"a": 0.5, "b": 0.2, "x": 0.3}),
        ShardDataset(urls["a"]),
    ):
        with pytest.raises(StateError, match="another dataset"):
            ShardLoader(other, 4).load_state_dict(state)
    loader = ShardLoader(mixed(urls), 4)
    for broken in ({"position": -1}, {"position": 10**9}, {"position": "x"}, {"epoch": None}):
        with pytest.raises(StateError):
            loader.load_state_dict({**state, **broken})


def test_a_state_of_another_schedule_is_refused(urls):
    loader = ShardLoader(mixed(urls, until=60, weights=CHANGING), 4)
    next(iter(loader))
    state = loader.state_dict()
    for other in (
        mixed(urls, until=60),
        mixed(urls, until=60, weights={**CHANGING, "a": stepwise(CHANGING["a"], 10)}),
        mixed(urls, until=60, weights={**CHANGING, "a": {0: 1, 36: 0}}),
    ):
        with pytest.raises(StateError, match="another dataset"):
            ShardLoader(other, 4).load_state_dict(state)
    same = mixed(urls, until=60, weights={**CHANGING, "a": {37: 0, 0: 1}})
    ShardLoader(same, 4).load_state_dict(state)
    good = state["counts"]
    for counts in (None, [], [4, 0], [4, 0, "0"], [0, 2, 2], [-1, 3, 2], [good[0] + 1, *good[1:]], good[:2], True):
        with pytest.raises(StateError, match="counts"):
            ShardLoader(same, 4).load_state_dict({**state, "counts": counts})
    del state["counts"]
    with pytest.raises(StateError, match="counts"):
        ShardLoader(same, 4).load_state_dict(state)


def test_constant_weights_have_states_as_before(urls):
    state = ShardLoader(mixed(urls), 4).state_dict()
    assert "counts" not in state
    alone = mixed(urls, weights={name: {0: weight} for name, weight in WEIGHTS.items()})
    assert Counter(name for name, _ in pairs(alone)) == Counter(name for name, _ in pairs(mixed(urls)))


def test_the_state_of_a_mixture_knows_how_datasets_are_drawn(urls):
    def loader(**options):
        return ShardLoader(mix({"a": ShardDataset(urls["a"], **options), "b": ShardDataset(urls["b"])}), 4)

    states = [loader(resample=resample).state_dict() for resample in (False, True, [1, 2, 3])]
    assert len({state["digest"] for state in states}) == 3


@pytest.mark.parametrize("workers", [0, 2])
def test_each_dataset_keeps_its_ops_and_fields(urls, workers):
    datasets = {
        "a": ShardDataset(urls["a"], fields="cls").map(tag),
        "b": ShardDataset(urls["b"], shuffle=True).filter(even).decode(),
    }
    samples = list(DataLoader(mix(datasets, until="last"), batch_size=None, num_workers=workers))
    assert all(("tag" in sample) == (sample["__dataset__"] == "a") for sample in samples)
    assert all(("txt" in sample) == (sample["__dataset__"] == "b") for sample in samples)
    assert {sample["cls"] for sample in samples if sample["__dataset__"] == "b"} == set(range(0, 16, 2))
    with pytest.raises(TypeError, match="filter"):
        len(mix(datasets))


def test_a_mixture_has_ops_of_its_own_and_can_be_joined(urls, make_uneven):
    right = [make_uneven(SHARDS[name], f"more-{name}") for name in ("a", "b")]
    left = {name: ShardDataset(urls[name], fields="cls") for name in ("a", "b")}
    stream = mix(left).join(right, fields="txt").to_tuple("cls", "txt")
    assert all(text == b"text " + cls for cls, text in stream)
    assert stream.ledger.members == 2 * stream.ledger.samples


@op(per_sample=True, resumable=True, one_for_one=True, context=("epoch",))
def note_epoch(samples, *, epoch=0):
    for sample in samples:
        yield {**sample, "epoch": epoch}


@pytest.mark.parametrize("weights", [WEIGHTS, CHANGING])
@pytest.mark.parametrize("loads", [False, True])
def test_ops_of_a_dataset_get_the_epoch_of_its_own_pass(urls, weights, loads):
    found = []
    for rank in range(2):
        datasets = {name: ShardDataset(url, shuffle=True, world=World(rank, 2)) for name, url in urls.items()}
        datasets["b"] = datasets["b"].filter(even)._then(BoundOp(note_epoch, (), {}))
        stream = mix(datasets, weights=weights, until=201, tail="pad")
        stream.set_epoch(3)
        samples = stream
        if loads:
            samples = [sample for batch in ShardLoader(stream, 7, num_workers=2, collate_fn=list) for sample in batch]
        found += [(int(sample["cls"]), sample["epoch"] - 3) for sample in samples if sample["__dataset__"] == "b"]
    assert len(set(found)) >= len(found) - 1, "pad repeats one sample"
    passes = sorted({epoch for _, epoch in found})
    assert passes == [number * PASS for number in range(len(passes))]
    assert len(passes) > 2
    assert all({value for value, epoch in found if epoch == own} == set(range(0, 16, 2)) for own in passes[:-1])


def draw(sample, rng):
    return {**sample, "number": rng.random()}


@pytest.mark.parametrize("index", [True, False])
def test_samples_that_come_again_draw_other_random_numbers(make_shards, index):
    """Those of a dataset that begins again, and those that are drawn with replacement."""
    urls = {name: make_shards(3, 4, name, index=index) for name in ("again", "drawn", "once")}
    datasets = {
        "again": ShardDataset(urls["again"], shuffle=True).map(draw, rng=True),
        "drawn": ShardDataset(urls["drawn"], resample=True).map(draw, rng=True),
        "once": ShardDataset(urls["once"]).map(draw, rng=True),
    }
    samples = list(mix(datasets, until=120))
    assert len({sample["number"] for sample in samples}) == 120
    batches = list(ShardLoader(mix(datasets, until=120), 12))
    assert all(len(batch["number"]) == 12 for batch in batches), "all samples have the same fields"


def test_the_ledger_of_a_mixture(urls, tmp_path):
    ledger = Ledger(max_errors=1000)
    datasets = {name: ShardDataset(url, shuffle=True) for name, url in urls.items()}
    (tmp_path / "b-0000.tar").unlink()
    stream = mix(datasets, until="last", on_error=ledger)
    delivered = list(stream)
    assert len(delivered) + len(ledger.quarantined) == len(stream)
    assert {entry.shard for entry in ledger.quarantined} == {str(tmp_path / "b-0000.tar")}
    ledger.check()


def test_a_mixture_that_loses_a_sample_is_found(urls, monkeypatch):
    stream = mixed(urls)
    kind = type(stream.source.shards)
    read_all = kind.read_all
    monkeypatch.setattr(kind, "read_all", lambda *places: islice(read_all(*places), 5))
    with pytest.raises(AuditError, match=r"[abc]-0000\.tar"):
        list(stream)


def test_what_cannot_be_mixed(urls, make_shards):
    dataset = ShardDataset(urls["a"])
    with pytest.raises(ValueError, match="nothing to mix"):
        mix({})
    with pytest.raises(TypeError, match="plain: tail= requires that all datasets are indexed"):
        mix({"a": dataset, "plain": ShardDataset(make_shards(1, name="plain"))}, tail="drop")
    with pytest.raises(TypeError, match="a: shuffle holds or counts"):
        mix({"a": dataset.shuffle(3)})
    for weights in ({"b": 1}, {"a": 1, "b": 1}, {"a": -1}, {"a": 0}, {"a": float("nan")}, {"a": "x"}):
        with pytest.raises(ValueError, match="weights"):
            mix({"a": dataset}, weights=weights)
    with pytest.raises(ValueError, match="no ratios of whole numbers"):
        mix({"a": dataset, "b": dataset}, weights={"a": 1, "b": 1.2345678901})
    for until in (-1, "never", 1.5, True):
        with pytest.raises(ValueError, match="until="):
            mix({"a": dataset}, until=until)


def test_weights_of_nothing_and_datasets_of_nothing(urls, make_uneven):
    assert {name for name, _ in pairs(mixed(urls, weights={"a": 1, "b": 0, "c": 3}))} == {"a", "c"}
    empty = make_uneven([0, 0], "empty")
    with pytest.raises(ValueError, match="no samples"):
        mixed({**urls, "empty": empty}, weights={**WEIGHTS, "empty": 1}, until=100)
    assert pairs(mixed({**urls, "empty": empty}, weights={**WEIGHTS, "empty": 1}, until="first")) == []
    assert list(mixed(urls, until=0)) == []
    datasets = {"a": ShardDataset(urls["a"]), "none": ShardDataset(empty)}
    with pytest.raises(ValueError, match="no samples"):
        mix(datasets, weights={"a": 1, "none": {0: 0, 50: 1}}, until=100)
    assert len(mix(datasets, weights={"a": 1, "none": {0: 0, 30: 1}}, until="first")) == 30


def quota_of(name: str, n: int) -> float:
    """The sum of a weight of CHANGING over the sum of all, which is 1.5."""
    return {"a": min(n, 37), "b": n / 2, "c": max(0, n - 37)}[name] / 1.5


def assert_quotas(order: list[tuple[str, int]]) -> None:
    """The shares are exact where a begins to be left out, and at the end."""
    for n in (min(37, len(order)), len(order)):
        counts = Counter(name for name, _ in order[:n])
        assert all(abs(counts[name] - quota_of(name, n)) < 1 for name in CHANGING), (n, counts)
    assert "c" not in [name for name, _ in order[:37]]
    assert "a" not in [name for name, _ in order[37:]]


@pytest.mark.parametrize("until", ["first", "last", 90])
def test_weights_change_in_steps(urls, until):
    stream = mixed(urls, until=until, weights=CHANGING)
    order = pairs(stream)
    assert len(order) == len(stream)
    assert_quotas(order)
    counts = Counter(order)
    seen = {name: len({value for other, value in counts if other == name}) for name in SIZES}
    missing = {name: size - seen[name] for name, size in SIZES.items()}
    again = {name: max(0, sum(n for (other, _), n in counts.items() if other == name) - seen[name]) for name in SIZES}
    if until == "first":
        assert not any(again.values())
        assert min(missing.values()) <= 1
    elif until == "last":
        assert not missing["b"] + missing["c"], "and a no longer comes"
        assert min(again["b"], again["c"]) <= 1
    else:
        assert len(order) == 90
    stream.ledger.check()


def test_steps_are_the_only_schedule(urls):
    datasets = {name: ShardDataset(url, shuffle=True) for name, url in urls.items()}
    assert pairs(mix(datasets, weights=CHANGING, schedule="steps")) == pairs(mix(datasets, weights=CHANGING))
    for schedule in ("linear", "cosine"):
        words = f"schedule= must be \"steps\", not '{schedule}'; stepwise\\(\\) makes steps of a line"
        with pytest.raises(ValueError, match=words):
            mix(datasets, weights=CHANGING, schedule=schedule)
    with pytest.raises(ValueError, match="weights"):
        mixed(urls, weights={**CHANGING, "b": {5: 1}})


def test_a_line_in_steps(urls):
    weights = {"a": stepwise({0: 1, 40: 0}, every=8), "b": 0.5, "c": stepwise({0: 0, 40: 1}, every=8)}
    order = [name for name, _ in pairs(mixed(urls, until=60, weights=weights))]
    for n in range(0, 41, 8):
        assert abs(order[:n].count("c") - n * n / 80 / 1.5) < 5, n
    assert "a" not in order[41:]


def test_an_epoch_begins_without_a_walk_to_what_it_drops(urls, monkeypatch):
    monkeypatch.setattr(choosing, "WINDOW", 16)
    made, make = [], Choices._make
    monkeypatch.setattr(Choices, "_make", lambda self, *where: made.append(where[1]) or make(self, *where))
    dataset = mixed(urls, 0, 4, until=5003, tail="drop", weights=CHANGING)
    next(iter(ShardLoader(dataset, 2, drop_last=True)))
    assert 0 <= max(made) < 100


def test_a_mixture_holds_the_plans_of_two_passes_of_each_dataset(urls):
    """However often the dataset begins again within an epoch."""
    plan = mixed(urls, until=1000, kind=Stream.from_shards).source.plan(0, 1)
    assert plan.passes(np.arange(len(plan)))[0].max() > 8
    for begin in range(0, len(plan), 40):
        plan[np.arange(begin, min(begin + 40, len(plan)))]
        held = Counter(dataset for dataset, _ in plan._plans)
        assert max(held.values()) <= 2


def test_remote_datasets_of_a_mixture_share_the_memory(make_shards, tmp_path, monkeypatch):
    make_shards(2, 20, "a", index=True)
    make_shards(2, 20, "b", index=True)
    monkeypatch.setattr(remote, "available_memory", lambda: 1 << 30)
    budgets, begin = [], fetch.BlockFetcher.__init__
    monkeypatch.setattr(
        fetch.BlockFetcher,
        "__init__",
        lambda self, *args, **kw: budgets.append(kw["budget"]) or begin(self, *args, **kw),
    )
    with serving(tmp_path) as site:
        parts = {name: ShardDataset(f"{site.url}/{name}-{{0000..0001}}.tar", shuffle=True) for name in "ab"}
        assert sorted(pairs(mix(parts))) == [(name, number) for name in "ab" for number in range(40)]
        assert budgets == [(1 << 30) // remote.PART // 2] * 2
        budgets.clear()
        assert len(list(ShardLoader(mix(parts), 8, num_workers=0))) == 10
        assert budgets == [(1 << 30) // remote.PART // 2] * 2


@pytest.mark.parametrize("ranks", [2, 8])
def test_ranks_of_a_packed_mixture_see_each_dataset(make_shards, ranks):
    datasets = {name: ShardDataset(make_shards(3, 1000, name, index=True), shuffle=True) for name in "ab"}
    lengths = np.random.default_rng(0).integers(1, 30, 6000)
    plan = mix(datasets).source
    packed = pack(lengths, 64).plan(plan.counts, lambda state: plan.plan(0, 1, state), ranks=ranks, tail="drop")
    for rank in range(ranks):
        shards, _ = packed[np.arange(rank, len(packed), ranks)]
        assert abs((shards < 3).sum() - len(shards) / 2) < 5 * len(shards) ** 0.5 / 2


# Streamed mixtures


@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (2, 0), (1, 2), pytest.param(2, 2, marks=pytest.mark.soak)])
def test_workers_and_ranks_share_the_shards_of_each_dataset(unindexed, ranks, workers):
    """In every worker the shares hold, and over all workers each sample comes once where no dataset begins again."""
    weights = SIZES
    loaded, alone = Counter(), Counter()
    for rank in range(ranks):
        loader = ShardLoader(mixed(unindexed, rank, ranks, weights=weights), 1, num_workers=workers, collate_fn=list)
        batches = [pairs(batch)[0] for batch in loader]
        loaded.update(batches)
        dataset = mixed(unindexed, rank, ranks, weights=weights)
        samples = list(DataLoader(dataset, batch_size=None, num_workers=workers, collate_fn=None))
        assert sorted(pairs(samples)) == sorted(batches)
        for worker in range(max(1, workers)):
            whole = mixed(unindexed, rank, ranks, weights=weights)
            own = pairs(whole.iterate(0, World(rank, ranks, worker, max(1, workers))))
            assert_shares([name for name, _ in own], weights)
            alone.update(own)
    assert loaded == alone
    assert max(loaded.values()) == 1
    if ranks * workers <= 1:
        assert len(loaded) == sum(SIZES.values())


def test_a_number_and_an_end_count_in_each_worker(unindexed):
    dataset = mixed(unindexed, until=30)
    names = [sample["__dataset__"] for sample in DataLoader(dataset, batch_size=None, num_workers=3, collate_fn=None)]
    assert len(names) == 90
    last = Counter(pairs(DataLoader(mixed(unindexed, until="last"), batch_size=None, num_workers=2, collate_fn=None)))
    assert len(last) == sum(SIZES.values())


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
    assert list(stream) != samples, "the next epoch has another order"
    assert len(mix(streams, until=8).map(str).batched(3).collect()) == 3


def test_plain_and_indexed_and_streamed_shards_mix(unindexed, make_shards):
    datasets = {
        "plain": Stream([{"cls": -1}, {"cls": -2}]),
        "indexed": ShardDataset(make_shards(2, 6, "indexed", index=True), shuffle=True),
        "streamed": ShardDataset(unindexed["b"], fields="cls").map(dict),
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


def test_a_mixture_of_mixtures(unindexed, make_shards):
    inner = mixed({"a": make_shards(2, 8, "ia", index=True), "b": make_shards(2, 8, "ib", index=True)}, weights=None)
    outer = mix({"inner": inner, "c": ShardDataset(unindexed["c"])}, weights={"inner": 2, "c": 1})
    order = pairs(outer)
    assert_shares([name for name, _ in order], {"inner": 2, "c": 1})
    assert Counter(value for name, value in order if name == "inner") == Counter([*range(16)] * 2)
    nested = mix({"mixed": mixed(unindexed), "plain": Stream([{"cls": 1}])}, until=40)
    assert Counter(name for name, _ in pairs(nested)) == {"mixed": 20, "plain": 20}
    assert nested.ledger.samples == 40
    assert mix({"only": inner}, until="first").collect()


@pytest.mark.parametrize("until", ["first", "last", 100])
def test_an_empty_dataset_is_an_error_and_no_endless_loop(unindexed, until, caplog):
    full = ShardDataset(unindexed["a"])
    for empty in (
        Stream([]),
        Stream(lambda: iter(())),
        Stream(range(10)).filter(lambda _: False),
        ShardDataset(unindexed["b"]).take(0),
        ShardDataset(unindexed["b"]).filter(lambda _: False),
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


def test_a_worker_without_a_shard_of_some_dataset_is_an_error(unindexed):
    message = "b: 4 shards for 6 workers of all ranks"
    for rank in range(2):
        with pytest.raises(WorldError, match=message):
            next(mixed(unindexed, rank, 2).iterate(0, World(rank, 2, 0, 3)))
    weights = {"a": 1, "b": 0, "c": 1}
    assert list(mixed(unindexed, weights=weights).iterate(0, World(0, 1, 4, 5)))
    weights["b"] = {0: 0, 10**6: 1}
    with pytest.raises(WorldError, match="b: 4 shards for 5 workers"):
        next(mixed(unindexed, weights=weights).iterate(0, World(0, 1, 4, 5)))


@pytest.mark.soak
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("until", ["first", "last", 40])
def test_a_loader_resumes_on_the_same_workers(unindexed, until, workers):
    expected = [
        pairs(batch) for batch in ShardLoader(mixed(unindexed, until=until), 3, num_workers=workers, collate_fn=list)
    ]
    steps = range(0, len(expected), 5 if workers else 1)
    for taken in steps if SOAK > 1 else steps[1:2] if workers else steps[1::2]:
        loader = ShardLoader(mixed(unindexed, until=until), 3, num_workers=workers, collate_fn=list)
        iterator = iter(loader)
        begun = [pairs(batch) for batch in islice(iterator, taken)]
        state = json.loads(json.dumps(loader.state_dict()))
        del iterator
        resumed = ShardLoader(mixed(unindexed, until=until), 3, num_workers=workers, collate_fn=list)
        resumed.load_state_dict(state)
        assert begun + [pairs(batch) for batch in resumed] == expected
    with pytest.raises(StateError, match="replayed"):
        ShardLoader(mixed(unindexed, until=until), 3, num_workers=workers + 1).load_state_dict(state)


@pytest.mark.soak
@pytest.mark.parametrize("weights", [WEIGHTS, {"a": {0: 1, 30: 0}, "b": 1, "c": {0: 0, 30: 1}}])
def test_a_stream_resumes_at_every_step(unindexed, weights):
    def build():
        datasets = {name: Stream.from_shards(url, shuffle=True) for name, url in unindexed.items()}
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


def test_a_state_of_another_streamed_mixture_is_refused(unindexed, make_shards):
    state = ShardLoader(mixed(unindexed), 4).state_dict()
    indexed = {name: make_shards(2, 2, f"i{name}", index=True) for name in unindexed}
    for other in (
        mixed(unindexed, until="last"),
        mixed(unindexed, weights={"a": 0.5, "b": 0.3, "c": 0.2}),
        mixed(unindexed, weights={**WEIGHTS, "a": {0: 0.5, 10: 1}}),
        mix({name: ShardDataset(url) for name, url in unindexed.items()}, weights=WEIGHTS, seed=5),
        mixed(indexed),
        ShardDataset(unindexed["a"]),
    ):
        with pytest.raises(StateError):
            ShardLoader(other, 4).load_state_dict(state)


def fail_on_sevens(sample):
    if int(sample["cls"]) % 7 == 0:
        raise ValueError("a multiple of seven")
    return sample


@pytest.mark.parametrize("workers", [0, 2])
def test_the_ledger_of_the_mixture_counts_for_all(unindexed, tmp_path, workers):
    ledger, others, unused = Ledger(max_errors=1000), Ledger(max_errors=1000), Ledger()
    (tmp_path / "uc-0003.tar").write_bytes(b"no tar" * 100)
    datasets = {
        "a": ShardDataset(unindexed["a"], on_error=unused).map(fail_on_sevens),
        "b": ShardDataset(unindexed["b"]).filter(even),
        "c": ShardDataset(unindexed["c"]).map(fail_on_sevens, on_error=others),
    }
    stream = mix(datasets, until="last", on_error=ledger).filter(even)
    samples = list(DataLoader(stream, batch_size=None, num_workers=workers, collate_fn=None))
    assert ledger.samples == len(samples) > 0
    assert ledger.failed > 0
    assert set(ledger.filtered) == {"filter(even)"}
    assert {entry.shard for entry in ledger.quarantined if entry.key is None} == {str(tmp_path / "uc-0003.tar")}
    assert len(others.quarantined) > 0
    assert unused._total() == Ledger()._total()
    assert stream.ledger is ledger
    ledger.check()
    total = ledger._total()
    assert total.samples == total.delivered + total.filtered.total() + total.failed + total.in_flight


def test_planned_samples_and_streamed_ones_are_counted_apart(unindexed, make_shards):
    datasets = {
        "planned": ShardDataset(make_shards(3, 6, "planned", index=True)),
        "streamed": ShardDataset(unindexed["b"]),
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
def test_leaving_the_loop_closes_what_is_open_and_counts(unindexed, taken):
    closed = []

    def forever():
        try:
            yield from ({"cls": i} for i in count())
        finally:
            closed.append(True)

    a, c = (Stream.from_shards(unindexed[name]) for name in "ac")
    datasets = {"a": a.shuffle(5), "b": Stream(forever), "c": c}
    stream = mix(datasets, until="last")
    iterator = iter(stream)
    assert len(list(islice(iterator, taken))) == taken
    iterator.close()
    assert len(closed) == (taken > 2)
    tally = stream.ledger._total()
    assert tally.delivered == taken
    assert tally.in_flight >= (5 if taken > 2 else 0)


@pytest.mark.parametrize("threads", [0, 2])
def test_arrays_of_a_streamed_mixture(unindexed, threads):
    for rank in range(2):
        stream = mixed(unindexed, rank, 2, until=40, kind=Stream.from_shards)
        expected = pairs(stream)
        loader = ArrayLoader(
            mixed(unindexed, rank, 2, until=40, kind=Stream.from_shards),
            6,
            fields={"cls": readers.integer()},
            threads=threads,
        )
        begun = [int(value) for batch in islice(loader, 2) for value in batch["cls"]]
        state = json.loads(json.dumps(loader.state_dict()))
        loader.load_state_dict(state)
        rest = [int(value) for batch in loader for value in batch["cls"]]
        assert begun + rest == [value for _, value in expected]


def test_a_streamed_mixture_is_pickled(unindexed):
    stream = mixed(unindexed, weights={"a": {0: 1, 50: 3}, "b": 1, "c": 1}, kind=Stream.from_shards)
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


def test_positions_of_a_schedule_are_of_all_ranks_and_workers(unindexed):
    weights = {"a": {0: 1, 20: 0}, "b": 0, "c": {0: 0, 20: 1}}
    begins = []
    for ranks in (1, 2, 4):
        names = [name for name, _ in pairs(mixed(unindexed, 0, ranks, weights=weights, until=20))]
        changes = [n for n, (before, after) in enumerate(pairwise(names), 1) if before != after]
        begins.append(changes)
    assert begins == [[], [10], [5]]
