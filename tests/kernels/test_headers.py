"""Members of mapped shards, taken after their headers were compared with the index."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from zlib import crc32

import msgpack
import numpy as np
import pytest
from rewritten import NAMES, Entry, npy, samples, stale, write
from soak import SOAK, rounds
from tar_corpus import entry, pax, seal
from twins import Pair

from tarshards.errors import ShardIndexError
from tarshards.index.build import build_index
from tarshards.index.header_checks import check_header
from tarshards.index.sidecar import FORMATS, Index
from tarshards.storage.ranges import LocalRanges
from tarshards.tar.read import BLOCK, END


def rows(headers: Any, index: Index, end: int = -1, **changes: Any) -> Any:
    """The members in the sidecar of an index, some of whose arrays are others."""
    names = ("sample", "field", "offset", "size")
    packed = msgpack.packb(
        {"keys": index.keys, **{name: index.arrays[name] for name in names}} | changes,
        unicode_errors="surrogateescape",
    )
    fields = tuple(field.encode("utf-8", "surrogateescape") for field in index.fields)
    return headers.MemberTable(packed, headers.layout(packed), fields, index.shard_size, end)


@pytest.fixture(scope="module")
def table(headers, mapped) -> Callable[..., Any]:
    """Return a function that makes the members of a shard and its index."""

    def make(path: Path, index: Index) -> Any:
        names: list[str | None] = list(index.fields)
        return headers.MappedMembers(mapped.Mapping(path), rows(headers, index), 0, 0, -1, str(path), names)

    return make


@pytest.fixture
def shard(tmp_path) -> tuple[Path, Index]:
    """Three samples with fields x, y and z, and one with many."""
    path = tmp_path / "a.tar"
    entries = [Entry(f"{i}.{field}", f"{i}{field}".encode() * 300) for i in range(3) for field in "xyz"]
    write(path, [*entries, *(Entry(f"many.{i}", b"%d" % i) for i in range(20))])
    return path, build_index(str(path))


def test_only_a_map_has_a_layout(headers):
    """Maps of msgpack begin with 80 to 8f, de or df; the empty ones of the last two have a size of 2 and 4 bytes."""
    for head in range(0x100):
        width = {0xDE: 2, 0xDF: 4}.get(head, 0)
        if head == 0x80 or width:
            assert headers.layout(bytes([head, *[0] * width])) == {}
        else:
            with pytest.raises(ValueError, match="no whole msgpack map"):
                headers.layout(bytes([head]))


def test_fills_a_sample(headers, table, shard):
    members = table(*shard)
    found: dict[str, Any] = {"__key__": ""}
    assert members.fill(found, ["x", None, "Z", *[None] * 20], 1, 0) == -1
    assert found == {"__key__": "1", "x": b"1x" * 300, "Z": b"1z" * 300}
    found = {}
    assert members.fill(found, [None] * 3 + [str(i) for i in range(20)], 3, 0) == -1
    assert found == {"__key__": "many", **{str(i): b"%d" % i for i in range(20)}}
    assert members.fill(found := {}, [None] * 23, 3, 0) == -1
    assert found == {"__key__": "many"}
    for wrong in -1, 4, 2**40:
        with pytest.raises(IndexError):
            members.fill({}, ["x"] * 23, wrong, 0)
    with pytest.raises(IndexError):
        members.fill({}, ["x"], 0, 0)
    for arguments in ((), ({}, [], 0), ({}, ["x"] * 23, "a", 0), ({}, ["x"] * 23, 0, None)):
        with pytest.raises(TypeError):
            members.fill(*arguments)


def test_nothing_is_filled_in_where_a_member_differs(headers, table, shard):
    path, index = shard
    data = bytearray(path.read_bytes())
    for member in 4, 5:
        data[int(index.offset[member]) - 512] = ord("7")
    path.write_bytes(data)
    members, names, found = table(path, index), [*"xyz", *[None] * 20], {}
    assert [members.fill(found, names, 1, settled) for settled in (0, 4, 5)] == [4, 4, 5]
    assert found == {}
    assert members.fill(found, names, 1, 6) == -1
    assert found["y"] == b"1y" * 300
    entries = [np.zeros(5, np.int64), np.array([3, 4, 5, -1, 6], np.int64)]
    assert headers.find_undecided([members], *entries) == [1, 2]
    members.settle(4)
    assert headers.find_undecided([members, None], *entries) == [2]
    assert headers.find_undecided([None], *entries) == []
    assert headers.find_undecided([members], *entries) == [2]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"keys": ["a", "b"]}, "samples out of order"),
        ({"keys": ["a", "b", 7, "d"]}, "not a string"),
        ({"keys": {"a": "b"}}, "not lists"),
        ({"sample": b"\4\0\0\0" * 29}, "samples out of order"),
        ({"sample": b"\0\0\0\0" * 28}, "different lengths"),
        ({"field": b"\x17\0" * 29}, "field without a name"),
        ({"offset": b"\xff\1\0\0\0\0\0\0" * 29}, "overlap"),
        ({"offset": b"\xff" * 8 * 29}, "beyond the shard's end"),
        ({"size": b"\xff\xff\0\0\0\0\0\0" * 29}, "shard's end"),
        ({"size": b"\xff" * 8 * 29}, "beyond the shard's end"),
        ({"sample": b"", "field": b"", "offset": b"", "size": b""}, "keys without members"),
    ],
)
def test_refuses_members_that_are_none(headers, shard, changes, problem):
    with pytest.raises(ValueError, match=problem):
        rows(headers, shard[1], **changes)


def test_where_the_entries_of_a_sidecar_are(headers):
    entries = {"a": b"x" * 300, "b": [1, -1, 2.5, None, True, {"c": ["d"]}], "e" * 300: "text", "f": b"", "g": 1 << 63}
    packed = msgpack.packb(entries)
    found = {name: packed[begin:end] for name, (begin, end) in headers.layout(packed).items()}
    assert found.keys() == entries.keys()
    assert [found["a"], found["f"]] == [entries["a"], b""]
    for name in "b", "e" * 300, "g":
        assert msgpack.unpackb(found[name]) == entries[name]
    for cut in range(len(packed)):
        with pytest.raises(ValueError, match="no whole msgpack map"):
            headers.layout(packed[:cut])
    for wrong in packed + b"\0", b"\xc1", b"\x93\1\2\3", msgpack.packb({1: 2}), b"\x81\xa1a\xc1":
        with pytest.raises(ValueError, match="no whole msgpack map"):
            headers.layout(wrong)


class Part(bytes):
    """What the twin reads in place of a buffer."""

    def read(self, offset: int, size: int) -> bytes:
        assert 0 <= offset <= offset + size <= len(self)
        return self[offset : offset + size]


def uneven(rng: random.Random, most: int = 400) -> Index:
    """The index of samples with 1 to 40 members, some with thousands, whose keys have up to 70,000 bytes."""
    counts = [rng.choice([1, 1, 1, 3, rng.randrange(1, 41)]) for _ in range(rng.randrange(1, most))]
    if rng.random() < 0.3 and most > 100:
        counts[rng.randrange(len(counts))] = 3000
    if rng.random() < 0.2:
        counts = [1] * len(counts)
    keys = [f"{i}" + rng.choice(["", "é", "k" * 31, "\udcff", "k" * 40, "l" * 300]) for i in range(len(counts))]
    if rng.random() < 0.3 and most > 100:
        keys[-1] += "m" * 70_000
    sample = np.repeat(np.arange(len(counts)), counts)
    size = np.array([rng.randrange(5000) for _ in sample])
    offset = np.cumsum((size + 511) // 512 * 512 + 512) - (size + 511) // 512 * 512
    field = np.array([rng.randrange(9) for _ in sample])
    pairs = (("sample", sample), ("field", field), ("offset", offset), ("size", size))
    arrays = {name: array.astype(FORMATS[name]).tobytes() for name, array in pairs}
    return Index(int(offset[-1] + size[-1] + 512), 0, keys, [f"f{i}" for i in range(9)], arrays)


def test_members_of_any_sample_are_found(headers):
    for seed in range(30):
        rng = random.Random(seed)
        index = uneven(rng)
        found = rows(headers, index)
        assert (len(found), found.members) == (len(index), len(index.sample))
        numbers = rng.sample(range(len(index)), min(len(index), 60))
        assert [found.key(number) for number in numbers] == [index.keys[number] for number in numbers]
        spans = [(int(index.first[number]), int(index.first[number + 1])) for number in numbers]
        assert [found.span(number) for number in numbers] == spans
        asked, firsts = np.array([*numbers, len(index)]), np.zeros(len(numbers) + 1, np.int64)
        found.read_firsts(asked, firsts)
        assert firsts.tolist() == index.first[asked].tolist()
        members = np.array(rng.choices(range(len(index.sample)), k=50))
        entries = np.zeros((50, 4), np.int64)
        found.read_entries(members, entries)
        for column, name in enumerate(("sample", "field", "offset", "size")):
            assert entries[:, column].tolist() == getattr(index, name)[members].tolist()
        assert found.entry(int(members[0])) == tuple(entries[0].tolist())
        for wrong in (-1, len(index.sample)):
            with pytest.raises(IndexError):
                found.entry(wrong)
            with pytest.raises(IndexError):
                found.read_entries(np.array([wrong]), np.zeros((1, 4), np.int64))
        for wrong in (-1, len(index)):
            with pytest.raises(IndexError):
                found.key(wrong)
            with pytest.raises(IndexError):
                found.span(wrong)
            with pytest.raises(IndexError):
                found.read_firsts(np.array([wrong - 1 if wrong < 0 else wrong + 1]), np.zeros(1, np.int64))
        with pytest.raises(ValueError, match="another size"):
            found.rest_on(b"")


def test_a_part_of_a_shard_has_some_of_its_members(headers, shard):
    path, index = shard
    data, whole = path.read_bytes(), rows(headers, index)
    low = int(index.offset[3]) - 512  # the second sample's first header
    part = memoryview(data)[low : int(index.offset[5]) + int(index.size[5])]

    held = Pair(part, Part(part))
    members, names = headers.MappedMembers(held, whole, low, 3, 6), [*"xyz", *[None] * 20]
    assert members.fill({}, names, 1, 0) == 3, "the header before it is not here"
    members.settle(3)
    assert members.fill(found := {}, names, 1, 0) == -1
    assert found == {"__key__": "1", **{name: f"1{name}".encode() * 300 for name in "xyz"}}
    assert members.fill(found := {}, names, 2, 0) == -1
    assert found == {"__key__": "2"}
    with pytest.raises(ValueError, match="not a member"):
        headers.find_undecided([members], np.zeros(1, np.int64), np.array([6]))
    for wrong in ((low, 4, 3), (low, 0, 30), (-1, 0, 3)):
        with pytest.raises(ValueError, match="not members"):
            headers.MappedMembers(held, whole, *wrong)


@pytest.mark.parametrize("damage", ["cut", "zeros", "ones", "noise"])
def test_a_mapped_sidecar_may_be_written_to_at_any_time(headers, mapped, shard, tmp_path, damage):
    """What is read of it then is an error, or differs from the shard."""
    kernel = headers.kernel
    path, index = shard
    packed = index.pack()
    sidecar = tmp_path / "a.tar.index"
    names = ["x", "y", "z", *map(str, range(20))]
    for seed in range(40):
        sidecar.write_bytes(packed)
        fields = tuple(field.encode() for field in index.fields)
        found = kernel.MemberTable(packed, kernel.layout(packed), fields, index.shard_size, -1)
        found.rest_on(mapped.kernel.Mapping(sidecar))
        members = kernel.MappedMembers(mapped.kernel.Mapping(path), found)
        assert [members.fill({}, names, sample, 0) for sample in range(4)] == [-1] * 4
        if damage == "cut":
            os.truncate(sidecar, 0)
        else:
            byte = {"zeros": b"\0", "ones": b"\xff"}.get(damage)
            other = byte * len(packed) if byte else random.Random(seed).randbytes(len(packed))
            with open(sidecar, "r+b") as file:
                file.write(other)
        for sample in range(4):
            result: dict[str, Any] = {}
            with suppress(OSError, IndexError):
                if members.fill(result, names, sample, 0) >= 0:
                    assert result == {}
            for value in result.values():
                assert value == result["__key__"] or bytes(value) in path.read_bytes()
        for call, number in ((found.key, 1), (found.span, 2), (found.entry, 5)):
            with suppress(OSError):
                call(number)
        shards, numbers = np.zeros(29, np.int64), np.arange(29)
        assert set(kernel.find_undecided([members], shards, numbers)) <= set(range(29))
        addresses, sizes, at = np.zeros((1, 4), np.uint64), np.zeros((1, 4), np.int64), np.zeros((1, 4), np.int64)
        rank = bytes(2 * 23)  # every field is the best one
        order = numbers[:4][::-1].copy()
        ends = np.zeros(1, np.int64)
        kernel.locate([members], lambda _, rank=rank: rank, shards[:4], numbers[:4], order, addresses, sizes, at, ends)
        assert 0 <= ends[0] <= index.shard_size
        assert sizes.max() <= index.shard_size
        if damage == "cut":
            assert at.tolist() == [[-2] * 4]
            with pytest.raises(OSError, match="shrunk"):
                members.fill({}, names, 0, 0)
    with pytest.raises(ValueError, match="another size"):
        found.rest_on(b"")


@pytest.fixture(scope="module")
def long(tmp_path_factory) -> tuple[Path, bytes, dict[str, Any]]:
    """A shard of samples with one field or two, its sidecar, and what that says of its pages."""
    path = tmp_path_factory.mktemp("long") / "a.tar"
    write(path, [Entry(f"{i:05d}.{field}", b"%d" % i) for i in range(2100) for field in "xy"[: 1 + i % 3 % 2]])
    packed = build_index(str(path)).pack()
    found = msgpack.unpackb(packed)
    entries = {name: tuple(ends) for name, ends in found["pages"]["entries"].items()}
    return path, packed, {**found["pages"], "entries": entries, "end": found["at"][0]}


def paged(headers: Any, packed: bytes, pages: dict[str, Any], shard_size: int) -> Any:
    """The kernel's members in a sidecar whose pages are checked when they are used."""
    own = 2100, pages["entries"]["keys"][0] + 3, *(pages[name] for name in ("each", "end", "marks", "crc32"))
    return headers.kernel.MemberTable(packed, pages["entries"], (b"x", b"y"), shard_size, -1, own)


