"""Runs items as calls of an executor on the machines of its cluster, which share the files."""

from __future__ import annotations

import os
from concurrent.futures import Executor, wait
from tempfile import TemporaryFile
from typing import Any

from tarshards.parallel.signals import TICK
from tarshards.run.jobs.job_plan import Item, JobPlan
from tarshards.run.jobs.worker import FAILED, SCHEDULER_GRACE, ItemResult, Worker, last_line


class RemoteWorker:
    """Has the methods of ``Worker``; the working directory must be at the same path on all machines."""

    def __init__(self, executor: Executor, plan: JobPlan, *, run: str, owner: str):
        self._executor, self._call = executor, _ItemCall(plan, run, owner, os.getcwd())
        self.stopped: bool = False

    def __enter__(self) -> RemoteWorker:
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped = True

    def stop(self) -> None:
        """End the running commands, and start no more."""
        self.stopped = True

    def run(self, item: Item, log: Any) -> ItemResult:
        """Run the command of *item* as ``Worker.run`` does; the loss of its machine is a failure."""
        future = self._executor.submit(self._call, item)
        while not wait([future], TICK).done:
            if self.stopped:
                future.cancel()
                return ItemResult(item, None)
        if (error := future.exception()) is not None:
            return ItemResult(item, FAILED, last_line(f"{type(error).__name__}: {error}".encode(), item))
        result, output = future.result()
        log.write(output)
        return result


class _ItemCall:
    def __init__(self, plan: JobPlan, run: str, owner: str, folder: str):
        self.plan, self.run, self.owner, self.folder = plan._replace(tasks=()), run, owner, folder

    def __call__(self, item: Item) -> tuple[ItemResult, bytes]:
        os.chdir(self.folder)
        with Worker(self.plan, run=self.run, owner=self.owner, grace=SCHEDULER_GRACE) as worker, TemporaryFile() as log:
            result = worker.run(item, log)
            log.seek(0)
            return result, log.read()
