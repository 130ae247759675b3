"""Packing by lengths that the index has, and samples that are split over rows."""

from __future__ import annotations

import re

import numpy as np
import pytest
from range_server import serving
from with_torch import ShardDataset, ShardLoader

from tarshards import ArrayLoader, ShardWriter, Stream, World, bucket, build_columns, mix, pack, readers
from tarshards.errors import SampleError, StateError
from tarshards.index.lengths import lengths_of

LENGTHS = np.clip(np.random.default_rng(0).lognormal(3, 1, 300), 1, 400).astype(int)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    with ShardWriter(folder / "t-%02d.tar", max_samples=80) as writer:
        for i, length in enumerate(LENGTHS):
            ids = 1000 * i + np.arange(length, dtype=np.int32)
            sample = {"__key__": f"{i:04d}", "npy": ids, "ids": ids.tobytes(), "txt": "x" * length}
            writer.write(sample | {"json": {"tokens": int(length)}})
    return folder


@pytest.fixture(scope="module")
def urls(folder):
    return str(folder / "t.shards.json")


def in_threads(urls, packing, **options):
    dataset = Stream.from_shards(urls, shuffle=True, seed=3, **options)
    return ArrayLoader(dataset, 1, fields={"ids": readers.ragged("<i4")}, packing=packing)


def in_processes(urls, packing, **options):
    dataset = ShardDataset(urls, shuffle=True, seed=3, fields="npy", **options).decode().rename_fields({"ids": "npy"})
    return ShardLoader(dataset, 1, packing=packing)


def by_fields(urls, packing, **options):
    dataset = ShardDataset(urls, shuffle=True, seed=3, **options)
    return ShardLoader(dataset, 1, fields={"ids": readers.ragged("<i4")}, packing=packing)


def npy_in_threads(urls, packing, **options):
    dataset = Stream.from_shards(urls, shuffle=True, seed=3, **options)
    return ArrayLoader(dataset, 1, fields={"ids:npy": readers.ragged()}, packing=packing)


def npy_by_fields(urls, packing, **options):
    dataset = ShardDataset(urls, shuffle=True, seed=3, **options)
    return ShardLoader(dataset, 1, fields={"ids:npy": readers.ragged("<i4")}, packing=packing)


of_all = pytest.mark.parametrize("make", [in_threads, in_processes, by_fields, npy_in_threads, npy_by_fields])


def rows_of(loader) -> list[list[int]]:
    return [np.asarray(row["ids"]).tolist() for row in loader]


@pytest.mark.parametrize(
    ("make", "field"),
    [
        *(
            (in_threads, "ids"),
            (by_fields, "ids"),
            (in_processes, "npy"),
            (npy_in_threads, "npy"),
            (npy_by_fields, "npy"),
        ),
        *((in_threads, "npy"), (npy_by_fields, "NPY")),
    ],
)
def test_lengths_come_from_the_index(urls, make, field):
    """Of ``npy`` the rows, and of raw arrays the elements that their reader makes, as if they were given."""
    assert rows_of(make(urls, pack(field, 512))) == rows_of(make(urls, pack(LENGTHS, 512)))
    state = make(urls, pack(field, 512)).state_dict()
    make(urls, pack(LENGTHS, 512)).load_state_dict(state)


def test_of_other_fields_bytes_are_the_lengths(urls):
    packing = pack("txt", 512)
    by_bytes = [row["__key__"] for row in in_threads(urls, packing)]
    assert by_bytes == [row["__key__"] for row in in_threads(urls, pack(LENGTHS, 512))]
    boxes = [row["__key__"] for row in in_threads(urls, bucket("txt", budget=800))]
    assert boxes == [row["__key__"] for row in in_threads(urls, bucket(LENGTHS, budget=800))]


@pytest.mark.parametrize("make", [npy_in_threads, npy_by_fields])
def test_buckets_of_npy(urls, make):
    batches = list(make(urls, bucket("npy", budget=800)))
    assert [batch["__key__"] for batch in batches] == [
        batch["__key__"] for batch in make(urls, bucket(LENGTHS, budget=800))
    ]
    for batch in batches:
        values, offsets = map(np.asarray, batch["ids"])
        assert np.diff(offsets).tolist() == LENGTHS[[*map(int, batch["__key__"])]].tolist()
        assert (values[offsets[:-1]] == [1000 * int(key) for key in batch["__key__"]]).all()


