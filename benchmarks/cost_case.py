"""One case of the benchmark of costs: opens the loader that stdin asks for, reads it, then leaves it open, and prints
the costs as JSON. Peers of the suite run here too, in their environments.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from processes import cpu_seconds, session
from sets import Data

BATCH = 64
SETTLE, IDLE = 0.5, 1.0  # seconds until the loader has filled its queues, and then in which nobody takes a batch


def ours(loader: str, data: Data) -> Iterable[Any]:
    from peers import tarshards_, tarshards_rows

    from tarshards import ShardDataset, ShardLoader

    if loader == "Stream":
        return tarshards_.samples(data, shuffled=True)
    if loader == "ArrayLoader":
        return tarshards_rows.loader(data, BATCH, 1, shuffled=True)
    workers = int(loader.split()[1])
    dataset = ShardDataset(tarshards_.shards(data), shuffle=True)
    return ShardLoader(dataset, BATCH, num_workers=workers, persistent_workers=workers > 0)


def others() -> Iterator[Path]:
    """Yield the folders in /proc of the processes that this one has started."""
    return (folder for folder in session(os.getsid(0)) if folder.name != str(os.getpid()))


def wake_ups() -> int:
    """Return how often a thread of this session has waited, including those of ended threads and processes."""
    total = sum(resource.getrusage(who).ru_nvcsw for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    for folder in others():
        with contextlib.suppress(OSError):
            for status in (folder / "task").glob("*/status"):
                total += int(re.search(r"^voluntary_ctxt_switches:\s+(\d+)", status.read_text(), re.M)[1])
    return total


def megabytes(folder: Path, name: str) -> float:
    kibibytes = re.search(rf"^{name}:\s+(\d+)", (folder / "smaps_rollup").read_text(), re.M)[1]
    return int(kibibytes) * 1024 / 1e6


def threads(folder: Path) -> int:
    return len(list((folder / "task").iterdir()))


def measure(peer: str, loader: str, workers: int, seconds: float, data: dict[str, Any]) -> dict[str, float]:
    """Return the costs of reading a loader for some seconds, after an epoch, and of then leaving it open."""
    given = Data(**data | {"urls": tuple(data["urls"]), "folder": Path(data["folder"])})
    module = importlib.import_module(f"peers.{peer}")
    with contextlib.suppress(ImportError):
        importlib.import_module("torch")  # which a trainer has, where the environment does
    gc.collect()
    me = Path("/proc/self")
    before, threads_before = megabytes(me, "Anonymous"), threads(me)
    size = getattr(module, "size", None) or (lambda task, item: 1)
    made = ours(loader, given) if loader else module.stream(given, shuffled=True, workers=workers)
    for _ in made:
        pass
    items, samples = iter(made), 0
    next(items)
    cpu, parent, waits, begun = cpu_seconds(), time.process_time(), wake_ups(), time.perf_counter()
    while time.perf_counter() - begun < seconds:
        try:
            samples += size("stream", next(items))
        except StopIteration:
            items = iter(made)
    spent = {
        "cpu": (cpu_seconds() - cpu) / samples,
        "parent": (time.process_time() - parent) / samples,
        "waits": (wake_ups() - waits) / samples,
        "rate": samples / (time.perf_counter() - begun),
    }
    time.sleep(SETTLE)
    private = [megabytes(folder, "Private_Dirty") for folder in others()]
    spent |= {
        "private": megabytes(me, "Anonymous") - before,
        "worker": max(private, default=0.0),
        "processes": len(private),
        "threads": threads(me) - threads_before + sum(map(threads, others())),
    }
    cpu, waits = cpu_seconds(), wake_ups()
    time.sleep(IDLE)
    return spent | {"idle_cpu": (cpu_seconds() - cpu) / IDLE, "idle_waits": (wake_ups() - waits - 1) / IDLE}


if __name__ == "__main__":
    here = str(Path(__file__).parent)
    sys.path[:] = [folder for folder in sys.path if folder != here] + [here]  # after the peers' imports
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a peer prints is no answer
    print(json.dumps(measure(**json.load(sys.stdin))), file=answers, flush=True)
    os.killpg(0, signal.SIGKILL)  # and all processes that the loader has started, which would keep the pipe open
