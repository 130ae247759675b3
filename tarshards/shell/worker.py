"""One slot's way to run one sample: a command in a scratch directory, a server, or a Python function."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from tarshards.errors import SampleError, TarshardsError
from tarshards.keys import is_reserved
from tarshards.openers.pipe import ending
from tarshards.samples import sample_members
from tarshards.shell.child import GRACE, Child
from tarshards.shell.scratch import Sample, Scratch, pack, remove, unpack

STDERR = 2


class Failure(Exception):
    """Why a sample failed, with the exit value and the signal of its process."""

    def __init__(self, reason: str, exitval: int = 255, signal: int = 0):
        super().__init__(reason)
        self.reason, self.exitval, self.signal = reason, exitval, signal

    @classmethod
    def of(cls, status: int, what: str) -> Failure:
        return cls(f"{what} {ending(status)}", max(status, 0), max(-status, 0))


@dataclass(frozen=True)
class Work:
    """What is done with each sample: exactly one of the first four is set."""

    command: str | None = None
    script: str | None = None
    server: str | None = None
    python: str | None = None
    subdirs: bool = False
    add_log: str | None = None
    timeout: float | None = None

    def __str__(self) -> str:
        return str(self.command or self.script or self.server or self.python)

    def arguments(self) -> list[str]:
        """The program that runs, and its arguments."""
        if self.python is not None:
            return [sys.executable, "-m", "tarshards.shell.call", self.python]
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
    return shutil.which("bash") or "/bin/sh"


class Worker:
    """What one slot runs samples with; ``stop`` may be called from any thread."""

    def __init__(self, work: Work, scratch: Scratch, slot: int):
        self.work, self.scratch, self.slot = work, scratch, slot
        self.arguments = work.arguments()
        self.environment = {**os.environ, "TAR_SLOT": str(slot), "TAR_SCRATCH": scratch.path}
        self.child: Child | None = None
        self.stopped = False

    def run(self, index: int, sample: Sample, fields: dict[str, bytes]) -> list[Sample]:
        """Return what becomes of *sample*, or raise Failure."""
        raise NotImplementedError

    def stop(self) -> None:
        """End what runs, and let nothing begin."""
        self.stopped = True
        if self.child is not None:
            self.child.stop()

    def close(self) -> None:
        if self.child is not None:
            self.child.end()

    def start(self, **options: Any) -> Child:
        try:
            self.child = Child(self.arguments, **options)
        except (OSError, ValueError) as error:
            raise Failure(f"cannot run {self.arguments[0]}: {error}", 127) from error
        if self.stopped:  # by another thread that did not see the child yet
            self.child.stop()
        return self.child

    @contextmanager
    def folder(self, index: int, fields: dict[str, bytes]) -> Iterator[str]:
        """The scratch directory of a sample, while it is needed."""
        path = f"{self.scratch.path}/{index}"
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
            environment = {
                **self.environment,
                "TAR_KEY": sample["__key__"],
                "TAR_INDEX": str(index),
                "TAR_SHARD": sample.get("__url__", ""),
            }
            if self.work.add_log is None:
                self._execute(folder, environment, STDERR)
                return pack(folder, sample, subdirs=self.work.subdirs)
            log = f"{self.scratch.path}/log-{self.slot}"
            with open(log, "w+b") as file:
                try:
                    self._execute(folder, environment, file.fileno())
                    packed = pack(folder, sample, subdirs=self.work.subdirs)
                except (Failure, TarshardsError):
                    file.seek(0)
                    sys.stderr.buffer.write(file.read())
                    sys.stderr.flush()
                    raise
                file.seek(0)
                return _with_log(packed, sample, self.work.add_log, file.read())

    def _execute(self, folder: str, environment: dict[str, str], output: int) -> None:
        child = self.start(cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        with child.deadline(self.work.timeout):
            status = child.wait()
        if child.timed_out:
            raise Failure(f"the command ran for more than {self.work.timeout:g} s", -1, 15)
        if status:
            raise Failure.of(status, "the command")


def _with_log(packed: list[Sample], sample: Sample, field: str, log: bytes) -> list[Sample]:
    same = [other for other in packed if other["__key__"] == sample["__key__"]]
    if not same:
        place = {name: value for name, value in sample.items() if name in ("__key__", "__url__")}
        same, packed = [place], [place, *packed]
    if field in same[0]:
        raise Failure(f"the command left a field {field}, and so would the log")
    same[0][field] = log
    return packed


class _Persistent(Worker):
    """Talks to one process, sample after sample; one that dies, hangs or talks nonsense fails its sample only."""

    def ask(self, question: bytes) -> Any:
        try:
            running = self.child or self.start(stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=self.environment)
            with running.deadline(self.work.timeout):
                return self.exchange(running.process.stdin, running.process.stdout, question)
        except (OSError, EOFError, ValueError, pickle.UnpicklingError) as error:
            if self.child is None:
                raise
            child, self.child = self.child, None
            late = child.timed_out
            status = child.end() if isinstance(error, ValueError) else _ended(child, 0.5)
            if late:
                raise Failure(f"the worker took more than {self.work.timeout:g} s", -1, 15) from None
            if isinstance(error, ValueError):
                raise Failure(str(error)) from None
            raise Failure.of(status, "the worker") from None

    def close(self) -> None:
        if self.child is not None and self.child.process.stdin is not None and not self.stopped:
            with suppress(BrokenPipeError):
                self.child.process.stdin.close()
            _ended(self.child, GRACE)
        super().close()

    def exchange(self, requests: Any, replies: Any, question: bytes) -> Any:
        """Send *question* and return the answer; raise EOFError where there is none, ValueError for a wrong one."""
        raise NotImplementedError


def _ended(child: Child, patience: float) -> int:
    """Wait for a process that has no more to say, and stop it when *patience* ends."""
    with child.deadline(patience):
        return child.wait()


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

    def exchange(self, requests: Any, replies: Any, question: bytes) -> Any:
        requests.write(question)
        requests.flush()
        line = replies.readline()
        if not line.endswith(b"\n"):
            raise EOFError
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
        place: Sample = {name: sample[name] for name in ("__key__", "__url__") if name in sample}
        reason, results = self.ask(pickle.dumps({**place, **fields}))
        if reason is not None:
            raise Failure(reason, 1)
        return [{**place, **result} for result in results]

    def exchange(self, requests: Any, replies: Any, question: bytes) -> Any:
        requests.write(question)
        requests.flush()
        return pickle.load(replies)


def encoded_results(sample: Sample, results: Any) -> list[Sample]:
    """Return what a function made of *sample*, None, a dict or a list of dicts, with all fields encoded."""
    results = [] if results is None else [results] if isinstance(results, dict) else results
    if not isinstance(results, list) or not all(isinstance(result, dict) for result in results):
        raise TypeError(f"the function returned {type(results).__name__}, not a dict, a list of dicts or None")
    encoded: dict[str, Sample] = {}
    for result in results:
        key = result.get("__key__", sample["__key__"])
        if key in encoded:
            raise SampleError("the function returned this key twice", key=key)
        members = sample_members({**result, "__key__": key})
        names = sorted(field for field in result if not is_reserved(field))
        encoded[key] = {"__key__": key, **{field: data for field, (_, data) in zip(names, members)}}
    return list(encoded.values())


def make_worker(work: Work, scratch: Scratch, slot: int) -> Worker:
    kind = ServerWorker if work.server is not None else PythonWorker if work.python is not None else CommandWorker
    return kind(work, scratch, slot)
