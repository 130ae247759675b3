"""Augmentations of a batch: ``transform(batch, rng) -> batch``, a new dict; the given one is unchanged.

A batch is a dict of arrays with a row a sample; images are of shape (n, height, width, channels). The options are given
with functools.partial: ``transforms=[partial(flip, field="jpg"), partial(to_chw, field="jpg")]``. The generator is
seeded by the batch, so that its draws are the same for any number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Batch = dict[str, Any]


def flip(batch: Batch, rng: np.random.Generator, *, field: str, probability: float = 0.5) -> Batch:
    """Mirror images left to right, each with this *probability*.

    >>> flip({"jpg": np.array([[[[1], [2]]]])}, np.random.default_rng(0), field="jpg", probability=1)["jpg"].tolist()
    [[[[2], [1]]]]
    """
    images = _images(batch, field)
    chosen = rng.random(len(images)) < probability
    flipped = images.copy()
    flipped[chosen] = images[chosen, :, ::-1]
    return {**batch, field: flipped}


def cutout(batch: Batch, rng: np.random.Generator, *, field: str, size: int, fill: Any = 0) -> Batch:
    """Fill a square of *size* pixels, at a random position wholly inside of each image, with a number or one a channel.

    >>> images = np.ones((2, 8, 8, 3), np.uint8)
    >>> cutout({"jpg": images}, np.random.default_rng(0), field="jpg", size=3)["jpg"].sum(axis=(1, 2)).tolist()
    [[55, 55, 55], [55, 55, 55]]
    """
    images = _images(batch, field)
    count, height, width, _ = images.shape
    if not 0 < size <= min(height, width):
        raise ValueError(f"a square of {size} pixels in images of {height} x {width}")
    inside = _inside(rng, count, height, size)[:, :, None] & _inside(rng, count, width, size)[:, None, :]
    cut = images.copy()
    cut[inside] = fill
    return {**batch, field: cut}


def translate(batch: Batch, rng: np.random.Generator, *, field: str, most: int, fill: Any = 0) -> Batch:
    """Shift each image by up to *most* pixels in both directions; new pixels at the borders are *fill*.

    >>> images = np.arange(1, 4).reshape(1, 1, 3, 1)
    >>> translate({"png": images}, np.random.default_rng(9), field="png", most=1)["png"].ravel().tolist()
    [2, 3, 0]
    """
    images = _images(batch, field)
    count, height, width, channels = images.shape
    padded = np.empty((count, height + 2 * most, width + 2 * most, channels), images.dtype)
    padded[:] = fill
    padded[:, most : most + height, most : most + width] = images
    rows, columns = (rng.integers(0, 2 * most + 1, (count, 1)) + np.arange(side) for side in (height, width))
    return {**batch, field: padded[np.arange(count)[:, None, None], rows[:, :, None], columns[:, None, :]]}


def move_points(batch: Batch, rng: np.random.Generator, *, field: str, affine: str) -> Batch:
    """Move positions by the maps in *affine*, of ``readers.affine``: x, y are the first two numbers of the last axis.

    *field* has an array of shape (n, ..., 2 or more), or the (values, offsets) of ``ragged``. Other numbers, such as a
    visibility, stay. Positions outside of the crop come to lie outside of the image.

    >>> batch = {"points": np.array([[[4.0, 2.0, 1.0]]]), "map": np.array([[[-0.5, 0, 10], [0, 0.5, 0]]])}
    >>> move_points(batch, np.random.default_rng(0), field="points", affine="map")["points"].tolist()
    [[[8.0, 1.0, 1.0]]]
    """
    return _with_values(batch, field, affine, _moved)


def move_boxes(batch: Batch, rng: np.random.Generator, *, field: str, affine: str, image: str) -> Batch:
    """Move boxes (left, top, right, bottom) by the maps in *affine*, and cut them to the sides of the field *image*.

    *field* has an array of shape (n, ..., 4), or the (values, offsets) of ``ragged``. No box is left out: one that lies
    outside of the crop has no area, since its sides are on a border of the image. The images are of one size, channels
    first or last.

    >>> batch = {"boxes": np.array([[[4.0, 2, 30, 6]]]), "map": np.array([[[-0.5, 0, 10], [0, 0.5, 0]]])}
    >>> batch["jpg"] = np.zeros((1, 5, 10, 3))
    >>> move_boxes(batch, np.random.default_rng(0), field="boxes", affine="map", image="jpg")["boxes"].tolist()
    [[[0.0, 1.0, 8.0, 3.0]]]
    """
    _, *sides, channels = _images(batch, image).shape
    height, width = sides if channels in (1, 3, 4) else (sides[1], channels)

    def moved(boxes: np.ndarray, maps: np.ndarray) -> np.ndarray:
        if boxes.shape[-1] != 4:
            raise ValueError(f"{field}: boxes of four numbers are wanted, not arrays of shape {boxes.shape}")
        corners = _moved(boxes.reshape(*boxes.shape[:-1], 2, 2), maps)
        ends = np.concatenate([corners.min(axis=-2), corners.max(axis=-2)], axis=-1)
        return ends.clip(0, np.array([width, height, width, height], np.float32))

    return _with_values(batch, field, affine, moved)


def mixup(batch: Batch, rng: np.random.Generator, *, field: str, label: str, classes: int, alpha: float = 1.0) -> Batch:
    """Mix each sample with another of the batch, in a share drawn from Beta(*alpha*, *alpha*): images and labels.

    Images become float32. Labels (whole numbers below *classes*, or already a share of each class) become float32 of
    shape (n, classes), each row of sum 1. Source: Zhang et al., "mixup: Beyond empirical risk minimization", 2018.

    >>> batch = {"jpg": np.zeros((4, 2, 2, 3), np.uint8), "cls": np.arange(4)}
    >>> mixed = mixup(batch, np.random.default_rng(0), field="jpg", label="cls", classes=10)
    >>> mixed["cls"].shape, mixed["cls"].sum(axis=1).round(5).tolist()
    ((4, 10), [1.0, 1.0, 1.0, 1.0])
    """
    images, labels = _images(batch, field).astype(np.float32), _shares(batch[label], classes)
    share = rng.beta(alpha, alpha, len(images)).astype(np.float32)
    other = rng.permutation(len(images))
    return {**batch, field: _mix(images, share, other), label: _mix(labels, share, other)}


def normalize(
    batch: Batch, rng: np.random.Generator, *, field: str, mean: Any, std: Any, dtype: Any = "float32"
) -> Batch:
    """Subtract *mean* and divide by *std* (a number, or one a channel), both in the units of the pixels.

    >>> white = {"jpg": np.full((1, 1, 1, 3), 255, np.uint8)}
    >>> normalize(white, np.random.default_rng(0), field="jpg", mean=127.5, std=[127.5, 255, 510])["jpg"].ravel()
    array([1.  , 0.5 , 0.25], dtype=float32)
    """
    pixels = np.array(_images(batch, field), dtype)
    pixels -= np.asarray(mean, dtype)
    pixels /= np.asarray(std, dtype)
    return {**batch, field: pixels}


def to_chw(batch: Batch, rng: np.random.Generator, *, field: str) -> Batch:
    """Move the channels to the front: (n, height, width, channels) -> (n, channels, height, width), as torch has them.

    >>> to_chw({"jpg": np.zeros((5, 2, 4, 3))}, np.random.default_rng(0), field="jpg")["jpg"].shape
    (5, 3, 2, 4)
    """
    return {**batch, field: np.ascontiguousarray(_images(batch, field).transpose(0, 3, 1, 2))}


def replace_label(batch: Batch, rng: np.random.Generator, *, field: str, labels: Mapping[str, Any]) -> Batch:
    """Give the samples whose keys are in *labels* the label for their key.

    >>> batch = {"__key__": ["a", "b"], "cls": np.array([1, 1])}
    >>> replace_label(batch, np.random.default_rng(0), field="cls", labels={"b": 7})["cls"].tolist()
    [1, 7]
    """
    replaced = np.array(batch[field])
    for i, key in enumerate(batch["__key__"]):
        if key in labels:
            replaced[i] = labels[key]
    return {**batch, field: replaced}


def module(batch: Batch, rng: np.random.Generator, *, field: str, module: Callable[[Any], Any]) -> Batch:
    """Give *field* of the batch, as a tensor, to a torch *module*, such as a transform of torchvision; no gradients.

    What it draws from torch's random generator of the CPU depends on *rng*, and so on the batch alone; the generator
    does not change. Several threads call it at once. A ``torch.nn.Module`` may store values in itself during a call,
    for each thread has a copy in each pass, with the same parameters and buffers; other functions may not.

    ::

        doubled = torch.nn.Upsample(scale_factor=2)
        loader = ArrayLoader(stream, 64, fields=fields, transforms=[partial(module, field="jpg", module=doubled)])
    """
    import torch

    from tarshards.loaders.arrays.seeded import Seeded, own_module

    with torch.no_grad(), Seeded(int(rng.integers(1 << 62))):
        made = own_module(module)(torch.from_numpy(np.ascontiguousarray(batch[field])))
    return {**batch, field: made.numpy()}


def _with_values(batch: Batch, field: str, affine: str, function: Callable[..., np.ndarray]) -> Batch:
    """Return the batch with ``function(values, maps)`` of a field; each row of values has the map of its sample."""
    value, maps = batch[field], batch[affine]
    if isinstance(value, tuple):
        values, offsets = value
        return {**batch, field: (function(values, np.repeat(maps, np.diff(offsets), axis=0)), offsets)}
    if not isinstance(value, np.ndarray):
        cure = "readers.array() reads arrays of one shape, and readers.ragged() of any length"
        raise ValueError(f"{field}: an array is wanted, not a {type(value).__name__}; {cure}")
    return {**batch, field: function(value, maps)}


def _moved(points: np.ndarray, maps: np.ndarray) -> np.ndarray:
    moved = np.array(points, np.float32)
    maps = maps.reshape(len(maps), *[1] * (moved.ndim - 2), 2, 3)
    moved[..., :2] = (maps[..., :2] @ moved[..., :2, None])[..., 0] + maps[..., 2]
    return moved


def _images(batch: Batch, field: str) -> np.ndarray:
    images = batch[field]
    if getattr(images, "ndim", None) != 4:
        shape = getattr(images, "shape", type(images).__name__)
        raise ValueError(f"{field}: images of shape (n, height, width, channels) are wanted, not {shape}")
    return np.asarray(images)


def _inside(rng: np.random.Generator, count: int, side: int, size: int) -> np.ndarray:
    """Return a mask along one side that marks a random stretch of *size*: (count, side) of bool."""
    begin = rng.integers(0, side - size + 1, (count, 1))
    pixel = np.arange(side)
    return (begin <= pixel) & (pixel < begin + size)


def _shares(labels: Any, classes: int) -> np.ndarray:
    """One-hot labels, unless they are shares already."""
    labels = np.asarray(labels)
    if labels.ndim == 2:
        return labels.astype(np.float32)
    if len(labels) and not (labels.min() >= 0 and labels.max() < classes):
        raise ValueError(f"labels from {labels.min()} to {labels.max()} in {classes} classes")
    shares: np.ndarray = (labels[:, None] == np.arange(classes)).astype(np.float32)
    return shares


def _mix(values: np.ndarray, share: np.ndarray, other: np.ndarray) -> np.ndarray:
    share = share.reshape(-1, *[1] * (values.ndim - 1))
    mixed: np.ndarray = share * values + (1 - share) * values[other]
    return mixed
