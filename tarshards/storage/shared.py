"""Bytes in memory that a process shares with the processes forked from it."""

from __future__ import annotations

import fcntl
import os
import weakref
from collections.abc import Callable
from struct import Struct
from threading import Lock
from time import monotonic, sleep

from tarshards.storage.cache import LEAST_PAUSE, MOST_PAUSE
from tarshards.storage.locks import PerProcess
from tarshards.storage.ranges import MappedRange, Mapping
from tarshards.storage.remote import Remote

ROW = Struct("<QQ")  # offset and length of a piece, length 0 while it is missing; in the first row: the end of the last


class SharedBytes:
    """Up to *count* pieces of bytes, shared by a process and those forked from it later; each is fetched once.

    They are in a file without a name, which is freed when the last process that has it open ends. They take as much
    memory as *remote* may hold; beyond that, each process holds the pieces that it fetches. A piece stays until it is
    dropped.

    The locks belong to ranges of the file and to processes: threads of one process must not ask for a piece at once.
    """

    def __init__(self, count: int, remote: Remote):
        self._remote, self._lock = remote, PerProcess(Lock)
        self._first = ROW.size * (count + 1)
        self._file = os.memfd_create("tarshards")
        weakref.finalize(self, os.close, self._file)
        os.ftruncate(self._file, self._first + remote.held())
        self._mapping = Mapping(f"/proc/self/fd/{self._file}")  # closing another descriptor later would end locks

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

    def hold(self, number: int, fetch: Callable[[], bytes]) -> bytes | MappedRange:
        """Return a piece; one of the processes that ask for it calls *fetch*, while the others wait."""
        if not self._acquire(number + 1):
            return self._found(number + 1) or fetch()
        try:
            return self._found(number + 1) or self._put(number + 1, fetch())
        finally:
            self._release(number + 1)

    def drop(self, number: int) -> None:
        """Let a piece be fetched again."""
        os.pwrite(self._file, ROW.pack(0, 0), ROW.size * (number + 1))

    def _row(self, row: int) -> tuple[int, int]:
        begin, size = ROW.unpack(os.pread(self._file, ROW.size, ROW.size * row))
        return begin, size

    def _found(self, row: int) -> MappedRange | None:
        begin, size = self._row(row)
        return MappedRange(self._mapping, begin, size) if size else None

    def _put(self, row: int, data: bytes) -> bytes | MappedRange:
        with self._lock():
            if not self._acquire(0):
                return data
            try:
                begin = self._row(0)[0] or self._first
                most = min(self._remote.held(), len(self._mapping) - self._first)
                if begin + len(data) - self._first > most:
                    return data
                os.pwrite(self._file, ROW.pack(begin + len(data), 0), 0)
            finally:
                self._release(0)
        view, at = memoryview(data), begin
        try:
            while view:
                done = os.pwrite(self._file, view, at)
                view, at = view[done:], at + done
            os.pwrite(self._file, ROW.pack(begin, len(data)), ROW.size * row)
        except OSError:  # no memory
            return data
        return MappedRange(self._mapping, begin, len(data))

    def _acquire(self, row: int) -> bool:
        """Lock a row; return False if another process, which may be stopped, has it for too long."""
        end, pause = monotonic() + self._remote.timeout, LEAST_PAUSE
        while True:
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, ROW.size * row)
                return True
            except (BlockingIOError, PermissionError):
                if monotonic() >= end:
                    return False
            sleep(pause)
            pause = min(2 * pause, MOST_PAUSE)

    def _release(self, row: int) -> None:
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, ROW.size * row)
