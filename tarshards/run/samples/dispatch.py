"""Samples handed out to slots, each a process; one thread has the conversation with all of them."""

from __future__ import annotations

import fcntl
import os
import pickle
import select
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from threading import Event, Thread
from typing import IO, Any

from tarshards.errors import OpError
from tarshards.run.samples.child import GRACE
from tarshards.run.samples.folder import Sample
from tarshards.run.samples.journal import Outcome
from tarshards.run.samples.scratch import Scratch
from tarshards.run.samples.slot import Reply
from tarshards.run.samples.worker import Frames, Work
from tarshards.storage.pipe import ending

PROGRAM = os.path.join(os.path.dirname(__file__), "slot.py")
SENT_AHEAD = 0.030  # seconds of work that a slot has been sent ahead, at most
DEEPEST = 64  # samples that a slot has been sent, at most
TICK = 0.2  # seconds; a signal that comes just before a wait is seen only after it
NAP = 0.001  # seconds in which replies of quick slots gather, so that one turn of the thread takes many
ROOM = 1 << 20  # bytes in a pipe


class Item:
    """A sample on its way; it has an *outcome* when it has been run to its end."""

    __slots__ = ("fields", "index", "made", "name", "outcome", "sample", "size")

    def __init__(self, index: int, sample: Sample):
        self.index, self.sample = index, sample
        self.fields: dict[str, bytes] = {}
        self.size = self.made = 0  # bytes of the fields and of the outputs
        self.name = ""  # in the journal
        self.outcome: Outcome | None = None

    def job(self) -> tuple[int, Sample, dict[str, bytes]]:
        place: Sample = {name: self.sample[name] for name in ("__key__", "__url__") if name in self.sample}
        return self.index, place, self.fields


