"""Every scheme of fsspec: object stores, archives, memory.

Objects of s3, gs and hf are read over our own connections, by signed URLs or with the token of the store. The packages
of the stores find the credentials; their file objects are not used. All bytes read from a file belong to one version of
it: for other stores, the version is checked after each range or block.

Objects of s3 and gs are written in parts, several at once; an object appears whole, or not at all. fsspec's file
objects upload one part after the other. Its `put_file` needs the whole object on the disk before it sends the first
byte, and in gcsfs it also uploads one part after the other. With 20 MB/s for each connection, 256 MB were written at 15
MB/s by file objects, at 27 to 72 by `put_file`, and at 66 to 102 by the code here. Bodies go to s3 over our own
connections, to signed URLs, since aiohttp waits forever for a server that stops reading a body.
"""

from __future__ import annotations

import errno
import io
import os
import re
from base64 import b64encode
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache, partial
from hashlib import md5
from threading import Lock
from time import monotonic
from typing import Any, TypeVar
from urllib.parse import quote
from uuid import uuid4

from tarshards.errors import OpenError, UrlError
from tarshards.parallel.calls import settled
from tarshards.parallel.forks import PerProcess
from tarshards.parallel.signals import defer_signals
from tarshards.storage import traffic
from tarshards.storage.ahead import ForwardReader
from tarshards.storage.location import Location, Transport
from tarshards.storage.ranges import Ranges
from tarshards.storage.remote import Remote
from tarshards.storage.requests import CHANGED, PASSING, Address, Patience, StatusError
from tarshards.storage.servers import Origin
from tarshards.storage.streams import InputStream, OutputStream, errno_of, is_missing, spooled
from tarshards.storage.transfer import RemoteFile, hold_whole, read_whole
from tarshards.storage.wire import run

#: The extra of tarshards that installs the package of a scheme.
EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "http": "http", "https": "http"}

#: Schemes whose URLs begin with a bucket.
BUCKETS = ("s3", "s3a", "gs", "gcs")
S3 = ("s3", "s3a")

#: Entries of a file's info that identify its version, the best first. An ETag of gcs changes with its metadata.
VALIDATORS = ["generation", "ETag", "etag", "md5Hash", "content_md5", "Content-MD5", "checksum", "CRC", "blob_id"]
VALIDATORS += ["sha", "hex", "version_id", "LastModified", "Last-Modified", "last_modified", "updated", "modified"]
VALIDATORS += ["mtime", "modificationTime", "modify", "created"]

#: Stores whose packages retry failed requests, so that we do not.
PATIENT = {"gs", "gcs"}

#: Names of error classes, or of base classes of them, that mean that no whole response arrived: of Python and requests,
#: botocore, aiohttp, httpx.
UNANSWERED = {
    "ConnectionError",
    "TimeoutError",
    "HTTPClientError",
    "ClientConnectionError",
    "ClientPayloadError",
    "TransportError",
}

#: Errors of S3 for a body that arrived incomplete or altered.
TORN = {"BadDigest", "IncompleteBody", "XAmzContentSHA256Mismatch"}

CLAIM = ".claim"  # suffix of the object by which a writer claims a name

EXPIRY = 3600  # seconds for which a signed URL is valid

#: Seconds for which a token is used; gcsfs renews one 300 seconds before it expires.
TOKEN_EXPIRY = 240

#: Bytes of a part: stores take 5 MiB to 5 GiB. After every GROWTH parts, the size doubles, so that the 10,000 parts of
#: an object can hold its maximum size, 5 TiB.
PART, GROWTH = 1 << 23, 1000

#: The most bytes of the parts under way at once, unless a single part is larger.
MEMORY = 1 << 26

T = TypeVar("T")


# Stores, and their requests.


def find_store(location: Location) -> tuple[Any, str]:
    """Return the file system of fsspec for *location*, and its path there.

    The store of the last link gets the `storage_options` of the location's `Remote`. Raises UrlError or OpenError.
    """
    links = [Location(link) for link in location.links]
    bucket, _, key = links[-1].url.partition(":")[2].removeprefix("//").partition("/")
    if links[-1].scheme in BUCKETS and not (bucket and key):
        scheme = links[-1].scheme
        raise UrlError(f"a URL of this scheme names a bucket and a file: {scheme}://BUCKET/NAME", url=location.name)
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
    """Return the options for s3fs: one attempt with the timeout of *remote*, since `Requests` makes the retries.

    URLs are signed by version 4, which all stores support. It needs the region, which s3fs requests if none is given.
    """
    waits = {"connect_timeout": remote.timeout, "read_timeout": remote.timeout, "retries": {"total_max_attempts": 1}}
    config = {**waits, "max_pool_connections": remote.connections, "signature_version": "s3v4"}
    return {
        "cache_regions": "AWS_DEFAULT_REGION" not in os.environ,
        **given,
        "config_kwargs": {**config, **given.get("config_kwargs", {})},
    }


