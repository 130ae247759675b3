"""The streams that opening a location returns, ranges of files that the system copies, and the errors of both."""

from __future__ import annotations

import errno
import io
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from itertools import chain
from select import POLLIN, POLLOUT
from typing import Any
from warnings import warn

from tarshards.errors import OpenError
from tarshards.parallel.signals import GRACE

BUFFER = 1 << 16  # bytes that a pipe holds, and of a buffer
PIECE = 1 << 19  # bytes that are read, copied or decompressed at once; they fit the processor's cache
#: Content-Encodings that are compressions: of the file itself, or of the response only.
COMPRESSING = ("gzip", "x-gzip", "bzip2", "xz", "lzma", "zstd", "lz4")
AT_ONCE = 1 << 24  # bytes that the system copies at once: more save nothing, and signals and readers of a pipe wait


NOT_YET = "the stream is non-blocking and has no bytes yet"  # read() returned None: not the end


@cache
def keep_memory() -> None:
    """Let the process keep freed memory for later buffers, members and look-ups, instead of giving it back each time.

    glibc returns the pages of a freed block to the kernel, which zeroes all pages of the next one before they are
    filled: a tenth of the time of small samples. It does so for blocks larger than the largest mapped and freed block
    so far, up to 32 MiB, and keeps twice that much free memory (mallopt(3)). So this allocates and frees one such
    block, without touching its pages. If an environment variable such as MALLOC_MMAP_THRESHOLD_ sets a threshold, glibc
    does not adapt it, and nothing changes.
    """
    with suppress(MemoryError):
        bytes(31 << 20)


def _wait(file: Any, event: int, seconds: float | None = None) -> bool:
    """Wait until *file*, which is non-blocking, can be read or written; return False after a number of *seconds*."""
    from tarshards.parallel.children import wait_for

    return wait_for(file.fileno(), event, None if seconds is None else time.monotonic() + seconds)


class InheritedFile(io.FileIO):
    """A file to read that was opened by another program, which may set it to non-blocking: reading waits all the same.

    It is not set to blocking, since that program and others share the setting.
    """

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or size < 0:
            return self.readall()
        while (data := super().read(size)) is None:
            _wait(self, POLLIN)
        return data

    def readall(self) -> bytes:
        return b"".join(iter(lambda: self.read(PIECE), b""))

    def readinto(self, buffer: Any, /) -> int:
        while (count := super().readinto(buffer)) is None:
            _wait(self, POLLIN)
        return count


class InputStream(io.RawIOBase):
    """A stream that is read sequentially; subclasses define `read_some`, which returns b"" only at the end."""

    name: str
    encoding = ""  # the Content-Encoding of a server

    def read_some(self, size: int) -> bytes:
        raise NotImplementedError

    def readable(self) -> bool:
        return True

    def read(self, size: int | None = -1, /) -> bytes:
        if self.closed:
            raise ValueError("read of a closed stream")
        if size is None or size < 0:
            return self.readall()
        return self.read_some(size) if size else b""

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer).cast("B")
        data = self.read(len(view))
        view[: len(data)] = data
        return len(data)


