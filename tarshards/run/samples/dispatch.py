"""Samples distributed to slots, each a process; one thread exchanges messages with all of them."""

from __future__ import annotations

import fcntl
import os
import pickle
import select
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from queue import Empty, SimpleQueue
from subprocess import PIPE
from threading import Thread
from typing import Any

from tarshards.errors import OpError
from tarshards.parallel.children import ChildGroup
from tarshards.parallel.signals import GRACE, TICK
from tarshards.run.samples.journal import SampleResult
from tarshards.run.samples.runners import Failure, Work
from tarshards.run.samples.scratch import Scratch
from tarshards.run.samples.slot import LONG, Frames, Reply
from tarshards.samples.keys import Sample

PROGRAM = os.path.join(os.path.dirname(__file__), "slot.py")
MAX_DEPTH = 64  # most samples sent to a slot


class QueuedSample:
    """A sample to be run; its *result* is set when it is finished."""

    __slots__ = ("begun", "fields", "index", "made", "name", "result", "sample", "seconds", "size", "tries")

    def __init__(self, index: int, sample: Sample):
        self.index: int = index
        self.sample: Sample = sample
        self.fields: dict[str, bytes] = {}
        self.size: int = 0  # total bytes of the fields
        self.made: int = 0  # total bytes of the outputs
        self.name: str = ""  # name in the journal
        self.tries: int = 0
        self.begun: float = 0.0
        self.seconds: float = 0.0
        self.result: SampleResult | None = None

    def job(self) -> tuple[int, Sample, dict[str, bytes]]:
        """Return the message for a slot."""
        reserved: Sample = {name: self.sample[name] for name in ("__key__", "__url__") if name in self.sample}
        return self.index, reserved, self.fields

    def tried(self, reply: Reply) -> Reply:
        """Count a try; return its reply with the start of the first try and the total seconds."""
        self.begun = self.begun if self.tries else reply.begun
        self.tries += 1
        self.seconds += reply.seconds
        return reply._replace(begun=self.begun, seconds=self.seconds)


