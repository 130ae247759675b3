"""Response bodies that are never silently short: a body that breaks off is resumed at the exact byte."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager, suppress
from hashlib import blake2b
from itertools import pairwise
from threading import Lock
from time import monotonic
from typing import Any

from tarshards.errors import OpenError
from tarshards.parallel.forks import PerProcess
from tarshards.storage import connections, traffic, tuning
from tarshards.storage.cache import Block, BlockCache
from tarshards.storage.connections import Origin, Response, StalledError
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
from tarshards.storage.streams import BUFFER, PIECE, encoded
from tarshards.storage.wire import Steps, Task, calling, drop, loading, run, start

HEAD = 1024  # bytes at the beginning of a file that are fetched with its metadata


class Transfer:
    """A body that is read sequentially, by as many requests as needed, up to *end* if that is known.

    Subclasses send the requests, and check that a response continues the body. Reading raises OpenError.
    """

    def __init__(self, address: Address, begin: int, end: int | None, response: Response | None = None):
        self.address = address
        self.name: str = address.name
        self.begin = self.position = begin
        self.end = end
        self._response = response
        self._buffer = memoryview(b"")
        self._patience = Patience(address)

    def open(self) -> Steps[None]:
        """Send the first request."""
        yield from self._patience.repeat(self._begin, self._offset)

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
        yield from ()
        return False

    def _read_into(self, view: memoryview) -> Steps[int]:
        return (yield from self._patience.repeat(lambda: self._receive(view), self._offset)) if len(view) else 0

    def _receive(self, view: memoryview) -> Steps[int]:
        """Read the next bytes into *view*, advance the position by their number, and return it."""
        try:
            response = self._response or (yield from self._begin())
            count = yield from response.receive(view)
            if not count and self.end is not None:
                raise ConnectionError(f"the answer ended before its {self.end} bytes")
        except BaseException:
            self.close()
            raise
        self.position += count
        return count

    def _begin(self) -> Steps[Response]:
        self._response = yield from self._connect()
        return self._response

    def _connect(self) -> Steps[Response]:
        """Return a response that begins at *position*."""
        raise NotImplementedError

    def _offset(self) -> int | None:
        return self.position or None

    def close(self) -> None:
        """Close the current response, if there is one."""
        if self._response is not None:
            self._response.close()
            self._response = None

    def error(self, reason: str) -> OpenError:
        return OpenError(reason, url=self.name, offset=self._offset())


class WholeTransfer(Transfer):
    """A whole file; its length may be unknown, and its server need not support ranges."""

    version: Version | None = None

    def __init__(self, address: Address):
        super().__init__(address, 0, None)

    def _connect(self) -> Steps[Response]:
        headers: dict[str, str] = {}
        if self.position:
            validator = self.version and self.version.validator
            if validator is None:
                raise self.error("broke off, and cannot be resumed: the server sent no ETag and no Last-Modified")
            headers |= {"Range": f"bytes={self.position}-", "If-Range": validator}
        response = yield from self.address.ask(headers)
        yield from self._check(response)
        return response

    def take(self, response: Response) -> Steps[None]:
        """Read the first response, which was asked for elsewhere."""
        yield from self._check(response)
        self._response = response

    def _check(self, response: Response) -> Steps[None]:
        """Advance *response* to the position, if it is of the same version; else raise OpenError, and close it."""
        try:
            yield from check_body(response, self.name, self.version)
            if self.version is None:
                if response.status != 200:
                    raise self.error(f"unexpected status {response.status}")
                self.end = response.length
                self.version = Version.of(response, -1 if self.end is None else self.end)
            elif response.status == 206:
                found = range_of(response, self.position)
                if found is None or self.end not in (None, found.size):
                    raise self.error(f"broke off, and cannot be resumed: {no_range(response)}")
                if found[1:] != self.version[1:]:
                    raise self.error(CHANGED)
                self.end = found.size
            elif Version.of(response, -1 if response.length is None else response.length) != self.version:
                raise self.error(CHANGED)
            else:
                yield from self._skip(response)
        except BaseException:
            response.close()
            raise

    def _skip(self, response: Response) -> Steps[None]:
        """Skip the bytes before the position: the server supports no ranges and sends the whole body again."""
        skipped, passed = 0, memoryview(bytearray(BUFFER))
        while skipped < self.position:
            count = yield from response.receive(passed[: self.position - skipped])
            if not count:
                raise ConnectionError("the answer ended again before the bytes that were read already")
            skipped += count


class RangeTransfer(Transfer):
    """The bytes of a file from *begin* to *end*, of *version*, or else of the version of the first response."""

    end: int
    slot: Admission | None = None
    _moves = 0

    def __init__(
        self, address: Address, begin: int, end: int, version: Version | None, response: Response | None = None
    ):
        super().__init__(address, begin, end, response)
        self.version = version
        if response is not None:
            response.leaves_stalled = True

    def _share(self, view: memoryview) -> Steps[bool]:
        if self.slot is None or self.version is None or len(view) < 2 * tuning.WINDOW_BYTES:
            return False
        if not self.slot.is_late(len(view)):
            return False
        self.close()
        count = max(1, self.address.location.remote.connections // 2)
        size = max(tuning.WINDOW_BYTES, -(-len(view) // count))
        parts = _Parts(self.address, self.position, view, self.version, size)
        try:
            yield from parts.settle(self.version)
        finally:
            parts.drop()
        self.position += len(view)
        return True

    def _receive(self, view: memoryview) -> Steps[int]:
        try:
            return (yield from super()._receive(view))
        except StalledError:
            self._moves += 1
            traffic.count("retries")
            return (yield from self._receive(view))

    def _connect(self) -> Steps[Response]:
        response = yield from ask_for(self.address, self.position, self.end)
        response.leaves_stalled = self._moves < tuning.MOST_MOVES
        try:
            yield from check_body(response, self.name, self.version)
            found = range_of(response, self.position)
            if found is None:
                is_other = self.version is not None and Version.of(response, self.version.size) != self.version
                raise self.error(CHANGED if is_other else no_range(response))
            if self.version is None:
                self.version, self.end = found, min(self.end, found.size)
            elif found != self.version:
                raise self.error(CHANGED)
        except BaseException:
            response.close()
            raise
        return response


class _Parts:
    """Works that fill *view* with the bytes of a file from *begin* on, *size* bytes each.

    Without a *version*, the file may end before the view does. They are admitted before requests that are made ahead.
    """

    def __init__(self, address: Address, begin: int, view: memoryview, version: Version | None, size: int):
        cuts = [*range(0, len(view), size), len(view)]
        self._transfers = [RangeTransfer(address, begin + a, begin + b, version) for a, b in pairwise(cuts)]
        views = [view[a:b] for a, b in pairwise(cuts)]
        self._works = [start(_fill(each, part)) for each, part in zip(self._transfers, views)]

    def settle(self, version: Version) -> Steps[None]:
        """Wait for the parts that the file has; raise the error of one that cannot be read, or of another version."""
        for transfer, work in zip(self._transfers, self._works):
            if transfer.begin < version.size:
                yield work
                work.result()
                if transfer.version != version:
                    raise transfer.error(CHANGED)

    def drop(self) -> None:
        """Stop fetching the parts."""
        for work in self._works:
            if not work.done():
                drop(work)


def _fill(transfer: RangeTransfer, view: memoryview) -> Steps[None]:
    slot = yield from admit(transfer.address, len(view), is_awaited=True)
    try:
        yield from transfer.fill(view)
    finally:
        transfer.close()
        slot.leave()


class Admission:
    """The right to have one of the requests of a process to a server under way: for *size* bytes, at most *most*."""

    def __init__(self, gate: Gate, size: int, most: int, soonest: float):
        self._gate = gate
        self._soonest = soonest
        self.most = most
        self.is_large = size >= tuning.REQUEST_BYTES // 4
        self.most_large: int = most if soonest > tuning.FAR_SECONDS else max(1, most // 2)
        self._time, self._rest, self.size = monotonic(), size, size
        self.begun = self._time

    def is_late(self, rest: int) -> bool:
        """Return whether idle connections would bring the *rest* of a large request much sooner.

        An epoch ends with its slowest request: the connection resends lost packets one after the other, while other
        connections are idle.
        """
        took, came = monotonic() - self._time, self._rest - rest
        if not self.is_large or took < max(tuning.LATE_SECONDS, 2 * self._soonest):
            return False
        self._time, self._rest = self._time + took, rest
        pace, others = took / max(came, 1), self._gate.pace
        are_idle = 2 * self._gate.large <= self.most_large
        return are_idle and pace > 2 * others > 0 and rest * pace > max(tuning.LATE_SECONDS, 5 * self._soonest)

    def leave(self) -> None:
        self._gate.leave(self)


class Gate:
    """The requests of a process to one server: as many as there may be connections are under way, others wait in order.

    Those whose reader waits for them come before those that are made ahead. Large requests to a near server use half of
    the connections, which fill the link; more would overflow its buffers. *pace* is the mean of large requests that
    ended, in seconds a byte.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._count, self.large = 0, 0
        self.pace = 0.0
        self._waiting: list[deque[tuple[Admission, Future[None]]]] = [deque(), deque()]  # awaited ones first

    def enter(self, slot: Admission, is_awaited: bool) -> Steps[None]:
        """Wait until the request of *slot* may be sent."""
        with self._lock:
            if self._admit(slot):
                return
            admitted: Future[None] = Future()
            waiting = self._waiting[not is_awaited]
            waiting.append((slot, admitted))
        try:
            yield admitted
        except BaseException:
            with self._lock:
                is_waiting = (slot, admitted) in waiting
                if is_waiting:
                    waiting.remove((slot, admitted))
            if not is_waiting:
                slot.leave()
            raise
        slot.begun = slot._time = monotonic()

    def _admit(self, slot: Admission) -> bool:
        if self._count >= slot.most or (slot.is_large and self.large >= slot.most_large):
            return False
        self._count += 1
        self.large += slot.is_large
        return True

    def leave(self, slot: Admission) -> None:
        with self._lock:
            self._count -= 1
            if slot.is_large:
                self.large -= 1
                pace = (monotonic() - slot.begun) / slot.size
                self.pace += (pace - self.pace) / 8 if self.pace else pace
            admitted = []
            for waiting in self._waiting:
                for pair in [pair for pair in waiting if self._admit(pair[0])]:
                    waiting.remove(pair)
                    admitted.append(pair[1])
        for each in admitted:
            each.set_result(None)


