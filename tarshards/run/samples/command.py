"""One run of a command over samples: read them, distribute them to slots, record and return the results in order."""

from __future__ import annotations

import re
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

from tarshards.errors import OpError, TarshardsError
from tarshards.parallel.calls import EACH
from tarshards.run.samples.dispatch import Dispatcher, QueuedSample
from tarshards.run.samples.journal import Joblog, Journal, SampleResult, identity
from tarshards.run.samples.runners import Work
from tarshards.run.samples.scratch import Scratch, encoded_fields
from tarshards.run.samples.slot import Reply, reason
from tarshards.samples.keys import Sample, join_name
from tarshards.storage.markers import log

SMALL = 1 << 26  # bytes of samples; below this limit quick slots may have more of them queued

OnFailure = Callable[[Sample, OpError], Any]


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
    on_error: OnFailure | None = None,
    keep_failed: bool = False,
    joblog: str | None = None,
    state: str | None = None,
    retry_failed: bool = False,
    tmpdir: str | None = None,
    strip: Sequence[str] = (),
) -> Iterator[Sample]:
    """Yield the results of running a command on each sample, *slots* at a time, in the order of the samples.

    Give one of *command*, a line of bash that runs in a directory with the fields as files ``sample.EXT``; *script*, a
    program that runs there; *server*, a line of bash that starts one server per slot, which answers a line of JSON per
    sample; *python*, ``module:function``, called with a dict of bytes in the process of each slot. The files
    ``sample.*`` that remain are the result; ``sample-SUFFIX.EXT`` is another sample; with *subdirs* each subdirectory
    is one. The fields *strip* of the results lose one newline at the end.

    A sample fails if its command fails, or runs for more than *timeout* seconds, and so do *retries* more tries.
    Without *on_error* the first failure ends the run and is raised as OpError. Otherwise ``on_error(sample, error)`` is
    called in the order of the samples, and the sample is left out, or with *keep_failed* yielded unchanged, unless
    *halt* ends the run.

    *joblog* names a file that gets a line per sample. *state* names a file that stores finished samples for a later run
    (failures too, unless *retry_failed*); the caller removes it. Scratch directories are made in *tmpdir*, by default
    in memory if there is enough. Closing the iterator kills running commands.
    """
    work = Work(command, script, server, python, subdirs, add_log, timeout, retries, tuple(strip))
    if sum(way is not None for way in (command, script, server, python)) != 1:
        raise ValueError("give one of command, script, server and python")
    if python is not None and not all(python.partition(":")):
        raise ValueError(f"{python!r} is not a function's name; write it like module:function")
    if slots < 1 or retries < 0 or (timeout is not None and timeout <= 0):
        raise ValueError("slots and timeout must be positive, and retries must not be negative")
    if add_log is not None:
        if command is None and script is None:
            raise ValueError("add_log requires a command or a script; servers and functions have no log per sample")
        join_name("sample", add_log)
    if (subdirs or strip) and python is not None:
        raise ValueError("subdirs and strip do not apply to a function")
    run = _Run(work, Halt("now", fail=1) if on_error is None else halt, ordered, on_error, keep_failed)
    return run.results(samples, slots, joblog, state, retry_failed, tmpdir)


