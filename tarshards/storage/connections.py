"""Connections to web servers, and requests and responses over them."""

from __future__ import annotations

import errno
import http.client
import os
import re
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from select import POLLIN, POLLOUT
from time import monotonic
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

from tarshards import kernels
from tarshards.parallel.forks import PerProcess
from tarshards.parallel.signals import defer_signals
from tarshards.storage import traffic, tuning
from tarshards.storage.servers import Origin, Proxy, WebServer
from tarshards.storage.streams import BUFFER, PIECE
from tarshards.storage.wire import STREAM, Steps, Task, Wait, calling, run, start

T = TypeVar("T")

HEAD_BYTES = 1 << 14  # bytes that are received together with headers: of a record of TLS
MOST_LINE, MOST_HEADERS = 1 << 16, 100
STATUS = re.compile(rb"HTTP/1\.(\d) +(\d{3})(.*)")
BROKEN = re.compile(r"[\0-\x1f\x7f]")  # no part of a header, and would end it


class StalledError(ConnectionError):
    """Nothing has arrived over a connection for a while, although much has arrived over others."""


class ResponseHeaders:
    """The headers of a response, by their names in any case; bytes are decoded as Latin-1, whatever they are."""

    def __init__(self, lines: list[bytes]):
        self._values: dict[str, list[str]] = {}
        values: list[str] = []
        for line in lines:
            if line[:1] in b" \t" and values:  # an obsolete form of long values
                values[-1] += " " + line.decode("latin-1").strip()
                continue
            name, _, value = line.decode("latin-1").partition(":")
            values = self._values.setdefault(name.rstrip().lower(), [])
            values.append(value.strip())

    def get(self, name: str, default: str = "") -> str:
        """Return the first value of *name*."""
        return self.get_all(name, [default])[0]

    def get_all(self, name: str, default: list[str]) -> list[str]:
        return self._values.get(name.lower(), default)


class Connection:
    """A socket that does not block, and the bytes that have arrived over it and are not read yet."""

    def __init__(self, sock: socket.socket):
        self.sock: Any = sock
        self.rest = bytearray()
        self.timeout = 30.0

    @property
    def has_rest(self) -> bool:
        """Whether bytes have arrived that are not read yet; others may wait in the socket."""
        return bool(self.rest) or (isinstance(self.sock, ssl.SSLSocket) and self.sock.pending() > 0)

    @property
    def is_open(self) -> bool:
        return bool(self.sock.fileno() >= 0)

    def close(self) -> None:
        self.sock.close()

    def is_reusable(self) -> bool:
        """Return whether an idle connection is open, and brought nothing but what TLS itself sends."""
        if not self.is_open or self.has_rest:
            return False
        return not _is_readable(self.sock) or _has_no_data(self.sock)

    def wait(self, events: int, until: float) -> Steps[None]:
        if (yield Wait(self.sock.fileno(), events, None, until)) is None:
            raise TimeoutError("timed out")

    def encrypt(self, host: str, until: float) -> Steps[None]:
        self.sock = _tls().wrap_socket(self.sock, server_hostname=host, do_handshake_on_connect=False)
        yield from self._attempt(self.sock.do_handshake, POLLIN, until)

    def _attempt(self, action: Callable[[], T], events: int, until: float) -> Steps[T]:
        """Call *action* until it does not have to wait for the socket any more."""
        while True:
            try:
                return action()
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
                if isinstance(error, ssl.SSLError):
                    events = POLLIN if isinstance(error, ssl.SSLWantReadError) else POLLOUT
            yield from self.wait(events, until)

    def send(self, data: Any) -> Steps[None]:
        view = memoryview(data)
        while view:
            until = monotonic() + self.timeout
            view = view[(yield from self._attempt(partial(self.sock.send, view), POLLOUT, until)) :]

    def receive(self, until: float) -> Steps[int]:
        """Add the next bytes to *rest*; return their number, 0 at the end."""
        if monotonic() >= until:  # there may always be some
            raise TimeoutError("timed out")
        data = yield from self._attempt(partial(self.sock.recv, HEAD_BYTES), POLLIN, until)
        self.rest += data
        return len(data)

    def line(self, until: float) -> Steps[bytes]:
        """Return the next line without its end; raise ConnectionError if the stream ends before."""
        while (end := self.rest.find(b"\n")) < 0:
            if len(self.rest) > MOST_LINE:
                raise http.client.LineTooLong("header line")
            if not (yield from self.receive(until)):
                raise ConnectionError("the answer broke off in its headers")
        if end > MOST_LINE:
            raise http.client.LineTooLong("header line")
        line = bytes(self.rest[:end])
        del self.rest[: end + 1]
        return line.removesuffix(b"\r")

    def head(self, until: float) -> Steps[tuple[int, str, ResponseHeaders, bool]]:
        """Return status, reason and headers of the next response, and whether it is of HTTP/1.1."""
        while True:
            if not self.rest and not (yield from self.receive(until)):
                raise http.client.RemoteDisconnected("Remote end closed connection without response")
            line = yield from self.line(until)
            match = STATUS.fullmatch(line)
            if match is None:
                raise http.client.BadStatusLine(line[:100].decode("latin-1"))
            lines: list[bytes] = []
            while header := (yield from self.line(until)):
                lines.append(header)
                if len(lines) > MOST_HEADERS:
                    raise http.client.HTTPException(f"got more than {MOST_HEADERS} headers")
            status = int(match[2])
            if status >= 200 or status == 101:  # others are interim ones
                return status, match[3].decode("latin-1").strip(), ResponseHeaders(lines), match[1] == b"1"

    def fill(self, view: memoryview, until: float, *, ends_body: bool = False) -> Steps[int | None]:
        """Receive bytes into *view*; return their number, 0 at the end, and None if none come *until* then.

        With *ends_body*, the end of the stream is that of the body, and no error may be taken for it: the kernel
        returns what has come before an error, and the next call finds an end.
        """
        if self.rest:
            count = min(len(view), len(self.rest))
            view[:count] = bytes(self.rest[:count])
            del self.rest[:count]
            return count
        if not (ends_body or isinstance(self.sock, ssl.SSLSocket)):
            found = yield Wait(self.sock.fileno(), POLLIN, view, until)
            if found is not None and found < 0:
                raise OSError(-found, os.strerror(-found))
            return found
        done = 0
        while done < len(view):
            try:
                if not (count := self.sock.recv_into(view[done:])):
                    break
                done += count
            except (BlockingIOError, ssl.SSLWantReadError):
                if done:
                    break
                if (yield Wait(self.sock.fileno(), POLLIN | STREAM, None, until)) is None:
                    return None
        return done


