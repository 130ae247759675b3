"""Response bodies that are never silently short: a body that breaks off is resumed at the exact byte."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from ctypes import addressof, c_char
from functools import partial
from hashlib import blake2b
from itertools import pairwise
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from threading import Lock
from typing import Any

from tarshards.errors import OpenError
from tarshards.parallel.forks import PerProcess
from tarshards.storage import traffic, tuning
from tarshards.storage.cache import Block, BlockCache
from tarshards.storage.connections import Response, StalledError
from tarshards.storage.location import Location
from tarshards.storage.ranges import Ranges
from tarshards.storage.redaction import without_userinfo
from tarshards.storage.requests import (
    CHANGED,
    Address,
    Patience,
    StatusError,
    Version,
    ask_for,
    check_body,
    no_range,
    range_of,
)
from tarshards.storage.servers import Admission
from tarshards.storage.streams import BUFFER, PIECE, encoded, keep_memory
from tarshards.storage.wire import Steps, Task, calling, drop, loading, run, start

HEAD = 1024  # bytes at the beginning of a file that are fetched with its metadata


class Transfer:
    """The bytes of a file from *position* to *end*, received in order by as many requests as needed.

    Without *end* it is the whole file, whose length may be unknown, and whose server need not support ranges. Reading
    raises OpenError.
    """

    _slot: Admission | None = None
    _response: Response | None = None
    _moves = 0

    def __init__(self, file: RemoteFile, position: int = 0, end: int | None = None):
        self.file = file
        self.position, self.end = position, end
        self.is_whole = end is None
        self._buffer = memoryview(b"")
        self._patience = Patience(file.address)

    def admit(self, size: int, *, is_awaited: bool = False) -> Steps[None]:
        """Wait until a request for *size* bytes may be sent; it counts until ``close``."""
        server = yield from self.file.address.find_server()
        self._slot = Admission(server, size, self.file.address.location.remote.connections, is_awaited=is_awaited)
        yield from self._slot.enter()

    def open(self) -> Steps[None]:
        """Send the first request."""
        yield from self._patience.repeat(self._begin, self._offset)

    def begin(self, size: int) -> Steps[None]:
        """Request the first *size* bytes of the file, or the whole file if ranges of it cannot be read.

        They can be read if the server supports them and sends a validator, which shows that other ranges are of the
        same version.
        """
        yield from self._patience.repeat(lambda: self._begin_file(size))

    def _begin_file(self, size: int) -> Steps[None]:
        address = self.file.address
        try:
            response = yield from ask_for(address, 0, size)
        except StatusError as error:
            if error.code not in (400, 416, 501):  # an empty file has no ranges
                raise
            response = yield from address.ask({})
        version = range_of(response, 0)
        self.is_whole = version is None or version.validator is None
        self.end = None if self.is_whole else size
        if self.is_whole and response.status == 206:
            response.close()
            response = yield from address.ask({})
        yield from self._accept(response)

    def read(self, size: int) -> bytes:
        """Return at least one byte and at most *size*; none at the end."""
        size = min(size, BUFFER) if self.end is None else min(size, BUFFER, self.end - self.position)
        if not self._buffer:
            self._buffer = memoryview(bytearray(BUFFER))
        view = self._buffer[:size]
        return bytes(view[: run(self._read_into(view))])

    def fill(self, view: memoryview) -> Steps[int]:
        """Fill *view*, or as much of it as there are bytes up to *end*; return their number."""
        begin = self.position
        while (done := self.position - begin) < len(view) and self.position != self.end:
            if not (yield from self._share(view[done:])) and not (yield from self._read_into(view[done:])):
                break
        if self.position == self.end:
            self.close()
        return self.position - begin

    def _share(self, view: memoryview) -> Steps[bool]:
        """Fill *view* over other connections, if that is faster; return whether it did."""
        if self._slot is None or len(view) < 2 * tuning.WINDOW_BYTES or not self._slot.is_late(len(view)):
            return False
        self._end_response()
        count = max(1, self.file.address.location.remote.connections // 2)
        parts = _Parts(self.file, self.position, view, max(tuning.WINDOW_BYTES, -(-len(view) // count)))
        try:
            yield from parts.settle()
        finally:
            parts.drop()
        self.position += len(view)
        return True

    def _read_into(self, view: memoryview) -> Steps[int]:
        return (yield from self._patience.repeat(lambda: self._receive(view), self._offset)) if len(view) else 0

    def _receive(self, view: memoryview) -> Steps[int]:
        """Read the next bytes into *view*, advance the position by their number, and return it."""
        while True:
            try:
                response = self._response or (yield from self._begin())
                count = yield from response.receive(view)
                if not count and self.end is not None:
                    raise ConnectionError(f"the answer ended before its {self.end} bytes")
                self.position += count
                return count
            except StalledError:
                self._end_response()
                self._moves += 1
                traffic.count("retries")
            except BaseException:
                self._end_response()
                raise

    def _begin(self) -> Steps[Response]:
        """Request the bytes from *position* on."""
        headers = {}
        if not self.is_whole:
            headers = {"Range": f"bytes={self.position}-{self.end - 1}"}  # type: ignore[operator]
        elif self.position:
            validator = self.file.version and self.file.version.validator
            if validator is None:
                raise self._error("broke off, and cannot be resumed: the server sent no ETag and no Last-Modified")
            headers = {"Range": f"bytes={self.position}-", "If-Range": validator}
        response = yield from self.file.address.ask(headers)
        yield from self._accept(response)
        return response

    def _accept(self, response: Response) -> Steps[None]:
        """Read on from *response*, if it continues the file's version at *position*; else raise, and close it."""
        file, name = self.file, self.file.name
        try:
            yield from check_body(response, name, file.version)
            known, found = file.version, range_of(response, self.position)
            if self.is_whole and response.status == 206 and known is not None:
                if found is None or self.end not in (None, found.size):
                    raise self._error(f"broke off, and cannot be resumed: {no_range(response)}")
                file.keep(found._replace(size=known.size), self.position)
                self.end = found.size
            elif self.is_whole:
                yield from self._accept_whole(response)
            elif found is None:
                is_other = known is not None and Version.of(response, known.size) != known
                raise self._error(CHANGED if is_other else no_range(response))
            else:
                file.keep(found, self.position)
                self.end = min(self.end or 0, found.size)
        except BaseException:
            response.close()
            raise
        response.leaves_stalled = not self.is_whole and self._moves < tuning.MOST_MOVES
        self._response = response

    def _accept_whole(self, response: Response) -> Steps[None]:
        """Accept a body that begins with the file, and skip the bytes before the position, if there are any."""
        if response.status != 200:
            raise self._error(f"unexpected status {response.status}")
        if self.end is None:
            self.end = response.length
        self.file.keep(Version.of(response, -1 if response.length is None else response.length), self.position)
        skipped, passed = 0, memoryview(bytearray(BUFFER if self.position else 0))
        while skipped < self.position:
            count = yield from response.receive(passed[: self.position - skipped])
            if not count:
                raise ConnectionError("the answer ended again before the bytes that were read already")
            skipped += count

    def _offset(self) -> int | None:
        return self.position or None

    def _end_response(self) -> None:
        if self._response is not None:
            self._response.close()
            self._response = None

    def close(self) -> None:
        """End the request, if there is one."""
        self._end_response()
        if self._slot is not None:
            self._slot.leave()
            self._slot = None

    def _error(self, reason: str) -> OpenError:
        return OpenError(reason, url=self.file.name, offset=self._offset())


