"""The process of one peer, in its environment: reads requests as JSON lines, and answers each with a line."""

from __future__ import annotations

import base64
import ctypes
import gc
import importlib
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

HERE = str(Path(__file__).parent)
sys.path[:] = [folder for folder in sys.path if folder != HERE] + [HERE]  # after the peers' imports

import training  # noqa: E402
from checks import entries  # noqa: E402
from processes import cpu_seconds, serve, usage  # noqa: E402
from sets import Data, drawn_places, read_samples  # noqa: E402

BATCH = 64
COUNTING = 0.02  # CPU seconds that a request and counting those of a session take, at most


class Lookup:
    """Samples with random numbers, as a loader."""

    def __init__(self, get: Callable[[int], Any], count: int):
        self.get, self.places = get, drawn_places(count)

    def __iter__(self) -> Iterator[Any]:
        return map(self.get, self.places)


class Worker:
    """A peer on one set; each method is a call that the runner can request."""

    def __init__(self, peer: Any):
        self.peer, self.loader, self.samples, self.step, self.cpu = peer, None, [], None, None

    def use(self, urls: list[str], folder: str, **data: Any) -> None:
        """Switch to another set."""
        self.data = Data(urls=tuple(urls), folder=Path(folder), **data)

    def prepare(self) -> None:
        """Make the peer's own format of the set, or its index."""
        if self.peer.OWN:
            self.peer.write(list(read_samples(self.data.urls)), self.data)
        else:
            self.peer.index(self.data)

    def open(self, task: str, **options: Any) -> float:
        """Make a loader; return the seconds it took."""
        self.cpu = None
        self.task = "crop" if task == "train" else task
        self.step = training.make_step() if task == "train" else None
        begun = time.perf_counter()
        if task == "random":
            self.loader = Lookup(self.peer.places(self.data), self.data.count)
        else:
            self.loader = getattr(self.peer, self.task)(self.data, **options)
        return time.perf_counter() - begun

    def epoch(self, repeats: int = 1, most: float = 0) -> dict[str, float]:
        """Run *repeats* epochs, or *most* seconds; return their wall and CPU seconds and samples, in total.

        *outside* are the CPU seconds since the last call, which a loader spends on what it will deliver now.
        """
        cpu, begun = cpu_seconds(), time.perf_counter()
        outside = 0 if self.cpu is None else max(0, cpu - self.cpu - COUNTING)
        samples = self._part(most) if most else sum(self._counted(self.loader) for _ in range(repeats))
        seconds, self.cpu = time.perf_counter() - begun, cpu_seconds()
        return {"seconds": seconds, "cpu": self.cpu - cpu, "samples": samples, "outside": outside}

    def use_up(self, seconds: float) -> dict[str, float]:
        """Run epochs for some seconds; return their rate, and the CPU seconds, faults and switches of a sample."""
        before, begun, samples = usage(), time.perf_counter(), 0
        while time.perf_counter() - begun < seconds:
            samples += self._counted(self.loader)
        rate, after = samples / (time.perf_counter() - begun), usage()
        return {"rate": rate} | {what: (after[what] - before[what]) / samples for what in after}

    def _counted(self, items: Iterable[Any]) -> int:
        """Take all items, and with a model train on them; return the number of their samples."""
        size, pair = getattr(self.peer, "size", None), getattr(self.peer, "pair", tuple)
        if self.step is not None:
            return sum(self.step(*pair(item)) for item in items)
        if size is not None:
            return sum(size(self.task, item) for item in items)
        last = deque(enumerate(items, 1), maxlen=1)
        return last[0][0] if last else 0

    def _part(self, seconds: float) -> int:
        """Take items for some seconds, of more than an epoch if it ends sooner; return the number of their samples."""
        items, samples, number, begun = iter(self.loader), 0, 1, time.perf_counter()
        while (now := time.perf_counter()) < begun + seconds:
            got = self._counted(islice(items, number))
            samples += got
            if not got:
                items = iter(self.loader)
            elif time.perf_counter() - now < seconds / 100:
                number *= 2
        return samples

    def check(self, most: int | None = None) -> list[Any]:
        """Return what one more epoch delivers, or *most* samples, for the runner to compare."""
        epochs = [self.loader] * (
            1 if most is None else 2
        )  # where a part was read, the rest of an epoch may come first
        return self._entries(chain.from_iterable(epochs), most)

    def close(self) -> None:
        """Release the loader, its processes and its memory."""
        self.loader = None
        self.samples = []
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)

    def load(self) -> int:
        """Load the set's samples into memory for `write`; return their size in bytes."""
        self.samples = list(read_samples(self.data.urls))
        return sum(len(value) for sample in self.samples for field, value in sample.items() if field != "__key__")

    def write(self) -> dict[str, float]:
        return self._timed(lambda: self.peer.write(self.samples, self.data))

    def index(self) -> dict[str, float]:
        return self._timed(lambda: self.peer.index(self.data))

    def first(self, workers: int) -> float:
        """Return the seconds from the call to the first sample."""
        self.task = "stream"
        begun = time.perf_counter()
        self.loader = self.peer.stream(self.data, shuffled=True, workers=workers)
        next(iter(self.loader))
        return time.perf_counter() - begun

    def start(self, workers: int) -> dict[str, Any]:
        """Go to the middle of an epoch; return the state there, and the contents of the next batch and of the rest."""
        self.task = "resume"
        self.loader, state = self.peer.start(self.data, workers=workers)
        batches = iter(self.loader)
        for _ in range(self.data.count // BATCH // 2):
            next(batches)
        kept = base64.b64encode(state()).decode()
        return {"state": kept, "next": self._entries([next(batches)]), "rest": self._entries(batches)}

    def restore(self, state: str, workers: int) -> dict[str, Any]:
        """Resume at *state*; return the seconds to the next batch, and the contents of it and of the rest."""
        self.task, decoded = "resume", base64.b64decode(state)
        begun = time.perf_counter()
        batches = iter(self.peer.restore(self.data, decoded, workers=workers))
        batch = next(batches)
        seconds = time.perf_counter() - begun
        return {"seconds": seconds, "next": self._entries([batch]), "rest": self._entries(batches)}

    def _entries(self, items: Iterable[Any], most: int | None = None) -> list[Any]:
        samples = chain.from_iterable(self.peer.plain(self.task, item, self.data) for item in items)
        return entries(self.task, islice(samples, most))

    def _timed(self, work: Callable[[], Any]) -> dict[str, float]:
        cpu, begun = cpu_seconds(), time.perf_counter()
        work()
        return {"seconds": time.perf_counter() - begun, "cpu": cpu_seconds() - cpu, "samples": self.data.count}


if __name__ == "__main__":
    if sys.argv[1] == "--try":
        from suite import attempt

        attempt(*sys.argv[2:])
    else:
        serve(lambda: Worker(importlib.import_module(f"peers.{sys.argv[1]}")))
