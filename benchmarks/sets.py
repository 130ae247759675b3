"""The data sets of the suite: made once, as plain tar shards, out of fixed seeds.

Every peer's environment imports this module, so it needs the standard library alone; making the sets takes numpy,
Pillow and scikit-learn.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

Sample = dict[str, str | bytes]  # "__key__", and each field's bytes


@dataclass(frozen=True)
class Data:
    """A set as a peer's functions meet it."""

    name: str  # "raw-2k"
    kind: str  # the fields: raw: bin, cls; text: txt, cls; otto: x.npy, cls; cifar: rgb, cls; jpeg: jpg, cls
    count: int  # samples
    urls: tuple[str, ...]  # the plain tar shards: paths, or http URLs
    folder: Path  # this peer's alone: its own format of the set, an index, a cache


def read_samples(urls: tuple[str, ...]) -> Iterator[Sample]:
    """Yield the samples of local shards, by Python's own tarfile: what the peers' writers are given."""
    for url in urls:
        sample: Sample = {}
        with tarfile.open(url) as tar:
            for member in tar:
                key, _, field = member.name.partition(".")
                if sample and sample["__key__"] != key:
                    yield sample
                    sample = {}
                sample["__key__"] = key
                sample[field] = tar.extractfile(member).read()
        yield sample
