"""Bytes in any order: what every random access goes through, and local files, which are mapped."""

from __future__ import annotations

import resource
import sys
from typing import Any, Self

from tarshards.errors import OpenError
from tarshards.storage.streams import failure

try:
    from tarshards.storage._mapped import Mapping
    from tarshards.storage._mapped import begin_flush as begin_flush
except ImportError:
    from tarshards.storage._mapped_py import Mapping  # type: ignore[assignment]
    from tarshards.storage._mapped_py import begin_flush as begin_flush

MOST_MAPPED = 24_000  # files: of the 65,530 mappings that the kernel allows a process (vm.max_map_count), two each


def are_buffers() -> bool:
    """Return whether kernels can read mapped files in place."""
    return not Mapping.__module__.endswith("_py")


def most_open() -> int:
    """Return how many shards a process should hold open at most; each may be mapped with its index.

    Without the kernel shards are descriptors. Others need some, too: libraries, memory, and shards that are being
    released.
    """
    if are_buffers():
        return MOST_MAPPED
    return max(1, min(MOST_MAPPED, _most_descriptors() // 2))


def most_held() -> int:
    """Return how many mapped files a process should also hold open at most, only to be quicker."""
    return min(MOST_MAPPED, _most_descriptors() // 4)


def _most_descriptors() -> int:
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if descriptors == resource.RLIM_INFINITY else descriptors


class MappedPart:
    """The bytes of a mapped file from *start* on, *size* of them or all."""

    def __init__(self, mapping: Mapping, start: int, size: int | None = None):
        self.mapping, self.start = mapping, start
        self._size = len(mapping) - start if size is None else size

    def __len__(self) -> int:
        return self._size

    def read(self, offset: int, size: int) -> bytes:
        """Return *size* bytes at *offset*."""
        return self.mapping.read(self.start + offset, size)

    @property
    def buffer(self) -> memoryview:
        """All of them, for kernels only."""
        return memoryview(self.mapping)[self.start : self.start + self._size]  # type: ignore[arg-type]


class Ranges:
    """A file that is read in any order; *size* is its length in bytes.

    ``read`` may be called by several threads at once. *remote* says that it waits for a network, so that it is better
    to ask for many reads at once.
    """

    name: str
    size: int
    remote = True

    def read(self, offset: int, size: int) -> bytes:
        """Return the *size* bytes at *offset*; raise OpenError where they cannot be read."""
        raise NotImplementedError

    def read_up_to(self, offset: int, size: int) -> bytes:
        """Return the *size* bytes at *offset*, or as many as there are."""
        return self.read(offset, max(0, min(size, self.size - offset)))

    def hold(self, offset: int, size: int) -> Any:
        """Return the *size* bytes at *offset*, as a ``MappedBlock`` where a cache has them on its disk."""
        return self.read(offset, size)

    def drop(self, offset: int, size: int) -> None:
        """Say that what was held is not needed again soon, so that no cache, nor this process, need keep it."""

    def verify(self) -> None:
        """Raise OpenError if the file is known to have been written to since it was opened."""

    def is_current(self) -> bool:
        """Return whether opening the URL again would give the same bytes; False where nothing tells."""
        return False

    @property
    def version(self) -> Any:
        """What identifies the bytes, in any process; None where nothing tells."""
        return None

    def expect(self, version: Any) -> None:
        """Raise OpenError unless the bytes are of this *version*, or the version is unknown."""
        if version is not None and self.version not in (None, version):
            raise OpenError("has changed since it was first opened", url=self.name)

    def close(self) -> None:
        """Release the file."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class LocalRanges(Ranges):
    """A local file, mapped into memory, or read if it has at most *copied* bytes.

    It stays as it is when the file is removed or replaced.
    """

    remote = False

    def __init__(self, path: str, name: str, copied: int = 0):
        self.name = name
        try:
            self.mapping = Mapping(path, copied)
        except (OSError, ValueError) as exc:
            raise failure(exc, name) from exc
        self.size = len(self.mapping)

    def read(self, offset: int, size: int) -> bytes:
        try:
            return self.mapping.read(offset, size)
        except (OSError, ValueError) as exc:
            raise failure(exc, self.name, offset) from exc

    def drop(self, offset: int, size: int) -> None:
        self.mapping.drop(offset, size)

    def scatter(self, flag: bool) -> None:
        """Tell the system whether reads are few and far apart, so that it reads nothing around them."""
        self.mapping.scatter(flag)

    def verify(self) -> None:
        if self.mapping.was_written():
            raise OpenError("was written to while it was read", url=self.name)

    def is_current(self) -> bool:
        return self.mapping.is_current()

    @property
    def version(self) -> tuple[int, int]:
        return self.size, self.mapping.modified
