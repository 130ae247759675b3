"""Reader of videos: some frames of each, resized on the way into the batch; only what is needed is decoded."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from tarshards.errors import DecodeError, whole_number
from tarshards.index.memory import Payloads
from tarshards.loaders.arrays.readers.base import Batch, Reader, failure, sides_of
from tarshards.loaders.arrays.readers.draws import uniform
from tarshards.samples.codecs.video import Clip, decode_clip

VideoCrop = Literal["none", "center"]


class Videos(Reader):
    """Clips of one number of frames and one size, which the first video determines if it is None; see video()."""

    def __init__(
        self, frames: int, size: tuple[int, int] | None, fps: float | None, start: float | str, crop: VideoCrop
    ):
        self.frames, self.size, self.fps, self.start, self.crop = frames, size, fps, start, crop

    def open(self, field: str, payload: bytes) -> Videos:
        """Learn the size of the frames, if it was not given."""
        if self.size is not None:
            return self
        try:
            height, width, _ = decode_clip(payload, Clip(1, None, 0.0, False), _to_rgb)[0].shape
        except Exception as exc:
            raise failure(exc) from exc
        return OneSize(self.frames, (height, width), self.fps, self.start, self.crop)

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

    def convert(self, frame: Any) -> np.ndarray:
        """Resize a frame, and crop what is beyond the size."""
        assert self.size is not None
        height, width = self.size
        if self.crop == "none":
            return _to_rgb(frame, height, width)
        scale = max(height / frame.height, width / frame.width)
        covering = max(height, round(frame.height * scale)), max(width, round(frame.width * scale))
        top, left = (covering[0] - height) // 2, (covering[1] - width) // 2
        return _to_rgb(frame, *covering)[top : top + height, left : left + width]


class OneSize(Videos):
    """Clips of videos that all have the size of the first."""

    def convert(self, frame: Any) -> np.ndarray:
        """Check the size of a frame."""
        if (frame.height, frame.width) != self.size:
            height, width = self.size or (0, 0)
            raise DecodeError(f"{frame.height} x {frame.width} pixels, where the first video has {height} x {width}")
        return _to_rgb(frame)


def _to_rgb(frame: Any, height: int | None = None, width: int | None = None) -> np.ndarray:
    return frame.to_ndarray(
        format="rgb24", height=height, width=width, interpolation=None if height is None else "AREA"
    )


def video(
    frames: int,
    size: int | tuple[int, int] | None = None,
    *,
    fps: float | None = None,
    start: float | Literal["random", "middle"] = 0.0,
    crop: VideoCrop = "none",
) -> Reader:
    """MP4, MOV, Matroska, WebM, AVI or Ogg -> uint8 RGB of shape (n, frames, height, width, 3).

    Of each video a clip of *frames* frames is taken: consecutive ones, or with *fps* those that are shown that many
    times a second. It begins at *start* seconds after the first frame, at a random time, or where it lies in the middle
    of the video. A video that ends before is an error. Only frames from the keyframe before the clip on are decoded, by
    one thread a video; nothing after the clip is looked at. With a *size* (height and width in pixels) all of the frame
    is resized, or for ``crop="center"`` the largest middle part of that aspect. Without, all videos must have the size
    of the first. Rotation is not applied. Needs ``pip install 'tarshards[media]'``.
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
    return Videos(whole_number("frames", frames, least=1), sides, fps, start, crop)
