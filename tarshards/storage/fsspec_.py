"""Every scheme of fsspec: object stores, archives, memory."""

from __future__ import annotations

import io
import os
from typing import Any

from tarshards.errors import OpenError
from tarshards.storage.location import Location, Transport
from tarshards.storage.ranges import Ranges
from tarshards.storage.streams import InputStream, OutputStream, failure, spooled

#: The extra of tarshards that installs the store of a scheme.
EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}

#: Stores whose files can be uploaded piece by piece and committed or discarded at the end; others get whole files.
STREAMED = {"s3", "s3a", "gs", "gcs"}


class Store(Transport):
    def open(self, location: Location, mode: str, **_: Any) -> InputStream | OutputStream:
        name = location.name
        store, path = find_store(location)
        try:
            if mode == "rb":
                return StoreInput(store, store.open(path, "rb"), name)
            if location.scheme in STREAMED:
                return _streamed(store.open(path, "wb", autocommit=False), name)
        except Exception as exc:
            raise failure(exc, name) from exc

        def put(file: Any) -> None:
            try:
                store.put_file(file.name, path)
            except Exception as exc:
                raise failure(exc, name) from exc

        return spooled(name, put)

    def ranges(self, location: Location) -> Ranges:
        return StoreRanges(location)

    def probe(self, location: Location) -> None:
        self.size(location)

    def size(self, location: Location) -> int | None:
        store, path = find_store(location)
        try:
            size = find_info(store, path).get("size")
        except Exception as exc:
            raise failure(exc, location.name) from exc
        return None if size is None else int(size)


TRANSPORT = Store()


def find_store(location: Location) -> tuple[Any, str]:
    """Return fsspec's file system of *location*, and the path that it has there."""
    links = [Location(link) for link in location.links]
    for link in links:
        if link.is_stream:
            raise OpenError(f"fsspec cannot read {link.name!r}", url=location.name)
    try:
        import fsspec

        store, path = fsspec.core.url_to_fs("::".join(map(_address, links)))
    except ImportError as exc:
        scheme, extra = next(((link.scheme, EXTRAS[link.scheme]) for link in links if link.scheme in EXTRAS), ("", ""))
        need = f"pip install 'tarshards[{extra}]'" if extra else str(exc)
        scheme = scheme or location.scheme
        raise OpenError(f"{scheme} needs a package that is not installed: {need}", url=location.name) from exc
    except Exception as exc:
        raise failure(exc, location.name) from exc
    return store, path


def _address(link: Location) -> str:
    """Return the URL of a link as fsspec wants it: `memory://a.tar` for `MEMORY:a.tar`."""
    scheme, rest = link.scheme, link.url.partition(":")[2]
    if not scheme or rest.startswith("//") or scheme == "data":
        return f"{scheme}:{rest}" if scheme else link.url
    return f"{scheme}://{rest}"


def find_info(store: Any, path: str) -> dict[str, Any]:
    """Return what *store* says of a file now; what it has listed before may be old."""
    from fsspec.implementations.cached import CachingFileSystem

    while isinstance(store, CachingFileSystem):  # which looks for it in a listing, and web servers have none
        store = store.fs
    store.invalidate_cache(path)
    info: dict[str, Any] = store.info(path)
    return info


class StoreInput(InputStream):
    """A file of a store, whose size is checked at its end."""

    def __init__(self, store: Any, file: Any, name: str):
        # An archive closes its files when it is garbage-collected.
        self._store = store
        # memory: gives every reader the same object, and so the same position.
        self._file = io.BytesIO(file.getvalue()) if isinstance(file, io.BytesIO) else file
        self._size = getattr(file, "size", None)
        self.name = name

    def read_some(self, size: int) -> bytes:
        try:
            data: bytes = self._file.read(size)
        except Exception as exc:
            raise failure(exc, self.name, self._file.tell()) from exc
        if not data and self._size is not None and self._file.tell() < self._size:
            raise OpenError(f"ended before its {self._size} bytes", url=self.name, offset=self._file.tell())
        return data

    def seekable(self) -> bool:
        seekable: bool = self._file.seekable()
        return seekable

    def seek(self, offset: int, whence: int = 0, /) -> int:
        position: int = self._file.seek(offset, whence)
        return position

    def tell(self) -> int:
        position: int = self._file.tell()
        return position

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


class StoreRanges(Ranges):
    """A file of one of fsspec's stores."""

    def __init__(self, location: Location):
        self.name, self._location = location.name, location
        self._process = os.getpid()
        self._store, self._path = find_store(location)
        try:
            self.size = int(find_info(self._store, self._path)["size"])
        except Exception as exc:
            raise failure(exc, self.name) from exc

    def read(self, offset: int, size: int) -> bytes:
        if offset < 0 or offset + size > self.size:
            raise OpenError(f"{size} bytes at offset {offset} of {self.size}", url=self.name)
        if self._process != os.getpid():  # stores have threads, which a fork does not copy
            self._store, self._path = find_store(self._location)
            self._process = os.getpid()
        try:
            data: Any = self._store.cat_file(self._path, start=offset, end=offset + size) if size else b""
        except Exception as exc:
            raise failure(exc, self.name, offset) from exc
        if len(data) != size:
            raise OpenError(f"{len(data)} of {size} bytes came", url=self.name, offset=offset)
        return bytes(data)


def _streamed(file: Any, name: str) -> OutputStream:
    """Return an OutputStream through fsspec's *file*, which was opened with autocommit=False."""

    def write(data: Any) -> None:
        try:
            file.write(data)
        except Exception as exc:
            raise failure(exc, name) from exc

    def commit() -> None:
        try:
            file.close()
            file.commit()
        except Exception as exc:
            raise failure(exc, name) from exc

    def discard() -> None:
        # Marked as closed first: closing it later would upload what is left.
        file.closed = True
        file.discard()

    return OutputStream(name, write, commit=commit, discard=discard)
