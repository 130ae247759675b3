"""Every scheme of fsspec: object stores, archives, memory.

Objects of s3, gs and hf are read over our own connections (``signing``). What is read of any file belongs to one
version of it: other stores are asked, after each range or block, whether the file is still the one that was opened.
"""

from __future__ import annotations

import errno
import io
import os
import re
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from threading import Lock
from typing import Any, TypeVar

from tarshards.errors import OpenError, UrlError
from tarshards.storage import traffic
from tarshards.storage.ahead import ReadAhead
from tarshards.storage.http import RemoteRanges
from tarshards.storage.location import Location, Transport
from tarshards.storage.locks import PerProcess
from tarshards.storage.ranges import Ranges
from tarshards.storage.remote import Remote
from tarshards.storage.streams import InputStream, OutputStream, errno_of, is_missing, spooled
from tarshards.storage.transfer import CHANGED, PASSING, Address, Patience, hold_whole, read_whole

#: The extra of tarshards that installs the store of a scheme.
EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "http": "http", "https": "http"}

#: Stores whose files lie in buckets, which the URL begins with.
BUCKETS = ("s3", "s3a", "gs", "gcs")
S3 = ("s3", "s3a")

#: What stores tell of a file that identifies its version, the best first. An ETag of gcs changes with its metadata.
VALIDATORS = ["generation", "ETag", "etag", "md5Hash", "content_md5", "Content-MD5", "checksum", "CRC", "blob_id"]
VALIDATORS += ["sha", "hex", "version_id", "LastModified", "Last-Modified", "last_modified", "updated", "modified"]
VALIDATORS += ["mtime", "modificationTime", "modify", "created"]

#: Stores whose packages repeat requests as they see fit, which would multiply with our repetitions.
PATIENT = {"gs", "gcs"}

#: What the errors of stores are called, or are subclasses of, where no whole answer came: those of Python and requests,
#: botocore, aiohttp, httpx.
UNANSWERED = {
    "ConnectionError",
    "TimeoutError",
    "HTTPClientError",
    "ClientConnectionError",
    "ClientPayloadError",
    "TransportError",
}

#: The errors of S3 that say that a body came incomplete or altered.
TORN = {"BadDigest", "IncompleteBody", "XAmzContentSHA256Mismatch"}

T = TypeVar("T")


class Store(Transport):
    def address(self, location: Location) -> Address | None:
        from tarshards.storage.signing import address_of

        return address_of(location)

    def open(self, location: Location, mode: str) -> InputStream | OutputStream:
        if mode == "rb":
            return StoreInput(location) if self.address(location) is None else ReadAhead([location]).open(0)
        store, path = find_store(location)
        if location.scheme in BUCKETS:
            from tarshards.storage.uploads import GsUpload, S3Upload, upload

            kind = S3Upload if location.scheme in S3 else GsUpload
            if kind.is_possible(store):
                return upload(kind(location, store, path))
        return spooled(location.name, lambda file: Requests(location).attempt(lambda: store.put_file(file.name, path)))

    def read(self, location: Location, most: int, **options: Any) -> bytes:
        address = self.address(location)
        return super().read(location, most, **options) if address is None else read_whole(address, most)

    def hold(self, location: Location, most: int) -> Any:
        address = self.address(location)
        return super().hold(location, most) if address is None else hold_whole(address, most)

    def ranges(self, location: Location, size: int | None = None) -> Ranges:
        address = self.address(location)
        return StoreRanges(location) if address is None else RemoteRanges(address, size)

    def glob(self, location: Location) -> list[str]:
        store, path = find_store(location)
        if Requests(location).attempt(lambda: store.exists(path)):
            return [location.url]
        found = sorted(Requests(location).attempt(lambda: store.glob(path)))
        first, stem, rest = location.url.partition(path.lstrip("/"))
        return [first + match.lstrip("/") + rest for match in found] if stem else [location.url]

    def probe(self, location: Location) -> None:
        self.size(location)

    def size(self, location: Location) -> int | None:
        store, path = find_store(location)
        size = Requests(location).attempt(lambda: find_info(store, path)).get("size")
        return None if size is None else int(size)

    def remove(self, location: Location) -> None:
        store, path = find_store(location)
        try:
            Requests(location).attempt(lambda: store.rm_file(path))
        except OpenError as error:
            if not is_missing(error):
                raise


TRANSPORT = Store()


