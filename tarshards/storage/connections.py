"""Connections to web servers, kept alive between requests in one pool for each process."""

from __future__ import annotations

import atexit
import http.client
import io
import os
import re
import select
import socket
import threading
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from time import monotonic
from typing import Any, NamedTuple, Self
from urllib.parse import unquote, urlsplit

from tarshards.parallel.calls import DaemonThreads
from tarshards.parallel.forks import PerProcess
from tarshards.storage import traffic, tuning

#: Environment variables that name proxies.
PROXIES = [form for name in ("http", "https", "all", "no") for form in (f"{name}_proxy", f"{name}_proxy".upper())]
PROXIES += ["REQUEST_METHOD"]  # set in a CGI program, where HTTP_PROXY may come from a client
RECORD = 16_384 + 256 + 5  # the most bytes of a TLS record (RFC 8446, 5.2), which is decrypted as a whole
DEFAULT_PORTS = {"http": 80, "https": 443}


class Origin(NamedTuple):
    """A scheme, host and port, to which connections and credentials belong."""

    scheme: str
    host: str
    port: int

    @classmethod
    def of(cls, url: str) -> Origin:
        """Return the origin of *url*; raise ValueError if it is malformed, or neither http nor https."""
        parts = urlsplit(url)
        if parts.scheme not in DEFAULT_PORTS or not parts.hostname:
            raise ValueError("neither an http nor an https URL with a host")
        return cls(parts.scheme, parts.hostname, parts.port or DEFAULT_PORTS[parts.scheme])


class _Timed(io.RawIOBase):
    """Reads a socket: the timeout applies to all reads between `begin` and `end` together, and to each of the others.

    `begin` and `end` enclose the lines before, between and after the parts of a body: a server may send any number.
    """

    _until: float | None = None

    def __init__(self, raw: Any, sock: Any):
        self._raw, self._sock, self._timeout = raw, sock, sock.gettimeout()

    def begin(self) -> None:
        self._until = monotonic() + self._timeout

    def end(self) -> None:
        if self._until is not None:
            self._until = None
            with suppress(OSError):  # closed
                self._sock.settimeout(self._timeout)

    @contextmanager
    def limited(self) -> Iterator[None]:
        self.begin()
        try:
            yield
        finally:
            self.end()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> Any:
        if self._until is not None:
            left = self._until - monotonic()
            if left <= 0:
                raise TimeoutError("timed out")
            self._sock.settimeout(left)
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self.end()
        self._raw.close()
        super().close()


class _Answer(http.client.HTTPResponse):
    """A response whose status and headers, and those of a proxy, must arrive within the timeout of its socket."""

    fp: Any
    timed: _Timed

    def __init__(self, sock: Any, *arguments: Any, **options: Any):
        super().__init__(sock, *arguments, **options)
        self.timed = _Timed(self.fp.detach(), sock)
        self.timed.begin()
        self.fp = io.BufferedReader(self.timed)

    def begin(self) -> None:
        super().begin()
        self.timed.end()

    def _read_status(self) -> Any:
        while True:
            line = super()._read_status()  # type: ignore[misc]
            if not 101 < line[1] < 200:  # 100 is skipped by begin; 103 is Early Hints
                return line
            http.client.parse_headers(self.fp)


class StalledError(ConnectionError):
    """Nothing has arrived over a connection for a while, although much has arrived over others."""


