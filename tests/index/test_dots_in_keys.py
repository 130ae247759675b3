"""Dots in keys: a warning of the sample that they make of many, and ``split="last"``, with and without an index."""

from __future__ import annotations

import logging
import pickle
import subprocess
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import need
from with_torch import ShardDataset

from tarshards import IndexedShards, Ledger, ShardWriter, Stream, read_samples
from tarshards.errors import SampleError, ShardIndexError, TarshardsError
from tarshards.index import build, members
from tarshards.index.build import build_index
from tarshards.index.refresh import refresh_indexes, verify_indexes
from tarshards.index.sidecar import Index
from tarshards.kernels import _tar_py
from tarshards.storage.manifest import Shard
from tarshards.verbs.check import check_shards
from tarshards.verbs.join import join_shards
from tarshards.write.map import map_shards

COUNT = 40  # of keys: 80 members
KEYS = [f"img_0.{number:06d}" for number in range(COUNT)]


@pytest.fixture(params=["tar", "bsdtar"])
def shard(request, tmp_path) -> str:
    """An archive of images and their classes, whose names have dots, as these programs write it."""
    need(request.param)
    folder = tmp_path / "files"
    folder.mkdir()
    for key in KEYS:
        (folder / f"{key}.JPG").write_text(f"picture {key}")
        (folder / f"{key}.cls").write_text("7")
    names = sorted(path.name for path in folder.iterdir())
    path = tmp_path / "a.tar"
    subprocess.run([request.param, "-cf", path, "-C", folder, *names], check=True)
    return str(path)


def expected(path: str) -> dict[str, dict[str, bytes]]:
    """What Python's tarfile finds, grouped by what is before the last dot."""
    found: dict[str, dict[str, bytes]] = {}
    with tarfile.open(path) as archive:
        for member in archive:
            key, _, field = member.name.rpartition(".")
            found.setdefault(key, {})[field.lower()] = archive.extractfile(member).read()
    return found


def plain(samples) -> dict[str, dict[str, bytes]]:
    return {each["__key__"]: {name: each[name] for name in each if name[:2] != "__"} for each in samples}


def warnings_of(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if "--split last" in record.getMessage()]


def save(url: str, split="last") -> str:
    build_index(url, split=split).save(url)
    return url


READERS = [read_samples, lambda url, **options: Stream.from_shards(url, index=False, **options), ShardDataset]


@pytest.mark.parametrize("read", READERS)
def test_one_sample_of_many_members_like_numbers_is_told(shard, read, caplog):
    (sample,) = read(shard)
    assert (sample["__key__"], len(sample) - 2) == ("img_0", 2 * COUNT)
    (words,) = warnings_of(caplog)
    assert words.startswith(f"{shard}: img_0: 80 fields, such as 000000.jpg: are there dots in the keys?")


def test_it_is_told_where_damage_is_passed_over_too(shard, caplog):
    ledger = Ledger(max_errors=9)
    assert [len(sample) - 2 for sample in read_samples(shard, on_error=ledger, on_damage="resync")] == [2 * COUNT]
    assert len(warnings_of(caplog)) == 1


def test_it_is_told_once_a_dataset(shard, caplog):
    ledger = Ledger(max_errors=9)
    assert len(list(read_samples([shard, shard, shard], on_error=ledger))) == 3
    assert len(warnings_of(caplog)) == 1


@pytest.mark.parametrize("names", [
    [f"a.{number}.jpg" for number in range(64)],
    [f"a.view{number}.jpg" for number in range(100)],
    [f"{key}.{field}" for key in range(100) for field in ("1.jpg", "2.jpg", "txt")],
])  # fmt: skip
def test_other_samples_are_not(tmp_path, names, caplog):
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name in names:
            archive.addfile(tarfile.TarInfo(name))
    list(read_samples(str(tmp_path / "a.tar")))
    (outcome,) = refresh_indexes([str(tmp_path / "a.tar")])
    assert (warnings_of(caplog), outcome.warning) == ([], None)
    assert not check_shards([str(tmp_path / "a.tar")]).counts["warning", "dots"]


def test_it_is_told_among_small_samples_too(tmp_path, caplog):
    names = [f"{key:03d}.{field}" for key in range(50) for field in ("cls", "txt")]
    names[50:50] = [f"img.{number}.jpg" for number in range(65)]
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name in names:
            archive.addfile(tarfile.TarInfo(name))
    assert len(list(read_samples(str(tmp_path / "a.tar")))) == 51
    assert len(warnings_of(caplog)) == 1


