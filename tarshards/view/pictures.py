"""Images in formats that any browser shows: thumbnails for lists, and whole images up to a number of pixels."""

from __future__ import annotations

from io import BytesIO
from threading import BoundedSemaphore

from tarshards.errors import DecodeError
from tarshards.samples.codecs import decode_field
from tarshards.samples.codecs.image import open_image
from tarshards.view.media_types import BYTES, media_type

THUMBNAIL = 240  # pixels
MOST_THUMBNAIL = 1024
TINY = 48  # pictures up to this size stay unchanged; the page enlarges them with square pixels
MAX_PIXELS = 1 << 26  # 8192 x 8192; an image has at most as many bytes as they take
_decoding = BoundedSemaphore(2)  # each takes up to 4 * MAX_PIXELS bytes


def thumbnail(field: str, data: bytes, pixels: int = THUMBNAIL) -> tuple[str, bytes]:
    """Return an image at most this many pixels wide and high, and its media type.

    Raises DecodeError for an image of more than MAX_PIXELS, and what the decoder raises.
    """
    from PIL import Image

    check_pixels(field, data)
    with _decoding:
        decoded = decode_field(field, data, "pilrgba")
        picture = Image.new("RGB", decoded.size, "white")
        picture.paste(decoded, mask=decoded)
        kind = "png" if max(picture.size) <= TINY else "jpeg"
        picture.thumbnail((pixels, pixels))
        file = BytesIO()
        picture.save(file, kind)
    return f"image/{kind}", file.getvalue()


def whole_picture(field: str, data: bytes) -> tuple[str, bytes]:
    """Return an image in its format if browsers show that, else as PNG; raises the errors of ``thumbnail``."""
    check_pixels(field, data)
    if (kind := media_type(field)) != BYTES:
        return kind, data
    with _decoding:
        file = BytesIO()
        decode_field(field, data, "pilrgba").save(file, "png")
    return "image/png", file.getvalue()


def check_pixels(field: str, data: bytes) -> None:
    """Raise DecodeError for an image of too many pixels, by its header."""
    with open_image(data) as header:
        if header.width * header.height > MAX_PIXELS:
            reason = f"{header.width} x {header.height} pixels are more than the {MAX_PIXELS:,} that are shown"
            raise DecodeError(reason, field=field)
