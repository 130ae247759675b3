"""Bytes at known places of a URL: local files mapped, http and the stores of fsspec by range requests."""

from __future__ import annotations

import os
import re
from typing import Any, Self

from tarshards.errors import OpenError
from tarshards.storage.opening import room_of
from tarshards.storage.streams import failure, public

try:
    from tarshards.storage._mapped import Mapping
except ImportError:
    from tarshards.storage._mapped_py import Mapping  # type: ignore[assignment]

HEAD = 1024  # bytes of the beginning that come with the size of a remote file


class Ranges:
    """A file that is read in any order; *size* is its length in bytes.

    ``read`` may be called by several threads at once. *remote* says that it waits for a network, so that many reads are
    better asked for at once.
    """

    name: str
    size: int
    remote = True

    def read(self, offset: int, size: int) -> bytes:
        """Return the *size* bytes at *offset*; raise OpenError where they cannot be had."""
        raise NotImplementedError

    def verify(self) -> None:
        """Raise OpenError if the file is known to have been written to since it was opened."""

    def is_current(self) -> bool:
        """Return whether opening the URL again would give the same bytes; False where nothing tells."""
        return False

    def close(self) -> None:
        """Let go of the file."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_ranges(url: str) -> Ranges:
    """Open a path, `file:`, `http:` or `https:` URL, or one of an fsspec scheme, for reading in any order.

    A local file is mapped; if it shrinks, reading what has gone is an OpenError. Of a remote one that changes, reading
    on is an OpenError where the server tells. Raises OpenError for pipes and for servers without ranges.
    """
    room = room_of(url)
    if room == "local":
        return LocalRanges(url)
    if room == "http":
        return HttpRanges(url)
    if room == "fsspec_":
        return StoreRanges(url)
    raise OpenError("a stream, of which no parts can be read in any order", url=public(url))


class LocalRanges(Ranges):
    """A local file, mapped into memory; the mapping stays when the file is removed or replaced."""

    remote = False

    def __init__(self, url: str):
        from tarshards.storage.local import local_path

        self.name = url
        self._path = local_path(url)
        try:
            self.mapping = Mapping(self._path)
            self._opened = os.stat(self._path)
        except (OSError, ValueError) as exc:
            raise failure(exc, url) from exc
        self.size = len(self.mapping)

    def read(self, offset: int, size: int) -> bytes:
        try:
            return self.mapping.read(offset, size)
        except (OSError, ValueError) as exc:
            raise failure(exc, self.name, offset) from exc

    def verify(self) -> None:
        try:
            now = os.stat(self._path)
        except FileNotFoundError:
            return
        then = self._opened
        if (now.st_dev, now.st_ino) == (then.st_dev, then.st_ino) and now.st_mtime_ns != then.st_mtime_ns:
            raise OpenError("was written to while it was read", url=self.name)

    def is_current(self) -> bool:
        try:
            now = os.stat(self._path)
        except OSError:
            return False
        then = self._opened
        return (now.st_dev, now.st_ino, now.st_mtime_ns) == (then.st_dev, then.st_ino, then.st_mtime_ns)


class HttpRanges(Ranges):
    """A file of a web server, read by range requests, each tried again until it is whole."""

    def __init__(self, url: str, *, timeout: float = 30.0, retries: int = 5):
        from tarshards.storage.http import Address

        self._address, self._retries = Address(url, timeout), retries
        self.name = self._address.name
        self._validator: tuple[str, str] | None = None
        self.size = -1
        self._head = self._ask(0, HEAD)

    def read(self, offset: int, size: int) -> bytes:
        if offset < 0 or offset + size > self.size:
            raise OpenError(f"{size} bytes at offset {offset} of {self.size}", url=self.name)
        if not size or offset + size <= len(self._head):
            return self._head[offset : offset + size]
        return self._ask(offset, size)

    def is_current(self) -> bool:
        return self._validator is not None  # with which each answer is compared

    def _ask(self, offset: int, size: int) -> bytes:
        from tarshards.storage.http import Patience

        return Patience(self.name, self._retries).attempt(lambda: self._answer(offset, size), lambda: offset)

    def _answer(self, offset: int, size: int) -> bytes:
        from tarshards.storage.http import validator

        headers = {"Accept-Encoding": "identity", "Range": f"bytes={offset}-{offset + size - 1}"}
        with self._address.request(headers) as response:
            match = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", response.headers.get("Content-Range", ""))
            if response.status != 206 or not match or int(match[1]) != offset:
                raise OpenError("the server serves no ranges, which random access needs", url=self.name)
            if self.size < 0:
                self.size, self._validator = int(match[3]), validator(response)
            elif (int(match[3]), validator(response)) != (self.size, self._validator):
                raise OpenError("changed while it was read", url=self.name, offset=offset)
            wanted = min(size, self.size - offset)
            data: bytes = response.read(wanted)
            if len(data) < wanted:
                raise ConnectionError(f"the answer ended after {len(data)} of {wanted} bytes")
        return data


class StoreRanges(Ranges):
    """A file of one of fsspec's stores."""

    def __init__(self, url: str):
        from tarshards.storage.fsspec_ import find_store

        self.name, self._url = public(url), url
        self._process = os.getpid()
        self._store, self._path = find_store(url)
        try:
            self.size = int(self._store.size(self._path))
        except Exception as exc:
            raise failure(exc, self.name) from exc

    def read(self, offset: int, size: int) -> bytes:
        if offset < 0 or offset + size > self.size:
            raise OpenError(f"{size} bytes at offset {offset} of {self.size}", url=self.name)
        if self._process != os.getpid():  # stores have threads, which a forked process has not
            from tarshards.storage.fsspec_ import find_store

            self._store, self._path = find_store(self._url)
            self._process = os.getpid()
        try:
            data: Any = self._store.cat_file(self._path, start=offset, end=offset + size) if size else b""
        except Exception as exc:
            raise failure(exc, self.name, offset) from exc
        if len(data) != size:
            raise OpenError(f"{len(data)} of {size} bytes came", url=self.name, offset=offset)
        return bytes(data)
