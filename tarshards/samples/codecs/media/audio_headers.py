"""Read the structure of audio files, and find damage that libsndfile and FFmpeg ignore, without decoding them.

Formats: RIFF/WAVE (IBM and Microsoft, 1991) and RF64 (EBU Tech 3306); AIFF 1.3; FLAC (RFC 9639); Ogg (RFC 3533);
MPEG audio layer III (ISO 11172-3, 13818-3) with the Xing, Info and VBRI headers; SPHERE (NIST, 1990s); AU (Sun);
CAF (Apple, Core Audio Format Specification); AAC in ADTS (ISO 14496-3, annex 1.A). ``video_headers`` reads the
structure of MP4 and Matroska.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import NamedTuple

from tarshards.errors import DecodeError

KINDS = "WAV", "AIFF", "FLAC", "Ogg", "MP3", "SPHERE", "AU", "CAF", "AAC", "MP4", "Matroska"
UNKNOWN = 0xFFFFFFFF  # the size written by a program that cannot seek back
STREAMED = "a streamed {}, whose header does not give its size; write it to a file: ffmpeg -i in.wav out.wav"
GSM, GSM_BLOCK, GSM_FRAMES = 0x31, 65, 320  # the format of WAVE, and the bytes and frames of its blocks
UNCOMPRESSED = frozenset({1, 3, 6, 7, 0xFFFE})  # WAVE formats with a fixed number of bytes a sample
WAV_DTYPES = {(1, 16): "<i2", (1, 32): "<i4", (3, 32): "<f4"}
FLAC_RATES = 0, 88200, 176400, 192000, 8000, 16000, 22050, 24000, 32000, 44100, 48000, 96000
AU_BYTES = {1: 1, 2: 1, 3: 2, 4: 3, 5: 4, 6: 4, 7: 8, 27: 1}  # of a sample, by encoding; others have no whole bytes
BITS_REVERSED = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))
OGG_BEGIN, OGG_END = 2, 4  # flags of a page
MP3_SAME = 0xFFFE0C00  # bits of the header that all frames share: sync, version, layer and rate
ADTS_SAME = 0xFFFFFDC0  # the same for AAC: all except the private, copyright and size bits
MP3_RATES = 44100, 48000, 32000
MP3_KBITS = (
    (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),  # of MPEG 2 and 2.5
    (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),  # of MPEG 1
)


class SoundHeader(NamedTuple):
    """The format of a sound, and its file's metadata about the samples: frames, bits and MD5, if present.

    With *dtype*, they are uncompressed, from *offset* of the file on, with *channels* per frame. For a file that
    libsndfile cannot read, *container* is FFmpeg's name of its format, or empty if ``video_headers`` knows it.
    """

    kind: str
    frames: int | None = None
    bits: int = 0
    md5: bytes = b""
    dtype: str = ""
    offset: int = 0
    channels: int = 0
    rate: int = 0
    container: str | None = None


def read_header(data: bytes) -> SoundHeader:
    """Check the structure of a whole sound file and return its header.

    Raises DecodeError for other bytes, and if the file is truncated or contradicts itself.
    """
    if data[:4] in (b"RIFF", b"RF64") and data[8:12] == b"WAVE":
        return _read_wav(data)
    if data[:4] == b"FORM" and data[8:12] in (b"AIFF", b"AIFC"):
        return _read_aiff(data)
    if data[:4] == b"OggS":
        return _read_ogg(data)
    if data[:8] == b"NIST_1A\n":
        return _read_sphere(data)
    if data[:4] in (b".snd", b"dns."):
        return _read_au(data)
    if data[:4] == b"caff":
        return _read_caf(data)
    if data[4:8] == b"ftyp":
        return SoundHeader("MP4", container="")
    if data[:4] == b"\x1aE\xdf\xa3":
        return SoundHeader("Matroska", container="")
    begin = _after_id3(data)
    if data[begin : begin + 4] == b"fLaC":
        return _read_flac(data[begin:])
    if _adts_frame(data, begin):
        return _read_adts(data, begin)
    if begin or (len(data) > 4 and _mp3_frame(_word(data, 0))):
        return _read_mp3(data, begin)
    raise DecodeError(f"not a sound in any of {' '.join(KINDS)}")


def _read_wav(data: bytes) -> SoundHeader:
    end, sizes = _little(data, 4) + 8, dict[bytes, int]()
    if data[:4] == b"RF64":
        if data[12:16] != b"ds64" or len(data) < 36:
            raise DecodeError("an RF64 without its sizes")
        end, sizes[b"data"] = _little(data, 20, 8) + 8, _little(data, 28, 8)
    elif end - 8 in (0, UNKNOWN):
        raise DecodeError(STREAMED.format("WAV"))
    form = payload = begin = None
    for name, offset, size in _chunks(data, end, "little", sizes):
        if name == b"fmt " and size >= 16:
            form = offset
        elif name == b"data" and payload is None:
            begin, payload = offset, size
    if form is None or payload is None or begin is None:
        raise DecodeError("a WAV without its format or its samples")
    code, channels, rate = _little(data, form, 2), _little(data, form + 2, 2), _little(data, form + 4)
    speed, block, bits = _little(data, form + 8), _little(data, form + 12, 2), _little(data, form + 14, 2)
    if (code, block) == (GSM, GSM_BLOCK):
        return SoundHeader("WAV", payload // block * GSM_FRAMES)
    if code not in UNCOMPRESSED:
        return SoundHeader("WAV")
    if not block or block != channels * -(-bits // 8) or speed != rate * block or payload % block:
        raise DecodeError(f"a WAV that contradicts itself: {channels} channels, {bits} bits, {payload} bytes")
    dtype = WAV_DTYPES.get((code, bits), "")
    if dtype and not (channels and rate):
        raise DecodeError(f"a WAV of {channels} channels at {rate} Hz")
    return SoundHeader("WAV", payload // block, bits, dtype=dtype, offset=begin, channels=channels, rate=rate)


def _read_aiff(data: bytes) -> SoundHeader:
    frames, form, payload = None, b"", None
    for name, offset, size in _chunks(data, int.from_bytes(data[4:8], "big") + 8, "big", {}):
        if name == b"COMM" and size >= 18:
            form = data[offset : offset + size]
            frames = int.from_bytes(form[2:6], "big")
        elif name == b"SSND" and size >= 8:
            payload = size - 8 - int.from_bytes(data[offset : offset + 4], "big")
    if frames is None or (payload is None and frames):
        raise DecodeError("an AIFF without its format or its samples")
    width = int.from_bytes(form[:2], "big") * -(-int.from_bytes(form[6:8], "big") // 8)
    is_plain = data[8:12] == b"AIFF" or form[18:22].lower() in (b"none", b"sowt", b"twos", b"fl32", b"fl64")
    if is_plain and payload is not None and payload != frames * width:
        raise DecodeError(f"an AIFF of {payload} bytes, where {frames} frames take {frames * width}")
    return SoundHeader("AIFF", None if form[18:22] == b"ima4" else frames)  # its count is in blocks


def _read_sphere(data: bytes) -> SoundHeader:
    """Read the header of NIST SPHERE: lines of a name, a type and a value."""
    begin = int(data[8:16]) if data[8:15].strip().isdigit() else 0
    lines = (line.split(maxsplit=2) for line in data[16:begin].partition(b"end_head")[0].splitlines())
    fields = {line[0]: line[2].strip() for line in lines if len(line) == 3}
    coding = fields.get(b"sample_coding", b"pcm").decode("latin-1")
    if "," in coding:
        raise DecodeError(f"a SPHERE file of {coding} is not supported; convert it: sph2pipe -f wav in.sph out.wav")
    try:
        names = b"sample_count", b"channel_count", b"sample_n_bytes"
        frames, channels, width = (int(fields[name]) for name in names)
    except (KeyError, ValueError):
        raise DecodeError("a SPHERE whose header is cut, or lacks the number of its samples") from None
    if begin + frames * channels * width != len(data):
        raise DecodeError(f"truncated: {len(data)} bytes, where {frames} frames take {frames * channels * width}")
    return SoundHeader("SPHERE", frames)


def _read_au(data: bytes) -> SoundHeader:
    if len(data) < 24:
        raise DecodeError("an AU truncated in its header")
    begin, size, code, _, channels = struct.unpack_from(">5I" if data[:1] == b"." else "<5I", data, 4)
    if size == UNKNOWN:
        raise DecodeError(STREAMED.format("AU"))
    if begin + size != len(data) or begin < 24:
        raise DecodeError(f"truncated: {len(data)} bytes, where the header says {begin + size}")
    width = channels * AU_BYTES.get(code, 0)
    if width and size % width:
        raise DecodeError(f"an AU that contradicts itself: {channels} channels, {size} bytes")
    return SoundHeader("AU", size // width if width else None)


def _read_caf(data: bytes) -> SoundHeader:
    offset, form, cookie, payload, frames = 8, b"", b"", None, None
    while offset + 12 <= len(data):
        name, size = struct.unpack_from(">4sq", data, offset)
        offset += 12
        if (name, size) == (b"data", -1):
            raise DecodeError(STREAMED.format("CAF"))
        if size < 0 or offset + size > len(data):
            raise DecodeError(f"truncated: the chunk {name!r} of {size} bytes does not end in {len(data)}")
        if name == b"desc":
            form = data[offset : offset + size]
        elif name == b"kuki":
            cookie = data[offset : offset + size]
        elif name == b"data":
            payload = size - 4  # after the edit count
        elif name == b"pakt" and size >= 24:
            frames = int.from_bytes(data[offset + 8 : offset + 16], "big")
        offset += size
    if data[offset:].strip(b"\0"):
        raise DecodeError(f"a CAF with {len(data) - offset} bytes after the last chunk")
    packet, length = struct.unpack_from(">II", form, 16) if len(form) >= 32 else (0, 0)
    if packet and payload is not None:  # bytes of each packet, if equal; else a table counts the frames
        frames = payload // packet * length
    if payload is None or frames is None:
        raise DecodeError("a CAF without its format, its samples or their number")
    is_read = form[8:12] in (b"lpcm", b"alaw", b"ulaw") or (form[8:12] == b"alac" and cookie[4:8] != b"frma")
    return SoundHeader("CAF", frames, container=None if is_read else "caf")


def _chunks(data: bytes, end: int, order: str, sizes: dict[bytes, int]) -> Iterator[tuple[bytes, int, int]]:
    """Yield name, offset and size of the chunks of a RIFF or IFF file, which must fill it to its *end*."""
    if end > len(data):
        raise DecodeError(f"truncated: {len(data)} of {end} bytes")
    offset = 12
    while offset + 8 <= end:
        name = data[offset : offset + 4]
        size = int.from_bytes(data[offset + 4 : offset + 8], "little" if order == "little" else "big")
        if size == UNKNOWN:
            if name not in sizes:
                raise DecodeError(STREAMED.format("sound"))
            size = sizes[name]
        if offset + 8 + size > end or not all(32 <= byte < 127 for byte in name):
            raise DecodeError(f"a chunk {name!r} of {size} bytes at {offset} does not fit into {end} bytes")
        yield name, offset + 8, size
        offset += 8 + size + (size & 1)
    if offset < end:
        raise DecodeError(f"{end - offset} bytes after the last chunk")


def _read_flac(data: bytes) -> SoundHeader:
    offset, is_last = 4, False
    while not is_last:
        if offset + 4 > len(data):
            raise DecodeError("a FLAC truncated in its metadata")
        is_last = data[offset] >= 128
        offset += 4 + int.from_bytes(data[offset + 1 : offset + 4], "big")
    if len(data) < 42 or data[4] & 127 or data[5:8] != b"\0\0\x22":
        raise DecodeError("a FLAC without its stream information")
    packed = int.from_bytes(data[18:26], "big")
    rate, bits, frames = packed >> 44, (packed >> 36 & 31) + 1, packed & (1 << 36) - 1
    if offset + 4 <= len(data):
        code = data[offset + 2] & 15
        if 0 < code < len(FLAC_RATES) and FLAC_RATES[code] != rate:
            raise DecodeError(f"a FLAC of {rate} Hz whose frames are of {FLAC_RATES[code]} Hz")
    md5 = data[26:42]
    return SoundHeader("FLAC", frames or None, bits, md5 if any(md5) else b"")


def _read_ogg(data: bytes) -> SoundHeader:
    expected: dict[bytes, int] = {}  # the number of the next page, by the stream's serial number
    for begin, end in ogg_pages(data):
        flags, serial, number = data[begin + 5], data[begin + 14 : begin + 18], _little(data, begin + 18)
        if _little(data, begin + 22) != ogg_checksum(data[begin:end]):
            raise DecodeError(f"wrong checksum of the Ogg page at {begin}")
        if (serial in expected) == bool(flags & OGG_BEGIN) or expected.get(serial, number) != number:
            raise DecodeError(f"a page is missing before the Ogg page at {begin}")
        expected[serial] = number + 1
        if flags & OGG_END:
            del expected[serial]
    if expected:
        raise DecodeError("a truncated Ogg: no last page")
    return SoundHeader("Ogg")


def ogg_pages(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each page; raise DecodeError for anything else."""
    begin = 0
    while begin < len(data):
        head = begin + 27
        if data[begin : begin + 5] != b"OggS\0" or head > len(data):
            raise DecodeError(f"no whole Ogg page at {begin}")
        table = data[head : head + data[begin + 26]]
        end = head + len(table) + sum(table)
        if len(table) < data[begin + 26] or end > len(data):
            raise DecodeError(f"a truncated Ogg: the page at {begin} is cut")
        yield begin, end
        begin = end


