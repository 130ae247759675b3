"""Ordered, bounded map over any ``concurrent.futures.Executor``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from typing import Any

TICK = 0.2  # seconds; a signal that comes just before a wait is seen only after it


def bounded_map(
    function: Callable[[Any], Any], items: Iterable[Any], *, executor: Executor, window: int, ordered: bool = True
) -> Iterator[Any]:
    """Yield ``function(item)`` for every item, with at most *window* of them under way or waiting.

    The results come in the order of the items, or with ``ordered=False`` as they are done. The first exception of the
    function or the items is raised; breaking off cancels what has not begun and waits for what has.
    """
    pending: list[Future[Any]] = []
    try:
        for item in items:
            pending.append(executor.submit(function, item))
            if len(pending) >= window:
                yield _take(pending, ordered)
        while pending:
            yield _take(pending, ordered)
    finally:
        for future in pending:
            future.cancel()
        wait([future for future in pending if not future.cancelled()])


def _take(pending: list[Future[Any]], ordered: bool) -> Any:
    candidates = pending[:1] if ordered else pending
    while not (done := [future for future in candidates if future.done()]):
        wait(candidates, TICK, FIRST_COMPLETED)
    future = done[0]
    pending.remove(future)
    return future.result()
