"""The loader follows the dataset's plan, resumes exactly, and survives any bad sample."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
from contextlib import suppress
from importlib import import_module
from itertools import islice
from types import ModuleType

import numpy as np
import pytest
import torch
from dali_photos import THREADS, dataset, decode, jpeg_of
from nvidia.dali import fn, pipeline_def

from tarshards import (
    ArrayLoader,
    DecodeError,
    Ledger,
    OpError,
    StateError,
    Stream,
    World,
    collate,
    dali,
    readers,
)
from tarshards.loaders.torch.shard_loader import ShardLoader
from tarshards.stream.mixed import mix

pytestmark = pytest.mark.interop

CPU = {"device": "cpu", "num_threads": THREADS}


def number_of(data, pair) -> int:
    """The label of a sample by its shard and number: all shards have 20."""
    shard, sample = pair
    return 20 * int(shard) + int(sample)


def labels(batches) -> list[int]:
    return [int(label) for batch in batches for label in batch.get("cls", [])]


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_order_is_that_of_the_plan(photos, shuffle):
    data = dataset(photos(101), shuffle=shuffle)
    loader = dali.dali_loader(data, decode, batch_size=8, **CPU)
    for epoch in range(3):
        planned = [number_of(data, sample) for sample in data.source.plan(epoch, 1)]
        batches = list(loader)
        assert labels(batches) == planned
        assert [len(batch["cls"]) for batch in batches] == [8] * 12 + [5]
        assert [key for batch in batches for key in batch["__key__"]] == [f"{number:05d}" for number in planned]
    loader.ledger.check()


def test_the_batches_are_those_of_a_shard_loader(photos):
    urls = photos(101)
    theirs = ShardLoader(dataset(urls).to_tuple("__key__"), 16)
    ours = dali.dali_loader(dataset(urls), decode, batch_size=16, **CPU)
    assert [batch["__key__"] for batch in ours] == [keys for (keys,) in theirs]


@pytest.mark.parametrize("ranks_after", [1, 2, 3, 5])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_run_resumes_on_another_number_of_ranks_without_repeat_or_miss(photos, steps, ranks_after):
    urls = photos(101)
    seen, states = [], []
    for rank in range(2):
        loader = dali.dali_loader(dataset(urls, world=World(rank, 2), tail="exact"), decode, batch_size=9, **CPU)
        batches = iter(loader)
        seen += labels(next(batches) for _ in range(steps))
        states.append(json.dumps(loader.state_dict()))
    assert states[0] == states[1]
    for rank in range(ranks_after):
        data = dataset(urls, world=World(rank, ranks_after), tail="exact")
        loader = dali.dali_loader(data, decode, batch_size=7, **CPU)
        loader.load_state_dict(json.loads(states[0]))
        assert len(loader) == len(range(rank, 101, ranks_after)) // -7 * -1, "of the whole epoch"
        seen += labels(loader)
        assert data.epochs.next == 1
    assert sorted(seen) == list(range(101))


def test_a_run_resumes_at_every_batch(photos):
    urls = photos(30)
    reference = dali.dali_loader(dataset(urls), decode, batch_size=7, **CPU)
    whole, following = labels(reference), labels(reference)
    loader = dali.dali_loader(dataset(urls), decode, batch_size=7, **CPU)
    for taken, _ in enumerate(loader, 1):
        again = dali.dali_loader(dataset(urls), decode, batch_size=4, **CPU)
        again.load_state_dict(loader.state_dict())
        assert labels(again) == (whole[7 * taken :] or following), "at the last batch: the next epoch"


def test_a_state_of_other_shards_is_refused(photos):
    state = dali.dali_loader(dataset(photos(3)), decode, batch_size=2, **CPU).state_dict()
    with pytest.raises(StateError):
        dali.dali_loader(dataset(photos(4)), decode, batch_size=2, **CPU).load_state_dict(state)


def test_breaking_off_begins_the_next_epoch(photos):
    data = dataset(photos(101))
    loader = dali.dali_loader(data, decode, batch_size=8, **CPU)
    for _ in loader:
        break
    assert labels(loader) == [number_of(data, sample) for sample in data.source.plan(1, 1)]
    loader.set_epoch(0)
    assert labels(loader) == [number_of(data, sample) for sample in data.source.plan(0, 1)]


def test_without_an_index_shards_are_streamed_and_a_state_is_replayed(photos):
    urls = photos(50)
    stream = Stream.from_shards(urls, index=False)
    loader = dali.dali_loader(stream, decode, batch_size=8, **CPU)
    batches = iter(loader)
    first = labels([next(batches), next(batches)])
    again = dali.dali_loader(Stream.from_shards(urls, index=False), decode, batch_size=8, **CPU)
    again.load_state_dict(loader.state_dict())
    assert first + labels(again) == list(range(50))


def test_a_shard_expression_is_read_in_order_and_only_its_fields(photos):
    loader = dali.dali_loader(photos(25), lambda cls: cls, fields="cls", batch_size=10, **CPU)
    assert labels(loader) == list(range(25))
    assert loader.ledger.members == 25


BOMB = bytearray(jpeg_of(0))
_frame = BOMB.index(b"\xff\xc0")
BOMB[_frame + 5 : _frame + 9] = (20_000).to_bytes(2, "big") * 2
DAMAGED = {
    3: jpeg_of(3)[:-200],
    17: b"This is no picture.",
    20: b"",
    33: bytes(BOMB),
    48: b"\x89PNG\r\n\x1a\n" + b"\0" * 30,
}


def quarantined(ledger: Ledger) -> dict[str, str]:
    return {f"{entry.key}.{entry.field}": entry.reason for entry in ledger.quarantined}


def test_damaged_images_are_named_and_everything_else_is_delivered(photos):
    data = dataset(photos(50, bad=DAMAGED))
    loader = dali.dali_loader(data, decode, batch_size=10, **CPU)
    for _ in range(2):
        data.ledger.clear()
        assert sorted(labels(loader)) == [i for i in range(50) if i not in DAMAGED]
        reasons = quarantined(data.ledger)
        assert set(reasons) == {f"{i:05d}.jpg" for i in DAMAGED}
        assert "truncated JPEG" in reasons["00003.jpg"]
        assert "not an image in any of JPEG PNG" in reasons["00017.jpg"]
        assert "empty" in reasons["00020.jpg"]
        assert "20000 x 20000 pixels" in reasons["00033.jpg"]
        data.ledger.check()
        assert (data.ledger.samples, data.ledger.failed, data.ledger.unaudited) == (45, 5, False)


@pytest.mark.parametrize("index", [True, False])
def test_what_was_read_ahead_of_a_loop_that_is_left_is_in_flight(photos, index):
    data = dataset(photos(50, bad=DAMAGED), index=index)
    loader = dali.dali_loader(data, decode, batch_size=5, **CPU)
    delivered = labels(islice(loader, 3))
    gc.collect()
    data.ledger.check()
    tally = data.ledger._total()
    assert data.ledger.samples == len(delivered)
    assert tally.in_flight > 0
    assert data.ledger.unaudited


def many_of_one(samples):
    for sample in samples:
        yield from [sample] * 20


def test_a_loop_that_is_left_behind_a_pipe_counts_what_went_into_it(photos):
    data = dataset(photos(50), index=False).pipe(many_of_one)
    loader = dali.dali_loader(data, decode, batch_size=5, **CPU)
    assert len(labels(islice(loader, 3))) == 15
    gc.collect()
    data.ledger.check()
    assert 1 <= data.ledger.samples <= 50


def test_damaged_images_can_be_masked(photos):
    data = dataset(photos(50, bad=DAMAGED))
    loader = dali.dali_loader(data, decode, batch_size=10, on_bad="mask", **CPU)
    batches = list(loader)
    assert sorted(labels(batches)) == list(range(50))
    assert set(quarantined(data.ledger)) == {f"{i:05d}.jpg" for i in DAMAGED}
    for batch in batches:
        assert batch["jpg"].shape == (10, 32, 40, 3)
        assert batch["valid"].tolist() == [int(label) not in DAMAGED for label in batch["cls"]]
        assert not batch["jpg"][~batch["valid"]].any()
    assert (data.ledger.samples, data.ledger.failed, data.ledger.unaudited) == (50, 0, False)


def test_a_damaged_image_raises_by_default(photos):
    loader = dali.dali_loader(dataset(photos(5, bad=DAMAGED), on_error=None), decode, batch_size=2, **CPU)
    with pytest.raises(DecodeError, match=r"set-000.tar: 00003.jpg: a truncated JPEG"):
        list(loader)


def test_what_came_before_an_error_is_delivered(photos):
    loader = dali.dali_loader(
        dataset(photos(20, bad={13: b""}), on_error=None, shuffle=False), decode, batch_size=2, **CPU
    )
    batches = iter(loader)
    assert labels(next(batches) for _ in range(6)) == list(range(12))
    with pytest.raises(DecodeError, match=r"00013\.jpg"):
        next(batches)


def with_bad_checksum(number: int) -> bytes:
    """A PNG that looks whole and does not decode."""
    from io import BytesIO

    from dali_photos import pixels_of
    from PIL import Image

    stream = BytesIO()
    Image.fromarray(pixels_of(number)).save(stream, "PNG")
    data = bytearray(stream.getvalue())
    data[len(data) // 2] ^= 1
    return bytes(data)


@pytest.mark.parametrize("on_bad", ["drop", "mask"])
def test_a_pipeline_goes_on_without_what_only_the_decoder_finds_bad(photos, on_bad, capfd):
    bad = {number: with_bad_checksum(number) for number in (4, 21, 22, 49)}
    data = dataset(photos(50, bad=bad))
    loader = dali.dali_loader(data, decode, batch_size=10, on_bad=on_bad, **CPU)
    for epoch in range(2):
        data.ledger.clear()
        batches = list(loader)
        planned = [number_of(data, sample) for sample in data.source.plan(epoch, 1)]
        delivered = labels(batches)
        assert {entry.key for entry in data.ledger.quarantined} == {f"{i:05d}" for i in bad}
        assert (data.ledger.samples, data.ledger.failed) == ((46, 4) if on_bad == "drop" else (50, 0))
        assert not data.ledger.unaudited
        if on_bad == "drop":
            assert delivered == [number for number in planned if number not in bad]
        else:
            assert delivered == planned
            assert [v for batch in batches for v in batch["valid"].tolist()] == [i not in bad for i in planned]
    assert "decode" in data.ledger.quarantined[0].reason


@pytest.fixture
def built(monkeypatch) -> list:
    """A list that gets an entry for each pipeline that is built."""
    module, built = import_module("tarshards.loaders.dali.dali_loader"), []
    build = module.build_pipeline
    monkeypatch.setattr(module, "build_pipeline", lambda *given, **options: built.append(0) or build(*given, **options))
    return built


@pytest.mark.parametrize("bad", [0, 31, 63])
def test_few_pipelines_are_built_where_an_image_does_not_decode(photos, bad, built, capfd):
    """For a GPU it takes seconds to build one."""
    data = dataset(photos(64, bad={bad: with_bad_checksum(bad)}), shuffle=False)
    assert labels(dali.dali_loader(data, decode, batch_size=64, **CPU)) == [i for i in range(64) if i != bad]
    assert len(built) == 3, "the first, the one that finds it, and the one that goes on"


@pytest.mark.parametrize("bad", [0, 31, 63])
def test_few_pipelines_are_built_where_the_pipeline_fails_on_an_image(photos, bad, built, capfd):
    data = dataset(photos(64, bad={bad: jpeg_of(0, 8, 8)}), shuffle=False)

    def crop(jpg, cls):
        return fn.crop(fn.decoders.image(jpg), crop=[20, 20]), cls

    assert labels(dali.dali_loader(data, crop, batch_size=64, **CPU)) == [i for i in range(64) if i != bad]
    assert len(built) <= 1 + 6 + 1, "the first, at most one for each half, and the one that goes on"
    assert [entry.key for entry in data.ledger.quarantined] == [f"{bad:05d}"]


@pytest.mark.parametrize("bad", [{0}, {63}, {0, 1}, {5, 6, 63}, {31, 32}, set(range(0, 64, 9))])
def test_every_bad_image_of_a_batch_is_found(photos, bad, capfd):
    data = dataset(photos(64, bad={number: with_bad_checksum(number) for number in bad}), shuffle=False)
    assert labels(dali.dali_loader(data, decode, batch_size=64, **CPU)) == [i for i in range(64) if i not in bad]
    assert {int(entry.key) for entry in data.ledger.quarantined} == bad
    data.ledger.check()


def test_a_blank_image_that_the_pipeline_cannot_take_either_is_left_out(write):
    samples = [{"__key__": str(i), "jpg": jpeg_of(i, 300, 300) if i else b"", "cls": i} for i in range(4)]
    data = dataset(write(samples), shuffle=False)

    def crop(jpg, cls):
        return fn.crop(fn.decoders.image(jpg), crop=[280, 280]), cls

    loader = dali.dali_loader(data, crop, batch_size=4, on_bad="mask", **CPU)
    assert [labels(loader), labels(loader)] == [[1, 2, 3], [0, 1, 2, 3]]  # then a blank one is as large as the others
    assert [entry.key for entry in data.ledger.quarantined] == ["0", "0", "0"]


def test_a_full_check_finds_it_before(photos, capfd):
    data = dataset(photos(20, bad={4: with_bad_checksum(4)}))
    loader = dali.dali_loader(data, decode, batch_size=10, check="full", **CPU)
    assert sorted(labels(loader)) == [i for i in range(20) if i != 4]
    assert set(quarantined(data.ledger)) == {"00004.jpg"}
    assert capfd.readouterr() == ("", "")


def test_a_full_check_finds_noise_in_the_middle_that_dali_lets_pass(photos, capfd):
    data = bytearray(jpeg_of(1))
    data[-60:-20] = b"\x55" * 40
    urls = photos(3, bad={1: bytes(data)})
    assert sorted(labels(dali.dali_loader(dataset(urls), decode, batch_size=3, **CPU))) == [0, 1, 2]
    assert sorted(labels(dali.dali_loader(dataset(urls), decode, batch_size=3, check="full", **CPU))) == [0, 2]


def test_a_pipeline_that_is_wrong_itself_is_no_sample_s_fault(photos):
    loader = dali.dali_loader(
        dataset(photos(10)), lambda jpg, cls: (fn.crop(fn.decoders.image(jpg), crop=[99, 99]), cls), batch_size=5, **CPU
    )
    with pytest.raises(RuntimeError, match="crop"):
        list(loader)
    assert not loader.ledger.quarantined


def test_a_batch_of_which_nothing_is_left_is_an_empty_dict(photos):
    data = dataset(photos(40, bad=dict.fromkeys([*range(10, 20), *range(30, 40)], b"")), shuffle=False)
    batches = list(dali.dali_loader(data, decode, batch_size=10, **CPU))
    assert [len(batch.get("cls", [])) for batch in batches] == [10, 0, 10, 0]
    assert batches[1] == {}
    source = dali.batch_source(data, 10)
    assert [len(label) for _, label in source] == [10, 10]


def test_a_sample_that_cannot_be_read_is_left_out(photos, tmp_path):
    urls = photos(40)
    with open(urls[1], "r+b") as file:
        file.truncate(1000)
    with pytest.raises(Exception, match="set-001"):
        dali.dali_loader(urls, decode, batch_size=10, **CPU)


def test_an_op_of_the_dataset_runs_before(photos):
    data = dataset(photos(20)).map_fields({"cls": lambda label: int(label) + 1000})
    assert sorted(labels(dali.dali_loader(data, decode, batch_size=6, **CPU))) == list(range(1000, 1020))


@pytest.mark.parametrize("fields", ["jpg cls", "image:jpg;png n:cls;id", "data:jpg;txt cls"])
@pytest.mark.parametrize("on_bad", ["drop", "mask"])
def test_batches_are_the_same_whether_read_together_or_one_by_one(photos, fields, on_bad):
    """Without ops whole batches are found and copied; an op, and a field of several kinds, see each sample."""
    urls, ways = photos(50, bad={**DAMAGED, 30: jpeg_of(30, 60, 50)}), []
    for data in dataset(urls), dataset(urls).map(dict), dataset(urls, fields="jpg cls"):
        options = {"batch_size": 8, "fields": fields, "on_bad": on_bad, "arrays": "numpy", **CPU}
        batches = list(dali.dali_loader(data, lambda jpg, cls: (jpg, cls), outputs=["jpg", "cls"], **options))
        said = [(error.shard, error.key, error.reason) for error in data.ledger.quarantined]
        ways.append(
            [
                [(batch["__key__"], batch["cls"].tolist(), batch.get("valid")) for batch in batches],
                [data.tobytes() for batch in batches for data in batch["jpg"]],
                (said, data.ledger.samples, data.ledger.failed),
            ]
        )
        data.ledger.check()
    assert repr(ways[0]) == repr(ways[1]) == repr(ways[2])
    assert len(ways[0][2][0]) == len(DAMAGED)


@pytest.mark.parametrize("dynamic", [True, False])
def test_memory_of_a_batch_is_not_reused_before_dali_is_done(photos, dynamic):
    """Outputs are the encoded bytes, of batches that are delivered late and early, and kept."""

    @pipeline_def(exec_dynamic=dynamic, prefetch_queue_depth=3)
    def pipeline(source):
        return tuple(fn.external_source(source, num_outputs=2, no_copy=True))

    loader = dali.dali_loader(dataset(photos(120)), pipeline, batch_size=2, arrays="numpy", **CPU)
    for _ in range(2):
        kept = []
        for number, batch in enumerate(loader):
            kept.append(batch)
            time.sleep(0.002 * (number % 7 == 0))
        for batch in kept:
            assert [data.tobytes() for data in batch["jpg"]] == [jpeg_of(number) for number in batch["cls"].tolist()]
        assert sorted(labels(kept)) == list(range(120))


def test_an_array_of_any_layout_arrives_as_it_is(write):
    wanted = np.arange(6).reshape(2, 3)
    urls = write(
        [{"__key__": str(i), "a.npy": wanted.astype(">i4") + i, "b.npy": wanted.astype("<f4")} for i in range(3)]
    )
    options = {"fields": "a.npy b.npy", "batch_size": 3, "arrays": "numpy", **CPU}
    for data in dataset(urls, shuffle=False), dataset(urls, shuffle=False).decode().map_fields({"b.npy": np.transpose}):
        (batch,) = dali.dali_loader(data, lambda a, b: (a, b), **options)
        assert (batch["a.npy"] == wanted + np.arange(3)[:, None, None]).all()
        assert (batch["b.npy"] == (wanted if batch["b.npy"].shape[1:] == (2, 3) else wanted.T)).all()


def test_an_op_that_fails_is_told_as_everywhere(photos):
    def fail(label):
        raise RuntimeError("no")

    data = dataset(photos(5), on_error=None).map_fields({"cls": fail}, on_error=Ledger())
    with pytest.raises(OpError, match=r"00000|00001|00002|00003|00004"):
        list(dali.dali_loader(data, decode, batch_size=6, **CPU))


@pytest.mark.parametrize("op", [lambda data: data.shuffle(10), lambda data: data.batched(2)])
def test_ops_that_hold_samples_are_refused(photos, op):
    with pytest.raises(TypeError, match="one sample at a time"):
        dali.dali_loader(op(dataset(photos(5))), decode, batch_size=2, **CPU)


def test_fields_of_another_type_are_left_out(write):
    shapes = [(2, 3), (4, 3), (5,), (2, 3)]
    samples = [{"__key__": str(i), "npy": np.full(shape, i, "<f4"), "cls": i} for i, shape in enumerate(shapes)]
    samples.append({"__key__": "4", "npy": np.zeros((2, 3), "<f4"), "cls": b"four"})
    data = dataset(write(samples), shuffle=False)
    loader = dali.dali_loader(data, lambda npy, cls: (npy, cls), fields="npy cls", batch_size=5, **CPU)
    (batch,) = loader
    assert batch["cls"].tolist() == [0, 1, 3]
    assert [tuple(array.shape) for array in batch["npy"]] == [(2, 3), (4, 3), (2, 3)]
    assert quarantined(data.ledger) == {
        "2.npy": "float32 of 1 dimensions, and the first sample has float32 of 2 dimensions",
        "4.cls": "b'four' is not a decimal integer of 64 bits",
    }


def test_a_missing_field_is_named(write):
    data = dataset(write([{"__key__": "a", "jpg": jpeg_of(0)}]))
    assert list(dali.dali_loader(data, decode, batch_size=1, **CPU)) == [{}]
    assert "no field cls" in data.ledger.quarantined[0].reason


@pytest.mark.parametrize(("last_batch", "sizes"), [("partial", [8, 8, 4]), ("pad", [8, 8, 8]), ("drop", [8, 8])])
def test_the_last_batch(photos, last_batch, sizes):
    data = dataset(photos(20))
    loader = dali.dali_loader(data, decode, batch_size=8, last_batch=last_batch, **CPU)
    batches = list(loader)
    assert len(loader) == len(sizes)
    assert [len(batch["cls"]) for batch in batches] == sizes
    planned = [number_of(data, sample) for sample in data.source.plan(0, 1)]
    assert labels(batches)[:20] == planned[: sum(sizes)]
    if last_batch == "pad":
        assert [sum(batch["valid"].tolist()) for batch in batches] == [8, 8, 4]
        assert batches[-1]["cls"][4:].tolist() == [planned[-1]] * 4
    data.ledger.check()
    assert data.ledger._total().dropped == 20 - min(20, sum(sizes))


@pytest.mark.parametrize("arrays", ["torch", "numpy"])
def test_arrays_by_choice(photos, arrays):
    loader = dali.dali_loader(dataset(photos(9)), decode, batch_size=4, last_batch="pad", arrays=arrays, **CPU)
    batches = list(loader)
    kind = torch.Tensor if arrays == "torch" else np.ndarray
    assert all(isinstance(batch[name], kind) for batch in batches for name in ("jpg", "cls", "valid"))
    kept = [np.asarray(batch["jpg"]).copy() for batch in batches]
    list(loader)
    assert all((np.asarray(batch["jpg"]) == before).all() for batch, before in zip(batches, kept))
    batches[0]["jpg"][:] = 0  # a batch is its owner's to write to


def test_what_a_pipeline_returns_on_the_cpu_is_copied_for_cupy(photos, monkeypatch):
    """cupy's arrays are on the GPU, and its from_dlpack refuses others."""
    stand_in = ModuleType("cupy")
    stand_in.asarray = lambda array: ("copied", array)
    monkeypatch.setitem(sys.modules, "cupy", stand_in)
    options = {"batch_size": 8, "last_batch": "pad", "arrays": "cupy", **CPU}
    (batch,) = dali.dali_loader(dataset(photos(5), shuffle=False), decode, **options)
    assert batch["cls"][0] == batch["jpg"][0] == batch["valid"][0] == "copied"
    assert batch["cls"][1].tolist() == [0, 1, 2, 3, 4, 4, 4, 4]
    assert batch["jpg"][1].shape == (8, 32, 40, 3)


