"""Codecs for sound (``pip install 'tarshards[media]'``).

libsndfile decodes WAV, AIFF, FLAC, Ogg (Vorbis, Opus), MP3, NIST SPHERE, AU and CAF; PyAV decodes AAC, and the audio of
MP4, Matroska and WebM.
"""

from __future__ import annotations

import operator
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import TYPE_CHECKING, Any, NamedTuple

from tarshards.errors import DecodeError
from tarshards.samples.codecs.array import to_array
from tarshards.samples.codecs.media import audio_headers
from tarshards.samples.codecs.media.video import MAX_BYTES, opened
from tarshards.samples.codecs.registry import SpecFamily, encoder, require

if TYPE_CHECKING:
    import numpy as np

EXTENSIONS = frozenset(
    "wav aif aiff aifc flac ogg oga opus mp3 sph au snd caf m4a aac mka weba w64 mp2 ac3 amr wma wv ape".split()  # noqa: SIM905
)
AUDIOSPECS = {"audio": "numpy", "torchaudio": "torch"}  # and the containers
BLOCK = 1 << 16  # frames written at once: libsndfile's Vorbis encoder keeps them on the stack
SERIAL = bytes(4)  # of an Ogg stream; libsndfile's is random, so that a sound would give different bytes each time


class Sound(NamedTuple):
    """Samples, float32 of shape (frames, channels) and mostly in [-1, 1], and their rate in Hz."""

    samples: np.ndarray
    rate: int


def decode_audio(data: bytes, audiospec: str = "audio") -> Any:
    """Decode a sound: ``audio`` gives (samples, rate), float32 of shape (frames, channels).

    ``torchaudio`` gives that package's form: a tensor of shape (channels, frames), and the rate. Raises an error for
    damaged and truncated files, as far as their format reveals it, and for more than 4 GiB of samples.
    """
    sound = decode_part(data)
    if AUDIOSPECS[audiospec] == "numpy":
        return sound
    torch = require("torch", extra="torch")
    return torch.from_numpy(sound.samples.T.copy()), sound.rate


def _duration(field: str, data: bytes) -> float:
    """Return the seconds of a sound; raise DecodeError if its header does not say."""
    header = audio_headers.read_header(data)
    soundfile = require("soundfile", extra="media")
    try:
        if header.container is not None:
            samples, rate = decode_audio(data)
            return len(samples) / rate
        info = soundfile.info(BytesIO(data))
        return float((header.frames or info.frames) / info.samplerate)
    except Exception as error:
        raise DecodeError(f"cannot read the duration of this audio: {error}") from error


SOUNDS = SpecFamily("audiospec", "sounds", AUDIOSPECS, EXTENSIONS, decode_audio, measures={"duration": _duration})
SOUNDS.add()


def decode_part(data: bytes, part: Callable[[int, int], slice] | None = None) -> Sound:
    """Decode a sound, or only its frames from ``part(frames, rate)``; the file is checked as a whole."""
    import numpy as np

    header = audio_headers.read_header(data)
    if header.dtype:  # uncompressed, in native form
        assert header.frames is not None
        whole = np.frombuffer(data, header.dtype, header.frames * header.channels, header.offset)
        whole = whole.reshape(header.frames, header.channels)
        rate = header.rate
        whole = whole if part is None else whole[part(header.frames, rate)]
        return Sound(_to_float(whole), rate)
    whole, rate = (_by_libsndfile if header.container is None else _by_ffmpeg)(data, header)
    return Sound(_to_float(whole if part is None else whole[part(len(whole), rate)]), rate)


def _by_libsndfile(data: bytes, header: audio_headers.SoundHeader) -> tuple[np.ndarray, int]:
    soundfile = require("soundfile", extra="media")
    try:
        with _in_memory(data) as memory, soundfile.SoundFile(memory, closefd=False) as file:
            claimed, rate = file.frames, file.samplerate
            if file.subtype == "GSM610" and header.kind == "WAV":  # libsndfile decodes the pad byte as a block
                claimed = header.frames or claimed
            if header.frames not in (None, claimed):
                raise ValueError(f"{claimed} frames, where the header says {header.frames}")
            _check_bytes(claimed, file.channels)
            integers = "int16" if header.bits <= 16 else "int32"
            whole = file.read(claimed, integers if header.kind == "FLAC" else "float32", always_2d=True)
    except soundfile.LibsndfileError as error:
        raise ValueError(f"libsndfile: {error.error_string}") from error
    if len(whole) != claimed:
        raise ValueError(f"damaged or truncated: {len(whole)} of {claimed} frames")
    if header.md5:
        _check_md5(whole, header)
    return whole, rate


