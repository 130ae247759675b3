"""Opening many shards: no object for each, no index loaded, and what is missing or wrong is reported at once."""

from __future__ import annotations

import gc
import os
import pickle
import random
import re
import shutil
from pathlib import Path
from tarfile import DIRTYPE, TarInfo
from typing import Any

import numpy as np
import pytest
from range_server import serving

from tarshards import IndexedShards, Ledger, ShardWriter, Stream, TarWriter, kernels
from tarshards.errors import OpenError, ShardIndexError, UrlError
from tarshards.index import inventory
from tarshards.index.build import build_index
from tarshards.storage.manifest import Shards
from tarshards.stream import sources
from tarshards.verbs.grep import KeyFilter
from tarshards.verbs.join import join_shards


def make(folder: Path, count: int) -> list[str]:
    """Write *count* indexed shards of two samples, links to eight files, and a manifest."""
    names = [f"{folder}/set-{i:05d}.tar" for i in range(count)]
    with ShardWriter(f"{folder}/first-%d.tar", max_samples=2) as writer:
        for i in range(16):
            writer.write({"__key__": f"{i:02d}", "cls": i})
    for i, name in enumerate(names):
        for end in "", ".index":
            os.link(f"{folder}/first-{i % 8}.tar{end}", name + end)
    (folder / "first.shards.json").unlink()
    entries = ",".join(f'{{"url": "{os.path.basename(name)}", "nsamples": 2, "filesize": 10240}}' for name in names)
    (folder / "set.shards.json").write_text(f'{{"wids_version": 1, "shardlist": [{entries}]}}')
    return names


@pytest.fixture(scope="module")
def many(tmp_path_factory) -> dict[str, Any]:
    """Expressions of 3,000 shards."""
    folder = tmp_path_factory.mktemp("many")
    names = make(folder, 3000)
    (folder / "list").write_text("\n".join(names))
    return {
        "manifest": f"{folder}/set.shards.json",
        "braces": f"{folder}/set-{{00000..02999}}.tar",
        "glob": f"{folder}/set-*.tar",
        "list": names,
        "file": f"@{folder}/list",
    }


@pytest.fixture(params=["two", "many"])
def names(request, tmp_path) -> list[str]:
    """Names of a few shards, which are looked up one by one, or of many, whose folder is listed."""
    return make(tmp_path, 2 if request.param == "two" else 150)


@pytest.mark.parametrize("index", ["auto", False])
@pytest.mark.parametrize("kind", ["manifest", "braces", "glob", "list", "file"])
def test_the_garbage_collector_tracks_no_object_for_each_shard(many, kind, index):
    next(iter(Stream.from_shards(many[kind], index=index, shuffle=True)))  # imports what it needs
    gc.collect()
    before = len(gc.get_objects())
    stream = Stream.from_shards(many[kind], index=index, shuffle=True)
    samples = iter(stream)
    assert next(samples)
    assert len(gc.get_objects()) - before < 300


def test_all_expressions_of_the_same_shards_are_one_dataset(many):
    digests = {kind: Stream.from_shards(spec).state_dict()["digest"] for kind, spec in many.items()}
    assert len(set(digests.values())) == 1
    assert {len(Stream.from_shards(spec)) for spec in many.values()} == {6000}
    assert pickle.loads(pickle.dumps(IndexedShards(many["glob"])))[5999]["__key__"] == "15"


def test_the_collector_runs_on_unless_it_was_off(many, tmp_path):
    def opened() -> None:
        with pytest.raises(UrlError, match="no file matches"):
            Stream.from_shards(f"{tmp_path}/*.tar")
        Path(tmp_path / "a.json").write_text("{")
        with pytest.raises(UrlError, match="JSON"):
            IndexedShards(f"{tmp_path}/a.json")
        IndexedShards(many["manifest"])

    opened()
    assert gc.isenabled()
    gc.disable()
    try:
        opened()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_digests_of_datasets_stay_as_they_were():
    counts = np.array([3, 4, 5]).astype("<i8").tobytes()
    assert (
        sources.dataset_digest(["d/a-0.tar", "/x/y/a-1.tar", "a-2.tar"], counts) == "4892b8d184d7f3b4aceace9c2b322ef3"
    )
    remote = ["http://host/d/a-0.tar", "s3://bucket/y/a-1.tar"]
    assert sources.dataset_digest(remote) == "5cee388195c68acf8f78e6b0e1cacf67"
    odd = ["d/a-0.tar", "b:c.tar", "http://me:secret@host/p/b.tar?signature=abc", "pipe:cat d/c.tar", "d/what?.tar"]
    odd[4:4] = ["zip://x/a.tar::http://host/all.zip", "file:///d/e%20f.tar"]
    assert sources.dataset_digest([*odd, "s3://bucket/k/z.tar"]) == "5ee741a976f01a344f874db2a7bd93c5"