def test_without_cupy_the_error_names_what_to_install(photos, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ModuleNotFoundError, match="cupy is missing: pip install cupy-cuda12x"):
        list(dali.dali_loader(dataset(photos(2)), decode, batch_size=2, arrays="cupy", **CPU))


def test_images_of_several_sizes_are_a_list(write):
    samples = [{"__key__": str(i), "jpg": jpeg_of(i, 10 + i, 20), "cls": i} for i in range(3)]
    (batch,) = dali.dali_loader(dataset(write(samples), shuffle=False), decode, batch_size=4, **CPU)
    assert [tuple(image.shape) for image in batch["jpg"]] == [(20, 10, 3), (20, 11, 3), (20, 12, 3)]


def test_a_pipeline_def_is_given_the_source(photos):
    @pipeline_def(enable_conditionals=True)
    def pipeline(source):
        jpg, cls = fn.external_source(source, num_outputs=2)
        image = fn.decoders.image(jpg)
        if cls % 2 == 0:
            image = fn.brightness(image, brightness=0.0)
        return image, cls, image

    outputs = ["image", "cls", "again"]
    for batch in dali.dali_loader(dataset(photos(20)), pipeline, outputs=outputs, batch_size=8, **CPU):
        assert list(batch) == [*outputs, "__key__"]
        assert [bool(image.any()) for image in batch["image"]] == [bool(label % 2) for label in batch["cls"]]


