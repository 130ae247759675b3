"""Videos: PyAV's own reader as the oracle, and damage that is an error as far as the format shows it."""

import io
import re
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from soak import SOAK
from videos import CODECS, made, moving

from tarshards import Stream, TarWriter
from tarshards.errors import DecodeError
from tarshards.samples.codecs import decode_field, video
from tarshards.samples.codecs.video import EXTENSIONS, decode_clip, decode_video

PAGE = Path(__file__).parents[3] / "docs" / "media.md"
KINDS = [(extension, codec) for extension, (_, codecs) in CODECS.items() for codec in codecs]


@pytest.fixture
def av():
    return pytest.importorskip("av", reason="needs PyAV")


def peer(av, data):
    with av.open(io.BytesIO(data)) as container:
        frames = list(container.decode(video=0))
    return np.stack([frame.to_ndarray(format="rgb24") for frame in frames]), [frame.time for frame in frames]


@pytest.mark.parametrize(("extension", "codec"), KINDS)
def test_frames_and_times_are_those_of_pyav(extension, codec, av):
    pixels = moving()
    data = made(extension, pixels, codec)
    got = decode_field(f"a.{extension}", data, video="video")
    frames, times = peer(av, data)
    assert np.array_equal(got.frames, frames)
    assert got.times.tolist() == times
    assert got.frames.shape == pixels.shape
    assert np.abs(got.frames.astype(int) - pixels).mean() < 6
    assert np.allclose(got.times, np.arange(12) / 10, atol=0.01)


def test_an_index_in_front_and_fragments_are_read(av):
    for flags in "faststart", "frag_keyframe+empty_moov":
        data = made("mp4", moving(), movflags=flags)
        assert np.array_equal(decode_video(data).frames, peer(av, data)[0])


def test_videos_stay_bytes_unless_a_videospec_asks(tmp_path, av):
    data = made("mp4", moving(3))
    with TarWriter(tmp_path / "a.tar") as writer:
        writer.write({"__key__": "a", "mp4": data, "cls": 3})
    stream = Stream.from_shards(str(tmp_path / "a.tar"))
    assert next(iter(stream.decode("rgb8", "audio")))["mp4"] == data
    for decoding in stream.decode("rgb8", "video"), stream.decode(mp4="video"):
        assert next(iter(decoding))["mp4"].frames.shape == (3, 48, 64, 3)
    with pytest.raises(ValueError, match="unknown videospec 'vid'; known: video"):
        decode_field("mp4", data, video="vid")


def is_same(data, whole):
    """Whether *data* decode to the frames; None if they are an error."""
    try:
        return np.array_equal(decode_video(data).frames, whole.frames)
    except Exception:
        return None


