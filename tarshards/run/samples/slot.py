"""The program of a slot: reads the work and then samples from stdin, runs each sample, and replies on stdout.

Samples are sent ahead. After a failed or slow sample, the slot does not start those that it has received, up to the
next None: the run may be about to halt, or another slot may be free.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
from typing import Any, NamedTuple

if __name__ == "__main__":  # commands and servers start it without site, to start faster
    sys.path.append(__file__.removesuffix("/tarshards/run/samples/slot.py"))

from tarshards.errors import TarshardsError
from tarshards.parallel.children import STDERR, STDIN, STDOUT
from tarshards.run.samples.folder import write_all
from tarshards.run.samples.runners import Failure, Runner, Work, make_runner
from tarshards.samples.keys import Sample

LONG = (
    0.02  # seconds of work that are sent ahead, at most; after a sample that takes longer nothing sent ahead is begun
)


class Reply(NamedTuple):
    """The result of one try of a sample, which began at *begun* and took *seconds*."""

    outputs: list[Sample]
    failure: str | None
    exitval: int
    signal: int
    begun: float
    seconds: float

    @property
    def pauses(self) -> bool:
        """Whether the slot starts none of the samples sent ahead."""
        return self.failure is not None or self.seconds > LONG


def run(runner: Runner, index: int, sample: Sample, fields: dict[str, bytes]) -> Reply:
    """Run a sample once."""
    begun, start = time.time(), time.perf_counter()
    outputs: list[Sample] = []
    failure, exitval, number = None, 0, 0
    try:
        outputs = runner.run(index, sample, fields)
    except Failure as error:
        failure, exitval, number = error.reason, error.exitval, error.signal
    except TarshardsError as error:
        failure, exitval = reason(error), 255
    return Reply(outputs, failure, exitval, number, begun, time.perf_counter() - start)


def reason(error: TarshardsError) -> str:
    """Return the reason of an error without its origin."""
    return error.reason if error.field is None else f"{error.field}: {error.reason}"


def serve(scratch: str, number: str) -> None:
    """Run samples until stdin ends. On SIGTERM, end the running command and exit; the parent cleans up."""

    stopping = False

    def stop(*_: object) -> None:
        nonlocal stopping
        if not stopping:  # removing the handler while a second signal is pending would be reported on stderr
            stopping = True
            runner.stop()
            os._exit(0)

    # Code in this process reads an empty stdin and prints to stderr; processes that it forks do not block the parent.
    jobs, replies = os.fdopen(os.dup(STDIN), "rb", 1 << 16), os.dup(STDOUT)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, STDIN)
    os.close(null)
    os.dup2(STDERR, STDOUT)
    os.register_at_fork(after_in_child=lambda: os.close(replies))

    work = Work(*pickle.load(jobs))
    runner = make_runner(work, scratch, number)
    if work.python is None:  # a function is simply killed
        signal.signal(signal.SIGTERM, stop)
    pausing = False
    while True:
        try:
            job: Any = pickle.load(jobs)
        except (EOFError, pickle.UnpicklingError):
            return runner.close()
        if job is None:
            pausing = False
        elif not pausing:
            reply = run(runner, *job)
            try:
                write_all(replies, framed(tuple(reply)))
            except BrokenPipeError:  # the parent is gone
                return runner.stop()
            pausing = reply.pauses


def framed(value: Any) -> bytes:
    """Return *value* pickled, after its length."""
    data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    return len(data).to_bytes(8, "little") + data


class Frames:
    """Collects bytes as they come, and returns the values of complete frames."""

    def __init__(self) -> None:
        self._data = bytearray()

    def add(self, data: bytes) -> list[Any]:
        """Return the values that are complete with *data*.

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


if __name__ == "__main__":
    serve(os.environ["TAR_SCRATCH"], os.environ["TAR_SLOT"])
