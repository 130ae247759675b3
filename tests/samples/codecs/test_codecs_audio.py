"""Sounds: round trips against soundfile, and every damage that a format shows is an error."""

import io
import re
import struct
import wave
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from soak import SOAK

from tarshards import Stream, TarWriter, readers
from tarshards.errors import DecodeError, EncodeError
from tarshards.samples.codecs import decode_field, encode_field
from tarshards.samples.codecs.media.audio import EXTENSIONS, decode_audio
from tarshards.samples.payloads import Payloads

RATE = 16000
PAGE = Path(__file__).parents[3] / "docs" / "guides" / "audio-text-ragged.md"
FORMATS = {"wav": "WAV", "aiff": "AIFF", "flac": "FLAC", "ogg": "OGG", "opus": "OGG", "mp3": "MP3"}
LOSSY = {"ogg", "opus", "mp3"}
TAG = b"ID3\4\0\0\0\0\0\x14" + bytes(20)  # that programs put before FLAC and AAC too


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


def written_by_pyav(format, codec, samples, rate=RATE):
    """A sound that PyAV wrote."""
    av, stream = pytest.importorskip("av", reason="needs PyAV"), io.BytesIO()
    with av.open(stream, "w", format=format) as container:
        sound = container.add_stream(codec, rate=rate, layout="mono" if samples.shape[1] == 1 else "stereo")
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples.T), format="fltp", layout=sound.layout)
        frame.rate, queue = rate, av.AudioFifo()
        for converted in av.AudioResampler(sound.format, sound.layout, rate).resample(frame):
            queue.write(converted)
        for part in queue.read_many(sound.frame_size or 1024, partial=True):
            container.mux(sound.encode(part))
        container.mux(sound.encode(None))
    return stream.getvalue()


def peer_of_pyav(data):
    """The samples that PyAV reads."""
    import av

    with av.open(io.BytesIO(data)) as container:
        frames = list(container.decode(audio=0))
        blocks = [frame.to_ndarray() for frame in frames]
    if not frames[0].format.is_planar:
        blocks = [block.reshape(-1, frames[0].layout.nb_channels).T for block in blocks]
    samples = np.concatenate(blocks, axis=1).T
    if samples.dtype.kind == "i":
        samples = samples / np.float32(2.0 ** (8 * samples.itemsize - 1))
    return samples, frames[0].rate


def chunk(name, data):
    return name + struct.pack(">q", len(data)) + data


def aac_in_caf(adts):
    """A file like those of Apple's recorders: the packets of an *adts* stream in a CAF."""
    packets, place = [], 0
    while place < len(adts):
        size = (adts[place + 3] & 3) << 11 | adts[place + 4] << 3 | adts[place + 5] >> 5
        packets.append(adts[place + 7 : place + size])
        place += size
    form = struct.pack(">d4s5I", RATE, b"aac ", 0, 0, 1024, 1, 0)
    specific = b"\x05\x02\x14\x08"  # AAC LC, 16 kHz, mono
    config = b"\x04" + bytes([13 + len(specific)]) + b"\x40\x15" + bytes(11) + specific
    cookie = bytes(4) + b"\x03" + bytes([3 + len(config) + 3]) + bytes(3) + config + b"\x06\x01\x02"
    sizes = b"".join(
        bytes([0x80 | size >> 7, size & 127]) if size > 127 else bytes([size]) for size in map(len, packets)
    )
    table = struct.pack(">qqii", len(packets), 1024 * len(packets), 0, 0) + sizes
    chunks = chunk(b"desc", form) + chunk(b"kuki", cookie) + chunk(b"pakt", table)
    return b"caff\0\1\0\0" + chunks + chunk(b"data", bytes(4) + b"".join(packets))


