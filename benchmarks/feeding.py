"""Benchmark feeding: batches of feeders beside the local loader, a bare stream of ZeroMQ, and the rate of a slow link.

The link (`tests/rigs`) has a round trip of 50 ms and 80 MB/s; without root, /dev/net/tun and a C compiler its line says
so.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import zmq
from checks import make
from measure import DATA, machine, record
from processes import TICKS
from sets import data_of

from tarshards import ArrayLoader, RemoteLoader, Stream, readers

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from programs import COMPILER, TUN, is_installed
from rigs.slow_link import Link

ROOT, BATCH, ROUNDS = DATA / "suite", 64, 5
SETS = {"photos": "photos256-1k", "raw": "raw-110k"}
SLEEP = 3e-3  # seconds a sample of a slow transform; a sleep stands for the cores of other machines
TRIP_MS, RATE = 50, 80  # of the link: its round trip, and MB/s
REST = 0.1  # seconds that a slow consumer takes for a batch


def urls(name: str) -> list[str]:
    return list(data_of(SETS[name], ROOT, "tarshards")[0].urls)


def work(batch: Any, rng: np.random.Generator) -> Any:
    """Use a core for 3 ms a sample."""
    end = time.thread_time() + SLEEP * len(batch["__key__"])
    while time.thread_time() < end:
        pass
    return batch


def rest(batch: Any, rng: np.random.Generator) -> Any:
    time.sleep(SLEEP * len(batch["__key__"]))
    return batch


def images(transforms: Iterable[Any] = ()) -> ArrayLoader:
    fields = {"jpg": readers.image(224, crop="random_resized", flip=0.5), "cls": readers.integer()}
    return ArrayLoader(Stream.from_shards(urls("photos"), shuffle=True), BATCH, fields=fields, transforms=transforms)


def decoded() -> ArrayLoader:
    return images()


def transformed() -> ArrayLoader:
    return images([work])


def rows(size: int, transforms: Iterable[Any] = ()) -> ArrayLoader:
    stream = Stream.from_shards(urls("raw"), shuffle=True)
    return ArrayLoader(stream, size, fields={"bin": readers.ragged("u1")}, transforms=transforms)


def raw() -> ArrayLoader:
    return rows(BATCH)


def resting() -> ArrayLoader:
    return rows(BATCH // 4, [rest])  # so that the threads of two feeders have many batches each


def arrays_of(batch: Any) -> list[np.ndarray]:
    parts = [part for value in batch.values() for part in (value if isinstance(value, tuple) else (value,))]
    return [part for part in parts if isinstance(part, np.ndarray)]


def size_of(batch: Any) -> int:
    return sum(array.nbytes for array in arrays_of(batch))


def cpu_of(pids: Iterable[int]) -> float:
    stats = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(stat[11]) + int(stat[12]) for stat in stats) / TICKS


def command(spec: str, address: str, *options: str) -> list[str]:
    return [str(Path(sys.executable).with_name("tarfeed")), "serve", f"feeding:{spec}", "--bind", address, *options]


@contextmanager
def feeders(spec: str, count: int = 1) -> Iterator[tuple[list[str], list[int]]]:
    """Run *count* feeders; yield their addresses and processes."""
    ports = []
    for _ in range(count):
        with socket.create_server(("127.0.0.1", 0)) as server:
            ports.append(server.getsockname()[1])
    addresses = [f"tcp://127.0.0.1:{port}" for port in ports]
    running = [subprocess.Popen(command(spec, address)) for address in addresses]
    try:
        yield addresses, [process.pid for process in running]
    finally:
        for process in running:
            process.terminate()
            process.wait()


def epoch(loader: Iterable[Any], pids: Iterable[int] = ()) -> tuple[float, float, float]:
    """Return the samples and bytes a second of an epoch, and the CPU seconds a GB of all processes."""
    begun, cpu = time.perf_counter(), time.process_time() + cpu_of(pids)
    samples = size = 0
    for batch in loader:
        samples, size = samples + len(batch["__key__"]), size + size_of(batch)
    seconds = time.perf_counter() - begun
    return samples / seconds, size / seconds, (time.process_time() + cpu_of(pids) - cpu) / size * 1e9


def bare(batches: list[list[np.ndarray]]) -> tuple[float, float]:
    """Return the bytes per second, and the CPU seconds per GB, of batches in memory that are requested one by one."""
    count, size = len(batches), sum(array.nbytes for batch in batches for array in batch)
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        server = zmq.Context().socket(zmq.ROUTER)
        server.bind("tcp://127.0.0.1:*")
        os.write(theirs, server.getsockopt(zmq.LAST_ENDPOINT))
        for batch in batches:
            name, _ = server.recv_multipart()
            server.send_multipart([name, b"", *batch], copy=False)
        time.sleep(0.5)
        os._exit(0)
    address = os.read(ours, 100).decode().strip("\0")
    os.close(ours)
    os.close(theirs)
    context = zmq.Context()
    client = context.socket(zmq.DEALER)
    client.connect(address)
    begun, cpu = time.perf_counter(), time.process_time()
    for _ in range(3):
        client.send(b"")
    for number in range(count):
        client.recv_multipart(copy=False)
        if number < count - 3:
            client.send(b"")
    seconds, own = time.perf_counter() - begun, time.process_time() - cpu
    _, _, usage = os.wait4(child, 0)
    return size / seconds, (own + usage.ru_utime + usage.ru_stime) / size * 1e9


def resident(pid: int) -> int:
    """Return the bytes of a process that are in memory, without those of mapped files."""
    _, pages, mapped, *_ = map(int, Path(f"/proc/{pid}/statm").read_text().split())
    return (pages - mapped) * os.sysconf("SC_PAGE_SIZE")


def held() -> str:
    """Return a line on the memory of both sides while the consumer is slow."""
    with feeders("raw") as (addresses, pids):
        remote = RemoteLoader("feeding:raw", addresses)
        next(iter(remote))
        sides = [os.getpid(), *pids]
        before, most, size = [resident(pid) for pid in sides], [0, 0], 0
        for batch in remote:
            size = max(size, size_of(batch))
            time.sleep(REST)
            most = [max(high, resident(pid)) for high, pid in zip(most, sides)]
        remote.close()
    here, there = ((high - low) / size for high, low in zip(most, before))
    return (
        f"While a consumer takes one batch of {size / 1e6:.1f} MB every {REST * 1e3:.0f} ms, its process grows by the "
        f"memory of {here:.1f} batches and the feeder, of {os.cpu_count()} threads, by that of {there:.1f}."
    )


def over_a_link() -> list[str]:
    """Return lines on rows of 110 KB over a link with a round trip, by one feeder at its far end and by two."""
    if not (is_installed(TUN) and is_installed(COMPILER)):
        return [f"A link of {RATE} MB/s: not measured, which needs {TUN} and {COMPILER}."]
    lines = []
    for count in (1, 2):  # connections, each of which has its window
        with Link(TRIP_MS / 2, RATE) as link:
            link.start(*command("raw", f"tcp://{link.address}:7700", "--no-encryption", "-p", str(count)))
            remote = RemoteLoader("feeding:raw", f"tcp://{link.address}:{{7700..{7699 + count}}}", encrypted=False)
            epoch(remote)
            rates = [epoch(remote)[1] / 1e6 for _ in range(ROUNDS)]
            remote.close()
        lines.append(
            f"Over a link of {RATE} MB/s with a round trip of {TRIP_MS} ms, {count} feeder{'s' * (count > 1)} at its "
            f"far end: {median(rates):.1f} MB/s ({min(rates):.1f} to {max(rates):.1f}), "
            f"{median(rates) / RATE:.2f} x its rate."
        )
    return lines


def compare(spec: str, make_local: Callable[[], Any], counts: Iterable[int] = (1,)) -> list[str]:
    """Return lines that compare the local loader with feeders, round by round."""
    local, lines = make_local(), []
    for count in counts:
        with feeders(spec, count) as (addresses, pids):
            remote = RemoteLoader(f"feeding:{spec}", addresses)
            epoch(local), epoch(remote)
            pairs = [(epoch(local), epoch(remote, pids)) for _ in range(ROUNDS)]
            remote.close()
        rates = [[pair[i][0] for pair in pairs] for i in (0, 1)]
        ratio = median(fed[0] / own[0] for own, fed in pairs)
        added = median(fed[2] - own[2] for own, fed in pairs)
        lines.append(
            f"| {spec}, {count} feeder{'s' * (count > 1)} | {median(rates[0]):,.0f} | {median(rates[1]):,.0f} "
            f"({min(rates[1]):,.0f} to {max(rates[1]):,.0f}) | {ratio:.2f} | {added:.2f} |"
        )
    return lines


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *sys.path])  # of the feeders
    for name in SETS.values():
        make(name, ROOT)
    lines = ["| | local, samples/s | fed, samples/s | fed / local | CPU s/GB more |", "|---|---|---|---|---|"]
    lines += compare("decoded", decoded) + compare("transformed", transformed) + compare("resting", resting, (1, 2))
    lines += compare("raw", raw)
    with feeders("raw") as (addresses, _):
        remote = RemoteLoader("feeding:raw", addresses)
        epoch(remote)
        batches = [arrays_of(batch) for batch in raw()]
        rates = [(epoch(remote)[1], bare(batches)) for _ in range(ROUNDS)]
        remote.close()
    fed, plain = median(rate[0] for rate in rates), median(rate[1][0] for rate in rates)
    cpu = median(rate[1][1] for rate in rates)
    lines += [
        "",
        f"Raw rows of 110 KB come at {fed / 1e9:.2f} GB/s, {median(a / b[0] for a, b in rates):.2f} x a bare stream of "
        f"ZeroMQ ({plain / 1e9:.2f} GB/s, {cpu:.2f} CPU s/GB) that answers requests with the same arrays, from memory.",
        *over_a_link(),
        held(),
    ]
    about = (
        "Batches by a feeder on the same machine, over loopback, beside the local ArrayLoader: decoded crops of JPEGs "
        "as uint8, in batches of 64; the same with 3 ms of work a sample; rows of 110 KB with 3 ms of sleep a sample, "
        f"in batches of 16, and as they are. Medians of {ROUNDS} interleaved epochs; both sides share the cores."
    )
    record("Feeding", [about, "", *lines, "", machine("numpy", "pyzmq")])


if __name__ == "__main__":
    main()
