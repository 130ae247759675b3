"""A separate process, running this file, that ends all processes that a killed tarproc or tarjob has started.

The process waits on its stdin: a byte means that the run has ended and cleaned up; end of file without a byte means
that the run was killed. It finds processes in any group or session by a variable in their initial environment.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress


class OwnProcesses:
    """The processes with *variable*, ``NAME=VALUE``, in their initial environment; there, more may follow VALUE."""

    def __init__(self, variable: str):
        self.variable = variable

    def guard(self, folder: str | None = None) -> None:
        """Start a process that, if this one is killed, ends them all and then removes *folder*, if given.

        Raises OpenError if no process can be started.
        """
        import subprocess

        try:
            # No environment, so that no other guard mistakes this one for a process of its run. Python before 3.11.8
            # would leave the pipe open where it cannot open /dev/null after it.
            with open(os.devnull, "wb") as null:
                self._guard = subprocess.Popen(
                    [sys.executable, "-I", "-S", __file__, self.variable, *([] if folder is None else [folder])],
                    stdin=subprocess.PIPE,
                    stdout=null,
                    stderr=null,
                    env={},
                    cwd="/",
                    start_new_session=True,
                )
        except OSError as error:
            from tarshards.errors import OpenError

            raise OpenError(f"no guard process can be started: {error.strerror}", errno=error.errno) from error

    def release(self) -> None:
        """End the guard; nothing is left to clean up."""
        with suppress(BrokenPipeError):
            self._guard.communicate(b".")

    def running(self) -> list[int]:
        """List their process ids."""
        found = []
        start = b"\0" + os.fsencode(self.variable)
        for name in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
                if start in b"\0" + file.read():
                    found.append(int(name))
        return found

    def end(self) -> None:
        """Kill them, and wait until they are gone."""
        quiet = 0
        while os.path.isdir("/proc/self") and quiet < 3:  # during an exec a process shows no environment
            processes = self.running()
            quiet = 0 if processes else quiet + 1
            for process in processes:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(process, signal.SIGKILL)
            time.sleep(0.02)


def main(variable: str, folder: str | None = None) -> None:
    if sys.stdin.buffer.read(1):
        return
    OwnProcesses(variable).end()
    if folder is not None:
        import shutil  # which takes milliseconds, in every run

        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
