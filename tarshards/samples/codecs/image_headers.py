"""Read the headers of images, without decoding: the size of JPEG and PNG, and whether they are truncated.

For other formats, check what Pillow ignores, or reports only after decoding.

Formats: ITU-T T.81 (JPEG), annex B; PNG, third edition (W3C), section 5; ITU-T T.800 (JPEG 2000), annexes A and I;
ISO 14496-12 (boxes and brands of HEIC and AVIF); ISO 18181-1 (JPEG XL), annex D, and -2; Microsoft's ICO.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from tarshards.errors import DecodeError

PNG = b"\x89PNG\r\n\x1a\n"
PNG_END = b"\0\0\0\0IEND\xaeB`\x82"
START_OF_FRAME = frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})  # these three are tables and an extension
ALONE = frozenset({0x01, *range(0xD0, 0xD9)})  # markers without a length
START_OF_SCAN, END_OF_IMAGE = 0xDA, b"\xff\xd9"


ICON = b"\0\0\1\0"
JPEG2000_BOXES, JPEG2000_CODESTREAM = b"\0\0\0\x0cjP  \r\n\x87\n", b"\xff\x4f\xff\x51"
JXL_BOXES, JXL_CODESTREAM = b"\0\0\0\x0cJXL \r\n\x87\n", b"\xff\x0a"
JXL_BITS = 9, 13, 18, 30  # of a side length minus 1
JXL_RATIOS = (1, 1), (12, 10), (4, 3), (3, 2), (16, 9), (5, 4), (2, 1)  # of width to height
HEVC = frozenset([b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs"])


class ImageHeader(NamedTuple):
    """The format of an image, "jpeg", "png" or Pillow's name of another one, and its size in pixels."""

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
    header, offset, end = None, 2, len(data)
    while offset + 4 <= end and data[offset] == 0xFF:
        marker = data[offset + 1]
        if marker == 0xFF:  # fill byte
            offset += 1
            continue
        if marker in ALONE:
            offset += 2
            continue
        if marker in START_OF_FRAME and offset + 9 <= end:
            height, width = (data[offset + 5] << 8) + data[offset + 6], (data[offset + 7] << 8) + data[offset + 8]
            header = _sized("jpeg", height, width)
        offset += 2 + (data[offset + 2] << 8) + data[offset + 3]
        if marker == START_OF_SCAN:
            break
    else:
        raise DecodeError("a JPEG truncated in its header")
    if header is None:
        raise DecodeError("a JPEG without its size")
    # Within a scan, 0xFF is followed by 0 or by a restart marker, so it cannot be mistaken for the end.
    if data.rfind(END_OF_IMAGE, offset) < 0:
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


def plugin_format(data: bytes) -> str:
    """Return the format of an image that Pillow needs a plugin for, "HEIF" or "JXL"; else an empty string."""
    if data[:2] == JXL_CODESTREAM or data[:12] == JXL_BOXES:
        return "JXL"
    if data[4:8] != b"ftyp":
        return ""
    size = min(int.from_bytes(data[:4], "big"), 1 << 10)
    return "HEIF" if HEVC.intersection(data[i : i + 4] for i in (8, *range(16, size, 4))) else ""


def check_jpeg2000(data: bytes) -> None:
    """Raise DecodeError if the end of a JPEG 2000 is missing."""
    end = len(data)
    if data[:4] != JPEG2000_CODESTREAM:
        end = max((stop for name, _, stop in _boxes(data) if name == b"jp2c"), default=0)
    if data[end - 2 : end] != END_OF_IMAGE:
        raise DecodeError(f"a truncated JPEG 2000: no end of the codestream in {len(data)} bytes")


def bits_of(data: bytes, kind: str) -> int:
    """Return the bits of a channel in a JPEG 2000, AVIF or HEIF image, the *kind* as Pillow names it; else 0.

    Sources: ITU-T T.800, A.5.1; ISO/IEC 23008-12, 6.5.6 (the property pixi).
    """
    if kind == "JPEG2000" and (start := data.find(JPEG2000_CODESTREAM)) >= 0:
        count = int.from_bytes(data[start + 40 : start + 42], "big")
        return max(((each & 127) + 1 for each in data[start + 42 : start + 42 + 3 * count : 3]), default=0)
    if kind in ("AVIF", "HEIF") and (start := data.find(b"pixi", 0, 1 << 16)) >= 0:
        count = data[start + 8] if len(data) > start + 8 else 0
        return max(data[start + 9 : start + 9 + count], default=0)
    return 0


def icon_images(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each image in an icon: a PNG, or a BMP without its file header; nothing for other bytes.

    Raises DecodeError if one is truncated, or its size differs from the icon's directory, and if some overlap.
    """
    if data[:4] != ICON:
        return
    count = int.from_bytes(data[4:6], "little")
    if not count or len(data) < 6 + 16 * count:
        raise DecodeError(f"a truncated icon: {len(data)} bytes for {count} images")
    found: set[tuple[int, int]] = set()
    left = len(data)
    for entry in range(6, 6 + 16 * count, 16):
        across, down = data[entry] or 256, data[entry + 1] or 256
        size, begin = struct.unpack_from("<II", data, entry + 8)
        if begin + size > len(data) or size < 24:
            raise DecodeError(f"a truncated icon: its image at {begin} of {size} bytes does not end in {len(data)}")
        if data[begin : begin + 8] == PNG:
            width, height = struct.unpack_from(">II", data, begin + 16)
        else:
            width, height = struct.unpack_from("<II", data, begin + 4)
            height //= 2  # the other half is the mask
        if (width, height) != (across, down):
            raise DecodeError(f"an icon of {across} x {down} pixels whose image has {width} x {height}")
        if (begin, size) not in found:
            found.add((begin, size))
            left -= size
            if left < 0:
                raise DecodeError("an icon whose images overlap")
            yield begin, begin + size


def jxl_size(data: bytes) -> tuple[int, int]:
    """Return the width and height of a JPEG XL; raise DecodeError if its header is incomplete."""
    begin = 0
    if data[:2] != JXL_CODESTREAM:
        starts = {b"jxlc": 0, b"jxlp": 4}  # a part begins with its number
        begin = next((offset + starts[name] for name, offset, _ in _boxes(data) if name in starts), len(data))
    if data[begin : begin + 2] != JXL_CODESTREAM or len(data) < begin + 12:
        raise DecodeError("a JPEG XL truncated in its header")
    bits = int.from_bytes(data[begin + 2 : begin + 12], "little")

    def take(count: int) -> int:
        nonlocal bits
        value, bits = bits & (1 << count) - 1, bits >> count
        return value

    def side() -> int:
        return 8 * (take(5) + 1) if is_small else take(JXL_BITS[take(2)]) + 1

    is_small = take(1)
    height, ratio = side(), take(3)
    if not ratio:
        return side(), height
    across, down = JXL_RATIOS[ratio - 1]
    return height * across // down, height


def _boxes(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Yield name, begin and end of the boxes of a file; raise DecodeError for a box beyond its end."""
    offset = 0
    while offset + 8 <= len(data):
        size, name, head = int.from_bytes(data[offset : offset + 4], "big"), data[offset + 4 : offset + 8], 8
        if size == 1:
            size, head = int.from_bytes(data[offset + 8 : offset + 16], "big"), 16
        end = offset + size if size else len(data)
        if end > len(data) or end < offset + head:
            raise DecodeError(f"truncated: the box {name!r} at {offset} ends at {end} of {len(data)} bytes")
        yield name, offset + head, end
        offset = end
