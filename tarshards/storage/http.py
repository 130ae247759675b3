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
from urllib.parse import quote, unquote, urlsplit

from tarshards.errors import OpenError, UrlError
from tarshards.storage.location import Location, Transport
from tarshards.storage.ranges import Ranges
from tarshards.storage.redaction import redacted, without_userinfo
from tarshards.storage.streams import InputStream, OutputStream, spooled, words

#: Seconds before the second attempt, doubled with every further one, and the longest wait.
PAUSE, LONGEST_PAUSE = 0.5, 60.0

HEAD = 1024  # bytes of the beginning that come with the size

# Statuses that may go away by themselves.
_PASSING = {408, 425, 429, 500, 502, 503, 504}

_T = TypeVar("_T")


class Http(Transport):
    def open(
        self, location: Location, mode: str, *, timeout: float, retries: int, **_: Any
    ) -> InputStream | OutputStream:
        address = Address(location, timeout)
        if mode == "rb":
            return HttpInput(address, retries)
        return spooled(address.name, lambda file: put(address, file, retries))

    def ranges(self, location: Location) -> Ranges:
        return HttpRanges(location)


TRANSPORT = Http()


class Address:
    """Where requests go: the URL and the credentials to send, and the name that messages show."""

    def __init__(self, location: Location, timeout: float):
        try:
            parts = urlsplit(location.url)
            known = bool(parts.hostname) and (parts.port or 0) >= 0
        except ValueError:
            known = False
        if not known:
            # The URL is kept out of the message, because its password may be what is malformed.
            raise UrlError("an http URL is http://host:port/path, special characters of a password as %XX")
        self.name, self.timeout = location.name, timeout
        self._url = quote(without_userinfo(location.url), safe=string.punctuation)
        self.authorization = None
        if parts.username is not None:
            user = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            self.authorization = "Basic " + base64.b64encode(user.encode()).decode()

    def request(self, headers: dict[str, str], **options: Any) -> http.client.HTTPResponse:
        """Return the response to a request after redirects; raise HTTPError for every status but 2xx."""
        request = urllib.request.Request(self._url, headers=headers, **options)
        request.add_header("User-Agent", "tarshards")
        if self.authorization:
            request.add_unredirected_header("Authorization", self.authorization)
        try:
            response: http.client.HTTPResponse = _opener().open(request, timeout=self.timeout)
        except HTTPError as exc:
            exc.close()
            raise
        return response


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Redirects that keep the credentials on their own host, and ignore those in a Location header."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        request = super().redirect_request(req, fp, code, msg, headers, without_userinfo(newurl))
        authorization = req.unredirected_hdrs.get("Authorization")
        if request and authorization and (request.type, request.host) == (req.type, req.host):
            request.add_unredirected_header("Authorization", authorization)
        return request


@cache
def _opener() -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(_Redirects)


class Patience:
    """Retries: pauses after each failure, raises after too many in a row without progress."""

    def __init__(self, name: str, retries: int):
        self.name, self.retries, self.failures = name, retries, 0

    def attempt(self, action: Callable[[], _T], offset: Callable[[], int | None] = lambda: None) -> _T:
        """Return what *action* returns once it succeeds; *offset* gives the offset of an error."""
        while True:
            try:
                result = action()
            except (OSError, http.client.HTTPException) as exc:
                self.failures += 1
                if not _may_pass(exc) or self.failures > self.retries:
                    reason = words(exc)
                    if isinstance(exc, HTTPError):
                        reason = redacted(" ".join(f"{exc.code} {exc.reason}".split()))
                    tried = f" (attempt {self.failures})" if self.failures > 1 else ""
                    raise OpenError(reason + tried, url=self.name, offset=offset()) from exc
                pause = PAUSE * 2 ** (self.failures - 1) * random.uniform(0.5, 1)
                sleep(min(max(pause, _retry_after(exc)), LONGEST_PAUSE))
            else:
                self.failures = 0
                return result


def _may_pass(exc: BaseException) -> bool:
    if isinstance(exc, HTTPError):
        return exc.code in _PASSING
    reason = getattr(exc, "reason", exc)
    unknown_host = isinstance(reason, socket.gaierror) and reason.errno == socket.EAI_NONAME
    return not (unknown_host or isinstance(reason, ssl.SSLCertVerificationError | http.client.InvalidURL))