def test_arrays_of_other_loaders_feed_a_pipeline(write):
    urls = write([{"__key__": f"{i:02d}", "npy": np.full((4, 4, 3), i, np.uint8), "cls": i} for i in range(20)])
    data = dataset(urls, shuffle=False)
    shard_loader = ShardLoader(data.decode(), 5, num_workers=1, collate_fn=collate)
    for loader in shard_loader, ArrayLoader(data, 5, fields={"npy": readers.array(), "cls": readers.integer()}):

        def batches(loader=loader):
            for batch in loader:
                yield batch["npy"], batch["cls"]

        @pipeline_def(batch_size=5, num_threads=1, device_id=None)
        def pipeline(batches=batches):
            pixels, numbers = fn.external_source(batches, num_outputs=2, cycle="raise", layout=["HWC", ""])
            return pixels, numbers

        built, found = pipeline(), []
        with suppress(StopIteration):
            while True:
                pixels, numbers = built.run()
                assert [np.asarray(each).max() for each in pixels] == [int(np.asarray(each)) for each in numbers]
                found += [int(np.asarray(each)) for each in numbers]
        assert found == [*range(20)]


@pytest.mark.filterwarnings("ignore:The external source node")
def test_outputs_without_names_are_refused(photos):
    loader = dali.dali_loader(dataset(photos(2)), lambda jpg, cls: cls, batch_size=2, **CPU)
    with pytest.raises(ValueError, match="1 outputs for the names jpg cls"):
        list(loader)


