"""Members of mapped shards, taken after their headers were compared with the index: the kernel and its twin."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from programs import load_kernel
from rewritten import NAMES, Entry, npy, samples, stale, write
from soak import SOAK

from tarshards.errors import ShardIndexError
from tarshards.index import _headers_py
from tarshards.index.build import build_index
from tarshards.index.headers import check_header
from tarshards.index.sidecar import Index
from tarshards.storage.ranges import LocalRanges


@pytest.fixture(params=["native", "python"])
def kernel(request):
    return _headers_py if request.param == "python" else load_kernel("tarshards.index._headers")


def table(kernel: Any, path: Any, index: Index, **changes: Any) -> Any:
    mapping = load_kernel(f"tarshards.storage.{'_mapped_py' if kernel is _headers_py else '_mapped'}").Mapping(path)
    arrays = {"first": index.first, **{name: index.arrays[name] for name in ("sample", "field", "offset", "size")}}
    return kernel.MappedMembers(mapping, index.keys, index.fields, *(arrays | changes).values())


@pytest.fixture
def shard(tmp_path) -> tuple[Path, Index]:
    """Three samples with fields x, y and z, and one with many."""
    path = tmp_path / "a.tar"
    entries = [Entry(f"{i}.{field}", f"{i}{field}".encode() * 300) for i in range(3) for field in "xyz"]
    write(path, [*entries, *(Entry(f"many.{i}", b"%d" % i) for i in range(20))])
    return path, build_index(str(path))


def test_fills_a_sample(kernel, shard):
    members = table(kernel, *shard)
    found: dict[str, Any] = {"__key__": "1"}
    assert members.fill(found, ["x", None, "Z", *[None] * 20], 1, 0) == -1
    assert found == {"__key__": "1", "x": b"1x" * 300, "Z": b"1z" * 300}
    found = {}
    assert members.fill(found, [None] * 3 + [str(i) for i in range(20)], 3, 0) == -1
    assert found == {str(i): b"%d" % i for i in range(20)}
    assert members.fill(found := {}, [None] * 23, 3, 0) == -1
    assert found == {}
    for wrong in -1, 4, 2**40:
        with pytest.raises(IndexError):
            members.fill({}, ["x"] * 23, wrong, 0)
    with pytest.raises(IndexError):
        members.fill({}, ["x"], 0, 0)
    for arguments in ((), ({}, [], 0), ({}, ["x"] * 23, "a", 0), ({}, ["x"] * 23, 0, None)):
        with pytest.raises(TypeError):
            members.fill(*arguments)


def test_nothing_is_filled_in_where_a_member_differs(kernel, shard):
    path, index = shard
    data = bytearray(path.read_bytes())
    for member in 4, 5:
        data[int(index.offset[member]) - 512] = ord("7")
    path.write_bytes(data)
    members, names, found = table(kernel, path, index), [*"xyz", *[None] * 20], {}
    assert [members.fill(found, names, 1, settled) for settled in (0, 4, 5)] == [4, 4, 5]
    assert found == {}
    assert members.fill(found, names, 1, 6) == -1
    assert found["y"] == b"1y" * 300
    places = [np.zeros(5, np.int64), np.array([3, 4, 5, -1, 6], np.int64)]
    assert kernel.find_undecided([members], *places) == [1, 2]
    members.settle(4)
    assert kernel.find_undecided([members, None], *places) == [2]
    assert kernel.find_undecided([None], *places) == []
    assert kernel.find_undecided([members], *places) == [2]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("first", np.array([0, 3, 6, 9], np.int64)),
        ("first", np.array([0, 3, 2, 9, 29], np.int64)),
        ("first", np.array([1, 3, 6, 9, 29], np.int64)),
        ("sample", b"\4\0\0\0" * 29),
        ("sample", b"\0\0\0\0" * 28),
        ("field", b"\x17\0" * 29),
        ("offset", b"\xff\1\0\0\0\0\0\0" * 29),
        ("offset", b"\xff" * 8 * 29),
        ("size", b"\xff\xff\0\0\0\0\0\0" * 29),
        ("size", b"\xff" * 8 * 29),
    ],
)
def test_refuses_members_that_are_none(kernel, shard, name, value):
    with pytest.raises(ValueError, match=r"order|lengths|shard|field|key"):
        table(kernel, *shard, **{name: value})


def test_refuses_places_that_are_none(kernel, shard):
    members, one = table(kernel, *shard), np.zeros(1, np.int64)
    for shards, numbers in ((one, one + 29), (one, np.zeros(2, np.int64))):
        with pytest.raises(ValueError, match=r"member|length"):
            kernel.find_undecided([members], shards, numbers)
    with pytest.raises(IndexError):
        kernel.find_undecided([members], one + 1, one)
    for wrong in -1, 29:
        with pytest.raises(IndexError):
            members.settle(wrong)


def test_a_shard_that_shrinks_is_an_error(kernel, shard):
    path, index = shard
    members = table(kernel, path, index)
    os.truncate(path, 0)
    with pytest.raises(OSError, match="shrunk"):
        members.fill({}, [*"xyz", *[None] * 20], 2, 0)
    assert kernel.find_undecided([members], np.zeros(2, np.int64), np.array([4, 8], np.int64)) == [0, 1]


def test_a_shard_without_members(kernel, tmp_path):
    path = tmp_path / "a.tar"
    write(path, [Entry("README", b"r")])
    members = table(kernel, path, build_index(str(path)))
    with pytest.raises(IndexError):
        members.fill({}, [], 0, 0)
    assert kernel.find_undecided([members], np.zeros(0, np.int64), np.zeros(0, np.int64)) == []


@pytest.mark.parametrize("format", ["ustar", "pax", "gnu"])
@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_names_of_all_formats_are_known_without_a_second_look(kernel, tmp_path, name, format):
    path = tmp_path / "a.tar"
    write(path, [Entry("README", b"r"), *samples(5, name, upper=True)], format, times=0.5)
    members = table(kernel, path, index := build_index(str(path)))
    count = len(index.sample)
    assert kernel.find_undecided([members], np.zeros(count, np.int64), np.arange(count)) == []


def test_members_of_concatenated_archives_are_known_without_a_second_look(kernel, tmp_path):
    path, other = tmp_path / "a.tar", tmp_path / "b.tar"
    write(path, samples(3, "a{:03d}"))
    write(other, samples(3, "b{:03d}"), "pax", times=0.5)
    path.write_bytes(path.read_bytes() + other.read_bytes())
    members = table(kernel, path, build_index(str(path), concatenated=True))
    assert kernel.find_undecided([members], np.zeros(18, np.int64), np.arange(18)) == []


def test_what_is_no_ascii_in_upper_case_needs_a_second_look(kernel, tmp_path):
    path = tmp_path / "a.tar"
    write(path, [Entry("a.Ö", b"1"), Entry("b.ö", b"1"), Entry("c.İ")])
    members = table(kernel, path, index := build_index(str(path)))
    assert kernel.find_undecided([members], np.zeros(3, np.int64), np.arange(3)) == [0, 2]
    with LocalRanges(str(path), "a.tar") as ranges:
        for member in range(3):
            check_header(ranges.read, index, member, url="a.tar")


@pytest.mark.soak
def test_the_twins_agree_on_rewritten_shards(tmp_path):
    """What they let pass is what the index says; of what they do not, the second look finds out."""
    native = load_kernel("tarshards.index._headers")
    refused = 0
    for seed in range(50_000, 50_000 + 40 * SOAK):
        if (made := stale(tmp_path, seed)) is None:
            continue
        path, held = made
        index = Index.load(str(path))
        count = len(index.sample)
        places = np.zeros(count, np.int64), np.random.default_rng(seed).permutation(count)
        tables = [table(kernel, path, index) for kernel in (native, _headers_py)]
        undecided = native.find_undecided(tables[:1], *places)
        assert undecided == _headers_py.find_undecided(tables[1:], *places), seed
        names = [None if field == "cls" and seed % 2 else field for field in index.fields]
        for sample in range(len(index)):
            for settled in 0, int(index.first[sample]) + 1, 10**6:
                results: list[dict[str, bytes]] = [{}, {}]
                ends = [each.fill(result, names, sample, settled) for each, result in zip(tables, results)]
                assert ends[0] == ends[1], seed
                assert results[0] == results[1], seed
        with LocalRanges(str(path), str(path)) as ranges:
            for place, member in enumerate(places[1].tolist()):
                key, field = index.keys[index.sample[member]], index.fields[index.field[member]]
                data = ranges.read(int(index.offset[member]), int(index.size[member]))
                try:
                    check_header(ranges.read, index, member, url=str(path))
                except ShardIndexError:
                    assert place in undecided, seed
                    refused += 1
                else:
                    assert held[key, field] == data, seed
    assert refused > 100


@pytest.mark.parametrize("size", [10, 600, 5000, 1 << 19, (1 << 20) - 60])
def test_an_extended_header_far_before_its_member_counts(tmp_path, size):
    """Its words count wherever it begins, also in what was the data of the member before."""
    path = tmp_path / "a.tar"
    data = b"a" * (1 << 21)
    write(path, [Entry("a.bin", data), Entry("b.cls", b"1"), Entry("c.cls", b"2")])
    index = build_index(str(path))
    entry = Entry("b.cls", b"1", pax={"comment": "c" * size, "path": "z.cls"})
    write(path, [entry], "pax")
    extended = path.read_bytes().index(b"b.cls\0")
    write(path, [Entry("a.bin", data[:-extended]), entry, Entry("c.cls", b"2")], "pax")
    with LocalRanges(str(path), "a.tar") as ranges:
        assert path.read_bytes().index(b"b.cls\0") == index.offset[1] - 512
        with pytest.raises(ShardIndexError, match=r"b\.cls: stale index.*here is 'z\.cls' of 1 bytes"):
            check_header(ranges.read, index, 1, url="a.tar")
        check_header(ranges.read, index, 2, url="a.tar")


def test_data_that_looks_like_an_extended_header_is_data(tmp_path):
    """A tar in a tar, whose end is a header of extended words for no member of its own."""
    inner, path = tmp_path / "inner", tmp_path / "a.tar"
    write(inner, [Entry("x.cls", b"1", pax={"path": "y.cls"})], "pax")
    nested = inner.read_bytes()[:1024]
    write(path, [Entry("a.tar", nested), Entry("b.npy", npy(1))])
    index = build_index(str(path))
    with LocalRanges(str(path), "a.tar") as ranges:
        check_header(ranges.read, index, 1, url="a.tar")
        with pytest.raises(ShardIndexError):  # not known to be data where what is before is not looked at
            check_header(ranges.read, index, 1, url="a.tar", low=512)
