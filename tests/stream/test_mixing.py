"""Several datasets as one: shares to within one sample at every position, one order, one state."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice

import numpy as np
import pytest
from range_server import serving
from soak import SOAK
from with_torch import DataLoader, ShardDataset, ShardLoader

from tarshards import ArrayLoader, Ledger, Stream, World, pack, readers
from tarshards.epoch import choices as choosing
from tarshards.epoch.choices import Choices
from tarshards.epoch.proportions import stepwise
from tarshards.errors import AuditError, StateError
from tarshards.index import fetch
from tarshards.storage import remote
from tarshards.stream.mixed import PASS, mix
from tarshards.stream.op import BoundOp, op

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]

SIZES = {"a": [13, 7, 20], "b": [9, 1, 6], "c": [30]}
WEIGHTS = {"a": 0.5, "b": 0.2, "c": 0.3}


@pytest.fixture
def urls(make_uneven) -> dict[str, str]:
    return {name: make_uneven(sizes, name) for name, sizes in SIZES.items()}


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


def global_order(parts: list[list]) -> list:
    """Return the sequence from the parts of the ranks: rank r has every len(parts)-th sample."""
    return [part[i] for i in range(max(map(len, parts))) for part in parts if i < len(part)]


@pytest.mark.parametrize("kind", [Stream.from_shards, ShardDataset])
@pytest.mark.parametrize("until", ["first", "last", 200])
def test_the_shares_of_an_epoch(urls, until, kind):
    stream = mixed(urls, until=until, kind=kind)
    order = pairs(stream)
    assert len(order) == len(stream)
    assert_whole(order)
    counts = Counter(order)
    whole = {name: sum(sizes) for name, sizes in SIZES.items()}
    seen = {name: len({value for other, value in counts if other == name}) for name in SIZES}
    if until == "first":
        assert max(counts.values()) == 1
        assert any(seen[name] == whole[name] for name in SIZES)
    elif until == "last":
        assert seen == whole, "every sample of every dataset came"
        assert min(max(counts[name, i] for i in range(40)) for name in SIZES) == 1
    else:
        assert len(order) == 200
    for name in SIZES:
        times = [counts[name, i] for i in range(whole[name])]
        assert max(times) - min(times) <= 1, "no sample comes again before all have come"


@pytest.mark.parametrize(("ranks", "workers"), [(1, 2), (2, 0), (3, 2)])
def test_the_global_order_does_not_depend_on_ranks_and_workers(urls, ranks, workers):
    expected = pairs(mixed(urls, until=120))
    parts = [
        batch_pairs(ShardLoader(mixed(urls, rank, ranks, until=120), 7, num_workers=workers)) for rank in range(ranks)
    ]
    assert global_order(parts) == expected
    assert_whole(expected)


def test_seeds_and_epochs(urls):
    stream = mixed(urls)
    epochs = [pairs(stream) for _ in range(2)]
    again = mixed(urls)
    assert [pairs(again) for _ in range(2)] == epochs
    assert epochs[0] != epochs[1]
    assert [name for name, _ in epochs[0]] != [name for name, _ in epochs[1]]
    assert Counter(name for name, _ in epochs[0]) == Counter(name for name, _ in epochs[1])
    other = pairs(mixed(urls, seed=6))
    assert [name for name, _ in other] != [name for name, _ in epochs[0]]
    assert pairs(mix({name: Stream.from_shards(url) for name, url in urls.items()}))[0][1] == 0


def test_a_dataset_that_begins_again_has_another_order(urls):
    order = pairs(mixed(urls, until=300))
    passes = [value for name, value in order if name == "b"]
    assert sorted(passes[:16]) == sorted(passes[16:32]) == list(range(16))
    assert passes[:16] != passes[16:32]


@pytest.mark.parametrize("until", ["first", "last", 130])
def test_resume_anywhere_on_other_ranks(urls, until):
    expected = pairs(mixed(urls, until=until))
    delivered, state = [], None
    for ranks, workers, size in ((2, 0, 3), (3, 1, 2), (1, 2, 5), (5, 0, 1)):
        parts, states = [], []
        for rank in range(ranks):
            loader = ShardLoader(mixed(urls, rank, ranks, until=until), size, num_workers=workers)
            if state is not None:
                loader.load_state_dict(state)
            parts.append(batch_pairs(islice(loader, 2)))
            states.append(loader.state_dict())
        assert all(other == states[0] for other in states)
        delivered += global_order(parts)
        state = json.loads(json.dumps(states[0]))
        assert len(json.dumps(state)) < 2048
    loader = ShardLoader(mixed(urls, until=until), 8)
    loader.load_state_dict(state)
    assert delivered + batch_pairs(loader) == expected


@pytest.mark.parametrize("tail", ["pad", "drop", "exact"])
def test_tails(urls, tail):
    ranks, ledger, parts = 4, Ledger(), []
    for rank in range(ranks):
        dataset = mixed(urls, rank, ranks, until=50, tail=tail)
        parts.append(batch_pairs(ShardLoader(dataset, 5)))
        ledger.merge(dataset.ledger)
    expected = pairs(mixed(urls, until=50))
    order = global_order(parts)
    assert order == {"pad": expected + expected[:2], "drop": expected[:48], "exact": expected}[tail]
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


def tag(sample):
    return {**sample, "tag": "tagged"}


def even(sample):
    return int(sample["cls"]) % 2 == 0


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
    right = [make_uneven(SIZES[name], f"more-{name}") for name in ("a", "b")]
    left = {name: ShardDataset(urls[name], fields="cls") for name in ("a", "b")}
    stream = mix(left).join(right, fields="txt").to_tuple("cls", "txt")
    assert all(text == b"text " + cls for cls, text in stream)
    assert stream.ledger.members == 2 * stream.ledger.samples


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


CHANGING = {"a": {0: 1, 37: 0}, "b": 0.5, "c": {0: 0, 37: 1}}


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
    missing = {name: sum(sizes) - seen[name] for name, sizes in SIZES.items()}
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


@pytest.mark.parametrize(("ranks", "workers"), [(1, 2), (2, 0), (3, 2)])
def test_the_global_order_of_a_schedule_does_not_depend_on_ranks_and_workers(urls, ranks, workers):
    expected = pairs(mixed(urls, until=90, weights=CHANGING))
    parts, arrays = [], []
    for rank in range(ranks):
        dataset = mixed(urls, rank, ranks, until=90, weights=CHANGING)
        parts.append(batch_pairs(ShardLoader(dataset, 7, num_workers=workers)))
        dataset = mixed(urls, rank, ranks, until=90, weights=CHANGING, kind=Stream.from_shards)
        batches = ArrayLoader(dataset, 7, fields={"cls": readers.integer()}, threads=workers)
        arrays.append([int(value) for batch in batches for value in batch["cls"]])
    assert global_order(parts) == expected
    assert global_order(arrays) == [value for _, value in expected]


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


@pytest.mark.parametrize("workers", [0, 2])
def test_a_schedule_resumes_again_and_again_in_both_loaders(urls, workers):
    expected = pairs(mixed(urls, until=100, weights=CHANGING))
    delivered, state, taken = [], None, 0
    for ranks, size, loads_arrays in ((2, 3, False), (3, 2, True), (1, 5, False), (4, 1, True), (2, 4, False)):
        parts, states = [], []
        for rank in range(ranks):
            kind = Stream.from_shards if loads_arrays else ShardDataset
            dataset = mixed(urls, rank, ranks, until=100, weights=CHANGING, kind=kind)
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
        taken += 2 * ranks * size
        begin = 0 if taken < 37 else 37  # where a has no weight any more
        counts = Counter(name for name, _ in expected[:begin])
        assert (state["position"], state["counts"]) == (taken, [counts[name] for name in CHANGING])
    loader = ShardLoader(mixed(urls, until=100, weights=CHANGING), 8)
    loader.load_state_dict(state)
    delivered += [value for _, value in batch_pairs(loader)]
    assert delivered == [value for _, value in expected]


@pytest.mark.parametrize("tail", ["pad", "drop", "exact"])
def test_tails_of_a_schedule(urls, tail):
    ranks, ledger, parts = 4, Ledger(), []
    for rank in range(ranks):
        dataset = mixed(urls, rank, ranks, until=50, tail=tail, weights=CHANGING)
        parts.append(batch_pairs(ShardLoader(dataset, 5)))
        ledger.merge(dataset.ledger)
    expected = pairs(mixed(urls, until=50, weights=CHANGING))
    assert global_order(parts) == {"pad": expected + expected[:2], "drop": expected[:48], "exact": expected}[tail]
    ledger.check()


def test_an_epoch_begins_without_a_walk_to_what_it_drops(urls, monkeypatch):
    monkeypatch.setattr(choosing, "WINDOW", 16)
    made, make = [], Choices._make
    monkeypatch.setattr(Choices, "_make", lambda self, *where: made.append(where[1]) or make(self, *where))
    dataset = mixed(urls, 0, 4, until=5003, tail="drop", weights=CHANGING)
    next(iter(ShardLoader(dataset, 2, drop_last=True)))
    assert 0 <= max(made) < 100


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


def test_a_dataset_with_weight_and_no_samples_is_refused(make_uneven, urls):
    datasets = {"a": ShardDataset(urls["a"]), "none": ShardDataset(make_uneven([0], "none"))}
    with pytest.raises(ValueError, match="no samples"):
        mix(datasets, weights={"a": 1, "none": {0: 0, 50: 1}}, until=100)
    assert len(mix(datasets, weights={"a": 1, "none": {0: 0, 30: 1}}, until="first")) == 30


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


def test_the_state_of_a_mixture_knows_how_datasets_are_drawn(urls):
    def loader(**options):
        return ShardLoader(mix({"a": ShardDataset(urls["a"], **options), "b": ShardDataset(urls["b"])}), 4)

    states = [loader(resample=resample).state_dict() for resample in (False, True, [1, 2, 3])]
    assert len({state["digest"] for state in states}) == 3


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
