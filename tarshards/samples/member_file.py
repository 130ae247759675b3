"""Members as seekable files: only the requested bytes of a lazy field are read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from tarshards.errors import OpenError, TarError
from tarshards.samples.fields import FieldNames
from tarshards.samples.keys import KeyRule, Sample, is_reserved
from tarshards.storage import tuning
from tarshards.storage.compression import Decompressed, decompressed
from tarshards.storage.opening import open_shard
from tarshards.storage.ranges import RangedFile, Ranges
from tarshards.storage.streams import PIECE

if TYPE_CHECKING:
    from tarshards.storage.location import Location

FIRST = 1 << 16  # bytes of the first request at a position of a remote member
FACTOR, MOST = 4, 1 << 22  # each consecutive request is larger by this factor, up to this many bytes
HELD = 1 << 23  # bytes of a member kept in memory


class MemberHeaders:
    """The headers of a remote member, to be compared with the index before its first byte is delivered.

    They begin at most *size* bytes before its data; *check* gets these bytes and raises an error if they differ.
    """

    def __init__(self, size: int, check: Callable[[bytes], None]):
        self.size = size
        self.check = check


class HeldRange(NamedTuple):
    """Held bytes of a remote member, and the number of bytes to fetch if reading continues after them."""

    begin: int
    data: bytes
    ahead: int

    @property
    def end(self) -> int:
        return self.begin + len(self.data)


class MemberFile(RangedFile):
    """The bytes of one member as a seekable file, for ``av.open``, ``zipfile`` and others.

    They are the *size* bytes at *offset* of the shard that *ranges* reads. Bytes of a local shard are read on request.
    For a remote shard the first read fetches 64 KiB, and reads that continue from there fetch up to 4 MiB. At most 8
    MiB, and the bytes of ``prefetch``, stay in memory. ``bytes(file)`` is the whole member.

    The file can be pickled; the copy reopens the shard and has the same position. Threads must not share one. Raises
    OpenError if the shard cannot be read or has changed, ShardIndexError if the member differs from the index, and
    TarError if the shard ends before it.
    """

    def __init__(
        self,
        location: Location | None,
        ranges: Ranges,
        offset: int,
        size: int,
        *,
        name: str,
        head: MemberHeaders | None = None,
    ):
        super().__init__(ranges, size)
        self.name = name  #: the member's name in the archive; *size* is its bytes
        self.url: str = ranges.name  #: the shard, without credentials
        self._location, self._offset = location, offset
        self._shard_size, self._version = ranges.size, None
        self._head = head
        self._taken = 0
        self._held: list[HeldRange] = []  # of a remote member, the most recently used last
        self._prefetched: list[HeldRange] = []

    @classmethod
    def of(cls, data: bytes, *, name: str, url: str) -> MemberFile:
        """Return the file of a member whose bytes are in memory."""
        return cls(None, HeldBytes(data, url), 0, len(data), name=name)

    def read1(self, size: int = -1, /) -> bytes:
        """Return the next *size* bytes, 64 KiB for -1, fewer only at the end."""
        return self.read(FIRST if size < 0 else size)

    def __len__(self) -> int:
        return self.size

    def __bool__(self) -> bool:
        return True  # even for a file without bytes

    def __bytes__(self) -> bytes:
        """Return the whole member, independent of the position."""
        self._check_open()
        return self._read(0, self.size)

    def pieces(self) -> Iterator[bytes]:
        """Read the whole member in pieces, independent of the position."""
        self._check_open()
        for position in range(0, self.size, PIECE):
            yield self._read(position, min(PIECE, self.size - position))

    def prefetch(self, offset: int, size: int) -> None:
        """Fetch the *size* bytes at *offset*, before they are read, with one request if the member is remote.

        They are held, regardless of their size, until the next call. A program that knows the range of a group of
        pictures thus fetches no other bytes.
        """
        self._check_open()
        if offset < 0 or size < 0:
            raise ValueError(f"{size} bytes at offset {offset}")
        held, end = [], min(offset + size, self.size)
        if not self._open().remote or offset >= end:
            return
        while offset < end and (found := self._find(offset)) is not None:
            held.append(found)
            offset = found.end
        if offset < end:
            held.append(self._ask(offset, end, FIRST))
        self._prefetched = held

    def close(self) -> None:
        """Release the shard, which others may read, and all held bytes."""
        self._held, self._prefetched, self._ranges, self._head = [], [], None, None
        super().close()

    def __repr__(self) -> str:
        return f"<MemberFile {self.name} of {self.url}, {self.size} bytes>"

    def _open(self) -> Ranges:
        """Return the ranges of the shard; a pickled copy reopens it, and raises OpenError if it has changed."""
        if self._ranges is None:
            assert self._location is not None
            self._ranges = self._location.ranges(self._shard_size)
            self._ranges.expect(self._version)
        return self._ranges

    def _read(self, position: int, size: int) -> bytes:
        if not size:
            return b""
        ranges = self._open()
        if not ranges.remote:
            data = self._take(self._offset + position, size)
            self._taken += size
            if self._taken >= HELD:
                ranges.drop(self._offset, self.size)
                self._taken = 0
            return data
        parts = []
        while size:
            found = self._find(position) or self._fetch(position, size)
            part = found.data[position - found.begin : position - found.begin + size]
            parts.append(part)
            position += len(part)
            size -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _find(self, position: int) -> HeldRange | None:
        """Return the held range with the bytes at *position*, or None."""
        for ranges in self._prefetched, self._held:
            for number, each in enumerate(ranges):
                if each.begin <= position < each.end:
                    ranges.append(ranges.pop(number))
                    return each
        return None

    def _fetch(self, position: int, size: int) -> HeldRange:
        """Fetch the *size* requested bytes at *position*, and bytes that may be requested next."""
        held = self._held + self._prefetched
        before = max((each for each in held if each.end <= position), key=lambda each: each.end, default=None)
        begin, ahead = position, FIRST
        if before is not None and position - before.end <= tuning.FIRST_BYTES // 8:
            ahead = before.ahead
        elif position + FIRST >= self.size:  # the end of a file is often read backwards
            begin = max(0 if before is None else before.end, self.size - FIRST)
        behind = min((each.begin for each in held if each.begin > position), default=self.size)
        fetched = self._ask(begin, min(position + max(size, ahead), behind), min(FACTOR * ahead, MOST))
        if len(fetched.data) <= MOST:
            self._held.append(fetched)
        while sum(len(each.data) for each in self._held) > HELD:
            self._held.pop(0)
        return fetched

    def _ask(self, begin: int, end: int, ahead: int) -> HeldRange:
        """Fetch the bytes from *begin* to *end*."""
        if self._head is not None and begin <= FIRST:  # the same request also fetches the headers
            return HeldRange(0, self._checked(end), ahead)
        self._checked()
        return HeldRange(begin, self._take(self._offset + begin, end - begin), ahead)

    def _checked(self, size: int = 0) -> bytes:
        """Fetch the headers, if not yet compared with the index, and *size* bytes of the member."""
        head = self._head
        if head is None:
            return b""
        data = self._take(self._offset - head.size, head.size + size)
        head.check(data[: head.size])
        self._head = None
        return data[head.size :]

    def _take(self, offset: int, size: int) -> bytes:
        """Read bytes of the shard; raise OpenError if it was modified since it was opened."""
        ranges = self._open()
        data = ranges.read(offset, size) if offset + size <= ranges.size else b""
        ranges.verify()
        if len(data) < size:
            reason = f"the shard ends at {ranges.size} bytes, in the member {self.name}"
            raise TarError(reason, url=self.url, offset=self._offset)
        return data

    def __getstate__(self) -> dict[str, Any]:
        self._check_open()
        self._checked()  # the copy has no index to compare with
        state = {name: value for name, value in vars(self).items() if name not in ("_held", "_prefetched", "_ranges")}
        if self._location is None:
            return state | {"_ranges": self._ranges}
        return state | {"_version": self._version if self._ranges is None else self._ranges.version}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._ranges = None
        self.__dict__.update(state)
        self._held, self._prefetched = [], []


class LazyMembers:
    """The lazy fields, *names*, of a shard that is read as a stream, each as a ``MemberFile``."""

    def __init__(self, location: Location, names: FieldNames, split: KeyRule):
        self._location, self._names, self._split = location, names, split
        self._known: set[str] = set()
        self._is_complete = False  # whether all lazy fields have been seen

    def open(self) -> Any:
        """Return a stream of the shard that can skip unread bytes; raise OpenError if it cannot."""
        location = self._location
        if location.is_stream:
            raise self._refusal("a pipe")
        if location.is_remote:
            self._ranges = ranges = location.ranges()
            stream: Any = MemberFile(location, ranges, 0, ranges.size, name=location.name)
            stream = decompressed(stream, location.name)
        else:
            stream = open_shard(location)
        try:
            if isinstance(stream, Decompressed):
                raise self._refusal("a compressed shard")
            if not stream.seekable():
                raise self._refusal("a pipe")
            if not location.is_remote:
                self._ranges = location.ranges()
        except BaseException:
            stream.close()
            raise
        return stream

    def _refusal(self, what: str) -> OpenError:
        return OpenError(f"lazy= reads members at any offset, which {what} does not allow", url=self._location.name)

    def unread(self, name: str, offset: int, size: int) -> MemberFile | None:
        """Return the file of a large member; None if its field is not lazy."""
        found = self._split(name)
        if found is None or found[1] not in self._names:
            return None
        return MemberFile(self._location, self._ranges, offset, size, name=name)

    def over(self, samples: Iterable[Sample]) -> Iterator[Sample]:
        """Yield *samples*, with small lazy members, which were read with their headers, as files."""
        for sample in samples:
            if not self._is_complete:
                self._known.update(name for name in sample if not is_reserved(name))
                self._is_complete = self._names.lacking(self._known) is None
            for field, value in sample.items():
                if field in self._names and isinstance(value, bytes):
                    name = f"{sample['__key__']}.{field}"
                    sample[field] = MemberFile.of(value, name=name, url=self._location.name)
            yield sample

    def check(self) -> None:
        """Raise SampleError for a lazy field that no sample of the shard has."""
        self._names.check(self._known, self._location.name)


class HeldBytes(Ranges):
    """Bytes in memory; *name* is their shard."""

    remote = False

    def __init__(self, data: bytes, name: str):
        self._data = data
        self.name: str = name
        self.size: int = len(data)

    def read(self, offset: int, size: int) -> bytes:
        return self._data[offset : offset + size]