#: What is only read: options of soundfile, or of PyAV.
BY_SOUNDFILE = {
    "SPHERE.wav": {"format": "NIST"},
    "ulaw.sph": {"format": "NIST", "subtype": "ULAW"},
    "GSM.wav": {"format": "WAV", "subtype": "GSM610", "rate": 8000},
    "ADPCM.wav": {"format": "WAV", "subtype": "IMA_ADPCM", "rate": 8000},
    "G721.wav": {"format": "WAV", "subtype": "G721_32", "rate": 8000},
    "GSM.aifc": {"format": "AIFF", "subtype": "GSM610"},
    "ADPCM.aif": {"format": "AIFF", "subtype": "IMA_ADPCM"},
    "tagged.flac": {"format": "FLAC"},
    "au": {"format": "AU"},
    "little.au": {"format": "AU", "endian": "LITTLE"},
    "ulaw.snd": {"format": "AU", "subtype": "ULAW"},
    "G723.au": {"format": "AU", "subtype": "G723_24"},
    "caf": {"format": "CAF"},
    "ALAC.caf": {"format": "CAF", "subtype": "ALAC_16"},
}
BY_PYAV = {
    "m4a": ("ipod", "aac"),
    "ALAC.m4a": ("ipod", "alac"),
    "aac": ("adts", "aac"),
    "tagged.aac": ("adts", "aac"),
    "AAC.caf": ("adts", "aac"),
    "mka": ("matroska", "libopus", 48000),
    "PCM.mka": ("matroska", "pcm_s16le"),
    "weba": ("webm", "libopus", 48000),
}


@pytest.fixture(params=[*BY_SOUNDFILE, *BY_PYAV])
def found(request, soundfile):
    """The field and the bytes of a sound of another program, of 3990 frames."""
    name, samples = request.param, tones(3990, 1)
    if name in BY_SOUNDFILE:
        data = written(soundfile, "wav", samples, **BY_SOUNDFILE[name])
    else:
        format, codec, *rate = BY_PYAV[name]
        data = written_by_pyav(format, codec, samples, *rate)
    return name, aac_in_caf(data) if name == "AAC.caf" else TAG + data if "tagged" in name else data


def test_sounds_of_other_programs_read_as_soundfile_or_pyav_reads_them(found, soundfile):
    name, data = found
    samples, rate = decode_field(name, data, "audio")
    try:
        theirs, their_rate = peer(soundfile, data)
    except soundfile.LibsndfileError:
        theirs, their_rate = peer_of_pyav(data)
    if name == "GSM.wav":  # of whose pad byte libsndfile makes 320 samples of noise, and FFmpeg none
        assert len(theirs) == len(samples) + 320
        theirs, their_rate = peer_of_pyav(data)
    assert (samples.dtype, rate) == (np.float32, their_rate)
    np.testing.assert_array_equal(samples, theirs)
    assert 3990 <= len(samples) < 3990 + 2048


def test_the_sound_of_a_video_is_decoded_where_it_is_asked_for():
    data = written_by_pyav("mp4", "aac", tones(3990))
    (sample,) = Stream([{"__key__": "a", "mp4": data}]).decode(mp4="audio")
    np.testing.assert_array_equal(sample["mp4"].samples, peer_of_pyav(data)[0])


UNREAD = {"w64", "wma", "amr", "ac3", "mp2", "wv", "ape"}


@pytest.mark.parametrize("field", sorted(UNREAD))
def test_sounds_that_are_not_read_are_errors_never_bytes(field):
    with pytest.raises(DecodeError, match=f"{field}: not a sound in any of WAV AIFF FLAC Ogg MP3 SPHERE"):
        decode_field(field, b"#!AMR\n" + bytes(100), "audio")
    assert decode_field(field, b"#!AMR\n") == b"#!AMR\n"


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("field", FORMATS)
def test_what_we_write_reads_as_soundfile_reads_it(field, channels, soundfile):
    for samples in tones(channels=channels), integers(tones(channels=channels)):
        data = encode_field(field, (samples, RATE))
        assert data == encode_field(field, (samples, RATE))
        decoded, rate = decode_field(field, data, "audio")
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


@pytest.mark.parametrize("field", ["wav", "aiff"])
def test_samples_that_float32_does_not_hold_are_refused_by_formats_that_are_exact(field):
    pytest.importorskip("soundfile", reason="needs soundfile")
    exact = tones(10).astype(np.float64)
    np.testing.assert_array_equal(decode_field(field, encode_field(field, (exact, RATE)), "audio")[0], exact)
    with pytest.raises(EncodeError, match=r"float32 does not hold all samples of float64; give samples.astype"):
        encode_field(field, (exact / 3, RATE))


