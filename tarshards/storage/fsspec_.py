"""Every scheme of fsspec: object stores, archives, memory."""

from __future__ import annotations

import io
from typing import Any

from tarshards.errors import OpenError
from tarshards.storage.streams import Reader, Writer, failure, public, spooled

#: The extra of tarshards that brings the store of a scheme.
EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}

#: Stores whose files can be uploaded piece by piece and committed or discarded at the end; others get whole files.
STREAMED = {"s3", "s3a", "gs", "gcs"}


def open_stream(url: str, mode: str, **_: Any) -> Reader | Writer:
    name = public(url)
    store, path = find_store(url)
    try:
        if mode == "rb":
            return RemoteReader(store, store.open(path, "rb"), name)
        if _scheme(url) in STREAMED:
            return _streamed(store.open(path, "wb", autocommit=False), name)
    except Exception as exc:
        raise failure(exc, name) from exc

    def put(file: Any) -> None:
        try:
            store.put_file(file.name, path)
        except Exception as exc:
            raise failure(exc, name) from exc

    return spooled(name, put)


def find_store(url: str) -> tuple[Any, str]:
    """Return fsspec's file system of *url*, and the path that *url* has there."""
    scheme, rest = _scheme(url), url.partition(":")[2]
    address = f"{scheme}:{rest}" if rest.startswith("//") or scheme == "data" else f"{scheme}://{rest}"
    try:
        import fsspec

        store, path = fsspec.core.url_to_fs(address)
    except ImportError as exc:
        need = f"pip install 'tarshards[{EXTRAS[scheme]}]'" if scheme in EXTRAS else str(exc)
        raise OpenError(f"{scheme} needs a package that is not installed: {need}", url=public(url)) from exc
    except Exception as exc:
        raise failure(exc, public(url)) from exc
    return store, path


def _scheme(url: str) -> str:
    return url.partition(":")[0].lower()


class RemoteReader(Reader):
    """A file of a store, whose size is checked at its end."""

    def __init__(self, store: Any, file: Any, name: str):
        # An archive closes its files when it is forgotten.
        self._store = store
        # memory: hands its one object to every reader, position included.
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


def _streamed(file: Any, name: str) -> Writer:
    """Return a Writer through fsspec's *file*, which was opened with autocommit=False."""

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

    return Writer(name, write, commit=commit, discard=discard)
