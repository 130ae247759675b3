"""Selections: an epoch over them equals one over shards with only these samples, and reads no others."""

from __future__ import annotations

import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from range_server import serving

from tarshards import ArrayLoader, ShardWriter, Stream, TarWriter, World, bucket, mix, readers, write_samples
from tarshards.epoch.plan import EpochPlan
from tarshards.epoch.selection import SelectedPlan, Selection
from tarshards.errors import DecodeError, OpError, SampleError, StateError
from tarshards.index.access import SampleSequence
from tarshards.index.build import build_index
from tarshards.parallel.process_pool import ProcessPool
from tarshards.storage import traffic
from tarshards.verbs.grep import KeyFilter

SIZES = [7, 0, 12, 5]
KEYS = [f"{shard}-{number:02d}" for shard, size in enumerate(SIZES) for number in range(size)]


def wide(key: str) -> bool:
    return int(key[2:]) % 3 == 0


@pytest.fixture
def shards(tmp_path) -> str:
    for shard, size in enumerate(SIZES):
        path = str(tmp_path / f"s-{shard}.tar")
        with TarWriter(path) as writer:
            for number in range(size):
                key = f"{shard}-{number:02d}"
                writer.write(
                    {"__key__": key, "json": {"width": number, "wide": wide(key)}, "cls": number, "bin": b"x" * 99}
                )
        build_index(path).save(path)
    return f"{tmp_path}/s-{{0..{len(SIZES) - 1}}}.tar"


def keys_of(samples) -> list[str]:
    return [sample["__key__"] for sample in samples]


def is_wide(sample) -> bool:
    return json.loads(sample["json"])["wide"]


WIDE = [key for key in KEYS if wide(key)]


@pytest.mark.parametrize(
    "options",
    [
        {"where": 'json["wide"]'},
        {"where": 'json["wide"]', "fields": "json"},
        {"where": is_wide, "fields": ["json"]},
        {"keys": WIDE[::-1]},
        {"drop": [key for key in KEYS if not wide(key)] + ["other"]},
    ],
)
def test_the_samples_that_are_asked_for(shards, options):
    dataset = Stream.from_shards(shards).select(**options)
    assert keys_of(dataset) == WIDE
    assert sorted(next(iter(dataset))) == ["__key__", "__url__", "bin", "cls", "json"]
    shuffled = keys_of(Stream.from_shards(shards, shuffle=True, seed=3, block=1).select(**options))
    assert sorted(shuffled) == WIDE != shuffled


def test_keys_in_a_file(shards, tmp_path):
    path = tmp_path / "keys"
    path.write_text("\n".join(WIDE) + "\n")
    dataset = Stream.from_shards(shards)
    assert keys_of(dataset.select(keys=path)) == keys_of(dataset.select(keys=str(path))) == WIDE
    assert keys_of(dataset.select(drop=path)) == [key for key in KEYS if not wide(key)]


def test_keys_that_no_sample_has_are_named_as_targrep_names_them(shards):
    lacking = ["a\\b", "c\td", "e'f", "x1", "x2", "x3"]
    with pytest.raises(SampleError) as selected:
        Stream.from_shards(shards).select(keys=[*WIDE, *lacking])
    with pytest.raises(SampleError) as grepped:
        list(KeyFilter([*WIDE, *lacking]).read(shards))
    assert str(selected.value) == str(grepped.value)
    assert str(selected.value).endswith(rf"no sample has 6 of {len(WIDE) + 6} keys: a\\b, c\td, e'f, x1, x2, ...")


def test_selections_can_be_selected_from(shards):
    dataset = Stream.from_shards(shards).select('json["wide"]').select("cls > 0", drop=["2-03"])
    assert keys_of(dataset) == [key for key in WIDE if int(key[2:]) > 0 and key != "2-03"]


def test_they_are_judged_once_and_alike_in_any_executor(shards):
    dataset = Stream.from_shards(shards)
    asked: list[str] = []

    def judge(sample) -> bool:
        asked.append(sample["__key__"])
        return is_wide(sample)

    with ThreadPoolExecutor(3) as threads, ProcessPool(2) as processes:
        chosen = dataset.select(judge, executor=threads)
        assert sorted(asked) == KEYS
        assert keys_of(chosen) == keys_of(chosen) == WIDE
        assert sorted(asked) == KEYS
        assert keys_of(dataset.select(is_wide, executor=processes)) == WIDE


def test_only_the_selected_are_read(shards, monkeypatch):
    read: list[tuple[int, int]] = []
    original = SampleSequence.read_all

    def noted(self, shards, samples):
        read.extend(zip(shards.tolist(), samples.tolist()))
        return original(self, shards, samples)

    dataset = Stream.from_shards(shards).select(keys=WIDE)
    monkeypatch.setattr(SampleSequence, "read_all", noted)
    assert keys_of(dataset) == WIDE
    assert read == [(int(key[0]), int(key[2:])) for key in WIDE]


