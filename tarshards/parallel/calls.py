"""Ordered, bounded maps over any executor, and two executors: threads that wait for a network, and coroutines."""

from __future__ import annotations

import atexit
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Executor, Future, wait
from contextlib import closing, suppress
from itertools import islice
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Any, Generic, Protocol, TypeVar

from tarshards.errors import shortened
from tarshards.parallel.signals import TICK, defer_signals

T = TypeVar("T")
R = TypeVar("R", covariant=True)

TASKS = 64  # tasks in progress at once
EACH = 4  # calls of each process or thread that are running, or wait for an earlier one


def settled_map(
    function: Callable[[Any], Any], items: Iterable[Any], *, executor: Executor, window: int, ordered: bool = True
) -> Generator[tuple[Any, Any, BaseException | None], None, None]:
    """Yield every item with ``function(item)`` or its exception; at most *window* calls are running or waiting.

    Results come in the order of the items, or with ``ordered=False`` as they finish. An exception of the iterable is
    raised, and CancelledError for a call that someone else cancelled. Closing the generator cancels calls that have not
    begun and waits for running ones.
    """
    check_executor(executor)
    pending: dict[Future[Any], Any] = {}  # and their items
    over: set[Future[Any]] = set()
    wake: SimpleQueue[None] = SimpleQueue()

    def settle(future: Future[Any]) -> None:
        over.add(future)
        if wake.empty():
            wake.put(None)

    def take() -> tuple[Any, Any, BaseException | None]:
        while (future := _first(pending, over, ordered)) is None:
            _rest(wake)
        item, error = pending.pop(future), future.exception()
        over.remove(future)
        return item, None if error else future.result(), error

    try:
        for item in items:
            with defer_signals():
                future = executor.submit(function, item)
                pending[future] = item
                future.add_done_callback(settle)
                del future  # else the last result would be held
            if len(pending) >= window:
                yield take()
        while pending:
            yield take()
    finally:
        with defer_signals():
            running = {future for future in pending if not future.cancel()}
        while not running <= over:
            _rest(wake)


def _first(pending: Iterable[Future[Any]], over: set[Future[Any]], ordered: bool) -> Future[Any] | None:
    """Return the first of *pending*, or unless *ordered* any, that is over."""
    candidates = islice(pending, 1) if ordered else pending
    return next((future for future in candidates if future in over), None)


def _rest(wake: SimpleQueue[None]) -> None:
    """Wait for a call to end; in contrast to a Condition, this leaves no lock taken when a signal's handler raises."""
    with suppress(Empty):
        wake.get(timeout=TICK)


def bounded_map(
    function: Callable[[Any], Any], items: Iterable[Any], *, executor: Executor, window: int, ordered: bool = True
) -> Generator[Any, None, None]:
    """Yield ``function(item)`` for every item, like ``settled_map``, and raise the first exception."""
    with closing(settled_map(function, items, executor=executor, window=window, ordered=ordered)) as settled:
        yield from map(_result, settled)  # no frame holds a result while the next is made, so its memory can be reused


def settled(future: Future[T]) -> Future[T]:
    """Wait until *future* is done, and return it; a signal that arrives meanwhile leaves its lock free."""
    while True:
        with defer_signals():
            if wait((future,), TICK).done:
                return future


class InParts(Protocol[R]):
    """A work that threads share: one begins it, each part may be read by any of them, and the last one finishes it."""

    def begin(self, most: int) -> int:
        """Prepare the work, and return the number of its parts: from 1 to *most*."""

    def read(self, part: int) -> None:
        """Do one of the parts."""

    def finish(self) -> R:
        """Return the result, once all parts have been read."""


