"""The guard before the decoder: what would end a pipeline is found in the bytes, and does not reach it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from io import BytesIO
from typing import Any, Literal, NamedTuple

import numpy as np

from tarshards.errors import DecodeError, SampleError
from tarshards.samples.codecs import decode_field
from tarshards.samples.codecs.image import EXTENSIONS, FORMATS, decode_image
from tarshards.samples.codecs.image_headers import read_header
from tarshards.samples.fields import Sample, parse_selection, pick_field

BadImage = Literal["drop", "mask"]
Check = Literal["header", "full"]
OnError = Callable[[Exception], Any]

#: What is decoded before DALI, which has no decoder for it; everything else arrives there as its bytes.
DECODED = frozenset(["cls", "cls2", "class", "count", "index", "inx", "id", "npy"])


class Row(NamedTuple):
    """One sample as DALI is fed it: an array a field. It is not *valid* where an image was replaced by a blank one."""

    sample: Sample
    arrays: list[np.ndarray]
    valid: bool


class Guard:
    """Samples -> rows of arrays, one for each of *fields*.

    A field may be ``image:jpg;png``: the first of the two that a sample has, as image. Numbers and ``.npy`` are
    decoded, arrays stay arrays, any other bytes become arrays of uint8. Images are checked first: the headers of JPEG
    and PNG and whether their end is there, of other formats what Pillow says of the header; with *check* "full" by
    decoding. More pixels than ``PIL.Image.MAX_IMAGE_PIXELS`` are refused. *on_bad* "drop" leaves the sample out, "mask"
    puts a black image, as large as the last good one, in the bad one's place. What is wrong with other fields, or has
    another type than the first sample's, is always left out.
    """

    def __init__(self, fields: str | Iterable[str], *, on_bad: BadImage, check: Check):
        if on_bad not in ("drop", "mask"):
            raise ValueError(f'on_bad is "drop" or "mask", not {on_bad!r}')
        if check not in ("header", "full"):
            raise ValueError(f'check is "header" or "full", not {check!r}')
        terms = parse_selection(fields if isinstance(fields, str) else " ".join(fields))
        if any("*" in term.alternatives for term in terms):
            raise ValueError("DALI is fed fields by name, not *")
        self.fields = [term.alternatives for term in terms]
        self.names = [term.name or term.alternatives[0] for term in terms]
        if len(set(self.names)) < len(self.names):
            raise ValueError(f"two fields of the name {max(self.names, key=self.names.count)}")
        self.on_bad, self.check = on_bad, check
        self._size = (256, 256)
        self._types: dict[int, tuple[np.dtype, int]] = {}

    def rows(self, samples: Iterable[Sample], on_error: OnError) -> Iterator[Row]:
        """Yield the rows of *samples*; what is wrong with them goes to *on_error*."""
        for sample in samples:
            if not isinstance(sample, dict):
                raise TypeError(f"a dataset for DALI yields dicts of fields, not {type(sample).__name__}")
            try:
                row = self._row(sample, on_error)
            except (DecodeError, SampleError) as error:
                on_error(error)
                continue
            yield row

    def mask(self, row: Row) -> Row:
        """Return a row with blank images in place of its own."""
        blank = [self._is_image(row.sample, column) for column in range(len(self.fields))]
        return Row(row.sample, [self._blank() if b else array for b, array in zip(blank, row.arrays)], False)

    def _is_image(self, sample: Sample, column: int) -> bool:
        field = pick_field(sample, self.fields[column])
        return field.rpartition(".")[2] in EXTENSIONS and isinstance(sample[field], bytes)

    def _row(self, sample: Sample, on_error: OnError) -> Row:
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
                arrays.append(self._blank())
                valid = False
        return Row(sample, arrays, valid)

    def _array(self, column: int, field: str, value: Any) -> np.ndarray:
        if isinstance(value, bytes):
            extension = field.rpartition(".")[2]
            if extension in EXTENSIONS:
                self._check_image(value)
            elif extension in DECODED:
                value = decode_field(field, value)
        if isinstance(value, bytes):
            return np.frombuffer(value, np.uint8)
        array = np.asarray(value)
        if array.dtype.kind not in "biuf":
            raise DecodeError(f"{type(value).__name__} is not what DALI takes: bytes, numbers, arrays of numbers")
        kind = array.dtype, array.ndim
        if self._types.setdefault(column, kind) != kind:
            first = "{} of {} dimensions".format(*self._types[column])
            raise DecodeError("{} of {} dimensions, and the first sample has {}".format(*kind, first))
        return array

    def _check_image(self, data: bytes) -> None:
        header = read_header(data)
        size = _size_by_pillow(data) if header is None else (header.height, header.width)
        _check_pixels(*size)
        if self.check == "full":
            try:
                decode_image(data, "rgb8")
            except Exception as exc:
                raise DecodeError(str(exc).strip().partition("\n")[0] or type(exc).__name__) from exc
        self._size = size

    def _blank(self) -> np.ndarray:
        return _blank(*self._size)


def describe(error: Exception) -> str:
    """Return in one line what DALI says in many.

    >>> describe(RuntimeError("Critical error in pipeline:\\n...\\nencountered:\\n\\nFailed to decode\\nCurrent ..."))
    'Failed to decode'
    """
    text = str(error).partition("encountered:")[2] or str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__


def _size_by_pillow(data: bytes) -> tuple[int, int]:
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(BytesIO(data), formats=FORMATS) as image:
            return image.height, image.width
    except UnidentifiedImageError:
        what = f"{bytes(data[:12])!r}..." if data else "empty"
        raise DecodeError(f"not an image in any of {' '.join(FORMATS)}: {what}") from None
    except Exception as exc:
        raise DecodeError(str(exc)) from exc


def _check_pixels(height: int, width: int) -> None:
    from PIL import Image

    limit = Image.MAX_IMAGE_PIXELS
    if limit is not None and height * width > limit:
        raise DecodeError(f"decompression bomb? {width} x {height} pixels are more than PIL.Image.MAX_IMAGE_PIXELS")


@lru_cache(64)
def _blank(height: int, width: int) -> np.ndarray:
    """Return the bytes of a black JPEG."""
    from PIL import Image

    stream = BytesIO()
    Image.new("RGB", (width, height)).save(stream, "JPEG")
    return np.frombuffer(stream.getvalue(), np.uint8)
