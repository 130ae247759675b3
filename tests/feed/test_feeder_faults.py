"""Feeders that are killed, stopped, late or wrong, and connections that break: each batch comes once, in order."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import random
import select
import signal
import socket
import threading
import time
from contextlib import closing, suppress
from pathlib import Path

import feed_specs
import pytest
from feed_specs import DATA
from soak import SOAK
from test_remote_loader import batches, free_port

from tarshards import OpenError, RemoteLoader
from tarshards.feed import feeder as feeder_module
from tarshards.feed.feeder import Feeder

pytest.importorskip("zmq")

PATIENCE = 0.5  # seconds


@pytest.fixture
def expected(data) -> list:
    return batches(feed_specs.slow())


def _fork_feeders(pipe) -> None:
    """Fork a feeder for each request: this process has no threads, in which a lock could be held at that moment."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        data, *given = pipe.recv()
        if os.fork() == 0:
            os.environ[DATA] = data
            _serve(pipe, *given)


def _serve(pipe, port: int, spec: str, version: str | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if version is not None:
        real = feeder_module.identity
        feeder_module.identity = lambda *given: real(*given) | {"numpy": version}
    feeder = Feeder(f"feed_specs:{spec}", f"tcp://127.0.0.1:{port}", threads=2)
    pipe.send(os.getpid())
    feeder.run()


@pytest.fixture(scope="module")
def forks_feeders():
    """The pipe to a process that forks feeders."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_fork_feeders, args=(theirs,), daemon=True)
    process.start()
    yield ours
    process.kill()
    process.join()


class Process:
    """A feeder in a separate process, which keeps its port when it is restarted."""

    def __init__(self, pipe, spec: str = "slow", version: str | None = None):
        self.pipe, self.port, self.spec, self.version = pipe, free_port(), spec, version
        self.address = f"tcp://127.0.0.1:{self.port}"
        self.pid = None

    def start(self) -> Process:
        self.pipe.send((os.environ[DATA], self.port, self.spec, self.version))
        assert self.pipe.poll(30)
        self.pid = self.pipe.recv()
        return self

    def signal(self, number: int) -> None:
        pid = self.pid
        with suppress(ProcessLookupError):  # a timer may wake one that was killed
            if pid is not None:
                os.kill(pid, number)

    def kill(self) -> None:
        if self.pid is not None:
            ended = os.pidfd_open(self.pid)
            os.kill(self.pid, signal.SIGKILL)
            select.select([ended], [], [])
            os.close(ended)
            self.pid = None


@pytest.fixture
def make_feeder(forks_feeders):
    made = []

    def make(**options) -> Process:
        made.append(Process(forks_feeders, **options))
        return made[-1]

    yield make
    for process in made:
        process.kill()


class Proxy:
    """A proxy of a feeder that can break connections and delay bytes."""

    def __init__(self, port: int):
        self._port, self._open = port, []
        self.held = threading.Event()
        self.held.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._copying = []
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(("127.0.0.1", self._port))
                except OSError:
                    near.close()
                    continue
                self._open += [near, far]
                for pair in ((near, far), (far, near)):
                    self._copying.append(threading.Thread(target=self._copy, args=pair, daemon=True))
                    self._copying[-1].start()

    def _copy(self, source, target) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                self.held.wait()
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        source.close()

    def reset(self) -> None:
        while self._open:
            end = self._open.pop()
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.held.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._accepting.join()
        self.reset()
        for thread in self._copying:
            thread.join()


def loader_of(*addresses: str) -> RemoteLoader:
    return RemoteLoader("feed_specs:slow", addresses, patience=PATIENCE, timeout=60)


def test_one_is_killed_one_is_stopped_and_goes_on_one_begins_late(make_feeder, expected):
    killed, stopped, late = make_feeder().start(), make_feeder().start(), make_feeder()
    loader = loader_of(killed.address, stopped.address, late.address)
    found = []
    for number, batch in enumerate(loader):
        found.append(feed(batch))
        if number == 3:
            killed.kill()
        if number == 6:
            stopped.signal(signal.SIGSTOP)
            late.start()
        if number == 14:
            stopped.signal(signal.SIGCONT)
    assert found == expected
    loader.ledger.check()
    assert loader.monitor.again > 0
    loader.close()


def feed(batch) -> object:
    (found,) = batches([batch])
    return found


def test_the_only_feeder_is_replaced(make_feeder, expected):
    feeder = make_feeder().start()
    loader = loader_of(feeder.address)
    found = []
    for number, batch in enumerate(loader):
        found.append(feed(batch))
        if number in (2, 9):
            feeder.kill()
            feeder.start()
    assert found == expected
    loader.ledger.check()
    loader.close()


def test_a_wrong_feeder_that_joins_is_left_out(make_feeder, expected, caplog):
    right, wrong = make_feeder().start(), make_feeder(version="0.1")
    loader = loader_of(right.address, wrong.address)
    found = []
    for number, batch in enumerate(loader):
        found.append(feed(batch))
        if number == 2:
            wrong.start()
            time.sleep(0.3)
    assert found == expected
    assert f"feeder {wrong.address} is not used: it differs in numpy (0.1, here" in caplog.text
    loader.close()


def test_a_consumer_that_rests_loses_no_feeder(make_feeder, expected, caplog):
    feeders = [make_feeder().start() for _ in range(2)]
    loader = loader_of(*(feeder.address for feeder in feeders))
    found = []
    for number, batch in enumerate(loader):
        found.append(feed(batch))
        if number in (1, 5):
            time.sleep(3 * PATIENCE)
    assert found == expected
    assert "silent" not in caplog.text
    assert loader.monitor.again == 0
    loader.close()


@pytest.mark.interop
def test_a_batch_that_kills_each_feeder_ends_the_training(make_feeder):
    """Though another feeder takes the place of each, and answers."""
    feeder, ends = make_feeder(spec="deadly").start(), threading.Event()

    def replace() -> None:
        while not ends.is_set():
            with suppress(ProcessLookupError):
                ended = os.pidfd_open(feeder.pid)
                select.select([ended], [], [], 0.1)
                os.close(ended)
                continue
            feeder.start()

    thread = threading.Thread(target=replace)
    thread.start()
    try:
        loader = RemoteLoader("feed_specs:deadly", feeder.address, patience=PATIENCE, timeout=2)
        with closing(loader), pytest.raises(OpenError, match=r"for 2 s: tcp://127"):
            list(loader)
    finally:
        ends.set()
        thread.join()


def resident(pid: int) -> int:
    """Return the bytes of a process that are in memory, without those of mapped files."""
    _, pages, mapped, *_ = map(int, Path(f"/proc/{pid}/statm").read_text().split())
    return (pages - mapped) * os.sysconf("SC_PAGE_SIZE")


def _take_slowly(pipe, address: str, feeder: int, prefetch: int) -> None:
    """Send how many batches the memory of this process and of the feeder has grown by at most."""
    M_MMAP_THRESHOLD = -3
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 20)  # so that the memory of a freed batch is given back
    loader = RemoteLoader("feed_specs:large", address, prefetch=prefetch, timeout=60)
    pids = [os.getpid(), feeder]
    before, most = [resident(pid) for pid in pids], [0, 0]
    with closing(loader):
        for number, batch in enumerate(loader):
            assert len(batch["large"]) == feed_specs.LARGE
            time.sleep(0.5 if number in (1, 20) else 0.01)
            most = [max(high, resident(pid)) for high, pid in zip(most, pids)]
    pipe.send((number, [(high - low) / feed_specs.LARGE for high, low in zip(most, before)]))


def test_a_slow_consumer_holds_the_memory_of_few_batches_on_both_sides(make_feeder):
    """*prefetch* and one here, and there one more than the feeder makes at once."""
    prefetch, feeder = 4, make_feeder(spec="large").start()
    context = multiprocessing.get_context("spawn")  # a new process, in whose memory no earlier test has left anything
    ours, theirs = context.Pipe()
    consumer = context.Process(target=_take_slowly, args=(theirs, feeder.address, feeder.pid, prefetch), daemon=True)
    consumer.start()
    try:
        theirs.close()
        assert ours.poll(120)
        number, used = ours.recv()
        assert number == 99
        assert all(1 < batches < 3 * prefetch for batches in used), used
    finally:
        consumer.kill()
        consumer.join()


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10 * SOAK if SOAK > 1 else 4))
def test_any_schedule_of_faults(seed, make_feeder, expected):
    """Kills and restarts, stops, resets and holds of connections, wrong versions, rests of the consumer, resumes."""
    rng = random.Random(seed)
    feeders = [make_feeder() for _ in range(rng.randrange(2, 4))]
    wrong = [make_feeder(version="0.1").start() for _ in range(rng.randrange(2))]
    proxies = [Proxy(feeder.port) for feeder in feeders]
    feeders[0].start()  # which is never killed or stopped for good
    for feeder in feeders[1:]:
        if rng.random() < 0.7:
            feeder.start()
    addresses = [proxy.address for proxy in proxies] + [feeder.address for feeder in wrong]
    rng.shuffle(addresses)
    loader = loader_of(*addresses)

    def disturb() -> None:
        feeder = rng.choice(feeders)
        what = rng.choice(["kill", "stop", "reset", "hold", "rest"])
        proxy = proxies[feeders.index(feeder)]
        if what == "kill":
            feeder.kill()
            if feeder is feeders[0] or rng.random() < 0.7:
                feeder.start()
        elif what == "stop":
            feeder.signal(signal.SIGSTOP)
            threading.Timer(rng.uniform(0, 2 * PATIENCE), feeder.signal, [signal.SIGCONT]).start()
        elif what == "reset":
            proxy.reset()
        elif what == "hold":
            proxy.held.clear()
            threading.Timer(rng.uniform(0, 2 * PATIENCE), proxy.held.set).start()
        elif what == "rest":
            time.sleep(rng.uniform(0, 1.5 * PATIENCE))

    found, iterator = [], iter(loader)
    try:
        while len(found) < len(expected):
            if rng.random() < 0.2:
                disturb()
            found.append(feed(next(iterator)))
            if rng.random() < 0.05:
                state = loader.state_dict()
                iterator.close()
                loader.close()
                loader = loader_of(*addresses)
                loader.load_state_dict(state)
                iterator = iter(loader)
        assert found == expected
        assert next(iterator, None) is None or len(expected) == len(found)
        loader.ledger.check()
    finally:
        iterator.close()
        loader.close()
        for proxy in proxies:
            proxy.close()
