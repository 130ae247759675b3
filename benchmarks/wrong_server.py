"""A web server on 127.0.0.1 that makes one error, once, in the middle of one file; otherwise it works correctly."""

from __future__ import annotations

import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

WRONGS = ("nothing", "reset", "stall", "length too large", "length too small")


@contextmanager
def serving(folder: Path, wrong: str, victim: str) -> Iterator[str]:
    """Serve the files of *folder*, with ranges; the first answer with the middle of *victim* has the error *wrong*.

    "reset" closes the connection with RST; "stall" stops sending and keeps it open. "length too large" announces twice
    the bytes that are sent before a normal close; "length too small" announces half of them.
    """
    ended, unhurt = threading.Event(), threading.Lock()  # the request that acquires the lock gets the error

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self, *, body: bool = True) -> None:
            path = folder / self.path.lstrip("/")
            if not path.is_file():
                return self.send_error(404)
            content = path.read_bytes()
            asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
            first = int(asked[1]) if asked else 0
            if first >= len(content):
                return self.send_error(416)
            part = content[first : int(asked[2]) + 1 if asked and asked[2] else None]
            middle = len(content) // 2 - first
            hurt = wrong != "nothing" and body and path.name == victim and 0 < middle < len(part)
            hurt = hurt and unhurt.acquire(blocking=False)
            self.send_response(206 if asked else 200)
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("ETag", f'"{path.name}"')
            self.send_header("Content-Length", str(middle if hurt and wrong == "length too small" else len(part)))
            if asked:
                self.send_header("Content-Range", f"bytes {first}-{first + len(part) - 1}/{len(content)}")
            self.end_headers()
            if not body:
                return None
            self.wfile.write(part[:middle] if hurt else part)
            if hurt:
                self.close_connection = True
                if wrong == "stall":
                    ended.wait()
                if wrong == "reset":
                    time.sleep(0.2)  # what was sent arrives before the reset
                    self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    socket.close(self.connection.detach())
            return None

        def do_HEAD(self) -> None:
            self.do_GET(body=False)

        def log_message(self, format: str, *arguments: object) -> None:
            """Keep the runner's stderr for failures."""

    class Listener(ThreadingHTTPServer):
        daemon_threads = True
        block_on_close = False

        def handle_error(self, request: object, client_address: object) -> None:
            """A client that disconnects is not an error."""

    with Listener(("127.0.0.1", 0), Handler) as listener:
        thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.server_address[1]}"
        finally:
            ended.set()
            listener.shutdown()
            thread.join()
