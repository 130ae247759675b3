"""JPEG by libjpeg-turbo: the library that Pillow has loaded, or else the system's."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING

from tarshards import kernels

if TYPE_CHECKING:
    import numpy as np

    from tarshards.samples.payloads import Payloads

#: Names of the system's library, by its interface: that of libjpeg 6b or 8.
NAMES = "libjpeg.so.62", "libjpeg.so.8", "libjpeg.62.dylib", "libjpeg.8.dylib"
CHANNELS = {"L": 1, "RGB": 3, "RGBA": 4, "CMYK": 4}


@cache
def library() -> str | None:
    """Return the path of the library that decodes JPEG; None if there is none, so that Pillow decodes."""
    names = [*NAMES]
    with suppress(ImportError):  # of a Pillow for another Python
        from PIL import _imaging

        names.insert(0, _imaging.__file__)
    return next(filter(None, map(kernels.jpeg.open_library, names)), None)


def read_headers(payloads: Payloads, finds_exif: bool = False) -> np.ndarray:
    """Return height, width, and whether EXIF data may be there, of each of *payloads*: see ``kernels.jpeg.headers``."""
    import numpy as np

    library()
    found = np.empty((len(payloads), 3), np.int32)
    kernels.jpeg.headers(found, payloads.addresses, payloads.sizes, finds_exif)
    return found


def decode(data: bytes, size: tuple[int, int], mode: str, eighths: int = 8) -> np.ndarray:
    """Decode an image of this *size* (height, width), at some eighths of it; raise ValueError for any damage."""
    import numpy as np

    height, width = (-(-side * eighths // 8) for side in size)
    pixels = np.empty((height, width, CHANNELS[mode]), np.uint8)
    kernels.jpeg.whole(pixels, data, mode, eighths)
    return pixels
