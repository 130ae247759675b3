"""What is derived from a shard never stands for another one: it is removed, or its digest tells."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from hashlib import blake2b, sha256
from pathlib import Path
from zlib import crc32

import msgpack
import pytest
from range_server import serving
from rewritten import without_digest
from with_torch import ShardDataset

from tarshards import IndexedShards, ShardWriter, Stream, read_samples, write_samples
from tarshards.errors import SampleError, ShardIndexError, StateError
from tarshards.formats.catalog import Catalog
from tarshards.index.build import build_index
from tarshards.index.exports import pack_dali
from tarshards.index.inventory import read_head
from tarshards.index.key_index import build_key_index
from tarshards.index.manifests import read_manifest, write_manifest
from tarshards.index.refresh import export_indexes
from tarshards.index.sidecar import Index
from tarshards.write.split import split_samples

NAMES = [f"a-{number:03d}.tar" for number in range(3)]
MANIFEST, KEYS, COLUMNS = "a.shards.json", "a.shards.keys", "a-000.tar.columns.parquet"
CURE = "rebuild it with `tarindex --key-index`"


def samples(mark: str) -> Iterator[dict]:
    """30 samples in three shards; with another *mark* the archives have the same sizes, first and last headers."""
    for number in range(30):
        at = number % 10
        yield {"__key__": f"{number:03d}{mark if 0 < at < 9 else '-'}", "txt": mark * 7 if 0 < at < 9 else "-------"}


def write(mark: str, name: str = "a-%03d.tar", **options) -> None:
    with ShardWriter(name, max_samples=10, **options) as writer:
        for sample in samples(mark):
            writer.write(sample)


@pytest.fixture(autouse=True)
def dataset(tmp_path, monkeypatch):
    """Three shards of old samples, and all that is derived from them, in the current folder."""
    monkeypatch.chdir(tmp_path)
    os.mkdir("n")
    write("o")
    build_key_index(read_manifest(MANIFEST))
    Path(COLUMNS).touch()
    list(export_indexes(NAMES, "dali"))
    assert marks() == "o"
    before = [(head.size, head.fingerprint) for head in map(read_head, NAMES)]
    write("n", "n/a-%03d.tar")
    assert before == [(head.size, head.fingerprint) for head in (read_head(f"n/{name}") for name in NAMES)]


def marks() -> str:
    """The marks of the keys that selections find, by the key index or without."""
    shards = Stream.from_shards(MANIFEST)
    known = "".join(mark for mark in "on" if len(shards.select(drop=[f"005{mark}"])) < 30)
    for mark in "on":
        if mark in known:
            assert [sample["__key__"] for sample in shards.select(keys=[f"005{mark}"])] == [f"005{mark}"]
        else:
            with pytest.raises(SampleError, match="no sample has 1 of 1 keys"):
                shards.select(keys=[f"005{mark}"])
    return known


def move(*endings: str) -> None:
    """Put new shards, and what lies beside them, over the old ones, as ``mv`` does."""
    for name in NAMES:
        for ending in ("", *endings):
            os.replace(f"n/{name}{ending}", f"{name}{ending}")


def by_tool(line: str, path_with_tools: str) -> str:
    environment = {**os.environ, "PATH": path_with_tools}
    done = subprocess.run(["bash", "-c", line], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stderr


REPLACED = {
    "ShardWriter": lambda: write("n"),
    "split_samples": lambda: split_samples(
        samples("n"), "a-%03d.tar", max_samples=10, max_bytes=None, overwrite=True, index=True
    ),
    "after the manifest was removed": lambda: (os.unlink(MANIFEST), write("n")),
    "after the shards were removed": lambda: ([os.unlink(name) for name in NAMES], write("n")),
}


@pytest.mark.parametrize("way", REPLACED)
def test_a_writer_removes_all_that_was_derived(way):
    REPLACED[way]()
    assert not {KEYS, "a-000.idx", COLUMNS} & {*os.listdir()}
    assert marks() == "n"


def test_tarsplit_removes_all_that_was_derived(path_with_tools):
    said = by_tool(
        "tarcat -q 'n/a-{000..002}.tar' | tarsplit -q -n 10 -o a-%03d.tar --index --overwrite", path_with_tools
    )
    assert "a-000.idx: removed with the shard that it described; write it again with `tarindex --format dali`" in said
    assert not {KEYS, "a-000.idx", COLUMNS} & {*os.listdir()}
    assert marks() == "n"


def test_shards_that_were_moved_with_their_indexes_are_told_from_those_in_the_manifest():
    move(".index")
    reason = r"a-000\.tar\.index: other keys or members than the manifest describes; write both again with `tarindex`"
    with pytest.raises(ShardIndexError, match=reason):
        marks()
    with pytest.raises(ShardIndexError, match=reason):
        next(iter(ShardDataset(MANIFEST, index=True)))
    assert [sample["__key__"] for sample in IndexedShards(NAMES)][5] == "005n"


@pytest.mark.parametrize("endings", [(), (".index",)])
def test_after_tarindex_moved_shards_are_read_without_the_old_key_index(endings, path_with_tools, caplog):
    move(*endings)
    by_tool("tarindex -q 'a-*.tar'", path_with_tools)
    assert os.path.exists(KEYS)
    assert marks() == "n"
    assert caplog.messages[0] == f"{KEYS}: not used: shards have changed since it was made; {CURE}"
    caplog.clear()
    by_tool("tarindex -q --key-index 'a-*.tar'", path_with_tools)
    assert marks() == "n"
    assert caplog.messages == []


def test_a_moved_shard_under_its_old_index_gives_no_sample():
    move()
    with pytest.raises(ShardIndexError, match=r"005o\.txt: stale index: .*'005n\.txt'.*`tarindex`"):
        IndexedShards(NAMES)["005o"]


def test_a_pinned_split_notices_other_keys(path_with_tools):
    by_tool(f"tarcatalog add catalog.yaml d@1 train={MANIFEST}", path_with_tools)
    assert len(list(read_samples("catalog.yaml#d@1"))) == 30
    move()
    by_tool("tarindex -q 'a-*.tar'", path_with_tools)
    with pytest.raises(StateError, match="d@1/train has changed: pinned as"):
        Catalog.load("catalog.yaml").shards("d@1")


def test_what_a_manifest_says_of_other_shards_is_told_before_it_is_passed_on(path_with_tools):
    """Cards take checksums from it, and catalogs are verified with it."""
    write("o", sha256=True)
    by_tool(f"tarcatalog add catalog.yaml d@1 train={MANIFEST}", path_with_tools)
    card = f"tarcard train={MANIFEST} --name d -o card.json --overwrite"
    by_tool(card, path_with_tools)
    move(".index")
    reason = "a-000.tar.index: other keys or members than the manifest describes; write both again with `tarindex`"
    assert by_tool(f"{card}; test $? = 1", path_with_tools) == f"tarcard: {reason}\n"
    (check,) = Catalog.load("catalog.yaml").verify()
    assert [len(check.faults), check.faults[0]] == [3, reason]
    by_tool(f"tarindex -q {MANIFEST}; {card}", path_with_tools)
    files = json.loads(Path("card.json").read_text())["distribution"]
    assert files[0]["sha256"] == sha256(Path(NAMES[0]).read_bytes()).hexdigest()


def test_a_split_that_was_pinned_before_manifests_had_digests_stays_valid(path_with_tools):
    shards = read_manifest(MANIFEST)
    write_manifest(MANIFEST, [shard._replace(digest=None) for shard in shards])
    by_tool(f"tarcatalog add catalog.yaml d@1 train={MANIFEST}", path_with_tools)
    by_tool("tarindex -q 'a-*.tar'", path_with_tools)
    assert read_manifest(MANIFEST) == shards
    assert len(Catalog.load("catalog.yaml").shards("d@1")) == 3


@pytest.mark.parametrize("named", ["a-000.tar", MANIFEST])
def test_a_checksum_goes_with_its_shard(named, path_with_tools):
    write("o", sha256=True)
    by_tool(f"tarindex -q {named}", path_with_tools)
    old = sha256(Path(NAMES[0]).read_bytes()).hexdigest()
    assert read_manifest(MANIFEST)[0].sha256 == old
    os.replace("n/a-000.tar", "a-000.tar")
    os.replace("n/a-000.tar.index", "a-000.tar.index")
    by_tool(f"tarindex -q {named}", path_with_tools)
    assert [shard.sha256 is None for shard in read_manifest(MANIFEST)] == [True, False, False]


def test_writers_that_write_manifests_write_digests(path_with_tools):
    digests = [read_head(name).digest.hex() for name in NAMES]
    assert [shard.digest for shard in read_manifest(MANIFEST)] == digests
    for line in (
        "tarindex -q --format wids -o b.shards.json 'a-*.tar'",
        "tarreshard -q -j 1 --keep-order -n 10 a.shards.json -o b-%03d.tar",
        "tarsplit -q -n 10 a.shards.json -o b-%03d.tar --index --overwrite",
    ):
        by_tool(line, path_with_tools)
        assert [shard.digest for shard in read_manifest("b.shards.json")] == digests, line


def test_a_key_index_of_several_series_is_removed_with_a_shard_of_the_second():
    write("o", "b-%03d.tar")
    both = read_manifest(MANIFEST) + read_manifest("b.shards.json")[:1]
    write_manifest("all.shards.json", both)
    assert build_key_index(both) == KEYS
    write_samples(list(samples("n"))[:10], "b-000.tar")
    assert not os.path.exists(KEYS)


def test_exports_of_other_shards_and_other_files_stay(caplog):
    Path("x.idx").write_bytes(b"12345678")
    write_samples(samples("n"), "x.tar")
    write_samples(samples("n"), "a-000.tar")
    assert Path("x.idx").exists()
    assert Path("a-001.idx").read_text() == pack_dali(Index.load("a-001.tar"), "a-001.tar")
    assert caplog.messages == [
        "x.idx: may be of the shard that is replaced; write it again with `tarindex --format`",
        "a-000.idx: removed with the shard that it described; write it again with `tarindex --format dali`",
    ]


@pytest.mark.parametrize("above", [".", ".."])
def test_energons_index_of_a_replaced_shard_is_removed(above, path_with_tools, caplog):
    os.makedirs("d/e")
    os.chdir("d/e")
    write("o", index=False)
    by_tool(f"tarindex -q --format energon -o {above} 'a-*.tar'", path_with_tools)
    meta = Path(above, ".nv-meta")
    kept = {"split.yaml", "dataset.yaml"}
    assert {*os.listdir(meta)} == kept | {"index.sqlite", "index.uuid", ".info.json"}
    write_samples(samples("n"), "other.tar")
    assert len(os.listdir(meta)) == 5
    write_samples(samples("n"), "a-001.tar")
    assert {*os.listdir(meta)} == kept
    assert {name for name in NAMES if os.path.exists(f"{name}.idx")} == {"a-000.tar", "a-002.tar"}
    assert [message.rpartition("; ")[2] for message in caplog.messages] == [
        "write it again with `tarindex --format tar.idx`",
        "write it again with `tarindex --format energon`",
    ]


# The digest itself.


def test_the_digest_is_over_keys_fields_places_and_sizes():
    """Computed as docs/index-format.md says, without our code; equal for every program that indexes the shard."""
    for crc in False, True:
        build_index(NAMES[0], crc=crc).save(NAMES[0])
        index = msgpack.unpackb(Path(f"{NAMES[0]}.index").read_bytes())
        names = ("keys", "fields", "sample", "field", "offset", "size")
        packed = b"".join(msgpack.packb(part) for name in names for part in (name, index[name]))
        assert index["shard"]["digest"] == blake2b(packed, digest_size=16).digest() == read_head(NAMES[0]).digest
        assert Index.load(NAMES[0]).digest == index["shard"]["digest"]
    others = {
        "data": {"txt": b"x" * 7},
        "key": {"__key__": "x05o"},
        "size": {"txt": b"x" * 8},
        "field": {"txu": b"x" * 7},
    }
    digests = {}
    for what, change in others.items():
        changed = list(samples("o"))[:10]
        changed[5] |= change
        if what == "field":
            del changed[5]["txt"]
        write_samples(changed, "x.tar")
        build_index("x.tar").save("x.tar")
        digests[what] = read_head("x.tar").digest
    assert digests.pop("data") == read_head(NAMES[0]).digest
    assert len({*digests.values(), read_head(NAMES[0]).digest}) == 4


def test_an_index_without_a_digest_is_read_and_renewed_with_its_checksums(caplog, path_with_tools):
    write("o", sha256=True)
    build_index(NAMES[0], crc=True).save(NAMES[0])
    build_key_index(shards := read_manifest(MANIFEST))
    without_digest(NAMES[0])
    caplog.clear()
    assert Index.load(NAMES[0]).digest is read_head(NAMES[0]).digest is None
    assert len(list(IndexedShards(MANIFEST))) == 30
    assert marks() == "o"
    assert caplog.messages[0] == f"{KEYS}: not used: indexes have no digests; {CURE}"
    cure = r"a-000\.tar\.index: written by an earlier version, without a digest; renew it with `tarindex`"
    with pytest.raises(ShardIndexError, match=cure):
        build_key_index(shards)
    by_tool("tarindex -q 'a-*.tar'", path_with_tools)
    assert Index.load(NAMES[0]).crc32 is not None
    assert read_manifest(MANIFEST) == shards, "with its checksum"


def test_a_digest_that_is_none_is_damage():
    for digest in (b"short", "0" * 16, 7):
        right = (index := build_index(NAMES[0])).pack()
        wrong = right[:-4].replace(msgpack.packb(index.digest), msgpack.packb(digest))
        with pytest.raises(ShardIndexError, match="damaged: an invalid digest"):
            Index.unpack(wrong + crc32(wrong).to_bytes(4, "big"))
        if not isinstance(digest, bytes):
            Path(f"{NAMES[0]}.index").write_bytes(wrong)
            with pytest.raises(ShardIndexError, match=r"damaged: .*an invalid digest"):
                read_head(NAMES[0])


def test_keys_of_remote_shards_are_looked_up_without_their_indexes(tmp_path):
    with serving(tmp_path) as site:
        remote = IndexedShards(f"{site.url}/{MANIFEST}")
        site.clear()
        assert remote.places("none") == []
        assert site.asked(".index") == 0
        urls = [f"{site.url}/{name}" for name in NAMES]
        assert IndexedShards(urls).shards.key_index is not None


def test_digests_tell_remote_shards_too(tmp_path, caplog):
    for name in (*NAMES, MANIFEST):
        os.replace(f"n/{name}", name)
        if name != MANIFEST:
            os.replace(f"n/{name}.index", f"{name}.index")
    with serving(tmp_path) as site:
        remote = IndexedShards(f"{site.url}/{MANIFEST}")
        assert (remote.places("005o"), remote.places("005n")) == ([], [5])
        assert caplog.messages == [f"{site.url}/{KEYS}: not used: shards have changed since it was made; {CURE}"]
