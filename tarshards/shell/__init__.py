"""Map commands over samples: each sample becomes files in a scratch directory, and what is left of them its result."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

from tarshards.errors import OpError, TarshardsError
from tarshards.keys import join_name
from tarshards.parallel import bounded_map
from tarshards.shell.halt import Halt
from tarshards.shell.journal import Joblog, Journal, Outcome, identity
from tarshards.shell.scratch import Sample, Scratch, encoded_fields
from tarshards.shell.slots import Slots
from tarshards.shell.worker import Failure, Work, Worker, make_worker

__all__ = ["Halt", "map_command"]

LOOK_AHEAD = 4  # samples a slot that are under way, or done and waiting for an earlier one


def map_command(
    samples: Iterable[Sample],
    command: str | None = None,
    *,
    script: str | None = None,
    server: str | None = None,
    python: str | None = None,
    slots: int = 1,
    ordered: bool = True,
    subdirs: bool = False,
    add_log: str | None = None,
    timeout: float | None = None,
    retries: int = 0,
    halt: Halt | None = None,
    on_error: Callable[[Sample, OpError], Any] | None = None,
    keep_failed: bool = False,
    joblog: str | None = None,
    state: str | None = None,
    retry_failed: bool = False,
    tmpdir: str | None = None,
) -> Iterator[Sample]:
    """Yield what a command makes of each sample, *slots* at a time, in the order of the samples.

    One of: *command*, a line of bash run where the fields are files ``sample.EXT``; *script*, a program run there;
    *server*, a line of bash that starts one worker a slot, which answers a line of JSON a sample; *python*,
    ``module:function``, called with a dict of bytes in a process a slot. What remains under ``sample.*`` is the
    result, ``sample-SUFFIX.EXT`` another sample; with *subdirs* each subdirectory is one.

    A sample fails when its command does, or takes more than *timeout* seconds, *retries* more times. Without
    *on_error* the first failure ends all and is raised as OpError; else ``on_error(sample, error)`` is called in its
    turn, and the sample is left out, or with *keep_failed* yielded as it came, unless *halt* ends all.

    *joblog* gets a line of each sample. *state* names a file that keeps what is finished, for a later run to take it
    from there (failures too, unless *retry_failed*); the caller removes it. Scratch directories go to *tmpdir*, by
    default to memory if there is room. Breaking off kills what runs.
    """
    work = Work(command, script, server, python, subdirs, add_log, timeout)
    if sum(way is not None for way in (command, script, server, python)) != 1:
        raise ValueError("one of command, script, server and python says what is to be run")
    if python is not None and not all(python.partition(":")):
        raise ValueError(f"{python!r} names no function; write it like module:function")
    if slots < 1 or retries < 0 or (timeout is not None and timeout <= 0):
        raise ValueError("slots and timeout are positive, retries is not negative")
    if add_log is not None:
        if command is None and script is None:
            raise ValueError("the log is that of a command or a script; servers and functions have none a sample")
        join_name("sample", add_log)
    if subdirs and python is not None:
        raise ValueError("a function has no subdirectories")
    if on_error is None:
        halt = Halt("now", fail=1)
    run = _Run(work, retries, halt)
    return run.results(samples, slots, ordered, on_error, keep_failed, joblog, state, retry_failed, tmpdir)


class _Done(NamedTuple):
    """A sample and its outcome; neither where it was not run to its end."""

    sample: Sample
    outcome: Outcome | None


class _Run:
    """One pass over the samples; ``_finish`` runs in the slots' threads, ``results`` in the caller's."""

    def __init__(self, work: Work, retries: int, halt: Halt | None):
        self.work, self.retries, self.halt = work, retries, halt
        self.identity = work.identity()
        self.workers: list[Worker] = []
        self.journal: Journal | None = None
        self.joblog: Joblog | None = None
        self.first: OpError | None = None  # the failure that halted the run

    def results(
        self,
        samples: Iterable[Sample],
        slots: int,
        ordered: bool,
        on_error: Callable[[Sample, OpError], Any] | None,
        keep_failed: bool,
        joblog: str | None,
        state: str | None,
        retry_failed: bool,
        tmpdir: str | None,
    ) -> Iterator[Sample]:
        with ExitStack() as stack:
            if state is not None:
                self.journal = Journal(state, retry_failed=retry_failed)
                stack.callback(self.journal.close)
            if joblog is not None:
                self.joblog = Joblog(joblog, append=state is not None)
                stack.callback(self.joblog.close)
            scratch = Scratch(tmpdir)
            stack.callback(lambda: scratch.close(kill=any(worker.stopped for worker in self.workers)))
            self.workers = [make_worker(self.work, scratch, slot) for slot in range(1, slots + 1)]
            for worker in self.workers:
                stack.callback(worker.close)
            executor = Slots(self.workers, self._give_up)
            stack.callback(executor.shutdown)
            finish: Callable[..., _Done] = self._finish
            window = LOOK_AHEAD * slots
            finished = bounded_map(finish, enumerate(samples), executor=executor, window=window, ordered=ordered)
            stack.callback(finished.close)  # type: ignore[attr-defined]
            for sample, outcome in finished:
                if outcome is None:
                    raise self._halted(on_error is None)
                if outcome.failure is not None:
                    error = _error(sample, outcome.failure)
                    if on_error is None:
                        raise error
                    on_error(sample, error)
                    if keep_failed:
                        yield sample
                else:
                    yield from outcome.outputs
            if self.halt is not None and self.halt.reached:
                raise self._halted(on_error is None)

    def _halted(self, strict: bool) -> OpError:
        assert self.halt is not None
        assert self.first is not None
        if strict:
            return self.first
        return OpError(f"halted because {self.halt.failed} samples have failed")

    def _give_up(self) -> None:
        """Stop what runs, unless it has been said that it may finish."""
        if self.halt is None or not self.halt.reached or self.halt.when == "now":
            for worker in self.workers:
                worker.stop()

    def _finish(self, worker: Worker, item: tuple[int, Sample]) -> _Done:
        index, sample = item
        if worker.stopped or (self.halt is not None and self.halt.reached):
            return _Done(sample, None)
        try:
            fields = encoded_fields(sample)
            outcome = self._recorded_or_run(worker, index, sample, fields)
        except TarshardsError as error:
            outcome = Outcome([], _reason(error))
        if outcome is not None and self.halt is not None and self.halt.count(outcome.failure is not None):
            self.first = _error(sample, str(outcome.failure))
            self._give_up()
        return _Done(sample, outcome)

    def _recorded_or_run(self, worker: Worker, index: int, sample: Sample, fields: dict[str, bytes]) -> Outcome | None:
        if self.journal is None:
            return self._run(worker, index, sample, fields)
        name = identity(self.identity, sample, fields)
        outcome = self.journal.find(name)
        if outcome is None:
            outcome = self._run(worker, index, sample, fields)
            if outcome is not None:
                self.journal.add(name, outcome)
        elif outcome.failure is not None:
            return Outcome([], f"{outcome.failure} (in an earlier run)")
        return outcome

    def _run(self, worker: Worker, index: int, sample: Sample, fields: dict[str, bytes]) -> Outcome | None:
        """Run one sample until it succeeds or has had its retries; None if it was stopped."""
        begun = time.time()
        exitval = signal = 0
        outcome = Outcome([], None)
        for _ in range(1 + self.retries):
            try:
                outcome, exitval, signal = Outcome(worker.run(index, sample, fields), None), 0, 0
            except Failure as failure:
                outcome, exitval, signal = Outcome([], failure.reason), failure.exitval, failure.signal
            except TarshardsError as error:
                outcome, exitval, signal = Outcome([], _reason(error)), 255, 0
            if worker.stopped:
                return None
            if outcome.failure is None:
                break
        if self.joblog is not None:
            sent, got = _size([fields]), _size(outcome.outputs)
            names = str(self.work), sample.get("__url__", ""), sample["__key__"]
            self.joblog.add(index, begun, sent, got, exitval, signal, *names)
        return outcome


def _size(samples: Iterable[dict[str, Any]]) -> int:
    return sum(len(data) for sample in samples for data in sample.values() if isinstance(data, bytes))


def _reason(error: TarshardsError) -> str:
    return error.reason if error.field is None else f"{error.field}: {error.reason}"


def _error(sample: Sample, reason: str) -> OpError:
    return OpError(reason, url=sample.get("__url__"), key=sample["__key__"])
