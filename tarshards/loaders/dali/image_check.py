"""The check before DALI: one undecodable image ends a pipeline, so bad images are found by their bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from io import BytesIO
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
from nvidia.dali.tensors import TensorCPU, TensorListCPU

from tarshards.errors import DecodeError, SampleError
from tarshards.samples.codecs import decode_field
from tarshards.samples.codecs.basic import INTEGERS
from tarshards.samples.codecs.image import IMAGES, check_image, read_sizes
from tarshards.samples.fields import parse_terms, pick_field
from tarshards.samples.keys import Sample
from tarshards.samples.payloads import Payloads

BadImagePolicy = Literal["drop", "mask"]
ImageCheck = Literal["header", "full"]

#: Fields that are decoded before DALI, which has no decoder for them; all others are passed to it as bytes.
DECODED = frozenset([*INTEGERS, "npy"])
UNDECODED = frozenset(["GIF", "ICO", "AVIF", "HEIF", "JXL"])  # formats of Pillow and its plugins
NUMBERS = "biuf"  # the kinds of dtypes that DALI has


class FieldRows(NamedTuple):
    """The values of one field in several samples, with its name in each, and whether the bytes there are an image.

    *values* are an array with a row for each sample, a list of bytes, numbers and arrays, or, as ``readers.ragged``
    gives them, the bytes of all samples end to end and their offsets.
    """

    names: Sequence[str]
    are_images: np.ndarray
    values: Any


class EncodedBatch(NamedTuple):
    """The samples of one batch as input of DALI; those from *real* on are repeats that fill it.

    Each of *columns* is an array with a row for each sample, or a list of DALI's tensors. *images* says for each column
    which rows are encoded images. *sound* is False where a black image replaces a bad one.
    """

    keys: Sequence[Any]
    urls: Sequence[Any]
    columns: list[Any]
    images: list[np.ndarray]
    sound: np.ndarray
    real: int

    @property
    def valid(self) -> np.ndarray:
        """Which rows are neither masked nor repeats."""
        return self.sound & (np.arange(len(self.keys)) < self.real)

    def take(self, rows: Sequence[int], *, fill: int = 0) -> EncodedBatch:
        """Return a batch of some rows, with as many repeats of the last of them as fill it."""
        real, rows = len(rows), [*rows, *[*rows][-1:] * fill]
        at = np.array(rows, np.int64)
        columns = [
            column[at] if isinstance(column, np.ndarray) else [column[row] for row in rows] for column in self.columns
        ]
        keys, urls = ([names[row] for row in rows] for names in (self.keys, self.urls))
        return EncodedBatch(keys, urls, columns, [images[at] for images in self.images], self.sound[at], real)

    def inputs(self) -> list[Any]:
        """Return what ``fn.external_source`` takes for each field; with ``no_copy=True`` it copies nothing."""
        return [
            column if isinstance(column, np.ndarray) else TensorListCPU(column, contiguous=False)
            for column in self.columns
        ]


class ImageGuard:
    """Turns samples into arrays for DALI, one per entry of *fields*, and stops images that would end a pipeline.

    An entry ``image:jpg;png`` is named ``image`` and takes the first of the two fields that a sample has. Numbers and
    ``.npy`` are decoded, arrays stay arrays, other bytes become tensors of uint8.

    *check* "header" checks the header and the end of a JPEG or PNG, and what Pillow reads of the header of other
    formats; "full" also decodes the image. Images of more than ``PIL.Image.MAX_IMAGE_PIXELS`` pixels are refused.

    *on_bad* "drop" leaves out the sample of a bad image; "mask" replaces the image by a black one of the size of the
    last good one. A sample with another error, or with a field of another type than in the first sample, is always left
    out.
    """

    def __init__(self, fields: str | Iterable[str], *, on_bad: BadImagePolicy, check: ImageCheck):
        if on_bad not in ("drop", "mask"):
            raise ValueError(f'on_bad is "drop" or "mask", not {on_bad!r}')
        if check not in ("header", "full"):
            raise ValueError(f'check is "header" or "full", not {check!r}')
        terms = parse_terms(fields if isinstance(fields, str) else " ".join(fields))
        if any("*" in term.alternatives for term in terms):
            raise ValueError("DALI needs fields by name, not *")
        self.fields: list[list[str]] = [term.alternatives for term in terms]
        self.names: list[str] = [term.column for term in terms]
        if len(set(self.names)) < len(self.names):
            raise ValueError(f"two fields are named {max(self.names, key=self.names.count)}")
        self.on_bad, self.check = on_bad, check
        self._last_size = [256, 256]
        self._types: dict[int, tuple[np.dtype, int]] = {}

    def encode_samples(self, samples: Iterable[Sample], on_error: Callable[[Exception], Any]) -> EncodedBatch:
        """Return *samples* as a batch, as ``encode`` does; those without a field are left out, too."""
        found, names = [], []
        for sample in samples:
            if not isinstance(sample, dict):
                raise TypeError(f"a dataset for DALI yields dicts of fields, not {type(sample).__name__}")
            try:
                names.append([pick_field(sample, alternatives) for alternatives in self.fields])
            except SampleError as error:
                on_error(error)
            else:
                found.append(sample)
        columns = [
            FieldRows(own, np.array([*map(IMAGES.has, own)]), [sample[name] for sample, name in zip(found, own)])
            for own in zip(*names)
        ]
        keys, urls = ([sample.get(name) for sample in found] for name in ("__key__", "__url__"))
        return self.encode(keys, urls, columns, on_error)

    def encode(
        self,
        keys: Sequence[Any],
        urls: Sequence[Any],
        columns: Iterable[FieldRows],
        on_error: Callable[[Exception], Any],
    ) -> EncodedBatch:
        """Return samples as a batch; call *on_error* with the errors of those that are left out or masked."""
        batch = EncodedBatch(keys, urls, [], [], np.ones(len(keys), bool), len(keys))
        errors: dict[int, list[tuple[DecodeError, bool]]] = {}  # of rows, with whether it is masked
        for number, column in enumerate(columns if keys else ()):
            encoded, are_images, failed = self._encode(number, column)
            batch.columns.append(encoded)
            batch.images.append(are_images)
            for row, error in failed.items():
                located = DecodeError(error.reason, url=urls[row], key=keys[row], field=column.names[row])
                located.__cause__ = error.__cause__
                errors.setdefault(row, []).append((located, self.on_bad == "mask" and bool(are_images[row])))
        left_out = set[int]()
        for row in sorted(errors):
            batch.sound[row] = False
            for located, is_masked in errors[row]:
                on_error(located)
                if not is_masked:
                    left_out.add(row)
                    break
        return batch.take([row for row in range(len(keys)) if row not in left_out]) if left_out else batch

    def mask(self, batch: EncodedBatch, row: int) -> None:
        """Replace the images of a sample by black ones."""
        for column, are_images in zip(batch.columns, batch.images):
            if are_images[row]:
                column[row] = _black_jpeg(*self._last_size)
        batch.sound[row] = False

    def is_decodable(self, batch: EncodedBatch, row: int) -> bool:
        """Whether the CPU decodes the images of a sample."""
        try:
            for column, are_images in zip(batch.columns, batch.images):
                if are_images[row]:
                    check_image(np.asarray(column[row]).tobytes())
        except DecodeError:
            return False
        return True

    def _encode(self, number: int, column: FieldRows) -> tuple[Any, np.ndarray, dict[int, DecodeError]]:
        """Return the *number*-th column of a batch, which of its rows are images, and the errors of rows."""
        names, are_images, values = column
        if isinstance(values, tuple):
            data, offsets = values
            view = memoryview(data)
            parts: list[Any] = [view[begin:end] for begin, end in pairwise(offsets.tolist())]
            images = Payloads.within(data, offsets[:-1], np.diff(offsets))[are_images]
            return self._tensors(parts, are_images, images, {})
        no_images = np.zeros(len(names), bool)
        if isinstance(values, np.ndarray) and values.dtype.kind in NUMBERS:
            try:
                return self._native(number, values, values.ndim - 1), no_images, {}
            except DecodeError as error:
                return values, no_images, dict.fromkeys(range(len(names)), error)
        parts, failed = [None] * len(names), {}
        for row, (name, value) in enumerate(zip(names, values)):
            try:
                parts[row] = self._part(number, name, value)
            except DecodeError as error:
                failed[row] = error
        arrays = [part for part in parts if isinstance(part, np.ndarray)]
        if arrays and not arrays[0].ndim:
            return np.array([arrays[0] if part is None else part for part in parts]), no_images, failed
        are_images = are_images & [isinstance(part, bytes) for part in parts]
        images = Payloads.of([part for part, is_image in zip(parts, are_images) if is_image])
        return self._tensors(parts, are_images, images, failed)

    def _tensors(
        self, parts: Iterable[Any], are_images: np.ndarray, images: Payloads, failed: dict[int, DecodeError]
    ) -> tuple[list[TensorCPU], np.ndarray, dict[int, DecodeError]]:
        """Return *parts* as ``_encode`` does, and check the *images* among them."""
        tensors = [TensorCPU(b"" if part is None else part) for part in parts]
        sizes, bad = self._check(images)
        rows = np.flatnonzero(are_images).tolist()
        for i, error in bad.items():
            failed[rows[i]] = error
            if self.on_bad == "mask":
                tensors[rows[i]] = _black_jpeg(*self._last_good(sizes[:i]))
        self._last_size = self._last_good(sizes)
        return tensors, are_images, failed

    def _part(self, number: int, name: str, value: Any) -> Any:
        """Return the bytes, or the array, that DALI gets for a value of the *number*-th column."""
        if isinstance(value, bytes) and name.rpartition(".")[2] in DECODED:
            value = decode_field(name, value)
        if isinstance(value, bytes):
            return value
        array = np.asarray(value)
        if array.dtype.kind not in NUMBERS:
            raise DecodeError(f"DALI takes bytes, numbers and arrays of numbers, not {type(value).__name__}")
        return self._native(number, array, array.ndim)

    def _native(self, number: int, array: np.ndarray, dimensions: int) -> np.ndarray:
        """Return *array* in the form that DALI reads; raise DecodeError if its type is not that of the first sample."""
        kind = array.dtype.newbyteorder("="), dimensions
        if self._types.setdefault(number, kind) != kind:
            first = "{} of {} dimensions".format(*self._types[number])
            raise DecodeError("{} of {} dimensions, and the first sample has {}".format(*kind, first))
        return np.asarray(array, kind[0], order="C")

    def _check(self, images: Payloads) -> tuple[np.ndarray, dict[int, DecodeError]]:
        """Return height and width of images, 0 for bad ones, and the errors of these by row."""
        from PIL import Image

        sizes, others = read_sizes(images)
        bad: dict[int, DecodeError] = {}
        for row, found in others.items():
            if isinstance(found, DecodeError):
                bad[row] = found
            elif found.kind in UNDECODED:
                bad[row] = DecodeError(f"{found.kind}, which DALI does not decode")
        most = Image.MAX_IMAGE_PIXELS
        for row in [] if most is None else np.flatnonzero(sizes.prod(axis=1, dtype=np.uint64) > most).tolist():
            height, width = sizes[row].tolist()
            words = f"{width} x {height} pixels are more than PIL.Image.MAX_IMAGE_PIXELS"
            bad.setdefault(row, DecodeError(f"decompression bomb? {words}"))
        for row in range(len(images)) if self.check == "full" else ():
            if row not in bad:
                try:
                    check_image(images[row])
                except DecodeError as error:
                    bad[row] = error
        sizes[[*bad]] = 0
        return sizes, bad

    def _last_good(self, sizes: np.ndarray) -> list[int]:
        """Return the last of *sizes* that is not 0, or else the last one of earlier images."""
        good = sizes[sizes[:, 0] > 0]
        return good[-1].tolist() if len(good) else self._last_size


@lru_cache(64)
def _black_jpeg(height: int, width: int) -> TensorCPU:
    from PIL import Image

    stream = BytesIO()
    Image.new("RGB", (width, height)).save(stream, "JPEG")
    return TensorCPU(stream.getvalue())
