"""Headers, members and rows of samples as we write them: plain ones, which need no extended headers."""

import os
import random
import struct
import tarfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from soak import rounds
from tar_corpus import pack, read_whole

from tarshards.samples.keys import split_name
from tarshards.samples.payloads import Payloads
from tarshards.tar.read import END, pack_members

NAMES = st.one_of(
    st.binary(min_size=1, max_size=120).map(os.fsdecode),
    st.text("nü/", min_size=90, max_size=120),
    st.text("n/", max_size=102),
).filter(lambda name: "\0" not in name and not name.endswith("/"))
SIZES = st.sampled_from([0, 1, 511, 512, 513, 5000])


@given(name=NAMES, size=st.integers(0, 1 << 34))
def test_a_plain_header_is_tarfiles_wherever_it_says_everything(tar, name, size):
    made = tar.plain_header(name, size)
    info = tarfile.TarInfo(name)
    info.size = size
    is_plain = len(name) <= 100 and name.isascii() and size < 1 << 33
    assert made == (info.tobuf(tarfile.USTAR_FORMAT) if is_plain else None)


def test_a_header_of_a_negative_size(tar):
    with pytest.raises(ValueError, match="negative"):
        tar.plain_header("a", -1)


FIELDS = st.lists(st.sampled_from(["jpg", "cls", "a.b", "é", "n" * 90]), unique=True).map(tuple)


@given(key=NAMES, fields=FIELDS, data=st.data())
def test_the_members_of_a_sample_are_packed_in_one_where_all_headers_are_plain(tar, key, fields, data):
    values = [bytes(data.draw(SIZES)) for _ in fields]
    packed = tar.plain_members(key, fields, values, 1000)
    names = [f"{key}.{field}" for field in fields]
    is_plain = all(name.isascii() and len(name) <= 100 for name in names) and max(map(len, values), default=1000) < 1000
    assert packed == (pack(zip(names, values)) if is_plain else None)
    assert b"".join(pack_members(key, fields, values)) == pack(zip(names, values))


def test_fields_without_values_are_refused(tar):
    with pytest.raises(ValueError, match="as many values as fields"):
        tar.plain_members("a", ("b", "c"), [b""], 10)


def columns_of(fields: list[str], held: list[Payloads], first: int):
    return [(field, first + i, of.addresses, of.sizes) for i, (field, of) in enumerate(zip(fields, held))]


@settings(deadline=None)
@given(data=st.data(), fields=FIELDS, row=st.integers(0, 2), most=st.sampled_from([0, 3000, 1 << 20]))
def test_rows_are_packed_as_their_samples(tar, data, fields, row, most):
    keys = data.draw(st.lists(NAMES | st.sampled_from(["", "a.b", "a__b", "a/b"]), min_size=3, max_size=6))
    values = [[data.draw(st.none() | SIZES.map(bytes)) for _ in keys] for _ in fields]
    payloads = [*map(Payloads.joined, values)]
    columns = columns_of(fields, payloads, 70_000)
    native, python = (
        tar.plain_rows(keys, columns, row, len(keys), 1000, most, 1 << 40, 7) for kernel in ("native", "python")
    )
    assert native == python
    end, packed, arrays = native
    expected = b""
    for at in range(row, end):
        held = {field: of[at] for field, of in zip(fields, values) if of[at] is not None}
        expected += b"".join(pack_members(keys[at], tuple(held), list(held.values())))
    assert packed == expected
    members = [member for member in read_whole(packed + END) if packed]
    sizes, offsets = (struct.unpack(f"<{len(members)}Q", arrays[at]) for at in (3, 2))
    assert list(sizes) == [len(member.data) for member in members]
    assert [packed[at - (1 << 40) :][:size] for at, size in zip(offsets, sizes)] == [each.data for each in members]
    assert [int.from_bytes(arrays[0][at : at + 4], "little") for at in range(0, len(arrays[0]), 4)] == [
        7 + at - row for at in range(row, end) for of in values if of[at] is not None
    ]
    if end == row:
        held = {field: of[row] for field, of in zip(fields, values) if of[row] is not None}
        reads_back = all(split_name(f"{keys[row]}.{field}") == (keys[row], field) for field in held)
        is_usual = "." not in keys[row] and "__" not in keys[row] and reads_back
        assert not is_usual or tar.plain_members(keys[row], tuple(held), list(held.values()), 1000) is None


def test_any_rows_are_packed_up_to_the_first_that_is_not_plain(tar):
    keys = ["a", "b/c", "_d", "k" * 95, "k" * 96, "", "a.b", "a__b", "a/", "é", "a\0"]
    for seed in range(rounds(600)):
        rng = random.Random(seed)
        held = [rng.choice(keys[: rng.choice([4, 4, 4, 11])]) for _ in range(rng.randrange(1, 7))]
        fields = rng.sample(["jpg", "cls", "f" * 4, "é"], rng.choice([0, 1, 1, 2, 4]) if seed % 9 else 3)
        limit, most = rng.choice([600, 1000]), rng.choice([0, 1024, 2048, 3000, 1 << 20])
        values = [[rng.choice([None, b"", b"1", bytes(512), bytes(599), bytes(600)]) for _ in held] for _ in fields]
        payloads = [*map(Payloads.joined, values)]
        columns = columns_of(fields, payloads, 65_535)
        row = rng.randrange(len(held))
        end, packed, _ = tar.plain_rows(held, columns, row, rng.randint(row, len(held)), limit, most, 1 << 40, 7)
        assert len(packed) <= most or end == row + 1
        if "é" not in fields:
            sample = [(field, of[row]) for field, of in zip(fields, values) if of[row] is not None]
            names, data = (tuple(field for field, _ in sample), [value for _, value in sample])
            tar.plain_members(held[row], names, data, limit)


def test_columns_that_are_shorter_than_the_rows_are_refused(tar):
    payloads = Payloads.joined([b"data"])
    for addresses, sizes in (payloads.addresses[:0], payloads.sizes), (payloads.addresses, payloads.sizes[:0]):
        with pytest.raises(ValueError, match="as many addresses and sizes"):
            tar.plain_rows(["a"], [("txt", 0, addresses, sizes)], 0, 1, 1000, 1000, 0, 0)
    for row, stop in (-1, 1), (0, 2):
        with pytest.raises(ValueError, match="as many keys as rows"):
            tar.plain_rows(["a"], [], row, stop, 1000, 1000, 0, 0)


def test_a_row_of_a_size_beyond_an_int_of_c_is_not_cut(tar):
    payloads = Payloads.joined([bytes(1000), bytes(1000)])
    columns = [("txt", 0, payloads.addresses, payloads.sizes + (1 << 32))]
    assert tar.plain_rows(["a"], columns, 0, 1, 2000, 1 << 20, 0, 0)[:2] == (0, b"")
