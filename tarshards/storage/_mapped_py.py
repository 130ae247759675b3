"""Bytes of a file by system calls, in pure Python: the twin of _mapped.c, for systems without a compiler.

A copy out of a mapping would kill the process where the file has shrunk; a read comes short.
"""

from __future__ import annotations

import os


def begin_flush(descriptor: int, offset: int, size: int) -> None:
    """Do nothing: flushing writes all."""


class Mapping:
    """A file kept open for reading in any order; *copied* is for the kernel, which maps longer files."""

    def __init__(self, path: str | os.PathLike[str], copied: int = 0):
        with open(path, "rb", buffering=0) as file:
            self._file = os.dup(file.fileno())
        self._path, self._opened = path, os.fstat(self._file)
        self._size = self._opened.st_size

    def __len__(self) -> int:
        return self._size

    def read(self, offset: int, size: int) -> bytes:
        """Return *size* bytes at *offset*."""
        if offset < 0 or size < 0 or offset + size > self._size:
            raise ValueError(f"{size} bytes at offset {offset} of {self._size}")
        data = os.pread(self._file, size, offset)
        while len(data) < size:  # a call gives 2 GiB at most
            more = os.pread(self._file, size - len(data), offset + len(data))
            if not more:
                raise OSError("the file has shrunk since it was opened")
            data += more
        return data

    def drop(self, offset: int, size: int) -> None:
        """Do nothing: no bytes are mapped into the memory of this process."""
        if offset < 0 or size < 0 or offset + size > self._size:
            raise ValueError(f"{size} bytes at offset {offset} of {self._size}")

    def scatter(self, flag: bool) -> None:
        """Tell the system whether reads are few and far apart, so that it reads no more."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_RANDOM if flag else os.POSIX_FADV_NORMAL)

    @property
    def modified(self) -> int:
        """When the file had been written to last, in nanoseconds."""
        return self._opened.st_mtime_ns

    def is_current(self) -> bool:
        """Return whether its path is that of the same file, not written to since."""
        now = self._find()
        return now is not None and os.path.samestat(now, self._opened) and self._is_as_it_was(now)

    def was_written(self) -> bool:
        """Return whether its path is that of the same file, but it was written to since."""
        now = self._find()
        return now is not None and os.path.samestat(now, self._opened) and not self._is_as_it_was(now)

    def _find(self) -> os.stat_result | None:
        try:
            return os.stat(self._path)
        except OSError:
            return None

    def _is_as_it_was(self, now: os.stat_result) -> bool:
        # The size, too: of a file that is truncated it changes first, then the bytes, and last the time.
        return (now.st_size, now.st_mtime_ns) == (self._opened.st_size, self._opened.st_mtime_ns)

    def hold_open(self) -> None:
        """Hold the file open, as it always is."""

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)
