"""The site as a browser shows it: nothing wider than the screen, and figures and diagrams that can be read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.interop

ROOT = Path(__file__).parents[1]
SITE = ROOT / "site"

#: By how much a page is wider than the window, and what makes it so.
TOO_WIDE = """() => {
    const beyond = document.documentElement.scrollWidth - innerWidth;
    const wide = beyond > 0 ? [...document.querySelectorAll("main *, header *")] : [];
    return [beyond, wide.filter(each => each.getBoundingClientRect().right > innerWidth).map(each => each.outerHTML)];
}"""


@pytest.fixture(scope="module")
def site():
    """What `make docs` built last, or builds."""
    if not (SITE / "index.html").exists():
        subprocess.run([sys.executable, ROOT / "docs/build_site.py"], check=True)
    return SITE


def test_no_page_is_wider_than_a_phone_or_a_small_screen(site, chromium):
    pages = sorted(site.rglob("index.html"))
    assert len(pages) > 80
    for width in 390, 1280:
        page = chromium.new_page(viewport={"width": width, "height": 800})
        for path in pages:
            page.goto(path.as_uri())
            beyond, wide = page.evaluate(TOO_WIDE)
            assert beyond <= 0, (width, path, wide[:3])
        page.close()


def test_figures_fit_the_page_and_diagrams_can_be_read(site, chromium):
    benchmarks, front = ((site / name).as_uri() for name in ("benchmarks/index.html", "index.html"))
    page = chromium.new_page(viewport={"width": 1280, "height": 800})
    page.goto(benchmarks)
    hidden = "all.map(each => each.scrollWidth - each.clientWidth)"
    tables = page.eval_on_selector_all(".md-typeset__scrollwrap, .md-typeset__table, table", f"all => {hidden}")
    assert tables
    assert max(tables) <= 0, "each column is in sight"
    side_by_side = "([a, b]) => a.getBoundingClientRect().top === b.getBoundingClientRect().top"
    assert page.eval_on_selector_all("img[src*='charts/']", side_by_side)
    page.goto(front)
    ends = page.evaluate(
        """() => [".md-header__inner", ".md-main__inner"].map(name => {
            const last = [...document.querySelectorAll(name + " > *")].filter(each => each.clientWidth);
            return Math.max(...last.map(each => each.getBoundingClientRect().right));
        })"""
    )
    assert abs(ends[0] - ends[1]) < 40, "the header is as wide as the page"
    page.close()
    page = chromium.new_page(viewport={"width": 390, "height": 800})
    for address in benchmarks, front:
        page.goto(address)
        page.wait_for_function("[...document.images].every(each => each.complete)")
        images = page.eval_on_selector_all(
            "main img", "all => all.map(each => [each.currentSrc, each.width / each.naturalWidth])"
        )
        drawn = {source.rpartition("/")[2]: scale for source, scale in images if source.endswith(".svg")}
        assert drawn
        assert min(drawn.values()) > 0.9, "letters of at least 11 pixels"
    assert "pipeline-narrow.svg" in drawn


def test_lines_of_code_fit_a_small_screen(site, chromium):
    page = chromium.new_page(viewport={"width": 1280, "height": 800})
    for name in "index.html", "start/index.html", "tour/index.html", "training/index.html", "migrating/index.html":
        page.goto((site / name).as_uri())
        lines = page.eval_on_selector_all("pre > code", "all => all.map(each => each.textContent.split('\\n')).flat()")
        hidden = page.eval_on_selector_all("pre > code", "all => all.map(each => each.scrollWidth - each.clientWidth)")
        assert max(map(len, lines)) > 90
        assert max(hidden) <= 0, name
    assert max(map(len, lines)) == 120, "the longest line that there may be"
    page.close()