def found_by_all(headers: Any, mapped: Any, path: Path, table: Any) -> dict[Any, Any]:
    """Everything that the kernel finds by a table, or why it does not: by its calls and their arguments."""
    kernel, found, samples = headers.kernel, {}, range(len(table))
    members = kernel.MappedMembers(mapped.kernel.Mapping(path), table, 0, 0, -1, "u", ["x", "y"])
    for call, count in ((table.key, len(table)), (table.span, len(table)), (table.entry, table.members)):
        for number in range(count):
            try:
                found[call.__name__, number] = call(number)
            except OSError as error:
                found[call.__name__, number] = str(error)
    numbers, zeros = np.arange(len(table)), np.zeros(len(table), np.int64)
    addresses, sizes, at = np.zeros((1, len(table)), np.uint64), *np.zeros((2, 1, len(table)), np.int64)
    rank = np.array([0, -1], np.int16).tobytes()
    kernel.locate([members], lambda _: rank, zeros, numbers, numbers, addresses, sizes, at, np.zeros(1, np.int64))
    located, read = enumerate(zip(at[0].tolist(), sizes[0].tolist())), []
    while len(read) < len(samples):
        read += kernel.read_samples([members], zeros, numbers, len(read))
    found.update((("locate", i), (member, size) if member >= 0 else member) for i, (member, size) in located)
    found.update((("read", i), sample) for i, sample in enumerate(read))
    every = np.arange(table.members)
    undecided = {*kernel.find_undecided([members], np.zeros(len(every), np.int64), every)}
    found.update((("compare", i), i not in undecided) for i in every.tolist())
    return found


