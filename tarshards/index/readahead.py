"""Members of mapped shards asked for before they are read, while it is the disk that reading waits for.

A page of a mapped file that is not in memory is read when it is touched, and whoever touches it waits for the disk, one
page or stretch after the other. The system can be told before which pages will be needed (madvise(2)), and reads them
meanwhile. For what is in memory that takes time and brings nothing, so it is done only where pages had to be waited
for, which the system counts for the process (getrusage(2)) and no permission is needed to know.
"""

from __future__ import annotations

import resource
import threading
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from tarshards.errors import TarshardsError

if TYPE_CHECKING:
    from tarshards.index.open import OpenShards

EVERY = 256  # samples after which the waits are counted, at most
FEW = 32  # samples for each wait that says nothing: a library's pages are waited for, too
LASTS = 16  # counts for which more waits are taken to say that the next samples are on the disk, too
FAR = 1 << 25  # bytes that are asked for ahead, about
FEWEST, MOST = 64, 1 << 12  # samples that are
APART = 1 << 16  # bytes between samples that take longer than another read of the disk

Places = tuple[np.ndarray, np.ndarray]  # shards and samples, int64


class Waits:
    """Says whether this process has waited for pages of files lately: during the last calls of ``come``.

    This is called after *every* samples. *begun* says that it did before there were any.
    """

    def __init__(self, every: int, *, begun: bool = False) -> None:
        self._few, self._before, self._left, self._were_many = every // FEW, _waits(), LASTS * begun, begun

    def come(self) -> bool:
        now = _waits()
        are_many = now - self._before > self._few
        starts = are_many and (self._were_many or self._left)  # many only once are of a new process
        self._left = LASTS if starts else max(0, self._left - 1)
        self._before, self._were_many = now, are_many
        return self._left > 0


def _waits() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


def reach(counts: np.ndarray, sizes: np.ndarray) -> tuple[int, int]:
    """Return how many samples of shards are asked for ahead, and after how many it is found out whether to.

    *counts* are the shards' samples, *sizes* their bytes.
    """
    far = int(min(max(FAR * int(counts.sum()) / max(1, int(sizes.sum())), FEWEST), MOST))
    return far, min(EVERY, far // 2)


def are_scattered(gap: float, counts: np.ndarray, sizes: np.ndarray) -> bool:
    """Return whether samples of such shards with so many others between them are read sooner without these."""
    return gap * int(sizes.sum()) >= APART * int(counts.sum()) > 0


class Readahead:
    """Asks for the samples of local *shards* that *upcoming* says will be read, ahead of their use.

    ``take`` is to be called before each *every* samples, or fewer. Threads may share it. Where samples are *scattered*,
    they are asked for from the first one on, more and more at once, and until ``close`` the system reads nothing around
    them.
    """

    def __init__(self, shards: OpenShards, upcoming: Iterator[Places], *, scattered: bool = False):
        self._shards, self._upcoming = shards, upcoming
        self._reach, self.every = reach(shards.counts, shards.sizes)
        self.every = min(self.every, FEW) if scattered else self.every
        self._waits, self._lock = Waits(self.every, begun=scattered), threading.Lock()
        self._taken = self._counted = self._scanned = self._asked = 0
        self._known: deque[Places] = deque()  # of the positions up to *scanned* that have not been asked for
        self._are_scattered = scattered
        if scattered:
            shards.scatter(True)
            self._ask(FEWEST)

    def take(self, count: int) -> None:
        """Note that *count* samples more are about to be read."""
        self._taken += count
        if self._taken - self._counted >= self.every and self._lock.acquire(blocking=False):
            try:
                self._counted = self._taken
                if self._waits.come():
                    far = max(FEWEST, 2 * self._taken) if self._are_scattered else self._reach
                    self._ask(self._taken + min(self._reach, far))
            finally:
                self._lock.release()

    def _ask(self, end: int) -> None:
        """Ask for the samples between those that are being read and the position *end*."""
        while self._scanned < end and (places := next(self._upcoming, None)) is not None:
            self._known.append(places)
            self._scanned += len(places[0])
        while self._known and self._asked < end:
            shards, samples = self._known.popleft()
            passed = min(len(shards), max(0, self._taken - self._asked))
            cut = min(len(shards), end - self._asked)
            self._asked += cut
            if cut < len(shards):
                self._known.appendleft((shards[cut:], samples[cut:]))
            shards, samples = shards[passed:cut], samples[passed:cut]
            for shard in np.unique(shards).tolist():
                try:
                    opened = self._shards.use(shard)
                    if self._are_scattered:
                        opened.scatter(True)
                    opened.ask(np.sort(samples[shards == shard]))
                except TarshardsError:  # raised again when it is read
                    continue

    def close(self) -> None:
        """Let the system read around what is read again."""
        if self._are_scattered:
            self._shards.scatter(False)
