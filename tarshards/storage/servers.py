"""The web servers that a process reads from: idle connections to each, and the requests under way, counted once."""

from __future__ import annotations

import atexit
import os
from base64 import b64encode
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cache
from threading import Lock
from time import monotonic
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from tarshards.parallel.forks import PerProcess
from tarshards.parallel.signals import defer_signals
from tarshards.storage import tuning
from tarshards.storage.wire import Steps

#: Environment variables that name proxies.
PROXIES = [form for name in ("http", "https", "all", "no") for form in (f"{name}_proxy", f"{name}_proxy".upper())]
PROXIES += ["REQUEST_METHOD"]  # set in a CGI program, where HTTP_PROXY may come from a client
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

    @property
    def named(self) -> str:
        """Its name in a header."""
        return self.at(None if self.port == DEFAULT_PORTS[self.scheme] else self.port)

    def at(self, port: int | None) -> str:
        host = (
            f"[{self.host}]"
            if ":" in self.host
            else self.host.encode("idna" if not self.host.isascii() else "ascii").decode()
        )
        return host if port is None else f"{host}:{port}"


class Proxy(NamedTuple):
    """A proxy, and the headers to send to it."""

    host: str
    port: int
    authorization: str | None

    @property
    def headers(self) -> dict[str, str]:
        return {"Proxy-Authorization": self.authorization} if self.authorization else {}


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


