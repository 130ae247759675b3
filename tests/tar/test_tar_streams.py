"""Streams of every kind give the same members, in bounded memory, whatever a header claims."""

import io
import os
import socket
import threading
import tracemalloc
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tar_corpus import Drip, entry, header, pack, pax, read, read_whole

from tarshards.storage.streams import PIECE, keep_memory
from tarshards.tar.read import BLOCK, END, MAX_READ, pack_header, padding, read_members


def numbered(sizes):
    """Members of these sizes, each of other bytes."""
    return [(f"{i}.bin", (b"%d," % i * (size // 2 + 1))[:size]) for i, size in enumerate(sizes)]


def assert_reads_back(archive, pairs, stream):
    members = read_whole(stream)
    assert [(member.name, member.data) for member in members] == pairs
    for name, data, offset in members:
        start = archive.index(b"\0", offset)
        assert archive[offset:start] == name.encode()
        assert archive[offset + BLOCK : offset + BLOCK + len(data)] == data


@contextmanager
def pipe(archive, step):
    """A pipe into which another thread writes *step* bytes at a time."""
    reading, writing = os.pipe()

    def feed():
        with open(writing, "wb", buffering=0) as file:
            for at in range(0, len(archive), step):
                file.write(archive[at : at + step])

    thread = threading.Thread(target=feed)
    thread.start()
    with open(reading, "rb", buffering=0) as stream:
        yield stream
    thread.join()


@contextmanager
def connection(archive, step):
    """A socket into which another thread writes *step* bytes at a time."""
    near, far = socket.socketpair()

    def feed():
        with far:
            for at in range(0, len(archive), step):
                far.sendall(archive[at : at + step])

    thread = threading.Thread(target=feed)
    thread.start()
    with near, near.makefile("rb", buffering=0) as stream:
        yield stream
    thread.join()


STREAMS = {"pipe": pipe, "socket": connection}
SIZES = [0, 1, 511, 512, 513, 100_000, 3, PIECE + 1, 2, PIECE, 5, 5]


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("step", [100, 1000, 1 << 20])
def test_pipes_and_sockets(kind, step):
    pairs = numbered(SIZES if step > 100 else SIZES[:7])
    archive = pack(pairs) + END
    with STREAMS[kind](archive, step) as stream:
        assert_reads_back(archive, pairs, stream)


@pytest.mark.parametrize("kind", STREAMS)
def test_a_pipe_that_breaks_off_raises(kind):
    archive = pack(numbered(SIZES[:7]))
    with STREAMS[kind](archive[:-1], 1000) as stream:
        assert "truncated" in str(read(stream, url="pipe:").error)
    with STREAMS[kind](archive[:-1], 1000) as stream:
        assert read(stream).error.url is None  # a descriptor's number is no name


@pytest.mark.parametrize("buffering", [0, -1])
def test_files(tmp_path, buffering):
    pairs = numbered(SIZES)
    path = tmp_path / "a.tar"
    path.write_bytes(pack(pairs) + END)
    with open(path, "rb", buffering=buffering) as stream:
        assert_reads_back(path.read_bytes(), pairs, stream)
    path.write_bytes(b"")
    with open(path, "rb", buffering=buffering) as stream:
        assert str(read(stream).error).startswith(f"{path}: ")


def test_a_stream_is_read_from_where_it_stands():
    stream = io.BytesIO(b"before" + pack([("a.txt", b"1")]) + END)
    stream.seek(6)
    assert read_whole(stream) == [("a.txt", b"1", 0)]


@pytest.mark.parametrize("archive", [b"", END, pack([("a.txt", b"1")]), pack([("a.txt", b"1")]) + END])
def test_a_non_blocking_stream_without_bytes_is_not_at_its_end(archive):
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    with open(reading, "rb", buffering=0) as stream, open(writing, "wb", buffering=0) as feed:
        feed.write(archive)
        error = read(stream, url="a.tar", end="optional").error
    assert error.reason == "the stream is non-blocking and has no bytes yet"
    assert (error.url, error.offset) == ("a.tar", len(archive))


class Pausing(Drip):
    """A non-blocking stream that cannot seek, and has no more bytes yet after *data*."""

    def read(self, size):
        return super().read(size) or None


@pytest.mark.parametrize("select", [None, "a.txt".__eq__])
def test_a_non_blocking_stream_without_bytes_inside_a_member(select):
    stream = Pausing(pack([("a.txt", b"1"), ("b.bin", bytes(2 * PIECE))])[:-PIECE], (PIECE,))
    reading = read(stream, url="a.tar", select=select)
    assert reading.members == [("a.txt", b"1", 0)]
    assert str(reading.error) == "a.tar: offset 1024: the stream is non-blocking and has no bytes yet"


@pytest.mark.parametrize("size", [PIECE - 1, PIECE, PIECE + 1, 3 * PIECE, PIECE - BLOCK, PIECE - 2 * BLOCK])
def test_members_around_and_beyond_the_size_of_the_buffer(size):
    pairs = numbered([5, size, 0, size, size, *range(12), size, 1])
    archive = pack(pairs) + END
    assert_reads_back(archive, pairs, io.BytesIO(archive))
    assert_reads_back(archive, pairs, Drip(archive, (PIECE - 7, 3, PIECE, 70_001)))


SMALL = 2048
MANY_SIZES = st.lists(
    st.one_of(
        st.integers(0, 40), st.integers(0, 5 * SMALL), st.sampled_from([SMALL - 1, SMALL, SMALL + 1, SMALL // 4, BLOCK])
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(sizes=MANY_SIZES, steps=st.lists(st.integers(1, 3000), min_size=1, max_size=4), picked=st.integers(1, 3))
def test_small_and_large_members_in_any_order(sizes, steps, picked):
    pairs = numbered(sizes)
    archive = pack(pairs) + END
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tarshards.tar.read.PIECE", SMALL)
        patch.setattr("tarshards.tar.read.MAX_READ", SMALL + 100)
        for stream in (io.BytesIO(archive), Drip(archive, steps)):
            assert_reads_back(archive, pairs, stream)
        everything = read_whole(archive)
        names = {name for name, _ in pairs[::picked]}
        for stream in (io.BytesIO(archive), Drip(archive, steps)):
            assert read_whole(stream, select=names.__contains__) == everything[::picked]


@pytest.mark.parametrize("size", [10, PIECE - 1, 3 * PIECE])
@pytest.mark.parametrize("opener", [io.BytesIO, Drip])
@pytest.mark.parametrize("select", [None, "a.txt".__eq__])
def test_the_data_of_what_is_no_regular_file_is_passed_over_and_counted_once(size, opener, select):
    folders = entry(b"." * size, name=b"d/", kind=b"D") + entry(b"." * size, name=b"e/")
    archive = pack([("a.txt", b"1")]) + folders + pack([("a.txt", b"2")]) + END
    reading = read(opener(archive), select=select)
    assert [member.data for member in reading.members] == [b"1", b"2"]
    assert (reading.skipped, reading.error) == ({"directory": 2}, None)


def test_select_sees_the_name_of_every_regular_file_once():
    archive = pack([("a.txt", b"1"), ("b.txt", bytes(PIECE))]) + entry(name=b"d/", kind=b"5") + pack([("c", b"")]) + END
    seen = []
    assert read_whole(archive, select=seen.append) == []
    assert seen == ["a.txt", "b.txt", "c"]


HUGE = 10 << 30


@pytest.fixture
def huge(tmp_path):
    """An archive with a member of 10 GiB, nearly all of it a hole, between two small ones."""
    path = tmp_path / "huge.tar"
    with open(path, "wb") as file:
        file.write(pack([("a.txt", b"1")]) + pack_header("huge.bin", HUGE))
        file.seek(HUGE, 1)
        file.write(pack([("b.txt", b"2")]) + END)
    return path


@contextmanager
def little_memory(bytes_at_most):
    keep_memory()  # allocates once a process what it frees at once
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < bytes_at_most
    finally:
        tracemalloc.stop()


def not_huge(name):
    return name != "huge.bin"


def bytes_read():
    """How many bytes this process has asked the system for."""
    with open("/proc/self/io") as counts:
        return int(counts.readline().removeprefix("rchar: "))


@pytest.mark.parametrize("buffering", [0, -1])
def test_a_huge_member_of_a_file_is_passed_over_at_once(huge, buffering):
    before = bytes_read()
    with little_memory(10 << 20), open(huge, "rb", buffering=buffering) as stream:
        members = read_whole(stream, select=not_huge)
    chain = len(pack([("a.txt", b"1")]))
    beyond = chain + len(pack_header("huge.bin", HUGE)) + HUGE
    assert members == [("a.txt", b"1", 0), ("b.txt", b"2", beyond)]
    assert bytes_read() - before < 1 << 20


@pytest.mark.parametrize("end", ["required", "optional"])
@pytest.mark.parametrize("length", [HUGE // 2, HUGE, 5000])
def test_a_huge_member_that_is_cut_raises_although_it_is_passed_over(huge, length, end):
    os.truncate(huge, length)
    with little_memory(10 << 20), open(huge, "rb", buffering=0) as stream:
        reading = read(stream, select=not_huge, end=end)
    assert (len(reading.members), reading.error.offset) == (1, 1024)
    assert reading.error.reason == "truncated in this member"


class Fabricated(io.RawIOBase):
    """A stream that cannot seek: *before*, then *zeros* zero bytes, then *after*."""

    def __init__(self, before, zeros, after):
        self.before, self.zeros, self.after = io.BytesIO(before), zeros, io.BytesIO(after)
        self.nothing = bytes(1 << 16)

    def read(self, size=-1):
        assert 0 < size <= MAX_READ
        if data := self.before.read(size):
            return data
        if self.zeros:
            data = self.nothing[: min(size, self.zeros)]
            self.zeros -= len(data)
            return data
        return self.after.read(size)


def test_a_huge_member_of_a_pipe_is_passed_over_without_being_held():
    size = 2 << 30
    before, after = pack([("a.txt", b"1")]) + pack_header("huge.bin", size), pack([("b.txt", b"2")]) + END
    with little_memory(10 << 20):
        members = read_whole(Fabricated(before, size, after), select=not_huge)
    assert members == [("a.txt", b"1", 0), ("b.txt", b"2", len(before) + size)]


@pytest.mark.parametrize("end", ["required", "optional"])
def test_a_huge_member_of_a_pipe_that_is_cut_raises(end):
    before = pack([("a.txt", b"1")]) + pack_header("huge.bin", HUGE)
    with little_memory(10 << 20):
        reading = read(Fabricated(before, 100 << 20, b""), select=not_huge, end=end)
    assert (len(reading.members), reading.error.offset) == (1, 1024)


@pytest.mark.parametrize("select", [None, not_huge])
@pytest.mark.parametrize("opener", [io.BytesIO, Drip])
def test_a_header_that_lies_about_a_huge_size_raises_without_taking_the_memory(opener, select):
    archive = pack([("a.txt", b"1")]) + pack_header("huge.bin", HUGE) + b"but this is all"
    with little_memory(10 << 20):
        reading = read(opener(archive), select=select)
    assert (len(reading.members), reading.error.offset) == (1, 1024)


def test_a_lying_header_of_a_file_costs_no_more_than_one_read(tmp_path):
    path = tmp_path / "a.tar"
    path.write_bytes(pack_header("huge.bin", HUGE) + b"but this is all")
    with little_memory(MAX_READ + (10 << 20)), open(path, "rb", buffering=0) as stream:
        assert read(stream).error.reason == "truncated in this member"


def test_extended_headers_without_end_do_not_fill_the_memory():
    stream = Drip(pax(b"mtime=1") * 20_000, (1 << 16,))
    with little_memory(10 << 20):
        assert read(stream).error.reason == "an extended header with a bad size"


@pytest.mark.parametrize("select", [None, not_huge])
def test_the_limit_is_the_largest_size_of_a_member(select):
    archive = pack(numbered([100, 101, 5])) + END
    assert len(read_whole(archive, limit=101)) == 3
    reading = read(archive, limit=100, select=select)
    assert [len(member.data) for member in reading.members] == [100]
    assert (reading.error.offset, reading.error.reason) == (1024, "a member larger than the limit")
    assert read(header(size=b"\x80" + bytes(6) + b"\x04" + bytes(3) + b"\x01")).error.reason.endswith("the limit")


def test_breaking_off_leaves_the_stream_open_after_what_was_read():
    archive = pack(numbered([10] * 5)) + END
    stream = io.BytesIO(archive)
    members = read_members(stream)
    assert next(members).name == "0.bin"
    members.close()
    assert not stream.closed


def test_the_last_padding_may_come_in_pieces():
    pairs = numbered([PIECE + 1, 1])
    archive = pack(pairs) + END
    assert padding(PIECE + 1) == 511
    assert_reads_back(archive, pairs, Drip(archive, (PIECE, 1, 2, 3, 5)))