def _address(link: Location) -> str:
    """Return the URL of a link as fsspec expects it: `memory://a.tar` for `MEMORY:a.tar`."""
    scheme, rest = link.scheme, link.url.partition(":")[2]
    if not scheme or rest.startswith("//") or scheme == "data":
        return f"{scheme}:{rest}" if scheme else link.url
    return f"{scheme}://{rest}"


def find_info(store: Any, path: str) -> dict[str, Any]:
    """Return the current info of a file, not that of an earlier listing."""
    from fsspec.implementations.cached import CachingFileSystem

    while isinstance(store, CachingFileSystem):  # its info uses listings, which web servers do not have
        store = store.fs
    store.invalidate_cache(path)
    info: dict[str, Any] = store.info(path)
    return info


def failed(exc: Exception, location: Location, offset: int | None = None) -> OpenError:
    """Return the OpenError for *exc*, which a store raised for a file."""
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
        self.location = location
        self._is_over = is_over

    renews = False

    def renew(self, is_expired: bool) -> None: ...

    def attempt(self, action: Callable[[], T]) -> T:
        """Call *action* and return its result; retry transient failures until *is_over* returns True.

        Raises OpenError.
        """

        def once() -> T:
            if self._is_over is not None and self._is_over():
                raise OpenError("the read was cancelled", url=self.location.name)
            try:
                return action()
            except Exception as exc:
                if self.location.scheme not in PATIENT and may_pass(exc):
                    raise ConnectionError(self.location.words(exc)) from self.location.safe(exc)
                raise failed(exc, self.location) from self.location.safe(exc)

        return Patience(self, self._is_over).attempt(once)


def may_pass(exc: Exception) -> bool:
    """Return whether an error of a store is transient, so that a retry may succeed.

    >>> may_pass(ConnectionResetError()), may_pass(PermissionError())
    (True, False)
    """
    response = getattr(exc.__cause__ or exc, "response", None)  # of botocore
    if isinstance(response, dict):
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        if status in PASSING or response.get("Error", {}).get("Code") in TORN:
            return True
    # Errors of gcsfs and huggingface_hub have a status.
    status = getattr(exc, "code", 0) or getattr(response, "status_code", 0)
    return not UNANSWERED.isdisjoint(kind.__name__ for kind in type(exc).__mro__) or status in PASSING


# Objects that are read over our own connections.


_reconnecting = PerProcess(Lock)


class StoreAddress(Address):
    """The URL and headers by which a store serves an object; they are renewed before they expire."""

    def __init__(self, location: Location):
        self.location = location
        self.name: str = location.name
        self._lock = PerProcess(Lock)
        self._given: tuple[str, dict[str, str]] = "", {}
        self._until = 0.0

    @property
    def target(self) -> tuple[str, dict[str, str]]:
        with self._lock():
            if monotonic() >= self._until:
                self._ask()
            return self._given

    renews = True

    @property
    def is_known(self) -> bool:  # type: ignore[override]
        return monotonic() < self._until

    def renew(self, is_expired: bool) -> None:
        with self._lock():
            self._ask()

    def _ask(self) -> None:
        store, path = find_store(self.location)  # fsspec makes another store in a forked process

        def sign() -> tuple[str, dict[str, str], float] | None:
            try:
                return self.sign(store, path)
            except (NotImplementedError, AttributeError):  # a store of another package under this scheme
                return None

        given = Requests(self.location).attempt(sign)
        if given is None:
            raise NotImplementedError
        url, headers, seconds = given
        self._given, self._until = (url, headers), monotonic() + seconds

    def sign(self, store: Any, path: str) -> tuple[str, dict[str, str], float]:
        """Return a URL of the object at *path*, headers for it, and the seconds for which to use them.

        Raises NotImplementedError if *store* cannot serve it to a web client.
        """
        raise NotImplementedError