def test_what_is_random_follows_from_the_seed_and_differs_by_epoch_and_rank(photos):
    urls = photos(20)

    def angles(**options):
        loader = dali.dali_loader(
            dataset(urls, **options), lambda cls: fn.random.uniform(cls), fields="cls", batch_size=5, **CPU
        )
        return [[float(x) for batch in loader for x in batch["cls"]] for _ in range(2)]

    first = angles()
    assert first == angles()
    assert first[0] != first[1]
    assert first != angles(seed=4)
    assert first[0][:5] != angles(world=World(1, 2))[0][:5]


def test_the_gpu_is_never_silently_the_cpu(photos, monkeypatch):
    monkeypatch.setattr("nvidia.dali.backend.GetCUDADeviceCount", lambda: 0)
    with pytest.raises(RuntimeError, match='device="cpu"'):
        dali.dali_loader(dataset(photos(1)), decode, batch_size=1)


def test_a_missing_dali_is_told_with_the_extras_that_bring_it():
    program = "import sys; sys.modules['nvidia.dali'] = None; from tarshards import dali"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    words = "nvidia.dali is missing: pip install 'tarshards[dali]' or pip install 'tarshards[dali13]'"
    assert done.stderr.splitlines()[-1].endswith(words)


WRONG = {
    "batch_size must be at least 1, not 0": {"batch_size": 0},
    "not 'tpu'": {"device": "tpu"},
    "uses none": {"device_id": 1},
    "not 'none'": {"last_batch": "none"},
    "not 'ignore'": {"on_bad": "ignore"},
    "not 'some'": {"check": "some"},
    "not 'jax'": {"arrays": "jax"},
    "by name": {"fields": "*"},
    "two fields are named jpg": {"fields": "jpg jpg"},
}


@pytest.mark.parametrize("message", WRONG)
def test_arguments_are_checked(photos, message):
    with pytest.raises(ValueError, match=message):
        dali.dali_loader(dataset(photos(1)), decode, **{"batch_size": 1, **CPU, **WRONG[message]})


def test_mixtures_and_joins_are_datasets_too(photos, write):
    first = dataset(photos(30))
    labelled = write([{"__key__": f"{i:05d}", "id": 100 + i} for i in range(30)], name="ids")
    joined = dataset(photos(30)).join(labelled)
    loader = dali.dali_loader(
        joined, lambda jpg, cls, id: (fn.decoders.image(jpg), cls, id), fields="jpg cls id", batch_size=8, **CPU
    )
    for batch in loader:
        assert (batch["id"] == 100 + batch["cls"]).all()
    second = dataset(photos(20, name="other"), seed=9)
    loader = dali.dali_loader(mix({"a": first, "b": second}, until="last"), decode, batch_size=8, **CPU)
    assert set(labels(loader)) == set(range(30))
