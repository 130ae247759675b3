"""One task, wherever it runs: its commands, their ends, and the markers that tell of them."""

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
from tarshards.run.jobs.plan import Item, Plan
from tarshards.storage.location import Location
from tarshards.storage.markers import Record, read_marker, write_marker

PERMANENT = 42  # the exit status of a command that will never succeed
FAILED = 1
GRACE = 5.0  # seconds between SIGTERM and SIGKILL
STDOUT = 1
INDEX_VARIABLES = ("JOB_COMPLETION_INDEX", "SLURM_ARRAY_TASK_ID")
TAIL = 4096  # bytes of a log in which its last line is looked for
LINE = 200  # characters of it that are kept


class Outcome(NamedTuple):
    """What became of an item: *status* is 0, that of its command, or 128 + the signal; None if it was stopped."""

    item: Item
    status: int | None
    line: str = ""

    @property
    def permanent(self) -> bool:
        """Whether it is no use to try again."""
        return self.status == PERMANENT


def is_done(plan: Plan, item: Item, record: Record | None) -> bool:
    """Say whether *record* is the done-marker of *item*; not where its output was a local file, and is no more."""
    if record is None or record.get("digest") != plan.digest(item):
        return False
    output = plan.output_of(item)
    return output is None or not Location.of(output).is_local or Location.of(output).exists()


class Worker:
    """Runs items of a plan; ``stop`` may be called from any thread."""

    def __init__(self, plan: Plan):
        self.plan = plan
        self.stopped = False

    def stop(self) -> None:
        """End the commands that run, and start no more."""
        self.stopped = True

    def run(self, item: Item, log: Any = None) -> Outcome:
        """Run the command of *item*, unless its marker says that it is done, and write the marker of what came out.

        What it prints is appended to the file *log*, or passed on to our stdout.
        """
        if is_done(self.plan, item, read_marker(self.plan.marker(item))):
            return Outcome(item, 0)
        begun = time.time()
        status, line = self._execute(self.plan.arguments(item), log)
        if status is None:
            return Outcome(item, None)
        output = self.plan.output_of(item)
        if status == 0 and output is not None and not Location.of(output).exists():
            status, line = FAILED, f"the command ended well, but there is no {Location.of(output).name}"
        record = {"digest": self.plan.digest(item), "item": list(item.values), "host": socket.gethostname()}
        if status == 0:
            seconds = round(time.time() - begun, 3)
            write_marker(self.plan.marker(item), {**record, "seconds": seconds})
        else:
            write_marker(self.plan.marker(item, "failed"), {**record, "status": status, "line": line})
        return Outcome(item, status, line)

    def _execute(self, arguments: list[str], log: Any) -> tuple[int | None, str]:
        """Run a command; return its status, None if it was stopped, and the last line of its output if it failed."""
        output = PIPE if log is None else log.fileno()
        try:
            group = ChildGroup(arguments, stdin=os.devnull, stdout=output, stderr=STDOUT)
        except (OSError, ValueError) as error:
            return 127, f"cannot run {arguments[0]}: {error}"
        copy = _Copy(os.fdopen(group.stdout, "rb")) if log is None else None
        try:
            while not (self.stopped or group.wait(TICK)):
                pass
            status = group.end(GRACE if self.stopped else 0)
        except BaseException:
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
    """A thread that passes a command's output on to our stdout, and keeps its end."""

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
        """Wait for what is still to come; a process outside the group that holds the pipe is not waited for."""
        self._thread.join(1)


def _tail(log: Any) -> bytes:
    size = os.fstat(log.fileno()).st_size
    return os.pread(log.fileno(), TAIL, max(0, size - TAIL))


def last_line(text: bytes) -> str:
    """Return the last line that is not blank.

    >>> last_line(b"one\\ntwo\\n\\n")
    'two'
    """
    lines = [line.strip() for line in text.decode(errors="replace").replace("\r", "\n").split("\n")]
    return next((line[:LINE] for line in reversed(lines) if line), "")


def run_task(url: str, *, index: int | None = None) -> int:
    """Run the task that the engine's environment names of the plan at *url*; return the exit code for the engine.

    It is 0 when all is done, 42 where all that failed will never succeed, and 1 where it is worth to try again.
    """
    location = Location.of(url)
    plan = Plan.loads(location.read().decode(), url=location.name)
    if index is None:
        index = _index()
    if not 0 <= index < len(plan.tasks):
        raise StateError(f"there is no task {index}: the plan has {len(plan.tasks)}", url=location.name)
    worker = Worker(plan)
    failed = [outcome for outcome in map(worker.run, plan.tasks[index]) if outcome.status != 0]
    for outcome in failed:
        print(f"tarjob: {' '.join(outcome.item.values)}: status {outcome.status}: {outcome.line}", file=sys.stderr)  # noqa: T201
    if not failed:
        return 0
    return PERMANENT if all(outcome.permanent for outcome in failed) else FAILED


def _index() -> int:
    found = [os.environ[name] for name in INDEX_VARIABLES if os.environ.get(name)]
    if not found:
        raise StateError(f"no task is named: neither {' nor '.join(INDEX_VARIABLES)} is set")
    return int(found[0])
