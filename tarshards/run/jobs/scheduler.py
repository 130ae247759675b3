"""The interface of Slurm and Kubernetes, and how jobs are submitted, queried, retried and cancelled with them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from importlib import import_module
from typing import Any, Protocol

from tarshards.errors import StateError
from tarshards.run.jobs.job_folder import JobFolder
from tarshards.run.jobs.job_options import Options
from tarshards.run.jobs.job_plan import Item, JobPlan
from tarshards.run.jobs.status import Show, Status, survey

SCHEDULERS = {"slurm": "Slurm", "kubernetes": "Kubernetes"}
ATTENDED = ("local", "ray")  # a process on this machine runs the job, or waits for its calls
PAUSE = 1.0  # seconds between two queries of a local job
WATCH = 5  # seconds between two queries of Slurm, or that one watch request of Kubernetes lasts


@dataclass
class Poll:
    """A scheduler's report on a job; *notes* are about tasks that ended without writing a marker.

    *done* and *failed* are numbers of items, or None if the scheduler does not know them.
    """

    running: int = 0
    ended: bool = True
    notes: list[str] = field(default_factory=list)
    done: set[int] | None = None
    failed: set[int] | None = None


class Scheduler(Protocol):
    """Slurm or Kubernetes."""

    def preview(self, plan: JobPlan) -> str:
        """Return the text that would be submitted."""
        ...

    def submit(self, plan: JobPlan, number: int) -> Iterator[dict[str, Any]]:
        """Submit *plan* as run *number* of the job; yield a record of each submitted part, with its tasks."""
        ...

    def poll(self, parts: list[dict[str, Any]]) -> Poll:
        """Return the state of these parts."""
        ...

    def wait(self, parts: list[dict[str, Any]]) -> None:
        """Wait until something may have changed."""
        ...

    def log(self, part: dict[str, Any], index: int) -> str:
        """Return the log of a part's task."""
        ...

    def cancel(self, parts: list[dict[str, Any]]) -> None:
        """End these parts."""
        ...


def make_scheduler(name: str, options: Options, folder: JobFolder) -> Scheduler:
    """Return the scheduler with this name; raise StateError for an unknown one."""
    if name not in SCHEDULERS:
        raise StateError(f"unknown scheduler {name!r}, known: {', '.join(SCHEDULERS)}")
    scheduler: Scheduler = getattr(import_module(f"tarshards.run.jobs.{name}"), SCHEDULERS[name])(options, folder)
    return scheduler


def submit(plan: JobPlan, folder: JobFolder, name: str, options: Options, *, again: bool = False) -> Status:
    """Submit the items of *plan* that are not done, permanently failed ones only with *again*; return the status.

    Raises StateError if the job still runs.
    """
    status = survey(plan)
    skipped = set() if again else status.permanent()
    rest = {item.number for item in plan.items} - status.done - skipped
    status.failed = {number: record for number, record in status.failed.items() if number in skipped}
    scheduler = make_scheduler(name, options, folder)
    try:
        before = folder.load()[1]
    except StateError:
        before = {}
    parts = before.get("parts", [])
    if parts and not scheduler.poll(parts).ended:
        raise StateError(f"{plan.name} is already running; `tarjob status {plan.name}` shows its progress")
    if rest:
        number = before.get("run", 0) + 1
        record = {"engine": name, "options": asdict(options), "run": number}
        folder.save(plan, **record, parts=[])
        parts = []
        for part in scheduler.submit(plan.only(rest), number):
            parts.append(part)
            folder.save(plan, **record, parts=parts)
        status.ended = False
    return status


def status_of(folder: JobFolder) -> tuple[JobPlan, Status, list[str]]:
    """Return the plan of a job, its status, and its scheduler's notes."""
    plan, record = folder.load()
    status = survey(plan)
    if record["engine"] in ATTENDED:
        status.ended = not folder.runs()
        return plan, status, []
    poll = make_scheduler(record["engine"], options_of(record), folder).poll(record["parts"])
    status.running, status.ended = poll.running, poll.ended
    return plan, status, poll.notes


def wait(folder: JobFolder, show: Show) -> tuple[JobPlan, Status, list[str]]:
    """Wait until the job has ended, showing its status as it changes."""
    plan, record = folder.load()
    status = survey(plan)
    if record["engine"] in ATTENDED:
        while folder.runs():
            time.sleep(PAUSE)
            status = survey(plan, status)
            status.ended = False
            show(status)
        return status_of(folder)
    scheduler = make_scheduler(record["engine"], options_of(record), folder)
    while True:
        poll = scheduler.poll(record["parts"])
        if poll.ended or poll.done is None:
            status = survey(plan, status)
        else:  # avoid reading remote markers repeatedly
            status.done |= poll.done
            fresh = plan.only((poll.failed or set()) - set(status.failed))
            status.failed.update(survey(fresh).failed)
        status.running, status.ended = poll.running, poll.ended
        show(status)
        if poll.ended:
            return plan, status, poll.notes
        scheduler.wait(record["parts"])


def log_of(folder: JobFolder, item: Item) -> str:
    """Return the log of the latest task with *item*."""
    _, record = folder.load()
    if record["engine"] in ATTENDED:
        try:
            with open(folder.log(item.number), encoding="utf-8", errors="replace") as file:
                return file.read()
        except FileNotFoundError:
            return ""
    scheduler = make_scheduler(record["engine"], options_of(record), folder)
    for part in record["parts"]:
        for index, numbers in enumerate(part["tasks"]):
            if item.number in numbers:
                return scheduler.log(part, index)
    return ""


def cancel(folder: JobFolder, *, patience: float = 10.0) -> bool:
    """End the running tasks of the job; return False if there were none."""
    _, record = folder.load()
    if record["engine"] in ATTENDED:
        running = folder.terminate()
        deadline = time.monotonic() + patience
        while running and folder.runs() and time.monotonic() < deadline:
            time.sleep(0.05)
        return running
    scheduler = make_scheduler(record["engine"], options_of(record), folder)
    running = not scheduler.poll(record["parts"]).ended
    scheduler.cancel(record["parts"])
    return running


def options_of(record: dict[str, Any]) -> Options:
    """Return the options in a record; raise StateError for one that this version does not have."""
    known = {each.name for each in fields(Options)}
    options: Any = {key: tuple(value) if isinstance(value, list) else value for key, value in record["options"].items()}
    for name in options.keys() - known:
        if options.pop(name):
            raise StateError(
                f"the job was submitted with --{name.replace('_', '-')}; submit it again with --patch FILE"
            )
    if operations := isinstance(options.get("patch"), tuple) and options.pop("patch"):
        raise StateError(
            f"the job was submitted with a JSON Patch of {len(operations)} operations; "
            "submit it again with --patch FILE, a merge patch"
        )
    return Options(**options)


def tasks_of(plan: JobPlan) -> list[list[int]]:
    """Return the numbers of the items of every task."""
    return [[item.number for item in task] for task in plan.tasks]
