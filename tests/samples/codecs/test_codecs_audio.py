"""Sounds: round trips against soundfile, and every damage that a format shows is an error."""

import io
import re
import struct
import wave
from pathlib import Path

import numpy as np
import pytest
from soak import SOAK

from tarshards import Stream, TarWriter
from tarshards.errors import DecodeError, EncodeError
from tarshards.samples.codecs import decode_field, encode_field
from tarshards.samples.codecs.audio import decode_audio

RATE = 16000
PAGE = Path(__file__).parents[3] / "docs" / "guides" / "audio-text-ragged.md"
FORMATS = {"wav": "WAV", "aiff": "AIFF", "flac": "FLAC", "ogg": "OGG", "opus": "OGG", "mp3": "MP3"}
LOSSY = {"ogg", "opus", "mp3"}


@pytest.fixture
def soundfile():
    return pytest.importorskip("soundfile", reason="needs soundfile")


def tones(frames=4000, channels=2):
    time = np.arange(frames) / RATE
    waves = 0.4 * np.sin(2 * np.pi * 440 * time)[:, None] * np.linspace(1, 0.5, channels)
    return (waves + np.random.default_rng(0).normal(0, 0.02, waves.shape)).astype(np.float32)


def integers(samples, dtype="int16"):
    return (samples.astype(np.float64) * np.iinfo(dtype).max).astype(dtype)


def written(soundfile, field, samples, rate=RATE, **options):
    """A sound that libsndfile wrote."""
    stream = io.BytesIO()
    soundfile.write(stream, samples, rate, **{"format": FORMATS[field], **options})
    return stream.getvalue()


def peer(soundfile, data):
    return soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("field", FORMATS)
def test_what_we_write_reads_as_soundfile_reads_it(field, channels, soundfile):
    for samples in tones(channels=channels), integers(tones(channels=channels)):
        data = encode_field(field, (samples, RATE))
        assert data == encode_field(field, (samples, RATE))
        decoded, rate = decode_field(field, data, audio="audio")
        theirs, their_rate = peer(soundfile, data)
        assert (decoded.dtype, rate, decoded.shape) == (np.float32, their_rate, theirs.shape)
        np.testing.assert_allclose(decoded, theirs, atol=1e-6 if field == "mp3" else 0)
        wanted = samples if samples.dtype == np.float32 else samples / np.float32(2**15)
        if field not in LOSSY:
            assert np.abs(decoded - wanted).max() <= (2**-23 if field == "flac" else 0)
        elif field != "opus":
            assert decoded.shape[0] >= 4000
            assert np.abs(decoded[:4000] - wanted)[500:-500].max() < 0.12


@pytest.mark.parametrize("subtype", ["PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW"])
@pytest.mark.parametrize("format", ["WAV", "WAVEX", "RF64", "AIFF"])
def test_uncompressed_sounds_of_every_width(format, subtype, soundfile):
    subtype = "PCM_S8" if (format, subtype) == ("AIFF", "PCM_U8") else subtype
    for frames in 2, 500:
        data = written(soundfile, "wav", tones(frames, 1), format=format, subtype=subtype)
        decoded, _ = decode_audio(data)
        np.testing.assert_array_equal(decoded, peer(soundfile, data)[0])
        assert decoded.shape == (frames, 1)


def test_wav_of_integers_reads_as_pythons_wave_reads_it():
    samples = integers(tones(100))
    with wave.open(io.BytesIO(encode_field("wav", (samples, 8000)))) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (2, 2, 8000)
        assert file.readframes(1000) == samples.tobytes()


def test_tensors_are_of_channels_and_frames_as_torchaudio_has_them():
    torch = pytest.importorskip("torch", reason="needs torch")
    tensor = torch.from_numpy(tones(100).T.copy())
    decoded, rate = decode_field("a.wav", encode_field("a.wav", (tensor, 8000)), audio="torchaudio")
    assert torch.equal(decoded, tensor)
    assert rate == 8000