@pytest.mark.parametrize(("extension", "codec"), KINDS)
def test_truncations_are_errors(extension, codec, av):
    data = made(extension, moving(8, 32, 32), codec)
    step = max(1, len(data) // (40 * SOAK))
    for size in {*range(0, len(data), step), *range(len(data) - 8, len(data))}:
        with pytest.raises(DecodeError, match=r"truncated|not a video|no moov|damaged|no whole Ogg|is cut|ends at|AVI"):
            decode_field(f"a.{extension}", data[:size], video="video")


def listed():
    """The extensions, by the words of the page on what of a changed bit is seen."""
    rows = re.findall(r"^\| ([a-z0-9, `]+) \| an error \| (an error|unseen) \|", PAGE.read_text(), re.MULTILINE)
    return {name: seen for names, seen in rows for name in re.findall(r"`([a-z0-9]+)`", names)}


def test_the_page_lists_what_is_seen_of_changed_bits(av):
    rng, found = np.random.default_rng(0), {}
    for extension in CODECS:
        data = made(extension, moving(8, 32, 32))
        whole, unseen = decode_video(data), 0
        for bit in rng.integers(0, 8 * len(data), 60 * SOAK).tolist():
            flipped = bytearray(data)
            flipped[bit // 8] ^= 1 << bit % 8
            unseen += is_same(bytes(flipped), whole) is False
        found[extension] = "unseen" if unseen else "an error"
    assert found == listed()
    assert set(found) == EXTENSIONS


def test_damage_that_ffmpeg_conceals_is_an_error(av):
    data = made("mp4", moving())
    whole, concealed = decode_video(data), 0
    for place in range(800, 1800, 40):
        changed = data[:place] + bytes(8) + data[place + 8 :]
        with av.open(io.BytesIO(changed)) as container:
            try:
                is_corrupt = [frame.is_corrupt for frame in container.decode(video=0)]
            except av.error.FFmpegError:
                continue
        if any(is_corrupt):
            assert is_same(changed, whole) is None, place
            concealed += len(is_corrupt) == 12
    assert concealed


@pytest.mark.parametrize("data", [b"", b"RIFF", bytes(5000), b"<html>", b"RIFF\4\0\0\0WAVE", b"\x1a\x45\xdf\xa3"])
def test_what_is_no_video(data, av):
    with pytest.raises(DecodeError, match=r"not a video in any of MP4 Matroska AVI Ogg|truncated in its header"):
        decode_field("mp4", data, video="video")


def test_a_streamed_matroska_is_refused_because_nothing_says_where_it_ends(av):
    data = made("mkv", moving(), live="1")
    with pytest.raises(DecodeError, match="a streamed Matroska, whose header does not give its size"):
        decode_field("mkv", data, video="video")


def test_decompression_bombs(av, monkeypatch):
    data = made("mp4", moving())
    monkeypatch.setattr("tarshards.samples.codecs.video.MAX_BYTES", 12 * 48 * 64 * 3 - 1)
    with pytest.raises(DecodeError, match=r"decompression bomb\? more than 12 frames of 64 x 48"):
        decode_field("mp4", data, video="video")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 48 * 64 - 1)
    with pytest.raises(DecodeError, match=r"decompression bomb\? 64 x 48 pixels"):
        decode_field("mp4", data, video="video")


@pytest.mark.parametrize("extension", CODECS)
def test_clips_are_parts_of_the_video(extension, av):
    data = made(extension, moving(40))
    frames = decode_video(data).frames
    for begin in 0.0, 0.1, 0.7, 2.3, 3.6:
        first = round(10 * begin)
        assert np.array_equal(decode_clip(data, 4, start=lambda _, begin=begin: begin), frames[first : first + 4])
        every_other = decode_clip(data, 3, start=lambda _, begin=begin: begin + 0.03, fps=5)
        assert np.array_equal(every_other, frames[first : first + 5 : 2])
        twice = decode_clip(data, 5, start=lambda _, begin=begin: begin + 0.01, fps=20)
        assert np.array_equal(twice, frames[[min(39, first + i // 2) for i in range(len(twice))]])
    assert len(decode_clip(data, 9, start=lambda _: 3.5)) == 5


def test_only_frames_from_the_key_frame_on_are_decoded(av, monkeypatch):
    data, taken = made("mp4", moving(200), gop=10), []

    class Counting:
        def __init__(self, container):
            self.seek, self._decode, self.duration = container.seek, container.decode, container.duration

        def decode(self, stream):
            for frame in self._decode(stream):
                taken.append(frame.time)
                yield frame

    @contextmanager
    def counted(data, opened=video.opened):
        with opened(data) as (container, stream):
            yield Counting(container), stream

    monkeypatch.setattr(video, "opened", counted)
    assert len(decode_clip(data, 2, start=lambda _: 15.4)) == 2
    assert 14.4 <= taken[0] <= 15.4
    assert taken[-1] == 15.5


def test_a_seek_to_frames_that_need_earlier_ones_begins_anew(av, monkeypatch):
    data, opened, calls = made("mp4", moving(40)), video.opened, []

    @contextmanager
    def failing(data):
        calls.append(data)
        if len(calls) == 1:
            raise ValueError("damaged")
        with opened(data) as found:
            yield found

    monkeypatch.setattr(video, "opened", failing)
    assert len(decode_clip(data, 2, start=lambda _: 2.0)) == len(calls) == 2
