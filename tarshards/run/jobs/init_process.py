"""What the first process of a container owes the others: it passes signals on, and reaps the orphans."""

from __future__ import annotations

import os
import signal
from types import FrameType

from tarshards.storage.local import defer_signals


def leave_init() -> None:
    """As process 1, go on in a child: process 1 itself stays behind as init, and exits as the child does.

    Otherwise what commands leave behind would stay as zombies, up to the limit of the pod's processes.
    """
    if os.getpid() != 1:
        return
    with defer_signals():
        child = os.fork()
        if child == 0:
            return

        def forward(number: int, _: FrameType | None) -> None:
            os.kill(child, number)

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, forward)
    reaped, status = 0, 0
    while reaped != child:
        reaped, status = os.wait()
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)  # the kernel ends what is left in the container