def shared_map(
    works: Iterable[InParts[R]], *, executor: Executor, threads: int, window: int
) -> Generator[R, None, None]:
    """Yield the results of *works* in order, made by *threads* of the *executor*, which share each work in parts.

    At most *window* works are begun, or finished and waiting. Threads take parts of the earliest work that has any
    left, so the first result comes as soon as all of them can make it, and few works are under way at once. Raises
    the first exception of a work when its turn comes. Closing the generator waits for the parts that are being read.
    """
    shared = _SharedWorks[R](executor, threads)
    try:
        for work in works:
            shared.add(work)
            if len(shared.under_way) >= window:
                yield shared.take()  # no frame holds a result while the next is made, so its memory can be reused
        while shared.under_way:
            yield shared.take()
    finally:
        shared.leave()


class _SharedWork(Generic[R]):
    """A work, how many of its *parts* are *taken*, and how many of these and its beginning are *left*; its result."""

    def __init__(self, work: InParts[R]):
        self.work = work
        self.is_begun = self.is_over = False
        self.taken, self.parts, self.left = 0, 0, 1
        self.result: R | None = None
        self.error: BaseException | None = None

    def end(self) -> None:
        """Finish the work after its last part, or its first error."""
        try:
            if self.error is None:
                self.result = self.work.finish()
        except BaseException as error:
            self.error = error
        self.is_over = True


class _SharedWorks(Generic[R]):
    """Works under way, in order, and the calls of up to *threads* that look for their parts, until none is left."""

    def __init__(self, executor: Executor, threads: int):
        self._executor, self._threads = executor, threads
        self.under_way: deque[_SharedWork[R]] = deque()
        self._lock = Lock()
        self._running = 0  # calls that will look for parts again
        self._calls: deque[Future[None]] = deque()
        self._wake: SimpleQueue[None] = SimpleQueue()

    def add(self, work: InParts[R]) -> None:
        if len(self._calls) > self._threads:  # some have ended
            with defer_signals():
                while self._calls and self._calls[0].done():
                    self._calls.popleft()
        self.under_way.append(_SharedWork(work))
        self._help(1)

    def take(self) -> Any:
        """Wait for the result of the first work, and return it."""
        while not self.under_way[0].is_over:
            _rest(self._wake)
        first = self.under_way.popleft()
        return _result((None, first.result, first.error))

    def leave(self) -> None:
        self.under_way.clear()
        while self._calls:  # those that run may add others, before they end
            with defer_signals():
                is_running = not self._calls[0].cancel()
            if is_running:
                settled(self._calls[0])
            self._calls.popleft()

    def _help(self, parts: int) -> None:
        """Let more threads, unless all do, look for *parts* that have come."""
        with self._lock:
            more = min(parts, self._threads - self._running)
            self._running += more
        if more:
            with defer_signals():
                for _ in range(more):
                    self._calls.append(self._executor.submit(self._run))

    def _run(self) -> None:
        while (taken := self._next()) is not None:
            shared, part = taken
            try:
                if part is None:
                    self._begin(shared)
                elif shared.error is None:
                    shared.work.read(part)
            except BaseException as error:
                shared.error = shared.error or error
            with self._lock:
                shared.left -= 1
                is_last = not shared.left
            if is_last:
                shared.end()
                if self._wake.empty():
                    self._wake.put(None)
            del taken, shared

    def _next(self) -> tuple[_SharedWork[R], int | None] | None:
        """Return the earliest work that has something left to do, and the part of it, None for its beginning."""
        with self._lock:
            for shared in list(self.under_way):
                if not shared.is_begun:
                    shared.is_begun = True
                    return shared, None
                if shared.taken < shared.parts:
                    shared.taken += 1
                    return shared, shared.taken - 1
            self._running -= 1
            return None

    def _begin(self, shared: _SharedWork[R]) -> None:
        parts = shared.work.begin(self._threads)
        with self._lock:
            shared.parts = parts
            shared.left += parts
        with suppress(RuntimeError):  # the program ends: this thread reads the parts
            self._help(parts - 1)


def check_executor(executor: Any) -> Executor:
    """Return the value of ``executor=``; raise TypeError for anything that cannot take calls."""
    if not hasattr(executor, "submit"):
        raise TypeError(f"executor= takes an Executor of concurrent.futures, not {shortened(executor)}")
    return executor


