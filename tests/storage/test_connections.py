"""Bodies over kept connections: in large portions where they come fast, byte by byte where they come slowly."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tarshards.storage import connections, traffic


@contextmanager
def answering(*portions: bytes, pause: float) -> Iterator[str]:
    """Answer one request with *portions* as the body, and a pause before each but the first; yield the URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(10_000)
                size = sum(map(len, portions))
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size + portions[0])
                for portion in portions[1:]:
                    time.sleep(pause)
                    connection.sendall(portion)
                connection.recv(1)

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        finally:
            connections._pool(os.getpid()).close()
            thread.join()


@pytest.fixture(autouse=True)
def direct(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")


def read(url: str, size: int, timeout: float) -> list[bytes]:
    """Return what each call of ``read`` returns."""
    with connections.request("GET", url, {}, timeout=timeout) as response:
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
