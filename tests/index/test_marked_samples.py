"""Samples at fault are marked in the index: indexed reading delivers, and refuses, what streaming does."""

from __future__ import annotations

import pickle
import random
import subprocess
import tarfile
from collections import Counter

import msgpack
import numpy as np
import pytest
from dirty_shards import FAULTS, any_members, expected, thousand, write_tar
from range_server import serving
from soak import rounds
from with_torch import ShardDataset, ShardLoader

from tarshards import ArrayLoader, IndexedShards, Ledger, Stream, TarWriter, read_samples
from tarshards.errors import SampleError
from tarshards.index.build import build_index
from tarshards.index.energon import export_energon
from tarshards.index.manifests import update_manifests
from tarshards.index.refresh import export_indexes, refresh_indexes
from tarshards.index.sidecar import VERSION, Index
from tarshards.loaders.arrays.readers.parsed import integer

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
]


def make(path, members, format: int = tarfile.USTAR_FORMAT) -> str:
    """Write a shard and its index."""
    write_tar(path, members, format)
    build_index(str(path)).save(str(path))
    return str(path)


def in_order(samples) -> list[dict]:
    return sorted(samples, key=lambda sample: (sample["__url__"], sample["__key__"]))


@pytest.fixture(params=FAULTS)
def urls(request, tmp_path) -> str:
    """Two shards of 1,000 samples, one of them at fault."""
    for name in "ab":
        make(tmp_path / f"{name}.tar", thousand(request.param))
    return f"{tmp_path}/{{a,b}}.tar"


def check(ledger: Ledger) -> None:
    """The other 999 of each shard were delivered, and the audit closes."""
    ledger.check()
    assert (ledger.samples, ledger.members) == (1998, 3996)
    assert Counter(entry.reason for entry in ledger.quarantined).total() == 2
    streamed = Ledger(max_errors=2)
    for shard in sorted({entry.shard for entry in ledger.quarantined}):
        list(read_samples(shard, on_error=streamed))
    assert sorted(ledger.quarantined) == streamed.quarantined


NUMBERS = sorted(2 * [i for i in range(1000) if i != 10])


@pytest.mark.parametrize("kind", [Stream.from_shards, ShardDataset])
@pytest.mark.parametrize("shuffle", [False, True])
def test_planned_epochs_deliver_what_streaming_does(urls, kind, shuffle):
    ledger, streamed = Ledger(max_errors=2), Ledger(max_errors=2)
    dataset = kind(urls, index=True, shuffle=shuffle, on_error=ledger)
    assert len(dataset) == 2000
    found = list(dataset)
    wanted = kind(urls, index=False, on_error=streamed)
    assert (in_order(found) if shuffle else found) == in_order(wanted)
    check(ledger)
    assert sorted(ledger.quarantined) == sorted(streamed.quarantined)


@pytest.mark.parametrize("workers", [0, 2])
def test_shard_loader(urls, workers):
    ledger = Ledger(max_errors=2)
    loader = ShardLoader(ShardDataset(urls, shuffle=True, on_error=ledger).decode(), 64, num_workers=workers)
    assert sorted(int(number) for batch in loader for number in batch["cls"]) == NUMBERS
    check(ledger)


def test_array_loader(urls):
    ledger = Ledger(max_errors=2)
    loader = ArrayLoader(Stream.from_shards(urls, shuffle=True, on_error=ledger), 64, fields={"cls": integer()})
    assert sorted(int(number) for batch in loader for number in batch["cls"]) == NUMBERS
    ledger.check()
    assert (ledger.samples, len(ledger.quarantined)) == (1998, 2)
    assert {entry.reason for entry in ledger.quarantined} <= set(FAULTS)
    with pytest.raises(SampleError, match=rf"{FAULTS[0]}|{FAULTS[1]}"):
        list(ArrayLoader(Stream.from_shards(urls), 64, fields={"cls": integer()}))


