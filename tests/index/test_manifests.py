"""Where manifests lie, what they name, and what remains in them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tarshards import IndexedShards, write_samples
from tarshards.errors import ShardIndexError, UrlError
from tarshards.index.build import build_index
from tarshards.index.manifests import Writing, read_manifest, update_manifests, write_manifest
from tarshards.storage.expressions import find_shards
from tarshards.storage.location import Location
from tarshards.storage.manifest import Shard


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("manifest", "url", "name"),
    [
        ("a.json", "b.tar", "b.tar"),
        ("d/a.json", "d/e/b.tar", "e/b.tar"),
        ("d/a.json", "b.tar", "../b.tar"),
        ("/d/a.json", "/d/b.tar", "b.tar"),
        ("/d/a.json", "/e/b.tar", "/e/b.tar"),
        ("file:///d/a%20b.json", "file:///d/b%20c.tar", "b c.tar"),
        ("a.json", "http://h/b.tar", "http://h/b.tar"),
        ("http://h/d/a.json", "http://h/d/b%20c.tar", "b c.tar"),
        ("http://h/d/a.json?k", "http://h/d/b.tar?k", "b.tar"),
        ("http://h/d/a.json?k", "http://h/d/b.tar", "http://h/d/b.tar"),
        ("http://h/d/a.json", "http://other/d/b.tar", "http://other/d/b.tar"),
        ("memory://d/a.json", "memory://d/e/b.tar", "e/b.tar"),
    ],
)
def test_names_in_manifests(manifest, url, name):
    assert Location.of(manifest).relative(Location.of(url)) == name


def test_what_is_written_is_read(here):
    (here / "d").mkdir()
    (here / "c:d.tar").touch()
    shards = [Shard("d/a b.tar", 1, 2), Shard("c:d.tar", 3), Shard(str(here / "d/e.tar")), Shard("http://h/a.tar?x=1")]
    write_manifest("d/x.json", shards)
    found = read_manifest("d/x.json")
    assert [shard[1:] for shard in found] == [shard[1:] for shard in shards]
    assert [os.path.normpath(shard.url) for shard in found[:3]] == ["d/a b.tar", "c:d.tar", "d/e.tar"]
    assert found[3].url == shards[3].url


def test_a_manifest_that_is_not_there_names_nothing(here):
    assert read_manifest("none.shards.json") == []


def update(*shards: Shard, **options) -> list[str]:
    return list(update_manifests(shards, **options))


def test_each_series_has_its_manifest(here):
    names = ["train-00.tar", "train-01.tar", "val-00.tar", "whole.tar", "sub/train-00.tar"]
    (here / "sub").mkdir()
    written = update(*(Shard(name, number) for number, name in enumerate(names)))
    assert written == ["train.shards.json", "val.shards.json", "whole.shards.json", "sub/train.shards.json"]
    assert find_shards("train.shards.json") == [Shard("train-00.tar", 0), Shard("train-01.tar", 1)]
    assert find_shards("sub/train.shards.json") == [Shard("sub/train-00.tar", 4)]


def test_a_manifest_keeps_what_is_there_and_is_sorted(here):
    for name in ("a-1.tar", "a-2.tar", "a-10.tar"):
        (here / name).touch()
    update(Shard("a-2.tar", 2), Shard("a-10.tar", 10), Shard("a-3.tar", 3))
    update(Shard("a-1.tar", 1), Shard("a-2.tar", 22))
    assert [shard[:2] for shard in find_shards("a.shards.json")] == [
        ("a-1.tar", 1),
        ("a-2.tar", 22),
        ("a-10.tar", 10),
    ]


def test_a_manifest_by_its_name_has_just_these_shards_in_their_order(here):
    update(Shard("b.tar", 1), Shard("a.tar", 2), url="all.shards.json")
    assert update(Shard("c.tar", 3), Shard("b.tar", 1), url="all.shards.json") == ["all.shards.json"]
    assert [shard.url for shard in find_shards("all.shards.json")] == ["c.tar", "b.tar"]


def test_dry(here):
    assert update(Shard("a-1.tar"), how=Writing(dry_run=True)) == ["a.shards.json"]
    assert os.listdir(here) == []


def test_entries_with_other_names_of_equal_number(here):
    text = '{"wids_version": 1, "shardlist": [{"url": "a.tar", "note": 1}, {"url": "b.tar", %s}]}'
    Path("a.shards.json").write_text(text % '"nsamples": 7')
    assert [shard.samples for shard in read_manifest("a.shards.json")] == [None, 7]
    Path("a.shards.json").write_text(text % '"concatenated": "yes"')
    with pytest.raises(UrlError, match=r"b\.tar has concatenated 'yes'"):
        read_manifest("a.shards.json")


def test_a_damaged_manifest_is_not_replaced(here):
    Path("a.shards.json").write_text("{}")
    with pytest.raises(UrlError, match="no shardlist"):
        update(Shard("a-1.tar", 1))
    assert Path("a.shards.json").read_text() == "{}"


def test_a_manifest_of_another_shard_is_told_when_the_shard_is_opened(here):
    write_samples([{"__key__": "a", "txt": "x"}], "a.tar")
    index = build_index("a.tar")
    index.save("a.tar")
    for shard, reason in [
        (Shard("a.tar", 2, index.shard_size), "1 samples, but 2 in the manifest"),
        (Shard("a.tar", 1, 512), f"{index.shard_size} bytes, but 512 in the manifest"),
    ]:
        write_manifest("a.shards.json", [shard])
        with pytest.raises(ShardIndexError, match=f"a.tar.index: {reason}"):
            IndexedShards("a.shards.json")[0]
