"""Calls in a forked process."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

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
