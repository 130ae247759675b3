"""Samples looked up by key in memory, where there is no key index."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable

import numpy as np


class KeyTable:
    """The places of *count* *keys*, by sorted hashes: 16 bytes a key. *key_of* returns the key of a place.

    >>> keys = ["a", "b", "a"]
    >>> table = KeyTable(keys, 3, keys.__getitem__)
    >>> table.places("a"), table.places("c"), table.repeated()
    ([0, 2], [], 'a')
    """

    def __init__(self, keys: Iterable[str], count: int, key_of: Callable[[int], str]):
        hashes = np.fromiter(map(hash, keys), np.int64, count)
        order = np.argsort(hashes, kind="stable")  # of equal keys the first stays first
        self._key_of = key_of
        self._hashes, self._places = hashes[order].data, order.data  # memoryviews: their items are ints

    def places(self, key: str) -> list[int]:
        """Return the places of *key*, ascending."""
        hashes, wanted = self._hashes, hash(key)
        at, found = bisect_left(hashes, wanted), []
        while at < len(hashes) and hashes[at] == wanted:
            place: int = self._places[at]
            if self._key_of(place) == key:
                found.append(place)
            at += 1
        return found

    def repeated(self) -> str | None:
        """Return a key that has several places, None where there is none."""
        hashes = np.asarray(self._hashes)
        for at in (np.flatnonzero(hashes[1:] == hashes[:-1]) + 1).tolist():
            place = self._places[at]
            key = self._key_of(place)
            if self.places(key)[0] != place:
                return key
        return None