@pytest.mark.parametrize("field", ["flac", "ogg", "opus", "mp3"])
def test_sounds_without_frames_are_written_where_they_can_be_read(field, soundfile):
    empty = np.zeros((0, 1), np.float32)
    with pytest.raises(EncodeError, match=r"a sound without frames, which .* does not give back; WAV does"):
        encode_field(field, (empty, RATE))
    assert decode_field("wav", encode_field("wav", (empty, RATE)), "audio")[0].shape == (0, 1)


def test_a_rate_is_a_whole_number():
    for rate in np.float32(44100.5), 44100.5, "44100":
        with pytest.raises(EncodeError, match=r"a sound is \(samples, rate\)"):
            encode_field("wav", (tones(10), rate))
    assert decode_field("wav", encode_field("wav", (tones(10), np.int64(8000))), "audio")[1] == 8000


def test_tensors_are_of_channels_and_frames_as_torchaudio_has_them():
    torch = pytest.importorskip("torch", reason="needs torch")
    tensor = torch.from_numpy(tones(100).T.copy())
    decoded, rate = decode_field("a.wav", encode_field("a.wav", (tensor, 8000)), "torchaudio")
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


@pytest.mark.soak
def test_every_truncation_of_what_others_write_is_an_error(found):
    name, data = found
    sound = decode_audio(data)
    cuts = {*range(0, len(data), max(1, len(data) // (40 * SOAK))), *range(len(data) - 20, len(data))}
    if name in ("aac", "tagged.aac"):  # which does not say how many frames there are
        cuts -= {match.start() for match in re.finditer(rb"\xff\xf1", data)}
    assert {is_same(data[:size], sound) for size in cuts} <= {None, True}


@pytest.mark.soak
def test_whatever_decodes_a_sound_calls_the_same_ones_damaged(found):
    _, data = found
    rng, rate = np.random.default_rng(0), decode_audio(data)[1]
    reader = readers.audio(rate)
    for place in rng.integers(0, len(data), 10 * SOAK):
        for damaged in data[:place], data[:place] + bytes([data[place] ^ 1 << place % 8]) + data[place + 1 :]:
            sound = None
            with suppress(Exception):
                sound = decode_audio(damaged)
            if sound is None or (sound.rate, sound.samples.shape[1]) == (rate, 1):
                batch = reader.make(1)
                failed = reader.read(batch, Payloads.of([damaged]), np.zeros(1, np.uint64))
                assert (sound is None) == bool(failed)
                assert failed or np.array_equal(batch[0], sound.samples)


def test_a_sphere_with_the_header_of_timit(soundfile):
    samples = integers(tones(467, 1))
    lines = [
        "NIST_1A\n   1024\ndatabase_id -s5 TIMIT\ndatabase_version -s3 1.0\nutterance_id -s8 cjf0_sa1",
        "channel_count -i 1\nsample_count -i 467\nsample_rate -i 16000\nsample_min -i -2191\nsample_max -i 2790",
        "sample_n_bytes -i 2\nsample_byte_format -s2 01\nsample_sig_bits -i 16\nend_head\n",
    ]
    data = "\n".join(lines).encode().ljust(1024) + samples.astype("<i2").tobytes()
    decoded, rate = decode_field("wav", data, "audio")
    np.testing.assert_array_equal(decoded, samples / np.float32(2**15))
    assert rate == 16000


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda data: data.replace(b"-s3 pcm", b"-s26 pcm,embedded-shorten-v2.00"), "sph2pipe -f wav in.sph out.wav"),
        (lambda data: data.replace(b"sample_count", b"sample_kount"), "lacks the number of its samples"),
        (lambda data: data + bytes(2), "9006 bytes, where 3990 frames take 7980"),
    ],
)
def test_a_sphere_that_cannot_be_read_says_why(change, reason, soundfile):
    data = written(soundfile, "wav", tones(3990, 1), format="NIST")
    assert len(data) == 1024 + 7980
    with pytest.raises(DecodeError, match=reason):
        decode_field("wav", change(data), "audio")


