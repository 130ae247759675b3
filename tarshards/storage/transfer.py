"""Requests to web servers, and bodies that are never silently short: what breaks off is resumed at the exact byte."""

from __future__ import annotations

import base64
import http.client
import random
import re
import socket
import ssl
import string
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from email.utils import parsedate_to_datetime
from functools import cache, cached_property
from hashlib import blake2b, pbkdf2_hmac
from itertools import pairwise
from time import monotonic, sleep, time
from typing import Any, NamedTuple, Protocol, TypeVar
from urllib.parse import quote, unquote, urldefrag, urljoin, urlsplit

from tarshards.errors import OpenError, UrlError
from tarshards.parallel import TICK, DaemonThreads
from tarshards.storage import connections, traffic
from tarshards.storage.cache import Block, BlockCache
from tarshards.storage.connections import Origin, Response, StalledError
from tarshards.storage.location import Location
from tarshards.storage.locks import PerProcess
from tarshards.storage.redaction import without_signature, without_userinfo
from tarshards.storage.streams import encoded, errno_of, read_at_most

#: Seconds before the second attempt, doubled with every further one, and the longest wait.
PAUSE, LONGEST_PAUSE = 0.5, 60.0

REDIRECTS = 10  # at most, for one request
REMEMBERED = 60.0  # seconds for which a file is asked for where the last redirect led
AT_ONCE = 1 << 18  # bytes
MOVES = 3  # times that the rest of a range is asked for over another connection because its own has stalled
LARGE = 1 << 19  # bytes of a request that takes longer than the wait for its answer
JUDGED, LATE = 0.1, 0.25  # seconds after which a large request is judged by its pace, and that its rest may then take
LEAST = 1 << 16  # bytes that are worth a request of their own where connections are idle
BEGINNING = 5 << 13  # bytes that come over a new connection in two round trips
HEAD = 1024  # bytes of the beginning that come with the other metadata of a file
_ANY_METHOD = {307, 308}  # redirects that repeat the request as it was
_REDIRECTS = {301, 302, 303} | _ANY_METHOD

#: Statuses that may go away by themselves.
PASSING = {408, 425, 429, 500, 502, 503, 504}

# What a host, a number or a chunk that cannot be raises.
_MALFORMED = (ValueError, OverflowError)

_NUMBER = r"(\d{1,18})"  # of bytes: what 64 bits hold
_RANGE = re.compile(rf"bytes {_NUMBER}-{_NUMBER}/{_NUMBER}")

CHANGED = "changed while it was read"
NO_RANGES = "the server serves no ranges, which random access requires"

#: Content-Encodings that leave the bytes as they are; "aws-chunked" is how S3 is sent objects, and some stores keep it.
_AS_THEY_ARE = ("", "identity", "aws-chunked", "utf-8")

_T = TypeVar("_T")


class StatusError(OSError):
    """An answer whose status is not 2xx; *code* is that status."""

    def __init__(self, response: Response):
        super().__init__(f"{response.status} {response.reason}")
        self.code, self.reason, self.headers = response.status, response.reason, response.headers


class Version(NamedTuple):
    """What identifies the bytes of a file: its size, a strong ETag or else a weak one, and its time of change.

    *encoding* is how they are encoded, as the server says; size and ranges are then those of the encoded bytes.
    """

    size: int
    etag: str
    modified: str
    encoding: str = ""

    @classmethod
    def of(cls, response: Response, size: int) -> Version:
        etag, modified = response.headers.get("ETag", ""), response.headers.get("Last-Modified", "")
        return cls(size, etag, "" if etag and not etag.startswith("W/") else modified, encoding_of(response))

    @property
    def validator(self) -> str | None:
        """What asks for equal bytes, as If-Range does; None where only a weak ETag, or nothing, tells of a change."""
        strong = self.etag if not self.etag.startswith("W/") else ""
        return strong or self.modified or None


NOT_ENCODED = Version(-1, "", "")