class Response:
    """The response to a request; closing it returns the connection to the pool if the whole body has been read.

    With *leaves_stalled*, reading raises StalledError if nothing arrives over this connection while others receive
    bytes: TCP resends a packet that is lost repeatedly after increasing pauses.
    """

    leaves_stalled = False

    def __init__(
        self, server: WebServer, connection: Connection, head: tuple[int, str, ResponseHeaders, bool], method: str
    ):
        self.status, self.reason, self.headers, is_newer = head
        self._server, self._connection = server, connection
        tokens = self.headers.get("Connection").lower()
        self._will_close = "close" in tokens or not (is_newer or "keep-alive" in tokens)
        self._is_chunked = self.headers.get("Transfer-Encoding").lower() == "chunked"
        self._chunk: int | None = None  # the bytes left of a chunk; None before the first one
        self._is_over = False
        #: The number of unread bytes of the body; None if the server does not send its length.
        self.length: int | None = None
        if method == "HEAD" or self.status in (204, 304):
            self.length, self._is_chunked = 0, False
        elif not self._is_chunked:
            with suppress(ValueError):
                length = int(self.headers.get("Content-Length", "none"))
                self.length = length if length >= 0 else None
            self._will_close |= self.length is None  # the body ends with the connection

    @property
    def is_read(self) -> bool:
        """Whether all of the body was received, as far as is known without waiting."""
        return self._is_over or self.length == 0

    def begin(self) -> Steps[bytes]:
        """Wait for bytes of the body, and return those that have come, without consuming them; none at its end."""
        if not self._is_chunked:
            if self.length != 0 and not self._connection.rest:
                yield from self._connection.receive(monotonic() + self._connection.timeout)
            return bytes(self._connection.rest[: self.length])
        if not self._chunk and not self._is_over:
            yield from self._next_chunk()
        if self._chunk and not self._connection.rest:
            yield from self._connection.receive(monotonic() + self._connection.timeout)
        return bytes(self._connection.rest[: self._chunk or 0])

    def receive(self, view: memoryview) -> Steps[int]:
        """Receive bytes of the body into *view*; return their number, 0 at its end."""
        if self._is_chunked and not self._chunk and not self._is_over:
            yield from self._next_chunk()
        left = self._chunk if self._is_chunked else self.length
        view = view if left is None else view[:left]
        if self.is_read or not view:
            return 0
        count = yield from self._await(view)
        if self._is_chunked:
            if not count:
                raise http.client.IncompleteRead(b"")
            self._chunk = (self._chunk or 0) - count
        elif self.length is not None:
            self.length -= count
        else:
            self._is_over = not count
        traffic.count("bytes", count)
        return count

    def _next_chunk(self) -> Steps[None]:
        """Read the size of the next chunk; after the last one also the trailers."""
        connection = self._connection
        until = monotonic() + connection.timeout  # for all the lines between two chunks
        try:
            if self._chunk is not None:
                yield from connection.line(until)
            self._chunk = int((yield from connection.line(until)).partition(b";")[0], 16)
            if self._chunk < 0:
                raise ValueError
        except (ValueError, ConnectionError):
            raise http.client.IncompleteRead(b"") from None
        if not self._chunk:
            while (yield from connection.line(until)):
                pass
            self._is_over = True

    def _await(self, view: memoryview) -> Steps[int]:
        """Receive at least one byte, or the end; raise TimeoutError or StalledError if nothing comes."""
        timeout = pause = self._connection.timeout
        if self.leaves_stalled:
            pause = max(2 * tuning.LATE_SECONDS, 5 * self._server.soonest)
        waited, before = 0.0, traffic.received()
        ends_body = self.length is None and not self._is_chunked
        while True:
            until = monotonic() + min(pause, timeout - waited)
            found = yield from self._connection.fill(view, until, ends_body=ends_body)
            if found is not None:
                return found
            waited += pause
            if waited >= timeout:
                raise TimeoutError("timed out")
            if traffic.received() - before >= tuning.REQUEST_BYTES // 2:
                raise StalledError("nothing came for a while")

    def read(self, size: int) -> bytes:
        """Return at least one byte of the body and at most *size*, none at its end."""
        view = memoryview(bytearray(min(size, BUFFER)))
        return bytes(view[: run(self.receive(view))])

    def beginning(self, most: int) -> Steps[bytes]:
        """Return up to *most* bytes of an error's body, and read what a connection that is to be kept brings of it.

        All that within one timeout; fewer bytes if it breaks off.
        """
        data, until = b"", monotonic() + self._connection.timeout
        drained = max(most, HEAD_BYTES if self.length is not None and self.length <= HEAD_BYTES else 0)
        try:
            while len(data) < drained and not self.is_read and monotonic() < until:
                self._connection.timeout = until - monotonic()
                view = memoryview(bytearray(drained - len(data)))
                if not (count := (yield from self.receive(view))):
                    break
                data += view[:count]
        except (OSError, http.client.HTTPException, ValueError):
            self._will_close = True
        return data[:most]

    def close(self) -> None:
        if self.is_read and not self._will_close and self._connection.is_open:
            self._server.put(self._connection)
        else:
            self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def request(
    method: str, url: str, headers: dict[str, str], *, body: Any = None, timeout: float = 30.0
) -> Steps[Response]:
    """Send a request and return the response, whatever its status; redirects are not followed.

    *body* is a file, which is sent from its beginning; *headers* have its length. A server may respond before it has
    read the whole body, but only with an error: success then raises ConnectionError. *timeout*, in seconds, limits the
    time without a byte of the response's body, the total time of everything before the body (interim responses, 1xx,
    included), and that of the lines between two chunks. An idle connection that turns out to be closed is replaced by a
    new one. Raises OSError, HTTPException, or ValueError for a malformed URL.
    """
    server = WebServer.of(url)
    parts = urlsplit(url)
    target = parts._replace(scheme="", netloc="", fragment="").geturl() or "/"
    if not target.startswith("/"):
        target = f"/{target}"
    if server.proxy is not None and server.origin.scheme == "http":
        target, headers = parts._replace(fragment="").geturl(), headers | server.proxy.headers
    head = _head_of(method, target, {"Host": server.origin.named, "Accept-Encoding": "identity", **headers})
    while True:
        kept: Connection | None = server.take()
        connection = kept or (yield from _connect(server, timeout))
        connection.timeout = timeout
        is_whole = True
        try:
            try:
                yield from connection.send(head)
                if body is not None:
                    yield from _send_body(connection, body)
            except (_AnsweredEarly, OSError) as error:
                if body is None or not connection.is_open or isinstance(error, TimeoutError):
                    raise
                is_whole = False  # the response may explain why
            sent = monotonic()
            traffic.count("requests")
            response = Response(server, connection, (yield from connection.head(sent + timeout)), method)
            server.answered(monotonic() - sent)
            if not is_whole:
                response._will_close = True
                if response.status < 300:
                    raise ConnectionError(f"{response.status} {response.reason} came before the whole body was sent")
            return response
        except (http.client.BadStatusLine, ConnectionError):
            connection.close()
            if kept is None:
                raise
        except BaseException:
            connection.close()
            raise


