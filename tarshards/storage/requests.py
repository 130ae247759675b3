"""Requests to web servers: addresses, redirects, retries, and the version of the file that a response belongs to."""

from __future__ import annotations

import base64
import errno
import http.client
import json
import random
import re
import socket
import ssl
import string
from collections.abc import Callable
from contextlib import suppress
from email.utils import parsedate_to_datetime
from functools import cache
from hashlib import blake2b, pbkdf2_hmac
from html import unescape
from time import monotonic, time
from typing import Any, NamedTuple, Protocol, TypeVar
from urllib.parse import quote, unquote, urldefrag, urljoin, urlsplit

from tarshards.errors import OpenError, UrlError, visible
from tarshards.parallel.forks import cached_property
from tarshards.parallel.signals import TICK
from tarshards.storage import connections, traffic, tuning
from tarshards.storage.connections import Response
from tarshards.storage.derived import COLUMNS, INDEX
from tarshards.storage.location import Location
from tarshards.storage.redaction import redacted, secrets_of, without_signature, without_userinfo
from tarshards.storage.servers import Origin, WebServer
from tarshards.storage.streams import encoded, errno_of
from tarshards.storage.wire import Steps, calling, pausing, run

_ANY_METHOD = {307, 308}  # redirects that repeat the request as it was
_REDIRECTS = {301, 302, 303} | _ANY_METHOD
_RANDOM = random.SystemRandom()  # the program's own numbers stay as they are, and forks differ

#: Statuses of transient failures: a later attempt may succeed.
PASSING = {408, 425, 429, 500, 502, 503, 504}

# Raised for a malformed host, number or chunk.
_MALFORMED = (ValueError, OverflowError)

_NUMBER = r"(\d{1,18})"  # bytes: a number that fits into 64 bits
_RANGE = re.compile(rf"bytes {_NUMBER}-{_NUMBER}/{_NUMBER}")

# Names of files that never begin as a page does: what is beside shards, and its manifests.
_NEVER_PAGES = (INDEX, COLUMNS, ".json", ".keys", ".idx")
PAGE = "the server sent a page of HTML instead of this file, which is taken as missing"

MOST_REDIRECTS = 10  # of one request; browsers follow 20
_MOST_SAID = 1 << 12  # bytes of a refusal's body that are read
_REASONS = ("Code", "Message", "Details", "AuthenticationErrorDetail")  # the last two are Google's and Azure's
_LONGEST_REASON = 300  # characters
_EXPIRED = "ExpiredToken"  # what S3's begins with

CHANGED = "changed while it was read"
NO_RANGES = "the server serves no ranges, which random access requires"

#: Content-Encodings that do not change the bytes; objects are sent to S3 as "aws-chunked", and some stores keep that.
_AS_THEY_ARE = ("", "identity", "aws-chunked", "utf-8")

_T = TypeVar("_T")


class StatusError(OSError):
    """A response whose status is not 2xx; *code* is that status.

    *is_expired* says that the server refuses credentials because they have expired, as S3 does with status 400.
    """

    def __init__(self, response: Response):
        super().__init__(f"{response.status} {response.reason}")
        self.code: int = response.status
        self.reason: str = response.reason
        self.headers: Any = response.headers
        self.is_expired: bool = False

    @property
    def is_refusal(self) -> bool:
        """Whether other credentials may be accepted."""
        return self.code in (401, 403) or self.is_expired


