"""Resize a batch of images, in numpy and ctypes: the twin of _pixels.c, used if that is not compiled."""

from __future__ import annotations

from ctypes import string_at

import numpy as np

PRECISION = 14  # bits of a weight


def resize(
    out: np.ndarray,
    addresses: np.ndarray,
    shape: tuple[int, int, int],
    boxes: np.ndarray,
    flips: np.ndarray,
    size: tuple[int, int],
    planar: bool,
    normal: np.ndarray | None,
) -> None:
    """Resize uint8 images of one *shape* (height, width, channels: 1, 3 or 4) to *size* (height, width), antialiased.

    The part of image i in boxes[i] (float32: left, top, right, bottom) is resampled with a triangle filter as wide as
    the scale (at least one pixel), and mirrored where flips[i] (uint8) is not 0. out[i] is HWC, or CHW if *planar*;
    its elements are uint8, or with *normal*, float32 of shape (2, channels), value / normal[0] - normal[1] as float32.
    Raises ValueError for a box outside of its image.
    """
    height, width, channels = shape
    high = np.array([width, height], np.float32)
    if not np.all((boxes[:, :2] >= 0) & (boxes[:, :2] < boxes[:, 2:]) & (boxes[:, 2:] <= high)):
        raise ValueError("a box does not lie in its image")
    for row, address, (left, top, right, bottom), flip in zip(out, addresses.tolist(), boxes, flips):
        pixels = np.frombuffer(string_at(address, height * width * channels), np.uint8).reshape(shape)
        across = _weights(left, right, width, size[1])
        down = _weights(top, bottom, height, size[0])
        pixels = _round(np.matmul(across[:: -1 if flip else 1], pixels.astype(np.float64)))
        pixels = _round(np.tensordot(down, pixels, 1)).astype(np.uint8)
        result = pixels if normal is None else pixels.astype(np.float32) / normal[0] - normal[1]
        row[:] = result.transpose(2, 0, 1) if planar else result


def _weights(low: np.float32, high: np.float32, length: int, size: int) -> np.ndarray:
    """Return integer weights (size, length) with row sums of 2**14, computed in the native twin's steps."""
    scale = float(high - low) / size
    support = max(scale, 1.0)
    centers = (float(low) + (np.arange(size) + 0.5) * scale)[:, None]
    pixels = np.arange(length)
    first = np.maximum(np.trunc(centers - support + 0.5), 0)
    last = np.trunc(centers + support + 0.5)
    triangle = np.maximum(1 - np.abs((pixels - centers + 0.5) / support), 0)
    sums = np.cumsum(np.where((pixels >= first) & (pixels < last), triangle, 0), axis=1)
    steps = np.floor(sums / sums[:, -1:] * 2**PRECISION + 0.5)
    return np.diff(steps, axis=1, prepend=0)


def _round(sums: np.ndarray) -> np.ndarray:
    return np.floor((sums + 2 ** (PRECISION - 1)) / 2**PRECISION)
