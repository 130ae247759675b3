"""Handlers of signals that raise, held back where an exception would leave a lock taken or a resource open."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from typing import Any

GRACE = 2.0  # seconds that a program, a thread or a reader of our output has when we end it, or ourselves
TICK = 0.2  # seconds; a signal that arrives just before a wait takes effect only after it
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # end a program; Python's handlers raise


@contextmanager
def defer_signals() -> Iterator[None]:
    """Let the handlers of SIGINT, SIGTERM and SIGHUP run at the end, so that no exception of theirs comes in between.

    In the main thread a handler may raise between any two instructions, also inside the methods of ``Condition``,
    ``Event`` and ``Future``: their lock then stays taken, and the threads that share it hang. (``with`` on a ``Lock``
    itself is safe.) The same is true between the creation of a resource and the code that releases it. Blocking the
    signals would not help: another thread receives them, and the handler still runs in the main thread.
    """
    if current_thread() is not main_thread():
        yield
        return
    handlers: dict[int, Callable[..., Any]] = {}
    arrived: list[tuple[int, Any]] = []
    defers = True

    def arrive(number: int, frame: Any) -> None:
        if defers:
            arrived.append((number, frame))
        else:  # an earlier handler raised before this one was restored
            handlers[number](number, frame)

    try:
        for raising in ENDING:
            if callable(handler := signal.getsignal(raising)):
                handlers[raising] = handler
                signal.signal(raising, arrive)
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        defers = False
        for number, frame in arrived:
            handlers[number](number, frame)
