"""One case of the benchmark of growing sets: opens the loader that stdin asks for, reads for some seconds, and prints
what that took, both as JSON.

The process first does the same with a small set, so that what is measured begins after the imports, those of torch
among them. Peers of the suite run here too, in their environments.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from processes import cpu_seconds, session
from sets import Data, read_samples

BATCH = 256
STEP = 0.02  # seconds between two looks at the clock, about

Opened = tuple[Any, Callable[[Any], int] | None]  # a loader, and how many samples an item is, None: one


def stream(spec: str) -> Opened:
    from tarshards import Stream

    return Stream.from_shards(spec, shuffle=True, index=True), None


def unindexed(spec: str) -> Opened:
    from tarshards import Stream

    return Stream.from_shards(spec, shuffle=True, index=False), None


def shard_loader(workers: int) -> Callable[[str], Opened]:
    def opened(spec: str) -> Opened:
        from tarshards import ShardDataset, ShardLoader

        dataset = ShardDataset(spec, shuffle=True, index=True)
        loader = ShardLoader(dataset, BATCH, num_workers=workers, persistent_workers=workers > 0)
        return loader, lambda batch: len(batch["__key__"])

    return opened


def array_loader(spec: str) -> Opened:
    from tarshards import ArrayLoader, Stream
    from tarshards.loaders.arrays.readers.arrays import ragged

    loader = ArrayLoader(Stream.from_shards(spec, shuffle=True, index=True), BATCH, fields={"bin": ragged()})
    return loader, lambda batch: len(batch["__key__"])


LOADERS: dict[str, Callable[[str], Opened]] = {
    "Stream": stream,
    "Stream, un-indexed": unindexed,
    "ShardLoader, 0 workers": shard_loader(0),
    "ShardLoader, 2 workers": shard_loader(2),
    "ArrayLoader": array_loader,
}


def import_all() -> None:
    """Import what reads shards, which a set on this machine may not need where the measured one does."""
    for package in ("storage", "index"):
        folder = Path(importlib.import_module(f"tarshards.{package}").__file__).parent
        for name in sorted(path.stem for path in folder.glob("[a-z]*.py")):
            with contextlib.suppress(ImportError):
                importlib.import_module(f"tarshards.{package}.{name}")


class Memory:
    """The memory of this process and of its workers, in MB; and the bytes of files that it has read or mapped by now.

    Shared memory is that of all processes together, each page once.
    """

    def __init__(self) -> None:
        self.private = self.worker = self.shared = 0.0
        for folder in session(os.getpid()):
            with contextlib.suppress(OSError):
                self._add(folder, folder.name == str(os.getpid()))
        me = Path("/proc/self")
        mapped = re.findall(r"\.index\n(?:[A-Z]\w+: .*\n)*?Rss: +(\d+) kB", (me / "smaps").read_text())
        self.read = int((me / "io").read_text().split()[1]) + 1024 * sum(map(int, mapped))

    def _add(self, folder: Path, mine: bool) -> None:
        kilobytes = re.findall(r"^(\w+): +(\d+) kB", (folder / "smaps_rollup").read_text(), re.M)
        megabytes = {name: int(size) * 1024 / 1e6 for name, size in kilobytes}
        self.shared += megabytes["Pss_File"] + megabytes["Pss_Shmem"]
        if mine:  # its pages are not private any more when it has forked
            self.private = megabytes["Anonymous"]
        else:
            self.worker = max(self.worker, megabytes["Private_Dirty"])


def say(**figures: Any) -> None:
    """Print figures at once: the runner keeps those of a case that it has to end."""
    print(json.dumps(figures), flush=True)


def taken(items: Iterator[Any], size: Callable[[Any], int] | None, most: int) -> tuple[int, int]:
    """Take *most* items, or what is left; return their number and that of their samples."""
    if size is None:
        last = deque(enumerate(islice(items, most), 1), maxlen=1)
        number = last[0][0] if last else 0
        return number, number
    sizes = [size(item) for item in islice(items, most)]
    return len(sizes), sum(sizes)


def measure(open_loader: Callable[[], Opened], warm: float, window: float) -> None:
    """Open a loader and read it.

    The rate is that of *window* seconds, which begin when the first epoch ends, or after *warm* seconds; a first batch
    is 256 samples. In a first epoch pages are mapped, and headers compared, meanwhile; so what was read of it is then
    read again, and *again* is the rate of that.
    """
    gc.collect()
    before = Memory()
    begun, cpu = time.perf_counter(), time.process_time()
    loader, size = open_loader()
    say(open=time.perf_counter() - begun, open_cpu=time.process_time() - cpu)
    state = loader.state_dict() if hasattr(loader, "load_state_dict") else None
    items = iter(loader)
    _, samples = taken(items, size, 1 if size else BATCH)
    while size and samples < BATCH and (more := taken(items, size, 1))[0]:
        samples += more[1]
    first = time.perf_counter()
    say(first=first - begun, first_cpu=time.process_time() - cpu)
    epoch, number, start, used, at_start = 0, 1, None, 0.0, 0
    while True:
        now = time.perf_counter()
        if start is None and (epoch or now - first >= warm):
            start, used, at_start = now, cpu_seconds(), samples
        if start is not None and now - start >= window:
            break
        got, more = taken(items, size, number)
        samples += more
        if got < number:
            items, epoch = iter(loader), epoch + 1
        elif time.perf_counter() - now < STEP:
            number *= 2
        elif time.perf_counter() - now > 2 * STEP:
            number = max(1, number // 2)
    seconds = now - start
    used = cpu_seconds() - used
    after = Memory()
    say(
        rate=(samples - at_start) / seconds,
        cpu=used / max(1, samples - at_start),
        epoch=epoch,
        private=after.private - before.private,
        worker=after.worker,
        shared=after.shared - before.shared,
        read=after.read - before.read,
    )
    if state is not None and not epoch:
        loader.load_state_dict(state)
        del items
        say(again=rate_of(iter(loader), size, samples, window))


def rate_of(items: Iterator[Any], size: Callable[[Any], int] | None, most: int, window: float) -> float:
    """Return the rate of *window* seconds, or up to *most* samples; the first half second is not counted."""
    counted, samples, number = 0, 0, 1
    start: float | None = None
    begun = now = time.perf_counter()
    while samples < most and (start is None or now - start < window):
        before = now
        more = taken(items, size, number)[1]
        now, samples = time.perf_counter(), samples + more
        if start is not None:
            counted += more
        elif now - begun > 0.5:
            start = now
        if now - before < STEP:
            number *= 2
    return counted / (now - start) if start is not None and counted else samples / (now - begun)


def first_sample(open_loader: Callable[[], Opened]) -> None:
    """Open a loader and take one item."""
    gc.collect()
    begun, cpu = time.perf_counter(), time.process_time()
    loader, _ = open_loader()
    next(iter(loader))
    say(first=time.perf_counter() - begun, first_cpu=time.process_time() - cpu)


def ours(loader: str, spec: str, small: str, warm: float, window: float) -> None:
    import torch  # noqa: F401 - as in the programs that use these loaders

    import_all()
    opened, size = LOADERS[loader](small)
    for _ in range(2):
        deque(opened, 0)
    del opened, size
    if window:
        measure(lambda: LOADERS[loader](spec), warm, window)
    else:
        first_sample(lambda: LOADERS[loader](spec))


def data_of(urls: list[str], folder: str, count: int) -> Data:
    return Data("growth", "raw", count, tuple(urls), Path(folder))


def write(peer: str, **data: Any) -> None:
    """Make a peer's own format of a set."""
    given = data_of(**data)
    samples = [{**sample, "cls": b"0"} for sample in read_samples(given.urls)]
    importlib.import_module(f"peers.{peer}").write(samples, given)


def foreign(peer: str, small: dict[str, Any], workers: int, warm: float, window: float, **data: Any) -> None:
    module = importlib.import_module(f"peers.{peer}")

    def opened(given: Data) -> Opened:
        loader = module.stream(given, shuffled=True, workers=workers)
        return loader, lambda item: module.size("stream", item) if hasattr(module, "size") else 1

    deque(opened(data_of(**small))[0], 0)
    measure(lambda: opened(data_of(**data)), warm, window)


if __name__ == "__main__":
    here = str(Path(__file__).parent)
    sys.path[:] = [folder for folder in sys.path if folder != here] + [here]  # after the peers' imports
    request = json.load(sys.stdin)
    {"ours": ours, "write": write, "foreign": foreign}[request.pop("do")](**request)
