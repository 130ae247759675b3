"""Input that another thread interrupts."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from tarshards.run.samples.command import Interruptible


def test_the_items_and_then_none():
    source = Interruptible("ab")
    assert [source.next() for _ in range(4)] == ["a", "b", None, None]


def test_an_interrupt_of_another_kind_is_raised():
    def items():
        signal.raise_signal(signal.SIGINT)
        yield 1

    with pytest.raises(KeyboardInterrupt):
        Interruptible(items()).next()


def test_a_reader_that_waits_is_woken_and_may_clean_up():
    ear, bell = os.pipe()
    cleaned = []

    def items():
        try:
            yield os.read(ear, 1)
        finally:
            time.sleep(0.5)  # as to end a program that writes a tar
            cleaned.append(1)

    source = Interruptible(items())
    interrupter = threading.Timer(0.2, source.interrupt)
    interrupter.start()
    assert source.next() is None
    assert cleaned == [1]
    interrupter.join()
    for end in (ear, bell):
        os.close(end)


def test_interrupting_at_any_moment_is_the_end_and_no_more():
    for delay in range(40):
        source = Interruptible(iter(int, 1))
        interrupter = threading.Timer(delay / 20_000, source.interrupt)
        interrupter.start()
        while source.next() is not None:
            pass
        interrupter.join()
        assert source.next() is None


def test_outside_of_the_main_thread_the_next_item_is_the_end():
    source, found = Interruptible(iter(lambda: time.sleep(0.05) or 1, 2)), []

    def read():
        while (item := source.next()) is not None:
            found.append(item)

    reader = threading.Thread(target=read)
    reader.start()
    while not found:
        time.sleep(0.01)
    source.interrupt()
    reader.join(30)
    assert not reader.is_alive()
    assert found
