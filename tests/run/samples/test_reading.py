"""Reading that another thread breaks off."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from tarshards.run.samples.reading import Reading


def test_the_items_and_then_none():
    reading = Reading("ab")
    assert [reading.next() for _ in range(4)] == ["a", "b", None, None]


def test_an_interrupt_of_another_kind_is_raised():
    def items():
        signal.raise_signal(signal.SIGINT)
        yield 1

    with pytest.raises(KeyboardInterrupt):
        Reading(items()).next()


def test_a_reader_that_waits_is_woken_and_may_clean_up():
    ear, bell = os.pipe()
    cleaned = []

    def items():
        try:
            yield os.read(ear, 1)
        finally:
            cleaned.append(1)

    reading = Reading(items())
    breaker = threading.Timer(0.2, reading.break_off)
    breaker.start()
    begun = time.monotonic()
    assert reading.next() is None
    assert time.monotonic() - begun < 5
    assert cleaned == [1]
    breaker.join()
    for end in (ear, bell):
        os.close(end)


def test_breaking_off_at_any_moment_is_the_end_and_no_more():
    for delay in range(40):
        reading = Reading(iter(int, 1))
        breaker = threading.Timer(delay / 20_000, reading.break_off)
        breaker.start()
        while reading.next() is not None:
            pass
        breaker.join()
        assert reading.next() is None


def test_outside_of_the_main_thread_the_next_item_is_the_end():
    reading, found = Reading(iter(lambda: time.sleep(0.05) or 1, 2)), []

    def read():
        while (item := reading.next()) is not None:
            found.append(item)

    reader = threading.Thread(target=read)
    reader.start()
    while not found:
        time.sleep(0.01)
    reading.break_off()
    reader.join(30)
    assert not reader.is_alive()
    assert found