def ogg_checksum(page: bytes) -> int:
    """Return the checksum of an Ogg page: CRC-32 without reflection, computed by zlib of bytes with reversed bits.

    >>> f"{ogg_checksum(bytes(22) + b'....' + bytes(3) + b'123456789'):08x}"  # CRC-32/MPEG-2 from 0: the digits alone
    '89a1897f'
    """
    reflected = zlib.crc32((page[:22] + bytes(4) + page[26:]).translate(BITS_REVERSED), UNKNOWN) ^ UNKNOWN
    return int.from_bytes(reflected.to_bytes(4, "little").translate(BITS_REVERSED), "big")


def _read_adts(data: bytes, begin: int) -> SoundHeader:
    """Read the headers of all AAC frames, whose first 28 bits, except one, are the same."""
    offset, first = begin, _word(data, begin) & ADTS_SAME
    while size := _adts_frame(data, offset) if _word(data, offset) & ADTS_SAME == first else 0:
        if offset + size > len(data):
            raise DecodeError(f"a truncated AAC: the frame at {offset} is cut")
        offset += size
    _check_tags("AAC", data, offset)
    return SoundHeader("AAC", container="aac")


def _adts_frame(data: bytes, offset: int) -> int:
    """Return the bytes of the AAC frame at *offset*; 0 if there is none."""
    head = data[offset : offset + 7]
    if len(head) < 7 or int.from_bytes(head[:2], "big") & 0xFFF6 != 0xFFF0:
        return 0
    size = (head[3] & 3) << 11 | head[4] << 3 | head[5] >> 5
    return size if size > 7 else 0


