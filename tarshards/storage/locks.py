"""File locks, which end with the process that holds them; and values that each process makes for itself.

A lock belongs to an open file; ``sweep`` removes the locked files that dead processes have left. A forked child has the
open files of its parent and would keep their locks after the parent's death, so it closes them, and no thread opens one
while another one forks. It cannot use the threads, locks and connections of its parent either: see ``PerProcess``.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from errno import EWOULDBLOCK
from time import monotonic, sleep
from typing import Any, Generic, TypeVar
from weakref import WeakSet

from tarshards.errors import OpenError, visible

T = TypeVar("T")

LONG_WAIT, MOST_WAIT = 10.0, 600.0  # seconds of waiting for the lock of a folder, before a warning and an error

_descriptors: set[int] = set()
_forking = threading.RLock()


class NoLocksError(OSError):
    """The file system has no locks."""


def try_lock(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool:
    """Lock an open file; return False if another one holds it. Raises NoLocksError."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise NoLocksError(error.errno, error.strerror) from error
    return True


def is_at(path: str, descriptor: int) -> bool:
    """Return whether the open file is the one at *path*, which may have been removed or replaced."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def lock(
    path: str,
    flags: int,
    wait: Callable[[], object] | None = None,
    *,
    take: Callable[[int], bool] = try_lock,
    optional: bool = False,
) -> int:
    """Open the file at *path*, lock it with *take* and return its descriptor, which ``release`` closes.

    While the lock is held elsewhere, *wait* is called, which sleeps or raises; without *wait*, raises BlockingIOError.
    Raises NoLocksError if the file system has no locks; with *optional*, the file is opened unlocked instead.
    """
    while True:
        descriptor = _open(path, flags)
        try:
            if take(descriptor):
                if is_at(path, descriptor):
                    return descriptor
            elif wait is None:
                raise BlockingIOError(EWOULDBLOCK, os.strerror(EWOULDBLOCK), path)
            else:
                wait()
        except NoLocksError:
            if optional:
                return descriptor
            release(descriptor)
            raise
        except BaseException:
            release(descriptor)
            raise
        release(descriptor)


def release(descriptor: int, *, unlock: bool = True) -> None:
    """Unlock and close a file; with ``unlock=False`` processes that have inherited it keep the lock."""
    with _forking:
        if descriptor in _descriptors:  # a child has closed those of its parent
            _descriptors.remove(descriptor)
            if unlock:  # closing does not, if a child that was forked just now still has it open
                with suppress(OSError):  # a file system without locks
                    fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


def is_locked(path: str) -> bool:
    """Return whether a process holds the lock of the file at *path*; False if that is unknown."""
    try:
        release(lock(path, os.O_RDONLY, take=lambda descriptor: try_lock(descriptor, fcntl.LOCK_SH)))
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def sweep(path: str, is_ours: Callable[[int], bool] = lambda descriptor: True) -> bool:
    """Remove the file at *path* if no process holds its lock and *is_ours* accepts its descriptor.

    Returns False if a process holds the lock, or may hold it; otherwise True, even if the file is missing or not ours.
    """
    try:
        descriptor = lock(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            if is_ours(descriptor):
                os.unlink(path)
        finally:
            release(descriptor)
    except OSError as error:
        return isinstance(error, FileNotFoundError)
    return True


@contextmanager
def locked(folder: str) -> Iterator[None]:
    """Hold the lock of a folder, so that one process at a time changes the manifests and catalogs in it.

    A warning names the folder after LONG_WAIT; OpenError is raised after MOST_WAIT: another process may be stopped.
    """
    begun, has_warned = monotonic(), False

    def wait() -> None:
        nonlocal has_warned
        waited = monotonic() - begun
        reason = "locked by a program that changes a manifest or catalog in it, or has been stopped meanwhile"
        if waited > MOST_WAIT:
            raise OpenError(f"{reason}; given up after {MOST_WAIT:g} s", url=folder)
        if waited > LONG_WAIT and not has_warned:
            import logging

            has_warned = True
            logging.getLogger("tarshards").warning("%s: %s; waiting", visible(folder), reason)
        sleep(0.01)

    descriptor = lock(folder, os.O_RDONLY, wait, optional=True)
    try:
        yield
    finally:
        release(descriptor)


def _open(path: str, flags: int) -> int:
    with _forking:
        descriptor = os.open(path, flags | os.O_CLOEXEC, 0o666)
        _descriptors.add(descriptor)
        return descriptor


class PerProcess(Generic[T]):
    """A value that *make* makes once in each process: a forked process cannot use its parent's threads and connections.

    It may also be a lock: if another thread of the parent held it during the fork, the child could never acquire it.

    >>> found = PerProcess(dict)
    >>> found() is found()
    True
    """

    __slots__ = ("__weakref__", "_made", "_make", "_making")

    def __init__(self, make: Callable[[], T]):
        self._make = make
        self.renew()
        renew_in_children(self)

    def __call__(self) -> T:
        if not self._made:
            with self._making:
                if not self._made:
                    self._made.append(self._make())
        return self._made[0]

    def renew(self) -> None:
        """Forget the value; the next call makes another one."""
        self._made: list[T] = []
        self._making = threading.RLock()


def renew_in_children(each: Any) -> None:
    """Call the method ``renew`` of an object, as long as the object exists, in each process forked from this one."""
    _renewed.add(each)


_renewed: WeakSet[Any] = WeakSet()


def _begin_child() -> None:
    global _forking
    _forking = threading.RLock()
    for descriptor in _descriptors:
        os.close(descriptor)
    _descriptors.clear()
    for each in list(_renewed):
        each.renew()


os.register_at_fork(
    before=lambda: _forking.acquire(), after_in_parent=lambda: _forking.release(), after_in_child=_begin_child
)
