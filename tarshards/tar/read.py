"""Bytes <-> members: plain POSIX tar, read loudly and written the same for the same input.

``scan``, ``cut``, ``walk`` and ``plain_header`` are the one switch between the native kernel and its pure-Python twin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from io import RawIOBase
from typing import Any, BinaryIO, Literal, NamedTuple, Protocol

from tarshards.errors import TarError

try:
    from tarshards.tar._tar import cut, plain_header, scan
    from tarshards.tar._tar import walk as walk
except ImportError:
    from tarshards.tar._tar_py import cut, plain_header, scan
    from tarshards.tar._tar_py import walk as walk

BLOCK = 512
CHUNK = 1 << 19  # bytes read at once where members are small; fits the processor's cache
MAX_READ = 1 << 26  # bytes asked for at once, so that a lying size costs no more memory than this
MEMBER_LIMIT = 16 << 30
END = bytes(2 * BLOCK)  # what ends an archive that we write

NOT_YET = "the stream is non-blocking and has no bytes yet"  # which is no end of the archive


class SkipCounter(Protocol):
    """What counts the members that are passed over; a ``Ledger`` is one."""

    def skip(self, reason: str) -> None:
        """Count a member that is no part of a sample."""


class Member(NamedTuple):
    """A regular file of an archive; *offset* is where its first header lies in the (decompressed) archive."""

    name: str
    data: bytes
    offset: int


def read_members(
    stream: BinaryIO | RawIOBase,
    *,
    url: str | None = None,
    select: Callable[[str], bool] | None = None,
    end: Literal["required", "optional"] = "required",
    limit: int = MEMBER_LIMIT,
    ledger: SkipCounter | None = None,
) -> Iterator[Member]:
    """Yield the regular files of the tar archive in *stream*, in their order.

    The stream may be a file, a pipe or a socket: it is read forwards, and its ``read(n)`` may return less than n.
    Members for whose name *select* is false are passed over without being held. Directories, links and devices are
    skipped, and counted by *ledger*. *url* names the archive in errors (by default the stream's own name).
    Concatenated archives are read as one.

    Raises TarError with the offset for a damaged or sparse member, one of more than *limit* bytes, an archive that is
    cut short (``end="optional"`` accepts one cut between members), and for an empty input.
    """
    if url is None and isinstance(name := getattr(stream, "name", None), str):
        url = name
    buffer, base = b"", 0  # base: offset of the buffer in the archive
    position, ended = 0, 0
    ahead = CHUNK  # how much to read when members are missing
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
        if last is not None:  # its data goes on beyond the buffer
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
                # A large member is best read straight into its bytes: read no further than to the data of the next,
                # which is likely as far off as this one was from the one before.
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
    """Raise TarError unless an archive may end after *rest*, whole blocks of which begin at *base*."""
    if base + len(rest) == 0:
        raise TarError("empty input, not a tar archive", url=url)
    if base == 0 and not ended and not missing and len(rest) < BLOCK:
        raise TarError("less than a header, not a tar archive", url=url, offset=0)
    if ended and any(rest):
        raise TarError("junk after the end of the archive", url=url, offset=base)
    if not ended and (rest or missing):
        raise TarError("truncated in a header or its padding", url=url, offset=base)
    if not ended and end != "optional":
        raise TarError("truncated: no block of zeros ends the archive", url=url, offset=base)


def pack_header(name: str, size: int) -> bytes:
    """Return the header of a regular file: plain ustar where it says everything, else with a pax header before it.

    Time, owner and mode are fixed, so that the same members give the same bytes.
    """
    return plain_header(name, size) or _pax_header(name, size)


def _pax_header(name: str, size: int) -> bytes:
    import tarfile

    info = tarfile.TarInfo(name)
    info.size = size
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def padding(size: int) -> int:
    """How many zero bytes follow *size* bytes of data up to the next block.

    >>> padding(1), padding(512)
    (511, 0)
    """
    return -size % BLOCK
