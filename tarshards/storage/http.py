"""The schemes http: and https:."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tarshards.errors import OpenError
from tarshards.storage.ahead import ForwardReader
from tarshards.storage.location import Location, Transport
from tarshards.storage.ranges import Ranges
from tarshards.storage.requests import Address, Patience, Version
from tarshards.storage.streams import InputStream, OutputStream, is_missing, spooled
from tarshards.storage.transfer import RemoteFile, find_version, hold_whole, read_whole
from tarshards.storage.wire import run


class Http(Transport):
    def address(self, location: Location) -> Address:
        return Address(location)

    def open(self, location: Location, mode: str) -> InputStream | OutputStream:
        if mode == "rb":
            return ForwardReader([location]).open(0)
        address = Address(location)
        return spooled(address.name, lambda file: put(address, file))

    def read(self, location: Location, most: int) -> bytes:
        return bytes(run(read_whole(Address(location), most)))

    def hold(self, location: Location, most: int, allocate: Callable[[int], Any] = bytearray) -> Any:
        return run(hold_whole(Address(location), most, allocate))

    def ranges(self, location: Location, size: int | None = None) -> Ranges:
        return RemoteFile.opened(Address(location), size)

    def probe(self, location: Location) -> None:
        _version(location)

    def size(self, location: Location) -> int | None:
        version = _version(location)
        return None if version is None or version.size < 0 or version.encoding else version.size

    def version(self, location: Location) -> list[Any]:
        version = _version(location)
        return [] if version is None else [version.size, version.etag, version.modified]

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


def _version(location: Location) -> Version | None:
    return run(find_version(Address(location)))


def put(address: Address, file: Any) -> None:
    """Store all of *file* with one PUT."""
    headers = {"Content-Length": str(file.tell()), "Content-Type": "application/octet-stream"}

    def action() -> None:
        with address.request(headers, method="PUT", body=file) as response:
            if response.status not in (200, 201, 204):
                raise OpenError(f"unexpected status {response.status}", url=address.name)

    Patience(address).attempt(action)
