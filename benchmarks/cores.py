"""Measure what loaders of images take a sample, by the number of threads or workers: rate, CPU, faults and switches.

Real images are decoded by as many threads or workers as there are cores, at most. To judge more on this machine, the
native work of our readers is replaced by a sleep: what is left of the CPU time is Python, most of it under the GIL.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any

from checks import make
from contenders import Contender, Run
from environments import all_peers, make_all
from measure import DATA, about, machine, record
from sets import data_of
from suite import Suite

ROOT = DATA / "suite"
SETS = {"photos256": (256, 256), "photos500": (375, 500)}
PEERS = ("dali", "ffcv", "webdataset", "torch_files")
LOADERS = ("ArrayLoader", "ShardLoader")
ALONE = "the reader alone"
BATCH, PART, SIZE, ROUNDS, SECONDS = 256, 64, 224, 3, 2.0
ASLEEP, MOST = 0.6e-3, 64  # seconds of the native work of an image; threads
LEAST = 1024  # samples of an epoch for each thread, so that it is not all beginning and end
HEAD = (
    "| | threads or workers | images/s | {} | CPU us/image | trainer, ms/batch | faults/image | switches/image | MiB |"
)


def powers(most: int) -> list[int]:
    """Return 1, 2, 4, ... up to *most*.

    >>> powers(12)
    [1, 2, 4, 8]
    """
    return [1 << i for i in range(most.bit_length()) if 1 << i <= most]


class ReaderAlone:
    """The images of *urls*, which have been located, read by threads: each takes parts, into rows of its own."""

    def __init__(self, urls: list[str], threads: int, image: Any):
        import numpy as np

        from tarshards import Stream, readers
        from tarshards.samples.fields import parse_terms

        source, self.threads = Stream.from_shards(urls, shuffle=True).source, threads
        plan = source.plan(0, 1)
        places = plan[np.arange(len(plan))]
        self.payloads = source.shards.mapped(parse_terms("jpg")).find(*places, places[1]).columns["jpg"]
        self.image, self.draws = image.open("jpg", self.payloads[0]), readers.draws_of(0, 0, range(len(plan)))
        self.own = threading.local()

    def read(self, begin: int) -> int:
        part = slice(begin, begin + PART)
        if not hasattr(self.own, "rows"):
            self.own.rows = self.image.make(PART)
        payloads = self.payloads[part]
        assert not self.image.read(self.own.rows[: len(payloads)], payloads, self.draws[part])
        return len(payloads)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        with ThreadPoolExecutor(self.threads) as pool:
            for count in pool.map(self.read, range(0, len(self.payloads), PART)):
                yield {"cls": range(count)}


def loader_of(name: str, urls: list[str], threads: int, asleep: float | None) -> Any:
    """Return one of LOADERS, or ALONE; where its native work is *asleep*, an image takes so many seconds."""
    from tarshards import ArrayLoader, ShardDataset, ShardLoader, kernels, readers

    if asleep is not None:
        kernels.jpeg.decode = lambda wanted, *_: time.sleep(asleep * int(wanted.sum()))
    image = readers.image(SIZE, crop="random_resized", flip=0.5)
    if name == ALONE:
        return ReaderAlone(urls, threads, image)
    fields = {"jpg": image, "cls": readers.integer()}
    dataset = ShardDataset(urls, shuffle=True)
    if name == "ArrayLoader":
        return ArrayLoader(dataset, BATCH, fields=fields, threads=threads)
    return ShardLoader(dataset, BATCH, fields=fields, num_workers=threads, persistent_workers=True)


def measure_one(name: str, threads: int, asleep: float | None, urls: list[str]) -> dict[str, float]:
    """Run epochs of a loader in this process, after one, for SECONDS; return what an image, or a batch, took."""
    from processes import usage

    loader, images, batches = loader_of(name, urls, threads, asleep), 0, 0

    def epoch() -> None:
        nonlocal images, batches
        for batch in loader:
            images += len(batch["cls"])
            batches += 1

    epoch()
    images = batches = 0
    before, own, begun = usage(), time.thread_time(), time.perf_counter()
    while time.perf_counter() - begun < SECONDS:
        epoch()
    seconds, own, after = time.perf_counter() - begun, time.thread_time() - own, usage()
    used = {what: (after[what] - before[what]) / images for what in after}
    used |= {"rate": images / seconds, "trainer": own / batches, "peak": peak()}
    return used


def lost(name: str, threads: int, asleep: float | None, urls: list[str]) -> float:
    """Return the seconds an image for which a thread of pure Python, which always wants the GIL, had to wait for it.

    This thread runs beside the loader. It also waits while the GIL is handed over and, on a busy machine, for a core.
    """
    loader, over, waited = loader_of(name, urls, threads, asleep), threading.Event(), 0.0

    def want() -> None:
        nonlocal waited
        wall, own = time.perf_counter(), time.thread_time()
        while not over.is_set():
            for _ in range(1000):
                pass
        waited = time.perf_counter() - wall - (time.thread_time() - own)

    for _ in loader:
        pass
    images, begun, thread = 0, time.perf_counter(), threading.Thread(target=want)
    thread.start()
    while time.perf_counter() - begun < SECONDS:
        images += sum(len(batch["cls"]) for batch in loader)
    over.set()
    thread.join()
    return waited / images


def peak() -> float:
    """Return the most memory that this process has had, in MiB; its workers' are not counted."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def in_process(name: str, threads: int, asleep: float | None, urls: list[str], what: str = "measure_one") -> Any:
    """Call ``measure_one`` or ``lost`` in a process of its own."""
    command = [sys.executable, __file__, what, name, str(threads), json.dumps(asleep), *urls]
    done = subprocess.run(command, check=True, capture_output=True, text=True, start_new_session=True)
    return json.loads(done.stdout)