_gates: PerProcess[dict[Origin, Gate]] = PerProcess(lambda: defaultdict(Gate))


def admit(address: Address, size: int, *, is_awaited: bool = False) -> Steps[Admission]:
    """Wait until a request for *size* bytes may be sent; return its slot, which ``leave`` frees."""
    url = yield from address.find_url()
    gate = _gates()[Origin.of(url)]
    slot = Admission(gate, size, address.location.remote.connections, connections.soonest(url))
    yield from gate.enter(slot, is_awaited)
    return slot


def begin_transfer(address: Address, size: int) -> Steps[WholeTransfer | RangeTransfer]:
    """Open the first *size* bytes of a file, or the whole file if ranges of it cannot be read.

    Ranges can be read if the server supports them and sends a validator, which shows that other ranges are of the same
    version.
    """

    def begin() -> Steps[WholeTransfer | RangeTransfer]:
        try:
            response = yield from ask_for(address, 0, size)
        except StatusError as error:
            if error.code not in (400, 416, 501):  # an empty file has no ranges
                raise
            response = yield from address.ask({})
        if response.status == 206:
            version = range_of(response, 0)
            if version is not None and version.validator is not None:
                try:
                    yield from check_body(response, address.name, None)
                except BaseException:
                    response.close()
                    raise
                return RangeTransfer(address, 0, min(size, version.size), version, response)
            response.close()
            response = yield from address.ask({})
        whole = WholeTransfer(address)
        yield from whole.take(response)
        return whole

    return (yield from Patience(address).repeat(begin))


