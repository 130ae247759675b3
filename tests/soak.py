"""The factor by which ``make soak`` multiplies property tests, kills and long schedules."""

import os
from collections.abc import Sequence
from typing import TypeVar

Case = TypeVar("Case")

SOAK = int(os.environ.get("TARSHARDS_SOAK", "1"))


def rounds(count: int) -> int:
    """Return how many of *count* random cases to run: a third, or in ``make soak`` SOAK times as many."""
    return SOAK * count if SOAK > 1 else -(-count // 3)


def some(cases: Sequence[Case], every: int) -> Sequence[Case]:
    """Return one of *every* so many cases, or in ``make soak`` all."""
    return cases if SOAK > 1 else cases[::every]