def test_sounds_stay_bytes_unless_an_audiospec_asks(tmp_path):
    data = encode_field("wav", (tones(10), 8000))
    with TarWriter(tmp_path / "a.tar") as writer:
        writer.write({"__key__": "a", "wav": (tones(10), 8000), "cls": 3})
    stream = Stream.from_shards(str(tmp_path / "a.tar"))
    assert next(iter(stream.decode()))["wav"] == data
    for decoding in stream.decode("rgb8", "audio"), stream.decode(wav="audio"):
        samples, rate = next(iter(decoding))["wav"]
        np.testing.assert_array_equal(samples, tones(10))
        assert rate == 8000
    with pytest.raises(ValueError, match="one audiospec"):
        stream.decode("audio", "torchaudio")
    with pytest.raises(ValueError, match="unknown audiospec 'sound'; known: audio torchaudio"):
        decode_field("wav", data, audio="sound")


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("wav", tones(10), "a sound is .samples, rate."),
        ("wav", (tones(10), 0), "at 0 Hz"),
        ("wav", (tones(10)[None], 8000), "of shape"),
        ("wav", (tones(10).astype("u1"), 8000), "samples of uint8"),
        ("flac", (3 * tones(10), 8000), "must lie in"),
        ("ogg", (np.full(10, np.nan), 8000), "must lie in"),
        ("flac", (integers(tones(10), "int32"), 8000), "the lower 8 of int32"),
    ],
)
def test_what_does_not_fit_is_refused(field, value, reason):
    with pytest.raises(EncodeError, match=reason):
        encode_field(field, value)


def is_same(data, sound):
    """Whether *data* decode to the sound; None if they are an error."""
    try:
        samples, rate = decode_audio(data)
    except Exception:
        return None
    return rate == sound[1] and np.array_equal(samples, sound[0])


@pytest.mark.parametrize("field", FORMATS)
def test_every_truncation_is_an_error_or_all_samples(field, soundfile):
    data = written(soundfile, field, tones(600, 1), subtype="OPUS" if field == "opus" else None)
    sound = decode_audio(data)
    assert {is_same(data[:size], sound) for size in range(len(data))} <= {None, True}


def listed():
    """The extensions, by the words of the page on what of a changed bit is seen."""
    rows = re.findall(r"^\| ([a-z0-9, `]+) \| an error \| (an error|unseen) \|", PAGE.read_text(), re.MULTILINE)
    return {name: seen for names, seen in rows for name in re.findall(r"`([a-z0-9]+)`", names)}


def test_the_page_lists_what_is_seen_of_changed_bits(soundfile):
    rng, found = np.random.default_rng(0), {}
    for field in FORMATS:
        data = encode_field(field, (integers(tones(2000, 1)), RATE))
        sound, unseen = decode_audio(data), 0
        for bit in rng.integers(0, 8 * len(data), 100 * SOAK).tolist():
            flipped = bytearray(data)
            flipped[bit // 8] ^= 1 << bit % 8
            unseen += is_same(bytes(flipped), sound) is False
        found[field] = "unseen" if unseen else "an error"
    assert found == {field: seen for field, seen in listed().items() if field in FORMATS}


def test_bits_of_a_wav_header_are_seen():
    data = encode_field("wav", (integers(tones(300)), RATE))
    sound = decode_audio(data)
    for bit in range(8 * 44):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        assert is_same(bytes(flipped), sound) is not False, bit


@pytest.mark.parametrize("size", [0, 0xFFFFFFFF])
def test_a_streamed_wav_is_refused_because_nothing_says_where_it_ends(size):
    data = encode_field("wav", (integers(tones(300)), RATE))
    streamed = data[:4] + struct.pack("<I", size) + data[8:40] + struct.pack("<I", size) + data[44:]
    with pytest.raises(DecodeError, match="a streamed WAV, whose header does not give its size"):
        decode_field("wav", streamed, audio="audio")


def test_an_ogg_without_a_page_is_an_error(soundfile):
    data = encode_field("ogg", (np.tile(tones(), (20, 1)), RATE))
    begins = [match.start() for match in re.finditer(b"OggS\0", data)]
    assert len(begins) > 4
    for begin, end in zip(begins[1:], [*begins[2:], len(data)]):
        with pytest.raises(DecodeError, match=r"a page is missing|no last page"):
            decode_field("ogg", data[:begin] + data[end:], audio="audio")


def test_a_flac_of_more_frames_than_memory_is_refused(soundfile):
    data = bytearray(encode_field("flac", (integers(tones(300)), RATE)))
    data[21] |= 15  # the upper bits of the number of frames
    with pytest.raises(DecodeError, match=r"decompression bomb\? \d+ frames"):
        decode_field("flac", bytes(data), audio="audio")


@pytest.mark.parametrize("data", [b"", b"RIFF", b"caff" + bytes(50), b".snd" + bytes(50), b"<html>", bytes(5000)])
def test_what_is_no_sound(data):
    with pytest.raises(DecodeError, match="not a sound in any of WAV AIFF FLAC Ogg MP3"):
        decode_field("wav", data, audio="audio")