class OutputStream(io.RawIOBase):
    """A stream that is written: `close` commits it, `abort` discards it.

    Committing has two steps. *finish* does whatever may still fail, such as writing a buffer; *commit* gives the file
    its name. `before_commit` is called between them. *file* is the file object that *write* writes to, if it has a
    descriptor. The bytes of a ``LastingFile`` cannot be discarded; `end` completes them. *copied* is called after each
    system call that has copied to it.

    Leaving a with-block by an exception aborts. A stream that is never closed aborts too, with a RuntimeWarning.
    """

    before_commit: Callable[[], object] | None = None

    def __init__(
        self,
        name: str,
        write: Callable[[Any], Any],
        *,
        finish: Callable[[], object] | None = None,
        commit: Callable[[], object],
        discard: Callable[[], object],
        file: Any = None,
        copied: Callable[[], object] | None = None,
    ):
        self.name = name
        self._file = file
        self._copied = copied
        self._growing: GrowingRange | None = None
        self._copies = False  # whether the system is copying a range
        self._write, self._finish, self._commit, self._discard = write, finish, commit, discard
        self._process = os.getpid()

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        if self.closed:
            raise ValueError(f"{self.name}: closed, so nothing more can be written")
        if self._growing is not None:
            if self._growing.take(data):
                return len(data)
            self._write_growing()
        try:
            self._write(data)
        except (BrokenPipeError, OpenError):
            raise
        except OSError as exc:
            raise failure(exc, self.name) from exc
        return len(data)

    def copy(self, file_range: FileRange) -> None:
        """Write the bytes of *file_range*; the system copies them if it can, with ranges that follow in its file."""
        if self._growing is not None:
            if len(self._growing) < AT_ONCE and self._growing.grow(file_range):
                return
            self._write_growing()
        if self._file is not None and not self.closed:
            self._copies = True  # a signal now would leave the range out
            with suppress(OSError):  # a full disk, or too many open files: the next write raises it
                self._file.flush()
                self._growing = GrowingRange(file_range)
            self._copies = False
            if self._growing is not None:
                return
        for piece in file_range.pieces():
            self.write(piece)

    def _write_growing(self) -> None:
        """Write the bytes of the growing range, and those that were written after it."""
        if self._growing is None:
            return
        self._copies = True
        growing, self._growing = self._growing, None
        try:
            done = 0
            for size in growing.copy_to(self._file.fileno()):
                done += size
                if self._copied is not None:
                    self._copied()
            for piece in growing.pieces(done):
                self.write(piece)
            for data in growing.after:
                self.write(data)
            self._copies = False
        finally:
            growing.close()

    def close(self) -> None:
        if self.closed:
            return
        try:
            for step in (self._write_growing, self._finish, self.before_commit, self._commit):
                if step is not None:
                    step()
        except BaseException as exc:
            self.abort()
            if isinstance(exc, OSError) and not isinstance(exc, BrokenPipeError | OpenError):
                raise failure(exc, self.name) from exc
            raise
        super().close()

    def end(self, pieces: Iterable[Any]) -> None:
        """Complete a write that a signal interrupted, and write *pieces*, if `abort` cannot discard what was written.

        Writes nothing if it is unknown how much was written: the system was copying, or the file failed.
        """
        if isinstance(self._file, LastingFile) and not self._copies and not self.closed:
            with suppress(OSError):
                self._write_growing()
                self._file.end(pieces)

    def abort(self) -> None:
        """Close the stream and discard what was written, as far as the transport can."""
        if not self.closed:
            super().close()
            if self._growing is not None:
                self._growing.close()
            with suppress(OSError):
                self._discard()

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def __del__(self, getpid: Callable[[], int] = os.getpid, warn: Callable[..., None] = warn) -> None:
        # A forked copy must not discard what its parent still writes. At the interpreter's exit, modules may be gone.
        if getattr(self, "_process", None) == getpid() and not self.closed:
            self.abort()
            # Not a ResourceWarning, which Python does not show by default.
            reason = "not closed, so what was written is lost; write in a with-block, or call close()"
            warn(f"{self.name}: {reason}", RuntimeWarning, stacklevel=2, source=self)


class LastingFile(io.BufferedWriter):
    """A file whose bytes cannot be discarded, such as a pipe: ``end`` completes a write that a signal interrupted.

    If another program has set it to non-blocking, writing waits all the same.
    """

    def __init__(self, raw: io.FileIO):
        # From Python 3.14 on, a piece as large as the buffer would bypass it, and a signal could cut it.
        super().__init__(raw, BUFFER + 1)
        self._left: Sequence[Any] = ()  # pieces of the write that was interrupted
        self._patience: float | None = None  # seconds to wait for a reader

    def write(self, data: Any, /) -> int:
        pieces = [data]
        if len(data) > BUFFER:
            pieces = [memoryview(data)[at : at + BUFFER] for at in range(0, len(data), BUFFER)]
        while pieces:
            written: list[int] = []
            try:
                # No Python code runs between pieces, which fit into the buffer: one that raises was not written.
                written.extend(map(super().write, pieces))
            except BlockingIOError as full:  # a part of a piece fitted into the buffer
                pieces = pieces[len(written) :]
                self._left = pieces = [memoryview(pieces[0])[full.characters_written :], *pieces[1:]]
                self.flush()
            except BaseException:
                self._left = pieces[len(written) :]
                raise
            else:
                pieces = []
        self._left = ()
        return len(data)

    def flush(self) -> None:
        while True:
            try:
                return super().flush()
            except BlockingIOError:
                if not _wait(self, POLLOUT, self._patience):
                    raise

    def end(self, pieces: Iterable[Any]) -> None:
        """Write the rest of an interrupted write and *pieces*; BlockingIOError if nobody reads for GRACE seconds."""
        blocks = os.get_blocking(self.fileno())
        os.set_blocking(self.fileno(), False)
        self._patience = GRACE
        try:
            for piece in chain(self._left, pieces):
                for at in range(0, len(piece), BUFFER):
                    self.flush()
                    super().write(memoryview(piece)[at : at + BUFFER])
            self.flush()
        finally:
            os.set_blocking(self.fileno(), blocks)


