"""Find out whether video files are whole, without decoding them: demuxers read truncated ones to their end.

Formats: ISO 14496-12 (MP4, MOV), section 4.2; Matroska and WebM (RFC 8794, RFC 9559); RIFF/AVI (Microsoft, 1992);
Ogg (RFC 3533).
"""

from __future__ import annotations

from tarshards.errors import DecodeError
from tarshards.samples.codecs.audio_headers import check_ogg
from tarshards.samples.codecs.image_headers import boxes

KINDS = "MP4", "Matroska", "AVI", "Ogg"
EBML, SEGMENT = b"\x1a\x45\xdf\xa3", b"\x18\x53\x80\x67"
STREAMED = "a streamed Matroska, whose header does not give its size; ffmpeg -i in.webm -c copy out.webm writes it"
MP4_FIRST = frozenset([b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide", b"pnot"])  # old MOVs have no ftyp


def check_video(data: bytes) -> None:
    """Raise DecodeError where *data* are no video file, or a truncated one."""
    if data[4:8] in MP4_FIRST:
        if b"moov" not in {name for name, _, _ in boxes(data)}:
            raise DecodeError("a truncated MP4: no moov box")
    elif data[:4] == EBML:
        _check_matroska(data)
    elif data[:4] == b"RIFF" and data[8:12] == b"AVI ":
        _check_avi(data)
    elif data[:4] == b"OggS":
        check_ogg(data)
    else:
        raise DecodeError(f"not a video in any of {' '.join(KINDS)}")


def _check_matroska(data: bytes) -> None:
    place = 4
    size, place = _ebml_size(data, place)
    place += size
    if data[place : place + 4] != SEGMENT:
        raise DecodeError("a Matroska truncated in its header")
    size, place = _ebml_size(data, place + 4)
    if size < 0:
        raise DecodeError(STREAMED)
    if place + size > len(data):
        raise DecodeError(f"a truncated Matroska: {len(data)} of {place + size} bytes")


def _ebml_size(data: bytes, place: int) -> tuple[int, int]:
    """Return the size of an element, -1 for an unknown one, and where its content begins."""
    first = data[place] if place < len(data) else 0
    length = 9 - first.bit_length()  # as many bytes as zeros lead the first one, and one
    if length > 8 or place + length > len(data):
        raise DecodeError("a Matroska truncated in its header")
    bits = 7 * length
    value = int.from_bytes(data[place : place + length], "big") & (1 << bits) - 1
    return -1 if value == (1 << bits) - 1 else value, place + length


def _check_avi(data: bytes) -> None:
    """Compare the sizes of the RIFF chunks, of which large files have several, with the file's."""
    place = 0
    while place < len(data):
        size = int.from_bytes(data[place + 4 : place + 8], "little")
        if data[place : place + 4] != b"RIFF" or size < 4:
            raise DecodeError(f"an AVI with {len(data) - place} bytes at {place} that are no RIFF chunk")
        place += 8 + size + (size & 1 and place + 8 + size < len(data))
    if place > len(data):
        raise DecodeError(f"a truncated AVI: {len(data)} of {place} bytes")
