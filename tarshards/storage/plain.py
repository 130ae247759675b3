"""Any shard as a local, uncompressed file, for reading in any order."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from tarshards.errors import TarshardsError
from tarshards.storage.compression import HEAD, find_compression
from tarshards.storage.location import Location
from tarshards.storage.opening import open_shard
from tarshards.storage.streams import failure, temporary

PIECE = 1 << 20  # bytes copied at once


class PlainFile:
    """The bytes of an uncompressed shard: the shard's own file, or a copy.

    *error* is what ended the copying before the shard's end, if anything did. The shard may consist of several archives
    if it is *concatenated*.
    """

    def __init__(
        self,
        file: Any,
        name: str,
        *,
        concatenated: bool = False,
        is_copy: bool = False,
        error: TarshardsError | None = None,
    ):
        self.name, self.concatenated, self.is_copy, self.error = name, concatenated, is_copy, error
        self.descriptor = file.fileno()
        self.size = os.fstat(self.descriptor).st_size

    def read(self, offset: int, size: int) -> bytes:
        """Return the *size* bytes at *offset*, or as many as there are; several threads may call this at once."""
        data = os.pread(self.descriptor, size, offset)
        while len(data) < size and (more := os.pread(self.descriptor, size - len(data), offset + len(data))):
            data += more
        return data


@contextmanager
def open_plain(url: str | Location, *, concatenated: bool = False) -> Iterator[PlainFile]:
    """Open a shard, which may be *concatenated*: a plain local file as it is, all else as an unnamed temporary copy."""
    location = Location.of(url)
    name = location.name
    if location.path is not None and os.path.isfile(location.path):  # a fifo can be opened only once
        with location.open() as file:
            plain = PlainFile(file, name, concatenated=concatenated)
            if not find_compression(plain.read(0, HEAD)):
                yield plain
                return
    import tempfile

    errors: list[TarshardsError] = []

    def pieces() -> Iterator[bytes]:
        try:
            with open_shard(location) as stream:
                while data := stream.read(PIECE):
                    yield data
        except TarshardsError as caught:
            errors.append(caught)
        except OSError as caught:
            errors.append(failure(caught, name))
            errors[0].__cause__ = caught

    with ExitStack() as stack:
        with temporary():  # which is no fault of the shard
            copy = stack.enter_context(tempfile.TemporaryFile())
            for data in pieces():
                copy.write(data)
            copy.flush()
        if errors and not copy.tell():
            raise errors[0]
        yield PlainFile(copy, name, concatenated=concatenated, is_copy=True, error=errors[0] if errors else None)
