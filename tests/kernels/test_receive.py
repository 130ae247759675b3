"""Receiving from many sockets at once: the kernel and its twin."""

from __future__ import annotations

import errno
import os
import random
import resource
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from select import POLLHUP, POLLIN, POLLOUT
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tarshards.kernels import IS_COMPILED, _wire_py, wire

KERNELS = [pytest.param(_wire_py, id="twin")]
if IS_COMPILED:
    KERNELS.append(pytest.param(wire, id="kernel"))


@pytest.fixture(params=KERNELS)
def kernel(request) -> ModuleType:
    return request.param


@pytest.fixture
def pairs() -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    made = [socket.socketpair() for _ in range(3)]
    for pair in made:
        for each in pair:
            each.setblocking(False)
    yield made
    for pair in made:
        for each in pair:
            each.close()


def waits_of(pairs, places, events=POLLIN):
    return [(mine.fileno(), events, place) for (mine, _), place in zip(pairs, places)]


def test_what_comes_is_received_into_its_place(kernel, pairs):
    places = [bytearray(5), bytearray(5), bytearray(3)]
    pairs[0][1].send(b"abc")
    pairs[2][1].send(b"xyz")
    assert kernel.receive(waits_of(pairs, places), 10_000) == [(0, 3), (2, 3)]
    assert places == [b"abc\0\0", bytes(5), b"xyz"]


def test_it_goes_on_until_a_place_is_full(kernel, pairs):
    place, sender = bytearray(400_000), pairs[0][1]
    data = random.Random(0).randbytes(len(place) + 7)

    def send() -> None:
        sender.setblocking(True)
        for at in range(0, len(data), 20_001):
            sender.sendall(data[at : at + 20_001])

    thread = threading.Thread(target=send)
    thread.start()
    assert kernel.receive(waits_of(pairs, [place]), 30_000) == [(0, len(place))]
    assert place == data[:-7]
    rest = bytearray(10)
    while not rest.startswith(data[-7:]):
        kernel.receive(waits_of(pairs, [memoryview(rest)]), 10)
    thread.join()


def test_the_time_is_over(kernel, pairs):
    begun = time.monotonic()
    assert kernel.receive(waits_of(pairs, [bytearray(5), None, None]), 50) == []
    assert time.monotonic() - begun >= 0.05
    pairs[0][1].send(b"a")
    assert kernel.receive(waits_of(pairs, [bytearray(5)]), 50) == [(0, 1)]
    assert kernel.receive([], 0) == []


def test_sockets_without_a_place_are_only_waited_for(kernel, pairs):
    pairs[1][1].send(b"a")
    assert kernel.receive(waits_of(pairs, [None] * 3), 10_000) == [(1, POLLIN)]
    assert kernel.receive(waits_of(pairs, [None] * 3, POLLIN | kernel.STREAM), 10_000) == [(1, POLLIN)]
    assert kernel.receive(waits_of(pairs, [None], POLLOUT), 10_000) == [(0, POLLOUT)]
    assert pairs[1][0].recv(10) == b"a"


def test_a_pause_is_a_descriptor_below_zero(kernel, pairs):
    assert kernel.receive([(-1, 0, None), *waits_of(pairs, [None])], 20) == []


def test_an_end_and_a_failure(kernel):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ends = []
        for linger in (0, 1):
            mine = socket.create_connection(listener.getsockname())
            mine.setblocking(False)
            other, _ = listener.accept()
            other.send(b"ab")
            assert kernel.receive([(mine.fileno(), POLLIN, bytearray(2))], 10_000) == [(0, 2)]
            other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", linger, 0))
            other.close()
            (found,) = kernel.receive([(mine.fileno(), POLLIN, bytearray(5))], 10_000)
            ends.append(found[1])
            mine.close()
        assert ends == [0, -errno.ECONNRESET]


def test_a_failure_after_some_bytes_is_told_by_the_next_call(kernel):
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as mine:
        mine.setblocking(False)
        other, _ = listener.accept()
        other.send(b"ab")
        other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        other.close()
        found = [kernel.receive([(mine.fileno(), POLLIN, bytearray(5))], 10_000) for _ in range(2)]
        assert found == [[(0, 2)], [(0, -errno.ECONNRESET)]]


def test_a_closed_descriptor_is_an_event(kernel, pairs):
    pairs[0][1].close()
    ((number, events),) = kernel.receive(waits_of(pairs[:1], [None]), 10_000)
    assert (number, bool(events & (POLLIN | POLLHUP))) == (0, True)


def test_a_signal_is_handled_while_it_waits(kernel, pairs):
    """In the main thread, whose handlers run in Python."""

    def stop(*_: object) -> None:
        raise InterruptedError("now")

    before = signal.signal(signal.SIGUSR1, stop)
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1))
    timer.start()
    try:
        with pytest.raises(InterruptedError, match="now"):
            kernel.receive(waits_of(pairs, [bytearray(5)]), 30_000)
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.skipif(not IS_COMPILED, reason="needs the compiled kernels")
@pytest.mark.parametrize("waits", [[(1,)], [5], [("a", 1, None)], [(0, POLLIN, b"abc")], (1,)])
def test_other_waits_are_refused(waits):
    with pytest.raises((TypeError, BufferError)):
        wire.receive(waits, 0)


@given(st.lists(st.lists(st.binary(max_size=50), max_size=4), min_size=1, max_size=4), st.integers(1, 70), st.data())
def test_both_receive_the_same(sent, size, data):
    closed = [data.draw(st.booleans()) for _ in sent]
    found = []
    for module in (_wire_py, wire):
        pairs = [socket.socketpair() for _ in sent]
        places = [bytearray(size) for _ in sent]
        for (mine, other), pieces, is_closed in zip(pairs, sent, closed):
            mine.setblocking(False)
            for piece in pieces:
                other.send(piece)
            if is_closed:
                other.close()
        results = module.receive([(mine.fileno(), POLLIN, place) for (mine, _), place in zip(pairs, places)], 1)
        found.append((results, places))
        for mine, other in pairs:
            mine.close()
            other.close()
    assert found[0] == found[1]


@pytest.mark.skipif(not IS_COMPILED, reason="needs the compiled kernels")
def test_more_sockets_than_a_process_may_have_are_an_error():
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, limit[1]))
    try:
        with pytest.raises(OSError, match="Invalid argument"):
            wire.receive([(-1, 0, None)] * 100, 10)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
