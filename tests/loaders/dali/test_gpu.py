"""What needs an NVIDIA GPU: the mixed decoder, and arrays that stay on the GPU."""

from __future__ import annotations

import threading
from contextlib import closing
from io import BytesIO

import feed_specs
import numpy as np
import pytest
import torch
from dali_photos import THREADS, by_pillow, dataset, jpeg_of, needs_gpu, pixels_of
from fed import fed
from nvidia.dali import Pipeline, fn
from PIL import Image

from tarshards import dali

pytestmark = [pytest.mark.interop, pytest.mark.gpu, needs_gpu]


def decode(jpg, cls):
    return fn.decoders.image(jpg, device="mixed"), cls


def test_images_are_decoded_on_the_gpu(photos):
    loader = dali.dali_loader(dataset(photos(101)), decode, batch_size=50)
    for _ in range(2):
        seen = []
        for batch in loader:
            assert batch["jpg"].is_cuda
            for image, label in zip(batch["jpg"].cpu().numpy(), batch["cls"].tolist()):
                seen.append(label)
                assert np.abs(image.astype(int) - by_pillow(jpeg_of(label))).mean() < 3
        assert sorted(seen) == list(range(101))


def test_a_bad_image_does_not_end_it(photos):
    data = dataset(photos(30, bad={3: jpeg_of(3)[:-200], 20: b"no image"}))
    (batch,) = dali.dali_loader(data, decode, batch_size=30)
    assert len(batch["cls"]) == 28


def test_a_loader_uses_the_gpu_that_it_is_given(photos):
    for batch in dali.dali_loader(photos(20), decode, batch_size=10, device_id=0):
        assert batch["jpg"].shape == (10, 32, 40, 3)
        assert batch["jpg"].device == torch.device("cuda", 0)


def test_outputs_as_cupy_and_numpy(photos):
    cupy = pytest.importorskip("cupy")
    urls = photos(10)
    (here,) = dali.dali_loader(urls, decode, batch_size=10, arrays="cupy")
    (there,) = dali.dali_loader(urls, decode, batch_size=10, arrays="numpy")
    assert isinstance(here["jpg"], cupy.ndarray)
    assert (cupy.asnumpy(here["jpg"]) == there["jpg"]).all()
    assert isinstance(here["cls"], cupy.ndarray), "also what the pipeline returns on the CPU"
    assert (cupy.asnumpy(here["cls"]) == there["cls"]).all()
    (padded,) = dali.dali_loader(urls, decode, batch_size=16, last_batch="pad", arrays="cupy")
    assert cupy.asnumpy(padded["valid"]).tolist() == [True] * 10 + [False] * 6


def labels(batches) -> list[int]:
    return [int(label) for batch in batches for label in batch.get("cls", [])]


def close_to(image: torch.Tensor, number: int) -> bool:
    return np.abs(image.cpu().numpy().astype(int) - by_pillow(jpeg_of(number))).mean() < 3


def test_images_of_several_sizes_are_a_list_on_the_gpu(write):
    samples = [{"__key__": str(i), "jpg": jpeg_of(i, 20 + i, 30), "cls": i} for i in range(5)]
    (batch,) = dali.dali_loader(dataset(write(samples), shuffle=False), decode, batch_size=5)
    assert [tuple(image.shape) for image in batch["jpg"]] == [(30, 20 + i, 3) for i in range(5)]
    assert all(image.is_cuda for image in batch["jpg"])


def test_a_run_resumes_at_every_batch(photos):
    urls = photos(30)
    reference = dali.dali_loader(dataset(urls), decode, batch_size=7)
    whole, following = labels(reference), labels(reference)
    loader = dali.dali_loader(dataset(urls), decode, batch_size=7)
    for taken, _ in enumerate(loader, 1):
        again = dali.dali_loader(dataset(urls), decode, batch_size=4)
        again.load_state_dict(loader.state_dict())
        assert labels(again) == (whole[7 * taken :] or following), "at the last batch: the next epoch"


