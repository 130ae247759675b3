"""Read files by system calls, in pure Python: the twin of _mapped.c, for systems without a compiler.

Nothing is mapped: if the file has shrunk, copying from a mapping would kill the process; a read returns fewer bytes.
"""

from __future__ import annotations

import os
from struct import Struct
from threading import Lock
from typing import Any

_word = Struct("=q")
_lock = Lock()

SHRUNK = "the file has shrunk since it was opened"


def begin_flush(descriptor: int, offset: int, size: int) -> None:
    """Do nothing: flushing writes all bytes."""


def replace_word(memory: Any, number: int, before: int, after: int) -> bool:
    """Write word *number* of shared memory if it is still *before*; return whether it was.

    Only the native twin sees what another process writes at the same moment.
    """
    with memoryview(memory).cast("B") as view, _lock:
        if not 0 <= number < len(view) // _word.size:
            raise IndexError(f"word {number}")
        if _word.unpack_from(view, _word.size * number) != (before,):
            return False
        _word.pack_into(view, _word.size * number, after)
        return True


class Mapping:
    """A file kept open for reading in any order; *copied* is ignored, as no file is mapped."""

    unmapped = 0  # no file was refused

    def __init__(self, path: str | os.PathLike[str], copied: int = 0):
        with open(path, "rb", buffering=0) as file:
            self._file = os.dup(file.fileno())
        self._path, self._opened = path, os.fstat(self._file)
        self._size = self._opened.st_size

    def __len__(self) -> int:
        return self._size

    def read(self, offset: int, size: int) -> bytes:
        """Return *size* bytes at *offset*; raise OSError if the file has shrunk."""
        if offset < 0 or size < 0 or offset + size > self._size:
            raise ValueError(f"{size} bytes at offset {offset} of {self._size}")
        data = os.pread(self._file, size, offset)
        while len(data) < size:  # a call returns at most 2 GiB
            more = os.pread(self._file, size - len(data), offset + len(data))
            if not more:
                raise OSError(SHRUNK)
            data += more
        return data

    def check(self, end: int) -> None:
        """Raise OSError unless the file still has its first *end* bytes: call it after copying them."""
        if os.fstat(self._file).st_size < min(end, self._size):
            raise OSError(SHRUNK)

    def drop(self, offset: int, size: int) -> None:
        """Do nothing: no bytes are mapped into the memory of this process."""
        if offset < 0 or size < 0 or offset + size > self._size:
            raise ValueError(f"{size} bytes at offset {offset} of {self._size}")

    def scatter(self, flag: bool) -> None:
        """Tell the system whether reads are few and far apart, so that it does not read ahead."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_RANDOM if flag else os.POSIX_FADV_NORMAL)

    @property
    def modified(self) -> int:
        """The time of the last modification when the file was opened, in nanoseconds."""
        return self._opened.st_mtime_ns

    def is_current(self) -> bool:
        """Return whether the path is still that of the same file, unmodified."""
        now = self._find()
        return now is not None and os.path.samestat(now, self._opened) and self._is_as_it_was(now)

    def was_written(self) -> bool:
        """Return whether the path is still that of the same file, but the file was written to."""
        now = self._find()
        return now is not None and os.path.samestat(now, self._opened) and not self._is_as_it_was(now)

    def _find(self) -> os.stat_result | None:
        try:
            return os.stat(self._path)
        except OSError:
            return None

    def _is_as_it_was(self, now: os.stat_result) -> bool:
        # Compare sizes, too: truncating a file changes its size first, then its bytes, and its time last.
        return (now.st_size, now.st_mtime_ns) == (self._opened.st_size, self._opened.st_mtime_ns)

    def read_by_calls(self, hold: bool) -> None:
        """Do nothing: no file is mapped."""

    def hold_open(self) -> None:
        """Do nothing: the file is always open."""

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)