class S3Address(StoreAddress):
    """An object of S3; *operation* has botocore's parameters for a URL that allows something other than reading."""

    def __init__(self, location: Location, **operation: Any):
        super().__init__(location)
        self._operation = operation
        self._session: Any = None  # of s3fs, which has read the credentials that signed

    def renew(self, is_expired: bool) -> None:
        """Sign again; if the credentials have expired, let s3fs find them again: their file may be a new one.

        botocore renews those of roles by itself, by their time.
        """
        if is_expired:
            store, _ = find_store(self.location)
            with _reconnecting():
                if store.session is self._session:  # else another has done it
                    Requests(self.location).attempt(lambda: store.connect(refresh=True))
        super().renew(is_expired)

    def sign(self, store: Any, path: str) -> tuple[str, dict[str, str], float]:
        url = store.sign(path, expiration=EXPIRY, **store.req_kw, **self._operation)
        self._session = store.session
        return url, {"x-amz-request-payer": "requester"} if store.req_kw else {}, EXPIRY / 2


class GsAddress(StoreAddress):
    """An object of Google Cloud Storage, by its XML API, whose ETags depend on the content alone."""

    def sign(self, store: Any, path: str) -> tuple[str, dict[str, str], float]:
        bucket, key, generation = store.split_path(path)
        if generation or getattr(store, "_use_client_cert", False) or _is_zonal(store, bucket):
            raise NotImplementedError
        headers: dict[str, str] = {}
        store.credentials.apply(headers)
        if payer := store.project if store.requester_pays is True else store.requester_pays:
            headers["x-goog-user-project"] = payer
        return f"{store.base.removesuffix('/storage/v1/')}/{bucket}/{quote(key)}", headers, TOKEN_EXPIRY


@cache
def _is_zonal(store: Any, bucket: str) -> bool:
    """Return whether a bucket can be read by gRPC only; the result is cached.

    Only Google's servers have such buckets. gcsfs waits a minute for the response of any other server.
    """
    if not hasattr(store, "_sync_lookup_bucket_type") or "googleapis.com" not in store.base:
        return False
    return bool(store._sync_lookup_bucket_type(bucket).name.startswith("ZONAL"))


class HfAddress(StoreAddress):
    """A file of a repository on the Hugging Face Hub, which redirects to the servers that have it."""

    def sign(self, store: Any, path: str) -> tuple[str, dict[str, str], float]:
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers

        found = store.resolve_path(path)
        if not hasattr(found, "repo_id"):
            raise NotImplementedError
        url = hf_hub_url(
            found.repo_id,
            found.path_in_repo,
            repo_type=found.repo_type,
            revision=found.revision,
            endpoint=store.endpoint,
        )
        token = {name: value for name, value in build_hf_headers(token=store.token).items() if name == "authorization"}
        return url, token, EXPIRY


class AzureAddress(StoreAddress):
    """A blob of Azure, signed with the key of the account."""

    def sign(self, store: Any, path: str) -> tuple[str, dict[str, str], float]:
        try:
            return store.sign(path, expiration=EXPIRY), {}, EXPIRY / 2
        except ValueError as error:  # adlfs has another login, or none
            raise NotImplementedError from error


ADDRESSES: dict[str, type[StoreAddress]] = {
    "s3": S3Address,
    "s3a": S3Address,
    "gs": GsAddress,
    "gcs": GsAddress,
    "hf": HfAddress,
    **dict.fromkeys(("az", "abfs", "abfss"), AzureAddress),
}


def address_of(location: Location) -> StoreAddress | None:
    """Return the address of an object; None if its store cannot serve it to a web client."""
    if len(location.links) > 1 or location.scheme not in ADDRESSES:
        return None
    address = ADDRESSES[location.scheme](location)
    try:
        is_known = Origin.of(address.target[0]) is not None
    except (NotImplementedError, ValueError):
        return None
    return address if is_known else None


# Other files, which fsspec reads.


_cache_tables = PerProcess(Lock)