class Version(NamedTuple):
    """The version of a file: its size, a strong ETag or else a weak one, and the time of its last change.

    *encoding* is its Content-Encoding; size and ranges are then those of the encoded bytes.
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
        """The value for If-Range: a strong ETag, or else the time of the last change; None if there is neither."""
        strong = self.etag if not self.etag.startswith("W/") else ""
        return strong or self.modified or None


NOT_ENCODED = Version(-1, "", "")


class Address:
    """The URL that requests for a location go to, and the credentials to send."""

    _login: str | None = None
    _moved: tuple[str, str, float] | None = None  # a URL, the target of its redirect, and until when to use it

    def __init__(self, location: Location):
        self.location = location
        self.name: str = location.name
        try:
            parts = urlsplit(location.url)
            known = bool(parts.hostname) and (parts.port or 0) >= 0
            self._url = quote(without_userinfo(location.url), safe=string.punctuation)
            user = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}".encode()
        except ValueError:
            known = False
        if not known:
            # A URL with a password is kept out of the message: the password may be the malformed part.
            name = None if "@" in location.url else location.name
            raise UrlError("an http URL is http://host:port/path, special characters of a password as %XX", url=name)
        self._login = None if parts.username is None else "Basic " + base64.b64encode(user).decode()

    @property
    def target(self) -> tuple[str, dict[str, str]]:
        """The URL to request, and the headers that only its origin may get."""
        return self._url, {} if self._login is None else {"Authorization": self._login}

    #: Whether ``target`` changes, and ``renew`` makes another one; both may then wait for other servers.
    renews = False
    is_known = True  # whether ``target`` does not wait

    def renew(self, is_expired: bool) -> None:
        """Renew credentials that were refused, perhaps as expired."""

    def find_url(self) -> Steps[str]:
        """Return ``read_url``."""
        if not self.is_known:
            yield from calling(lambda: self.target)
        return self.read_url

    @property
    def is_far(self) -> bool:
        """Whether its server takes long to respond."""
        with suppress(ValueError):  # raised again by a request
            return WebServer.of(self.read_url).is_far
        return False

    def find_server(self) -> Steps[WebServer]:
        """Return the server of ``read_url``; raise OpenError if the environment names a proxy that cannot be."""
        url = yield from self.find_url()
        try:
            return WebServer.of(url)
        except ValueError as error:
            raise OpenError(str(error), url=self.name) from error

    @cached_property
    def digest(self) -> str:
        """A digest that distinguishes the object from others: of its URL without a signature, and of the login.

        A server may send different bytes for each login. The URL includes the endpoint of a store.
        """
        path, _, query = self.target[0].partition("?")
        login = "" if self._login is None else _digest_of_login(self._login, Origin.of(path))
        named = f"{path}?{without_signature(query)} {login}"
        return blake2b(named.encode(errors="surrogateescape"), digest_size=16).hexdigest()

    @property
    def read_url(self) -> str:
        """The URL that a GET requests: that of ``target``, or the one to which it last redirected."""
        return self._moved_from(self.target[0])

    def _moved_from(self, url: str) -> str:
        moved = self._moved
        return url if moved is None or moved[0] != url or monotonic() >= moved[2] else moved[1]

    def request(self, headers: dict[str, str], *, method: str = "GET", body: Any = None) -> Response:
        """Make the steps of ``ask`` in this thread."""
        return run(self.ask(headers, method=method, body=body))

    def ask(self, headers: dict[str, str], *, method: str = "GET", body: Any = None) -> Steps[Response]:
        """Send a request, follow redirects and return the response; raise StatusError for every status but 2xx.

        Only 307 and 308 redirect methods other than GET; *body*, a file, is then sent again. Credentials are sent to
        their origin only. An error at the target of a redirect has a note that names the target. Raises OpenError for a
        redirect to another scheme, and for too many. For a minute, further GETs go to the target of the last redirect,
        unless that fails: hubs redirect each request for a range, and limit their rate.
        """
        yield from self.find_url()
        url, secret = self.target
        if method == "GET" and (read_url := self._moved_from(url)) != url:
            try:
                return (yield from self._ask_once(method, read_url, headers, None))
            except (OSError, http.client.HTTPException, *_MALFORMED):
                self._moved = None
        visited = [url]
        while True:
            try:
                response = yield from self._ask_once(method, url, {**headers, **secret}, body)
                if len(visited) > 1 and method == "GET" and not secret:
                    self._moved = visited[0], url, monotonic() + tuning.LONGEST_SECONDS
                return response
            except (OSError, http.client.HTTPException, *_MALFORMED) as error:
                failure = error
            target = self._redirected(url, method, failure)
            if target is None:
                if len(visited) > 1:
                    failure.add_note(f"redirected to {Location(url).name}")
                raise failure
            if target in visited or len(visited) > MOST_REDIRECTS:
                reason = "a loop of redirects" if target in visited else f"more than {MOST_REDIRECTS} redirects"
                status = status_of(failure, self.location)
                raise OpenError(f"{status}: {reason}, the last to {Location(target).name[:200]}", url=self.name)
            visited.append(target)
            if Origin.of(target) != Origin.of(url):
                secret = {}
            url = target

    def _ask_once(self, method: str, url: str, headers: dict[str, str], body: Any) -> Steps[Response]:
        sent = {"User-Agent": "tarshards", **headers}
        timeout = self.location.remote.timeout
        response = yield from connections.request(method, url, sent, body=body, timeout=timeout)
        try:
            if not 200 <= response.status < 300:
                error = StatusError(response)
                said = yield from response.beginning(_MOST_SAID)
                if response.status >= 400 and (reason := _said_in(said, url, sent)):
                    error.is_expired = reason.startswith(_EXPIRED)
                    error.add_note(reason)
                raise error
            if method == "GET" and self.location.base.endswith(_NEVER_PAGES) and (yield from _is_page(response)):
                _warn_of_pages(self.name, url)
                raise OpenError(PAGE, url=self.name, errno=errno.ENOENT)
        except BaseException:
            response.close()
            raise
        return response

    def _redirected(self, url: str, method: str, failure: Exception) -> str | None:
        """Return the URL that a response redirects to, if any; raise OpenError unless it is http or https."""
        code = failure.code if isinstance(failure, StatusError) else None
        written = failure.headers.get("Location") if code in _REDIRECTS else None  # type: ignore[attr-defined]
        if not written:
            return None
        if method != "GET" and code not in _ANY_METHOD:
            failure.add_note(f"which redirects no {method}; only 307 and 308 do")
            return None
        try:
            target = urldefrag(urljoin(url, without_userinfo(written))).url
            Origin.of(target)
        except ValueError:
            shown = self.location.redacted(written)[:200] if urlsplit_or_none(written) else "a malformed URL"
            raise OpenError(f"redirected to {shown}, which is neither http nor https", url=self.name) from None
        # http.client decodes headers as Latin-1, whatever their bytes are.
        return quote(target, encoding="iso-8859-1", safe=string.punctuation)


def _said_in(body: bytes, url: str, sent: dict[str, str]) -> str:
    """Return the reason that the *body* of a refusal gives, in one line and without credentials; "" if there is none.

    It is the XML of S3, Google and Azure, or JSON.
    """
    text = body.decode("utf-8-sig", "replace").strip()
    found: list[Any] = []
    if text.startswith("<"):
        found = [unescape(said) for name in _REASONS for said in re.findall(f"<{name}>([^<]*)</{name}>", text)[:1]]
    elif text.startswith("{"):
        with suppress(ValueError, RecursionError):
            fields = json.loads(text)
            said = fields.get("error") or fields.get("message") or fields.get("detail")
            found = [said.get("message") if isinstance(said, dict) else said]
    words = ": ".join(" ".join(each.split()).rstrip(".") for each in found if isinstance(each, str) and each.strip())
    secrets = secrets_of(url) | set(sent.get("Authorization", "").split()[1:])
    return visible(redacted(words, secrets))[:_LONGEST_REASON]


def _is_page(response: Response) -> Steps[bool]:
    """Return whether a response begins with HTML: some servers send a page, with status 200, for a missing file."""
    if response.status != 200 and not response.headers.get("Content-Range").startswith("bytes 0-"):
        return False
    return (yield from response.begin()).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"<")


def _warn_of_pages(name: str, url: str) -> None:
    """Warn of a server, once in a process and those forked from it, whose pages are taken for missing files."""
    mine = object()
    if _servers_of_pages.setdefault(Origin.of(url), mine) is mine:
        import logging

        logging.getLogger("tarshards").warning("%s: %s", visible(name), PAGE)


_servers_of_pages: dict[Origin, object] = {}


@cache
def _digest_of_login(login: str, origin: Origin) -> str:
    """Return a digest that takes 20 ms to compute, so that guessing passwords with it is slow."""
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
    """A location with credentials that may be renewed: an Address, or a store of fsspec."""

    location: Location
    renews: bool

    def renew(self, is_expired: bool) -> None: ...


class Patience:
    """Retries with pauses; raises OpenError after too many failures in a row, or at the next one once *is_over*."""

    def __init__(self, address: Renewable, is_over: Callable[[], bool] | None = None):
        self.address = address
        self.location: Location = address.location
        self.failures: int = 0
        self._renewed, self._is_over = False, is_over

    def attempt(self, action: Callable[[], _T]) -> _T:
        """Call *action* until it succeeds, and return its result."""

        def once() -> Steps[_T]:
            yield from ()
            return action()

        return run(self.repeat(once))

    def repeat(self, action: Callable[[], Steps[_T]], offset: Callable[[], int | None] = lambda: None) -> Steps[_T]:
        """Make the steps of *action* until they succeed, and return their result; *offset* is that of an error."""
        while True:
            try:
                result = yield from action()
            except OpenError:  # not transient
                raise
            except (OSError, http.client.HTTPException, *_MALFORMED) as error:
                if isinstance(error, StatusError) and error.is_refusal and not self._renewed and self.address.renews:
                    self._renewed = True
                    yield from calling(self.address.renew, error.is_expired)
                    continue
                self.failures += 1
                if not _may_pass(error) or self.failures > self.location.remote.retries or self._ends():
                    raise self._failure(error, offset()) from self.location.safe(error)
                traffic.count("retries")
                pause = tuning.PAUSE_SECONDS * 2 ** (self.failures - 1) * _RANDOM.uniform(0.5, 1)
                yield from self._wait(min(max(pause, _retry_after(error)), tuning.LONGEST_SECONDS))
            else:
                self.failures, self._renewed = 0, False
                return result

    def _ends(self) -> bool:
        return self._is_over is not None and self._is_over()

    def _wait(self, seconds: float) -> Steps[None]:
        while self._is_over is not None and seconds > TICK:
            if self._is_over():
                return
            yield from pausing(TICK)
            seconds -= TICK
        yield from pausing(seconds)

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
    """Return the seconds to wait that a server requests by Retry-After; 0.0 without it."""
    value = error.headers.get("Retry-After", "") if isinstance(error, StatusError) else ""
    try:
        return float(value) if value.isdecimal() else parsedate_to_datetime(value).timestamp() - time()
    except (ValueError, TypeError, OverflowError):
        return 0.0


def ask_for(address: Address, begin: int, end: int) -> Steps[Response]:
    """Request the bytes from *begin* to *end*, and return the response."""
    return address.ask({"Range": f"bytes={begin}-{end - 1}"})


def range_of(response: Response, begin: int) -> Version | None:
    """Return the version of the file if *response* is a range of it that begins at *begin*, else None."""
    match = _RANGE.fullmatch(response.headers.get("Content-Range", "")) if response.status == 206 else None
    if match is None or int(match[1]) != begin or not begin <= int(match[2]) < int(match[3]):
        return None
    if encoding_of(response) and response.length != int(match[2]) + 1 - begin:
        return None  # the range was encoded, not the file
    return Version.of(response, int(match[3]))


def no_range(response: Response) -> str:
    """Return the reason why *response* is not the range that was requested."""
    if response.status == 206:
        return f"the server sent a wrong Content-Range {response.headers.get('Content-Range', '')[:80]!r}"
    return NO_RANGES


def encoding_of(response: Response) -> str:
    """Return the Content-Encoding of *response*; "" if it does not change the bytes."""
    values = ",".join(response.headers.get_all("Content-Encoding", [])).split(",")
    return ", ".join(value.strip() for value in values if value.strip().lower() not in _AS_THEY_ARE)


def check_body(response: Response, name: str, version: Version | None = NOT_ENCODED) -> Steps[None]:
    """Raise OpenError for a body with another encoding than *version*, ConnectionError if it broke off."""
    if response.length is None and not (yield from response.begin()) and not response.is_read:
        raise ConnectionError("the answer broke off before its first byte")
    encoding = encoding_of(response)
    if encoding and version is not None and encoding != version.encoding:
        raise encoded(encoding, name)
    for value in response.headers.get_all("Transfer-Encoding", []):
        if value.strip().lower() not in ("", "identity", "chunked"):
            raise OpenError(f"the server sent Transfer-Encoding {value}, which was not asked for", url=name)