@pytest.mark.parametrize("read", READERS)
def test_the_last_dot_splits_names(shard, read, caplog):
    assert plain(read(shard, split="last")) == expected(shard)
    assert not warnings_of(caplog)


@pytest.mark.parametrize("index", ["auto", True])
def test_an_index_of_the_last_dots_gives_the_same(shard, index, caplog):
    save(shard)
    dataset = ShardDataset(shard, split="last", index=index)
    assert len(dataset) == COUNT
    assert plain(dataset) == plain(ShardDataset(shard, split="last", shuffle=True)) == expected(shard)
    indexed = IndexedShards(shard)  # which takes the samples as the index has them
    assert plain(indexed) == plain(pickle.loads(pickle.dumps(indexed))) == expected(shard)
    assert indexed[KEYS[3]]["jpg"] == b"picture img_0.000003"
    assert not warnings_of(caplog)


@pytest.mark.parametrize(("made", "wanted"), [("last", "first"), ("first", "last")])
@pytest.mark.parametrize("index", ["auto", True])
def test_an_index_of_another_rule_is_refused(shard, made, wanted, index):
    save(shard, made)
    for options in [{"split": wanted}] + [{}] * (wanted == "first"):
        with pytest.raises(ShardIndexError, match=rf"a\.tar\.index: made with `tarindex --split {made}`; .*{wanted}`"):
            list(ShardDataset(shard, index=index, **options))
    assert len(list(ShardDataset(shard, index=False, split=wanted))) == (COUNT if wanted == "last" else 1)


def test_code_for_webdataset_has_its_rule(shard):
    wds = pytest.importorskip("tarshards.webdataset")
    assert [len(sample) - 2 for sample in wds.WebDataset(save(shard, "first"))] == [2 * COUNT]
    with pytest.raises(ShardIndexError, match="tarindex --split first"):
        list(wds.WebDataset(save(shard)))


def test_it_is_refused_where_a_manifest_says_how_many_samples_there_are(shard):
    save(shard)
    known = Shard(shard, COUNT, Path(shard).stat().st_size, indexed=True)
    with pytest.raises(ShardIndexError, match="--split last"):
        list(ShardDataset([known]))
    assert len(list(ShardDataset([known], split="last"))) == COUNT


def test_an_index_says_so_and_other_indexes_say_nothing(shard, tmp_path):
    assert msgpack.unpackb(build_index(shard, split="last").pack())["shard"]["split"] == "last"
    assert "split" not in msgpack.unpackb(build_index(shard).pack())["shard"]
    index = build_index(shard)
    index.split = "middle"
    with pytest.raises(ShardIndexError, match="damaged: an unknown rule for names"):
        Index.unpack(index.pack())


def test_an_index_keeps_its_rule_when_it_is_renewed(shard):
    (outcome,) = refresh_indexes([shard])
    assert "img_0: 80 fields" in outcome.warning
    (outcome,) = refresh_indexes([Shard(shard, split="last")])
    assert (outcome.shard.samples, outcome.warning) == (COUNT, None)
    (outcome,) = refresh_indexes([shard])
    assert (outcome.written, outcome.shard.samples) == (None, COUNT)
    with tarfile.open(shard, "a") as archive:
        archive.addfile(tarfile.TarInfo("img_1.5.cls"))
    (outcome,) = refresh_indexes([shard])  # whose index is stale
    assert outcome.shard.samples == COUNT + 1
    (outcome,) = verify_indexes([shard])
    assert outcome.error is None
    (outcome,) = refresh_indexes([Shard(shard, split="first")])
    assert outcome.shard.samples == 2


def test_a_renewed_index_is_of_another_rule_though_its_keys_are_the_same(make_shards):
    (url,) = [make_shards(1, 3, index=True).replace("{0000..0000}", "0000")]
    (outcome,) = refresh_indexes([Shard(url, split="last")])
    assert outcome.written is not None
    assert Index.load(url).split == "last"


