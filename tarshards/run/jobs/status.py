"""The progress of a job, read from its markers: counts, rate, time left, and failures with their last log line."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tarshards.errors import visible
from tarshards.run.jobs.job_plan import Item, JobPlan
from tarshards.run.jobs.worker import PERMANENT
from tarshards.storage.location import look_up
from tarshards.storage.markers import Record, is_made, is_of, read_marker

SHOWN = 20  # failures in a table


@dataclass
class Status:
    """Which items of a job are done and which have failed; *running* comes from the scheduler."""

    total: int
    done: set[int] = field(default_factory=set)
    failed: dict[int, Record] = field(default_factory=dict)
    running: int = 0
    ended: bool = True

    @property
    def complete(self) -> bool:
        """Whether every item is done."""
        return len(self.done) == self.total

    def permanent(self) -> set[int]:
        """The items that failed for good, with status 42."""
        return {number for number, record in self.failed.items() if record.get("status") == PERMANENT}


Show = Callable[[Status], object]


def survey(plan: JobPlan, known: Status | None = None) -> Status:
    """Read the markers of *plan*, except for items that are done according to *known*."""
    status = Status(len(plan.items), done=set(known.done if known else ()))
    open_items = [item for item in plan.items if item.number not in status.done]
    for item, record in _records(plan, open_items, "done"):
        if is_made(record, plan.digest(item), plan.local_output(item)):
            status.done.add(item.number)
    open_items = [item for item in open_items if item.number not in status.done]
    for item, record in _records(plan, open_items, "failed"):
        if record is not None and is_of(record, plan.digest(item)):
            status.failed[item.number] = record
    return status


def _records(plan: JobPlan, items: list[Item], kind: str) -> Iterator[tuple[Item, Record | None]]:
    return zip(items, look_up(read_marker, [plan.marker(item, kind) for item in items]))


class Clock:
    """Rate and time left, from the items done since the clock was started."""

    def __init__(self, done: int = 0, now: float | None = None):
        self.begun = time.monotonic() if now is None else now
        self.before = done

    def line(self, status: Status, now: float | None = None) -> str:
        """Return the rate and the time left as text, empty while they are unknown.

        >>> Clock(0, now=0.0).line(Status(10, done={1, 2}), now=4.0)
        '0.5/s, 0:00:16 left'
        """
        elapsed = (time.monotonic() if now is None else now) - self.begun
        fresh = len(status.done) - self.before
        if fresh < 1 or elapsed <= 0:
            return ""
        rate = fresh / elapsed
        left = int((status.total - len(status.done) - len(status.failed)) / rate)
        return f"{rate:.3g}/s, {left // 3600}:{left // 60 % 60:02d}:{left % 60:02d} left"


def one_line(status: Status, clock: Clock) -> str:
    """Return the counts in one line."""
    parts = [f"{len(status.done)}/{status.total} done", f"{status.running} running", f"{len(status.failed)} failed"]
    return ", ".join([*parts, *filter(None, [clock.line(status)])])


def table(plan: JobPlan, status: Status, clock: Clock | None = None) -> str:
    """Return the counts, and the failures with their last log line."""
    rest = status.total - len(status.done) - len(status.failed) - status.running
    rows = [
        f"job      {plan.name}",
        f"items    {status.total}",
        f"done     {len(status.done)}",
        f"running  {status.running}",
        f"failed   {len(status.failed)}",
        f"{'not run' if status.ended and rest > 0 else 'waiting':8} {max(rest, 0)}",
    ]
    if clock is not None and (line := clock.line(status)):
        rows.append(f"rate     {line}")
    return "\n".join(rows + failures(plan, status))


def failures(plan: JobPlan, status: Status) -> list[str]:
    """Return a line per failure, for the first of them."""
    items = {item.number: item for item in plan.items}
    lines = [_failure(items[number], record) for number, record in sorted(status.failed.items())[:SHOWN]]
    if len(status.failed) > SHOWN:
        lines.append(f"  and {len(status.failed) - SHOWN} more")
    return lines


def _failure(item: Item, record: Record) -> str:
    what = "permanent" if record.get("status") == PERMANENT else f"status {record.get('status')}"
    return visible(f"  {item.number} {' '.join(item.values)}: {what}: {record.get('line', '')}")


class Display:
    """Shows a status as it changes, and each failure: the counts in place on a terminal, else every *every* seconds."""

    def __init__(self, plan: JobPlan, status: Status, *, quiet: bool = False, every: float = 30.0):
        self.clock, self.quiet, self.every = Clock(len(status.done)), quiet, every
        self._items = {item.number: item for item in plan.items}
        self._told = set(status.failed)
        self._shown = time.monotonic()
        self._terminal = sys.stderr.isatty()

    def update(self, status: Status) -> None:
        """Show *status* if it is time to."""
        now = time.monotonic()
        fresh = sorted(set(status.failed) - self._told)
        pause = self.every if not self._terminal else 0 if fresh else 0.2
        if self.quiet or now - self._shown < pause:
            return
        self._shown = now
        self._told.update(fresh)
        for number in fresh:
            self._write(_failure(self._items[number], status.failed[number]) + "\n")
        self._write(one_line(status, self.clock) + "\n" * (not self._terminal))

    def _write(self, text: str) -> None:
        sys.stderr.write(f"\r\x1b[K{text}" if self._terminal else text)
        sys.stderr.flush()

    def close(self) -> None:
        """Clear the line."""
        if self._terminal and not self.quiet:
            sys.stderr.write("\r\x1b[K")

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
