"""Members whose content is not the bytes after their headers: links to members of the same archive, and sparse ones.

Formats: POSIX.1-2017, pax, "ustar Interchange Format" (linkname) and "pax Extended Header Keywords" (linkpath); GNU tar
manual, "Storing Sparse Files" (old GNU format, PAX 0.0, 0.1 and 1.0). Links resolve as in Python's tarfile: a hard link
to the last member of that name before it, a symbolic link to the last one in the archive.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from tarshards.parallel.forks import cached_property
from tarshards.storage.compression import Decompressed, bomb
from tarshards.storage.streams import read_at_most
from tarshards.tar.read import (
    AFTER_END,
    BLOCK,
    LARGE,
    LINKS,
    MEMBER_LIMIT,
    SPARSE,
    Item,
    MemberCounter,
    Taker,
    UnresolvedError,
    padding,
    scan,
)

if TYPE_CHECKING:
    from tarshards.tar._tar_py import ScannedMember

LEAST, MOST = 2 << 10, 1 << 19  # bytes of headers read at once
SLOT = 24  # bytes of an entry in the map of GNU's old sparse format

Read = Callable[[int, int], bytes]  # takes an offset and a size; may return less at the end of the archive


NO_WAY_BACK = (
    "to which pipes and compressed shards cannot go back: read an uncompressed file, or pack with "
    "`tar --hard-dereference --dereference`"
)


class Step(NamedTuple):
    """A member in the chain from a link or sparse member to its content.

    *header* is the offset of its first header. *link* is its link target; None for the last step, the member with the
    content, which has *size* bytes.
    """

    header: int
    name: str
    link: str | None
    size: int


class SpecialMembers:
    """Finds and reads the contents of the links and sparse members of an archive, through *read*.

    All headers, including those of archives that follow, are read once, when the first link is followed. Members after
    damage are found only if *names* is passed, which returns the name of each member and the offset of its first
    header. A sparse member has no content if ``bomb(size, stored)`` returns why not, for the bytes that it holds and
    stores.
    """

    def __init__(
        self,
        read: Read,
        *,
        limit: int = MEMBER_LIMIT,
        names: Callable[[], Iterable[tuple[str, int]]] | None = None,
        bomb: Callable[[int, int], str | None] = bomb,
    ):
        self._read, self._limit, self._bomb = read, limit, bomb
        self._names = names or partial(_names, read, limit)

    @classmethod
    def of(
        cls, stream: Any, reached: int, read: Read | None = None, *, limit: int, max_ratio: float | None
    ) -> SpecialMembers:
        """Return the special members of the archive in *stream*, which was read up to the offset *reached*.

        Without *read*, the stream itself is used if it can seek; links in other streams are not resolved.
        """
        if read is None and stream.seekable():
            read = partial(_read_at, stream, stream.tell() - reached)

        def why_not(size: int, stored: int) -> str | None:
            if isinstance(stream, Decompressed):
                return bomb(size, min(stored, stream.packed), max_ratio or stream.max_ratio)
            return bomb(size, stored, max_ratio)

        return cls(read or _refuse, limit=limit, bomb=why_not)

    def deliver(
        self,
        taker: Taker[Item],
        name: str,
        kind: str,
        head: bytes,
        stored: bytes,
        header: int,
        *,
        leave: Callable[[str, int, int], Any] | None,
        ledger: MemberCounter | None,
    ) -> Iterable[Item]:
        """Return *taker*'s items for a link or sparse member with the headers *head*, at *header*, and data *stored*.

        A link to a directory is skipped, and counted by *ledger*. For *leave* see ``read_archive``.
        """
        try:
            if kind == SPARSE:
                return taker.add(name, expand(head, stored, self._limit, self._bomb), header, head)
            if self._read is _refuse:
                raise UnresolvedError(f"{kind} to {link_target(head)!r}, {NO_WAY_BACK}")
            if steps := self.find(header):
                return taker.add(name, self.read(steps, leave and partial(leave, name)), header, head)
        except UnresolvedError as error:
            return taker.refuse(name, str(error), header)
        if ledger is not None:
            ledger.skip(kind)
        return ()

    def find(self, header: int, *, whole: bool = False) -> list[Step]:
        """Return the steps to the content of the link or sparse member at *header*; an empty list for a directory.

        Raises UnresolvedError if there is no content, and with *whole* also if a sparse member is damaged.
        """
        steps: list[Step] = []
        offsets = [header]
        while True:
            name, head, size, kind = self._member(offsets[-1])
            if kind == "directory":
                return []
            if kind in ("", SPARSE):
                steps.append(Step(offsets[-1], name, None, sparse_size(head) if kind else size))
                if whole and kind == SPARSE:
                    self.read(steps)
                return steps
            if kind not in LINKS:
                raise UnresolvedError(f"a link to a {kind}")
            link = link_target(head)
            link_text = f"{kind} to {link!r}"
            steps.append(Step(offsets[-1], name, link, 0))
            path = link if kind == "hard link" else posixpath.join(posixpath.dirname(name), link)
            path = posixpath.normpath(path)
            every = self._offsets.get(path, [])
            found = [offset for offset in every if offset < offsets[-1]] if kind == "hard link" else every
            if not found:
                if path == "." or path in self._folders:
                    return []
                raise UnresolvedError(f"{link_text}, which is not in the archive" + (" before it" if every else ""))
            if found[-1] in offsets:
                raise UnresolvedError(f"{link_text}, which leads back to it")
            offsets.append(found[-1])

    def read(
        self,
        steps: list[Step],
        leave: Callable[[int, int], Any] | None = None,
        begins: Callable[[int, int], bool] = lambda header, start: True,
    ) -> Any:
        """Return the content at the end of *steps*; raise UnresolvedError if a member differs from its step.

        With *leave*, a large member that is not sparse is not read: its content is ``leave(offset, size)``, unless that
        is None. ``begins(header, start)`` returns whether the headers of the member whose data begins at *start* begin
        at *header*, and not before it.
        """
        for header, name, link, _ in steps:
            found, head, stored, kind = self._member(header)
            if not begins(header, header + len(head)):
                raise UnresolvedError(f"an extended header before that of {name!r}")
            if found != name or (link_target(head) if kind in LINKS else None) != link:
                raise UnresolvedError(f"{found!r} instead of {name!r}")
        size = steps[-1].size
        if kind not in ("", SPARSE):
            raise UnresolvedError(f"{name!r}, a {kind}, instead of a file")
        at = header + len(head)
        if leave is not None and not kind and stored == size >= LARGE and (left := leave(at, size)) is not None:
            return left
        data = self._read(at, stored)
        if len(data) < stored:
            raise UnresolvedError(f"{name!r} is truncated")
        data = expand(head, data, self._limit, self._bomb) if kind else data
        if len(data) != size:
            raise UnresolvedError(f"{len(data)} bytes in {name!r} instead of {size}")
        return data

    def _member(self, header: int) -> tuple[str, bytes, int, str]:
        """Return name, headers, bytes of data, and kind of the member at *header*."""
        found = member_at(self._read, header, self._limit)
        if found is None:
            raise UnresolvedError("no sound header")
        name, first, start, end, kind = found
        return name, self._read(header + first, start - first), end - start, kind

    @cached_property
    def _offsets(self) -> dict[str, list[int]]:
        """The offsets of the first headers of all members, by their names."""
        offsets: dict[str, list[int]] = {}
        for name, header in self._names():
            offsets.setdefault(posixpath.normpath(name), []).append(header)
        return offsets

    @cached_property
    def _folders(self) -> set[str]:
        """The folders of all members."""
        return {name[:end] for name in self._offsets for end, letter in enumerate(name) if letter == "/"}


def _read_at(stream: Any, begin: int, offset: int, size: int) -> bytes:
    """Read *size* bytes at an offset of the archive that begins at *begin*; the stream keeps its position."""
    here = stream.tell()
    stream.seek(begin + offset)
    data = read_at_most(stream, size, size)
    stream.seek(here)
    return data


def _refuse(offset: int, size: int) -> bytes:
    raise UnresolvedError(NO_WAY_BACK)


def member_at(read: Read, header: int, limit: int = MEMBER_LIMIT) -> ScannedMember | None:
    """Return the member whose first header is at *header*, with offsets relative to that; None if there is none."""
    length = LEAST
    while True:
        data = read(header, length)
        if not any(data[:BLOCK]):
            return None
        found, position, need, _, problem = scan(data, 0, 0, limit, True)
        if found:
            return found[0]
        if problem or position + need <= length or len(data) < length:
            return None
        length = position + need


def _names(read: Read, limit: int) -> Iterator[tuple[str, int]]:
    """Yield the name of each member, and the offset of its first header."""
    position = zeros = 0
    ahead = LEAST
    while data := read(position, ahead):
        found, length, need, zeros, problem = scan(data, 0, zeros, limit)
        yield from ((name, position + header) for name, header, *_ in found)
        position += length
        if problem == AFTER_END:
            zeros, ahead = 0, LEAST
        elif problem or (length < len(data) and len(data) < ahead):
            return
        else:
            ahead = max(need, LEAST if length > LARGE * len(found) else min(2 * ahead, MOST))


def link_target(head: bytes) -> str:
    """Return the target of a link with the headers *head*."""
    records, long_link, block = _parts(head)
    target = dict(records).get(b"linkpath", long_link)
    if target is None:
        target = block[157:257].split(b"\0", 1)[0]
    return target.decode("utf-8", "surrogateescape")


def sparse_size(head: bytes) -> int:
    """Return the size of a sparse member's content, in bytes; raise UnresolvedError if *head* lacks it."""
    records, _, block = _parts(head)
    sizes = [value for key, value in records if key in (b"GNU.sparse.size", b"GNU.sparse.realsize")]
    return _number(sizes[-1] if sizes else block[483:495], is_text=bool(sizes))


