"""The tasks of a plan on this machine's cores."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from tarshards.run.jobs.folder import Folder
from tarshards.run.jobs.plan import Item, Plan
from tarshards.run.jobs.status import Status
from tarshards.run.jobs.worker import Outcome, Worker

Show = Callable[[Status], object]
TICK = 0.2  # seconds; a signal that comes just before a wait is seen only after it


def run_local(
    plan: Plan,
    folder: Folder,
    status: Status,
    *,
    slots: int,
    retries: int = 3,
    max_failed: int | None = None,
    again: bool = False,
    show: Show = lambda status: None,
) -> Status:
    """Run what is not done by *status*, *slots* tasks at once, and return what came of all.

    An item whose command fails is run again after all others, up to *retries* times, but not if it ends with status 42;
    and one that did so in an earlier run only with *again*. More than *max_failed* failures end the run. Leaving it by
    an exception, as an interrupt is, ends the commands that run.
    """
    status.ended = False
    skipped = set() if again else status.permanent()
    todo = list(plan.only(_rest(plan, status.done | skipped)).tasks)
    status.failed = {number: record for number, record in status.failed.items() if number in skipped}
    worker = Worker(plan)
    for left in range(retries, -1, -1):
        failed: set[int] = set()
        with closing(_results(worker, todo, folder, slots)) as events:
            for event in events:
                if isinstance(event, int):
                    status.running += event
                elif event.status == 0:
                    status.done.add(event.item.number)
                elif left and not event.permanent:
                    failed.add(event.item.number)
                else:
                    status.failed[event.item.number] = {"status": event.status, "line": event.line}
                show(status)
                if max_failed is not None and len(status.failed) > max_failed:
                    worker.stop()
        if not failed or worker.stopped:
            break
        todo = list(plan.only(failed).tasks)
    status.ended, status.running = True, 0
    return status


def _rest(plan: Plan, numbers: set[int]) -> set[int]:
    return {item.number for item in plan.items} - numbers


def _results(
    worker: Worker, tasks: list[tuple[Item, ...]], folder: Folder, slots: int
) -> Generator[Outcome | int, None, None]:
    """Yield the outcome of every item as it ends; and 1 when a task begins, -1 when it ends."""
    events: SimpleQueue[Any] = SimpleQueue()
    waiting = iter(tasks)  # drawing from a list's iterator is atomic

    def serve() -> None:
        try:
            for task in waiting:
                events.put(len(task))
                for item in task:
                    if worker.stopped:
                        break
                    with open(folder.log(item.number), "a+b") as log:
                        outcome = worker.run(item, log)
                    if outcome.status is not None:
                        events.put(outcome)
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
