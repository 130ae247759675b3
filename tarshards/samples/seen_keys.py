"""Keys that may occur only once, for any number of keys."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import chain, islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

LATEST = 1 << 18  # keys held in full
BITS = 16  # the least bits of the filter per older key


class SeenKeys:
    """The keys added: the latest, up to 262,144, with their shards; two hashes of each older key.

    Two of 1e9 keys have the same 128 bits of hashes with a probability of 1e-21.

    >>> seen = SeenKeys()
    >>> seen.add("a", "x.tar")
    >>> "a" in seen, seen.shard_of("a"), [*seen.which(["b", "a"])], seen.isdisjoint(["b"])
    (True, 'x.tar', [False, True], True)
    """

    def __init__(self) -> None:
        self._latest: dict[str, str | None] = {}
        self._runs: list[tuple[Collection[str], str | None]] = []  # latest keys that are not in the dict yet
        self._waiting = 0  # the number of keys in these runs
        self._old: _Hashes | None = None
        self._greatest = ""  # of all keys: any greater key is new, so sorted keys need no look-up

    def __contains__(self, key: str) -> bool:
        if key > self._greatest:
            return False
        return key in self._searched() or (self._old is not None and key in self._old)

    def add(self, key: str, shard: str | None = None) -> None:
        """Add a key, which is in *shard*."""
        if key > self._greatest:
            self._greatest = key
        self._latest[key] = shard
        self._limit()

    def update(self, keys: Collection[str], shard: str | None = None) -> None:
        """Add several keys."""
        self._runs.append((keys, shard))
        self._waiting += len(keys)
        self._greatest = max(self._greatest, max(keys, default=""))
        self._limit()

    def shard_of(self, key: str) -> str | None:
        """Return the shard that one of the latest keys is in, None for another."""
        return self._searched().get(key)

    def isdisjoint(self, keys: Collection[str]) -> bool:
        """Return whether none of *keys* was added."""
        if min(keys, default="") > self._greatest:
            return True
        if self._old is not None and self._old.which([*keys]).any():
            return False
        return self._searched().keys().isdisjoint(keys)

    def which(self, keys: Iterable[str]) -> Iterator[bool]:
        """Yield for each of *keys* whether it was added."""
        latest = self._searched()
        if self._old is None:
            yield from map(latest.__contains__, keys)
            return
        keys = iter(keys)
        while part := list(islice(keys, LATEST)):
            for key, is_old in zip(part, self._old.which(part).tolist()):
                yield is_old or key in latest

    def _searched(self) -> dict[str, str | None]:
        """Return the latest keys as a dict; filled on demand, not while keys ascend: inserting is a cache miss."""
        for keys, shard in self._runs:
            self._latest.update(dict.fromkeys(keys, shard))
        self._runs, self._waiting = [], 0
        return self._latest

    def _limit(self) -> None:
        """Replace the latest keys by their hashes if they are too many."""
        if len(self._latest) + self._waiting >= LATEST:
            self._old = self._old or _Hashes()
            self._old.update([*self._latest, *chain.from_iterable(keys for keys, _ in self._runs)])
            self._latest.clear()
            self._runs, self._waiting = [], 0


class _Hashes:
    """The hashes of keys in sorted runs, each at least twice as long as the next, behind a Bloom filter."""

    def __init__(self) -> None:
        self._runs: list[tuple[np.ndarray, np.ndarray]] = []  # the first hashes, ascending, and the second ones
        self._count = self._mask = 0
        self._filter = bytearray()

    def __contains__(self, key: str) -> bool:
        bits, mask, filled = hash(key), self._mask, self._filter
        slot = bits & mask
        if not filled[slot >> 3] >> (slot & 7) & 1:
            return False
        slot = bits >> 32 & mask
        if not filled[slot >> 3] >> (slot & 7) & 1:
            return False
        return bool(self.which([key])[0])

    def which(self, keys: list[str]) -> np.ndarray:
        """Return which of *keys* were added."""
        import numpy as np

        first, second = _hash(keys)
        order = first.argsort()  # in which each search finds in the caches what the one before it read
        first, second = first[order], second[order]
        found = np.zeros(len(keys), np.bool_)
        for firsts, seconds in self._runs:
            slots = np.searchsorted(firsts, first)
            while True:  # again for different keys with the same first hash
                within = np.minimum(slots, len(firsts) - 1)
                alike = (firsts[within] == first) & (slots < len(firsts)) & ~found
                found |= alike & (seconds[within] == second)
                if not (alike & ~found).any():
                    break
                slots += alike
        which = np.empty_like(found)
        which[order] = found
        return which

    def update(self, keys: list[str]) -> None:
        """Add *keys*."""
        import numpy as np

        run = _sorted(*_hash(keys))
        fresh = [run]
        while self._runs and len(self._runs[-1][0]) < 2 * len(run[0]):
            run = _sorted(*map(np.concatenate, zip(self._runs.pop(), run)))
        self._runs.append(run)
        self._count += len(keys)
        if BITS * self._count > 8 * len(self._filter):
            self._filter = bytearray(1 << (2 * BITS * self._count).bit_length() - 3)
            self._mask, fresh = 8 * len(self._filter) - 1, self._runs
        filled = np.frombuffer(self._filter, np.uint8)
        for bits, _ in fresh:
            for slots in (bits & self._mask, bits >> 32 & self._mask):
                np.bitwise_or.at(filled, slots >> 3, np.left_shift(1, slots & 7).astype(np.uint8))


def _hash(keys: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return two independent hashes of each of *keys*, different in each process."""
    import numpy as np

    first = np.fromiter(map(hash, keys), np.int64, len(keys))
    return first, np.fromiter(map(hash, map("\0".__add__, keys)), np.int64, len(keys))


def _sorted(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    order = first.argsort(kind="stable")
    return first[order], second[order]
