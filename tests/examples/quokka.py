"""The photo of a quokka that the package imgaug contains, with its outline, box and keypoints."""

from __future__ import annotations

import io
import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw


class Quokka:
    """The photo and its annotations; the test is skipped if `make test-interop` has not downloaded the package."""

    def __init__(self) -> None:
        wheels = [*Path(sys.prefix, "imgaug").glob("imgaug-*.whl")]
        if not wheels:
            pytest.skip("imgaug is not downloaded")
        with zipfile.ZipFile(wheels[0]) as file:
            self.jpg = file.read("imgaug/quokka.jpg")
            notes = json.loads(file.read("imgaug/quokka_annotations.json"))
        self.outline = [(point["x"], point["y"]) for point in notes["polygons"][0]["keypoints"]]
        self.points = [(point["x"], point["y"]) for point in notes["keypoints"]]
        self.boxes = [[box["x1"], box["y1"], box["x2"], box["y2"]] for box in notes["bounding_boxes"]]
        self.image = Image.open(io.BytesIO(self.jpg))

    def mask(self, number: int) -> Image.Image:
        """Return the mask, with this number in the outline and 0 elsewhere."""
        drawn = Image.new("L", self.image.size)
        ImageDraw.Draw(drawn).polygon(self.outline, fill=number)
        return drawn

    def sample(self) -> dict[str, Any]:
        """Return the fields of a sample, as the guide writes them."""
        arrays = {"boxes.npy": np.array(self.boxes, np.float32), "points.npy": np.array(self.points, np.float32)}
        return {"jpg": self.jpg, "mask.png": np.asarray(self.mask(1))} | arrays
