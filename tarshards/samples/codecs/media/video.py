"""Decode videos by PyAV, FFmpeg's bindings (``pip install 'tarshards[media]'``): MP4, MOV, Matroska, WebM, AVI, Ogg."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from io import BytesIO
from itertools import chain
from typing import IO, TYPE_CHECKING, Any, Literal, NamedTuple

from tarshards.errors import DecodeError
from tarshards.samples.codecs.image import oriented
from tarshards.samples.codecs.media import video_headers
from tarshards.samples.codecs.registry import SpecFamily, require

if TYPE_CHECKING:
    import numpy as np

EXTENSIONS = frozenset(["mp4", "m4v", "mov", "mkv", "webm", "avi", "ogv"])
VIDEOSPECS = {"video": "numpy", "torchvideo": "torch"}  # and the containers
MAX_BYTES = 1 << 32  # decoded: 2.5 minutes of 640 x 480 at 30 frames a second, six hours of 48 kHz in mono
MAX_PIXELS = 1 << 26  # of a frame: 8192 x 8192
CHECKS = {"err_detect": "crccheck+bitstream+buffer+explode", "max_pixels": str(MAX_PIXELS)}
SLANT = 0.0175  # of a display matrix: a rotation within a degree of a quarter turn counts as one, as in FFmpeg
DISORDER = "damaged: its frames are not in the order of their times"
SLACK = 1e-3  # seconds: Matroska rounds times to milliseconds
ONE_FRAME = frozenset(["h264", "hevc", "mpeg4", "mjpeg", "ffv1"])  # codecs with one frame per packet


class Video(NamedTuple):
    """Frames, uint8 RGB of shape (frames, height, width, 3), the time of each in seconds, and their mean rate."""

    frames: np.ndarray
    times: np.ndarray
    fps: float


class Clip(NamedTuple):
    """The wanted frames of a video: *frames* of them, *fps* per second or consecutive ones, from *start* on.

    *start* is in seconds; with *is_fraction* it is a part, from 0 to 1, of the times at which such a clip can begin.
    """

    frames: int
    fps: float | None
    start: float
    is_fraction: bool


def decode_video(data: Any, videospec: str = "video", rotate: bool = True) -> Any:
    """Decode the frames of a video: ``video`` gives (frames, times, fps), ``torchvideo`` frames and times as tensors.

    *data* are bytes or a seekable file. Audio is left out, and frames are rotated and mirrored by the file's metadata
    unless *rotate* is False. Raises an error for damaged and truncated videos, as far as their format reveals it, and
    for more than 4 GiB of frames. One thread decodes.
    """
    import numpy as np

    with opened(data) as (container, stream):
        is_unordered, fps = _is_unordered(container, stream), _rate(stream)
        frames: list[np.ndarray] = []
        times: list[float] = []
        packets = size = 0
        for packet in container.demux(stream):
            packets += packet.size > 0
            for frame in packet.decode():
                pixels = to_rgb(_checked(frame), orientation_of(frame) if rotate else 1)
                size += pixels.nbytes
                if size > MAX_BYTES:
                    raise ValueError(f"decompression bomb? more than {len(frames)} frames of {pixels.nbytes} bytes")
                frames.append(pixels)
                times.append(len(times) / fps if is_unordered and fps else frame.time)
        name = stream.codec_context.codec.canonical_name
        claimed = len(stream.index_entries) if container.format.name != "ogg" else 0
    if not frames:
        raise ValueError("damaged or truncated: no frame")
    if packets < claimed or (name in ONE_FRAME and len(frames) < packets):
        raise ValueError(f"damaged or truncated: {len(frames)} of {max(packets, claimed)} frames")
    video = Video(np.stack(frames), np.array(times, np.float64), fps)
    if (np.diff(video.times) < 0).any():
        raise ValueError(DISORDER)
    if VIDEOSPECS[videospec] == "numpy":
        return video
    torch = require("torch", extra="torch")
    return torch.from_numpy(video.frames), torch.from_numpy(video.times), fps


VIDEOS = SpecFamily("videospec", "videos", VIDEOSPECS, EXTENSIONS, decode_video, ("rotate",))
VIDEOS.add()


def orientation_of(frame: Any) -> int:
    """Return the rotation and mirroring of a frame for display, in EXIF's numbers: 1 to 8.

    Its display matrix moves the pixel in column x and row y to column a x + c y and row b x + d y.
    """
    found = frame.side_data.get("DISPLAYMATRIX")
    if found is None:
        return 1
    a, b, _, c, d = struct.unpack_from("=5i", bytes(found))
    if max(abs(b), abs(c)) <= SLANT * max(abs(a), abs(d)):
        return (1, 4, 2, 3)[2 * (a < 0) + (d < 0)]
    if max(abs(a), abs(d)) <= SLANT * max(abs(b), abs(c)):
        return (5, 6, 8, 7)[2 * (b < 0) + (c < 0)]
    angle = round(math.degrees(math.atan2(b, a)))
    raise DecodeError(
        f"a rotation by {angle} degrees is not supported; rotate=False gives the frames as they are stored"
    )


def to_rgb(frame: Any, orientation: int, size: tuple[int, int] | None = None) -> np.ndarray:
    """Return the pixels of a frame, with an EXIF *orientation* applied, resized to *size* (height, width)."""
    height, width = (None, None) if size is None else size[:: -1 if orientation >= 5 else 1]
    method = None if size is None else "AREA"
    return oriented(frame.to_ndarray(format="rgb24", height=height, width=width, interpolation=method), orientation)


def decode_clip(data: Any, clip: Clip, convert: Callable[[Any], np.ndarray]) -> list[np.ndarray]:
    """Decode only the frames of a clip, starting at the keyframe before it; *convert* converts each frame."""
    with opened(data) as (container, stream):
        fps = clip.fps or _rate(stream)
        if not clip.is_fraction:
            start = clip.start
        else:
            if not fps:
                raise DecodeError("the video has no frame rate; pass fps=")
            duration = _duration(container, stream)
            start = clip.start * max(0.0, duration - clip.frames / fps)
        found = _from(container, stream, start, clip, convert)
        if len(found) < clip.frames and clip.is_fraction:  # with irregular intervals frames may end earlier
            times = _times(container, stream)
            last = times[-clip.frames] if clip.frames <= len(times) else -1.0
            last = times[-1] - (clip.frames - 1) / clip.fps if clip.fps and times else last
            if last >= 0:
                found = _from(container, stream, min(start, last), clip, convert)
    if len(found) < clip.frames:
        raise DecodeError(f"{len(found)} frames from {start:.3f} s on, fewer than {clip.frames}")
    return found


def _from(container: Any, stream: Any, start: float, clip: Clip, convert: Callable[[Any], Any]) -> list[np.ndarray]:
    """Return the converted frames of *clip* from *start* on, fewer if the video ends before."""
    first, back = float((stream.start_time or 0) * stream.time_base), 0.0
    start += first
    while True:
        at = first if _is_unordered(container, stream) else max(first, start - back)
        container.seek(int(at // stream.time_base), stream=stream)
        frames = _timed(container, stream)
        head = next(frames, None)
        if head is None:
            return []
        if head[0] <= start + SLACK or start - back <= first:
            return _taken(chain([head], frames), start, stream, clip, convert)
        back = max(1.0, 2 * back)  # the keyframe found is shown after the start


def _timed(container: Any, stream: Any) -> Iterator[tuple[float, Any]]:
    """Yield frames with their times."""
    rate = _rate(stream) if _is_unordered(container, stream) else 0.0
    for number, frame in enumerate(container.decode(stream)):
        yield (number / rate if rate else frame.time), frame


def _taken(
    frames: Iterable[tuple[float, Any]], start: float, stream: Any, clip: Clip, convert: Callable[[Any], Any]
) -> list[np.ndarray]:
    """Return the converted frames of *clip* from *start* on, a time on the scale of *frames*."""
    found: list[np.ndarray] = []
    held, shown, wanted = None, start, start  # held: the frame shown at the wanted time, unless the next is
    for time, frame in frames:
        if held is not None and time < shown:
            raise ValueError(DISORDER)
        while held is not None and time > wanted + SLACK:
            found.append(convert(_checked(held)))
            if len(found) == clip.frames:
                return found
            wanted = start + len(found) / clip.fps if clip.fps else time
        held, shown = frame, time
    end = shown + (1 / _rate(stream) if _rate(stream) else 2 * SLACK)
    while held is not None and len(found) < clip.frames and end > wanted + SLACK:
        found.append(convert(_checked(held)))
        wanted = start + len(found) / clip.fps if clip.fps else end
    return found


def _is_unordered(container: Any, stream: Any) -> bool:
    """Return whether the times of frames are unknown: AVI counts packets, and FFmpeg guesses the order of H.264."""
    return container.format.name == "avi" and stream.codec_context.has_b_frames


def _times(container: Any, stream: Any) -> list[float]:
    """Return the times of all frames, in seconds after the first."""
    container.seek(0, stream=stream)
    times = sorted(packet.pts for packet in container.demux(stream) if packet.pts is not None)
    return [float((time - times[0]) * stream.time_base) for time in times]


def _rate(stream: Any) -> float:
    return float(stream.average_rate or stream.guessed_rate or 0)


def _duration(container: Any, stream: Any) -> float:
    if stream.duration:
        return float(stream.duration * stream.time_base)
    if container.duration:
        return container.duration / 1e6
    times, rate = _times(container, stream), _rate(stream)
    return times[-1] + (1 / rate if rate else 0.0) if times else 0.0


@contextmanager
def opened(data: Any, kind: Literal["video", "audio"] = "video", name: str = "") -> Iterator[tuple[Any, Any]]:
    """Open the first stream of a *kind* with one thread; FFmpeg gets the container format, so it reads no playlist.

    *name* is FFmpeg's name of a container that was already checked.
    """
    av = require("av", extra="media")
    is_file = hasattr(data, "seek")
    file: IO[bytes] = data if is_file else BytesIO(data)
    name = name or video_headers.read_format(file, is_memory=not is_file)
    file.seek(0)
    with av.open(file, format=name, container_options={"err_detect": "crccheck+explode"}) as container:
        stream = next(iter(getattr(container.streams, kind)), None)
        if stream is None:
            raise ValueError(f"no {kind} in the file")
        context = stream.codec_context
        context.thread_count, context.options = 1, CHECKS
        if kind == "video":
            _check_size(context.width, context.height)
        yield container, stream


def _checked(frame: Any) -> Any:
    """Return *frame*; raise ValueError for a corrupt frame, or too many pixels."""
    if frame.is_corrupt:
        raise ValueError(f"damaged: the frame at {frame.time} s is corrupt")
    _check_size(frame.width, frame.height)
    return frame


def _check_size(width: int, height: int) -> None:
    if width * height > MAX_PIXELS:
        raise ValueError(f"decompression bomb? {width} x {height} pixels are more than {MAX_PIXELS}")