def test_a_page_of_a_sidecar_is_checked_where_it_is_used(headers, mapped, long):
    """A byte that changed is told of by what needs its page; all else is found."""
    path, packed, pages = long
    size = path.stat().st_size
    sound = found_by_all(headers, mapped, path, paged(headers, packed, pages, size))
    assert sound["key", 7] == "00007"
    assert sound["read", 2099] == {"__key__": "02099", "__url__": "u", "x": b"2099"}
    assert all(found for (call, _), found in sound.items() if call == "compare")
    lost = ("damaged: truncated, or wrong checksum", None, -2, False)
    for seed in range(rounds(12)):
        rng = random.Random(seed)
        name = rng.choice(["keys", "sample", "field", "offset", "size"])
        at = rng.randrange(*pages["entries"][name])
        wrong = bytearray(packed)
        wrong[at] ^= 1 << rng.randrange(8)
        found = found_by_all(headers, mapped, path, paged(headers, bytes(wrong), pages, size))
        differing = {key for key in sound if found[key] != sound[key]}
        assert [found[key] for key in differing if found[key] not in lost] == []
        assert 0 < len(differing) < len(sound) * 0.9


def test_what_a_sidecar_says_of_its_pages_is_not_trusted(headers, mapped, long):
    """With right checksums, whatever the pages hold: it is told of, or found, within the shard."""
    path, packed, pages = long
    size = path.stat().st_size
    for seed in range(rounds(40)):
        rng = random.Random(seed)
        wrong, said = bytearray(packed), dict(pages)
        for _ in range(rng.choice([1, 1, 30])):
            begin, end = pages["entries"][rng.choice(["keys", "sample", "field", "offset", "size"])]
            at = rng.randrange(begin + 3, end - 8)
            wrong[at : at + 8] = rng.choice([bytes(8), b"\xff" * 8, rng.randbytes(8)])
        sums = [crc32(wrong[i : min(i + 4096, said["end"])]) for i in range(0, said["end"], 4096)]
        said["crc32"] = np.array(sums, "<u4").tobytes()
        if rng.random() < 0.3:
            said["marks"] = rng.randbytes(len(said["marks"]))
        if rng.random() < 0.3:
            said.update(
                rng.choice([{"each": rng.choice([1, 2, -1])}, {"crc32": b""}, {"marks": b""}, {"end": 1 << 40}])
            )
        try:
            table = paged(headers, bytes(wrong), said, size)
        except ValueError:
            continue
        found = found_by_all(headers, mapped, path, table)
        for (call, number), each in found.items():
            if call == "entry" and not isinstance(each, str):
                assert 512 <= each[2] <= each[2] + each[3] <= size
                assert each[1] < 2
            if call == "read" and each is not None:
                assert (each["__key__"], each["x"]) == (f"{number:05d}", b"%d" % number)


