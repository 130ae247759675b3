"""Where fields lie: mapped and read alike, with what is missing, changed or not to be opened named."""

from __future__ import annotations

import os
import pickle
import tarfile
from io import BytesIO

import numpy as np
import pytest
from programs import load_kernel

from tarshards import ShardWriter
from tarshards.errors import OpenError, SampleError
from tarshards.index import mapped_fields
from tarshards.index.access import SampleSequence
from tarshards.index.build import build_index
from tarshards.index.mapped_fields import MappedFields, find_in_samples
from tarshards.samples.fields import parse_terms
from tarshards.samples.payloads import BatchKeys
from tarshards.storage.expressions import find_shards
from tarshards.storage.manifest import Shards

TERMS = parse_terms("picture:png;jpg cls")


@pytest.fixture
def shards(tmp_path) -> SampleSequence:
    """Thirty samples in three shards: the even ones have png, those that 3 divides jpg, all but 17 cls."""
    with ShardWriter(str(tmp_path / "set-%d.tar"), max_samples=10) as writer:
        for i in range(30):
            fields = {"png": b"p" * i} if i % 2 == 0 else {}
            fields |= {"jpg": b"j" * i} if i % 3 == 0 else {}
            fields |= {"cls": i} if i != 17 else {"txt": "none"}
            writer.write({"__key__": f"{i:02d}"} | fields)
    return SampleSequence(find_shards(tmp_path / "set-{0..2}.tar"))


@pytest.fixture(params=["mapped", "read"])
def find(request, shards):
    if request.param == "read":
        return lambda s, i, numbers: find_in_samples(list(shards.read_all(s, i)), TERMS, numbers)
    load_kernel("tarshards.kernels._mapped")
    return shards.mapped(TERMS).find


NUMBERS = np.array([29, 0, 17, 4, 9, 5, 4])


