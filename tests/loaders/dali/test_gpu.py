"""What needs an NVIDIA GPU: the mixed decoder, and arrays that stay on the GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from dali_photos import by_pillow, dataset, jpeg_of, needs_gpu
from nvidia.dali import fn

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
