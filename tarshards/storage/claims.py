"""Names of local files that one writer at a time may claim, so that none replaces what another has just written.

The claims on the names of a folder are locks on bytes of its file ``.tarshards.lock``, one byte a name. They belong to
the open file, so they end with its process. Byte 0 is locked by all who have the file open, shared: who locks it alone
is the last, and removes the file. A line in it is the number of a byte, and the process and host that have locked it.
"""

from __future__ import annotations

import fcntl
import os
import re
import struct
from contextlib import suppress
from time import sleep
from typing import Any
from weakref import finalize
from zlib import crc32

from tarshards.errors import OpenError, visible
from tarshards.storage.location import Location
from tarshards.storage.locks import NoLocksError, is_at, lock, release, renew_in_children
from tarshards.storage.streams import failure

LOCKS = ".tarshards.lock"
_NUMBERS = 1 << 24  # names that differ only in their last number have neighbouring bytes, which are one lock
_TICK = 0.01  # seconds; the file is locked alone only while it is removed


class Claims:
    """The local files that a writer claims until it is released, its process ends, or nothing refers to it.

    A process that is forked has none of its parent's claims. Where the system cannot lock files, a warning says that
    others cannot be told.
    """

    def __init__(self) -> None:
        self._files: dict[str, int] = {}  # descriptors by folder; -1 where it has no locks
        self.release = finalize(self, _release, self._files)
        renew_in_children(self)

    def take(self, url: str | Location) -> None:
        """Claim a file that will be written; raise OpenError, which names the holder, if another writer has it."""
        location = Location.of(url)
        if location.path is None:
            return
        try:
            path = os.path.realpath(location.path)
        except ValueError:  # such as a NUL in the name, as writing will say
            return
        if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):  # a device, or a pipe
            return
        folder, base = os.path.split(path)
        if folder not in self._files:
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
            raise OpenError(f"{_holder(descriptor, byte)} writes it; {cure}", url=location.name)
        with suppress(OSError):  # a full disk
            os.write(descriptor, f"{byte} {os.getpid()} {os.uname().nodename}\n".encode())

    def renew(self) -> None:
        """Have none of the claims of the parent, whose files are closed here."""
        self._files.clear()

    def __reduce__(self) -> Any:  # a copy in another process is another writer's
        return Claims, ()

    def __enter__(self) -> Claims:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _lock(descriptor: int, kind: int, start: int, length: int = 1) -> bool:
    """Lock bytes for an open file, not for a process; return False if that is refused. `struct flock` is Linux's."""
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
    """Return the descriptor of the file of locks in *folder*, -1 where there cannot be one."""
    path = os.path.join(folder, LOCKS)
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
    try:
        # Another one that has it alone is about to remove it.
        return lock(path, flags, lambda: sleep(_TICK), take=lambda descriptor: _lock(descriptor, fcntl.F_RDLCK, 0))
    except NoLocksError as error:
        _warn(path, error)
        with suppress(OSError):
            os.unlink(path)
    except OSError as error:
        if os.access(folder, os.W_OK):  # else writing says why it fails
            _warn(path, error)
    return -1


def _warn(path: str, error: OSError) -> None:
    import logging

    reason = f"{error.strerror}; nothing tells whether others write under the same pattern"
    logging.getLogger("tarshards").warning("%s: %s", visible(path), reason)


def _holder(descriptor: int, byte: int) -> str:
    """Say who has claimed a name: the last that wrote a line for it."""
    text = os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode("utf-8", "replace")
    if not (lines := re.findall(rf"^{byte} (\d+) (.*)$", text, re.MULTILINE)):
        return "a writer of another process"
    process, host = lines[-1]
    is_own = (process, host) == (str(os.getpid()), os.uname().nodename)
    return "another writer of this process" if is_own else f"a writer of process {process} on {visible(host)}"


def _release(files: dict[str, int]) -> None:
    for folder, descriptor in files.items():
        if descriptor < 0:
            continue
        path = os.path.join(folder, LOCKS)
        with suppress(OSError):
            if _lock(descriptor, fcntl.F_WRLCK, 0) and is_at(path, descriptor):  # no others have it open
                os.unlink(path)
        with suppress(OSError):
            _lock(descriptor, fcntl.F_UNLCK, 0, 0)  # of a child forked just now too
        release(descriptor)
    files.clear()
