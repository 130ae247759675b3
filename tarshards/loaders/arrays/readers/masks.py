"""What lies beside an image: its mask, cropped as it is, and the affine map by which boxes and keypoints follow it."""

from __future__ import annotations

from typing import Any, overload

import numpy as np

from tarshards.errors import DecodeError, shortened
from tarshards.loaders.arrays.readers import crops
from tarshards.loaders.arrays.readers.images import Images, View
from tarshards.loaders.arrays.readers.reader import ArrayReader, Batch, Reader, failure, stack
from tarshards.samples.codecs.image import decode_mask, read_sizes
from tarshards.samples.payloads import Payloads


class Masks(ArrayReader):
    """Numbers of pixels in PNG and other formats; each pixel of the batch is one of the file, as *view* says."""

    def __init__(self, view: View, dtype: np.dtype):
        self.view = view
        self.dtype = dtype

    def at(self, epoch: int) -> Masks:
        view = self.view.at(epoch)
        return self if view is self.view else Masks(view, self.dtype)

    def make(self, count: int) -> Batch:
        """Return an array of masks, or a list if each keeps its size."""
        return [None] * count if self.view.size is None else np.empty((count, *self.view.size), self.dtype)

    def read(self, batch: Batch, payloads: Payloads, draws: np.ndarray) -> dict[int, DecodeError]:
        """Decode each mask, and take the pixels of its crop."""
        view = self.view
        headers, others = read_sizes(payloads)
        failed = {row: error for row, error in others.items() if isinstance(error, DecodeError)}
        sizes = headers.astype(np.int64)
        sizes[list(failed)] = 1
        boxes, flips = view.boxes(sizes[:, 0], sizes[:, 1], draws), crops.flips_of(draws, view.flip)
        for row, payload in enumerate(payloads):
            if row in failed:
                continue
            try:
                numbers = decode_mask(payload)
                (height, width), (tall, wide) = sizes[row].tolist(), numbers.shape
                if (tall, wide) != (height, width):
                    raise ValueError(f"a header of {width} x {height} pixels, and {wide} x {tall} decoded")
                batch[row] = self._cut(numbers, boxes[row].astype(np.float64), bool(flips[row]))
            except Exception as exc:
                failed[row] = failure(exc)
        return failed

    def _cut(self, numbers: np.ndarray, box: np.ndarray, is_mirrored: bool) -> np.ndarray:
        """Return the pixels of a mask in which the middles of the pixels of the batch lie."""
        height, width = numbers.shape if self.view.size is None else self.view.size
        left, top, right, bottom = box
        rows = top + (np.arange(height) + 0.5) * ((bottom - top) / height)
        columns = left + (np.arange(width) + 0.5) * ((right - left) / width)
        columns = columns[::-1] if is_mirrored else columns
        # Two calls without the GIL: one for both axes would keep it.
        cut = numbers.take(rows.astype(np.intp), 0).take(columns.astype(np.intp), 1)
        if not np.can_cast(cut.dtype, self.dtype) and cut.size:
            limits, (least, most) = np.iinfo(self.dtype), (int(cut.min()), int(cut.max()))
            if least < limits.min or most > limits.max:
                raise ValueError(f"numbers from {least} to {most} in a mask of {self.dtype}; set dtype=")
        return cut.astype(self.dtype, copy=False)

    def join(self, batch: Batch) -> Any:
        """Return masks that kept their sizes as one array if these are equal."""
        return batch if self.view.size is not None else stack(batch)


class AffineMaps(ArrayReader):
    """The maps from positions in the images that *images* reads to positions in the batch."""

    def __init__(self, images: Any):
        self.images = images

    def learns(self, field: str) -> bool:
        """Return whether the size of raw images is in the header of a .npy file."""
        return self.images.learns(field)

    def open(self, field: str, payload: bytes) -> AffineMaps:
        """Return the reader for raw images, or for encoded ones."""
        return AffineMaps(self.images.open(field, payload))

    def at(self, epoch: int) -> AffineMaps:
        images = self.images.at(epoch)
        return self if images is self.images else AffineMaps(images)

    def make(self, count: int) -> np.ndarray:
        """Return an array of shape (count, 2, 3)."""
        return np.empty((count, 2, 3), np.float32)

    def read(self, batch: Batch, payloads: Payloads, draws: np.ndarray) -> dict[int, DecodeError]:
        """Compute the maps from the sizes in the headers."""
        view = self.images.view
        sizes, _, _, failed = self.images.sizes_of(payloads)
        sizes[list(failed)] = 1
        boxes, flips = view.boxes(sizes[:, 0], sizes[:, 1], draws), crops.flips_of(draws, view.flip)
        batch[:] = crops.affine_maps(boxes, flips, sizes if view.size is None else np.array([view.size]))
        return failed


@overload
def mask(image: ArrayReader, *, dtype: Any = "uint8") -> ArrayReader: ...
@overload
def mask(image: Reader, *, dtype: Any = "uint8") -> Reader: ...
def mask(image: Reader, *, dtype: Any = "uint8") -> Reader:
    """Masks of classes or objects -> integers of shape (n, height, width), cropped and mirrored as *image*.

    *image* is the reader of the images, made by ``image``. A mask of the same size as its image gets the same box and
    is mirrored alike; each of its pixels is one of the file (nearest neighbour), so that no number is made up. It is a
    grey image, or one with a palette, whose indices count, in a format without loss such as PNG. A number that does not
    fit into *dtype*, an integer type, is an error.
    """
    element = np.dtype(dtype)
    if element.kind not in "iu":
        raise ValueError(f"dtype={element} must be an integer type")
    return Masks(_checked(image, "mask").view, element)


def affine(image: Reader) -> ArrayReader:
    """Images -> the maps of positions in them to positions in the batch, float32 of shape (n, 2, 3).

    *image* is the reader of the same field, made by ``image``. The map [[a, 0, c], [0, e, f]] takes x, y to a x + c,
    e y + f, in pixels, where (0, 0) is the upper left corner of the image, and (0.5, 0.5) the middle of its first
    pixel; a is negative in a mirrored image. ``augment.move_points`` and ``move_boxes`` apply it.
    """
    return AffineMaps(_checked(image, "affine"))


def _checked(image: Any, name: str) -> Images:
    if not isinstance(image, Images):
        raise TypeError(f"readers.{name} takes the reader of the images, readers.image(...), not {shortened(image)}")
    return image