class WebServer:
    """A server, which is reached over a proxy if the environment names one; see ``WebServer.of``.

    - Idle connections are kept; the most recently used one is taken first.
    - As many requests as there may be connections are under way, and others wait in order: those whose reader waits for
      them come before those that are made ahead. Large requests to a near server use half of the connections, which
      fill the link; more would overflow its buffers.
    - *soonest* is the seconds until the fastest response began, 0.0 before the first one, and *pace* the mean of large
      requests that ended, in seconds a byte.
    """

    def __init__(self, origin: Origin, proxy: Proxy | None):
        self.origin, self.proxy = origin, proxy
        self.soonest = self.pace = 0.0
        self._lock = PerProcess(Lock)
        self._idle: list[tuple[float, Any]] = []  # with the time since when each is idle
        self._opening = 0  # connections
        self._shares: list[int] = []  # connections for each of the whole files to be fetched next
        self._whole_files = 0  # that are being fetched
        self._under_way: set[Admission] = set()
        self._waiting: list[deque[Admission]] = [deque(), deque()]  # awaited ones first

    @classmethod
    def of(cls, url: str) -> WebServer:
        """Return the server of *url* in this process; raise ValueError if that or its proxy is malformed."""
        origin = Origin.of(url)
        key = origin, _find_proxy(origin, tuple(map(os.environ.get, PROXIES)))
        servers = _servers()
        return servers.get(key) or servers.setdefault(key, cls(*key))

    @property
    def is_far(self) -> bool:
        return self.soonest > tuning.FAR_SECONDS

    def answered(self, seconds: float) -> None:
        """Record the seconds until a response began."""
        self.soonest = min(self.soonest or seconds, seconds)

    # Connections.

    def take(self) -> Any:
        """Return an idle connection that is still open, None if there is none."""
        while True:
            with self._lock():
                if not self._idle:
                    return None
                since, connection = self._idle.pop()
            if monotonic() - since < tuning.IDLE_SECONDS and connection.is_reusable():
                return connection
            connection.close()

    def put(self, connection: Any) -> None:
        """Keep a connection; close those of all servers that were idle for too long."""
        now = monotonic()
        with self._lock():
            self._idle.append((now, connection))
        for server in list(_servers().values()):
            server.close_idle(now - tuning.IDLE_SECONDS)

    def close_idle(self, since: float = float("inf")) -> None:
        """Close the connections that have been idle since that time, or before."""
        while True:
            with self._lock():
                if not self._idle or self._idle[0][0] > since:
                    return
                _, connection = self._idle.pop(0)
            connection.close()

    def spare(self) -> int:
        """Return the number of connections that are idle, or being opened."""
        return len(self._idle) + self._opening

    def prepare(self, count: int, files: int) -> int:
        """Let the next *files* whole files share *count* connections; return how many the caller has to open now."""
        with self._lock():
            self._shares = [max(1, count // files)] * files if files else []
            missing = max(0, count - self.spare())
            self._opening += missing
            return missing

    def opened(self) -> None:
        """Record that a connection was opened, or cannot be."""
        with self._lock():
            self._opening -= 1

    def take_share(self) -> int:
        """Return the number of connections that one more whole file may use at once, 1 or more."""
        with self._lock():
            return self._shares.pop() if self._shares else 1

    @contextmanager
    def sharing(self) -> Iterator[Callable[[], int]]:
        """Count a reader of a whole file; yield a function that returns its share of the idle connections."""
        with self._lock():
            self._whole_files += 1
        try:
            yield lambda: self.spare() // self._whole_files
        finally:
            with self._lock():
                self._whole_files -= 1

    # Requests.

    def large(self) -> int:
        """Return the number of large requests under way."""
        return sum(request.is_large for request in list(self._under_way))

    def enter(self, request: Admission) -> None:
        """Admit a request, or let it wait."""
        with defer_signals(), self._lock():
            self._waiting[not request.is_awaited].append(request)
            self._admit()

    def leave(self, request: Admission) -> None:
        """End a request, or its wait."""
        with defer_signals(), self._lock():
            if request in self._under_way:
                self._under_way.remove(request)
                if request.is_large:
                    pace = (monotonic() - request.begun) / request.size
                    self.pace += (pace - self.pace) / 8 if self.pace else pace
            elif request in (waiting := self._waiting[not request.is_awaited]):
                waiting.remove(request)
            self._admit()

    def _admit(self) -> None:
        for waiting in self._waiting:
            for request in list(waiting):
                if len(self._under_way) >= request.most or (request.is_large and self.large() >= request.most_large):
                    continue  # others may have more connections
                waiting.remove(request)
                self._under_way.add(request)
                request.admitted.set_result(None)


class Admission:
    """The right to have a request under way: for *size* bytes, and at most *most* at once; a reader may wait for it."""

    def __init__(self, server: WebServer, size: int, most: int, *, is_awaited: bool):
        self._server = server
        self.is_awaited, self.most = is_awaited, most
        self.is_large = size >= tuning.REQUEST_BYTES // 4
        self.most_large: int = most if server.is_far else max(1, most // 2)
        self.size = self._rest = size
        self.begun = self._time = monotonic()
        self.admitted: Future[None] = Future()

    def enter(self) -> Steps[None]:
        """Wait until the request may be sent."""
        self._server.enter(self)
        if not self.admitted.done():
            yield self.admitted
            self.begun = self._time = monotonic()

    def leave(self) -> None:
        """End the request, or the wait for it."""
        self._server.leave(self)

    def is_late(self, rest: int) -> bool:
        """Return whether idle connections would bring the *rest* of a large request much sooner.

        An epoch ends with its slowest request: the connection resends lost packets one after the other, while other
        connections are idle.
        """
        took, came, soonest = monotonic() - self._time, self._rest - rest, self._server.soonest
        if self.is_awaited or not self.is_large or took < max(tuning.LATE_SECONDS, 2 * soonest):
            return False
        self._time, self._rest = self._time + took, rest
        pace, others = took / max(came, 1), self._server.pace
        are_idle = 2 * self._server.large() <= self.most_large
        return are_idle and pace > 2 * others > 0 and rest * pace > max(tuning.LATE_SECONDS, 5 * soonest)


_servers: PerProcess[dict[tuple[Origin, Proxy | None], WebServer]] = PerProcess(dict)


@atexit.register
def close_connections() -> None:
    """Close all idle connections of this process."""
    for server in list(_servers().values()):
        server.close_idle()
