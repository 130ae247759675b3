"""A feeder makes the batches that consumers request, in threads; it keeps no state between batches."""

from __future__ import annotations

import logging
import os
import select
from collections import deque
from contextlib import suppress
from queue import SimpleQueue
from threading import Lock, Thread
from time import perf_counter
from traceback import format_exception
from typing import Any, NamedTuple
from uuid import uuid4

from tarshards.errors import OpenError, visible
from tarshards.feed.encryption import check_address, serve_with
from tarshards.feed.identity import identity, loader_of
from tarshards.feed.messages import COUNTED, REQUESTS, TOGETHER, decode, encode, encoded_error
from tarshards.loaders.batches import BatchMaker
from tarshards.loaders.monitor import Stopwatch
from tarshards.parallel.host import available_cores
from tarshards.parallel.signals import TICK
from tarshards.samples.codecs.registry import require
from tarshards.samples.ledger import Ledger, Tally

log: logging.Logger = logging.getLogger("tarshards")

REQUEST = 1 << 20  # bytes of the largest message of a consumer; a longer one ends its connection


class _Request(NamedTuple):
    """A batch that a *consumer*, identified by its connection, has requested in the pass *name*."""

    consumer: bytes
    name: str
    epoch: int
    state: dict[str, Any] | None
    rank: int
    ranks: int
    g: int


class _Collected(Ledger):
    """Collects the errors of one batch; they are sent to the consumer, whose ledger decides what to do."""

    def __init__(self) -> None:
        super().__init__(max_errors=float("inf"))
        self.errors: list[tuple[bool, Exception]] = []  # the flag: whether the sample had been read

    def __call__(self, error: Exception) -> None:
        self.errors.append((False, error))

    def fail(self, error: Exception) -> None:
        self.errors.append((True, error))


