"""Response bodies that are never silently short: a body that breaks off is resumed at the exact byte."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from hashlib import blake2b
from itertools import pairwise
from threading import Lock
from time import monotonic
from typing import Any

from tarshards.errors import OpenError
from tarshards.parallel.calls import DaemonThreads, settled
from tarshards.parallel.forks import PerProcess
from tarshards.parallel.signals import defer_signals
from tarshards.storage import connections, traffic, tuning
from tarshards.storage.cache import Block, BlockCache
from tarshards.storage.connections import Origin, Response, StalledError
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
from tarshards.storage.streams import encoded, read_at_most

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
        self.is_dropped: bool = False
        self._response = response
        self._buffer: memoryview | None = None
        self._patience = Patience(address, lambda: self.is_dropped)

    def open(self) -> None:
        """Send the first request."""
        self._patience.attempt(self._begin, self._offset)

    def read(self, size: int) -> bytes:
        """Return at least one byte and at most *size*; none at the end."""
        if self._buffer is None:
            self._buffer = memoryview(bytearray(tuning.PIECE))
        view = self._buffer[: size if self.end is None else min(size, self.end - self.position)]
        return bytes(view[: self._readinto(view)])

    def fill(self, view: memoryview) -> None:
        """Fill *view*, or as much of it as there are bytes up to *end*."""
        done = 0
        while done < len(view) and self.position != self.end and not self._share(view[done:]):
            done += self._readinto(view[done : done + tuning.PIECE])
        if self.position == self.end:
            self.close()

    def _share(self, view: memoryview) -> bool:
        """Fill *view* over other connections, if that is faster; return whether it did."""
        return False

    def _readinto(self, view: memoryview) -> int:
        return self._patience.attempt(lambda: self._receive(view), self._offset) if len(view) else 0

    def _receive(self, view: memoryview) -> int:
        """Read the next bytes into *view*, advance the position by their number, and return it."""
        try:
            count = (self._response or self._begin()).readinto(view)
            if not count and self.end is not None:
                raise ConnectionError(f"the answer ended before its {self.end} bytes")
        except BaseException:
            self.close()
            raise
        self.position += count
        return count

    def _begin(self) -> Response:
        self._response = self._connect()
        return self._response

    def _connect(self) -> Response:
        """Return a response that begins at *position*."""
        raise NotImplementedError

    def _offset(self) -> int | None:
        return self.position or None

    def close(self) -> None:
        """Close the current response, if there is one."""
        if self._response is not None:
            self._response.close()
            self._response = None

    def drop(self) -> None:
        """Make a thread that waits for the body fail soon."""
        self.is_dropped = True
        response = self._response
        if response is not None:
            response.abort()

    def error(self, reason: str) -> OpenError:
        return OpenError(reason, url=self.name, offset=self._offset())


class WholeTransfer(Transfer):
    """A whole file; its length may be unknown, and its server need not support ranges."""

    def __init__(self, address: Address, response: Response | None = None):
        super().__init__(address, 0, None)
        self.version: Version | None = None
        if response is not None:
            self._response = self._checked(response)

    def _connect(self) -> Response:
        headers = {"Accept-Encoding": "identity"}
        if self.position:
            validator = self.version and self.version.validator
            if validator is None:
                raise self.error("broke off, and cannot be resumed: the server sent no ETag and no Last-Modified")
            headers |= {"Range": f"bytes={self.position}-", "If-Range": validator}
        return self._checked(self.address.request(headers))

    def _checked(self, response: Response) -> Response:
        """Return *response*, advanced to the position, if it is of the same version; else raise OpenError."""
        try:
            check_body(response, self.name, self.version)
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
                self._skip(response)
        except BaseException:
            response.close()
            raise
        return response

    def _skip(self, response: Response) -> None:
        """Skip the bytes before the position: the server supports no ranges and sends the whole body again."""
        skipped = 0
        while skipped < self.position:
            data = response.read(min(self.position - skipped, 1 << 16))
            if not data:
                raise ConnectionError("the answer ended again before the bytes that were read already")
            skipped += len(data)


class RangeTransfer(Transfer):
    """The bytes of a file from *begin* to *end*, of *version*, or else of the version of the first response."""

    end: int
    large: LargeRequest | None = None
    _moves = 0
    _parts: _RangeTransfers | None = None

    def __init__(
        self, address: Address, begin: int, end: int, version: Version | None, response: Response | None = None
    ):
        super().__init__(address, begin, end, response)
        self.version = version
        if response is not None:
            response.leaves_stalled = True

    def _share(self, view: memoryview) -> bool:
        if self.large is None or self.version is None:
            return False
        if len(view) < 2 * tuning.INITIAL_WINDOW or not self.large.is_late(len(view)):
            return False
        self.close()
        count = max(1, self.address.location.remote.connections // 2)
        # Separate threads: all the others may be waiting for bytes that are fetched here.
        threads = connections.fetching_threads(count, "parts")
        size = max(tuning.INITIAL_WINDOW, -(-len(view) // count))
        self._parts = _RangeTransfers(self.address, self.position, view, self.version, size, threads)
        if self.is_dropped:
            self._parts.drop()
        self._parts.wait(self.version)
        self.position += len(view)
        return True

    def drop(self) -> None:
        super().drop()
        if self._parts is not None:
            self._parts.drop()

    def _receive(self, view: memoryview) -> int:
        try:
            return super()._receive(view)
        except StalledError:
            self._moves += 1
            traffic.count("retries")
            return self._receive(view)

    def _connect(self) -> Response:
        response = ask_for(self.address, self.position, self.end)
        response.leaves_stalled = self._moves < tuning.MOVES
        try:
            check_body(response, self.name, self.version)
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


class _RangeTransfers:
    """Transfers that fill *view* with the bytes of a file from *begin* on; *threads* fetch *size* bytes each.

    Without a *version*, the file may end before the view does.
    """

    def __init__(
        self,
        address: Address,
        begin: int,
        view: memoryview,
        version: Version | None,
        size: int,
        threads: DaemonThreads,
    ):
        cuts = [*range(0, len(view), size), len(view)]
        self._transfers = [RangeTransfer(address, begin + a, begin + b, version) for a, b in pairwise(cuts)]
        views = [view[a:b] for a, b in pairwise(cuts)]
        self._futures = [threads.submit(transfer.fill, part) for transfer, part in zip(self._transfers, views)]

    def wait(self, version: Version) -> None:
        """Wait for the parts that the file has; raise the error of one that cannot be read, or of another version."""
        try:
            for transfer, future in zip(self._transfers, self._futures):
                if transfer.begin < version.size:
                    settled(future).result()
                    if transfer.version != version:
                        raise transfer.error(CHANGED)
        except BaseException:
            self.drop()
            raise

    def drop(self) -> None:
        """Stop fetching the parts."""
        for transfer, future in zip(self._transfers, self._futures):
            with defer_signals():
                cancelled = future.cancel()
            if not cancelled:
                transfer.drop()


def begin_transfer(
    address: Address, size: int, is_over: Callable[[], bool] | None = None
) -> WholeTransfer | RangeTransfer:
    """Open the first *size* bytes of a file, or the whole file if ranges of it cannot be read.

    Ranges can be read if the server supports them and sends a validator, which shows that other ranges are of the same
    version. No more retries are made once *is_over* returns True.
    """
    patience = Patience(address, is_over)

    def begin() -> WholeTransfer | RangeTransfer:
        try:
            response = ask_for(address, 0, size)
        except StatusError as error:
            if error.code not in (400, 416, 501):  # an empty file has no ranges
                raise
            response = address.request({"Accept-Encoding": "identity"})
        if response.status == 206:
            version = range_of(response, 0)
            if version is not None and version.validator is not None:
                try:
                    check_body(response, address.name, None)
                except BaseException:
                    response.close()
                    raise
                return RangeTransfer(address, 0, min(size, version.size), version, response)
            response.close()
            response = address.request({"Accept-Encoding": "identity"})
        return WholeTransfer(address, response)

    return patience.attempt(begin)


def read_whole(address: Address, most: int, allocate: Callable[[int], Any] = bytearray) -> Any:
    """Return the bytes of a file, no more than *most*, in a buffer from ``allocate(size)`` if their number is known.

    A long file is fetched in parts over several connections. The parts wait for a connection in the order of the
    readers, so that files read one after the other arrive in that order.
    """
    try:
        return _read_parts(address, most, allocate)
    except OpenError as error:
        if error.reason != CHANGED:
            raise
    with closing(WholeTransfer(address)) as transfer:
        transfer.open()
        refuse_encoded(transfer)
        return read_at_most(transfer, most, tuning.PIECE)


@contextmanager
def _sharing_idle(address: Address) -> Iterator[Callable[[], int]]:
    """Count a reader of a whole file; yield a function that returns its share of the idle connections."""
    key = Origin.of(address.read_url)
    lock, readers = _whole_readers()
    with lock:
        readers[key] += 1
    try:
        yield lambda: connections.spare(address.read_url) // readers[key]
    finally:
        with lock:
            readers[key] -= 1


_whole_readers: PerProcess[tuple[threading.Lock, Counter[Origin]]] = PerProcess(lambda: (threading.Lock(), Counter()))


def _read_parts(address: Address, most: int, allocate: Callable[[int], Any]) -> Any:
    """Return the bytes as ``read_whole`` does; raise OpenError if the file changes while it is read.

    Readers share the idle connections. Small parts over many connections arrive soonest, as each is slow at its start.
    If the file has a share of several connections, each requests a part before the size of the file is known.
    """
    soonest = connections.soonest(address.read_url)
    part, window = (4 if soonest > tuning.FAR else 1) * tuning.FIRST, tuning.INITIAL_WINDOW
    share = min(tuning.PARTS_AHEAD, connections.take_share(address.read_url))
    threads = connections.fetching_threads(address.location.remote.connections, "parts of files")
    with _sharing_idle(address) as idle, ExitStack() as stack:
        first = part
        if max(share, idle()) > 1:
            first = 3 * window if soonest and share == 1 else window  # a used connection brings more at once
        guess = memoryview(bytearray((share - 1) * window))
        guessed = _RangeTransfers(address, first, guess, None, window, threads)
        stack.callback(guessed.drop)
        beginning, version = stack.enter_context(_beginning(address, first, most))
        if isinstance(beginning, bytes):
            return beginning
        buffer = allocate(min(version.size, most))
        view = memoryview(buffer)
        known = min(first + len(guess), len(view))
        size = max(window, min(part, -(-(len(view) - known) // max(1, idle()))))
        parts = _RangeTransfers(address, known, view[known:], version, size, threads)
        stack.callback(parts.drop)
        beginning.fill(view[:first])
        guessed.wait(version)
        view[first:known] = guess[: max(0, known - first)]
        parts.wait(version)
    return buffer


@contextmanager
def _beginning(address: Address, size: int, most: int) -> Iterator[tuple[RangeTransfer | bytes, Version]]:
    """Open the first *size* bytes of a file; yield the transfer and the version of the file.

    If ranges of the file cannot be read, yield all its bytes instead of a transfer, no more than *most*.
    """
    with closing(begin_transfer(address, size)) as beginning:
        refuse_encoded(beginning)
        version = beginning.version
        assert version is not None
        if isinstance(beginning, WholeTransfer):
            yield read_at_most(beginning, most, tuning.PIECE), version
        else:
            yield beginning, version


def hold_whole(address: Address, most: int, allocate: Callable[[int], Any] = bytearray) -> Any:
    """Return the bytes as ``read_whole`` does, or a ``MappedBlock`` if the cache has the file on its disk.

    The first KiB is always requested, and is part of the key in the cache: if the file was replaced, it differs even if
    the validator, a time in seconds, is the same.
    """
    if address.location.remote.cache_dir is None:
        return read_whole(address, most, allocate)
    with _beginning(address, HEAD, most) as (beginning, version):
        if isinstance(beginning, bytes):
            return beginning
        head = bytearray(min(beginning.end, most))
        beginning.fill(memoryview(head))
    size = min(version.size, most)
    cached = cached_block(address, 0, size, version)
    if size == len(head):
        return bytes(head)
    try:
        if cached is None:
            return bytes(head + read_range(address, len(head), size, version)[0])
        cache, block = cached
        named = blake2b(block.digest.encode() + head, digest_size=16).hexdigest()
        held = cache.hold(block._replace(digest=named), lambda: head + read_range(address, len(head), size, version)[0])
        return bytes(held) if isinstance(held, memoryview) else held
    except OpenError as error:
        if error.reason != CHANGED:
            raise
        return read_whole(address, most, allocate)


def read_range(address: Address, begin: int, end: int, version: Version | None = None) -> tuple[bytearray, Version]:
    """Return the bytes from *begin* to *end*, or to the end of the file, and their version.

    Raises OpenError if their version is not *version*, or if the server supports no ranges.
    """
    transfer = RangeTransfer(address, begin, end, version)
    with large_request(address, end - begin) as transfer.large:
        try:
            transfer.open()
            refuse_encoded(transfer)
            buffer = bytearray(transfer.end - begin)
            transfer.fill(memoryview(buffer))
        finally:
            transfer.close()
    assert transfer.version is not None
    return buffer, transfer.version


@contextmanager
def large_request(address: Address, size: int) -> Iterator[LargeRequest | None]:
    """Wait until a request for *size* bytes may be sent, and count it while it is under way; yield None if it is small.

    Large requests to a near server use half of the connections, which fill the link; more would overflow its buffers.
    Small requests, and those to a far server, need all connections.
    """
    if size < tuning.LARGE:
        yield None
        return
    remote, url = address.location.remote, address.read_url
    soonest = connections.soonest(url)
    most = remote.connections if soonest > tuning.FAR else max(1, remote.connections // 2)
    under_way = _large_requests()[Origin.of(url)]
    with under_way.lock:
        under_way.changed.wait_for(lambda: under_way.count < most)
        under_way.count += 1
    try:
        begun = monotonic()
        yield LargeRequest(under_way, most, size, soonest)
        under_way.end((monotonic() - begun) / size)
    finally:
        with under_way.lock:
            under_way.count -= 1
            under_way.changed.notify()


class _LargeRequests:
    """The large requests of a process to one server; *pace* is the mean of those that ended, in seconds per byte."""

    def __init__(self) -> None:
        self.count = 0
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        self.pace = 0.0

    def end(self, pace: float) -> None:
        """Add the pace of a request that has ended."""
        self.pace += (pace - self.pace) / 8 if self.pace else pace


class LargeRequest:
    """One of at most *most* large requests, for *size* bytes; the fastest response took *soonest* seconds."""

    def __init__(self, under_way: _LargeRequests, most: int, size: int, soonest: float):
        self._under_way, self._most = under_way, most
        self._soonest = soonest
        self._time, self._rest = monotonic(), size

    def is_late(self, rest: int) -> bool:
        """Return whether idle connections would bring the *rest* much sooner.

        An epoch ends with its slowest request: the connection resends lost packets one after the other, while other
        connections are idle.
        """
        took, came = monotonic() - self._time, self._rest - rest
        if took < max(tuning.LATE, 2 * self._soonest):
            return False
        self._time, self._rest = self._time + took, rest
        pace, others = took / max(came, 1), self._under_way.pace
        are_idle = 2 * self._under_way.count <= self._most
        return are_idle and pace > 2 * others > 0 and rest * pace > max(tuning.LATE, 5 * self._soonest)


_large_requests: PerProcess[dict[Origin, _LargeRequests]] = PerProcess(lambda: defaultdict(_LargeRequests))


def through_cache(address: Address, begin: int, end: int, version: Version, fetch: Callable[[], bytearray]) -> Any:
    """Return the bytes from *begin* to *end* of this *version* from the cache, or as *fetch* returns them."""
    cached = cached_block(address, begin, end, version)
    return fetch() if cached is None else cached[0].take(cached[1], fetch)


def held_by_cache(address: Address, begin: int, end: int, version: Version, fetch: Callable[[], bytearray]) -> Any:
    """Return what ``through_cache`` does, or a ``MappedBlock`` if the cache has the bytes on its disk."""
    cached = cached_block(address, begin, end, version)
    return fetch() if cached is None else cached[0].hold(cached[1], fetch)


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


def refuse_encoded(transfer: WholeTransfer | RangeTransfer) -> None:
    """Raise OpenError if the server has encoded the bytes of *transfer*."""
    if transfer.version is not None and transfer.version.encoding:
        raise encoded(transfer.version.encoding, transfer.name, ", or stream a shard (index=False)")


class RemoteRanges(Ranges):
    """A file of a web server, read by range requests, each retried until it is complete.

    Passing a *size* that is known, as from a manifest, saves the request for it; the first response corrects it.
    """

    def __init__(self, address: Address, size: int | None = None):
        self._address = address
        self.name: str = address.name
        self._head: bytes | bytearray = b""
        self._lock, self._asking = PerProcess(Lock), PerProcess(Lock)
        self._version: Version | None = None
        self.size = self._open() if size is None else size

    def _open(self) -> int:
        self._head, version = read_range(self._address, 0, HEAD)
        self._version = version
        return version.size

    def read(self, offset: int, size: int) -> bytes:
        return bytes(self._get(offset, size, through_cache))

    def hold(self, offset: int, size: int) -> Any:
        return self._get(offset, size, held_by_cache)

    def _get(self, offset: int, size: int, from_cache: Callable[..., Any]) -> Any:
        if offset < 0 or offset + size > self.size:
            raise OpenError(f"no {size} bytes at offset {offset} of {self.size}", url=self.name)
        if not size or offset + size <= len(self._head):
            return self._head[offset : offset + size]
        if self._address.location.remote.cache_dir is not None:
            with self._asking():
                if self._version is None:
                    self._keep(read_range(self._address, 0, 1)[1])  # it is part of the key of a block
        version = self._version
        if version is None:
            data, version = read_range(self._address, offset, offset + size)
            self._keep(version)
            return data
        end = offset + size
        return from_cache(
            self._address, offset, end, version, lambda: read_range(self._address, offset, end, version)[0]
        )

    def drop(self, offset: int, size: int) -> None:
        if self._version is not None:
            cached = cached_block(self._address, offset, offset + size, self._version)
            if cached is not None:
                cached[0].drop(cached[1])

    def _keep(self, version: Version) -> None:
        """Require that all bytes read are of *version*, and set ``size`` to its size."""
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
