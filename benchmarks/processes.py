"""Run the peers' processes: send them requests as JSON lines, monitor them, and kill them if they hang.

``serve`` is the loop of such a process.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import select
import signal
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("worker.py")
RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
TICKS = os.sysconf("SC_CLK_TCK")


class CannotError(Exception):
    """A peer does not support the request."""


class FailedError(Exception):
    """A peer failed, died or did not answer."""


def session(leader: int) -> Iterator[Path]:
    """Yield the folder in /proc of every process of a session: a peer and its descendants."""
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(ProcessLookupError, ValueError):
            if os.getsid(int(folder.name)) == leader:
                yield folder


def cpu_seconds() -> float:
    """Return the CPU seconds of this session, including ended processes."""
    ticks = 0
    for folder in session(os.getsid(0)):
        with contextlib.suppress(OSError):
            ticks += sum(map(int, (folder / "stat").read_text().rpartition(")")[2].split()[11:15]))
    return ticks / TICKS


def usage() -> dict[str, float]:
    """Return the CPU seconds, page faults and context switches of this session; of other processes' threads that live.

    Faults are those that need no disk.
    """
    own = resource.getrusage(resource.RUSAGE_SELF)
    faults, switches = own.ru_minflt, own.ru_nvcsw + own.ru_nivcsw
    for folder in session(os.getsid(0)):
        with contextlib.suppress(OSError):
            if int(folder.name) == os.getpid():
                continue
            faults += int((folder / "stat").read_text().rpartition(")")[2].split()[7])
            for thread in (folder / "task").iterdir():
                status = (thread / "status").read_text()
                switches += sum(map(int, re.findall(r"voluntary_ctxt_switches:\s+(\d+)", status)))
    return {"cpu": cpu_seconds(), "faults": faults, "switches": switches}


def mebibytes(leader: int) -> float:
    """Return the anonymous and shared memory of a session; shared memory counts once, mapped files do not count."""
    kibibytes = 0
    for folder in session(leader):
        with contextlib.suppress(OSError):
            rollup = (folder / "smaps_rollup").read_text()
            kibibytes += sum(map(int, re.findall(r"^Pss_(?:Anon|Shmem):\s+(\d+)", rollup, re.MULTILINE)))
    return kibibytes / 1024


class Process:
    """A peer's process; *python* is that of its environment, and *log* receives its output.

    It runs *program*, which calls ``serve``, with the name of the peer.
    """

    def __init__(self, name: str, python: str, log: Path, *, program: Path = WORKER, **environment: str):
        log.parent.mkdir(parents=True, exist_ok=True)
        self.name, self.log, self.peak = name, log, 0.0
        kept = {key: value for key, value in os.environ.items() if key not in RANKS}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0}
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                [python, str(program), name], **pipes, stderr=errors, env=kept | environment, start_new_session=True
            )
        self._bytes = b""

    def ready(self, limit: float = 120) -> None:
        """Wait until the peer is imported; memory used by then does not count."""
        self._answer(limit)
        self.before = mebibytes(self.process.pid)

    def ask(self, call: str, limit: float = 120, *, watch: bool = False, **arguments: Any) -> Any:
        """Return the answer to a call; with *watch*, `peak` is its peak memory in MiB above that after the imports.

        Raises CannotError or FailedError; after *limit* seconds without an answer the peer is killed.
        """
        try:
            self.process.stdin.write(json.dumps({"call": call, **arguments}).encode() + b"\n")
        except OSError:
            self._answer(0)
        answer = self._answer(limit, watch)
        self.peak = max(self.peak, mebibytes(self.process.pid) - self.before) if watch else self.peak
        return answer

    def _answer(self, limit: float, watch: bool = False) -> Any:
        deadline, pipe = time.monotonic() + limit, self.process.stdout
        while b"\n" not in self._bytes:
            left = deadline - time.monotonic()
            if not select.select([pipe], [], [], min(0.02, max(left, 0)) if watch else max(left, 0))[0]:
                if left <= 0:
                    self.kill()
                    raise FailedError(f"no answer within {limit:.0f} s{self._last_words()}")
                if watch:
                    self.peak = max(self.peak, mebibytes(self.process.pid) - self.before)
                continue
            part = os.read(pipe.fileno(), 1 << 20)
            if not part:
                self.kill()
                raise FailedError(f"died, exit status {self.process.wait()}{self._last_words()}")
            self._bytes += part
        line, _, self._bytes = self._bytes.partition(b"\n")
        reply = json.loads(line)
        if "cannot" in reply:
            raise CannotError(reply["cannot"])
        if "failed" in reply:
            raise FailedError(reply["failed"])
        return reply["answer"]

    def _last_words(self) -> str:
        lines = self.log.read_text(errors="replace").split("\n")
        words = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"; its log ends: {words[:200]}" if words else ""

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        """End the peer and its descendants."""
        for folder in session(self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(folder.name), signal.SIGKILL)
        for pipe in self.process.stdin, self.process.stdout:
            pipe.close()
        self.process.wait()


def serve(make: Callable[[], Any]) -> None:
    """Answer requests, each a line that names a method of what *make* returns, and its arguments."""
    # Output of the peer and its processes goes to the log; only this process uses the pipes.
    lines, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    worker = make()
    print(json.dumps({"answer": "ready"}), file=answers, flush=True)
    for line in lines:
        print(json.dumps(_answer(worker, line)), file=answers, flush=True)
    os.killpg(0, signal.SIGKILL)  # the runner is gone: end everything that was started


def _answer(worker: Any, line: str) -> dict[str, Any]:
    request = json.loads(line)
    try:
        return {"answer": getattr(worker, request.pop("call"))(**request)}
    except NotImplementedError as exc:
        return {"cannot": str(exc) or "not implemented"}
    except Exception as exc:
        traceback.print_exc()
        return {"failed": " ".join(f"{type(exc).__name__}: {exc}".split())[:300]}
