"""Connections to web servers, kept alive between requests: one pool of idle ones a process."""

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

from tarshards.parallel import DaemonThreads
from tarshards.storage import traffic
from tarshards.storage.locks import PerProcess

IDLE = 50.0  # seconds after which an idle connection is not used again; servers close them after about a minute
SWEEP = 1.0  # seconds between two searches for idle connections that servers have closed
DRAINED = 1 << 16  # bytes of an answer that are read, so that its connection can be used again
#: What names proxies.
PROXIES = [form for name in ("http", "https", "all", "no") for form in (f"{name}_proxy", f"{name}_proxy".upper())]
PROXIES += ["REQUEST_METHOD"]  # in whose presence HTTP_PROXY may be a client's
BLOCK = 1 << 18  # bytes of a body that are sent at a time
WAKE = 1 << 15  # bytes of a body that are awaited at once; of more the kernel would keep its receive window small
RECORD = 16_384 + 256 + 5  # bytes of a record of TLS, at most (RFC 8446, 5.2): one is decrypted at a time
RECORDS = 2  # of them are awaited at once
FAR = 0.1  # seconds to the beginning of an answer
STALL, ANSWERS = 0.5, 5  # seconds without a byte in a body, and as many times as long as an answer takes to begin
ELSEWHERE = 1 << 20  # bytes that come meanwhile over other connections, so that it is not the server that is slow
DEFAULT_PORTS = {"http": 80, "https": 443}


class Origin(NamedTuple):
    """What a connection belongs to, and credentials too: a scheme, host and port."""

    scheme: str
    host: str
    port: int

    @classmethod
    def of(cls, url: str) -> Origin:
        """Return the origin of *url*; raise ValueError for one that is malformed, or neither http nor https."""
        parts = urlsplit(url)
        if parts.scheme not in DEFAULT_PORTS or not parts.hostname:
            raise ValueError("neither an http nor an https URL with a host")
        return cls(parts.scheme, parts.hostname, parts.port or DEFAULT_PORTS[parts.scheme])


class _Timed(io.RawIOBase):
    """What comes over a socket: from `begin` to `end` all of it within the timeout, else each part of it.

    So are the lines around a body read: a server may send any number of them.
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
    """An answer whose status and headers, and those of a proxy before it, come within the timeout of its socket."""

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
    """A connection over which nothing has come for a while, though much has come over others."""


class Response:
    """The answer to a request; closing it gives the connection back if the body has been read, else closes it too.

    With *leaves_stalled*, reading raises StalledError where nothing comes over this connection while others bring what
    they are asked for: a packet that is lost again and again is sent after ever longer pauses.
    """

    leaves_stalled = False

    def __init__(self, key: Any, connection: http.client.HTTPConnection, response: _Answer):
        self.status, self.reason, self.headers = response.status, response.reason, response.headers
        self._key, self._connection, self._response = key, connection, response
        self._rest: bytes | None = None  # what came together with the headers and is not read yet
        self._awaited = 1

    @property
    def length(self) -> int | None:
        """The bytes of the body that have not been read; None where the server does not say."""
        left = self._response.length
        return None if left is None else left + len(self._rest or b"")

    def peek(self) -> bytes:
        """Return some bytes of the body without reading them; none at its end."""
        return self._rest or self._call(self._response.peek, 1)

    def read(self, size: int) -> bytes:
        """Return at least one byte of the body and at most *size*, none at its end."""
        if self._rest is None:
            self._rest = self._call(self._response.read1, max(WAKE, io.DEFAULT_BUFFER_SIZE))
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
        with self._response.timed.limited():  # the sizes of chunks, what extends them, and what trails the last
            return read(size)

    def readinto(self, view: memoryview) -> int:
        """Read at least one byte into *view*, and no more than fit; return how many, 0 at the end of the body."""
        response = self._response
        left = response.length or 0
        most = 0 if response.chunked else min(len(view), left)
        if self._rest != b"" or most <= io.DEFAULT_BUFFER_SIZE:  # what is buffered beyond it would be awaited in vain
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
        """Wait until some of the next *size* bytes are there, so that a thread is not woken for every packet.

        Returns how often they can be read from the connection before they are awaited again.
        """
        connection: Any = self._connection
        sock, timeout = connection.sock, connection.timeout
        if sock is None:  # the server closes it after this answer
            return 1
        left, reads = self._response.length or 0, 1
        if type(sock) is socket.socket:
            self._wake_at(min(size, left, WAKE))
        elif sock.pending():
            return 1
        elif left >= 2 * RECORDS * RECORD:  # as many again follow: the rest of a record in part is awaited like these
            reads = RECORDS
            self._wake_at(RECORDS * RECORD)
        else:
            self._wake_at(1)
        pause = max(STALL, ANSWERS * _pool().soonest.get(self._key, 0.0)) if self.leaves_stalled else timeout
        waited, before = 0.0, traffic.received()
        while not _is_readable(sock, min(pause, timeout - waited)):
            self._wake_at(1)  # for a server so slow that its few bytes are progress
            reads = 1
            if _is_readable(sock):
                break
            waited += pause
            if waited >= timeout:
                raise TimeoutError("timed out")
            if traffic.received() - before >= ELSEWHERE:
                raise StalledError("nothing came for a while")
        return reads

    def _wake_at(self, size: int) -> None:
        if size != self._awaited and self._connection.sock is not None:
            self._connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)
            self._awaited = size

    def close(self) -> None:
        connection, response = self._connection, self._response
        whole = response.isclosed() or response.length == 0
        if not whole and response.length is not None and response.length <= DRAINED and self.status >= 300:
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
        """Let a thread that waits for this answer fail at once; it closes it."""
        sock = self._connection.sock
        with suppress(OSError):
            if sock is not None:
                sock.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def request(method: str, url: str, headers: dict[str, str], *, body: Any = None, timeout: float = 30.0) -> Response:
    """Send a request and return the answer, of any status; redirects are not followed.

    *body* is a file, which is sent from its beginning; *headers* say how long it is. An answer may come before its end,
    but success is then a ConnectionError. *timeout* is in seconds without a byte of the body; all that comes before it,
    interim answers (1xx) among that, and the lines between two of its chunks are to come within as many. A kept
    connection that turns out to be closed is replaced by a new one. Raises OSError, HTTPException, or ValueError for a
    malformed URL.
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
                is_whole = False  # and what the server says of it may be there
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


