"""Claims on the names of local files, so that no writer replaces a file that another has just written.

The claims on the names of a folder are locks on bytes of its file ``.tarshards.lock``, one byte for each name. They
belong to the open file, so they end with the process. Every process that has the file open holds a shared lock on byte
0; the last one can lock that byte exclusively, and removes the file. Each line of the file is the number of a byte, and
the process and host that have locked it.
"""

from __future__ import annotations

import fcntl
import os
import re
import struct
from contextlib import suppress
from errno import EBUSY, ENOTSUP
from time import sleep
from typing import Any
from weakref import finalize
from zlib import crc32

from tarshards.errors import OpenError, visible
from tarshards.parallel.forks import renew_in_children
from tarshards.parallel.signals import defer_signals
from tarshards.storage.location import Location
from tarshards.storage.locks import PAUSE, NoLocksError, is_at, lock, release
from tarshards.storage.streams import failure

LOCKS = ".tarshards.lock"
_NUMBERS = 1 << 24  # names that differ only in their last number have adjacent bytes: the kernel merges their locks


class Claims:
    """The names that a writer claims, until it releases them, its process ends, or nothing refers to this object.

    A forked process has none of its parent's claims. If the system cannot lock files, a warning says that other writers
    go unnoticed.
    """

    def __init__(self) -> None:
        self._files: dict[str, int] = {}  # descriptors by folder; -1 if the folder has no locks
        finalize(self, _release, self._files)
        renew_in_children(self)

    def take(self, url: str | Location) -> None:
        """Claim a file that will be written; raise OpenError, which names the other writer, if it is claimed.

        The errno of this error is EBUSY. A file that may not be replaced is looked for after that: another writer may
        have made and released it just before.
        """
        location = Location.of(url)
        if location.path is None:
            return
        try:
            path = os.path.realpath(location.path)
        except ValueError:  # such as a NUL in the name: writing raises the error
            return
        if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):  # a device, or a pipe
            return
        folder, base = os.path.split(path)
        if folder not in self._files:
            with defer_signals():  # between both, nobody would remove the file
                self._files[folder] = _open(folder)
        if (descriptor := self._files[folder]) < 0:
            return
        byte = _byte_of(base)
        try:
            is_free = _lock(descriptor, fcntl.F_WRLCK, byte)
        except OSError as error:
            raise failure(error, location.name) from error
        if not is_free:
            cure = "wait until that is closed, or name another pattern or start number"
            raise OpenError(f"{_holder(descriptor, byte)} writes it; {cure}", url=location.name, errno=EBUSY)
        with suppress(OSError):  # a full disk
            os.write(descriptor, f"{byte} {os.getpid()} {os.uname().nodename}\n".encode())

    def release(self) -> None:
        """Release all claims; further calls do nothing."""
        _release(self._files)

    def renew(self) -> None:
        """Forget the claims of the parent process, whose descriptors are closed in this one."""
        self._files.clear()

    def __reduce__(self) -> Any:  # a copy in another process belongs to another writer
        return Claims, ()

    def __enter__(self) -> Claims:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _lock(descriptor: int, kind: int, start: int, length: int = 1) -> bool:
    """Lock bytes for an open file, not for a process (`struct flock` of Linux); return False if others hold them."""
    if not hasattr(fcntl, "F_OFD_SETLK"):
        raise NoLocksError(ENOTSUP, "this system has no such locks")
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", kind, os.SEEK_SET, start, length, 0))
    except (BlockingIOError, PermissionError):
        return False
    except OSError as error:
        raise NoLocksError(error.errno, error.strerror) from error
    return True


def _byte_of(base: str) -> int:
    before, number, after = re.fullmatch(r"(.*?)(\d*)(\D*)", base, re.DOTALL).groups()  # type: ignore[union-attr]
    series = os.fsencode(f"{before}\0{after}")
    hashed = crc32(series) << 6 | crc32(series[::-1]) & 63  # hashlib takes longer to load than a tool to start
    return (1 + hashed) * _NUMBERS + int(number or 0) % _NUMBERS


def _open(folder: str) -> int:
    """Return the descriptor of the file of locks in *folder*, -1 if there can be none."""
    path = os.path.join(folder, LOCKS)
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
    try:
        # A process that holds byte 0 exclusively is about to remove the file.
        return lock(path, flags, lambda: sleep(PAUSE), take=lambda descriptor: _lock(descriptor, fcntl.F_RDLCK, 0))
    except NoLocksError as error:
        _warn(path, error)
        with suppress(OSError):
            os.unlink(path)
    except OSError as error:
        if os.access(folder, os.W_OK):  # otherwise writing raises the error
            _warn(path, error)
    return -1


def _warn(path: str, error: OSError) -> None:
    import logging

    reason = f"{error.strerror}; nothing tells whether others write under the same pattern"
    logging.getLogger("tarshards").warning("%s: %s", visible(path), reason)


def _holder(descriptor: int, byte: int) -> str:
    """Return a description of the writer that has claimed a name: the last that wrote a line for it."""
    text = os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode("utf-8", "replace")
    if not (lines := re.findall(rf"^{byte} (\d+) (.*)$", text, re.MULTILINE)):
        return "a writer of another process"
    process, host = lines[-1]
    is_own = (process, host) == (str(os.getpid()), os.uname().nodename)
    return "another writer of this process" if is_own else f"a writer of process {process} on {visible(host)}"


@defer_signals()
def _release(files: dict[str, int]) -> None:
    for folder, descriptor in files.items():
        if descriptor < 0:
            continue
        path = os.path.join(folder, LOCKS)
        with suppress(OSError):
            if _lock(descriptor, fcntl.F_WRLCK, 0) and is_at(path, descriptor):  # no other process has it open
                os.unlink(path)
        with suppress(OSError):
            _lock(descriptor, fcntl.F_UNLCK, 0, 0)  # also for a child that was forked just now
        release(descriptor)
    files.clear()
