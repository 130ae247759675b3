"""Runs one task, on any machine: runs its commands one after the other, and writes a marker for each result."""

from __future__ import annotations

import os
import socket
import sys
import time
from contextlib import suppress
from subprocess import PIPE
from threading import Thread
from typing import Any, NamedTuple

from tarshards.errors import StateError, visible
from tarshards.parallel.children import ChildGroup
from tarshards.parallel.signals import TICK, defer_signals
from tarshards.run.guard import OwnProcesses
from tarshards.run.jobs.attempt import Attempt
from tarshards.run.jobs.job_plan import Item, JobPlan
from tarshards.storage.location import Location
from tarshards.storage.markers import Marker

PERMANENT = 42  # the exit status of a command that will never succeed
FAILED = 1
GRACE = 5.0  # seconds between SIGTERM and SIGKILL
SCHEDULER_GRACE = 25.0  # the same under Kubernetes and Slurm, which send SIGKILL 30 seconds after SIGTERM by default
STDOUT = 1
INDEX_VARIABLES = ("JOB_COMPLETION_INDEX", "SLURM_ARRAY_TASK_ID")
TAIL = 4096  # bytes at the end of a log in which its last line is searched
LINE = 200  # most characters of that line to keep


class ItemResult(NamedTuple):
    """The result of an item: *status* is that of its command, or 128 + the signal; None if it was stopped."""

    item: Item
    status: int | None
    line: str = ""

    @property
    def permanent(self) -> bool:
        """Whether the item must not be retried."""
        return self.status == PERMANENT


class Worker:
    """Runs items of a plan in a with-block; ``stop`` may be called from any thread.

    *run* is the same for all tries of one run of the job. Commands and their descendants have the environment variable
    ``TARJOB_RUN``, which begins with *owner*; a guard ends them if this process is killed. A stopped command has
    *grace* seconds to exit.
    """

    def __init__(self, plan: JobPlan, *, run: str, owner: str, grace: float = GRACE):
        self.plan = plan
        self.run_name = run
        self.grace = grace
        self.stopped: bool = False
        value = f"{owner}/{os.getpid()}-{time.time_ns()}"
        self._processes, self._environment = OwnProcesses(f"TARJOB_RUN={value}"), {**os.environ, "TARJOB_RUN": value}

    def __enter__(self) -> Worker:
        self._processes.guard()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None or self.stopped:
            self._processes.end()
        self._processes.release()

    def stop(self) -> None:
        """End the running commands, and start no more."""
        self.stopped = True

    def run(self, item: Item, log: Any = None) -> ItemResult:
        """Run the command of *item*, unless a marker says that it is done, and write a marker.

        Its output is appended to the file *log*, or copied to our stdout. If the item fails again, the record of its
        first failure in this run is kept, unless the item must not be retried.
        """
        plan = self.plan
        with Attempt(plan, item) as attempt:
            if not attempt.lock(lambda: self.stopped):
                return ItemResult(item, None)
            marker, failure = Marker(plan.marker(item)), Marker(plan.marker(item, "failed"))
            done = marker.read()
            if plan.is_done(item, done):
                attempt.end()  # its record was left by a killed worker
                return ItemResult(item, 0)
            earlier = failure.read()
            record: dict[str, Any] = {"digest": plan.digest(item), "item": item.names, "host": socket.gethostname()}
            attempt.begin(record, earlier, done)
            if done:  # of other code or inputs: it must not become valid again
                marker.remove()
            begun, inputs = time.time(), plan.inputs_of(item)
            status, line = self._execute(item, log, attempt.descriptor)
            if status is None:
                return ItemResult(item, None)
            output = plan.output_of(item)
            if status == 0 and output is not None and not Location.of(output).exists():
                status, line = FAILED, f"the command succeeded, but did not write {Location.of(output).name}"
            if status == 0:
                after = plan.inputs_of(item)
                record["inputs"] = {name: version for name, version in inputs.items() if after.get(name) == version}
                record |= {"code": plan.code} if plan.code else {}
                record |= {"absent": attempt.absent} if attempt.absent else {}
                marker.write({**record, "seconds": round(time.time() - begun, 3)})
                if earlier is not None:
                    failure.remove()
            else:
                same = {"digest": record["digest"], "run": self.run_name}
                if earlier is not None and same.items() <= earlier.items() and status != PERMANENT:
                    status, line = earlier["status"], earlier["line"]
                failed = {**record, "run": self.run_name, "status": status, "line": line, "absent": attempt.absent}
                failure.write(failed)
            attempt.end()
            return ItemResult(item, status, line)

    def _execute(self, item: Item, log: Any, held: int | None) -> tuple[int | None, str]:
        """Run a command; return its status, None if it was stopped, and the last line of its output if it failed."""
        arguments = self.plan.arguments(item)
        output, start = (PIPE, 0) if log is None else (log.fileno(), os.fstat(log.fileno()).st_size)
        group: ChildGroup | None = None
        try:
            try:
                with defer_signals():
                    group = ChildGroup(
                        arguments, self._environment, stdin=os.devnull, stdout=output, stderr=STDOUT, held=held
                    )
            except (OSError, ValueError) as error:
                return 127, f"cannot run {arguments[0]}: {error}"
            copy = _Copy(os.fdopen(group.stdout, "rb")) if log is None else None
            while not (self.stopped or group.wait(TICK)):
                pass
            status = group.end(self.grace if self.stopped else 0)
        except BaseException:
            if group is not None:
                group.end(self.grace)
            raise
        if copy is not None:
            copy.finish()
        if self.stopped:
            return None, ""
        if status == 0:
            return 0, ""
        line = last_line(_tail(log, start) if copy is None else copy.kept, item)
        return (status if status > 0 else 128 - status), line or group.how_it_ended


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
        """Wait for the rest of the output, but not for processes outside the group that keep the pipe open."""
        self._thread.join(1)


