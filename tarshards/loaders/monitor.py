"""Where a running loader spends its time: who waits for whom, and what limits the rate."""

from __future__ import annotations

from dataclasses import dataclass

BUSY = 0.8  # the part of the time from which on the consumer is the limit


@dataclass
class Monitor:
    """Where a loader spent its time since the iteration began, up to the last batch taken; all times in seconds.

    *waited*: the consumer for batches; *consumed*: between taking one and asking for the next. *reading* and
    *decoding* are those of all *threads* together; what a mapped shard has not in memory yet is read while decoding.
    *samples* and *bytes* (of their fields, as stored) were delivered.

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

    @property
    def seconds(self) -> float:
        """The time between the first request and the last."""
        return self.waited + self.consumed

    @property
    def idle(self) -> float:
        """The seconds, of all threads together, that they had nothing to do but to wait for the consumer."""
        return max(0.0, self.threads * self.seconds - self.reading - self.decoding)

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def bytes_per_second(self) -> float:
        return self.bytes / self.seconds if self.seconds else 0.0

    @property
    def limit(self) -> str:
        """What would have to be faster: "consuming", "reading" or "decoding"."""
        if self.consumed >= BUSY * self.seconds:
            return "consuming"
        return "reading" if self.reading > self.decoding else "decoding"

    def __str__(self) -> str:
        seconds = self.seconds or 1.0
        return (
            f"{self.samples_per_second:,.0f} samples/s, {self.bytes_per_second / 1e6:,.1f} MB/s; "
            f"waited {self.waited / seconds:.0%} for the loader, "
            f"its threads {self.idle / seconds / self.threads:.0%} for the consumer; the limit is {self.limit}"
        )
