"""The array loader: the plan's order in arrays, the same bytes for any threads, and nothing lost or left behind."""

from __future__ import annotations

import gc
import io
import json
import os
import random
import resource
import subprocess
import sys
import time
from collections import deque
from functools import partial
from itertools import count, islice, product, zip_longest

import numpy as np
import pytest
from leftovers import Leftovers
from PIL import Image
from programs import load_kernel, warnings_of
from soak import SOAK, rounds

from tarshards import IndexedShards, Ledger, ShardWriter, Stream, TarWriter, World
from tarshards.errors import DecodeError, OpenError, SampleError, StateError
from tarshards.index.build import build_index
from tarshards.loaders.arrays import assembly
from tarshards.loaders.arrays.array_loader import ArrayLoader
from tarshards.loaders.arrays.augment import cutout
from tarshards.loaders.arrays.readers.arrays import array
from tarshards.loaders.arrays.readers.arrays import ragged as read_ragged
from tarshards.loaders.arrays.readers.images import image
from tarshards.loaders.arrays.readers.parsed import bytes_, integer, text
from tarshards.stream.mixed import mix

SAMPLES, SHARDS = 300, 3


def npy(values) -> bytes:
    stream = io.BytesIO()
    np.save(stream, values)
    return stream.getvalue()


def jpg(seed: int) -> bytes:
    stream = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (5, 6, 3), dtype=np.uint8)
    Image.fromarray(pixels).resize((48, 40), Image.Resampling.BICUBIC).save(stream, "JPEG")
    return stream.getvalue()


def vector(number: int) -> np.ndarray:
    return np.arange(7, dtype=np.float32) + number


def sample(number: int, **fields) -> dict:
    return {"__key__": f"{number:04d}", "x.npy": npy(vector(number)), "cls": str(number).encode()} | fields