def _head_of(method: str, target: str, headers: dict[str, str]) -> bytes:
    lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    if any(map(BROKEN.search, lines)) or " " in target:
        raise ValueError("a URL or a header with a control character")
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def _send_body(connection: Connection, body: Any) -> Steps[None]:
    """Send a file from its beginning; raise _AnsweredEarly if the server responds before its end."""
    body.seek(0)
    while data := body.read(PIECE):
        if _is_answered(connection.sock):
            raise _AnsweredEarly
        yield from connection.send(data)


def connect_ahead(url: str, count: int, *, files: int = 0, timeout: float) -> None:
    """Begin to open connections to the server of *url*, so that *count* are idle soon.

    The next *files* whole files from there that are fetched share them. Errors are ignored: the requests that need the
    connections raise them again.
    """
    with suppress(ValueError):
        server = WebServer.of(url)
        for _ in range(server.prepare(count, files)):
            start(_open_one(server, timeout), lambda _: server.opened())


def _open_one(server: WebServer, timeout: float) -> Steps[None]:
    with suppress(OSError, ValueError, http.client.HTTPException):
        server.put((yield from _connect(server, timeout)))


class _AnsweredEarly(Exception):
    """A server has refused or redirected a request before it has read the whole body."""


def _is_answered(sock: Any) -> bool:
    """Return whether a response other than an interim one (1xx) has arrived; False under TLS, where it is unknown."""
    if isinstance(sock, ssl.SSLSocket) or not _is_readable(sock):
        return False
    return not re.match(rb"HTTP/1\.\d 1", sock.recv(10, socket.MSG_PEEK))


