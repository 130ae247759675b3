"""An executor whose threads each own a worker, and whose jobs can be stopped while they run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from threading import Thread
from typing import Any

from tarshards.shell.worker import Worker


class Job(Future[Any]):
    """A future; giving it up calls *stop*, since what has begun must not be waited for."""

    def __init__(self, stop: Callable[[], Any]):
        super().__init__()
        self._stop = stop

    def cancel(self) -> bool:
        self._stop()
        return super().cancel()


class Slots(Executor):
    """Run jobs as ``function(worker, item)``, in one thread for each of *workers*."""

    def __init__(self, workers: Sequence[Worker], stop: Callable[[], Any]):
        self._stop = stop
        self._jobs: SimpleQueue[Any] = SimpleQueue()
        self._threads = [
            Thread(target=self._serve, args=(worker,), name="tarshards-slot", daemon=True) for worker in workers
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, function: Callable[..., Any], /, *args: Any, **_: Any) -> Future[Any]:
        job = Job(self._stop)
        self._jobs.put((job, function, args))
        return job

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads if wait else ():
            thread.join()

    def _serve(self, worker: Worker) -> None:
        while (entry := self._jobs.get()) is not None:
            job, function, args = entry
            if not job.set_running_or_notify_cancel():
                continue
            try:
                job.set_result(function(worker, *args))
            except BaseException as error:
                job.set_exception(error)
            del entry, job, args
