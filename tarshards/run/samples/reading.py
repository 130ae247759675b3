"""Reading that another thread can break off, also while it waits for a byte."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterable
from typing import Any

AGAIN = 1.0  # seconds; a signal that comes just before a read is seen only after it


class Reading:
    """The items of an iterable; ``break_off`` ends them from another thread.

    It sends SIGINT to a reader that waits, and so works in a main thread in which that is a KeyboardInterrupt; the
    iterable sees that, and can clean up. Elsewhere the next item is the end.
    """

    def __init__(self, items: Iterable[Any]):
        self._items = iter(items)
        self._waits, self._broken = False, False
        self._gate = threading.Lock()  # as long as it is held, no signal is sent

    def next(self) -> Any:
        """Return the next item, or None after the last."""
        try:
            self._waits = threading.current_thread() is threading.main_thread()
            try:
                return None if self._broken else next(self._items, None)
            finally:
                with self._gate:
                    self._waits = False
        except KeyboardInterrupt:
            if not self._broken:
                raise
            return None

    def break_off(self) -> None:
        """Let there be no more items, and wait until the reader has left the last."""
        self._broken = True
        while True:
            with self._gate:
                if not self._waits or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
                    return
                signal.pthread_kill(int(threading.main_thread().ident or 0), signal.SIGINT)
            end = time.monotonic() + AGAIN
            while self._waits and time.monotonic() < end:
                time.sleep(0.01)