class Address:
    """Where the requests for a location go: its URL and the credentials to send."""

    _login: str | None = None
    _moved: tuple[str, str, float] | None = None  # which URL has redirected, to which one, and until when to go there

    def __init__(self, location: Location):
        self.location, self.name = location, location.name
        try:
            parts = urlsplit(location.url)
            known = bool(parts.hostname) and (parts.port or 0) >= 0
            self._url = quote(without_userinfo(location.url), safe=string.punctuation)
            user = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}".encode()
        except ValueError:
            known = False
        if not known:
            # A URL with a password is kept out of the message, because that may be what is malformed.
            name = None if "@" in location.url else location.name
            raise UrlError("an http URL is http://host:port/path, special characters of a password as %XX", url=name)
        self._login = None if parts.username is None else "Basic " + base64.b64encode(user).decode()

    @property
    def target(self) -> tuple[str, dict[str, str]]:
        """The URL to ask, and the headers that only its origin gets."""
        return self._url, {} if self._login is None else {"Authorization": self._login}

    def renew(self) -> bool:
        """Get new credentials for those that were refused; return whether there may be some."""
        return False

    @cached_property
    def digest(self) -> str:
        """A digest of what tells the object from others: its URL without what signs it, and the login that asks.

        A server may answer each login otherwise. What a store calls an object, its endpoint included, is in its URL.
        """
        place, _, query = self.target[0].partition("?")
        login = "" if self._login is None else _digest_of_login(self._login, Origin.of(place))
        named = f"{place}?{without_signature(query)} {login}"
        return blake2b(named.encode(errors="surrogateescape"), digest_size=16).hexdigest()

    @property
    def place(self) -> str:
        """The URL that a GET asks: that of ``target``, or where its last redirect led."""
        url = self.target[0]
        moved = self._moved
        return url if moved is None or moved[0] != url or monotonic() >= moved[2] else moved[1]

    def request(self, headers: dict[str, str], *, method: str = "GET", body: Any = None) -> Response:
        """Return the answer to a request after redirects; raise StatusError for every status but 2xx.

        Only 307 and 308 redirect other methods than GET; *body*, a file, is then sent again. Credentials stay with the
        origin that they are for. What is raised at the target of a redirect has a note that names it. Raises OpenError
        for a redirect to another scheme, and for too many. Where a GET was redirected to is asked at once for a minute,
        unless it fails: hubs redirect every range, and allow few requests to themselves.
        """
        url, secret = self.target
        if method == "GET" and (place := self.place) != url:
            try:
                return self._ask_once(method, place, headers, None)
            except (OSError, http.client.HTTPException, *_MALFORMED):
                self._moved = None
        visited = [url]
        while True:
            try:
                response = self._ask_once(method, url, {**headers, **secret}, body)
                if len(visited) > 1 and method == "GET" and not secret:
                    self._moved = visited[0], url, monotonic() + REMEMBERED
                return response
            except (OSError, http.client.HTTPException, *_MALFORMED) as error:
                failure = error
            target = self._redirected(url, method, failure)
            if target is None:
                if len(visited) > 1:
                    failure.add_note(f"redirected to {Location(url).name}")
                raise failure
            if target in visited or len(visited) > REDIRECTS:
                reason = "a loop of redirects" if target in visited else f"more than {REDIRECTS} redirects"
                status = status_of(failure, self.location)
                raise OpenError(f"{status}: {reason}, the last to {Location(target).name[:200]}", url=self.name)
            visited.append(target)
            if Origin.of(target) != Origin.of(url):
                secret = {}
            url = target

    def _ask_once(self, method: str, url: str, headers: dict[str, str], body: Any) -> Response:
        sent = {"User-Agent": "tarshards", **headers}
        response = connections.request(method, url, sent, body=body, timeout=self.location.remote.timeout)
        if 200 <= response.status < 300:
            return response
        response.close()
        raise StatusError(response)

    def _redirected(self, url: str, method: str, failure: Exception) -> str | None:
        """Return the URL that an answer redirects to, if it does; OpenError for one that is not http or https."""
        code = failure.code if isinstance(failure, StatusError) else None
        place = failure.headers.get("Location") if code in _REDIRECTS else None  # type: ignore[attr-defined]
        if not place:
            return None
        if method != "GET" and code not in _ANY_METHOD:
            failure.add_note(f"which redirects no {method}; only 307 and 308 do")
            return None
        try:
            target = urldefrag(urljoin(url, without_userinfo(place))).url
            Origin.of(target)
        except ValueError:
            shown = self.location.redacted(place)[:200] if urlsplit_or_none(place) else "a malformed URL"
            raise OpenError(f"redirected to {shown}, which is neither http nor https", url=self.name) from None
        # Headers come as Latin-1, whatever their bytes are.
        return quote(target, encoding="iso-8859-1", safe=string.punctuation)


