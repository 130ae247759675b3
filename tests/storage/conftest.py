"""Common parts of the tests of HTTP: a server that misbehaves as scripted, and no pauses between attempts."""

from __future__ import annotations

import pytest

from tarshards.storage import tuning
from tarshards.testing.faulty_server import serving


@pytest.fixture
def server():
    with serving() as running:
        yield running
        running.requests.clear()  # of the bodies, which garbage would hold


@pytest.fixture
def no_pauses(monkeypatch):
    monkeypatch.setattr(tuning, "PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(tuning, "LONGEST_SECONDS", 0.002)