def _check_tags(kind: str, data: bytes, offset: int) -> None:
    """Raise DecodeError unless only tags or zeros follow the last frame."""
    rest = data[offset:]
    is_tag = (rest[:3] == b"TAG" and len(rest) == 128) or rest[:8] in (b"APETAGEX", b"LYRICSBE")
    if rest.strip(b"\0") and not is_tag:
        raise DecodeError(f"an {kind} with {len(rest)} bytes at {offset} that are no frame")


def _read_mp3(data: bytes, offset: int) -> SoundHeader:
    first, frames, claimed = _word(data, offset), 0, None
    begun, end = offset, len(data)
    if not _mp3_frame(first):
        raise DecodeError("an MP3 without a frame of layer III")
    while offset < end:
        head = _word(data, offset)
        size = _mp3_frame(head) if head & MP3_SAME == first & MP3_SAME else 0
        if not size:
            break
        if offset + size > end:
            raise DecodeError(f"a truncated MP3: the frame at {offset} is cut")
        if offset == begun:
            claimed = _mp3_count(data[offset : offset + size], head)
        offset, frames = offset + size, frames + 1
    _check_tags("MP3", data, offset)
    if claimed is not None and claimed != frames - 1:
        raise DecodeError(f"an MP3 with {frames - 1} of {claimed} frames")
    return SoundHeader("MP3")


