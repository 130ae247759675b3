"""Bytes in memory that a process shares with the processes forked from it."""

from __future__ import annotations

import fcntl
import os
import weakref
from collections.abc import Callable
from functools import partial
from mmap import mmap
from struct import Struct
from threading import Lock
from time import monotonic, sleep
from typing import Any

from tarshards.parallel.forks import PerProcess
from tarshards.storage.locks import PAUSE, pauses
from tarshards.storage.remote import Remote
from tarshards.storage.wire import Steps, pausing

#: A piece: its offset, the bytes reserved for it, and its length, which is 0 while it is missing. The first row has the
#: end of the last piece.
ROW = Struct("<QQQ")


class SharedBytes:
    """Up to *count* pieces of bytes, shared by a process and those forked from it later; each is fetched once.

    They are in an unnamed file in memory, which cannot shrink, and which is freed when the last process that has it
    open ends. They take at most as much memory as *remote* may hold; beyond that, each process holds the pieces that it
    fetches. A piece stays until it is dropped.

    Record locks on the file, which belong to processes, guard the pieces: two threads of one process must not ask for
    the same piece at once.
    """

    def __init__(self, count: int, remote: Remote):
        self._remote, self._lock = remote, PerProcess(Lock)
        self._first = ROW.size * (count + 1)
        self._given_up: set[int] = set()  # rows that another process has locked for too long
        self._file = os.memfd_create("tarshards", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self._file)
        os.ftruncate(self._file, self._first + remote.held())
        fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        self._memory = mmap(self._file, 0)  # its own descriptor stays open: closing it would release our locks

    @classmethod
    def of(cls, count: int, remote: Remote) -> SharedBytes | None:
        """Return a new one, or None on systems that have no such files."""
        try:
            return cls(count, remote)
        except (AttributeError, OSError, ValueError):
            return None

    @property
    def taken(self) -> int:
        """The bytes of all pieces."""
        return max(0, self._row(0)[0] - self._first)

    def hold(self, number: int, fetch: Callable[[Callable[[int], Any]], Any]) -> bytes | memoryview:
        """Return a piece, by its number; one of the processes that ask for it calls *fetch*, while the others wait.

        *fetch* gets a function that allocates shared memory for a number of bytes, and returns the bytes of the piece.
        If they are in other memory, they are copied.
        """
        if not self._acquire(number + 1):
            return self._found(number + 1) or bytes(fetch(bytearray))
        try:
            return self._found(number + 1) or self._put(number + 1, fetch)
        finally:
            self._release(number + 1)

    def claim(self, number: int) -> Steps[bool]:
        """Return whether a piece is missing, so that this process has to fetch it, until ``leave``.

        While another process fetches it, the steps wait, and no thread: the few threads are needed to load what this
        process has fetched, for which the other process may wait.
        """
        end, rests = monotonic() + self._remote.timeout, pauses()
        while not self._found(number + 1) and monotonic() < end:
            if self._lock_row(number + 1):
                if not self._found(number + 1):
                    return True
                self._release(number + 1)
            else:
                yield from pausing(next(rests))
        if not self._found(number + 1):
            self._given_up.add(number + 1)
        return False

    def leave(self, number: int) -> None:
        """End the claim to a piece; ``hold`` ends it, too."""
        self._release(number + 1)

    def drop(self, number: int) -> None:
        """Forget a piece: it is fetched again, into other memory, since processes may still read this one."""
        self._write(number + 1, 0, 0, 0)

    def _row(self, row: int) -> tuple[int, int, int]:
        begin, capacity, size = ROW.unpack(os.pread(self._file, ROW.size, ROW.size * row))
        return begin, capacity, size

    def _write(self, row: int, begin: int, capacity: int, size: int) -> None:
        os.pwrite(self._file, ROW.pack(begin, capacity, size), ROW.size * row)

    def _found(self, row: int) -> memoryview | None:
        begin, _, size = self._row(row)
        return memoryview(self._memory)[begin : begin + size].toreadonly() if size else None

    def _put(self, row: int, fetch: Callable[[Callable[[int], Any]], Any]) -> bytes | memoryview:
        data = fetch(partial(self._reserve, row))
        if not self._is_shared(data):
            copy = self._reserve(row, len(data))
            if not self._is_shared(copy):
                return bytes(data)
            copy[:] = data
            data = copy
        begin, capacity, _ = self._row(row)
        self._write(row, begin, capacity, len(data))
        return memoryview(data).toreadonly()

    def _is_shared(self, data: Any) -> bool:
        return isinstance(data, memoryview) and data.obj is self._memory

    def _reserve(self, row: int, size: int) -> memoryview | bytearray:
        """Return memory for a piece, which is private to this process if no shared memory is left."""
        begin, capacity, _ = self._row(row)  # a failed attempt may have reserved bytes already
        if capacity < size:
            with self._lock():
                if not self._acquire(0):
                    return bytearray(size)
                try:
                    begin = self._row(0)[0] or self._first
                    most = min(self._remote.held(), len(self._memory) - self._first)
                    if begin + size - self._first > most:
                        return bytearray(size)
                    os.posix_fallocate(self._file, begin, size)
                    self._write(row, begin, size, 0)
                    self._write(0, begin + size, 0, 0)
                except OSError:  # no memory
                    return bytearray(size)
                finally:
                    self._release(0)
        return memoryview(self._memory)[begin : begin + size]

    def _acquire(self, row: int) -> bool:
        """Lock a row; return False if another process, which may be stopped, has it for too long."""
        end = monotonic() + (0 if row in self._given_up else self._remote.timeout)
        while not (is_locked := self._lock_row(row)) and monotonic() < end:
            sleep(PAUSE)
        return is_locked

    def _lock_row(self, row: int) -> bool:
        """Lock a row, and return True, unless another process has it."""
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, ROW.size * row)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def _release(self, row: int) -> None:
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, ROW.size * row)
