"""Images decoded by Pillow or by simplejpeg, for peers that do not decode images or take a decoder."""

from __future__ import annotations

from io import BytesIO

import numpy as np
import simplejpeg
from PIL import Image

CROP = 224
rng = np.random.default_rng()


def decode(data: bytes, decoder: str) -> np.ndarray:
    return simplejpeg.decode_jpeg(data, "RGB") if decoder == "simplejpeg" else np.asarray(opened(data))


def opened(data: bytes, decoder: str = "Pillow") -> Image.Image:
    if decoder == "simplejpeg":
        return Image.fromarray(simplejpeg.decode_jpeg(data, "RGB"))
    with Image.open(BytesIO(data)) as image:
        return image.convert("RGB")


def random_crop(data: bytes, decoder: str) -> np.ndarray:
    """RandomResizedCrop and RandomHorizontalFlip of torchvision, without torchvision."""
    pixels = opened(data, decoder)
    area = rng.uniform(0.08, 1) * pixels.width * pixels.height
    aspect = np.exp(rng.uniform(np.log(3 / 4), np.log(4 / 3)))
    width, height = min(pixels.width, np.sqrt(area * aspect)), min(pixels.height, np.sqrt(area / aspect))
    left, top = rng.uniform(0, pixels.width - width), rng.uniform(0, pixels.height - height)
    box = (left, top, left + width, top + height)
    resized = pixels.resize((CROP, CROP), Image.Resampling.BILINEAR, box)
    return np.asarray(resized)[:, :: rng.choice([-1, 1])].copy()