def expand(
    head: bytes, stored: bytes, limit: int = MEMBER_LIMIT, bomb: Callable[[int, int], str | None] = bomb
) -> bytes:
    """Return the content of a sparse member with the headers *head* and the data *stored*.

    Raises UnresolvedError for a map that contradicts the data or the size, for more than *limit* bytes, and for what
    *bomb* refuses.
    """
    size = sparse_size(head)
    if size > limit:
        raise UnresolvedError("a sparse member larger than the limit")
    if reason := bomb(size, len(stored)):
        raise UnresolvedError(f"a sparse member of {size} bytes, of which {len(stored)} are stored: {reason}")
    pieces, at = _map(head, stored)
    content = bytearray(size)
    end = 0
    for offset, length in pieces:
        if offset < end or offset + length > size or at + length > len(stored):
            _damaged()
        content[offset : offset + length] = stored[at : at + length]
        at, end = at + length, offset + length
    if at != len(stored):
        raise UnresolvedError("a sparse member with more data than its map says")
    return bytes(content)


def _map(head: bytes, stored: bytes) -> tuple[list[tuple[int, int]], int]:
    """Return the offset and length of each piece of a sparse member, and the offset of the first in *stored*."""
    records, _, block = _parts(head)
    named = dict(records)
    if not any(key.startswith(b"GNU.sparse") for key in named):
        slots = [block[386:482]] + [head[at : at + 504] for at in range(head.rindex(block) + BLOCK, len(head), BLOCK)]
        entries = [part[at : at + SLOT] for part in slots for at in range(0, len(part), SLOT)]
        return [(_number(entry[:12]), _number(entry[12:])) for entry in entries if entry[0]], 0
    if named.get(b"GNU.sparse.major") == b"1":
        count, at = _line(stored, 0)
        numbers = []
        for _ in range(2 * count):
            number, at = _line(stored, at)
            numbers.append(number)
        return list(zip(numbers[::2], numbers[1::2])), at + padding(at)
    if b"GNU.sparse.map" in named:
        texts = named[b"GNU.sparse.map"].split(b",") if named[b"GNU.sparse.map"] else []
    else:
        texts = [value for key, value in records if key in (b"GNU.sparse.offset", b"GNU.sparse.numbytes")]
    numbers = [_number(text, is_text=True) for text in texts]
    if len(numbers) % 2:
        _damaged()
    return list(zip(numbers[::2], numbers[1::2])), 0


