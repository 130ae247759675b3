"""The directory ``.tarjob/NAME``, in which the submitting machine keeps a job's files."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tarshards.errors import StateError
from tarshards.run.guard import OwnProcesses
from tarshards.run.jobs.job_plan import JobPlan
from tarshards.storage.location import Location
from tarshards.storage.markers import Marker

ROOT = ".tarjob"


class JobFolder:
    """The plan, the options, the scheduler's ids, the logs and the lock of one job."""

    def __init__(self, name: str):
        self.name = name
        self.path: str = os.path.abspath(os.path.join(ROOT, name))
        self._running = Marker(f"{self.path}/lock")  # has the id of the process that runs the job

    @property
    def plan_path(self) -> str:
        return f"{self.path}/plan.json"

    @property
    def state(self) -> str:
        """The default folder of markers."""
        return f"{ROOT}/{self.name}/markers"

    def log(self, number: int) -> str:
        """The log of an item's commands."""
        return f"{self.path}/logs/{number:06d}.log"

    def save(self, plan: JobPlan, **record: Any) -> None:
        """Write the plan, and the record needed to query or retry the job.

        If the plan has credentials, only the owner of the folder can read it.
        """
        Location(self.log(0)).make_folder()
        if plan.has_credentials:
            os.chmod(self.path, 0o700)
        self.write("plan.json", plan.dumps())
        Marker(f"{self.path}/job.json").write(record)

    def write(self, name: str, text: str) -> str:
        """Write a file atomically and return its path."""
        path = f"{self.path}/{name}"
        with Location(path).open("wb") as stream:
            stream.write(os.fsencode(text))
        return path

    def load(self) -> tuple[JobPlan, dict[str, Any]]:
        """Return the plan and the record; raise StateError if there is no such job."""
        record = Marker(f"{self.path}/job.json").read()
        if record is None:
            known = ", ".join(names()) or "none"
            raise StateError(f"no job {self.name} was started in this directory; known jobs: {known}")
        kinds = {"engine": str, "options": dict, "parts": list}
        if not all(isinstance(record.get(name), kind) for name, kind in kinds.items()):
            raise StateError("damaged; run the job's command line again", url=f"{self.path}/job.json")
        return JobPlan.loads(Location(self.plan_path).read(), url=self.plan_path), record

    @property
    def variable(self) -> str:
        """The beginning of the variable that identifies the commands of this job; see ``guard``."""
        return f"TARJOB_RUN={self.path}/"

    @contextmanager
    def locked(self) -> Iterator[bool]:
        """Lock out other runs of this job; end the processes of a killed last run, and yield whether it was killed.

        Raises StateError if a run is active.
        """
        Location(self.log(0)).make_folder()
        try:
            self._running.lock()
        except BlockingIOError as error:
            raise StateError(f"{self.name} is already running") from error
        try:
            killed = bool(self._running.location.size())  # a run that ends leaves the file empty
            self._running.write({"pid": os.getpid()})
            if killed:
                OwnProcesses(self.variable).end()
            try:
                yield killed
            finally:
                self._running.clear()
        finally:
            self._running.release()

    def terminate(self) -> bool:
        """Send SIGTERM to the process that runs the job; return False if there is none."""
        if not self.runs():
            return False
        try:
            os.kill((self._running.read() or {})["pid"], signal.SIGTERM)
        except (OSError, KeyError):  # it has just begun, or just ended
            return False
        return True

    def runs(self) -> bool:
        """Whether a process on this machine runs the job."""
        return self._running.is_locked


def names() -> list[str]:
    """Return the jobs started in this directory, the latest last."""
    try:
        found = [entry for entry in os.scandir(ROOT) if os.path.exists(f"{entry.path}/job.json")]
    except FileNotFoundError:
        return []
    return [entry.name for entry in sorted(found, key=lambda entry: os.path.getmtime(f"{entry.path}/job.json"))]
