"""A look at what a killed tarproc leaves."""

from __future__ import annotations

import os
import time
from pathlib import Path


def processes_with(marker: str) -> list[str]:
    """The command lines of the processes whose environment or command line holds *marker*."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            line = Path(f"/proc/{name}/cmdline").read_bytes()
            if marker.encode() in line + Path(f"/proc/{name}/environ").read_bytes() and int(name) != os.getpid():
                found.append(line.replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


def wait_until(holds, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.01)
