"""Read-ahead of remote files: bytes are fetched before they are needed.

``FetchQueue`` decides when a request begins. Its users say which request comes next: ``ForwardReader``, below, reads
files from beginning to end, and ``index.fetch`` reads the blocks of an epoch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from functools import partial
from threading import RLock
from typing import Any, Generic, TypeVar
from weakref import ref

from tarshards.errors import OpenError, TarshardsError
from tarshards.parallel.calls import settled
from tarshards.parallel.forks import cached_property
from tarshards.parallel.signals import defer_signals
from tarshards.storage import traffic, tuning
from tarshards.storage.location import Location
from tarshards.storage.requests import Address
from tarshards.storage.streams import InputStream
from tarshards.storage.transfer import RemoteFile, Transfer, memory
from tarshards.storage.wire import Steps, Task, drop, run, soon, start


class Fetch:
    """One request for about *size* bytes, which count against the budget of a queue until they are released."""

    size = 0
    work: Task[Any] | None = None  # set when the request begins
    counted = 0  # bytes of the budget that it uses now
    is_over = False  # released or dropped

    def settle(self) -> None:
        """Decide what to request. The queue calls this just before the request begins, with its lock held."""


F = TypeVar("F", bound=Fetch)


class FetchQueue(Generic[F]):
    """Makes requests in the order in which *upcoming* returns them; several threads may read from it.

    *upcoming* returns None if no request is known yet; it is called with *lock* held. *run* returns the steps of one
    request, whose result is its bytes. At most *budget* bytes are held or under way, more only if a reader waits for a
    request that does not fit. At most *connections* requests are under way.
    """

    def __init__(
        self, connections: int, budget: int, *, upcoming: Callable[[], F | None], run: Callable[[F], Steps[Any]]
    ) -> None:
        self.budget = budget
        self.held: int = 0
        self.lock: RLock = RLock()
        self._upcoming, self._run = upcoming, run
        self._next: F | None = None  # the next request, if it did not fit into the budget
        self._begun: set[F] = set()  # requests that have begun and are not released
        self._under_way: set[object] = set()  # an object for each request, which its work may hold without a cycle
        self._most = connections
        self._is_closed = False

    def fits(self, fetch: F) -> bool:
        """Return whether *fetch* fits into the budget now; any request fits if nothing else is held."""
        return not self.held or self.held + fetch.size <= self.budget

    def extend(self) -> None:
        """Begin the next requests, as far as the budget allows; call this when *upcoming* has new ones."""
        with self.lock:
            while len(self._under_way) < self._most and not self._is_closed:
                fetch = self._next = self._next or self._upcoming()
                if fetch is None:
                    return
                if fetch.work is None and not fetch.is_over:
                    if not self.fits(fetch):
                        return
                    self._begin(fetch)
                self._next = None

    def take(self, fetch: F) -> Any:
        """Return the result of *fetch*, or raise its error; the request begins now unless it has begun."""
        with self.lock:
            work = fetch.work or self._begin(fetch)
        with defer_signals():
            is_done = work.done()
        if not is_done:
            with traffic.waiting():
                settled(work)
        return work.result()

    def _begin(self, fetch: F) -> Task[Any]:
        fetch.settle()
        fetch.counted = fetch.size
        self.held += fetch.size
        self._begun.add(fetch)
        self._under_way.add(request := object())
        fetch.work = start(self._run(fetch), partial(_end, ref(self), request))
        return fetch.work

    def _end(self, request: object) -> None:
        self._under_way.discard(request)
        with suppress(RuntimeError):  # no thread can be started: who releases a fetch begins the next ones
            soon(self.extend)  # what comes next may have to be asked for

    def release(self, fetch: F) -> None:
        """Return the bytes of *fetch* to the budget and begin the next requests. If it has not begun, it never does."""
        with self.lock:
            self._forget(fetch)
            self.extend()

    def drop(self, fetch: F) -> None:
        """Release *fetch*, and end its request."""
        with self.lock:
            self._forget(fetch)
            if fetch.work is not None:
                drop(fetch.work)

    def _forget(self, fetch: F) -> None:
        self.held -= fetch.counted
        fetch.counted, fetch.is_over = 0, True
        self._begun.discard(fetch)

    def close(self) -> None:
        """Drop all requests, and begin no more."""
        with self.lock:
            self._is_closed = True
            for fetch in list(self._begun):
                self.drop(fetch)


def _end(queue: ref[FetchQueue[Any]], request: object, _: object) -> None:
    """End a request of a queue; its work has no reference to the queue, which may hold the bytes of its work."""
    if (alive := queue()) is not None:
        alive._end(request)


class _NoRangesError(Exception):
    """The server sends the file only as a whole."""


class _RangeFetch(Fetch):
    """The bytes of *file* from *begin* to *end*, or to the end of the file."""

    def __init__(self, file: RemoteFile, begin: int, end: int):
        self.file, self.begin, self.end, self.size = file, begin, end, end - begin

    def fetch(self) -> Steps[Any]:
        """Return its bytes; raise _NoRangesError if the server sends whole files only."""
        file = self.file
        if file.version is None:
            with closing(Transfer(RemoteFile(file.address))) as beginning:  # no more ranges if there are none
                yield from beginning.admit(self.size)
                yield from beginning.begin(1 if file.is_cached else self.end)
                if beginning.is_whole:
                    raise _NoRangesError
                file.expect(beginning.file.version)
                if not file.is_cached:
                    buffer = memory(beginning.end or 0)
                    yield from beginning.fill(buffer)
                    return buffer
        self.end = min(self.end, file.size)
        return (yield from file.find(self.begin, self.end))


class _File:
    """A file and its *fetches* that were not read yet; *requested* is the offset at which the last one ends.

    It *is_opened* once, and *is_cut* if the rest of it is not fetched.
    """

    def __init__(self, location: Location):
        self.location = location
        self.requested = 0
        self.fetches: deque[_RangeFetch] = deque()
        self.has_ranges = True  # whether ranges of it may be requested
        self.is_opened = self.is_cut = False

    @cached_property
    def address(self) -> Address | None:
        return self.location.address()

    @cached_property
    def remote(self) -> RemoteFile:
        """The file itself, if it is read over HTTP."""
        assert self.address is not None
        return RemoteFile(self.address)

    @property
    def is_remote(self) -> bool:
        """Whether it can be read over HTTP, according to its location."""
        try:
            return self.address is not None
        except TarshardsError:  # raised again when it is opened
            return False

    @property
    def is_requested(self) -> bool:
        """Whether no further range can be requested now; after the first, this requires the version of the file."""
        if not self.has_ranges:
            return True
        return bool(self.fetches) if self.remote.version is None else self.requested >= self.remote.size


class ForwardReader:
    """Reads files one after the other, in ranges that are fetched ahead, including those of the files that follow.

    The budget is small at first and doubles with each range that was read, so that reading only a beginning fetches
    little. It grows up to the memory that the first location's ``remote`` allows one of *processes*.
    """

    def __init__(self, locations: Sequence[Location], processes: int = 1):
        remote = locations[0].remote
        self._files = [_File(location) for location in locations]
        self._most = min(remote.budget(processes), 2 * remote.connections * tuning.REQUEST_BYTES)
        budget = min(4 * (tuning.FIRST_BYTES if len(locations) == 1 else tuning.REQUEST_BYTES), self._most)
        self._current = 0  # number of the file that is being read
        self._is_paused = False  # while a server sends a whole file
        self._queue = FetchQueue(remote.connections, budget, upcoming=self._next_fetch, run=_RangeFetch.fetch)

    def opens(self, number: int) -> bool:
        """Return whether ``open`` can open the file of this *number*."""
        return self._files[number].is_remote

    def open(self, number: int) -> InputStream:
        """Return the stream of the file of this *number*; earlier streams of it and of files before end by an error."""
        for earlier in self._files[self._current : number]:
            self.drop(earlier)
        file = self._files[number]
        if file.is_opened or number < self._current:
            self.drop(file)
            file = self._files[number] = _File(file.location)
        file.is_opened = True
        with self._queue.lock:
            self._current = max(self._current, number)
            if file.remote.is_cached and not file.is_requested:
                self._add_fetch(file)
            first = file.fetches[0] if file.fetches else None
            file.has_ranges = first is not None  # until ``_begin`` has found its version
        transfer = self._begin(file) if first is None else self._find_ranges(file, first)
        self._is_paused = transfer is not None and transfer.is_whole
        self._queue.extend()
        return _AheadInput(self, file, transfer)

    def _begin(self, file: _File) -> Transfer:
        """Request the first bytes of a file, which can be read as they arrive."""
        transfer = Transfer(file.remote)
        run(transfer.begin(min(tuning.FIRST_BYTES, self._most)))
        if not transfer.is_whole:
            file.requested, file.has_ranges = transfer.end or 0, True
        return transfer

    def _find_ranges(self, file: _File, first: _RangeFetch) -> Transfer | None:
        """Wait for the first range of a file; return the whole file if its server supports no ranges."""
        try:
            self._queue.take(first)
            return None
        except _NoRangesError:
            self.drop(file)
        except BaseException:
            self.drop(file)
            raise
        transfer = Transfer(RemoteFile(file.remote.address))
        run(transfer.open())
        return transfer

    def take(self, file: _File) -> tuple[Any, _RangeFetch] | None:
        """Return the bytes of the next range of *file*, and their fetch, to be released later; None at the end."""
        with self._queue.lock:
            if file.is_cut:
                reason = "it or a file after it was opened since, so it cannot be read on"
                raise OpenError(reason, url=file.location.name)
            if not file.fetches:
                if file.is_requested:
                    return None
                self._add_fetch(file)  # even if ranges of the files after it use the whole budget
            fetch = file.fetches[0]
        data = self._queue.take(fetch)
        file.fetches.popleft()
        return data, fetch

    def release(self, fetch: _RangeFetch) -> None:
        """Release a range that was read, and let more be fetched ahead than before."""
        self._queue.budget = min(2 * self._queue.budget, self._most)
        self._queue.release(fetch)

    def drop(self, file: _File) -> None:
        """Fetch no more of *file*."""
        with self._queue.lock:
            file.is_cut |= bool(file.fetches) or (file.is_opened and not file.is_requested)
            file.has_ranges = False
            for fetch in file.fetches:
                self._queue.drop(fetch)
            file.fetches.clear()

    def _next_fetch(self) -> _RangeFetch | None:
        """Return the next range to request, in the order of the files."""
        if self._is_paused:
            return None
        for number in range(self._current, len(self._files)):
            file = self._files[number]
            if file.has_ranges and not file.is_remote:
                file.has_ranges = False
            if not file.is_requested:
                return self._add_fetch(file)
        return None

    def _add_fetch(self, file: _File) -> _RangeFetch:
        """Add the fetch of the next range; of a file that may be in a cache, all have the same size."""
        remote, size = file.remote, tuning.REQUEST_BYTES
        if not remote.is_cached:
            count = max(1, file.location.remote.connections // (8 if remote.address.is_far else 2))
            budget = max(4 * tuning.FIRST_BYTES, self._queue.budget)  # a small ahead= does not make requests smaller
            size = min(size, budget // count)
        end = file.requested + size
        fetch = _RangeFetch(remote, file.requested, end if remote.version is None else min(end, remote.size))
        file.requested = fetch.end
        file.fetches.append(fetch)
        return fetch

    def close(self) -> None:
        """Fetch no more."""
        self._queue.close()
        for file in self._files:
            self.drop(file)


class _AheadInput(InputStream):
    """A file that is read through *reader*; its first bytes, or all, come from *transfer* as they arrive."""

    def __init__(self, reader: ForwardReader, file: _File, transfer: Transfer | None):
        self.name = file.location.name
        version = (file.remote if transfer is None else transfer.file).version
        self.encoding = "" if version is None else version.encoding
        self._reader, self._file, self._transfer = reader, file, transfer
        self._fetch: _RangeFetch | None = None
        self._left: Any = b""  # its unread bytes

    def read_some(self, size: int) -> bytes:
        data = self._next(size)
        return data if isinstance(data, bytes) else bytes(data)

    def readinto(self, buffer: Any, /) -> int:
        if self.closed:
            raise ValueError("read of a closed stream")
        view = memoryview(buffer).cast("B")
        if view:
            data = self._next(len(view))
            view[: len(data)] = data
            return len(data)
        return 0

    def _next(self, size: int) -> bytes | memoryview:
        if self._transfer is not None:
            data = self._transfer.read(size)
            if data or self._transfer.is_whole:
                return data
            self._transfer.close()
            self._transfer = None
        if not self._left:
            self._release()
            taken = self._reader.take(self._file)
            if taken is None:
                return b""
            self._left, self._fetch = memoryview(taken[0]), taken[1]
        data, self._left = self._left[:size], self._left[size:]
        return data

    def _release(self) -> None:
        if self._fetch is not None:
            self._reader.release(self._fetch)
            self._fetch = None

    def close(self) -> None:
        if not self.closed and hasattr(self, "_left"):
            if self._transfer is not None:
                self._transfer.close()
            self._left = b""
            self._reader.drop(self._file)
            self._release()
        super().close()


def opened_ahead(locations: Sequence[Location], processes: int = 1) -> Iterator[Location]:
    """Yield *locations* in order, to be read sequentially; bytes that follow, also of the next ones, are prefetched.

    The memory for this is shared by *processes* processes on this host.
    """
    reader = ForwardReader(locations, processes)
    try:
        for number, location in enumerate(locations):
            yield location.opened_by(partial(reader.open, number)) if reader.opens(number) else location
    finally:
        reader.close()
