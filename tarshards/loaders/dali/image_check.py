"""The check before DALI: one undecodable image ends a pipeline, so bad images are found by their bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from io import BytesIO
from typing import Any, Literal, NamedTuple

import numpy as np

from tarshards.errors import DecodeError, SampleError
from tarshards.samples.codecs import decode_field
from tarshards.samples.codecs.basic import INTEGERS
from tarshards.samples.codecs.image import IMAGES, check_image, read_size
from tarshards.samples.fields import parse_terms, pick_field
from tarshards.samples.keys import Sample

BadImagePolicy = Literal["drop", "mask"]
ImageCheck = Literal["header", "full"]

#: Fields that are decoded before DALI, which has no decoder for them; all others are passed to it as bytes.
DECODED = frozenset([*INTEGERS, "npy"])
UNDECODED = frozenset(["GIF", "ICO", "AVIF", "HEIF", "JXL"])  # formats of Pillow and its plugins


class EncodedSample(NamedTuple):
    """One sample as input of DALI: one array per field. *valid* is False if a black image replaces a bad one."""

    sample: Sample
    arrays: list[np.ndarray]
    valid: bool


class ImageGuard:
    """Turns samples into arrays for DALI, one per entry of *fields*, and stops images that would end a pipeline.

    An entry ``image:jpg;png`` is named ``image`` and takes the first of the two fields that a sample has. Numbers and
    ``.npy`` are decoded, arrays stay arrays, other bytes become arrays of uint8.

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
        self._last_size = (256, 256)
        self._types: dict[int, tuple[np.dtype, int]] = {}

    def encode(self, samples: Iterable[Sample], on_error: Callable[[Exception], Any]) -> Iterator[EncodedSample]:
        """Yield *samples* as arrays; call *on_error* with the errors of samples that are left out or masked."""
        for sample in samples:
            if not isinstance(sample, dict):
                raise TypeError(f"a dataset for DALI yields dicts of fields, not {type(sample).__name__}")
            try:
                encoded = self._encode(sample, on_error)
            except (DecodeError, SampleError) as error:
                on_error(error)
                continue
            yield encoded

    def mask(self, encoded: EncodedSample) -> EncodedSample:
        """Return a sample with black images instead of its own."""
        arrays = [
            _black_jpeg(*self._last_size) if self._is_image(encoded.sample, column) else array
            for column, array in enumerate(encoded.arrays)
        ]
        return EncodedSample(encoded.sample, arrays, False)

    def is_decodable(self, encoded: EncodedSample) -> bool:
        """Whether the CPU decodes the images of a sample."""
        try:
            for column, array in enumerate(encoded.arrays):
                if self._is_image(encoded.sample, column):
                    check_image(array.tobytes())
        except DecodeError:
            return False
        return True

    def _is_image(self, sample: Sample, column: int) -> bool:
        field = pick_field(sample, self.fields[column])
        return IMAGES.has(field) and isinstance(sample[field], bytes)

    def _encode(self, sample: Sample, on_error: Callable[[Exception], Any]) -> EncodedSample:
        arrays, valid = [], True
        for column, alternatives in enumerate(self.fields):
            field = pick_field(sample, alternatives)
            try:
                arrays.append(self._array(column, field, sample[field]))
            except DecodeError as error:
                located = DecodeError(error.reason, url=sample.get("__url__"), key=sample.get("__key__"), field=field)
                located.__cause__ = error.__cause__
                if self.on_bad == "drop" or not self._is_image(sample, column):
                    raise located from error.__cause__
                on_error(located)
                arrays.append(_black_jpeg(*self._last_size))
                valid = False
        return EncodedSample(sample, arrays, valid)

    def _array(self, column: int, field: str, value: Any) -> np.ndarray:
        if isinstance(value, bytes):
            if IMAGES.has(field):
                self._check_image(value)
            elif field.rpartition(".")[2] in DECODED:
                value = decode_field(field, value)
        if isinstance(value, bytes):
            return np.frombuffer(value, np.uint8)
        array = np.asarray(value)
        if array.dtype.kind not in "biuf":
            raise DecodeError(f"DALI takes bytes, numbers and arrays of numbers, not {type(value).__name__}")
        kind = array.dtype, array.ndim
        if self._types.setdefault(column, kind) != kind:
            first = "{} of {} dimensions".format(*self._types[column])
            raise DecodeError("{} of {} dimensions, and the first sample has {}".format(*kind, first))
        return array

    def _check_image(self, data: bytes) -> None:
        size = _size_of(data)
        _check_pixels(*size)
        if self.check == "full":
            check_image(data)
        self._last_size = size


def _size_of(data: bytes) -> tuple[int, int]:
    try:
        kind, height, width = read_size(data)
    except DecodeError:
        raise
    except Exception as exc:
        raise DecodeError(str(exc)) from exc
    if kind in UNDECODED:
        raise DecodeError(f"{kind}, which DALI does not decode")
    return height, width


def _check_pixels(height: int, width: int) -> None:
    from PIL import Image

    limit = Image.MAX_IMAGE_PIXELS
    if limit is not None and height * width > limit:
        raise DecodeError(f"decompression bomb? {width} x {height} pixels are more than PIL.Image.MAX_IMAGE_PIXELS")


@lru_cache(64)
def _black_jpeg(height: int, width: int) -> np.ndarray:
    from PIL import Image

    stream = BytesIO()
    Image.new("RGB", (width, height)).save(stream, "JPEG")
    return np.frombuffer(stream.getvalue(), np.uint8)
