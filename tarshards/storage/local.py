"""Local files: read unbuffered, written under a temporary name until they are whole."""

from __future__ import annotations

import errno
import io
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from itertools import count
from typing import TYPE_CHECKING, Any

from tarshards.errors import OpenError
from tarshards.parallel.signals import defer_signals
from tarshards.storage.derived import INDEX
from tarshards.storage.location import Location, Transport
from tarshards.storage.locks import NoLocksError, is_at, sweep, try_lock
from tarshards.storage.streams import ALIGNED, AT_ONCE, LastingFile, OutputStream, check_written, failure, is_missing

if TYPE_CHECKING:
    from tarshards.storage.ranges import LocalRanges

#: What fsync reports on a file system that cannot flush a file.
NEVER_FLUSHED = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP}
NO_FSYNC = (
    "cannot be flushed to the disk on this file system ({}); write elsewhere, or do not wait (sync=False, --no-sync)"
)
ACL = "system.posix_acl_access"
# What file systems without hard links raise.
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)

LONGEST = 240  # bytes of a name in that of its temporary file, which may have 255

# Paths of files that are open already.
_DESCRIPTORS = ("/dev/stdout", "/dev/stderr", "/dev/fd/", "/proc/")


class Local(Transport):
    def open(self, location: Location, mode: str) -> io.FileIO | OutputStream:
        path = str(location.path)
        try:
            return _open_reader(path) if mode == "rb" else _open_writer(path, location)
        except (OSError, ValueError) as exc:
            error = failure(exc, location.name)
            raise OpenError(error.reason + _cure(exc, path, mode), url=error.url, errno=error.errno) from exc

    def ranges(self, location: Location, size: int | None = None) -> LocalRanges:
        from tarshards.storage.ranges import LocalRanges

        return LocalRanges(str(location.path), location.name)

    def make_folder(self, location: Location) -> None:
        folder = os.path.dirname(str(location.path))
        if folder:
            try:
                _make_folder(folder, location)
            except (OSError, ValueError) as exc:
                raise failure(exc, folder) from exc

    def exists(self, location: Location) -> bool:
        return os.path.exists(str(location.path))

    def size(self, location: Location) -> int:
        try:
            return os.stat(str(location.path)).st_size
        except (OSError, ValueError) as exc:
            raise failure(exc, location.name) from exc

    def version(self, location: Location) -> list[Any]:
        path = str(location.path)
        try:
            status = os.stat(path)
            if not stat.S_ISDIR(status.st_mode):
                return [status.st_size, status.st_mtime_ns]
            below = [os.path.join(folder, name) for folder, _, names in os.walk(path) for name in sorted(names)]
            found = [(os.path.relpath(name, path), os.stat(name)) for name in sorted(below)]
        except (OSError, ValueError) as exc:
            raise failure(exc, location.name) from exc
        from hashlib import blake2b

        text = "".join(f"{name}\0{status.st_size}\0{status.st_mtime_ns}\n" for name, status in found)
        return [blake2b(text.encode("utf-8", "surrogateescape"), digest_size=10).hexdigest()]

    def remove(self, location: Location) -> None:
        try:
            os.unlink(str(location.path))
        except (OSError, ValueError) as exc:
            if not is_missing(error := failure(exc, location.name)):
                raise error from exc

    def rename(self, location: Location, target: Location, replace: bool) -> None:
        path = os.path.realpath(str(target.path))
        try:
            _replace(str(location.path), path, target, is_new=not replace)
        except (OSError, ValueError) as exc:
            raise failure(exc, target.name) from exc


TRANSPORT = Local()


def _open_reader(path: str) -> io.FileIO:
    """Open a file that will be read to its end; the system reads farther ahead than usual."""
    file = io.FileIO(path)
    with suppress(OSError, AttributeError):  # a pipe, or a system without such hints
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
    return file