@cache
def _digest_of_login(login: str, origin: Origin) -> str:
    """Return a digest that takes 20 ms to compute, so that trying passwords with it is slow."""
    return pbkdf2_hmac("sha256", login.encode(), repr(origin).encode(), 1 << 16).hex()


def urlsplit_or_none(url: str) -> Any:
    """Return the parts of *url*, None if it is malformed."""
    try:
        return urlsplit(url)
    except ValueError:
        return None


def status_of(error: Any, location: Location) -> str:
    """Return the status and the reason of a StatusError, without credentials."""
    return location.redacted(" ".join(f"{error.code} {error.reason}".split()))


class Renewable(Protocol):
    """What requests are sent for, and with which credentials: an Address, or a store of fsspec."""

    location: Location

    def renew(self) -> bool: ...


class Patience:
    """Retries: pauses after each failure, raises after too many in a row without progress, or once it *is_over*."""

    def __init__(self, address: Renewable, is_over: Callable[[], bool] | None = None):
        self.address, self.location, self.failures = address, address.location, 0
        self._renewed, self._is_over = False, is_over

    def attempt(self, action: Callable[[], _T], offset: Callable[[], int | None] = lambda: None) -> _T:
        """Return what *action* returns once it succeeds; *offset* gives the offset of an error."""
        while True:
            try:
                result = action()
            except OpenError:  # which waiting does not help
                raise
            except (OSError, http.client.HTTPException, *_MALFORMED) as error:
                if getattr(error, "code", None) in (401, 403) and not self._renewed and self.address.renew():
                    self._renewed = True
                    continue
                self.failures += 1
                if not _may_pass(error) or self.failures > self.location.remote.retries or self._ends():
                    raise self._failure(error, offset()) from self.location.safe(error)
                traffic.count("retries")
                pause = PAUSE * 2 ** (self.failures - 1) * random.uniform(0.5, 1)
                self._wait(min(max(pause, _retry_after(error)), LONGEST_PAUSE))
            else:
                self.failures = 0
                return result

    def _ends(self) -> bool:
        return self._is_over is not None and self._is_over()

    def _wait(self, seconds: float) -> None:
        while self._is_over is not None and seconds > TICK:
            if self._is_over():
                return
            sleep(TICK)
            seconds -= TICK
        sleep(seconds)

    def _failure(self, error: Exception, offset: int | None) -> OpenError:
        reason = " ".join(self.location.words(error).split())
        if isinstance(error, StatusError):
            reason = status_of(error, self.location)
            if region := error.headers.get("x-amz-bucket-region"):
                reason += f" (the bucket is in {region}: set AWS_DEFAULT_REGION)" if error.code in (301, 400) else ""
        reason = ", ".join([reason, *getattr(error, "__notes__", [])])
        tried = f" (attempt {self.failures})" if self.failures > 1 else ""
        return OpenError(reason + tried, url=self.location.name, offset=offset, errno=errno_of(error))


def _may_pass(error: BaseException) -> bool:
    if isinstance(error, StatusError):
        return error.code in PASSING
    if isinstance(error, (ssl.SSLCertVerificationError, http.client.InvalidURL, *_MALFORMED)):
        return False
    return not (isinstance(error, socket.gaierror) and error.errno == socket.EAI_NONAME)


def _retry_after(error: BaseException) -> float:
    """Return the seconds that a server asks us to wait."""
    value = error.headers.get("Retry-After", "") if isinstance(error, StatusError) else ""
    try:
        return float(value) if value.isdecimal() else parsedate_to_datetime(value).timestamp() - time()
    except (ValueError, TypeError, OverflowError):
        return 0.0


