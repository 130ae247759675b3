"""Child processes that end with all their descendants."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from math import inf
from subprocess import PIPE
from threading import RLock
from typing import Any

STDIN, STDOUT, STDERR = 0, 1, 2
IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)


def ending(status: int) -> str:
    """Describe how a process with this exit status ended; a negative status is a signal.

    >>> ending(3), ending(-9)
    ('ended with status 3', 'was killed by signal 9')
    """
    return f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"


def wait_for(descriptor: int, event: int, deadline: float | None) -> bool:
    """Wait for an event of ``select.poll`` on *descriptor*; return False if the monotonic clock reaches *deadline*."""
    poller = select.poll()
    poller.register(descriptor, event)
    return bool(poller.poll(None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000))


class ChildGroup:
    """A child process that leads its own process group; only the waiting thread may do more than ``signal`` it.

    *arguments* start with the program, which is looked up on the PATH. *stdin*, *stdout* and *stderr* are each a
    descriptor, the path of a file, or ``subprocess.PIPE``; by default the child inherits ours. It also inherits the
    descriptor *held*. The attributes ``stdin`` and ``stdout`` are our ends of the pipes, raw descriptors that the
    caller closes.
    ``status`` is None until the leader has been reaped, then its exit status as in ``subprocess``. Raises OSError or
    ValueError if the program cannot be started.
    """

    def __init__(
        self,
        arguments: list[str],
        environment: Mapping[str, str] | None = None,
        *,
        stdin: int | str | None = None,
        stdout: int | str | None = None,
        stderr: int | str | None = None,
        held: int | None = None,
    ):
        self.status: int | None = None
        self._ended: int | None = None  # the status, if the system cannot wait without reaping
        self._reaping = RLock()  # a signal handler may interrupt
        self.stdin: int = -1
        self.stdout: int = -1
        theirs: list[int] = []
        try:
            if stdin == PIPE:
                stdin, self.stdin = os.pipe()
                theirs.append(stdin)
            if stdout == PIPE:
                self.stdout, stdout = os.pipe()
                theirs.append(stdout)
            actions = [_redirect(*end) for end in enumerate((stdin, stdout, stderr)) if end[1] is not None]
            if held is not None:
                actions.append(_redirect(held, held))
            self.pid: int = os.posix_spawnp(
                arguments[0],
                arguments,
                os.environ if environment is None else environment,
                file_actions=actions,
                setpgroup=0,
                setsigmask=(),
                setsigdef=IGNORED_BY_PYTHON,
            )
        except BaseException:
            theirs += [end for end in (self.stdin, self.stdout) if end >= 0]
            raise
        finally:
            for end in theirs:
                os.close(end)

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the leader exits, but do not reap it; return False if it still runs after *seconds*."""
        # An unreaped leader keeps its process id, which is the group's, from being reused.
        if self.status is not None:
            return True
        if seconds is None and hasattr(os, "waitid"):
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
            return True
        deadline = inf if seconds is None else time.monotonic() + seconds
        try:
            descriptor = os.pidfd_open(self.pid)
        except (AttributeError, OSError):  # macOS, Linux before 5.3
            while not self._has_ended():
                if time.monotonic() >= deadline:
                    return False
                time.sleep(0.005)
            return True
        try:
            return wait_for(descriptor, select.POLLIN, deadline)
        finally:
            os.close(descriptor)

    def _has_ended(self) -> bool:
        if hasattr(os, "waitid"):
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
        # macOS before Python 3.13. The id is not reused while another process of the group runs.
        if self._ended is None:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            self._ended = os.waitstatus_to_exitcode(status) if found else None
        return self._ended is not None

    def reap(self) -> int:
        """Wait for the leader and return its exit status; other processes of the group continue."""
        if self.status is None:
            with suppress(ChildProcessError):  # SIGCHLD is ignored
                self.wait()
        with self._reaping:
            if self.status is None:
                self.status = self._ended
            if self.status is None:
                try:
                    self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
                except ChildProcessError:  # a signal handler reaped it meanwhile, or SIGCHLD is ignored
                    self.status = 0
            return self.status

    @property
    def how_it_ended(self) -> str:
        """How the leader ended, in words: see ``ending``."""
        return ending(self.reap())

    def end(self, grace: float = 0.0) -> int:
        """Kill the whole group, after SIGTERM and at most *grace* seconds if *grace* is given; return the exit status.

        Does nothing once the leader has been reaped.
        """
        if self.status is None:
            if grace:
                self.signal(signal.SIGTERM)
                self.wait(grace)
            self.signal(signal.SIGKILL)
        return self.reap()

    def signal(self, number: int) -> None:
        """Send a signal to every process of the group, unless the leader has been reaped."""
        with self._reaping:
            if self.status is None:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.pid, number)


def _redirect(descriptor: int, target: int | str | None) -> tuple[Any, ...]:
    """Return the file action of posix_spawn that makes *target* the child's *descriptor*."""
    if isinstance(target, str):
        flags = os.O_RDONLY if descriptor == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        return os.POSIX_SPAWN_OPEN, descriptor, target, flags, 0o666
    return os.POSIX_SPAWN_DUP2, target, descriptor
