"""Read and write the members of plain POSIX tar archives; every fault raises, and equal input gives equal bytes.

This module selects the C kernel or the equivalent Python code for ``scan``, ``cut``, ``walk`` and ``plain_header``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from io import RawIOBase
from typing import Any, BinaryIO, Literal, NamedTuple, Protocol, TypeAlias

from tarshards.errors import TarError

try:
    from tarshards.tar._tar import cut, plain_header, scan
    from tarshards.tar._tar import walk as walk
except ImportError:
    from tarshards.tar._tar_py import cut, plain_header, scan
    from tarshards.tar._tar_py import walk as walk

#: Whether the native parser is in use rather than its twin in Python.
COMPILED = scan.__module__ == "tarshards.tar._tar"

BLOCK = 512
CHUNK = 1 << 19  # bytes per read if members are small; fits the processor's cache
MAX_READ = 1 << 26  # bytes per read of a large member: the most memory that a wrong size can waste
MEMBER_LIMIT = 16 << 30
END = bytes(2 * BLOCK)  # the end of an archive that we write

#: Whether zeros must end an archive, or it may also be cut between two members.
ArchiveEnd: TypeAlias = Literal["required", "optional"]

NOT_YET = "the stream is non-blocking and has no bytes yet"  # read() returned None: not the end of the archive


class SkipCounter(Protocol):
    """An object that counts skipped members, such as a ``Ledger``."""

    def skip(self, reason: str) -> None:
        """Count a member that does not belong to a sample."""


class Member(NamedTuple):
    """A regular file of an archive; *offset* is that of its first header in the (decompressed) archive, in bytes."""

    name: str
    data: bytes
    offset: int


def read_members(
    stream: BinaryIO | RawIOBase,
    *,
    url: str | None = None,
    select: Callable[[str], bool] | None = None,
    end: ArchiveEnd = "required",
    limit: int = MEMBER_LIMIT,
    ledger: SkipCounter | None = None,
) -> Iterator[Member]:
    """Yield the regular files of the tar archive in *stream*, in archive order.

    The stream may be a file, a pipe or a socket: it is read forwards, and its ``read(n)`` may return less than n bytes.
    Members whose name *select* rejects are skipped without being held in memory. Directories, links and devices are
    skipped, and counted by *ledger*. *url* names the archive in errors (by default the name of the stream).
    Concatenated archives are read as one.

    Raises TarError with the offset for a damaged or sparse member, a member of more than *limit* bytes, a truncated
    archive (``end="optional"`` accepts truncation between members), and empty input.
    """
    if url is None and isinstance(name := getattr(stream, "name", None), str):
        url = name
    buffer, base = b"", 0  # base: offset of the buffer in the archive
    position, ended = 0, 0
    ahead = CHUNK  # bytes to read when the buffer has no further member
    mark = None  # offset of the end of the last large member
    while True:
        members, position, need, ended, problem = scan(buffer, position, ended, limit)
        available = len(buffer)
        last = members.pop() if members and members[-1][3] > available else None
        wanted = members if select is None else [found for found in members if not found[4] and select(found[0])]
        whole = cut(buffer, wanted, base, Member)
        if ledger is not None and len(whole) < len(members):
            for kind in [found[4] for found in members if found[4]]:
                ledger.skip(kind)
        yield from whole
        if last is not None:  # its data continues beyond the buffer
            name, header, start, stop, kind = last
            if not kind and (select is None or select(name)):
                missing = stop - (start if start > available else available)
                data = stream.read(missing if missing < MAX_READ else MAX_READ) or b""
                if len(data) < missing:
                    data += _read_rest(stream, missing - len(data), url, base + header)
                yield Member(name, buffer[start:] + data if start < available else data, base + header)
                del data
            else:
                _pass_over(stream, stop - available, url, base + header)
                if kind and ledger is not None:
                    ledger.skip(kind)
            if stop - start >= CHUNK // 8:
                # Reading a large member directly into its own bytes saves a copy. So read only up to the data of the
                # next member, which is probably as far away as this one was from the previous one.
                ahead = BLOCK if mark is None else base + start - mark
                mark = base + position
            available, buffer = stop, b""
        if problem:
            if base + position == 0 and problem == "bad header checksum":
                problem = "not a tar archive"
            raise TarError(problem, url=url, offset=base + position)
        if ahead > CHUNK:
            ahead = CHUNK
        rest = buffer[position:]
        missing = need - len(rest)
        if position > available:
            base += available
            position -= available
        else:
            base += position
            position = 0
        chunk = stream.read(position + (ahead if ahead > missing else missing))
        if not chunk:
            break
        ahead *= 2
        buffer = rest + chunk if rest else chunk
    if chunk is None:
        raise TarError(NOT_YET, url=url, offset=base)
    _check_end(rest, base, position, ended, url, end)


def _read_rest(stream: Any, size: int, url: str | None, offset: int) -> bytes:
    """Read the last *size* bytes of the member at *offset*."""
    parts = []
    while size:
        data = stream.read(min(size, MAX_READ))
        if not data:
            raise TarError(NOT_YET if data is None else "truncated in this member", url=url, offset=offset)
        parts.append(data)
        size -= len(data)
    return b"".join(parts)


def _pass_over(stream: Any, size: int, url: str | None, offset: int) -> None:
    if stream.seekable():
        stream.seek(size - 1, 1)
        size = 1
    while size:
        data = stream.read(min(size, CHUNK))
        if not data:
            raise TarError(NOT_YET if data is None else "truncated in this member", url=url, offset=offset)
        size -= len(data)


def _check_end(rest: bytes, base: int, missing: int, ended: int, url: str | None, end: str) -> None:
    """Raise TarError unless the archive may end after *rest*, which starts at offset *base*."""
    if base + len(rest) == 0:
        raise TarError("empty input, not a tar archive", url=url)
    if base == 0 and not ended and not missing and len(rest) < BLOCK:
        raise TarError("shorter than a header, not a tar archive", url=url, offset=0)
    if ended and any(rest):
        raise TarError("junk after the end of the archive", url=url, offset=base)
    if not ended and (rest or missing):
        raise TarError("truncated in a header or its padding", url=url, offset=base)
    if not ended and end != "optional":
        raise TarError("truncated: no block of zeros at the end of the archive", url=url, offset=base)


def pack_header(name: str, size: int) -> bytes:
    """Return the header of a regular file: ustar, preceded by a pax header if ustar cannot hold the name or size.

    Time, owner and mode are fixed, so the same members give the same bytes.
    """
    return plain_header(name, size) or _pax_header(name, size)


def _pax_header(name: str, size: int) -> bytes:
    import tarfile

    info = tarfile.TarInfo(name)
    info.size = size
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def padding(size: int) -> int:
    """Return the number of zero bytes that fill *size* bytes of data up to the next block.

    >>> padding(1), padding(512)
    (511, 0)
    """
    return -size % BLOCK
