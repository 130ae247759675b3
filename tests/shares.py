"""The law that holds for every prefix of a mixture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


def assert_shares(names: Iterable[str], weights: dict[str, float]) -> None:
    """At every prefix each dataset has had its share to within one."""
    counts, total = Counter(), sum(weights.values())
    for step, name in enumerate(names, 1):
        counts[name] += 1
        for other, weight in weights.items():
            assert abs(counts[other] - step * weight / total) < 1, (step, counts)
