"""http: and https:, never silently short: a transfer that breaks off is resumed at the exact byte, or raises."""

from __future__ import annotations

import base64
import http.client
import random
import re
import socket
import ssl
import string
import urllib.request
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from functools import cache
from time import sleep, time
from typing import Any, TypeVar
from urllib.error import HTTPError
from urllib.parse import quote, unquote, urldefrag, urljoin, urlsplit

from tarshards.errors import OpenError, UrlError
from tarshards.storage.location import Location, Transport
from tarshards.storage.ranges import Ranges
from tarshards.storage.redaction import without_userinfo
from tarshards.storage.streams import InputStream, OutputStream, errno_of, is_missing, spooled

#: Seconds before the second attempt, doubled with every further one, and the longest wait.
PAUSE, LONGEST_PAUSE = 0.5, 60.0

HEAD = 1024  # bytes of the beginning that come with the size

REDIRECTS = 10  # at most, for one request
_REDIRECTS = {301, 302, 303, 307, 308}

# Statuses that may go away by themselves.
_PASSING = {408, 425, 429, 500, 502, 503, 504}

# What urllib raises of a host, a number or a chunk that cannot be.
_MALFORMED = (ValueError, OverflowError)

_NUMBER = r"(\d{1,18})"  # of bytes: what 64 bits hold

_T = TypeVar("_T")


class Http(Transport):
    def open(self, location: Location, mode: str, **_: Any) -> InputStream | OutputStream:
        address = Address(location)
        if mode == "rb":
            return HttpInput(address)
        return spooled(address.name, lambda file: put(address, file))

    def ranges(self, location: Location) -> Ranges:
        return HttpRanges(location)

    def remove(self, location: Location) -> None:
        address = Address(location)
        try:
            Patience(location).attempt(lambda: address.request({}, method="DELETE").close())
        except OpenError as error:
            if not is_missing(error):
                raise


TRANSPORT = Http()


class Address:
    """Where requests go: the URL and the credentials to send, and the location that messages show."""

    def __init__(self, location: Location):
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
        self.location, self.name = location, location.name
        self._authorization = None if parts.username is None else "Basic " + base64.b64encode(user).decode()

    def request(self, headers: dict[str, str], **options: Any) -> http.client.HTTPResponse:
        """Return the response to a request after redirects; raise HTTPError for every status but 2xx.

        Credentials stay with the scheme, host and port that they are for. What is raised at the target of a redirect
        has a note that names it. Raises OpenError for a redirect to another scheme, and for too many.
        """
        url, authorization, visited = self._url, self._authorization, [self._url]
        while True:
            request = urllib.request.Request(url, headers=headers, **options)
            request.add_header("User-Agent", "tarshards")
            if authorization:
                request.add_unredirected_header("Authorization", authorization)
            try:
                response: http.client.HTTPResponse = _opener().open(request, timeout=self.location.remote.timeout)
                return response
            except (OSError, http.client.HTTPException) as exc:
                failure = exc
            if isinstance(failure, HTTPError):
                failure.close()
            target = self._target(url, failure) if request.get_method() == "GET" else None
            if target is None:
                if len(visited) > 1:
                    failure.add_note(f"redirected to {Location(url).name}")
                raise failure
            if target in visited or len(visited) > REDIRECTS:
                reason = "a loop of redirects" if target in visited else f"more than {REDIRECTS} redirects"
                status = status_of(failure, self.location)
                raise OpenError(f"{status}: {reason}, the last to {Location(target).name[:200]}", url=self.name)
            visited.append(target)
            if _origin(target) != _origin(url):
                authorization = None
            url = target

    def _target(self, url: str, exc: Exception) -> str | None:
        """Return the URL that an answer redirects to, if it does; OpenError for one that is not http or https."""
        place = exc.headers.get("Location") if isinstance(exc, HTTPError) and exc.code in _REDIRECTS else None
        if not place:
            return None
        try:
            target = urldefrag(urljoin(url, without_userinfo(place))).url
            known = bool(_origin(target)[1])
        except ValueError:
            target, known = "", False
        if not known:
            shown = self.location.redacted(target)[:200] or "a malformed URL"
            raise OpenError(f"redirected to {shown}, which is neither http nor https", url=self.name)
        # Headers come as Latin-1, whatever their bytes are.
        return quote(target, encoding="iso-8859-1", safe=string.punctuation)


def status_of(exc: Any, location: Location) -> str:
    """Return the status and the reason of an HTTPError, without credentials."""
    return location.redacted(" ".join(f"{exc.code} {exc.reason}".split()))


