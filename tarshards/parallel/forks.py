"""What a forked process cannot share with its parent, whose threads it lacks: files with locks, values, and locks.

A child has the open files of its parent, and would keep their locks after the parent's death; so it closes those opened
here, and no thread opens one while another one forks. It cannot use the threads and connections of its parent, and a
lock that one of these threads held stays taken: see ``PerProcess`` and ``cached_property``.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from weakref import WeakSet

T = TypeVar("T")

_descriptors: set[int] = set()
_forking = threading.RLock()


def open_own(path: str, flags: int) -> int:
    """Open a file for this process only, and return the descriptor, which ``close_own`` closes."""
    with _forking:
        descriptor = os.open(path, flags | os.O_CLOEXEC, 0o666)
        _descriptors.add(descriptor)
        return descriptor


def close_own(descriptor: int, before: Callable[[int], object] | None = None) -> None:
    """Call *before*, and close the descriptor; do neither if a fork closed it in this process."""
    with _forking:
        if descriptor in _descriptors:
            _descriptors.remove(descriptor)
            if before is not None:
                before(descriptor)
            os.close(descriptor)


class PerProcess(Generic[T]):
    """A value that *make* makes once in each process, such as threads, connections or a lock.

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


def fork_count() -> int:
    """Return a number that differs from an earlier one if this process has forked, or was forking, since then."""
    return _forks


def renew_in_children(each: Any) -> None:
    """Call the method ``renew`` of an object, as long as the object exists, in each process forked from this one."""
    _renewed.add(each)


_renewed: WeakSet[Any] = WeakSet()
_forks = 0


def _begin_fork() -> None:
    global _forks
    _forking.acquire()
    _forks += 1


def _end_fork() -> None:
    global _forks
    _forks += 1
    _forking.release()


def _begin_child() -> None:
    global _forking
    _forking = threading.RLock()
    for descriptor in _descriptors:
        os.close(descriptor)
    _descriptors.clear()
    for each in list(_renewed):
        each.renew()


os.register_at_fork(before=_begin_fork, after_in_parent=_end_fork, after_in_child=_begin_child)

if TYPE_CHECKING or sys.version_info >= (3, 12):
    from functools import cached_property as cached_property
else:
    from contextlib import nullcontext

    class cached_property(functools.cached_property):
        """As in Python 3.12, without the lock that all objects of a class share."""

        def __init__(self, function):
            super().__init__(function)
            self.lock = nullcontext()
