"""When so many samples have failed that the rest is not worth running."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from threading import Lock
from typing import Literal

AT_LEAST = 3  # failures before a percentage means something


@dataclass
class Halt:
    """Halt when *fail* samples have failed, or *percent* of those finished (and at least 3).

    ``soon`` begins no more, ``now`` also kills those that run.

    >>> Halt.parse("now,fail=1")
    Halt(when='now', fail=1, percent=None)
    >>> Halt.parse("soon,fail=10%")
    Halt(when='soon', fail=None, percent=10.0)
    """

    when: Literal["now", "soon"]
    fail: int | None = None
    percent: float | None = None
    finished: int = field(default=0, repr=False)
    failed: int = field(default=0, repr=False)
    reached: bool = field(default=False, repr=False)
    _lock: Lock = field(default_factory=Lock, repr=False, compare=False)

    @classmethod
    def parse(cls, text: str) -> Halt:
        """Parse ``now|soon,fail=N|N%``; raise ValueError for anything else."""
        match = re.fullmatch(r"(now|soon),fail=([1-9]\d*|\d+(?:\.\d+)?(?=%))(%?)", text)
        if match is None:
            raise ValueError(f"{text!r} is no halting rule; write it like now,fail=1 or soon,fail=10%")
        when: Literal["now", "soon"] = "now" if match[1] == "now" else "soon"
        return cls(when, percent=float(match[2])) if match[3] else cls(when, fail=int(match[2]))

    def count(self, failed: bool) -> bool:
        """Count a finished sample; return True if this is the one to halt for."""
        with self._lock:
            self.finished += 1
            self.failed += failed
            before, self.reached = self.reached, self.reached or self._is_reached()
            return self.reached and not before

    def _is_reached(self) -> bool:
        if self.fail is not None and self.failed >= self.fail:
            return True
        return (
            self.percent is not None and self.failed >= AT_LEAST and 100 * self.failed >= self.percent * self.finished
        )
