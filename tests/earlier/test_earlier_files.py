"""What an earlier version has written is read, and gone on from, by this one: files.tar.gz, which make.py made.

States of loaders are in loaders/states.json, and what killed runs of functions left is in write/begun.tar.gz.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tarfile
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
import served

from tarshards import IndexedShards, Ledger, Stream, expand_urls, read_samples
from tarshards.errors import ShardIndexError
from tarshards.formats.catalog import Catalog
from tarshards.index.build import build_index
from tarshards.index.exports import pack_dali
from tarshards.index.manifests import read_manifest
from tarshards.index.sidecar import Index
from tarshards.storage.cache import CacheFolder
from tarshards.storage.remote import LEAST_CACHE

HERE = Path(__file__).parent
SET = "set/a.shards.json"
MADE_BY_TAR = ["links-bsdtar", "links-gnu", "links-pax"]
MADE_BY_TAR += ["sparse-0.0", "sparse-0.1", "sparse-1.0", "sparse-bsdtar", "sparse-old"]


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    """The files, in the current folder."""
    monkeypatch.chdir(tmp_path)
    with tarfile.open(HERE / "files.tar.gz") as archive:
        archive.extractall(filter="data")
    for name in MADE_BY_TAR:
        shutil.copy(HERE.parent / f"cases/{name}.tar", ".")
    return tmp_path


@pytest.fixture
def run(path_with_tools, files):
    """Return a function that runs a line of bash and returns its output."""

    def run(line: str) -> str:
        environment = {**os.environ, "PATH": path_with_tools, "FOLDER": str(files)}
        done = subprocess.run(["bash", "-c", line], env=environment, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def contents(samples) -> list[dict]:
    return [{name: value for name, value in sample.items() if name != "__url__"} for sample in samples]


# Indexes, and what is derived from them.


@pytest.mark.parametrize("name", [*MADE_BY_TAR, "set/a-0", "set/a-1", "set/a-2", "faults", "last", "concatenated-0"])
def test_an_index_is_that_which_is_written_now(name):
    url = f"{name}.tar"
    found, before = Index.load(url), Path(f"{url}.index").read_bytes()
    split = "last" if name == "last" else "first"
    built = build_index(url, crc=found.crc32 is not None, concatenated="concatenated" in name, split=split)
    built.save(url)
    assert Path(f"{url}.index").read_bytes() == before


@pytest.mark.parametrize("name", [*MADE_BY_TAR, "faults"])
def test_samples_are_found_by_an_index(name):
    indexed, streamed = Ledger(max_errors=9), Ledger(max_errors=9)
    found = contents(Stream.from_shards(f"{name}.tar", on_error=indexed))
    assert found == contents(read_samples(f"{name}.tar", on_error=streamed))
    assert Counter(entry.reason for entry in indexed.quarantined) == Counter(
        entry.reason for entry in streamed.quarantined
    )
    assert len(indexed.quarantined) == (3 if name == "faults" else 0)
    assert found


def test_a_rule_of_keys_and_several_archives_are_known_from_the_index():
    with pytest.raises(ShardIndexError, match="made with `tarindex --split last`"):
        Stream.from_shards("last.tar")
    assert [sample["__key__"] for sample in Stream.from_shards("last.tar", split="last")] == ["img_0.01", "img_0.02"]
    assert len(contents(Stream.from_shards("concatenated.shards.json"))) == 5


def test_the_manifest_and_the_key_index(monkeypatch):
    assert [shard.url for shard in read_manifest(SET)] == [f"set/a-{i}.tar" for i in range(3)]
    assert [shard.samples for shard in read_manifest(SET)] == [7, 7, 6]
    shards = IndexedShards(SET)
    monkeypatch.setattr("tarshards.index.open.KeyTable", None)  # where all keys are loaded
    assert [shards[f"{i:02d}"]["txt"] for i in range(20)] == [f"text {i}".encode() for i in range(20)]


@pytest.mark.interop
def test_columns():
    chosen = Stream.from_shards(SET).select("n > 2 and length == 7 and bytes < 9")
    assert [sample["__key__"] for sample in chosen] == ["13", "14", "18", "19"]


def test_tarindex_finds_nothing_to_do(run):
    derived = {path: path.read_bytes() for path in Path("set").iterdir()}
    indexes = {path: path.stat().st_ino for path in Path("set").glob("*.index")}
    run(f"tarindex -q --check --crc {SET} && tarindex -q --crc --key-index {SET}")
    assert {path: path.read_bytes() for path in Path("set").iterdir()} == derived
    assert {path: path.stat().st_ino for path in indexes} == indexes
    assert Path("set/a-0.idx").read_text() == pack_dali(Index.load("set/a-0.tar"), "set/a-0.tar")


# Catalogs and cards.


def test_a_catalog_and_its_pins(run):
    pytest.importorskip("yaml")
    assert expand_urls("catalog.yaml#a@1/train") == [f"set/a-{i}.tar" for i in range(3)]
    assert contents(Catalog.load("catalog.yaml").stream("a@1")) == contents(Stream.from_shards(SET).decode("rgb8"))
    before = Path("catalog.yaml").read_bytes()
    assert run("tarcatalog verify --content catalog.yaml").startswith("a@1/train\t")
    run("tarcatalog pin catalog.yaml")
    assert Path("catalog.yaml").read_bytes() == before
    assert run(f"tarcard {SET} --name a --licence CC0-1.0 -o set/again.json && cmp set/card.json set/again.json") == ""


# States and the cache.


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.interop if "column" in name else ()) for name in served.STREAMS]
)
def test_a_state_goes_on_with_the_same_samples(name):
    state, following = json.loads(Path("states.json").read_text())[name]
    stream = served.STREAMS[name](SET)
    stream.load_state_dict(state)
    assert stream.state_dict() == state
    assert [sample["__key__"] for sample in stream] == following
    begun = served.STREAMS[name](SET)  # its first epoch has the order of this version
    keys = [sample["__key__"] for sample in islice(begun, 4)]
    now = begun.state_dict()
    assert now["taken"] == state["taken"]
    stream = served.STREAMS[name](SET)
    stream.load_state_dict(now)
    whole = [sample["__key__"] for sample in served.STREAMS[name](SET)]
    assert whole == keys + [sample["__key__"] for sample in stream]
    if "mixed" not in name:
        assert whole[4:] == following, "small datasets have the same order"


def test_blocks_of_the_cache_are_used_and_what_a_kill_left_is_removed():
    before = {path: path.stat().st_ino for path in Path("cache").glob("??/*")}
    with served.site(Path("set")) as site:
        found = contents(served.dataset("cache"))
        assert site.bytes < 5_000, "versions are asked for, and no shard"
        assert found == contents(Stream.from_shards(SET, shuffle=True, seed=3))
        site.clear()
        assert contents(served.dataset("new")) == found
        assert site.bytes > 60_000, "as with a new cache"
    assert {path: path.stat().st_ino for path in Path("cache").glob("??/*")} == before
    assert os.listdir("cache/spool") == os.listdir("cache/parts") == []
    cache = CacheFolder.existing("cache")
    assert [is_whole for _, is_whole in cache.verify()] == [True] * 3
    counts = cache.read_counts()
    assert (counts["pinned"], counts["spool"], counts["budget"]) == (69632, 0, LEAST_CACHE)


# Runs of tools that ended early.


def test_tarproc_goes_on_from_its_journal(run):
    Path("cured").touch()
    run(served.TARPROC.replace("--resume", "--resume-failed"))
    assert Path("ran").read_text().split() == ["00", "01", "02", "03", "04", "05", "06"]
    assert contents(read_samples("up.tar")) == contents(read_samples("set/a-0.tar"))
    assert not Path("up.tar.tarproc").exists()


def test_tarjob_goes_on_from_its_folder(run):
    assert "\n  2 2: status 1: ended with status 1\n" in run("tarjob status job || true")
    Path("cured").touch()
    run(served.TARJOB)
    assert Path("items").read_text().split() == ["0", "1", "3", "2"]
    assert "done     4" in run("tarjob status job")