def test_a_table_says_what_spares_a_look_at_all_keys(headers):
    for seed in range(30):
        index = uneven(random.Random(seed))
        each, marks = rows(headers, index).pages
        counts = {*np.diff(index.first).tolist()}
        assert each == (counts.pop() if len(counts) == 1 else 0)
        packed = msgpack.packb(index.keys, unicode_errors="surrogateescape")
        begin = len(packed) - sum(len(msgpack.packb(key, unicode_errors="surrogateescape")) for key in index.keys)
        for number, mark in enumerate(np.frombuffer(marks, "<u4").tolist()):
            key = msgpack.packb(index.keys[64 * number], unicode_errors="surrogateescape")
            assert packed[begin + mark :].startswith(key)


def test_refuses_to_compare_members_that_do_not_exist(headers, table, shard):
    members, one = table(*shard), np.zeros(1, np.int64)
    for shards, numbers in ((one, one + 29), (one, np.zeros(2, np.int64))):
        with pytest.raises(ValueError, match=r"member|length"):
            headers.find_undecided([members], shards, numbers)
    with pytest.raises(IndexError):
        headers.find_undecided([members], one + 1, one)
    for wrong in -1, 29:
        with pytest.raises(IndexError):
            members.settle(wrong)


def test_refuses_to_read_members_that_do_not_exist_or_fit(headers, mapped, shard):
    """Those at addresses outside of their shard, or whose index has other entries, stay where they are."""
    kernel, (path, index) = headers.kernel, shard
    mapping = mapped.kernel.Mapping(path)
    mapping.read_by_calls(True)
    fields = tuple(field.encode() for field in index.fields)
    packed = index.pack()
    members = kernel.MappedMembers(
        mapping, kernel.MemberTable(packed, kernel.layout(packed), fields, path.stat().st_size, -1)
    )
    base = np.frombuffer(mapping, np.uint8).__array_interface__["data"][0]
    numbers, which = np.arange(9), np.zeros(9, np.int64)
    sizes, addresses = index.size[:9].astype(np.int64), (index.offset[:9] + np.uint64(base)).astype(np.uint64)
    for wrong in (numbers[:8], sizes), (numbers + 29, sizes), (numbers, -sizes), (numbers, sizes * 2):
        with pytest.raises(ValueError, match=r"member|length"):
            kernel.fetch([members], which, *wrong, addresses.copy(), np.empty(int(sizes.sum()), np.uint8))
    for shift in 1, -(1 << 40), 1 << 40:
        moved = (addresses.astype(np.int64) + shift).astype(np.uint64)
        before, arena = moved.copy(), np.empty(int(sizes.sum()), np.uint8)
        assert kernel.fetch([members], which, numbers, sizes, moved, arena)
        assert (moved == before).all()
    arena = np.empty(int(sizes.sum()), np.uint8)
    assert not kernel.fetch([members], which, numbers, sizes, addresses, arena)
    assert addresses[0] == arena.__array_interface__["data"][0]
    data = path.read_bytes()
    assert arena.tobytes() == b"".join(
        data[offset : offset + size] for offset, size in zip(index.offset[:9].tolist(), sizes.tolist())
    )


