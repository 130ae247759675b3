"""Runs the tasks of a plan on this machine, or by calls of an executor."""

from __future__ import annotations

import os
import time
from collections.abc import Generator
from concurrent.futures import Executor
from contextlib import closing
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from tarshards.parallel.signals import TICK
from tarshards.run.jobs.job_folder import JobFolder
from tarshards.run.jobs.job_options import Options
from tarshards.run.jobs.job_plan import Item, JobPlan
from tarshards.run.jobs.remote_worker import RemoteWorker
from tarshards.run.jobs.status import Show, Status
from tarshards.run.jobs.worker import ItemResult, Worker
from tarshards.storage.location import look_up
from tarshards.storage.markers import Marker


def run_local(
    plan: JobPlan,
    folder: JobFolder,
    status: Status,
    options: Options,
    *,
    slots: int,
    again: bool = False,
    executor: Executor | None = None,
    show: Show = lambda status: None,
) -> Status:
    """Run the items that *status* does not count as done, *slots* tasks at once, and return the final status.

    Commands run on this machine, or on the machines of *executor*.

    An item whose command fails is retried after all others, up to ``retries`` times, unless it ended with status 42; an
    item that did so in an earlier run runs only with *again*. More than ``max_failed`` failures end the run. An
    exception, such as an interrupt, ends the running commands.
    """
    status.ended = True
    skipped = set() if again else status.permanent()
    todo = list(plan.only(_rest(plan, status.done | skipped)).tasks)
    status.failed = {number: record for number, record in status.failed.items() if number in skipped}
    if not todo:
        return status
    status.ended = False
    failed: dict[int, dict[str, Any]] = {}  # items to retry
    make_worker = Worker if executor is None else partial(RemoteWorker, executor)
    with make_worker(plan, run=f"{os.getpid()}-{time.time_ns()}", owner=folder.path) as worker:
        for left in range(options.retries, -1, -1):
            failed = {}
            with closing(_results(worker, todo, folder, slots)) as events:
                for event in events:
                    if isinstance(event, int):
                        status.running += event
                    elif event.status == 0:
                        status.done.add(event.item.number)
                    else:
                        kept = failed if left and not event.permanent else status.failed
                        kept[event.item.number] = {"status": event.status, "line": event.line}
                    show(status)
                    if options.max_failed is not None and len(status.failed) > options.max_failed:
                        worker.stop()
            if not failed or worker.stopped:
                break
            todo = list(plan.only(failed).tasks)
    status.failed.update(failed)
    status.ended, status.running = True, 0
    return status


def remove_unfinished(plan: JobPlan, status: Status) -> None:
    """Remove the records of begun items that a killed run may have left for items that are done."""
    done = [item for item in plan.items if item.number in status.done and plan.files_of(item)]
    list(look_up(lambda location: Marker(location).remove(), [plan.marker(item, "started") for item in done]))


def _rest(plan: JobPlan, numbers: set[int]) -> set[int]:
    return {item.number for item in plan.items} - numbers


def _results(
    worker: Worker | RemoteWorker, tasks: list[tuple[Item, ...]], folder: JobFolder, slots: int
) -> Generator[ItemResult | int, None, None]:
    """Yield the result of each item when it ends, the number n when a task of n items begins, and -n when it ends."""
    events: SimpleQueue[Any] = SimpleQueue()
    waiting = iter(tasks)  # next() on a list's iterator is atomic

    def serve() -> None:
        try:
            for task in waiting:
                events.put(len(task))
                for item in task:
                    if worker.stopped:
                        break
                    with open(folder.log(item.number), "a+b") as log:
                        result = worker.run(item, log)
                    if result.status is not None:
                        events.put(result)
                events.put(-len(task))
                if worker.stopped:
                    break
        except BaseException as error:
            events.put(error)
        finally:
            events.put(None)

    threads = [Thread(target=serve, daemon=True) for _ in range(min(slots, len(tasks)))]
    try:
        for thread in threads:
            thread.start()
        ended = 0
        while ended < len(threads):
            try:
                event = events.get(timeout=TICK)
            except Empty:
                continue
            if isinstance(event, BaseException):
                raise event
            if event is None:
                ended += 1
            else:
                yield event
    except BaseException:
        worker.stop()
        raise
    finally:
        for thread in threads:
            if thread.ident:
                thread.join()
