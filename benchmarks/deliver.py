"""Run one JOB on possibly damaged data in a peer's environment, and record all samples.

`faults.py` starts a new process for every case as `python deliver.py JOB RECORD`. The record gets a JSON line for each
sample immediately, so it also shows what was delivered before a hang or crash.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

HERE = str(Path(__file__).parent)
sys.path[:] = [folder for folder in sys.path if folder != HERE] + [HERE]  # after the peers' imports

from checks import digest, look  # noqa: E402
from processes import session  # noqa: E402
from sets import Data, read_samples  # noqa: E402


class Delivery:
    """A peer, a job and its record."""

    def __init__(self, job: dict[str, Any], record: Path):
        self.job, self.record = job, os.open(record, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.peer = importlib.import_module(f"peers.{job['peer']}")
        data = job["data"]
        self.data = Data(**{**data, "urls": tuple(data["urls"]), "folder": Path(data["folder"])})

    def note(self, event: str, value: Any = None) -> None:
        os.write(self.record, json.dumps([event, value]).encode() + b"\n")

    def write(self) -> None:
        self.peer.write(list(read_samples(self.data.urls)), self.data)

    def index(self) -> None:
        self.peer.index(self.data)

    def stream(self) -> None:
        self.take("stream", self.peer.stream(self.data, shuffled=False, workers=self.job["workers"]))

    def decode(self) -> None:
        self.take("decode", self.peer.decode(self.data, workers=self.job["workers"]))

    def start(self) -> None:
        loader, state = self.peer.start(self.data, workers=self.job["workers"])
        batches = iter(loader)
        self.take("resume", islice(batches, self.job["batches"]))
        Path(self.job["state"]).write_bytes(state())

    def restore(self) -> None:
        state = Path(self.job["state"]).read_bytes()
        self.take("resume", self.peer.restore(self.data, state, workers=self.job["workers"]))

    def take(self, task: str, items: Iterable[Any]) -> None:
        """Record every sample; a sample without all fields is recorded as broken."""
        for place, item in enumerate(items):
            try:
                for payload, label in self.peer.plain(task, item, self.data):
                    told = look(payload, label) if task == "decode" else [int(label), digest(payload, int(label))]
                    self.note("sample", told)
            except Exception as exc:
                self.note("broken", words(exc))
            if place == 0 and self.job["kill"]:
                kill_worker()


def kill_worker() -> None:
    """Kill one of this process's workers, as the kernel does when memory runs out."""
    time.sleep(0.5)  # the workers fill their queues, and wait with most of the epoch left
    workers = [pid for pid in map(int, (folder.name for folder in session(os.getsid(0)))) if is_worker(pid)]
    if not workers:
        raise NotImplementedError("has no worker processes")
    os.kill(max(workers), signal.SIGKILL)


def is_worker(pid: int) -> bool:
    """Return whether this is a worker process, not a helper of multiprocessing."""
    with suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        helper = b"resource_tracker" in command or b"multiprocessing.forkserver" in command
        return pid != os.getpid() and os.readlink(f"/proc/{pid}/exe") == os.readlink("/proc/self/exe") and not helper
    return False


def words(exc: BaseException) -> str:
    """Return an exception's message: the last line of a traceback from a worker, or the whole text."""
    lines = [line for line in str(exc).splitlines() if line.strip()]
    remote = len(lines) > 1 and "Traceback (most recent call last)" in str(exc)
    return lines[-1] if remote else f"{type(exc).__name__}: {' '.join(' '.join(lines).split())}"


def main(job: Path, record: Path) -> None:
    delivery = Delivery(json.loads(job.read_text()), record)
    delivery.note("ready")
    try:
        getattr(delivery, delivery.job["do"])()
    except NotImplementedError as exc:
        delivery.note("cannot", str(exc))
    except Exception as exc:
        delivery.note("said", words(exc))
    else:
        delivery.note("end")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
