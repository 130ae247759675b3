"""Small photographs, and pipelines that are built and run by hand."""

from __future__ import annotations

from collections.abc import Iterator
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from nvidia.dali import Pipeline, backend, fn
from PIL import Image

from tarshards import Ledger, ShardDataset

WIDTH, HEIGHT = 40, 32
THREADS = 2


def pixels_of(number: int, width: int = WIDTH, height: int = HEIGHT) -> np.ndarray:
    """A smooth picture, different for each number."""
    y, x = np.mgrid[:height, :width]
    planes = [2 * x + number, 3 * y + 2 * number, x + y + 3 * number]
    return (127 + 120 * np.sin(np.stack(planes, axis=-1) / 40)).astype(np.uint8)


def jpeg_of(number: int, width: int = WIDTH, height: int = HEIGHT) -> bytes:
    stream = BytesIO()
    Image.fromarray(pixels_of(number, width, height)).save(stream, "JPEG", quality=95)
    return stream.getvalue()


def by_pillow(data: bytes) -> np.ndarray:
    return np.array(Image.open(BytesIO(data)).convert("RGB"))


def dataset(urls: list[str], **options: Any) -> ShardDataset:
    """A shuffled dataset whose ledger takes any error."""
    return ShardDataset(urls, **{"shuffle": True, "seed": 3, "on_error": Ledger(max_errors=1000), **options})


def decode(jpg: Any, cls: Any) -> tuple[Any, Any]:
    return fn.decoders.image(jpg), cls


def by_hand(source: Any, batch_size: int, epochs: int, **options: Any) -> Iterator[list[tuple[np.ndarray, int]]]:
    """Yield epochs of (image, label) from a pipeline that is built around *source*."""
    pipe = Pipeline(batch_size=batch_size, num_threads=THREADS, device_id=None)
    with pipe:
        pipe.set_outputs(*decode(*fn.external_source(source, num_outputs=source.num_outputs, **options)))
    pipe.build()
    for _ in range(epochs):
        epoch: list[tuple[np.ndarray, int]] = []
        while True:
            try:
                images, labels = pipe.run()
            except StopIteration:
                break
            for i in range(len(images)):
                epoch.append((np.array(images[i]), int(np.array(labels[i]))))
        pipe.reset()
        yield epoch


needs_gpu = pytest.mark.skipif(not backend.GetCUDADeviceCount(), reason="needs an NVIDIA GPU")
