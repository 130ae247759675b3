"""The twin of _jpeg.c, used if that is not compiled: it takes no image, and the callers decode each by other means."""

from __future__ import annotations

import numpy as np


def open_library(name: str) -> str | None:
    """Open libjpeg-turbo, in the file *name* or a library that this depends on, unless it is open.

    Returns the path of the library; None if there is none, or not with an interface that is known.
    """
    return None


def headers(found: np.ndarray, addresses: np.ndarray, sizes: np.ndarray, finds_exif: bool) -> None:
    """Write a row of int32 for each of the payloads: height, width, and 1 if *finds_exif* and it may have EXIF data.

    The height is 0 of what ``decode`` does not take: anything but JPEGs of 8 bits in grey or three colours, and all if
    no library is open. Raises OSError if a payload is in a mapped file that has shrunk.
    """
    found[:] = 0


def decode(
    decoded: np.ndarray,
    rows: np.ndarray,
    addresses: np.ndarray,
    sizes: np.ndarray,
    boxes: np.ndarray,
    flips: np.ndarray,
    targets: np.ndarray,
    planar: bool,
    normal: np.ndarray | None,
) -> None:
    """Decode JPEGs to RGB, and write what ``pixels.resize`` makes of their boxes to the addresses *rows*.

    Image i is taken unless decoded[i] (int32) is 0; then that is the number of its rows that were decoded, or 0 if it
    is damaged or of a form that is not taken. targets[i] (int32) are the height and width of its output. It is decoded
    at the least number of eighths of its size, up to 4, at which its box covers the target, or else in full. The errors
    are those of ``headers``.
    """
    decoded[:] = 0


def header(data: bytes) -> tuple[int, int, str]:
    """Return the height, width and colours (L RGB YCbCr CMYK YCCK, or empty) of a JPEG.

    Raises ValueError with libjpeg's words, and where no library is open.
    """
    raise ValueError("no library is open")


def whole(out: np.ndarray, data: bytes, mode: str, eighths: int) -> None:
    """Decode a JPEG, at some eighths of its size, into an array of shape (height, width, channels).

    The *mode* is L, RGB, RGBA or CMYK. The errors are those of ``header``; a warning is an error, too.
    """
    raise ValueError("no library is open")
