"""Open the bytes of a URL, a shard through its compression, or a shard as a plain local file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, BinaryIO

from tarshards.errors import TarshardsError
from tarshards.storage.compression import (
    HEAD,
    bomb,
    bomb_in,
    compressed,
    decompressed,
    find_compression,
    without_pixz_index,
)
from tarshards.storage.derived import forget
from tarshards.storage.location import Location
from tarshards.storage.manifest import Shard
from tarshards.storage.remote import Remote
from tarshards.storage.streams import PIECE, failure, temporary


def open_url(
    url: str | os.PathLike[str] | Location,
    mode: str = "rb",
    *,
    allow_pipe: bool = False,
    remote: Remote | None = None,
    sync: bool = True,
) -> BinaryIO:
    """Open *url* for reading ("rb") or writing ("wb") bytes.

    `read(n)` may return fewer than n bytes; it returns none only at the end. A file appears under its name at
    `close()`; `abort()`, or leaving a with-block by an exception, discards it. `close()` waits until a local
    file and its name are on the disk, so that they survive a power loss; with *sync* False it does not wait.

    URLs are paths, `file:`, `-` (stdin or stdout), `http:`, `https:`, every scheme of fsspec, and with *allow_pipe*
    `pipe:command`. *remote* has the options for servers and stores; see `Remote`. Raises UrlError for an unknown
    scheme, and OpenError for any other failure.
    """
    return Location.of(url, remote, allow_pipe=allow_pipe, sync=sync).open(mode)


def open_shard(
    url: str | os.PathLike[str] | Location,
    mode: str = "rb",
    *,
    allow_pipe: bool = False,
    max_ratio: float | None = None,
    sync: bool = True,
) -> BinaryIO:
    """Open *url* as `open_url` does, through its compression.

    Reading detects gzip, bzip2, xz, lzma, zstd and lz4 by their first bytes, never by the name, and also if a server
    sends them with a Content-Encoding, which `open_url` refuses. Raises OpenError for damage. Data that passes through
    may expand by any ratio; `read()`, of all that is left, and `read_members`, of one member, raise for more than both
    256 MiB and *max_ratio* times the compressed size (by default 200, or that of ``Remote``).

    Writing compresses by the suffix (`.gz .tgz .bz2 .tbz2 .xz .txz .lzma .zst .tzst .lz4` and their variants); the same
    data gives the same bytes. Raises UrlError for the suffix of another format, such as `.br` or `.zip`. `close()`
    removes the index of an earlier shard of this name, and, beside a local one, all other files derived from it. lz4
    needs ``pip install 'tarshards[lz4]'``.
    """
    location = Location.of(url, allow_pipe=allow_pipe, sync=sync)
    compression = location.compression() if mode == "wb" else None
    stream: Any = location.open(mode, compressed=True)
    if mode == "wb":
        stream.before_commit = partial(forget, location)
        shard: Any = compressed(stream, compression)
    else:
        shard = decompressed(stream, location.name, location.max_ratio if max_ratio is None else max_ratio)
    return shard


class PlainFile:
    """The bytes of an uncompressed shard: its own file, or a copy.

    The index that pixz appends to a tar is left out. *source* is the stream that was copied, *error* the error that
    ended copying before the end of the shard, if any.
    """

    shard: Shard = Shard("")  #: how the shard is read

    def __init__(
        self,
        file: Any,
        location: Location,
        *,
        is_copy: bool = False,
        source: Any = None,
        error: TarshardsError | None = None,
    ):
        self.name: str = location.name
        self.is_copy = is_copy
        self._source, self._max_ratio = source, location.max_ratio
        self.error = error
        self.descriptor: Any = file.fileno()
        self.size: int = os.fstat(self.descriptor).st_size
        self.size = without_pixz_index(self.size, self.read)

    def bomb(self, size: int, stored: int) -> str | None:
        """Return why *size* bytes of a member, of which *stored* are stored, may not be held; None if they may."""
        return bomb_in(self._source, size) or (bomb(size, stored, self._max_ratio) if stored < size else None)

    def read(self, offset: int, size: int) -> bytes:
        """Return the *size* bytes at *offset*, fewer at the end; several threads may call this at once."""
        size = max(0, min(size, self.size - offset))
        data = os.pread(self.descriptor, size, offset)
        while len(data) < size and (more := os.pread(self.descriptor, size - len(data), offset + len(data))):
            data += more
        return data


@contextmanager
def open_plain(shard: Shard | str, location: Location | None = None) -> Iterator[PlainFile]:
    """Open a shard at its URL, or at *location*: a plain local file itself, any other as an unnamed temporary copy."""
    shard = Shard.of(shard)
    with _plain_file(location or shard.location()) as file:
        file.shard = shard
        yield file


@contextmanager
def _plain_file(location: Location) -> Iterator[PlainFile]:
    name = location.name
    if location.path is not None and os.path.isfile(location.path):  # a fifo can be opened only once
        with location.open() as file:
            plain = PlainFile(file, location)
            if not find_compression(plain.read(0, HEAD)):
                yield plain
                return
    import tempfile

    errors: list[TarshardsError] = []
    source: Any = None

    def pieces() -> Iterator[bytes]:
        nonlocal source
        try:
            with open_shard(location) as stream:
                source = stream
                while data := stream.read(PIECE):
                    yield data
        except TarshardsError as caught:
            errors.append(caught)
        except OSError as caught:
            errors.append(failure(caught, name))
            errors[0].__cause__ = caught

    with ExitStack() as stack:
        with temporary():  # its errors do not concern the shard
            copy = stack.enter_context(tempfile.TemporaryFile())
            for data in pieces():
                copy.write(data)
            copy.flush()
        if errors and not copy.tell():
            raise errors[0]
        yield PlainFile(copy, location, is_copy=True, source=source, error=errors[0] if errors else None)
