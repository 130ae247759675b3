"""Reader of sounds: decoded, mixed, resampled, cropped and padded."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import numpy as np

from tarshards.errors import DecodeError, whole_number
from tarshards.loaders.arrays.readers.draws import uniform
from tarshards.loaders.arrays.readers.reader import Reader
from tarshards.samples.codecs.media.audio import decode_part
from tarshards.samples.codecs.registry import require

SoundCrop = Literal["start", "center", "random"]


class Sounds(Reader):
    """Sounds of one rate and number of channels; the options are those of ``audio``."""

    def __init__(self, rate: int, seconds: float | None, channels: int, crop: SoundCrop, pad: bool):
        self.rate = rate
        self.seconds = seconds
        self.channels = channels
        self.crop = crop
        self.pad = pad
        self.frames: int | None = None if seconds is None else round(seconds * rate)

    def read(self, batch: Any, payloads: Iterable[bytes], draws: np.ndarray) -> dict[int, DecodeError]:
        """Decode each sound into an array of its own."""
        if self.crop == "random":
            positions = uniform(draws, 0).tolist()
        else:
            positions = [0.5 if self.crop == "center" else 0.0] * len(draws)

        def read(row: int, payload: bytes) -> None:
            batch[row] = self._read_one(payload, positions[row])

        return self.read_each(payloads, read)

    def _read_one(self, payload: bytes, position: float) -> np.ndarray:
        """Decode a sound; a longer one than wanted is cropped at this *position*, from 0, its start, to 1, its end."""

        def part(frames: int, rate: int) -> slice:
            """Return the frames to decode, of all *frames* of a sound of this *rate*."""
            if self.frames is None:
                return slice(None)
            wanted = -(-self.frames * rate // self.rate)
            if wanted > frames and not self.pad:
                raise DecodeError(f"a sound of {frames / rate:.3f} s, shorter than {self.seconds} s; pad=True pads it")
            begin = int(position * max(0, frames - wanted + 1))
            return slice(begin, begin + wanted)

        samples, rate = decode_part(payload, part)
        samples = _mixed(samples, self.channels)
        if rate != self.rate and len(samples):
            samples = require("soxr", extra="media").resample(samples, rate, self.rate)
        return samples if self.frames is None else samples[: self.frames]

    def join(self, batch: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return the sounds padded to one length, with their lengths, or end to end, with the offset of each."""
        return self.join_in(batch, np.empty)

    def join_in(self, batch: Any, empty: Callable[[int, np.dtype], np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Return the sounds padded to one length, with their lengths, or end to end, with the offset of each."""
        lengths = np.array([len(samples) for samples in batch], np.int64)
        if not self.pad and self.frames is None:
            offsets = np.zeros(len(batch) + 1, np.int64)
            np.cumsum(lengths, out=offsets[1:])
            values = empty(int(offsets[-1]) * self.channels, np.dtype(np.float32)).reshape(-1, self.channels)
            for begin, samples in zip(offsets.tolist(), batch):
                values[begin : begin + len(samples)] = samples
            return values, offsets
        frames = self.frames if self.frames is not None else int(lengths.max(initial=0))
        padded = empty(len(batch) * frames * self.channels, np.dtype(np.float32))
        padded = padded.reshape(len(batch), frames, self.channels)
        for row, samples in zip(padded, batch):
            row[: len(samples)], row[len(samples) :] = samples, 0
        return padded, lengths


def _mixed(samples: np.ndarray, channels: int) -> np.ndarray:
    """Return *samples* with this number of channels: the mean of several for one, or one repeated for several."""
    found = samples.shape[1]
    if found == channels:
        return samples
    if channels == 1:
        return samples.mean(axis=1, keepdims=True)
    if found == 1:
        return np.repeat(samples, channels, axis=1)
    raise DecodeError(f"a sound of {found} channels, which cannot be mixed to {channels}")


def audio(
    rate: int, seconds: float | None = None, *, channels: int = 1, crop: SoundCrop = "center", pad: bool = True
) -> Reader:
    """What ``decode("audio")`` reads -> (samples, lengths): float32 of shape (n, frames, channels), and int64 of (n,).

    Sounds are resampled to *rate* by soxr, and mixed to one channel by their mean; one channel is repeated for more.
    With *seconds* longer ones are cropped, and shorter ones padded with zeros; lengths count the frames that are not
    padding. Without *seconds* all are padded to the longest of the batch. With ``pad=False`` a sound shorter than
    *seconds* is an error, and without *seconds* the reader gives (values, offsets) as ``ragged`` does, of shape
    (total, channels). Needs ``pip install 'tarshards[media]'``.
    """
    rate, channels = whole_number("rate", rate, least=1), whole_number("channels", channels, least=1)
    if crop not in ("start", "center", "random"):
        raise ValueError(f'crop={crop!r} is none of "start", "center", "random"')
    if seconds is not None and not round(seconds * rate) > 0:
        raise ValueError(f"seconds={seconds} is no time of at least one frame")
    return Sounds(rate, seconds, channels, crop, pad)
