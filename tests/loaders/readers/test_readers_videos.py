"""Videos, read into batches of clips."""

import numpy as np
import pytest
from readers_data import whole
from videos import made, moving

from tarshards import ArrayLoader, ShardWriter, Stream, readers
from tarshards.index.build import build_index
from tarshards.index.memory import Payloads
from tarshards.loaders.arrays.readers.draws import draws_of
from tarshards.samples.codecs.video import decode_video

pytestmark = pytest.mark.usefixtures("av")


@pytest.fixture
def av():
    return pytest.importorskip("av", reason="needs PyAV")


def failures(reader, datas):
    """What fails of *datas*, by place."""
    return reader.read(reader.make(len(datas)), 0, Payloads.of(datas), draws_of(0, 0, np.arange(len(datas))))


@pytest.mark.parametrize("parts", [1, 3])
def test_clips_lie_where_start_says(parts):
    datas = [made("mp4", moving(frames)) for frames in (20, 30, 40)]
    frames = [decode_video(data).frames for data in datas]
    for start, begins in ("start", (0, 0, 0)), ("middle", (8, 13, 18)), (0.5, (5, 5, 5)):
        batch = whole(readers.video(4, start=start), datas, parts=parts)
        assert batch.shape == (3, 4, 48, 64, 3)
        assert all(np.array_equal(clip, each[begin : begin + 4]) for clip, each, begin in zip(batch, frames, begins))


def test_random_clips_are_drawn_for_each_sample():
    data = made("mp4", moving(60))
    frames = decode_video(data).frames
    reader = readers.video(2, start="random")
    batch = whole(reader, [data] * 40)
    begins = [next(i for i in range(59) if np.array_equal(frames[i : i + 2], clip)) for clip in batch]
    assert len(set(begins)) > 15
    assert min(begins) < 12
    assert max(begins) > 45
    assert np.array_equal(batch, whole(reader, [data] * 40, parts=3))


def test_frames_are_resized_as_ffmpeg_does(av):
    data = made("mkv", moving(6))
    batch = whole(readers.video(6, (20, 30)), [data])
    assert (batch.shape, batch.dtype) == ((1, 6, 20, 30, 3), np.uint8)
    import io

    with av.open(io.BytesIO(data)) as container:
        for frame, got in zip(container.decode(video=0), batch[0]):
            small = frame.reformat(30, 20, "rgb24", interpolation="BILINEAR")
            assert np.array_equal(small.to_ndarray(), got)


def test_short_videos_fail_or_repeat_their_last_frame():
    datas = [made("mp4", moving(5)), made("mp4", moving(9))]
    failed = failures(readers.video(7), datas)
    assert [(i, str(error)) for i, error in failed.items()] == [
        (0, "5 frames, fewer than 7; pad=True repeats the last one")
    ]
    padded = whole(readers.video(7, pad=True), datas)
    assert np.array_equal(padded[0, 4:], padded[0, [4, 4, 4]])
    assert np.array_equal(padded[0, :5], decode_video(datas[0]).frames)


def test_videos_of_several_sizes_without_a_size_are_a_list():
    batch = whole(readers.video(2), [made("mp4", moving(4)), made("mp4", moving(4, 32, 32))])
    assert [clip.shape for clip in batch] == [(2, 48, 64, 3), (2, 32, 32, 3)]


def test_what_does_not_decode_fails_alone():
    data = made("mp4", moving(8))
    failed = failures(readers.video(4, 16), [data, data[:-50], b"x", data])
    assert sorted(failed) == [1, 2]
    assert "truncated" in str(failed[1])
    assert "not a video" in str(failed[2])


def test_a_loader_delivers_the_same_whatever_the_threads(tmp_path):
    name = str(tmp_path / "a.tar")
    with ShardWriter(str(tmp_path / "a-%d.tar")) as writer:
        for i in range(12):
            writer.write({"__key__": str(i), "mp4": made("mp4", moving(10 + i)), "cls": i})
    name = str(tmp_path / "a-0.tar")
    build_index(name)
    fields = {"mp4": readers.video(4, 24, fps=5, start="random"), "cls": readers.integer()}

    def epoch(threads):
        stream = Stream.from_shards(name, shuffle=True)
        return [(b["mp4"].copy(), b["cls"].copy()) for b in ArrayLoader(stream, 5, fields=fields, threads=threads)]

    one, two = epoch(1), epoch(2)
    assert sorted(np.concatenate([labels for _, labels in one]).tolist()) == list(range(12))
    for (clips, labels), (others, other_labels) in zip(one, two):
        assert np.array_equal(clips, others)
        assert np.array_equal(labels, other_labels)


@pytest.mark.parametrize(
    ("arguments", "options", "reason"),
    [
        ((0,), {}, "frames must be"),
        ((2, (3,)), {}, "one number or a pair"),
        ((2, 0), {}, "size must be"),
        ((2,), {"fps": 0}, "fps=0 must be above 0"),
        ((2,), {"start": "end"}, "start='end' is neither"),
        ((2,), {"start": -1.0}, "start=-1.0 is neither"),
    ],
)
def test_arguments_out_of_range(arguments, options, reason):
    with pytest.raises(ValueError, match=reason):
        readers.video(*arguments, **options)
