"""A web server on 127.0.0.1 for the files of one folder, with ranges and uploads; it counts requests."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote


@dataclass
class Site:
    """*requests* are the paths and ranges that were asked for, *bytes* the payload that was sent.

    *missing* is the status for what is missing, with the body *page*.

    *find* tells which file answers a path, with its query, and a header Authorization; by default the path does.

    What is PUT is stored, and what is to DELETE removed, unless *refusal*, a status, says no. What is to GET is held
    back until no more was asked for within *hold* seconds, and then sent all together: a round. *connections* are those
    that were accepted.
    """

    folder: Path
    url: str = ""
    ranges: bool = True
    etag: str = '"v1"'
    missing: int = 404
    page: bytes = b""
    find: Callable[[str, str], str] = lambda path, login: path.partition("?")[0]
    refusal: int | None = None
    hold: float = 0
    rounds: int = 0
    connections: int = 0
    requests: list[tuple[str, str | None]] = field(default_factory=list)
    bytes: int = 0
    _last: float = 0

    def clear(self) -> None:
        self.requests.clear()
        self.bytes = 0

    def wait(self, asking: threading.Condition) -> None:
        """Wait for the end of the round."""
        with asking:
            this, self._last = self.rounds, time.monotonic()
            while self.rounds == this and (left := self._last + self.hold - time.monotonic()) > 0:
                asking.wait(left)
            if self.rounds == this:
                self.rounds += 1
                asking.notify_all()

    def asked(self, ending: str) -> int:
        """How many requests were for names of this *ending*."""
        return sum(path.endswith(ending) for path, _ in self.requests)


@contextmanager
def serving(folder: Path) -> Iterator[Site]:
    site, lock, asking = Site(folder), threading.Lock(), threading.Condition()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # connections are kept alive
        disable_nagle_algorithm = True  # else what is sent after the headers waits until those are acknowledged

        def do_GET(self) -> None:
            site.wait(asking)
            wanted = self.headers.get("Range")
            data = self._file.read_bytes() if self._file.is_file() else None
            match = re.fullmatch(r"bytes=(\d+)-(\d*)", wanted or "")
            status, part = site.missing if data is None else 200, site.page if data is None else data
            backwards = match and match[2] and int(match[2]) < int(match[1])  # RFC 9110 14.1.1: then it is no range
            if data is not None and match and not backwards and site.ranges:
                status, part = 206, data[int(match[1]) : int(match[2]) + 1 if match[2] else None]
            with lock:
                site.requests.append((self.path, wanted))
                site.bytes += len(part)
            self.send_response(status)
            self.send_header("ETag", site.etag)
            self.send_header("Content-Length", str(len(part)))
            if status == 206 and match and data is not None:
                first = int(match[1])
                self.send_header("Content-Range", f"bytes {first}-{first + len(part) - 1}/{len(data)}")
            self.end_headers()
            self.wfile.write(part)

        def do_PUT(self) -> None:
            data = self.rfile.read(int(self.headers["Content-Length"]))
            if site.refusal is None:
                self._file.parent.mkdir(parents=True, exist_ok=True)
                self._file.write_bytes(data)
            self._answer(site.refusal or 201)

        def do_DELETE(self) -> None:
            is_there = self._file.is_file()
            if site.refusal is None:
                self._file.unlink(missing_ok=True)
            self._answer(site.refusal or (204 if is_there else 404))

        @property
        def _file(self) -> Path:
            return site.folder / unquote(site.find(self.path, self.headers.get("Authorization", "")).lstrip("/"))

        def _answer(self, status: int) -> None:
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            """stderr is for failures."""

    class Listener(ThreadingHTTPServer):
        daemon_threads = True
        block_on_close = False
        request_queue_size = 128  # of more than these at once, each waits for a second

        def process_request(self, *arguments: Any) -> None:
            site.connections += 1
            super().process_request(*arguments)

        def handle_error(self, request: object, client_address: object) -> None:
            """A client that leaves is no error."""

    with Listener(("127.0.0.1", 0), Handler) as listener:
        site.url = f"http://127.0.0.1:{listener.server_address[1]}"
        thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield site
        finally:
            listener.shutdown()
            thread.join()
