"""Several datasets as one: shares to within one sample at every moment, one order, one state."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice

import pytest
from with_torch import DataLoader, ShardDataset, ShardLoader

from tarshards import Ledger, Stream, World
from tarshards.errors import AuditError, StateError
from tarshards.stream.mix import mix

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]

SIZES = {"a": [13, 7, 20], "b": [9, 1, 6], "c": [30]}
WEIGHTS = {"a": 0.5, "b": 0.2, "c": 0.3}


@pytest.fixture
def urls(make_uneven) -> dict[str, str]:
    return {name: make_uneven(sizes, name) for name, sizes in SIZES.items()}


def mixed(urls, rank=0, ranks=1, weights=WEIGHTS, seed=5, until="first", tail=None, kind=ShardDataset, **options):
    datasets = {name: kind(url, shuffle=True, world=World(rank, ranks), **options) for name, url in urls.items()}
    return mix(datasets, weights=weights, seed=seed, until=until, tail=tail)


def pairs(samples) -> list[tuple[str, int]]:
    return [(sample["__dataset__"], int(sample["cls"])) for sample in samples]


def batch_pairs(batches) -> list[tuple[str, int]]:
    return [(name, int(value)) for batch in batches if batch for name, value in zip(batch["__dataset__"], batch["cls"])]


def global_order(parts: list[list]) -> list:
    """The sequence of which rank r has every len(parts)-th sample."""
    return [part[i] for i in range(max(map(len, parts))) for part in parts if i < len(part)]


def assert_shares(order: list[tuple[str, int]], weights: dict[str, float]) -> None:
    """At every prefix each dataset has had its share to within one."""
    counts, total = Counter(), sum(weights.values())
    for step, (name, _) in enumerate(order, 1):
        counts[name] += 1
        for other, weight in weights.items():
            assert abs(counts[other] - step * weight / total) < 1, (step, counts)


@pytest.mark.parametrize("kind", [Stream.from_shards, ShardDataset])
@pytest.mark.parametrize("until", ["first", "last", 200])
def test_shares_hold_at_every_prefix(urls, until, kind):
    stream = mixed(urls, until=until, kind=kind)
    order = pairs(stream)
    assert len(order) == len(stream)
    assert_shares(order, WEIGHTS)
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
    assert_shares(expected, WEIGHTS)


def test_seeds_and_epochs(urls):
    stream = mixed(urls)
    epochs = [pairs(stream) for _ in range(2)]
    again = mixed(urls)
    assert [pairs(again) for _ in range(2)] == epochs
    assert epochs[0] != epochs[1]
    assert [name for name, _ in epochs[0]] == [name for name, _ in epochs[1]]
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
    with pytest.raises(TypeError, match="plain: mixing requires indexed shards"):
        mix({"a": dataset, "plain": ShardDataset(make_shards(1, name="plain"))})
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
