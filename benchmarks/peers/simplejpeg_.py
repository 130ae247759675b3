"""The decoder alone: simplejpeg over JPEGs in memory, into reused rows; no loader can be much faster."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import numpy as np
import simplejpeg
from sets import Data, read_samples

PACKAGES = ("simplejpeg==1.9.0", "numpy==2.4.6")
SYSTEM = ()
OWN = False
THREADS = ("decode",)
DECODERS = ("simplejpeg",)
CANNOT = {
    "stream": "is a decoder",
    "arrays": "is a decoder",
    "crop": "is a decoder",
    "random": "is a decoder",
    "write": "is a decoder",
    "index": "is a decoder",
    "resume": "is a decoder",
}


class Images:
    """Every image once, decoded by *workers* threads."""

    def __init__(self, data: Data, workers: int):
        self.samples = [(sample["jpg"], int(sample["cls"])) for sample in read_samples(data.urls)]
        self.workers = workers
        height, width, _, _ = simplejpeg.decode_jpeg_header(self.samples[0][0])
        self.rows = np.empty((4 * workers, height, width, 3), np.uint8)

    def __iter__(self) -> Iterator[tuple[np.ndarray, int]]:
        with ThreadPoolExecutor(self.workers) as pool:
            works = (pool.submit(self.decode, i) for i in range(len(self.samples)))
            pending = deque(islice(works, 2 * self.workers))
            while pending:
                yield pending.popleft().result()
                pending.extend(islice(works, 1))

    def decode(self, i: int) -> tuple[np.ndarray, int]:
        data, label = self.samples[i]
        return simplejpeg.decode_jpeg(data, "RGB", buffer=self.rows[i % len(self.rows)]), label


def decode(data: Data, *, workers: int) -> Images:
    return Images(data, workers)


def plain(task: str, item: tuple[np.ndarray, int], data: Data) -> Iterator[tuple[Any, int]]:
    yield item
