"""How a slot runs one sample: a command in a scratch directory, a server, or a Python function."""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from subprocess import PIPE
from typing import Any, NamedTuple

from tarshards.errors import SampleError, TarshardsError
from tarshards.parallel.children import STDERR, ChildGroup, ending, wait_for
from tarshards.parallel.signals import GRACE
from tarshards.run.samples.folder import pack, remove, unpack, write_all
from tarshards.samples.keys import Sample
from tarshards.storage.code_digest import digest_module

PIPE_BUF = select.PIPE_BUF  # bytes that a pipe accepts at once when poll reports it writable


class Failure(Exception):
    """Why a sample failed, with the exit value and the signal of its process."""

    def __init__(self, reason: str, exitval: int = 255, signal: int = 0):
        super().__init__(reason)
        self.reason = reason
        self.exitval = exitval
        self.signal = signal

    @classmethod
    def of_status(cls, status: int, what: str) -> Failure:
        """Return the failure of a process that ended with *status*."""
        return cls(f"{what} {ending(status)}", max(status, 0), max(-status, 0))

    @classmethod
    def of_timeout(cls, seconds: float | None, what: str) -> Failure:
        """Return the failure of a process that was ended after *seconds*."""
        return cls(f"{what} ran for more than {seconds:g} s", -1, 15)


class Work(NamedTuple):
    """The work on each sample; exactly one of the first four is set."""

    command: str | None = None
    script: str | None = None
    server: str | None = None
    python: str | None = None
    subdirs: bool = False
    add_log: str | None = None
    timeout: float | None = None
    retries: int = 0
    strip: tuple[str, ...] = ()  # fields that lose the newline that shells add to a value

    def __str__(self) -> str:
        return str(self.command or self.script or self.server or self.python)

    def arguments(self) -> list[str]:
        """Return the program to run, and its arguments."""
        if self.script is not None:
            script = os.path.abspath(self.script)
            return [script] if os.access(script, os.X_OK) else [bash(), script]
        return [bash(), "-c", str(self.command if self.server is None else self.server)]

    def identity(self, *, with_code: bool = True) -> str:
        """Return a text that identifies the work: a script by its contents, a function by the code of its module.

        Without *with_code*, it is the text of releases up to 0.2, which identified a function by its name.
        """
        script = None
        if self.script is not None:
            with open(self.script, "rb") as file:
                script = file.read().hex()
        parts = [self.command, script, self.server, self.python, self.subdirs, self.add_log, *self.strip]
        if with_code and self.python is not None and (code := digest_module(self.python.partition(":")[0])):
            parts.append(code)
        return json.dumps(parts)


def bash() -> str:
    """Return the path of bash, or of sh if there is no bash."""
    import shutil

    return shutil.which("bash") or "/bin/sh"


class Runner:
    """Runs the samples of one slot, in directories below *scratch*."""

    def __init__(self, work: Work, scratch: str, slot: str):
        self.work = work
        self.scratch = scratch
        self.slot = slot
        self.arguments: list[str] = work.arguments() if work.python is None else []
        self.group: ChildGroup | None = None

    def run(self, index: int, sample: Sample, fields: dict[str, bytes]) -> list[Sample]:
        """Return the samples that *sample* becomes; raise Failure or TarshardsError."""
        raise NotImplementedError

    def stop(self) -> None:
        """End the running program."""
        if self.group is not None:
            self.group.end(GRACE)

    def close(self) -> None:
        """End programs that still run after the last sample."""

    def stripped(self, packed: list[Sample]) -> list[Sample]:
        """Strip one newline from the end of the fields ``work.strip`` of *packed*, and return these samples."""
        for sample in packed:
            for field in sample.keys() & self.work.strip:
                sample[field] = sample[field].removesuffix(b"\n")
        return packed

    def start(self, environment: dict[str, str], **ends: Any) -> ChildGroup:
        """Start the program with these ends for stdin, stdout and stderr."""
        try:
            self.group = ChildGroup(self.arguments, environment, **ends)
        except (OSError, ValueError) as error:
            raise Failure(f"cannot run {self.arguments[0]}: {error}", 127) from error
        return self.group

    @contextmanager
    def folder(self, index: int, fields: dict[str, bytes]) -> Iterator[str]:
        """Make the scratch directory of a sample, and remove it afterwards."""
        path = f"{self.scratch}/{index}"
        try:
            unpack(fields, path)
            yield path
        except OSError as error:
            raise Failure(f"scratch directory: {error}") from error
        finally:
            remove(path, fields)


class CommandRunner(Runner):
    """Runs a command for each sample."""

    def __init__(self, work: Work, scratch: str, slot: str):
        super().__init__(work, scratch, slot)
        self.environment: dict[str, str] = dict(os.environ)

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
                return self.stripped(pack(folder, sample, subdirs=self.work.subdirs))
            with open(f"{self.scratch}/log-{self.slot}", "w+b") as file:
                try:
                    self._execute(environment, file.fileno())
                    packed = pack(folder, sample, subdirs=self.work.subdirs)
                except (Failure, TarshardsError):
                    file.seek(0)
                    write_all(STDERR, file.read())
                    raise
                file.seek(0)
                return self.stripped(_with_log(packed, sample, self.work.add_log, file.read()))

    def _execute(self, environment: dict[str, str], output: int) -> None:
        group = self.start(environment, stdin=os.devnull, stdout=output, stderr=output)
        in_time = group.wait(self.work.timeout)
        status = group.end(0 if in_time else GRACE)
        if not in_time:
            raise Failure.of_timeout(self.work.timeout, "the command")
        if status:
            raise Failure.of_status(status, "the command")


