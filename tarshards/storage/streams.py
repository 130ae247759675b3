"""What opening a location returns: streams, and parts of files that the system copies; the wording of failures."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from warnings import warn

from tarshards.errors import OpenError
from tarshards.storage.redaction import redacted

LONG = 1 << 23  # bytes after which a run is copied: its calls are long enough, and a reader of a pipe need not wait


class InputStream(io.RawIOBase):
    """A stream that is read forwards; subclasses say how by `read_some`, which gives b"" only at the end."""

    name: str
    encoding = ""  # of the bytes, where a server says that it has encoded them

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

    Committing has two steps. *finish* does what may still fail, such as writing what is buffered; *commit* gives the
    file its name. Between them `before_commit` is called. *file* is what *write* writes to, where the system knows it.

    Leaving a with-block by an exception aborts, and so does forgetting to close, which is a RuntimeWarning, too.
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
    ):
        self.name = name
        self._file = file
        self._run: Run | None = None
        self._write, self._finish, self._commit, self._discard = write, finish, commit, discard
        self._process = os.getpid()

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        if self.closed:
            raise ValueError(f"{self.name}: closed, so nothing more can be written")
        if self._run is not None:
            if self._run.take(data):
                return len(data)
            self._end_run()
        try:
            self._write(data)
        except (BrokenPipeError, OpenError):
            raise
        except OSError as exc:
            raise failure(exc, self.name) from exc
        return len(data)

    def copy(self, extent: Extent) -> None:
        """Write the bytes of *extent*, which the system copies where it can, with those that follow in its file."""
        if self._run is not None:
            if len(self._run) < LONG and self._run.grow(extent):
                return
            self._end_run()
        if self._file is not None and not self.closed:
            with suppress(OSError):  # a full disk, or too many open files: writing on says what
                self._file.flush()
                self._run = Run(extent)
                return
        for piece in extent.pieces():
            self.write(piece)

    def _end_run(self) -> None:
        """Write what the run stands for, and what came after it."""
        run, self._run = self._run, None
        if run is None:
            return
        try:
            for piece in run.pieces(run.copy_to(self._file.fileno())):
                self.write(piece)
            for data in run.after:
                self.write(data)
        finally:
            run.close()

    def close(self) -> None:
        if self.closed:
            return
        try:
            for step in (self._end_run, self._finish, self.before_commit, self._commit):
                if step is not None:
                    step()
        except BaseException as exc:
            self.abort()
            if isinstance(exc, OSError) and not isinstance(exc, BrokenPipeError | OpenError):
                raise failure(exc, self.name) from exc
            raise
        super().close()

    def abort(self) -> None:
        """Close and discard what was written, as far as the transport can."""
        if not self.closed:
            super().close()
            if self._run is not None:
                self._run.close()
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
            # Not a ResourceWarning, which Python does not show unless it is asked to.
            lost = "not closed, so what was written is lost; write in a with-block, or call close()"
            warn(f"{self.name}: {lost}", RuntimeWarning, stacklevel=2, source=self)


def spooled(name: str, put: Callable[[Any], object]) -> OutputStream:
    """Return an OutputStream into a temporary file, which *put* stores whole when it is committed."""
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
    """Let an OSError of a temporary file in *folder*, by default that of the system, be an OpenError that names it."""
    try:
        yield
    except OSError as error:
        if isinstance(error, OpenError):
            raise
        reason = f"cannot write a temporary file: {error.strerror or words(error)}"
        if folder is None:
            from tempfile import gettempdir

            reason += "; set TMPDIR to another folder"
            with suppress(OSError):  # there is none that can be written to
                folder = gettempdir()
        raise OpenError(reason, url=folder, errno=error.errno) from error


def passed_on(file: Any) -> OutputStream:
    """Return an OutputStream into *file*, any object with a `write` that takes bytes; it is flushed but not closed."""
    name = getattr(file, "name", None)

    def write(data: Any) -> None:
        while True:
            count = file.write(data)
            if not isinstance(count, int) or count >= len(data):  # only raw streams write less
                return
            data = memoryview(data)[count:]

    def commit() -> None:
        if hasattr(file, "flush"):
            file.flush()

    name = name if isinstance(name, str) else f"a {type(file).__name__}"
    return OutputStream(name, write, commit=commit, discard=lambda: None)


def read_at_most(source: Any, most: int, piece: int) -> bytes:
    """Return what *source* reads up to its end, but no more than *most* bytes, at most *piece* at a time."""
    pieces = []
    while most and (data := source.read(min(most, piece))):
        pieces.append(data)
        most -= len(data)
    return b"".join(pieces)


def failure(exc: BaseException, url: str, offset: int | None = None) -> OpenError:
    """Return the OpenError that says what *exc* means for *url*.

    >>> failure(FileNotFoundError("x"), "memory://x")
    OpenError('memory://x: No such file or directory')
    """
    return OpenError(words(exc), url=url, offset=offset, errno=errno_of(exc))


def encoded(encoding: str, url: str, cure: str = "") -> OpenError:
    """Return the OpenError for bytes whose *encoding* by a server nobody undoes; *cure* follows what helps always."""
    reason = f"the server sent Content-Encoding {encoding}, which was not asked for"
    return OpenError(f"{reason}; store the file without it{cure}", url=url)


def is_missing(error: OpenError) -> bool:
    """Say whether *error* means that there is nothing at its URL, rather than that it cannot be reached."""
    return error.errno == errno.ENOENT


def is_answer(error: OpenError) -> bool:
    """Say whether a server was reached and shows nothing: what it answers to a right to write, or to a signed URL."""
    cause: Any = error.__cause__
    return cause is None or isinstance(cause, PermissionError) or 400 <= getattr(cause, "code", 0) < 500


def is_refused(error: OpenError) -> bool:
    """Say whether a server or store refuses to show what is at the URL, or whether there is something."""
    cause: Any = error.__cause__
    return isinstance(cause, PermissionError) or getattr(cause, "code", 0) in (401, 403)


def errno_of(exc: BaseException) -> int | None:
    """Return the errno of *exc*, None if it has none; that of a web server's answer that nothing is there is ENOENT."""
    if isinstance(reason := getattr(exc, "reason", None), BaseException):
        return errno_of(reason)
    if isinstance(exc, FileNotFoundError) or getattr(exc, "code", None) in (404, 410):
        return errno.ENOENT
    number = getattr(exc, "errno", None)
    return number if isinstance(number, int) else None