def test_samples_are_located_and_compared_in_any_order(headers, table, shard):
    kernel = headers.kernel
    path, index = shard
    data = bytearray(path.read_bytes())
    data[int(index.offset[index.first[1]]) - 512] = ord("7")
    path.write_bytes(data)
    rank, shards, samples = bytes(2 * 23), np.array([1, 0, 1, 1]), np.array([3, 0, 0, 2])
    addresses, sizes, numbers = np.zeros((1, 4), np.int64), np.zeros((1, 4), np.int64), np.zeros((1, 4), np.int64)
    ends, found = np.zeros(2, np.int64), []
    for order in np.array([[0, 1, 2, 3], [3, 2, 1, 0], [1, 2, 0, 3]]):
        tables = [None, table(path, index).kernel]
        assert not kernel.locate(tables, lambda _: rank, shards, samples, order, addresses, sizes, numbers, ends)
        assert numbers.tolist() == [[index.first[3], -1, 0, index.first[2]]]
        found.append((addresses[0, [0, 3]] - addresses[0, 2]).tolist())
        others = np.array([3, 0, 1, 2])
        assert kernel.locate(tables, lambda _: rank, shards, others, order, addresses, sizes, numbers, ends)
    assert found == [[index.offset[index.first[i]] - index.offset[0] for i in (3, 2)]] * 3
    for wrong in ([0, 1, 2, 4], [0, 1, 2, -1], [0, 1, 2]):
        with pytest.raises(ValueError, match=r"order|length"):
            kernel.locate(tables, lambda _: rank, shards, samples, np.array(wrong), addresses, sizes, numbers, ends)


def test_a_shard_that_shrinks_is_an_error(headers, table, shard):
    path, index = shard
    members = table(path, index)
    os.truncate(path, 0)
    with pytest.raises(OSError, match="shrunk"):
        members.fill({}, [*"xyz", *[None] * 20], 2, 0)
    assert headers.find_undecided([members], np.zeros(2, np.int64), np.array([4, 8], np.int64)) == [0, 1]
    assert headers.read_samples([members], np.zeros(2, np.int64), np.array([0, 2], np.int64), 0) == [None, None]


def test_a_sample_in_the_page_in_which_the_shard_ends_now_is_an_error(headers, table, shard):
    path, index = shard
    members, names = table(path, index), ["x", "y", "z", *map(str, range(20))]
    data = path.read_bytes()
    before = [{} for _ in range(len(index))]
    assert {members.fill(result, names, sample, 0) for sample, result in enumerate(before)} == {-1}
    for end in range(len(data), 0, -331):
        os.truncate(path, end)
        for sample, expected in enumerate(before):
            result, last = {}, int(index.first[sample + 1]) - 1
            if index.offset[last] + index.size[last] > end:
                with pytest.raises(OSError, match="shrunk"):
                    members.fill(result, names, sample, 0)
            else:
                assert (members.fill(result, names, sample, 0), result) == (-1, expected)


