"""Markers: whole or not there; what cannot be known is an error, never a no."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tarshards import OpenError, UrlError
from tarshards.storage.expressions import common_name
from tarshards.storage.location import Location, look_up
from tarshards.storage.markers import Marker, Provenance, digest_of


@pytest.fixture(params=["local", "file", "memory"])
def place(request, tmp_path) -> str:
    return {"local": f"{tmp_path}/a/b", "file": f"file://{tmp_path}/a/b", "memory": f"memory://{tmp_path}/a/b"}[
        request.param
    ]


def test_markers_read_back(place):
    url = f"{place}/x.tar.done"
    assert Marker(url).read() is None
    assert not Location.of(url).exists()
    Marker(url).write({"digest": "d", "item": ["\udcff", "ü"]})
    assert Marker(url).read() == {"digest": "d", "item": ["\udcff", "ü"]}
    assert Location.of(url).exists()
    assert list(look_up(Location.exists, [url, f"{url}x", url])) == [True, False, True]
    assert Location.of(url).size() > 10


def test_a_locked_marker_reads_back_and_is_one_process_s(place):
    url = f"{place}/x.tar.started"
    marker, other = Marker(url), Marker(url)
    marker.lock()
    assert marker.read() is None
    for record in ({"digest": "d" * 100}, {"digest": "d"}):
        marker.write(record)
        assert marker.read() == other.read() == record
    assert other.is_locked == (other.location.path is not None)
    if other.is_locked:
        with pytest.raises(BlockingIOError):
            other.lock()
        marker.clear()
        assert other.location.size() == 0
    marker.release()
    assert not other.is_locked
    assert marker.read() == other.read()


@pytest.mark.parametrize("text", [b"", b"{", b'{"digest": "x"', b"[]", b"\xff"])
def test_a_torn_marker_is_none(tmp_path, text):
    (tmp_path / "x.done").write_bytes(text)
    assert Marker(f"{tmp_path}/x.done").read() is None


def test_what_cannot_be_known_is_an_error(tmp_path):
    os.mkdir(tmp_path / "x.done")
    with pytest.raises(OpenError):
        Marker(f"{tmp_path}/x.done").read()
    with pytest.raises(OpenError, match="No such file"):
        Location.of(f"{tmp_path}/nothing").size()
    Path(tmp_path / "file").write_text("")
    with pytest.raises(OpenError, match=r"Not a directory|File exists"):
        Marker(f"{tmp_path}/file/x.done").write({})


def test_the_size_of_a_stream_is_unknown():
    assert Location.of("pipe:cat a.tar").size() is None


def test_digests_are_of_all_parts():
    assert len({digest_of("a"), digest_of("a", ""), digest_of(["a"]), digest_of("", "a")}) == 4


@pytest.mark.parametrize(
    ("urls", "name"),
    [
        (["d/out-000.tar", "d/out-001.tar"], "d/out"),
        (["s3://b/x/out_07.tar", "s3://b/x/out_17.tar"], "s3://b/x/out"),
        (["d/0.tar", "d/1.tar"], "d/"),
        (["a/x.tar", "b/x.tar"], ""),
        (["x.tar.gz"], "x"),
    ],
)
def test_common_names(urls, name):
    assert common_name(urls) == name


def test_no_shards_have_no_name():
    with pytest.raises(UrlError):
        common_name([])


def test_what_is_made_is_made_once(place):
    output, marker, calls = Location.of(f"{place}/x.tar"), f"{place}/x.tar.done", []

    def make():
        calls.append(Marker(marker).read())
        Marker(output).write({})
        return {"number": len(calls)}

    def once(digest="d", **options):
        return Provenance(digest, output).make_once(marker, make, **options)

    assert once() == ({"digest": "d", "number": 1}, False)
    assert once() == ({"digest": "d", "number": 1}, True)
    assert once("e") == ({"digest": "e", "number": 2}, False), "something else"
    assert once("e", resume=False) == ({"digest": "e", "number": 3}, False)
    output.remove()
    assert once("e") == ({"digest": "e", "number": 4}, False)
    assert [call and call["digest"] for call in calls] == [None] * 4, "removed before something is made"
    Marker(marker).remove()
    assert once("e")[1] is False, "the output alone may be a part of it"


def test_in_a_folder_of_one_work_markers_have_no_digest(place):
    assert Provenance(None).make_once(f"{place}/1.done", lambda: {"a": 1}) == ({"a": 1}, False)
    assert Provenance(None).make_once(f"{place}/1.done", lambda: {"a": 2}) == ({"a": 1}, True)
    assert Provenance("d").find(f"{place}/1.done") is None
    Marker(f"{place}/1.done").write({})  # as where nothing can be removed
    assert Provenance(None).make_once(f"{place}/1.done", lambda: {"a": 2}) == ({"a": 2}, False)
