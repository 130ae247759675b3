"""A process in a group of its own, which ends as a whole group."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Lock, Timer
from typing import IO, Any

GRACE = 2.0  # seconds between SIGTERM and SIGKILL


class Child:
    """A running process; ``stop`` may be called from any thread, at any time."""

    def __init__(self, arguments: list[str], **options: Any):
        self._lock = Lock()
        self._ended = False
        self._killer: Timer | None = None
        self.timed_out = False
        self.process = subprocess.Popen(arguments, process_group=0, **options)

    def stop(self) -> None:
        """Send the group SIGTERM, and a while later SIGKILL."""
        with self._lock:
            if self._ended or self._killer is not None:
                return
            self._signal(signal.SIGTERM)
            self._killer = _daemon(GRACE, self._kill)

    @contextmanager
    def deadline(self, seconds: float | None) -> Iterator[None]:
        """Stop the group unless the block is left within *seconds* (None: wait for ever)."""
        timer = None if seconds is None else _daemon(seconds, self._time_out)
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()

    def wait(self) -> int:
        """Wait for the leader, then kill what it has left running; return its status as subprocess does."""
        # The leader must not be reaped before: its id is the group's, and would be free for another process.
        os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
        return self.end()

    def end(self) -> int:
        """Kill the group at once and return the leader's status."""
        with self._lock:
            if not self._ended:
                self._signal(signal.SIGKILL)
                self.process.wait()
                self._ended = True
            if self._killer is not None:
                self._killer.cancel()
        for end in (self.process.stdin, self.process.stdout):
            _close(end)
        return self.process.returncode

    def _time_out(self) -> None:
        self.timed_out = True
        self.stop()

    def _kill(self) -> None:
        with self._lock:
            if not self._ended:
                self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)


def _daemon(seconds: float, function: Any) -> Timer:
    timer = Timer(seconds, function)
    timer.daemon = True
    timer.start()
    return timer


def _close(end: IO[bytes] | None) -> None:
    if end is not None:
        with suppress(BrokenPipeError):
            end.close()
