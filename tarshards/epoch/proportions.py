"""Which source comes next, so that each source has had its share to within one sample at every moment."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from fractions import Fraction
from heapq import heapify, heappop, heappush
from typing import Any, Literal

from tarshards.errors import StateError

Until = Literal["first", "last"] | int  # when a mixture ends: see check_until


class Mixture(Iterator[int]):
    """The endless sequence of the numbers of sources by *weights*: of any n, source i has its share of n to within one.

    By R. Tijdeman, "The chairman assignment problem", Discrete Mathematics 32 (1980): of the sources that are behind
    their share by 1 / (2 k - 2) or more, k being their number, that one comes which would be 1 - 1 / (2 k - 2) behind
    first; of several, the first in an order by *seed*. All is in whole numbers, so that nothing drifts.

    Only the ratios of weights count; a source of weight 0 never comes; a float counts as the decimal it is written as.
    *counts*, how often each source has come, is the whole state: the same weights and seed go on from there. Raises
    ValueError for weights that are negative, not finite or all 0, and StateError for counts that are not of these.

    >>> mixture = Mixture([5, 2, 1], seed=0)
    >>> mixture.take(8), mixture.counts
    ([0, 0, 1, 0, 2, 0, 0, 1], [5, 2, 1])
    """

    def __init__(self, weights: Sequence[Any], seed: int, counts: Sequence[int] | None = None):
        whole = _whole(weights)
        total, start = sum(whole), [0] * len(whole) if counts is None else list(counts)
        if len(start) != len(whole) or any(type(count) is not int for count in start):
            raise StateError(f"counts {start} are not of {len(whole)} sources")
        self.period = total  # choices after which every source has had exactly its share, and the sequence repeats
        self._step = sum(start)
        if any(abs(weight * self._step - total * count) >= total for weight, count in zip(whole, start)):
            raise StateError(f"counts {start} are not of a mixture by weights {list(weights)}")
        rng = random.Random(f"mixture/{seed}")
        sources = sorted(range(len(whole)), key=lambda _: rng.random())
        self._counts, self._sources = start, [source for source in sources if whole[source]]
        # Times are fractions with the sources' own divisors: due / divisor is when a source may come again, and
        # (due + slack) / divisor when it is late; each coming moves both by period / divisor.
        parts = max(2 * len(self._sources) - 2, 1)
        self._period, self._slack = parts * total, max(parts - 2, 0) * total
        self._divisor = [parts * whole[source] for source in self._sources]
        self._due = [total + self._period * start[source] for source in self._sources]
        self._ready: list[tuple[int, int]] = []
        self._waiting = [(-(-due // divisor), i) for i, (due, divisor) in enumerate(zip(self._due, self._divisor))]
        heapify(self._waiting)

    @property
    def counts(self) -> list[int]:
        """How often each source has come."""
        return list(self._counts)

    def __next__(self) -> int:
        return self.take(1)[0]

    def take(self, count: int) -> list[int]:
        """The next *count* choices."""
        waiting, ready, due, divisor = self._waiting, self._ready, self._due, self._divisor
        chosen = []
        for step in range(self._step + 1, self._step + count + 1):
            while waiting and waiting[0][0] <= step:
                i = heappop(waiting)[1]
                heappush(ready, ((due[i] + self._slack) // divisor[i], i))
            i = heappop(ready)[1]  # there is one: the sources are behind by 1 in sum
            due[i] += self._period
            heappush(waiting, (-(-due[i] // divisor[i]), i))
            source = self._sources[i]
            self._counts[source] += 1
            chosen.append(source)
        self._step += count
        return chosen


def check_until(until: Any) -> Until:
    """Return *until*; raise ValueError for what does not say when a mixture ends.

    It ends before the first source would begin again ("first"), when the last has been read once ("last"), or after
    that number of samples.
    """
    if until not in ("first", "last") and not (type(until) is int and until >= 0):
        raise ValueError(f'until= is "first", "last" or a number of samples, not {until!r}')
    return until


def fractions_of(weights: Sequence[Any]) -> list[Fraction]:
    """Return *weights* as fractions, a float as the decimal it is written as; raise ValueError as ``Mixture`` does."""
    try:
        shares = [Fraction(str(weight)) for weight in weights]
    except (ValueError, ZeroDivisionError):
        raise ValueError(f"weights must be finite numbers, not {list(weights)}") from None
    if not any(shares) or min(shares) < 0:
        raise ValueError(f"weights must be positive or 0, and not all 0, not {list(weights)}")
    return shares


def _whole(weights: Sequence[Any]) -> list[int]:
    """The least whole numbers in the ratios of *weights*."""
    shares = fractions_of(weights)
    scale = math.lcm(*(share.denominator for share in shares))
    whole = [int(share * scale) for share in shares]
    return [weight // math.gcd(*whole) for weight in whole]
