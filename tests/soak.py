"""The factor by which ``make soak`` multiplies property tests, kills and long schedules."""

import os

SOAK = int(os.environ.get("TARSHARDS_SOAK", "1"))


def rounds(count: int) -> int:
    """Return how many of *count* random cases to run: a third, or in ``make soak`` SOAK times as many."""
    return SOAK * count if SOAK > 1 else -(-count // 3)
