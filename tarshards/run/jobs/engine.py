"""What every engine does, and how a plan is handed to one, asked for, tried again and cancelled."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from importlib import import_module
from typing import Any, Protocol

from tarshards.errors import StateError
from tarshards.run.jobs.folder import Folder
from tarshards.run.jobs.options import Options
from tarshards.run.jobs.plan import Item, Plan
from tarshards.run.jobs.status import Status, survey

ENGINES = {"slurm": "Slurm", "kubernetes": "Kubernetes"}
PAUSE = 1.0  # seconds between two looks at a local job
Show = Callable[[Status], object]


@dataclass
class Poll:
    """What an engine says of a job: how much runs, whether it has ended, and how tasks ended that no marker tells of.

    *done* and *failed* are the numbers of items, or None where only the markers know.
    """

    running: int = 0
    ended: bool = True
    notes: list[str] = field(default_factory=list)
    done: set[int] | None = None
    failed: set[int] | None = None


class Engine(Protocol):
    """Slurm or Kubernetes."""

    def preview(self, plan: Plan) -> str:
        """Return what would be submitted."""
        ...

    def submit(self, plan: Plan, number: int) -> Iterator[dict[str, Any]]:
        """Submit *plan* as the job's *number*-th run; yield a record of each part that is submitted, with its tasks."""
        ...

    def poll(self, parts: list[dict[str, Any]]) -> Poll:
        """Say how these parts are."""
        ...

    def wait(self, parts: list[dict[str, Any]]) -> None:
        """Return when something may have changed."""
        ...

    def log(self, part: dict[str, Any], index: int) -> str:
        """Return the log of a part's task."""
        ...

    def cancel(self, parts: list[dict[str, Any]]) -> None:
        """End these parts."""
        ...


def make_engine(name: str, options: Options, folder: Folder) -> Engine:
    """Return the engine of that name."""
    engine: Engine = getattr(import_module(f"tarshards.run.jobs.{name}"), ENGINES[name])(options, folder)
    return engine


def submit(plan: Plan, folder: Folder, name: str, options: Options, *, again: bool = False) -> Status:
    """Give what has no marker of *plan* to an engine; what failed for good only with *again*. Return the status.

    Raises StateError where the job still runs.
    """
    status = survey(plan)
    skipped = set() if again else status.permanent()
    rest = {item.number for item in plan.items} - status.done - skipped
    status.failed = {number: record for number, record in status.failed.items() if number in skipped}
    engine = make_engine(name, options, folder)
    try:
        before = folder.load()[1]
    except StateError:
        before = {}
    parts = before.get("parts", [])
    if parts and not engine.poll(parts).ended:
        raise StateError(f"{plan.name} is running already; tarjob status {plan.name} tells how far it is")
    if rest:
        number = before.get("run", 0) + 1
        record = {"engine": name, "options": asdict(options), "run": number}
        folder.save(plan, **record, parts=[])
        parts = []
        for part in engine.submit(plan.only(rest), number):
            parts.append(part)
            folder.save(plan, **record, parts=parts)
        status.ended = False
    return status


def status_of(folder: Folder) -> tuple[Plan, Status, list[str]]:
    """Return the plan of a job, its status, and what its engine says of tasks that no command ended."""
    plan, record = folder.load()
    status = survey(plan)
    if record["engine"] == "local":
        status.ended = not folder.runs()
        return plan, status, []
    poll = make_engine(record["engine"], options_of(record), folder).poll(record["parts"])
    status.running, status.ended = poll.running, poll.ended
    return plan, status, poll.notes


def wait(folder: Folder, show: Show) -> tuple[Plan, Status, list[str]]:
    """Wait until the job has ended, showing its status as it changes."""
    plan, record = folder.load()
    status = survey(plan)
    if record["engine"] == "local":
        while folder.runs():
            time.sleep(PAUSE)
            status = survey(plan, status)
            status.ended = False
            show(status)
        return status_of(folder)
    engine = make_engine(record["engine"], options_of(record), folder)
    while True:
        poll = engine.poll(record["parts"])
        if poll.ended or poll.done is None:
            status = survey(plan, status)
        else:  # markers far away are not read again and again
            status.done |= poll.done
            fresh = plan.only((poll.failed or set()) - set(status.failed))
            status.failed.update(survey(fresh).failed)
        status.running, status.ended = poll.running, poll.ended
        show(status)
        if poll.ended:
            return plan, status, poll.notes
        engine.wait(record["parts"])


def log_of(folder: Folder, item: Item) -> str:
    """Return the log of the task that *item* was last part of."""
    _, record = folder.load()
    if record["engine"] == "local":
        try:
            with open(folder.log(item.number), encoding="utf-8", errors="replace") as file:
                return file.read()
        except FileNotFoundError:
            return ""
    engine = make_engine(record["engine"], options_of(record), folder)
    for part in record["parts"]:
        for index, numbers in enumerate(part["tasks"]):
            if item.number in numbers:
                return engine.log(part, index)
    return ""


def cancel(folder: Folder, *, patience: float = 10.0) -> bool:
    """End what runs of the job; return False where nothing did."""
    _, record = folder.load()
    if record["engine"] == "local":
        running = folder.terminate()
        deadline = time.monotonic() + patience
        while running and folder.runs() and time.monotonic() < deadline:
            time.sleep(0.05)
        return running
    engine = make_engine(record["engine"], options_of(record), folder)
    running = not engine.poll(record["parts"]).ended
    engine.cancel(record["parts"])
    return running


def options_of(record: dict[str, Any]) -> Options:
    """Return the options that a record keeps."""
    options: Any = {key: tuple(value) if isinstance(value, list) else value for key, value in record["options"].items()}
    return Options(**options)


def tasks_of(plan: Plan) -> list[list[int]]:
    """Return the numbers of the items of every task."""
    return [[item.number for item in task] for task in plan.tasks]