def read_whole(address: Address, most: int, allocate: Callable[[int], Any] = bytearray) -> Steps[Any]:
    """Return the bytes of a file, no more than *most*, in a buffer from ``allocate(size)`` if their number is known.

    A long file is fetched in parts over several connections. The parts wait for a connection in the order of the
    readers, so that files read one after the other arrive in that order.
    """
    try:
        return (yield from _read_parts(address, most, allocate))
    except OpenError as error:
        if error.reason != CHANGED:
            raise
    with closing(WholeTransfer(address)) as transfer:
        yield from transfer.open()
        return (yield from _read_all(transfer, most))


def _read_all(transfer: WholeTransfer, most: int) -> Steps[bytes]:
    refuse_encoded(transfer.version, transfer.name)
    pieces, held = [], 0
    while held < most:
        view = memoryview(bytearray(min(PIECE, most - held)))
        done = yield from transfer.fill(view)
        pieces.append(view[:done])
        held += done
        if done < len(view):
            break
    return b"".join(pieces)


@contextmanager
def _sharing_idle(url: str) -> Iterator[Callable[[], int]]:
    """Count a reader of a whole file; yield a function that returns its share of the idle connections."""
    key = Origin.of(url)
    lock, readers = _whole_readers()
    with lock:
        readers[key] += 1
    try:
        yield lambda: connections.spare(url) // readers[key]
    finally:
        with lock:
            readers[key] -= 1