def test_headers_of_npy_may_differ_in_length_and_dtype(tmp_path):
    wide = np.dtype([(f"a column with a long name, number {i}", "f4") for i in range(9)])
    arrays = [np.zeros(3, "<i4"), np.zeros((5, 2), "<f8"), np.zeros(4, "<i2"), np.zeros(0, "u1")]
    arrays += [np.zeros(6, wide), np.zeros(7, wide)]
    with ShardWriter(tmp_path / "a-%02d.tar") as writer:
        for i, array in enumerate(arrays):
            writer.write({"__key__": f"{i}", "npy": array})
    dataset = ShardDataset(str(tmp_path / "a.shards.json"))
    assert lengths_of(dataset.source.shards, "npy").tolist() == [3, 5, 4, 0, 6, 7]


def test_lengths_of_remote_shards(folder):
    with serving(folder) as site:
        dataset = ShardDataset(f"{site.url}/t.shards.json")
        assert lengths_of(dataset.source.shards, "npy").tolist() == LENGTHS.tolist()
        assert lengths_of(dataset.source.shards, "txt").tolist() == LENGTHS.tolist()


def resumed(loader, state):
    loader.load_state_dict(state)
    yield from loader


@pytest.mark.interop
@of_all
@pytest.mark.parametrize("packing", [bucket("seconds", budget=6.5), pack("json.seconds", 6.5)])
def test_lengths_in_seconds_fill_batches_and_resume(folder, tmp_path, make, packing):
    pytest.importorskip("pyarrow")
    with ShardWriter(tmp_path / "s-%02d.tar", max_samples=80) as writer:
        for i, length in enumerate(LENGTHS[:160]):
            ids = 1000 * i + np.arange(length, dtype=np.int32)
            sample = {"__key__": f"{i:04d}", "npy": ids, "ids": ids.tobytes(), "json": {"seconds": int(length) / 80}}
            writer.write(sample)
    urls = str(tmp_path / "s.shards.json")
    build_columns(urls, "json.seconds")
    keys = [row["__key__"] for row in make(urls, packing)]
    assert sorted(key for each in keys for key in each) == [f"{i:04d}" for i in range(160)]
    for each in keys:
        seconds = [LENGTHS[int(key)] / 80 for key in each]
        assert (sum(seconds) if packing.is_packed else max(seconds) * len(seconds)) <= 6.5 + 1e-9
    loader = make(urls, packing)
    passes = iter(loader)
    begun = [next(passes)["__key__"] for _ in range(3)]
    state = loader.state_dict()
    assert begun + [row["__key__"] for row in resumed(make(urls, packing), state)] == keys
    other = make(urls, bucket("seconds", budget=6.25))
    with pytest.raises(StateError, match="other lengths or another packing="):
        list(resumed(other, state))


@pytest.mark.interop
def test_a_column_has_the_lengths_too(tmp_path):
    pytest.importorskip("pyarrow")
    with ShardWriter(tmp_path / "c-%02d.tar", max_samples=3) as writer:
        for i in range(7):
            writer.write({"__key__": f"{i}", "json": {"tokens": i + 1}, "txt": "x" * 50})
    urls = str(tmp_path / "c.shards.json")
    build_columns(urls, "json.tokens")
    assert lengths_of(ShardDataset(urls).source.shards, "tokens").tolist() == list(range(1, 8))


@pytest.mark.interop
def test_a_column_that_is_named_as_a_field_has_the_lengths_as_they_are(tmp_path):
    pytest.importorskip("pyarrow")
    with ShardWriter(tmp_path / "c-%02d.tar", max_samples=3) as writer:
        for i in range(7):
            writer.write({"__key__": f"{i}", "json": {"ids": i + 1}, "ids": np.arange(i + 1, dtype="<i4").tobytes()})
    urls = str(tmp_path / "c.shards.json")
    build_columns(urls, "json.ids")
    loader = in_threads(urls, pack("ids", 7))
    assert loader.maker.packing.known.tolist() == list(range(1, 8))
    assert max(map(len, rows_of(loader))) == 7


def test_of_selections_joins_and_mixtures(urls):
    dataset = Stream.from_shards(urls, fields="ids")
    chosen = dataset.select(keys=[f"{i:04d}" for i in range(0, 300, 3)])
    fields = {"ids": readers.ragged("<i4")}
    rows = list(ArrayLoader(chosen, 1, fields=fields, packing=pack("ids", 512)))
    assert sorted(key for row in rows for key in row["__key__"]) == [f"{i:04d}" for i in range(0, 300, 3)]
    assert lengths_of(dataset.join(urls, fields="txt").source.shards, "npy").tolist() == LENGTHS.tolist()
    mixture = mix({"a": dataset, "b": chosen})
    assert lengths_of(mixture.source.shards, "ids").tolist() == [*(4 * LENGTHS), *(4 * LENGTHS)]