class Transfer:
    """A body that is read forwards, by as many requests as it takes, up to *end* where that is known.

    Kinds of it say what they ask for, and whether an answer continues what was read. Reading raises OpenError.
    """

    def __init__(self, address: Address, begin: int, end: int | None, response: Response | None = None):
        self.address, self.name = address, address.name
        self.position, self.end = begin, end
        self.is_dropped = False
        self._response = response
        self._buffer: memoryview | None = None
        self._patience = Patience(address, lambda: self.is_dropped)

    def open(self) -> None:
        """Send the first request."""
        self._patience.attempt(self._begin, self._offset)

    def read(self, size: int) -> bytes:
        """Return at least one byte and at most *size*, none at the end."""
        if self._buffer is None:
            self._buffer = memoryview(bytearray(AT_ONCE))
        view = self._buffer[: size if self.end is None else min(size, self.end - self.position)]
        return bytes(view[: self._readinto(view)])

    def fill(self, view: memoryview) -> None:
        """Fill *view*, which is no longer than what is left."""
        done = 0
        while done < len(view) and not self._share(view[done:]):
            done += self._readinto(view[done : done + AT_ONCE])
        if self.position == self.end:
            self.close()

    def _share(self, view: memoryview) -> bool:
        """Return whether *view* was filled over other connections."""
        return False

    def _readinto(self, view: memoryview) -> int:
        return self._patience.attempt(lambda: self._receive(view), self._offset) if len(view) else 0

    def _receive(self, view: memoryview) -> int:
        """Read what comes next into *view*, and return how many bytes; only then do they count as read."""
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
        """Return an answer that begins at *position*."""
        raise NotImplementedError

    def _offset(self) -> int | None:
        return self.position or None

    def close(self) -> None:
        """Close the answer that is under way, if there is one."""
        if self._response is not None:
            self._response.close()
            self._response = None

    def drop(self) -> None:
        """Let a thread that waits for its bytes fail soon."""
        self.is_dropped = True
        response = self._response
        if response is not None:
            response.abort()

    def error(self, reason: str) -> OpenError:
        return OpenError(reason, url=self.name, offset=self._offset())


class WholeTransfer(Transfer):
    """A whole file, whose length may be unknown, of a server that may support no ranges."""

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
        """Return *response*, advanced to where the last one broke off, if it is the same body."""
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
        """Read what was read already: the server supports no ranges and sends the whole body again."""
        skipped = 0
        while skipped < self.position:
            data = response.read(min(self.position - skipped, 1 << 16))
            if not data:
                raise ConnectionError("the answer ended again before what was read already")
            skipped += len(data)