def test_shards_that_no_longer_reach_as_far_as_was_copied_are_found(headers, table, shard):
    kernel = headers.kernel
    path, index = shard
    members, size = table(path, index).kernel, int(index.offset[-1] + index.size[-1])
    held = kernel.MappedMembers(path.read_bytes(), index.table)
    tables, which = [None, members, held, members, members], np.array([1, 0, 2, 1, 4, 3, 4])
    ends = np.array([0, size, size, size - 1, 0])
    assert kernel.find_shrunk(tables, which, ends) == []
    os.truncate(path, size - 1)
    assert kernel.find_shrunk(tables, which, ends) == [1]
    assert kernel.find_shrunk(tables, which[1:3], ends) == []
    os.truncate(path, 10)
    assert kernel.find_shrunk(tables, which, ends) == [1, 3]
    assert kernel.find_shrunk([], which[:0], ends[:0]) == []
    with pytest.raises(ValueError, match="length"):
        kernel.find_shrunk(tables, which, ends[:2])
    for wrong in (-1, 5):
        with pytest.raises(IndexError):
            kernel.find_shrunk(tables, np.array([wrong]), ends)
    with pytest.raises(ValueError, match="mapped shard"):
        kernel.find_shrunk([1, 2, 3, 4, 5], which, ends)


def test_a_shard_without_members(headers, table, tmp_path):
    path = tmp_path / "a.tar"
    write(path, [Entry("README", b"r")])
    members = table(path, build_index(str(path)))
    with pytest.raises(IndexError):
        members.fill({}, [], 0, 0)
    assert headers.find_undecided([members], np.zeros(0, np.int64), np.zeros(0, np.int64)) == []


@pytest.mark.parametrize("format", ["ustar", "pax", "gnu"])
@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_names_of_all_formats_are_known_without_a_second_look(headers, table, tmp_path, name, format):
    path = tmp_path / "a.tar"
    write(path, [Entry("README", b"r"), *samples(5, name, upper=True)], format, times=0.5)
    members = table(path, index := build_index(str(path)))
    count = len(index.sample)
    assert headers.find_undecided([members], np.zeros(count, np.int64), np.arange(count)) == []


def test_members_of_concatenated_archives_are_known_without_a_second_look(headers, table, tmp_path):
    path, other = tmp_path / "a.tar", tmp_path / "b.tar"
    write(path, samples(3, "a{:03d}"))
    write(other, samples(3, "b{:03d}"), "pax", times=0.5)
    path.write_bytes(path.read_bytes() + other.read_bytes())
    members = table(path, build_index(str(path), concatenated=True))
    assert headers.find_undecided([members], np.zeros(18, np.int64), np.arange(18)) == []


def test_what_is_no_ascii_in_upper_case_needs_a_second_look(headers, table, tmp_path):
    path = tmp_path / "a.tar"
    write(path, [Entry("a.Ö", b"1"), Entry("b.ö", b"1"), Entry("c.İ")])
    members = table(path, index := build_index(str(path)))
    assert headers.find_undecided([members], np.zeros(3, np.int64), np.arange(3)) == [0, 2]
    with LocalRanges(str(path), "a.tar") as ranges:
        for member in range(3):
            check_header(ranges.read, index, member, url="a.tar")


@pytest.mark.soak
def test_rewritten_shards_give_what_they_hold(headers, table, tmp_path):
    """Members that are accepted match the index; all others are decided by the second check."""
    refused = 0
    for seed in range(50_000, 50_000 + 20 * SOAK):
        if (made := stale(tmp_path, seed)) is None:
            continue
        path, held = made
        index = Index.load(str(path))
        count = len(index.sample)
        entries = np.zeros(count, np.int64), np.random.default_rng(seed).permutation(count)
        members = table(path, index)
        undecided = headers.find_undecided([members], *entries)
        names: list[str | None] = [None if field == "cls" and seed % 2 else field for field in index.fields]
        for sample in range(len(index)):
            for settled in 0, int(index.first[sample]) + 1, 10**6:
                members.fill({}, names, sample, settled)
        with LocalRanges(str(path), str(path)) as ranges:
            for i, member in enumerate(entries[1].tolist()):
                key, field = index.keys[index.sample[member]], index.fields[index.field[member]]
                data = ranges.read(int(index.offset[member]), int(index.size[member]))
                try:
                    check_header(ranges.read, index, member, url=str(path))
                except ShardIndexError:
                    assert i in undecided, seed
                    refused += 1
                else:
                    assert held[key, field] == data, seed
    assert refused > 100


FIELDS = ["x", "y", "z.x", "é", "\udcff", "f" * 60]


