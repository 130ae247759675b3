"""Videos, read into batches of clips."""

from contextlib import suppress
from importlib.util import find_spec

import numpy as np
import pytest
from readers_data import read, whole
from soak import SOAK, rounds
from videos import KINDS, RATE, peer, upright, written

from tarshards import ArrayLoader, ShardWriter, Stream, readers
from tarshards.errors import DecodeError
from tarshards.index.build import build_index
from tarshards.samples.codecs.media import video

pytestmark = pytest.mark.skipif(find_spec("av") is None, reason="needs PyAV")


@pytest.mark.parametrize("kind", KINDS)
def test_clips_are_parts_of_what_pyav_reads(kind):
    data = written(kind, 24)
    frames, _ = peer(data)
    for first in range(0, 21, 3):
        clips = whole(readers.video(4, start=first / RATE), [data])
        np.testing.assert_array_equal(clips[0], frames[first : first + 4])
    with_fps = whole(readers.video(4, fps=RATE / 2, start=0.5), [data])
    np.testing.assert_array_equal(with_fps[0], frames[[5, 7, 9, 11]])
    faster = whole(readers.video(4, fps=RATE * 2, start=0.5), [data])
    np.testing.assert_array_equal(faster[0], frames[[5, 5, 6, 6]])
    middle = whole(readers.video(4, start="middle"), [data])
    np.testing.assert_array_equal(middle[0], frames[10:14])


def place_of(clip, frames):
    (place,) = [i for i in range(len(frames)) if np.array_equal(frames[i : i + len(clip)], clip)]
    return place


@pytest.mark.parametrize("kind", ["mp4 h264", "mkv h264", "live webm", "ogv vp8", "avi mpeg4"])
def test_random_clips_lie_all_over_the_video(kind):
    data = written(kind, 24)
    frames, _ = peer(data)
    many = [data] * 20
    clips = whole(readers.video(4, start="random"), many)
    places = [place_of(clip, frames) for clip in clips]
    assert len({*places}) >= 8
    np.testing.assert_array_equal(whole(readers.video(4, start="random"), many, parts=7), clips)
    assert (whole(readers.video(4, start="random"), many, epoch=1) != clips).any()


@pytest.mark.parametrize("kind", ["mp4 h264", "mkv h264"])
def test_frames_at_changing_intervals(kind):
    times = np.cumsum([100, 40, 300, 20] * 6).tolist()
    data = written(kind, 24, times=times)
    frames, shown = peer(data)
    shown -= shown[0]
    for start in np.arange(0, 2.2, 0.31 if SOAK > 1 else 0.62):
        clips = whole(readers.video(3, fps=8, start=float(start)), [data])
        wanted = [int(np.searchsorted(shown, start + i / 8 + 2e-3)) - 1 for i in range(3)]
        np.testing.assert_array_equal(clips[0], frames[wanted])
    clips = whole(readers.video(20, start="random"), [data] * 12)
    assert {place_of(clip, frames) for clip in clips} <= {*range(5)}


def test_frames_are_resized_as_pyav_does_and_cropped():
    data = written(size=(32, 48))
    resized, _ = peer(data, width=20, height=10, interpolation="AREA")
    np.testing.assert_array_equal(whole(readers.video(2, (10, 20)), [data])[0], resized[:2])
    covering, _ = peer(data, width=24, height=16, interpolation="AREA")
    np.testing.assert_array_equal(whole(readers.video(2, 16, crop="center"), [data])[0], covering[:2, :, 4:20])


@pytest.mark.parametrize("hflip", [False, True])
@pytest.mark.parametrize("degrees", [90, 180, 270])
def test_frames_are_turned_before_they_are_resized_and_cropped(degrees, hflip):
    data = written(turn=(degrees, hflip))
    frames, _ = peer(data)
    wanted = upright(frames[:2], degrees, hflip)
    np.testing.assert_array_equal(whole(readers.video(2), [data])[0], wanted)
    np.testing.assert_array_equal(whole(readers.video(2, rotate=False), [data])[0], frames[:2])
    lies = degrees == 180
    size = (10, 20) if lies else (20, 10)
    resized = upright(peer(data, width=20, height=10, interpolation="AREA")[0][:2], degrees, hflip)
    np.testing.assert_array_equal(whole(readers.video(2, size), [data])[0], resized)
    covering = upright(peer(data, width=24, height=16, interpolation="AREA")[0][:2], degrees, hflip)
    middle = covering[:, :, 4:20] if lies else covering[:, 4:20]
    np.testing.assert_array_equal(whole(readers.video(2, 16, crop="center"), [data])[0], middle)
    left_alone = peer(data, width=24, height=16, interpolation="AREA")[0][:2, :, 4:20]
    np.testing.assert_array_equal(whole(readers.video(2, 16, crop="center", rotate=False), [data])[0], left_alone)


