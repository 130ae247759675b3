"""Local shards read from the disk before their samples are needed.

A page of a mapped file that is not in memory is read when it is touched, and the thread that touches it waits for the
disk. The system can be asked in advance to read the pages that will be needed (madvise(2)). For pages that are in
memory, asking takes time and gains nothing. The system counts for each process how often it waited for a page
(getrusage(2)).
"""

from __future__ import annotations

import resource
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from mmap import PAGESIZE
from typing import TYPE_CHECKING

import numpy as np

from tarshards import kernels
from tarshards.errors import TarshardsError
from tarshards.index.open import MOST_WHOLE
from tarshards.samples.payloads import address_of
from tarshards.storage.ranges import most_open
from tarshards.storage.streams import PIECE

if TYPE_CHECKING:
    from tarshards.index.open import OpenShard, OpenShards
    from tarshards.samples.fields import FieldNames

EVERY = 256  # samples after which the waits are counted, at most
FEW = 32  # samples for each wait that says nothing: a library's pages are waited for, too
BLOCKS = PAGESIZE // 512  # as which getrusage counts a page
LASTS = 16  # counts for which more waits are taken to say that the next samples are on the disk, too
AHEAD = 1 << 25  # bytes that are asked for ahead, about
LOOKED_UP = 1 << 12  # samples, or positions, to look up at once; no more are asked for ahead
APART = 1 << 16  # bytes between samples that take longer than another read of the disk
SMALL = 1 << 14  # bytes of a sample that takes a disk as long as another read

Numbers = tuple[np.ndarray, np.ndarray]  # of shards, and of the samples in them; int64


def in_parts(shards: np.ndarray, samples: np.ndarray, size: int) -> Iterator[Numbers]:
    """Yield the numbers of *size* samples at a time."""
    for begin in range(0, len(shards), size):
        yield shards[begin : begin + size], samples[begin : begin + size]


class Waits:
    """Says whether this process has waited for pages of files lately: during the last calls of ``come``.

    This is called after *every* samples. *begun* says that it waited before there were any. Of files that are read by
    calls (*of_calls*), the pages are counted that were not in memory.
    """

    def __init__(self, every: int, *, begun: bool = False, of_calls: bool = False) -> None:
        self._count = _pages_read if of_calls else _waits
        self._few, self._before, self._left, self._were_many = every // FEW, self._count(), LASTS * begun, begun

    def come(self) -> bool:
        now = self._count()
        are_many = now - self._before > self._few
        starts = are_many and (self._were_many or self._left)  # many only once are of a new process
        self._left = LASTS if starts else max(0, self._left - 1)
        self._before, self._were_many = now, are_many
        return self._left > 0


def _waits() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


def _pages_read() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_inblock // BLOCKS


class LocalReadahead:
    """Has the system read samples of local *shards* before they are needed.

    *upcoming* yields the numbers of the samples in the order in which they will be read; *gap* is how many others lie
    between two runs of them, on average. Call ``take`` before reading each *every* samples, or fewer. Threads may
    share it. It reads nothing of its own until this process waits for the disk. Then

    - small samples of small sets (up to 16 KiB each, 1 GiB together) come with all others: a thread reads the shards
      whole, in file order, which takes a fraction of the disk's requests
    - other samples come in pieces: the next 32 MiB or so of *upcoming* are asked for.

    Samples with 64 KiB or more between them are asked for from the first one on, and until ``close`` the system reads
    nothing around them.
    """

    def __init__(self, shards: OpenShards, upcoming: Iterator[Numbers], *, gap: float = 0.0):
        self._shards, self._upcoming = shards, upcoming
        samples, size = int(shards.counts.sum()), int(shards.sizes.sum())
        self._reach = int(min(max(AHEAD * samples / max(1, size), 2 * FEW), LOOKED_UP))
        self._are_scattered = gap * size >= APART * samples > 0
        self._reads_whole = (
            not self._are_scattered and size <= min(MOST_WHOLE, SMALL * samples) and len(shards.named) <= most_open()
        )
        self.every: int = min(EVERY, FEW if self._are_scattered else self._reach // 2)
        self._lock = threading.Lock()
        self._waits = Waits(self.every, begun=self._are_scattered, of_calls=shards.are_called)
        self._taken = self._counted = self._scanned = self._asked = 0
        self._known: deque[Numbers] = deque()  # of the positions up to *scanned* that have not been asked for
        self._fields: FieldNames | None = None
        self._thread: threading.Thread | None = None  # which reads whole shards
        self._over = threading.Event()
        if self._are_scattered:
            shards.scatter(True)
            self._ask(0, 2 * FEW)

    def take(self, count: int, fields: FieldNames | None = None) -> None:
        """Record that *fields* (default: those of the shards) of the next *count* samples will be read."""
        begin, self._taken = self._taken, self._taken + count
        if self._taken - self._counted >= self.every and self._lock.acquire(blocking=False):
            try:
                self._counted, self._fields = self._taken, fields
                if self._thread is None and self._waits.come():
                    self._bring(begin)
            finally:
                self._lock.release()

    def _bring(self, begin: int) -> None:
        """Have the system read what comes at the position *begin* and after it."""
        if self._reads_whole:
            self._thread = threading.Thread(target=self._read_whole, name="tarshards-readahead", daemon=True)
            self._thread.start()
            return
        far = max(2 * FEW, 2 * self._taken) if self._are_scattered else self._reach
        self._ask(begin, self._taken + min(self._reach, far))

    def _ask(self, begin: int, end: int) -> None:
        """Ask for the samples from the position *begin* to *end*, each once."""
        while self._scanned < end and (numbers := next(self._upcoming, None)) is not None:
            self._known.append(numbers)
            self._scanned += len(numbers[0])
        while self._known and self._asked < end:
            shards, samples = self._known.popleft()
            passed = min(len(shards), max(0, begin - self._asked))
            cut = min(len(shards), end - self._asked)
            self._asked += cut
            if cut < len(shards):
                self._known.appendleft((shards[cut:], samples[cut:]))
            shards, samples = shards[passed:cut], samples[passed:cut]
            for shard in sorted(set(shards.tolist())):
                with suppress(TarshardsError):  # raised again when it is read
                    opened = self._shards.use(shard)
                    if self._are_scattered:
                        opened.scatter(True)
                    opened.ask(np.sort(samples[shards == shard]), self._fields)

    def _read_whole(self) -> None:
        for number in range(len(self._shards.named)):
            with suppress(TarshardsError):  # raised again when it is read
                self._touch(self._shards.use(number))

    def _touch(self, shard: OpenShard) -> None:
        """Read a mapped shard into memory, one range while the next one is requested."""
        if shard.buffer is None:
            return
        begin, size = address_of(shard.buffer), len(shard.buffer)
        pages = np.arange(begin, begin + size, PAGESIZE, dtype=np.uint64)
        step = PIECE // PAGESIZE
        for i in range(0, len(pages), step):
            if self._over.is_set():
                return
            following = pages[i + step : i + step + 1]
            kernels.rows.ask(following, np.minimum(PIECE, begin + size - following.astype(np.int64)))
            part = pages[i : i + step]
            with suppress(OSError):  # the shard has shrunk; reading the missing bytes will raise the error
                kernels.rows.gather(np.empty((len(part), 1), np.uint8), part, b"")

    def close(self) -> None:
        """End the thread, and let the system read around what is read again."""
        self._over.set()
        if self._thread is not None and not sys.is_finalizing():  # when daemon threads never run again
            self._thread.join()
        if self._are_scattered:
            self._shards.scatter(False)