def refuse_encoded(response: http.client.HTTPResponse, name: str) -> None:
    """Raise OpenError for a body whose bytes are not those of the file."""
    for header, known in ("Content-Encoding", "identity"), ("Transfer-Encoding", "chunked"):
        for value in response.headers.get_all(header, []):
            if value.strip().lower() not in ("", "identity", known):
                raise OpenError(f"the server sent {header} {value}, which was not asked for", url=name)


def _origin(url: str) -> tuple[str, str | None, int | None]:
    """Return what credentials belong to: the scheme, host and port; no host where the scheme is not of http."""
    parts = urlsplit(url)
    default = {"http": 80, "https": 443}.get(parts.scheme)
    return parts.scheme, parts.hostname if default else None, parts.port or default


@cache
def _opener() -> urllib.request.OpenerDirector:
    """Return what opens http and https, and follows no redirects."""
    opener = urllib.request.OpenerDirector()
    for handler in (urllib.request.ProxyHandler, urllib.request.HTTPHandler, urllib.request.HTTPSHandler):
        opener.add_handler(handler())
    opener.add_handler(urllib.request.HTTPDefaultErrorHandler())
    opener.add_handler(urllib.request.HTTPErrorProcessor())
    return opener


class Patience:
    """Retries: pauses after each failure, raises after too many in a row without progress."""

    def __init__(self, location: Location):
        self.location, self.retries, self.failures = location, location.remote.retries, 0

    def attempt(self, action: Callable[[], _T], offset: Callable[[], int | None] = lambda: None) -> _T:
        """Return what *action* returns once it succeeds; *offset* gives the offset of an error."""
        while True:
            try:
                result = action()
            except OpenError:  # which waiting does not help
                raise
            except (OSError, http.client.HTTPException, *_MALFORMED) as exc:
                self.failures += 1
                if not _may_pass(exc) or self.failures > self.retries:
                    raise self._failure(exc, offset()) from self.location.safe(exc)
                pause = PAUSE * 2 ** (self.failures - 1) * random.uniform(0.5, 1)
                sleep(min(max(pause, _retry_after(exc)), LONGEST_PAUSE))
            else:
                self.failures = 0
                return result

    def _failure(self, exc: Exception, offset: int | None) -> OpenError:
        reason = " ".join(self.location.words(exc).split())
        if isinstance(exc, HTTPError):
            reason = status_of(exc, self.location)
        reason = ", ".join([reason, *getattr(exc, "__notes__", [])])
        tried = f" (attempt {self.failures})" if self.failures > 1 else ""
        return OpenError(reason + tried, url=self.location.name, offset=offset, errno=errno_of(exc))


def _may_pass(exc: BaseException) -> bool:
    if isinstance(exc, HTTPError):
        return exc.code in _PASSING
    if isinstance(exc, _MALFORMED):
        return False
    reason = getattr(exc, "reason", exc)
    unknown_host = isinstance(reason, socket.gaierror) and reason.errno == socket.EAI_NONAME
    return not (unknown_host or isinstance(reason, ssl.SSLCertVerificationError | http.client.InvalidURL))


def _retry_after(exc: BaseException) -> float:
    """Return the seconds that a server asks us to wait."""
    value = exc.headers.get("Retry-After", "") if isinstance(exc, HTTPError) and exc.headers else ""
    try:
        return float(value) if value.isdecimal() else parsedate_to_datetime(value).timestamp() - time()
    except (ValueError, TypeError, OverflowError):
        return 0.0


