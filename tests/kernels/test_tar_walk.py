"""Walking through an archive for its samples, from a descriptor or a function, in any pieces."""

import io
import os
import struct
import sys
from contextlib import suppress
from itertools import product

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tar_corpus import Skips, entry, pack, pax
from test_tar_scan import ARCHIVES, LIMITS, buffers

from tarshards.errors import SampleError, TarshardsError
from tarshards.kernels import _tar_py
from tarshards.samples.grouping import group_members
from tarshards.samples.keys import split_name
from tarshards.tar.read import END, MAX_END, MEMBER_LIMIT, read_members

WHOLE = 1 << 30, 1 << 30, 0
NAMES = st.one_of(
    st.tuples(
        st.sampled_from(["a", "b", "é", "a_", "_a", "d.e/a", "d/__a", "__d__/a", "d/", "d/.a", "__", "k" * 40, ""]),
        st.sampled_from([".x", ".Y", ".y", ".x.y", ".", "", "..", ".x__", ".__x__", ".É", ".é", "." + "f" * 33]),
    ).map("".join),
    st.text("ab._/é", max_size=7),
    st.integers(0, 40).map("a.f{}".format),
)


SMALL_ARCHIVES = st.lists(st.tuples(NAMES.filter(bool), st.integers(0, 1500).map(bytes)), max_size=12)


def file_of(content):
    """Return the descriptor of a file in memory."""
    descriptor = os.memfd_create("archive")
    assert os.write(descriptor, content) == len(content)
    return descriptor


def source_of(content, kind):
    return file_of(content) if kind == "file" else lambda offset, size: content[offset : offset + size]


def samples_read(archive, limit, concatenated, counter=None, end="optional"):
    members = read_members(io.BytesIO(archive), limit=limit, concatenated=concatenated, ledger=counter, end=end)
    return list(group_members(members))


def fields_that_came_before(fields, arrays):
    """The numbers of the members whose field their sample has already."""
    pairs = list(
        zip(struct.unpack(f"<{len(arrays[0]) // 4}I", arrays[0]), struct.unpack(f"<{len(arrays[1]) // 2}H", arrays[1]))
    )
    entries = [fields.index(name) for name in ("__key__", "__url__") if name in fields]
    return [number for number, pair in enumerate(pairs) if pair in pairs[:number] or pair[1] in entries]


def samples_in(archive, found):
    """The samples that were found, with their data."""
    keys, fields, (*arrays, _, _), *_ = found
    columns = [struct.unpack(f"<{len(arrays[0]) // 4}{code}", array) for array, code in zip(arrays, "IHQQ")]
    samples = [{"__key__": key, "__url__": ""} for key in keys]
    for sample, field, offset, size in zip(*columns):
        samples[sample][fields[field]] = archive[offset : offset + size]
    return samples


