"""One pass of a command over samples: what is read, handed out, recorded, and given back in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any

from tarshards.errors import OpError, TarshardsError
from tarshards.run.samples.dispatch import Dispatcher, Item
from tarshards.run.samples.folder import Sample
from tarshards.run.samples.halt import Halt
from tarshards.run.samples.journal import Joblog, Journal, Outcome, identity
from tarshards.run.samples.reading import Reading
from tarshards.run.samples.scratch import Scratch, encoded_fields
from tarshards.run.samples.slot import Reply, reason
from tarshards.run.samples.worker import Work
from tarshards.samples.keys import join_name

LOOK_AHEAD = 4  # samples a slot that are under way, or done and waiting for an earlier one
SMALL = 1 << 26  # bytes of samples; below, quick slots are kept busy with more of them


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
    work = Work(command, script, server, python, subdirs, add_log, timeout, retries)
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
    run = _Run(work, Halt("now", fail=1) if on_error is None else halt, ordered)
    return run.results(samples, slots, on_error, keep_failed, joblog, state, retry_failed, tmpdir)


class _Run:
    """``finish`` runs in the dispatcher's thread, ``_end`` in both, all else in the caller's."""

    def __init__(self, work: Work, halt: Halt | None, ordered: bool):
        self.work, self.halt, self.ordered = work, halt, ordered
        self.identity = work.identity()
        self.journal: Journal | None = None
        self.joblog: Joblog | None = None
        self.first: OpError | None = None  # the failure that halted the run
        self.line: deque[Item] = deque()  # in the order of the samples, or of their ends
        self.read = self.made = self.taken = 0  # bytes of all fields, of what was made of them, of both once they go

    def results(
        self,
        samples: Iterable[Sample],
        slots: int,
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
            scratch = stack.enter_context(Scratch(tmpdir))
            reading = Reading(enumerate(samples))
            self.dispatcher = stack.enter_context(Dispatcher(self.work, scratch, slots, self.finish, reading.break_off))
            for sample, outcome in self._ended(reading, slots):
                if outcome.failure is None:
                    yield from outcome.outputs
                elif on_error is None:
                    break
                else:
                    on_error(sample, _error(sample, outcome.failure))
                    if keep_failed:
                        yield sample
            if self.first is not None and self.halt is not None:
                self.dispatcher.settle()
                if on_error is None:
                    raise self.first
                raise OpError(f"halted because {self.halt.failed} samples have failed")

    def _ended(self, reading: Reading, slots: int) -> Iterator[tuple[Sample, Outcome]]:
        """Yield what has ended in its turn, while as much as may be is on its way; stop where the run is halted."""
        line = self.line
        ahead = 0  # samples that are on their way
        more = True
        while True:
            while line and (outcome := line[0].outcome) is not None:
                item = line.popleft()
                ahead -= 1
                self.taken += item.size + item.made
                yield item.sample, outcome
            few = ahead < LOOK_AHEAD * slots
            if not few and self.read + self.made - self.taken < SMALL:
                few = ahead < 2 * self.dispatcher.depth
            if more and few and not self.dispatcher.halted:
                entry = reading.next()
                more = entry is not None
                if more:
                    ahead += 1
                    self._begin(*entry)
            elif not ahead or not self.dispatcher.wait(lambda: line and line[0].outcome is not None):
                return

    def _begin(self, index: int, sample: Sample) -> None:
        """Send a sample on its way."""
        item = Item(index, sample)
        if self.ordered:
            self.line.append(item)
        try:
            item.fields = encoded_fields(sample)
        except TarshardsError as error:
            self._end(item, Outcome([], reason(error)))
            return
        item.size = _size([item.fields])
        self.read += item.size
        found = None
        if self.journal is not None:
            item.name = identity(self.identity, sample, item.fields)
            found = self.journal.find(item.name)
        if found is None:
            self.dispatcher.add(item)
        elif found.failure is None:
            self._end(item, found)
        else:
            self._end(item, Outcome([], f"{found.failure} (in an earlier run)"))

    def finish(self, item: Item, reply: Reply) -> None:
        """Record what a slot says of an item."""
        outcome = Outcome(reply.outputs, reply.failure)
        item.made = _size(outcome.outputs)
        self.made += item.made
        if self.joblog is not None:
            names = str(self.work), item.sample.get("__url__", ""), item.sample["__key__"]
            times = reply.begun, reply.seconds
            self.joblog.add(item.index, times, item.size, item.made, reply.exitval, reply.signal, *names)
        if self.journal is not None:
            self.journal.add(item.name, outcome)
        self._end(item, outcome)

    def _end(self, item: Item, outcome: Outcome) -> None:
        """Let an item have its outcome, and halt the run if it is the one to halt for."""
        if self.halt is not None and self.halt.count(outcome.failure is not None):
            self.first = _error(item.sample, str(outcome.failure))
            self.dispatcher.halt(kill=self.halt.when == "now")
        item.fields = {}
        item.outcome = outcome
        if not self.ordered:
            self.line.append(item)


def _size(samples: Iterable[dict[str, Any]]) -> int:
    return sum(len(data) for sample in samples for data in sample.values() if isinstance(data, bytes))


def _error(sample: Sample, reason: str) -> OpError:
    return OpError(reason, url=sample.get("__url__"), key=sample["__key__"])