def _by_ffmpeg(data: bytes, header: audio_headers.SoundHeader) -> tuple[np.ndarray, int]:
    import numpy as np

    blocks, frames, packets, rate = [], 0, 0, 0
    with opened(data, "audio", header.container or "") as (container, stream):
        to_floats = require("av", extra="media").AudioResampler("fltp")  # raises an error if the rate changes
        for packet in container.demux(stream):
            packets += packet.size > 0
            for frame in packet.decode():
                if frame.is_corrupt:
                    raise ValueError(f"damaged: the sound at {frame.time} s is corrupt")
                frames, rate = frames + frame.samples, frame.sample_rate
                _check_bytes(frames, frame.layout.nb_channels)
                blocks += [converted.to_ndarray() for converted in to_floats.resample(frame)]
        claimed = len(stream.index_entries) if header.container != "aac" else 0
    if packets < claimed or not blocks:
        raise ValueError(f"damaged or truncated: {packets} of {claimed} packets")
    if header.frames not in (None, frames):
        raise ValueError(f"{frames} frames, where the header says {header.frames}")
    return np.concatenate(blocks, axis=1).T, rate


def _check_bytes(frames: int, channels: int) -> None:
    if frames * channels * 4 > MAX_BYTES:
        raise ValueError(f"decompression bomb? {frames} frames of {channels} channels")


@contextmanager
def _in_memory(data: bytes) -> Iterator[int | BytesIO]:
    """Yield a file in memory: libsndfile reads bytes by calling Python, so that threads would wait for each other."""
    if not hasattr(os, "memfd_create"):
        yield BytesIO(data)
        return
    descriptor = os.memfd_create("sound")
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(data)
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)


def _to_float(samples: np.ndarray) -> np.ndarray:
    """Return integers as float32 in [-1, 1), and floats unchanged, in a new array."""
    import numpy as np

    floats = samples.astype(np.float32, order="C")
    if samples.dtype.kind == "i":
        floats *= np.float32(2.0 ** (1 - 8 * samples.dtype.itemsize))
    return floats