class Response:
    """The response to a request; closing it returns the connection to the pool if the whole body has been read.

    With *leaves_stalled*, reading raises StalledError if nothing arrives over this connection while others receive
    bytes: TCP resends a packet that is lost repeatedly after increasing pauses.
    """

    leaves_stalled = False

    def __init__(self, key: Any, connection: http.client.HTTPConnection, response: _Answer):
        self.status: int = response.status
        self.reason: str = response.reason
        self.headers: Any = response.headers
        self._key, self._connection, self._response = key, connection, response
        self._rest: bytes | None = None  # the unread bytes that arrived with the headers
        self._low_water = 1

    @property
    def length(self) -> int | None:
        """The number of unread bytes of the body; None if the server does not send its length."""
        left = self._response.length
        return None if left is None else left + len(self._rest or b"")

    def peek(self) -> bytes:
        """Return the next bytes of the body without consuming them; none at its end."""
        return self._rest or self._call(self._response.peek, 1)

    def read(self, size: int) -> bytes:
        """Return at least one byte of the body and at most *size*, none at its end."""
        if self._rest is None:
            self._rest = self._call(self._response.read1, max(tuning.WAKE, io.DEFAULT_BUFFER_SIZE))
            traffic.count("bytes", len(self._rest))
        if self._rest:
            data, self._rest = self._rest[:size], self._rest[size:]
            return data
        if self._response.length:
            self._await(size)
        data = self._call(self._response.read1, size)
        traffic.count("bytes", len(data))
        return data

    def _call(self, read: Callable[[int], bytes], size: int) -> bytes:
        if not self._response.chunked:
            return read(size)
        with self._response.timed.limited():  # sizes and extensions of chunks, and trailers
            return read(size)

    def readinto(self, view: memoryview) -> int:
        """Read at least one byte into *view*; return the number of bytes, 0 at the end of the body."""
        response = self._response
        left = response.length or 0
        most = 0 if response.chunked else min(len(view), left)
        if self._rest != b"" or most <= io.DEFAULT_BUFFER_SIZE:  # all of it may be in the buffer already
            data = self.read(len(view))
            view[: len(data)] = data
            return len(data)
        view = view[:most]
        records, done = self._await(most), 0
        while records and (not done or len(view) - done > io.DEFAULT_BUFFER_SIZE):
            count = response.fp.readinto1(view[done:])
            records, done = records - 1 if count else 0, done + count
        response.length = left - done
        traffic.count("bytes", done)
        return done

    def _await(self, size: int) -> int:
        """Wait until many of the next *size* bytes have arrived, so that a thread is not woken for every packet.

        Returns the number of reads to make before the next wait.
        """
        sock: Any = self._connection.sock
        if sock is None:  # the server closes the connection after this response
            return 1
        left, records = self._response.length or 0, tuning.RECORDS * RECORD
        if type(sock) is socket.socket:
            return self._wait(sock, 1, min(size, left, tuning.WAKE))
        if sock.pending():
            return 1
        if left >= 2 * records:  # enough is left, even if the next bytes are the rest of a record
            return self._wait(sock, tuning.RECORDS, records)
        return self._wait(sock, 1, 1)

    def _wait(self, sock: Any, reads: int, size: int) -> int:
        """Wait for *size* bytes and return *reads*, or 1 if fewer arrive; raise TimeoutError or StalledError."""
        timeout: Any = self._connection.timeout
        pause = timeout
        if self.leaves_stalled:
            pause = max(tuning.STALL, tuning.ANSWERS * _pool().soonest.get(self._key, 0.0))
        waited, before = 0.0, traffic.received()
        self._wake_at(size)
        while not _is_readable(sock, min(pause, timeout - waited)):
            self._wake_at(1)  # fewer bytes count as progress, too: the server may be slow
            reads = 1
            if _is_readable(sock):
                break
            waited += pause
            if waited >= timeout:
                raise TimeoutError("timed out")
            if traffic.received() - before >= tuning.ELSEWHERE:
                raise StalledError("nothing came for a while")
        return reads

    def _wake_at(self, size: int) -> None:
        """Wake a waiting thread only when *size* bytes have arrived."""
        if size != self._low_water and self._connection.sock is not None:
            self._connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)
            self._low_water = size

    def beginning(self, most: int) -> bytes:
        """Return up to *most* bytes of the body, all within one timeout; fewer if it breaks off."""
        data, response = b"", self._response
        try:
            with response.timed.limited():
                while len(data) < most and (more := response.read1(most - len(data))):
                    data += more
        except (OSError, http.client.HTTPException, ValueError):
            response.will_close = True
        return data

    def close(self) -> None:
        connection, response = self._connection, self._response
        whole = response.isclosed() or response.length == 0
        is_short = response.length is not None and response.length <= tuning.DRAINED
        if not whole and is_short and self.status >= 300 and not response.will_close:
            with suppress(OSError, http.client.HTTPException), response.timed.limited():
                response.read()
                whole = response.isclosed()
        response.close()
        if whole and not response.will_close and connection.sock is not None:
            with suppress(OSError):
                self._wake_at(1)
            _pool().put(self._key, connection)
        else:
            connection.close()

    def abort(self) -> None:
        """Make a thread that waits for this response fail at once; that thread closes the response."""
        sock = self._connection.sock
        with suppress(OSError):
            if sock is not None:
                sock.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def request(method: str, url: str, headers: dict[str, str], *, body: Any = None, timeout: float = 30.0) -> Response:
    """Send a request and return the response, whatever its status; redirects are not followed.

    *body* is a file, which is sent from its beginning; *headers* have its length. A server may respond before it has
    read the whole body, but only with an error: success then raises ConnectionError. *timeout*, in seconds, limits the
    time without a byte of the response's body, the total time of everything before the body (interim responses, 1xx,
    included), and that of the lines between two chunks. An idle connection that turns out to be closed is replaced by a
    new one. Raises OSError, HTTPException, or ValueError for a malformed URL.
    """
    origin, proxy = key = _key_of(url)
    parts = urlsplit(url)
    target = parts._replace(scheme="", netloc="", fragment="").geturl() or "/"
    if not target.startswith("/"):
        target = f"/{target}"
    if proxy is not None and origin.scheme == "http":
        target, headers = parts._replace(fragment="").geturl(), headers | proxy.headers
    pool = _pool()
    while True:
        kept = pool.take(key)
        connection = kept or _connect(origin, proxy, timeout)
        connection.timeout = timeout
        is_whole = True
        try:
            if kept is None:
                connection.connect()
            connection.sock.settimeout(timeout)
            try:
                connection.request(method, target, _blocks(body, connection) if body else None, headers)
            except (_AnsweredEarly, OSError) as error:
                if body is None or connection.sock is None or isinstance(error, TimeoutError):
                    raise
                is_whole = False  # the response may explain why
            sent = monotonic()
            traffic.count("requests")
            response: Any = connection.getresponse()
            pool.answered(key, monotonic() - sent)
            if not is_whole:
                response.will_close = True
                if response.status < 300:
                    response.close()
                    raise ConnectionError(f"{response.status} {response.reason} came before the whole body was sent")
            return Response(key, connection, response)
        except (http.client.RemoteDisconnected, http.client.BadStatusLine, ConnectionError):
            connection.close()
            if kept is None:
                raise
        except BaseException:
            connection.close()
            raise


