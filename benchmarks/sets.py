"""The datasets of the suite: generated once, as plain tar shards, from fixed seeds.

Every peer's environment imports this module, so it needs only the standard library; generating the sets needs numpy,
Pillow, scikit-learn and tarshards.
"""

from __future__ import annotations

import io
import json
import random
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

Sample = dict[str, str | bytes]  # "__key__", and each field's bytes
SHARDS, SMOKE, PLACES = {"shards-10k": 10_000}, 200, 10_000  # shards: else 4; samples of a smoke run; random access
FIELDS = {  # those that are compared, beside the label cls
    "raw": ("bin",),
    "five": ("bin", "txt", "json", "npy"),
    "text": ("txt",),
    "otto": ("x.npy",),
    "cifar": ("rgb",),
    "jpeg": ("jpg",),
}


@dataclass(frozen=True)
class Data:
    """A set, as passed to a peer's functions."""

    name: str  # "raw-2k"
    kind: str  # which fields beside cls: one of FIELDS
    count: int  # samples
    urls: tuple[str, ...]  # the plain tar shards: paths, or http URLs
    folder: Path  # for this peer only: its own format of the set, an index, a cache


def read_samples(urls: tuple[str, ...]) -> Iterator[Sample]:
    """Yield the samples of local shards, read by Python's tarfile, for the peers' writers."""
    for url in urls:
        sample: Sample = {}
        with tarfile.open(url) as tar:
            for member in filter(tarfile.TarInfo.isfile, tar):
                key, _, field = member.name.removeprefix("./").partition(".")
                if sample and sample["__key__"] != key:
                    yield sample
                    sample = {}
                sample["__key__"] = key
                sample[field] = tar.extractfile(member).read()
        yield sample


def drawn_places(count: int) -> list[int]:
    """Return the sample numbers for measuring random access."""
    return random.Random(0).choices(range(count), k=PLACES)


def raw(size: int) -> Callable[[int], Iterator[Any]]:
    def fields(count: int) -> Iterator[Any]:
        rng = random.Random(size)
        for i in range(count):
            yield {"bin": rng.randbytes(size), "cls": i % 1000}

    return fields


def five(count: int) -> Iterator[Any]:
    """A small picture's bytes, a caption, metadata, an embedding and a label."""
    import numpy as np

    rng = random.Random("five")
    for i in range(count):
        embedding = np.array([rng.random() for _ in range(16)], np.float32)
        about = {"row": i, "source": f"{rng.getrandbits(64):016x}"}
        yield {"bin": rng.randbytes(2048), "txt": f"caption {i}", "json": about, "npy": embedding, "cls": i % 1000}


def text(count: int) -> Iterator[Any]:
    """Lines of 100 to 500 words out of 20,000 by Zipf's law; frequent words are short."""
    rng = random.Random("text")
    letters = "etaoinshrdlucmfwypvbgkqjxz"
    weights = list(accumulate(1 / (1 + i) for i in range(26)))
    lengths = (2 + min(10, rank.bit_length() // 2 + rng.randrange(4)) for rank in range(20_000))
    words = ["".join(rng.choices(letters, cum_weights=weights, k=length)) for length in lengths]
    frequencies = list(accumulate(1 / (1 + rank) for rank in range(len(words))))
    for i in range(count):
        yield {"txt": " ".join(rng.choices(words, cum_weights=frequencies, k=rng.randint(100, 500))), "cls": i % 1000}


def otto(count: int) -> Iterator[Any]:
    """The Otto challenge's shape: 93 small counts, 9 classes."""
    import numpy as np

    rng = np.random.default_rng(0)
    for i in range(count):
        stream = io.BytesIO()
        np.save(stream, rng.poisson(0.7, 93).astype(np.float32))
        yield {"x.npy": stream.getvalue(), "cls": i % 9}


def cifar(count: int) -> Iterator[Any]:
    """Smooth pictures, uncompressed."""
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(0)
    for i in range(count):
        coarse = Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8))
        yield {"rgb": coarse.resize((32, 32), Image.Resampling.BICUBIC).tobytes(), "cls": i % 10}


def photos(width: int, height: int) -> Callable[[int], Iterator[Any]]:
    """Crops of scikit-learn's two photographs, at scales from 0.8 to 1.25, as JPEG of quality 90."""

    def fields(count: int) -> Iterator[Any]:
        import numpy as np
        from PIL import Image
        from sklearn.datasets import load_sample_images

        pictures, rng = [Image.fromarray(picture) for picture in load_sample_images().images], np.random.default_rng(0)
        for i in range(count):
            picture, stream = pictures[i % len(pictures)], io.BytesIO()
            scale = min(rng.uniform(0.8, 1.25), picture.width / width, picture.height / height)
            cut = width * scale, height * scale
            left, top = rng.uniform(0, picture.width - cut[0]), rng.uniform(0, picture.height - cut[1])
            box = (left, top, left + cut[0], top + cut[1])
            part = picture.resize((width, height), Image.Resampling.BICUBIC, box)
            part.save(stream, "JPEG", quality=90)
            yield {"jpg": stream.getvalue(), "cls": i}

    return fields


SETS: dict[str, tuple[str, int, Callable[[int], Iterator[Any]]]] = {
    "raw-2k": ("raw", 10_000, raw(2048)),
    "raw-2k-200k": ("raw", 200_000, raw(2048)),
    "raw-2k-5m": ("raw", 5_000_000, raw(2048)),
    "raw-110k": ("raw", 1_500, raw(110 * 1024)),
    "raw-110k-10k": ("raw", 10_500, raw(110 * 1024)),
    "raw-1m": ("raw", 1_000, raw(1 << 20)),
    "five": ("five", 10_000, five),
    "five-200k": ("five", 200_000, five),
    "shards-10k": ("raw", 20_000, raw(1024)),
    "text": ("text", 5_000, text),
    "otto": ("otto", 20_000, otto),
    "otto-200k": ("otto", 200_000, otto),
    "cifar": ("cifar", 10_000, cifar),
    "cifar-200k": ("cifar", 200_000, cifar),
    "photos256": ("jpeg", 600, photos(256, 256)),
    "photos256-1k": ("jpeg", 1_000, photos(256, 256)),
    "photos500": ("jpeg", 250, photos(500, 375)),
}

LINKED = {"raw-2k-5m": ("raw-2k-200k", 25)}  # hard links of a set's shards, so often
PART = {"raw-2k-5m": 2.0, "five-200k": 2.0, "otto-200k": 2.0, "cifar-200k": 2.0}  # seconds of a round, not an epoch
CHECKED = 20_000  # samples of these that are compared with the set


def data_of(name: str, root: Path, peer: str) -> tuple[Data, list[Any]]:
    """Return a generated set for *peer*, and its reference."""
    folder = root / "sets" / name
    known = json.loads((folder / "reference.json").read_text())
    urls = tuple(map(str, sorted(folder.glob("*.tar"))))
    return Data(name, SETS[name][0], known["count"], urls, root / "peers" / peer / name), known["entries"]
