"""Locks of files, which end with the process that holds them; ``sweep`` removes the files that dead ones left."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from errno import EWOULDBLOCK
from time import monotonic, sleep

from tarshards.errors import OpenError, visible
from tarshards.parallel.forks import close_own, open_own
from tarshards.parallel.signals import TICK

PAUSE = 0.005  # seconds between attempts to lock what another process has locked
LONG_WAIT, MOST_WAIT = 10.0, 600.0  # seconds of waiting for the lock of a folder, before a warning and an error


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
        descriptor = open_own(path, flags)
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


def pauses() -> Iterator[float]:
    """Yield the seconds of pauses between attempts to lock by steps: they grow, as each attempt takes two threads."""
    pause = PAUSE
    while True:
        yield pause
        pause = min(2 * pause, TICK)


def release(descriptor: int, *, unlock: bool = True) -> None:
    """Unlock and close a file; with ``unlock=False`` processes that have inherited it keep the lock."""
    with suppress(OSError):  # of a write, which whoever wrote has checked
        close_own(descriptor, _unlock if unlock else None)


def _unlock(descriptor: int) -> None:
    with suppress(OSError):  # a file system without locks
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing does not, if a child that was forked just now has it open


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
        sleep(PAUSE)

    descriptor = lock(folder, os.O_RDONLY, wait, optional=True)
    try:
        yield
    finally:
        release(descriptor)