def _cure(exc: Exception, path: str, mode: str) -> str:
    """Return advice, after a semicolon, for a file that cannot be opened; an empty string if there is none."""
    if isinstance(exc, IsADirectoryError) and mode == "rb" and not path.endswith(INDEX):
        return f"; name the shards in it, as '{path}/*.tar'"
    if not isinstance(exc, FileNotFoundError):
        return ""
    folder = os.path.dirname(path)
    if mode == "wb":
        return f"; make the folder {folder} first" if folder else ""
    if "{" in path or "%" in path:
        return "; a range of shards is written as {000..146}"
    if " " in path.strip() or "," in path:
        return "; several names are given as a list, or separated by `::`"
    return "; the name begins or ends with white space" if path != path.strip() else ""


def _open_writer(path: str, location: Location) -> OutputStream:
    """Return an OutputStream that atomically replaces the file at *path* when closed; devices are written directly."""
    if path.startswith(_DESCRIPTORS) or _is_special(path):
        file = LastingFile(io.FileIO(path, "wb"))
        return OutputStream(location.name, file.write, commit=file.close, discard=file.raw.close, file=file)

    with defer_signals():
        return _open_temporary(os.path.realpath(path), location)


def _open_temporary(target: str, location: Location) -> OutputStream:
    temporary, descriptor = _claim(target)
    _keep_permissions(target, descriptor)
    file = _AlignedFile(descriptor, location.sync)
    # The lock is held until the temporary name is gone, so that no other writer removes the file as a leftover.

    def finish() -> None:
        file.close()
        # Most file systems may write the name before the bytes: after a power loss, the file would be zeros.
        if location.sync and (error := flush(descriptor)):
            raise OpenError(NO_FSYNC.format(error.strerror), url=location.name, errno=error.errno) from error
        check_written(descriptor)

    def commit() -> None:
        _replace(temporary, target, location)
        os.close(descriptor)

    def discard(unlink: Callable[[str], None] = os.unlink, close: Callable[[int], None] = os.close) -> None:
        file.drop()
        try:
            unlink(temporary)
        finally:
            close(descriptor)

    return OutputStream(
        location.name, file.write, finish=finish, commit=commit, discard=discard, file=file, copied=file.start_disk
    )


def _keep_permissions(target: str, descriptor: int) -> None:
    """Give a new file the owner, group, mode and access list of the one that it will replace, as far as is allowed.

    Where the group cannot be kept, it gets what others may do: the file may be in a group that had no access.
    """
    own = os.fstat(descriptor)
    try:
        replaced = os.stat(target)
    except OSError:  # there is none
        return
    mode = stat.S_IMODE(replaced.st_mode) & 0o777
    if (replaced.st_uid, replaced.st_gid) != (own.st_uid, own.st_gid):
        for user in (replaced.st_uid, -1):
            with suppress(OSError):
                os.fchown(descriptor, user, replaced.st_gid)
                break
        else:
            mode = mode & 0o707 | (mode & 0o007) << 3
    with suppress(OSError):  # a file system without modes
        if mode != stat.S_IMODE(own.st_mode):
            os.fchmod(descriptor, mode)
    with suppress(OSError, AttributeError):  # without access lists
        os.setxattr(descriptor, ACL, os.getxattr(target, ACL))


def _replace(path: str, target: str, location: Location, *, is_new: bool = False) -> None:
    """Rename a file; if *location* syncs, wait until the new name is on the disk.

    A file of the new name is replaced; if it *is_new*, FileExistsError is raised.
    """
    with synced_folder(os.path.dirname(target)) if location.sync else nullcontext():
        (_rename_to_new if is_new else os.replace)(path, target)


def _rename_to_new(path: str, target: str) -> None:
    """Rename a file; raise FileExistsError if *target* exists."""
    try:
        os.link(path, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL))  # empty, if the process is killed here
        try:
            os.replace(path, target)
        except BaseException:
            os.unlink(target)
            raise
    else:
        os.unlink(path)


