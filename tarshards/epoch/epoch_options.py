"""What an epoch is: the options that all planned and streamed datasets share, as one value."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from tarshards.errors import flag, shortened, whole_number

Tail = Literal["exact", "pad", "drop"]
TAILS: tuple[Tail, ...] = get_args(Tail)


@dataclass(frozen=True, kw_only=True)
class EpochOptions:
    """The order of the samples of an epoch, and the treatment of samples that do not divide evenly among ranks.

    - *shuffle*: permute the samples by (*seed*, epoch); False keeps the storage order. Without indexes the shards are
      permuted, and each worker mixes samples in a buffer.
    - *seed*: the seed of the permutations
    - *tail*: "exact" delivers each sample once, so that some ranks have one more; "pad" repeats samples from the start
      of the epoch and "drop" leaves out its last ones, so that all ranks have the same number; None is "pad" for
      several ranks and "exact" for one. Without indexes only "exact" is possible, and loaders require it, or
      ``steps=``, if the number of ranks does not divide the number of shards.
    - *pool*: the number of samples that are shuffled together, over all ranks (None: all, if they are 2**18 at most; of
      more, about a million that have at most 4 GiB, but at least 2**18); without indexes, in the buffer of each worker
      (None: 1,000)
    - *block*: the number of consecutive samples that are permuted as one, and requested together from a remote shard
      (None: about 1 MiB, at most 16; if all samples fit into *pool*, single samples are permuted). Requires indexes.
    - *resample*: True draws the samples of an epoch, as many as there are, with replacement by (*seed*, epoch,
      position); without indexes it draws shards. A list of weights, one for each shard, draws the shards by these.
      Excludes *pool* and *block*; *shuffle* has no effect.

    Raises TypeError for a *seed*, *pool* or *block* that is not an integer, a *shuffle* that is not a bool, and a
    *resample* that is neither a bool nor a list, and ValueError for a *pool* or *block* below 1, another *tail*, and
    weights that are negative, not finite or all 0.
    """

    shuffle: bool = False
    seed: int = 0
    tail: Tail | None = None
    pool: int | None = None
    block: int | None = None
    resample: bool | Sequence[float] = False

    def __post_init__(self) -> None:
        advice = "; pool= is the number of samples that are shuffled together"
        self.__dict__.update(seed=whole_number("seed", self.seed), shuffle=flag("shuffle", self.shuffle, advice))
        if self.tail is not None:
            check_tail(self.tail)
        for name in ("pool", "block"):
            if getattr(self, name) is not None:
                self.__dict__[name] = whole_number(name, getattr(self, name), 1)
        self.__dict__["resample"] = _check_resample(self.resample)
        if self.resample and (self.pool or self.block):
            raise ValueError("resample= draws each sample by itself: leave out pool= and block=")

    @property
    def needs_index(self) -> bool:
        """Whether an option is given that requires planned epochs."""
        return self.tail not in (None, "exact") or self.block is not None

    def tail_for(self, ranks: int) -> Tail:
        """Return *tail*, or its default for this number of ranks."""
        return self.tail or ("exact" if ranks == 1 else "pad")


def _check_resample(resample: Any) -> bool | tuple[float, ...]:
    """Return ``resample=``, with weights as a tuple; raise TypeError or ValueError for an invalid value."""
    if isinstance(resample, bool):
        return resample
    try:
        weights = tuple(map(float, resample))
    except (TypeError, ValueError):
        words = "resample= is True, or a list of weights, one for each shard"
        raise TypeError(f"{words}, not {shortened(resample)}") from None
    if not any(weights) or min(weights) < 0 or not math.isfinite(sum(weights)):
        raise ValueError(
            f"weights in resample= must be finite, positive or 0, and not all 0, not {shortened(resample)}"
        )
    return weights


def check_tail(tail: Any) -> Tail:
    """Return *tail*; raise ValueError if there is no such tail."""
    if tail not in TAILS:
        raise ValueError(f"tail must be one of {', '.join(TAILS)}, not {tail!r}")
    return tail
