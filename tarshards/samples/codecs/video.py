"""Codec for videos by FFmpeg's libraries (``pip install 'tarshards[media]'``): MP4, MOV, MKV, WebM, AVI and Ogg."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from io import BytesIO
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from tarshards.errors import did_you_mean
from tarshards.samples.codecs.registry import require
from tarshards.samples.codecs.video_headers import check_video

if TYPE_CHECKING:
    import numpy as np

EXTENSIONS = frozenset(["mp4", "m4v", "mov", "mkv", "webm", "avi", "ogv"])
VIDEOSPECS = ("video",)
MAX_BYTES = 1 << 32  # of decoded frames
STRICT = {"err_detect": "crccheck+bitstream+buffer+explode"}  # else FFmpeg conceals what it cannot decode


class Video(NamedTuple):
    """Frames, uint8 of shape (frames, height, width, 3), and when each is shown, float64 seconds of shape (frames,)."""

    frames: np.ndarray
    times: np.ndarray


def check_videospec(video: Any) -> str:
    """Return *video*; raise ValueError unless it is a videospec."""
    if video not in VIDEOSPECS:
        raise ValueError(f"unknown videospec {video!r}; known: {' '.join(VIDEOSPECS)}{did_you_mean(video, VIDEOSPECS)}")
    return video


def decode_video(data: bytes, videospec: str = "video") -> Video:
    """Decode the first video stream of a file to RGB; its rotation is not applied, and sound is left out.

    Raises an error for damaged and truncated files, as far as their format shows it, and for what would take more than
    4 GiB.
    """
    import numpy as np

    frames, times, packets, held = [], [], 0, 0
    with opened(data) as (container, stream):
        for packet in container.demux(stream):
            packets += packet.size > 0 and not packet.is_discard
            for frame in packet.decode():
                frames.append(pixels_of(frame))
                times.append(time_of(frame))
                held += frames[-1].nbytes
                if held > MAX_BYTES:
                    raise ValueError(
                        f"decompression bomb? more than {len(frames)} frames of {frame.width} x {frame.height}"
                    )
    if len(frames) < packets:
        raise ValueError(f"damaged: {len(frames)} of {packets} frames")
    if not frames:
        raise ValueError("a video without frames")
    return Video(np.stack(frames), np.array(times))


@contextmanager
def opened(data: bytes) -> Iterator[tuple[Any, Any]]:
    """Give the container and its first video stream, for a decoder of one thread that reports all damage it finds."""
    check_video(data)
    av = require("av", extra="media")
    try:
        with av.open(BytesIO(data), options=STRICT) as container:
            if not container.streams.video:
                raise ValueError("no video stream")
            stream = container.streams.video[0]
            context = stream.codec_context
            context.thread_count, context.options = 1, STRICT
            _check_size(context.width, context.height)
            yield container, stream
    except av.error.FFmpegError as error:
        raise ValueError(f"damaged: {error.strerror or type(error).__name__}") from error


def pixels_of(frame: Any, size: tuple[int, int] | None = None) -> np.ndarray:
    """Return RGB pixels of a frame, resized to *size* (height and width); raise ValueError for a damaged one."""
    if frame.is_corrupt:
        raise ValueError(f"damaged: the frame at {time_of(frame):.3f} s")
    _check_size(frame.width, frame.height)
    if size is None:
        return frame.to_ndarray(format="rgb24")
    return frame.to_ndarray(format="rgb24", height=size[0], width=size[1], interpolation="BILINEAR")


def time_of(frame: Any) -> float:
    """Return the seconds at which a frame is shown; 0 where the file does not say."""
    return 0.0 if frame.time is None else float(frame.time)


def _check_size(width: int, height: int) -> None:
    from PIL import Image

    limit = Image.MAX_IMAGE_PIXELS  # one limit for all pictures
    if limit is not None and width * height > limit:
        raise ValueError(f"decompression bomb? {width} x {height} pixels are more than PIL.Image.MAX_IMAGE_PIXELS")


def decode_clip(
    data: bytes,
    count: int,
    *,
    start: Callable[[float], float],
    fps: float | None = None,
    size: tuple[int, int] | None = None,
) -> list[np.ndarray]:
    """Decode at most *count* frames, each of *size* (height and width): consecutive ones, or *fps* a second.

    They begin at ``start(left)`` seconds, where *left* is how much longer the video is than they. Decoding begins at
    the key frame before.
    """
    try:
        return _decode_clip(data, count, start, fps, size, seeks=True)
    except ValueError:  # frames after a key frame may need some before it; a damaged file fails again
        return _decode_clip(data, count, start, fps, size, seeks=False)


def _decode_clip(
    data: bytes,
    count: int,
    start: Callable[[float], float],
    fps: float | None,
    size: tuple[int, int] | None,
    *,
    seeks: bool,
) -> list[np.ndarray]:
    with opened(data) as (container, stream):
        rate = float(stream.average_rate or stream.guessed_rate or 25)
        first = float((stream.start_time or 0) * stream.time_base)
        if stream.duration is not None:
            seconds = float(stream.duration * stream.time_base)
        else:
            seconds = (container.duration or 0) / 1e6
        begin = first + start(max(0.0, seconds - count / (fps or rate)))
        if seeks and begin > first:
            container.seek(int(begin / stream.time_base), stream=stream)
        frames = container.decode(stream)
        near = 0.5 / rate
        if fps is None:
            clip = (frame for frame in frames if time_of(frame) > begin - near)
        else:
            clip = _sampled(frames, [begin + i / fps for i in range(count)], near)
        return [pixels_of(frame, size) for frame in islice(clip, count)]


def _sampled(frames: Iterable[Any], times: list[float], near: float) -> Generator[Any, None, None]:
    """Yield the frame that is shown at each of *times*, up to the last frame's."""
    shown, i = None, 0
    for frame in frames:
        while i < len(times) and shown is not None and time_of(frame) > times[i] + 1e-6:
            yield shown
            i += 1
        if i == len(times):
            return
        shown = frame
    while shown is not None and i < len(times) and times[i] < time_of(shown) + 2 * near:
        yield shown
        i += 1
