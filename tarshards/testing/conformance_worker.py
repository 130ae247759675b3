"""Read each of many expressions in a separate process, and print the outcomes as lines of JSON.

``python conformance_worker.py READER SECONDS`` takes an expression from each line of stdin, as JSON. READER is a
function, ``module:function``, or a command, which gets the expression as its last argument. This file imports only the
standard library, so that the Python of any environment can run it.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib import import_module
from typing import Any

FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
CANNOT = os.EX_UNAVAILABLE  # the exit status of a reader that does not support the input, such as an expression
ENDINGS = {0: "end", CANNOT: "cannot"}


def plain(sample: Any) -> dict[str, Any]:
    """Return a sample for JSON: each field as text with one character per byte, without other entries."""
    shown = {}
    for name, value in dict(sample).items():
        if name == "__key__":
            shown[name] = value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else value
        elif not (name.startswith("__") and name.endswith("__")) and value is not None:
            data = value.encode("utf-8", "surrogateescape") if isinstance(value, str) else bytes(memoryview(value))
            shown[name] = data.decode("latin-1")
    return shown


def read_by(function: Callable[[str], Iterable[Any]]) -> Callable[[str, int], int]:
    """Return a function that writes the samples of *function* to a descriptor as lines, and returns the exit status."""

    def read(expression: str, records: int) -> int:
        try:
            for sample in function(expression):
                os.write(records, json.dumps(plain(sample)).encode() + b"\n")
        except NotImplementedError as error:
            sys.stderr.write(f"{error}\n")
            return CANNOT
        except Exception:
            traceback.print_exc()
            return 1
        return 0

    return read


def run_by(command: list[str]) -> Callable[[str, int], int]:
    def run(expression: str, records: int) -> int:
        os.dup2(records, 1)
        os.execvp(command[0], [*command, expression])

    return run


def deliver(read: Callable[[str, int], int], expression: str, seconds: int) -> dict[str, Any]:
    """Run *read* in a child process for *seconds* at most; return its samples, ending and messages."""
    with tempfile.TemporaryFile() as records, tempfile.TemporaryFile() as log:
        child = os.fork()
        if not child:
            status = 1
            try:
                os.setsid()
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(seconds)  # remains in effect when a command is executed
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
                status = read(expression, records.fileno())
                sys.stderr.flush()
            finally:
                os._exit(status)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # its children too
        records.seek(0)
        log.seek(0)
        samples = [json.loads(line) for line in records if line.endswith(b"\n")]
        lines = log.read().decode(errors="replace").splitlines()
    if code < 0:
        ending = "hang" if -code == signal.SIGALRM else "crash"
        lines.append(f"{signal.strsignal(-code)} (signal {-code})")
    else:
        ending = ENDINGS.get(code, "error")
    return {"samples": samples, "ending": ending, "log": [line.strip() for line in lines if line.strip()]}


def main(reader: str, seconds: str) -> None:
    sys.path[0] = ""  # not the folder of this file
    if FUNCTION.fullmatch(reader):
        module, _, name = reader.partition(":")
        read = read_by(getattr(import_module(module), name))
    else:
        read = run_by(shlex.split(reader))
    for line in sys.stdin:
        sys.stdout.write(json.dumps(deliver(read, json.loads(line), int(seconds))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
