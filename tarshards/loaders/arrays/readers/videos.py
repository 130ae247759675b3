"""Reader of videos: a clip of frames of each, resized; only what the clip needs is decoded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import numpy as np

from tarshards.errors import DecodeError, whole_number
from tarshards.loaders.arrays.readers.draws import uniform
from tarshards.loaders.arrays.readers.reader import ArrayReader, sides_of
from tarshards.samples.codecs.media.video import Clip, decode_clip, orientation_of, to_rgb

VideoCrop = Literal["none", "center"]


class Videos(ArrayReader):
    """Clips of as many frames of each video, resized to *size*; the options are those of ``video``."""

    def __init__(
        self,
        frames: int,
        size: tuple[int, int] | None,
        fps: float | None,
        start: float | str,
        crop: VideoCrop,
        rotate: bool,
    ):
        self.frames = frames
        self.size = size
        self.fps = fps
        self.start = start
        self.crop = crop
        self.rotate = rotate

    def learns(self, field: str) -> bool:
        """Return whether the first video determines the size."""
        return self.size is None

    def open(self, field: str, payload: bytes) -> Videos:
        """Return a reader of videos of the size of this one, unless a size was given."""
        if self.size is not None:
            return self
        try:
            height, width, _ = decode_clip(payload, Clip(1, None, 0.0, False), self.whole)[0].shape
        except Exception as exc:
            raise DecodeError.because(exc) from exc
        return OneSize(self.frames, (height, width), self.fps, self.start, self.crop, self.rotate)

    def make(self, count: int) -> np.ndarray:
        """Return an array of shape (count, frames, height, width, 3)."""
        return np.empty((count, self.frames, *(self.size or (0, 0)), 3), np.uint8)

    def read(self, batch: Any, payloads: Iterable[bytes], draws: np.ndarray) -> dict[int, DecodeError]:
        """Decode a clip of each video."""
        is_fraction = isinstance(self.start, str)  # of the times at which a clip can begin, instead of seconds
        if self.start == "random":
            starts = uniform(draws, 0).tolist()
        else:
            starts = [0.5 if is_fraction else float(self.start)] * len(draws)

        def read(row: int, payload: bytes) -> None:
            clip = decode_clip(payload, Clip(self.frames, self.fps, starts[row], is_fraction), self.convert)
            for frame, pixels in zip(batch[row], clip):
                frame[:] = pixels

        return self.read_each(payloads, read)

    def orientation(self, frame: Any) -> int:
        """Return how a frame is to be turned, as an EXIF orientation."""
        return orientation_of(frame) if self.rotate else 1

    def whole(self, frame: Any) -> np.ndarray:
        """Return the pixels of a frame, turned."""
        return to_rgb(frame, self.orientation(frame))

    def convert(self, frame: Any) -> np.ndarray:
        """Return the pixels of a frame, turned, resized and cropped to the size."""
        assert self.size is not None
        height, width = self.size
        orientation = self.orientation(frame)
        if self.crop == "none":
            return to_rgb(frame, orientation, self.size)
        tall, wide = (frame.height, frame.width)[:: -1 if orientation >= 5 else 1]
        scale = max(height / tall, width / wide)
        covering = max(height, round(tall * scale)), max(width, round(wide * scale))
        top, left = (covering[0] - height) // 2, (covering[1] - width) // 2
        return to_rgb(frame, orientation, covering)[top : top + height, left : left + width]


class OneSize(Videos):
    """Clips of videos that all have the size of the first."""

    def convert(self, frame: Any) -> np.ndarray:
        """Return the pixels of a frame, turned; raise DecodeError if its size differs from that of the first video."""
        pixels = self.whole(frame)
        if pixels.shape[:2] != self.size:
            (tall, wide, _), (height, width) = pixels.shape, self.size or (0, 0)
            raise DecodeError(f"{tall} x {wide} pixels, where the first video has {height} x {width}")
        return pixels


def video(
    frames: int,
    size: int | tuple[int, int] | None = None,
    *,
    fps: float | None = None,
    start: float | Literal["random", "middle"] = 0.0,
    crop: VideoCrop = "none",
    rotate: bool = True,
) -> ArrayReader:
    """MP4, MOV, Matroska, WebM, AVI or Ogg -> uint8 RGB of shape (n, frames, height, width, 3).

    A clip of *frames* frames is taken from each video: consecutive ones, or with *fps* those that are shown at this
    rate. It begins at *start* seconds after the first frame, at a "random" time, or so that it is in the "middle" of
    the video. A video that ends before the clip is an error. Decoding begins at the keyframe before the clip and ends
    with the clip, in one thread for each video. With a *size* (height and width in pixels) whole frames are resized to
    it, or, with ``crop="center"``, the largest part in the middle with its aspect. Without a size, all videos must have
    that of the first. Frames are first turned and mirrored as the file says, unless *rotate* is False. Needs
    ``pip install 'tarshards[media]'``.
    """
    if crop not in ("none", "center"):
        raise ValueError(f'crop={crop!r} is none of "none", "center"')
    if crop != "none" and size is None:
        raise ValueError(f"crop={crop!r} needs a size")
    if fps is not None and not 0 < fps < float("inf"):
        raise ValueError(f"fps={fps} must be a number of frames a second")
    if start not in ("random", "middle") and (isinstance(start, str) or not 0 <= start < float("inf")):
        raise ValueError(f'start={start!r} is none of "random", "middle", a time in seconds')
    sides = sides_of(size)
    return Videos(whole_number("frames", frames, least=1), sides, fps, start, crop, rotate)
