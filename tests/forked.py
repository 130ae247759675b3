"""Calls in a forked process, and in threads that fork."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

from leftovers import wait_until


def in_child(function: Callable[[], object]) -> int:
    """Return the exit status of a forked process that calls *function*: 0 if that returns true. Fail if it hangs."""
    child = os.fork()
    if not child:
        try:
            os._exit(not function())
        finally:
            os._exit(2)
    try:
        wait_until(lambda: os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT))
    finally:
        os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
    return os.waitstatus_to_exitcode(status)


def run_in_threads(*functions: Callable[[], Any]) -> list[Any]:
    """Return what *functions* return, each called in a thread.

    A process that a thread of an executor forks would fail at its end: it waits for the threads of executors.
    """
    results: list[Any] = [None] * len(functions)

    def run(number: int) -> None:
        results[number] = functions[number]()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