def test_shards_without_indexes_come_in_the_order_of_the_seed(many):
    names = many["list"][:20]
    expected = names.copy()
    random.Random("7/0").shuffle(expected)
    found = Stream.from_shards(names, index=False, shuffle=True, seed=7, pool=1)
    assert list(dict.fromkeys(sample["__url__"] for sample in found)) == expected


@pytest.mark.parametrize("read", [Stream.from_shards, IndexedShards])
def test_a_missing_shard_is_told_at_once(names, read):
    os.unlink(names[-1])
    with pytest.raises(OpenError, match=re.escape(names[-1]) + ": No such file"):
        read(names)
    os.unlink(f"{names[-1]}.index")
    with pytest.raises(OpenError, match=re.escape(names[-1]) + ": No such file"):
        read(names)


@pytest.mark.parametrize("kind", ["names", "manifest", "index_dir"])
def test_a_missing_index_is_told_at_once(names, kind, tmp_path):
    options = {}
    spec: Any = names
    gone = f"{names[-1]}.index"
    if kind == "manifest":
        spec = f"{tmp_path}/set.shards.json"
    elif kind == "index_dir":
        options = {"index_dir": tmp_path / "idx"}
        shutil.copytree(tmp_path, f"{tmp_path}/idx{os.path.realpath(tmp_path)}", ignore=lambda *_: ["idx"])
        gone = f"{tmp_path}/idx{os.path.realpath(gone)}"
    assert len(Stream.from_shards(spec, **options)) == 2 * len(names)
    os.unlink(gone)
    with pytest.raises(ShardIndexError, match=re.escape(names[-1]) + ": no index found, but other shards have one"):
        Stream.from_shards(spec, **options)
    if kind == "names":
        with pytest.raises(ShardIndexError, match=re.escape(gone) + ": no index found; create one"):
            IndexedShards(spec)


def test_a_stale_index_is_told_at_once_if_its_shard_has_another_size_else_when_it_is_used(names):
    index = Path(f"{names[1]}.index").read_bytes()
    for size in 1, 5000:
        os.unlink(names[1])
        with TarWriter(names[1]) as writer:
            for i in range(2):
                writer.write({"__key__": f"new{i}", "cls": bytes(size)})
        Path(f"{names[1]}.index").write_bytes(index)
        if size > 1:
            with pytest.raises(ShardIndexError, match=r"1\.tar\.index: stale: the shard has \d+ bytes, but had 10240"):
                IndexedShards(names)
            continue
        indexed = IndexedShards(names)
        assert indexed[0]["cls"] == b"0"
        with pytest.raises(ShardIndexError, match=r"1\.tar\.index: stale"):
            indexed[2]
        ledger = Ledger(max_errors=9)
        assert len(list(Stream.from_shards(names, on_error=ledger))) == 2 * len(names) - 2
        assert {entry.reason.partition(":")[0] for entry in ledger.quarantined} == {"stale"}


def test_keys_are_not_looked_up_in_a_stale_index(names, tmp_path):
    index = Path(f"{names[1]}.index").read_bytes()
    os.unlink(names[1])
    with TarWriter(names[1]) as writer:
        for i in range(2):
            writer.write({"__key__": f"new{i}", "cls": i})
    Path(f"{names[1]}.index").write_bytes(index)
    with pytest.raises(ShardIndexError, match=r"1\.tar\.index: stale"):
        list(KeyFilter(["00", "new0"]).candidates(names[:2]))
    other = str(tmp_path / "other.tar")
    with TarWriter(other) as writer:
        writer.write({"__key__": "new0", "txt": "x"})
    with pytest.raises(ShardIndexError, match=r"1\.tar\.index: stale"):
        list(join_shards([other, names[1]]))


def test_a_shard_without_samples_is_compared_at_once(tmp_path):
    """Nobody would open it, so its new samples would not be read."""
    name = str(tmp_path / "a.tar")
    folders = [TarInfo(f"d{i}") for i in range(2)]
    for folder in folders:
        folder.type = DIRTYPE
    Path(name).write_bytes(b"".join(folder.tobuf() for folder in folders) + bytes(9 << 10))
    build_index(name).save(name)
    assert len(IndexedShards(name)) == 0
    packed = Path(f"{name}.index").read_bytes()
    with TarWriter(name) as writer:
        for i in range(2):
            writer.write({"__key__": f"{i}", "cls": i})
    assert os.path.getsize(name) == 10240
    Path(f"{name}.index").write_bytes(packed)
    with pytest.raises(ShardIndexError, match=r"a\.tar\.index: stale"):
        IndexedShards(name)


