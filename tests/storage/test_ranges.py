"""Bytes at known places of local files, web servers and stores."""

from __future__ import annotations

import os
import re

import fsspec
import pytest
from range_server import serving

from tarshards.errors import OpenError
from tarshards.storage import tuning
from tarshards.storage.location import Location
from tarshards.storage.ranges import LocalRanges

DATA = os.urandom(10_000)


@pytest.fixture(params=["path", "file:", "http:", "memory:"])
def url(request, tmp_path):
    """The URL of a file that holds DATA."""
    (tmp_path / "a b.tar").write_bytes(DATA)
    if request.param == "path":
        yield str(tmp_path / "a b.tar")
    elif request.param == "file:":
        yield f"file://{tmp_path}/a%20b.tar"
    elif request.param == "http:":
        (tmp_path / "a.tar").write_bytes(DATA)
        with serving(tmp_path) as site:
            yield f"{site.url}/a.tar"
    else:
        name = f"/{os.urandom(4).hex()}.tar"
        store = fsspec.filesystem("memory")
        store.pipe_file(name, DATA)
        yield f"memory:/{name}"
        store.rm(name)


def test_reads_any_part(url):
    with Location.of(url).ranges() as ranges:
        assert ranges.size == len(DATA)
        assert ranges.remote == (not isinstance(ranges, LocalRanges))
        for offset, size in ((0, 1), (9_999, 1), (512, 512), (1000, 100), (5_000, 5_000), (0, 10_000)):
            assert ranges.read(offset, size) == DATA[offset : offset + size]
        for offset in (0, 700, 5_000, 10_000):
            assert ranges.read(offset, 0) == b""


@pytest.mark.parametrize("place", [(-1, 1), (10_000, 1), (0, 10_001), (20_000, 0)])
def test_places_outside_are_errors(url, place):
    with (
        Location.of(url).ranges() as ranges,
        pytest.raises(OpenError, match=re.escape(f"{place[1]} bytes at offset {place[0]}")),
    ):
        ranges.read(*place)


def test_what_is_not_there(url):
    with pytest.raises(OpenError, match="nobody"):
        Location.of(url.replace(".tar", ".nobody")).ranges()


@pytest.mark.parametrize("url", ["-", "pipe:cat x.tar"])
def test_streams_have_no_ranges(url):
    with pytest.raises(OpenError, match="a stream"):
        Location.of(url).ranges()


def test_a_server_that_fails_for_a_while(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "PAUSE_SECONDS", 0.01)
    (tmp_path / "a.tar").write_bytes(DATA)
    with serving(tmp_path) as site:
        ranges = Location.of(f"{site.url}/a.tar").ranges()
        ask, calls = ranges.address.ask, []

        def sometimes(headers):
            calls.append(headers)
            if len(calls) < 3:
                raise ConnectionResetError("reset by peer")
            return (yield from ask(headers))

        monkeypatch.setattr(ranges.address, "ask", sometimes)
        assert ranges.read(2000, 3000) == DATA[2000:5000]
        assert len(calls) == 3


def test_a_server_without_ranges_and_a_file_that_changes(tmp_path):
    (tmp_path / "a.tar").write_bytes(DATA)
    with serving(tmp_path) as site:
        ranges = Location.of(f"{site.url}/a.tar").ranges()
        site.etag = '"v2"'
        with pytest.raises(OpenError, match="changed while it was read"):
            ranges.read(5000, 10)
        site.ranges = False
        with pytest.raises(OpenError, match="no ranges"):
            Location.of(f"{site.url}/a.tar").ranges()


def test_a_file_written_to_in_place_is_told(tmp_path):
    path = tmp_path / "a.tar"
    path.write_bytes(DATA)
    with Location.of(str(path)).ranges() as ranges:
        ranges.verify()
        with path.open("r+b") as file:
            file.write(b"new")
        os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
        with pytest.raises(OpenError, match=r"a\.tar: changed while it was read"):
            ranges.verify()


@pytest.mark.parametrize("change", [lambda path: path.unlink(), lambda path: path.rename(f"{path}.old")])
def test_a_file_removed_or_replaced_is_none_of_ours(tmp_path, change):
    path = tmp_path / "a.tar"
    path.write_bytes(DATA)
    with Location.of(str(path)).ranges() as ranges:
        change(path)
        ranges.verify()
        path.write_bytes(b"another")
        ranges.verify()
        assert ranges.read(0, 10_000) == DATA


def test_a_file_that_shrinks_is_an_error(tmp_path):
    path = tmp_path / "a.tar"
    path.write_bytes(DATA)
    with Location.of(str(path)).ranges() as ranges:
        os.truncate(path, 100)
        with pytest.raises(OpenError, match=r"a\.tar: offset 5000: the file has shrunk since it was opened"):
            ranges.read(5000, 10)