@example(archive=ARCHIVES[0], reads=WHOLE, limit=MEMBER_LIMIT, cut=0, concatenated=False)
@example(archive=ARCHIVES[0] + b"junk", reads=WHOLE, limit=MEMBER_LIMIT, cut=0, concatenated=False)
@example(archive=ARCHIVES[0] * 2, reads=WHOLE, limit=MEMBER_LIMIT, cut=0, concatenated=False)
@example(archive=pack([("a.x", b"")]) + END + ARCHIVES[0], reads=WHOLE, limit=MEMBER_LIMIT, cut=0, concatenated=True)
@example(archive=END + ARCHIVES[0], reads=(1, 600, 0), limit=MEMBER_LIMIT, cut=0, concatenated=True)
@example(archive=ARCHIVES[0] + bytes(MAX_END), reads=WHOLE, limit=MEMBER_LIMIT, cut=0, concatenated=False)
@example(archive=ARCHIVES[0] + bytes(MAX_END), reads=WHOLE, limit=MEMBER_LIMIT, cut=0, concatenated=True)
@example(
    archive=b"".join([ARCHIVES[0], bytes((1 << 17) - len(ARCHIVES[0]))]),
    reads=WHOLE,
    limit=MEMBER_LIMIT,
    cut=0,
    concatenated=False,
)
@example(
    archive=b"".join([ARCHIVES[0], bytes((1 << 17) - len(ARCHIVES[0]))]),
    reads=WHOLE,
    limit=MEMBER_LIMIT,
    cut=1,
    concatenated=False,
)
@example(archive=END + bytes(1), reads=WHOLE, limit=MEMBER_LIMIT, cut=0, concatenated=True)
@example(archive=pack([("a.x", b""), ("a.X", b"")]) + END, reads=WHOLE, limit=MEMBER_LIMIT, cut=0, concatenated=False)
@example(
    archive=pack([("a.__url__", b""), ("b.x", b"")]) + END, reads=WHOLE, limit=MEMBER_LIMIT, cut=0, concatenated=False
)
@example(
    archive=pack([(name, b"") for name in ("b.x__", "__a.y", "__a.x__")]) + END,
    reads=WHOLE,
    limit=1,
    cut=0,
    concatenated=False,
)
@settings(max_examples=200, deadline=None)
@given(
    archive=st.one_of(buffers(), SMALL_ARCHIVES.map(lambda members: pack(members) + END)),
    reads=st.tuples(st.integers(1, 3000), st.integers(1, 4000), st.integers(0, 1000)),
    limit=LIMITS,
    cut=st.sampled_from([0, 0, 0, 1, 512, 1024, 1500, 1536]),
    concatenated=st.booleans(),
)
def test_finds_what_reading_finds_in_any_archive(tar, archive, reads, limit, cut, concatenated):
    archive = archive[: len(archive) - cut]
    options = limit, split_name, concatenated
    result = tar.walk(source_of(archive, "function"), len(archive), reads, *options)
    assert tar.walk(source_of(archive, "function"), len(archive), WHOLE, *options) == result
    descriptor = file_of(archive)
    try:
        for some in (reads, WHOLE):
            assert tar.walk(descriptor, len(archive), some, *options) == result
    finally:
        os.close(descriptor)
    twice = [] if result is None else fields_that_came_before(*result[1:3])
    if result is None:
        with pytest.raises(TarshardsError):
            samples_read(archive, limit, concatenated)
    if result is not None and result[4] == len(archive):  # no zeros
        with pytest.raises(TarshardsError):  # there is no block of zeros, or a member before is faulty
            samples_read(archive, limit, concatenated, end="required")
    if result is None:
        pass
    elif result[2][5]:
        numbers, headers = zip(*struct.iter_unpack("<IQ", result[2][5]))
        scanned = _tar_py.scan(archive, 0, 0, limit)[0]
        special = {header: start for _, header, start, _, kind in scanned if kind in _tar_py.ELSEWHERE}
        offsets = struct.unpack(f"<{len(result[2][2]) // 8}Q", result[2][2])
        assert concatenated or [special[header] for header in headers] == [offsets[number] for number in numbers]
    elif twice or len(set(result[0])) < len(result[0]):  # keys that come back are not looked for
        with pytest.raises(SampleError, match=r"adjacent|duplicate"):
            samples_read(archive, limit, concatenated)
        assert result[2][4] == struct.pack(f"<{len(twice)}I", *twice)
    else:
        assert result[2][4] == b""
        counter = Skips()
        assert samples_in(archive, result) == samples_read(archive, limit, concatenated, counter)
        assert result[3] == 1 + counter.joined
        assert not any(archive[result[4] :])


@pytest.fixture
def walk(tar):
    return tar.walk


@pytest.fixture(params=["file", "function"])
def source(request):
    """Return a function that turns bytes into a source to read from."""
    opened = []

    def make(content):
        opened.append(source_of(content, request.param))
        return opened[-1]

    yield make
    for descriptor in opened:
        if isinstance(descriptor, int):
            os.close(descriptor)


MEMBERS = [("a.x", b"1"), ("a.y", bytes(600)), ("README", b""), ("b.y", b""), ("b.z", b"3")]
ARCHIVE = pack(MEMBERS) + END
FOUND = (
    ["a", "b"],
    ["x", "y", "z"],
    (
        struct.pack("<4I", 0, 0, 1, 1),
        struct.pack("<4H", 0, 1, 1, 2),
        struct.pack("<4Q", 512, 1536, 3584, 4096),
        struct.pack("<4Q", 1, 600, 0, 1),
        b"",
        b"",
    ),
    1,
    len(ARCHIVE) - len(END),
)


def test_what_is_found(walk, source):
    assert walk(source(ARCHIVE), len(ARCHIVE), WHOLE, MEMBER_LIMIT, split_name) == FOUND
    assert walk(source(END), len(END), WHOLE, MEMBER_LIMIT, split_name) == ([], [], (b"",) * 6, 1, 0)


def test_links_and_sparse_members_are_marked(walk, source):
    archive = pack(MEMBERS[:1]) + entry(name=b"a.y", kind=b"1") + entry(name=b"b", kind=b"2")
    archive += pax(b"GNU.sparse.major=1") + entry(b"12", name=b"b.y") + entry(name=b"b.z", kind=b"5") + END
    keys, fields, arrays, archives, end = walk(source(archive), len(archive), WHOLE, MEMBER_LIMIT, split_name)
    assert (keys, fields, archives, end) == (["a", "b"], ["x", "y"], 1, len(archive) - len(END))
    assert arrays[2:4] == (struct.pack("<3Q", 512, 1536, 4096 - 512), struct.pack("<3Q", 1, 0, 2))
    assert list(struct.iter_unpack("<IQ", arrays[5])) == [(1, 1024), (2, 2048)]


