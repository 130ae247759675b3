"""One attempt at an item, and the record that tells a later attempt which files this one has left.

A killed tool of ours may leave a complete output without its marker, and would refuse to replace it forever. So before
the command starts, the attempt records which output files of our tools do not exist. If such a file exists when the
item runs again, an earlier attempt made it, and it is removed. A file that existed before is not touched, nor is a file
of another program, which may be a checkpoint.

The record is locked while the command, or any process that it started, is alive. The next attempt, on any machine with
the same files, waits for the lock, so that no two attempts write one output.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Any

from tarshards.errors import OpenError, visible
from tarshards.parallel.signals import TICK
from tarshards.run.jobs.job_plan import Item, JobPlan
from tarshards.storage.derived import forget
from tarshards.storage.location import Location
from tarshards.storage.markers import Marker

PATIENCE = 10  # times that the lock is tried before the wait is reported


class Attempt:
    """An attempt at *item*; the command inherits ``descriptor``, the lock of its record, None if there is no lock."""

    def __init__(self, plan: JobPlan, item: Item):
        self._files = plan.files_of(item)
        self._marker = Marker(plan.marker(item, "started"))
        self._digest = plan.digest(item)
        self.absent: list[str] = []  # output files of our tools that did not exist before any attempt

    def __enter__(self) -> Attempt:
        return self

    def __exit__(self, *_: object) -> None:
        self._marker.release(unlock=False)

    @property
    def descriptor(self) -> int | None:
        return self._marker.descriptor

    def lock(self, stopped: Callable[[], bool]) -> bool:
        """Wait until no other attempt at the item is running; return False if *stopped* first."""
        waiting = count()

        def wait() -> None:
            if next(waiting) == PATIENCE:
                reason = "waits for an earlier command, which still runs"
                print(f"tarjob: {visible(self._marker.location.name)}: {reason}", file=sys.stderr)  # noqa: T201
            time.sleep(TICK)
            if stopped():
                raise BlockingIOError

        if stopped():
            return False
        if self._files:
            try:
                self._marker.lock(wait, optional=True)
            except BlockingIOError:
                return False
        return True

    def begin(self, record: dict[str, Any], *earlier: dict[str, Any] | None) -> None:
        """Remove the files of earlier attempts, and write the record that this one has started.

        *earlier* are the records of the last failure and of a success with other code or inputs. Raises OpenError if
        the record cannot be written.
        """
        if not self._files:
            return
        made: set[str] = set()
        for found in (self._marker.read(), *earlier):
            if found is not None and found.get("digest") == self._digest:
                made.update(Location(url).recorded for url in found.get("absent", ()))
        for url in [url for url, is_ours in self._files.items() if is_ours]:
            location = Location(url)
            with suppress(OpenError):  # the command will report the error
                if location.recorded in made and (location.is_taken() or os.path.islink(str(location.path))):
                    forget(location)
                    location.remove()
                if not (location.is_taken() if location.path is None else os.path.lexists(location.path)):
                    self.absent.append(location.recorded)
        self._marker.write({**record, "absent": self.absent})

    def end(self) -> None:
        """Remove the record; another marker says whether the item is done or failed."""
        if self._files:
            self._marker.remove()