def find_store(location: Location) -> tuple[Any, str]:
    """Return fsspec's file system of *location*, and the path that it has there.

    The store that its last link names is made with the `storage_options` of its `Remote`; others get another store.
    """
    links = [Location(link) for link in location.links]
    bucket, _, key = links[-1].url.partition(":")[2].removeprefix("//").partition("/")
    if links[-1].scheme in BUCKETS and not (bucket and key):
        scheme = links[-1].scheme
        raise UrlError(f"such a URL is {scheme}://BUCKET/NAME, with a bucket and a name in it", url=location.name)
    for link in links:
        if link.is_stream:
            raise OpenError(f"fsspec cannot read {link.name!r}", url=location.name)
    try:
        import fsspec

        options = dict(location.remote.storage_options or {})
        is_s3fs = location.scheme in S3 and hasattr(fsspec.get_filesystem_class(location.scheme), "call_s3")
        if is_s3fs:
            options = _s3_options(location.remote, {**fsspec.config.conf.get("s3", {}), **options})
        store, path = fsspec.core.url_to_fs("::".join(map(_address, links)), **{links[-1].scheme or "file": options})
        if is_s3fs:
            store.retries = 1
    except ImportError as exc:
        scheme, extra = next(((link.scheme, EXTRAS[link.scheme]) for link in links if link.scheme in EXTRAS), ("", ""))
        need = f"pip install 'tarshards[{extra}]'" if extra else str(exc)
        scheme = scheme or location.scheme
        reason = f"{scheme} needs a package that is not installed: {need}"
        raise OpenError(reason, url=location.name) from location.safe(exc)
    except Exception as exc:
        if isinstance(exc, TypeError) and (missing := re.search(r"missing \d+ required .*?: (.*)", str(exc))):
            scheme, names = location.scheme, re.findall(r"'(\w+)'", missing[1])
            cure = ", ".join(f"FSSPEC_{scheme}_{name}".upper() for name in names)
            reason = f"{scheme} needs {' and '.join(names)}; set the environment variable {cure}"
            raise OpenError(reason, url=location.name) from location.safe(exc)
        raise failed(exc, location) from location.safe(exc)
    return store, path


def _s3_options(remote: Remote, given: dict[str, Any]) -> dict[str, Any]:
    """Return what s3fs is made with: it asks once, and waits as *remote* says; `Requests` asks again.

    It signs URLs by version 4, which all stores know. That is for a region, which it asks for where none is named.
    """
    waits = {"connect_timeout": remote.timeout, "read_timeout": remote.timeout, "retries": {"total_max_attempts": 1}}
    config = {**waits, "max_pool_connections": remote.connections, "signature_version": "s3v4"}
    return {
        "cache_regions": "AWS_DEFAULT_REGION" not in os.environ,
        **given,
        "config_kwargs": {**config, **given.get("config_kwargs", {})},
    }


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


class Opened:
    """A file of a store and its version, which everything that is read of it must be of."""

    def __init__(self, location: Location):
        self.store, self.path = find_store(location)
        try:
            info = find_info(self.store, self.path)
        except Exception as exc:
            raise failed(exc, location) from location.safe(exc)
        self.size, self.version = info.get("size"), version_of(info)

    def open(self) -> Any:
        """Return fsspec's file; reading it raises if a block comes of another version."""
        file = self.store.open(self.path, "rb")
        cache: Any = getattr(file, "cache", None)
        if hasattr(cache, "fetcher"):
            fetcher = cache.fetcher
            cache.fetcher = lambda start, end: self.check(fetcher(start, end))
        return file

    def fetch(self, start: int, end: int) -> Any:
        """Return the bytes from *start* to *end*; raise if they are of another version."""
        traffic.count("requests")
        data = self.check(self.store.cat_file(self.path, start=start, end=end))
        traffic.count("bytes", len(data))
        return data

    def check(self, data: Any = b"") -> Any:
        """Return *data*, which was read before, if the file is still of this version."""
        if version_of(find_info(self.store, self.path)) != self.version:
            raise OpenError(CHANGED)
        return data


def version_of(info: dict[str, Any]) -> tuple[Any, ...]:
    """Return what identifies the version of a file: its size, and the best of VALIDATORS that its store tells.

    >>> version_of({"size": 3, "mtime": 1.5, "ETag": "v1"})
    (3, 'ETag', 'v1')
    """
    best = next((name for name in VALIDATORS if info.get(name)), "")
    return info.get("size"), best, info.get(best)


