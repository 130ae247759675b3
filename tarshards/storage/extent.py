"""Bytes of an open file that are written elsewhere without being read: the system copies them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress

from tarshards.errors import OpenError

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
