"""Debian's Chromium, driven by Playwright."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from programs import find

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

SOON = 60_000  # milliseconds


@contextmanager
def chromium() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        options = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=find("chromium"), args=options)
        yield browser
        browser.close()


def until(page: Page, expression: str) -> None:
    """Wait until an expression holds; the policy of the page forbids that it does so itself."""
    end = time.monotonic() + SOON / 1000
    while not page.evaluate(expression):
        assert time.monotonic() < end, expression
        time.sleep(0.02)


def show(page: Page, url: str) -> None:
    """Go to a sample in tarview, and wait until its fields are there."""
    page.goto("about:blank")
    page.goto(url)
    page.wait_for_selector("[data-shown]")


def cards(page: Page) -> list[str]:
    """Return the keys of the samples in sight in tarview's grid, in their order, once all are there."""
    time.sleep(0.05)  # scrolling takes a frame
    every = "all.map(card => [Number(card.dataset.position), card.querySelector('b')?.textContent])"
    found: list[tuple[int, str | None]] = [(0, None)]
    end = time.monotonic() + SOON / 1000
    while not found or None in [key for _, key in found]:
        assert time.monotonic() < end, found
        found = page.eval_on_selector_all(".card", f"all => {every}")
    return [str(key) for _, key in sorted(found)]
