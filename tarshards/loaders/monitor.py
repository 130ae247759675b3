"""Where a running loader spends its time: waiting of consumer and loader, and the bottleneck."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import ceil
from time import perf_counter

from tarshards.parallel.host import available_cores
from tarshards.storage import traffic
from tarshards.storage.traffic import Traffic

BUSY = 0.8  # the fraction of the time from which on the consumer is the limit
UNKNOWN = 0.02  # a consumer that works for a smaller fraction of the time is too fast to measure


class Stopwatch:
    """Measures the work of this process, one batch after the other; its threads also fetch in between."""

    def __init__(self) -> None:
        self._before = traffic.so_far()
        self.begin()

    def begin(self) -> None:
        """Begin to work on a batch."""
        self._begun = perf_counter()

    def take(self) -> tuple[float, Traffic]:
        """Return the seconds since the beginning, and the traffic since the last call."""
        before, self._before = self._before, traffic.so_far()
        return perf_counter() - self._begun, self._before - before


@dataclass
class Monitor:
    """Where a loader spent its time since the iteration began, up to the last batch taken; all times in seconds.

    *waited*: the consumer for batches; *consumed*: between taking one and asking for the next. *reading* and *decoding*
    are sums over all *threads* or workers; pages of a mapped shard that are not yet in memory are read during decoding.
    *samples* counts delivered samples, and *bytes* their fields, as stored: only an ArrayLoader counts these. *traffic*
    is the traffic with web servers and stores, of the workers or of all threads of this process.

    >>> print(Monitor(threads=2, waited=0.1, consumed=0.9, reading=0.1, decoding=0.5, samples=1000, bytes=10**6))
    1,000 samples/s, 1.0 MB/s; waited 10% for the loader, its threads 70% for the consumer; the limit is consuming
    """

    threads: int = 1
    waited: float = 0.0
    consumed: float = 0.0
    reading: float = 0.0
    decoding: float = 0.0
    samples: int = 0
    bytes: int = 0
    traffic: Traffic = field(default_factory=Traffic)

    def add(self, seconds: float, traffic: Traffic) -> None:
        """Count the work of a thread or worker that reads and decodes in turn: it reads while it waits."""
        self.reading += traffic.waited
        self.decoding += max(0.0, seconds - traffic.waited)

    def add_sent(self, seconds: float, counts: Iterable[float]) -> None:
        """Count the work of another process, and its traffic, whose *counts* it has sent."""
        sent = Traffic(*counts)  # type: ignore[arg-type]
        self.add(seconds, sent)
        self.traffic += sent

    @property
    def seconds(self) -> float:
        """The time between the first request and the last."""
        return self.waited + self.consumed

    @property
    def idle(self) -> float:
        """The seconds, summed over all threads, spent waiting for the consumer."""
        return max(0.0, self.threads * self.seconds - self.reading - self.decoding)

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def bytes_per_second(self) -> float:
        return self.bytes / self.seconds if self.seconds else 0.0

    @property
    def limit(self) -> str:
        """The bottleneck: "consuming", "network" (reading from it), "reading" or "decoding"."""
        if self.consumed >= BUSY * self.seconds:
            return "consuming"
        if self.reading <= self.decoding:
            return "decoding"
        return "network" if self.traffic.waited >= self.reading / 2 else "reading"

    @property
    def needed_rate(self) -> float:
        """The samples per second that the consumer takes if it never waits; 0 if unknown."""
        return self.samples / self.consumed if self.consumed else 0.0

    @property
    def needed_bandwidth(self) -> float:
        """The bytes per second of the samples at that rate: of their fields, or as received if that is not counted."""
        return (self.bytes or self.traffic.bytes) / self.consumed if self.consumed else 0.0

    @property
    def needed_threads(self) -> float:
        """The threads, or workers, that read and decode at that rate as fast as these did."""
        return (self.reading + self.decoding) / self.consumed if self.consumed else 0.0

    @property
    def advice(self) -> str:
        """What the consumer needs: how many samples and bytes per second, threads, and machines with as many cores.

        The numbers are for one process: one rank, with one GPU.

        >>> print(Monitor(threads=1, waited=6, consumed=4, reading=1, decoding=5, samples=1000, bytes=10**8).advice)
        the consumer alone takes 250 samples/s, 25.0 MB/s; 1.5 threads feed it, and there are 1: add 1
        """
        if self.consumed < UNKNOWN * self.seconds or not self.samples:
            return "the loop does next to nothing between batches, so its needs are unknown: measure with the model"
        size = f", {self.needed_bandwidth / 1e6:,.1f} MB/s" if self.bytes or self.traffic.bytes else ""
        words = f"the consumer alone takes {self.needed_rate:,.0f} samples/s{size}"
        words += f"; {self.needed_threads:.1f} threads feed it"
        lacking = ceil(self.needed_threads) - self.threads
        if lacking <= 0:
            return f"{words}, and there are {self.threads}: enough"
        cure = f"{words}, and there are {self.threads}: add {lacking}"
        cores = available_cores()
        if (machines := ceil(self.needed_threads / cores)) > 1:
            cure += f", on {machines} machines of {cores} cores"
        if self.reading > self.decoding:
            cure += f"; or make reading faster, which takes {self.reading / (self.reading + self.decoding):.0%} of them"
        return cure

    def __str__(self) -> str:
        seconds = self.seconds or 1.0
        rates = [f"{self.samples_per_second:,.0f} samples/s"]
        rates += [f"{self.bytes_per_second / 1e6:,.1f} MB/s"] if self.bytes else []
        words = [
            ", ".join(rates),
            f"waited {self.waited / seconds:.0%} for the loader, "
            f"its threads {self.idle / seconds / self.threads:.0%} for the consumer",
        ]
        if self.traffic.requests or self.traffic.cache_hits:
            words.append(str(self.traffic))
        return "; ".join([*words, f"the limit is {self.limit}"])
