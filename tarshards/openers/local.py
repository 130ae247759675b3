"""Local files: read unbuffered, written under a temporary name until they are whole."""

from __future__ import annotations

import io
import os
import stat
from typing import Any
from urllib.parse import unquote

from tarshards.errors import UrlError
from tarshards.openers.streams import Writer, failure

# These lead to a file that is open already, whatever its kind.
_DESCRIPTORS = ("/dev/stdout", "/dev/stderr", "/dev/fd/", "/proc/")


def open_stream(url: str, mode: str, **_: Any) -> io.RawIOBase:
    path = local_path(url)
    try:
        return io.FileIO(path) if mode == "rb" else open_writer(path, url)
    except (OSError, ValueError) as exc:
        raise failure(exc, url) from exc


def local_path(url: str) -> str:
    """Return the path that a plain path or a `file:` URL names.

    >>> [local_path(url) for url in ("a%20b.tar", "file:a%20b.tar", "file:///a%20b.tar")]
    ['a%20b.tar', 'a%20b.tar', '/a b.tar']
    """
    if url[:7].lower() == "file://":
        host, slash, path = url[7:].partition("/")
        if host not in ("", "localhost") or not slash:
            raise UrlError("a file:// URL has three slashes before its path; file:a.tar is relative", url=url)
        return unquote(slash + path)
    return url[5:] if url[:5].lower() == "file:" else url


def open_writer(path: str, name: str) -> Writer:
    """Return a Writer that gives *path* its bytes at once, when they are all there."""
    if path.startswith(_DESCRIPTORS) or _is_special(path):
        file = io.BufferedWriter(io.FileIO(path, "wb"))
        return Writer(name, file.write, commit=file.close, discard=file.raw.close)
    target = os.path.realpath(path)
    folder, base = os.path.split(target)
    temporary = os.path.join(folder, f".{base}.{os.urandom(4).hex()}.tmp")
    # 0o666 lets the umask decide; tempfile would give 0o600.
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    file = io.BufferedWriter(io.FileIO(descriptor, "wb"), 1 << 16)

    def commit() -> None:
        file.close()
        os.replace(temporary, target)

    def discard() -> None:
        # Closing the raw file first drops the buffer unwritten.
        file.raw.close()
        os.unlink(temporary)

    return Writer(name, file.write, commit=commit, discard=discard)


def _is_special(path: str) -> bool:
    try:
        return not stat.S_ISREG(os.stat(path).st_mode)
    except FileNotFoundError:
        return False
