"""One slot's way to run one sample: a command in a scratch directory, a server, or a Python function."""

from __future__ import annotations

import json
import os
import pickle
import select
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from tarshards.errors import TarshardsError
from tarshards.run.samples.child import GRACE, Child, wait_for
from tarshards.run.samples.folder import Sample, pack, remove, unpack, write_all

STDIN, STDOUT, STDERR = 0, 1, 2
PIPE_BUF = select.PIPE_BUF  # what a pipe that poll says is writable takes at once


class Failure(Exception):
    """Why a sample failed, with the exit value and the signal of its process."""

    def __init__(self, reason: str, exitval: int = 255, signal: int = 0):
        super().__init__(reason)
        self.reason, self.exitval, self.signal = reason, exitval, signal

    @classmethod
    def of(cls, status: int, what: str) -> Failure:
        from tarshards.storage.pipe import ending

        return cls(f"{what} {ending(status)}", max(status, 0), max(-status, 0))


class Work(NamedTuple):
    """What is done with each sample: exactly one of the first four is set."""

    command: str | None = None
    script: str | None = None
    server: str | None = None
    python: str | None = None
    subdirs: bool = False
    add_log: str | None = None
    timeout: float | None = None
    retries: int = 0

    def __str__(self) -> str:
        return str(self.command or self.script or self.server or self.python)

    def arguments(self) -> list[str]:
        """The program that runs, and its arguments."""
        if self.python is not None:
            return [sys.executable, "-m", "tarshards.run.samples.call", self.python]
        if self.script is not None:
            script = os.path.abspath(self.script)
            return [script] if os.access(script, os.X_OK) else [bash(), script]
        return [bash(), "-c", str(self.command if self.server is None else self.server)]

    def identity(self) -> str:
        """A text that is the same where the same is done; of a script it is the contents that count."""
        script = None
        if self.script is not None:
            with open(self.script, "rb") as file:
                script = file.read().hex()
        return json.dumps([self.command, script, self.server, self.python, self.subdirs, self.add_log])


def bash() -> str:
    import shutil

    return shutil.which("bash") or "/bin/sh"


class Worker:
    """What one slot runs samples with, in directories below *scratch*."""

    def __init__(self, work: Work, scratch: str, slot: str):
        self.work, self.scratch, self.slot = work, scratch, slot
        self.arguments = work.arguments()
        self.environment = dict(os.environ)
        self.child: Child | None = None

    def run(self, index: int, sample: Sample, fields: dict[str, bytes]) -> list[Sample]:
        """Return what becomes of *sample*, or raise Failure."""
        raise NotImplementedError

    def stop(self) -> None:
        """End what runs."""
        if self.child is not None:
            self.child.end(GRACE)

    def close(self) -> None:
        """End what is left when there are no more samples."""

    def start(self, environment: dict[str, str], *file_actions: Any) -> Child:
        try:
            self.child = Child(self.arguments, environment, file_actions)
        except (OSError, ValueError) as error:
            raise Failure(f"cannot run {self.arguments[0]}: {error}", 127) from error
        return self.child

    @contextmanager
    def folder(self, index: int, fields: dict[str, bytes]) -> Iterator[str]:
        """The scratch directory of a sample, while it is needed."""
        path = f"{self.scratch}/{index}"
        try:
            unpack(fields, path)
            yield path
        except OSError as error:
            raise Failure(f"scratch directory: {error}") from error
        finally:
            remove(path)


class CommandWorker(Worker):
    """Runs a command for each sample."""

    def run(self, index: int, sample: Sample, fields: dict[str, bytes]) -> list[Sample]:
        with self.folder(index, fields) as folder:
            os.chdir(folder)
            environment = {
                **self.environment,
                "TAR_KEY": sample["__key__"],
                "TAR_INDEX": str(index),
                "TAR_SHARD": sample.get("__url__", ""),
            }
            if self.work.add_log is None:
                self._execute(environment, STDERR)
                return pack(folder, sample, subdirs=self.work.subdirs)
            with open(f"{self.scratch}/log-{self.slot}", "w+b") as file:
                try:
                    self._execute(environment, file.fileno())
                    packed = pack(folder, sample, subdirs=self.work.subdirs)
                except (Failure, TarshardsError):
                    file.seek(0)
                    write_all(STDERR, file.read())
                    raise
                file.seek(0)
                return _with_log(packed, sample, self.work.add_log, file.read())

    def _execute(self, environment: dict[str, str], output: int) -> None:
        child = self.start(
            environment,
            (os.POSIX_SPAWN_OPEN, STDIN, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, output, STDOUT),
            (os.POSIX_SPAWN_DUP2, output, STDERR),
        )
        in_time = child.wait(self.work.timeout)
        status = child.end(0 if in_time else GRACE)
        if not in_time:
            raise Failure(f"the command ran for more than {self.work.timeout:g} s", -1, 15)
        if status:
            raise Failure.of(status, "the command")