@pytest.mark.parametrize("change", [1, 511, 512, 4096])
def test_an_archive_that_is_shorter_than_was_said_is_damaged(walk, source, change):
    size = len(ARCHIVE)
    assert walk(source(ARCHIVE), size + change, WHOLE, MEMBER_LIMIT, split_name) is None
    assert walk(source(ARCHIVE[:-change]), size, WHOLE, MEMBER_LIMIT, split_name) is None


def test_any_rule_may_split(walk, source):
    asked = []

    def split(name):
        asked.append(name)
        return None if name == "README" else (name[0], name[1:])

    found = walk(source(ARCHIVE), len(ARCHIVE), WHOLE, MEMBER_LIMIT, split)
    assert found[:2] == (["a", "b"], [".x", ".y", ".z"])
    assert asked == 2 * [name for name, _ in MEMBERS], "by each"


def test_only_new_fields_and_doubtful_names_are_asked_for(walk, source):
    asked = []

    def split(name):
        asked.append(name)
        return split_name(name)

    archive = pack([(f"{key}.{field}", b"") for key in ("a", "b", "c__d") for field in ("x", "y")]) + END
    assert walk(source(archive), len(archive), WHOLE, MEMBER_LIMIT, split) is not None
    assert asked == 2 * ["a.x", "a.y", "c__d.x"], "by each"


def test_more_fields_than_an_index_holds_are_counted(tar):
    names = tuple(map(str, range(65_538)))
    archive = tar.kernel.plain_members("a", names, len(names) * [b""], 1) + END
    _, fields, arrays, *_ = tar.walk(source_of(archive, "function"), len(archive), WHOLE, MEMBER_LIMIT, split_name)
    assert fields == [*names]
    assert arrays[1][-4:] == struct.pack("<2H", 0, 1)


class Mistake(Exception):
    pass


def fail(*_):
    raise Mistake


def test_exceptions_come_through(walk, source):
    for read, split in [(source(ARCHIVE), fail), (fail, split_name)]:
        with pytest.raises(Mistake):
            walk(read, len(ARCHIVE), WHOLE, MEMBER_LIMIT, split)
    for read in (lambda *_: None, 1 << 100):
        with pytest.raises((TypeError, OverflowError)):
            walk(read, len(ARCHIVE), WHOLE, MEMBER_LIMIT, split_name)
    for parts, one in product((7, ("a",)), (walk.kernel, walk.twin)):
        with pytest.raises((TypeError, ValueError)):
            one(source(ARCHIVE), len(ARCHIVE), WHOLE, MEMBER_LIMIT, lambda name, parts=parts: parts)
    descriptor = file_of(ARCHIVE)
    os.close(descriptor)
    with pytest.raises(OSError, match="Bad file descriptor"):
        walk(descriptor, len(ARCHIVE), WHOLE, MEMBER_LIMIT, split_name)


@pytest.mark.parametrize("parts", ["ab", ("a", b"x"), (1, "x"), ["a", "x"], ("a", "x", "y")])
def test_native_rules_give_pairs_of_text(tar, parts):
    with pytest.raises(TypeError):
        tar.kernel.walk(source_of(ARCHIVE, "function"), len(ARCHIVE), WHOLE, MEMBER_LIMIT, lambda name: parts)


def test_native_walks_keep_nothing(tar):
    walk = tar.kernel.walk
    archives = [
        ARCHIVE,
        ARCHIVE[:-1024],
        ARCHIVE.replace(b"a.y", b"a.x", 1),
        pack([("d.e/a.x", b""), ("b", b"")]) + END,
    ]

    def walk_all():
        for archive, split in product(archives, (split_name, fail, lambda name: ("a",), lambda name: None)):
            for source in (source_of(archive, "function"), fail, lambda *_: None):
                with suppress(Mistake, TypeError):
                    walk(source, len(archive), WHOLE, MEMBER_LIMIT, split)

    walk_all()
    before = sys.getallocatedblocks()
    for _ in range(50):
        walk_all()
    assert sys.getallocatedblocks() < before + 50


@pytest.mark.parametrize(
    ("size", "reads", "limit"),
    [(-1, WHOLE, 0), (9, WHOLE, -1), (9, (0, 1, 0), 0), (9, (1, 1, -1), 0), (9, (1, 1, 1 << 32), 0)],
)
def test_bad_arguments_are_refused(walk, size, reads, limit):
    with pytest.raises(ValueError, match="must not be negative"):
        walk(fail, size, reads, limit, split_name)