def _check_md5(whole: np.ndarray, header: audio_headers.SoundHeader) -> None:
    """Compare the samples, as little-endian integers of the fewest bytes, with the MD5 in the header."""
    import hashlib

    import numpy as np

    width, size = -(-header.bits // 8), whole.itemsize
    lowest = whole >> (8 * size - header.bits)
    packed: Any = lowest.astype(f"<i{size}", copy=False)
    if width < size:
        packed = packed.view(np.uint8).reshape(-1, size)[:, :width].tobytes()
    if hashlib.md5(packed, usedforsecurity=False).digest() != header.md5:
        raise ValueError("a damaged FLAC: its samples do not match their MD5")


@encoder("wav")
def encode_wav(value: Any) -> bytes:
    """Encode (samples, rate) as WAV, exactly: int16, int32, or float32 of any range."""
    import numpy as np

    samples, rate = _to_sound(value, is_exact=True)
    data, channels = samples.astype(samples.dtype.newbyteorder("<")).tobytes(), samples.shape[1]
    kind, width = (3 if samples.dtype == np.float32 else 1), samples.dtype.itemsize
    form = struct.pack(
        "<4sIHHIIHH", b"fmt ", 16, kind, channels, rate, rate * channels * width, channels * width, 8 * width
    )
    fact = struct.pack("<4sII", b"fact", 4, len(samples)) if kind == 3 else b""
    chunks = form + fact + struct.pack("<4sI", b"data", len(data)) + data
    if len(chunks) + 4 >= audio_headers.UNKNOWN:
        raise ValueError("more than 4 GiB, the most that a WAV holds")
    return struct.pack("<4sI4s", b"RIFF", len(chunks) + 4, b"WAVE") + chunks


@encoder("aif", "aiff")
def encode_aiff(value: Any) -> bytes:
    """Encode (samples, rate) as AIFF, exactly: int16, int32, or float32 of any range."""
    subtype = {"int16": "PCM_16", "int32": "PCM_32", "float32": "FLOAT"}[str(_to_sound(value, is_exact=True)[0].dtype)]
    data = _write(value, "AIFF", subtype)
    if subtype == "FLOAT":  # its PEAK chunk contains the time
        at = data.index(b"PEAK") + 12
        data = data[:at] + bytes(4) + data[at + 4 :]
    return data


@encoder("flac")
def encode_flac(value: Any) -> bytes:
    """Encode (samples, rate) as FLAC: int16, and int32 whose lower 8 bits are 0, exactly; floats with 24 bits."""
    import numpy as np

    samples, _ = _to_sound(value)
    if samples.dtype == np.int32 and (samples & 255).any():
        raise ValueError("FLAC holds 24 bits: the lower 8 of int32 must be 0")
    return _write(value, "FLAC", "PCM_16" if samples.dtype == np.int16 else "PCM_24", is_bounded=True)


@encoder("ogg", "oga")
def encode_ogg(value: Any) -> bytes:
    """Encode (samples, rate) as Ogg Vorbis."""
    return _with_serial(_write(value, "OGG", "VORBIS", is_bounded=True))


@encoder("opus")
def encode_opus(value: Any) -> bytes:
    """Encode (samples, rate) as Ogg Opus; the rate is 8, 12, 16, 24 or 48 kHz."""
    return _with_serial(_write(value, "OGG", "OPUS", is_bounded=True))


@encoder("mp3")
def encode_mp3(value: Any) -> bytes:
    """Encode (samples, rate) as MP3."""
    return _write(value, "MP3", "MPEG_LAYER_III", is_bounded=True)


def _write(value: Any, format: str, subtype: str, *, is_bounded: bool = False) -> bytes:
    import numpy as np

    samples, rate = _to_sound(value)
    if is_bounded and not len(samples):
        raise ValueError(f"a sound without frames, which {format} does not give back; WAV does")
    if is_bounded and samples.dtype == np.float32 and not (np.abs(samples) <= 1).all():
        raise ValueError(f"samples from {samples.min()} to {samples.max()}; floats must lie in [-1, 1]")
    if is_bounded and format != "FLAC" and samples.dtype != np.float32:  # libsndfile's MP3 of integers is distorted
        samples = (samples / -np.float64(np.iinfo(samples.dtype).min)).astype(np.float32)
    soundfile, stream = require("soundfile", extra="media"), BytesIO()
    with soundfile.SoundFile(stream, "w", rate, samples.shape[1], subtype, format=format) as file:
        for first in range(0, len(samples), BLOCK):
            file.write(samples[first : first + BLOCK])
    return stream.getvalue()


def _with_serial(data: bytes) -> bytes:
    pages = []
    for begin, end in audio_headers.ogg_pages(data):
        page = data[begin : begin + 14] + SERIAL + data[begin + 18 : end]
        pages.append(page[:22] + audio_headers.ogg_checksum(page).to_bytes(4, "little") + page[26:])
    return b"".join(pages)


def _to_sound(value: Any, *, is_exact: bool = False) -> tuple[np.ndarray, int]:
    """Return samples of shape (frames, channels) and the rate; a tensor is (channels, frames), as in torchaudio.

    With *is_exact*, raises ValueError for float64 samples that float32 cannot represent.
    """
    import numpy as np

    if not isinstance(value, tuple | list) or len(value) != 2 or not hasattr(value[1], "__index__"):
        raise TypeError("a sound is (samples, rate): an array of (frames, channels) or (frames,), and Hz")
    samples, rate = to_array(value[0]), operator.index(value[1])
    if not isinstance(value[0], np.ndarray) and samples.ndim == 2:
        samples = np.ascontiguousarray(samples.T)
    samples = samples[:, None] if samples.ndim == 1 else samples
    if samples.ndim != 2 or not 1 <= samples.shape[1] <= 255 or rate <= 0:
        raise ValueError(f"a sound of shape {samples.shape} at {rate} Hz; expected (frames, channels) or (frames,)")
    if samples.dtype.kind == "f":
        given, samples = samples, samples.astype(np.float32, copy=False)
        if is_exact and not np.array_equal(given, samples, equal_nan=True):
            raise ValueError(f"float32 does not hold all samples of {given.dtype}; give samples.astype('float32')")
    if samples.dtype not in (np.float32, np.int16, np.int32):
        raise TypeError(f"samples of {samples.dtype}; expected floats, int16 or int32")
    return samples, rate
