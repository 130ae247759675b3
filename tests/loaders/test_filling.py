"""Full batches despite filters and faults: equal on all ranks, the same for any workers, with a closing ledger."""

from __future__ import annotations

import gc
from collections import Counter
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from range_server import serving
from with_torch import ShardDataset, ShardLoader

from tarshards import ArrayLoader, EpochPlan, Ledger, Remote, ShardWriter, Stream, World, mix, readers
from tarshards.epoch.plan import AROUND
from tarshards.errors import SampleError

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]

SAMPLES, BAD = 30_000, 10
FIELDS = {"cls": readers.integer()}


def kept(sample) -> bool:
    return int(sample["cls"]) % BAD != 0


def never(sample) -> bool:
    return False


def number(sample) -> dict:
    return {"__key__": sample["__key__"], "cls": int(sample["cls"])}


def fail_on_threes(sample):
    if int(sample["cls"]) % 30 == 3:
        raise ValueError("a three")
    return sample


@pytest.fixture(scope="module")
def urls(tmp_path_factory) -> str:
    """Indexed shards of the classes 0 to 29,999; a class of sevens in 700 does not parse."""
    folder = tmp_path_factory.mktemp("filled")
    with ShardWriter(str(folder / "set-%02d.tar"), max_samples=5000, index=True) as writer:
        for i in range(SAMPLES):
            writer.write({"__key__": f"{i:05d}", "cls": i, "odd.cls": b"cat" if i % 700 == 7 else i})
    return str(folder / "set-{00..05}.tar")


MIXED = {"a": 20, "b": 30, "c": 300}  # the samples of the datasets of a mixture
SHARES = {"a": 1, "b": 1, "c": 3}