def _after_id3(data: bytes) -> int:
    """Return the offset of the first frame: an ID3v2 tag has its size in the low 7 bits of four bytes."""
    if data[:3] != b"ID3":
        return 0
    size = 0
    for byte in data[6:10]:
        size = size << 7 | byte & 127
    return 10 + size + (10 if len(data) > 5 and data[5] & 16 else 0)


def _mp3_frame(head: int) -> int:
    """Return the bytes of the layer III frame with this header; 0 for anything else, or a free bit rate."""
    version, layer, kbits, rate = head >> 19 & 3, head >> 17 & 3, head >> 12 & 15, head >> 10 & 3
    if head >> 21 != 0x7FF or version == 1 or layer != 1 or kbits in (0, 15) or rate == 3 or head & 3 == 2:
        return 0
    is_first = version == 3
    hertz = MP3_RATES[rate] >> (0, 1, 2)[(3, 2, 0).index(version)]
    return (144000 if is_first else 72000) * MP3_KBITS[is_first][kbits] // hertz + (head >> 9 & 1)


def _mp3_count(frame: bytes, head: int) -> int | None:
    """Return the frame count in the first frame, if it is an info frame without sound; else None."""
    is_first, is_mono = head >> 19 & 3 == 3, head >> 6 & 3 == 3
    offset = 4 + (17 if is_mono else 32) if is_first else 4 + (9 if is_mono else 17)
    if frame[offset : offset + 4] in (b"Xing", b"Info"):
        return _word(frame, offset + 8) if frame[offset + 7] & 1 else None
    return _word(frame, 50) if frame[36:40] == b"VBRI" else None


def _word(data: bytes, offset: int) -> int:
    return int.from_bytes(data[offset : offset + 4], "big")


def _little(data: bytes, offset: int, size: int = 4) -> int:
    return int.from_bytes(data[offset : offset + size], "little")
