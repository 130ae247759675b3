"""Read the structure of videos: their container, and whether they are truncated, without decoding them.

Formats: ISO/IEC 14496-12 (MP4, MOV), RFC 9559 (Matroska, WebM), Microsoft's AVI RIFF reference with OpenDML, and
RFC 3533 (Ogg).
"""

from __future__ import annotations

import struct
import zlib
from typing import IO

from tarshards.errors import DecodeError
from tarshards.samples.codecs.media import audio_headers

BOXES = frozenset([b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide", b"styp"])  # boxes that may begin a file
EBML, SEGMENT, CRC_32 = 0x1A45DFA3, 0x18538067, 0xBF
# In a segment: SeekHead, Info, Tracks, Cluster, Cues, Attachments, Chapters, Tags, Void, CRC-32.
PARTS = frozenset([0x114D9B74, 0x1549A966, 0x1654AE6B, 0x1F43B675, 0x1C53BB6B, 0x1941A469, 0x1043A770, 0x1254C367])
PARTS |= {0xEC, CRC_32}


def read_format(file: IO[bytes], *, is_memory: bool) -> str:
    """Return FFmpeg's name of the container; raise DecodeError for a truncated one, and for any other bytes.

    With *is_memory* reading is free, so checksums are compared, if the container has them. Ogg's are always compared.

    >>> from io import BytesIO
    >>> read_format(BytesIO(b"RIFF\\4\\0\\0\\0AVI "), is_memory=True)
    'avi'
    """
    end = file.seek(0, 2)
    head = _read(file, 0, 16)
    if head[4:8] in BOXES:
        _check_boxes(file, end)
        return "mov"
    if head[:4] == EBML.to_bytes(4, "big"):
        _check_matroska(file, end, is_memory)
        return "matroska"
    if head[:4] == b"RIFF" and head[8:12] == b"AVI ":
        _check_avi(file, end)
        return "avi"
    if head[:4] == b"OggS":
        audio_headers.read_header(_read(file, 0, end))
        return "ogg"
    raise DecodeError("not a video in any of: MP4 MOV Matroska WebM AVI Ogg")


def _read(file: IO[bytes], offset: int, size: int) -> bytes:
    file.seek(offset)
    return file.read(size)


def _check_boxes(file: IO[bytes], end: int) -> None:
    offset, kinds = 0, set()
    while offset < end:
        head = _read(file, offset, 16)
        size, kind, large = struct.unpack(">I4sQ", head.ljust(16, b"\0"))
        size = end - offset if size == 0 else large if size == 1 else size
        if size < 8 or offset + size > end:
            raise DecodeError(f"truncated: the box at {offset} does not end in {end} bytes")
        kinds.add(kind)
        offset += size
    if b"moov" not in kinds or kinds.isdisjoint((b"mdat", b"moof")):
        raise DecodeError("truncated: no moov box, or no mdat box")


def _check_avi(file: IO[bytes], end: int) -> None:
    offset = 0
    while (head := _read(file, offset, 8))[:4] == b"RIFF" and len(head) == 8:
        size = int.from_bytes(head[4:], "little")
        if offset + 8 + size > end or not size:
            raise DecodeError(f"truncated: the RIFF chunk at {offset} does not end in {end} bytes")
        offset += 8 + size + size % 2
    if offset < end:
        raise DecodeError(f"{end - offset} bytes that are no RIFF chunk at the end")


def _check_matroska(file: IO[bytes], end: int, is_memory: bool) -> None:
    offset, found = 0, False
    while offset < end:
        name, size, offset = _element(file, offset)
        if name == SEGMENT:
            found = True
            if size is None:
                return  # a live stream, whose end is unknown
            if offset + size > end:
                raise DecodeError(f"truncated: a segment of {size} bytes in {end - offset}")
            if is_memory:
                _check_segment(file, offset, offset + size)
        elif size is None or offset + size > end:
            raise DecodeError(f"damaged or truncated: the element before {offset} does not end")
        offset += size
    if not found:
        raise DecodeError("truncated: no segment")


def _check_segment(file: IO[bytes], offset: int, end: int) -> None:
    """Compare the checksums of the elements in a segment."""
    while offset < end:
        name, size, offset = _element(file, offset)
        if name not in PARTS:
            raise DecodeError(f"damaged: no known element before {offset}")
        if size is None:
            return
        if offset + size > end:
            raise DecodeError(f"damaged: the element before {offset} is longer than its segment")
        data = _read(file, offset, size)
        if data[:2] == bytes([CRC_32, 0x84]) and zlib.crc32(data[6:]) != int.from_bytes(data[2:6], "little"):
            raise DecodeError(f"damaged: wrong checksum of the element before {offset}")
        offset += size


def _element(file: IO[bytes], offset: int) -> tuple[int, int | None, int]:
    """Return the name of the element at *offset*, its size (None if unknown), and the offset of its data."""
    head = _read(file, offset, 12)
    width = 9 - head[0].bit_length() if head else 9
    name, rest = int.from_bytes(head[:width], "big"), head[width:]
    length = 9 - rest[0].bit_length() if rest else 9
    if width > 4 or length > 8 or len(rest) < length:
        raise DecodeError(f"damaged or truncated: no element at {offset}")
    mask = (1 << 7 * length) - 1
    size = int.from_bytes(rest[:length], "big") & mask
    return name, None if size == mask else size, offset + width + length
