"""Members whose content is not the bytes after their headers: links to members of the same archive, and sparse ones.

Formats: POSIX.1-2017, pax, "ustar Interchange Format" (linkname) and "pax Extended Header Keywords" (linkpath); GNU tar
manual, "Storing Sparse Files" (old GNU format, PAX 0.0, 0.1 and 1.0). Links resolve as in Python's tarfile: a hard link
to the last member of that name before it, a symbolic link to the last one in the archive.
"""

from __future__ import annotations

import posixpath
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from tarshards.kernels._tar_py import AFTER_END, BLOCK, ELSEWHERE, LINKS, READS, SPARSE, bytes_ahead, parse_size
from tarshards.parallel.forks import cached_property
from tarshards.storage.compression import Decompressed, bomb
from tarshards.storage.streams import read_at_most
from tarshards.tar.read import LARGE, MEMBER_LIMIT, UnresolvedError, padding, scan

if TYPE_CHECKING:
    from tarshards.kernels._tar_py import ScannedMember

SLOT = 24  # bytes of an entry in the map of GNU's old sparse format
EMPTY = 4  # pieces of a sparse member without data: programs end a hole with one or two, links to many cost their sum
MOST_LINKS = 40  # links in a chain: GNU's libc and Linux follow as many
MOST_NAMES = 1 << 12  # bytes of the names in a chain, without those in the first link: a path of Linux has fewer

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


