"""The directory ``.tarjob/NAME``, in which the submitting machine keeps a job's files."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tarshards.errors import StateError
from tarshards.run.guard import end_all
from tarshards.run.jobs.job_plan import JobPlan
from tarshards.storage.local import flush
from tarshards.storage.location import Location
from tarshards.storage.locks import is_locked, lock, release
from tarshards.storage.markers import read_marker, write_marker
from tarshards.storage.streams import failure

ROOT = ".tarjob"


class JobFolder:
    """The plan, the options, the scheduler's ids, the logs and the lock of one job."""

    def __init__(self, name: str):
        self.name = name
        self.path: str = os.path.abspath(os.path.join(ROOT, name))

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
        write_marker(f"{self.path}/job.json", record)

    def write(self, name: str, text: str) -> str:
        """Write a file atomically and return its path."""
        path = f"{self.path}/{name}"
        with Location(path).open("wb") as stream:
            stream.write(os.fsencode(text))
        return path

    def load(self) -> tuple[JobPlan, dict[str, Any]]:
        """Return the plan and the record; raise StateError if there is no such job."""
        record = read_marker(f"{self.path}/job.json")
        if record is None:
            known = ", ".join(names()) or "none"
            raise StateError(f"no job {self.name} was started in this directory; known jobs: {known}")
        kinds = {"engine": str, "options": dict, "parts": list}
        if not all(isinstance(record.get(name), kind) for name, kind in kinds.items()):
            raise StateError("damaged; run the job's command line again", url=f"{self.path}/job.json")
        try:
            with open(self.plan_path) as file:
                text = file.read()
        except (OSError, ValueError) as error:
            raise failure(error, self.plan_path) from error
        return JobPlan.loads(text, url=self.plan_path), record

    @property
    def variable(self) -> str:
        """The beginning of the variable that identifies the commands of this job; see ``guard``."""
        return f"TARJOB_RUN={self.path}/"

    @property
    def _lock(self) -> str:
        return f"{self.path}/lock"

    @contextmanager
    def locked(self) -> Iterator[bool]:
        """Lock out other runs of this job; end the processes of a killed last run, and yield whether it was killed.

        Raises StateError if a run is active.
        """
        Location(self.log(0)).make_folder()
        try:
            descriptor = lock(self._lock, os.O_RDWR | os.O_CREAT)
        except BlockingIOError as error:
            raise StateError(f"{self.name} is already running") from error
        except OSError as error:
            raise failure(error, self._lock) from error
        try:
            killed = os.fstat(descriptor).st_size > 0  # a run that ends leaves the file empty
            os.ftruncate(descriptor, 0)
            os.write(descriptor, json.dumps({"pid": os.getpid()}).encode())
            flush(descriptor)
            if killed:
                end_all(self.variable)
            try:
                yield killed
            finally:
                os.ftruncate(descriptor, 0)
        finally:
            release(descriptor)

    def terminate(self) -> bool:
        """Send SIGTERM to the process that runs the job; return False if there is none."""
        if not self.runs():
            return False
        try:
            with open(self._lock) as file:
                os.kill(json.load(file)["pid"], signal.SIGTERM)
        except (OSError, ValueError):  # it has just begun, or just ended
            return False
        return True

    def runs(self) -> bool:
        """Whether a process on this machine runs the job."""
        return is_locked(self._lock)


def names() -> list[str]:
    """Return the jobs started in this directory, the latest last."""
    try:
        found = [entry for entry in os.scandir(ROOT) if os.path.exists(f"{entry.path}/job.json")]
    except FileNotFoundError:
        return []
    return [entry.name for entry in sorted(found, key=lambda entry: os.path.getmtime(f"{entry.path}/job.json"))]