@pytest.fixture(scope="module")
def mixed_urls(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("mixed")
    for name, size in MIXED.items():
        with ShardWriter(f"{folder}/{name}-%d.tar", max_samples=10, index=True) as writer:
            for i in range(size):
                writer.write({"__key__": f"{name}{i:03d}", "cls": i, "odd.cls": b"cat" if i % BAD == 0 else i})
    return {name: f"{folder}/{name}-*.tar" for name in MIXED}


def loader(urls, *, workers=0, size=32, rank=0, ranks=1, **options):
    options = {"shuffle": True, "seed": 1, "on_error": Ledger(max_errors=100_000)} | options
    dataset = ShardDataset(urls, world=World(rank, ranks), **options).map(fail_on_threes).filter(kept).map(number)
    return ShardLoader(dataset, size, num_workers=workers, fill=True)


def keys(batches) -> list[list[str]]:
    return [batch["__key__"] for batch in batches]


def close(ledger: Ledger) -> None:
    """Check that the sum closes: each planned sample is in one class, and repeats count separately."""
    ledger.check()
    tally = ledger._total()
    classes = tally.delivered + tally.filtered.total() + tally.failed + tally.quarantined_samples + tally.dropped
    assert classes == tally.planned + tally.repeated
    assert tally.delivered == tally.planned - tally.dropped, "every position of the plan was filled"


def test_every_batch_is_full_on_every_rank(urls):
    loaders = [loader(urls, rank=rank, ranks=4, size=64, tail="drop") for rank in range(4)]
    epochs = [keys(each) for each in loaders]
    assert [[len(batch) for batch in epoch] for epoch in epochs] == [[64] * 117 + [12]] * 4
    for epoch, each in zip(epochs, loaders):
        assert all(int(key) % BAD != 0 and int(key) % 30 != 3 for batch in epoch for key in batch)
        assert all(len(set(batch)) == len(batch) for batch in epoch), "never one that is already in the batch"
        close(each.ledger)
    delivered = Counter(key for epoch in epochs for batch in epoch for key in batch)
    good = {f"{i:05d}" for i in range(SAMPLES) if i % BAD and i % 30 != 3}
    assert set(delivered) == good, "a sample that passes comes at its own position, whatever is repeated"
    assert max(delivered.values()) <= 6


def test_filled_batches_do_not_depend_on_workers_or_a_resume(urls):
    expected = keys(islice(loader(urls), 60))
    assert keys(islice(loader(urls, workers=3), 60)) == expected
    resumed, first = loader(urls, workers=2), loader(urls)
    iterator = iter(first)
    assert keys(islice(iterator, 17)) == expected[:17]
    resumed.load_state_dict(first.state_dict())
    assert keys(islice(resumed, 43)) == expected[17:]


def test_filled_batches_are_the_same_on_other_numbers_of_ranks(urls):
    alone = keys(islice(loader(urls, size=96), 30))
    parts = [keys(islice(loader(urls, size=32, rank=rank, ranks=3), 30)) for rank in range(3)]
    for whole, *batches in zip(alone, *parts):
        assert whole == [key for group in zip(*batches) for key in group]


def test_a_batch_alone_is_the_one_that_the_loader_delivers(urls):
    each = loader(urls)
    batches, maker = keys(islice(each, 8)), each.passes.maker
    assert [maker.make(0, None, 0, 1, g)["__key__"] for g in (0, 7, 3)] == [batches[g] for g in (0, 7, 3)]


def test_the_ledger_counts_what_was_tried(urls):
    each = loader(urls, workers=2)
    assert sum(map(len, keys(each))) == SAMPLES
    close(each.ledger)
    tally = each.ledger._total()
    assert tally.planned == SAMPLES
    assert tally.filtered["filter(kept)"] > SAMPLES // BAD, "some substitutes were left out as well"
    assert tally.failed > SAMPLES // 30
    assert tally.repeated == tally.filtered.total() + tally.failed


@pytest.mark.parametrize("workers", [0, 2])
def test_a_filter_that_leaves_nothing_is_named(urls, workers):
    each = ShardLoader(ShardDataset(urls, shuffle=True).filter(never), 4, num_workers=workers, fill=True)
    with pytest.raises(SampleError, match=r"filter\(never\) left out 32"):
        next(iter(each))
    gc.collect()


def test_small_datasets_are_filled_from_the_whole_epoch(make_shards):
    each = ShardLoader(ShardDataset(make_shards(2, 20, index=True), shuffle=True).filter(kept), 16, fill=True)
    assert [len(batch["__key__"]) for batch in each] == [16, 16, 8]
    with pytest.raises(SampleError, match="in the batch already"):
        list(ShardLoader(ShardDataset(make_shards(2, 20, index=True)).filter(kept), 40, fill=True))


@pytest.mark.parametrize("shuffle", [True, False])
@given(st.data())
def test_substitutes_are_of_the_lane_and_window(shuffle, data):
    total = data.draw(st.integers(1, 40_000))
    lanes = data.draw(st.sampled_from([1, 2, 6, 192]))
    pool = data.draw(st.sampled_from([1, 64, 1000, 2**18]))
    plan = EpochPlan([total], seed=3, epoch=1, lanes=lanes, pool=pool, shuffle=shuffle, block=16)
    position = data.draw(st.integers(0, total - 1))
    drawn = list(plan.substitutes(position))
    assert len(drawn) == 64
    assert len(set(drawn)) > min(total, 40) // 2
    lanes = lanes if shuffle else 1
    positions = {sample: number for number, (_, sample) in enumerate(plan)}
    if total // lanes >= AROUND:
        assert {positions[sample] % lanes for _, sample in drawn} == {position % lanes}
        width = max(AROUND, min(pool // lanes, -(-total // lanes))) if shuffle else AROUND
        assert all(abs(positions[sample] - position) // lanes < 2 * width for _, sample in drawn)
    taken = data.draw(st.integers(0, position))
    ranks = data.draw(st.sampled_from([1, 2, 5]))
    assert list(plan.resume(taken, ranks, "exact").resume(0, 1).substitutes(0)) == list(
        plan.substitutes([*positions].index(plan.resume(taken, ranks, "exact")[0][1]))
    )


def test_a_mixture_fills_from_the_dataset_of_the_position(make_shards):
    parts = {
        "a": ShardDataset(make_shards(2, 40, "a", index=True), shuffle=True).filter(kept),
        "b": ShardDataset(make_shards(3, 40, "b", index=True), shuffle=True),
    }
    mixed = mix(parts, weights={"a": 1, "b": 3})
    each = ShardLoader(mixed, 8, fill=True)
    plan = mixed.source.plan(0, 1)
    for number, batch in enumerate(each):
        shards, _ = plan[np.arange(8 * number, 8 * number + 8)]
        assert batch["__dataset__"] == ["a" if shard < 2 else "b" for shard in shards.tolist()]
    close(each.ledger)


def weight():
    return st.integers(0, 5) | st.dictionaries(st.integers(1, 200), st.integers(0, 5), max_size=3).map(
        lambda later: {0: 1, **later}
    )


@given(st.data())
def test_substitutes_in_a_mixture_are_of_its_epoch_and_of_the_dataset_of_the_position(mixed_urls, data):
    options = data.draw(
        st.sampled_from([{}, {"pool": 16, "block": 2}, {"shuffle": False}, {"resample": True, "shuffle": False}])
    )
    weights = {"a": data.draw(weight()), "b": data.draw(weight()), "c": 1}
    until = data.draw(st.sampled_from(["first", "last"]) | st.integers(1, 400))
    parts = {name: ShardDataset(mixed_urls[name], **{"shuffle": True, "seed": 2} | options) for name in MIXED}
    if "resample" not in options:
        parts["b"] = parts["b"].select(where=lambda sample: sample["cls"] != b"7")
    source = mix(parts, weights=weights, until=until).source
    plan = source.plan(1, data.draw(st.sampled_from([1, 3])))
    epoch = set(zip(*(array.tolist() for array in plan[np.arange(plan.total)])))
    if "resample" in options:
        epoch = {(shard, i) for shard, size in enumerate(source.counts.tolist()) for i in range(size)}
    begun = data.draw(st.integers(0, plan.total))
    rest = source.plan(1, 2, {"epoch": 1, "position": begun, "version": 4, **plan.choices.state(begun)})
    for position in data.draw(st.lists(st.integers(0, max(0, len(plan) - 1)), max_size=5)) if plan.total else ():
        drawn = list(plan.substitutes(position))
        assert set(drawn) <= epoch
        (shard,), _ = plan[np.array([position])]
        assert {np.searchsorted(source.shards.starts, other, "right") for other, _ in drawn} <= {
            np.searchsorted(source.shards.starts, shard, "right")
        }
        if begun <= position < plan.total:
            assert list(rest.substitutes(position - begun)) == drawn


@pytest.mark.parametrize("name", ["samples", "workers", "fields", "arrays", "threads", "ranks", "resumed"])
def test_a_filled_mixture_has_only_samples_of_its_epoch(mixed_urls, name):
    """Of c, 90 of 300 samples come in an epoch: the others come in the next."""
    planned = mix({each: ShardDataset(mixed_urls[each], shuffle=True) for each in MIXED}, until=150, weights=SHARES)
    plan = planned.source.plan(0, 1)
    epoch = {planned.source.shards.read(*map(int, each))["__key__"] for each in zip(*plan[np.arange(150)])}
    ledgers = [Ledger(max_errors=1000) for _ in range(3)]

    def mixed(rank: int = 0, ranks: int = 1) -> ShardDataset:
        parts = {each: ShardDataset(mixed_urls[each], shuffle=True, world=World(rank, ranks)) for each in MIXED}
        return mix(parts, until=150, weights=SHARES, on_error=ledgers[rank])

    def made(workers: int = 0, **world: int) -> ShardLoader:
        return ShardLoader(mixed(**world).filter(kept), 15, num_workers=workers, fill=True)

    array_fields = {"odd.cls": readers.integer()}
    if name == "ranks":
        batches = [batch for rank in range(3) for batch in made(rank=rank, ranks=3)]
    elif name == "resumed":
        first, rest = made(), made(2)
        batches = list(islice(first, 4))
        rest.load_state_dict(first.state_dict())
        batches += rest
    elif name in ("arrays", "threads"):
        batches = list(ArrayLoader(mixed(), 15, fields=array_fields, threads=2 * (name == "threads"), fill=True))
    elif name == "fields":
        batches = list(ShardLoader(mixed(), 15, fields=array_fields, fill=True))
    else:
        batches = list(made(2 * (name == "workers")))
    came = Counter(key for batch in batches for key in batch["__key__"])
    assert sum(came.values()) == 150
    assert max(came.values()) > 1, "some are substitutes"
    assert came.keys() <= epoch
    for ledger in ledgers if name == "ranks" else ():
        close(ledger)


@pytest.mark.parametrize("threads", [0, 2])
def test_an_array_loader_fills_what_does_not_decode(urls, threads):
    fields = {"odd.cls": readers.integer()}

    def epoch(count=None, **options):
        stream = Stream.from_shards(urls, shuffle=True, on_error=Ledger(max_errors=1000))
        made = ArrayLoader(stream, 50, fields=fields, threads=threads, fill=True, **options)
        return made, [(batch["__key__"][:], batch["odd.cls"].tolist()) for batch in islice(made, count)]

    made, batches = epoch()
    assert [len(names) for names, _ in batches] == [50] * 600
    for names, values in batches:
        assert list(map(int, names)) == values
        assert len(set(values)) == 50
    close(made.ledger)
    assert made.ledger._total().failed == made.ledger._total().repeated == len(made.ledger.quarantined)
    assert made.ledger.failed >= len(range(7, SAMPLES, 700))
    first, _ = epoch(20)
    resumed, _ = epoch(0)
    resumed.load_state_dict(first.state_dict())
    assert [(batch["__key__"][:], batch["odd.cls"].tolist()) for batch in islice(resumed, 30)] == batches[20:50]


def test_an_array_loader_and_a_shard_loader_fill_alike(urls):
    arrays = ArrayLoader(
        Stream.from_shards(urls, shuffle=True, on_error="skip"), 50, fields={"odd.cls": readers.integer()}, fill=True
    )
    dataset = ShardDataset(urls, shuffle=True, on_error="skip")
    samples = ShardLoader(dataset.map_fields({"odd.cls": int}), 50, fill=True)
    assert [list(batch["__key__"]) for batch in islice(arrays, 40)] == keys(islice(samples, 40))


def test_an_array_loader_without_indexes_refuses_to_fill(make_shards):
    with pytest.raises(TypeError, match="tarindex"):
        ArrayLoader(Stream.from_shards(make_shards(2)), 4, fields=FIELDS, fill=True)


def test_an_order_that_is_not_kept_cannot_be_filled(urls):
    dataset = ShardDataset(urls).async_map(number, ordered=False)
    with pytest.raises(TypeError, match="ordered=True"):
        ShardLoader(dataset, 4, fill=True)


def test_ops_that_read_ahead_tell_which_sample_failed(urls):
    dataset = ShardDataset(urls, shuffle=True, on_error=Ledger(max_errors=1000))
    ahead = dataset.async_map(fail_on_threes, workers=3).filter(kept).async_map(number, workers=2)
    plain = dataset.map(fail_on_threes).filter(kept).map(number)
    epochs = [keys(islice(ShardLoader(each, 32, fill=True), 20)) for each in (ahead, plain)]
    assert epochs[0] == epochs[1]


def test_remote_shards_are_filled_from_the_blocks_at_hand(urls):
    with serving(Path(urls).parent) as site:
        over_http = loader(f"{site.url}/set-{{00..05}}.tar", remote=Remote(connections=4), index=True)
        assert keys(islice(over_http, 40)) == keys(islice(loader(urls), 40))
        requests = len(site.requests)
    with serving(Path(urls).parent) as site:
        plain = ShardDataset(f"{site.url}/set-{{00..05}}.tar", shuffle=True, seed=1, remote=Remote(connections=4))
        assert len(list(islice(ShardLoader(plain, 32), 40))) == 40
        assert requests <= 1.2 * len(site.requests)
