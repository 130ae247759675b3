"""The monitor of a loader: rates, waits, and the bottleneck."""

from __future__ import annotations

import re

import pytest

from tarshards.loaders.monitor import Monitor
from tarshards.storage.traffic import Traffic


@pytest.mark.parametrize(
    ("waited", "consumed", "reading", "network", "decoding", "limit"),
    [
        (1, 9, 5, 5, 4, "consuming"),
        (9, 1, 5, 2, 4, "reading"),
        (9, 1, 5, 3, 4, "network"),
        (9, 1, 4, 4, 5, "decoding"),
        (5, 5, 0, 0, 9, "decoding"),
    ],
)
def test_the_limit_is_what_would_have_to_be_faster(waited, consumed, reading, network, decoding, limit):
    monitor = Monitor(waited=waited, consumed=consumed, reading=reading, decoding=decoding)
    monitor.traffic = Traffic(waited=network)
    assert monitor.limit == limit


def test_work_is_waiting_for_the_network_or_decoding():
    monitor = Monitor()
    monitor.add(3.0, Traffic(requests=1, waited=1.0))
    assert (monitor.reading, monitor.decoding) == (1, 2)


def test_traffic_is_told_where_there_was_some():
    assert "requests" not in str(Monitor())
    text = str(Monitor(traffic=Traffic(requests=1200, retries=3, bytes=2_500_000, cache_hits=7)))
    assert "1,200 requests (3 retries), 2.5 MB received, 7 blocks from the cache" in text


def test_rates_and_waits():
    monitor = Monitor(threads=2, waited=1, consumed=3, reading=1, decoding=2, samples=400, bytes=8000)
    assert (monitor.seconds, monitor.samples_per_second, monitor.bytes_per_second, monitor.idle) == (4, 100, 2000, 5)


def test_before_the_first_batch_there_are_no_rates():
    assert (Monitor().samples_per_second, Monitor().bytes_per_second, Monitor().idle) == (0, 0, 0)
    assert "0 samples/s" in str(Monitor())


@pytest.mark.parametrize(
    ("monitor", "words"),
    [
        (Monitor(threads=2, consumed=1.0, decoding=0.5, samples=100), "100 samples/s; 0.5 threads .*: enough$"),
        (
            Monitor(threads=1, waited=1.0, consumed=1.0, decoding=8.0, samples=100, bytes=10**7),
            "10.0 MB/s; 8.0 .*add 7, on 4 ",
        ),
        (
            Monitor(threads=1, waited=1.0, consumed=1.0, reading=1.5, decoding=0.5, samples=9),
            "faster, which takes 75% of",
        ),
        (Monitor(threads=1, waited=1.0, consumed=0.01, decoding=1.0, samples=9), "its needs are unknown"),
        (Monitor(), "its needs are unknown"),
    ],
)
def test_advice_is_what_the_consumer_needs(monkeypatch, monitor, words):
    monkeypatch.setattr("tarshards.loaders.monitor.available_cores", lambda: 2)
    assert re.search(words, monitor.advice)