def row(name: str, threads: int, rounds: list[dict[str, float]], beside: float) -> str:
    """Return a row of the table; the rate is also shown as a part of *beside*."""
    rates = [each["rate"] for each in rounds]
    middle = {what: median(each[what] for each in rounds) for what in rounds[0]}
    cells = [name, str(threads), f"{about(rates)}{middle['rate']:,.0f}", f"{middle['rate'] / beside:.2f}"]
    cells += [f"{1e6 * middle['cpu']:,.1f}", f"{1e3 * middle['trainer']:.2f}" if middle.get("trainer") else ""]
    cells += [f"{middle['faults']:.2f}", f"{middle['switches']:.2f}", f"{middle['peak']:,.0f}"]
    return f"| {' | '.join(cells)} |"


def table(rows: Iterator[str], beside: str) -> list[str]:
    return [HEAD.format(beside), "|---" * 9 + "|", *rows]


def asleep_rows(urls: list[str], samples: int, rounds: int = ROUNDS, most: int = MOST) -> Iterator[str]:
    """Yield the rows of loaders whose native work is asleep: up to *most* threads, or as many workers as cores.

    The shards *urls*, of *samples* in all, are repeated to longer epochs.
    """
    cores = os.cpu_count() or 1
    for name in LOADERS:
        for threads in powers(most if name == "ArrayLoader" else cores):
            epoch = urls * -(-threads * LEAST // samples)
            measured = [in_process(name, threads, ASLEEP, epoch) for _ in range(rounds)]
            yield row(name, threads, measured, threads / ASLEEP)


def lost_words(urls: list[str], samples: int) -> str:
    """Return a sentence with what a thread of pure Python waits beside an ArrayLoader whose native work is asleep."""
    waits = {}
    for threads in (1, 16, MOST):
        epoch = urls * -(-threads * LEAST // samples)
        waits[threads] = median(in_process("ArrayLoader", threads, ASLEEP, epoch, "lost") for _ in range(ROUNDS))
    words = ", ".join(f"{1e6 * waited:.1f} us ({threads})" for threads, waited in waits.items())
    return (
        f"A thread of pure Python beside the ArrayLoader waits so long an image for the GIL: {words} beside so many "
        "threads; the hand-over of the GIL is included."
    )


class Peers(Suite):
    """The peers in one setting after the other, with all that a sample takes."""

    def rows(self, name: str, contenders: list[Contender], cores: int) -> Iterator[str]:
        """Yield the rows of ours and of the peers, interleaved, for each number of threads or workers up to *cores*."""
        alone: dict[str, float] = {}
        urls = list(data_of(name, self.root, "tarshards")[0].urls)
        for number in powers(cores):
            self.say(f"{name}, {number} threads or workers")
            runs = [Run(contender, "crop", {"workers": number}) for contender in contenders]
            found: dict[str, list[dict[str, float]]] = {each: [] for each in (*LOADERS, ALONE)}
            for run in runs:
                run.step(Run.ready)
                run.step(Run.first_epoch)
            for _ in range(ROUNDS):
                for loader in (*LOADERS, ALONE):
                    found[loader].append(in_process(loader, number, None, urls))
                for run in runs:
                    run.step(keeping(found))
            for run in runs:
                run.step(Run.check)
                for used in found.get(run.contender.peer.name, []):
                    used["peak"] = run.row.get("peak", 0.0)
                run.step(Run.close)
            for loader, rounds in found.items():
                yield row(loader, number, rounds, alone.setdefault(loader, median(each["rate"] for each in rounds)))
            yield from (
                f"| {run.contender.peer.name} | {number} | {run.row.get('failed') or run.row.get('cannot')} |"
                for run in runs
                if run.over
            )


def keeping(found: dict[str, list[dict[str, float]]]) -> Callable[[Run], None]:
    """Return a step of a run, which measures it for SECONDS, and keeps what a sample took."""

    def step(run: Run) -> None:
        used = run.ask("use_up", seconds=SECONDS)
        found.setdefault(run.contender.peer.name, []).append(used | {"peak": 0.0})

    return step


def main() -> None:
    make("photos256", ROOT)
    data, _ = data_of("photos256", ROOT, "tarshards")
    lines = [
        f"Batches of {BATCH} by an ArrayLoader and a ShardLoader whose native work (decoding, cropping and resizing an "
        f"image) is replaced by a sleep of {1e3 * ASLEEP:g} ms: what many cores would do, as far as Python lets them. "
        "The fourth column is the rate as a part of what the sleeps alone would allow; CPU time is all that is not "
        "asleep, most of it under the GIL. MiB: the most memory of the main process; rows are not written to.",
        "",
        *table(asleep_rows(list(data.urls), data.count), "of the sleeps'"),
        "",
        lost_words(list(data.urls), data.count),
    ]
    peers = [peer for peer in all_peers() if peer.name in PEERS]
    for name, (height, width) in SETS.items():
        make(name, ROOT)
        suite = Peers(ROOT, peers, make_all(peers, lambda words: None), smoke=False)
        able = [peer for peer in peers if not isinstance(suite.pythons[peer.file], OSError)]
        contenders = [Contender(peer, str(suite.pythons[peer.file]), name, ROOT) for peer in able]
        for contender in contenders:
            contender.start()
        try:
            rows = list(suite.rows(name, contenders, os.cpu_count() or 1))
        finally:
            for contender in contenders:
                contender.end()
        words = (
            f"JPEGs of {width} x {height}, random crops of {SIZE} x {SIZE}: ours in batches of {BATCH}, peers' of 64. "
            f"{ALONE.capitalize()}: threads read parts of {PART} located images into rows of their own."
        )
        lines += ["", words, "", *table(iter(rows), "x one")]
    record("Images by the number of cores", [*lines, "", machine("tarshards", "numpy")])


if __name__ == "__main__":
    if len(sys.argv) > 1:
        what, name, threads, asleep, *urls = sys.argv[1:]
        print(json.dumps(globals()[what](name, int(threads), json.loads(asleep), urls)))
    else:
        main()