def _line(stored: bytes, at: int) -> tuple[int, int]:
    """Return the number in the line at an offset, and the offset of the next line."""
    end = stored.find(b"\n", at, at + SLOT)
    return _number(stored[at : max(end, at)], is_text=True), end + 1


def _number(field: bytes, *, is_text: bool = False) -> int:
    """Return a number of the map: decimal text, or as in headers."""
    from tarshards.tar._tar_py import parse_size

    if is_text:
        return int(field) if field.isdigit() and len(field) < 20 else _damaged()
    size = parse_size(field)
    return size if size >= 0 else _damaged()


def _damaged() -> int:
    raise UnresolvedError("a sparse member whose map is damaged")


def _parts(head: bytes) -> tuple[list[tuple[bytes, bytes]], bytes | None, bytes]:
    """Return the pax records in headers, GNU's long name of a link, and the block of the member's own header."""
    records: list[tuple[bytes, bytes]] = []
    link = None
    at = 0
    while (kind := head[at + 156 : at + 157]) in (b"x", b"X", b"g", b"L", b"K"):
        size = _number(head[at + 124 : at + 136])
        body = head[at + BLOCK : at + BLOCK + size]
        if kind == b"K":
            link = body.split(b"\0", 1)[0]
        while kind in (b"x", b"X") and body:
            length = int(body.split(b" ", 1)[0])
            key, _, value = body[:length].split(b" ", 1)[1][:-1].partition(b"=")
            records.append((key, value))
            body = body[length:]
        at += BLOCK + size + padding(size)
    return records, link, head[at : at + BLOCK]