def connect_ahead(url: str, count: int, *, files: int = 0, connections: int, timeout: float) -> None:
    """Open connections to the server of *url*, in *connections* threads, until *count* are idle.

    The next *files* whole files from there that are fetched share them. Errors are ignored: the requests that need the
    connections raise them again.
    """
    with suppress(ValueError):
        origin, proxy = key = _key_of(url)
        pool, threads = _pool(), fetching_threads(connections, "connect")
        pool.divide(key, count, files)
        missing = max(0, count - pool.spare(key))
        pool.open_soon(key, missing)
        for _ in range(missing):
            threads.submit(_open_one, pool, key, origin, proxy, timeout)


def _open_one(pool: _Pool, key: Any, origin: Origin, proxy: Proxy | None, timeout: float) -> None:
    try:
        connection = _connect(origin, proxy, timeout)
        connection.connect()
        pool.put(key, connection)
    except (OSError, ValueError, http.client.HTTPException):
        pass
    finally:
        pool.open_soon(key, -1)


def spare(url: str) -> int:
    """Return the number of connections to the server of *url* that are idle, or being opened."""
    try:
        return _pool().spare(_key_of(url))
    except ValueError:  # raised again by a request
        return 0


def take_share(url: str) -> int:
    """Return the number of connections that one more whole file from the server of *url* may use at once, 1 or more."""
    try:
        return _pool().take_share(_key_of(url))
    except ValueError:  # raised again by a request
        return 1


