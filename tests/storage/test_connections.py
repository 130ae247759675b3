"""Bodies over kept connections: in large portions where they come fast, byte by byte where they come slowly.

What has stalled comes over another connection.
"""

from __future__ import annotations

import random
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import accumulate
from typing import Any

import pytest
from forked import in_child
from leftovers import wait_until
from programs import need

from tarshards.errors import OpenError
from tarshards.storage import connections, servers, traffic, transfer, tuning
from tarshards.storage.location import Location
from tarshards.storage.remote import Remote
from tarshards.storage.requests import Address, Version
from tarshards.storage.servers import Admission, WebServer
from tarshards.storage.transfer import RemoteFile, read_whole
from tarshards.storage.wire import Steps, drop, run, start
from tarshards.testing.faulty_server import Answer, Server
from tarshards.testing.faulty_server import serving as misbehaving


@contextmanager
def answering(
    *portions: bytes, pause: float, certificate: str | None = None, before: bytes = b"", framing: str = ""
) -> Iterator[str]:
    """Answer one request with *portions* as the body, and a pause before each but the first; yield the URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            if certificate is not None:
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                context.load_cert_chain(certificate)
                connection = context.wrap_socket(connection, server_side=True)
            with connection:
                connection.recv(10_000)
                size = sum(map(len, portions))
                header = framing or f"Content-Length: {size}"
                connection.sendall(before + f"HTTP/1.1 200 OK\r\n{header}\r\n\r\n".encode() + portions[0])
                for portion in portions[1:]:
                    time.sleep(pause)
                    connection.sendall(portion)
                with suppress(ConnectionResetError):  # the client leaves bytes unread
                    connection.recv(1)

        thread = threading.Thread(target=answer)
        thread.start()
        url = f"http{'s' * (certificate is not None)}://127.0.0.1:{listener.getsockname()[1]}/"
        try:
            yield url
        finally:
            WebServer.of(url).close_idle()
            thread.join()


def read(url: str, size: int, timeout: float) -> list[bytes]:
    """Return what each call of ``read`` returns."""
    with run(connections.request("GET", url, {}, timeout=timeout)) as response:
        portions = []
        while data := response.read(size):
            portions.append(data)
            assert response.length is not None
    return portions


def test_a_server_so_slow_that_each_byte_is_progress():
    """It takes longer than the timeout to send what is awaited, but is never silent for as long."""
    with answering(b"a" * 100, *[b"b" * 10] * 8, pause=0.2) as url:
        begun = time.monotonic()
        portions = read(url, 1000, timeout=0.7)
    assert b"".join(portions) == b"a" * 100 + b"b" * 80
    assert time.monotonic() - begun > 1.4


def test_a_server_that_falls_silent():
    with answering(b"a" * 100, b"b" * 10, pause=3) as url, pytest.raises(TimeoutError):
        read(url, 1000, timeout=0.3)


def test_few_calls_for_many_small_packets():
    before = traffic.so_far()
    with answering(b"", *[b"x" * 500] * 500, pause=0.0005) as url:
        portions = read(url, 1 << 18, timeout=30)
    assert b"".join(portions) == b"x" * 250_000
    assert len(portions) < 20
    assert (traffic.so_far() - before).bytes == 250_000


def test_small_reads_lose_nothing_of_what_came_with_the_headers():
    with answering(b"abcdefghij", b"klmno", pause=0.1) as url:
        assert b"".join(read(url, 3, timeout=30)) == b"abcdefghijklmno"


def read_into(url: str, size: int, timeout: float) -> bytes:
    """Return the body, read into memory of *size* bytes again and again."""
    body, view = bytearray(), memoryview(bytearray(size))
    with run(connections.request("GET", url, {}, timeout=timeout)) as response:
        while count := run(response.receive(view)):
            body += view[:count]
    return bytes(body)


PORTIONS = {
    "records as long as can be": [1 << 14] * 12,
    "short records": [1400] * 120,
    "one after the other": [1, 20_000, 33_290, 66_580, 9000, 3, 50_000],
    "the last one comes in two": [33_290, 33_290, 100, 16_400],
}


@pytest.mark.parametrize("sizes", PORTIONS.values(), ids=PORTIONS)
@pytest.mark.parametrize("size", [100_000, 9000, 1000])
def test_the_end_of_a_body_is_not_awaited_together_with_more(certificate, sizes, size):
    body = random.Random(0).randbytes(sum(sizes))
    portions = [body[end - portion : end] for portion, end in zip(sizes, accumulate(sizes))]
    with answering(*portions, pause=0.002, certificate=certificate) as url:
        begun = time.monotonic()
        assert read_into(url, size, timeout=5) == body
        assert time.monotonic() - begun < 4


@pytest.mark.parametrize("size", [1 << 18, 1000])
def test_a_body_that_was_buffered_with_its_headers(monkeypatch, certificate, size):
    monkeypatch.setattr(connections, "HEAD_BYTES", 1 << 17)
    body = random.Random(0).randbytes(100_000)
    with answering(body, pause=0, certificate=certificate) as url:
        assert read_into(url, size, timeout=1) == body


def test_a_reset_is_no_end_of_a_body_without_a_length():
    """Also if bytes have just come."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(10_000)
                connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                time.sleep(0.05)
                connection.sendall(b"a" * 1000)
                time.sleep(0.0003)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ConnectionResetError):
            read_into(f"http://127.0.0.1:{listener.getsockname()[1]}/", 1 << 18, timeout=5)
        thread.join()


