"""Pipelines for images, to use or to copy: ``dali_loader(urls, training, batch_size=256)``."""

from __future__ import annotations

from typing import Any

from nvidia.dali import Pipeline, fn, types

MEAN, STD = [123.675, 116.28, 103.53], [58.395, 57.12, 57.375]  # of ImageNet's pixels, by which its models are trained


def training(jpg: Any, cls: Any, *, size: int = 224) -> tuple[Any, Any]:
    """A random part of each image, resized to a square of *size* pixels, mirrored or not, normalised; CHW, float32."""
    images = fn.decoders.image_random_crop(
        jpg, device=decoder(), random_area=[0.08, 1], random_aspect_ratio=[3 / 4, 4 / 3]
    )
    images = fn.resize(images, size=[size, size])
    return normalized(images, mirror=fn.random.coin_flip()), cls


def evaluation(jpg: Any, cls: Any, *, size: int = 224, shorter: int = 256) -> tuple[Any, Any]:
    """The middle square of *size* pixels of each image, its shorter side resized to *shorter*; CHW, float32."""
    images = fn.decoders.image(jpg, device=decoder())
    images = fn.resize(images, resize_shorter=shorter)
    return normalized(images, crop=[size, size]), cls


def decoder() -> str:
    """Where the pipeline that is being described decodes: the bytes always come in main memory."""
    return "cpu" if Pipeline.current().device_id is None else "mixed"


def normalized(images: Any, **options: Any) -> Any:
    options |= {"mean": MEAN, "std": STD, "dtype": types.DALIDataType.FLOAT, "output_layout": "CHW"}
    return fn.crop_mirror_normalize(images, **options)