_whole_readers: PerProcess[tuple[Any, Counter[Origin]]] = PerProcess(lambda: (Lock(), Counter()))


def _read_parts(address: Address, most: int, allocate: Callable[[int], Any]) -> Steps[Any]:
    """Return the bytes as ``read_whole`` does; raise OpenError if the file changes while it is read.

    Readers share the idle connections. Small parts over many connections arrive soonest, as each is slow at its start.
    If the file has a share of several connections, each requests a part before the size of the file is known.
    """
    url = yield from address.find_url()
    soonest = connections.soonest(url)
    part, window = (4 if soonest > tuning.FAR_SECONDS else 1) * tuning.FIRST_BYTES, tuning.WINDOW_BYTES
    share = min(max(1, tuning.FIRST_BYTES // 2 // window), connections.take_share(url))
    with _sharing_idle(url) as idle, ExitStack() as stack:
        first = part
        if max(share, idle()) > 1:
            first = 3 * window if soonest and share == 1 else window  # a used connection brings more at once
        guess = memoryview(bytearray((share - 1) * window))
        guessed = _Parts(address, first, guess, None, window)
        stack.callback(guessed.drop)
        slot = yield from admit(address, first, is_awaited=True)
        is_admitted = stack.enter_context(ExitStack())
        is_admitted.callback(slot.leave)
        beginning = yield from begin_transfer(address, first)
        is_admitted.callback(beginning.close)
        if isinstance(beginning, WholeTransfer):
            return (yield from _read_all(beginning, most))
        refuse_encoded(beginning.version, address.name)
        version = beginning.version
        assert version is not None
        buffer = allocate(min(version.size, most))
        view = memoryview(buffer)
        known = min(first + len(guess), len(view))
        size = max(window, min(part, -(-(len(view) - known) // max(1, idle()))))
        parts = _Parts(address, known, view[known:], version, size)
        stack.callback(parts.drop)
        yield from beginning.fill(view[:first])
        is_admitted.close()
        yield from guessed.settle(version)
        view[first:known] = guess[: max(0, known - first)]
        yield from parts.settle(version)
    return buffer


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
    with closing((yield from begin_transfer(address, HEAD))) as beginning:
        if isinstance(beginning, WholeTransfer):
            return (yield from _read_all(beginning, most))
        refuse_encoded(beginning.version, address.name)
        head = bytearray(min(beginning.end, most))
        yield from beginning.fill(memoryview(head))
    version = beginning.version
    assert version is not None
    size = min(version.size, most)
    cached = cached_block(address, 0, size, version)
    if size == len(head):
        return bytes(head)

    def fetch() -> Steps[bytearray]:
        return head + (yield from read_range(address, len(head), size, version))[0]

    try:
        if cached is None:
            return bytes((yield from fetch()))
        cache, block = cached
        named = blake2b(block.digest.encode() + head, digest_size=16).hexdigest()
        held = yield from cache.fill_mapped(block._replace(digest=named), fetch)
        return bytes(held) if isinstance(held, memoryview) else held
    except OpenError as error:
        if error.reason != CHANGED:
            raise
        return (yield from read_whole(address, most, allocate))


def read_range(
    address: Address, begin: int, end: int, version: Version | None = None
) -> Steps[tuple[memoryview, Version]]:
    """Return the bytes from *begin* to *end*, or to the end of the file, and their version.

    They may be encoded. Raises OpenError if their version is not *version*, or if the server supports no ranges.
    """
    transfer = RangeTransfer(address, begin, end, version)
    transfer.slot = slot = yield from admit(address, end - begin)
    try:
        yield from transfer.open()
        buffer = memory(transfer.end - begin)
        yield from transfer.fill(buffer)
    finally:
        transfer.close()
        slot.leave()
    assert transfer.version is not None
    return buffer, transfer.version


MOST_FREE, LONGEST_FREE = 32, 2 * tuning.REQUEST_BYTES  # pieces of memory that are kept, and bytes of one
_free: list[_Memory] = []


class _Memory(bytearray):
    """Memory that is received into again when nothing refers to it, since the system clears new pages."""

    __slots__ = ()

    def __del__(self, free: list[_Memory] = _free, most: int = MOST_FREE, longest: int = LONGEST_FREE) -> None:
        if 0 < len(self) <= longest and len(free) < most:  # at the interpreter's exit, modules may be gone
            free.append(self)


def memory(size: int) -> memoryview:
    """Return *size* bytes of memory, with any content."""
    if size < tuning.REQUEST_BYTES // 4:
        return memoryview(bytearray(size))
    for number in range(len(_free) - 1, -1, -1):
        with suppress(IndexError):  # another thread took it
            found = _free.pop(number)
            if size <= len(found) <= size + size // 4:
                return memoryview(found)[:size]
            _free.append(found)
    if len(_free) == MOST_FREE:
        with suppress(IndexError):
            _free.pop(0).clear()
    return memoryview(_Memory(-(-size // BUFFER) * BUFFER))[:size]


def through_cache(
    address: Address, begin: int, end: int, version: Version, fetch: Callable[[], Steps[Any]], *, mapped: bool = False
) -> Steps[Any]:
    """Return the bytes from *begin* to *end* of this *version* from the cache, or as the steps of *fetch* do.

    With *mapped* it is a ``MappedBlock`` if the cache has them on its disk.
    """
    cached = cached_block(address, begin, end, version)
    if cached is None:
        return (yield from fetch())
    cache, block = cached
    return (yield from (cache.fill_mapped if mapped else cache.fill)(block, fetch))


def cached_block(address: Address, begin: int, end: int, version: Version) -> tuple[BlockCache, Block] | None:
    """Return the cache and the block for these bytes; None if there is no cache for them."""
    cache = BlockCache.of(address.location.remote)
    url = without_userinfo(address.location.url)
    path, _, query = url.partition("?")
    validator = version.validator
    # With a query, only an ETag identifies a file: files of other queries may have the same time.
    if cache is None or validator is None or (query and validator != version.etag):
        return None
    return cache, Block(path, validator, version.size, begin, end - begin, address.digest)


def refuse_encoded(version: Version | None, name: str) -> None:
    """Raise OpenError if the server has encoded the bytes of a file."""
    if version is not None and version.encoding:
        raise encoded(version.encoding, name, ", or stream a shard (index=False)")


class RemoteRanges(Ranges):
    """A file of a web server, read by range requests, each retried until it is complete.

    Passing a *size* that is known, as from a manifest, saves the request for it; the first response corrects it.
    """

    def __init__(self, address: Address, size: int | None = None):
        self._address = address
        self.name: str = address.name
        self._head: Any = b""
        self._lock = PerProcess(Lock)
        self._asked: PerProcess[list[Task[Any]]] = PerProcess(list)  # for the version, at most once
        self._version: Version | None = None
        self.size = self._open() if size is None else size

    def _open(self) -> int:
        self._head, version = run(read_range(self._address, 0, HEAD))
        self._keep(version)
        return version.size

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
        if self._address.location.remote.cache_dir is None:
            data, version = yield from read_range(self._address, offset, end, self._version)
            self._keep(version)
            return data
        version = self._version or (yield from self._ask())

        def fetch() -> Steps[memoryview]:
            return (yield from read_range(self._address, offset, end, version))[0]

        return (yield from through_cache(self._address, offset, end, version, fetch, mapped=mapped))

    def _ask(self) -> Steps[Version]:
        """Return the version, which is part of the key of a block."""
        asked = self._asked()
        with self._lock():
            if not asked or (asked[0].done() and asked[0].exception() is not None):
                asked[:] = [start(read_range(self._address, 0, 1))]
            work = asked[0]
        yield work
        version: Version = work.result()[1]
        self._keep(version)
        return version

    def drop(self, offset: int, size: int) -> None:
        if self._version is not None:
            cached = cached_block(self._address, offset, offset + size, self._version)
            if cached is not None:
                cached[0].drop(cached[1])

    def _keep(self, version: Version) -> None:
        """Require that all bytes read are of *version*, as they are stored, and set ``size`` to its size."""
        refuse_encoded(version, self.name)
        with self._lock():
            if self._version is None:
                self.size: int = version.size
                self._version = version
            elif version != self._version:
                raise OpenError(CHANGED, url=self.name)

    @property
    def version(self) -> Version | None:
        return self._version

    def expect(self, version: Version | None) -> None:
        if version is not None:
            self._keep(version)

    def is_current(self) -> bool:
        return self._version is None or self._version.validator is not None  # every response is compared with it
