"""A bad key is an error of its sample, not its shard: with on_error the sample is left out, and reading continues."""

from __future__ import annotations

import random
import subprocess
import tarfile
from itertools import product
from pathlib import Path

import pytest
from dirty_shards import FAULTS, any_members, expected, thousand, write_tar
from soak import rounds, some
from with_torch import DataLoader, ShardDataset

from tarshards import Ledger, Stream, read_samples
from tarshards.errors import OpenError, SampleError
from tarshards.samples.resync.reading import survey_file
from tarshards.storage.opening import open_plain
from tarshards.verbs.sort import read_loose_members, regroup_members

READERS = [read_samples, Stream.from_shards, ShardDataset]


def entries(ledger: Ledger) -> list[tuple]:
    """Key, field, offset and reason of quarantined samples."""
    return [entry[1:] for entry in ledger.quarantined]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("reader", READERS)
def test_999_of_1000_samples_are_delivered(tmp_path, reader, fault):
    path = write_tar(tmp_path / "a.tar", thousand(fault))
    ledger = Ledger(max_errors=1)
    read = list(reader(path, on_error=ledger))
    assert [int(sample["cls"]) for sample in read] == [i for i in range(1000) if i != 10]
    assert read == expected(path).samples
    key, field, member = ("0010", "cls", 22) if fault == FAULTS[0] else ("0003", None, 20)
    assert ledger.quarantined == [(path, key, field, member * 1024, fault)]
    assert (ledger.shards, ledger.samples, ledger.members) == (1, 999, 1998)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("reader", READERS)
def test_without_on_error_it_raises(tmp_path, reader, fault):
    path = write_tar(tmp_path / "a.tar", thousand(fault))
    read: list[dict] = []
    with pytest.raises(SampleError, match=fault):
        read.extend(reader(path))
    assert len(read) == 10


@pytest.mark.parametrize("fault", FAULTS)
def test_workers_deliver_the_other_samples(tmp_path, fault):
    for name in "ab":
        write_tar(tmp_path / f"{name}.tar", thousand(fault))
    ledger = Ledger(max_errors=1)
    dataset = ShardDataset(f"{tmp_path}/{{a,b}}.tar", on_error=ledger)
    read = list(DataLoader(dataset, batch_size=None, num_workers=2))
    assert sorted(int(sample["cls"]) for sample in read) == sorted(2 * [i for i in range(1000) if i != 10])
    assert (ledger.samples, len(ledger.quarantined)) == (1998, 2)


def test_an_error_is_counted_and_passed_on_once(tmp_path):
    path = write_tar(tmp_path / "a.tar", [(name, b"") for name in ("a.x", "a.x", "b.x", "b.x", "c.x")])
    errors: list[Exception] = []
    ledger = Ledger(max_errors=1, on_error=errors.append)
    with pytest.raises(SampleError, match=r"offset 1536: b\.x: duplicate field"):
        list(read_samples(path, on_error=ledger))
    assert [error.key for error in errors] == ["a", "b"]
    assert entries(ledger) == [("a", "x", 512, "duplicate field"), ("b", "x", 1536, "duplicate field")]
    assert ledger.shards == 0


@pytest.mark.parametrize("kind", [OpenError, OSError, KeyError])
def test_what_on_error_raises_is_no_error_of_the_shard(tmp_path, kind):
    path = write_tar(tmp_path / "a.tar", [("a.x", b""), ("a.x", b"")])
    calls = []

    def refuse(error):
        calls.append(error)
        raise kind("no more")

    with pytest.raises(kind, match="no more"):
        list(read_samples(path, on_error=refuse))
    assert len(calls) == 1


def test_damage_after_a_bad_key_ends_the_shard(tmp_path):
    path = write_tar(tmp_path / "a.tar", thousand(FAULTS[0]))
    Path(path).write_bytes(Path(path).read_bytes()[: 50 * 2048 + 100])
    ledger = Ledger(max_errors=2)
    assert len(list(read_samples(path, on_error=ledger))) == 47
    assert [entry.reason.split(" in ")[0] for entry in ledger.quarantined] == [FAULTS[0], "truncated"]


@pytest.mark.soak
@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_any_bad_keys(tmp_path, format):
    for seed in range(rounds(50)):
        path = write_tar(tmp_path / "a.tar", any_members(random.Random(seed)), format)
        ledger, wanted = Ledger(max_errors=100), expected(path)
        assert list(read_samples(path, on_error=ledger)) == wanted.samples, seed
        assert entries(ledger) == wanted.refused, seed
        assert (ledger.shards, ledger.samples, ledger.members) == (1, len(wanted.samples), wanted.members), seed


@pytest.mark.parametrize("fault", FAULTS)
def test_reading_past_damage_names_the_same_place(tmp_path, fault):
    path = write_tar(tmp_path / "a.tar", thousand(fault))
    ledger = Ledger(max_errors=1)
    assert list(read_samples(path, on_error=ledger, on_damage="resync")) == expected(path).samples
    assert entries(ledger) == expected(path).refused


def test_a_survey_names_the_first_duplicate(tmp_path):
    path = write_tar(tmp_path / "a.tar", [(name, b"") for name in ("a.x", "a.__key__", "a.x", "b.x")])
    with open_plain(path) as file:
        assert [sample.wrong for sample in survey_file(file).samples] == [("__key__", 512), None]


def test_regrouping_leaves_out_the_samples_at_fault(tmp_path):
    path = write_tar(tmp_path / "a.tar", [(f"{name}.x", b"") for name in "abacb"] + [("c.y", b"")])
    ledger = Ledger(max_errors=2)
    samples = list(regroup_members(read_loose_members(path, ledger=ledger), ledger=ledger))
    assert [sample["__key__"] for sample in samples] == ["c"]
    assert entries(ledger) == [("a", "x", 1024, FAULTS[0]), ("b", "x", 2048, FAULTS[0])]
    assert (ledger.samples, ledger.members) == (1, 2)
    with pytest.raises(SampleError, match=FAULTS[0]):
        list(regroup_members(read_loose_members(path, ledger=Ledger())))


TOOLS = [
    "tarcat",
    "tarcat --interleave 2",
    "tarpcat",
    "tarsort",
    "tarsort --shuffle",
    "targrep text",
    "tarproc -c true",
    "tarmerge --conflict first a.tar",
    "tarsplit -o out-%06d.tar -n 5000",
]


@pytest.mark.soak
@pytest.mark.parametrize(("tool", "fault"), some([*product(TOOLS, FAULTS)], 2))
def test_tools_write_the_other_samples(tmp_path, path_with_tools, tool, fault):
    write_tar(tmp_path / "a.tar", thousand(fault)[: 63 if fault == FAULTS[0] else 60])
    out = "" if "-o" in tool else " -o out.tar"
    command = ["bash", "-c", f"{tool} a.tar{out} -q --on-error skip"]
    done = subprocess.run(command, cwd=tmp_path, env={"PATH": path_with_tools}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f": {fault}" in done.stderr
    (written,) = tmp_path.glob("out*.tar")
    keys = [sample["__key__"] for sample in expected(tmp_path / "a.tar").samples]
    assert sorted(sample["__key__"] for sample in read_samples(str(written))) == keys
    assert len(keys) == 29