class HttpInput(InputStream):
    """The body of one response, read by as many requests as it takes."""

    def __init__(self, address: Address):
        self.name = address.name
        self._address, self._patience = address, Patience(address.location)
        self._response: http.client.HTTPResponse | None = None
        self._position = 0
        self._length: int | None = None
        self._version: tuple[str, ...] = ()
        self._patience.attempt(self._connect)

    def read_some(self, size: int) -> bytes:
        return self._patience.attempt(lambda: self._receive(size), lambda: self._position or None)

    def _receive(self, size: int) -> bytes:
        if self._position == self._length:
            return b""
        if self._length is not None:
            size = min(size, self._length - self._position)
        try:
            data = (self._response or self._connect()).read1(size)
            if not data and self._length is not None:
                raise ConnectionError(f"the answer ended before its {self._length} bytes")
        except BaseException:
            self._disconnect()
            raise
        self._position += len(data)
        return data

    def _connect(self) -> http.client.HTTPResponse:
        headers = {"Accept-Encoding": "identity"}
        if self._position:
            if (validator := validator_of(self._version)) is None:
                raise self._error("broke off, and cannot be resumed: the server sent no ETag and no Last-Modified")
            headers |= {"Range": f"bytes={self._position}-", "If-Range": validator}
        response = self._address.request(headers)
        try:
            # http.client takes truncated headers for whole ones, but then nothing follows them.
            if response.length != 0 and not response.peek(1):
                raise ConnectionError("the answer broke off before its first byte")
            refuse_encoded(response, self.name)
            if self._position:
                self._resume(response)
            elif response.status == 200:
                self._length, self._version = response.length, version_of(response)
            else:
                raise self._error(f"unexpected status {response.status}")
        except BaseException:
            response.close()
            raise
        self._response = response
        return response

    def _resume(self, response: http.client.HTTPResponse) -> None:
        """Advance *response* to where the last one broke off, if it is the same body."""
        if version_of(response) != self._version:
            raise self._error("changed while it was read")
        if response.status == 206:
            part = response.headers.get("Content-Range", "")
            match = re.fullmatch(rf"bytes {_NUMBER}-\d+/{_NUMBER}", part)
            if not match or int(match[1]) != self._position or self._length not in (None, int(match[2])):
                raise self._error(f"broke off, and cannot be resumed: wrong Content-Range {part[:80]!r}")
            self._length = int(match[2])
        elif response.status == 200:
            # The server supports no ranges and sends the whole body again: skip what was read already.
            if response.length != self._length:
                raise self._error("changed while it was read")
            skipped = 0
            while skipped < self._position:
                data = response.read1(min(self._position - skipped, 1 << 16))
                if not data:
                    raise ConnectionError("the answer ended again before what was read already")
                skipped += len(data)
        else:
            raise self._error(f"unexpected status {response.status}")

    def _disconnect(self) -> None:
        if self._response is not None:
            self._response.close()
            self._response = None

    def _error(self, reason: str) -> OpenError:
        return OpenError(reason, url=self.name, offset=self._position or None)

    def close(self) -> None:
        if not self.closed and hasattr(self, "_response"):
            self._disconnect()
        super().close()


class HttpRanges(Ranges):
    """A file of a web server, read by range requests, each retried until it is complete."""

    def __init__(self, location: Location):
        self._address = Address(location)
        self.name = self._address.name
        self._version: tuple[str, ...] = ()
        self.size = -1
        self._head = self._ask(0, HEAD)

    def read(self, offset: int, size: int) -> bytes:
        if offset < 0 or offset + size > self.size:
            raise OpenError(f"{size} bytes at offset {offset} of {self.size}", url=self.name)
        if not size or offset + size <= len(self._head):
            return self._head[offset : offset + size]
        return self._ask(offset, size)

    def is_current(self) -> bool:
        return validator_of(self._version) is not None  # each response is compared with it

    def _ask(self, offset: int, size: int) -> bytes:
        return Patience(self._address.location).attempt(lambda: self._answer(offset, size), lambda: offset)

    def _answer(self, offset: int, size: int) -> bytes:
        headers = {"Accept-Encoding": "identity", "Range": f"bytes={offset}-{offset + size - 1}"}
        with self._address.request(headers) as response:
            match = re.fullmatch(rf"bytes {_NUMBER}-\d+/{_NUMBER}", response.headers.get("Content-Range", ""))
            if response.status != 206 or not match or int(match[1]) != offset:
                raise OpenError("the server serves no ranges, which random access requires", url=self.name)
            refuse_encoded(response, self.name)
            if self.size < 0:
                self.size, self._version = int(match[2]), version_of(response)
            elif (int(match[2]), version_of(response)) != (self.size, self._version):
                raise OpenError("changed while it was read", url=self.name, offset=offset)
            wanted = min(size, self.size - offset)
            data: bytes = response.read(wanted)
            if len(data) < wanted:
                raise ConnectionError(f"the answer ended after {len(data)} of {wanted} bytes")
        return data


def version_of(response: http.client.HTTPResponse) -> tuple[str, ...]:
    """Return what identifies the version of a body: a strong ETag, else a weak one and the time of its last change."""
    etag, modified = response.headers.get("ETag", ""), response.headers.get("Last-Modified", "")
    return (etag,) if etag and not etag.startswith("W/") else (etag, modified)


def validator_of(version: tuple[str, ...]) -> str | None:
    """Return the part of a version that asks for equal bytes, as If-Range does; a weak ETag only tells of a change."""
    return version[-1] or None if version else None


def put(address: Address, file: Any) -> None:
    """Store all of *file* with one PUT."""
    size = file.tell()

    def action() -> None:
        file.seek(0)
        headers = {"Content-Length": str(size), "Content-Type": "application/octet-stream"}
        address.request(headers, data=file, method="PUT").close()

    Patience(address.location).attempt(action)