def _with_log(packed: list[Sample], sample: Sample, field: str, log: bytes) -> list[Sample]:
    same = [other for other in packed if other["__key__"] == sample["__key__"]]
    if not same:
        same = [dict(sample)]
        packed = same + packed
    if field in same[0]:
        raise Failure(f"the command left a field {field}, and so would the log")
    same[0][field] = log
    return packed


class _Persistent(Worker):
    """Talks to one process, sample after sample; one that dies, hangs or talks nonsense fails its sample only."""

    requests = replies = -1  # our ends of its pipes

    def ask(self, question: bytes) -> Any:
        child = self.child or self._begin()
        deadline = None if self.work.timeout is None else time.monotonic() + self.work.timeout
        try:
            self._send(question, deadline)
            return self.answer(deadline)
        except (OSError, EOFError, ValueError) as error:
            self._hang_up()
            if isinstance(error, TimeoutError):
                child.end(GRACE)
                raise Failure(f"the worker took more than {self.work.timeout:g} s", -1, 15) from None
            if isinstance(error, ValueError):
                child.end()
                raise Failure(str(error)) from None
            raise Failure.of(child.end(0 if child.wait(0.5) else GRACE), "the worker") from None

    def answer(self, deadline: float | None) -> Any:
        """Return the answer; raise EOFError where there is none, ValueError for a wrong one."""
        raise NotImplementedError

    def receive(self, deadline: float | None) -> bytes:
        if not wait_for(self.replies, select.POLLIN, deadline):
            raise TimeoutError
        data = os.read(self.replies, 1 << 16)
        if not data:
            raise EOFError
        return data

    def close(self) -> None:
        if (child := self.child) is not None:
            os.close(self.requests)
            child.end(0 if child.wait(GRACE) else GRACE)

    def _send(self, question: bytes, deadline: float | None) -> None:
        step = len(question) if deadline is None else PIPE_BUF
        for start in range(0, len(question), step):
            if not wait_for(self.requests, select.POLLOUT, deadline):
                raise TimeoutError
            write_all(self.requests, question[start : start + step])

    def _begin(self) -> Child:
        theirs, self.requests = os.pipe()
        self.replies, back = os.pipe()
        try:
            return self.start(
                self.environment, (os.POSIX_SPAWN_DUP2, theirs, STDIN), (os.POSIX_SPAWN_DUP2, back, STDOUT)
            )
        finally:
            os.close(theirs)
            os.close(back)
            if self.child is None:
                self._hang_up()

    def _hang_up(self) -> None:
        self.child = None
        os.close(self.requests)
        os.close(self.replies)


class ServerWorker(_Persistent):
    """Sends a command one line of JSON a sample, and reads one."""

    def run(self, index: int, sample: Sample, fields: dict[str, bytes]) -> list[Sample]:
        with self.folder(index, fields) as folder:
            paths = {field: f"{folder}/sample.{field}" for field in fields}
            question = {"dir": folder, "key": sample["__key__"], "index": index, "fields": paths}
            reply = self.ask(json.dumps(question).encode() + b"\n")
            if reply.get("error") is not None:
                raise Failure(f"the worker says: {reply['error']}", 1)
            return pack(folder, sample, subdirs=self.work.subdirs)

    def answer(self, deadline: float | None) -> Any:
        line = self.receive(deadline)
        while not line.endswith(b"\n"):
            line += self.receive(deadline)
        try:
            reply = json.loads(line)
        except ValueError:
            reply = None
        if not isinstance(reply, dict):
            raise ValueError(f"the worker answered {line[:80]!r}, which is no JSON object")
        return reply


class PythonWorker(_Persistent):
    """Calls a Python function in a process of its own."""

    def run(self, index: int, sample: Sample, fields: dict[str, bytes]) -> list[Sample]:
        reason, results = self.ask(framed({**sample, **fields}))
        if reason is not None:
            raise Failure(reason, 1)
        return [{**sample, **result} for result in results]

    def answer(self, deadline: float | None) -> Any:
        frames = Frames()
        while not (found := frames.add(self.receive(deadline))):
            pass
        return found[0]


def framed(value: Any) -> bytes:
    """Return *value* as bytes that say where they end."""
    data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    return len(data).to_bytes(8, "little") + data


class Frames:
    """Takes bytes as they come, and gives the values of the frames that are whole."""

    def __init__(self) -> None:
        self._data = bytearray()

    def add(self, data: bytes) -> list[Any]:
        """Return the values that end in *data*.

        >>> frames, data = Frames(), framed("one") + framed("two")
        >>> frames.add(data[:5]), frames.add(data[5:])
        ([], ['one', 'two'])
        """
        self._data += data
        values, start = [], 0
        with memoryview(self._data) as view:
            while start + 8 <= len(view):
                end = start + 8 + int.from_bytes(view[start : start + 8], "little")
                if end > len(view):
                    break
                values.append(pickle.loads(view[start + 8 : end]))
                start = end
        del self._data[:start]
        return values


def make_worker(work: Work, scratch: str, slot: str) -> Worker:
    kind = ServerWorker if work.server is not None else PythonWorker if work.python is not None else CommandWorker
    return kind(work, scratch, slot)