class _Found(NamedTuple):
    """A member: its *step*, its kind, and the offset and number of the bytes that are *stored*."""

    step: Step
    kind: str
    start: int
    stored: int


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
        self._members: dict[int, _Found] = {}  # those to which links have led, by their headers
        self._damaged: dict[int, str] = {}  # what is wrong with sparse members, by their headers
        self._sound: set[int] = set()  # the headers of those whose maps are right

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

    def content(
        self, kind: str, header: int, head: bytes, stored: bytes, unread: Callable[[int, int], Any] | None = None
    ) -> Any:
        """Return the content of a link or sparse member with the headers *head*, at *header*, and data *stored*.

        Returns None for a link to a directory; raises UnresolvedError if there is no content. For *unread* see
        ``read``.
        """
        if kind == SPARSE:
            return expand(head, stored, self._limit, self._bomb)
        if self._read is _refuse:
            raise UnresolvedError(f"{kind} to {link_target(head)!r}, {NO_WAY_BACK}")
        steps = self.find(header)
        return self.read(steps, unread) if steps else None

    def find(self, header: int, *, whole: bool = False) -> list[Step]:
        """Return the steps to the content of the link or sparse member at *header*; an empty list for a directory.

        Raises UnresolvedError if there is no content, for a chain of more than MOST_LINKS links or MOST_NAMES bytes of
        names, and with *whole* also if a sparse member is damaged.
        """
        steps: list[Step] = []
        names, passed = 0, set[int]()  # bytes of the names after those in the first header; the links' headers
        while True:
            found = self._member(header)
            step, kind = found.step, found.kind
            if kind == "directory":
                return []
            if kind and kind not in ELSEWHERE:
                raise UnresolvedError(f"a link to a {kind}")
            if steps:
                names += len(step.name) + len(step.link or "")
            steps.append(step)
            passed.add(header)
            if len(steps) > MOST_LINKS + (step.link is None) or names > MOST_NAMES:
                many = f"{MOST_LINKS} links" if names <= MOST_NAMES else f"{MOST_NAMES} bytes of names"
                first = f"{self._member(steps[0].header).kind} to {steps[0].link!r}"
                raise UnresolvedError(f"{first}, which leads through more than {many}")
            if step.link is None:
                if whole and kind == SPARSE and header not in self._sound:
                    self._expanded(found, checked_map)
                    self._sound.add(header)
                return steps
            path = step.link if kind == "hard link" else posixpath.join(posixpath.dirname(step.name), step.link)
            path = posixpath.normpath(path)
            every = self._offsets.get(path, [])
            before = bisect_left(every, header) if kind == "hard link" else len(every)
            if not before:
                if path == "." or self._is_folder(path):
                    return []
                missing = "not in the archive" + (" before it" if every else "")
                raise UnresolvedError(f"{kind} to {step.link!r}, which is {missing}")
            header = every[before - 1]
            if header in passed:
                raise UnresolvedError(f"{kind} to {step.link!r}, which leads back to it")

    def read(
        self,
        steps: list[Step],
        unread: Callable[[int, int], Any] | None = None,
        begins: Callable[[int, int], bool] = lambda header, start: True,
    ) -> Any:
        """Return the content at the end of *steps*; raise UnresolvedError if a member differs from its step.

        With *unread*, a large member that is not sparse is not read: its content is ``unread(offset, size)``, unless
        that is None. ``begins(header, start)`` returns whether the headers of the member whose data begins at *start*
        begin at *header*, and not before it.
        """
        for header, name, link, _ in steps:
            found = self._member(header)
            if not begins(header, found.start):
                raise UnresolvedError(f"an extended header before that of {name!r}")
            if (found.step.name, found.step.link) != (name, link):
                raise UnresolvedError(f"{found.step.name!r} instead of {name!r}")
        size = steps[-1].size
        if found.kind not in ("", SPARSE):
            raise UnresolvedError(f"{name!r}, a {found.kind}, instead of a file")
        is_large = not found.kind and found.stored == size >= LARGE
        if unread is not None and is_large and (left := unread(found.start, size)) is not None:
            return left
        data = self._expanded(found, expand) if found.kind else self._data(found)
        if len(data) != size:
            raise UnresolvedError(f"{len(data)} bytes in {name!r} instead of {size}")
        return data

    def _data(self, found: _Found) -> bytes:
        data = self._read(found.start, found.stored)
        if len(data) < found.stored:
            raise UnresolvedError(f"{found.step.name!r} is truncated")
        return data

    def _head(self, found: _Found) -> bytes:
        return self._read(found.step.header, found.start - found.step.header)

    def _member(self, header: int) -> _Found:
        """Return the member at *header*, whose headers are read once: many links may lead to it."""
        if header not in self._members:
            member = member_at(self._read, header, self._limit)
            if member is None:
                raise UnresolvedError("no sound header")
            name, first, start, end, kind = member
            head = self._read(header + first, start - first) if kind in ELSEWHERE else b""
            link = link_target(head) if kind in LINKS else None
            size = 0 if link is not None else sparse_size(head) if kind == SPARSE else end - start
            self._members[header] = _Found(Step(header, name, link, size), kind, header + start, end - start)
        return self._members[header]

    def _expanded(self, found: _Found, make: Callable[..., Any]) -> Any:
        """Return what *make* returns of a sparse member; many links may lead to one that is damaged."""
        if (damage := self._damaged.get(found.step.header)) is not None:
            raise UnresolvedError(damage)
        try:
            return make(self._head(found), self._data(found), self._limit, self._bomb)
        except UnresolvedError as error:
            self._damaged[found.step.header] = str(error)
            raise

    @cached_property
    def _offsets(self) -> dict[str, list[int]]:
        """The offsets of the first headers of all members, ascending, by their names."""
        offsets: dict[str, list[int]] = {}
        for name, header in self._names():
            offsets.setdefault(posixpath.normpath(name), []).append(header)
        return offsets

    @cached_property
    def _sorted(self) -> list[str]:
        """The names of all members."""
        return sorted(self._offsets)

    def _is_folder(self, path: str) -> bool:
        """Return whether a member is in the folder *path*."""
        at = bisect_left(self._sorted, f"{path}/")
        return at < len(self._sorted) and self._sorted[at].startswith(f"{path}/")


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
    length = READS[0]
    while True:
        data = read(header, length)
        if not any(data[:BLOCK]):
            return None
        found, position, need, _, problem = scan(data, 0, 0, limit, True)
        if found:
            return found[0]
        if problem or position + need <= length or len(data) < length:
            return None
        length = max(position + need, 2 * length)


def _names(read: Read, limit: int) -> Iterator[tuple[str, int]]:
    """Yield the name of each member, and the offset of its first header."""
    position = zeros = 0
    ahead = READS[0]
    while data := read(position, ahead):
        found, length, need, zeros, problem = scan(data, 0, zeros, limit)
        yield from ((name, position + header) for name, header, *_ in found)
        position += length
        if problem == AFTER_END:
            zeros, ahead = 0, READS[0]
        elif problem or (length < len(data) and len(data) < ahead):
            return
        else:
            ahead = bytes_ahead(READS, ahead, len(found), length, need)


