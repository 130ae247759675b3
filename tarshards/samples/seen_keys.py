"""Keys that may occur once, however many there are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING

from tarshards.errors import SampleError

if TYPE_CHECKING:
    import numpy as np

LATEST = 1 << 18  # keys that are held as they are
DIGEST = 16  # bytes: two keys of 1e9 have the same one with a probability of 1e-21


class SeenKeys:
    """The keys that were added: the latest 262,144 as they are, of others a digest of 16 bytes.

    A key that comes again is an error with *reason*, at once if it is one of the latest, otherwise as soon as there are
    262,144 others, or at ``check``.

    >>> seen = SeenKeys("duplicate key")
    >>> seen.add("a", url="x.tar")
    >>> "a" in seen, [*seen.which(["b", "a"])]
    (True, [False, True])
    >>> seen.add("a", url="y.tar")
    Traceback (most recent call last):
        ...
    tarshards.errors.SampleError: y.tar: a: duplicate key
    """

    def __init__(self, reason: str):
        self.reason = reason
        self._latest: dict[str, str | None] = {}  # the shards that they are in
        self._runs: list[np.ndarray] = []  # sorted digests, each run at least twice as long as the next

    def add(self, key: str, *, url: str | None) -> None:
        """Add a key; raise SampleError for one that was added before, which may be an earlier one than this."""
        if key in self._latest:
            raise SampleError(self.reason, url=url, key=key)
        self._latest[key] = url
        if len(self._latest) == LATEST:
            self.check()

    def check(self) -> None:
        """Raise SampleError if one of the latest keys was added before; hold only digests of them."""
        import numpy as np

        if not self._runs and len(self._latest) < LATEST:
            return
        digests = _digests(self._latest)
        for (key, url), is_old in zip(self._latest.items(), self._are_old(digests).tolist()):
            if is_old:
                raise SampleError(self.reason, url=url, key=key)
        self._latest.clear()
        run = np.sort(digests)
        while self._runs and len(self._runs[-1]) < 2 * len(run):
            run = np.sort(np.concatenate([self._runs.pop(), run]), kind="stable")
        self._runs.append(run)

    def __contains__(self, key: str) -> bool:
        return key in self._latest or (bool(self._runs) and bool(self._are_old(_digests([key]))[0]))

    def which(self, keys: Iterable[str]) -> Iterator[bool]:
        """Yield of each of *keys* whether it was added."""
        if not self._runs:
            yield from map(self._latest.__contains__, keys)
            return
        keys = iter(keys)
        while part := list(islice(keys, LATEST)):
            for key, is_old in zip(part, self._are_old(_digests(part)).tolist()):
                yield is_old or key in self._latest

    def _are_old(self, digests: np.ndarray) -> np.ndarray:
        """Return which of *digests* the runs have."""
        import numpy as np

        old = np.zeros(len(digests), np.bool_)
        for run in self._runs:
            places = np.minimum(np.searchsorted(run, digests), len(run) - 1)
            old |= run[places] == digests
        return old


def _digests(keys: Iterable[str]) -> np.ndarray:
    from hashlib import blake2b

    import numpy as np

    digested = (blake2b(key.encode(errors="surrogateescape"), digest_size=DIGEST).digest() for key in keys)
    return np.frombuffer(b"".join(digested), f"S{DIGEST}")
