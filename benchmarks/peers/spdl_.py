"""SPDL, plain tars: shards read whole and parsed by iter_tarfile, batches made by the threads of a pipeline.

It has no shuffle over tars: here the order of the shards is drawn, and that of the samples within each shard.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import spdl.io
from checks import FIELD
from sets import Data
from spdl.pipeline import PipelineBuilder

PACKAGES = ("spdl==0.8.0", "spdl-io==0.8.0", "numpy==2.4.6")
SYSTEM = ("ffmpeg",)
OWN = False
THREADS = ("arrays", "decode", "crop")  # stream with 0 is iter_tarfile alone; with 1 and 2 these are threads too
DECODERS = ("FFmpeg",)
CANNOT = {
    "random": "iterates over an archive; no access by number",
    "write": "has no writer of samples",
    "index": "has no index",
    "resume": "its pipeline has no state; an epoch starts again",
}
SIDE = 224

View = dict[str, Any]  # a sample: its key, and views of its fields in the shard's bytes
Batch = tuple[np.ndarray, list[int]]


def read_shard(url: str) -> list[View]:
    with open(url, "rb") as file:
        archive = file.read()
    samples: list[View] = []
    last = None
    for name, value in spdl.io.iter_tarfile(archive):
        key, _, field = name.partition(".")
        if key != last:
            samples.append(sample := {"__key__": key})
            last = key
        sample[field] = value
    return samples


class Shards:
    """This rank's shards; in another order each epoch if shuffled."""

    def __init__(self, data: Data, *, shuffled: bool):
        if "://" in data.urls[0]:
            raise NotImplementedError("reads no URLs")
        rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.urls, self.shuffled, self.epochs = data.urls[rank::world], shuffled, count()

    def readers(self) -> Iterator[Callable[[], list[View]]]:
        """Yield a function that reads a shard, for each of them."""
        rng, urls = random.Random(next(self.epochs)), list(self.urls)
        if self.shuffled:
            rng.shuffle(urls)
        for url in urls:
            yield partial(self.read, url, rng.random())

    def read(self, url: str, seed: float) -> list[View]:
        samples = read_shard(url)
        if self.shuffled:
            random.Random(seed).shuffle(samples)
        return samples

    def __iter__(self) -> Iterator[View]:
        for read in self.readers():
            yield from read()

    def batches(self, size: int) -> Iterator[list[View]]:
        samples: list[View] = []
        for read in self.readers():
            samples += read()
            while len(samples) >= size:
                yield samples[:size]
                del samples[:size]
        if samples:
            yield samples


@dataclass
class Loader:
    """A pipeline per epoch: the source in its own thread, *work* on its items in *workers* threads."""

    source: Callable[[], Iterable[Any]]
    work: Callable[[Any], Any]
    workers: int

    def __iter__(self) -> Iterator[Any]:
        builder = PipelineBuilder().add_source(self.source()).pipe(self.work, concurrency=self.workers).add_sink()
        pipeline = builder.build(num_threads=self.workers)
        with pipeline.auto_stop():
            yield from pipeline


def stream(data: Data, *, shuffled: bool, workers: int) -> Iterable[Any]:
    """With threads, an item is all samples of a shard: handing over single samples costs more than reading them."""
    shards = Shards(data, shuffled=shuffled)
    return Loader(shards.readers, lambda read: read(), workers) if workers else shards


def batches_of(data: Data, size: int, work: Callable[[list[View]], np.ndarray], workers: int) -> Loader:
    shards = Shards(data, shuffled=True)

    def batch(samples: list[View]) -> Batch:
        return work(samples), [int(bytes(sample["cls"])) for sample in samples]

    return Loader(lambda: shards.batches(size), batch, workers)


def arrays(data: Data, *, size: int, workers: int) -> Loader:
    def stacked(samples: list[View]) -> np.ndarray:
        return np.stack([spdl.io.load_npy(sample["x.npy"]) for sample in samples])

    def pixels(samples: list[View]) -> np.ndarray:
        joined = b"".join(sample["rgb"] for sample in samples)
        return np.frombuffer(joined, np.uint8).reshape(-1, 32, 32, 3)

    return batches_of(data, size, stacked if data.kind == "otto" else pixels, workers)


def decode(data: Data, *, workers: int) -> Loader:
    def decoded(samples: list[View]) -> np.ndarray:
        images = [sample["jpg"] for sample in samples]
        return spdl.io.to_numpy(spdl.io.load_image_batch(images, width=None, height=None))

    return batches_of(data, 64, decoded, workers)


def crop(data: Data, *, workers: int) -> Loader:
    def cropped(samples: list[View]) -> np.ndarray:
        packets = [spdl.io.demux_image(sample["jpg"]) for sample in samples]
        frames = [spdl.io.decode_packets(one, filter_desc=drawn_crop(one.width, one.height)) for one in packets]
        return spdl.io.to_numpy(spdl.io.convert_frames(frames))

    return batches_of(data, 64, cropped, workers)


def drawn_crop(width: int, height: int) -> str:
    """FFmpeg's filters for a random resized crop and flip, drawn as torchvision does."""
    for _ in range(10):
        area = width * height * random.uniform(0.08, 1)
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if w <= width and h <= height:
            break
    else:
        w = h = min(width, height)
    x, y = random.randint(0, width - w), random.randint(0, height - h)
    filters = spdl.io.get_video_filter_desc(
        scale_width=SIDE, scale_height=SIDE, scale_algo="bilinear", scale_mode=None, filter_desc="hflip"
    )
    flipped = random.random() < 0.5
    return f"crop={w}:{h}:{x}:{y}," + (filters if flipped else filters.replace("hflip,", ""))


def plain(task: str, item: Any, data: Data) -> Iterator[tuple[Any, int]]:
    if task == "stream":
        for sample in item if isinstance(item, list) else [item]:
            yield bytes(sample[FIELD[data.kind]]), int(bytes(sample["cls"]))
    else:
        yield from zip(*item)


def size(task: str, item: Any) -> int:
    if task == "stream":
        return len(item) if isinstance(item, list) else 1
    return len(item[1])
