"""``tarshards demo``: write handwritten digits to tar shards, train a classifier, check that no sample is missing."""

from __future__ import annotations

import random
import tarfile
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

from tarshards.samples.ledger import Ledger
from tarshards.write.shards import ShardWriter

if TYPE_CHECKING:
    import torch
    from torch import nn

# The scans are sorted by writer, and the shards keep that order: the held-out shards are by other writers.
ALL, TRAIN, TEST = "digits-{00..07}.tar", "digits-{00..05}.tar", "digits-{06..07}.tar"
SHARD = 225  # samples per shard, except the last
GOAL = 0.95


def digit_samples() -> Iterator[dict[str, Any]]:
    """Yield the 1,797 scans included in scikit-learn, their 17 shades scaled to 0..255."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    for number, (image, label) in enumerate(zip(digits.images, digits.target)):
        yield {"__key__": f"{number:04d}", "png": (image * 255 / 16).astype("uint8"), "cls": int(label)}


def write_digits(folder: str) -> ShardWriter:
    """Write all scans to eight shards in *folder*, and return the writer."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    with ShardWriter(f"{folder}/digits-{{shard:02d}}.tar", max_samples=SHARD) as writer:
        for sample in digit_samples():
            writer.write(sample)
    return writer


def read_with_tarfile(shards: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the samples of *shards*, read with Python's tarfile."""
    for shard in shards:
        with tarfile.open(shard) as archive:
            for key, members in groupby(archive, lambda member: member.name.split(".")[0]):
                files = {member.name.split(".", 1)[1]: archive.extractfile(member) for member in members}
                fields = {field: file.read() for field, file in files.items() if file is not None}
                yield {"__key__": key, "__url__": shard, **fields}


def samples_per_second(*readers: Callable[[], Iterable[Any]], passes: int = 9) -> list[float]:
    """Return the speed of each reader: the median of *passes* passes, with the readers taking turns."""
    speeds: list[list[float]] = [[] for _ in readers]
    for _ in range(passes):
        for reader, speed in zip(readers, speeds):
            begun = perf_counter()
            count = sum(1 for _ in reader())
            speed.append(count / (perf_counter() - begun))
    return [median(speed) for speed in speeds]


def nudge(image: torch.Tensor) -> torch.Tensor:
    """Move an image by up to one pixel in each direction."""
    from torch.nn.functional import pad

    top, left = random.choices(range(3), k=2)
    return pad(image, (1, 1, 1, 1))[top : top + 8, left : left + 8]


def classifier() -> nn.Module:
    """Return an untrained network that maps a batch of 8 x 8 images to ten scores each."""
    from torch import nn

    return nn.Sequential(
        nn.Unflatten(1, (1, 8)),
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(64 * 4 * 4, 10),
    )


def train(folder: str, *, seed: int, epochs: int, ledger: Ledger) -> Iterator[float]:
    """Train a classifier on the first six shards; after every epoch, yield its accuracy on the other two."""
    import torch
    from tqdm import tqdm

    from tarshards.loaders.torch.shard_dataset import ShardDataset
    from tarshards.loaders.torch.shard_loader import ShardLoader

    torch.manual_seed(seed)
    torch.set_num_threads(1)  # leave the other cores to the workers
    seen = (
        ShardDataset(f"{folder}/{TRAIN}", shuffle=True, seed=seed, on_error=ledger)
        .decode("torchl")
        .map_fields({"png": nudge})
        .to_tuple("png", "cls")
    )
    held_out = ShardDataset(f"{folder}/{TEST}", on_error=ledger).decode("torchl").to_tuple("png", "cls")
    seen_batches, held_out_batches = [
        ShardLoader(dataset, 32, num_workers=2, persistent_workers=True) for dataset in (seen, held_out)
    ]
    model = classifier()
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    for epoch in range(1, epochs + 1):
        model.train()
        with tqdm(total=6 * SHARD, desc=f"epoch {epoch}", unit=" samples", leave=False, disable=None) as bar:
            for images, labels in seen_batches:
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(images), labels).backward()
                optimizer.step()
                bar.update(len(labels))
        model.eval()
        with torch.no_grad():
            right = torch.cat([model(images).argmax(1) == labels for images, labels in held_out_batches])
        yield right.float().mean().item()
