"""Ordered, bounded work over any executor, and child processes that are ended reliably.

``settled_map`` keeps a window of calls running, and ``bounded_map`` also raises the first failure; ``DaemonThreads``
wait for a network; ``EventLoop`` runs coroutines; ``ProcessPool`` runs calls in processes, and a process that dies
fails only its own call; ``ChildGroup`` is a program with its descendants, which end together. The processes of
``run.samples`` import this module, so it loads ``multiprocessing`` and ``asyncio`` only when a pool or a loop starts.
"""

from __future__ import annotations

import atexit
import os
import select
import signal
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from contextlib import closing, suppress
from queue import SimpleQueue
from threading import Lock, RLock, Thread
from typing import TYPE_CHECKING, Any

from tarshards.errors import OpError, RemoteTraceback, shortened

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

TICK = 0.2  # seconds; a signal that arrives just before a wait takes effect only after it
GRACE = 2.0  # seconds between SIGTERM and SIGKILL
PIPE = -1  # for ChildGroup: a new pipe
IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)


def settled_map(
    function: Callable[[Any], Any], items: Iterable[Any], *, executor: Executor, window: int, ordered: bool = True
) -> Generator[tuple[Any, Any, BaseException | None], None, None]:
    """Yield every item with ``function(item)`` or its exception; at most *window* calls are running or waiting.

    Results come in the order of the items, or with ``ordered=False`` as they finish. An exception of the iterable is
    raised, and CancelledError for a call that someone else cancelled. Closing the generator cancels calls that have not
    begun and waits for running ones.
    """
    check_executor(executor)
    pending: list[tuple[Future[Any], Any]] = []
    try:
        for item in items:
            pending.append((executor.submit(function, item), item))
            if len(pending) >= window:
                yield _settle(pending, ordered)
        while pending:
            yield _settle(pending, ordered)
    finally:
        for future, _ in pending:
            future.cancel()
        wait([future for future, _ in pending if not future.cancelled()])


def bounded_map(
    function: Callable[[Any], Any], items: Iterable[Any], *, executor: Executor, window: int, ordered: bool = True
) -> Generator[Any, None, None]:
    """Yield ``function(item)`` for every item, like ``settled_map``, and raise the first exception."""
    with closing(settled_map(function, items, executor=executor, window=window, ordered=ordered)) as settled:
        yield from map(_result, settled)  # no frame holds a result while the next is made, so its memory can be reused


def check_executor(executor: Any) -> Executor:
    """Return the value of ``executor=``; raise TypeError for anything that cannot take calls."""
    if not hasattr(executor, "submit"):
        raise TypeError(f"executor= takes an Executor of concurrent.futures, not {shortened(executor)}")
    return executor


def _settle(pending: list[tuple[Future[Any], Any]], ordered: bool) -> tuple[Any, Any, BaseException | None]:
    """Remove one of *pending* that is done; return its item, result and error."""
    candidates = [future for future, _ in (pending[:1] if ordered else pending)]
    while not (done := [number for number, future in enumerate(candidates) if future.done()]):
        wait(candidates, TICK, FIRST_COMPLETED)
    future, item = pending.pop(done[0])
    error = future.exception()
    return item, None if error else future.result(), error


def _result(outcome: tuple[Any, Any, BaseException | None]) -> Any:
    _, result, error = outcome
    if error is not None:
        try:
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
                self._started += 1
                Thread(target=self._serve, name=self._name, daemon=True).start()
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


class _Call(Future[Any]):
    """A future; cancelling it ends the process that runs the call."""

    process: Any = None

    def cancel(self) -> bool:
        with suppress(AttributeError, ValueError):
            if self.running():
                self.process.kill()
        return super().cancel()