def test_headers_are_compared_by_the_rule_of_the_index(shard):
    save(shard)
    data = bytearray(Path(shard).read_bytes())
    at = data.index(b"img_0.000003.cls\0")
    data[at : at + 7] = b"img_0_0"  # the name has one dot less, and the header's checksum is wrong
    Path(shard).write_bytes(data)
    with pytest.raises(TarshardsError, match=r"img_0\.000003"):
        list(IndexedShards(shard))


def test_a_check_tells_of_it_and_takes_the_rule(shard):
    for options in ({}, {"decode": True}):
        report = check_shards([shard], **options)
        (finding,) = [each for each in report.findings if each.kind == "dots"]
        assert (finding.severity, finding.key, report.samples) == ("warning", "img_0", 1)
        report = check_shards([Shard(shard, split="last")], **options)
        assert (report.samples, report.counts["warning", "dots"]) == (COUNT, 0)


def test_tools_take_the_rule_of_a_shard(shard, tmp_path):
    joined = join_shards([[Shard(shard, split="last")]] * 2, conflict="first")
    assert plain(joined) == expected(shard)
    renamed = map_shards(
        rename, [Shard(shard, split="last")], str(tmp_path / "out-{shard:05d}.tar"), per_sample=True, executor=None
    )
    assert sum(each.samples_out for each in renamed) == COUNT


def rename(sample):
    return {**sample, "__key__": sample["__key__"].replace(".", "-")}


segments = st.lists(
    st.sampled_from(["a", "b", "1", "000001", "JPG", "txt", "", "__x__"]), min_size=1, max_size=4
).filter(any)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["", "d/", "d.e/"]), segments), min_size=1, max_size=12))
def test_with_and_without_an_index_the_same_samples_come(tmp_path_factory, parts):
    """Also of names with one dot, which the kernel splits by itself."""
    path = tmp_path_factory.mktemp("dots") / "a.tar"
    names = ["first.one", *(folder + ".".join(words) for folder, words in parts)]
    with tarfile.open(path, "w") as archive:
        for name in names:
            archive.addfile(tarfile.TarInfo(name))
    streamed, indexed = Ledger(max_errors=99), Ledger(max_errors=99)
    found = [each["__key__"] for each in read_samples(str(path), split="last", on_error=streamed)]
    save(str(path))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "walk", _tar_py.walk)
        assert build_index(str(path), split="last") == Index.load(str(path))
    again = [each["__key__"] for each in ShardDataset(str(path), split="last", on_error=indexed)]
    assert found == again
    assert [(each.key, each.reason) for each in streamed.quarantined] == [
        (each.key, each.reason) for each in indexed.quarantined
    ]
    assert set(found) <= {name.rpartition(".")[0] for name in names}


def test_too_many_fields_are_told_with_the_cure(shard, monkeypatch):
    monkeypatch.setattr(members, "MAX_FIELDS", 70)
    with pytest.raises(ShardIndexError, match=r"80 different fields, but .* at most 70; .* `--split last`"):
        build_index(shard)
    assert len(build_index(shard, split="last")) == COUNT


def test_the_writer_tells_of_the_sample_that_is_too_much(tmp_path, monkeypatch):
    monkeypatch.setattr(members, "MAX_FIELDS", 5)
    with ShardWriter(tmp_path / "a-%d.tar", sync=False) as writer:
        writer.write({"__key__": "a", "1": b"", "2": b"", "3": b""})
        writer.write({"__key__": "b", "1": b"", "4": b"", "5": b""})
        with pytest.raises(SampleError, match=r"a-0\.tar: c\.6: 6 different fields, but an index holds at most 5"):
            writer.write({"__key__": "c", "1": b"", "6": b""})
        writer.write({"__key__": "c", "5": b""})
    assert [each["__key__"] for each in IndexedShards(str(tmp_path / "a-0.tar"))] == ["a", "b", "c"]


def test_mapped_samples_that_are_too_much_are_told_too(shard, tmp_path, monkeypatch):
    monkeypatch.setattr(members, "MAX_FIELDS", 70)  # which processes that are not forked would not see
    with ThreadPoolExecutor(1) as threads, pytest.raises(SampleError, match="80 different fields"):
        map_shards(dict, [shard], str(tmp_path / "out-{shard:05d}.tar"), per_sample=True, executor=threads)


@pytest.fixture(autouse=True)
def log_is_seen(caplog):
    caplog.set_level(logging.WARNING, "tarshards")