def test_an_index_that_is_none_or_of_another_rule_is_told_at_once(names):
    path = Path(f"{names[-1]}.index")
    right = path.read_bytes()
    path.unlink()
    version = right.replace(b"\xa7version\x01", b"\xa7version\x09")
    for wrong, reason in (
        (b"", "empty"),
        (b"x" * 400, "not an index"),
        (version, "version 9"),
        (right[:60], "damaged"),
    ):
        path.write_bytes(wrong)
        with pytest.raises(ShardIndexError, match=rf"{re.escape(str(path))}: .*{reason}"):
            IndexedShards(names)
    index = build_index(names[-1], split="last")
    index.save(names[-1])
    with pytest.raises(ShardIndexError, match="made with `tarindex --split last`"):
        Stream.from_shards(names, split="first")


def test_only_the_beginnings_of_remote_indexes_are_read(tmp_path):
    with ShardWriter(str(tmp_path / "a-%d.tar"), max_samples=500, index=True) as writer:
        for i in range(2000):
            writer.write({"__key__": f"{i}", "cls": i})
    (tmp_path / "a.shards.json").unlink()
    with serving(tmp_path) as site:
        indexed = IndexedShards(f"{site.url}/a-{{0..3}}.tar")
        assert (len(indexed), len(site.requests)) == (2000, 4)
        assert site.bytes <= 4 * 1024
        assert indexed[1999]["cls"] == b"1999"
        site.ranges = False
        assert len(IndexedShards(f"{site.url}/a-{{0..3}}.tar")) == 2000


def test_indexes_that_nobody_made_are_looked_for_here_and_there(tmp_path, monkeypatch):
    for i in range(40):
        with TarWriter(f"{tmp_path}/a-{i:02d}.tar") as writer:
            writer.write({"__key__": f"{i}", "cls": i})
    monkeypatch.setattr(inventory, "PROBED", 10)
    with serving(tmp_path) as site:
        stream = Stream.from_shards(f"{site.url}/a-{{00..39}}.tar")
        assert len(site.requests) == 10
        assert len(list(stream)) == 40
    build_index(f"{tmp_path}/a-08.tar").save(f"{tmp_path}/a-08.tar")
    with pytest.raises(ShardIndexError, match=r"a-00\.tar: no index found, but other shards have one"):
        Stream.from_shards(f"{tmp_path}/a-{{00..39}}.tar")
    assert len(list(Stream.from_shards(f"{tmp_path}/a-{{00..39}}.tar", index=False))) == 40


def test_folders_of_many_shards_are_listed_each(tmp_path, monkeypatch):
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    names = [name for folder in folders for name in make(folder, 100)]
    listed: list[bytes] = []
    are_listed = kernels.sidecars.are_listed
    monkeypatch.setattr(kernels.sidecars, "are_listed", lambda *given: listed.append(given[0]) or are_listed(*given))
    assert all(inventory.has_index(Shards(names)))
    assert [os.fsdecode(folder) for folder in listed] == [f"{folder}/" for folder in folders]
    os.unlink(f"{names[7]}.index")
    assert [number for number, is_there in enumerate(inventory.has_index(Shards(names))) if not is_there] == [7]
    monkeypatch.setattr(kernels.sidecars, "are_listed", _refuse)
    assert [number for number, is_there in enumerate(inventory.has_index(Shards(names))) if not is_there] == [7]


def _refuse(*_: object) -> bytes:
    raise PermissionError


@pytest.mark.parametrize("count", [1, 3, 100])
def test_shards_of_several_folders_keep_their_counts(tmp_path, monkeypatch, count):
    monkeypatch.chdir(tmp_path)
    names, counts = [], [3, 0, 2, 4, 1]
    for i in range(5 * count):
        names.append(f"{'abcd'[i % 4]}/x/{i}.tar" if i % 3 else f"{i}.tar")
        os.makedirs(os.path.dirname(names[-1]) or ".", exist_ok=True)
        with TarWriter(names[-1]) as writer:
            for sample in range(counts[i % 5]):
                writer.write({"__key__": f"{sample}", "cls": sample})
        build_index(names[-1]).save(names[-1])
    assert IndexedShards(names).counts.tolist() == counts * count
    assert IndexedShards(names).sizes.tolist() == [*map(os.path.getsize, names)]
    os.unlink(f"{names[-1]}.index")
    with pytest.raises(ShardIndexError, match="no index found"):
        IndexedShards(names)
