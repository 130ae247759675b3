"""The page in Chromium, in which no error goes unnoticed."""

from __future__ import annotations

import pytest
from rigs import browser


@pytest.fixture
def page(chromium):
    """A page in which no error may go unnoticed, and no dialog open."""
    page = chromium.new_page(viewport={"width": 1100, "height": 720})
    page.set_default_timeout(browser.SOON)
    problems = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("dialog", lambda dialog: problems.append(dialog.message))
    yield page
    page.close()
    assert problems == []