@pytest.mark.parametrize("fault", FAULTS)
def test_remote_shards(tmp_path, fault):
    path = make(tmp_path / "a.tar", thousand(fault)[: 63 if fault == FAULTS[0] else 60])
    ledger = Ledger(max_errors=2)
    with serving(tmp_path) as site:
        assert build_index(f"{site.url}/a.tar") == Index.load(path)
        read = Stream.from_shards(f"{site.url}/a.tar", index=True, on_error=ledger)
        assert [int(sample["cls"]) for sample in read] == [i for i in range(30) if i != 10]
        loader = ArrayLoader(read, 8, fields={"cls": integer()})
        assert [len(batch["cls"]) for batch in loader] == [8, 7, 8, 6]
    ledger.check()


def test_without_on_error_it_raises(urls):
    with pytest.raises(SampleError, match=rf"a\.tar: offset \d+: \d+(\.cls)?: ({FAULTS[0]}|{FAULTS[1]})"):
        list(Stream.from_shards(urls))


def test_samples_by_number_and_by_key(urls):
    shards = IndexedShards(urls)
    index = shards.shards.index(0)
    assert list(index.faults) == [10]
    for source in (shards, pickle.loads(pickle.dumps(shards))):
        with pytest.raises(SampleError):
            source[10]
    assert shards[9]["__key__"] == "0009"
    key = shards.keys[10]
    if key == "0010":
        with pytest.raises(SampleError):
            shards[shards.find(key)]
    else:
        assert shards.find(key) == index.numbers[key] == 3
        assert shards[3]["cls"] == b"3"
    assert shards.has_faults()


@pytest.mark.soak
def test_any_bad_keys(tmp_path):
    for seed in range(rounds(50)):
        format = [tarfile.USTAR_FORMAT, tarfile.PAX_FORMAT, tarfile.GNU_FORMAT][seed % 3]
        path = make(tmp_path / "a.tar", any_members(random.Random(seed)), format)
        wanted, ledger = expected(path), Ledger(max_errors=100)
        assert list(Stream.from_shards(path, index=True, on_error=ledger)) == wanted.samples, seed
        assert [entry[1:] for entry in ledger.quarantined] == wanted.refused, seed
        assert (ledger.samples, ledger.members) == (len(wanted.samples), wanted.members), seed
        ledger.check()
        assert len(Index.load(path)) == len(wanted.samples) + len(wanted.refused), seed


def test_joined_shards(tmp_path):
    left = make(tmp_path / "left.tar", [(f"{key}.x", key.encode()) for key in "abcd"])
    names = ["b.y", "b.Y", "a.y", "c.y", "a.y", "d.y"]  # of b, and again a: refused
    right = make(tmp_path / "right.tar", [(name, b"%d" % i) for i, name in enumerate(names)])
    ledger = Ledger(max_errors=1)
    joined = list(Stream.from_shards(left, on_error=ledger).join(right))
    assert [(sample["__key__"], sample["y"]) for sample in joined] == [("a", b"2"), ("c", b"3"), ("d", b"5")]
    assert [entry[1:] for entry in ledger.quarantined] == [("b", "y", 1024, FAULTS[0])]


def test_a_column_names_the_sample(tmp_path):
    write_tar(tmp_path / "a.tar", [])
    with TarWriter(tmp_path / "a.tar") as writer:
        for i in range(3):
            writer.write({"__key__": f"{i}", "npy": np.full(4, i), "txt": "x"})
    members = [(info.name, data) for info, data in unpacked(tmp_path / "a.tar")]
    path = make(tmp_path / "b.tar", [*members, members[0]])
    with pytest.raises(SampleError, match=r"b\.tar: offset \d+: 0: members of this key are not adjacent"):
        np.asarray(IndexedShards(path).column("npy"))


def unpacked(path):
    with tarfile.open(path) as archive:
        for info in archive:
            yield info, archive.extractfile(info).read()