def test_what_follows_a_body_is_no_answer_to_the_next_request(certificate):
    """Under TLS it may have been received, and decrypted, together with the end of the body."""
    forged = b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nforged"
    body = b"a" * 1000
    with answering(b"", body + forged, pause=0.05, certificate=certificate, framing="Content-Length: 1000") as url:
        assert read_into(url, 1000, timeout=5) == body
        kept = WebServer.of(url).take()
        if kept is not None:
            kept.close()
        assert kept is None


def test_a_host_is_looked_up_again_although_its_address_came_at_once(monkeypatch):
    asked = []

    def start_and_wait(steps: Steps[Any], *ended: Any) -> Any:
        work = start(steps, *ended)
        work.result(30)
        return work

    monkeypatch.setattr(connections, "start", start_and_wait)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *where: asked.append(where) or [])
    for _ in range(2):
        run(connections._look_up("localhost", 80))
    assert len(asked) == 2


class Stalling(Server):
    """Of the first *stalls* answers for the file's first bytes it sends a part, and then nothing."""

    stalls = 1

    def choose(self, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[Answer, bytes]:
        if begin_of(headers) < SIZE:
            self.stalls -= 1
            if self.stalls >= 0:
                return Answer(cut=SIZE // 4, end="stall"), self.body
        return Answer(end="keep"), self.body


SIZE = 1 << 18


def begin_of(headers: dict[str, str]) -> int:
    return int(headers["range"].removeprefix("bytes=").partition("-")[0])


@pytest.fixture(params=["http", "https"])
def certificate(request, tmp_path, monkeypatch):
    """The certificate of a server, which is trusted; None for one without TLS."""
    if request.param == "http":
        return None
    need("openssl")
    certificate = str(tmp_path / "certificate.pem")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-keyout", certificate, "-out", f"{certificate}.crt"]
    subprocess.run(command, check=True, capture_output=True)
    with open(f"{certificate}.crt") as file, open(certificate, "a") as both:
        both.write(file.read())
    monkeypatch.setenv("SSL_CERT_FILE", certificate)
    monkeypatch.setattr(connections, "_tls", connections._tls.__wrapped__)
    return certificate


@pytest.fixture
def stalling(certificate, monkeypatch):
    """A server whose first answer stalls, and the bytes of its file."""
    monkeypatch.setattr(tuning, "LATE_SECONDS", 0.1)
    monkeypatch.setattr(Admission, "is_late", lambda slot, rest: False)  # of a busy machine
    with misbehaving(Stalling(), certificate) as server:
        server.body = random.Random(0).randbytes(4 * SIZE)
        yield server


def known(address: Address) -> RemoteFile:
    """Return a file whose version is known already."""
    file = RemoteFile(address)
    file.keep(Version(4 * SIZE, '"v1"', ""))
    return file


def read_beginning(server: Server, *, beside: bool, timeout: float) -> bytes:
    """Read the first bytes with no retry, while others are read *beside*."""
    address = Address(Location(f"{server.url}/shard.tar", Remote(retries=0, timeout=timeout)))
    ended = threading.Event()

    def read_others() -> None:
        while not ended.wait(0.01):
            run(RemoteFile(address).fetch(SIZE, 4 * SIZE))

    thread = threading.Thread(target=read_others)
    if beside:
        thread.start()
    try:
        return bytes(run(known(address).fetch(0, SIZE)))
    finally:
        ended.set()
        if beside:
            thread.join()


@pytest.mark.parametrize("stalls", [1, tuning.MOST_MOVES])
def test_what_has_stalled_comes_over_another_connection(stalling, stalls):
    """Without a retry, and from the byte where it has stalled."""
    stalling.stalls = stalls
    before = traffic.so_far()
    assert read_beginning(stalling, beside=True, timeout=4) == stalling.body[:SIZE]
    begins = [begin for _, _, headers, _ in stalling.requests if (begin := begin_of(headers)) < SIZE]
    assert len(begins) == 1 + stalls
    assert begins[0] < begins[1] <= SIZE // 4
    assert (traffic.so_far() - before).retries == stalls


@pytest.mark.parametrize(("stalls", "beside"), [(1, False), (tuning.MOST_MOVES + 1, True)])
def test_a_server_that_is_silent_has_its_time_out(stalling, stalls, beside):
    stalling.stalls = stalls
    with pytest.raises(OpenError, match="timed out"):
        read_beginning(stalling, beside=beside, timeout=1)
    assert stalling.stalls == 0


@pytest.fixture
def slow():
    """A server of 1 MiB whose answers come at once, but for those that a test plays."""
    with misbehaving(Server(default=Answer(end="keep"))) as server:
        server.body = random.Random(0).randbytes(4 * SIZE)
        yield server


def read_after_others(server: Server, connections: int, *answers: Answer) -> bytes:
    """Read the whole file, as *answers* bring it, after it was read before."""
    address = Address(Location(f"{server.url}/shard.tar", Remote(retries=0, connections=connections)))
    run(RemoteFile(address).fetch(0, 4 * SIZE))
    server.play(*answers, body=server.body, default=server.default)
    return bytes(run(known(address).fetch(0, 4 * SIZE)))


SLOW = Answer(end="keep", pace=SIZE // 16, pause=0.02)


def test_the_rest_of_a_late_request_comes_over_idle_connections(slow):
    assert read_after_others(slow, 32, SLOW) == slow.body
    begins = sorted(begin_of(headers) for _, _, headers, _ in slow.requests)
    assert begins[0] == 0
    assert 2 < len(begins) == len(set(begins)) <= 1 + 16
    assert begins[1] >= SIZE // 16, "what had come is not asked for again"


def test_who_may_have_one_connection_does_not_hold_up_others(slow):
    """A late request ends only when the parts of its rest have come."""
    file, other = (
        known(Address(Location(f"{slow.url}/shard.tar", Remote(retries=0, connections=count)))) for count in (32, 1)
    )
    run(file.fetch(0, 4 * SIZE))
    slow.play(SLOW, body=slow.body, default=slow.default)
    late = start(file.fetch(0, 4 * SIZE))
    wait_until(lambda: slow.requests)
    waiting = start(read_whole(other.address, 4 * SIZE))
    try:
        assert late.result(10) == waiting.result(10) == slow.body
    finally:
        drop(waiting)
        drop(late)
    assert len(slow.requests) > 4, "the rest came over other connections"


@pytest.mark.parametrize(("connections", "late"), [(2, 0.25), (32, 60)])
def test_a_request_stays_whole(slow, monkeypatch, connections, late):
    """Where no connection is idle, and where it is not late."""
    monkeypatch.setattr(tuning, "LATE_SECONDS", late)
    assert read_after_others(slow, connections, SLOW) == slow.body
    assert len(slow.requests) == 1


@pytest.mark.parametrize("answer", [Answer(status="404 Not Found"), Answer(cut=400), Answer(etag='"v2"')])
def test_a_part_of_the_rest_fails(slow, answer):
    with pytest.raises(OpenError, match=r"404|ended before|broke off|changed") as caught:
        read_after_others(slow, 32, SLOW, Answer(end="keep"), Answer(end="keep"), answer)
    assert f"{slow.url}/shard.tar" in str(caught.value)


@pytest.fixture
def opened(monkeypatch):
    """The connections that were opened."""
    connect, found = connections._connect, []

    def noting(*arguments: Any) -> Steps[connections.Connection]:
        connection = yield from connect(*arguments)
        found.append(connection)
        return connection

    monkeypatch.setattr(connections, "_connect", noting)
    yield found
    servers.close_connections()


@pytest.fixture
def long(certificate):
    """A server of 1 MiB that keeps connections."""
    with misbehaving(Server(default=Answer(end="keep")), certificate) as server:
        server.body = random.Random(0).randbytes(4 * SIZE)
        yield server


@pytest.mark.parametrize("pause", [tuning.IDLE_SECONDS - 1, tuning.IDLE_SECONDS + 1])
def test_a_connection_that_was_idle_for_long_is_closed_and_not_used_again(long, opened, monkeypatch, pause):
    clock = time.monotonic()
    monkeypatch.setattr(servers, "monotonic", lambda: clock)
    for _ in range(2):
        with run(connections.request("HEAD", f"{long.url}/shard.tar", {})) as response:
            assert response.read(1) == b""
        clock += pause
    assert len(opened) == 1 + (pause >= tuning.IDLE_SECONDS)
    assert [connection.is_open for connection in opened] == [False, True][-len(opened) :]


def test_connections_that_were_idle_for_long_are_closed_though_nobody_asks_for_them(slow, opened, monkeypatch):
    """When one to another server is kept."""
    clock = time.monotonic()
    monkeypatch.setattr(servers, "monotonic", lambda: clock)
    with misbehaving(Server(default=Answer(end="keep"))) as other:
        for url in (other.url, slow.url):
            with run(connections.request("HEAD", f"{url}/shard.tar", {})) as response:
                assert response.read(1) == b""
            clock += 2 * tuning.IDLE_SECONDS
        assert [connection.is_open for connection in opened] == [False, True]


def open_ahead(server: Server, count: int, files: int = 0) -> Location:
    """Open idle connections, which the next *files* files share, and return the location of the file."""
    connections.connect_ahead(server.url, count, files=files, timeout=5)
    assert WebServer.of(server.url).spare() == count
    wait_until(lambda: len(WebServer.of(server.url)._idle) == count)
    return Location(f"{server.url}/shard.tar.index", Remote(retries=0, connections=count))


def test_a_whole_file_comes_over_connections_that_are_open(long, opened):
    """And over no more than these, and one for each reader, where several files are read at once."""
    location = open_ahead(long, 6)
    time.sleep(0.05)  # tickets of TLS come
    assert location.read() == long.body
    begins = [begin_of(headers) for _, _, headers, _ in long.requests]
    assert len(begins) == len(set(begins)) == 1 + 5
    with ThreadPoolExecutor(3) as threads:
        assert all(threads.map(lambda _: location.read() == long.body, range(9)))
    assert len(opened) <= 6 + 3
    assert WebServer.of(long.url).spare() == len(opened)


def test_readers_of_whole_files_share_the_idle_connections(long):
    """Each of six has one: the file comes in parts of the usual size, not in one for each of the idle connections."""
    location = open_ahead(long, 6)
    together = threading.Barrier(6)

    def read(_: int) -> bytes:
        together.wait(30)
        return location.read()

    with ThreadPoolExecutor(6) as threads:
        assert all(body == long.body for body in threads.map(read, range(6)))
    assert len(long.requests) <= 6 * len(long.body) // tuning.FIRST_BYTES + 6
    long.requests.clear()
    assert location.read() == long.body
    assert len(long.requests) > len(long.body) // tuning.FIRST_BYTES


def test_a_whole_file_comes_in_parts_where_no_connection_is_open(long, opened):
    assert Location(f"{long.url}/shard.tar.index").read() == long.body
    begins = sorted(begin_of(headers) for _, _, headers, _ in long.requests)
    assert begins == list(range(0, len(long.body), tuning.FIRST_BYTES))
    assert len(opened) <= len(begins)


def test_files_come_in_the_order_in_which_they_are_asked_for(long):
    """One thread fetches parts here: those of the first file before those of the second."""
    long.default = Answer(end="keep", pace=1 << 16, pause=0.01)

    def asked() -> list[tuple[str, int]]:
        return [(path, begin_of(headers)) for _, path, headers, _ in long.requests]

    def read(name: str) -> bool:
        return Location(f"{long.url}/{name}", Remote(retries=0, connections=1)).read() == long.body

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(read, "a")
        wait_until(lambda: len(asked()) == 2)
        second = threads.submit(read, "b")
        assert [first.result(), second.result()] == [True, True]
    assert [path for path, begin in asked() if begin] == 3 * ["/a"] + 3 * ["/b"]


def test_no_more_is_read_than_the_limit(slow, opened):
    location = open_ahead(slow, 4)
    assert location.read(4 * SIZE) == slow.body
    for limit in 10, 4 * SIZE - 1:
        with pytest.raises(OpenError, match=f"more than {limit:,} bytes"):
            location.read(limit)


def test_a_whole_file_that_changes_meanwhile_is_one_or_the_other(slow, opened):
    location = open_ahead(slow, 4)
    slow.play(*[Answer(end="keep")] * 2, body=slow.body, default=Answer(etag='"v2"', end="keep"))
    assert location.read() == slow.body
    assert any("range" not in headers for _, _, headers, *_ in slow.requests)


@pytest.mark.parametrize("answer", [Answer(status="404 Not Found"), Answer(cut=400)])
def test_a_part_of_a_whole_file_fails(slow, opened, answer):
    location = open_ahead(slow, 4)
    slow.play(*[Answer(end="keep")] * 2, answer, body=slow.body, default=slow.default)
    with pytest.raises(OpenError, match=r"404|ended before|broke off") as caught:
        location.read()
    assert f"{slow.url}/shard.tar.index" in str(caught.value)


def test_a_server_without_ranges_sends_a_whole_file(slow, opened):
    location = open_ahead(slow, 4)
    slow.play(body=slow.body, default=Answer(ranges=False, end="keep"))
    assert location.read() == slow.body
    assert len(slow.requests) == 1


WINDOW = tuning.WINDOW_BYTES


def windows(server: Server) -> list[int]:
    """Return the offsets of the requested ranges that are one window long."""
    ranges = [headers["range"] for _, _, headers, _ in server.requests if "range" in headers]
    spans = [span.removeprefix("bytes=").split("-") for span in ranges]
    return sorted(int(begin) for begin, end in spans if int(end) + 1 - int(begin) == WINDOW)


@pytest.mark.parametrize("size", [1, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, 3 * WINDOW, 3 * WINDOW + 1, 4 * SIZE])
def test_a_file_with_a_share_of_connections_comes_in_parts_of_a_window(long, size):
    """Those beyond its end may have been requested, too; those of a third file are not."""
    long.body = long.body[:size]
    location = open_ahead(long, 6, files=2)
    parts = [0, WINDOW, 2 * WINDOW]
    for _ in range(2):
        long.requests.clear()
        assert location.read() == long.body
        assert {begin for begin in parts if begin < size} <= set(windows(long))
        assert size > 3 * WINDOW or set(windows(long)) <= set(parts)
    assert WebServer.of(long.url).take_share() == 1


class LateParts(Server):
    """Answers the requests that are made before the size is known, but the first, when one for the rest has come."""

    def choose(self, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[Answer, bytes]:
        if 0 < begin_of(headers) < 6 * WINDOW:
            wait_until(lambda: any(begin_of(headers) >= 6 * WINDOW for _, _, headers, _ in self.requests))
        return self.default, self.body


def test_the_rest_of_a_file_comes_over_all_connections_of_its_share():
    """Also over those that still bring its first parts: over one, its connection would be slow at its start."""
    with misbehaving(LateParts(default=Answer(end="keep"))) as server:
        server.body = random.Random(0).randbytes(4 * SIZE)
        location = open_ahead(server, 6, files=1)
        assert location.read() == server.body
        assert sum(begin_of(headers) >= 6 * WINDOW for _, _, headers, _ in server.requests) == 6


@pytest.mark.parametrize("limit", [10, WINDOW + 10, 4 * SIZE - 1])
def test_no_more_is_read_of_a_file_with_a_share_than_the_limit(slow, limit):
    location = open_ahead(slow, 4, files=1)
    with pytest.raises(OpenError, match=f"more than {limit:,} bytes"):
        location.read(limit)


class Replacing(Server):
    """Sends *other* for ranges from the first window on."""

    other: Answer

    def choose(self, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[Answer, bytes]:
        return (self.other if "range" in headers and begin_of(headers) else self.default), self.body


@pytest.mark.parametrize("size", [100, 2 * WINDOW])
@pytest.mark.parametrize(
    "other", [Answer(etag='"v2"', end="keep"), Answer(status="404 Not Found"), Answer(status="500 No"), Answer(cut=300)]
)
def test_a_part_that_was_requested_before_the_size_was_known_matters_only_if_it_exists(size, other, no_pauses):
    with misbehaving(Replacing(default=Answer(end="keep"))) as server:
        server.body, server.other = random.Random(0).randbytes(size), other
        location = open_ahead(server, 4, files=1)
        if size < WINDOW or other.etag == '"v2"':  # a file that changes is read again, as a whole
            assert location.read() == server.body
        else:
            with pytest.raises(OpenError, match=r"shard.tar.index.*(404|500|ended before|broke off)"):
                location.read()


class Unnamed(Server):
    """Sends no validator; the first bytes come late, and the whole file breaks off."""

    def choose(self, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[Answer, bytes]:
        if "range" not in headers:
            return Answer(etag=None, cut=3 * WINDOW), self.body
        if not begin_of(headers):
            wait_until(lambda: len(self.requests) > 1)
            time.sleep(0.1)
        return self.default, self.body


def test_a_part_that_comes_first_lets_no_file_be_short():
    with misbehaving(Unnamed(default=Answer(etag=None, end="keep"))) as server:
        server.body = random.Random(0).randbytes(4 * SIZE)
        location = open_ahead(server, 4, files=1)
        with pytest.raises(OpenError, match="ended before its 1048576 bytes"):
            location.read()


def test_connections_that_cannot_be_opened_are_left_to_requests(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    connections.connect_ahead(url, 3, timeout=5)
    wait_until(lambda: WebServer.of(url).spare() == 0)
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setenv("http_proxy", "http://:80")
    connections.connect_ahead(url, 3, timeout=5)
    with pytest.raises(OpenError, match="proxy"):
        Location(f"{url}/a.tar.index").read()


#: What a server, or a proxy, sends without end before an answer, and around the chunks of one: first, then again.
OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
ENDLESS = {
    "100 Continue": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "102 Processing": (b"", b"HTTP/1.1 102 Processing\r\n\r\n"),
    "103 Early Hints": (b"", b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n"),
    "a status line": (b"HTTP/1.1 200 ", b"O"),
    "a header": (OK + b"X: ", b"x"),
    "headers": (OK, b"X: y\r\n"),
    "an extension of a chunk": (CHUNKED + b"4;", b"x"),
    "an extension of a later chunk": (CHUNKED + b"4\r\nbody\r\n4;", b"x"),
    "a trailer": (CHUNKED + b"4\r\nbody\r\n0\r\nX: ", b"x"),
    "trailers": (CHUNKED + b"4\r\nbody\r\n0\r\n", b"X: y\r\n"),
    "the body of an error": (b"HTTP/1.1 404 Not Found\r\nContent-Length: 60000\r\n\r\n", b"x"),
    "an answer of a proxy": (b"HTTP/1.1 200 OK\r\n", b"X: y\r\n"),
}


@contextmanager
def without_end(first: bytes, again: bytes, pause: float) -> Iterator[str]:
    """Answer each request with *first*, and then *again* for ever, with pauses; yield the URL."""
    is_over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer(connection: socket.socket) -> None:
            with connection, suppress(OSError):
                connection.recv(10_000)
                connection.sendall(first)
                while not is_over.wait(pause):
                    connection.sendall(again)

        def serve() -> None:
            with suppress(OSError):
                while not is_over.is_set():
                    threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/a.tar"
        finally:
            is_over.set()
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            thread.join()


@pytest.mark.parametrize("pause", [0.0, 0.05], ids=["fast", "slow"])
@pytest.mark.parametrize("what", ENDLESS)
def test_what_never_ends_is_given_up_at_the_deadline(what, pause, monkeypatch):
    first, again = ENDLESS[what]
    if not pause:
        again *= 2000
    with without_end(first, again, pause) as url:
        if what == "an answer of a proxy":
            monkeypatch.setenv("no_proxy", "")
            monkeypatch.setenv("https_proxy", url)
            url = "https://127.0.0.1:1/a.tar"
        begun = time.monotonic()
        location = Location(url, Remote(timeout=0.2, retries=0))
        with pytest.raises(OpenError, match=r"timed out|100 headers|65536 bytes|404 Not Found") as caught:
            location.read()
        assert time.monotonic() - begun < 5
    assert caught.value.url == url


def test_interim_answers_of_any_kind_are_passed_over():
    hints = b"HTTP/1.1 103 Early Hints\r\nLink: </style.css>\r\n\r\n"
    with answering(b"body", pause=0, before=b"HTTP/1.1 100 Continue\r\n\r\n" + hints) as url:
        assert b"".join(read(url, 1000, timeout=5)) == b"body"


def test_a_slow_body_in_chunks_has_all_the_time_it_needs():
    chunks = [b"4\r\n", b"body", b"\r\n"] * 5 + [b"0\r\n", b"\r\n"]
    served = answering(b"", *chunks, pause=0.1, framing="Transfer-Encoding: chunked")
    with served as url, run(connections.request("GET", url, {}, timeout=0.5)) as response:
        assert b"".join(iter(lambda: response.read(100), b"")) == b"body" * 5


DEFERRING = ("enter", "leave", "_admit", "close", "_end_response")  # signals, or ending something


def interrupted(steps: Steps[Any], line: int) -> bool:
    """Make steps, with a KeyboardInterrupt before so many lines of transfer.py; return whether there was one."""
    left = line

    def trace(frame, event, _):
        nonlocal left
        if frame.f_code.co_filename != transfer.__file__ or frame.f_code.co_name in DEFERRING:
            return None
        left -= event == "line"
        if event == "line" and left == 0:
            raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        run(steps)
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # a response that was not stored yet
@pytest.mark.parametrize("connections", [1, 32])
def test_a_request_that_is_interrupted_anywhere_takes_no_connection_from_others(slow, connections):
    address = Address(Location(f"{slow.url}/shard.tar", Remote(retries=0, connections=connections)))
    lines = next(line for line in range(1, 1000) if not interrupted(RemoteFile(address).fetch(0, 100), line))
    assert lines > 30
    server = WebServer.of(slow.url)
    assert not server._under_way
    assert not any(server._waiting)


@pytest.mark.forks
def test_a_child_ends_what_its_parent_began_though_another_thread_held_the_lock(slow):
    with run(connections.request("GET", f"{slow.url}/shard.tar", {}, timeout=5)) as response:
        while response.read(SIZE):
            pass
        server = WebServer.of(slow.url)
        request = Admission(server, SIZE, 1, is_awaited=True)
        run(request.enter())

        def end() -> bool:
            response.close()
            request.leave()
            return True

        with server._lock():
            assert in_child(end) == 0
        request.leave()