def test_a_field_that_is_missing_is_named(urls):
    with pytest.raises(SampleError, match=r"t-00\.tar: 0000: no field abc"):
        rows_of(in_threads(urls, pack("abc", 512)))
    with pytest.raises(ValueError, match="lengths must be a number"):
        pack(["a"], 512)


def pieces_of(rows) -> list[int]:
    return sorted(element for row in rows for element in row)


ALL = sorted(1000 * i + e for i, length in enumerate(LENGTHS) for e in range(length))


@of_all
def test_every_element_of_long_samples_comes_once(urls, make):
    loader = make(urls, pack(LENGTHS, 64, overlong="split"))
    rows = rows_of(loader)
    assert pieces_of(rows) == ALL
    assert max(map(len, rows)) == 64
    assert len(rows) <= 1.03 * LENGTHS.sum() / 64
    assert len(loader) == len(rows)
    further = int((-(-LENGTHS // 64) - 1).sum())
    assert re.search(rf"^epoch 0: 300 planned \+ {further} repeated = {300 + further} delivered\n", str(loader.ledger))
    assert f"{further} repeated" in str(loader.ledger)
    loader.ledger.check()
    assert rows_of(loader) != rows, "another epoch"


@of_all
def test_pieces_are_stretches_of_a_sample(urls, make):
    for row in make(urls, pack(LENGTHS, 64, overlong="split")):
        bounds = np.asarray(row["cu_seqlens"]).tolist()
        for key, begin, end in zip(row["__key__"], bounds, bounds[1:]):
            piece = np.asarray(row["ids"])[begin:end] - 1000 * int(key)
            assert (piece[0] % 64, np.diff(piece).tolist()) == (0, [1] * (len(piece) - 1))


@of_all
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_run_resumes_in_the_middle_of_a_sample(urls, make, ranks):
    packing = pack(LENGTHS, 64, overlong="split")
    before, states = [], []
    for rank in range(2):
        loader = make(urls, packing, world=World(rank, 2), tail="exact")
        iterator = iter(loader)
        before += [np.asarray(next(iterator)["ids"]).tolist() for _ in range(20)]
        states.append(loader.state_dict())
        iterator.close()
    assert states[0] == states[1]
    after = []
    for rank in range(ranks):
        loader = make(urls, packing, world=World(rank, ranks), tail="exact")
        loader.load_state_dict(states[0])
        after += rows_of(loader)
    assert pieces_of(before + after) == ALL


@of_all
@pytest.mark.parametrize("tail", ["pad", "drop"])
def test_ranks_take_equal_steps_and_the_sums_close(urls, make, tail):
    loaders = [make(urls, pack("npy", 64, overlong="split"), world=World(r, 3), tail=tail) for r in range(3)]
    rows = [rows_of(loader) for loader in loaders]
    assert len({len(each) for each in rows}) == 1
    missing = len(set(ALL)) - len({e for each in rows for row in each for e in row})
    assert (missing > 0) <= (tail == "drop")


def test_workers_make_the_same_rows(urls):
    dataset = ShardDataset(urls, shuffle=True, seed=3, fields="npy").decode().rename_fields({"ids": "npy"})
    packing = pack("npy", 64, overlong="split")
    alone, two = (rows_of(ShardLoader(dataset, 1, packing=packing, num_workers=n)) for n in (0, 2))
    first = rows_of(in_threads(urls, pack(LENGTHS, 64, overlong="split")))
    assert pieces_of(alone) == pieces_of(two) == ALL
    assert alone == first


@of_all
@pytest.mark.parametrize("wrong", [LENGTHS + 1, np.maximum(LENGTHS - 1, 1), np.minimum(LENGTHS, 64)])
def test_lengths_that_are_wrong_lose_nothing(urls, make, wrong):
    with pytest.raises(SampleError, match=r"\d+ elements, where pack\(\) was given \d+"):
        rows_of(make(urls, pack(wrong, 64, overlong="split")))


def test_buckets_are_not_split(urls):
    with pytest.raises(ValueError, match='overlong="split" is for pack'):
        bucket(LENGTHS, budget=64, overlong="split")
