"""Duplicate keys, among more keys than fit into memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from typing import IO
from zlib import crc32

from tarshards.storage.streams import temporary

HELD = 1 << 17  # keys in memory before they go to disk
PARTS = 64

Origin = tuple[int, int]


class KeyOrigins:
    """Every key with its origins, pairs of a shard's number and an offset.

    Up to HELD keys are held in memory. If there are more, all are distributed by a hash over unnamed temporary files,
    which are searched one at a time: this takes about 200 bytes for every 64th key.

    >>> with KeyOrigins() as keys:
    ...     for number, key in enumerate("abca"):
    ...         keys.add(key, (0, number))
    ...     list(keys.duplicates())
    [('a', [(0, 0), (0, 3)])]
    """

    def __init__(self) -> None:
        self._keys: list[tuple[str, Origin]] = []
        self._files: list[IO[bytes]] = []

    def add(self, key: str, origin: Origin) -> None:
        """Add a key and its origin."""
        self._keys.append((key, origin))
        if len(self._keys) >= HELD:
            self._spill()

    def extend(self, keys: Iterable[tuple[str, Origin]]) -> None:
        """Add many keys, each with its origin."""
        rest = iter(keys)
        while batch := list(islice(rest, HELD - len(self._keys))):
            self._keys += batch
            if len(self._keys) >= HELD:
                self._spill()

    def _spill(self) -> None:
        import tempfile

        with temporary():
            while len(self._files) < PARTS:
                self._files.append(tempfile.TemporaryFile())  # noqa: SIM115 (closed by close)
            self._write_parts()
        self._keys = []

    def _write_parts(self) -> None:
        import pickle

        parts: list[list[tuple[str, Origin]]] = [[] for _ in range(PARTS)]
        for entry in self._keys:
            parts[crc32(entry[0].encode("utf-8", "surrogateescape")) % PARTS].append(entry)
        for file, part in zip(self._files, parts):
            pickle.dump(part, file, 5)
            file.flush()

    def duplicates(self) -> Iterator[tuple[str, list[Origin]]]:
        """Yield each key with several origins, and the origins, in no particular order of keys."""
        if self._files:
            self._spill()
        for part in map(_load, self._files) if self._files else [iter([self._keys])]:
            first: dict[str, Origin] = {}
            again: dict[str, list[Origin]] = {}
            for entries in part:
                for key, origin in entries:
                    if (known := first.setdefault(key, origin)) is not origin:
                        again.setdefault(key, [known]).append(origin)
            yield from again.items()

    def close(self) -> None:
        """Delete the temporary files."""
        for file in self._files:
            with suppress(OSError):  # a full disk, which has been reported
                file.close()

    def __enter__(self) -> KeyOrigins:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _load(file: IO[bytes]) -> Iterator[list[tuple[str, Origin]]]:
    import pickle

    end = file.seek(0, 2)
    file.seek(0)
    while file.tell() < end:
        yield pickle.load(file)
