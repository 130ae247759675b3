"""Permutations by a seed that are the same with every release of numpy: sorted hashes of splitmix64.

The generator is Steele, Lea and Flood's ("Fast splittable pseudorandom number generators", 2014).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
CHUNK = 1 << 16  # positions, or numbers of a row, that are computed at once: limits the memory of temporaries


def finalize(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's finalizer, of every element.

    >>> [f"{x:016x}" for x in finalize(np.array([0x9E3779B97F4A7C15], np.uint64))]
    ['e220a8397b1dcdaf']
    """
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def fold(key: NDArray[np.uint64], word: Any) -> NDArray[np.uint64]:
    """The key that follows *key* and a 64-bit *word*."""
    return finalize((key ^ np.asarray(word).astype(np.uint64)) + GOLDEN)


def hash_of(*numbers: int) -> NDArray[np.uint64]:
    """The hash of whole numbers of any size and sign: each folds in 2 n + (1 if negative), then its n 64-bit limbs."""
    key = np.zeros(1, np.uint64)
    for number in numbers:
        limbs = -(-abs(number).bit_length() // 64)
        key = fold(key, np.uint64(2 * limbs + (number < 0)))
        for i in range(limbs):
            key = fold(key, np.uint64(abs(number) >> 64 * i & 0xFFFFFFFFFFFFFFFF))
    return key


def hashes(key: NDArray[np.uint64], count: int) -> NDArray[np.uint64]:
    """The first *count* outputs of splitmix64 begun at *key*."""
    return finalize(key + np.arange(1, count + 1, dtype=np.uint64) * GOLDEN)


def permutations(keys: NDArray[np.uint64], sizes: ArrayLike, width: int) -> NDArray[np.uint64]:
    """Return rows of *width* numbers: row k begins with a permutation of range(sizes[k]) by keys[k].

    It sorts i by the i-th output of splitmix64 begun at the key. The lowest bits, as many as width - 1 has, are
    replaced by i itself: there are no ties, and one array is sorted instead of two.
    """
    mask = np.uint64((1 << (width - 1).bit_length()) - 1)
    rows = np.empty((len(keys), width), np.uint64)
    for begin in range(0, width, CHUNK):
        i = np.arange(begin, min(begin + CHUNK, width), dtype=np.uint64)
        part = rows[:, begin : begin + CHUNK]
        np.bitwise_and(finalize(keys[:, None] + (i + np.uint64(1)) * GOLDEN), ~mask, out=part)
        part |= i
        if np.min(sizes) < width:
            part[i >= np.asarray(sizes, np.uint64)[:, None]] = np.iinfo(np.uint64).max
    rows.sort(axis=1)
    rows &= mask
    return rows
