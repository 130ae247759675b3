"""Weights that change over an epoch: how many samples each source is due at every position, and which comes next."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from decimal import ROUND_HALF_EVEN, Context, Decimal
from fractions import Fraction
from functools import lru_cache
from heapq import heapify, heappop, heappush
from math import ceil, floor, inf, isqrt, lcm
from typing import Any, Literal, NamedTuple, get_args

from tarshards.epoch.proportions import fractions_of
from tarshards.errors import StateError, shortened, whole_number

Schedule = Literal["linear", "steps"]
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)

DIGITS = 50  # of a logarithm after the point, beyond those that its factor takes
FINE = 256  # bits of a quota at a knot, where it is not exact with fewer
WIDEST = 10**15  # ratio of two weights: with more, growth is lost among the digits
ENDLESS = 1 << 62  # positions; more than any epoch has


class Cell(NamedTuple):
    """Positions *begin* to *end* over which quotas grow evenly: that of source i is (base[i] + x growth[i]) / unit.

    *x* is counted from *begin*; all are whole numbers.
    """

    begin: int
    end: int
    unit: int
    base: list[int]
    growth: list[int]

    def at(self, position: int) -> list[Fraction]:
        """The quotas at a position of the cell."""
        x = position - self.begin
        return [Fraction(base + x * growth, self.unit) for base, growth in zip(self.base, self.growth)]


class _Ramp:
    """The quotas between two knots, over which weights go from *first* by *slope* a position; *before* are the quotas
    at the first of them, *begin*.

    The integral of (a + b x) / (c + d x) is b / d x + (a - b c / d) / d log(1 + d x / c). Whatever the logarithm is
    taken to be, the quotas add up to the position, for the factors of it add up to 0.
    """

    def __init__(
        self, begin: Fraction, first: list[Fraction], slope: list[Fraction], before: list[Fraction], cell: int
    ):
        self.begin, self.first, self.before, self.cell = begin, first, before, cell
        total, change = sum(first, Fraction(0)), sum(slope, Fraction(0))
        self.change = change / total
        if change:
            self.linear = [b / change for b in slope]
            self.further = [(a - b * total / change) / change for a, b in zip(first, slope)]
            self.digits = DIGITS + len(str(floor(max(map(abs, self.further)))))
        else:
            self.linear = [a / total for a in first]
            self.further = [b / total / 2 for b in slope]

    def at(self, position: int | Fraction) -> list[Fraction]:
        """The quotas at *position*."""
        x = position - self.begin
        further = _logarithm(1 + self.change * x, self.digits) if self.change else x * x
        return [q + a * x + b * further for q, a, b in zip(self.before, self.linear, self.further)]


class Quotas:
    """How many of the first n samples should have come from each source, by *weights* that change with n.

    A weight is a ``{position: weight}`` with a knot at 0, "linear" between the knots or in "steps", and constant after
    the last; or it is one number. At each position the weights count relative to their sum, so that the quotas of n are
    the integrals of these ratios from 0 to n, and add up to n. A worker that takes one of every *stride* positions has
    quotas of its own: n of its samples are n x *stride* positions.

    *sources* are those that ever have weight; *ends* says from which position on each has none any more.
    All are fractions, the same on every machine. Over a ``Cell`` quotas are taken to grow evenly, which differs from
    the integral by less than *error* samples; at the bounds of cells, by less than 1e-40.

    Raises ValueError for weights that are negative, not finite, or all 0 at some position, for positive ones that
    differ by a factor above 1e15, and for knots that do not begin at 0; TypeError for knots that are no whole numbers.

    >>> quotas = Quotas([{0: 1, 10: 0}, {0: 0, 10: 1}])
    >>> [float(quota) for quota in quotas.at(10)], [float(quota) for quota in quotas.at(30)]
    ([5.0, 5.0], [5.0, 25.0])
    """

    def __init__(self, weights: Sequence[Any], schedule: Schedule = "linear", *, stride: int = 1):
        self.weights, self.schedule, self.stride = list(weights), schedule, stride
        curves = [_curve(weight) for weight in weights]
        knots = sorted({knot for curve in curves for knot in curve})
        self.sources = [number for number, curve in enumerate(curves) if any(curve.values())]
        self.ends = {number: _end(curves[number], stride) for number in self.sources}
        self.parts = max(2 * len(self.sources) - 2, 1)
        self.error = Fraction(1, 2 * self.parts)
        rows = [[_weight(curve, knot, schedule) for curve in curves] for knot in knots]
        for knot, row in zip(knots, rows):
            if not any(row):
                raise ValueError(f"weights are all 0 at position {knot}, where some source has to come")
        positive = [value for curve in curves for value in curve.values() if value]
        if max(positive) > WIDEST * min(positive) or knots[-1] >= ENDLESS // 2:
            raise ValueError(f"weights have positions up to 2**61, and differ by 1e15 at most, not {list(weights)}")
        self._knots = [Fraction(knot, stride) for knot in knots]
        self._ramps: list[_Ramp] = []
        before = [Fraction(0)] * len(curves)
        for number, (begin, row) in enumerate(zip(self._knots, rows)):
            is_last = number + 1 == len(rows)
            length = Fraction(1) if is_last else self._knots[number + 1] - begin
            after = row if is_last or schedule == "steps" else rows[number + 1]
            slope = [(last - first) / length for first, last in zip(row, after)]
            ramp = _Ramp(begin, row, slope, before, self._even(row, after, slope))
            self._ramps.append(ramp)
            before = _rounded(ramp.at(begin + length), row, slope)
        self._make, self._bound = lru_cache(1 << 12)(self._cell), lru_cache(2)(self._quotas)

    def __reduce__(self) -> Any:
        return _restore, (self.weights, self.schedule, self.stride)

    def _even(self, first: list[Fraction], last: list[Fraction], slope: list[Fraction]) -> int:
        """How long a cell may be: a chord of length h is off by h * h / 8 of how fast a share changes, at most."""
        total, change = sum(first), sum(slope)
        fastest = max(abs(b * total - a * change) for a, b in zip(first, slope)) / min(total, sum(last)) ** 2
        return max(1, isqrt(floor(8 * self.error / fastest))) if fastest else ENDLESS

    def cell(self, position: int) -> Cell:
        """The cell that begins at or before *position*, and ends after it."""
        return self._make(*self._bounds(position))

    def _bounds(self, position: int) -> tuple[int, int]:
        number = bisect_right(self._knots, position) - 1
        ramp = self._ramps[number]
        if number + 1 == len(self._ramps):
            return ceil(ramp.begin), ENDLESS
        begin, end = ceil(ramp.begin), floor(self._knots[number + 1])
        if position >= end:
            return position, position + 1  # a knot is in it
        begin += (position - begin) // ramp.cell * ramp.cell
        return begin, min(begin + ramp.cell, end)

    def _cell(self, begin: int, end: int) -> Cell:
        first = self._bound(begin)
        if end == ENDLESS:
            growth = self._ramps[-1].linear
        else:
            growth = [(after - before) / (end - begin) for before, after in zip(first, self._bound(end))]
        unit = lcm(*(fraction.denominator for fraction in (*first, *growth)))
        scaled = ([q.numerator * (unit // q.denominator) for q in quotas] for quotas in (first, growth))
        return Cell(begin, end, unit, *scaled)

    def _quotas(self, position: int) -> list[Fraction]:
        return self._ramps[bisect_right(self._knots, position) - 1].at(position)

    def at(self, position: int) -> list[Fraction]:
        """The quotas of the first *position* samples."""
        return self.cell(position).at(position)

    def first(self, source: int, quota: int | Fraction, *, beyond: bool = False, after: int = -1) -> int | None:
        """The first position where *source* is due *quota* samples, or *beyond* that; None if it never is.

        At the position *after* it is not.
        """

        def is_due(position: int) -> bool:
            due = self.at(position)[source]
            return due > quota or (due == quota and not beyond)

        low, high = after, after + 2
        while not is_due(high):
            cell = self.cell(high)
            if cell.end == ENDLESS:
                missing, growth = quota * cell.unit - cell.base[source], cell.growth[source]
                return cell.begin + int(missing // growth + 1 if beyond else -(-missing // growth)) if growth else None
            low, high = high, after + 2 * (high - after)
        while low + 1 < high:
            middle = (low + high) // 2
            low, high = (low, middle) if is_due(middle) else (middle, high)
        return high


class ScheduledMixture(Iterator[int]):
    """The endless sequence of the numbers of sources by *quotas*: at every n, each has come its quota to within one.

    By Tijdeman's rule, as ``Mixture``: a source may come when it is behind its quota by 1 / (2 k - 2), k being their
    number, and of those that may, that one comes which would be 1 - 1 / (2 k - 2) behind first; of several, the first
    in an order by *seed*. *counts*, how often each source has come, is the whole state. Raises StateError for counts
    that are not of these quotas.

    >>> ScheduledMixture(Quotas([{0: 1, 10: 0}, {0: 0, 10: 1}]), seed=0).take(20)
    [0, 0, 1, 0, 0, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]
    """

    def __init__(self, quotas: Quotas, seed: int, counts: Sequence[int] | None = None):
        self.quotas, number = quotas, len(quotas.weights)
        self._counts = [0] * number if counts is None else list(counts)
        self._step = check_counts(quotas, self._counts)
        rng = random.Random(f"mixture/{seed}")
        order = sorted(range(number), key=lambda _: rng.random())
        self._sources = [source for source in order if source in quotas.sources]
        self._ready: list[tuple[float, int]] = []  # when each that may come is late, and which it is
        self._waiting: list[tuple[int, int]] = []  # when each of the others may come, if that is in this cell
        self._enter()

    @property
    def counts(self) -> list[int]:
        """How often each source has come."""
        return list(self._counts)

    def __next__(self) -> int:
        return self.take(1)[0]

    def _enter(self) -> None:
        """Begin the cell at the present step."""
        self._cell = cell = self.quotas.cell(self._step)
        parts = self.quotas.parts
        self._period, self._slack = parts * cell.unit, max(parts - 2, 0) * cell.unit
        # As in Mixture, due / divisor is when a source may come again, and (due + slack) / divisor when it is late.
        self._divisor = [parts * cell.growth[source] for source in self._sources]
        self._due = [
            self._period * self._counts[source] + cell.unit - parts * cell.base[source] for source in self._sources
        ]
        is_ready = {i for _, i in self._ready}
        self._waiting = []
        length = cell.end - cell.begin
        for i, (due, divisor) in enumerate(zip(self._due, self._divisor)):
            if i not in is_ready and due <= divisor * length:
                self._waiting.append((-(-due // divisor) if divisor else 0, i))
        heapify(self._waiting)

    def _late(self, i: int) -> float:
        """The last position at which source i may come, where it may still come at the end of this cell."""
        source = self._sources[i]
        last = self._counts[source] + 1 - Fraction(1, self.quotas.parts)
        if self._cell.end == ENDLESS:
            return inf
        cell = self.quotas.cell(self._cell.end)
        left, growth = last * cell.unit - cell.base[source], cell.growth[source]
        if (cell.end - cell.begin) * growth > left:
            return cell.begin + int(left // growth)
        late = inf if cell.end == ENDLESS else self.quotas.first(source, last, beyond=True, after=cell.end)
        return inf if late is None else late - 1

    def take(self, count: int) -> list[int]:
        """The next *count* choices."""
        chosen: list[int] = []
        while len(chosen) < count:
            if self._step == self._cell.end:
                self._enter()
            self._take(min(count - len(chosen), self._cell.end - self._step), chosen)
        return chosen

    def _take(self, count: int, chosen: list[int]) -> None:
        """Append the next *count* choices, which are in this cell."""
        ready, waiting, due, divisor = self._ready, self._waiting, self._due, self._divisor
        period, slack, counts, sources = self._period, self._slack, self._counts, self._sources
        begin, length = self._cell.begin, self._cell.end - self._cell.begin
        for x in range(self._step - begin + 1, self._step - begin + count + 1):
            while waiting and waiting[0][0] <= x:
                i = heappop(waiting)[1]
                late = (due[i] + slack) // divisor[i] if divisor[i] else length
                heappush(ready, (begin + late if late < length else self._late(i), i))
            i = heappop(ready)[1]  # there is one: the sources are behind by 1 in sum
            counts[sources[i]] += 1
            chosen.append(sources[i])
            due[i] = numerator = due[i] + period
            if numerator <= divisor[i] * length:
                heappush(waiting, (-(-numerator // divisor[i]), i))
        self._step += count


def check_counts(quotas: Quotas, counts: Any, position: int | None = None) -> int:
    """Return the sum of *counts*; raise StateError unless they are those of a mixture by *quotas* at *position*."""
    number = len(quotas.weights)
    if not isinstance(counts, list) or len(counts) != number or any(type(count) is not int for count in counts):
        raise StateError(f"counts {shortened(counts)} are not of {number} sources")
    step = sum(counts)
    if min(counts) < 0 or step >= ENDLESS or step != (step if position is None else position):
        raise StateError(f"counts {shortened(counts)} are not of position {position}")
    most = 1 - Fraction(1, quotas.parts)
    if any(abs(quota - count) > most for quota, count in zip(quotas.at(step), counts)):
        raise StateError(f"counts {shortened(counts)} are not of a mixture by these weights")
    return step


def check_schedule(schedule: Any) -> Schedule:
    """Return *schedule*; raise ValueError if there is no such schedule."""
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule= must be one of {', '.join(SCHEDULES)}, not {shortened(schedule)}")
    return schedule


def _curve(weight: Any) -> dict[int, Fraction]:
    """The knots of a weight."""
    curve = dict(weight) if isinstance(weight, Mapping) else {0: weight}
    knots = [whole_number("a position of weights", knot, 0) for knot in curve]
    if 0 not in knots:
        raise ValueError(f"weights that change need one at position 0, not {shortened(weight)}")
    values = fractions_of([*curve.values(), 1])  # which may be all 0
    return dict(sorted(zip(knots, values)))


def _weight(curve: dict[int, Fraction], position: int, schedule: Schedule) -> Fraction:
    """The weight at *position*."""
    knots = list(curve)
    number = bisect_right(knots, position)
    before = knots[number - 1]
    if schedule == "steps" or number == len(knots):
        return curve[before]
    part = Fraction(position - before, knots[number] - before)
    return curve[before] + part * (curve[knots[number]] - curve[before])


def _end(curve: dict[int, Fraction], stride: int) -> float:
    """The first position from which on the weight is 0."""
    knots = list(curve)
    if curve[knots[-1]]:
        return inf
    last = max(number for number, knot in enumerate(knots) if curve[knot])
    return -(-knots[last + 1] // stride)


def _rounded(quotas: list[Fraction], weights: list[Fraction], slope: list[Fraction]) -> list[Fraction]:
    """Return *quotas* of the same sum with denominators that do not grow from knot to knot."""
    if lcm(*(quota.denominator for quota in quotas)).bit_length() <= FINE:
        return quotas
    moved = [i for i, pair in enumerate(zip(weights, slope)) if any(pair)]  # others may not fall behind what they had
    result = [Fraction(floor(q * (1 << FINE)), 1 << FINE) if i in moved else q for i, q in enumerate(quotas)]
    result[max(moved, key=lambda i: 2 * weights[i] + slope[i])] += sum(quotas) - sum(result)
    return result


def _logarithm(number: Fraction, digits: int) -> Fraction:
    """The natural logarithm to *digits* after the point, the same on every machine."""
    context = Context(prec=digits + 5, rounding=ROUND_HALF_EVEN, traps=[])
    quotient = context.divide(Decimal(number.numerator), Decimal(number.denominator))
    return Fraction(round(context.ln(quotient).scaleb(digits, context)), 10**digits)


def _restore(weights: list[Any], schedule: Schedule, stride: int) -> Quotas:
    return Quotas(weights, schedule, stride=stride)