def failed(exc: Exception, location: Location, offset: int | None = None) -> OpenError:
    """Return the OpenError that says what *exc* means for a file."""
    if isinstance(exc, OpenError):
        reason = exc.reason
    elif isinstance(exc, OSError) and exc.errno == errno.EBUSY:  # FileExpired of s3fs
        reason = CHANGED
    else:
        reason = " ".join(location.words(exc).split())
    return OpenError(reason, url=location.name, offset=offset, errno=errno_of(exc))


class Requests:
    """The requests of a store, which renews its credentials itself."""

    def __init__(self, location: Location, is_over: Callable[[], bool] | None = None):
        self.location, self._is_over = location, is_over

    def renew(self) -> bool:
        return False

    def attempt(self, action: Callable[[], T]) -> T:
        """Return what *action* returns once it succeeds; failures that may pass are retried until it *is_over*."""

        def once() -> T:
            if self._is_over is not None and self._is_over():
                raise OpenError("given up", url=self.location.name)
            try:
                return action()
            except Exception as exc:
                if self.location.scheme not in PATIENT and may_pass(exc):
                    raise ConnectionError(self.location.words(exc)) from self.location.safe(exc)
                raise failed(exc, self.location) from self.location.safe(exc)

        return Patience(self, self._is_over).attempt(once)


def may_pass(exc: Exception) -> bool:
    """Return whether what a store raised may go away by itself.

    >>> may_pass(ConnectionResetError()), may_pass(PermissionError())
    (True, False)
    """
    response = getattr(exc.__cause__ or exc, "response", None)  # of botocore
    if isinstance(response, dict):
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        if status in PASSING or response.get("Error", {}).get("Code") in TORN:
            return True
    # What gcsfs and huggingface_hub raise has a status.
    status = getattr(exc, "code", 0) or getattr(response, "status_code", 0)
    return not UNANSWERED.isdisjoint(kind.__name__ for kind in type(exc).__mro__) or status in PASSING


class StoreInput(InputStream):
    """A file of a store, whose size and version are checked."""

    def __init__(self, location: Location):
        self.name, self._location = location.name, location
        self._opened = Opened(location)  # which keeps the store: an archive closes its files when it is collected
        try:
            file = self._opened.open()
        except Exception as exc:
            raise failed(exc, self._location) from self._location.safe(exc)
        # memory: gives every reader the same object, and so the same position.
        self._file = io.BytesIO(file.getvalue()) if isinstance(file, io.BytesIO) else file
        self._size = getattr(file, "size", None)

    def read_some(self, size: int) -> bytes:
        offset = self._file.tell()
        try:
            data: bytes = self._file.read(size)
            if not data and self._size is not None and offset < self._size:
                raise OpenError(f"ended before its {self._size} bytes")
            if not data and not hasattr(self._file, "cache") and not isinstance(self._file, io.BytesIO):
                self._opened.check()  # its blocks are not
        except Exception as exc:
            raise failed(exc, self._location, offset) from self._location.safe(exc)
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
        if not self.closed and hasattr(self, "_file"):
            with suppress(Exception):  # all that was read is checked; some caches cannot close their files
                self._file.close()
        super().close()


class StoreRanges(Ranges):
    """A file of one of fsspec's stores."""

    def __init__(self, location: Location):
        self.name, self._location = location.name, location
        self._lock, self._is_begun = PerProcess(Lock), False
        self._opened = PerProcess(partial(Opened, location))  # stores have threads, which a fork does not copy
        opened = self._opened()
        if opened.size is None:
            raise OpenError("the store tells no size, which random access requires", url=self.name)
        self.size, self._version = int(opened.size), opened.version

    def read(self, offset: int, size: int) -> bytes:
        if offset < 0 or offset + size > self.size:
            raise OpenError(f"{size} bytes at offset {offset} of {self.size}", url=self.name)
        try:
            opened = self._opened()
            if opened.version != self._version:
                raise OpenError(CHANGED)
            # The first alone, for which a cache of fsspec may fetch the whole file; others would find a part of it.
            with nullcontext() if self._is_begun else self._lock():
                data = opened.fetch(offset, offset + size) if size else b""
                self._is_begun = True
        except Exception as exc:
            raise failed(exc, self._location, offset) from self._location.safe(exc)
        if len(data) != size:
            raise OpenError(f"{len(data)} of {size} bytes came", url=self.name, offset=offset)
        return bytes(data)

    @property
    def version(self) -> tuple[Any, ...]:
        return self._version