def soonest(url: str) -> float:
    """Return the seconds until the fastest response of the server of *url* began; 0.0 before the first response."""
    try:
        return _pool().soonest.get(_key_of(url), 0.0)
    except ValueError:  # raised again by a request
        return 0.0


def fetching_threads(connections: int, use: str = "fetch") -> DaemonThreads:
    """Return the pool of *connections* threads that this process has for one *use*."""
    return _threads()(connections, f"tarshards-{use}")


_threads = PerProcess(lambda: cache(DaemonThreads))


class _AnsweredEarly(Exception):
    """A server has refused or redirected a request before it has read the whole body."""


def _blocks(body: Any, connection: http.client.HTTPConnection) -> Iterator[bytes]:
    """Yield a file from its beginning; raise _AnsweredEarly if the server responds or closes before its end."""
    body.seek(0)
    while data := body.read(tuning.PIECE):
        if _is_answered(connection.sock):
            raise _AnsweredEarly
        yield data


def _is_answered(sock: Any) -> bool:
    """Return whether a response other than an interim one (1xx) has arrived; False under TLS, where it is unknown."""
    if not isinstance(sock, socket.socket) or hasattr(sock, "pending") or not _is_readable(sock):
        return False
    return not re.match(rb"HTTP/1\.\d 1", sock.recv(10, socket.MSG_PEEK))


class Proxy(NamedTuple):
    """A proxy, and the headers to send to it."""

    host: str
    port: int
    authorization: str | None

    @property
    def headers(self) -> dict[str, str]:
        return {"Proxy-Authorization": self.authorization} if self.authorization else {}


def _key_of(url: str) -> tuple[Origin, Proxy | None]:
    """Return the origin and the proxy of a connection for *url*; raise ValueError if either is malformed."""
    origin = Origin.of(url)
    return origin, _proxy_of(origin)


def _proxy_of(origin: Origin) -> Proxy | None:
    """Return the proxy that the environment names for *origin*; raise ValueError if that is malformed."""
    return _find_proxy(origin, tuple(map(os.environ.get, PROXIES)))


@cache
def _find_proxy(origin: Origin, variables: tuple[str | None, ...]) -> Proxy | None:
    from urllib.request import getproxies, proxy_bypass

    proxies = getproxies() if any(variables) else {}
    found = proxies.get(origin.scheme) or proxies.get("all")
    if not found or proxy_bypass(f"{origin.host}:{origin.port}"):
        return None
    where = urlsplit(found if "://" in found else f"http://{found}")
    if not where.hostname:
        raise ValueError("the proxy that the environment names has no host")
    login = None
    if where.username is not None:
        login = b64encode(f"{unquote(where.username)}:{unquote(where.password or '')}".encode()).decode()
    return Proxy(where.hostname, where.port or DEFAULT_PORTS.get(where.scheme, 80), login and f"Basic {login}")


def _connect(origin: Origin, proxy: Proxy | None, timeout: float) -> http.client.HTTPConnection:
    host, port = (origin.host, origin.port) if proxy is None else (proxy.host, proxy.port)
    connection: http.client.HTTPConnection
    if origin.scheme == "http":
        connection = http.client.HTTPConnection(host, port, timeout=timeout)
    else:
        connection = http.client.HTTPSConnection(host, port, timeout=timeout, context=_tls())
    connection.response_class = _Answer
    if origin.scheme == "https" and proxy is not None:
        connection.set_tunnel(origin.host, origin.port, proxy.headers)
    return connection


