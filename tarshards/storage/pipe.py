"""`pipe:command`: the output or the input of a shell command, which must succeed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from contextlib import suppress
from contextvars import ContextVar
from typing import IO, Any

from tarshards.errors import OpenError
from tarshards.storage.location import Location, Transport
from tarshards.storage.streams import InputStream, OutputStream, failure

#: A list that a thread sets to have its PipeInputs added to, so that another thread can kill their commands.
OPENED: ContextVar[list[PipeInput]] = ContextVar("OPENED")


class Pipe(Transport):
    def open(self, location: Location, mode: str, *, allow_pipe: bool, **_: Any) -> InputStream | OutputStream:
        if not allow_pipe:
            raise OpenError("a command runs only with allow_pipe=True", url=location.name)
        command = location.url.partition(":")[2]
        return PipeInput(command, location.name) if mode == "rb" else open_writer(command, location.name)


TRANSPORT = Pipe()


def start(command: str, name: str, **ends: Any) -> subprocess.Popen[bytes]:
    """Run *command* in a process group of its own; every part of a pipeline must succeed. Errors name *name*."""
    bash = shutil.which("bash")
    shell = [bash, "-o", "pipefail", "-c"] if bash else ["sh", "-c"]
    try:
        return subprocess.Popen([*shell, command], process_group=0, **ends)
    except (OSError, ValueError) as exc:
        raise failure(exc, name) from exc


def check(process: subprocess.Popen[bytes], name: str) -> None:
    status = process.wait()
    if status:
        raise OpenError(f"the command {ending(status)}", url=name)


def ending(status: int) -> str:
    """Say how a process ended whose status this is, negative for a signal.

    >>> ending(3), ending(-9)
    ('ended with status 3', 'was killed by signal 9')
    """
    return f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill and reap *process* and what it started, unless it has been waited for."""
    if process.returncode is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class PipeInput(InputStream):
    """The output of a command; its last read raises where the command failed."""

    def __init__(self, command: str, name: str):
        self.name = name
        self._owner = os.getpid()
        self._process = start(command, name, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, bufsize=0)
        self._stdout = _end(self._process.stdout)
        OPENED.get([]).append(self)

    def read_some(self, size: int) -> bytes:
        data = self._stdout.read(size)
        if not data:
            check(self._process, self.name)
        return data

    def kill(self) -> None:
        """Kill the command, also while another thread waits for its output, which then ends."""
        kill(self._process)

    def close(self) -> None:
        if not self.closed and hasattr(self, "_stdout"):
            # A forked copy must not kill what its parent still reads.
            if self._owner == os.getpid():
                kill(self._process)
            self._stdout.close()
        super().close()


def open_writer(command: str, name: str) -> OutputStream:
    """Return an OutputStream into a command, which `close` waits for and `abort` kills."""
    process = start(command, name, stdin=subprocess.PIPE)
    stdin = _end(process.stdin)

    def write(data: Any) -> None:
        try:
            stdin.write(data)
        except BrokenPipeError as exc:
            check(process, name)
            raise OpenError("the command stopped reading before the end", url=name) from exc

    def commit() -> None:
        try:
            stdin.close()
        except BrokenPipeError as exc:
            check(process, name)
            raise OpenError("the command stopped reading before the end", url=name) from exc
        check(process, name)

    def discard() -> None:
        kill(process)
        # Closing the raw file first drops the buffer unwritten.
        stdin.raw.close()  # type: ignore[attr-defined]

    return OutputStream(name, write, commit=commit, discard=discard)


def _end(end: IO[bytes] | None) -> IO[bytes]:
    if end is None:
        raise TypeError("a process started without the pipe asked for")
    return end