def _tail(log: Any, start: int) -> bytes:
    """Return the end of *log*, without its first *start* bytes."""
    size = os.fstat(log.fileno()).st_size
    return os.pread(log.fileno(), TAIL, max(start, size - TAIL))


def last_line(text: bytes, item: Item) -> str:
    """Return the last non-blank line, without credentials.

    >>> last_line(b"one\\ntwo\\n\\n", Item(0, ("a",)))
    'two'
    """
    shown = item.redacted(text.decode(errors="replace"))
    lines = [line.strip() for line in shown.replace("\r", "\n").split("\n")]
    return next((line[:LINE] for line in reversed(lines) if line), "")


def run_task(url: str, *, index: int | None = None) -> int:
    """Run a task of the plan at *url*, by default the one in the scheduler's environment; return the exit code.

    The code is 0 if all items are done, 42 if all failures are permanent, and 1 if a retry may help.
    """
    location = Location.of(url)
    plan = JobPlan.loads(location.read(), url=location.name)
    if index is None:
        index = _index()
    if not 0 <= index < len(plan.tasks):
        raise StateError(f"no task {index}: the plan has {len(plan.tasks)} tasks", url=location.name)
    run = os.environ.get("SLURM_ARRAY_JOB_ID") or socket.gethostname()  # Kubernetes names a host after Job and index
    with Worker(plan, run=run, owner=socket.gethostname(), grace=SCHEDULER_GRACE) as worker:
        failed = [result for result in map(worker.run, plan.tasks[index]) if result.status != 0]
    for result in failed:
        text = f"{' '.join(result.item.names)}: status {result.status}: {result.line}"
        print(f"tarjob: {visible(text)}", file=sys.stderr)  # noqa: T201
    if not failed:
        return 0
    return PERMANENT if all(result.permanent for result in failed) else FAILED


def _index() -> int:
    found = [os.environ[name] for name in INDEX_VARIABLES if os.environ.get(name)]
    if not found:
        raise StateError(f"no task given: neither {' nor '.join(INDEX_VARIABLES)} is set; use --index")
    return int(found[0])
