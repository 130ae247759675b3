"""Reader of videos: some frames of each, decoded from the key frame before them, and resized."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from tarshards.errors import DecodeError, whole_number
from tarshards.index.memory import Payloads
from tarshards.loaders.arrays.readers.base import Batch, Reader, failure, stack
from tarshards.loaders.arrays.readers.draws import uniform
from tarshards.samples.codecs.video import decode_clip

PLACES = {"start": 0.0, "middle": 0.5}  # parts of the time by which a video is longer than its clip


class Videos(Reader):
    """Clips of as many frames; see video()."""

    def __init__(self, frames: int, size: tuple[int, int] | None, fps: float | None, start: float | str, pad: bool):
        self.frames, self.size, self.fps, self.start, self.pad = frames, size, fps, start, pad

    def make(self, count: int) -> Batch:
        """An array of clips, or a list where each keeps its size."""
        if self.size is None:
            return [None] * count
        return np.empty((count, self.frames, *self.size, 3), np.uint8)

    def read(self, batch: Batch, first: int, payloads: Payloads, draws: np.ndarray) -> dict[int, DecodeError]:
        """Decode a clip of each video into its place."""
        failed = {}
        places = uniform(draws, 0) if self.start == "random" else np.zeros(len(payloads))
        for i, payload in enumerate(payloads):
            try:
                clip = self._read_one(payload, float(places[i]))
                if self.size is None:
                    batch[first + i] = np.stack(clip)
                else:
                    np.stack(clip, out=batch[first + i])
            except Exception as exc:
                failed[i] = failure(exc)
        return failed

    def _read_one(self, payload: bytes, draw: float) -> list[np.ndarray]:
        def start(left: float) -> float:
            if isinstance(self.start, str):
                return PLACES.get(self.start, draw) * left
            return self.start

        clip = decode_clip(payload, self.frames, start=start, fps=self.fps, size=self.size)
        if not clip or (len(clip) < self.frames and not self.pad):
            raise DecodeError(f"{len(clip)} frames, fewer than {self.frames}; pad=True repeats the last one")
        return clip + clip[-1:] * (self.frames - len(clip))

    def join(self, batch: Batch) -> Any:
        """Stack clips that kept their size, where it is one."""
        return stack(batch) if self.size is None else batch


def video(
    frames: int,
    size: int | tuple[int, int] | None = None,
    *,
    fps: float | None = None,
    start: float | Literal["start", "middle", "random"] = "middle",
    pad: bool = False,
) -> Reader:
    """MP4, MOV, MKV, WebM, AVI or Ogg -> uint8 of shape (n, frames, height, width, 3), RGB.

    The frames are consecutive, or with *fps* those shown that often a second. They begin at *start*: seconds, or such
    that they are the first, in the middle, or at a random place. Each is resized to *size* (height and width) as a
    whole; without a size they keep theirs, and make a list where it differs. A video with fewer frames is an error, or
    with *pad* the last one is repeated. Decoding begins at the key frame before: damage elsewhere is not seen, except
    truncation. Needs ``pip install 'tarshards[media]'``.
    """
    frames = whole_number("frames", frames, least=1)
    sides = (size, size) if isinstance(size, int) else size
    if sides is not None and (len(sides) != 2 or min(whole_number("size", side, least=1) for side in sides) < 1):
        raise ValueError(f"size={size} must be one number or a pair, height and width")
    if fps is not None and not fps > 0:
        raise ValueError(f"fps={fps} must be above 0")
    if start not in (*PLACES, "random") and (isinstance(start, str | bool) or not start >= 0):
        raise ValueError(f'start={start!r} is neither seconds nor one of "start", "middle", "random"')
    return Videos(frames, None if sides is None else (sides[0], sides[1]), fps, start, pad)
