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
    - *block*: the consecutive samples that stay in one stretch of the order, and that a remote shard is asked for
      together (None: about 1 MiB, at most 16). Requires indexes.

    Raises TypeError for a *seed*, *pool* or *block* that is no integer and a *shuffle* that is no bool, and ValueError
    for a *pool* or *block* below 1 and another *tail*.
    """

    shuffle: bool = False
    seed: int = 0
    tail: Tail | None = None
    pool: int | None = None
    block: int | None = None

    def __post_init__(self) -> None:
        advice = "; pool= is the number of samples that are shuffled together"
        self.__dict__.update(seed=whole_number("seed", self.seed), shuffle=flag("shuffle", self.shuffle, advice))
        if self.tail is not None:
            check_tail(self.tail)
        for name in ("pool", "block"):
            if getattr(self, name) is not None:
                self.__dict__[name] = whole_number(name, getattr(self, name), 1)

    @property
    def needs_index(self) -> bool:
        """Whether an option is given that only planned epochs have."""
        return any(value is not None for value in (self.tail, self.pool, self.block))

    def tail_for(self, ranks: int) -> Tail:
        """Return *tail*, or its default for so many ranks."""
        return self.tail or ("exact" if ranks == 1 else "pad")


def check_tail(tail: Any) -> Tail:
    """Return *tail*; raise ValueError if there is no such tail."""
    if tail not in TAILS:
        raise ValueError(f"tail must be one of {', '.join(TAILS)}, not {tail!r}")
    return tail
