"""Read the headers of JPEG and PNG images: their size, and whether they are truncated, without decoding them.

Formats: ITU-T T.81 (JPEG), annex B; PNG, third edition (W3C), section 5.
"""

from __future__ import annotations

from typing import NamedTuple

from tarshards.errors import DecodeError

PNG = b"\x89PNG\r\n\x1a\n"
PNG_END = b"\0\0\0\0IEND\xaeB`\x82"
START_OF_FRAME = frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})  # these three are tables and an extension
ALONE = frozenset({0x01, *range(0xD0, 0xD9)})  # markers without a length
START_OF_SCAN, END_OF_IMAGE = 0xDA, b"\xff\xd9"


class ImageHeader(NamedTuple):
    """The format of an image, "jpeg" or "png", and its size in pixels."""

    kind: str
    height: int
    width: int


def read_header(data: bytes) -> ImageHeader | None:
    """Return the header of a JPEG or PNG image, or None for any other bytes.

    Raises DecodeError if the header is incomplete or the end of the image is missing.

    >>> read_header(PNG + b"\\0\\0\\0\\rIHDR\\0\\0\\0\\x02\\0\\0\\0\\x03" + 9 * b"\\0" + PNG_END)
    ImageHeader(kind='png', height=3, width=2)
    """
    if data[:3] == b"\xff\xd8\xff":
        return _read_jpeg(data)
    if data[:8] == PNG:
        return _read_png(data)
    return None


def _read_jpeg(data: bytes) -> ImageHeader:
    header, place, end = None, 2, len(data)
    while place + 4 <= end and data[place] == 0xFF:
        marker = data[place + 1]
        if marker == 0xFF:  # fill
            place += 1
            continue
        if marker in ALONE:
            place += 2
            continue
        if marker in START_OF_FRAME and place + 9 <= end:
            height, width = (data[place + 5] << 8) + data[place + 6], (data[place + 7] << 8) + data[place + 8]
            header = _sized("jpeg", height, width)
        place += 2 + (data[place + 2] << 8) + data[place + 3]
        if marker == START_OF_SCAN:
            break
    else:
        raise DecodeError("a JPEG truncated in its header")
    if header is None:
        raise DecodeError("a JPEG without its size")
    # Within a scan, 0xFF is followed by 0 or by a restart marker, so it cannot be mistaken for the end.
    if data.rfind(END_OF_IMAGE, place) < 0:
        raise DecodeError(f"a truncated JPEG: no end-of-image marker in {end} bytes")
    return header


def _read_png(data: bytes) -> ImageHeader:
    if data[12:16] != b"IHDR" or len(data) < 33:
        raise DecodeError("a PNG truncated in its header")
    if data.rfind(PNG_END) < 0:
        raise DecodeError(f"a truncated PNG: no IEND chunk in {len(data)} bytes")
    return _sized("png", int.from_bytes(data[20:24], "big"), int.from_bytes(data[16:20], "big"))


def _sized(kind: str, height: int, width: int) -> ImageHeader:
    if not height or not width:
        raise DecodeError(f"a {kind.upper()} of {width} x {height} pixels")
    return ImageHeader(kind, height, width)