def connect_ahead(url: str, count: int, *, connections: int, timeout: float) -> None:
    """Open idle connections to the server of *url*, in as many threads as *connections*, until there are *count*.

    The requests that need them report why they cannot be opened.
    """
    with suppress(ValueError):
        origin, proxy = key = _key_of(url)
        pool, threads = _pool(), fetching_threads(connections, "connect")
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
    """Return how many connections to the server of *url* are idle, or will be soon."""
    try:
        return _pool().spare(_key_of(url))
    except ValueError:  # raised again by a request
        return 0


def soonest(url: str) -> float:
    """Return how soon an answer of the server of *url* has begun, in seconds; 0.0 before this process had one."""
    try:
        return _pool().soonest.get(_key_of(url), 0.0)
    except ValueError:  # raised again by a request
        return 0.0


def fetching_threads(connections: int, use: str = "fetch") -> DaemonThreads:
    """Return the threads of this process for one *use* that fetch over as many *connections*."""
    return _threads()(connections, f"tarshards-{use}")


_threads = PerProcess(lambda: cache(DaemonThreads))


class _AnsweredEarly(Exception):
    """A server need not read a whole body to refuse it, or to redirect it."""


def _blocks(body: Any, connection: http.client.HTTPConnection) -> Iterator[bytes]:
    """Yield a file from its beginning; raise _AnsweredEarly where an answer, or the end, has come before its end."""
    body.seek(0)
    while data := body.read(BLOCK):
        if _is_answered(connection.sock):
            raise _AnsweredEarly
        yield data


def _is_answered(sock: Any) -> bool:
    """Whether what has come is more than a status 1xx, which only asks to go on. Under TLS, what comes is no answer."""
    if not isinstance(sock, socket.socket) or hasattr(sock, "pending") or not _is_readable(sock):
        return False
    return not re.match(rb"HTTP/1\.\d 1", sock.recv(10, socket.MSG_PEEK))


class Proxy(NamedTuple):
    """A proxy, and the headers that it is sent."""

    host: str
    port: int
    authorization: str | None

    @property
    def headers(self) -> dict[str, str]:
        return {"Proxy-Authorization": self.authorization} if self.authorization else {}


def _key_of(url: str) -> tuple[Origin, Proxy | None]:
    """Return what a connection for *url* belongs to; raise ValueError if this, or the proxy, is malformed."""
    origin = Origin.of(url)
    return origin, _proxy_of(origin)


def _proxy_of(origin: Origin) -> Proxy | None:
    """Return the proxy that the environment names for *origin*; raise ValueError for one that is malformed."""
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
    """The certificates that are trusted: the system's, or those of SSL_CERT_FILE and SSL_CERT_DIR."""
    import ssl

    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context


class _Pool:
    """The idle connections of a process, by origin and proxy; the one that was used last is used first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: dict[Any, list[tuple[float, http.client.HTTPConnection]]] = {}
        self._opening: Counter[Any] = Counter()
        self.soonest: dict[Any, float] = {}  # seconds in which an answer began
        self._swept = 0.0

    def answered(self, key: Any, seconds: float) -> None:
        """Note how soon an answer began."""
        if seconds < self.soonest.get(key, seconds + 1):
            self.soonest[key] = seconds

    def open_soon(self, key: Any, count: int) -> None:
        """Note that so many connections more will be opened, and be idle."""
        with self._lock:
            self._opening[key] += count

    def spare(self, key: Any) -> int:
        """Return how many connections are idle, or will be soon."""
        with self._lock:
            return len(self._idle.get(key, ())) + self._opening[key]

    def take(self, key: Any) -> http.client.HTTPConnection | None:
        """Return an idle connection on which nothing has come, None if there is none."""
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
        """Keep a connection, and from time to time close those of all origins that cannot be used again."""
        now, dead = monotonic(), []
        with self._lock:
            if now - self._swept > SWEEP:
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
        return monotonic() - since < IDLE and sock is not None and (not _is_readable(sock) or _has_no_data(sock))

    def close(self) -> None:
        """Close what is idle."""
        with self._lock:
            idle = [pair for pairs in self._idle.values() for pair in pairs]
            self._idle.clear()
        for _, connection in idle:
            connection.close()


def _is_readable(sock: socket.socket, seconds: float | None = 0) -> bool:
    """Whether a connection has something to read within *seconds*, its end among that; None is any time."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(None if seconds is None else 1000 * seconds))


def _has_no_data(sock: Any) -> bool:
    """Whether what has come on an idle connection is of TLS itself: its server's tickets follow the handshake."""
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
