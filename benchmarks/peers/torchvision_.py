"""torchvision's ImageFolder and transforms, a file an image in a folder a class; torch's DataLoader."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from peers import (
    _images,
    _torchvision,  # noqa: F401 - before what imports torchvision
)
from sets import Data, Sample
from torch.utils.data import DataLoader
from torchvision.datasets import DatasetFolder
from torchvision.transforms import Compose, PILToTensor, RandomHorizontalFlip, RandomResizedCrop

PACKAGES = ("torch==2.13.0", "torchvision==0.28.0", "pillow==13.0.0", "simplejpeg==1.9.0")
SYSTEM = ()
OWN = True
THREADS = ()
FORM = {"crop": "transforms in Python"}
DECODERS = ("Pillow", "simplejpeg")
CANNOT = {
    "stream": "delivers images",
    "arrays": "delivers images",
    "random": "delivers images",
    "write": "has no writer",
    "index": "reads no tars",
    "resume": "torch's DataLoader has no state",
}


def write(samples: list[Sample], data: Data) -> None:
    """The file name keeps the label: folders of classes would be as many as images here."""
    folder = data.folder / "images"
    folder.mkdir()
    for sample in samples:
        (folder / f"{int(sample['cls']):08d}.jpg").write_bytes(sample["jpg"])


class Labelled(DatasetFolder):
    """ImageFolder with a choice of decoder; a label is the number in the file's name."""

    def __init__(self, data: Data, decoder: str, transform: Any):
        read = partial(read_image, decoder=decoder)
        super().__init__(str(data.folder), read, extensions=(".jpg",), transform=transform)
        self.samples = [(path, int(Path(path).stem)) for path, _ in self.samples]


def read_image(path: str, decoder: str) -> Any:
    with open(path, "rb") as file:
        return _images.opened(file.read(), decoder)


def load(data: Data, transform: Any, workers: int, decoder: str, *, shuffled: bool) -> DataLoader:
    options = {"num_workers": workers, "persistent_workers": workers > 0, "shuffle": shuffled}
    return DataLoader(Labelled(data, decoder, transform), 64, **options)


def decode(data: Data, *, workers: int, decoder: str = "Pillow") -> DataLoader:
    return load(data, PILToTensor(), workers, decoder, shuffled=False)


def crop(data: Data, *, workers: int, decoder: str = "Pillow") -> DataLoader:
    transform = Compose([RandomResizedCrop(_images.CROP), RandomHorizontalFlip(), PILToTensor()])
    return load(data, transform, workers, decoder, shuffled=True)


def plain(task: str, item: Any, data: Data) -> Iterator[tuple[np.ndarray, int]]:
    yield from zip(item[0].numpy(), item[1].tolist())


def size(task: str, item: Any) -> int:
    return len(item[1])