class Opened:
    """A file of a store, and the version that all bytes read from it must have."""

    def __init__(self, location: Location):
        self.store: Any
        self.path: str
        self.store, self.path = find_store(location)
        try:
            info = find_info(self.store, self.path)
        except Exception as exc:
            raise failed(exc, location) from location.safe(exc)
        self.size: Any | None = info.get("size")
        self.version: tuple[Any, ...] = version_of(info)

    def _alone(self) -> AbstractContextManager[Any]:
        """Return a lock if the store is a cache of fsspec, which only one thread at a time may use.

        Its table loses entries that two threads add at once, and while one thread fetches a whole file, another would
        find a part of it.
        """
        return _cache_tables() if hasattr(self.store, "check_files") else nullcontext()

    def open(self) -> Any:
        """Return fsspec's file; reading it raises OpenError if a block is of another version."""
        with self._alone():
            file = self.store.open(self.path, "rb")
        cache: Any = getattr(file, "cache", None)
        if hasattr(cache, "fetcher"):
            fetcher = cache.fetcher
            cache.fetcher = lambda start, end: self.check(fetcher(start, end))
        return file

    def fetch(self, start: int, end: int) -> Any:
        """Return the bytes from *start* to *end*; raise OpenError if they are of another version."""
        traffic.count("requests")
        with self._alone():
            data = self.check(self.store.cat_file(self.path, start=start, end=end))
        traffic.count("bytes", len(data))
        return data

    def check(self, data: Any = b"") -> Any:
        """Return *data*, which was just read, if the file still has this version; else raise OpenError."""
        if version_of(find_info(self.store, self.path)) != self.version:
            raise OpenError(CHANGED)
        return data


def version_of(info: dict[str, Any]) -> tuple[Any, ...]:
    """Return the version of a file: its size, and the best of VALIDATORS in its info.

    >>> version_of({"size": 3, "mtime": 1.5, "ETag": "v1"})
    (3, 'ETag', 'v1')
    """
    best = next((name for name in VALIDATORS if info.get(name)), "")
    return info.get("size"), best, info.get(best)


class StoreInput(InputStream):
    """A file of a store, whose size and version are checked."""

    def __init__(self, location: Location):
        self.name: str = location.name
        self._location = location
        self._opened = Opened(location)  # keeps the store alive: an archive that is garbage-collected closes its files
        try:
            file = self._opened.open()
        except Exception as exc:
            raise failed(exc, self._location) from self._location.safe(exc)
        # memory: returns the same object, with one position, to every reader.
        self._file = io.BytesIO(file.getvalue()) if isinstance(file, io.BytesIO) else file
        self._size = getattr(file, "size", None)

    def read_some(self, size: int) -> bytes:
        offset = self._file.tell()
        try:
            data: bytes = self._file.read(size)
            if not data and self._size is not None and offset < self._size:
                raise OpenError(f"read {offset} bytes instead of {self._size}")
            if not data and not hasattr(self._file, "cache") and not isinstance(self._file, io.BytesIO):
                self._opened.check()  # no block of such a file was checked
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
        self.name: str = location.name
        self._location = location
        self._opened = PerProcess(partial(Opened, location))  # stores have threads, which a fork does not copy
        opened = self._opened()
        if opened.size is None:
            raise OpenError("the store does not report the size, which random access requires", url=self.name)
        self.size: int = int(opened.size)
        self._version = opened.version

    def read(self, offset: int, size: int) -> bytes:
        if offset < 0 or offset + size > self.size:
            raise OpenError(f"no {size} bytes at offset {offset} of {self.size}", url=self.name)
        try:
            opened = self._opened()
            if opened.version != self._version:
                raise OpenError(CHANGED)
            data = opened.fetch(offset, offset + size) if size else b""
        except Exception as exc:
            raise failed(exc, self._location, offset) from self._location.safe(exc)
        if len(data) != size:
            raise OpenError(f"read {len(data)} bytes instead of {size}", url=self.name, offset=offset)
        return bytes(data)

    @property
    def version(self) -> tuple[Any, ...]:
        return self._version


# Objects that are written in parts.


def size_of_part(number: int) -> int:
    """Return the bytes of a part, by its number, from 1."""
    return PART << (number - 1) // GROWTH


