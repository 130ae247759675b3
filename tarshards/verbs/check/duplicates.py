"""Find duplicate keys among more keys than fit into memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from operator import lt
from typing import IO, TYPE_CHECKING, Any

from tarshards.storage.streams import temporary

if TYPE_CHECKING:
    import numpy as np

HELD = 1 << 17  # keys in memory at which they are spilled to disk
PARTS = 64  # files that hashes are distributed to

Origin = tuple[int, int]  # the number of a shard, and an offset
Run = tuple[list[str], int, list[int]]  # keys of one shard, its number, and the offset of each


class KeyOrigins:
    """All keys with their origins, to find duplicate ones.

    While each key is greater than the previous one, none can be a duplicate. Up to about HELD keys are held in memory;
    more are spilled to an unnamed temporary file. Once keys do not ascend, the hashes of spilled keys are distributed
    to PARTS such files, which are searched one at a time: this takes 8 bytes for every 64th key. Only keys whose hash
    occurs again are read back and compared, about HELD at a time.

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
        self._spilled: IO[bytes] | None = None  # runs
        self._hashes: list[IO[bytes]] = []  # of the keys in them, in PARTS files

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
            if self._spilled is None:
                self._spilled = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close)
            _dump(self._runs, self._spilled)
            if self._greatest is None:
                runs = [self._runs] if self._hashes else _load(self._spilled)
                while len(self._hashes) < PARTS:
                    self._hashes.append(tempfile.TemporaryFile())  # noqa: SIM115 (closed by close)
                for each in runs:
                    self._distribute(each)
        self._runs, self._held = [], 0

    def _distribute(self, runs: list[Run]) -> None:
        import numpy as np

        hashes = np.sort(np.concatenate([_hash(keys) for keys, _, _ in runs] or [_hash([])]))
        edges = np.searchsorted(hashes, np.arange(1, PARTS, dtype=np.uint64) * np.uint64(2**64 // PARTS))
        for file, part in zip(self._hashes, np.split(hashes, edges)):
            file.write(part.tobytes())
            file.flush()

    def duplicates(self) -> Iterator[tuple[str, list[Origin]]]:
        """Yield each key that has several origins, with the origins; keys are in no particular order."""
        if self._greatest is not None:
            return
        if self._spilled is None:
            yield from _duplicates(_entries(self._runs))
            return
        self._spill()
        for repeated in self._repeated():
            yield from _duplicates(_entries_with(repeated, self._spilled))

    def _repeated(self) -> Iterator[np.ndarray]:
        """Yield the hashes that occur several times, ascending, in arrays of about HELD."""
        import numpy as np

        found: list[np.ndarray] = []
        for file in self._hashes:
            file.seek(0)
            part = np.sort(np.frombuffer(file.read(), np.uint64))
            found.append(np.unique(part[1:][part[1:] == part[:-1]]))
            if sum(map(len, found)) >= HELD or file is self._hashes[-1]:
                if any(map(len, found)):
                    yield np.concatenate(found)
                found = []

    def close(self) -> None:
        """Delete the temporary files."""
        for file in self._hashes if self._spilled is None else [*self._hashes, self._spilled]:
            with suppress(OSError):  # a full disk, which has been reported
                file.close()

    def __enter__(self) -> KeyOrigins:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _hash(keys: list[str]) -> np.ndarray:
    """Return a hash of each key, uint64, different in each process."""
    import numpy as np

    return np.fromiter(map(hash, keys), np.int64, len(keys)).view(np.uint64)


def _duplicates(entries: Iterable[tuple[str, Origin]]) -> Iterator[tuple[str, list[Origin]]]:
    first: dict[str, Origin] = {}
    again: dict[str, list[Origin]] = {}
    for key, origin in entries:
        if (known := first.setdefault(key, origin)) is not origin:
            again.setdefault(key, [known]).append(origin)
    yield from again.items()


def _entries(runs: list[Run]) -> Iterator[tuple[str, Origin]]:
    for keys, shard, offsets in runs:
        for key, offset in zip(keys, offsets):
            yield key, (shard, offset)


def _entries_with(hashes: np.ndarray, spilled: IO[bytes]) -> Iterator[tuple[str, Origin]]:
    """Yield the spilled keys that have one of these *hashes*, which ascend, with their origins."""
    import numpy as np

    for runs in _load(spilled):
        for keys, shard, offsets in runs:
            own = _hash(keys)
            slots = np.minimum(np.searchsorted(hashes, own), len(hashes) - 1)
            for i in np.flatnonzero(hashes[slots] == own).tolist():
                yield keys[i], (shard, offsets[i])


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
