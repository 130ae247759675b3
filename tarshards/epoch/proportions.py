"""Which source comes next, so that at every position each source has had its share to within one sample."""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from heapq import heapify, heappop, heappush
from itertools import pairwise, zip_longest
from math import ceil, floor, inf, lcm
from typing import Any, Literal, NamedTuple

from tarshards.errors import StateError, shortened, whole_number

Until = Literal["first", "last"] | int  # when a mixture ends: see check_until

FINE = 256  # bits of a quota where a weight changes, if it is not exact with fewer
WIDEST = 10**15  # ratio of two weights that change: with more, growth vanishes in these bits


class Phase(NamedTuple):
    """Positions *begin* to *end* over which quotas grow evenly: that of source i is (base[i] + x growth[i]) / unit.

    *x* is counted from *begin*; all are whole numbers, and the *end* of the last phase is infinite.
    """

    begin: int
    end: float
    unit: int
    base: list[int]
    growth: list[int]

    def at(self, position: int) -> list[Fraction]:
        """The quotas at a position of the phase."""
        x = position - self.begin
        return [Fraction(base + x * growth, self.unit) for base, growth in zip(self.base, self.growth)]


class Quotas:
    """The number of the first n samples that should come from each source, by *weights*.

    A weight is a number, or ``{position: weight}`` with one for position 0; each applies until the next
    position. At each position the weights count relative to their sum, so that the quotas of n are the sums of these
    ratios over the first n positions, and add up to n. A worker that takes one of every *stride* positions has quotas
    of its own: n of its samples are n x *stride* positions. Only the ratios of weights count; a float counts as the
    decimal it is written as.

    *sources* are those that ever have a weight; *ends* has the position after which each has none. All are fractions,
    the same on every machine.

    Raises ValueError for weights that are negative, not finite, or all 0 at some position; and for those that change
    also for positive ones that differ by a factor above 1e15, and for positions that do not begin at 0. Raises
    TypeError for positions that are not whole numbers.

    >>> quotas = Quotas([{0: 1, 10: 0}, {0: 1}])
    >>> [float(quota) for quota in quotas.at(10)], [float(quota) for quota in quotas.at(30)]
    ([5.0, 5.0], [5.0, 25.0])
    """

    def __init__(self, weights: Sequence[Any], *, stride: int = 1):
        self.weights: list[Any] = list(weights)
        if any(isinstance(weight, Mapping) for weight in self.weights):
            curves = [_curve(weight if isinstance(weight, Mapping) else {0: weight}) for weight in self.weights]
        else:
            curves = [{0: value} for value in _fractions(self.weights)]
        self.sources: list[int] = [number for number, curve in enumerate(curves) if any(curve.values())]
        self.ends: dict[int, float] = {number: _end(curves[number], stride) for number in self.sources}
        self.parts: int = max(2 * len(self.sources) - 2, 1)
        knots = sorted({0, *(knot for curve in curves for knot in curve)})
        rows = [[_weight(curve, knot) for curve in curves] for knot in knots]
        for knot, row in zip(knots, rows):
            if not any(row):
                where = f" at position {knot}" if len(knots) > 1 else ""
                raise ValueError(f"weights must be positive or 0, and not all 0{where}, not {shortened(self.weights)}")
        positive = [value for curve in curves for value in curve.values() if value]
        if len(knots) > 1 and (max(positive) > WIDEST * min(positive) or knots[-1] >= 1 << 61):
            raise ValueError(f"weights have positions up to 2**61, and differ by 1e15 at most, not {self.weights}")
        self.phases: list[Phase] = _phases([Fraction(knot, stride) for knot in knots], rows)
        self._begins = [phase.begin for phase in self.phases]
        # Of each source, its quotas at the ends of all phases but the last.
        self._reached = list(zip(*(phase.at(phase.begin) for phase in self.phases[1:]))) or [()] * len(curves)

    @property
    def period(self) -> int:
        """The number of choices after which, with constant weights, all shares are exact and choices repeat."""
        (phase,) = self.phases
        return phase.unit

    def at(self, position: int) -> list[Fraction]:
        """The quotas of the first *position* samples."""
        return self.phases[bisect_right(self._begins, position) - 1].at(position)

    def phase(self, source: int, quota: int | Fraction, *, beyond: bool = False) -> Phase:
        """The first phase in which *source* is due *quota* samples, or *beyond* that; the last if it never is."""
        return self.phases[(bisect_right if beyond else bisect_left)(self._reached[source], quota)]

    def first(self, source: int, quota: int | Fraction, *, beyond: bool = False) -> int | None:
        """The first position where *source* is due *quota* samples, or *beyond* that; None if it never is."""
        phase = self.phase(source, quota, beyond=beyond)
        missing, growth = quota * phase.unit - phase.base[source], phase.growth[source]
        if not growth:
            return None if missing or beyond else phase.begin
        return phase.begin + int(missing // growth + 1 if beyond else -(-missing // growth))


class Mixture(Iterator[int]):
    """The endless sequence of the numbers of sources by *weights*: of any n, source i has its share of n to within one.

    By R. Tijdeman, "The chairman assignment problem", Discrete Mathematics 32 (1980): of the sources that are behind
    their quota by 1 / (2 k - 2) or more, k being their number, that one comes which would be 1 - 1 / (2 k - 2) behind
    first; of several, the first in an order by *seed*. All values are whole numbers, so nothing drifts.

    *weights* are as for ``Quotas``, which may be given instead: a source of weight 0 does not come. *counts*, how often
    each source has come, is the whole state: the same weights and seed continue from it. Raises ValueError for weights
    as ``Quotas`` does, and StateError for counts that are not of these.

    >>> mixture = Mixture([5, 2, 1], seed=0)
    >>> mixture.take(8), mixture.counts
    ([0, 0, 1, 0, 2, 0, 0, 1], [5, 2, 1])
    >>> Mixture([{0: 1, 10: 0}, {0: 1}], seed=0).take(20)
    [0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]
    """

    def __init__(self, weights: Sequence[Any] | Quotas, seed: int, counts: Sequence[int] | None = None):
        self.quotas: Quotas = weights if isinstance(weights, Quotas) else Quotas(weights)
        number = len(self.quotas.weights)
        self._counts = [0] * number if counts is None else list(counts)
        self._step = check_counts(self.quotas, self._counts)
        rng = random.Random(f"mixture/{seed}")
        order = sorted(range(number), key=lambda _: rng.random())
        self._sources = [source for source in order if source in self.quotas.sources]
        # Positions are fractions with divisors of the source's phase: due / divisor is where a source may come again,
        # and (due + slack) / divisor where it is late; each coming moves both by period / divisor.
        self._due, self._divisor, self._slack, self._period = ([0] * len(self._sources) for _ in range(4))
        self._end = [inf] * len(self._sources)  # the ends of these phases
        self._ready: list[tuple[float, int]] = []  # sources that may come, by the position where each is late
        self._waiting = [(self._enter(i), i) for i in range(len(self._sources))]  # the others, by when they may come
        heapify(self._waiting)

    @property
    def counts(self) -> list[int]:
        """The number of times that each source has come."""
        return list(self._counts)

    def __next__(self) -> int:
        return self.take(1)[0]

    def take(self, count: int) -> list[int]:
        """The next *count* choices."""
        waiting, ready, counts, sources = self._waiting, self._ready, self._counts, self._sources
        due, divisor, slack, period, end = self._due, self._divisor, self._slack, self._period, self._end
        chosen = []
        for step in range(self._step + 1, self._step + count + 1):
            while waiting and waiting[0][0] <= step:
                i = heappop(waiting)[1]
                late = (due[i] + slack[i]) // divisor[i]
                heappush(ready, (late if late < end[i] else self._late(i), i))
            i = heappop(ready)[1]  # one exists, since the sources are behind by 1 in sum
            counts[sources[i]] += 1
            chosen.append(sources[i])
            due[i] += period[i]
            position = -(-due[i] // divisor[i])
            heappush(waiting, (position if position <= end[i] else self._enter(i), i))
        self._step += count
        return chosen

    def _enter(self, i: int) -> float:
        """Return where source i may come next, after making its positions those of the phase in which that is."""
        source, parts = self._sources[i], self.quotas.parts
        due = self._counts[source] * parts + 1
        phase = self.quotas.phase(source, Fraction(due, parts))
        self._divisor[i] = divisor = parts * phase.growth[source]
        if not divisor:
            return inf
        self._due[i] = phase.unit * due - parts * phase.base[source] + divisor * phase.begin
        self._slack[i], self._period[i] = phase.unit * max(parts - 2, 0), phase.unit * parts
        self._end[i] = phase.end
        return -(-self._due[i] // divisor)

    def _late(self, i: int) -> float:
        """The last position at which source i may come, where that is not in the phase in which it was due."""
        source = self._sources[i]
        beyond = self.quotas.first(source, self._counts[source] + 1 - Fraction(1, self.quotas.parts), beyond=True)
        return inf if beyond is None else beyond - 1


def stepwise(line: Mapping[int, Any], every: int) -> dict[int, float]:
    """Return a weight that follows *line* in steps of *every* positions.

    *line* is ``{position: weight}``: straight from each of its positions to the next, and constant after the last. Each
    step has the weight of the line at its middle. Raises ValueError and TypeError for bad positions and weights.

    >>> stepwise({0: 1.0, 1000: 0.5}, every=250)
    {0: 0.9375, 250: 0.8125, 500: 0.6875, 750: 0.5625, 1000: 0.5}
    """
    every = whole_number("every", every, 1)
    curve = _curve(line)
    steps = {position: float(weight) for position, weight in curve.items()}
    for (begin, first), (end, last) in pairwise(curve.items()):
        for position in range(begin, end, every):
            middle = Fraction(position + min(position + every, end), 2)
            steps[position] = float(first + (last - first) * (middle - begin) / (end - begin))
    return dict(sorted(steps.items()))


def check_counts(quotas: Quotas, counts: Any, position: int | None = None) -> int:
    """Return the sum of *counts*; raise StateError unless they are those of a mixture by *quotas* at *position*."""
    number = len(quotas.weights)
    if not isinstance(counts, list) or len(counts) != number or any(type(count) is not int for count in counts):
        raise StateError(f"counts {shortened(counts)} are not those of {number} sources")
    step = sum(counts)
    if min(counts) < 0 or step != (step if position is None else position):
        raise StateError(f"counts {shortened(counts)} are not those of position {position}")
    most = 1 - Fraction(1, quotas.parts)
    if any(abs(quota - count) > most for quota, count in zip(quotas.at(step), counts)):
        raise StateError(f"counts {shortened(counts)} are not those of a mixture by these weights")
    return step


def check_until(until: Any) -> Until:
    """Return *until*; raise ValueError unless it defines the end of a mixture.

    It ends before the first source would begin again ("first"), when the last has been read once ("last"), or after
    that number of samples.
    """
    if until not in ("first", "last") and not (type(until) is int and until >= 0):
        raise ValueError(f'until= is "first", "last" or a number of samples, not {until!r}')
    return until


def _fractions(weights: Sequence[Any]) -> list[Fraction]:
    """Return *weights* as fractions, a float as the decimal it is written as."""
    try:
        values = [Fraction(str(weight)) for weight in weights]
    except (ValueError, ZeroDivisionError):
        raise ValueError(f"weights must be finite numbers, not {list(weights)}") from None
    if any(value < 0 for value in values):
        raise ValueError(f"weights must be positive or 0, and not all 0, not {list(weights)}")
    return values


def _curve(weight: Mapping[Any, Any]) -> dict[int, Fraction]:
    """The positions at which a weight changes, and its values there."""
    knots = [whole_number("a position of weights", knot, 0) for knot in weight]
    if 0 not in knots:
        raise ValueError(f"weights that change need one at position 0, not {shortened(weight)}")
    return dict(sorted(zip(knots, _fractions(list(weight.values())))))


def _weight(curve: dict[int, Fraction], position: int) -> Fraction:
    """The weight at *position*."""
    knots = list(curve)
    return curve[knots[bisect_right(knots, position) - 1]]


def _end(curve: dict[int, Fraction], stride: int) -> float:
    """The position from which the weight is 0."""
    knots = list(curve)
    if curve[knots[-1]]:
        return inf
    last = max(number for number, knot in enumerate(knots) if curve[knot])
    return -(-knots[last + 1] // stride)


def _phases(knots: list[Fraction], rows: list[list[Fraction]]) -> list[Phase]:
    """Return the phases over whole positions, where weights are those of *rows* from each of *knots* to the next."""
    shares = [[weight / total for weight in row] for row, total in zip(rows, map(sum, rows))]
    quotas = [[Fraction(0)] * len(rows[0])]  # at the knots
    for (before, after), row, share in zip(pairwise(knots), rows, shares):
        quotas.append(_rounded([q + part * (after - before) for q, part in zip(quotas[-1], share)], row))

    def at(position: int) -> list[Fraction]:
        number = bisect_right(knots, position) - 1
        return [q + part * (position - knots[number]) for q, part in zip(quotas[number], shares[number])]

    bounds = sorted({bound for knot in knots for bound in (floor(knot), ceil(knot))})
    phases = []
    for begin, end in zip_longest(bounds, bounds[1:]):
        first = at(begin)
        growth = shares[-1] if end is None else [(q - p) / (end - begin) for p, q in zip(first, at(end))]
        unit = lcm(*(fraction.denominator for fraction in (*first, *growth)))
        base, growing = ([q.numerator * (unit // q.denominator) for q in each] for each in (first, growth))
        phases.append(Phase(begin, inf if end is None else end, unit, base, growing))
    return phases


def _rounded(quotas: list[Fraction], weights: list[Fraction]) -> list[Fraction]:
    """Return *quotas* of the same sum with denominators that do not grow from knot to knot."""
    if lcm(*(quota.denominator for quota in quotas)).bit_length() <= FINE:
        return quotas
    moved = [i for i, weight in enumerate(weights) if weight]  # others may not fall behind what they had
    result = [Fraction(floor(q * (1 << FINE)), 1 << FINE) if i in moved else q for i, q in enumerate(quotas)]
    result[max(moved, key=weights.__getitem__)] += sum(quotas) - sum(result)
    return result
