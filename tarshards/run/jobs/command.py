"""A command in a process group of its own, which any thread may stop."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from threading import Lock, Timer
from typing import Any

GRACE = 5.0  # seconds between SIGTERM and SIGKILL


class Command:
    """A running process with nothing on stdin, whose stdout and stderr are *output*."""

    def __init__(self, arguments: list[str], output: Any):
        self._lock = Lock()
        self._ended = False
        self._killer: Timer | None = None
        self.process = subprocess.Popen(
            arguments, process_group=0, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )

    def stop(self) -> None:
        """Send the group SIGTERM, and a while later SIGKILL."""
        with self._lock:
            if self._ended or self._killer is not None:
                return
            self._signal(signal.SIGTERM)
            self._killer = Timer(GRACE, self._kill)
            self._killer.daemon = True
            self._killer.start()

    def wait(self) -> int:
        """Wait for the leader, then kill what it has left running; return its status as subprocess does."""
        # The leader must not be reaped before: its id is the group's, and would be free for another process.
        os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
        with self._lock:
            self._signal(signal.SIGKILL)
            self._ended = True
            if self._killer is not None:
                self._killer.cancel()
        return self.process.wait()

    def _kill(self) -> None:
        with self._lock:
            if not self._ended:
                self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)
