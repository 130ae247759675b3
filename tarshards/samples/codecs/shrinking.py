"""Images made smaller for training: with a limited side, as JPEG of a given quality, or as raw pixels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from io import BytesIO
from typing import Any

from tarshards.errors import DecodeError, whole_number
from tarshards.samples.codecs.image import open_image
from tarshards.samples.fields import pick_field


@dataclass(frozen=True)
class Shrinking:
    """Makes the first of *fields* that a sample has a JPEG or raw pixels; see ``ops.shrink_images``."""

    fields: Sequence[str]
    most: int | None
    quality: int
    proportion: float
    seed: int

    def __post_init__(self) -> None:
        if self.most is not None:
            whole_number("max_resolution", self.most, 1)
        if not 1 <= whole_number("jpeg_quality", self.quality, 1) <= 100:
            raise ValueError(f"jpeg_quality must be from 1 to 100, not {self.quality}")
        if not 0 <= self.proportion <= 1:
            raise ValueError(f"proportion must be from 0 to 1, not {self.proportion}")
        whole_number("seed", self.seed)

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        field = pick_field(sample, list(self.fields))
        extension = "jpg" if self._share(sample) < self.proportion else "ppm"
        try:
            data = self._shrunk(sample[field], extension)
        except Exception as error:
            raise DecodeError.because(error, field).at(sample) from error
        before, dot, _ = field.rpartition(".")
        named = {name: value for name, value in sample.items() if name != field}
        return {**named, f"{before}{dot}{extension}": data}

    def _share(self, sample: dict[str, Any]) -> float:
        """Return a pseudorandom number in [0, 1) from the seed and the key of a sample."""
        name = f"{self.seed}/{sample.get('__key__', '')}".encode("utf-8", "surrogateescape")
        return int.from_bytes(blake2b(name, digest_size=8).digest(), "little") / 2**64

    def _shrunk(self, data: bytes, extension: str) -> bytes:
        from PIL import Image

        with open_image(data) as opened:
            longest = max(opened.size)
            is_small = self.most is None or longest <= self.most
            if is_small and extension == "jpg" and opened.format == "JPEG":
                return data
            image = opened.convert("RGB")
        if not is_small and self.most is not None:
            size = tuple(max(1, round(side * self.most / longest)) for side in image.size)
            image = image.resize(size, Image.Resampling.BOX)  # type: ignore[arg-type]
        stream = BytesIO()
        if extension == "jpg":
            image.save(stream, "JPEG", quality=self.quality)
        else:
            image.save(stream, "PPM")
        return stream.getvalue()
