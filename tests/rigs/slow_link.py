"""A slow network on one machine: a link into a network namespace, with a delay and a rate, and a web server behind it.

Needs root, /dev/net/tun, a C compiler and nginx; `needs` names them for `programs.need`.
"""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from programs import COMPILER, TUN, find

needs = (TUN, COMPILER, "nginx", "unshare", "openssl", "curl")

PORT, TLS_PORT = 8000, 8443
START = 30.0  # seconds for a program to start, at most

NGINX = """
daemon off; master_process off; user root; pid {folder}/pid; error_log {folder}/error.log;
events {{ worker_connections 2000; }}
http {{
    client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
    log_format counted '$connection $request_method $request_uri $status $body_bytes_sent $http_range';
    access_log {folder}/access.log counted;
    default_type application/octet-stream; sendfile on; tcp_nodelay on;
    tcp_nopush off;  # else the end of a range waits 40 ms
    keepalive_timeout 600; keepalive_requests 1000000;
    server {{
        listen {port} reuseport; listen {tls_port} ssl reuseport; root {root};
        ssl_certificate {folder}/certificate.pem; ssl_certificate_key {folder}/key.pem;
    }}
}}
"""


class Link:
    """A link of packets to `address`, in its own network namespace, for the duration of the context.

    Each direction delays packets by *one_way_ms*, carries *mb_s* MB/s, drops what does not fit into *buffer_kb*, and
    loses *lost* of 100,000 packets. Several links, also of other processes, do not disturb each other. When the thread
    that made it ends, however it ends, so do the link and the programs started in it.
    """

    address: str  #: of the far end

    def __init__(self, one_way_ms: float = 25, mb_s: float = 80, *, buffer_kb: float = 4000, lost: int = 0):
        self._numbers = [str(number) for number in (one_way_ms, mb_s, buffer_kb, lost)]
        self._stack = ExitStack()

    def __enter__(self) -> Link:
        with ExitStack() as stack:
            self.folder = Path(tempfile.mkdtemp(prefix="slow-link-"))
            stack.callback(shutil.rmtree, self.folder)
            program, source = self.folder / "link", Path(__file__).with_name("link.c")
            subprocess.run(["cc", "-O2", "-pthread", "-o", program, source], check=True)
            process = subprocess.Popen([program, *self._numbers], stdout=subprocess.PIPE, text=True)
            stack.callback(end, process)
            assert process.stdout is not None
            stack.enter_context(process.stdout)
            addresses = process.stdout.readline().split()
            if not addresses:
                raise OSError("the link did not start; stderr says why")
            self.pid, self.address = process.pid, addresses[1]
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self, *command: str) -> subprocess.Popen[bytes]:
        """Start a program at the far end."""
        enter = ["nsenter", f"--net=/proc/{self.pid}/ns/net", "setpriv", "--pdeathsig", "KILL"]
        process = subprocess.Popen([*enter, *command], stdin=subprocess.DEVNULL)
        self._stack.callback(end, process)
        return process

    def serving(self, root: Path) -> AbstractContextManager[Site]:
        """Serve the files of a folder by nginx at the far end, over http and https."""
        return serving(root, self.address, (PORT, TLS_PORT), self.start)


@contextmanager
def serving(
    root: Path, address: str, ports: tuple[int, int], start: Callable[..., subprocess.Popen[bytes]], servers: int = 1
) -> Iterator[Site]:
    """Serve the files of a folder by nginx, over http and https at two *ports* of an address.

    *start* starts a program there. Of several *servers*, processes, each takes some of the connections.
    """
    nginx = find("nginx")
    assert nginx is not None
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nginx-")))
        # One that its users make their own authority of: SSL_CERT_FILE, curl --cacert.
        command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=rig"]
        command += ["-addext", f"subjectAltName=IP:{address}"]
        files = ["-keyout", folder / "key.pem", "-out", folder / "certificate.pem"]
        subprocess.run([*command, *files], check=True, capture_output=True)
        port, tls_port = ports
        settings = NGINX.format(folder=folder, root=Path(root).resolve(), port=port, tls_port=tls_port)
        (folder / "nginx.conf").write_text(settings)
        processes = []
        for _ in range(servers):
            process = start(nginx, "-e", f"{folder}/error.log", "-c", f"{folder}/nginx.conf")
            stack.callback(end, process)
            processes.append(process)
            wait_for(address, port, process)
        yield Site(
            f"http://{address}:{port}", f"https://{address}:{tls_port}", folder, [each.pid for each in processes]
        )


class Request(NamedTuple):
    """A line of nginx's log, written when the answer has been sent."""

    connection: int
    method: str
    path: str
    status: int
    bytes: int  # of the body that were sent
    range: str  # "bytes=0-99", or "-"


@dataclass
class Site:
    """A server, and its requests."""

    url: str
    tls_url: str
    folder: Path
    servers: list[int]  # the ids of its processes
    _read: int = field(default=0, repr=False)

    @property
    def certificate(self) -> Path:
        return self.folder / "certificate.pem"

    def taken(self) -> list[Request]:
        """Return the requests that were answered since the last call."""
        with open(self.folder / "access.log", "rb") as log:
            log.seek(self._read)
            text = log.read()
        text = text[: text.rfind(b"\n") + 1]
        self._read += len(text)
        lines = (re.fullmatch(r"(\d+) (\S+) (\S+) (\d+) (\d+) (.*)", line) for line in text.decode().splitlines())
        parts = (line.groups() for line in lines if line is not None)
        return [
            Request(int(connection), method, path, int(status), int(sent), span)
            for connection, method, path, status, sent, span in parts
        ]


def wait_for(address: str, port: int, process: subprocess.Popen[bytes]) -> None:
    """Return when a program accepts connections; OSError if it ends before, or takes too long."""
    limit = time.monotonic() + START
    while process.poll() is None and time.monotonic() < limit:
        try:
            socket.create_connection((address, port), 1).close()
            return
        except OSError:
            time.sleep(0.02)
    raise OSError(f"{process.args[-3:]} does not listen")  # type: ignore[index]


def end(process: subprocess.Popen[bytes] | subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