def _retry_after(exc: BaseException) -> float:
    """Return the seconds that a server asks us to wait."""
    value = exc.headers.get("Retry-After", "") if isinstance(exc, HTTPError) and exc.headers else ""
    try:
        return float(value) if value.isdecimal() else parsedate_to_datetime(value).timestamp() - time()
    except (ValueError, TypeError):
        return 0.0


class HttpInput(InputStream):
    """The body of one response, read by as many requests as it takes."""

    def __init__(self, address: Address, retries: int):
        self.name = address.name
        self._address, self._patience = address, Patience(address.name, retries)
        self._response: http.client.HTTPResponse | None = None
        self._position = 0
        self._length: int | None = None
        self._validator: tuple[str, str] | None = None
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
            if self._validator is None:
                raise self._error("broke off, and cannot be resumed: the server sent no ETag and no Last-Modified")
            headers |= {"Range": f"bytes={self._position}-", "If-Range": self._validator[1]}
        response = self._address.request(headers)
        try:
            # http.client takes truncated headers for whole ones, but then nothing follows them.
            if response.length != 0 and not response.peek(1):
                raise ConnectionError("the answer broke off before its first byte")
            encoding = response.headers.get("Content-Encoding", "identity")
            if encoding.lower() != "identity":
                raise self._error(f"the server sent Content-Encoding {encoding}, which was not asked for")
            if self._position:
                self._resume(response)
            elif response.status == 200:
                self._length, self._validator = response.length, validator(response)
            else:
                raise self._error(f"unexpected status {response.status}")
        except BaseException:
            response.close()
            raise
        self._response = response
        return response

    def _resume(self, response: http.client.HTTPResponse) -> None:
        """Advance *response* to where the last one broke off, if it is the same body."""
        if validator(response) != self._validator:
            raise self._error("changed while it was read")
        if response.status == 206:
            part = response.headers.get("Content-Range", "")
            match = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", part)
            if not match or int(match[1]) != self._position or self._length not in (None, int(match[2])):
                raise self._error(f"broke off, and cannot be resumed: wrong Content-Range {part!r}")
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

    def __init__(self, location: Location, *, timeout: float = 30.0, retries: int = 5):
        self._address, self._retries = Address(location, timeout), retries
        self.name = self._address.name
        self._validator: tuple[str, str] | None = None
        self.size = -1
        self._head = self._ask(0, HEAD)

    def read(self, offset: int, size: int) -> bytes:
        if offset < 0 or offset + size > self.size:
            raise OpenError(f"{size} bytes at offset {offset} of {self.size}", url=self.name)
        if not size or offset + size <= len(self._head):
            return self._head[offset : offset + size]
        return self._ask(offset, size)

    def is_current(self) -> bool:
        return self._validator is not None  # each response is compared with it

    def _ask(self, offset: int, size: int) -> bytes:
        return Patience(self.name, self._retries).attempt(lambda: self._answer(offset, size), lambda: offset)

    def _answer(self, offset: int, size: int) -> bytes:
        headers = {"Accept-Encoding": "identity", "Range": f"bytes={offset}-{offset + size - 1}"}
        with self._address.request(headers) as response:
            match = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", response.headers.get("Content-Range", ""))
            if response.status != 206 or not match or int(match[1]) != offset:
                raise OpenError("the server serves no ranges, which random access requires", url=self.name)
            if self.size < 0:
                self.size, self._validator = int(match[3]), validator(response)
            elif (int(match[3]), validator(response)) != (self.size, self._validator):
                raise OpenError("changed while it was read", url=self.name, offset=offset)
            wanted = min(size, self.size - offset)
            data: bytes = response.read(wanted)
            if len(data) < wanted:
                raise ConnectionError(f"the answer ended after {len(data)} of {wanted} bytes")
        return data


def validator(response: http.client.HTTPResponse) -> tuple[str, str] | None:
    """Return the header that identifies the version of a body: a strong ETag, else the time of its last change."""
    etag, modified = response.headers.get("ETag", ""), response.headers.get("Last-Modified", "")
    if etag and not etag.startswith("W/"):
        return "ETag", etag
    return ("Last-Modified", modified) if modified else None


def put(address: Address, file: Any, retries: int) -> None:
    """Store all of *file* with one PUT."""
    size = file.tell()

    def action() -> None:
        file.seek(0)
        headers = {"Content-Length": str(size), "Content-Type": "application/octet-stream"}
        address.request(headers, data=file, method="PUT").close()

    Patience(address.name, retries).attempt(action)
