"""A process in a group of its own, which ends as a whole group; for a program of one thread."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

GRACE = 2.0  # seconds between SIGTERM and SIGKILL
DEFAULTS = (signal.SIGPIPE, signal.SIGXFSZ)  # which Python ignores


def wait_for(descriptor: int, event: int, deadline: float | None) -> bool:
    """Wait for the event of poll at *descriptor*; False if the *deadline* on the monotonic clock came first."""
    if deadline is None:
        return True
    poller = select.poll()
    poller.register(descriptor, event)
    return bool(poller.poll(max(0.0, deadline - time.monotonic()) * 1000))


class Child:
    """A running process, started as os.posix_spawn does."""

    def __init__(self, arguments: list[str], environment: dict[str, str], file_actions: Sequence[Any]):
        self._status: int | None = None
        self.pid = os.posix_spawn(
            arguments[0], arguments, environment, file_actions=file_actions, setpgroup=0, setsigdef=DEFAULTS
        )

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the leader; False if that takes more than *seconds*."""
        if seconds is not None:
            descriptor = os.pidfd_open(self.pid)
            try:
                return wait_for(descriptor, select.POLLIN, time.monotonic() + seconds)
            finally:
                os.close(descriptor)
        # The leader must not be reaped before its group is killed: the id would be free for another process.
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        return True

    def end(self, grace: float = 0.0) -> int:
        """Kill the whole group, with *grace* after a SIGTERM; return the leader's status as subprocess does."""
        if self._status is None:
            if grace:
                self._signal(signal.SIGTERM)
                self.wait(grace)
            self._signal(signal.SIGKILL)
            with suppress(ChildProcessError):  # a signal's handler has come between
                self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._status or 0

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)
