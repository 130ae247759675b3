"""Read and write the members of plain POSIX tar archives; every fault raises, and equal input gives equal bytes.

``tarshards.tar.elsewhere`` handles links and sparse members, whose content is elsewhere.

This module selects the C kernel or the equivalent Python code for ``scan``, ``cut``, ``walk``, ``Grouper``,
``plain_header``, ``plain_members`` and ``plain_rows``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from io import BytesIO, RawIOBase
from itertools import chain
from typing import TYPE_CHECKING, Any, BinaryIO, Generic, NamedTuple, NoReturn, Protocol, TypeAlias, TypeVar

from tarshards import kernels
from tarshards.errors import SampleError, TarError, visible
from tarshards.kernels._tar_py import AFTER_END, BLOCK, ELSEWHERE, RECORD, is_apart, most_end
from tarshards.kernels._tar_py import MAX_END as MAX_END
from tarshards.storage.compression import bomb_in, is_pixz_index
from tarshards.storage.manifest import ArchiveEnd
from tarshards.storage.streams import NOT_YET, PIECE, keep_memory

if TYPE_CHECKING:
    from tarshards.kernels._tar_py import ScannedMember

Grouper = kernels.tar.Grouper
cut, scan, walk = kernels.tar.cut, kernels.tar.scan, kernels.tar.walk
plain_header, plain_members, plain_rows = kernels.tar.plain_header, kernels.tar.plain_members, kernels.tar.plain_rows

LARGE = PIECE // 8  # members of at least this many bytes are read separately
MAX_READ = 1 << 26  # bytes per read of a large member: the most memory that a wrong size can waste
MEMBER_LIMIT = 16 << 30
END = bytes(2 * BLOCK)  # ends an archive
NO_END = 'truncated: no block of zeros at the end of the archive; `--end optional` (end="optional") accepts it'
JUNK = "junk after the end of the archive"

#: How to read archives of another kind or compression.
BSDTAR = "('pipe:bsdtar -cf - @FILE' reads it)"
ZLIB = "zlib data ('pipe:pigz -dcz FILE' reads it)"
#: Formats without a magic, by the suffix of their files.
SUFFIXES = {
    ".br": "brotli data ('pipe:brotli -dc FILE' reads it)",
    ".brotli": "brotli data ('pipe:brotli -dc FILE' reads it)",
    ".zz": ZLIB,
    ".deflate": "data of deflate without a header",
}
#: Files often passed instead of an archive, by their first bytes in lower case.
OTHERS = {
    b"version https://git-lfs": "a Git LFS pointer (`git lfs pull` fetches the file)",
    b"/annex/objects/": "a git-annex pointer (`git annex get` fetches the file)",
    b"outs:": "a DVC pointer (`dvc pull` fetches the file)",
    b"<!doctype html": "an HTML page",
    b"<html": "an HTML page",
    b"<?xml": "XML",
    b"<error": "XML",
    b"{": "JSON (the name of a manifest ends in .json; `tarimport` takes JSON lines)",
    b"pk\3\4": f"a zip file {BSDTAR}",
    b"7z\xbc\xaf": f"a 7z file {BSDTAR}",
    b"rar!": f"a RAR file {BSDTAR}",
    b"070701": f"a cpio archive {BSDTAR}",
    b"070707": f"a cpio archive {BSDTAR}",
    b"\x1f\x9d": f"a file of compress {BSDTAR}",
    b"lzip": f"an lzip file {BSDTAR}",
    b"\x89lzo": f"an lzop file {BSDTAR}",
    b"\2!l\x18": f"an lz4 file of the legacy format {BSDTAR}",
    b"lrzi": f"an lrzip file {BSDTAR}",
    b"7kst\xa01\x83\xd3": "a zpaq file",
    b"zpq": "a zpaq file",
    b"grzipii": "a grzip file",
    b"x\x01": ZLIB,
    b"x\x9c": ZLIB,
    b"x\xda": ZLIB,
    b"!<arch>": f"an ar archive {BSDTAR}",
    b"xar!": f"a xar archive {BSDTAR}",
    b"warc/": f"a WARC file {BSDTAR}",
    b"\xff\6\0\0snappy": "a snappy file",
    b"par1": "a Parquet file (`tarimport` makes shards of it)",
    b"arrow1": "an Arrow file",
    b"\x89hdf": "an HDF5 file",
    b"sqlite format 3": "a SQLite database",
    b"hsqs": "a squashfs image",
    b"\x89png": "an image",
    b"\xff\xd8\xff": "an image",
    b"\x93numpy": "a .npy file",
}

#: pax records that define the name, size and content of a member, not its metadata.
DEFINING = re.compile(r"path|linkpath|size|hdrcharset|GNU\.sparse\..*")


class MemberCounter(Protocol):
    """An object that counts skipped members and joined archives, such as a ``Ledger``."""

    def skip(self, reason: str) -> None:
        """Count a member that does not belong to a sample."""

    def count(self, *, joined: int) -> None:
        """Count *joined* archives, each of which follows another in its shard."""


class Member(NamedTuple):
    """A regular file of an archive; *offset* is that of its first header in the (decompressed) archive, in bytes."""

    name: str
    data: bytes
    offset: int


Item = TypeVar("Item", covariant=True)

#: The state after a buffer: position, need, zeros, problem and last, as ``Grouper.read`` returns them.
Reached: TypeAlias = "tuple[int, int, int, str | BaseException | None, ScannedMember | None]"


class KeptBytes(bytes):
    """The data of a member with its *headers*, for a writer that keeps its mode, owner, time and pax records."""

    headers: bytes


def with_headers(data: Any, headers: bytes) -> Any:
    """Return the *data* of a member, bytes or a ``FileRange``, with its headers."""
    data = KeptBytes(data) if isinstance(data, bytes) else data
    data.headers = headers
    return data


class UnresolvedError(Exception):
    """A link or a sparse member has no content, or the content of a member is a decompression bomb."""


class Taker(Generic[Item]):
    """Turns the members of an archive into items, such as members or samples.

    *url* names the archive in errors, by default the name of its stream; *ledger* counts the members that are no
    regular files, and archives that follow another one. A member has at most *limit* bytes.
    """

    def __init__(self, url: str | None = None, ledger: MemberCounter | None = None, limit: int = MEMBER_LIMIT):
        self.url: Any = url
        self.ledger: Any = ledger
        self.limit = limit

    def take(self, buffer: bytes, position: int, zeros: int, base: int) -> tuple[Iterable[Item], Reached]:
        """Return the items from the members in *buffer*, and the state after these members.

        *base* is the offset of the buffer in the archive; ``scan`` explains the others.
        """
        raise NotImplementedError

    def wants(self, name: str) -> bool:
        """Return whether a member that is not in one buffer is read."""
        return True

    def add(self, name: str, data: bytes, offset: int, headers: bytes) -> Iterable[Item]:
        """Return the items from a member that is not in one buffer."""
        raise NotImplementedError

    def refuse(self, name: str, reason: str, offset: int) -> Iterable[Item]:
        """Return the items from a member without content, or raise an error."""
        raise NotImplementedError

    def complete(self) -> Iterable[Item]:
        """Return the item that is still open at the end of an archive, if there is one."""
        return ()


class _Members(Taker[Member]):
    """Passes the members that *select* accepts through, with *keeps* with their headers."""

    def __init__(self, select: Callable[[str], bool] | None, keeps: bool, *options: Any):
        super().__init__(*options)
        self._select, self._keeps = select, keeps

    def take(self, buffer: bytes, position: int, zeros: int, base: int) -> tuple[list[Member], Reached]:
        members, reached = scan_whole(buffer, position, zeros, self.limit)
        select = self._select
        wanted = members if select is None else [found for found in members if not found[4] and select(found[0])]
        whole: list[Member]
        if self._keeps:
            whole = [
                Member(name, with_headers(buffer[start:end], buffer[header:start]), base + header)
                for name, header, start, end, kind in wanted
                if not kind
            ]
        else:
            whole = cut(buffer, wanted, base, Member)
        if self.ledger is not None and len(whole) < len(members):
            for kind in [found[4] for found in members if found[4]]:
                self.ledger.skip(kind)
        return whole, reached

    def wants(self, name: str) -> bool:
        return self._select is None or self._select(name)

    def add(self, name: str, data: bytes, offset: int, headers: bytes) -> tuple[Member]:
        return (Member(name, with_headers(data, headers) if self._keeps else data, offset),)

    def refuse(self, name: str, reason: str, offset: int) -> NoReturn:
        raise TarError(f"{name!r}: {reason}", url=self.url, offset=offset)


def read_members(
    stream: BinaryIO | RawIOBase,
    *,
    url: str | None = None,
    select: Callable[[str], bool] | None = None,
    end: ArchiveEnd = "required",
    concatenated: bool = False,
    limit: int = MEMBER_LIMIT,
    max_ratio: float | None = None,
    ledger: MemberCounter | None = None,
    keep_headers: bool = False,
) -> Iterator[Member]:
    """Yield the regular files of the tar archive in *stream*, in archive order.

    The stream may be a file, a pipe or a socket: it is read sequentially, and ``read(n)`` may return fewer than n
    bytes. Members whose name *select* rejects are skipped without being held in memory. Directories and devices are
    skipped, and counted by *ledger*. A link to a member of the archive has that member's content, read at its offset,
    so the stream must be able to seek. *url* names the archive in errors (by default the name of the stream). With
    *concatenated* all archives in *stream* are read as one, and those after the first counted by *ledger*; zeros that
    overwrote members then look like the end of an archive. With *keep_headers*, data is ``KeptBytes``.

    Raises TarError with the offset for a damaged member, a link without a target, a member of more than *limit* bytes,
    a truncated archive (``end="optional"`` accepts truncation after any member), and empty input; for a member of a
    compressed archive, or a sparse one, of more than 256 MiB and *max_ratio* times the compressed or stored size (by
    default that of ``open_shard``, or 200); for members after blocks of zeros and more zeros at the end than writers
    leave, unless *concatenated*; and for only zeros, unless they are the two blocks, or the record, of an archive
    without members.
    """
    taker = _Members(select, keep_headers, url or _name_of(stream), ledger, limit)
    return read_archive(stream, taker, end=end, concatenated=concatenated, max_ratio=max_ratio)


def read_archive(
    stream: BinaryIO | RawIOBase,
    taker: Taker[Item],
    *,
    end: ArchiveEnd = "required",
    concatenated: bool = False,
    max_ratio: float | None = None,
    unread: Callable[[str, int, int], Any] | None = None,
    read_back: Callable[[int, int], bytes] | None = None,
) -> Iterator[Item]:
    """Yield the items that *taker* makes from the members of an archive; options and errors are as in ``read_members``.

    If the stream cannot seek, ``read_back(offset, size)`` reads the archive for links. With *unread*, which requires a
    stream that can seek, the data of large members is not read, but replaced by ``unread(name, offset, size)``, unless
    that is None.
    """
    if not hasattr(stream, "read"):
        raise TypeError(f"read_members takes a stream of bytes, such as open_shard(url), not {type(stream).__name__}")
    url, ledger, limit = taker.url or _name_of(stream), taker.ledger, taker.limit
    keep_memory()
    special = None
    buffer, base = b"", 0  # base: offset of the buffer in the archive
    position, zeros = 0, 0
    ahead = PIECE  # bytes to read when the buffer has no further member
    mark = None  # offset of the end of the last large member
    while True:
        items, (position, need, zeros, problem, last) = taker.take(buffer, position, zeros, base)
        yield from items
        available = len(buffer)
        if last is not None:  # its data continues beyond the buffer, or its content is elsewhere
            name, header, start, stop, kind = last
            offset, head = base + header, buffer[header:start]
            is_wanted = (not kind or kind in ELSEWHERE) and taker.wants(name)
            data: Any = None
            refused = ""
            if unread is not None and is_wanted and stop - available >= LARGE and not kind:
                data = unread(name, base + start, stop - start)
            if not is_wanted or data is not None:
                _pass_over(stream, stop - available, url, offset)
            else:
                try:
                    data = _read_rest(stream, name, buffer[start:stop], stop - start, url, offset, max_ratio)
                    if kind:
                        if special is None:
                            from tarshards.tar.elsewhere import SpecialMembers

                            reached = base + max(stop, available)
                            special = SpecialMembers.of(stream, reached, read_back, limit=limit, max_ratio=max_ratio)
                        data = special.content(kind, offset, head, data, unread and partial(unread, name))
                except UnresolvedError as error:
                    refused = str(error)
            if refused:
                yield from taker.refuse(name, refused, offset)
            elif data is not None:
                yield from taker.add(name, data, offset, head)
            elif kind and ledger is not None:
                ledger.skip(kind)
            del data
            if position <= available:
                continue  # the buffer has more
            if stop - start >= LARGE:
                # Reading a large member directly into its own bytes saves a copy. So read only up to the data of the
                # next member, which is probably as far away as this one was from the previous one.
                ahead = BLOCK if mark is None else base + start - mark
                mark = base + position
            available, buffer = (stop if stop > available else available), b""
        if isinstance(problem, BaseException):
            raise problem
        if problem == AFTER_END:
            if not concatenated:
                if zeros * BLOCK == len(END) or (base + position) % RECORD == 0:  # not zeros that overwrote members
                    yield from taker.complete()
                raise _after_end(url, base + position, zeros)
            zeros = 0
            if ledger is not None:
                ledger.count(joined=1)
            continue
        if problem:
            pieces = chain([buffer[position:]], iter(lambda: stream.read(PIECE) or b"", b""))
            if problem == JUNK and is_pixz_index(pieces):
                rest, base, position, chunk = b"", base + position, 0, b""
                break
            if base + position == 0 and problem == "bad header checksum":
                problem = not_an_archive(buffer, url)
            raise TarError(problem, url=url, offset=base + position)
        if ahead > PIECE:
            ahead = PIECE
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
        buffer = rest + (chunk if len(chunk) >= position + missing else _with_more(stream, chunk, position + missing))
    if chunk is None:
        raise TarError(NOT_YET, url=url, offset=base)
    if zeros and is_pixz_index([rest]):
        rest = b""
    _check_end(rest, base, position, zeros, url, end)
    if not concatenated:
        _check_padding(base + len(rest), zeros * BLOCK + len(rest), url)


def _name_of(stream: Any) -> str | None:
    name = getattr(stream, "name", None)
    return name if isinstance(name, str) else None


def scan_whole(buffer: bytes, position: int, zeros: int, limit: int) -> tuple[list[ScannedMember], Reached]:
    """Return the members that are complete in *buffer*, as ``scan`` returns them, and the state after them."""
    members, position, need, zeros, problem = scan(buffer, position, zeros, limit, True)
    last = members.pop() if members and is_apart(members[-1], len(buffer)) else None
    return members, (position, need, zeros, problem, last)


def scan_through(buffer: bytes, zeros: int, limit: int) -> tuple[list[ScannedMember], int, int, int, str | None]:
    """Return the result of ``scan`` from the beginning of *buffer*, over all concatenated archives in it."""
    members, position, need, zeros, problem = scan(buffer, 0, zeros, limit)
    while problem == AFTER_END:
        more, position, need, zeros, problem = scan(buffer, position, 0, limit)
        members += more
    return members, position, need, zeros, problem


def _read_rest(
    stream: Any, name: str, begun: bytes, size: int, url: str | None, offset: int, max_ratio: float | None
) -> bytes:
    """Read the rest of the member at *offset*, which has *size* bytes and begins with *begun*; return all its bytes.

    A decompression bomb is passed over, and then raises UnresolvedError.
    """
    parts, held = [begun] if begun else [], len(begun)
    try:
        while held < size:
            data = stream.read(min(size - held, MAX_READ))
            if not data:
                raise TarError(NOT_YET if data is None else "truncated in this member", url=url, offset=offset)
            parts.append(data)
            held += len(data)
            if reason := bomb_in(stream, held, max_ratio):
                parts.clear()
                _pass_over(stream, size - held, url, offset)
                raise UnresolvedError(reason)
        return b"".join(parts)
    except MemoryError:
        origin = ": ".join(filter(None, (url, f"offset {offset}")))
        raise MemoryError(f"{origin}: {visible(name)}, {size:,} bytes, does not fit into memory") from None


def _with_more(stream: Any, data: bytes, size: int) -> bytes:
    """Return *data* and what follows it in *stream*, *size* bytes if it has as many now: headers are parsed whole."""
    parts, held = [data], len(data)
    while held < size and (data := stream.read(size - held)):
        parts.append(data)
        held += len(data)
    return b"".join(parts)


def _pass_over(stream: Any, size: int, url: str | None, offset: int) -> None:
    """Pass over the last *size* bytes of the member at *offset*; nothing if *size* is not positive."""
    if size <= 0:
        return
    if stream.seekable():
        stream.seek(size - 1, 1)
        size = 1
    while size:
        data = stream.read(min(size, PIECE))
        if not data:
            raise TarError(NOT_YET if data is None else "truncated in this member", url=url, offset=offset)
        size -= len(data)


def _after_end(url: str | None, offset: int, zeros: int) -> TarError:
    """Return the error for the member at *offset*, after this number of *zeros* blocks."""
    reason = (
        f"{AFTER_END} at offset {offset - BLOCK * zeros}: the archive was damaged, or archives were concatenated; "
        "`--ignore-zeros` (concatenated=True) reads them as one"
    )
    return TarError(reason, url=url, offset=offset)


def _check_end(rest: bytes, base: int, missing: int, zeros: int, url: str | None, end: str) -> None:
    """Raise TarError unless the archive may end after *zeros* blocks and *rest*, which starts at offset *base*."""
    if base + len(rest) == 0:
        raise TarError("empty input, not a tar archive", url=url)
    if base == 0 and not zeros and not missing and len(rest) < BLOCK:
        raise TarError(not_an_archive(rest, url), url=url, offset=0)
    if zeros and any(rest):
        raise TarError(JUNK, url=url, offset=base)
    if not zeros and rest:
        raise TarError("truncated in a header or its padding", url=url, offset=base)
    if not zeros and end != "optional":
        raise TarError(NO_END, url=url, offset=base)
    padding = zeros * BLOCK + len(rest)
    if zeros * BLOCK == base and padding == RECORD:
        warn_of_zeros(url or "the archive")
    elif zeros * BLOCK == base and padding > len(END):
        raise TarError(
            f"only zeros, {padding} bytes: overwritten, or an empty archive of another program", url=url, offset=0
        )


def warn_of_zeros(name: str) -> None:
    """Log a warning that a file has only the zeros that GNU tar writes for an archive without members."""
    import logging

    words = f"only zeros, {RECORD} bytes: an archive without members, or a shard that was overwritten"
    logging.getLogger("tarshards").warning("%s: %s", name, words)


def _check_padding(size: int, padding: int, url: str | None) -> None:
    """Raise TarError for more bytes of zeros at the end of an archive of *size* bytes than writers leave."""
    if padding > most_end(size):
        reason = f"{padding} bytes of zeros at the end, more than the {most_end(size)} that writers leave"
        reason += ": members were overwritten, or the file is padded; `--ignore-zeros` (concatenated=True) reads it"
        raise TarError(reason, url=url, offset=size - padding)


def not_an_archive(head: bytes, url: str | None = None) -> str:
    """Return the message that data beginning with *head* is not an archive, and what it is if recognized.

    Without a magic, the suffix of *url* is believed.

    >>> not_an_archive(b"<!DOCTYPE html><title>Log in</title>"), not_an_archive(b"set-000.tar\\nset-001.tar\\n")
    ('an HTML page, not a tar archive', 'a list of names, to be read as @FILE, not a tar archive')
    """
    text = head[:BLOCK].lstrip().lower()
    for beginning, kind in OTHERS.items():
        if text.startswith(beginning):
            return f"{kind}, not a tar archive"
    if b".tar" in text.partition(b"\n")[0] and b"\0" not in text:
        return "a list of names, to be read as @FILE, not a tar archive"
    for suffix, kind in SUFFIXES.items():
        if (url or "").partition("?")[0].lower().endswith(suffix):
            return f"{kind} by its name, not a tar archive"
    return f"{'' if len(head) >= BLOCK else 'shorter than a header, '}not a tar archive"


def pack_header(name: str, size: int) -> bytes:
    """Return the header of a regular file: ustar, preceded by a pax header if ustar cannot hold the name or size.

    Time, owner and mode are fixed, so the same members give the same bytes.
    """
    return plain_header(name, size) or _pax_header(name, size)


#: The end of an archive whose writer failed: a header without its data. Most readers accept an archive that just stops.
CUT = pack_header("truncated.here", BLOCK)


def pack_members(key: str, fields: tuple[str, ...], values: list[bytes]) -> list[bytes]:
    """Return the members of a sample in pieces to write: one bytes object, or else header, data and padding of each.

    Values that carry the headers of the members from which they come keep them.

    Raises SampleError for a name that is not text: with a surrogate that does not stand for a single byte.
    """
    pieces: list[bytes] = []
    try:
        if (packed := plain_members(key, fields, values, LARGE)) is not None:
            return [packed]
        for field, value in zip(fields, values):
            name, headers = f"{key}.{field}", getattr(value, "headers", None)
            header = pack_header(name, len(value)) if headers is None else kept_headers(headers, name, len(value))
            pieces += [header, value, bytes(padding(len(value)))]
    except UnicodeEncodeError as error:
        reason = f"a name with a lone surrogate, {error.object[error.start]!a}, which UTF-8 cannot encode"
        raise SampleError(reason, key=visible(key)) from error
    return pieces


def kept_headers(headers: bytes, name: str, size: int) -> bytes:
    """Return the *headers* of a member, or, if *name* or *size* differs, headers of a regular file with its metadata.

    The metadata are its mode, owner, times and pax records. Raises SampleError if Python's tarfile cannot read them.
    """
    if scan(headers, 0, 0, size)[0] == [(name, 0, len(headers), len(headers) + size, "")]:
        return headers
    import tarfile

    no_map = BytesIO(headers + b"0\n".ljust(BLOCK, b"\0"))  # of a sparse member, whose map may follow its headers
    try:
        with tarfile.open(fileobj=no_map, mode="r:", encoding="utf-8") as archive:
            info: Any = archive.next()
    except (tarfile.TarError, ValueError) as error:
        raise SampleError(f"headers whose metadata cannot be kept: {error}", key=visible(name)) from error
    info.type, info.linkname = tarfile.REGTYPE, ""
    info.pax_headers = {record: value for record, value in info.pax_headers.items() if not DEFINING.fullmatch(record)}
    return _pax_header(name, size, info)


def _pax_header(name: str, size: int, info: Any = None) -> bytes:
    import tarfile

    info = info or tarfile.TarInfo()
    info.name, info.size = name, size
    made: bytes = info.tobuf(tarfile.PAX_FORMAT, "utf-8")
    return made


def end_of(size: int) -> bytes:
    """Return the zeros that end an archive whose members take *size* bytes: END, and the rest of the last record.

    GNU tar writes whole records of 20 blocks, and ``tar --delete`` loses members of an archive that ends otherwise. An
    archive without members has no record: longer files of zeros are not taken for one.

    >>> len(end_of(1024)), len(end_of(9216)), len(end_of(9728)), len(end_of(0))
    (9216, 1024, 10752, 1024)
    """
    return END + bytes(-(size + len(END)) % RECORD) if size else END


def padding(size: int) -> int:
    """Return the number of zero bytes that fill *size* bytes of data up to the next block.

    >>> padding(1), padding(512)
    (511, 0)
    """
    return -size % BLOCK
