"""`pipe:command`: the output or the input of a shell command, which must succeed."""

from __future__ import annotations

import os
import shutil
import signal
from contextvars import ContextVar
from subprocess import PIPE
from typing import Any

from tarshards.errors import OpenError
from tarshards.parallel.children import ChildGroup, ending
from tarshards.storage.location import Location, Transport
from tarshards.storage.streams import InputStream, OutputStream, failure

#: A list to which a thread's PipeInputs are added if it sets one, so that another thread can kill their commands.
OPENED: ContextVar[list[PipeInput]] = ContextVar("OPENED")


class Pipe(Transport):
    def open(self, location: Location, mode: str) -> InputStream | OutputStream:
        if not location.allow_pipe:
            raise OpenError("a command runs only with allow_pipe=True", url=location.name)
        command = location.url.partition(":")[2]
        return PipeInput(command, location.name) if mode == "rb" else open_writer(command, location.name)


TRANSPORT = Pipe()


def start(command: str, name: str, **options: Any) -> ChildGroup:
    """Start *command*, with the options of ChildGroup; every part of a pipeline must succeed. Errors name *name*."""
    bash = shutil.which("bash")
    shell = [bash, "-o", "pipefail", "-c"] if bash else ["sh", "-c"]
    try:
        return ChildGroup([*shell, command], **options)
    except (OSError, ValueError) as exc:
        raise failure(exc, name) from exc


def check(group: ChildGroup, name: str) -> None:
    """Wait for the command; raise OpenError if it failed. Its background processes continue."""
    if status := group.reap():
        raise OpenError(f"the command {ending(status)}", url=name)


class PipeInput(InputStream):
    """The output of a command; its last read raises OpenError if the command failed."""

    def __init__(self, command: str, name: str):
        self.name = name
        self._owner = os.getpid()
        self._group = start(command, name, stdin=os.devnull, stdout=PIPE)
        self._stdout = os.fdopen(self._group.stdout, "rb", 0)
        OPENED.get([]).append(self)

    def read_some(self, size: int) -> bytes:
        data = self._stdout.read(size)
        if not data:
            check(self._group, self.name)
        return data

    def kill(self) -> None:
        """Kill the command, also while another thread waits for its output, which then ends."""
        self._group.signal(signal.SIGKILL)

    def close(self) -> None:
        if not self.closed and hasattr(self, "_stdout"):
            # A forked copy must not kill what its parent still reads.
            if self._owner == os.getpid():
                self._group.end()
            self._stdout.close()
        super().close()


def open_writer(command: str, name: str) -> OutputStream:
    """Return an OutputStream into a command, which `close` waits for and `abort` kills."""
    group = start(command, name, stdin=PIPE)
    stdin = os.fdopen(group.stdin, "wb")

    def write(data: Any) -> None:
        try:
            stdin.write(data)
        except BrokenPipeError as exc:
            check(group, name)
            raise OpenError("the command stopped reading before the end", url=name) from exc

    def commit() -> None:
        try:
            stdin.close()
        except BrokenPipeError as exc:
            check(group, name)
            raise OpenError("the command stopped reading before the end", url=name) from exc
        check(group, name)

    def discard() -> None:
        group.end()
        # Closing the raw file first drops the buffer unwritten.
        stdin.raw.close()

    return OutputStream(name, write, commit=commit, discard=discard)
