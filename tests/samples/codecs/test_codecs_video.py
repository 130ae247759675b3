"""Videos: the frames that PyAV reads, and an error for every damage that a format shows."""

import io
import re
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from soak import SOAK
from videos import KINDS, RATE, peer, upright, written

from tarshards import Stream, TarWriter
from tarshards.errors import DecodeError
from tarshards.samples.codecs import decode_field
from tarshards.samples.codecs.media import video

PAGE = Path(__file__).parents[3] / "docs" / "guides" / "audio-text-ragged.md"
pytestmark = pytest.mark.skipif(find_spec("av") is None, reason="needs PyAV")
FIELDS = {"matroska": "mkv", "ogg": "ogv"}


@pytest.mark.parametrize("kind", KINDS)
def test_frames_are_those_of_pyav(kind):
    data = written(kind)
    frames, times = peer(data)
    field = FIELDS.get(KINDS[kind][0], KINDS[kind][0])
    decoded = decode_field(field, data, "video")
    assert (decoded.frames.dtype, decoded.frames.shape) == (np.uint8, (12, 32, 48, 3))
    np.testing.assert_array_equal(decoded.frames, frames)
    wanted = np.arange(12) / RATE if kind in ("avi h264", "avi mpeg4") else times
    np.testing.assert_allclose(decoded.times, wanted)
    assert decoded.fps == pytest.approx(RATE)
    np.testing.assert_array_equal(video.decode_video(io.BytesIO(data)).frames, frames)  # of a seekable file


TURNED = [(kind, hflip) for kind in ("mp4 h264", "mov h264", "fragmented mp4") for hflip in (False, True)]


@pytest.mark.parametrize(("kind", "hflip"), [*TURNED, ("mkv h264", False)])
@pytest.mark.parametrize("degrees", [0, 90, 180, 270])
def test_frames_are_turned_and_mirrored_as_the_file_asks(kind, degrees, hflip):
    data = written(kind, turn=(degrees, hflip))
    frames, _ = peer(data)
    field = FIELDS.get(KINDS[kind][0], KINDS[kind][0])
    wanted = upright(frames, degrees, hflip)
    decoded = decode_field(field, data, "video")
    np.testing.assert_array_equal(decoded.frames, wanted)
    np.testing.assert_array_equal(decode_field(field, data, "video", rotate=False).frames, frames)
    (sample,) = Stream([{"__key__": "a", field: data}]).decode("video", rotate=False)
    np.testing.assert_array_equal(sample[field].frames, frames)
    (sample,) = Stream([{"__key__": "a", field: data}]).decode(**{field: "video"})
    np.testing.assert_array_equal(sample[field].frames, wanted)


def test_a_rotation_by_another_angle_is_an_error_with_its_cure():
    data = written(turn=(30,))
    with pytest.raises(DecodeError, match="a rotation by -30 degrees is not supported; rotate=False gives"):
        decode_field("mp4", data, "video")
    assert decode_field("mp4", data, "video", rotate=False).frames.shape == (12, 32, 48, 3)


def test_frames_as_tensors():
    torch = pytest.importorskip("torch", reason="needs torch")
    data = written()
    frames, times, fps = decode_field("mp4", data, "torchvideo")
    assert torch.equal(frames, torch.from_numpy(peer(data)[0]))
    assert (times.dtype, times.shape, fps) == (torch.float64, (12,), RATE)


def test_videos_stay_bytes_unless_a_videospec_asks(tmp_path):
    data = written()
    with TarWriter(tmp_path / "a.tar") as writer:
        writer.write({"__key__": "a", "mp4": data})
    stream = Stream.from_shards(str(tmp_path / "a.tar"))
    assert next(iter(stream.decode()))["mp4"] == data
    for decoding in stream.decode("rgb8", "audio", "video"), stream.decode(mp4="video"):
        np.testing.assert_array_equal(next(iter(decoding))["mp4"].frames, peer(data)[0])
    with pytest.raises(ValueError, match="one videospec"):
        stream.decode("video", "torchvideo")


def is_same(data, right):
    """Whether the frames are the *right* ones; None for an error."""
    try:
        frames = video.decode_video(data).frames
    except Exception:
        return None
    return frames.shape == right.shape and bool((frames == right).all())


def cuts(data):
    """Places all over a video, and those between its fragments or clusters."""
    borders = [match.start() - 4 for match in re.finditer(b"moof", data)]
    borders += [match.start() for match in re.finditer(b"\x1f\x43\xb6\x75", data)]
    return {*range(0, len(data), max(1, len(data) // (25 * SOAK))), *borders, *range(len(data) - 9, len(data))}


def flipped(data, bit):
    return data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :]


@pytest.mark.soak
def test_the_page_lists_what_is_seen_of_damage():
    rng, found = np.random.default_rng(0), {}
    for kind in KINDS:
        data = written(kind)
        right = video.decode_video(data).frames
        cut = any(is_same(data[:end], right) is False for end in cuts(data))
        bits = rng.integers(0, 8 * len(data), 60 * SOAK).tolist()
        changed = any(is_same(flipped(data, bit), right) is False for bit in bits)
        found[kind] = tuple("unseen" if unseen else "an error" for unseen in (cut, changed))
    rows = re.findall(r"^\| ([a-z0-9, `]+) \| (an error|unseen) \| (an error|unseen) \|$", PAGE.read_text(), re.M)
    assert found == {
        name: (cut, bit) for names, cut, bit in rows for name in re.findall("`([a-z0-9]+ [a-z0-9]+)`", names)
    }


@pytest.mark.parametrize("data", [b"", b"x", b"\0" * 99, b"#EXTM3U\nfile:///etc/passwd\n", b"ffconcat version 1.0\n"])
def test_other_bytes_are_an_error(data):
    with pytest.raises(DecodeError, match=r"mp4.*not a video in any of: MP4 MOV"):
        decode_field("mp4", data, "video")


def test_bombs_are_errors(monkeypatch):
    data = written()
    monkeypatch.setattr(video, "MAX_BYTES", 11 * 32 * 48 * 3)
    with pytest.raises(DecodeError, match="decompression bomb"):
        decode_field("mp4", data, "video")
    monkeypatch.setattr(video, "MAX_PIXELS", 32 * 48 - 1)
    with pytest.raises(DecodeError, match=r"decompression bomb. 48 x 32 pixels"):
        decode_field("mp4", data, "video")


def test_a_sound_alone_is_no_video():
    import av

    stream = io.BytesIO()
    with av.open(stream, "w", format="mp4") as container:
        sound = container.add_stream("aac", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.rate = 8000
        container.mux(sound.encode(frame))
        container.mux(sound.encode(None))
    with pytest.raises(DecodeError, match="no video in the file"):
        decode_field("mp4", stream.getvalue(), "video")
