"""A tool that fails ends with the address at which the documentation explains the error, where there is a site."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tarshards import OpenError, TarError, UrlError
from tarshards.cli.advice import address_of, place_of

ROOT = Path(__file__).parents[2]
SITE = "https://docs.example/tarshards/"
NAMES = "Metadata-Version: 2.4\nName: tarshards\nVersion: 0\n"


@pytest.fixture
def site(tmp_path, monkeypatch):
    """An installed package that names a site."""
    folder = tmp_path / "site/tarshards-0.dist-info"
    folder.mkdir(parents=True)
    urls = f"Project-URL: Source, https://a.b\nProject-URL: Documentation, {SITE}\n"
    folder.joinpath("METADATA").write_text(NAMES + urls)
    monkeypatch.syspath_prepend(folder.parent)
    return folder.parent


def test_the_address_of_an_error(site):
    error = OpenError("broke off, and cannot be resumed: a reset", url="http://host/a.tar")
    assert address_of(error) == f"{SITE}troubleshooting/remote/#broke-off-and-cannot-be-resumed"
    assert address_of(OpenError("nothing of ours")) is None


def test_without_a_site_there_is_no_address(site):
    site.joinpath("tarshards-0.dist-info/METADATA").write_text(NAMES)
    assert address_of(OpenError("broke off, and cannot be resumed: a reset")) is None


def test_the_heading_with_the_longest_text_of_the_class():
    assert place_of(UrlError("no file matches")) == "troubleshooting/opening/#no-file-matches"
    longer = "troubleshooting/opening/#no-file-matches-there-is-no-folder"
    assert place_of(UrlError("no file matches: there is no folder a*[b]?")) == longer
    assert place_of(TarError("no file matches")) is None


def test_what_stands_in_a_name_does_not_slow_the_search_down():
    assert place_of(TarError("a link to a " * 100_000)) == "troubleshooting/archives/#a-link-to-a"


TARCAT = "import sys; sys.argv[0] = 'tarcat'; from tarshards.cli.tarcat import main; main()"


def test_the_last_line_of_a_tool(site, tmp_path):
    for known, last in ((True, f"tarcat: see {SITE}troubleshooting/opening/#no-such-file-or-directory"), (False, None)):
        if not known:
            site.joinpath("tarshards-0.dist-info/METADATA").write_text(NAMES)
        environment = {**os.environ, "PYTHONPATH": f"{site}:{ROOT}"}  # the first that is installed counts
        command = [sys.executable, "-c", TARCAT, "a.tar"]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 1
        first, *others = done.stderr.splitlines()
        assert first == "tarcat: a.tar: No such file or directory"
        assert others == [last] * known
