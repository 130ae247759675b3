"""The account of a loader: rates, waits, and what was the limit."""

from __future__ import annotations

import pytest

from tarshards.loaders.monitor import Monitor


@pytest.mark.parametrize(
    ("waited", "consumed", "reading", "decoding", "limit"),
    [(1, 9, 5, 4, "consuming"), (9, 1, 5, 4, "reading"), (9, 1, 4, 5, "decoding"), (5, 5, 0, 9, "decoding")],
)
def test_the_limit_is_what_would_have_to_be_faster(waited, consumed, reading, decoding, limit):
    assert Monitor(waited=waited, consumed=consumed, reading=reading, decoding=decoding).limit == limit


def test_rates_and_waits():
    monitor = Monitor(threads=2, waited=1, consumed=3, reading=1, decoding=2, samples=400, bytes=8000)
    assert (monitor.seconds, monitor.samples_per_second, monitor.bytes_per_second, monitor.idle) == (4, 100, 2000, 5)


def test_before_the_first_batch_there_are_no_rates():
    assert (Monitor().samples_per_second, Monitor().bytes_per_second, Monitor().idle) == (0, 0, 0)
    assert "0 samples/s" in str(Monitor())
