"""Images by Pillow, for peers that do not decode images."""

from __future__ import annotations

from io import BytesIO

import numpy as np
from PIL import Image

CROP = 224
rng = np.random.default_rng()


def decode(data: bytes) -> np.ndarray:
    return np.asarray(Image.open(BytesIO(data)).convert("RGB"))


def random_crop(data: bytes) -> np.ndarray:
    """RandomResizedCrop and RandomHorizontalFlip of torchvision, without torchvision."""
    with Image.open(BytesIO(data)) as opened:
        pixels = opened.convert("RGB")
    area = rng.uniform(0.08, 1) * pixels.width * pixels.height
    aspect = np.exp(rng.uniform(np.log(3 / 4), np.log(4 / 3)))
    width, height = min(pixels.width, np.sqrt(area * aspect)), min(pixels.height, np.sqrt(area / aspect))
    left, top = rng.uniform(0, pixels.width - width), rng.uniform(0, pixels.height - height)
    box = (left, top, left + width, top + height)
    resized = pixels.resize((CROP, CROP), Image.Resampling.BILINEAR, box)
    return np.asarray(resized)[:, :: rng.choice([-1, 1])].copy()