class ProcessPool(Executor):
    """An executor of *workers* processes (default: the cores), which are started when the first call comes.

    If a process dies, by a signal or by ``os._exit``, its call fails with OpError and another process replaces it; the
    standard pool fails every call instead. Functions and results are pickled; processes start by Python's default
    method. *shared* is sent to each process once, for ``call_shared``. Cancelling a running call ends its process,
    unless the pool *finishes* such calls.

    >>> with ProcessPool(2) as pool:
    ...     list(pool.map(str.upper, ["a", "b"]))
    ['A', 'B']
    """

    def __init__(self, workers: int | None = None, *, shared: Any = None, finishes: bool = False):
        self.workers = len(os.sched_getaffinity(0)) if workers is None else workers
        if self.workers < 1:
            raise ValueError(f"at least 1 process works, not {workers}")
        self._shared, self._finishes = shared, finishes
        self._calls: SimpleQueue[Any] = SimpleQueue()
        self._threads: list[Thread] = []
        self._lock = Lock()
        self._closed = False

    def submit(self, function: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        with self._lock:
            if self._closed:
                raise RuntimeError("a pool that was shut down takes no calls")
            if not self._threads:
                self._start()
            call = _Call()
            self._calls.put((call, function, args, options))
            return call

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        with self._lock:
            self._closed = True
        while cancel_futures and not self._calls.empty():
            self._calls.get()[0].cancel()
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads if wait else ():
            thread.join()

    def _start(self) -> None:
        # Processes before threads: a forked one has none of our threads, but may inherit a lock that one of them holds.
        processes: list[_Process] = []
        threads: list[Thread] = []
        try:
            while len(processes) < self.workers:
                processes.append(_Process(self._shared))
            for process in processes:
                threads.append(Thread(target=self._serve, args=(process,), daemon=True))
                threads[-1].start()
        except BaseException:  # also a signal's
            for _ in threads:
                self._calls.put(None)
            for process in processes:
                process.close()
            raise
        self._threads = threads

    def _serve(self, process: _Process) -> None:
        while (entry := self._calls.get()) is not None:
            call, *work = entry
            call.process = None if self._finishes else process
            if call.set_running_or_notify_cancel():
                try:
                    call.set_result(process.ask(work))
                except BaseException as error:
                    call.set_exception(error)
                if process.dead:
                    process = _Process(self._shared)
            del entry, call, work
        process.close()


_FROM_THE_PARENT = (signal.SIGINT, signal.SIGTERM)


class _Process:
    """A process and the pipe to it."""

    # A forked process holds copies of our ends of the pipes to those before it. If we die, the last one finds its pipe
    # closed and ends, then the one before it; two that start at once would hold each other's ends. And starting a
    # process reaps others that have ended, whose exit status a join at that moment would miss.
    _one_at_a_time = Lock()

    def __init__(self, shared: Any) -> None:
        import multiprocessing

        context: Any = multiprocessing.get_context()
        forks = context.get_start_method() == "fork"
        with self._one_at_a_time:
            self._pipe, theirs = context.Pipe()
            try:
                self._process = context.Process(target=_work, args=(theirs, self._pipe, shared), daemon=True)
                # A signal during the hooks of a fork would call our handlers there, and what they raise would be lost.
                before = signal.pthread_sigmask(signal.SIG_BLOCK, _FROM_THE_PARENT if forks else ())
                try:
                    self._process.start()
                finally:
                    signal.pthread_sigmask(signal.SIG_SETMASK, before)
            except BaseException:
                self._pipe.close()  # ends the process
                raise
            finally:
                theirs.close()
        self.dead = False
        # Processes that are not forked first import the main module.
        self._imports = not forks

    def ask(self, work: Any) -> Any:
        """Return the result of a call, or raise its exception; OpError if the process died."""
        try:
            self._pipe.send(work)
            error, result, traceback = self._pipe.recv()
        except (EOFError, OSError) as broken:
            self.dead = True
            status = self._join()
            end = ending(status)
            if self._imports and status == 1:
                end += ' before its first result; a script must start processes below `if __name__ == "__main__":`'
            raise OpError(f"its process {end}") from broken
        self._imports = False
        if error is not None:
            raise error from RemoteTraceback(traceback)
        return result

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        with suppress(OSError):
            self._pipe.send(None)
        self._pipe.close()
        self._join()

    def _join(self) -> Any:
        with self._one_at_a_time:
            self._process.join()
            return self._process.exitcode


def call_shared(item: Any) -> Any:
    """Call the object that the pool of this process shares."""
    return _shared(item)


_shared: Any = None


def _work(pipe: Connection, theirs: Connection, shared: Any) -> None:
    """Answer calls until the other end is closed."""
    global _shared
    _shared = shared
    theirs.close()  # a forked copy would keep our own end open
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is interrupted, and ends us
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FROM_THE_PARENT)
    while True:
        try:
            work = pipe.recv()
        except (EOFError, ConnectionError):  # the parent has ended
            return
        except Exception as error:  # for calls that cannot be unpickled here
            pipe.send(_reply_of(error))
            continue
        if work is None:
            return
        function, args, options = work
        try:
            reply: Any = (None, function(*args, **options), "")
        except Exception as error:
            reply = _reply_of(error)
        try:
            pipe.send(reply)
        except ConnectionError:
            return
        except Exception as error:
            pipe.send(_reply_of(OpError(f"the result cannot be sent back: {type(error).__name__}: {error}")))


