"""The files, threads and processes that a test leaves behind, and waiting for their end."""

from __future__ import annotations

import gc
import os
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def open_files() -> set[str]:
    names = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the listing's own
            names.add(f"{descriptor} {os.readlink(f'/proc/self/fd/{descriptor}')}")
    return {name for name in names if not re.search(r"/dev/shm/(torch_|pym-)|/memfd:", name)}


class Leftovers:
    """Tells which files and threads of this process have come since it was made, and are still there.

    Those of earlier tests may end meanwhile: garbage that is collected late, threads that a busy machine holds up.
    """

    def __init__(self) -> None:
        gc.collect()
        self._files, self._threads = open_files(), set(threading.enumerate())

    def files(self) -> set[str]:
        return open_files() - self._files

    def threads(self) -> set[threading.Thread]:
        return set(threading.enumerate()) - self._threads


def processes_with(marker: str) -> list[str]:
    """The command lines of the other processes whose environment or command line holds *marker*."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            line = Path(f"/proc/{name}/cmdline").read_bytes()
            if marker.encode() in line + Path(f"/proc/{name}/environ").read_bytes() and int(name) != os.getpid():
                found.append(line.replace(b"\0", b" ").decode())
    return found


def wait_until(holds: Callable[[], object]) -> None:
    """Wait for a condition that may take long on a busy machine; look seldom at what takes long to look at."""
    begun, latest = time.monotonic(), time.monotonic() + 100
    while not holds():
        looked = time.monotonic()
        assert looked < latest, "it did not come to pass"
        time.sleep(max(0.01, 4 * (looked - begun)))
        begun = time.monotonic()
