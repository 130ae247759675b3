"""FFCV, its beton files: read from the page cache (os_cache), batches assembled by code that numba compiles."""

from __future__ import annotations

import os
from collections.abc import Iterator
from io import BytesIO
from typing import Any

import cv2
import numpy as np
import torch
from ffcv.fields import BytesField, IntField, NDArrayField, RGBImageField
from ffcv.fields.rgb_image import RandomResizedCropRGBImageDecoder
from ffcv.loader import Loader, OrderOption
from ffcv.transforms import RandomHorizontalFlip, ToTensor
from ffcv.writer import DatasetWriter
from sets import FIELDS, Data, Sample

PACKAGES = (
    "ffcv==1.0.2",
    "torch==2.13.0",
    "numba==0.68.1",
    "numpy==2.4.6",
    "opencv-python==5.0.0.93",
    "pillow==13.0.0",
)
SYSTEM = ("libopencv-dev", "libturbojpeg0-dev", "pkg-config", "g++")
OWN = True
THREADS = ("stream", "arrays", "decode", "crop")
FORM = {"stream": "rows"}
DECODERS = ("libjpeg-turbo",)
SIZES = {"raw-110k": 64, "raw-1m": 16}  # batches of its best size; of small samples 256
CANNOT = {
    "random": "its loader delivers epochs; no access by number",
    "index": "reads no tars",
    "resume": "its loader has no state; an epoch starts again",
}


class Samples:
    """An indexed dataset, as FFCV's writer asks for: a value for each of its fields."""

    def __init__(self, samples: list[Sample], kind: str) -> None:
        self.samples, self.kind = samples, kind

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, place: int) -> tuple[Any, ...]:
        sample = self.samples[place]
        label = int(sample["cls"])
        if self.kind == "otto":
            return np.load(BytesIO(sample["x.npy"])), label
        if self.kind == "cifar":
            return np.frombuffer(sample["rgb"], np.uint8).reshape(32, 32, 3), label
        if self.kind == "jpeg":  # a field of images takes pixels, and compresses them again
            pixels = cv2.imdecode(np.frombuffer(sample["jpg"], np.uint8), cv2.IMREAD_COLOR)
            return cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB), label
        parts = [np.frombuffer(sample[field], np.uint8) for field in FIELDS[self.kind]]
        return *parts, label, *map(len, parts)


def write(samples: list[Sample], data: Data) -> None:
    fields = {
        "otto": {"x": NDArrayField(shape=(93,), dtype=np.dtype("float32")), "y": IntField()},
        "cifar": {"x": RGBImageField(write_mode="raw"), "y": IntField()},
        "jpeg": {"x": RGBImageField(write_mode="jpg", jpeg_quality=90), "y": IntField()},
    }
    # Rows of bytes have the length of the longest row and are not cleared, so a separate field has the true length.
    names = FIELDS[data.kind]
    own = {name: BytesField() for name in names} | {"y": IntField()} | {f"size of {name}": IntField() for name in names}
    writer = DatasetWriter(str(data.folder / "set.beton"), fields.get(data.kind, own))
    writer.from_indexed_dataset(Samples(samples, data.kind))


def load(data: Data, size: int, workers: int, *, shuffled: bool = True, image: list[Any] | None = None) -> Loader:
    ranks = "RANK" in os.environ
    if ranks and not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    return Loader(
        str(data.folder / "set.beton"),
        batch_size=size,
        num_workers=workers,
        os_cache=True,
        order=OrderOption.RANDOM if shuffled else OrderOption.SEQUENTIAL,
        distributed=ranks,
        drop_last=False,
        pipelines={"x": image} if image else {},
    )


def stream(data: Data, *, shuffled: bool, workers: int) -> Loader:
    return load(data, SIZES.get(data.name, 256), workers, shuffled=shuffled)


def arrays(data: Data, *, size: int, workers: int) -> Loader:
    return load(data, size, workers)


def decode(data: Data, *, workers: int) -> Loader:
    return load(data, 64, workers)


def crop(data: Data, *, workers: int) -> Loader:
    image = [RandomResizedCropRGBImageDecoder((224, 224)), RandomHorizontalFlip(), ToTensor()]
    return load(data, 64, workers, image=image)


def plain(task: str, item: tuple[torch.Tensor, ...], data: Data) -> Iterator[tuple[Any, int]]:
    columns, count = [column.numpy() for column in item], len(FIELDS[data.kind])
    values, labels, sizes = columns[:count], columns[count][:, 0].tolist(), columns[count + 1 :]
    for place, label in enumerate(labels):
        if sizes:
            yield b"".join(each[place, : size[place, 0]].tobytes() for each, size in zip(values, sizes)), label
        else:
            yield values[0][place], label


def pair(item: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    return item[0], item[1][:, 0]


def size(task: str, item: tuple[torch.Tensor, ...]) -> int:
    return len(item[0])