def test_the_sidecar_of_a_sound_shard_stays_as_it_was(make_shards, tmp_path):
    make_shards(1, 5, index=True)
    packed = msgpack.unpackb((tmp_path / "set-0000.tar.index").read_bytes())
    assert packed["version"] == VERSION == 1
    assert "faults" not in packed


def test_earlier_readers_refuse_marked_samples(urls, tmp_path):
    packed = msgpack.unpackb((tmp_path / "a.tar.index").read_bytes())
    assert packed["version"] == 2
    ((sample, reason, offset, field),) = packed["faults"]
    assert sample == 10
    assert reason in [fault.partition("; ")[0] for fault in FAULTS], "without the tool that cures it"
    assert (offset, field) in [(22 * 1024, "cls"), (20 * 1024, None)]


def test_exports_refuse_what_they_cannot_mark(urls, tmp_path):
    shard = f"{tmp_path}/a.tar"
    for format in ("dali", "tar.idx"):
        (outcome,) = export_indexes([shard], format)
        assert isinstance(outcome.error, SampleError)
        assert "tarcheck --repair" in str(outcome.error)
    with pytest.raises(SampleError, match="tarcheck --repair"):
        list(export_energon([shard]))


def test_manifests_count_them(urls, tmp_path):
    shards = [f"{tmp_path}/{name}.tar" for name in "ab"]
    manifest = f"{tmp_path}/all.shards.json"
    list(update_manifests([outcome.shard for outcome in refresh_indexes(shards)], manifest))
    ledger = Ledger(max_errors=2)
    assert len(list(Stream.from_shards(manifest, on_error=ledger))) == 1998
    check(ledger)


def test_tarindex_tells_each_time(tmp_path, path_with_tools):
    write_tar(tmp_path / "a.tar", [(name, b"") for name in ("a.x", "a.X", "b.x", "a.y", "c.x")])

    def tarindex(options: str) -> subprocess.CompletedProcess:
        command = ["bash", "-c", f"tarindex {options} a.tar"]
        return subprocess.run(command, cwd=tmp_path, env={"PATH": path_with_tools}, capture_output=True, text=True)

    for _ in range(2):
        done = tarindex("")
        message = "tarindex: a.tar: offset 512: a.x: duplicate field; samples marked in the index: 2\n"
        assert (done.returncode, done.stderr) == (1, message)
        assert (tmp_path / "a.shards.json").exists()
    assert tarindex("--check").returncode == 0
    assert tarindex("--crc").returncode == 1
    assert tarindex("--check --crc").returncode == 0
    done = tarindex("--format dali")
    assert (done.returncode, (tmp_path / "a.idx").exists()) == (1, False)


@pytest.mark.parametrize("order", ["abcdef", "fedcba"])
def test_tools_that_look_up_by_index(tmp_path, path_with_tools, order):
    make(tmp_path / "left.tar", [(f"{key}.x", b"") for key in order])
    right = [(f"{key}.y", b"") for key in "abcdef"]
    make(tmp_path / "right.tar", [*right[:2], right[1], *right[2:], right[0]])

    def run(line: str) -> subprocess.CompletedProcess:
        command = ["bash", "-c", f"{line} -q --on-error skip"]
        return subprocess.run(command, cwd=tmp_path, env={"PATH": path_with_tools}, capture_output=True, text=True)

    done = run("tarmerge left.tar right.tar -o out.tar")
    assert done.returncode == 0, done.stderr
    assert [sample["__key__"] for sample in read_samples(tmp_path / "out.tar")] == [key for key in order if key != "b"]
    (tmp_path / "keys").write_text("a\nb\nc\n")
    done = run("targrep --keys keys right.tar -o found.tar")
    assert done.returncode == 0, done.stderr
    assert [sample["__key__"] for sample in read_samples(tmp_path / "found.tar")] == ["a", "c"]
    assert done.stderr.count("duplicate field") == done.stderr.count("not adjacent") == 1
