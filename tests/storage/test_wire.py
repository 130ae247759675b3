"""Work in steps: in the calling thread, or many at once in the one thread of the process."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
import time
from concurrent.futures import CancelledError, Future
from select import POLLIN

import pytest
from leftovers import wait_until

from tarshards.parallel.calls import DaemonThreads
from tarshards.storage import wire
from tarshards.storage.wire import Steps, Wait, calling, drop, pausing, results, run, start


def doubled(number: int, pause: float = 0.001) -> Steps[int]:
    yield from pausing(pause)
    return 2 * number


def failing() -> Steps[None]:
    yield from pausing(0.001)
    raise ValueError("no")


@pytest.fixture(params=["run", "start"])
def make(request):
    return run if request.param == "run" else lambda steps: start(steps).result(30)


def test_steps_have_a_result_or_an_error(make):
    assert make(doubled(4)) == 8
    with pytest.raises(ValueError, match="no"):
        make(failing())


def test_what_comes_over_a_socket_goes_to_its_place(make):
    mine, other = socket.socketpair()
    place = bytearray(6)

    def receive() -> Steps[list[int | None]]:
        found = []
        found.append((yield Wait(mine.fileno(), POLLIN, None, time.monotonic() + 0.01)))
        other.send(b"abcdef")
        found.append((yield Wait(mine.fileno(), POLLIN, memoryview(place), time.monotonic() + 30)))
        other.close()
        found.append((yield Wait(mine.fileno(), POLLIN, memoryview(place), time.monotonic() + 30)))
        return found

    with mine, other:
        mine.setblocking(False)
        assert make(receive()) == [None, 6, 0]
        assert place == b"abcdef"


def test_a_call_is_made_here_or_by_another_thread(make):
    here = threading.get_ident()
    assert (make(calling(threading.get_ident)) == here) == (make is run)
    with pytest.raises(ZeroDivisionError):
        make(calling(divmod, 1, 0))


def test_steps_wait_for_a_future(make):
    future: Future[int] = Future()
    threading.Timer(0.02, future.set_result, [5]).start()

    def wait() -> Steps[int]:
        yield future
        return future.result()

    assert make(wait()) == 5


def test_a_call_for_which_no_thread_can_be_started_fails_alone(monkeypatch):
    def refuse() -> DaemonThreads:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(wire, "_callers", refuse)
    with pytest.raises(RuntimeError, match="start new thread"):
        start(calling(threading.get_ident)).result(30)
    assert start(doubled(2)).result(30) == 4


def test_many_works_wait_in_one_thread():
    start(doubled(0)).result(30)  # starts the threads
    before, begun = threading.active_count(), time.monotonic()
    works = [start(doubled(number, 0.2)) for number in range(100)]
    assert threading.active_count() == before
    assert [work.result(30) for work in works] == [2 * number for number in range(100)]
    assert time.monotonic() - begun < 10


def test_what_is_dropped_ends_at_its_step():
    ended = []

    def forever() -> Steps[None]:
        try:
            yield from pausing(3600)
        finally:
            ended.append(threading.current_thread().name)

    called = []
    work = start(forever(), called.append)
    drop(work)
    with pytest.raises(CancelledError):
        work.result(30)
    assert called == [work]
    assert ended == ["tarshards-wire"] or not ended, "it may not have begun"
    drop(work)  # nothing is left to end
    never = start(wait_for(Future()))
    drop(never)
    with pytest.raises(CancelledError):
        never.result(30)


def test_steps_that_fail_as_they_end_leave_the_thread_to_others():
    begun = threading.Event()

    def failing_at_its_end() -> Steps[None]:
        try:
            begun.set()
            yield from pausing(3600)
        finally:
            raise ValueError("no")

    work = start(failing_at_its_end())
    assert begun.wait(30)
    drop(work)
    with pytest.raises(ValueError, match="no"):
        work.result(30)
    assert start(doubled(1)).result(30) == 2


def wait_for(future: Future[None]) -> Steps[None]:
    yield future


def test_a_work_that_is_dropped_while_it_waits_for_another_takes_no_notice_of_that():
    future: Future[None] = Future()
    work = start(wait_for(future))
    drop(work)
    with pytest.raises(CancelledError):
        work.result(30)
    future.set_result(None)
    assert start(doubled(1)).result(30) == 2


def test_results_come_in_order_and_few_are_under_way():
    under_way, most = 0, 0

    def counted(number: int) -> Steps[int]:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        yield from pausing(0.001 * (7 - number % 7))
        under_way -= 1
        return number

    assert list(results(map(counted, range(30)), 4)) == list(range(30))
    assert 1 < most <= 4


def test_results_that_are_left_end_what_is_under_way():
    begun, ended = [], []

    def doubled_at_last(number: int) -> Steps[int]:
        begun.append(number)
        try:
            return (yield from doubled(number, 0.001 if number == 0 else 3600))
        finally:
            ended.append(number)

    found = results(map(doubled_at_last, range(9)), 3)
    assert next(found) == 0
    found.close()
    wait_until(lambda: sorted(ended) == sorted(begun))
    assert len(begun) <= 3


def test_an_interrupt_ends_the_steps_that_this_thread_makes():
    ended = threading.Event()

    def forever() -> Steps[None]:
        try:
            yield from pausing(3600)
        finally:
            ended.set()

    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        run(forever())
    timer.join()
    assert ended.is_set()


@pytest.mark.forks
def test_a_forked_process_has_a_thread_of_its_own():
    assert start(doubled(1)).result(30) == 2
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=lambda: queue.put(start(doubled(2)).result(30)))
    child.start()
    assert queue.get() == 4
    child.join()
    assert start(doubled(3)).result(30) == 6
