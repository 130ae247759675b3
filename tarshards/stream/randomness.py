"""A random generator for each sample, independent of workers and resumes."""

from __future__ import annotations

from functools import cache
from hashlib import blake2b
from typing import Any

import numpy as np

from tarshards.errors import shortened
from tarshards.storage.location import Location


class SampleGenerator:
    """A numpy Generator, reseeded for each sample by *seed*, *epoch*, the name of its shard and its key.

    The state of its PCG64 is a BLAKE2b hash of these.
    """

    def __init__(self, seed: int, epoch: int):
        self._hash = blake2b(f"{seed}/{epoch}".encode(), digest_size=32)
        self._bits = np.random.PCG64(0)
        self._generator = np.random.Generator(self._bits)

    def seeded(self, sample: Any) -> np.random.Generator:
        """Return the generator seeded for *sample*; raise TypeError for a sample without a key."""
        if not isinstance(sample, dict) or "__key__" not in sample:
            raise TypeError(f"rng=True needs samples with __key__, as shards have them, not {shortened(sample)}")
        own = self._hash.copy()
        draw = sample.get("__draw__", "")  # tells repeated draws of a sample in one epoch apart
        name = f"{_name(sample.get('__url__', ''))}\0{sample['__key__']}\0{draw}"
        own.update(name.encode("utf-8", "surrogateescape"))
        number = int.from_bytes(own.digest(), "little")
        self._bits.state = {
            "bit_generator": "PCG64",
            "state": {"state": number % (1 << 128), "inc": number >> 128 | 1},
            "has_uint32": 0,
            "uinteger": 0,
        }
        return self._generator


@cache
def _name(url: str) -> str:
    """Return the name of a shard, independent of its location."""
    return Location.of(url).identity