class RangeTransfer(Transfer):
    """The bytes of a file from *begin* to *end*, of this *version*; without one, of the version that answers."""

    end: int
    large: LargeRequest | None = None
    _moves = 0
    _parts: _Parts | None = None

    def __init__(
        self, address: Address, begin: int, end: int, version: Version | None, response: Response | None = None
    ):
        super().__init__(address, begin, end, response)
        self.version = version
        if response is not None:
            response.leaves_stalled = True

    def _share(self, view: memoryview) -> bool:
        if self.large is None or self.version is None or len(view) < 2 * LEAST or not self.large.is_late(len(view)):
            return False
        self.close()
        count = max(1, self.address.location.remote.connections // 2)
        # Those of fetching_threads may all wait for the bytes that are fetched here.
        threads = connections.fetching_threads(count, "parts")
        size = max(LEAST, -(-len(view) // count))
        self._parts = _Parts(self.address, self.position, view, self.version, size, threads)
        if self.is_dropped:
            self._parts.drop()
        self._parts.wait()
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
        response.leaves_stalled = self._moves < MOVES
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


class _Parts:
    """The bytes of a file from *begin* on, which fill *view*: *threads* fetch *size* bytes each."""

    def __init__(
        self,
        address: Address,
        begin: int,
        view: memoryview,
        version: Version,
        size: int,
        threads: DaemonThreads,
    ):
        cuts = [*range(0, len(view), size), len(view)]
        self._transfers = [RangeTransfer(address, begin + a, begin + b, version) for a, b in pairwise(cuts)]
        views = [view[a:b] for a, b in pairwise(cuts)]
        self._futures = [threads.submit(transfer.fill, part) for transfer, part in zip(self._transfers, views)]

    def wait(self) -> None:
        """Wait until all have come; raise the error of one that cannot be read."""
        try:
            for future in self._futures:
                future.result()
        except BaseException:
            self.drop()
            raise

    def drop(self) -> None:
        """Fetch no more of them."""
        for transfer, future in zip(self._transfers, self._futures):
            if not future.cancel():
                transfer.drop()


def begin_transfer(
    address: Address, size: int, is_over: Callable[[], bool] | None = None
) -> WholeTransfer | RangeTransfer:
    """Return the first *size* bytes of a file, or where its server supports no ranges the whole file; they are open.

    The bytes are of a file that has a version with a validator, so that other ranges can be known to belong to it.
    No more retries are made once it *is_over*.
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


def read_whole(address: Address, most: int) -> bytes:
    """Return the bytes of a file, no more than *most*.

    The readers of whole files share the idle connections: a long file comes over several, each slow at its beginning.
    """
    with _sharing_idle(address) as idle:
        if idle() > 1:
            try:
                return _read_spread(address, most, idle)
            except OpenError as error:
                if error.reason != CHANGED:
                    raise
        with closing(WholeTransfer(address)) as transfer:
            transfer.open()
            refuse_encoded(transfer)
            return read_at_most(transfer, most, AT_ONCE)


@contextmanager
def _sharing_idle(address: Address) -> Iterator[Callable[[], int]]:
    """Count a reader of a whole file; give a function that returns its share of the idle connections."""
    key = Origin.of(address.place)
    lock, readers = _whole_readers()
    with lock:
        readers[key] += 1
    try:
        yield lambda: connections.spare(address.place) // readers[key]
    finally:
        with lock:
            readers[key] -= 1


_whole_readers: PerProcess[tuple[threading.Lock, Counter[Origin]]] = PerProcess(lambda: (threading.Lock(), Counter()))


def _read_spread(address: Address, most: int, idle: Callable[[], int]) -> bytes:
    """Return what ``read_whole`` does; raise OpenError if the file changes meanwhile."""
    with _beginning(address, BEGINNING, most) as (beginning, version):
        if isinstance(beginning, bytes):
            return beginning
        buffer = bytearray(min(version.size, most))
        begin = min(beginning.end, len(buffer))
        view, rest = memoryview(buffer)[:begin], memoryview(buffer)[begin:]
        size = max(BEGINNING, -(-len(rest) // max(1, idle())))
        threads = connections.fetching_threads(address.location.remote.connections, "beginnings")
        parts = _Parts(address, begin, rest, version, size, threads)
        try:
            beginning.fill(view)
            parts.wait()
        finally:
            parts.drop()
    return bytes(buffer)


@contextmanager
def _beginning(address: Address, size: int, most: int) -> Iterator[tuple[RangeTransfer | bytes, Version]]:
    """Open the first *size* bytes of a file; give the transfer and the version of the file.

    Where its server supports no ranges, give the whole file instead, no more than *most* bytes.
    """
    with closing(begin_transfer(address, size)) as beginning:
        refuse_encoded(beginning)
        version = beginning.version
        assert version is not None
        yield read_at_most(beginning, most, AT_ONCE) if isinstance(beginning, WholeTransfer) else beginning, version


def hold_whole(address: Address, most: int) -> Any:
    """Return what ``read_whole`` does, or as a ``MappedBlock`` where the cache has it on its disk.

    In the cache it stands for its version and its first KiB, which a server is always asked for: of a file that was
    replaced, these differ where its validator, a time in seconds, may not.
    """
    if address.location.remote.cache_dir is None:
        return read_whole(address, most)
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
        return read_whole(address, most)


def read_range(address: Address, begin: int, end: int, version: Version | None = None) -> tuple[bytearray, Version]:
    """Return the bytes from *begin* to *end*, or to the end of the file, and the version that they are of.

    Raises OpenError if that is not *version*, or the server supports no ranges.
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
    """Wait until a request for *size* bytes may be sent, and count it while it is under way; None if it is not large.

    Large ones to a server that answers soon use half of the connections: so many fill the line, and more than that
    overflow its buffers. Where answers begin late, and for small requests, all connections are needed.
    """
    if size < LARGE:
        yield None
        return
    remote, url = address.location.remote, address.place
    soonest = connections.soonest(url)
    most = remote.connections if soonest > connections.FAR else max(1, remote.connections // 2)
    under_way = _large_requests()[Origin.of(url)]
    with under_way.changed:
        under_way.changed.wait_for(lambda: under_way.count < most)
        under_way.count += 1
    try:
        begun = monotonic()
        yield LargeRequest(under_way, most, size, soonest)
        under_way.end((monotonic() - begun) / size)
    finally:
        with under_way.changed:
            under_way.count -= 1
            under_way.changed.notify()


class _LargeRequests:
    """The large requests of a process to one server, and the *pace* of those that have ended, in seconds a byte."""

    def __init__(self) -> None:
        self.count = 0
        self.changed = threading.Condition()
        self.pace = 0.0

    def end(self, pace: float) -> None:
        """Count the pace of one that has ended."""
        self.pace += (pace - self.pace) / 8 if self.pace else pace


class LargeRequest:
    """One of those under way, at most *most* at once, for *size* bytes; an answer takes *soonest* seconds or longer."""

    def __init__(self, under_way: _LargeRequests, most: int, size: int, soonest: float):
        self._under_way, self._most = under_way, most
        self._soonest = soonest
        self._time, self._rest = monotonic(), size

    def is_late(self, rest: int) -> bool:
        """Return whether idle connections would bring the *rest* much sooner.

        At the end of an epoch all wait for the slowest: that of a connection that resends what was lost, little by
        little, while others have nothing to do.
        """
        took, came = monotonic() - self._time, self._rest - rest
        if took < max(JUDGED, 2 * self._soonest):
            return False
        self._time, self._rest = self._time + took, rest
        pace, others = took / max(came, 1), self._under_way.pace
        are_idle = 2 * self._under_way.count <= self._most
        return are_idle and pace > 2 * others > 0 and rest * pace > max(LATE, 5 * self._soonest)


_large_requests: PerProcess[dict[Origin, _LargeRequests]] = PerProcess(lambda: defaultdict(_LargeRequests))


def through_cache(
    address: Address,
    begin: int,
    end: int,
    version: Version,
    fetch: Callable[[], bytes | bytearray],
    *,
    mapped: bool = False,
) -> Any:
    """Return the bytes from *begin* to *end* of this *version* from the cache, or as *fetch* returns them.

    With *mapped* those that the cache has on its disk are a ``MappedBlock``.
    """
    cached = cached_block(address, begin, end, version)
    if cached is None:
        return fetch()
    cache, block = cached
    return cache.hold(block, fetch) if mapped else cache.take(block, fetch)


def cached_block(address: Address, begin: int, end: int, version: Version) -> tuple[BlockCache, Block] | None:
    """Return the cache and the block in it of these bytes; None where they are not cached."""
    cache = BlockCache.of(address.location.remote)
    url = without_userinfo(address.location.url)
    path, _, query = url.partition("?")
    validator = version.validator
    if cache is None or validator is None or (query and validator != version.etag):  # others may have it too
        return None
    return cache, Block(path, validator, version.size, begin, end - begin, address.digest)


def ask_for(address: Address, begin: int, end: int) -> Response:
    """Return the answer to a request for the bytes from *begin* to *end*."""
    return address.request({"Accept-Encoding": "identity", "Range": f"bytes={begin}-{end - 1}"})


def range_of(response: Response, begin: int) -> Version | None:
    """Return the version of the file in a range that begins at *begin*; None if *response* is no such range."""
    match = _RANGE.fullmatch(response.headers.get("Content-Range", "")) if response.status == 206 else None
    if match is None or int(match[1]) != begin or not begin <= int(match[2]) < int(match[3]):
        return None
    if encoding_of(response) and response.length != int(match[2]) + 1 - begin:
        return None  # a range of the file that was encoded by itself
    return Version.of(response, int(match[3]))


def no_range(response: Response) -> str:
    """Say why *response* is not the range that was asked for."""
    if response.status == 206:
        return f"the server sent a wrong Content-Range {response.headers.get('Content-Range', '')[:80]!r}"
    return NO_RANGES


def encoding_of(response: Response) -> str:
    """Return the Content-Encoding of *response*; "" where that leaves the bytes as they are."""
    values = ",".join(response.headers.get_all("Content-Encoding", [])).split(",")
    return ", ".join(value.strip() for value in values if value.strip().lower() not in _AS_THEY_ARE)


def refuse_encoded(transfer: WholeTransfer | RangeTransfer) -> None:
    """Raise OpenError if the bytes of *transfer* are not those of its file."""
    if transfer.version is not None and transfer.version.encoding:
        raise encoded(transfer.version.encoding, transfer.name, ", or stream a shard (index=False)")


def check_body(response: Response, name: str, version: Version | None = NOT_ENCODED) -> None:
    """Raise OpenError for a body that is encoded otherwise than *version*, ConnectionError for one that broke off."""
    # http.client takes truncated headers for whole ones, but then nothing follows them.
    if response.length != 0 and not response.peek():
        raise ConnectionError("the answer broke off before its first byte")
    encoding = encoding_of(response)
    if encoding and version is not None and encoding != version.encoding:
        raise encoded(encoding, name)
    for value in response.headers.get_all("Transfer-Encoding", []):
        if value.strip().lower() not in ("", "identity", "chunked"):
            raise OpenError(f"the server sent Transfer-Encoding {value}, which was not asked for", url=name)