def listed():
    """The extensions, by the page's words on the detection of a changed bit."""
    rows = re.findall(r"^\| ([a-z0-9, `]+) \| an error \| (an error|unseen) \|", PAGE.read_text(), re.MULTILINE)
    return {name: seen for names, seen in rows for name in re.findall(r"`([a-z0-9]+)`", names)}


def flipped(data, bit):
    return data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :]


@pytest.mark.soak
def test_the_page_lists_what_is_seen_of_changed_bits(soundfile):
    rng, found = np.random.default_rng(0), {}
    for field in FORMATS:
        data = encode_field(field, (integers(tones(2000, 1)), RATE))
        sound = decode_audio(data)
        bits = rng.integers(0, 8 * len(data), 100 * SOAK).tolist()
        found[field] = "unseen" if any(is_same(flipped(data, bit), sound) is False for bit in bits) else "an error"
    assert found == {field: seen for field, seen in listed().items() if field in FORMATS}


@pytest.mark.soak
def test_the_page_lists_what_is_seen_of_changed_bits_in_what_others_write(found):
    name, data = found
    rng, sound = np.random.default_rng(0), decode_audio(data)
    bits = rng.integers(0, 8 * len(data), 100 * SOAK).tolist()
    seen = "unseen" if any(is_same(flipped(data, bit), sound) is False for bit in bits) else "an error"
    assert seen == listed()[name.rpartition(".")[2]]


def test_the_page_lists_all_sounds_that_are_read():
    assert {*listed()} == EXTENSIONS - UNREAD


def test_bits_of_a_wav_header_are_seen():
    data = encode_field("wav", (integers(tones(300)), RATE))
    sound = decode_audio(data)
    for bit in range(8 * 44):
        assert is_same(flipped(data, bit), sound) is not False, bit


def test_a_streamed_au_or_caf_is_refused_too(soundfile):
    au, caf = (written(soundfile, "wav", tones(300, 1), format=format) for format in ("AU", "CAF"))
    place = caf.index(b"data") + 4
    for data in au[:8] + b"\xff\xff\xff\xff" + au[12:], caf[:place] + b"\xff" * 8 + caf[place + 8 :]:
        with pytest.raises(DecodeError, match=r"a streamed (AU|CAF), whose header does not give its size"):
            decode_field("au", data, "audio")


@pytest.mark.parametrize("size", [0, 0xFFFFFFFF])
def test_a_streamed_wav_is_refused_because_nothing_says_where_it_ends(size):
    data = encode_field("wav", (integers(tones(300)), RATE))
    streamed = data[:4] + struct.pack("<I", size) + data[8:40] + struct.pack("<I", size) + data[44:]
    with pytest.raises(DecodeError, match="a streamed WAV, whose header does not give its size"):
        decode_field("wav", streamed, "audio")


def test_an_ogg_without_a_page_is_an_error(soundfile):
    data = encode_field("ogg", (np.tile(tones(), (20, 1)), RATE))
    begins = [match.start() for match in re.finditer(b"OggS\0", data)]
    assert len(begins) > 4
    for begin, end in zip(begins[1:], [*begins[2:], len(data)]):
        with pytest.raises(DecodeError, match=r"a page is missing|no last page"):
            decode_field("ogg", data[:begin] + data[end:], "audio")


def test_a_flac_of_more_frames_than_memory_is_refused(soundfile):
    data = bytearray(encode_field("flac", (integers(tones(300)), RATE)))
    data[21] |= 15  # the upper bits of the number of frames
    with pytest.raises(DecodeError, match=r"decompression bomb\? \d+ frames"):
        decode_field("flac", bytes(data), "audio")


@pytest.mark.parametrize("data", [b"", b"RIFF", b"FORM" + bytes(50), b"<html>", bytes(5000)])
def test_what_is_no_sound(data):
    with pytest.raises(DecodeError, match="not a sound in any of WAV AIFF FLAC Ogg MP3 SPHERE AU CAF AAC MP4 Matroska"):
        decode_field("wav", data, "audio")
