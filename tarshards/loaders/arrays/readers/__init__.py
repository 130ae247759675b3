"""Readers: they turn the bytes of a field into its part of a batch, for an ArrayLoader or a ShardLoader.

- ``reader``: ``Reader``, the interface; ``parsed``: numbers, text, JSON, any function; ``arrays``: arrays of one shape
- ``images``: decoded, cropped, resized and normalized; ``masks``: what lies beside an image
- ``crops``: the part of an image that is taken; ``draws``: random numbers
- ``sounds``: decoded, resampled, mixed, cropped and padded; ``videos``: clips of frames, resized (may be removed)
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from tarshards.errors import shortened
from tarshards.loaders.arrays.readers.arrays import array, ragged
from tarshards.loaders.arrays.readers.draws import draws_of
from tarshards.loaders.arrays.readers.images import image
from tarshards.loaders.arrays.readers.masks import affine, mask
from tarshards.loaders.arrays.readers.parsed import bytes_, decoded, floating, integer, json, text, using
from tarshards.loaders.arrays.readers.reader import ArrayReader, Reader

__all__ = [
    "ArrayReader",
    "Reader",
    "affine",
    "array",
    "bytes_",
    "decoded",
    "draws_of",
    "floating",
    "image",
    "integer",
    "json",
    "mask",
    "ragged",
    "reader_of",
    "text",
    "using",
]
if find_spec(f"{__name__}.sounds"):  # unless it was removed
    from tarshards.loaders.arrays.readers.sounds import audio as audio
    from tarshards.loaders.arrays.readers.videos import video as video

    __all__ += ["audio", "video"]


def reader_of(value: Any) -> Reader:
    """Return a reader as it is, and any other function as ``using(function)``."""
    if isinstance(value, Reader):
        return value
    name = getattr(value, "__name__", "")
    if globals().get(name) is value:
        raise TypeError(f"readers.{name} is a function that makes a reader: write readers.{name}()")
    if not callable(value):
        cure = "readers.integer(), readers.image(224) and others make readers"
        raise TypeError(f"a reader or a function of bytes is wanted, not {shortened(value)}; {cure}")
    return using(value)