class _Parts:
    """Works that fill *view* with the bytes of a file from *begin* on, *size* bytes each.

    The file may end before the view does. They are admitted before requests that are made ahead.
    """

    def __init__(self, file: RemoteFile, begin: int, view: memoryview, size: int):
        self._file = file
        cuts = [*range(0, len(view), size), len(view)]
        self._works = [(begin + a, start(_fill(file, begin + a, view[a:b]))) for a, b in pairwise(cuts)]

    def settle(self) -> Steps[None]:
        """Wait for the parts that the file has; raise the error of one that cannot be read."""
        assert self._file.version is not None
        for begin, work in self._works:
            if begin < self._file.version.size:
                yield work
                work.result()

    def drop(self) -> None:
        """Stop fetching the parts."""
        for _, work in self._works:
            if not work.done():
                drop(work)


def _fill(file: RemoteFile, begin: int, view: memoryview) -> Steps[None]:
    with closing(Transfer(file, begin, begin + len(view))) as transfer:
        yield from transfer.admit(len(view), is_awaited=True)
        yield from transfer.fill(view)


def read_whole(address: Address, most: int, allocate: Callable[[int], Any] = bytearray) -> Steps[Any]:
    """Return the bytes of a file, no more than *most*, in a buffer from ``allocate(size)`` if their number is known.

    A long file is fetched in parts over several connections. The parts wait for a connection in the order of the
    readers, so that files read one after the other arrive in that order.
    """
    try:
        return (yield from _read_parts(RemoteFile(address), most, allocate))
    except OpenError as error:
        if error.reason != CHANGED:
            raise
    with closing(Transfer(RemoteFile(address))) as transfer:
        yield from transfer.open()
        return (yield from _read_all(transfer, most))