def spooled(name: str, put: Callable[[Any], object]) -> OutputStream:
    """Return an OutputStream into a temporary file, which is passed to *put* when the stream is committed."""
    import tempfile

    with temporary():
        file = tempfile.NamedTemporaryFile()  # noqa: SIM115

    def write(data: Any) -> None:
        with temporary():
            file.write(data)

    def finish() -> None:
        with temporary():
            file.flush()

    def commit() -> None:
        put(file)
        file.close()

    return OutputStream(name, write, finish=finish, commit=commit, discard=file.close)


@contextmanager
def temporary(folder: str | None = None) -> Iterator[None]:
    """Turn an OSError of a temporary file into an OpenError that names its *folder*, by default the system's."""
    try:
        yield
    except OSError as error:
        if isinstance(error, OpenError):
            raise
        reason = f"cannot write a temporary file: {error.strerror or words(error)}"
        if folder is None:
            from tempfile import gettempdir

            reason += "; set TMPDIR to another folder"
            with suppress(OSError):  # no folder can be written to
                folder = gettempdir()
        raise OpenError(reason, url=folder, errno=error.errno) from error


def check_written(descriptor: int) -> None:
    """Raise the OSError that closing the file would raise; the file stays open, and locked.

    NFS and others report a full quota, or a server that failed, only there. Linux flushes at each close of a duplicate.
    """
    os.close(os.dup(descriptor))


def passed_on(file: Any) -> OutputStream:
    """Return an OutputStream into *file*, any object with a `write` that takes bytes; it is flushed but not closed."""
    name = getattr(file, "name", None)

    def write(data: Any) -> None:
        while True:
            count = file.write(data)
            if count is None and isinstance(file, io.RawIOBase):
                _wait(file, POLLOUT)
                continue
            if not isinstance(count, int) or count >= len(data):  # only raw streams write less
                return
            data = memoryview(data)[count:]

    def commit() -> None:
        if hasattr(file, "flush"):
            file.flush()

    name = name if isinstance(name, str) else f"a {type(file).__name__}"
    return OutputStream(name, write, commit=commit, discard=lambda: None)


def read_some(source: Any, size: int) -> bytes:
    """Return up to *size* bytes of *source*, none only at its end; raise OpenError if it has none yet."""
    data: bytes | None = source.read(size)
    if data is None:
        name = getattr(source, "name", None)
        raise OpenError(NOT_YET, url=name if isinstance(name, str) else None)
    return data


def read_at_most(source: Any, most: int, piece: int) -> bytes:
    """Read *source* up to its end, but no more than *most* bytes, at most *piece* at a time."""
    pieces = []
    while most and (data := read_some(source, min(most, piece))):
        pieces.append(data)
        most -= len(data)
    return b"".join(pieces)


def failure(exc: BaseException, url: str, offset: int | None = None) -> OpenError:
    """Return the OpenError for *exc* at *url*.

    >>> failure(FileNotFoundError("x"), "memory://x")
    OpenError('memory://x: No such file or directory')
    """
    return OpenError(words(exc), url=url, offset=offset, errno=errno_of(exc))


def taken(url: str) -> OpenError:
    """Return the OpenError for an output at *url* that exists and may not be replaced."""
    return OpenError("the file exists; --overwrite replaces it", url=url, errno=errno.EEXIST)


def encoded(encoding: str, url: str, cure: str = "") -> OpenError:
    """Return the OpenError for a Content-Encoding that is not undone; *cure* is added to the advice."""
    reason = f"the server sent Content-Encoding {encoding}, which was not asked for"
    return OpenError(f"{reason}; store the file without it{cure}", url=url)


def is_missing(error: OpenError) -> bool:
    """Return whether *error* means that nothing exists at its URL, rather than that it cannot be reached."""
    return error.errno in (errno.ENOENT, errno.ENAMETOOLONG)


def is_answer(error: OpenError) -> bool:
    """Return whether a server responded with a refusal; it may still allow writing, or another signed URL."""
    cause: Any = error.__cause__
    return cause is None or isinstance(cause, PermissionError) or 400 <= getattr(cause, "code", 0) < 500


def is_refused(error: OpenError) -> bool:
    """Return whether a server or store denied access to the URL."""
    cause: Any = error.__cause__
    return isinstance(cause, PermissionError) or getattr(cause, "code", 0) in (401, 403)


def errno_of(exc: BaseException) -> int | None:
    """Return the errno of *exc*, if any; ENOENT for the statuses 404 and 410 of a web server."""
    if isinstance(reason := getattr(exc, "reason", None), BaseException):
        return errno_of(reason)
    if isinstance(exc, FileNotFoundError) or getattr(exc, "code", None) in (404, 410):
        return errno.ENOENT
    number = getattr(exc, "errno", None)
    return number if isinstance(number, int) else None