class Slot:
    """Our end of the conversation with one slot's process."""

    def __init__(self, work: Work, scratch: Scratch, number: int):
        self.process = subprocess.Popen(
            [sys.executable, "-S", "-P", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            process_group=0,
            env={**os.environ, "TAR_SLOT": str(number), "TAR_SCRATCH": scratch.path},
        )
        self.jobs, self.replies = _end(self.process.stdin), _end(self.process.stdout)
        for end in (self.jobs, self.replies):
            os.set_blocking(end.fileno(), False)
            with suppress(OSError):  # there is a limit on what a user has in all
                fcntl.fcntl(end, fcntl.F_SETPIPE_SZ, ROOM)
        self.under_way: deque[Item] = deque()
        self.depth = 1  # so many samples may be under way
        self.over = False  # it will say no more
        self.unsent: deque[bytes | memoryview] = deque([pickle.dumps(tuple(work))])
        self._frames = Frames()

    @property
    def fill(self) -> float:
        return len(self.under_way) / self.depth

    def add(self, item: Item) -> None:
        self.under_way.append(item)
        self.unsent.append(pickle.dumps(item.job(), pickle.HIGHEST_PROTOCOL))

    def send(self) -> None:
        """Send what the pipe takes now."""
        while self.unsent:
            try:
                sent = os.writev(self.jobs.fileno(), list(islice(self.unsent, DEEPEST)))
            except BlockingIOError:
                return
            except BrokenPipeError:  # the end of its replies tells why
                self.unsent.clear()
                return
            while sent:
                first = self.unsent.popleft()
                if len(first) > sent:
                    self.unsent.appendleft(memoryview(first)[sent:])
                sent -= min(sent, len(first))

    def receive(self) -> list[tuple[Item, Reply]]:
        """Return the items that have been replied to."""
        found = []
        with suppress(BlockingIOError):
            while data := os.read(self.replies.fileno(), 1 << 16):
                found += self._frames.add(data)
                if len(data) < 1 << 16:
                    break
            else:
                self.over = True
        return [(self.under_way.popleft(), Reply(*reply)) for reply in found]

    def end(self, seconds: float | None) -> None:
        """Wait for the end of the process, and kill it when that takes more than *seconds*."""
        self.jobs.close()
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.replies.close()

    def pace(self, reply: Reply) -> list[Item]:
        """Let more or fewer samples be under way after *reply*; return those that are to be handed out again."""
        if not reply.forgets:
            self.depth = (
                min(2 * self.depth, DEEPEST) if self.depth * reply.seconds < SENT_AHEAD else -(-self.depth // 2)
            )
            return []
        forgotten = list(self.under_way)
        self.under_way.clear()
        self.depth = 1
        self.unsent.append(pickle.dumps(None))
        return forgotten


class Dispatcher:
    """Runs items in *slots* processes, and has the conversation with them in a thread.

    There it calls *finish* with each one that has been run, and *ended* when there will be no more.
    """

    def __init__(
        self,
        work: Work,
        scratch: Scratch,
        slots: int,
        finish: Callable[[Item, Reply], None],
        ended: Callable[[], None],
    ):
        self._finish, self._ended = finish, ended
        self._pending: deque[Item] = deque()
        self._news = Event()
        self._halted = self._killed = self._closing = False
        self._hungry = False  # wake the thread for a new item
        self._error: BaseException | None = None
        self._slots: list[Slot] = []
        try:
            for number in range(1, slots + 1):
                self._slots.append(Slot(work, scratch, number))
        except OSError as error:
            for slot in self._slots:
                slot.end(0)
            raise OpError(f"no more than {len(self._slots)} slots can be started: {error.strerror}") from error
        self._ear, self._bell = os.pipe()
        for end in (self._ear, self._bell):
            os.set_blocking(end, False)
        self._thread = Thread(target=self._converse, name="tarshards-dispatcher", daemon=True)
        self._thread.start()

    @property
    def depth(self) -> int:
        """How many samples may be under way now."""
        return sum(slot.depth for slot in self._slots)

    @property
    def halted(self) -> bool:
        return self._halted or self._error is not None

    def add(self, item: Item) -> None:
        self._pending.append(item)
        if self._hungry:
            self._wake()

    def wait(self, ready: Callable[[], Any]) -> bool:
        """Wait until *ready*; False where that will never be, since all has ended."""
        while not ready() and self._thread.is_alive():
            self._news.wait(TICK)
            self._news.clear()
        if self._error is not None:
            raise self._error
        return bool(ready())

    def halt(self, *, kill: bool) -> None:
        """Begin nothing more, and with *kill* stop what has begun; from any thread."""
        self._halted = True
        if kill:
            self._kill()
        self._wake()

    def settle(self) -> None:
        """Wait until all that had begun when it was halted has ended."""
        self.wait(lambda: False)

    def __enter__(self) -> Dispatcher:
        return self

    def __exit__(self, *_: object) -> None:
        """End all slots, at once where they are busy."""
        self._closing = True
        self._wake()
        self._thread.join()
        if self._busy():
            self._kill()
        for slot in self._slots:
            slot.jobs.close()
        end = time.monotonic() + 2 * GRACE
        for slot in self._slots:
            slot.end(max(0.0, end - time.monotonic()) if self._killed else None)
        os.close(self._ear)
        os.close(self._bell)

    def _kill(self) -> None:
        self._killed = True
        for slot in self._slots:
            slot.process.terminate()

    def _wake(self) -> None:
        self._hungry = False
        with suppress(BlockingIOError):
            os.write(self._bell, b".")

    def _converse(self) -> None:
        try:
            while not (self._closing or self._killed or (self._halted and not self._busy())):
                if not self._halted:
                    self._hand_out()
                self._listen()
        except BaseException as error:
            self._error = error
        self._news.set()
        self._ended()

    def _busy(self) -> bool:
        return any(slot.under_way for slot in self._slots)

    def _hand_out(self) -> None:
        self._hungry = True  # before the look: an item that is added behind our back rings
        while self._pending:
            slot = min(self._slots, key=lambda slot: slot.fill)
            if slot.fill >= 1:
                break
            slot.add(self._pending.popleft())
        self._hungry = min(slot.fill for slot in self._slots) <= 0.5

    def _listen(self) -> None:
        poller = select.poll()
        poller.register(self._ear, select.POLLIN)
        for slot in self._slots:
            slot.send()
            poller.register(slot.replies, select.POLLIN)
            if slot.unsent:
                poller.register(slot.jobs, select.POLLOUT)
        if self.depth > 8 * len(self._slots):
            time.sleep(NAP)
        ready = {descriptor for descriptor, _ in poller.poll()}
        if self._ear in ready:
            os.read(self._ear, 4096)
        for slot in self._slots:
            if slot.replies.fileno() in ready and not self._killed:
                self._hear(slot)

    def _hear(self, slot: Slot) -> None:
        for item, reply in slot.receive():
            self._finish(item, reply)
            self._news.set()
            forgotten = slot.pace(reply)
            self._pending.extendleft(reversed(forgotten))
            if self._killed:
                return
        if slot.over and not self._killed:
            raise OpError(f"the process of a slot {ending(slot.process.wait())}")


def _end(pipe: IO[bytes] | None) -> IO[bytes]:
    if pipe is None:
        raise TypeError("a process started without the pipe asked for")
    return pipe
