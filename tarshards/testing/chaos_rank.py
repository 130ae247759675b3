"""One rank of a chaos world: it reads its part, records the samples, and triggers the faults at their steps."""

from __future__ import annotations

import ctypes
import faulthandler
import json
import multiprocessing
import os
import pickle
import random
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tarshards.epoch.world import World
from tarshards.errors import AuditError
from tarshards.loaders.arrays import readers
from tarshards.loaders.arrays.array_loader import ArrayLoader
from tarshards.run.samples.runners import load
from tarshards.samples.ledger import Ledger
from tarshards.storage import tuning
from tarshards.storage.remote import Remote
from tarshards.stream.stream import Stream
from tarshards.testing.chaos_shards import digest

PAUSE = 0.01  # seconds between attempts of a request, at most
NEW_NAMESPACE, MS_PRIVATE = 0x20000, 0x44000  # Linux's CLONE_NEWNS; MS_REC | MS_PRIVATE


def run(job: dict[str, Any]) -> None:
    """Run one rank as *job* describes; its output is a file of JSON lines, which a kill may cut off."""
    os.setsid()
    os.environ.update(job["environment"])
    multiprocessing.set_start_method(None, force=True)  # the system's default, not the method that started this process
    descriptor = os.open(job["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    os.dup2(os.open(f"{job['output']}.stderr", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)

    faulthandler.register(signal.SIGUSR1)  # the rank and its workers then print their stacks

    def tell(**line: Any) -> None:
        os.write(descriptor, json.dumps(line).encode() + b"\n")

    _shorten_pauses()
    ledger = Ledger(max_errors=float("inf")) if job["goes_on"] else None
    try:
        for name, value in job["machine"].items():
            MACHINE[name](value)
        loader = open_loader(job, ledger)
        if job["state"] is not None:
            loader.load_state_dict(pickle.loads(Path(job["state"]).read_bytes()))
        _read(job, loader, ledger, tell)
        tell(lost=lost_of(ledger))
        if ledger is not None and job["reader"] in ("planned", "arrays", "torch") and not ledger.unaudited:
            ledger.check()
    except AuditError as error:
        tell(audit=str(error))
        sys.exit(1)
    except Exception as error:
        tell(error=f"{type(error).__name__}: {error}")
        sys.exit(1)
    else:
        tell(ended=True)


def lost_of(ledger: Ledger | None) -> list[tuple[str | None, str | None]]:
    """Return the shards and keys of the samples in a ledger."""
    if ledger is None:
        return []
    shards = [os.path.basename(entry.shard or "").removesuffix(".index") for entry in ledger.quarantined]
    return [(shard or None, entry.key) for shard, entry in zip(shards, ledger.quarantined)]


def _read(job: dict[str, Any], loader: Any, ledger: Ledger | None, tell: Callable[..., None]) -> None:
    for step, item in enumerate(loader, 1):
        tell(step=step, samples=list(samples_of(item)))
        if (step % job["every"] == 0 or step == job["stop"]) and hasattr(loader, "state_dict"):
            Path(f"{job['output']}.{step}").write_bytes(pickle.dumps(loader.state_dict()))
            tell(saved=step, lost=lost_of(ledger))
        if step == job["stop"]:
            tell(stopped=step)
            return
        for action, *arguments in job["at"].get(str(step), []):
            ACTIONS[action](*arguments)
        time.sleep(job["pace"])
    tell(read=True)


def _shorten_pauses(worker: int = 0) -> None:
    """Retry requests without long pauses, also in a *worker*: rounds are short."""
    tuning.LONGEST_SECONDS = PAUSE


def open_loader(job: dict[str, Any], ledger: Ledger | None) -> Any:
    """Return the loader: made by the user's function, or one of ours."""
    kind, urls = job["reader"], job["urls"]
    if ":" in kind:
        return load(kind)(urls)
    options = {"index": kind != "stream", "shuffle": job["shuffle"], "seed": job["seed"], "on_error": ledger}
    if kind != "stream":
        options |= {"block": job["block"], "tail": "exact"}
    cache = {"cache_dir": job["cache"], "cache_bytes": 1 << 24} if job["cache"] else {}
    options["remote"] = Remote(connections=4, timeout=2, retries=3, **cache)
    if kind == "torch":
        from tarshards.loaders.torch.shard_dataset import ShardDataset
        from tarshards.loaders.torch.shard_loader import ShardLoader

        more = {"num_workers": job["workers"], "collate_fn": list, "worker_init_fn": _shorten_pauses}
        return ShardLoader(ShardDataset(urls, **options), job["batch"], **more)
    if kind == "arrays":
        fields = {name: readers.bytes_() for name in job["fields"]}
        return ArrayLoader(Stream.from_shards(urls, **options), job["batch"], fields=fields, threads=job["workers"])
    return Stream.from_shards(urls, world=World.detect(), **options)


def samples_of(item: Any) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the keys of a sample, a list of samples or a batch, and the digests of their fields."""
    if isinstance(item, dict) and isinstance(item["__key__"], str):
        item = [item]
    if isinstance(item, dict):
        names = [name for name in item if not name.startswith("__")]
        item = [
            {"__key__": key, **{name: item[name][row] for name in names}} for row, key in enumerate(item["__key__"])
        ]
    for sample in item:
        yield (
            str(sample["__key__"]),
            {name: digest(_bytes(value)) for name, value in sample.items() if not name.startswith("__")},
        )


def _bytes(value: Any) -> bytes:
    """Return the bytes of a value: its own, an array's, or those of its repr."""
    if hasattr(value, "tobytes"):
        return bytes(value.tobytes())
    return value if isinstance(value, bytes) else repr(value).encode()


# Faults at a step.


def _signal_worker(number: int, seed: int) -> None:
    """Send a signal to one of the processes that this rank has started, if any."""
    mine = [path.read_text() for path in Path("/proc/self/task").glob("*/children")]
    workers = sorted(int(worker) for line in mine for worker in line.split())
    if workers:
        worker = random.Random(seed).choice(workers)
        os.kill(worker, number)
        if number == signal.SIGSTOP:
            time.sleep(STOPPED)
            os.kill(worker, signal.SIGCONT)


STOPPED = 0.3  # seconds

ACTIONS: dict[str, Callable[..., Any]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "kill worker": lambda seed: _signal_worker(signal.SIGKILL, seed),
    "stop worker": lambda seed: _signal_worker(signal.SIGSTOP, seed),
    "replace": os.replace,
    "truncate": os.truncate,
    "remove": os.unlink,
}


# Faults of the machine. Mounts are in a namespace of this process, and end with it.


def _limit_files(more: int) -> None:
    count = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (count + more, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def _mount(folder: str, options: str, flags: int = 0) -> None:
    """Mount a file system in memory on *folder*; raise OSError if this process may not."""
    system = ctypes.CDLL(None, use_errno=True)
    for call, arguments in (
        (system.unshare, (NEW_NAMESPACE,)),
        (system.mount, (b"none", b"/", None, MS_PRIVATE, None)),
        (system.mount, (b"tmpfs", os.fsencode(folder), b"tmpfs", flags, options.encode())),
    ):
        if call(*arguments):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), folder)


def _fill_disk(folder: str) -> None:
    try:
        _mount(folder, "size=128k")
    except OSError:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 17, 1 << 17))


def _forbid_writing(folder: str) -> None:
    try:
        _mount(folder, "size=128k", 1)  # MS_RDONLY
    except OSError:
        os.chmod(folder, 0o500)


def _jump_clock(seconds: float) -> None:
    """Shift the time of day in all loaded modules."""
    now, now_ns = time.time, time.time_ns
    other = {now: lambda: now() + seconds, now_ns: lambda: now_ns() + int(seconds * 1e9)}
    for module in list(sys.modules.values()):
        for name, value in list(vars(module).items()):
            if value is now or value is now_ns:
                setattr(module, name, other[value])


MACHINE: dict[str, Callable[[Any], None]] = {
    "files": _limit_files,
    "disk": _fill_disk,
    "read-only": _forbid_writing,
    "shm": lambda size: _mount("/dev/shm", f"size={size}"),
    "clock": _jump_clock,
}
