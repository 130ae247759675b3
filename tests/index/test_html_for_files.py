"""Servers that send a page of HTML, with status 200, for every file that is missing."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator

import pytest
from range_server import Site, serving
from with_torch import ShardDataset

from tarshards import IndexedShards, ShardWriter, Stream
from tarshards.errors import OpenError, SampleError, ShardIndexError
from tarshards.index.manifests import read_manifest
from tarshards.storage import requests
from tarshards.storage.expressions import find_shards

PAGES = [b"<!DOCTYPE html><title>Home</title>", b"\xef\xbb\xbf\n <html>" + bytes(3000), b"<!-- an application -->"]
WORDS = "the server sent a page of HTML instead of this file, which is taken as missing"


@pytest.fixture(params=["whole", "ranges"])
def site(request, tmp_path, monkeypatch) -> Iterator[Site]:
    monkeypatch.setattr(requests, "_servers_of_pages", {})
    with ShardWriter(str(tmp_path / "set-%d.tar"), index=True, max_samples=5) as writer:
        for i in range(10):
            writer.write({"__key__": f"{i}", "txt": f"{i}"})
    with serving(tmp_path) as site:
        site.missing, site.page = 200, PAGES[0]
        if request.param == "ranges":  # the page is a file, which is sent in ranges, too
            (tmp_path / "index.html").write_bytes(PAGES[1])
            site.find = lambda path, login: path if (tmp_path / path.lstrip("/")).is_file() else "index.html"
        yield site


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("options", [{}, {"index": False}], ids=str)
def test_shards_without_index_are_streamed_and_one_warning_says_why(site, tmp_path, caplog, options):
    for path in tmp_path.glob("*.index"):
        path.unlink()
    for _ in range(2):
        samples = list(Stream.from_shards(f"{site.url}/set-{{0..1}}.tar", **options))
        assert [sample["__key__"] for sample in samples] == [str(i) for i in range(10)]
    warnings = warnings_in(caplog)
    assert len(warnings) <= 1
    assert all(warning.endswith(f"tar.index: {WORDS}") for warning in warnings)
    assert len(warnings) == (not options)


def test_an_index_that_is_needed_is_named_as_missing(site, tmp_path):
    (tmp_path / "set-1.tar.index").unlink()
    with pytest.raises(ShardIndexError, match="no index found; create one with `tarindex`"):
        IndexedShards(f"{site.url}/set-{{0..1}}.tar")


def test_a_damaged_index_is_an_error_still(site, tmp_path):
    (tmp_path / "set-1.tar.index").write_bytes(b"damaged")
    with pytest.raises(ShardIndexError, match="not an index of tarshards"):
        list(ShardDataset(f"{site.url}/set-{{0..1}}.tar"))


def test_a_key_index_that_is_missing_is_not_used(site):
    assert IndexedShards(f"{site.url}/set-{{0..1}}.tar")["7"]["txt"] == b"7"


def test_a_manifest_that_is_named_is_an_error_that_says_so(site, tmp_path):
    assert len(find_shards(f"{site.url}/set.shards.json")) == 2
    (tmp_path / "set.shards.json").unlink()
    with pytest.raises(OpenError, match=f"set.shards.json: {WORDS}"):
        find_shards(f"{site.url}/set.shards.json")


def test_a_writer_takes_a_page_as_no_manifest(site, tmp_path):
    (tmp_path / "set.shards.json").unlink()
    assert read_manifest(f"{site.url}/set.shards.json") == []


@pytest.mark.interop
def test_columns_that_are_missing(site):
    pytest.importorskip("pyarrow")
    with pytest.raises(SampleError, match="no field duration"):  # the samples are read
        ShardDataset(f"{site.url}/set-{{0..1}}.tar").select(where="duration > 1")


@pytest.mark.parametrize("page", PAGES)
def test_pages_of_all_kinds(site, tmp_path, page):
    site.page = page
    if (tmp_path / "index.html").exists():
        (tmp_path / "index.html").write_bytes(page)
    for path in tmp_path.glob("*.index"):
        path.unlink()
    assert len(list(ShardDataset(f"{site.url}/set-{{0..1}}.tar"))) == 10


def test_a_cache_of_blocks_takes_no_page_as_an_index(site, tmp_path):
    shutil.move(tmp_path / "set-1.tar.index", tmp_path / "later")
    url = f"{site.url}/set-1.tar"
    with pytest.raises(ShardIndexError, match="no index found"):
        IndexedShards(url)
    shutil.move(tmp_path / "later", tmp_path / "set-1.tar.index")
    assert len(IndexedShards(url)) == 5