def _connect(server: WebServer, timeout: float) -> Steps[Connection]:
    """Open a connection, also through a proxy; raise OSError if that is impossible, or takes too long."""
    until, origin, proxy = monotonic() + timeout, server.origin, server.proxy
    host, port = (origin.host, origin.port) if proxy is None else (proxy.host, proxy.port)
    failure: OSError = socket.gaierror(socket.EAI_NONAME, f"{host} has no address")
    for family, kind, protocol, _, address in (yield from _look_up(host, port)):
        connection = Connection(socket.socket(family, kind, protocol))
        try:
            connection.sock.setblocking(False)
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            yield from _reach(connection, address, until)
        except OSError as error:
            connection.close()
            failure = error
            continue
        except BaseException:
            connection.close()
            raise
        break
    else:
        raise failure
    try:
        connection.timeout = timeout
        if origin.scheme == "https":
            if proxy is not None:
                yield from _tunnel(connection, origin, proxy, until)
            yield from connection.encrypt(origin.host, until)
    except BaseException:
        connection.close()
        raise
    return connection


def _look_up(host: str, port: int) -> Steps[list[Any]]:
    """Return the addresses of a host; those who ask for them at the same time share an answer."""
    look_up = partial(socket.getaddrinfo, host, port, 0, socket.SOCK_STREAM)
    if re.fullmatch(r"[\d.]+|.*:.*", host):  # an address
        return look_up()
    asked = _asked()
    if (answer := asked.get((host, port))) is None:
        answer = asked[host, port] = start(calling(look_up))
        with defer_signals():  # not given to ``start``: the answer may come before it is in the table, and stay there
            answer.add_done_callback(lambda _: asked.pop((host, port), None))
    yield answer
    return answer.result()


_asked: PerProcess[dict[tuple[str, int], Task[list[Any]]]] = PerProcess(dict)


def _reach(connection: Connection, address: Any, until: float) -> Steps[None]:
    code = connection.sock.connect_ex(address)
    if code in (errno.EINPROGRESS, errno.EWOULDBLOCK):
        yield from connection.wait(POLLOUT, until)
        code = connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code:
        raise OSError(code, os.strerror(code))


def _tunnel(connection: Connection, origin: Origin, proxy: Proxy, until: float) -> Steps[None]:
    """Have the proxy connect to a server."""
    where = origin.at(origin.port)
    yield from connection.send(_head_of("CONNECT", where, {"Host": where, **proxy.headers}))
    status, reason, _, _ = yield from connection.head(until)
    if status != 200:
        raise OSError(f"Tunnel connection failed: {status} {reason}")


@cache
def _tls() -> Any:
    """Return a context that trusts the certificates of the system, or those of SSL_CERT_FILE and SSL_CERT_DIR."""
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context


def _is_readable(sock: socket.socket) -> bool:
    """Return whether a socket can be read, or has ended."""
    return bool(kernels.wire.receive([Wait(sock.fileno(), POLLIN, None, 0.0)], 0))


def _has_no_data(sock: Any) -> bool:
    """Return whether only bytes of TLS itself have arrived, such as the session tickets that follow a handshake."""
    if not isinstance(sock, ssl.SSLSocket):
        return False
    try:
        sock.recv(1)
    except ssl.SSLWantReadError:
        return True
    except OSError:
        pass
    return False
