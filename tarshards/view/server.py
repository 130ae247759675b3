"""The web server of the page: read-only, reachable only from this machine and with its token."""

from __future__ import annotations

import json
import logging
import re
import secrets
from collections.abc import Callable
from contextlib import suppress
from hmac import compare_digest
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, quote, urlsplit

from tarshards.errors import TarshardsError, visible
from tarshards.samples.member_file import MemberFile
from tarshards.view.media_types import media_type
from tarshards.view.page_text import served_files, served_page
from tarshards.view.view_api import Answer, ViewApi

log: logging.Logger = logging.getLogger("tarshards")

HOSTS = frozenset(["127.0.0.1", "localhost", "::1"])
IDLE = 60  # seconds after which a connection without requests is closed
PIECE = 1 << 18  # bytes of a member to read and send at once
RANGE = re.compile(r"bytes=(\d*)-(\d*)")
#: The policy of every response except the page itself: no content of it is executed.
CLOSED = "sandbox; default-src 'none'; frame-ancestors 'none'"
POLICY = (
    "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; img-src 'self' blob: data:; "
    "media-src 'self' blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors {frames}"
)


class RangeError(ValueError):
    """The requested range is outside the file."""


class ByteRange(NamedTuple):
    """Bytes from *begin* to *end* of a file."""

    begin: int
    end: int

    @classmethod
    def of(cls, header: str | None, size: int) -> ByteRange | None:
        """Return the range that a header names, None for the whole file; raise RangeError for one outside the file.

        >>> ByteRange.of("bytes=2-", 10), ByteRange.of("bytes=-3", 10), ByteRange.of("lines=1-", 10)
        (ByteRange(begin=2, end=10), ByteRange(begin=7, end=10), None)
        """
        found = RANGE.fullmatch(header or "")
        if found is None or found[0] == "bytes=-":
            return None
        first, last = found.groups()
        begin = int(first) if first else max(size - int(last), 0)
        end = min(int(last) + 1, size) if first and last else size
        if not begin < end:
            raise RangeError(f"no bytes {header} of {size}")
        return cls(begin, end)


class ViewServer(ThreadingHTTPServer):
    """Serves the page of *api* at ``url``, which contains the token; with *framed*, notebooks may embed it."""

    daemon_threads = True

    def __init__(self, api: ViewApi, port: int = 0, *, framed: bool = False):
        self.api = api
        self.framed = framed
        self.token: str = secrets.token_urlsafe(24)
        self.files: dict[str, tuple[str, str]] = served_files()
        super().__init__(("127.0.0.1", port), ViewHandler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/{self.token}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a connection that the browser closed, as it does when the user scrolls on."""


class ViewHandler(BaseHTTPRequestHandler):
    """Answers the requests of one connection."""

    protocol_version, timeout = "HTTP/1.1", IDLE
    server_version, sys_version = "tarview", ""
    server: ViewServer

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        token, _, path = address.path.removeprefix("/").partition("/")
        if not self._is_allowed(token):
            self._send(HTTPStatus.FORBIDDEN, "text/plain", b"403\n")
        elif path == "":
            self._send_page()
        elif path in self.server.files:
            kind, text = self.server.files[path]
            self._send(HTTPStatus.OK, f"{kind}; charset=utf-8", text.encode())
        else:
            self._answer(path, dict(parse_qsl(address.query)))

    do_HEAD = do_GET

    def _is_allowed(self, token: str) -> bool:
        """Return whether the request has the token, and comes from this server's page or from no page."""
        host, origin = self.headers.get("Host", ""), self.headers.get("Origin")
        with suppress(ValueError):  # a malformed host
            if urlsplit(f"//{host}").hostname in HOSTS and origin in (None, f"http://{host}"):
                return compare_digest(token.encode(), self.server.token.encode())
        return False

    def _send_page(self) -> None:
        nonce = secrets.token_urlsafe(16)
        frames = "http: https: vscode-webview:" if self.server.framed else "'none'"
        text = served_page(self.server.api.name, nonce, {"transport": "server"})
        policy = POLICY.format(nonce=nonce, frames=frames)
        self._send(HTTPStatus.OK, "text/html; charset=utf-8", text.encode(), policy)

    def _answer(self, path: str, parameters: dict[str, str]) -> None:
        method: Callable[[dict[str, str]], Answer] | None = self.server.api.methods.get(path)
        if method is None:
            self._send_error(HTTPStatus.NOT_FOUND, f"there is no {visible(path)}")
            return
        try:
            answer = method(parameters)
            if isinstance(answer, MemberFile):
                asked = ByteRange.of(self.headers.get("Range"), answer.size)
                begin, end = asked or ByteRange(0, answer.size)
                answer.seek(begin)
                piece = answer.read(min(PIECE, end - begin))
        except RangeError as error:
            self._send_error(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, str(error))
        except (TarshardsError, ValueError, TypeError, LookupError, OSError, ImportError) as error:
            self._send_error(HTTPStatus.BAD_REQUEST, str(error))
        except Exception as error:
            log.exception("%s", path)
            self._send_error(HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(error).__name__}: {error}")
        else:
            if isinstance(answer, MemberFile):
                self._send_file(answer, asked, piece)
            elif isinstance(answer, tuple):
                self._send(HTTPStatus.OK, *answer)
            else:
                self._send(HTTPStatus.OK, "application/json", json.dumps(answer).encode())

    def _send_error(self, status: HTTPStatus, reason: str) -> None:
        self._send(status, "application/json", json.dumps({"error": reason}).encode())

    def _send_file(self, file: MemberFile, asked: ByteRange | None, piece: bytes) -> None:
        """Send a member, or the range *asked* for; its first *piece* has been read.

        If reading fails after that, the connection closes before all bytes are sent.
        """
        begin, end = asked or ByteRange(0, file.size)
        self._begin(HTTPStatus.OK if asked is None else HTTPStatus.PARTIAL_CONTENT, media_type(file.name), end - begin)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Disposition", f"attachment; filename*=UTF-8''{quote(file.name, errors='replace')}")
        if asked is not None:
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{file.size}")
        self.end_headers()
        while piece and self.command != "HEAD":
            self.wfile.write(piece)
            begin += len(piece)
            piece = file.read(min(PIECE, end - begin))

    def _send(self, status: HTTPStatus, kind: str, body: bytes, policy: str = CLOSED) -> None:
        self._begin(status, kind, len(body), policy)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _begin(self, status: HTTPStatus, kind: str, size: int, policy: str = CLOSED) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(size))
        self.send_header("Content-Security-Policy", policy)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cache-Control", "no-store")

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: URLs contain the token."""
