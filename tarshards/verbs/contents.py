"""The contents of shards: the number of samples, and for each field its number of samples and the sizes of its data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from tarshards.errors import visible


class FieldSizes:
    """The sizes of one field.

    ``samples`` is the number of samples with the field, ``bytes`` the total size of its data, ``least`` and ``most``
    the smallest and the largest size in a sample. ``histogram`` counts samples by ``size.bit_length()``.
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
        """Count *samples* samples whose field has *size* bytes."""
        self.least = min(self.least, size) if self.samples else size
        self.most = max(self.most, size)
        self.samples += samples
        self.bytes += size * samples
        self.histogram[size.bit_length()] += samples

    def extend(self, sizes: Iterable[int]) -> None:
        """Count one sample for each of *sizes*, in bytes."""
        for size, samples in Counter(sizes).items():
            self.add(size, samples)

    def as_json(self) -> dict[str, int]:
        """Return the counts by name, without the histogram."""
        return {name: value for name, value in vars(self).items() if name != "histogram"}


class Contents:
    """The number of ``samples``, and the sizes of each of their ``fields``."""

    def __init__(self) -> None:
        self.samples = 0
        self.fields: dict[str, FieldSizes] = {}

    def table(self, *columns: str) -> list[str]:
        """Return the lines of a table of the fields: name, samples with and without the field, and *columns*.

        *columns* are names of attributes of ``FieldSizes``.
        """
        rows = [("field", "samples", "missing", *columns)]
        for name, sizes in sorted(self.fields.items()):
            counts = sizes.samples, self.samples - sizes.samples, *(getattr(sizes, column) for column in columns)
            rows.append((visible(name), *map(str, counts)))
        return align(rows)


def align(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return *rows* as lines, with the first column aligned left and the others right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))])
        for row in rows
    ]