def test_the_ledger_adds_up(shards):
    dataset = Stream.from_shards(shards, shuffle=True).select(keys=WIDE)
    dataset.collect()
    assert f"epoch 0: {len(WIDE)} planned = {len(WIDE)} delivered\n" in str(dataset.ledger)


def test_faults_are_told_or_left_out(shards, tmp_path):
    write_samples(
        [{"__key__": "9-00", "json": b"{"}, {"__key__": "9-03", "json": b'{"wide": 1}'}], str(tmp_path / "t.tar")
    )
    build_index(str(tmp_path / "t.tar")).save(str(tmp_path / "t.tar"))
    dataset = Stream.from_shards([shards, str(tmp_path / "t.tar")])
    with pytest.raises(DecodeError, match=r"t.tar: 9-00.json: Expecting"):
        dataset.select('json["wide"]')
    errors: list[Exception] = []
    assert keys_of(dataset.select('json["wide"]', on_error=errors.append)) == [*WIDE, "9-03"]
    assert [error.key for error in errors] == ["9-00"]
    with pytest.raises(OpError, match=r"s-0.tar: 0-00: the condition fails: KeyError: 'size'"):
        dataset.select(lambda sample: sample["size"])


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"keys": ["0-00", "a", "b"]}, SampleError, "no sample has 2 of 3 keys: a, b"),
        ({}, TypeError, "select takes a condition, keys= or drop="),
        ({"keys": [1]}, TypeError, "keys= is a list of keys, or the name of a file of them, not of 1"),
        ({"drop": [0]}, TypeError, "drop= is a list of keys, or the name of a file of them, not of 0"),
        ({"where": 7}, TypeError, "where="),
        ({"where": "import os"}, ValueError, "is not an expression"),
        ({"keys": [1.5], "where": "True"}, TypeError, "not of 1.5"),
    ],
)
def test_what_makes_no_selection(shards, options, error, words):
    with pytest.raises(error, match=words):
        Stream.from_shards(shards).select(**options)


def test_where_it_does_not_belong(shards):
    dataset = Stream.from_shards(shards)
    with pytest.raises(TypeError, match="select requires indexed shards; run `tarindex` first"):
        Stream.from_shards(shards, index=False).select("True")
    with pytest.raises(TypeError, match="select comes before the ops"):
        dataset.decode().select("True")
    with pytest.raises(TypeError, match="select from the datasets"):
        mix({"a": dataset, "b": dataset}).select("True")
    with pytest.raises(SampleError, match="no sample is selected"):
        dataset.select("False").collect()


def test_a_state_is_of_one_selection(shards):
    dataset = Stream.from_shards(shards, shuffle=True)
    loader = ArrayLoader(dataset.select(keys=WIDE), 2, fields={"cls": readers.integer()})
    batches = [list(batch["__key__"]) for batch in loader]
    begun = iter(ArrayLoader(dataset.select(keys=WIDE), 2, fields={"cls": readers.integer()}))
    loader = ArrayLoader(dataset.select(keys=WIDE), 2, fields={"cls": readers.integer()})
    begun = iter(loader)
    assert list(next(begun)["__key__"]) == batches[0]
    state = loader.state_dict()
    begun.close()
    again = ArrayLoader(dataset.select(keys=WIDE), 2, fields={"cls": readers.integer()})
    again.load_state_dict(state)
    assert [list(batch["__key__"]) for batch in again] == batches[1:]
    for other in (dataset, dataset.select(keys=WIDE[1:]), dataset.select(keys=[key for key in KEYS if not wide(key)])):
        with pytest.raises(StateError, match="others were selected"):
            ArrayLoader(other, 2, fields={"cls": readers.integer()}).load_state_dict(state)


def test_selections_are_mixed_joined_and_resampled(shards, tmp_path):
    dataset = Stream.from_shards(shards).select(keys=WIDE)
    mixed = mix({"wide": dataset, "other": Stream.from_shards(shards).select(drop=WIDE)}, until="last")
    counted = Counter(keys_of(mixed))
    assert counted.keys() == set(KEYS)
    for shard, size in enumerate(SIZES):
        path = str(tmp_path / f"j-{shard}.tar")
        write_samples(({"__key__": f"{shard}-{number:02d}", "txt": str(number)} for number in range(size)), path)
        build_index(path).save(path)
    joined = dataset.join(f"{tmp_path}/j-{{0..{len(SIZES) - 1}}}.tar")
    assert [(sample["__key__"], int(sample["txt"])) for sample in joined] == [(key, int(key[2:])) for key in WIDE]
    with pytest.raises(TypeError, match="select comes before join"):
        joined.select("True")
    drawn = Stream.from_shards(shards, resample=True).select(keys=WIDE)
    assert set(keys_of(drawn)) <= set(WIDE)
    assert len(keys_of(drawn)) == len(WIDE)


