"""http: and https:, by range requests over connections that are kept alive."""

from __future__ import annotations

from functools import partial
from threading import Lock
from typing import Any

from tarshards.errors import OpenError
from tarshards.storage.ahead import ForwardReader
from tarshards.storage.location import Location, Transport
from tarshards.storage.locks import PerProcess
from tarshards.storage.ranges import Ranges
from tarshards.storage.streams import InputStream, OutputStream, is_missing, spooled
from tarshards.storage.transfer import (
    CHANGED,
    HEAD,
    Address,
    Patience,
    Version,
    begin_transfer,
    cached_block,
    hold_whole,
    read_range,
    read_whole,
    through_cache,
)


class Http(Transport):
    def address(self, location: Location) -> Address:
        return Address(location)

    def open(self, location: Location, mode: str) -> InputStream | OutputStream:
        if mode == "rb":
            return ForwardReader([location]).open(0)
        address = Address(location)
        return spooled(address.name, lambda file: put(address, file))

    def read(self, location: Location, most: int) -> bytes:
        return read_whole(Address(location), most)

    def hold(self, location: Location, most: int) -> Any:
        return hold_whole(Address(location), most)

    def ranges(self, location: Location, size: int | None = None) -> Ranges:
        return RemoteRanges(Address(location), size)

    def probe(self, location: Location) -> None:
        begin_transfer(Address(location), 1).close()

    def glob(self, location: Location) -> list[str]:
        from tarshards.storage.webdav import matching

        return list(matching(location))

    def remove(self, location: Location) -> None:
        address = Address(location)
        try:
            Patience(address).attempt(lambda: address.request({}, method="DELETE").close())
        except OpenError as error:
            if not is_missing(error):
                raise


TRANSPORT = Http()


class RemoteRanges(Ranges):
    """A file of a web server, read by range requests, each retried until it is complete.

    *size* is what is known of its size before the server has said it.
    """

    def __init__(self, address: Address, size: int | None = None):
        self._address, self.name = address, address.name
        self._head: bytes | bytearray = b""
        self._lock, self._asking = PerProcess(Lock), PerProcess(Lock)
        self._version: Version | None = None
        self.size = self._open() if size is None else size

    def _open(self) -> int:
        self._head, version = read_range(self._address, 0, HEAD)
        self._version = version
        return version.size

    def read(self, offset: int, size: int) -> bytes:
        return bytes(self._read(offset, size, mapped=False))

    def hold(self, offset: int, size: int) -> Any:
        return self._read(offset, size, mapped=True)

    def _read(self, offset: int, size: int, *, mapped: bool) -> Any:
        if offset < 0 or offset + size > self.size:
            raise OpenError(f"{size} bytes at offset {offset} of {self.size}", url=self.name)
        if not size or offset + size <= len(self._head):
            return self._head[offset : offset + size]
        if self._address.location.remote.cache_dir is not None:
            with self._asking():
                if self._version is None:
                    self._keep(read_range(self._address, 0, 1)[1])  # a block of the cache is of a version
        known = self._version
        if known is not None:
            fetch = partial(read_range, self._address, offset, offset + size, known)
            return through_cache(self._address, offset, offset + size, known, lambda: fetch()[0], mapped=mapped)
        data, version = read_range(self._address, offset, offset + size)
        self._keep(version)
        return data

    def drop(self, offset: int, size: int) -> None:
        if self._version is not None:
            cached = cached_block(self._address, offset, offset + size, self._version)
            if cached is not None:
                cached[0].drop(cached[1])

    def _keep(self, version: Version) -> None:
        """Let all that is read be of *version*, whose size may be another than was known."""
        with self._lock():
            if self._version is None:
                self.size, self._version = version.size, version
            elif version != self._version:
                raise OpenError(CHANGED, url=self.name)

    @property
    def version(self) -> Version | None:
        return self._version

    def expect(self, version: Version | None) -> None:
        if version is not None:
            self._keep(version)

    def is_current(self) -> bool:
        return self._version is None or self._version.validator is not None  # each answer is compared with it


def put(address: Address, file: Any) -> None:
    """Store all of *file* with one PUT."""
    headers = {"Content-Length": str(file.tell()), "Content-Type": "application/octet-stream"}

    def action() -> None:
        with address.request(headers, method="PUT", body=file) as response:
            if response.status not in (200, 201, 204):
                raise OpenError(f"unexpected status {response.status}", url=address.name)

    Patience(address).attempt(action)
