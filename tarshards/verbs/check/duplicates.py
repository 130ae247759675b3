"""Find duplicate keys among more keys than fit into memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from operator import lt
from typing import IO, Any
from zlib import crc32

from tarshards.storage.streams import temporary

HELD = 1 << 17  # keys in memory at which they are spilled to disk
PARTS = 64  # files that keys are distributed to

Origin = tuple[int, int]  # the number of a shard, and an offset
Run = tuple[list[str], int, list[int]]  # keys of one shard, its number, and the offset of each


class KeyOrigins:
    """All keys with their origins, to find duplicate ones.

    While each key is greater than the previous one, none can be a duplicate. Up to about HELD keys are held in memory;
    more are spilled to an unnamed temporary file. Once keys do not ascend, spilled keys are distributed by their hash
    to PARTS such files, which are searched one at a time: this takes about 200 bytes for every 64th key.

    >>> with KeyOrigins() as keys:
    ...     for number, key in enumerate("abca"):
    ...         keys.add(key, (0, number))
    ...     list(keys.duplicates())
    [('a', [(0, 0), (0, 3)])]
    """

    def __init__(self) -> None:
        self._runs: list[Run] = []
        self._held = 0
        self._greatest: str | None = ""  # the last key while keys ascend, None once they do not
        self._ascending: IO[bytes] | None = None  # runs whose keys ascend
        self._files: list[IO[bytes]] = []

    def add(self, key: str, origin: Origin) -> None:
        """Add a key and its origin."""
        shard, offset = origin
        if not self._runs or self._runs[-1][1] != shard:
            self._runs.append(([], shard, []))
        keys, _, offsets = self._runs[-1]
        keys.append(key)
        offsets.append(offset)
        if self._greatest is not None:
            self._greatest = key if key > self._greatest else None
        self._hold(1)

    def extend(self, keys: Sequence[str], shard: int, offsets: Sequence[int]) -> None:
        """Add many keys of one shard, each with its offset."""
        if not keys:
            return
        self._runs.append(([*keys], shard, [*offsets]))
        if self._greatest is not None:
            ascends = keys[0] > self._greatest and all(map(lt, keys, islice(keys, 1, None)))
            self._greatest = keys[-1] if ascends else None
        self._hold(len(keys))

    def _hold(self, more: int) -> None:
        self._held += more
        if self._held >= HELD:
            self._spill()

    def _spill(self) -> None:
        import tempfile

        with temporary():
            if self._greatest is not None and self._ascending is None:
                self._ascending = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close)
            while self._greatest is None and len(self._files) < PARTS:
                self._files.append(tempfile.TemporaryFile())  # noqa: SIM115 (closed by close)
            if self._ascending is None:
                self._distribute(self._runs)
            else:
                _dump(self._runs, self._ascending)
        self._runs, self._held = [], 0
        if self._greatest is None and self._ascending is not None:
            for runs in _load(self._ascending):
                with temporary():
                    self._distribute(runs)
            self._ascending.close()
            self._ascending = None

    def _distribute(self, runs: list[Run]) -> None:
        parts: list[list[tuple[str, Origin]]] = [[] for _ in range(PARTS)]
        for entry in _entries(runs):
            parts[crc32(entry[0].encode("utf-8", "surrogateescape")) % PARTS].append(entry)
        for file, part in zip(self._files, parts):
            _dump(part, file)

    def duplicates(self) -> Iterator[tuple[str, list[Origin]]]:
        """Yield each key that has several origins, with the origins; keys are in no particular order."""
        if self._greatest is not None:
            return
        if self._files or self._ascending is not None:
            self._spill()
        for part in map(_load, self._files) if self._files else [iter([_entries(self._runs)])]:
            first: dict[str, Origin] = {}
            again: dict[str, list[Origin]] = {}
            for entries in part:
                for key, origin in entries:
                    if (known := first.setdefault(key, origin)) is not origin:
                        again.setdefault(key, [known]).append(origin)
            yield from again.items()

    def close(self) -> None:
        """Delete the temporary files."""
        for file in self._files if self._ascending is None else [*self._files, self._ascending]:
            with suppress(OSError):  # a full disk, which has been reported
                file.close()

    def __enter__(self) -> KeyOrigins:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _entries(runs: list[Run]) -> Iterator[tuple[str, Origin]]:
    for keys, shard, offsets in runs:
        for key, offset in zip(keys, offsets):
            yield key, (shard, offset)


def _dump(items: list[Any], file: IO[bytes]) -> None:
    import pickle

    pickle.dump(items, file, 5)
    file.flush()


def _load(file: IO[bytes]) -> Iterator[list[Any]]:
    import pickle

    end = file.seek(0, 2)
    file.seek(0)
    while file.tell() < end:
        yield pickle.load(file)
