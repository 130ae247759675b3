"""Readers of images: cropped, resized, mirrored and normalized as they are written into the batch.

``image()`` gives ``Images``. The first payload decides which of two readers does the work: ``RawImages`` for pixels of
one shape, ``EncodedImages`` for JPEG, PNG and others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, overload

import numpy as np

from tarshards import kernels
from tarshards.errors import DecodeError, shortened, whole_number
from tarshards.loaders.arrays.readers import crops
from tarshards.loaders.arrays.readers.arrays import Rows, header_as
from tarshards.loaders.arrays.readers.reader import ArrayReader, Batch, Reader, failure, sides_of, stack
from tarshards.samples.codecs import jpeg
from tarshards.samples.codecs.image import decode_image, open_image, oriented, read_orientation
from tarshards.samples.codecs.npy import is_npy
from tarshards.samples.payloads import Payloads

Crop = Literal["none", "center", "random_resized"]
Layout = Literal["HWC", "CHW"]


@dataclass(frozen=True)
class View:
    """How images become pixels of the batch: the options of ``image``."""

    size: tuple[int, int] | None
    crop: Crop
    scale: tuple[float, float]
    ratio: Any
    flip: float
    dtype: np.dtype
    layout: Layout
    mean: Any
    std: Any
    exif_transpose: bool
    sizes: Any = ()  # pairs of an epoch and the size from there on

    def at(self, epoch: int) -> View:
        """Return the view for this *epoch*; itself if its size is the same."""
        due = [size for begin, size in self.sizes if begin <= epoch]
        return self if not due or due[-1] == self.size else replace(self, size=due[-1])

    def shape(self, size: tuple[int, int], channels: int) -> tuple[int, int, int]:
        """Return the shape in the batch of an image of this *size*."""
        return (channels, *size) if self.layout == "CHW" else (*size, channels)

    def keeps(self, shape: tuple[int, ...]) -> bool:
        """Return whether an image of this shape, unless it is mirrored, goes into the batch unchanged."""
        as_is = self.crop == "none" and self.layout == "HWC" and self.dtype == np.uint8
        return as_is and self.size in (None, shape[:2])

    def boxes(self, heights: np.ndarray, widths: np.ndarray, draws: np.ndarray) -> np.ndarray:
        """Return the box of each image that is taken."""
        if self.size is None or self.crop == "none":
            return crops.whole(heights, widths)
        if self.crop == "center":
            return crops.center(heights, widths, self.size[1] / self.size[0], self.ratio)
        return crops.random_resized(heights, widths, draws, self.scale, self.ratio)

    def normal(self, channels: int) -> np.ndarray | None:
        """Return for each channel what its values are divided by, and what is then subtracted; None if they stay."""
        if self.dtype == np.uint8:
            return None
        for name, given in ("mean", self.mean), ("std", self.std):
            if np.shape(given) not in ((), (1,), (channels,)):
                raise ValueError(f"{name}={given} is not a number, nor one for each of {channels} channels")
        mean, std = (np.broadcast_to(given, channels) for given in (self.mean, self.std))
        return np.array([255 * std, mean / std], np.float32)


class ImageSizes(NamedTuple):
    """Height and width of images, after they are turned; *are_jpegs* says which a kernel may decode."""

    sizes: np.ndarray
    orientations: np.ndarray
    are_jpegs: np.ndarray
    failed: dict[int, DecodeError]


class RawImages(Rows):
    """Pixels of one shape, as raw bytes or .npy; one call of a kernel resizes many."""

    def __init__(self, rows: Rows, view: View):
        super().__init__(rows.dtype, rows.shape, rows.prefix)
        self.view = view
        self.pixels: tuple[int, ...] = (*rows.shape, 1) if len(rows.shape) == 2 else rows.shape
        if rows.dtype != np.uint8 or len(self.pixels) != 3 or self.pixels[2] not in (1, 3, 4) or 0 in rows.shape:
            raise DecodeError(f"{rows.dtype} of shape {rows.shape} is no image: uint8 of (H, W), or (H, W, 1, 3 or 4)")
        self.normal: Any = view.normal(self.pixels[2])
        self.is_quick: bool = view.keeps(self.pixels) and not view.flip

    def at(self, epoch: int) -> RawImages:
        view = self.view.at(epoch)
        return self if view is self.view else RawImages(Rows(self.dtype, self.shape, self.prefix), view)

    def make(self, count: int) -> np.ndarray:
        """Return an array of images."""
        height, width, channels = self.pixels
        return np.empty((count, *self.view.shape(self.view.size or (height, width), channels)), self.view.dtype)

    def sizes_of(self, payloads: Payloads) -> ImageSizes:
        """Return the size of each image, which is that of the first."""
        count = len(payloads)
        return ImageSizes(np.tile(self.pixels[:2], (count, 1)), np.ones(count, np.int64), np.zeros(count, bool), {})

    def read(self, batch: Batch, payloads: Payloads, draws: np.ndarray) -> dict[int, DecodeError]:
        """Resize the images, or copy them if their size is unchanged."""
        if self.is_quick:
            return super().read(batch, payloads, draws)
        view, flips = self.view, crops.flips_of(draws, self.view.flip)
        count = len(payloads) if view.crop == "random_resized" else 1  # all other boxes are equal
        heights, widths = (np.full(count, side) for side in self.pixels[:2])
        boxes = np.broadcast_to(view.boxes(heights, widths, draws[:count]), (len(payloads), 4))
        return self.fill(batch, payloads, self._write, np.ascontiguousarray(boxes), flips)

    def _write(self, out: np.ndarray, addresses: np.ndarray, boxes: np.ndarray, flips: np.ndarray) -> None:
        _resize(out, addresses, self.pixels, boxes, flips, self.view.layout, self.normal)


class EncodedImages(Reader):
    """JPEG, PNG and other formats of Pillow, as RGB."""

    def __init__(self, view: View):
        self.view = view
        self.normal: Any = view.normal(3)

    def at(self, epoch: int) -> EncodedImages:
        view = self.view.at(epoch)
        return self if view is self.view else EncodedImages(view)

    def make(self, count: int) -> Batch:
        """Return an array of images, or a list if each keeps its size."""
        if self.view.size is None:
            return [None] * count
        return np.empty((count, *self.view.shape(self.view.size, 3)), self.view.dtype)

    def sizes_of(self, payloads: Payloads) -> ImageSizes:
        """Read the size of each image from its header; an image whose header cannot be read has failed."""
        headers = jpeg.read_headers(payloads, self.view.exif_transpose)
        sizes, failed = headers[:, :2].astype(np.int64), dict[int, DecodeError]()
        orientations = np.ones(len(payloads), np.int64)
        are_jpegs = (sizes[:, 0] > 0) & (sizes.prod(axis=1) <= _most_pixels())
        are_known = are_jpegs & (headers[:, 2] == 0)
        for i in np.flatnonzero(~are_known).tolist():
            payload = payloads[i]
            try:
                if self.view.exif_transpose:
                    orientations[i] = read_orientation(payload)
                sizes[i] = _turned(sizes[i] if are_jpegs[i] else _size_of(payload), orientations[i])
            except Exception as exc:
                failed[i] = failure(exc)
        return ImageSizes(sizes, orientations, are_jpegs, failed)

    def read(self, batch: Batch, payloads: Payloads, draws: np.ndarray) -> dict[int, DecodeError]:
        """Decode the crop of each image, no larger than needed, into its row: JPEGs together, others one by one."""
        view = self.view
        sizes, orientations, are_jpegs, failed = self.sizes_of(payloads)
        boxes = view.boxes(sizes[:, 0], sizes[:, 1], draws)
        flips = crops.flips_of(draws, view.flip)
        rows = batch if view.size is not None else self._rows(batch, sizes, failed)
        are_left = are_jpegs & (orientations == 1)
        are_left[list(failed)] = False
        are_read = self._decode(rows, payloads, are_left, sizes, boxes, flips)
        for i in np.flatnonzero(~are_read).tolist():
            if i in failed:
                continue
            payload = payloads[i]
            try:
                height, width = sizes[i].tolist()
                own = slice(i, i + 1)
                self._read_one(rows[i], payload, (height, width), int(orientations[i]), boxes[own], flips[own])
            except Exception as exc:
                failed[i] = failure(exc)
        return failed

    def _rows(self, batch: list[Any], sizes: np.ndarray, failed: dict[int, DecodeError]) -> Any:
        """Put rows of these *sizes* into the batch, those of one array if all are equal; return them or that array."""
        view = self.view
        if not failed and len(sizes) > 0 and bool((sizes == sizes[0]).all()):
            with suppress(MemoryError):  # headers may claim any size; then each image fails by itself
                rows = np.empty((len(sizes), *view.shape((sizes[0, 0], sizes[0, 1]), 3)), view.dtype)
                batch[:] = rows
                return rows
        for i, (height, width) in enumerate(sizes.tolist()):
            if i not in failed:
                try:
                    batch[i] = np.empty(view.shape((height, width), 3), view.dtype)
                except MemoryError as exc:
                    failed[i] = failure(exc)
        return batch

    def _decode(
        self, rows: Any, payloads: Payloads, wanted: np.ndarray, sizes: np.ndarray, boxes: np.ndarray, flips: np.ndarray
    ) -> np.ndarray:
        """Decode the *wanted* JPEGs into their rows by one call of a kernel; return whether each was decoded."""
        if not wanted.any():
            return wanted
        view, targets = self.view, np.empty((len(payloads), 2), np.int32)
        targets[:] = sizes if view.size is None else view.size
        out = rows if view.dtype in (np.uint8, np.float32) else _like(rows)
        decoded, of_payloads = wanted.astype(np.int32), (payloads.addresses, payloads.sizes)
        is_planar = view.layout == "CHW"
        kernels.jpeg.decode(decoded, _addresses(out), *of_payloads, boxes, flips, targets, is_planar, self.normal)
        if out is not rows:
            for i in np.flatnonzero(decoded).tolist():
                rows[i][:] = out[i]
        return decoded > 0

    def join(self, batch: Batch) -> Any:
        """Return images that kept their sizes, if these are equal, as one array, without a copy if possible."""
        if self.view.size is not None:
            return batch
        rows = batch[0].base if batch else None
        if rows is not None and len(rows) == len(batch) and all(image.base is rows for image in batch):
            return rows
        return stack(batch)

    def _read_one(
        self,
        out: np.ndarray,
        payload: bytes,
        size: tuple[int, int],
        orientation: int,
        boxes: np.ndarray,
        flips: np.ndarray,
    ) -> None:
        """Read an image of this *size*, after it is turned, into *out*; *boxes* and *flips* have one row, its own."""
        pixels = np.ascontiguousarray(oriented(decode_image(payload, "rgb8"), orientation))
        if pixels.shape[:2] != size:
            raise ValueError(
                f"a header of {size[1]} x {size[0]} pixels, and {pixels.shape[1]} x {pixels.shape[0]} decoded"
            )
        addresses = np.array([pixels.__array_interface__["data"][0]], np.uint64)
        _resize(out[None], addresses, pixels.shape, boxes, flips, self.view.layout, self.normal)


class Images(ArrayReader):
    """Raw or encoded images; with a *shape*, raw ones of it."""

    def __init__(self, view: View, shape: tuple[int, ...] | None):
        self.view = view
        self.shape = shape

    def at(self, epoch: int) -> Images:
        view = self.view.at(epoch)
        return self if view is self.view else Images(view, self.shape)

    def learns(self, field: str) -> bool:
        """Return whether the shape is in the header of a .npy file."""
        return is_npy(field)

    def open(self, field: str, payload: bytes) -> Reader:
        """Return the reader of raw images, or of encoded ones."""
        if is_npy(field):
            return RawImages(Rows(*header_as(payload, shape=self.shape)), self.view)
        if self.shape is not None:
            return RawImages(Rows(np.dtype(np.uint8), self.shape), self.view)
        return EncodedImages(self.view)


def _resize(
    out: np.ndarray,
    addresses: np.ndarray,
    shape: Any,
    boxes: np.ndarray,
    flips: np.ndarray,
    layout: Layout,
    normal: Any,
) -> None:
    """Resize the *boxes* of images with this *shape* at *addresses* into *out*."""
    size = out.shape[2:] if layout == "CHW" else out.shape[1:3]
    target = out if out.dtype in (np.uint8, np.float32) else np.empty(out.shape, np.float32)
    kernels.pixels.resize(target, addresses, shape, boxes, flips, size, layout == "CHW", normal)
    if target is not out:
        out[:] = target


def _like(rows: Any) -> Any:
    """Return rows of float32, of the shapes of *rows*: an array, or a list that has None for those that failed."""
    if isinstance(rows, np.ndarray):
        return np.empty(rows.shape, np.float32)
    return [None if row is None else np.empty(row.shape, np.float32) for row in rows]


def _addresses(rows: Any) -> np.ndarray:
    """Return the address of each of the rows, which are as in ``_like``."""
    if isinstance(rows, np.ndarray):
        first, step = rows.__array_interface__["data"][0], rows.strides[0]
        return np.uint64(first) + np.arange(len(rows), dtype=np.uint64) * np.uint64(step)
    return np.array([0 if row is None else row.__array_interface__["data"][0] for row in rows], np.uint64)


def _most_pixels() -> float:
    from PIL import Image

    return math.inf if Image.MAX_IMAGE_PIXELS is None else Image.MAX_IMAGE_PIXELS


def _size_of(payload: bytes) -> tuple[int, int]:
    """Return the height and width in the header; raise ValueError if there is none, or for too many pixels."""
    with open_image(payload) as opened:
        height, width = opened.height, opened.width
    if width * height > _most_pixels():
        raise ValueError(f"decompression bomb? {width} x {height} pixels are more than PIL.Image.MAX_IMAGE_PIXELS")
    return height, width


def _turned(size: Any, orientation: int) -> tuple[int, int]:
    """Return *size* with height and width exchanged if this EXIF orientation exchanges them."""
    return (size[1], size[0]) if orientation >= 5 else size


@overload
def image(
    size: int | tuple[int, int] | Mapping[int, int | tuple[int, int]],
    *,
    crop: Crop = "none",
    scale: tuple[float, float] = (0.08, 1),
    ratio: float | tuple[float, float] | None = None,
    flip: float = 0,
    dtype: Any = "uint8",
    layout: Layout = "HWC",
    mean: float | Sequence[float] | None = None,
    std: float | Sequence[float] | None = None,
    shape: tuple[int, ...] | None = None,
    exif_transpose: bool = False,
) -> ArrayReader: ...
@overload
def image(
    size: None = None,
    *,
    flip: float = 0,
    dtype: Any = "uint8",
    layout: Layout = "HWC",
    mean: float | Sequence[float] | None = None,
    std: float | Sequence[float] | None = None,
    shape: tuple[int, ...] | None = None,
    exif_transpose: bool = False,
) -> Reader: ...
def image(
    size: int | tuple[int, int] | Mapping[int, int | tuple[int, int]] | None = None,
    *,
    crop: Crop = "none",
    scale: tuple[float, float] = (0.08, 1),
    ratio: float | tuple[float, float] | None = None,
    flip: float = 0,
    dtype: Any = "uint8",
    layout: Layout = "HWC",
    mean: float | Sequence[float] | None = None,
    std: float | Sequence[float] | None = None,
    shape: tuple[int, ...] | None = None,
    exif_transpose: bool = False,
) -> Reader:
    """Images -> an array of shape (n, height, width, channels), or (n, channels, height, width) for ``layout="CHW"``.

    Encoded images become RGB; of several frames, the first is read, and *exif_transpose* turns it as its EXIF data say.
    Raw uint8 pixels, of the given *shape* or in ``.npy``, keep their channels. With a *size* (height and width in
    pixels), the part of each image that *crop* selects is resized to it, with antialiasing:

    - ``none``: the whole image;
    - ``center``: the largest box in the middle with the aspect of *size*, its sides multiplied by *ratio* (default 1;
      32 / 48 stands for a resize to 48 and a crop to 32);
    - ``random_resized``: a box at a random position, of a random area (*scale*: its range, as parts of the image's
      area) and a random aspect (*ratio*: the range of width / height, default 3 / 4 to 4 / 3).

    A *size* may change with the epoch of the dataset: ``{0: 128, 16: 192}`` is 128 before epoch 16 and 192 from there
    on, the same on all ranks, and after a resume. Without a size, images keep theirs, and make a list if these differ.
    *flip* is the probability that an image is mirrored. Elements are uint8, or of a float *dtype* in [0, 1]; then
    *mean* is subtracted, and the rest divided by *std*, each one number or one for each channel. Of a JPEG, only the
    rows and columns of the crop are decoded, by DCT scaling with the smallest factor that still covers it.
    """
    if crop not in ("none", "center", "random_resized") or layout not in ("HWC", "CHW"):
        raise ValueError(f"crop={crop!r} or layout={layout!r} is none of: none center random_resized; HWC CHW")
    if size is None and crop != "none":
        raise ValueError(f"crop={crop!r} needs a size")
    if ratio is None:
        ratio = (3 / 4, 4 / 3) if crop == "random_resized" else 1.0
    if crop == "random_resized":
        if not isinstance(ratio, tuple) or not (0 < scale[0] <= scale[1] <= 1 and 0 < ratio[0] <= ratio[1]):
            raise ValueError(f"scale={scale} and ratio={ratio} must be pairs in order, scale within (0, 1]")
    elif isinstance(ratio, tuple) or not 0 < ratio <= 1:
        raise ValueError(f"ratio={ratio} must be within (0, 1]: the part of the largest box that is taken")
    if not 0 <= flip <= 1:
        raise ValueError(f"flip={flip} must be a probability")
    sizes = _sizes(size) if isinstance(size, Mapping) else ()
    sides = sizes[0][1] if sizes else sides_of(size)  # type: ignore[arg-type]
    element = np.dtype(dtype)
    if element != np.uint8 and (element.kind != "f" or element.itemsize > 8):
        raise ValueError(f"dtype={element} must be uint8, float16, float32 or float64")
    if element == np.uint8 and (mean is not None or std is not None):
        raise ValueError("mean and std need a float dtype")
    mean, std = 0.0 if mean is None else mean, 1.0 if std is None else std
    view = View(sides, crop, scale, ratio, flip, element, layout, mean, std, exif_transpose, sizes)
    return Images(view, shape)


def _sizes(given: Mapping[int, Any]) -> tuple[tuple[int, tuple[int, int]], ...]:
    """Return pairs of an epoch and the size from there on, in order; raise ValueError for anything else."""
    sizes = [(whole_number("an epoch in size=", epoch, 0), sides_of(size)) for epoch, size in given.items()]
    if 0 not in given or not all(size for _, size in sizes):
        raise ValueError(f"size={shortened(given)} must give the size of epoch 0, and a size for each epoch")
    return tuple(sorted(sizes))  # type: ignore[arg-type]