class Upload:
    """An object that is being written; each store has a subclass.

    A part is sent as soon as more data follows, so that small objects take one request. After a kill -9, parts remain
    until the store expires them; no listing shows them.
    """

    def __init__(self, location: Location, store: Any, path: str):
        self.location = location
        self.store = store
        self.path = path
        self.bucket: str
        self.key: str
        self.bucket, self.key = store.split_path(path)[:2]
        self.requests: Requests = Requests(location, self.is_over)
        self._buffer = bytearray()
        self._executor: ThreadPoolExecutor | None = None
        self._running: deque[Future[Any]] = deque()
        self._sent: list[Any] = []
        self._is_discarded = False

    @classmethod
    def is_possible(cls, store: Any) -> bool:
        """Return whether *store* has those methods of its scheme's usual package that are used here."""
        raise NotImplementedError

    def begin(self) -> None:
        raise NotImplementedError

    def put(self, number: int, data: bytes) -> Any:
        """Store a part; return its entry in the list for `complete`."""
        raise NotImplementedError

    def complete(self, parts: list[Any]) -> None:
        raise NotImplementedError

    def end(self) -> None:
        """Remove the parts of an upload that will not be completed."""
        raise NotImplementedError

    def put_whole(self, data: bytes) -> None:
        """Store a small object."""
        self.requests.attempt(lambda: self.store.pipe_file(self.path, data))

    def is_over(self) -> bool:
        return self._is_discarded

    def write(self, data: Any) -> None:
        self._buffer += data
        while len(self._buffer) > size_of_part(self._number):
            self._send(size_of_part(self._number))

    @property
    def _number(self) -> int:
        """The number of the next part."""
        return len(self._sent) + len(self._running) + 1

    def _send(self, size: int) -> None:
        """Begin to upload the first *size* bytes of the buffer; wait while too many parts are under way."""
        most = min(MEMORY // PART, self.location.remote.connections)
        if self._executor is None:
            self.begin()
            self._executor = ThreadPoolExecutor(most, "tarshards-upload")
        while len(self._running) >= max(1, min(most, MEMORY // size)):
            self._settle()
        number, data = self._number, bytes(self._buffer[:size])
        del self._buffer[:size]
        with defer_signals():
            self._running.append(self._executor.submit(self.put, number, data))

    def _settle(self) -> None:
        """Wait for the first part under way. A failed part stays, so that the upload cannot be completed."""
        self._sent.append(settled(self._running[0]).result())
        self._running.popleft()

    def finish(self) -> None:
        if self._executor is not None:
            self._send(len(self._buffer))
            while self._running:
                self._settle()
            self._executor.shutdown()

    def commit(self) -> None:
        if self._executor is None:
            self.put_whole(bytes(self._buffer))
        else:
            self.complete(self._sent)
        self.store.invalidate_cache(self.path)

    def discard(self) -> None:
        if self._executor is not None:
            self._is_discarded = True
            self._executor.shutdown(cancel_futures=True)  # a part that arrives after `end` would remain
            with suppress(Exception):
                self.end()
        self._buffer.clear()


def upload(kind: Upload) -> OutputStream:
    """Return an OutputStream into an upload."""
    name = kind.location.name
    return OutputStream(name, kind.write, finish=kind.finish, commit=kind.commit, discard=kind.discard)


class S3Upload(Upload):
    """A multipart upload of S3: bodies go to signed URLs, all other requests through s3fs."""

    id: str = ""

    @classmethod
    def is_possible(cls, store: Any) -> bool:
        # Options such as a storage class are headers, which signed URLs lack; put_file of s3fs sends them.
        return hasattr(store, "call_s3") and not (store.s3_additional_kwargs or store.req_kw)

    def begin(self) -> None:
        self.id = self._call("create_multipart_upload")["UploadId"]

    def put(self, number: int, data: bytes) -> dict[str, Any]:
        tag = self._put(data, client_method="upload_part", UploadId=self.id, PartNumber=number)
        return {"PartNumber": number, "ETag": tag}

    def put_whole(self, data: bytes) -> None:
        self._put(data, client_method="put_object")

    def complete(self, parts: list[Any]) -> None:
        self._call("complete_multipart_upload", UploadId=self.id, MultipartUpload={"Parts": parts})

    def end(self) -> None:
        self.store.call_s3("abort_multipart_upload", Bucket=self.bucket, Key=self.key, UploadId=self.id)

    def _call(self, method: str, **options: Any) -> Any:
        return self.requests.attempt(lambda: self.store.call_s3(method, Bucket=self.bucket, Key=self.key, **options))

    def _put(self, data: bytes, **operation: Any) -> str | None:
        """Send a body; return its ETag."""
        checksum = checksum_of(data)
        address = S3Address(self.location, ContentMD5=checksum, **operation)
        headers = {"Content-MD5": checksum, "Content-Length": str(len(data))}

        def action() -> str | None:
            try:
                with address.request(headers, method="PUT", body=io.BytesIO(data)) as response:
                    return response.headers.get("ETag")
            except StatusError as error:
                if error.code == 400 and not error.is_expired:  # the body arrived incomplete, altered, or too slowly
                    raise ConnectionError(str(error)) from error
                raise

        return Patience(address, self.is_over).attempt(action)


class GsUpload(Upload):
    """A multipart upload of Google Cloud Storage (its XML API), through gcsfs, which retries requests itself."""

    id: str = ""

    @classmethod
    def is_possible(cls, store: Any) -> bool:
        return hasattr(store, "call") and hasattr(store, "base")

    def begin(self) -> None:
        _, answer = self._call("POST", uploads="")
        found = re.search(rb"<UploadId>([^<]+)</UploadId>", answer)
        if not found:
            raise OpenError("the store did not start the upload", url=self.location.name)
        self.id = found[1].decode()

    def put(self, number: int, data: bytes) -> str:
        headers = {"Content-MD5": checksum_of(data)}
        answer, _ = self._call("PUT", headers=headers, data=data, partNumber=number, uploadId=self.id)
        return f"<Part><PartNumber>{number}</PartNumber><ETag>{answer['ETag']}</ETag></Part>"

    def complete(self, parts: list[Any]) -> None:
        text = f"<CompleteMultipartUpload>{''.join(parts)}</CompleteMultipartUpload>"
        _, answer = self._call("POST", data=text.encode(), uploadId=self.id)
        if b"<CompleteMultipartUploadResult" not in answer:  # an error may come after the status
            raise OpenError("the store did not complete the upload", url=self.location.name)

    def end(self) -> None:
        self.store.call("DELETE", self._url, uploadId=self.id)

    @property
    def _url(self) -> str:
        return f"{self.store.base.removesuffix('/storage/v1/')}/{self.bucket}/{quote(self.key)}"

    def _call(self, method: str, **options: Any) -> Any:
        return self.requests.attempt(lambda: self.store.call(method, self._url, **options))


def checksum_of(data: bytes) -> str:
    """Return the Content-MD5 of a body."""
    return b64encode(md5(data, usedforsecurity=False).digest()).decode()


class Store(Transport):
    def address(self, location: Location) -> Address | None:
        return address_of(location)

    def open(self, location: Location, mode: str) -> InputStream | OutputStream:
        if mode == "rb":
            return StoreInput(location) if self.address(location) is None else ForwardReader([location]).open(0)
        store, path = find_store(location)
        if location.scheme in BUCKETS:
            kind = S3Upload if location.scheme in S3 else GsUpload
            if kind.is_possible(store):
                return upload(kind(location, store, path))
        return spooled(location.name, lambda file: Requests(location).attempt(lambda: store.put_file(file.name, path)))

    def read(self, location: Location, most: int) -> bytes:
        address = self.address(location)
        return super().read(location, most) if address is None else bytes(run(read_whole(address, most)))

    def hold(self, location: Location, most: int, allocate: Callable[[int], Any] = bytearray) -> Any:
        address = self.address(location)
        return super().hold(location, most) if address is None else run(hold_whole(address, most, allocate))

    def ranges(self, location: Location, size: int | None = None) -> Ranges:
        address = self.address(location)
        return StoreRanges(location) if address is None else RemoteFile.opened(address, size)

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

    def version(self, location: Location) -> list[Any]:
        store, path = find_store(location)
        size, name, value = version_of(Requests(location).attempt(lambda: find_info(store, path)))
        return [size, name, str(value)]

    def remove(self, location: Location) -> None:
        store, path = find_store(location)
        try:
            Requests(location).attempt(lambda: store.rm_file(path))
        except OpenError as error:
            if not is_missing(error):
                raise

    def rename(self, location: Location, target: Location, replace: bool) -> None:
        (store, path), (_, to) = find_store(location), find_store(target)
        with nullcontext() if replace else self._new(store, to, target):
            Requests(target).attempt(lambda: store.cp_file(path, to))
        self.remove(location)

    @contextmanager
    def _new(self, store: Any, path: str, location: Location) -> Iterator[None]:
        """Keep others from creating an object in a with-block; raise OpenError if it exists.

        Copies cannot be conditional in all stores. So the object `NAME.claim` is put first, on the condition that there
        is none; a writer that is killed leaves it.
        """
        claim, own = location.sibling(CLAIM), uuid4().bytes
        claimed = find_store(claim)[1]

        def put() -> bool:
            try:
                store.pipe_file(claimed, own, mode="create")
            except FileExistsError:
                with suppress(FileNotFoundError):
                    return bool(store.cat_file(claimed) == own)  # by an attempt that was not answered
                return False
            return True

        if not Requests(location).attempt(put):
            reason = f"{claim.base} says that another writer makes it, or was killed while it did"
            raise OpenError(reason, url=location.name, errno=errno.EEXIST)
        try:
            if self.exists(location):
                raise OpenError(os.strerror(errno.EEXIST), url=location.name, errno=errno.EEXIST)
            yield
        finally:
            self.remove(claim)


TRANSPORT = Store()
