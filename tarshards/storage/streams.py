"""What every opener returns: a Reader or a Writer, and the wording of their failures."""

from __future__ import annotations

import errno
import io
import os
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from tarshards.errors import OpenError

#: How a URL begins that is no path.
SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")


class Reader(io.RawIOBase):
    """A stream that is read forwards; subclasses say how by `read_some`, which gives b"" only at the end."""

    name: str

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


class Writer(io.RawIOBase):
    """A stream that is written: `close` commits it, `abort` discards it.

    Leaving a with-block by an exception aborts, and so does forgetting to close.
    """

    def __init__(
        self, name: str, write: Callable[[Any], Any], *, commit: Callable[[], object], discard: Callable[[], object]
    ):
        self.name = name
        self._write, self._commit, self._discard = write, commit, discard
        self._process = os.getpid()

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        if self.closed:
            raise ValueError("write to a closed stream")
        try:
            self._write(data)
        except BrokenPipeError:
            raise
        except OSError as exc:
            raise failure(exc, self.name) from exc
        return len(data)

    def close(self) -> None:
        if self.closed:
            return
        try:
            self._commit()
        except BaseException as exc:
            self.abort()
            if isinstance(exc, OSError) and not isinstance(exc, BrokenPipeError):
                raise failure(exc, self.name) from exc
            raise
        super().close()

    def abort(self) -> None:
        """Close without a trace, as far as the transport can."""
        if not self.closed:
            super().close()
            with suppress(OSError):
                self._discard()

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def __del__(self) -> None:
        # A forked copy must not discard what its parent still writes.
        if getattr(self, "_process", None) == os.getpid():
            self.abort()


def spooled(name: str, put: Callable[[Any], object]) -> Writer:
    """Return a Writer into a temporary file, which *put* stores whole when it is committed."""
    import tempfile

    file = tempfile.NamedTemporaryFile()  # noqa: SIM115

    def commit() -> None:
        file.flush()
        put(file)
        file.close()

    return Writer(name, file.write, commit=commit, discard=file.close)


def failure(exc: BaseException, url: str, offset: int | None = None) -> OpenError:
    """Return the OpenError that says what *exc* means for *url*.

    >>> failure(FileNotFoundError("x"), "memory://x")
    OpenError('memory://x: No such file or directory')
    """
    return OpenError(words(exc), url=url, offset=offset)


def is_missing(error: OpenError) -> bool:
    """Say whether *error* means that there is nothing at its URL, rather than that it cannot be reached."""
    cause = error.__cause__
    return isinstance(cause, FileNotFoundError) or getattr(cause, "code", None) in (404, 410)


def words(exc: BaseException) -> str:
    if isinstance(reason := getattr(exc, "reason", None), BaseException):
        return words(reason)
    if isinstance(exc, FileNotFoundError):
        return os.strerror(errno.ENOENT)
    return getattr(exc, "strerror", None) or str(exc) or type(exc).__name__


def public(url: str) -> str:
    """Return *url* without a user's name and password, fit for messages.

    >>> public("http://me:secret@host/a.tar")
    'http://host/a.tar'
    """
    return re.sub(r"(?<=://)[^/?#]*@", "", url) if "@" in url else url
