"""What an epoch is: the options that all planned and streamed datasets share, as one value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

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

    Raises ValueError for another *tail*.
    """

    shuffle: bool = False
    seed: int = 0
    tail: Tail | None = None
    pool: int | None = None

    def __post_init__(self) -> None:
        if self.tail is not None:
            check_tail(self.tail)

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