def test_videos_that_are_turned_have_the_size_that_is_shown():
    datas = [written(size=(48, 32)), written(turn=(90,)), written()]
    clips, failed = read(readers.video(2), datas)
    assert clips.shape[2:] == (48, 32, 3)
    assert {row: str(error) for row, error in failed.items()} == {
        2: "32 x 48 pixels, where the first video has 48 x 32"
    }


def test_what_fails_is_named_and_the_rest_is_read():
    whole = written()  # an encoder with threads may give other bytes each time
    datas = [whole, written(count=2), written(size=(48, 32)), whole[:-9], whole]
    clips, failed = read(readers.video(4), datas)
    assert {row: str(error) for row, error in failed.items()} == {
        1: "2 frames from 0.000 s on, fewer than 4",
        2: "48 x 32 pixels, where the first video has 32 x 48",
        3: str(failed[3]),
    }
    assert "truncated" in str(failed[3])
    np.testing.assert_array_equal(clips[[0, 4]], np.stack([peer(datas[0])[0][:4]] * 2))
    for start in 1.2, 99.0:
        _, failed = read(readers.video(1, 8, start=start), datas[:1])
        assert "0 frames from" in str(failed[0])


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
def test_a_clip_of_all_frames_is_what_the_video_gives_and_an_error_where_that_is_one(kind):
    rng, data = np.random.default_rng(0), written(kind)
    for place in [*rng.integers(0, len(data), rounds(10)), *(len(data) - rng.integers(1, 900, rounds(10)))]:
        for damaged in data[:place], data[:place] + bytes([data[place] ^ 1 << place % 8]) + data[place + 1 :]:
            frames = clips = None
            with suppress(Exception):
                frames = video.decode_video(damaged).frames
            with suppress(DecodeError):
                clips, failed = read(readers.video(12), [damaged])
                clips = None if failed else clips
            assert clips is None or np.array_equal(clips[0], frames)


def test_frames_whose_times_go_back_are_damaged():
    data = written("mp4 mpeg4")
    place = data.index(b"ctts") + 12  # of how many frames are shown how much later, 8 bytes each
    for entry, later in (0, 0x2000), (1, 0x400), (2, 0x1000):
        damaged = data[: place + 8 * entry + 4] + later.to_bytes(4, "big") + data[place + 8 * entry + 8 :]
        with pytest.raises(ValueError, match="not in the order of their times"):
            video.decode_video(damaged)
        assert read(readers.video(12, 8), [damaged])[1]


def test_only_what_is_needed_is_decoded(monkeypatch):
    decoded = []
    checked = video._checked
    monkeypatch.setattr(video, "_checked", lambda frame: decoded.append(frame.time) or checked(frame))
    whole(readers.video(3, 8, start=4.0), [written(count=60)])
    assert decoded == pytest.approx([4.0, 4.1, 4.2])


def test_bad_options_are_refused():
    for options in (
        {"crop": "left"},
        {"crop": "center"},
        {"fps": 0},
        {"start": "end"},
        {"start": -1},
        {"size": (1, 2, 3)},
    ):
        with pytest.raises(ValueError, match=next(iter(options))):
            readers.video(4, **options)
    with pytest.raises(ValueError, match="frames"):
        readers.video(0)


def test_a_loader_gives_batches_of_clips(tmp_path):
    datas = [written(count=8 + i) for i in range(4)]
    with ShardWriter(str(tmp_path / "v-%d.tar")) as writer:
        for i, data in enumerate(datas):
            writer.write({"__key__": str(i), "mp4": data})
    build_index(tmp_path / "v-0.tar")
    stream = Stream.from_shards(str(tmp_path / "v-0.tar"))
    (batch,) = ArrayLoader(stream, 4, fields={"mp4": readers.video(4, 16, start="middle")})
    assert (batch["mp4"].shape, batch["mp4"].dtype) == ((4, 4, 16, 16, 3), np.uint8)
    for key, clip in zip(batch["__key__"], batch["mp4"]):
        frames, _ = peer(datas[int(key)], width=16, height=16, interpolation="AREA")
        begin = (len(frames) - 4) // 2
        np.testing.assert_array_equal(clip, frames[begin : begin + 4])
