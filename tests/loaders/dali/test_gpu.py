"""What needs an NVIDIA GPU: the mixed decoder, arrays that are there already, DALI beside torch's streams."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from dali_photos import by_pillow, dataset, jpeg_of, needs_gpu
from nvidia.dali import Pipeline, fn

from tarshards.loaders.dali import array_source, dali_loader, native_loader
from tarshards.loaders.dali.pipelines import training

pytestmark = [pytest.mark.gpu, needs_gpu]


def decode(jpg, cls):
    return fn.decoders.image(jpg, device="mixed"), cls


@pytest.mark.parametrize(
    "make",
    [
        lambda urls, **options: dali_loader(dataset(urls), decode, **options),
        lambda urls, **options: native_loader(urls, decode, **options),
    ],
    ids=["dali_loader", "native_loader"],
)
def test_images_are_decoded_on_the_gpu(photos, make):
    loader = make(photos(101), batch_size=50)
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
    (batch,) = dali_loader(data, decode, batch_size=30)
    assert len(batch["cls"]) == 28


def test_the_ready_pipeline_runs_there(photos):
    for batch in dali_loader(photos(20), training, batch_size=10, device_id=0):
        assert batch["jpg"].shape == (10, 3, 224, 224)
        assert batch["jpg"].device == torch.device("cuda", 0)


def test_outputs_as_cupy_and_numpy(photos):
    cupy = pytest.importorskip("cupy")
    urls = photos(10)
    (here,) = dali_loader(urls, decode, batch_size=10, arrays="cupy")
    (there,) = dali_loader(urls, decode, batch_size=10, arrays="numpy")
    assert isinstance(here["jpg"], cupy.ndarray)
    assert (cupy.asnumpy(here["jpg"]) == there["jpg"]).all()


@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_arrays_of_the_gpu_are_fed_as_they_are(library):
    if library == "cupy":
        arange = pytest.importorskip("cupy").arange
    else:

        def arange(stop, dtype):
            return torch.arange(stop, device="cuda").to(torch.float32)

    batches = [{"x": arange(24, dtype="float32").reshape(2, 3, 4) + i} for i in range(3)]
    pipe = Pipeline(batch_size=2, num_threads=1, device_id=0)
    with pipe:
        source = array_source(batches, fields="x")
        (x,) = fn.external_source(source, num_outputs=source.num_outputs, device="gpu")
        pipe.set_outputs(x * 2.0)
    pipe.build()
    for i in range(3):
        (outputs,) = pipe.run()
        assert (np.array(outputs.as_cpu().as_tensor()) == (np.arange(24).reshape(2, 3, 4) + i) * 2).all()
