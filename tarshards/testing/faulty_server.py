"""An HTTP server on 127.0.0.1 that misbehaves exactly as scripted."""

from __future__ import annotations

import re
import socketserver
import ssl
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from socket import SO_LINGER, SOL_SOCKET


@dataclass(frozen=True)
class Answer:
    """One response: its headers, the number of bytes after which it breaks off (*cut*), and how it ends."""

    status: str = "200 OK"
    headers: tuple[tuple[str, str], ...] = ()
    etag: str | None = '"v1"'
    modified: str | None = None
    body: bytes | None = None
    framing: str = "length"  # or "chunked", "none"
    ranges: bool = True
    shift: int = 0  # added to the start in Content-Range
    total: int = 0  # added to the size in Content-Range
    most: int | None = None  # bytes of a range, at most
    length: int = 0  # added to Content-Length
    pace: int = 1 << 30  # bytes sent at once
    pause: float = 0.0  # seconds after each of these sends
    cut: int | None = None
    # "reset", "stall", "keep" to continue on the connection, "drop" to close it without an answer, and "drain" to read
    # the rest of the request and discard it
    end: str = "close"
    raw: bytes | None = None  # sent unchanged instead of an answer
    interim: bytes = b""  # sent before the request's body is read
    taken: int | None = None  # bytes of the request's body to read before the answer; None: all

    def build(self, body: bytes, start: int | None, stop: int | None = None) -> bytes:
        if self.raw is not None:
            return self.raw
        body = body if self.body is None else self.body
        headers = [*self.headers]
        headers += [] if self.end in ("keep", "drop", "stall") else [("Connection", "close")]
        headers += [("ETag", self.etag)] if self.etag else []
        headers += [("Last-Modified", self.modified)] if self.modified else []
        status, part = self.status, body
        if start is not None and self.ranges and status.startswith("200") and start >= len(body):
            status, part = "416 Range Not Satisfiable", b""
            headers += [("Content-Range", f"bytes */{len(body)}")]
        elif start is not None and self.ranges and status.startswith("200"):
            status, part = "206 Partial Content", body[start:stop][: self.most]
            end = start + len(part) - 1
            headers += [("Content-Range", f"bytes {start + self.shift}-{end}/{len(body) + self.total}")]
        if self.framing == "length":
            headers += [("Content-Length", str(len(part) + self.length))]
        elif self.framing == "chunked":
            headers += [("Transfer-Encoding", "chunked")]
            chunks = [part[at : at + 1000] for at in range(0, len(part), 1000)]
            part = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers)
        return f"HTTP/1.1 {status}\r\n{lines}\r\n".encode() + part


@dataclass(repr=False)
class Server:
    """Sends *answers* in turn, then complete ones with *body*; `requests` has each method, path, headers and body."""

    body: bytes = b""
    answers: list[Answer] = field(default_factory=list)
    default: Answer = Answer()
    requests: list[tuple[str, str, dict[str, str], bytes]] = field(default_factory=list)
    url: str = ""
    stopped: threading.Event = field(default_factory=threading.Event)

    def play(self, *answers: Answer, body: bytes, default: Answer | None = None) -> str:
        """Send these answers from now on; return the URL."""
        self.answers[:], self.body, self.default = answers, body, default or Answer()
        self.requests.clear()
        return f"{self.url}/shard.tar"

    def choose(self, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[Answer, bytes]:
        """Return the response to a request, and the body of the requested file."""
        return self.answers.pop(0) if self.answers else self.default, self.body


class _Handler(socketserver.StreamRequestHandler):
    server: _Listener

    def handle(self) -> None:
        with suppress(ConnectionError):
            while self._answer():
                pass

    def _answer(self) -> bool:
        """Answer one request; return whether the connection stays open."""
        script = self.server.script
        line = self.rfile.readline().decode()
        if not line:
            return False
        method, path, _ = line.split()
        headers: dict[str, str] = {}
        while (line := self.rfile.readline().decode().strip()) != "":
            name, _, value = line.partition(": ")
            headers[name.lower()] = value
        next_answer = script.answers[0] if script.answers else script.default
        self.request.sendall(next_answer.interim)
        length = int(headers.get("content-length", 0))
        body = self.rfile.read(length if next_answer.taken is None else min(length, next_answer.taken))
        script.requests.append((method, path, headers, body))
        answer, known = script.choose(method, path, headers, body)
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", headers.get("range", ""))
        valid = headers.get("if-range") in (None, answer.etag, answer.modified)
        start = int(match[1]) if match and valid else None
        raw = answer.build(known, start, int(match[2]) + 1 if match and match[2] else None)
        if method == "HEAD":
            raw = raw[: raw.index(b"\r\n\r\n") + 4]
        raw = raw if answer.cut is None else raw[: answer.cut]
        for at in range(0, len(raw), answer.pace):
            self.request.sendall(raw[at : at + answer.pace])
            script.stopped.wait(answer.pause)
        if answer.end == "stall":
            script.stopped.wait(5)
        elif answer.end == "drain":
            while self.rfile.read1(1 << 16):
                pass
        elif answer.end == "reset":
            self.request.setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))
            # Closing without the server's usual shutdown sends a reset.
            self.rfile.close()
            self.wfile.close()
            self.request.close()
        return answer.end == "keep"


class _Listener(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False
    script: Server

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore the error of a client that has disconnected."""


@contextmanager
def serving(script: Server | None = None, certificate: str | None = None) -> Iterator[Server]:
    """Serve *script*; over TLS if *certificate* names a file with a certificate and its key."""
    with _Listener(("127.0.0.1", 0), _Handler) as listener:
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            listener.socket = context.wrap_socket(listener.socket, server_side=True)
        listener.script = script or Server()
        listener.script.url = f"http{'s' if certificate else ''}://127.0.0.1:{listener.server_address[1]}"
        thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield listener.script
        finally:
            listener.script.stopped.set()
            listener.shutdown()
            thread.join()
