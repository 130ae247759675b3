"""The part of each image that is taken, and which images are mirrored: a function of the draws, for many at once."""

from __future__ import annotations

import numpy as np

from tarshards.loaders.arrays.readers.draws import uniform

#: The random numbers of the ten boxes that are tried, as in torchvision, four for each; number 0 decides on mirroring.
NUMBERS = np.arange(1, 41).reshape(10, 4)


def flips_of(draws: np.ndarray, probability: float) -> np.ndarray:
    """Return 1 (uint8) for the images that are mirrored."""
    return (uniform(draws, 0) < probability).astype(np.uint8) if probability else np.zeros(len(draws), np.uint8)


def whole(heights: np.ndarray, widths: np.ndarray) -> np.ndarray:
    """Return the boxes of whole images: left, top, right and bottom in pixels, a row of float32 for each image.

    >>> whole(np.array([10]), np.array([20])).tolist()
    [[0.0, 0.0, 20.0, 10.0]]
    """
    return _boxes(0 * widths, 0 * heights, widths, heights)


def center(heights: np.ndarray, widths: np.ndarray, aspect: float, part: float) -> np.ndarray:
    """Return boxes in the middle with this *aspect* (width / height), whose sides are *part* of the largest that fit.

    >>> center(np.array([100]), np.array([300]), aspect=1, part=0.5).tolist()
    [[125.0, 25.0, 175.0, 75.0]]
    """
    w = np.minimum(widths, heights * aspect) * part
    h = np.minimum(heights, widths / aspect) * part
    return _boxes((widths - w) / 2, (heights - h) / 2, (widths + w) / 2, (heights + h) / 2)


def random_resized(
    heights: np.ndarray,
    widths: np.ndarray,
    draws: np.ndarray,
    scale: tuple[float, float],
    ratio: tuple[float, float],
) -> np.ndarray:
    """Return random boxes: *scale* and *ratio* are the ranges of their part of the area and aspect (width / height).

    This is the crop of torchvision's RandomResizedCrop: the aspect is log-uniform, sides are whole pixels, and after
    ten boxes that do not fit, the middle of the image is taken, cropped to the nearest aspect in the range.
    """
    low, high = np.log(ratio[0]), np.log(ratio[1])
    boxes = _middle(heights, widths, ratio)
    missing = np.arange(len(draws))
    for tried in NUMBERS[:1], NUMBERS[1:]:  # all others together, for the images that the first box does not fit
        numbers = uniform(draws[missing], tried.T[:, :, None])  # for each box: area, aspect, left, top
        height, width = heights[missing], widths[missing]
        area = height * width * (scale[0] + (scale[1] - scale[0]) * numbers[0])
        aspect = np.exp(low + (high - low) * numbers[1])
        w, h = np.rint(np.sqrt(area * aspect)), np.rint(np.sqrt(area / aspect))
        fit = (w > 0) & (w <= width) & (h > 0) & (h <= height)
        first = fit.argmax(axis=0), np.arange(len(missing))
        w, h, fits = w[first], h[first], fit[first]
        left, top = np.floor(numbers[2][first] * (width - w + 1)), np.floor(numbers[3][first] * (height - h + 1))
        boxes[missing[fits]] = _boxes(left, top, left + w, top + h)[fits]
        missing = missing[~fits]
    return boxes


def affine_maps(boxes: np.ndarray, flips: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return the maps from positions in images to those in the batch, for boxes resized to *sizes* (height, width).

    >>> affine_maps(np.array([[2, 1, 18, 9]]), np.array([1]), np.array([[4, 8]])).tolist()
    [[[-0.5, 0.0, 9.0], [0.0, 0.5, -0.5]]]
    """
    left, top, right, bottom = boxes.T.astype(np.float64)
    height, width = np.broadcast_to(sizes, (len(boxes), 2)).T
    maps = np.zeros((len(boxes), 2, 3), np.float32)
    across, down = width / (right - left), height / (bottom - top)
    maps[:, 0, 0] = np.where(flips, -across, across)
    maps[:, 0, 2] = np.where(flips, width + left * across, -left * across)
    maps[:, 1, 1], maps[:, 1, 2] = down, -top * down
    return maps


def _middle(heights: np.ndarray, widths: np.ndarray, ratio: tuple[float, float]) -> np.ndarray:
    """Return the largest boxes in the middle, in whole pixels, whose aspects are the images', clipped to *ratio*."""
    w = np.clip(np.rint(heights * ratio[1]), 1, widths)
    h = np.clip(np.rint(widths / ratio[0]), 1, heights)
    left, top = (widths - w) // 2, (heights - h) // 2
    return _boxes(left, top, left + w, top + h)


def _boxes(left: np.ndarray, top: np.ndarray, right: np.ndarray, bottom: np.ndarray) -> np.ndarray:
    return np.stack([left, top, right, bottom], axis=1).astype(np.float32)
