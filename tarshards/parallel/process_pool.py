"""An executor of processes; one that dies fails only its own call."""

from __future__ import annotations

import signal
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from queue import SimpleQueue
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any

from tarshards.errors import OpError, RemoteTraceback
from tarshards.parallel.children import ending
from tarshards.parallel.forks import PerProcess
from tarshards.parallel.host import available_cores
from tarshards.parallel.signals import ENDING

if TYPE_CHECKING:
    from multiprocessing.connection import Connection


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
    unless the pool *finishes* such calls. Raises RuntimeError in a process of a pool, which starts no other processes.

    >>> with ProcessPool(2) as pool:
    ...     list(pool.map(str.upper, ["a", "b"]))
    ['A', 'B']
    """

    def __init__(self, workers: int | None = None, *, shared: Any = None, finishes: bool = False):
        self.workers: int = available_cores() if workers is None else workers
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


_BEFORE_RESULTS = ' before its first result; a script must start processes below `if __name__ == "__main__":`'


class _Process:
    """A process and the pipe to it."""

    # A forked process holds copies of our ends of the pipes to earlier processes. If we die, the last one finds its
    # pipe closed and ends, then the one before it; two that start at once would hold each other's ends. And starting a
    # process reaps others that have ended, whose exit status a join at that moment would miss. A child is forked while
    # the lock is held.
    _one_at_a_time = PerProcess(Lock)

    def __init__(self, shared: Any) -> None:
        import multiprocessing

        if multiprocessing.current_process().daemon:
            what = "a process of a pool, or a worker of a DataLoader, starts no other processes"
            raise RuntimeError(f"{what}: pass executor=, such as a ThreadPoolExecutor")
        context: Any = multiprocessing.get_context()
        forks = context.get_start_method() == "fork"
        with self._one_at_a_time():
            self._pipe, theirs = context.Pipe()
            try:
                self._process = context.Process(target=_work, args=(theirs, self._pipe, shared), daemon=True)
                # A signal during the hooks of a fork would call our handlers there, and their exceptions would be lost.
                before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING if forks else ())
                try:
                    self._process.start()
                finally:
                    signal.pthread_sigmask(signal.SIG_SETMASK, before)
            except BaseException as error:
                self._pipe.close()  # ends the process
                # From Python 3.14 on, the server of forks imports the main module first, and ends if that fails.
                if not forks and isinstance(error, EOFError | ConnectionError):
                    raise OpError(f"its process ended{_BEFORE_RESULTS}") from error
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
                end += _BEFORE_RESULTS
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
        with self._one_at_a_time():
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
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
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