def write(folder, samples, *, index=True, name="set", per_shard=SAMPLES // SHARDS) -> str:
    with ShardWriter(str(folder / f"{name}-%d.tar"), max_samples=per_shard, index=index) as writer:
        for one in samples:
            writer.write(one)
    return str(folder / f"{name}-{{0..{len(writer.shards) - 1}}}.tar")


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Threads share also the small batches of these tests."""
    monkeypatch.setattr(assembly, "LEAST", 4)


@pytest.fixture(scope="module")
def urls(tmp_path_factory) -> str:
    return write(tmp_path_factory.mktemp("arrays"), (sample(i, jpg=jpg(i)) for i in range(SAMPLES)))


def ragged(number: int) -> bytes:
    return random.Random(number).randbytes(900 + 37 * number % 3000)


@pytest.fixture(scope="module")
def ragged_urls(tmp_path_factory) -> str:
    samples = ({"__key__": f"{i:04d}", "bin": ragged(i), "cls": b"%d" % i} for i in range(SAMPLES))
    return write(tmp_path_factory.mktemp("ragged"), samples)


FIELDS = {"x.npy": array(), "cls": integer()}
RAGGED = {"bin": read_ragged(), "cls": integer()}


def loader(urls, size=32, *, fields=FIELDS, threads=2, shuffle=True, options=None, **dataset) -> ArrayLoader:
    stream = Stream.from_shards(urls, shuffle=shuffle, seed=5, **dataset)
    return ArrayLoader(stream, size, fields=fields, threads=threads, **(options or {}))


def augmented(urls, size=32, **options) -> ArrayLoader:
    """A loader in which everything is drawn that can be."""
    fields = {"jpg": image(24, crop="random_resized", flip=0.5), **FIELDS}
    transforms = [partial(cutout, field="jpg", size=5)]
    return loader(urls, size, fields=fields, options={"transforms": transforms}, **options)


def frozen(batch) -> dict:
    """The bytes of a batch."""
    return {
        field: value.tobytes() if isinstance(value, np.ndarray) else [frozen_or_key(each) for each in value]
        for field, value in batch.items()
    }


def frozen_or_key(value: np.ndarray | str) -> bytes | str:
    return value if isinstance(value, str) else value.tobytes()


def labels(batches) -> list[int]:
    return [label for batch in batches for label in batch["cls"].tolist()]


def test_batches_are_the_plans_samples(urls):
    batches = list(loader(urls))
    keys = [one["__key__"] for one in Stream.from_shards(urls, shuffle=True, seed=5)]
    assert [key for batch in batches for key in batch["__key__"]] == keys
    assert [len(batch["cls"]) for batch in batches] == [32] * 9 + [12]
    for batch in batches:
        assert batch["__key__"] == [f"{label:04d}" for label in batch["cls"]]
        np.testing.assert_array_equal(batch["x.npy"], np.stack([vector(label) for label in batch["cls"]]))


def test_every_iteration_is_another_epoch_of_every_sample(urls):
    loading = loader(urls)
    assert len(loading) == 10
    epochs = [labels(loading) for _ in range(3)]
    assert all(sorted(epoch) == list(range(SAMPLES)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    loading.set_epoch(1)
    assert labels(loading) == epochs[1]
    loading.ledger.check()
    assert loading.ledger.samples == 4 * SAMPLES


@pytest.mark.parametrize("index", [True, False])
def test_bytes_and_states_are_the_same_for_any_number_of_threads(urls, index):
    def run(threads):
        loading = augmented(urls, threads=threads, index=index, shuffle=True)
        return [(frozen(batch), loading.state_dict()) for _ in range(2) for batch in loading]

    runs = [run(threads) for threads in (0, 1, 2, 4, 8)]
    assert len(runs[0]) == 20
    assert all(other == runs[0] for other in runs[1:])


@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize("taken", [0, 1, 4, 9, 10])
def test_resumed_the_next_batches_are_what_they_would_have_been(urls, taken, index):
    through = augmented(urls, index=index)
    whole = [frozen(batch) for _ in range(2) for batch in through]
    begun = augmented(urls, index=index)
    batches = iter(begun)
    for batch in islice(batches, taken):
        del batch
    state = json.loads(json.dumps(begun.state_dict()))
    batches.close()
    resumed = augmented(urls, index=index, threads=1)
    resumed.load_state_dict(state)
    if index:
        assert len(resumed) == 10
    rest = [frozen(batch) for batch in resumed]
    assert rest == (whole[taken:10] or whole[10:]), "at the last batch: the next epoch"
    if taken < 10:
        assert [frozen(batch) for batch in resumed] == whole[10:]


def test_draws_are_the_samples_own_whatever_the_ranks(urls):
    def crops(loading):
        return {key: row.tobytes() for batch in loading for key, row in zip(batch["__key__"], batch["jpg"])}

    fields = {"jpg": image(24, crop="random_resized", flip=0.5)}
    alone = crops(loader(urls, fields=fields))
    parts = [crops(loader(urls, 16, fields=fields, world=World(rank, 3), tail="exact")) for rank in range(3)]
    assert parts[0] | parts[1] | parts[2] == alone
    assert sum(map(len, parts)) == SAMPLES


def test_tails_make_ranks_equal(urls):
    for tail, steps in ("pad", [11, 11, 11, 11, 11, 11, 11]), ("drop", [11] * 7), ("exact", [11] * 7):
        ranks = [loader(urls, 4, world=World(rank, 7), tail=tail) for rank in range(7)]
        assert [len(list(loading)) for loading in ranks] == steps
        for loading in ranks[1:]:
            ranks[0].ledger.merge(loading.ledger)
        ranks[0].ledger.check()
        assert ranks[0].ledger.samples == {"pad": 301, "drop": 294, "exact": 300}[tail]


def test_without_indexes_shards_are_streamed(tmp_path):
    urls = write(tmp_path, map(sample, range(SAMPLES)), index=False)
    loading = loader(urls, shuffle=False)
    assert labels(loading) == list(range(SAMPLES))
    assert labels(loading) == list(range(SAMPLES))
    with pytest.raises(TypeError, match="only planned epochs have a length"):
        len(loading)
    other = loader(urls, 16, shuffle=False)
    with pytest.raises(StateError, match="batch_size 32, not 16"):
        other.load_state_dict(loading.state_dict())


@pytest.fixture
def damaged(tmp_path) -> str:
    """Samples: 0 and 7 have no JPEG in jpg, 40 has no jpg, and 41 has no number in cls."""
    samples = {i: sample(i, jpg=jpg(i)) for i in range(60)}
    samples[0]["jpg"] = samples[7]["jpg"] = b"no image"
    samples[41]["cls"] = b"dog"
    del samples[40]["jpg"]
    return write(tmp_path, samples.values(), per_shard=20)


BROKEN = {**FIELDS, "jpg": image(16)}


@pytest.mark.parametrize("threads", [0, 3])
@pytest.mark.parametrize("index", [True, False])
def test_an_undecodable_sample_is_named_and_raises_at_its_batch(damaged, threads, index):
    def until_it_fails(start):
        loading = loader(damaged, 4, fields=BROKEN, threads=threads, shuffle=False, index=index)
        if start:
            loading.load_state_dict(loader(damaged, 4, shuffle=False, index=index).state_dict() | start)
        taken = count()
        with pytest.raises((DecodeError, SampleError)) as caught:
            deque(zip(loading, taken), 0)
        return next(taken), caught.value

    taken, error = until_it_fails({})
    assert (taken, error.key, error.field) == (0, "0000", "jpg")
    assert error.url.endswith("set-0.tar")
    if index:
        taken, error = until_it_fails({"position": 8})
        assert (taken, error.key, error.field) == (8, "0040", None)
        assert "no field jpg" in error.reason
        taken, error = until_it_fails({"position": 41})
        assert (taken, error.key, error.field) == (0, "0041", "cls")
        assert "b'dog' is not a decimal integer" in error.reason


@pytest.mark.parametrize("index", [True, False])
def test_under_a_ledger_batches_are_shorter_and_as_many(damaged, index):
    ledger = Ledger(max_errors=4)
    loading = loader(damaged, 4, fields=BROKEN, shuffle=False, on_error=ledger, index=index)
    batches = list(loading)
    assert [len(batch["cls"]) for batch in batches] == [3, 3] + [4] * 8 + [2] + [4] * 4
    assert [batch["jpg"].shape for batch in batches] == [(len(batch["cls"]), 16, 16, 3) for batch in batches]
    assert labels(batches) == [i for i in range(60) if i not in (0, 7, 40, 41)]
    for batch in batches:
        np.testing.assert_array_equal(batch["x.npy"], np.stack([vector(label) for label in batch["cls"]]))
    assert [(entry.key, entry.field) for entry in ledger.quarantined] == [
        ("0000", "jpg"),
        ("0007", "jpg"),
        ("0040", None),
        ("0041", "cls"),
    ]
    if index:
        ledger.check()
        assert ledger.samples == 56


@pytest.mark.parametrize("fill", [False, True])
def test_shared_batches_are_those_of_one_thread_whatever_fails_in_them(tmp_path, fill):
    def broken(number: int) -> dict:
        fields = {"jpg": jpg(number), "txt": b"t" * (number % 9)}
        fields |= {"jpg": b"no image"} if number % 7 == 0 else {}
        fields |= {"cls": b"no number"} if number % 11 == 0 else {}
        fields |= {"txt": b"\xff"} if number % 5 == 0 else {}
        return sample(number, **fields)

    urls = write(tmp_path, map(broken, range(SAMPLES)))
    chosen = {"cls": integer(), "jpg": image(24, crop="random_resized", flip=0.5), "txt": text(), "x.npy": array()}
    came = []
    for threads, least in (0, 64), (3, 1), (3, 16):
        assembly.LEAST = least
        errors: list = []
        options: dict = {"fields": chosen, "options": {"fill": fill}, "on_error": errors.append}
        loading = loader(urls, 64, threads=threads, **options)
        batches = [{**batch, "__key__": list(batch["__key__"])} for batch in loading]
        came.append(([frozen(batch) for batch in batches], list(map(str, errors))))
    assert came[1:] == came[:1] * 2
    assert len(came[0][1]) > 100
    assert all("cls" in error for error in came[0][1] if "0077" in error), "the first field that does not decode"


def test_a_batch_of_which_nothing_is_left_is_empty(damaged):
    transforms = [lambda batch, rng: batch | {"half": batch["cls"] / 2}]
    options = {"transforms": transforms}
    loading = loader(damaged, 1, fields=BROKEN, shuffle=False, on_error=Ledger(max_errors=9), options=options)
    batches = list(loading)
    assert len(batches) == 60
    assert [i for i, batch in enumerate(batches) if "half" not in batch] == [40], "it has no jpg: nothing was read"
    assert [len(batch["cls"]) for batch in batches] == [int(i not in (0, 7, 40, 41)) for i in range(60)]
    assert (batches[0]["jpg"].shape, batches[0]["x.npy"].shape, batches[0]["__key__"]) == ((0, 16, 16, 3), (0, 7), [])


def test_where_nothing_can_be_read_nothing_is_delivered(urls):
    loading = loader(urls, fields={"png": image(8)}, on_error=Ledger(max_errors=1000))
    assert [batch["__key__"] for batch in loading] == [[]] * 10
    assert len(loading.ledger.quarantined) == SAMPLES
    loading.ledger.check()
    with pytest.raises(SampleError, match="no field png"):
        next(iter(loader(urls, fields={"png": image(8)})))


def test_what_fields_are_like_the_datasets_first_sample_says_in_any_order(tmp_path):
    samples = [sample(i, bin=bytes(4 if i else 8)) for i in range(60)]
    urls = write(tmp_path, samples, per_shard=20)
    for seed in range(3):
        stream = Stream.from_shards(urls, shuffle=True, seed=seed, on_error=Ledger(max_errors=100))
        loading = ArrayLoader(stream, 7, fields={"bin": array("<i4")}, threads=4)
        assert [key for batch in loading for key in batch["__key__"]] == ["0000"]


def test_a_shard_that_is_written_to_fails_and_is_not_delivered(tmp_path):
    load_kernel("tarshards.kernels._mapped")  # without, each sample is copied at once, and its header compared
    urls = write(tmp_path, map(sample, range(60)), per_shard=20)
    loading = loader(urls, 5, threads=0, on_error=Ledger(max_errors=100))
    assert len(labels(loading)) == 60
    os.utime(tmp_path / "set-1.tar", ns=(0, 0))
    assert sorted(labels(loading)) == [i for i in range(60) if i not in range(20, 40)]
    assert {entry.reason for entry in loading.ledger.quarantined} == {"changed while it was read"}


def test_a_shard_that_cannot_be_opened_fails_and_is_tried_again(tmp_path):
    urls = write(tmp_path, map(sample, range(60)), per_shard=20)
    loading = loader(urls, 5, on_error=Ledger(max_errors=100))
    (tmp_path / "set-1.tar").rename(tmp_path / "away")
    assert sorted(labels(loading)) == [i for i in range(60) if i not in range(20, 40)]
    (tmp_path / "away").rename(tmp_path / "set-1.tar")
    assert sorted(labels(loading)) == list(range(60))
    loading.ledger.check()
    (tmp_path / "set-1.tar").unlink()
    with pytest.raises(OpenError, match=r"set-1\.tar"):
        list(loader(urls, 5))


@pytest.mark.parametrize("options", [{}, {"index": False}])
def test_an_empty_dataset_is_an_error(tmp_path, options):
    url = str(tmp_path / "empty.tar")
    with TarWriter(url):
        pass
    build_index(url).save(url)
    with pytest.raises(SampleError, match=r"empty\.tar: no samples in this shard"):
        list(loader(url, **options))


def test_other_sources_than_plain_shards_are_read(tmp_path, urls):
    more = write(tmp_path, ({"__key__": f"{i:04d}", "txt": f"text {i}"} for i in range(SAMPLES)), name="more")
    joined = Stream.from_shards(urls, shuffle=True).join(more)
    for batch in ArrayLoader(joined, 50, fields={"cls": integer(), "txt": text()}, threads=2):
        assert batch["txt"] == [f"text {label}" for label in batch["cls"]]
    parts = {name: Stream.from_shards(urls, shuffle=True, seed=seed) for seed, name in enumerate("ab")}
    mixed = mix(parts, weights={"a": 3, "b": 1}, until="last")
    fields = {"cls": integer(), "jpg": image(16, crop="random_resized")}
    loading = ArrayLoader(mixed, 100, fields=fields, threads=2)
    whole = [frozen(batch) for batch in loading]
    assert sum(len(batch["__key__"]) for batch in whole) == 4 * SAMPLES - 1
    loading.ledger.check()
    resumed = ArrayLoader(mixed, 100, fields=fields, threads=0)
    resumed.load_state_dict({**loading.state_dict(), "epoch": 0, "position": 500})
    assert [frozen(batch) for batch in resumed] == whole[5:]


def test_only_the_datasets_fields_are_there(urls):
    with pytest.raises(SampleError, match="no field cls"):
        list(ArrayLoader(Stream.from_shards(urls, fields="x.npy"), 10, fields=FIELDS))


def test_a_field_may_be_named_and_have_alternatives(urls):
    batch = next(iter(loader(urls, fields={"image:png;jpg": image(16), "label:cls": integer(), "cls": bytes_()})))
    assert list(batch) == ["image", "label", "cls", "__key__"]
    assert [int(data) for data in batch["cls"]] == batch["label"].tolist()


@pytest.mark.parametrize("index", [True, False])
def test_batches_are_the_callers_to_keep(urls, index):
    loading = augmented(urls, 16, index=index)
    kept, copies = [], []
    for batch in islice(loading, 19):
        kept.append(batch)
        copies.append(frozen(batch))
    views = [batch.pop("jpg")[3:, ::2] for batch in kept[:4]]
    copies += [{"jpg": view.tobytes()} for view in views]
    list(loading)
    assert [frozen(batch) for batch in kept[4:]] == copies[4:19]
    assert [{"jpg": view.tobytes()} for view in views] == copies[19:]


def test_memory_is_used_again_when_it_was_let_go(urls):
    loading = loader(urls, 16, threads=2)
    addresses = set()
    for _ in range(3):
        for batch in loading:
            addresses.add(batch["x.npy"].__array_interface__["data"][0])
            del batch
    assert len(addresses) <= 6


@pytest.mark.parametrize("threads", [0, 3])
def test_batches_have_no_new_pages_once_there_are_buffers(urls, threads):
    loading, faults = loader(urls, 30, fields={"jpg": image(128, flip=0.5)}, threads=threads), []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for batch in loading:
            pages = batch["jpg"].nbytes // resource.getpagesize()
            del batch
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    assert pages > 300
    assert min(faults[2:]) < 0.05 * pages * len(loading)


def test_reused_buffers_stay_until_the_next_but_one_is_asked_for(urls):
    loading = loader(urls, 16, options={"reuse": True})
    addresses, last = set(), None
    for _ in range(3):
        for batch in loading:
            if last is not None:
                assert frozen(last[0]) == last[1]
            last = batch, frozen(batch)
            addresses.add(batch["x.npy"].__array_interface__["data"][0])
    assert len(addresses) == 6


@pytest.mark.parametrize("index", [True, False])
def test_live_passes_reuse_their_own_buffers(tmp_path, index):
    urls = write(tmp_path, (sample(i, txt=b"t" * i) for i in range(SAMPLES)), index=index)
    options: dict = {"fields": FIELDS | {"txt": read_ragged()}, "index": index}
    expected = [
        [frozen(batch) for batch in epoch] for plain in [loader(urls, 16, **options)] for epoch in (plain, plain)
    ]
    loading, addresses = loader(urls, 16, options={"reuse": True}, **options), set()
    for turn in range(3):
        loading.set_epoch(0)
        passes = [[], []]
        for batches in zip_longest(loading, loading):
            for own, batch in zip(passes, batches):
                if batch is not None:
                    own.append(frozen(batch))
                    addresses.add(address(batch["x.npy"]))
        assert passes == expected, turn
    assert len(addresses) <= 2 * (6 if index else 7), "the memory of passes that have ended is used again"


@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize("taken", [1, 2, 5])
def test_the_last_batches_of_a_pass_that_was_left_stay_until_the_next_but_one(tmp_path, index, taken):
    urls = write(tmp_path, (sample(i) for i in range(SAMPLES)), index=index)
    loading = loader(urls, 16, index=index, options={"reuse": True})
    addresses = set()
    for _ in range(4):
        left, last = iter(loading), []
        for batch in islice(left, taken):
            last = [*last[-1:], batch]
            addresses.add(address(batch["x.npy"]))
        left.close()
        before = list(map(frozen, last))
        following = iter(loading)
        next(following)
        following.close()
        assert list(map(frozen, last[-1:])) == before[-1:], "one batch was requested after it"
    assert len(addresses) <= (6 if index else 7)


def address(array) -> int:
    return array.__array_interface__["data"][0]


def test_memory_of_ragged_rows_is_used_again_when_it_was_let_go(ragged_urls):
    loading = loader(ragged_urls, 16, fields=RAGGED, threads=2, shuffle=False)
    addresses = set()
    for epoch in range(24):
        for batch in loading:
            if epoch > 15:  # until then they grow to the largest batch
                addresses.add(address(batch["bin"][0]))
            del batch
    assert len(addresses) <= 12, "of more than a hundred batches"


def test_ragged_rows_are_the_callers_to_keep(ragged_urls):
    loading = loader(ragged_urls, 16, fields=RAGGED, threads=2, shuffle=False)
    kept = list(loading)
    views = [batch["bin"][0][7:] for batch in loading]
    assert len({address(batch["bin"][0]) for batch in kept} | {address(view) for view in views}) == 2 * len(kept)
    list(loading)
    expected = dict(enumerate(map(ragged, range(SAMPLES))))
    for batch, view in zip(kept, views):
        values, offsets = batch["bin"]
        assert view.tobytes() == values[7:].tobytes()
        for row, number in enumerate(batch["cls"]):
            assert values[offsets[row] : offsets[row + 1]].tobytes() == expected[int(number)]


def test_reused_ragged_rows_stay_until_the_next_but_one_is_asked_for(ragged_urls):
    loading = loader(ragged_urls, 16, fields=RAGGED, shuffle=False, options={"reuse": True})
    addresses, last = set(), None
    for epoch in range(8):
        for batch in loading:
            values = batch["bin"][0]
            if last is not None:
                assert last[0].tobytes() == last[1]
            last = values, values.tobytes()
            if epoch > 6:  # until then they grow to the largest batch that each has had
                addresses.add(address(values))
    assert len(addresses) == 6


@pytest.mark.parametrize("reuse", [False, True])
def test_ragged_rows_of_a_dtype_in_batches_of_any_size(tmp_path, reuse):
    rows = [np.arange(length % 50, dtype=">i4") for length in range(0, 7000, 97)]
    samples = ({"__key__": f"{i:03d}", "tok": row.tobytes(), "cls": b"%d" % i} for i, row in enumerate(rows))
    urls = write(tmp_path, samples, per_shard=40)
    fields = {"tok": read_ragged(">i4"), "cls": integer()}
    loading = loader(urls, 5, fields=fields, threads=1, options={"reuse": reuse})
    for _ in range(2):
        for batch in loading:
            values, offsets = batch["tok"]
            assert (values.dtype, len(values)) == (np.dtype(">i4"), offsets[-1])
            for row, number in enumerate(batch["cls"]):
                assert values[offsets[row] : offsets[row + 1]].tolist() == rows[number].tolist()


def test_torch_tensors_are_kept_too(urls):
    torch = pytest.importorskip("torch")
    loading = loader(urls, 16, options={"device": "cpu"})
    plain = [frozen(batch) for batch in loader(urls, 16)]
    kept = [batch["x.npy"].view(-1) for batch in loading]
    assert all(isinstance(tensor, torch.Tensor) for tensor in kept)
    list(loading)
    assert [tensor.numpy().tobytes() for tensor in kept] == [batch["x.npy"] for batch in plain]


def mappings() -> int:
    with open("/proc/self/maps") as maps:
        return sum(".tar" in line for line in maps)


@pytest.mark.soak
@pytest.mark.parametrize("index", [True, False])
def test_broken_off_nothing_is_left_behind(urls, index):
    rng = random.Random(0)

    def break_off():
        loading = augmented(urls, rng.choice([4, 32]), threads=rng.choice([0, 1, 3]), index=index)
        for _ in islice(loading, rng.randrange(12)):
            pass

    break_off()
    gc.collect()
    before, mapped = Leftovers(), mappings()
    for _ in range(rounds(50)):
        break_off()
    gc.collect()
    assert not before.files() | before.threads()
    assert mappings() <= mapped


def interrupt(loading, error) -> None:
    for _ in loading:
        raise error


def test_an_exception_of_the_consumer_ends_the_threads(urls):
    before = Leftovers()
    loading = augmented(urls)
    for error in KeyboardInterrupt, RuntimeError:
        with pytest.raises(error):
            interrupt(loading, error)
        gc.collect()
        assert not before.threads()
    assert loading.ledger.unaudited
    assert sorted(labels(loading)) == list(range(SAMPLES))


def test_a_transform_that_fails_raises_at_its_batch(urls):
    def fail(batch, rng):
        if 17 in batch["cls"]:
            raise ZeroDivisionError("seventeen")
        return batch

    loading = loader(urls, 10, shuffle=False, threads=4, options={"transforms": [fail]})
    taken = count()
    with pytest.raises(ZeroDivisionError, match="seventeen"):
        deque(zip(loading, taken), 0)
    assert next(taken) == 1


def test_ten_epochs_take_no_more_memory(urls):
    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1])

    loading = augmented(urls, 64)
    sizes = []
    for _ in range(10):
        for _ in loading:
            pass
        sizes.append(resident())
    assert max(sizes[1:]) <= 1.05 * sizes[1]


def test_a_transform_may_drop_the_keys(urls):
    batches = loader(urls, options={"transforms": [lambda batch, rng: {"cls": batch["cls"]}]})
    assert sum(len(batch["cls"]) for batch in batches) == SAMPLES == batches.monitor.samples


def test_the_monitor_says_what_the_limit_is(urls):
    loading = loader(urls, fields={"jpg": image(24)}, threads=1)
    size = 0
    for batch in loading:
        size += len(batch["__key__"])
        if size < 100:
            continue
    monitor = loading.monitor
    assert monitor.samples == SAMPLES
    assert monitor.bytes == sum(len(one["jpg"]) for one in IndexedShards(urls))
    assert monitor.limit == "decoding"
    begun = time.monotonic()
    for _ in loading:  # take nine times as long over a batch as it took to come
        came = time.monotonic()
        time.sleep(max(0.05, 9 * (came - begun)))
        begun = time.monotonic()
    assert loading.monitor.limit == "consuming"
    assert loading.monitor.consumed > 0.4


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"fields": {}}, ValueError, "names no field"),
        ({"fields": {"a:jpg": bytes_(), "a:cls": bytes_()}}, ValueError, "two fields of one name"),
        ({"fields": {"*": bytes_()}}, ValueError, "is not one field"),
        ({"fields": {"cls": "integer"}}, TypeError, "a reader or a function"),
        ({"threads": -1}, ValueError, "threads must be at least 0, not -1"),
        ({"size": 0}, ValueError, "batch_size must be at least 1, not 0"),
    ],
)
def test_wrong_arguments_are_refused(urls, options, error, words):
    with pytest.raises(error, match=words):
        loader(urls, **options)


def test_streams_that_are_no_plain_shards_are_refused(urls):
    with pytest.raises(TypeError, match="without ops"):
        ArrayLoader(Stream.from_shards(urls).map(dict), 4, fields=FIELDS)
    with pytest.raises(TypeError, match="takes shards"):
        ArrayLoader(Stream([1]), 4, fields=FIELDS)


LOADING = [
    "read_samples(urls)",
    "Stream.from_shards(urls, index=False).decode().filter(bool).batched(3)",
    "dataset",
    "dataset.decode().shuffle(9).filter(bool)",
    "ArrayLoader(dataset, 4, fields=fields)",
    "ArrayLoader(dataset, 4, fields=fields, threads=2)",
]
HOLDERS = ["__main__", "os"]  # whose names are forgotten before those of tarshards, and after


@pytest.mark.soak
@pytest.mark.parametrize(
    ("holder", "loading"),
    [
        *product(["__main__"] if SOAK == 1 else HOLDERS, LOADING),
        *[("os", "ArrayLoader(dataset, 4, fields=fields, threads=2)")] * (SOAK == 1),
    ],
)
def test_a_program_may_end_in_the_middle_of_a_loop(make_shards, loading, holder):
    program = f"""
import os, sys
from tarshards import ArrayLoader, Stream, read_samples
from tarshards.loaders.arrays.readers.parsed import integer
urls = {make_shards(4, 50, index=True)!r}
dataset, fields = Stream.from_shards(urls, shuffle=True), {{"cls": integer()}}
begun = iter({loading})
next(begun)
sys.modules[{holder!r}].held = begun, [module for name, module in sys.modules.items() if name.startswith("tarshards")]
del begun
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, warnings_of(done.stderr)) == (0, "")
