"""Links and sparse members of indexed shards: the same samples as streams give, by every way that reads them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from zlib import crc32

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import need
from range_server import serving
from rewritten import Entry, npy, write
from with_torch import ShardDataset, ShardLoader

from tarshards import ArrayLoader, IndexedShards, Ledger, Stream, read_samples, readers
from tarshards.errors import SampleError, ShardIndexError
from tarshards.index.build import build_index
from tarshards.index.lengths import lengths_of
from tarshards.index.refresh import export_indexes, refresh_indexes, verify_index
from tarshards.index.sidecar import Index
from tarshards.tar.elsewhere import Step


@pytest.fixture
def shard(tmp_path, monkeypatch) -> str:
    """A shard by GNU tar: a hard link, symbolic ones, one to a folder, one out of the archive, and a sparse member."""
    need("GNU tar")
    monkeypatch.chdir(tmp_path)
    os.mkdir("d")
    for i in range(6):
        Path(f"d/{i}.cls").write_text(f"{i}")
    for i in (0, 4):
        Path(f"d/{i}.x.npy").write_bytes(npy(i))
    os.link("d/0.x.npy", "d/1.x.npy")
    os.symlink("4.x.npy", "d/2.x.npy")
    os.symlink("../out.npy", "d/3.x.npy")
    os.symlink("d", "v1.0")
    with open("d/5.x.npy", "wb") as file:
        np.save(file, np.zeros(8192))
        end = file.tell()
        file.truncate(128)
        file.seek(end - 8)
        file.write(b"12345678")
    command = ["tar", "-cSf", "a.tar", "--sort=name", "--hole-detection=raw", "d", "v1.0"]
    subprocess.run(command, check=True)
    build_index("a.tar").save("a.tar")
    return "a.tar"


def streamed(url: str) -> tuple[list, list]:
    ledger = Ledger(max_errors=9)
    samples = list(read_samples(url, on_error=ledger))
    return samples, [entry[:5] for entry in ledger.quarantined]


def planned(url: str) -> tuple[list, list]:
    ledger = Ledger(max_errors=9)
    samples = list(Stream.from_shards(url, index=True, on_error=ledger))
    return samples, [entry[:5] for entry in ledger.quarantined]


def test_a_stream_has_the_contents_of_the_files(shard):
    samples, faults = streamed(shard)
    assert [sample["__key__"] for sample in samples] == ["d/0", "d/1", "d/2", "d/4", "d/5"]
    for sample in samples:
        assert sample["x.npy"] == Path(f"{sample['__key__']}.x.npy").read_bytes()
    assert [(fault[1], fault[2]) for fault in faults] == [("d/3", "x.npy")]
    assert len(samples[-1]["x.npy"]) > 65536 > os.path.getsize(shard)


def test_an_index_gives_what_a_stream_gives(shard):
    assert planned(shard) == streamed(shard)
    index = Index.load(shard)
    assert [index.keys[index.sample[member]] for member in index.elsewhere] == ["d/1", "d/2", "d/5"]
    assert index.faults[3].reason == "incomplete: symbolic link to '../out.npy', which is not in the archive"
    assert "v1" not in index.keys
    with pytest.raises(SampleError, match=r"d/3\.x\.npy: incomplete: symbolic link to '\.\./out\.npy'"):
        IndexedShards(shard)[3]
    verify_index(shard)
    assert [outcome.written for outcome in refresh_indexes([shard])] == [None]


def test_over_http_it_is_the_same(shard, tmp_path):
    here = [dict(sample, __url__="") for sample in streamed(shard)[0]]
    with serving(tmp_path) as site:
        for read in streamed, planned:
            samples, faults = read(f"{site.url}/{shard}")
            assert [dict(sample, __url__="") for sample in samples] == here
            assert [fault[1] for fault in faults] == ["d/3"]
        with IndexedShards(f"{site.url}/{shard}", lazy="x.npy")[1]["x.npy"] as file:
            assert file.read() == npy(0)
            assert file.seek(0, 2) == len(npy(0))


@pytest.mark.parametrize("remote", [False, True])
def test_lazy_fields_are_files(shard, tmp_path, remote):
    with serving(tmp_path) as site:
        url = f"{site.url}/{shard}" if remote else shard
        eager = {sample["__key__"]: sample["x.npy"] for sample in streamed(shard)[0]}
        for indexed in (True, False):
            stream = Stream.from_shards(url, index=indexed, lazy="x.npy", on_error="skip")
            assert {sample["__key__"]: bytes(sample["x.npy"]) for sample in stream} == eager


def test_loaders_deliver_it(shard):
    by_key = {sample["__key__"]: sample for sample in streamed(shard)[0]}
    ledger = Ledger(max_errors=9)
    dataset = ShardDataset(shard, index=True, shuffle=True, on_error=ledger)
    found = [sample for batch in ShardLoader(dataset, 2, num_workers=2, collate_fn=list) for sample in batch]
    assert {sample["__key__"]: sample for sample in found} == by_key
    ledger = Ledger(max_errors=9)
    stream = Stream.from_shards(shard, index=True, shuffle=True, on_error=ledger)
    batches = list(ArrayLoader(stream, 2, fields={"cls": readers.integer(), "x.npy": readers.bytes_()}))
    arrays = {key: data for batch in batches for key, data in zip(batch["__key__"], batch["x.npy"])}
    assert {key: bytes(data) for key, data in arrays.items()} == {key: each["x.npy"] for key, each in by_key.items()}
    assert [entry.key for entry in ledger.quarantined] == ["d/3"]


def test_who_needs_the_bytes_in_the_shard_refuses_it_by_name(shard):
    with pytest.raises(ShardIndexError, match=r"d/1\.x\.npy: a link or a sparse member.*`tarcat -o`"):
        lengths_of(IndexedShards(shard), "x.npy")
    assert (IndexedShards(shard).column("x.npy")[[1, 0]] == 0).all(), "where the link leads"
    for format in "dali", "tar.idx":
        (outcome,) = export_indexes([shard], format)
        assert "a link or a sparse member" in str(outcome.error)


def test_what_a_link_leads_to_is_compared(tmp_path):
    path = tmp_path / "a.tar"
    entries = [Entry("a.x", b"1"), Entry("b.x", b"2"), Entry("c.x", type=b"1", link="a.x"), Entry("d.x", b"4")]
    write(path, entries)
    index = build_index(str(path))
    assert index.elsewhere == {2: [Step(1024 * 2, "c.x", "a.x", 0), Step(0, "a.x", None, 1)]}
    index.save(str(path))
    assert IndexedShards(str(path))[2]["x"] == b"1"
    for changed in (
        [*entries[:2], Entry("c.x", type=b"1", link="b.x"), entries[3]],
        [*entries[:2], Entry("c.x", type=b"2", link="b.x"), entries[3]],
        [*entries[:2], Entry("c.x"), entries[3]],
        [Entry("a.x", b"12"), *entries[1:]],
        [Entry("e.x", b"1"), Entry("a.x", b"2"), *entries[2:]],
    ):
        write(path, changed)
        broken = Index.load(str(path), check=False)
        broken.fingerprint = build_index(str(path)).fingerprint
        broken.save(str(path))
        with pytest.raises(ShardIndexError, match=r"c\.x: stale index: .*; rebuild it with `tarindex`"):
            IndexedShards(str(path))[2]
        with pytest.raises(ShardIndexError):
            verify_index(str(path))


def test_a_target_that_an_extended_header_renames_is_noticed(tmp_path):
    path = tmp_path / "a.tar"
    link, last = Entry("c.x", type=b"1", link="a.x"), Entry("d.x", b"4")
    write(path, [Entry("b.bin", b"1" * 2048), Entry("a.x", b"1"), link, last])
    index = build_index(str(path))
    write(path, [Entry("b.bin", b"1" * 1024), Entry("a.x", b"1", pax={"path": "z.x"}), link, last], "pax")
    index.fingerprint = build_index(str(path)).fingerprint
    index.save(str(path))
    with serving(tmp_path) as site:
        for url in str(path), f"{site.url}/a.tar":
            with pytest.raises(ShardIndexError, match=r"c\.x: stale index: an extended header before that of 'a\.x'"):
                IndexedShards(url)[2]


@pytest.mark.parametrize(
    "elsewhere",
    [
        [[9, [0, "a.x", None, 1]]],
        [[0]],
        [[0, [0, "a.x", "b.x", 1]]],
        [[0, [0, 7, None, 1]]],
        [[0, [-1, "a.x", None, 1]]],
        [[0, [0, "a.x", None, -1]]],
        [[0, [1 << 40, "a.x", None, 1]]],
        [[0, [0, "a.x"]]],
        7,
    ],
)
def test_steps_that_lead_nowhere_are_refused(tmp_path, elsewhere):
    path = tmp_path / "a.tar"
    write(path, [Entry("a.x", b"1")])
    found = msgpack.unpackb(build_index(str(path)).pack())
    del found["checksum"]
    packer = msgpack.Packer(autoreset=False)
    packer.pack_map_header(len(found) + 2)
    for name, value in (found | {"version": 2, "elsewhere": elsewhere}).items():
        packer.pack(name)
        packer.pack(value)
    packed = packer.bytes() + b"\xa8checksum\xce"
    packed += crc32(packed).to_bytes(4, "big")
    with pytest.raises(ShardIndexError, match="damaged"):
        Index.unpack(packed, url="a.tar.index")


def test_streams_of_pipes_quarantine_links_alone(shard):
    ledger = Ledger(max_errors=9)
    samples = list(read_samples(f"pipe:cat {shard}", allow_pipe=True, on_error=ledger))
    assert [sample["__key__"] for sample in samples] == ["d/0", "d/4", "d/5"]
    assert {entry.key for entry in ledger.quarantined} == {"d/1", "d/2", "d/3", "v1"}
    assert all("--hard-dereference" in entry.reason for entry in ledger.quarantined if entry.key != "d/3")
    subprocess.run(["gzip", "-k", shard], check=True)
    with pytest.raises(
        SampleError, match=r"offset \d+: d/1\.x\.npy: incomplete: hard link to 'd/0\.x\.npy', to which pipes"
    ):
        list(read_samples(f"{shard}.gz"))


@pytest.mark.parametrize("where", [600, 1100, 5000])
def test_reading_past_damage_never_gives_a_piece_for_a_whole(shard, where):
    """Next to damage as elsewhere, a link and a sparse member come whole or not at all."""
    whole = {sample["__key__"]: sample for sample in streamed(shard)[0]}
    with open(shard, "r+b") as file:
        file.seek(where)
        file.write(b"\xff" * 20)
    ledger = Ledger(max_errors=99)
    found = list(read_samples(shard, on_error=ledger, on_damage="resync"))
    assert found
    for sample in found:
        assert sample == whole[sample["__key__"]]
    assert ledger.quarantined


NAMES = ["a.x", "a.y", "b.x", "c.x", "c.y", "README", "d/a.x"]
ENTRIES = st.builds(
    Entry,
    st.sampled_from(NAMES),
    st.binary(max_size=3),
    st.sampled_from([b"0", b"0", b"1", b"2", b"5"]),
    link=st.sampled_from([*NAMES, "x", ".", "d"]),
)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(ENTRIES, min_size=1, max_size=8, unique_by=lambda entry: entry.name),
    st.sampled_from(["ustar", "pax", "gnu"]),
)
def test_any_links_are_the_same_with_an_index_and_without(tmp_path_factory, entries, format):
    path = tmp_path_factory.mktemp("law") / "a.tar"
    for entry in entries:
        if entry.type != b"0":
            entry.data = b""
    write(path, entries, format)
    url = str(path)
    index = build_index(url)
    index.save(url)
    assert len(index) == 0 or planned(url) == streamed(url)
    assert len(index) == len(streamed(url)[0]) + len(streamed(url)[1])