@dataclass
class Halt:
    """A rule that ends a run after *fail* failures, or when *percent* of the finished samples, at least 3, have failed.

    ``soon`` lets running samples finish, ``now`` kills them.

    >>> Halt.parse("now,fail=1")
    Halt(when='now', fail=1, percent=None)
    >>> Halt.parse("soon,fail=10%")
    Halt(when='soon', fail=None, percent=10.0)
    """

    when: Literal["now", "soon"]
    fail: int | None = None
    percent: float | None = None
    finished: int = field(default=0, repr=False)
    failed: int = field(default=0, repr=False)
    reached: bool = field(default=False, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    @classmethod
    def parse(cls, text: str) -> Halt:
        """Parse ``now|soon,fail=N|N%``; raise ValueError for anything else."""
        match = re.fullmatch(r"(now|soon),fail=([1-9]\d*|\d+(?:\.\d+)?(?=%))(%?)", text)
        if match is None:
            raise ValueError(f"{text!r} is not a halting rule; write it like now,fail=1 or soon,fail=10%")
        when: Literal["now", "soon"] = "now" if match[1] == "now" else "soon"
        return cls(when, percent=float(match[2])) if match[3] else cls(when, fail=int(match[2]))

    def count(self, failed: bool) -> bool:
        """Count a finished sample; return True if the rule applies from this sample on."""
        with self._lock:
            self.finished += 1
            self.failed += failed
            before, self.reached = self.reached, self.reached or self._is_reached()
            return self.reached and not before

    def _is_reached(self) -> bool:
        if self.fail is not None and self.failed >= self.fail:
            return True
        if self.percent is None or self.failed < 3:  # of fewer, a percentage means little
            return False
        return 100 * self.failed >= self.percent * self.finished


class Interruptible:
    """The items of an iterable; ``interrupt`` ends the iteration from another thread.

    A reader that is blocked in the main thread gets SIGINT; the iterable gets the KeyboardInterrupt and can clean up.
    In other threads, or if SIGINT has another handler, reading ends with the next item.
    """

    def __init__(self, items: Iterable[Any]):
        self._items = iter(items)
        self._reads, self._interrupted = False, False
        self._lock = threading.Lock()  # while it is held, no signal is sent

    def next(self) -> Any:
        """Return the next item, or None after the last."""
        try:
            self._reads = threading.current_thread() is threading.main_thread()
            try:
                return None if self._interrupted else next(self._items, None)
            finally:
                with self._lock:
                    self._reads = False
        except KeyboardInterrupt:
            if not self._interrupted:
                raise
            return None

    def interrupt(self) -> None:
        """End the iteration, and wait until the reader has finished the last item."""
        self._interrupted = True
        while True:
            with self._lock:
                if not self._reads or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
                    return
                signal.pthread_kill(int(threading.main_thread().ident or 0), signal.SIGINT)
            # One that arrives just before a read takes effect only after it; but the next one also ends cleaning up.
            end = time.monotonic() + 1
            while self._reads and time.monotonic() < end:
                time.sleep(0.01)


class _Run:
    """One run; ``finish`` runs in the dispatcher's thread, ``_end`` in both, the rest in the caller's."""

    def __init__(self, work: Work, halt: Halt | None, ordered: bool, on_error: OnFailure | None, keep_failed: bool):
        self.work, self.halt, self.ordered = work, halt, ordered
        self.on_error, self.keep_failed = on_error, keep_failed
        self.identity, self.earlier_identity = work.identity(), work.identity(with_code=False)
        self.begun = self.kept = self.unsure = 0  # samples: all, found in the journal, and those of an earlier release
        self.journal: Journal | None = None
        self.joblog: Joblog | None = None
        self.halted_by: OpError | None = None
        self.line: deque[QueuedSample] = deque()  # in the order in which to yield them
        self.read = self.made = self.taken = 0  # bytes of fields, of outputs, and of both for yielded samples

    def results(
        self,
        samples: Iterable[Sample],
        slots: int,
        joblog: str | None,
        state: str | None,
        retry_failed: bool,
        tmpdir: str | None,
    ) -> Iterator[Sample]:
        with ExitStack() as stack:
            if state is not None:
                self.journal = Journal(state, retry_failed=retry_failed)
                stack.callback(self.journal.close)
                stack.callback(self._say_kept)
            if joblog is not None:
                self.joblog = Joblog(joblog, append=state is not None)
                stack.callback(self.joblog.close)
            scratch = stack.enter_context(Scratch(tmpdir))
            source = Interruptible(enumerate(samples))
            self.dispatcher = stack.enter_context(Dispatcher(self.work, scratch, slots, self.finish, source.interrupt))
            for sample, result in self._finished(source, slots):
                if result.failure is None:
                    yield from result.outputs
                elif self.on_error is None:
                    break
                else:
                    self.on_error(sample, _error(sample, result.failure))
                    if self.keep_failed:
                        yield sample
            if self.halted_by is not None and self.halt is not None:
                self.dispatcher.settle()
                if self.on_error is None:
                    raise self.halted_by
                for queued in self.line:  # failures queued behind samples that never finish
                    if queued.result is not None and queued.result.failure is not None:
                        self.on_error(queued.sample, _error(queued.sample, queued.result.failure))
                raise OpError(f"halted because {self.halt.failed} samples have failed")

    def _finished(self, source: Interruptible, slots: int) -> Iterator[tuple[Sample, SampleResult]]:
        """Yield finished samples in order, and keep enough others queued; stop when the run is halted."""
        line = self.line
        ahead = 0  # samples read but not yet yielded
        more = True
        failed: TarshardsError | None = None  # of the source: the samples before it are finished first
        while True:
            while line and (result := line[0].result) is not None:
                queued = line.popleft()
                ahead -= 1
                self.taken += queued.size + queued.made
                yield queued.sample, result
            few = ahead < EACH * slots
            if not few and self.read + self.made - self.taken < SMALL:
                few = ahead < 2 * self.dispatcher.depth
            if more and few and not self.dispatcher.halted:
                try:
                    entry = source.next()
                except TarshardsError as error:
                    entry, failed = None, error
                more = entry is not None
                if more:
                    ahead += 1
                    self._begin(*entry)
            elif not ahead or not self.dispatcher.wait(lambda: line and line[0].result is not None):
                if failed is not None and not ahead:
                    raise failed
                return

    def _say_kept(self) -> None:
        if self.kept:
            note = f", {self.unsure} by an earlier release, which did not record code" if self.unsure else ""
            log.warning("results of %d of %d samples kept from an earlier run%s", self.kept, self.begun, note)

    def _begin(self, index: int, sample: Sample) -> None:
        """Queue a sample, or finish it if the journal has its result."""
        queued = QueuedSample(index, sample)
        if self.ordered:
            self.line.append(queued)
        try:
            queued.fields = encoded_fields(sample)
        except TarshardsError as error:
            self._end(queued, SampleResult([], reason(error)))
            return
        queued.size = _size([queued.fields])
        self.read += queued.size
        found = None
        self.begun += 1
        if self.journal is not None:
            queued.name = identity(self.identity, sample, queued.fields)
            found = self.journal.find(queued.name)
            if found is None and self.earlier_identity != self.identity:
                found = self.journal.find(identity(self.earlier_identity, sample, queued.fields))
                self.unsure += found is not None
            self.kept += found is not None
        if found is None:
            self.dispatcher.add(queued)
        elif found.failure is None:
            self._end(queued, found)
        else:
            self._end(queued, SampleResult([], f"{found.failure} (in an earlier run)"))

    def finish(self, queued: QueuedSample, reply: Reply) -> None:
        """Record the reply for a sample."""
        result = SampleResult(reply.outputs, reply.failure)
        queued.made = _size(result.outputs)
        self.made += queued.made
        if self.joblog is not None:
            names = str(self.work), queued.sample.get("__url__", ""), queued.sample["__key__"]
            times = reply.begun, reply.seconds
            self.joblog.add(queued.index, times, queued.size, queued.made, reply.exitval, reply.signal, *names)
        if self.journal is not None:
            self.journal.add(queued.name, result)
        self._end(queued, result)

    def _end(self, queued: QueuedSample, result: SampleResult) -> None:
        """Set the result of a sample, and halt the run if the rule says so."""
        if self.halt is not None and self.halt.count(result.failure is not None):
            self.halted_by = _error(queued.sample, str(result.failure))
            self.dispatcher.halt(kill=self.halt.when == "now")
        queued.fields = {}
        queued.result = result
        if not self.ordered:
            self.line.append(queued)


def _size(samples: Iterable[dict[str, Any]]) -> int:
    return sum(len(data) for sample in samples for data in sample.values() if isinstance(data, bytes))


def _error(sample: Sample, reason: str) -> OpError:
    return OpError(reason, url=sample.get("__url__"), key=sample["__key__"])