def _with_log(packed: list[Sample], sample: Sample, field: str, log: bytes) -> list[Sample]:
    same = [other for other in packed if other["__key__"] == sample["__key__"]]
    if not same:
        same = [dict(sample)]
        packed = same + packed
    if field in same[0]:
        raise Failure(f"the command wrote the field {field}, which the log would replace")
    same[0][field] = log
    return packed


class ServerRunner(Runner):
    """Sends a server one line of JSON per sample and reads one; restarts a server that fails."""

    def run(self, index: int, sample: Sample, fields: dict[str, bytes]) -> list[Sample]:
        with self.folder(index, fields) as folder:
            paths = {field: f"{folder}/sample.{field}" for field in fields}
            question = {"dir": folder, "key": sample["__key__"], "index": index, "fields": paths}
            answer = self._ask(json.dumps(question).encode() + b"\n")
            if answer.get("error") is not None:
                raise Failure(f"the server says: {answer['error']}", 1)
            return self.stripped(pack(folder, sample, subdirs=self.work.subdirs))

    def close(self) -> None:
        if (group := self.group) is not None:
            os.close(group.stdin)
            group.end(0 if group.wait(GRACE) else GRACE)

    def _ask(self, question: bytes) -> dict[str, Any]:
        group = self.group or self.start(dict(os.environ), stdin=PIPE, stdout=PIPE)
        deadline = None if self.work.timeout is None else time.monotonic() + self.work.timeout
        try:
            _send(group.stdin, question, deadline)
            line = _receive_line(group.stdout, deadline)
        except TimeoutError:
            self._end(group, GRACE)
            raise Failure.of_timeout(self.work.timeout, "the server") from None
        except (OSError, EOFError):
            status = self._end(group, 0 if group.wait(0.5) else GRACE)
            raise Failure.of_status(status, "the server") from None
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            self._end(group, 0)
            raise Failure(f"the server answered {line[:80]!r}, which is not a JSON object")
        return answer

    def _end(self, group: ChildGroup, grace: float) -> int:
        self.group = None
        os.close(group.stdin)
        os.close(group.stdout)
        return group.end(grace)


def _send(pipe: int, data: bytes, deadline: float | None) -> None:
    step = len(data) if deadline is None else PIPE_BUF
    for start in range(0, len(data), step):
        if not wait_for(pipe, select.POLLOUT, deadline):
            raise TimeoutError
        write_all(pipe, data[start : start + step])


def _receive_line(pipe: int, deadline: float | None) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        if not wait_for(pipe, select.POLLIN, deadline):
            raise TimeoutError
        data = os.read(pipe, 1 << 16)
        if not data:
            raise EOFError
        line += data
    return line


class FunctionRunner(Runner):
    """Calls a Python function in this process; if the function ends the process, the dispatcher starts another."""

    def __init__(self, work: Work, scratch: str, slot: str):
        super().__init__(work, scratch, slot)
        sys.path.insert(0, os.getcwd())
        self._function: Callable[[Any], Any] | None = None
        self._problem: str | None = None

    def run(self, index: int, sample: Sample, fields: dict[str, bytes]) -> list[Sample]:
        if self.work.timeout is not None:
            # SIGALRM has its default action, so that it ends this process in any code, even C code.
            signal.setitimer(signal.ITIMER_REAL, self.work.timeout)
        try:
            function = self._load()
            results = encoded_results(sample, function({**sample, **fields}))
        except Failure:
            raise
        except Exception as error:
            raise Failure(f"{type(error).__name__}: {error}", 1) from error
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            sys.stdout.flush()
        return [{**sample, **result} for result in results]

    def _load(self) -> Callable[[Any], Any]:
        if self._function is None and self._problem is None:
            try:
                self._function = load(str(self.work.python))
            except Exception as error:
                self._problem = f"{self.work.python}: {type(error).__name__}: {error}"
        if self._function is None:
            raise Failure(str(self._problem), 1)
        return self._function


def load(name: str) -> Callable[..., Any]:
    """Import the function that *name*, ``module:function``, names."""
    module, _, attribute = name.partition(":")
    function: Any = importlib.import_module(module)
    for part in attribute.split("."):
        function = getattr(function, part)
    if not callable(function):
        raise TypeError(f"{name} is not callable")
    return function


def encoded_results(sample: Sample, results: Any) -> list[Sample]:
    """Return a function's result for *sample* (None, a dict or a list of dicts) as dicts with all fields encoded."""
    from tarshards.samples.grouping import encode_sample

    results = [] if results is None else [results] if isinstance(results, dict) else results
    if not isinstance(results, list) or not all(isinstance(result, dict) for result in results):
        raise TypeError(f"the function returned {type(results).__name__}, not a dict, a list of dicts or None")
    encoded: dict[str, Sample] = {}
    for result in results:
        key = result.get("__key__", sample["__key__"])
        if key in encoded:
            raise SampleError("the function returned this key twice", key=key)
        fields, values = encode_sample({**result, "__key__": key})
        encoded[key] = {"__key__": key, **dict(zip(fields, values))}
    return list(encoded.values())


def make_runner(work: Work, scratch: str, slot: str) -> Runner:
    """Return the runner for *work*."""
    kind = ServerRunner if work.server is not None else FunctionRunner if work.python is not None else CommandRunner
    return kind(work, scratch, slot)