def _reply_of(error: Exception) -> tuple[Exception, None, str]:
    """Return a reply with *error* for the other end, as text if it cannot be unpickled there."""
    import pickle
    from traceback import format_exception

    text = "\n" + "".join(format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = OpError(f"{type(error).__name__}: {error}")
    return error, None, text


def ending(status: int) -> str:
    """Describe how a process with this exit status ended; a negative status is a signal.

    >>> ending(3), ending(-9)
    ('ended with status 3', 'was killed by signal 9')
    """
    return f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"


def wait_for(descriptor: int, event: int, deadline: float | None) -> bool:
    """Wait for an event of ``select.poll`` on *descriptor*; return False if the monotonic clock reaches *deadline*."""
    if deadline is None:
        return True
    poller = select.poll()
    poller.register(descriptor, event)
    return bool(poller.poll(max(0.0, deadline - time.monotonic()) * 1000))


class ChildGroup:
    """A child process that leads its own process group; only the waiting thread may do more than ``signal`` it.

    *arguments* start with the program, which is looked up on the PATH. *stdin*, *stdout* and *stderr* are each a
    descriptor, the path of a file, or PIPE; by default the child inherits ours. It also inherits the descriptor *held*.
    The attributes ``stdin`` and ``stdout`` are our ends of the pipes, raw descriptors that the caller closes.
    ``status`` is None until the leader has been reaped, then its exit status as in ``subprocess``. Raises OSError or
    ValueError if the program cannot be started.
    """

    def __init__(
        self,
        arguments: list[str],
        environment: Mapping[str, str] | None = None,
        *,
        stdin: int | str | None = None,
        stdout: int | str | None = None,
        stderr: int | str | None = None,
        held: int | None = None,
    ):
        self.status: int | None = None
        self._reaping = RLock()  # a signal handler may interrupt
        self.stdin = self.stdout = -1
        theirs: list[int] = []
        try:
            if stdin == PIPE:
                stdin, self.stdin = os.pipe()
                theirs.append(stdin)
            if stdout == PIPE:
                self.stdout, stdout = os.pipe()
                theirs.append(stdout)
            actions = [_redirect(*end) for end in enumerate((stdin, stdout, stderr)) if end[1] is not None]
            if held is not None:
                actions.append(_redirect(held, held))
            self.pid = os.posix_spawnp(
                arguments[0],
                arguments,
                os.environ if environment is None else environment,
                file_actions=actions,
                setpgroup=0,
                setsigmask=(),
                setsigdef=IGNORED_BY_PYTHON,
            )
        except BaseException:
            theirs += [end for end in (self.stdin, self.stdout) if end >= 0]
            raise
        finally:
            for end in theirs:
                os.close(end)

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the leader exits, but do not reap it; return False if it still runs after *seconds*."""
        # An unreaped leader keeps its process id, which is the group's, from being reused.
        if self.status is not None:
            return True
        if seconds is None:
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
            return True
        deadline = time.monotonic() + seconds
        try:
            descriptor = os.pidfd_open(self.pid)
        except OSError:  # Linux before 5.3
            while os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
                if time.monotonic() >= deadline:
                    return False
                time.sleep(0.005)
            return True
        try:
            return wait_for(descriptor, select.POLLIN, deadline)
        finally:
            os.close(descriptor)

    def reap(self) -> int:
        """Wait for the leader and return its exit status; other processes of the group continue."""
        if self.status is None:
            with suppress(ChildProcessError):  # SIGCHLD is ignored
                self.wait()
        with self._reaping:
            if self.status is None:
                try:
                    self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
                except ChildProcessError:  # a signal handler reaped it meanwhile, or SIGCHLD is ignored
                    self.status = 0
            return self.status

    def end(self, grace: float = 0.0) -> int:
        """Kill the whole group, after SIGTERM and at most *grace* seconds if *grace* is given; return the exit status.

        Does nothing once the leader has been reaped.
        """
        if self.status is None:
            if grace:
                self.signal(signal.SIGTERM)
                self.wait(grace)
            self.signal(signal.SIGKILL)
        return self.reap()

    def signal(self, number: int) -> None:
        """Send a signal to every process of the group, unless the leader has been reaped."""
        with self._reaping:
            if self.status is None:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.pid, number)


def _redirect(descriptor: int, target: int | str | None) -> tuple[Any, ...]:
    """Return the file action of posix_spawn that makes *target* the child's *descriptor*."""
    if isinstance(target, str):
        flags = os.O_RDONLY if descriptor == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        return os.POSIX_SPAWN_OPEN, descriptor, target, flags, 0o666
    return os.POSIX_SPAWN_DUP2, target, descriptor
