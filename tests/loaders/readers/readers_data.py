"""What the tests of the readers share: images that have everything in them, and how a loader reads."""

import io
from itertools import pairwise

import numpy as np
from PIL import Image

from tarshards.loaders.arrays.readers.draws import draws_of
from tarshards.samples.payloads import Payloads


def picture(height, width, seed=0):
    """Smooth colours, edges and noise: uint8 of shape (height, width, 3)."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (5, 6, 3), dtype=np.uint8))
    pixels = np.array(coarse.resize((width, height), Image.Resampling.BICUBIC))
    pixels[height // 3 : height // 2, width // 4 : width // 2] = rng.integers(0, 256, 3)
    return (pixels.astype(np.int64) + rng.integers(-9, 10, pixels.shape)).clip(0, 255).astype(np.uint8)


def saved(pixels, format="JPEG", **options):
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, format, **options)
    return stream.getvalue()


def npy(array):
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def read(reader, datas, *, field="bin", seed=0, epoch=0, parts=1, samples=None):
    """Return the batch that a loader with this number of threads makes of *datas*, and the failed samples."""
    payloads = Payloads.of(datas)
    samples = np.arange(len(datas)) if samples is None else samples
    draws = draws_of(seed, epoch, samples)
    opened = reader.open(field, payloads[0])
    batch = opened.make(len(datas))
    failed = {}
    bounds = np.linspace(0, len(datas), parts + 1).astype(int).tolist()
    for first, end in pairwise(bounds):
        part = batch[first:end]  # a copy of a list
        found = opened.read(part, payloads[first:end], draws[first:end])
        batch[first:end] = part
        failed.update({first + i: error for i, error in found.items()})
    return opened.join(batch), failed


def whole(reader, datas, **options):
    """Return the batch; no sample of it failed."""
    batch, failed = read(reader, datas, **options)
    assert not failed, failed
    return batch
