"""Reader of videos: some frames of each, resized on the way into the batch; only what is needed is decoded."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from tarshards.errors import DecodeError, whole_number
from tarshards.index.memory import Payloads
from tarshards.loaders.arrays.readers.draws import uniform
from tarshards.loaders.arrays.readers.reader import Batch, Reader, failure, sides_of
from tarshards.samples.codecs.video import Clip, decode_clip, orientation_of, to_rgb

VideoCrop = Literal["none", "center"]


class Videos(Reader):
    """Clips of one number of frames and one size, which the first video determines if it is None; see video()."""

    def __init__(
        self,
        frames: int,
        size: tuple[int, int] | None,
        fps: float | None,
        start: float | str,
        crop: VideoCrop,
        rotate: bool,
    ):
        self.frames, self.size, self.fps, self.start, self.crop, self.rotate = frames, size, fps, start, crop, rotate

    def learns(self, field: str) -> bool:
        """Say whether the first video determines the size."""
        return self.size is None

    def open(self, field: str, payload: bytes) -> Videos:
        """Learn the size of the frames, if it was not given."""
        if self.size is not None:
            return self
        try:
            height, width, _ = decode_clip(payload, Clip(1, None, 0.0, False), self.whole)[0].shape
        except Exception as exc:
            raise failure(exc) from exc
        return OneSize(self.frames, (height, width), self.fps, self.start, self.crop, self.rotate)

    def make(self, count: int) -> np.ndarray:
        """An array of shape (count, frames, height, width, 3)."""
        return np.empty((count, self.frames, *(self.size or (0, 0)), 3), np.uint8)

    def read(self, batch: Batch, first: int, payloads: Payloads, draws: np.ndarray) -> dict[int, DecodeError]:
        """Decode a clip of each video."""
        failed = {}
        is_place = isinstance(self.start, str)
        starts = (
            uniform(draws, 0) if self.start == "random" else np.full(len(payloads), 0.5 if is_place else self.start)
        )
        for i, payload in enumerate(payloads):
            try:
                clip = decode_clip(payload, Clip(self.frames, self.fps, float(starts[i]), is_place), self.convert)
                for row, pixels in zip(batch[first + i], clip):
                    row[:] = pixels
            except Exception as exc:
                failed[i] = failure(exc)
        return failed

    def orientation(self, frame: Any) -> int:
        """How a frame is turned, in EXIF's numbers."""
        return orientation_of(frame) if self.rotate else 1

    def whole(self, frame: Any) -> np.ndarray:
        """Turn a frame."""
        return to_rgb(frame, self.orientation(frame))

    def convert(self, frame: Any) -> np.ndarray:
        """Turn and resize a frame, and crop what is beyond the size."""
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
        """Turn a frame, and check its size."""
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
) -> Reader:
    """MP4, MOV, Matroska, WebM, AVI or Ogg -> uint8 RGB of shape (n, frames, height, width, 3).

    Of each video a clip of *frames* frames is taken: consecutive ones, or with *fps* those that are shown that many
    times a second. It begins at *start* seconds after the first frame, at a random time, or where it lies in the middle
    of the video. A video that ends before is an error. Only frames from the keyframe before the clip on are decoded, by
    one thread a video; nothing after the clip is looked at. With a *size* (height and width in pixels) all of the frame
    is resized, or for ``crop="center"`` the largest middle part of that aspect. Without, all videos must have the size
    of the first. Frames are turned and mirrored as the file asks before they are resized, unless *rotate* is False.
    Needs ``pip install 'tarshards[media]'``.
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