def written(rng: random.Random, members: list[tuple[str, bytes]]) -> tuple[bytes, list[int]]:
    """Return an archive of *members* in any format, with what may stand between them, and where their data begin."""
    archive, offsets = b"", []
    for name, data in members:
        raw, fields = name.encode("utf-8", "surrogateescape"), {}
        for _ in range(rng.choice([0, 0, 0, 0, 1, 2])):
            between = (
                pax(b"comment=1", kind=b"g"),
                pax(b"mtime=0.5"),
                entry(b"r", name=b"README"),
                END,
                entry(kind=b"5"),
            )
            archive += rng.choice(between)
        if len(raw) > 100 or rng.random() < 0.2:
            archive += rng.choice(
                [pax(b"path=" + raw), pax(b"path=" + raw, b"size=%d" % len(data)), entry(raw, kind=b"L")]
            )
            raw = b"other"
        elif b"/" in raw and rng.random() < 0.5:
            fields["prefix"], _, raw = raw.partition(b"/")
        else:
            fields["magic"] = rng.choice([b"ustar\x0000", b"ustar  \0", b""])
        size = rng.choice([b"%011o\0", b"%012o", b"%11o "]) % len(data)
        size = rng.choice([size, size, b"\x80" + len(data).to_bytes(11, "big")])
        member = entry(data, name=raw, size=size, kind=rng.choice([b"0", b"0", b"\0", b"7"]), **fields)
        archive += member
        offsets.append(len(archive) - len(member) + BLOCK)
    return archive, offsets