class Slot:
    """The parent's end of one slot's process."""

    def __init__(self, work: Work, scratch: Scratch, number: int):
        self.work = work
        self.number = number
        flags = ["-S", "-P"] if work.python is None else ["-P"]  # a function may import from site-packages
        self.group: ChildGroup = ChildGroup(
            [sys.executable, *flags, PROGRAM],
            {**os.environ, "TAR_SLOT": str(number), "TAR_SCRATCH": scratch.path},
            stdin=PIPE,
            stdout=PIPE,
        )
        self.jobs: Any = os.fdopen(self.group.stdin, "wb", 0)
        self.replies: Any = os.fdopen(self.group.stdout, "rb", 0)
        for pipe in (self.jobs, self.replies):
            os.set_blocking(pipe.fileno(), False)
            with suppress(OSError, AttributeError):  # the pipes of one user share a limit; only Linux has such sizes
                fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, 1 << 20)
        self.sent: deque[QueuedSample] = deque()  # samples without a reply yet
        self.depth: int = 1  # limit of the samples sent
        self.closed: bool = False  # the process sends no more replies
        self.begun: float | None = None  # the time when the first sent sample began, if known
        self.unsent: deque[bytes | memoryview] = deque([pickle.dumps(tuple(work))])
        self._frames = Frames()

    @property
    def fill(self) -> float:
        """The share of the depth that is in use."""
        return len(self.sent) / self.depth

    def add(self, queued: QueuedSample) -> None:
        """Send a sample, as soon as ``send`` is called."""
        if not self.sent:
            self.begun = time.time()
        self.sent.append(queued)
        self.unsent.append(pickle.dumps(queued.job(), pickle.HIGHEST_PROTOCOL))

    def send(self) -> None:
        """Send as much as the pipe accepts now."""
        while self.unsent:
            try:
                sent = os.writev(self.jobs.fileno(), list(islice(self.unsent, MAX_DEPTH)))
            except BlockingIOError:
                return
            except BrokenPipeError:  # reading the end of the replies gives the reason
                self.unsent.clear()
                return
            while sent:
                first = self.unsent.popleft()
                if len(first) > sent:
                    self.unsent.appendleft(memoryview(first)[sent:])
                sent -= min(sent, len(first))

    def receive(self) -> list[tuple[QueuedSample, Reply]]:
        """Return the samples that have been replied to."""
        found = []
        with suppress(BlockingIOError):
            while data := os.read(self.replies.fileno(), 1 << 16):
                found += self._frames.add(data)
                if len(data) < 1 << 16:
                    break
            else:
                self.closed = True
        if found:
            self.begun = time.time()
        return [(self.sent.popleft(), Reply(*reply)) for reply in found]

    def pace(self, reply: Reply) -> list[QueuedSample]:
        """Raise or lower the depth after *reply*; return the samples that the slot does not start."""
        if not reply.pauses:
            is_quick = self.depth * reply.seconds < LONG
            self.depth = min(2 * self.depth, MAX_DEPTH) if is_quick else -(-self.depth // 2)
            return []
        unstarted = list(self.sent)
        self.sent.clear()
        self.depth = 1
        self.unsent.append(pickle.dumps(None))
        return unstarted

    def end(self, seconds: float | None) -> None:
        """Wait until the process exits, and kill its group then or after *seconds*."""
        self.jobs.close()
        self.group.wait(seconds)
        self.group.end()
        self.replies.close()

    def died(self) -> Reply:
        """Return the reply for the first sample sent to a function's process that has died."""
        begun = self.begun or time.time()
        failure = Failure.of_status(self.group.reap(), "the function's process")
        if self.work.timeout is not None and failure.signal == signal.SIGALRM:
            failure = Failure.of_timeout(self.work.timeout, "the function")
        return Reply([], failure.reason, failure.exitval, failure.signal, begun, time.time() - begun)


class Dispatcher:
    """Runs samples in *slots* processes; a thread exchanges messages with them.

    The thread calls *finish* with each sample that is finished, and *ended* when it ends.
    """

    def __init__(
        self,
        work: Work,
        scratch: Scratch,
        slots: int,
        finish: Callable[[QueuedSample, Reply], None],
        ended: Callable[[], None],
    ):
        self._work, self._scratch = work, scratch
        self._finish, self._ended = finish, ended
        self._pending: deque[QueuedSample] = deque()
        self._changed: SimpleQueue[None] = SimpleQueue()  # has an item if something changed
        self._halted = self._killed = self._closing = False
        self._wants_more = False  # wake the thread for a new sample
        self._error: BaseException | None = None
        self._slots: list[Slot] = []
        try:
            for number in range(1, slots + 1):
                self._slots.append(Slot(work, scratch, number))
            self._woken, self._waker = os.pipe()
        except OSError as error:
            for slot in self._slots:
                slot.end(0)
            raise OpError(f"no more than {len(self._slots)} slots can be started: {error.strerror}") from error
        for pipe in (self._woken, self._waker):
            os.set_blocking(pipe, False)
        self._thread = Thread(target=self._run, name="tarshards-dispatcher", daemon=True)
        self._thread.start()

    @property
    def depth(self) -> int:
        """The number of samples that may be sent to slots now."""
        return sum(slot.depth for slot in self._slots)

    @property
    def halted(self) -> bool:
        """Whether no more samples will start."""
        return self._halted or self._error is not None

    def add(self, queued: QueuedSample) -> None:
        """Run a sample as soon as a slot is free."""
        self._pending.append(queued)
        if self._wants_more:
            self._wake()

    def wait(self, ready: Callable[[], Any]) -> bool:
        """Wait until *ready*; return False if the thread ended before. Raises the error that ended it."""
        while not ready() and self._thread.is_alive():
            with suppress(Empty):
                self._changed.get(timeout=TICK)
        if self._error is not None:
            raise self._error
        return bool(ready())

    def halt(self, *, kill: bool) -> None:
        """Start no more samples, and with *kill* end the running ones; may be called from any thread."""
        self._halted = True
        self._killed = self._killed or kill
        self._wake()

    def settle(self) -> None:
        """Wait until all samples that were running when the run was halted have finished."""
        self.wait(lambda: False)

    def __enter__(self) -> Dispatcher:
        return self

    def __exit__(self, *_: object) -> None:
        """End all slots, and kill those that are busy."""
        self._closing = True
        self._wake()
        self._thread.join()
        self._killed = self._killed or self._busy()
        if self._killed:
            self._terminate()
        for slot in self._slots:
            slot.jobs.close()
        # A slot ends a server's process itself, which takes time; a function may leave threads that never end.
        patience = 2 * GRACE if self._killed or self._work.python is not None else None
        end = time.monotonic() + (patience or 0)
        for slot in self._slots:
            slot.end(None if patience is None else max(0.0, end - time.monotonic()))
        os.close(self._woken)
        os.close(self._waker)

    def _terminate(self) -> None:
        for slot in self._slots:
            slot.group.signal(signal.SIGTERM)

    def _wake(self) -> None:
        self._wants_more = False
        with suppress(BlockingIOError):
            os.write(self._waker, b".")

    def _run(self) -> None:
        try:
            while not (self._closing or self._killed or (self._halted and not self._busy())):
                if not self._halted:
                    self._distribute()
                self._exchange()
            if self._killed:
                self._terminate()
        except BaseException as error:
            self._error = error
        self._report()
        self._ended()

    def _report(self) -> None:
        if self._changed.empty():
            self._changed.put(None)

    def _busy(self) -> bool:
        return any(slot.sent for slot in self._slots)

    def _distribute(self) -> None:
        self._wants_more = True  # set before looking, so that a sample added meanwhile wakes the thread
        while self._pending:
            slot = min(self._slots, key=lambda slot: slot.fill)
            if slot.fill >= 1:
                break
            slot.add(self._pending.popleft())
        self._wants_more = min(slot.fill for slot in self._slots) <= 0.5

    def _exchange(self) -> None:
        """Send as much as possible, and process the replies that have arrived."""
        poller = select.poll()
        poller.register(self._woken, select.POLLIN)
        for slot in self._slots:
            slot.send()
            poller.register(slot.replies, select.POLLIN)
            if slot.unsent:
                poller.register(slot.jobs, select.POLLOUT)
        if self.depth > 8 * len(self._slots):
            time.sleep(0.001)  # collects the replies of fast slots, so that this thread wakes less often
        ready = {descriptor for descriptor, _ in poller.poll()}
        if self._woken in ready:
            os.read(self._woken, 4096)
        for slot in list(self._slots):
            if slot.replies.fileno() in ready and not self._killed:
                self._receive(slot)

    def _receive(self, slot: Slot) -> None:
        for queued, reply in slot.receive():
            unstarted = slot.pace(reply)
            self._pending.extendleft(reversed(unstarted))
            self._conclude(slot, queued, reply)
            if self._killed:
                return
        if slot.closed:
            self._replace(slot)

    def _conclude(self, slot: Slot, queued: QueuedSample, reply: Reply) -> None:
        """Finish a sample, or retry it in the same slot."""
        total = queued.tried(reply)
        if reply.failure is not None and queued.tries <= self._work.retries:
            slot.add(queued)
        else:
            self._finish(queued, total)
            self._report()

    def _replace(self, slot: Slot) -> None:
        """Replace a slot whose process has died; if it ran a function, its current sample fails.

        Raises OpError for the slots of commands and servers, which cannot kill their slot.
        """
        slot.end(0.5)
        if self._work.python is None or slot.begun is None:
            raise OpError(f"the process of a slot {slot.group.how_it_ended}")
        try:
            fresh = Slot(self._work, self._scratch, slot.number)
        except OSError as error:
            raise OpError(f"a slot cannot be started again: {error.strerror}") from error
        self._slots[self._slots.index(slot)] = fresh
        if slot.sent:
            queued = slot.sent.popleft()
            self._pending.extendleft(reversed(slot.sent))
            self._conclude(fresh, queued, slot.died())