@cache
def _tls() -> Any:
    """Return a context that trusts the certificates of the system, or those of SSL_CERT_FILE and SSL_CERT_DIR."""
    import ssl

    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context


class _Pool:
    """The idle connections of a process, by origin and proxy; the most recently used one is taken first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: dict[Any, list[tuple[float, http.client.HTTPConnection]]] = {}
        self._opening: Counter[Any] = Counter()
        self._shares: dict[Any, list[int]] = {}  # connections for each of the whole files to be fetched next
        self.soonest: dict[Any, float] = {}  # seconds until the fastest response began
        self._swept = 0.0

    def answered(self, key: Any, seconds: float) -> None:
        """Record the seconds until a response began."""
        if seconds < self.soonest.get(key, seconds + 1):
            self.soonest[key] = seconds

    def open_soon(self, key: Any, count: int) -> None:
        """Add to the number of connections that are being opened."""
        with self._lock:
            self._opening[key] += count

    def divide(self, key: Any, count: int, files: int) -> None:
        """Let the next *files* whole files share *count* connections."""
        with self._lock:
            self._shares[key] = [max(1, count // files)] * files if files else []

    def take_share(self, key: Any) -> int:
        """Return the number of connections of one more whole file, at least 1."""
        with self._lock:
            shares = self._shares.get(key)
            return shares.pop() if shares else 1

    def spare(self, key: Any) -> int:
        """Return the number of connections that are idle, or being opened."""
        with self._lock:
            return len(self._idle.get(key, ())) + self._opening[key]

    def take(self, key: Any) -> http.client.HTTPConnection | None:
        """Return an idle connection that is still open, None if there is none."""
        while True:
            with self._lock:
                idle = self._idle.get(key)
                if not idle:
                    return None
                since, connection = idle.pop()
            if self._is_alive(since, connection):
                return connection
            connection.close()

    def put(self, key: Any, connection: http.client.HTTPConnection) -> None:
        """Keep a connection; from time to time, close those of all origins that cannot be used again."""
        now, dead = monotonic(), []
        with self._lock:
            if now - self._swept > tuning.SWEEP:
                self._swept = now
                for other, idle in list(self._idle.items()):
                    alive = [pair for pair in idle if self._is_alive(*pair)]
                    dead += [pair for pair in idle if pair not in alive]
                    self._idle[other] = alive
                    if not alive:
                        del self._idle[other]
            self._idle.setdefault(key, []).append((now, connection))
        for _, stale in dead:
            stale.close()

    @staticmethod
    def _is_alive(since: float, connection: http.client.HTTPConnection) -> bool:
        sock = connection.sock
        return monotonic() - since < tuning.IDLE and sock is not None and (not _is_readable(sock) or _has_no_data(sock))

    def close(self) -> None:
        """Close all idle connections."""
        with self._lock:
            idle = [pair for pairs in self._idle.values() for pair in pairs]
            self._idle.clear()
        for _, connection in idle:
            connection.close()


def _is_readable(sock: socket.socket, seconds: float | None = 0) -> bool:
    """Return whether a socket can be read, or has ended, within *seconds*; None waits forever."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(None if seconds is None else 1000 * seconds))


def _has_no_data(sock: Any) -> bool:
    """Return whether only bytes of TLS itself have arrived, such as the session tickets that follow a handshake."""
    if not hasattr(sock, "pending"):
        return False
    import ssl

    sock.settimeout(0)
    try:
        sock.recv(1)
    except ssl.SSLWantReadError:
        return True
    except OSError:
        pass
    return False


def _make_pool() -> _Pool:
    pool = _Pool()
    atexit.register(pool.close)
    return pool


_pool = PerProcess(_make_pool)