def check_sent(function: Any, executor: Any, caller: str) -> None:
    """Raise TypeError, which names *caller*, if *executor* has processes, and *function* cannot be sent to them."""
    import pickle
    from concurrent.futures import ProcessPoolExecutor

    from tarshards.parallel.process_pool import ProcessPool

    if not isinstance(executor, ProcessPool | ProcessPoolExecutor):
        return
    try:
        pickle.dumps(function)
    except Exception as error:
        code = getattr(function, "__code__", None)
        where = "" if code is None else f" ({code.co_filename}, line {code.co_firstlineno})"
        name = getattr(function, "__name__", shortened(function))
        cure = "define it with def at the top of a module, or pass executor=ThreadPoolExecutor()"
        raise TypeError(f"{caller}: the function {name}{where} cannot be sent to another process: {cure}") from error


def _result(outcome: tuple[Any, Any, BaseException | None]) -> Any:
    _, result, error = outcome
    if error is not None:
        try:
            if isinstance(error, StopIteration):  # which would end the map, as if there were no more items
                raise RuntimeError("generator raised StopIteration") from error
            raise error
        finally:
            del outcome, error  # which the traceback would hold
    return result


class DaemonThreads(Executor):
    """An executor of at most *workers* threads that wait for a network; they do not prevent the process from exiting.

    >>> list(DaemonThreads(2).map(abs, [-1, 2]))
    [1, 2]
    """

    def __init__(self, workers: int, name: str = "tarshards-fetch"):
        self._workers, self._name = workers, name
        self._calls: SimpleQueue[Any] = SimpleQueue()
        self._lock = Lock()
        self._started = self._idle = 0

    def submit(self, function: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            if self._idle:
                self._idle -= 1
            elif self._started < self._workers:
                Thread(target=self._serve, name=self._name, daemon=True).start()  # may raise RuntimeError
                self._started += 1
            self._calls.put((future, function, args, options))
        return future

    def _serve(self) -> None:
        while True:
            future, function, args, options = self._calls.get()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(*args, **options))
                except BaseException as error:
                    future.set_exception(error)
            del future, function, args, options  # else they would be held while the thread is idle
            with self._lock:
                self._idle += self._calls.empty()  # may be fewer than are idle: then one more thread is started


class EventLoop(Executor):
    """An executor of coroutine functions, at most *workers* at once, on an event loop in its own thread.

    Shutting it down cancels running coroutines and waits for them to end.

    >>> async def double(number):
    ...     return 2 * number
    >>> with EventLoop(2) as loop:
    ...     list(loop.map(double, [1, 2]))
    [2, 4]
    """

    def __init__(self, workers: int):
        import asyncio

        begun: Future[Any] = Future()
        self._free, self._end = asyncio.Semaphore(workers), asyncio.Event()
        self._thread = Thread(target=asyncio.run, args=(self._serve(begun),), name="tarshards-loop", daemon=True)
        self._thread.start()
        self._loop = begun.result()
        atexit.register(self.shutdown)  # else tasks that are pending at exit are reported as destroyed

    def submit(self, function: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        from asyncio import run_coroutine_threadsafe

        return run_coroutine_threadsafe(self._call(function, args, options), self._loop)

    async def _call(self, function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        async with self._free:
            return await function(*args, **options)

    async def _serve(self, begun: Future[Any]) -> None:
        import asyncio

        begun.set_result(asyncio.get_running_loop())
        await self._end.wait()
        if left := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in left:
                if not task.cancelling():  # a second cancellation would interrupt its clean-up
                    task.cancel()
            await asyncio.wait(left)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        atexit.unregister(self.shutdown)
        with suppress(RuntimeError):  # the loop is closed already
            self._loop.call_soon_threadsafe(self._end.set)
        if wait:
            self._thread.join()
