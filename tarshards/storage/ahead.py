"""Files of web servers and stores read forwards: their pieces are fetched ahead, over the borders of files, too."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from functools import cached_property, partial
from typing import Any

from tarshards.errors import TarshardsError
from tarshards.storage import traffic, tuning
from tarshards.storage.connections import fetching_threads, soonest
from tarshards.storage.location import Location
from tarshards.storage.remote import PIECE
from tarshards.storage.requests import Address, Version
from tarshards.storage.streams import InputStream
from tarshards.storage.transfer import (
    RangeTransfer,
    Transfer,
    WholeTransfer,
    begin_transfer,
    large_request,
    through_cache,
)

FIRST = 1 << 18  # bytes of the first piece: who reads only a beginning has it soon, and little is fetched in vain
NEAR, DISTANT = 16, 4  # pieces of a window that has not grown yet, for a server that is near, and one that is far
LEAST = 1 << 16  # bytes of a piece where little memory may be used


class _Piece:
    """The bytes of a file from *begin* to *end*, which a thread fetches; its file may end before."""

    def __init__(self, begin: int, end: int):
        self.begin, self.end, self.size = begin, end, end - begin
        self.future: Future[Any]
        self.is_dropped = False
        self._transfer: Transfer | None = None

    def fetch(self, file: _File, address: Address) -> Any:
        """Return its bytes; raise _NoRangesError if the server sends whole files only."""
        if file.version is None and file.is_cached:
            found = begin_transfer(address, 1, lambda: self.is_dropped)
            found.close()
            if isinstance(found, WholeTransfer):
                raise _NoRangesError
            file.version = found.version
            assert file.version is not None
            self.end = min(self.end, file.version.size)
        if file.version is not None and file.is_cached:
            return through_cache(address, self.begin, self.end, file.version, lambda: self._download(file, address))
        return self._download(file, address)

    def _download(self, file: _File, address: Address) -> bytearray:
        with large_request(address, self.size) as large:
            if file.version is None:
                transfer = begin_transfer(address, self.end, lambda: self.is_dropped)
                if isinstance(transfer, WholeTransfer):
                    transfer.close()
                    raise _NoRangesError
                file.version = transfer.version
            else:
                transfer = RangeTransfer(address, self.begin, self.end, file.version)
            transfer.large = large
            self._transfer = transfer
            buffer = bytearray(transfer.end - self.begin)
            try:
                if not self.is_dropped:
                    transfer.fill(memoryview(buffer))
            finally:
                transfer.close()
        return buffer

    def drop(self) -> None:
        """Fetch no more of it."""
        self.is_dropped = True
        if not self.future.cancel() and self._transfer is not None:
            self._transfer.drop()


class _NoRangesError(Exception):
    """The server of a file sends it as a whole only."""


class _File:
    """A file, and the *pieces* of it that were asked for and not read yet; *asked* bytes of it were asked for."""

    def __init__(self, location: Location):
        self.location = location
        self.version: Version | None = None  # known when its first piece has begun to come
        self.asked = 0
        self.pieces: deque[_Piece] = deque()
        self.is_piecewise = True
        self.is_cached = location.remote.cache_dir is not None  # then its pieces are of one size

    @cached_property
    def address(self) -> Address | None:
        return self.location.address()

    @property
    def has_address(self) -> bool:
        """Whether it is asked for by HTTP, as far as is known without opening it."""
        try:
            return self.address is not None
        except TarshardsError:  # raised again when it is opened
            return False

    @property
    def is_asked(self) -> bool:
        """Whether nothing more is to be asked for now."""
        if self.version is None:
            return bool(self.pieces) or not self.is_piecewise
        return self.asked >= self.version.size


class ReadAhead:
    """Reads files one after the other; what is held of them or under way is within the budget of one of *processes*.

    While little has been read, little is fetched ahead.
    """

    def __init__(self, locations: Sequence[Location], processes: int = 1):
        remote = locations[0].remote
        self._files = [_File(location) for location in locations]
        self._most = min(remote.budget(processes), 2 * remote.connections * PIECE)
        self._window = min(4 * FIRST if len(locations) == 1 else 4 * PIECE, self._most)
        self._held = 0
        self._first = 0  # the first file that is not asked for as a whole
        self._is_paused = False  # while a server sends whole files
        self._threads = fetching_threads(remote.connections)

    def opens(self, number: int) -> bool:
        """Return whether a file is one that ``open`` can open."""
        return self._files[number].has_address

    def open(self, number: int) -> InputStream:
        """Return the stream of a file; those before it are read no more."""
        for earlier in self._files[self._first : number]:
            self.drop(earlier)
        self._first = max(self._first, number)
        file = self._files[number]
        address = file.address
        assert address is not None
        transfer: WholeTransfer | RangeTransfer | None = None
        if file.is_cached and not file.pieces and file.is_piecewise:
            self._ask(file)
        if file.pieces:
            try:
                file.pieces[0].future.result()
            except _NoRangesError:
                self.drop(file)
                transfer = WholeTransfer(address)
                transfer.open()
            except BaseException:
                self.drop(file)
                raise
        else:
            found = begin_transfer(address, min(FIRST, self._most))
            if isinstance(found, RangeTransfer):
                file.version, file.asked = found.version, found.end
            transfer = found
        self._is_paused = isinstance(transfer, WholeTransfer)
        self._extend()
        return _AheadInput(self, file, transfer)

    def take(self, file: _File) -> tuple[Any, int] | None:
        """Return the next piece of *file*, and how many bytes it counts as until ``release``; None at the end."""
        if not file.pieces:
            if file.is_asked:
                return None
            self._ask(file)  # even where pieces of the files after it use the whole budget
        piece = file.pieces[0]
        with traffic.waiting():
            data = piece.future.result()
        file.pieces.popleft()
        return data, piece.size

    def release(self, size: int) -> None:
        """Fetch other bytes instead of *size* bytes that were read."""
        self._held -= size
        self._window = min(2 * self._window, self._most)
        self._extend()

    def drop(self, file: _File) -> None:
        """Fetch no more of *file*."""
        file.is_piecewise = False
        for piece in file.pieces:
            piece.drop()
            self._held -= piece.size
        file.pieces.clear()
        if file.version is not None:
            file.asked = file.version.size

    def _extend(self) -> None:
        """Ask for pieces, in the order of the files, as far as the window allows."""
        number = self._first
        while number < len(self._files) and self._held < self._window and not self._is_paused:
            file = self._files[number]
            if not file.is_asked:
                self._ask(file)
                continue
            number += 1
            if file.version is not None and number == self._first + 1:
                self._first = number

    def _ask(self, file: _File) -> None:
        """Ask for the next piece of *file*."""
        if not file.has_address or file.address is None:
            file.is_piecewise = False
            return
        if file.is_cached:
            size = PIECE
        else:
            count = NEAR if soonest(file.address.read_url) <= tuning.FAR else DISTANT
            size = max(LEAST, min(PIECE, self._window // count))
        end = file.asked + size
        piece = _Piece(file.asked, end if file.version is None else min(end, file.version.size))
        file.asked = piece.end
        self._held += piece.size
        piece.future = self._threads.submit(piece.fetch, file, file.address)
        file.pieces.append(piece)

    def close(self) -> None:
        """Fetch no more."""
        for file in self._files:
            self.drop(file)


class _AheadInput(InputStream):
    """A file that is read through *reader*; *transfer* brings its first bytes, or all, as they come."""

    def __init__(self, reader: ReadAhead, file: _File, transfer: WholeTransfer | RangeTransfer | None):
        self.name = file.location.name
        version = file.version if transfer is None else transfer.version
        self.encoding = "" if version is None else version.encoding
        self._reader, self._file, self._transfer = reader, file, transfer
        self._piece = memoryview(b"")
        self._counted = 0  # the bytes that it counts as

    def read_some(self, size: int) -> bytes:
        if self._transfer is not None:
            data = self._transfer.read(size)
            if data or isinstance(self._transfer, WholeTransfer):
                return data
            self._transfer.close()
            self._transfer = None
        if not self._piece:
            self._release()
            taken = self._reader.take(self._file)
            if taken is None:
                return b""
            self._piece, self._counted = memoryview(taken[0]), taken[1]
        data = bytes(self._piece[:size])
        self._piece = self._piece[size:]
        return data

    def _release(self) -> None:
        if self._counted:
            self._reader.release(self._counted)
            self._counted = 0

    def close(self) -> None:
        if not self.closed and hasattr(self, "_piece"):
            if self._transfer is not None:
                self._transfer.close()
            self._piece = memoryview(b"")
            self._release()
            self._reader.drop(self._file)
        super().close()


def opened_ahead(locations: Sequence[Location], processes: int = 1) -> Iterator[Location]:
    """Yield the locations in their order; while one is read, what follows of it and of those after it is fetched.

    As many *processes* on this host share the memory for that.
    """
    reader = ReadAhead(locations, processes)
    try:
        for number, location in enumerate(locations):
            yield location.opened_by(partial(reader.open, number)) if reader.opens(number) else location
    finally:
        reader.close()
