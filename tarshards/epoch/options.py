"""What an epoch is: the options that all planned and streamed datasets share, as one value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from tarshards.errors import flag, whole_number

Tail = Literal["exact", "pad", "drop"]
TAILS: tuple[Tail, ...] = get_args(Tail)


@dataclass(frozen=True)
class EpochOptions:
    """In which order the samples of an epoch come, and what becomes of those that ranks cannot share equally.

    - *shuffle*: permute the samples, or without indexes the shards, by (*seed*, epoch); False keeps the storage order
    - *seed*: what the permutations are drawn from
    - *tail*: "exact" delivers each sample once, so that some ranks have one more; "pad" repeats samples from the start
      of the epoch and "drop" leaves out its last ones, so that ranks have equally many; None is "pad" for several ranks
      and "exact" for one. Requires indexes.
    - *pool*: the samples that are shuffled together, over all ranks (None: 2**18). Requires indexes.

    Raises TypeError for a *seed* or *pool* that is no integer and a *shuffle* that is no bool, and ValueError for a
    *pool* below 1 and another *tail*.
    """

    shuffle: bool = False
    seed: int = 0
    tail: Tail | None = None
    pool: int | None = None

    def __post_init__(self) -> None:
        advice = "; pool= is the number of samples that are shuffled together"
        self.__dict__.update(seed=whole_number("seed", self.seed), shuffle=flag("shuffle", self.shuffle, advice))
        if self.tail is not None:
            check_tail(self.tail)
        if self.pool is not None:
            self.__dict__.update(pool=whole_number("pool", self.pool, 1))

    @property
    def needs_index(self) -> bool:
        """Whether an option is given that only planned epochs have."""
        return self.tail is not None or self.pool is not None

    def tail_for(self, ranks: int) -> Tail:
        """Return *tail*, or its default for so many ranks."""
        return self.tail or ("exact" if ranks == 1 else "pad")


def check_tail(tail: Any) -> Tail:
    """Return *tail*; raise ValueError if there is no such tail."""
    if tail not in TAILS:
        raise ValueError(f"tail must be one of {', '.join(TAILS)}, not {tail!r}")
    return tail
