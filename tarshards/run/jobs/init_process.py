"""The duties of the first process of a container: forward signals, and reap orphans."""

from __future__ import annotations

import os
import signal
from types import FrameType

_FORWARDED = (signal.SIGINT, signal.SIGTERM)


def leave_init() -> None:
    """As process 1, continue in a child; process 1 itself remains as init, and exits with the child's status.

    Otherwise orphans of commands would stay as zombies, up to the pod's limit of processes.
    """
    if os.getpid() != 1:
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    try:
        child = os.fork()
        if child == 0:
            return

        def forward(number: int, _: FrameType | None) -> None:
            os.kill(child, number)

        for number in _FORWARDED:
            signal.signal(number, forward)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    reaped, status = 0, 0
    while reaped != child:
        reaped, status = os.wait()
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)  # the kernel ends what is left in the container
