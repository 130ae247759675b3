"""Random access to files; local files are mapped."""

from __future__ import annotations

import io
import os
import resource
import sys
from mmap import mmap
from operator import index
from typing import TYPE_CHECKING, Any, Self

from tarshards import kernels
from tarshards.errors import OpenError, visible
from tarshards.storage.streams import failure

if TYPE_CHECKING:
    from tarshards.storage.wire import Steps

Mapping = kernels.mapped.Mapping

MOST_MAPPED = 24_000  # files with two mappings each; the kernel allows a process 65,530 mappings (vm.max_map_count)
UNMAPPED = "%s: cannot be mapped into memory (%s); it, and files like it, are read instead, which is slower"

# One word, which forked processes share: 1 after a file could not be mapped, and takes a descriptor instead.
_keeps_open = mmap(-1, 8)


def most_open() -> int:
    """Return the most shards that a process should hold open; each may be mapped with its index.

    Without compiled kernels, or on a file system that maps no files, each takes a descriptor, and some must be left for
    other uses. Mappings must be left for libraries, memory, and shards that are being released.
    """
    if kernels.IS_COMPILED and not any(_keeps_open):
        return MOST_MAPPED
    return max(1, min(MOST_MAPPED, _most_descriptors() // 2))


def most_held() -> int:
    """Return the most mapped files that a process should also hold open, which only makes checking them faster."""
    return min(MOST_MAPPED, _most_descriptors() // 4)


def _most_descriptors() -> int:
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if descriptors == resource.RLIM_INFINITY else descriptors


class Ranges:
    """A file that is read in any order; *size* is its length in bytes.

    ``read`` may be called by several threads at once. A *remote* file waits for a network, so it is better to
    make many reads at once.
    """

    name: str
    size: int
    remote = True

    def read(self, offset: int, size: int) -> bytes:
        """Return the *size* bytes at *offset*; raise OpenError if they cannot be read."""
        raise NotImplementedError

    def read_up_to(self, offset: int, size: int) -> bytes:
        """Return the *size* bytes at *offset*, fewer at the end."""
        return self.read(offset, max(0, min(size, self.size - offset)))

    def hold(self, offset: int, size: int) -> Any:
        """Return the *size* bytes at *offset*, or a ``MappedBlock`` of them if a cache has them on its disk."""
        return self.read(offset, size)

    def take(self, offset: int, size: int) -> Steps[Any]:
        """Return what ``hold`` does, as steps."""
        from tarshards.storage.wire import loading  # which local files do not need

        return (yield from loading(self.hold, offset, size))

    def check(self, end: int) -> None:
        """Raise OpenError if the first *end* bytes of a mapped file, which kernels have copied, are no longer there."""

    def drop(self, offset: int, size: int) -> None:
        """Release bytes that are not needed again soon, from a cache and from the memory of this process."""

    def verify(self) -> None:
        """Raise OpenError if the file is known to have been written to since it was opened."""

    def is_current(self) -> bool:
        """Return whether opening the URL again would give the same bytes; False if that is unknown."""
        return False

    @property
    def version(self) -> Any:
        """A value that identifies the bytes, in any process; None if there is none."""
        return None

    def expect(self, version: Any) -> None:
        """Raise OpenError unless the bytes are of this *version*, or the version is unknown."""
        if version is not None and self.version not in (None, version):
            raise OpenError("has changed since it was first opened", url=self.name)

    def file(self) -> RangedFile:
        """Return all its bytes as a seekable file, which closes it."""
        return RangedFile(self)

    def close(self) -> None:
        """Release the file."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RangedFile(io.BufferedIOBase):
    """The first *size* bytes of *ranges*, or all, as a seekable file; threads must not share one.

    Closing it closes *ranges*.
    """

    _ranges: Ranges | None = None

    def __init__(self, ranges: Ranges, size: int | None = None):
        self.size: int = ranges.size if size is None else size
        self._ranges = ranges
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        self._check_open()
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Go to *offset* from the beginning, the position or the end; a position after the end has no bytes."""
        self._check_open()
        if whence not in (os.SEEK_SET, os.SEEK_CUR, os.SEEK_END):
            raise ValueError(f"whence is 0, 1 or 2, not {whence!r}")
        position = (0, self._position, self.size)[whence] + index(offset)
        if position < 0:
            raise ValueError(f"negative seek position {position}")
        self._position = position
        return position

    def read(self, size: int | None = -1, /) -> bytes:
        """Return the next *size* bytes, fewer only at the end; all that are left for -1 or None."""
        self._check_open()
        left = max(0, self.size - self._position)
        size = -1 if size is None else index(size)
        data = self._read(self._position, left if size < 0 else min(size, left))
        self._position += len(data)
        return data

    def _read(self, position: int, size: int) -> bytes:
        """Return *size* bytes of the file, which has them."""
        assert self._ranges is not None
        return self._ranges.read(position, size)

    def _check_open(self) -> None:
        if self.closed:
            raise ValueError("I/O operation on a closed file")

    def close(self) -> None:
        if self._ranges is not None:
            self._ranges.close()
            self._ranges = None
        super().close()


class LocalRanges(Ranges):
    """A local file, mapped into memory, or read if it has at most *copied* bytes.

    If the file is removed or replaced, its bytes stay readable. On a file system that maps no files it is read, which a
    warning says once in a process and those forked from it.
    """

    remote = False

    def __init__(self, path: str, name: str, copied: int = 0):
        self.name = name
        try:
            self.mapping: Any = Mapping(path, copied)
        except (OSError, ValueError) as exc:
            raise failure(exc, name) from exc
        self.size: int = len(self.mapping)
        if self.mapping.unmapped:
            _tell_of(name, self.mapping.unmapped)

    def read(self, offset: int, size: int) -> bytes:
        try:
            return self.mapping.read(offset, size)
        except (OSError, ValueError) as exc:
            raise failure(exc, self.name, offset) from exc

    def check(self, end: int) -> None:
        try:
            self.mapping.check(end)
        except OSError as exc:
            raise failure(exc, self.name) from exc

    def drop(self, offset: int, size: int) -> None:
        self.mapping.drop(offset, size)

    def scatter(self, flag: bool) -> None:
        """Tell the system whether reads are few and far apart, so that it does not read ahead."""
        self.mapping.scatter(flag)

    def verify(self) -> None:
        if self.mapping.was_written():
            raise OpenError("changed while it was read", url=self.name)

    def is_current(self) -> bool:
        return self.mapping.is_current()

    @property
    def version(self) -> tuple[int, int]:
        return self.size, self.mapping.modified


def _tell_of(name: str, error: int) -> None:
    if kernels.mapped.replace_word(_keeps_open, 0, 0, 1):
        import logging

        logging.getLogger("tarshards").warning(UNMAPPED, visible(name), os.strerror(error))
