"""Counts of the requests of this process to web servers and stores, over all its threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from threading import Lock
from time import perf_counter

from tarshards.parallel.forks import PerProcess


@dataclass(frozen=True)
class Traffic:
    """Requests sent, and retries among them; *bytes* of bodies received; blocks found in a cache; and the seconds for
    which readers waited for data.

    >>> Traffic(requests=3, bytes=10) - Traffic(requests=1)
    Traffic(requests=2, retries=0, bytes=10, cache_hits=0, waited=0.0)
    """

    requests: int = 0
    retries: int = 0
    bytes: int = 0
    cache_hits: int = 0
    waited: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.requests:,} requests ({self.retries:,} retries), {self.bytes / 1e6:,.1f} MB received, "
            f"{self.cache_hits:,} blocks from the cache"
        )

    def __add__(self, other: Traffic) -> Traffic:
        if other is _NONE:  # between two batches of local shards
            return self
        return Traffic(*(getattr(self, name) + getattr(other, name) for name in _NAMES))

    def __sub__(self, other: Traffic) -> Traffic:
        if other is self:
            return _NONE
        return Traffic(*(getattr(self, name) - getattr(other, name) for name in _NAMES))


_NAMES = [field.name for field in fields(Traffic)]
_counts: dict[str, float] = dict.fromkeys(_NAMES, 0)
_lock = PerProcess(Lock)
_latest = _NONE = Traffic()


def count(name: str, number: float = 1) -> None:
    """Add *number* to the field *name* of ``Traffic``."""
    with _lock():
        _counts[name] += number


def so_far() -> Traffic:
    """Return the counts since the process began; the same object until one changes."""
    global _latest
    with _lock():
        if _counts != vars(_latest):
            _latest = Traffic(**_counts)  # type: ignore[arg-type]
        return _latest


def received() -> float:
    """Return the bytes of bodies received since the process began."""
    return _counts["bytes"]


@contextmanager
def waiting() -> Iterator[None]:
    """Count the time that this thread waits for another one to fetch data."""
    begun = perf_counter()
    try:
        yield
    finally:
        count("waited", perf_counter() - begun)
