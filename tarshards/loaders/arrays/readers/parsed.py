"""Readers that parse or decode: numbers, text, JSON, the codec of a field, any function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tarshards import kernels
from tarshards.errors import DecodeError, check_function
from tarshards.loaders.arrays.readers.reader import ArrayReader, Batch, Reader, stack
from tarshards.samples.codecs import ByExtension
from tarshards.samples.codecs.basic import decode_integer, decode_text, encoding_of
from tarshards.samples.codecs.image import IMAGES
from tarshards.samples.payloads import Payloads
from tarshards.storage.remote import check_ratio


class Numbers(ArrayReader):
    """Numbers in text, which the kernel *parse* parses, many at once; an error says that a payload is not *kind*."""

    is_quick = True

    def __init__(self, dtype: str, parse: str, kind: str):
        self.dtype = dtype
        self.parse = parse
        self.kind = kind

    def make(self, count: int) -> np.ndarray:
        """Return an array of shape (count,)."""
        return np.zeros(count, self.dtype)

    def read(self, batch: Batch, payloads: Payloads, draws: np.ndarray) -> dict[int, DecodeError]:
        """Parse all payloads; the kernel stops at each that it cannot parse."""
        parse = getattr(kernels.rows, self.parse)
        failed: dict[int, DecodeError] = {}
        begun = 0
        while (bad := parse(batch[begun:], payloads.addresses[begun:], payloads.sizes[begun:])) >= 0:
            begun += bad
            try:
                batch[begun] = self.after_mark(payloads[begun])
            except (ValueError, OverflowError):
                failed[begun] = DecodeError(f"{payloads[begun][:20]!r} is not {self.kind}")
            begun += 1
        return failed

    def after_mark(self, payload: bytes) -> Any:
        """Parse text with a byte order mark, which the kernel does not; raise ValueError for other text."""
        if encoding_of(payload) == "utf-8":
            raise ValueError
        return (decode_integer if self.dtype == "int64" else lambda data: float(decode_text(data)))(payload)


class Function(Reader):
    """A function of a payload, or of the value that ops have made from it."""

    takes_values = True

    def __init__(self, function: Callable[[bytes], Any], pad: Any = None):
        check_function(function, "a reader")
        self.function = function
        self.pad = pad

    def decode(self, payload: bytes) -> Any:
        """Call the function."""
        return self.function(payload)

    def join(self, batch: Batch) -> Any:
        """Return an array if ``stack`` can make one."""
        return stack(batch, self.pad)


class Codec(Reader):
    """The codec of the field's extension."""

    def __init__(self, by_extension: ByExtension, pad: Any, field: str = ""):
        self.by_extension = by_extension
        self.pad = pad
        self.field = field

    def open(self, field: str, payload: bytes) -> Reader:
        """Return the reader of the codec for the extension of *field*."""
        return Codec(self.by_extension, self.pad, field)

    def decode(self, payload: bytes) -> Any:
        """Decode one payload; the caller adds field and key to an error."""
        try:
            return self.by_extension.decode(self.field, payload)
        except DecodeError as exc:
            raise DecodeError(exc.reason) from exc.__cause__

    def join(self, batch: Batch) -> Any:
        """Return an array if ``stack`` can make one."""
        return stack(batch, self.pad)


class Plain(Reader):
    """A list of payloads, decoded with the codec of the extension *codec* unless that is None."""

    def __init__(self, codec: str | None):
        self.codec = codec
        self.by_extension: ByExtension = ByExtension()

    def decode(self, payload: bytes) -> Any:
        """Decode one payload, or return it."""
        if self.codec is None:
            return payload
        try:
            return self.by_extension.decode(self.codec, payload)
        except DecodeError as exc:
            raise DecodeError(exc.reason) from exc.__cause__


def integer() -> ArrayReader:
    """ASCII decimals (``cls``) -> int64 of shape (n,). Binary numbers are ``array("<i4", ())``."""
    return Numbers("int64", "parse_integers", "a decimal integer of 64 bits")


def floating() -> ArrayReader:
    """Numbers as Python's ``float`` reads them -> float64 of shape (n,). Binary numbers are ``array("<f4", ())``."""
    return Numbers("float64", "parse_floats", "a number")


def bytes_() -> Reader:
    """The unchanged bytes -> a list of bytes."""
    return Plain(None)


def text() -> Reader:
    """UTF-8 -> a list of str."""
    return Plain("txt")


def json() -> Reader:
    """JSON -> a list of objects."""
    return Plain("json")


def decoded(images: str | None = None, *, pad: Any = None, max_ratio: float | None = None) -> Reader:
    """What the codec of the field's extension gives, images by an imagespec -> an array, or a list.

    Numbers, and arrays of one dtype and shape, become an array with a row for each sample. With *pad*, so do arrays of
    different shapes: it fills every axis up to the longest of the batch. Anything else becomes a list. *max_ratio* is
    as for ``decode``.
    """
    if max_ratio is not None:
        check_ratio(max_ratio)
    words = () if images is None else (IMAGES.check(images),)
    return Codec(ByExtension(words, max_ratio=max_ratio), pad)


def using(function: Callable[[bytes], Any], *, pad: Any = None) -> Reader:
    """What ``function(data: bytes)`` gives -> an array or a list, as ``decoded``; many threads call it at once."""
    return Function(function, pad)