def png_with_a_wrong_checksum(number: int) -> bytes:
    stream = BytesIO()
    Image.fromarray(pixels_of(number)).save(stream, "PNG")
    data = bytearray(stream.getvalue())
    data[len(data) // 2] ^= 1
    return bytes(data)


def jpeg_without_huffman_tables(number: int) -> bytes:
    """A JPEG whose header and end are right, and whose Huffman tables have more codes than there can be."""
    data = bytearray(jpeg_of(number))
    place = data.find(b"\xff\xc4")
    while place >= 0:
        data[place + 5 : place + 21] = b"\xff" * 16
        place = data.find(b"\xff\xc4", place + 21)
    return bytes(data)


@pytest.mark.parametrize("damaged", [png_with_a_wrong_checksum, jpeg_without_huffman_tables])
@pytest.mark.parametrize("on_bad", ["drop", "mask"])
def test_a_pipeline_goes_on_without_what_only_the_decoder_finds_bad(photos, on_bad, damaged, capfd):
    bad = {number: damaged(number) for number in (4, 21, 22)}
    data = dataset(photos(40, bad=bad))
    planned = [20 * int(shard) + int(sample) for shard, sample in data.source.plan(0, 1)]
    batches = list(dali.dali_loader(data, decode, batch_size=20, on_bad=on_bad))
    assert {entry.key for entry in data.ledger.quarantined} == {f"{i:05d}" for i in bad}
    assert (data.ledger.samples, data.ledger.failed) == ((37, 3) if on_bad == "drop" else (40, 0))
    data.ledger.check()
    assert not data.ledger.unaudited
    if on_bad == "drop":
        assert labels(batches) == [number for number in planned if number not in bad]
    else:
        assert labels(batches) == planned
        assert [v for batch in batches for v in batch["valid"].tolist()] == [i not in bad for i in planned]
    for batch in batches:
        for image, label in zip(batch["jpg"], batch["cls"].tolist(), strict=True):
            assert not image.any() if label in bad else close_to(image, label)


def test_a_run_resumes_behind_a_pipeline_that_was_built_again(photos, capfd):
    urls = photos(30, bad={4: png_with_a_wrong_checksum(4)})
    loader = dali.dali_loader(dataset(urls), decode, batch_size=10)
    batches, states = [], []
    for batch in loader:
        batches.append(batch)
        states.append(loader.state_dict())
    assert sorted(labels(batches)) == [i for i in range(30) if i != 4]
    again = dali.dali_loader(dataset(urls), decode, batch_size=10)
    again.load_state_dict(states[1])
    assert labels(again) == labels(batches[2:])


def test_damaged_images_can_be_masked(photos):
    bad = {3: jpeg_of(3)[:-200], 17: b"no image", 20: b""}
    data = dataset(photos(50, bad=bad))
    batches = list(dali.dali_loader(data, decode, batch_size=10, on_bad="mask"))
    assert sorted(labels(batches)) == list(range(50))
    for batch in batches:
        assert batch["jpg"].shape == (10, 32, 40, 3)
        assert batch["valid"].tolist() == [int(label) not in bad for label in batch["cls"]]
        assert not batch["jpg"][~batch["valid"].cuda()].any()
    data.ledger.check()


@pytest.mark.parametrize("own_stream", [False, True])
def test_pixels_stay_until_the_gpu_has_read_them(photos, own_stream):
    """The loop drops a batch while the GPU, which is behind, has still to read it."""
    loader = dali.dali_loader(dataset(photos(400)), decode, batch_size=8)
    copies, numbers = [], []
    with torch.cuda.stream(torch.cuda.Stream() if own_stream else torch.cuda.current_stream()):
        for _ in range(2):
            for batch in loader:
                torch.cuda._sleep(20_000_000)  # cycles, about 10 ms
                copies.append(batch["jpg"].clone())
                numbers += batch["cls"].tolist()
                del batch
    torch.cuda.synchronize()
    assert all(close_to(image, number) for image, number in zip(torch.cat(copies), numbers, strict=True))


def test_batches_that_a_loop_keeps_stay_as_they_are(photos):
    loader = dali.dali_loader(dataset(photos(100)), decode, batch_size=8)
    batches = [batch for _ in range(2) for batch in loader]
    for batch in batches:
        assert all(close_to(image, number) for image, number in zip(batch["jpg"], batch["cls"].tolist(), strict=True))


def test_a_pipeline_by_hand_decodes_on_the_gpu(photos):
    data = dataset(photos(50, bad={7: b""}))
    source = dali.batch_source(data, 8)
    pipe = Pipeline(batch_size=8, num_threads=THREADS, device_id=0)
    with pipe:
        pipe.set_outputs(*decode(*fn.external_source(source, num_outputs=source.num_outputs)))
    pipe.build()
    for _ in range(2):
        seen = []
        while True:
            try:
                images, numbers = pipe.run()
            except StopIteration:
                break
            for image, number in zip(images.as_cpu(), numbers, strict=True):
                seen.append(int(np.array(number)))
                assert np.abs(np.array(image).astype(int) - by_pillow(jpeg_of(seen[-1]))).mean() < 3
        pipe.reset()
        assert sorted(seen) == [i for i in range(50) if i != 7]


def test_a_pipeline_that_uses_no_gpu_runs_beside_one_that_does(photos):
    urls = photos(20)
    here = dali.dali_loader(dataset(urls), decode, batch_size=10)
    there = dali.dali_loader(dataset(urls), lambda j, c: (fn.decoders.image(j), c), batch_size=10, device="cpu")
    for ours, theirs in zip(here, there, strict=True):
        assert not theirs["jpg"].is_cuda
        assert (ours["jpg"].cpu().int() - theirs["jpg"].int()).abs().float().mean() < 3


def test_a_loop_that_is_left_can_begin_again(photos):
    data = dataset(photos(101))
    loader = dali.dali_loader(data, decode, batch_size=8)
    for _ in range(3):
        with closing(iter(loader)) as batches:
            next(batches)
    assert sorted(labels(loader)) == list(range(101))
    data.ledger.check()


def test_a_pipeline_runs_in_a_thread(photos):
    loader, seen = dali.dali_loader(dataset(photos(50)), decode, batch_size=8), []
    thread = threading.Thread(target=lambda: seen.extend(labels(loader)))
    thread.start()
    thread.join(60)
    assert sorted(seen) == list(range(50))


def test_batches_of_other_hosts_are_decoded_on_the_gpu(photos, tmp_path, monkeypatch):
    pytest.importorskip("zmq")
    monkeypatch.setenv(feed_specs.DATA, str(tmp_path))
    photos(50)
    local = feed_specs.encoded()
    with fed("encoded", 2) as remote:
        for _ in range(2):
            batches = list(dali.dali_loader(remote, decode))
            assert labels(batches) == [int(label) for batch in local for label in batch["cls"]]
            for batch in batches:
                assert all(close_to(image, label) for image, label in zip(batch["jpg"], batch["cls"].tolist()))
