"""The progress of a job, read from its markers: counts, and failures with their last log line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tarshards.errors import visible
from tarshards.run.jobs.job_plan import Item, JobPlan
from tarshards.run.jobs.worker import PERMANENT
from tarshards.storage.location import look_up
from tarshards.storage.markers import Marker, Provenance

SHOWN = 20  # failures in a table
ON_TERMINAL: Any = {"mininterval": 0.2}
IN_LOG: Any = {  # a line every 30 seconds, and none at the start
    "mininterval": 30,
    "delay": 0.001,
    "bar_format": "{n_fmt}/{total_fmt} done [{elapsed}<{remaining}, {rate_fmt}{postfix}]\n",
}


@dataclass
class Status:
    """The items of a job that are done or have failed; *running* comes from the scheduler.

    *unsure* are items that are done according to a marker of an earlier release, without their code and inputs.
    """

    total: int
    done: set[int] = field(default_factory=set)
    failed: dict[int, dict[str, Any]] = field(default_factory=dict)
    running: int = 0
    ended: bool = True
    unsure: int = 0

    @property
    def complete(self) -> bool:
        """Whether every item is done."""
        return len(self.done) == self.total

    def kept(self) -> str:
        """A line that says how many items an earlier run has done, empty if none."""
        note = f", {self.unsure} by an earlier release, which did not record code and inputs" if self.unsure else ""
        return f"{len(self.done)} of {self.total} items kept from an earlier run{note}" if self.done else ""

    def permanent(self) -> set[int]:
        """The items that failed permanently, with status 42."""
        return {number for number, record in self.failed.items() if record.get("status") == PERMANENT}


Show = Callable[[Status], object]


def survey(plan: JobPlan, known: Status | None = None) -> Status:
    """Read the markers of *plan*, except for items that are done according to *known*."""
    status = Status(len(plan.items), done=set(known.done if known else ()))
    open_items = [item for item in plan.items if item.number not in status.done]
    for item, record in _records(plan, open_items, "done"):
        if plan.is_done(item, record):
            status.done.add(item.number)
            status.unsure += "inputs" not in (record or {})
    open_items = [item for item in open_items if item.number not in status.done]
    for item, record in _records(plan, open_items, "failed"):
        if record is not None and Provenance(plan.digest(item)).is_of(record):
            status.failed[item.number] = record
    return status


def _records(plan: JobPlan, items: list[Item], kind: str) -> Iterator[tuple[Item, dict[str, Any] | None]]:
    return zip(items, look_up(lambda location: Marker(location).read(), [plan.marker(item, kind) for item in items]))


def table(plan: JobPlan, status: Status) -> str:
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
    return "\n".join(rows + failures(plan, status))


def failures(plan: JobPlan, status: Status) -> list[str]:
    """Return a line per failure, for the first of them."""
    items = {item.number: item for item in plan.items}
    lines = [_failure(items[number], record) for number, record in sorted(status.failed.items())[:SHOWN]]
    if len(status.failed) > SHOWN:
        lines.append(f"  and {len(status.failed) - SHOWN} more")
    return lines


def _failure(item: Item, record: dict[str, Any]) -> str:
    what = "permanent" if record.get("status") == PERMANENT else f"status {record.get('status')}"
    return visible(f"  {item.number} {' '.join(item.names)}: {what}: {record.get('line', '')}")


class Display:
    """Shows a status as it changes: a bar on a terminal, else a line every 30 seconds; and each failure."""

    def __init__(self, plan: JobPlan, status: Status, *, quiet: bool = False):
        from tqdm import tqdm

        self._items = {item.number: item for item in plan.items}
        self._told = set(status.failed)
        self._is_terminal = sys.stderr.isatty() and not quiet
        self._bar = tqdm(
            total=status.total,
            initial=len(status.done),
            unit=" items",
            smoothing=0,
            miniters=0,
            leave=False,
            disable=quiet,
            **(ON_TERMINAL if self._is_terminal else IN_LOG),
        )

    def update(self, status: Status) -> None:
        """Show *status* if it is time to; on a terminal failures at once."""
        self._bar.set_postfix_str(f"{status.running} running, {len(status.failed)} failed", refresh=False)
        write: Any = self._bar.write if self._is_terminal else print  # the former keeps the bar below
        if self._bar.update(len(status.done) - self._bar.n) or self._is_terminal:
            for number in sorted(set(status.failed) - self._told):
                self._told.add(number)
                write(_failure(self._items[number], status.failed[number]), file=sys.stderr)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()
