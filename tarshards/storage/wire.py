"""Work that waits for sockets, as steps: a generator that yields what it waits for.

``run`` makes steps in the calling thread. ``start`` makes them in the one thread that a process has for all works under
way, which receives what comes for any of them by one kernel (``kernels/_wire.c``). So steps must not wait in any other
way: by ``calling``, ``loading`` and ``looking``, another thread calls a function that may.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from select import POLLIN
from time import monotonic
from typing import Any, Generic, NamedTuple, TypeVar

from tarshards import kernels
from tarshards.parallel.calls import DaemonThreads, settled
from tarshards.parallel.forks import PerProcess
from tarshards.parallel.signals import TICK, defer_signals

T = TypeVar("T")

STREAM: int = kernels.wire.STREAM
LOADERS = 8  # threads that load indexes, and read and write blocks of a cache
LOOKERS = 32  # threads that look up many files; each call waits for a disk or a store
LONGEST = 3600.0  # seconds that a call of the kernel lasts, at most


class Wait(NamedTuple):
    """A socket, the events to wait for, and a place for what is received, if any; until a time of ``monotonic``.

    The steps get what ``kernels.wire.receive`` returns for it, or None if nothing has come until then. Without a socket
    (the descriptor -1) it is a pause.
    """

    descriptor: int
    events: int
    place: memoryview | None
    until: float


class Call(Generic[T]):
    """A call of a function that may wait: by the thread that makes the steps if it makes no others, or by another.

    *future* has the result when the next step is made.
    """

    future: Future[T]

    def __init__(self, function: Callable[..., T], arguments: tuple[Any, ...], threads: Callable[[], DaemonThreads]):
        self.function, self.arguments, self.threads = function, arguments, threads

    def make(self) -> None:
        self.future = Future()
        try:
            self.future.set_result(self.function(*self.arguments))
        except Exception as error:
            self.future.set_exception(error)


# What steps wait for: the next one is made when that is over. It gets a value after a Wait only.
Steps = Generator["Wait | Call[Any] | Future[Any]", Any, T]


class Task(Future[T]):
    """Steps that the thread of this process makes, and their result."""

    def __init__(self, steps: Steps[T]):
        super().__init__()
        self.set_running_or_notify_cancel()  # only ``drop`` cancels it
        self.steps = steps


def run(steps: Steps[T]) -> T:
    """Make *steps* in this thread; return their result, or raise their exception.

    They get what a handler of a signal raises while they wait, and may end what they began.
    """
    value: Any = None
    failure: BaseException | None = None
    try:
        while True:
            wait = steps.send(value) if failure is None else steps.throw(failure)
            value = failure = None
            try:
                if isinstance(wait, Wait):
                    value = _await(wait)
                elif isinstance(wait, Call):
                    wait.make()
                else:
                    settled(wait)
            except BaseException as error:
                failure = error
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        steps.close()
        del failure  # its traceback has this frame


def _await(wait: Wait) -> int | None:
    while True:
        left = min(wait.until - monotonic(), TICK)  # a signal that comes just before the call takes effect after it
        if found := kernels.wire.receive([wait], max(0, int(1000 * left) + 1)):
            return found[0][1]
        if monotonic() >= wait.until:
            return None


def start(steps: Steps[T], ended: Callable[[Future[T]], object] | None = None) -> Task[T]:
    """Begin to make *steps* in the thread of this process; *ended* is called when they have ended, or were dropped."""
    work = Task(steps)
    if ended is not None:
        work.add_done_callback(ended)
    with defer_signals():
        _wire().resume(work)
    return work


def drop(work: Task[Any]) -> None:
    """End the steps of *work* soon, wherever they are; its result is then a CancelledError."""
    with defer_signals():
        _wire().resume(work, is_dropped=True)


def results(works: Iterable[Steps[T]], window: int) -> Iterator[T]:
    """Yield the results of works in order, while up to *window* are under way."""
    begun: deque[Task[T]] = deque()
    try:
        for steps in works:
            begun.append(start(steps))
            if len(begun) >= window:
                yield settled(begun.popleft()).result()
        while begun:
            yield settled(begun.popleft()).result()
    finally:
        for work in begun:
            drop(work)


#: Threads for short calls that never wait for the steps of another work: names of hosts, and credentials.
_callers = PerProcess(lambda: DaemonThreads(2, "tarshards-call"))

#: Threads for calls that may wait for the steps of other works, for files, or for other processes.
loading_threads = PerProcess(lambda: DaemonThreads(LOADERS, "tarshards-load"))


#: Threads for calls that look up files by any package, or on a slow disk; they are started where there are many files.
looking_threads = PerProcess(lambda: DaemonThreads(LOOKERS, "tarshards-look"))


def calling(function: Callable[..., T], *arguments: Any) -> Steps[T]:
    """Call a short function that may wait for another server, and return its result."""
    return _calling(_callers, function, arguments)


def loading(function: Callable[..., T], *arguments: Any) -> Steps[T]:
    """Call a function that may wait for other works, files or processes, and return its result."""
    return _calling(loading_threads, function, arguments)


def looking(function: Callable[..., T], *arguments: Any) -> Steps[T]:
    """Call a function that looks up, or reads, one of many files, and return its result."""
    return _calling(looking_threads, function, arguments)


def _calling(threads: Callable[[], DaemonThreads], function: Callable[..., T], arguments: tuple[Any, ...]) -> Steps[T]:
    call = Call(function, arguments, threads)
    yield call
    return call.future.result()


def soon(function: Callable[[], object]) -> None:
    """Have another thread call a short function."""
    _callers().submit(function)


def load_soon(function: Callable[..., object], *arguments: Any) -> None:
    """Have another thread call a function that may wait for other works, files or processes."""
    loading_threads().submit(function, *arguments)


def pausing(seconds: float) -> Steps[None]:
    yield Wait(-1, 0, None, monotonic() + seconds)


class _Wire:
    """The thread that makes the steps of works, and what these wait for."""

    def __init__(self) -> None:
        self._resumed: deque[tuple[Task[Any], bool]] = deque()  # by any thread
        self._waits: dict[Task[Any], Wait] = {}
        self._bell, self._ringer = socket.socketpair()
        self._bell.setblocking(False)
        self._ringer.setblocking(False)
        self._rests = False  # whether the thread has to be rung for
        threading.Thread(target=self._serve, name="tarshards-wire", daemon=True).start()

    def resume(self, work: Task[Any], *, is_dropped: bool = False) -> None:
        """Let the thread make the next step of *work*, or its last."""
        self._resumed.append((work, is_dropped))
        if self._rests:
            self._rests = False
            with suppress(BlockingIOError):
                self._ringer.send(b"\0")

    def _serve(self) -> None:
        bell = Wait(self._bell.fileno(), POLLIN, None, 0.0)
        while True:
            while self._resumed:
                self._go_on(*self._resumed.popleft())
            self._rests = True
            works = list(self._waits)
            waits = [*self._waits.values(), bell]
            left = LONGEST if len(waits) == 1 else min(waits[:-1], key=_until).until - monotonic()
            milliseconds = 0 if self._resumed else max(0, int(1000 * min(left, LONGEST)) + 1)
            try:
                found = kernels.wire.receive(waits, milliseconds)
            except (OSError, MemoryError) as error:  # no thread would make the steps of any work again
                found = []
                for work in works:
                    self._end(work, error)
            self._rests = False
            for number, value in found:
                if number < len(works):
                    self._step(works[number], value)
                else:
                    with suppress(BlockingIOError):
                        self._bell.recv(64)
            del works, waits
            now = monotonic()
            late = [work for work, wait in self._waits.items() if wait.until <= now]
            while late:  # no local variable holds a work, and its result, while this thread rests
                self._step(late.pop(0), None)

    def _go_on(self, work: Task[Any], is_dropped: bool) -> None:
        if is_dropped:
            self._end(work, CancelledError())
        elif not work.done():
            self._step(work, None)

    def _step(self, work: Task[Any], value: int | None) -> None:
        self._waits.pop(work, None)
        try:
            wait = work.steps.send(value)
        except StopIteration as end:
            work.set_result(end.value)
        except BaseException as error:
            work.set_exception(error)
        else:
            if isinstance(wait, Wait):
                self._waits[work] = wait
                return
            if isinstance(wait, Call):
                try:
                    wait.future = wait.threads().submit(wait.function, *wait.arguments)
                except RuntimeError as error:  # no thread can be started
                    wait.future = Future()
                    wait.future.set_exception(error)
                wait = wait.future
            waiting = [work]  # emptied at once: who waits for this result later would hold that of *work*, too
            wait.add_done_callback(lambda _: self.resume(waiting.pop()))

    def _end(self, work: Task[Any], error: BaseException) -> None:
        """End the steps of *work* with this *error*, or with one that they raise as they end."""
        self._waits.pop(work, None)
        if work.done():
            return
        try:
            work.steps.close()
        except BaseException as raised:
            error = raised
        work.set_exception(error)


def _until(wait: Wait) -> float:
    return wait.until


_wire = PerProcess(_Wire)
