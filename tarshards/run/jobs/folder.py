"""Where this machine remembers its jobs: ``.tarjob/NAME`` in the working directory."""

from __future__ import annotations

import fcntl
import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tarshards.errors import OpenError, StateError
from tarshards.run.jobs.plan import Plan
from tarshards.storage.markers import read_marker, write_marker

ROOT = ".tarjob"


class Folder:
    """The plan, the options, the engine's ids, the logs and the lock of one job."""

    def __init__(self, name: str):
        self.name = name
        self.path = os.path.abspath(os.path.join(ROOT, name))

    @property
    def plan_path(self) -> str:
        return f"{self.path}/plan.json"

    @property
    def state(self) -> str:
        """A folder for markers that have no other place."""
        return f"{ROOT}/{self.name}/markers"

    def log(self, number: int) -> str:
        """The log of an item's commands."""
        return f"{self.path}/logs/{number:06d}.log"

    def save(self, plan: Plan, **record: Any) -> None:
        """Keep the plan and what is needed to ask for the job, or to try again."""
        try:
            os.makedirs(f"{self.path}/logs", exist_ok=True)
        except OSError as error:
            raise OpenError(error.strerror or str(error), url=self.path) from error
        self.write("plan.json", plan.dumps())
        write_marker(f"{self.path}/job.json", record)

    def write(self, name: str, text: str) -> str:
        """Write a file, whole or not at all, and return its path."""
        path = f"{self.path}/{name}"
        with open(f"{path}.{os.getpid()}", "w") as file:
            file.write(text)
        os.replace(file.name, path)
        return path

    def load(self) -> tuple[Plan, dict[str, Any]]:
        """Return the plan and the record; raise StateError where there is no such job."""
        record = read_marker(f"{self.path}/job.json")
        if record is None:
            known = ", ".join(names()) or "none"
            raise StateError(f"no job {self.name} was started in this directory; there are {known}")
        with open(self.plan_path) as file:
            return Plan.loads(file.read(), url=self.plan_path), record

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other runs of this job out; raise StateError where there is one."""
        with open(f"{self.path}/lock", "a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise StateError(f"{self.name} is running already") from error
            file.truncate(0)
            file.write(json.dumps({"pid": os.getpid()}))
            file.flush()
            yield

    def terminate(self) -> bool:
        """Send the process that runs the job SIGTERM; return False where none does."""
        try:
            with open(f"{self.path}/lock", "a+") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with open(f"{self.path}/lock") as file:
                os.kill(json.load(file)["pid"], signal.SIGTERM)
            return True
        except OSError:
            return False
        return False

    def runs(self) -> bool:
        """Say whether a process on this machine runs the job."""
        try:
            with open(f"{self.path}/lock") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False


def names() -> list[str]:
    """List the jobs that were started in this directory, the latest last."""
    try:
        found = [entry for entry in os.scandir(ROOT) if os.path.exists(f"{entry.path}/job.json")]
    except FileNotFoundError:
        return []
    return [entry.name for entry in sorted(found, key=lambda entry: os.path.getmtime(f"{entry.path}/job.json"))]