class _AlignedFile:
    """A file that is written in multiples of ALIGNED bytes, as far as the positions of copied ranges allow.

    With *sync* the disk starts while the file is written, so that closing waits for fewer bytes.
    """

    def __init__(self, descriptor: int, sync: bool):
        self._raw = io.FileIO(descriptor, "wb", closefd=False)
        self._buffer = io.BufferedWriter(self._raw, 4 * ALIGNED)
        self._put = self._buffer.write
        self._left = 3 * ALIGNED  # bytes to buffer before the next write; those up to a boundary fit too
        self._sync = sync
        self._begun = 0  # where the disk has started

    def fileno(self) -> int:
        return self._raw.fileno()

    def write(self, data: Any) -> None:
        self._left -= len(data)
        if self._left >= 0:
            self._put(data)
        else:
            self._write_aligned(memoryview(data))

    def _write_aligned(self, data: memoryview) -> None:
        """Write the buffer and *data* up to the last boundary, and buffer the rest."""
        begin = self._buffer.tell()
        first, last = -begin % ALIGNED, len(data) - (begin + len(data)) % ALIGNED
        if first > len(data):
            self._put(data)
            return
        self._put(data[:first])
        self.flush()
        while first < last:
            first += self._raw.write(data[first:last])
        self.start_disk()
        self.write(data[last:])

    def flush(self) -> None:
        self._buffer.flush()
        self._left = 3 * ALIGNED

    def start_disk(self) -> None:
        """Start the disk on what was written or copied since the last time, if it is AT_ONCE bytes or more.

        Without this, 0.8 x the samples/s of 110 KB are written, and tarcat of them takes 1.6 x as long.
        """
        if self._sync and (end := self._raw.tell()) >= self._begun + AT_ONCE:
            from tarshards import kernels

            kernels.mapped.begin_flush(self.fileno(), self._begun, end - self._begun)
            self._begun = end

    def close(self) -> None:
        self._buffer.close()

    def drop(self) -> None:
        """Close the file without writing the buffer."""
        self._raw.close()


def _make_folder(path: str, location: Location) -> None:
    """Create the folder *path*; if *location* syncs, wait for the disk: a power loss could remove it with its files."""
    above = os.path.dirname(path.rstrip("/"))
    if above and not os.path.exists(above):
        _make_folder(above, location)
    if not os.path.isdir(path):
        with synced_folder(above or ".") if location.sync else nullcontext():
            os.makedirs(path, exist_ok=True)


@contextmanager
def synced_folder(path: str) -> Iterator[None]:
    """At the end of a with-block, wait until the names in the folder *path* are on the disk."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError:  # a folder that may be written to, but not listed
        yield
        return
    try:
        yield
        flush(descriptor)  # some file systems flush no folders
    finally:
        os.close(descriptor)


def flush(descriptor: int) -> OSError | None:
    """Wait until an open file, or the names in a folder, are on the disk; return the error if none can be flushed."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NEVER_FLUSHED:
            raise
        return error
    return None


def _claim(target: str) -> tuple[str, int]:
    """Create and lock a temporary file beside *target*, and return its path and descriptor.

    Removes the temporary files that killed writers of *target* have left.
    """
    folder, base = os.path.split(target)
    if len(os.fsencode(base)) > LONGEST:
        base = os.fsencode(base)[:LONGEST].decode(errors="ignore")  # with others that begin so, numbers differ
    names = (os.path.join(folder, f".{base}.{number}.tmp") for number in count())
    path = next(names)
    while True:
        try:
            # 0o666 lets the umask decide; tempfile would give 0o600.
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            if not sweep(path):
                path = next(names)
            continue
        try:
            is_ours = try_lock(descriptor) and is_at(path, descriptor)  # else another writer removes it
        except NoLocksError:  # then nobody removes files
            is_ours = True
        if is_ours:
            while os.path.lexists(other := next(names)):
                sweep(other)
            return path, descriptor
        os.close(descriptor)


def _is_special(path: str) -> bool:
    try:
        return not stat.S_ISREG(os.stat(path).st_mode)
    except FileNotFoundError:
        return False