def _read_all(transfer: Transfer, most: int) -> Steps[bytes]:
    transfer.file.refuse_encoded()
    pieces, held = [], 0
    while held < most:
        view = memoryview(bytearray(min(PIECE, most - held)))
        done = yield from transfer.fill(view)
        pieces.append(view[:done])
        held += done
        if done < len(view):
            break
    return b"".join(pieces)


def _read_parts(file: RemoteFile, most: int, allocate: Callable[[int], Any]) -> Steps[Any]:
    """Return the bytes as ``read_whole`` does; raise OpenError if the file changes while it is read.

    Readers share the idle connections. Small parts over many connections arrive soonest, as each is slow at its start.
    If the file has a share of several connections, each requests a part before the size of the file is known.
    """
    server = yield from file.address.find_server()
    part, window = (4 if server.is_far else 1) * tuning.FIRST_BYTES, tuning.WINDOW_BYTES
    share = min(max(1, tuning.FIRST_BYTES // 2 // window), server.take_share())
    with server.sharing() as idle, ExitStack() as stack:
        first = part
        if max(share, idle()) > 1:
            first = 3 * window if server.soonest and share == 1 else window  # a used connection brings more at once
        guess = memoryview(bytearray((share - 1) * window))
        guessed = _Parts(file, first, guess, window)
        stack.callback(guessed.drop)
        beginning = stack.enter_context(closing(Transfer(file)))
        yield from beginning.admit(first, is_awaited=True)
        yield from beginning.begin(first)
        if beginning.is_whole:
            return (yield from _read_all(beginning, most))
        buffer = allocate(min(file.refuse_encoded().size, most))
        view = memoryview(buffer)
        known = min(first + len(guess), len(view))
        at_once = max(share, idle())  # connections that still bring its first parts are idle soon
        parts = _Parts(file, known, view[known:], max(window, min(part, -(-(len(view) - known) // at_once))))
        stack.callback(parts.drop)
        yield from beginning.fill(view[:first])
        beginning.close()
        yield from guessed.settle()
        view[first:known] = guess[: max(0, known - first)]
        yield from parts.settle()
    return buffer


def find_version(address: Address) -> Steps[Version | None]:
    """Return the version of a file; raise OpenError if it is missing, or a page of HTML, which its first KiB tells."""
    with closing(Transfer(RemoteFile(address))) as transfer:
        yield from transfer.begin(HEAD)
        if not transfer.is_whole:
            yield from transfer.fill(memoryview(bytearray(HEAD)))  # the connection is kept
        return transfer.file.version


def find_address(location: Location) -> Steps[Address | None]:
    """Return what ``Location.address`` does; a store may be asked for it."""
    if location.family == "fsspec_":
        return (yield from calling(location.address))
    return location.address()


def hold_ahead(location: Location, limit: int) -> Steps[Any]:
    """Return what ``Location.hold`` does; a thread waits only for stores that are not read over our own connections."""
    address = yield from find_address(location)
    if address is None:
        return (yield from loading(location.hold, limit))
    return location.check_length((yield from hold_whole(address, limit + 1)), limit)


def hold_whole(address: Address, most: int, allocate: Callable[[int], Any] = bytearray) -> Steps[Any]:
    """Return the bytes as ``read_whole`` does, or a ``MappedBlock`` if the cache has the file on its disk.

    The first KiB is always requested, and is part of the key in the cache: if the file was replaced, it differs even if
    the validator, a time in seconds, is the same.
    """
    if address.location.remote.cache_dir is None:
        return (yield from read_whole(address, most, allocate))
    file = RemoteFile(address)
    with closing(Transfer(file)) as beginning:
        yield from beginning.begin(HEAD)
        if beginning.is_whole:
            return (yield from _read_all(beginning, most))
        size = min(file.refuse_encoded().size, most)
        head = bytearray(min(HEAD, size))
        yield from beginning.fill(memoryview(head))
    if size == len(head):
        return bytes(head)

    def fetch() -> Steps[bytearray]:
        return head + (yield from file.fetch(len(head), size))

    try:
        held = yield from file.find(0, size, fetch, head=head, mapped=True)
    except OpenError as error:
        if error.reason != CHANGED:
            raise
        return (yield from read_whole(address, most, allocate))
    return bytes(held) if isinstance(held, memoryview | bytearray) else held


HUGE = 1 << 21  # bytes of a huge page of Linux
MOST_FREE = 32  # pieces that are kept
MOST_PIECES = 1 << 13  # that there may be: each is up to three mappings, and a process may have 65,530
_free: list[mmap | None] = [None] * MOST_PIECES  # those that are free come last; None: one may be made


class _Piece(c_char * (2 * HUGE)):  # type: ignore[misc]
    """A mapping that bytes are received into again when nothing refers to this object, since new pages are cleared."""

    mapping: mmap

    def __del__(self, free: list[mmap | None] = _free, most: int = MOST_FREE) -> None:
        if free[-most:].count(None):  # at the interpreter's exit, modules may be gone
            free.append(self.mapping)
        else:
            free.insert(0, None)


def memory(size: int) -> memoryview:
    """Return *size* bytes of memory, with any content.

    About 2 MiB and more, as requests have them, are in a huge page if the system has one, and the rest in small ones:
    a page fault for all instead of one for each 4 KiB. Less would leave too much of it unused.
    """
    keep_memory()
    if HUGE * 7 // 8 < size <= 2 * HUGE:
        with suppress(IndexError, OSError):  # there are too many, or the system has no more memory
            mapping = _free.pop() or _map()
            piece = _Piece.from_buffer(mapping, _beginning(mapping))
            piece.mapping = mapping
            return memoryview(piece).cast("B")[:size]
    return memoryview(bytearray(size))


def _map() -> mmap:
    mapping = mmap(-1, 3 * HUGE, MAP_PRIVATE | MAP_ANONYMOUS)
    with suppress(ImportError, OSError):  # the system has none
        from mmap import MADV_HUGEPAGE

        mapping.madvise(MADV_HUGEPAGE, _beginning(mapping), HUGE)
    return mapping


def _beginning(mapping: mmap) -> int:
    """Return where a huge page can begin: before Linux 6.7, a mapping may begin in the midst of one."""
    return -addressof(c_char.from_buffer(mapping)) % HUGE


class RemoteFile(Ranges):
    """A file of a web server: all that is read of it is of one *version*, which the first response says.

    Its *size* is that of the version, or before the one that is passed, as from a manifest. Requests are retried until
    they are complete.
    """

    version: Version | None = None

    def __init__(self, address: Address, size: int = 0):
        self.address = address
        self.name: str = address.name
        self.size: int = size
        self._head: Any = b""
        self._lock = PerProcess(Lock)
        self._asked: PerProcess[list[Task[Any]]] = PerProcess(list)  # for the version, at most once
        self.is_cached: bool = address.location.remote.cache_dir is not None

    @classmethod
    def opened(cls, address: Address, size: int | None) -> RemoteFile:
        """Return a file to be read in any order; without a *size*, its beginning is requested."""
        file = cls(address, size or 0)
        if size is None:
            file._head = run(file.fetch(0, HEAD))
            file.refuse_encoded()
        return file

    def keep(self, version: Version, offset: int = 0) -> None:
        """Raise OpenError unless a response is of the same *version* as all before."""
        with self._lock():
            if self.version is None:
                self.size, self.version = version.size, version
            elif version != self.version:
                raise OpenError(CHANGED, url=self.name, offset=offset or None)

    def refuse_encoded(self) -> Version:
        """Return the version, which is known; raise OpenError if the server has encoded the bytes."""
        assert self.version is not None
        if self.version.encoding:
            raise encoded(self.version.encoding, self.name, ", or stream a shard (index=False)")
        return self.version

    def fetch(self, begin: int, end: int) -> Steps[memoryview]:
        """Return the bytes from *begin* to *end*, or to the end of the file; they may be encoded.

        Raises OpenError if the server supports no ranges.
        """
        with closing(Transfer(self, begin, end)) as transfer:
            yield from transfer.admit(end - begin)
            yield from transfer.open()
            buffer = memory((transfer.end or end) - begin)
            yield from transfer.fill(buffer)
        return buffer

    def find(
        self,
        begin: int,
        end: int,
        fetch: Callable[[], Steps[Any]] | None = None,
        *,
        head: bytes | bytearray = b"",
        mapped: bool = False,
    ) -> Steps[Any]:
        """Return the bytes from *begin* to *end* from the cache, or as the steps of *fetch* do.

        With *mapped* it is a ``MappedBlock`` if the cache has them on its disk. The bytes of a *head* are part of the
        key in the cache.
        """
        fetch = fetch or partial(self.fetch, begin, end)
        if not self.is_cached:
            return (yield from fetch())
        if self.version is None:
            yield from self._ask()
        cached = self._cached(begin, end)
        if cached is None:
            return (yield from fetch())
        cache, block = cached
        if head:
            block = block._replace(digest=blake2b(block.digest.encode() + head, digest_size=16).hexdigest())
        return (yield from (cache.fill_mapped if mapped else cache.fill)(block, fetch))

    def _cached(self, begin: int, end: int) -> tuple[BlockCache, Block] | None:
        """Return the cache and the block for these bytes; None if there is no cache for them."""
        cache, version = BlockCache.of(self.address.location.remote), self.version
        path, _, query = without_userinfo(self.address.location.url).partition("?")
        validator = version and version.validator
        # With a query, only an ETag identifies a file: files of other queries may have the same time.
        if cache is None or version is None or validator is None or (query and validator != version.etag):
            return None
        return cache, Block(path, validator, version.size, begin, end - begin, self.address.digest)

    def _ask(self) -> Steps[None]:
        """Request the version, which is part of the key of a block."""
        asked = self._asked()
        with self._lock():
            if not asked or (asked[0].done() and asked[0].exception() is not None):
                asked[:] = [start(self.fetch(0, 1))]
            work = asked[0]
        yield work
        work.result()

    def read(self, offset: int, size: int) -> bytes:
        return bytes(run(self.take(offset, size, mapped=False)))

    def hold(self, offset: int, size: int) -> Any:
        return run(self.take(offset, size))

    def take(self, offset: int, size: int, *, mapped: bool = True) -> Steps[Any]:
        if offset < 0 or offset + size > self.size:
            raise OpenError(f"no {size} bytes at offset {offset} of {self.size}", url=self.name)
        end = offset + size
        if not size or end <= len(self._head):
            return self._head[offset:end]
        found = yield from self.find(offset, end, mapped=mapped)
        self.refuse_encoded()
        return found

    def drop(self, offset: int, size: int) -> None:
        if (cached := self._cached(offset, offset + size)) is not None:
            cached[0].drop(cached[1])

    def expect(self, version: Version | None) -> None:
        if version is not None:
            self.keep(version)

    def is_current(self) -> bool:
        return self.version is None or self.version.validator is not None  # every response is compared with it
