"""The contents of shards: the number of samples, and for each field its number of samples and the sizes of its data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from tarshards.errors import visible


class FieldSizes:
    """The number of *samples* with a field, and the *bytes* of its data: in all, the *least* and the *most* per sample.

    *histogram* counts sizes by their powers of two: n bytes are in ``n.bit_length()``.
    """

    def __init__(self) -> None:
        self.samples: int = 0
        self.bytes: int = 0
        self.least: int = 0
        self.most: int = 0
        self.histogram: Counter[int] = Counter()

    @property
    def mean(self) -> str:
        """The mean size, with one decimal."""
        return f"{self.bytes / self.samples:.1f}"

    def add(self, size: int, samples: int = 1) -> None:
        """Count *samples* with this *size*."""
        self.least = min(self.least, size) if self.samples else size
        self.most = max(self.most, size)
        self.samples += samples
        self.bytes += size * samples
        self.histogram[size.bit_length()] += samples

    def extend(self, sizes: Iterable[int]) -> None:
        """Count a sample for each of *sizes*."""
        for size, samples in Counter(sizes).items():
            self.add(size, samples)

    def as_json(self) -> dict[str, int]:
        """Return the counts without the histogram."""
        return {name: value for name, value in vars(self).items() if name != "histogram"}


class Contents:
    """The number of *samples*, and the sizes of each of their *fields*."""

    def __init__(self) -> None:
        self.samples = 0
        self.fields: dict[str, FieldSizes] = {}

    def table(self, *columns: str) -> list[str]:
        """Return lines with a row for each field: its name, the numbers of samples with and without it, and *columns*.

        *columns* are attributes of FieldSizes.
        """
        rows = [("field", "samples", "missing", *columns)]
        for name, sizes in sorted(self.fields.items()):
            counts = sizes.samples, self.samples - sizes.samples, *(getattr(sizes, column) for column in columns)
            rows.append((visible(name), *map(str, counts)))
        return align(rows)


def align(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return *rows* as lines in which the first column is aligned left and the others right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))])
        for row in rows
    ]