def rewritten(rng: random.Random, members: list[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
    """Return other members; many lie where the old ones lay."""
    members = list(members)
    for _ in range(rng.choice([0, 1, 1, 3])):
        at, other = rng.randrange(len(members)), rng.randrange(len(members))
        name, data = members[at]
        place = rng.randrange(len(name))
        members[at] = rng.choice(
            [
                (name, data + b"7"),
                (name, data[: rng.randint(0, len(data))]),
                (name[:place] + rng.choice("9zZ./") + name[place + 1 :], data),
                (name.upper(), data),
                members[other],
            ]
        )
    return members


def damaged(rng: random.Random, archive: bytes, offsets: list[int]) -> bytes:
    """Return an archive with a few other bytes in the headers of members, or cut."""
    data = bytearray(archive)
    for _ in range(rng.choice([0, 0, 1, 3])):
        at = rng.choice(offsets) - BLOCK + rng.choice([0, 1, 124, 134, 135, 148, 156, 257, 345, 500, 500, 500])
        data[at] = rng.choice([0, 32, 48, 55, 128, 255, data[at] ^ 32])
        if rng.random() < 0.6:
            block = at // BLOCK * BLOCK
            data[block : block + BLOCK] = seal(data[block : block + BLOCK])
    return bytes(data[: rng.choice([len(data), len(data), len(data), rng.randrange(len(data))])])


def any_shard(seed: int) -> tuple[Index, bytes]:
    """Return the index of a few samples, and the shard that it is of, or one rewritten or damaged since."""
    rng = random.Random(seed)
    folder, counts = rng.choice(["", "d/", "é/", "p" * 90 + "/"]), rng.choices([1, 1, 2, 3, 40], k=rng.randrange(1, 6))
    keys = [f"{folder}{i}" + rng.choice(["", "k" * 70, "\udcff"]) for i in range(len(counts))]
    owners = [i for i, count in enumerate(counts) for _ in range(count)]
    fields = [rng.randrange(len(FIELDS)) for _ in owners]
    members = []
    for i, field in zip(owners, fields):
        name = rng.choice([FIELDS[field], FIELDS[field].upper()])
        members.append((f"{keys[i]}.{name}", rng.randbytes(rng.choice([0, 5, 512, 900]))))
    archive, offsets = written(random.Random(~seed), members)
    arrays = {"sample": owners, "field": fields, "offset": offsets, "size": [len(data) for _, data in members]}
    packed = {name: np.array(array, FORMATS[name]).tobytes() for name, array in arrays.items()}
    other = written(random.Random(~seed), rewritten(rng, members))
    return Index(len(archive), 0, keys, FIELDS, packed), damaged(rng, *other)


def test_any_members_are_compared_with_any_archive(headers):
    """All of them or some, in any order, with some settled before."""
    for seed in range(rounds(240)):
        rng = random.Random(seed)
        index, shard = any_shard(seed)
        count, offsets = len(index.sample), index.offset.tolist()
        begin, end = rng.choice([(0, count), (0, count), sorted(rng.choices(range(count + 1), k=2))])
        low = 0 if begin == 0 else rng.choice(offsets[begin - 1 : begin + 1]) - rng.choice([0, BLOCK])
        held = shard[low:] if end == count else shard[low : offsets[end - 1] + BLOCK * rng.randrange(3)]
        names = [rng.choice([field, field, field, None]) for field in FIELDS]
        part = Pair(held, Part(held)), rows(headers, index), low, begin, rng.choice([end, end if end < count else -1])
        own = headers.MappedMembers(*part, "a.tar", names)
        for _ in range(6):
            own.fill({}, names, rng.randrange(len(index)), rng.choice([0, 0, 0, rng.randrange(count + 1)]))
            if begin < end:
                some = np.array(rng.choices(range(begin, end), k=rng.randrange(30)), np.int64)
                headers.find_undecided([None, own], rng.choice([1, 1, 0]) + 0 * some, some)
                if rng.random() < 0.2:
                    own.settle(rng.randrange(begin, end))
        shards = np.array(rng.choices([0, 1, 1, 1], k=50), np.int64)
        asked = np.array([rng.randrange(-1, len(index) + 1) for _ in shards], np.int64)
        results = [
            all_samples(module, [None, members], shards, asked)
            for module, members in ((headers.kernel, own.kernel), (headers.twin, own.twin))
        ]
        assert results[0] == results[1]
        with suppress(IndexError):
            headers.find_keys([None, own], shards, asked)
        with pytest.raises(ValueError, match="differ in length"):
            headers.find_keys([None, own], shards, asked[1:])


@pytest.mark.parametrize(("magic", "undecided"), [(b"", [0]), (b"ustar\x0000", []), (b"ustar  \0", [])])
def test_the_size_before_a_member_counts_of_headers_that_are_known_to_be_such(headers, magic, undecided):
    first, second = (bytearray(entry(b"1", name=name, magic=magic)) for name in (b"a.x", b"b.x"))
    first[500] ^= 1  # the checksum is wrong then
    arrays = {"sample": [0, 1], "field": [0, 0], "offset": [512, 1536], "size": [1, 1]}
    packed = {name: np.array(array, FORMATS[name]).tobytes() for name, array in arrays.items()}
    shard = bytes(first + second)
    table = rows(headers, Index(len(shard), 0, ["a", "b"], ["x"], packed))
    own = headers.MappedMembers(Pair(shard, Part(shard)), table)
    assert headers.find_undecided([own], np.zeros(1, np.int64), np.ones(1, np.int64)) == undecided


def all_samples(module: Any, tables: list[Any], shards: np.ndarray, samples: np.ndarray) -> list[dict[str, Any] | None]:
    """Yield samples as a call returns some of them."""
    found: list[dict[str, Any] | None] = []
    while len(found) < len(samples):
        found += module.read_samples(tables, shards, samples, len(found))
    assert module.read_samples(tables, shards, samples, len(found)) == []
    return found


def test_any_damage_of_a_table_is_told_of_or_read_alike(headers):
    for seed in range(rounds(900)):
        rng = random.Random(seed)
        index = uneven(rng, most=9)
        name = rng.choice(["sample", "field", "offset", "size"])
        width = np.dtype(FORMATS[name]).itemsize
        array = bytearray(index.arrays[name])
        at = rng.randrange(len(array))
        array[at : at + width] = rng.choice([bytes(1), b"\1", b"\xff", rng.randbytes(width), b"\xff" * width])
        cut = rng.choice([len(array), len(array), len(array) - width, len(array) - 1])
        keys = rng.choice([[*index.keys, rng.choice(["k", 7])], index.keys[1:]])
        change: dict[str, Any] = rng.choice(
            [{}, {name: bytes(array[:cut])}, {name: bytes(array[:cut])}, {"keys": keys}]
        )
        end = rng.choice([-1, index.shard_size - rng.choice([512, 513])])
        with suppress(ValueError):
            found = rows(headers, index, end, **change)
            for number in range(-1, len(index) + 2):
                for call in found.key, found.span, found.entry:
                    with suppress(IndexError):
                        call(number)


def test_any_bytes_have_a_layout_or_none(headers):
    names = ["a", "é" * 20, "k" * 300, 7, b"b"]
    values = [0, -1, 1 << 40, 2.5, None, True, b"x" * 300, b"", "t" * 40, [1, [2, {"a": b"c"}]], {"b": 1}, [0] * 20]
    values += [bytes(70_000)]
    values += [msgpack.ExtType(5, b"1"), msgpack.ExtType(5, b"12345"), msgpack.ExtType(9, bytes(70_000)), "t" * 70_000]
    for seed in range(rounds(1500)):
        rng = random.Random(seed)
        entries = dict(zip(rng.sample(names, rng.choice([1, 2, 3, 5])), rng.choices(values, k=5)))
        packed = bytearray(msgpack.packb(entries) if rng.random() < 0.9 else msgpack.packb(rng.choice(values)))
        for _ in range(rng.choice([0, 0, 1, 2])):
            packed[rng.randrange(min(len(packed), 60))] = rng.choice(
                [0x80, 0xC1, 0xC4, 0xDE, 0xDF, 0xA1, rng.randrange(256)]
            )
        with suppress(ValueError):
            headers.layout(bytes(packed[: rng.choice([len(packed), len(packed), rng.randrange(len(packed))])]))


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
    """A tar in a tar that ends in an extended header without a member."""
    inner, path = tmp_path / "inner", tmp_path / "a.tar"
    write(inner, [Entry("x.cls", b"1", pax={"path": "y.cls"})], "pax")
    nested = inner.read_bytes()[:1024]
    write(path, [Entry("a.tar", nested), Entry("b.npy", npy(1))])
    index = build_index(str(path))
    with LocalRanges(str(path), "a.tar") as ranges:
        check_header(ranges.read, index, 1, url="a.tar")
        with pytest.raises(ShardIndexError):  # not known to be data where what is before is not looked at
            check_header(ranges.read, index, 1, url="a.tar", low=512)