def link_target(head: bytes) -> str:
    """Return the target of a link with the headers *head*."""
    records, long_link, at = _parts(head)
    target = dict(records).get(b"linkpath", long_link)
    if target is None:
        target = head[at + 157 : at + 257].split(b"\0", 1)[0]
    return target.decode("utf-8", "surrogateescape")


def sparse_size(head: bytes) -> int:
    """Return the size of a sparse member's content, in bytes; raise UnresolvedError if *head* lacks it."""
    records, _, at = _parts(head)
    sizes = [value for key, value in records if key in (b"GNU.sparse.size", b"GNU.sparse.realsize")]
    return _number(sizes[-1] if sizes else head[at + 483 : at + 495], is_text=bool(sizes))


def expand(
    head: bytes, stored: bytes, limit: int = MEMBER_LIMIT, bomb: Callable[[int, int], str | None] = bomb
) -> bytes:
    """Return the content of a sparse member with the headers *head* and the data *stored*.

    Raises UnresolvedError as ``checked_map`` does.
    """
    size, pieces, at = checked_map(head, stored, limit, bomb)
    content = bytearray(size)
    for offset, length in pieces:
        content[offset : offset + length] = stored[at : at + length]
        at += length
    return bytes(content)


def checked_map(
    head: bytes, stored: bytes, limit: int, bomb: Callable[[int, int], str | None]
) -> tuple[int, list[tuple[int, int]], int]:
    """Return the size of a sparse member's content, offset and length of each piece, and where the first is *stored*.

    Raises UnresolvedError for a map that contradicts the data or the size, for more than *limit* bytes, and for what
    *bomb* refuses.
    """
    size = sparse_size(head)
    if size > limit:
        raise UnresolvedError("a sparse member larger than the limit")
    if reason := bomb(size, len(stored)):
        raise UnresolvedError(f"a sparse member of {size} bytes, of which {len(stored)} are stored: {reason}")
    pieces, begin = _map(head, stored)
    end, at = 0, begin
    for offset, length in pieces:
        if offset < end or offset + length > size or at + length > len(stored):
            _damaged()
        at, end = at + length, offset + length
    if at != len(stored):
        raise UnresolvedError("a sparse member with more data than its map says")
    if len(pieces) > 2 * (at - begin) + EMPTY:
        _damaged()
    return size, pieces, begin


def _map(head: bytes, stored: bytes) -> tuple[list[tuple[int, int]], int]:
    """Return the offset and length of each piece of a sparse member, and the offset of the first in *stored*."""
    records, _, at = _parts(head)
    named = dict(records)
    if not any(key.startswith(b"GNU.sparse") for key in named):
        slots = [head[at + 386 : at + 482]] + [head[at : at + 504] for at in range(at + BLOCK, len(head), BLOCK)]
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
    if is_text:
        return int(field) if field.isdigit() and len(field) < 20 else _damaged()
    size = parse_size(field)
    return size if size >= 0 else _damaged()


def _damaged() -> int:
    raise UnresolvedError("a sparse member whose map is damaged")


def _parts(head: bytes) -> tuple[list[tuple[bytes, bytes]], bytes | None, int]:
    """Return the pax records in headers, GNU's long name of a link, and the offset of the member's own header."""
    records: list[tuple[bytes, bytes]] = []
    link = None
    at = 0
    while (kind := head[at + 156 : at + 157]) in (b"x", b"X", b"g", b"L", b"K"):
        begin, size = at + BLOCK, _number(head[at + 124 : at + 136])
        if kind == b"K":
            link = head[begin : begin + size].split(b"\0", 1)[0]
        at = begin + size + padding(size)
        while kind in (b"x", b"X") and begin < at - padding(size):
            space = head.index(b" ", begin)
            end = begin + int(head[begin:space])
            key, _, value = head[space + 1 : end - 1].partition(b"=")
            records.append((key, value))
            begin = end
    return records, link, at
