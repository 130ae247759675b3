"""The program of a slot: the work and then jobs come on stdin, each is run,
and a reply goes to stdout.

Jobs are sent ahead. Where a sample fails or takes long, the slot forgets those that it has got but not begun, up to
a None between them: they may be not worth running any more, or be better off in another slot.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
from typing import Any, NamedTuple

if __name__ == "__main__":  # started without site, in a tenth of the time that an import of all would take
    sys.path.append(__file__.removesuffix("/tarshards/run/samples/slot.py"))

from tarshards.errors import TarshardsError
from tarshards.run.samples.folder import Sample, write_all
from tarshards.run.samples.worker import Failure, Work, Worker, framed, make_worker

LONG = 0.02  # seconds


class Reply(NamedTuple):
    """What a slot says of a sample; *seconds* are those of all tries, the first of which began at *begun*."""

    outputs: list[Sample]
    failure: str | None
    exitval: int
    signal: int
    begun: float
    seconds: float

    @property
    def forgets(self) -> bool:
        """Say whether the slot has forgotten the jobs that had been sent ahead."""
        return self.failure is not None or self.seconds > LONG


def run(worker: Worker, retries: int, index: int, sample: Sample, fields: dict[str, bytes]) -> Reply:
    """Run a sample until it succeeds or has had its retries."""
    begun, start = time.time(), time.perf_counter()
    outputs: list[Sample] = []
    failure, exitval, number = None, 0, 0
    for _ in range(1 + retries):
        try:
            outputs, failure, exitval, number = worker.run(index, sample, fields), None, 0, 0
        except Failure as error:
            failure, exitval, number = error.reason, error.exitval, error.signal
        except TarshardsError as error:
            failure, exitval, number = reason(error), 255, 0
        if failure is None:
            break
    return Reply(outputs, failure, exitval, number, begun, time.perf_counter() - start)


def reason(error: TarshardsError) -> str:
    return error.reason if error.field is None else f"{error.field}: {error.reason}"


def serve(scratch: str, number: str) -> None:
    """Run jobs until there are no more, or a SIGTERM comes: then end what runs, and leave the rest to our parent."""

    def stop(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        worker.stop()
        os._exit(0)

    jobs = open(0, "rb", buffering=1 << 16, closefd=False)  # noqa: SIM115 - until the end
    work = Work(*pickle.load(jobs))
    worker = make_worker(work, scratch, number)
    signal.signal(signal.SIGTERM, stop)
    forgetting = False
    while True:
        try:
            job: Any = pickle.load(jobs)
        except (EOFError, pickle.UnpicklingError):
            return worker.close()
        if job is None:
            forgetting = False
        elif not forgetting:
            reply = run(worker, work.retries, *job)
            try:
                write_all(1, framed(tuple(reply)))
            except BrokenPipeError:  # nobody is there any more
                return worker.stop()
            forgetting = reply.forgets


if __name__ == "__main__":
    serve(os.environ["TAR_SCRATCH"], os.environ["TAR_SLOT"])