class Feeder:
    """Makes the batches of the loader that *spec* names, for consumers that connect to *address*.

    It makes *threads* batches in parallel (default: the number of cores). Python code in the pipeline runs in one
    thread at a time, so such a loader needs several feeders. With *keys*, a folder, only consumers with its client key
    are answered; with *encrypted* False, a network address needs no keys.

    Raises UrlError for an invalid address or spec, and OpenError for an address or keys that cannot be used.
    """

    def __init__(
        self, spec: str, address: str, *, keys: str | None = None, encrypted: bool = True, threads: int | None = None
    ):
        check_address(address, keys, encrypted)
        self._zmq = zmq = require("zmq", extra="feed")
        loader = loader_of(spec)
        self._identity = identity(spec, loader)
        self._instance = uuid4().hex
        self.threads: int = threads or available_cores()
        self._passes: dict[bytes, str] = {}  # the current pass of each consumer
        self._work: SimpleQueue[_Request | None] = SimpleQueue()
        self._done: deque[tuple[bytes, list[Any]]] = deque()
        self._lock, self._stopwatch = Lock(), Stopwatch()
        self._counts = {"batches": 0, "bytes": 0}
        self._runs = True
        self._making, self._begun = 0.0, perf_counter()
        self._woken, self._waker = os.pipe()
        os.set_blocking(self._woken, False)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        # A consumer takes what it requests, and requests little: one that does not is not answered.
        self._socket.linger, self._socket.sndhwm, self._socket.maxmsgsize = 0, 4 * (self.threads + 1), REQUEST
        self._socket.router_mandatory, self._socket.ipv6 = True, "[" in address
        self._checker = serve_with(self._socket, keys) if keys is not None else None
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self.close()
            raise OpenError(error.strerror or str(error), url=address, errno=error.errno) from error
        self.address: Any = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        maker = loader.passes.maker
        maker.open()
        for _ in range(self.threads):
            own = maker.for_thread(_Collected())
            Thread(target=self._serve, args=(own,), name="tarshards-feed", daemon=True).start()

    def run(self, until_closed: int | None = None) -> None:
        """Answer until a signal handler raises, ``stop`` is called, or the descriptor *until_closed* is closed."""
        poller = self._zmq.Poller()
        poller.register(self._socket, self._zmq.POLLIN)
        poller.register(self._woken, select.POLLIN)
        if until_closed is not None:
            poller.register(until_closed, select.POLLIN)
        while self._runs:
            events = dict(poller.poll(1000 * TICK))
            if until_closed in events:
                return
            self._drain()
            while self._done:
                consumer, frames = self._done.popleft()
                self._send(consumer, frames)
            for _ in range(TOGETHER):
                if not self._take():
                    break

    def stop(self) -> None:
        """Let ``run`` return; may be called from any thread."""
        self._runs = False

    def close(self) -> None:
        """Close the socket. Unfinished batches are discarded; consumers request them from other feeders."""
        for _ in range(self.threads):
            self._work.put(None)
        if self._checker is not None:
            self._checker.stop()
        self._socket.close()
        self._context.term()

    def _drain(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._woken, 4096)

    def _take(self) -> bool:
        """Receive a message and answer it; return False if there is none."""
        try:
            consumer, *frames = self._socket.recv_multipart(self._zmq.NOBLOCK, copy=False)
        except self._zmq.Again:
            return False
        try:
            self._answer(consumer.bytes, decode(frames, REQUESTS))
        except ValueError as error:
            log.warning("%s: invalid message: %s", self.address, visible(str(error)))
        return True

    def _send(self, consumer: bytes, frames: list[Any]) -> None:
        try:
            self._socket.send_multipart([consumer, *frames], self._zmq.NOBLOCK, copy=False)
        except self._zmq.ZMQError:  # it has gone, or does not take what it requested
            self._passes.pop(consumer, None)

    def _answer(self, consumer: bytes, words: dict[str, Any]) -> None:
        if words["kind"] == "hello":
            welcome = {"kind": "welcome", "identity": self._identity, "instance": self._instance}
            self._send(consumer, encode(welcome | {"capacity": self.threads + 1, "threads": self.threads}))
        elif words["kind"] == "make":
            request = _Request(
                consumer, words["pass"], *(words[name] for name in ("epoch", "state", "rank", "ranks", "g"))
            )
            if request.rank >= request.ranks:
                raise ValueError(f"rank {request.rank} of {request.ranks}")
            self._passes[consumer] = request.name
            self._work.put(request)
        elif words["kind"] == "leave":
            self._passes.pop(consumer, None)
        elif words["kind"] == "status":
            self._send(consumer, encode({"kind": "status", **self.status()}))

    def status(self) -> dict[str, Any]:
        """Return the counts of batches and bytes, and the fraction of the time that threads spend on batches."""
        seconds = perf_counter() - self._begun
        return self._counts | {
            "seconds": round(seconds, 1),
            "threads": self.threads,
            "making": round(self._making / (seconds * self.threads), 3),
            "queued": self._work.qsize(),
        }

    def _serve(self, maker: BatchMaker) -> None:
        while (request := self._work.get()) is not None:
            if self._passes.get(request.consumer) != request.name:
                continue
            begun = perf_counter()
            frames = _made(maker, request, begun, self._stopwatch)
            with self._lock:
                self._making += perf_counter() - begun
                self._counts["batches"] += 1
                self._counts["bytes"] += sum(memoryview(frame).nbytes for frame in frames[1:])
            self._done.append((request.consumer, frames))
            del frames
            os.write(self._waker, b".")


def _made(maker: BatchMaker, request: _Request, begun: float, stopwatch: Stopwatch) -> list[Any]:
    """Return the answer to a request: the batch with its counts and errors, or the error that prevented it."""
    ledger = maker.stream.source.ledger
    assert isinstance(ledger, _Collected)
    ledger.errors.clear()
    reply = {"kind": "batch", "pass": request.name, "g": request.g}
    try:
        part = maker.part(*request[2:])
        batch = maker.read(part, request.epoch)
        unread = next((error for _, error in ledger.errors if isinstance(error, OSError)), None)
        if unread is not None:
            raise unread
        left_out = None if part.left_out is None else _as_data(part.left_out)
        _, traffic = stopwatch.take()
        reply["counts"] = [part.taken, part.quarantined, part.members, left_out]
        reply["errors"] = [[was_read, encoded_error(error)] for was_read, error in ledger.errors]
        reply["work"] = [perf_counter() - begun, list(vars(traffic).values())]
        return encode(reply | {"batch": batch})
    except BaseException as error:  # also SystemExit of an op, which would end this thread, and the training would wait
        # The cause may be this host: another feeder may succeed.
        again = isinstance(error, OSError | MemoryError)
        text = "".join(format_exception(error))
        return encode(reply | {"kind": "failed", "again": again, "error": encoded_error(error), "traceback": text})


def _as_data(tally: Tally) -> dict[str, Any]:
    """Return the counts of the samples of a batch; errors are sent separately."""
    return {name: getattr(tally, name) for name in COUNTED} | {"filtered": dict(tally.filtered)}
