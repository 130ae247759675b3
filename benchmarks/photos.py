"""Shards of photographs for the programs that decode images."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image

from tarshards import ShardWriter


def write_photos(folder: Path, samples: int, shard: int, height: int, width: int, *, classes: int) -> str:
    """Write *samples* crops of scikit-learn's two photographs as JPEG, unless *folder* exists; return their expression.

    A shard has *shard* samples of ``jpg`` and ``cls``, a number below *classes*.
    """
    from sklearn.datasets import load_sample_images

    urls = f"{folder}/photos-{{0000..{samples // shard - 1:04d}}}.tar"
    if folder.exists():
        return urls
    photos, rng = load_sample_images().images, np.random.default_rng(0)

    def crops() -> Iterator[np.ndarray]:
        for number in range(samples):
            photo = photos[number % len(photos)]
            top, left = (
                int(rng.integers(0, whole - part + 1)) for whole, part in zip(photo.shape[:2], (height, width))
            )
            yield photo[top : top + height, left : left + width]

    part = Path(f"{folder}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    with (
        ShardWriter(f"{part}/photos-%04d.tar", max_samples=shard) as writer,
        ThreadPoolExecutor(os.cpu_count()) as pool,
    ):
        for number, jpg in enumerate(pool.map(_encode, crops())):
            writer.write({"__key__": f"{number:06d}", "jpg": jpg, "cls": number % classes})
    part.rename(folder)
    return urls


def _encode(pixels: np.ndarray) -> bytes:
    stream = BytesIO()
    Image.fromarray(pixels).save(stream, "JPEG", quality=90)
    return stream.getvalue()