def words(exc: BaseException) -> str:
    """Return what *exc* says, without the credentials of URLs in it."""
    if isinstance(reason := getattr(exc, "reason", None), BaseException):
        return words(reason)
    if isinstance(exc, FileNotFoundError):
        return os.strerror(errno.ENOENT)
    return redacted(getattr(exc, "strerror", None) or str(exc)) or type(exc).__name__


PIECE = 1 << 19  # bytes read at once where the system cannot copy
MOST_AFTER = 1 << 20  # bytes between two extents of a run
AT_ONCE = 1 << 24  # bytes that the system copies between two looks at signals


def _copy_range(output: int, file: int, offset: int, size: int) -> int:
    return os.copy_file_range(file, output, size, offset)


#: How the system copies: from file to file, maybe without moving any data; to a pipe, a socket or another device.
_COPIES: list[Callable[[int, int, int, int], int]] = []
if hasattr(os, "copy_file_range"):
    _COPIES.append(_copy_range)
if hasattr(os, "sendfile"):
    _COPIES.append(os.sendfile)


class Extent:
    """*size* bytes at *offset* of the open file *descriptor*, which *url* names in errors.

    It stands for bytes in a sample that is only written again: it has their length, and gives them by ``pieces``.
    """

    def __init__(self, descriptor: int, url: str, offset: int, size: int):
        self.descriptor, self.url, self.offset, self.size = descriptor, url, offset, size

    def __len__(self) -> int:
        return self.size

    def pieces(self, position: int = 0) -> Iterator[bytes]:
        """Read the bytes from *position* on, some at a time; raise OpenError where the file has shrunk meanwhile."""
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

    def copy_to(self, output: int) -> int:
        """Let the system copy the bytes to the descriptor *output*; return how many it did, from the first on.

        It does less where it cannot copy between such files, or where anything fails: who then reads and writes the
        rest learns what.
        """
        done = 0
        for copy in _COPIES:
            with suppress(OSError):
                while done < self.size:
                    count = copy(output, self.descriptor, self.offset + done, min(self.size - done, AT_ONCE))
                    if not count:
                        break
                    done += count
        return done


class Run(Extent):
    """An extent that grows by what is written after it, as long as the same bytes follow it in its file.

    A few calls then copy many members; each call costs the system more than most headers, and parts of pages.
    """

    def __init__(self, extent: Extent):
        super().__init__(os.dup(extent.descriptor), extent.url, extent.offset, extent.size)
        self._inode = _inode(extent)
        self.after: list[bytes] = []  # what was written after it
        self._left = MOST_AFTER

    def take(self, data: bytes) -> bool:
        """Take up *data*, which are written next; return False where they are too many."""
        self._left -= len(data)
        if self._left >= 0:
            self.after.append(data)
        return self._left >= 0

    def grow(self, extent: Extent) -> bool:
        """Take up *extent*, which is written next, if it and what was written before it follow in the file."""
        between = b"".join(self.after)
        end = self.offset + self.size
        if extent.offset != end + len(between) or _inode(extent) != self._inode:
            return False
        try:
            if os.pread(self.descriptor, len(between), end) != between:
                return False
        except OSError:
            return False
        self.size += len(between) + extent.size
        self.after, self._left = [], MOST_AFTER
        return True

    def close(self) -> None:
        """Close its descriptor."""
        os.close(self.descriptor)


def _inode(extent: Extent) -> tuple[int, int]:
    status = os.fstat(extent.descriptor)
    return status.st_dev, status.st_ino