@st.composite
def selections(draw):
    counts = draw(st.lists(st.integers(0, 40), min_size=1, max_size=8))
    total = sum(counts)
    numbers = draw(st.lists(st.integers(0, max(0, total - 1)), max_size=60)) if total else []
    return counts, Selection(counts, numbers), sorted(set(numbers))


@settings(deadline=None, max_examples=150)
@given(selections(), st.integers(1, 5), st.integers(1, 7), st.booleans(), st.data())
def test_a_plan_over_a_selection(chosen, ranks, block, shuffle, data):
    counts, selection, numbers = chosen
    whole = [(shard, number) for shard, count in enumerate(counts) for number in range(count)]
    expected = [whole[number] for number in numbers]
    options = {"seed": 1, "epoch": 2, "block": block, "pool": 8, "shuffle": shuffle}
    plan = SelectedPlan(EpochPlan(selection.counts, **options, ranks=ranks), selection)
    pairs = list(zip(*(part.tolist() for part in plan[np.arange(len(plan))])))
    assert sorted(pairs) == expected
    if not shuffle:
        assert pairs == expected
    else:  # as of shards that have just these samples
        small = EpochPlan(selection.counts, **options, ranks=ranks)
        assert pairs == [(shard, int(selection.locate(shard, place))) for shard, place in small]
    cut = data.draw(st.integers(0, len(plan) // ranks)) * ranks
    rest = plan.resume(cut, data.draw(st.integers(1, 5)))
    assert list(zip(*(part.tolist() for part in rest[np.arange(len(rest))]))) == pairs[cut:]
    for position in range(min(3, len(plan))):
        assert {next(plan.substitutes(position)) for _ in range(2)} <= set(expected)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("workers", [1, 2])
def test_ranks_and_workers_divide_it(shards, ranks, workers):
    parts = [
        keys_of(
            Stream.from_shards(shards, shuffle=True, tail="pad", world=World(rank, ranks, worker, workers)).select(
                keys=WIDE
            )
        )
        for rank in range(ranks)
        for worker in range(workers)
    ]
    assert set().union(*parts) == set(WIDE)
    steps = {sum(len(parts[rank * workers + worker]) for worker in range(workers)) for rank in range(ranks)}
    assert steps == {-(-len(WIDE) // ranks)}


@pytest.mark.parametrize("numbers", [[3], [-1], [[0]], [0.5]])
def test_numbers_that_select_nothing(numbers):
    with pytest.raises(ValueError, match="sample"):
        Selection([2, 1], numbers)


def test_of_remote_shards_only_the_selected_are_fetched(tmp_path):
    size, run = 2000, 50
    with ShardWriter(f"{tmp_path}/r-%d.tar", max_samples=500, index=True) as writer:
        for number in range(2000):
            writer.write({"__key__": f"{number:04d}", "bin": bytes(size)})
    chosen = [f"{number:04d}" for number in range(2000) if number // run % 10 == 3]
    with serving(tmp_path) as site:
        dataset = Stream.from_shards(f"{site.url}/r-{{0..3}}.tar", index=True).select(keys=chosen)
        before = traffic.so_far()
        assert keys_of(dataset) == chosen
        fetched = traffic.so_far() - before
    assert fetched.requests <= 2 * len(chosen) // run
    assert fetched.bytes <= 1.15 * len(chosen) * (512 + 2048)


@pytest.mark.parametrize("chosen", [WIDE, KEYS[::2]])
def test_selected_samples_are_packed(shards, chosen):
    lengths = [2 + number % 5 for number in range(len(KEYS))]  # of all samples
    length_of = dict(zip(KEYS, lengths))

    def loader() -> ArrayLoader:
        dataset = Stream.from_shards(shards, shuffle=True).select(keys=chosen)
        return ArrayLoader(dataset, 1, fields={"cls": readers.integer()}, packing=packing)

    packing = bucket(lengths, budget=9)
    batches = [list(batch["__key__"]) for batch in loader()]
    assert sorted(key for batch in batches for key in batch) == sorted(chosen)
    assert all(len(batch) * max(length_of[key] for key in batch) <= 9 for batch in batches)
    begun = loader()
    iterator = iter(begun)
    next(iterator)
    resumed = loader()
    resumed.load_state_dict(begun.state_dict())
    assert [list(batch["__key__"]) for batch in resumed] == batches[1:]
    iterator.close()
