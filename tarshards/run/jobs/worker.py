"""Runs one task, on any machine: its commands one after the other, and a marker for each result."""

from __future__ import annotations

import os
import socket
import sys
import time
from contextlib import suppress
from threading import Thread
from typing import Any, NamedTuple

from tarshards.errors import StateError
from tarshards.parallel import PIPE, TICK, ChildGroup, ending
from tarshards.run.jobs.job_plan import Item, JobPlan
from tarshards.storage.local import defer_signals
from tarshards.storage.location import Location
from tarshards.storage.markers import Record, read_marker, write_marker

PERMANENT = 42  # the exit status of a command that will never succeed
FAILED = 1
GRACE = 5.0  # seconds between SIGTERM and SIGKILL
STDOUT = 1
INDEX_VARIABLES = ("JOB_COMPLETION_INDEX", "SLURM_ARRAY_TASK_ID")
TAIL = 4096  # bytes of a log that are searched for its last line
LINE = 200  # characters of that line that are kept


class ItemResult(NamedTuple):
    """The result of an item: *status* is that of its command, or 128 + the signal; None if it was stopped."""

    item: Item
    status: int | None
    line: str = ""

    @property
    def permanent(self) -> bool:
        """Whether the item must not be tried again."""
        return self.status == PERMANENT


def is_done(plan: JobPlan, item: Item, record: Record | None) -> bool:
    """Whether *record* is the done-marker of *item*, and its output, if that is a local file, still exists."""
    if record is None or record.get("digest") != plan.digest(item):
        return False
    output = plan.output_of(item)
    return output is None or not Location.of(output).is_local or Location.of(output).exists()


class Worker:
    """Runs items of a plan; ``stop`` may be called from any thread."""

    def __init__(self, plan: JobPlan):
        self.plan = plan
        self.stopped = False

    def stop(self) -> None:
        """End the commands that run, and start no more."""
        self.stopped = True

    def run(self, item: Item, log: Any = None) -> ItemResult:
        """Run the command of *item*, unless a marker says that it is done, and write a marker.

        Its output is appended to the file *log*, or copied to our stdout.
        """
        if is_done(self.plan, item, read_marker(self.plan.marker(item))):
            return ItemResult(item, 0)
        begun = time.time()
        status, line = self._execute(self.plan.arguments(item), log)
        if status is None:
            return ItemResult(item, None)
        output = self.plan.output_of(item)
        if status == 0 and output is not None and not Location.of(output).exists():
            status, line = FAILED, f"the command succeeded, but did not write {Location.of(output).name}"
        record = {"digest": self.plan.digest(item), "item": list(item.values), "host": socket.gethostname()}
        if status == 0:
            seconds = round(time.time() - begun, 3)
            write_marker(self.plan.marker(item), {**record, "seconds": seconds})
        else:
            write_marker(self.plan.marker(item, "failed"), {**record, "status": status, "line": line})
        return ItemResult(item, status, line)

    def _execute(self, arguments: list[str], log: Any) -> tuple[int | None, str]:
        """Run a command; return its status, None if it was stopped, and the last line of its output if it failed."""
        output = PIPE if log is None else log.fileno()
        group: ChildGroup | None = None
        try:
            try:
                with defer_signals():
                    group = ChildGroup(arguments, stdin=os.devnull, stdout=output, stderr=STDOUT)
            except (OSError, ValueError) as error:
                return 127, f"cannot run {arguments[0]}: {error}"
            copy = _Copy(os.fdopen(group.stdout, "rb")) if log is None else None
            while not (self.stopped or group.wait(TICK)):
                pass
            status = group.end(GRACE if self.stopped else 0)
        except BaseException:
            if group is not None:
                group.end(GRACE)
            raise
        if copy is not None:
            copy.finish()
        if self.stopped:
            return None, ""
        if status == 0:
            return 0, ""
        line = last_line(_tail(log) if copy is None else copy.kept)
        return (status if status > 0 else 128 - status), line or ending(status)


class _Copy:
    """A thread that copies a command's output to our stdout and keeps its end."""

    def __init__(self, stream: Any):
        self.kept = b""
        self._stream = stream
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with self._stream, suppress(OSError):
            while data := self._stream.read1(1 << 16):
                self.kept = (self.kept + data)[-TAIL:]
                sys.stdout.buffer.write(data)
                sys.stdout.buffer.flush()

    def finish(self) -> None:
        """Wait for the rest of the output, but not for a process outside the group that keeps the pipe open."""
        self._thread.join(1)


def _tail(log: Any) -> bytes:
    size = os.fstat(log.fileno()).st_size
    return os.pread(log.fileno(), TAIL, max(0, size - TAIL))


def last_line(text: bytes) -> str:
    """Return the last non-blank line.

    >>> last_line(b"one\\ntwo\\n\\n")
    'two'
    """
    lines = [line.strip() for line in text.decode(errors="replace").replace("\r", "\n").split("\n")]
    return next((line[:LINE] for line in reversed(lines) if line), "")


def run_task(url: str, *, index: int | None = None) -> int:
    """Run a task of the plan at *url*, by default the one in the scheduler's environment; return the exit code.

    The code is 0 if all items are done, 42 if all failures are for good, and 1 if another try may help.
    """
    location = Location.of(url)
    plan = JobPlan.loads(location.read().decode(), url=location.name)
    if index is None:
        index = _index()
    if not 0 <= index < len(plan.tasks):
        raise StateError(f"no task {index}: the plan has {len(plan.tasks)} tasks", url=location.name)
    worker = Worker(plan)
    failed = [result for result in map(worker.run, plan.tasks[index]) if result.status != 0]
    for result in failed:
        print(f"tarjob: {' '.join(result.item.values)}: status {result.status}: {result.line}", file=sys.stderr)  # noqa: T201
    if not failed:
        return 0
    return PERMANENT if all(result.permanent for result in failed) else FAILED


def _index() -> int:
    found = [os.environ[name] for name in INDEX_VARIABLES if os.environ.get(name)]
    if not found:
        raise StateError(f"no task given: neither {' nor '.join(INDEX_VARIABLES)} is set; use --index")
    return int(found[0])
