"""Histograms of field sizes, classes and columns; each bar has a query that selects its samples."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import Any

import numpy as np

from tarshards.errors import TarshardsError
from tarshards.samples.codecs import decode_field
from tarshards.samples.codecs.basic import INTEGERS
from tarshards.view.queries import column_of, members_of
from tarshards.view.viewed_shards import ViewedShards

BARS = 24
SHARDS = 256  # shards whose indexes are read for sizes, evenly spaced if there are more
READ = 4_000  # samples whose classes are read, evenly spaced if there are more


def histogram(viewed: ViewedShards, of: str, numbers: np.ndarray | None = None) -> dict[str, Any]:
    """Return the bars of ``size:FIELD``, ``class:FIELD`` or ``column:NAME``, over *numbers* or all samples.

    Each bar has a *label*, a *count*, and the *query* that selects its samples. *samples* of *total* were examined.
    Raises ValueError for another *of*.
    """
    kind, _, name = of.partition(":")
    if kind == "size" and name:
        return _of_sizes(viewed, name)
    if kind == "class" and name:
        return _of_classes(viewed, name, numbers)
    if kind == "column" and name:
        values = column_of(viewed, name)
        chosen = values if numbers is None else values[numbers]
        return _of_values(chosen, name, len(values))
    raise ValueError(f"a histogram is of size:FIELD, class:FIELD or column:NAME, not {of!r}")


def _spaced(count: int, most: int) -> list[int]:
    return np.unique(np.linspace(0, max(count - 1, 0), min(count, most)).astype(np.int64)).tolist() if count else []


def _of_sizes(viewed: ViewedShards, field: str) -> dict[str, Any]:
    """Count the sizes of a field by powers of two, from the indexes alone."""
    viewed.extend(1)
    counts: Counter[int] = Counter()
    samples = 0
    for shard in _spaced(viewed.known_shards, SHARDS):
        if not viewed.count(shard):
            continue
        index = viewed.index(shard)
        samples += len(index)
        sizes = members_of(viewed, shard, index, field)[:, 3]
        counts.update(np.ceil(np.log2(sizes.astype(np.float64) + 1)).astype(int).tolist())
    bars = []
    for power, count in sorted(counts.items()):
        least, most = 1 << power >> 1, (1 << power) - 1
        bars.append({"label": f"{least}-{most} B", "count": count, "query": {"sizes": f"{field}:{least}-{most}"}})
    return {"bars": bars, "samples": samples, "total": viewed.total}


def _of_classes(viewed: ViewedShards, field: str, numbers: np.ndarray | None) -> dict[str, Any]:
    """Read up to READ samples, and count the values of a field in them."""
    total = viewed.total if numbers is None else len(numbers)
    counts: Counter[Any] = Counter()
    chosen = np.array(_spaced(total, READ), np.int64)
    for sample in viewed.read(chosen if numbers is None else numbers[chosen], [field]):
        value = None
        with suppress(TarshardsError):
            value = decode_field(field, sample[field]) if isinstance(sample, dict) and field in sample else None
        counts[value if isinstance(value, int | str) else None] += 1
    name = field if field.isidentifier() else f"fields[{field!r}]"
    bars = [
        {"label": str(value), "count": count, "query": {"where": f"{name} == {value!r}"} if value is not None else {}}
        for value, count in _most_common(counts)
    ]
    return {"bars": bars, "samples": len(chosen), "total": total, "values": len(counts)}


def _most_common(counts: Counter[Any]) -> list[tuple[Any, int]]:
    """Return the most common values with their counts, numbers in their order and others by their counts."""
    found = counts.most_common(BARS)
    numbers = [(value, count) for value, count in found if isinstance(value, int | float)]
    return sorted(numbers) + [each for each in found if each not in numbers]


def _of_values(values: np.ndarray, name: str, total: int) -> dict[str, Any]:
    about = {"samples": len(values), "total": total}
    if (values.dtype.kind in "biu" and len(np.unique(values)) > BARS) or values.dtype.kind == "f":
        finite = values[np.isfinite(values)]
        heights, edges = np.histogram(finite, BARS) if len(finite) else (np.zeros(0, int), np.zeros(1))
        bars = []
        for at, count in enumerate(heights.tolist()):
            low, high = float(edges[at]), float(edges[at + 1])
            compare = "<=" if at == len(heights) - 1 else "<"
            where = f"{name} >= {low!r} and {name} {compare} {high!r}"
            bars.append({"label": f"{low:.4g} to {high:.4g}", "count": count, "query": {"where": where}})
        return {"bars": bars, **about}
    counts = Counter(values.tolist())
    bars = [
        {"label": str(value), "count": count, "query": {"where": f"{name} == {value!r}"}}
        for value, count in _most_common(counts)
    ]
    return {"bars": bars, **about, "values": len(counts)}


def suggestions(fields: list[str], columns: list[str]) -> list[str]:
    """Return the histograms that samples with these fields and columns can have.

    >>> suggestions(["jpg", "cls"], ["width"])
    ['class:cls', 'column:width', 'size:jpg', 'size:cls']
    """
    classes = [f"class:{field}" for field in fields if field.rpartition(".")[2] in INTEGERS]
    return [*classes, *(f"column:{name}" for name in columns), *(f"size:{field}" for field in fields)]
