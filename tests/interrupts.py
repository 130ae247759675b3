"""An interrupt at any instruction of a function."""

from __future__ import annotations

import signal
import sys
from _thread import interrupt_main
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any


def interrupted_at(number: int, function: Callable[[], Any]) -> Any:
    """Call *function* in the main thread; SIGINT arrives just before its instruction *number*, counted from 1.

    As for any signal, Python calls the handler at the next instruction that allows it. The function that traces must
    not call it: it would raise where no signal can, as between the end of a ``with`` and the release of its lock, which
    all threads would then lack.
    """
    left = number
    arrivals: Any = defaultdict(partial(interrupt_main, signal.SIGINT))

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal left
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if not left:
                sys.settrace(None)  # else it would run as this function begins again
                arrivals[None]  # not a call, after which it would run at once
        return trace

    sys.settrace(trace)
    try:
        return function()
    finally:
        sys.settrace(None)