def test_the_first_alternative_that_is_there_is_found(find):
    found = find(NUMBERS // 10, NUMBERS % 10, NUMBERS)
    assert found.keys == [f"{i:02d}" for i in NUMBERS]
    assert {i: str(error) for i, error in found.failures.items()}.keys() == {0, 2, 5}
    assert all(
        isinstance(error, SampleError) and "no field png or jpg" in str(error) for error in found.failures.values()
    )
    assert found.failures[2].key == "17"
    good = found.keep(np.array([1, 3, 4, 6]))
    assert [bytes(data) for data in good.columns["picture"]] == [b"", b"pppp", b"jjjjjjjjj", b"pppp"]
    assert [bytes(data) for data in good.columns["cls"]] == [b"0", b"4", b"9", b"4"]
    part = found.part(2, 6)
    assert part.failures.keys() == {0, 3}
    assert part.keys == ["17", "04", "09", "05"]
    assert bytes(part.columns["picture"][2]) == b"jjjjjjjjj"


@pytest.mark.parametrize("change", ["written to", "removed"])
def test_a_shard_that_is_not_what_it_was_fails_as_a_whole(shards, tmp_path, change):
    load_kernel("tarshards.kernels._mapped")
    path = tmp_path / "set-1.tar"
    if change == "removed":
        path.unlink()
    mapped = shards.mapped(TERMS)
    if change == "written to":
        mapped.find(np.arange(3), *2 * [np.zeros(3, np.int64)])
        os.utime(path, ns=(0, 0))
    numbers = np.array([4, 14, 24, 18])
    failures = mapped.find(numbers // 10, numbers % 10, numbers).failures
    assert failures.keys() == {1, 3}
    assert all(isinstance(error, OpenError) and "set-1.tar" in str(error) for error in failures.values())
    assert len(list(mapped.changes())) == (change == "written to")


def test_a_shard_that_can_be_opened_again_is_found_again(shards, tmp_path):
    load_kernel("tarshards.kernels._mapped")
    fresh = SampleSequence(find_shards(tmp_path / "set.shards.json"))
    mapped = fresh.mapped(TERMS)
    (tmp_path / "set-1.tar").rename(tmp_path / "away")
    numbers = np.array([4, 14, 24, 18])
    assert mapped.find(numbers // 10, numbers % 10, numbers).failures.keys() == {1, 3}
    assert not mapped.retry()
    (tmp_path / "away").rename(tmp_path / "set-1.tar")
    assert mapped.find(numbers // 10, numbers % 10, numbers).failures.keys() == {1, 3}
    assert mapped.retry()
    assert not mapped.find(numbers // 10, numbers % 10, numbers).failures


def test_shards_are_opened_when_they_are_needed_and_of_their_indexes_nothing_is_copied(shards, tmp_path):
    load_kernel("tarshards.kernels._mapped")
    fresh = SampleSequence(find_shards(tmp_path / "set.shards.json"))
    mapped = fresh.mapped(TERMS)
    assert list(fresh.shards.in_use) == []
    found = mapped.find(np.array([1, 1]), *2 * [np.array([4, 8])])
    assert list(fresh.shards.in_use) == [1]
    assert not found.check()
    assert found.keys == ["14", "18"]
    assert not {"keys", "arrays", "first", "sample", "offset"} & fresh.shards.in_use[1].index.__dict__.keys()


def test_headers_are_compared_once(shards, monkeypatch):
    load_kernel("tarshards.kernels._mapped")
    mapped = shards.mapped(TERMS)
    numbers = np.array([4, 14, 24])
    for _ in range(2):
        found = mapped.find(numbers // 10, numbers % 10, numbers)
        assert not found.headers.are_new, "they are compared when they are found"
        assert not found.check()
    monkeypatch.setattr(MappedFields, "_doubtful", lambda mapped, numbers: [])  # nobody looks whether it was written to
    index = shards.shards.index(0)
    with open(shards.urls[0], "r+b") as file:
        for sample in (4, 6):
            for member in range(*index.table.span(sample)):
                file.seek(index.data_range(member)[0] - 512)
                file.write(b"other")
    assert list(mapped.find(np.array([0, 0]), *2 * [np.array([4, 6])]).check()) == [1]


def test_links_are_read_and_samples_at_fault_fail(tmp_path):
    load_kernel("tarshards.kernels._mapped")
    path = str(tmp_path / "a.tar")
    with tarfile.open(path, "w") as archive:
        for name in "0.cls", "1.cls", "2.cls", "2.cls", "3.cls":
            member = tarfile.TarInfo(name)
            if name == "1.cls":
                member.type, member.linkname = tarfile.LNKTYPE, "0.cls"
            data = b"" if member.islnk() else name[:1].encode() * 5
            member.size = len(data)
            archive.addfile(member, BytesIO(data))
    build_index(path).save(path)
    found = (
        SampleSequence(Shards([path]))
        .mapped(parse_terms("cls"))
        .find(np.zeros(4, np.int64), *2 * [np.array([3, 2, 1, 0])])
    )
    failures = found.check()
    assert failures.keys() == {1}
    assert failures[1].key == "2"
    good = found.keep(np.array([0, 2, 3]))
    assert list(next(iter(good.columns.values()))) == [b"33333", b"00000", b"00000"]
    assert good.keys == ["3", "1", "0"]


def test_only_local_shards_are_mapped(shards, monkeypatch):
    monkeypatch.setattr(SampleSequence, "is_remote", lambda self: True)
    assert shards.mapped(TERMS) is None


def test_kernels_without_a_guard_are_given_no_mapping(shards, monkeypatch):
    monkeypatch.setattr("tarshards.kernels.IS_COMPILED", False)
    fresh = SampleSequence(Shards(shards.urls))
    assert fresh.mapped(TERMS) is None
    assert [sample["__key__"] for sample in fresh] == [sample["__key__"] for sample in shards]


def test_keys_are_like_a_list():
    keys = BatchKeys.of(["c", "a", "a"])
    assert keys == ["c", "a", "a"]
    assert keys == BatchKeys.of(["c", "a", "a"])
    assert keys != ["c", "a"]
    assert (keys[0], keys[-1], keys[1:], list(keys), "a" in keys, "b" in keys) == (
        "c",
        "a",
        ["a", "a"],
        [*"caa"],
        True,
        False,
    )
    assert repr(keys) == "['c', 'a', 'a']"
    assert type(pickle.loads(pickle.dumps(keys))) is list


def test_of_many_shards_a_change_is_found_within_a_second(shards, tmp_path, monkeypatch):
    load_kernel("tarshards.kernels._mapped")
    now = [100.0]
    monkeypatch.setattr(mapped_fields, "ASKED", 2)
    monkeypatch.setattr(mapped_fields.time, "monotonic", lambda: now[0])
    found = shards.mapped(TERMS)
    numbers = np.arange(0, 30, 2)
    found.find(numbers // 10, numbers % 10, numbers)
    assert not any(
        isinstance(error, OpenError) for error in found.find(numbers // 10, numbers % 10, numbers).failures.values()
    )
    os.utime(tmp_path / "set-1.tar", ns=(0, 0))
    for later in (1.5, 1.5, 0.1):
        now[0] += later
        failures = found.find(numbers // 10, numbers % 10, numbers).failures
        assert [i for i, error in failures.items() if isinstance(error, OpenError)] == [5, 6, 7, 8, 9]