def words(exc: BaseException) -> str:
    """Return the message of *exc*, without the credentials of URLs in it."""
    if isinstance(reason := getattr(exc, "reason", None), BaseException):
        return words(reason)
    if isinstance(exc, FileNotFoundError):
        return os.strerror(errno.ENOENT)
    from tarshards.storage.redaction import redacted  # no tool needs it to start

    return redacted(getattr(exc, "strerror", None) or str(exc)) or type(exc).__name__


# Bytes; writes to files begin and end at multiples of this: 0.7 x the time of copying 2 GB, where the page cache can
# have large folios, as of ext4 since Linux 6.16. Multiples of a page: no gain; of 1 MiB: the same.
ALIGNED = 1 << 16


def _position(file: int) -> int:
    """Return where the next byte of an open file is written; 0 for a pipe."""
    try:
        return os.lseek(file, 0, os.SEEK_CUR)
    except OSError:
        return 0


def _copy_range(output: int, file: int, offset: int, size: int) -> int:
    return os.copy_file_range(file, output, size, offset)


#: System calls that copy: from file to file, perhaps without moving any data; to a pipe, a socket or another device.
_COPIES: list[Callable[[int, int, int, int], int]] = []
if hasattr(os, "copy_file_range"):
    _COPIES.append(_copy_range)
if hasattr(os, "sendfile"):
    _COPIES.append(os.sendfile)


class FileRange:
    """A range of an open file: *size* bytes at *offset* of *descriptor*; errors name *url*.

    A sample that is only copied has such ranges instead of bytes: ``len`` is the number of bytes, and ``pieces`` reads
    them. *headers* are the headers of the member, if they are kept.
    """

    headers: bytes | None = None

    def __init__(self, descriptor: int, url: str, offset: int, size: int):
        self.descriptor = descriptor
        self.url = url
        self.offset = offset
        self.size = size

    def __len__(self) -> int:
        return self.size

    def pieces(self, position: int = 0) -> Iterator[bytes]:
        """Yield the bytes from *position* on in pieces; raise OpenError if the file has shrunk."""
        while position < self.size:
            offset = self.offset + position
            try:
                data = os.pread(self.descriptor, min(self.size - position, PIECE), offset)
            except OSError as error:
                raise OpenError(str(error.strerror), url=self.url, offset=offset, errno=error.errno) from error
            if not data:
                raise OpenError("the file has shrunk since it was opened", url=self.url, offset=offset)
            yield data
            position += len(data)

    def copy_to(self, output: int) -> Iterator[int]:
        """Let the system copy the bytes to the descriptor *output*; yield the number of bytes that each call copied.

        It copies fewer in all if it cannot copy between such files, or if anything fails; reading and writing the rest
        then raises the error.
        """
        begin, done = _position(output), 0
        for copy in _COPIES:
            with suppress(OSError):
                while done < self.size:
                    most = -(begin + done) % ALIGNED or AT_ONCE
                    count = copy(output, self.descriptor, self.offset + done, min(self.size - done, most))
                    if not count:
                        break
                    done += count
                    yield count


class GrowingRange(FileRange):
    """A range that grows as long as the bytes that are written after it also follow it in its file.

    A few system calls thus copy many members; one call for each would cost more than copying most headers.
    """

    def __init__(self, file_range: FileRange):
        super().__init__(os.dup(file_range.descriptor), file_range.url, file_range.offset, file_range.size)
        self._inode = _inode(file_range)
        self.after: list[bytes] = []  # the bytes written after it
        self._left = PIECE

    def take(self, data: bytes) -> bool:
        """Add *data*, the bytes that are written next; return False if there are more than PIECE between two ranges."""
        self._left -= len(data)
        if self._left >= 0:
            self.after.append(data)
        return self._left >= 0

    def grow(self, file_range: FileRange) -> bool:
        """Add *file_range*, which is written next; return False if it does not follow the earlier bytes in its file."""
        between = b"".join(self.after)
        end = self.offset + self.size
        if file_range.offset != end + len(between) or _inode(file_range) != self._inode:
            return False
        try:
            if os.pread(self.descriptor, len(between), end) != between:
                return False
        except OSError:
            return False
        self.size += len(between) + file_range.size
        self.after, self._left = [], PIECE
        return True

    def close(self) -> None:
        """Close its descriptor."""
        os.close(self.descriptor)


def _inode(file_range: FileRange) -> tuple[int, int]:
    status = os.fstat(file_range.descriptor)
    return status.st_dev, status.st_ino
