"""Memory that processes share, and into which indexes are received."""

import multiprocessing
import os

import pytest

from tarshards.errors import OpenError
from tarshards.storage.remote import LEAST_AHEAD, Remote
from tarshards.storage.shared import SharedBytes
from tarshards.storage.wire import run

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs files without a name")
LARGE = LEAST_AHEAD * 3 // 4


@pytest.fixture
def shared():
    made = SharedBytes.of(3, Remote(ahead=LEAST_AHEAD))
    assert made is not None
    return made


def received(data, allocate):
    """Return *data* as a reader does that knows its size before its bytes come."""
    view = allocate(len(data))
    view[:] = data
    return view


def refuse(allocate):
    pytest.fail("fetched again")


@pytest.mark.parametrize("fetch", [lambda allocate: received(b"abc", allocate), lambda allocate: b"abc"])
def test_a_piece_is_fetched_once_and_is_read_only(shared, fetch):
    piece = shared.hold(1, fetch)
    assert (piece, piece.readonly) == (b"abc", True)
    assert shared.hold(1, refuse) == b"abc"
    assert shared.taken == 3


def test_what_a_failed_attempt_reserved_is_used_by_the_next(shared):
    def broken(allocate):
        allocate(LARGE)[:5] = b"wrong"
        raise OpenError("broke off")

    for _ in range(3):
        with pytest.raises(OpenError, match="broke off"):
            shared.hold(0, broken)
    piece = shared.hold(0, lambda allocate: received(b"x" * LARGE, allocate))
    assert isinstance(piece, memoryview)
    assert shared.taken == LARGE


def test_a_piece_that_is_dropped_stays_as_it_was_for_those_who_have_it(shared):
    before = shared.hold(0, lambda allocate: received(b"old", allocate))
    shared.drop(0)
    assert shared.hold(0, lambda allocate: received(b"new", allocate)) == b"new"
    assert before == b"old"


def test_pieces_for_which_there_is_no_memory_are_held_by_their_process(shared):
    first = shared.hold(0, lambda allocate: received(b"a" * LARGE, allocate))
    second = shared.hold(1, lambda allocate: received(b"b" * LARGE, allocate))
    third = shared.hold(2, lambda allocate: received(b"c", allocate))
    assert [type(piece) for piece in (first, second, third)] == [memoryview, bytes, memoryview]
    assert (second, third) == (b"b" * LARGE, b"c")


def test_its_file_cannot_be_cut_under_those_who_read_it(shared):
    with pytest.raises(PermissionError):
        os.ftruncate(shared._file, 10)


@pytest.mark.forks
def test_a_forked_process_reads_what_another_received(shared):
    worker = multiprocessing.get_context("fork").Process(
        target=shared.hold, args=(2, lambda allocate: received(b"of the child", allocate))
    )
    worker.start()
    worker.join()
    assert shared.hold(2, refuse) == b"of the child"


@pytest.mark.forks
def test_a_process_that_is_stopped_is_waited_for_once(monkeypatch):
    shared = SharedBytes.of(1, Remote(ahead=LEAST_AHEAD, timeout=0.2))
    here, there = multiprocessing.Pipe()

    def claim():
        there.send(run(shared.claim(0)))
        there.recv()

    worker = multiprocessing.get_context("fork").Process(target=claim)
    worker.start()
    try:
        assert here.recv()
        assert not run(shared.claim(0)), "it takes too long"
        monkeypatch.setattr("tarshards.storage.shared.sleep", lambda seconds: pytest.fail("waits again"))
        assert shared.hold(0, lambda allocate: b"of this process") == b"of this process"
    finally:
        here.send("end")
        worker.join()
