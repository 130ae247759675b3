"""Random numbers of a sample: a pure function of seed, epoch and the number of the sample.

The draw of sample i is splitmix64's output at the key of (seed, epoch) folded with i; its k-th number in [0, 1) is the
upper 53 bits of the k-th output of a splitmix64 seeded with the draw. All readers of a sample get the same draw, so an
image and its mask are cropped alike.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tarshards.epoch.permutations import GOLDEN, finalize, fold, hash_of


def draws_of(seed: int, epoch: int, samples: Any) -> np.ndarray:
    """Return the draw (uint64) of each of *samples*, their numbers in the dataset.

    >>> [f"{draw:016x}" for draw in draws_of(0, 0, [0, 1])]
    ['238275bc38fcbe91', '2f32a78496c67c60']
    """
    return fold(hash_of(seed, epoch), np.asarray(samples, np.uint64))


def uniform(draws: np.ndarray, k: int | np.ndarray) -> np.ndarray:
    """Return the k-th number in [0, 1) of each draw (float64), for one k, or an array of them that is broadcast."""
    steps = (np.array(k, np.uint64, ndmin=1) + np.uint64(1)) * GOLDEN
    return (finalize(draws + steps) >> np.uint64(11)) * 2.0**-53
