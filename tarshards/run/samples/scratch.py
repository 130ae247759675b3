"""The directory of a run's scratch directories, and the fields written there."""

from __future__ import annotations

import os
import re
import tempfile
from contextlib import suppress

from tarshards.errors import OpenError, SampleError
from tarshards.run.guard import OwnProcesses
from tarshards.run.samples.folder import remove
from tarshards.samples.codecs import encode_field
from tarshards.samples.keys import Sample, is_reserved
from tarshards.storage.locks import lock, release

MIN_FREE = 1 << 30  # /dev/shm is used if this many bytes are free
VARIABLE = "TAR_SCRATCH"
NAME = re.compile(r"tarproc-\d+-[0-9a-f]{12}")


class Scratch:
    """The parent of all samples' scratch directories; a guard process removes it if this process is killed.

    It is locked while in use. Unlocked directories were left by killed runs and guards, and are removed here.
    """

    def __init__(self, tmpdir: str | None = None):
        folder = os.path.abspath(tmpdir or default_folder())
        try:
            _sweep(folder)
            while not self._make(folder):
                pass
        except OpenError:
            raise
        except OSError as error:
            reason = f"no scratch directory can be made here: {error.strerror}"
            raise OpenError(reason, url=folder, errno=error.errno) from error

    def _make(self, folder: str) -> bool:
        """Make and lock the directory; return False if another run has removed it before it was locked."""
        self.path: str = f"{folder}/tarproc-{os.getpid()}-{os.urandom(6).hex()}"
        self._processes = OwnProcesses(f"{VARIABLE}={self.path}")
        self._processes.guard(self.path)  # first, so that a kill leaves no directory without a guard
        self._lock = None
        try:
            os.mkdir(self.path, 0o700)
        except OSError:
            self._processes.release()
            raise
        with suppress(OSError):  # a file system without locks, on which nothing is swept
            self._lock = _lock(self.path)
            if self._lock is None:
                self._processes.release()
                return False
        return True

    def __enter__(self) -> Scratch:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Remove the directory and end the guard; after an error, kill processes that left their group."""
        if kind is not None:
            self._processes.end()
        remove(self.path)
        self._processes.release()
        if self._lock is not None:
            release(self._lock)


def _sweep(folder: str) -> None:
    """Remove the directories of killed runs in *folder*, and end their processes."""
    with os.scandir(folder) as entries:
        paths = [entry.path for entry in entries if NAME.fullmatch(entry.name)]
    for path in paths:
        with suppress(OSError):  # another user's, or gone
            if (locked := _lock(path)) is not None:
                OwnProcesses(f"{VARIABLE}={path}").end()
                remove(path)
                release(locked)


def _lock(path: str) -> int | None:
    """Return a descriptor that locks the directory at *path*; None if another run has locked or removed it."""
    with suppress(BlockingIOError, FileNotFoundError):
        return lock(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    return None


def default_folder() -> str:
    """Return the folder for scratch directories: /dev/shm if it has enough free space, else TMPDIR."""
    with suppress(OSError):
        space = os.statvfs("/dev/shm")
        if space.f_bavail * space.f_frsize >= MIN_FREE and os.access("/dev/shm", os.W_OK):
            return "/dev/shm"
    return tempfile.gettempdir()


def encoded_fields(sample: Sample) -> dict[str, bytes]:
    """Return the fields of *sample* as bytes; raise SampleError for a field that cannot be part of a file name.

    >>> encoded_fields({"__key__": "a", "cls": 7})
    {'cls': b'7'}
    """
    for field in sample:
        if "/" in field or "\0" in field:
            raise SampleError(
                "this field name cannot be part of a file name", url=sample.get("__url__"), key=sample["__key__"]
            )
    return {field: encode_field(field, value) for field, value in sample.items() if not is_reserved(field)}
