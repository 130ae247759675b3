"""Members with their headers, members that are left or read elsewhere, ends, names in errors."""

import io
import tarfile

import pytest
from tar_corpus import Drip, Skips, entry, header, pack, pax, seal, tarfile_archive

from tarshards.errors import SampleError, TarError
from tarshards.storage.streams import PIECE
from tarshards.tar.read import (
    BLOCK,
    CUT,
    END,
    LARGE,
    KeptBytes,
    Member,
    Taker,
    kept_headers,
    pack_header,
    pack_members,
    read_archive,
    read_members,
    scan_through,
    scan_whole,
    with_headers,
)

PAIRS = [("a.txt", b"1"), ("n" * 120, b"22"), ("b.bin", b"b" * 2 * PIECE), ("c.bin", b"c" * 3 * PIECE), ("d.txt", b"4")]
LINK = header(name=b"a.lnk", kind=b"1")
LINK = seal(LINK[:157] + b"a.txt" + LINK[162:])
MIXED = pack(PAIRS) + entry(name=b"e/", kind=b"5") + LINK + END


@pytest.mark.parametrize("opener", [io.BytesIO, Drip])
@pytest.mark.parametrize("select", [None, lambda name: name in ("n" * 120, "c.bin", "d.txt")])
def test_members_with_their_headers(opener, select):
    archive = pack(PAIRS) + entry(name=b"e/", kind=b"5") + END
    plain = list(read_members(opener(archive), select=select))
    kept = list(read_members(opener(archive), select=select, keep_headers=True))
    assert kept == plain
    assert {type(member.data) for member in plain} == {bytes}
    for name, data, offset in kept:
        assert type(data) is KeptBytes
        assert data.headers == pack_header(name, len(data))
        assert archive[offset:].startswith(data.headers + data)


def test_links_have_their_own_headers():
    *_, link = read_members(io.BytesIO(MIXED), keep_headers=True)
    assert link == ("a.lnk", b"1", MIXED.index(LINK))
    assert link.data.headers == LINK


def test_headers_of_what_is_not_read():
    class Range:
        pass

    left = Range()
    assert with_headers(left, b"head") is left
    assert left.headers == b"head"


PLACE = ("path", "size", "linkpath", "hdrcharset")


def info_of(headers):
    """The place and the metadata that Python's tarfile reads in the headers of a member."""
    with tarfile.open(fileobj=io.BytesIO(headers + END)) as archive:
        info = archive.next()
    records = {name: value for name, value in info.pax_headers.items() if name not in PLACE}
    return (info.name, info.size, info.type, info.linkname), (
        *(info.mode, info.uid, info.gid, info.uname, info.gname, info.mtime),
        records,
    )


def headers_of(name, **fields):
    """The headers that Python's tarfile makes for a member with metadata of its own."""
    info = tarfile.TarInfo(name)
    info.mode, info.uid, info.gid, info.uname, info.gname, info.mtime = 0o604, 7, 8, "alice", "staff", 12345.5
    info.pax_headers = {"TEST.note": "\u00e9"}
    for field, value in fields.items():
        setattr(info, field, value)
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


@pytest.mark.parametrize("name", ["a.txt", "d/" * 60 + "\u00e9.txt"])
def test_headers_with_the_right_name_and_size_are_kept_and_else_their_metadata(name):
    headers = headers_of(name, size=5)
    assert kept_headers(headers, name, 5) is headers
    for other, size in ((name, 6), ("b.txt", 5), ("\udce9" * 90, 1 << 40)):
        changed = kept_headers(headers, other, size)
        place, metadata = info_of(changed)
        assert place == (other, size, tarfile.REGTYPE, "")
        assert metadata == info_of(headers)[1]
        assert kept_headers(changed, other, size) is changed


@pytest.mark.parametrize("kind", [tarfile.LNKTYPE, tarfile.SYMTYPE])
def test_the_headers_of_a_link_become_those_of_a_file(kind):
    headers = headers_of("b.txt", type=kind, linkname="a" * 150)
    place, metadata = info_of(kept_headers(headers, "b.txt", 3))
    assert place == ("b.txt", 3, tarfile.REGTYPE, "")
    assert metadata == info_of(headers)[1]


def test_the_headers_of_a_sparse_member_become_those_of_a_file():
    sparse = (b"GNU.sparse.major=1", b"GNU.sparse.minor=0", b"GNU.sparse.name=a.x", b"GNU.sparse.realsize=9")
    headers = pax(*sparse, b"TEST.note=1") + header(name=b"GNUSparseFile.0/a.x", size=b"00000001000\0")
    place, metadata = info_of(kept_headers(headers, "a.x", 9))
    assert place == ("a.x", 9, tarfile.REGTYPE, "")
    assert metadata[-1] == {"TEST.note": "1"}


def test_values_with_headers_are_packed_with_these():
    headers = headers_of("a.txt", size=1)
    assert pack_members("a", ("txt",), [with_headers(b"1", headers)]) == [headers, b"1", bytes(511)]
    changed, *_ = pack_members("b", ("txt",), [with_headers(b"12", headers)])
    assert changed == kept_headers(headers, "b.txt", 2)
    plain = pack_header("a.txt", 1)
    assert pack_members("a", ("txt",), [with_headers(b"1", plain)]) == [plain, b"1", bytes(511)]
    assert pack_members("b", ("txt",), [with_headers(b"12", plain)])[0] == pack_header("b.txt", 2)


def test_headers_that_tarfile_cannot_read_are_named():
    with pytest.raises(SampleError, match=r"^a\\n\.txt: headers whose metadata cannot be kept: ") as raised:
        kept_headers(pax(b"mtime=1") + b"?" * BLOCK, "a\n.txt", 1)
    assert raised.value.key == r"a\n.txt"


class Listing(Taker):
    """Takes the members of an archive, each in a buffer or in parts, and notes its end."""

    is_wanted = True

    def wants(self, name):
        return self.is_wanted

    def take(self, buffer, position, zeros, base):
        members, reached = scan_whole(buffer, position, zeros, self.limit)
        return [(name, buffer[start:end], base + header) for name, header, start, end, kind in members if not kind], (
            reached
        )

    def add(self, name, data, offset, headers):
        yield name, data, offset

    def refuse(self, name, reason, offset):
        yield name, reason, offset

    def complete(self):
        yield "complete"


EXPECTED = [(name, data, MIXED.index(pack_header(name, len(data)))) for name, data in PAIRS]


def test_large_members_may_be_left():
    asked = []

    def unread(name, offset, size):
        asked.append((name, MIXED[offset : offset + size]))
        return None if name == "b.bin" else ("left", size)

    items = list(read_archive(io.BytesIO(MIXED), Listing(), unread=unread))
    assert asked == PAIRS[2:4]
    left = ("c.bin", ("left", 3 * PIECE), EXPECTED[3][2])
    assert items == [*EXPECTED[:3], left, EXPECTED[4], ("a.lnk", b"1", MIXED.index(LINK))]


def test_links_to_large_members_may_be_left():
    """The target itself is in the buffer, and need not be left."""
    target = b"x" * LARGE
    archive = pack([("a.txt", target)]) + LINK + END
    left = list(read_archive(io.BytesIO(archive), Listing(), unread=lambda name, offset, size: (name, offset, size)))
    assert [data for _, data, _ in left] == [target, ("a.lnk", BLOCK, LARGE)]


def test_a_member_that_is_left_and_cut_is_truncated():
    archive = io.BytesIO(MIXED[: EXPECTED[3][2] + PIECE])
    with pytest.raises(TarError, match="truncated in this member") as raised:
        list(read_archive(archive, Listing("a.tar"), unread=lambda *_: "left"))
    assert (raised.value.url, raised.value.offset) == ("a.tar", EXPECTED[3][2])


@pytest.mark.parametrize(
    ("opener", "is_wanted", "options"),
    [
        (io.BytesIO, True, {"unread": lambda *_: "left"}),
        *((opener, is_wanted, {}) for opener in (io.BytesIO, Drip) for is_wanted in (False, True)),
    ],
)
def test_the_offset_of_a_member_that_is_cut_far_behind(opener, is_wanted, options):
    large, small = pack([("a.bin", bytes(2 * PIECE))]), pack([("b.txt", b"b")])
    whole = (large + small) * 3
    listing = Listing()
    listing.is_wanted = is_wanted
    with pytest.raises(TarError) as raised:
        list(read_archive(opener(whole + large[:LARGE]), listing, **options))
    assert str(raised.value) == f"offset {len(whole)}: truncated in this member"


def test_links_of_streams_that_cannot_seek_are_read_elsewhere():
    asked = []

    def read_back(offset, size):
        asked.append((offset, size))
        return MIXED[offset : offset + size]

    assert list(read_archive(Drip(MIXED), Listing(), read_back=read_back))[-1] == ("a.lnk", b"1", MIXED.index(LINK))
    assert asked
    unread = list(read_archive(Drip(MIXED), Listing()))[-1]
    assert unread[1].startswith("hard link to 'a.txt', ")


@pytest.mark.parametrize("before", [0, 3])
def test_links_of_a_stream_that_does_not_begin_at_the_archive(before):
    stream = io.BytesIO(b"?" * before + MIXED)
    stream.seek(before)
    assert list(read_archive(stream, Listing()))[-1] == ("a.lnk", b"1", MIXED.index(LINK))


ONE = pack([("a.txt", b"1")])


@pytest.mark.parametrize("opener", [io.BytesIO, Drip])
@pytest.mark.parametrize(
    ("zeros", "is_end"),
    [(BLOCK, False), (2 * BLOCK, True), (3 * BLOCK, False), (20 * BLOCK - len(ONE), True), (20 * BLOCK, False)],
)
def test_members_after_an_end_leave_complete_what_was_open(zeros, is_end, opener):
    """Two blocks of zeros end an archive, or zeros up to a whole record; others may have overwritten members."""
    found = []
    with pytest.raises(TarError, match="members after the end"):
        found.extend(read_archive(opener(ONE + bytes(zeros) + ONE + END), Listing()))
    assert found == [("a.txt", b"1", 0), *["complete"] * is_end]


@pytest.mark.parametrize("size", [1, 3 * PIECE + 1])
@pytest.mark.parametrize("left", [0, 100, 510, 511])
def test_padding_that_is_cut_is_an_end_where_that_is_optional(size, left):
    """Go writes the padding of a member with the next header, or with the end."""
    archive = pack([("a.bin", b"a" * size)])
    archive = archive[: len(archive) - 511 + left]
    with pytest.raises(TarError, match="truncated: no block of zeros at the end of the archive; `--end optional`"):
        list(read_members(io.BytesIO(archive)))
    assert [member.data for member in read_members(io.BytesIO(archive), end="optional")] == [b"a" * size]
    with pytest.raises(TarError, match="truncated in this member"):
        list(read_members(io.BytesIO(archive[: -left - 1]), end="optional"))


@pytest.mark.parametrize("before", [b"", pack([("a.txt", b"")])])
def test_a_header_without_the_next_is_truncated(before):
    with pytest.raises(TarError) as raised:
        list(read_members(io.BytesIO(before + pax(b"mtime=1")[:BLOCK])))
    assert str(raised.value) == f"offset {len(before)}: truncated in a header or its padding"


class Recorded(io.BytesIO):
    """Keeps what was read."""

    def __init__(self, data):
        super().__init__(data)
        self.chunks = []

    def read(self, size=-1):
        self.chunks.append(super().read(size))
        return self.chunks[-1]


def test_large_members_are_read_at_once_and_not_copied():
    """With what is between two of them, once the reader knows how much that is."""
    large, small = bytes(2 * PIECE), pack([("b.txt", b"b" * BLOCK)])
    stream = Recorded((pack([("a.bin", large)]) + small) * 8 + END)
    members = list(read_members(stream))[::2][3:]
    assert [any(data is chunk for chunk in stream.chunks) for _, data, _ in members] == [True] * 5
    sizes = [len(chunk) for chunk in stream.chunks]
    first = sizes.index(len(large))
    assert sizes[first : first + 8] == [len(large), len(small) + BLOCK] * 4


def test_small_members_after_a_large_one_are_read_many_at_once():
    stream = Recorded(pack([("a.bin", bytes(PIECE)), *[("b.txt", bytes(BLOCK))] * 4096]) + END)
    assert len(list(read_members(stream))) == 4097
    assert len(stream.chunks) < 25


def test_without_a_ledger_nothing_is_counted():
    folder = entry(name=b"e/", kind=b"5") + entry(b"x" * PIECE, name=b"f/", kind=b"D")
    archive = folder + ONE + END + folder + ONE + END
    members = list(read_members(io.BytesIO(archive), concatenated=True))
    assert members == [("a.txt", b"1", archive.index(ONE)), ("a.txt", b"1", archive.rindex(ONE))]


def test_a_link_that_is_not_selected_is_counted():
    skips = Skips()
    assert [name for name, *_ in read_members(io.BytesIO(MIXED), select="d.txt".__eq__, ledger=skips)] == ["d.txt"]
    assert skips == {"directory": 1, "hard link": 1}


def test_a_link_to_a_directory_is_counted_as_a_link():
    skips = Skips()
    archive = entry(name=b"a.txt/", kind=b"5") + LINK + END
    assert list(read_members(io.BytesIO(archive), ledger=skips)) == []
    assert skips == {"directory": 1, "hard link": 1}


def test_what_is_no_stream_is_refused():
    message = r"^read_members takes a stream of bytes, such as open_shard\(url\), not str$"
    with pytest.raises(TypeError, match=message):
        next(read_members("a.tar"))


def test_an_archive_is_named_by_its_stream_or_url():
    class Named(io.BytesIO):
        name = "s.tar"

    for options, url in (({}, "s.tar"), ({"url": "u.tar"}, "u.tar")):
        for archive in (
            LINK + END,
            ONE[:-1],
            ONE + CUT,
            ONE + END + ONE,
            ONE + END * 99,
            ONE + b"?" * BLOCK,
            ONE + END + b"?",
        ):
            with pytest.raises(TarError) as raised:
                list(read_members(Named(archive), **options))
            assert raised.value.url == url
    Named.name = 3  # a descriptor
    with pytest.raises(TarError) as raised:
        list(read_members(Named(LINK + END)))
    assert raised.value.url is None


def test_what_is_scanned_through_goes_over_ends():
    archive = ONE + END + pack([("b.txt", b"22")])
    members, position, need, zeros, problem = scan_through(archive + bytes(BLOCK) + ONE + bytes(2 * BLOCK), 0, 100)
    assert [name for name, *_ in members] == ["a.txt", "b.txt", "a.txt"]
    assert members[1][1:] == (len(ONE + END), len(ONE + END) + BLOCK, len(ONE + END) + BLOCK + 2, "")
    assert (position, need, zeros, problem) == (len(archive) + BLOCK + len(ONE) + 2 * BLOCK, BLOCK, 2, None)
    assert scan_through(ONE + END + pack([("b.txt", b"22")]), 0, 1)[4] == "a member larger than the limit"
    assert scan_through(ONE, 1, 100)[0] == members[:1]


def test_what_is_scanned_whole_stops_before_links_and_cut_members():
    archive = ONE + LINK + ONE
    members, reached = scan_whole(archive, 0, 0, 100)
    link = ("a.lnk", len(ONE), len(ONE) + BLOCK, len(ONE) + BLOCK, "hard link")
    assert members == [("a.txt", 0, BLOCK, BLOCK + 1, "")]
    assert reached == (len(ONE + LINK), BLOCK, 0, None, link)
    members, reached = scan_whole(archive, len(ONE + LINK), 0, 100)
    assert (len(members), reached) == (1, (len(archive), BLOCK, 0, None, None))
    assert scan_whole(ONE[: BLOCK + 1], 0, 0, 100) == (
        [("a.txt", 0, BLOCK, BLOCK + 1, "")],
        (len(ONE), BLOCK, 0, None, None),
    )
    members, reached = scan_whole(ONE[:BLOCK], 0, 0, 100)
    assert (members, reached) == ([], (len(ONE), BLOCK, 0, None, ("a.txt", 0, BLOCK, BLOCK + 1, "")))
    assert scan_whole(archive, 0, 0, 0)[1][3] == "a member larger than the limit"
    assert scan_whole(END, 0, 0, 0) == ([], (len(END), BLOCK, 2, None, None))


@pytest.mark.parametrize("format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_a_member_has_all_its_headers(format):
    archive = tarfile_archive([("n" * 120, b"1")], format=format)
    [member] = read_members(io.BytesIO(archive), keep_headers=True)
    assert member == Member("n" * 120, b"1", 0)
    assert member.data.headers == archive[: archive.index(b"1\0", 3 * BLOCK)]


class Small(io.BytesIO):
    """A file whose large members do not fit into memory."""

    def read(self, size=-1):
        if size > 300_000 and self.tell():
            raise MemoryError
        return super().read(min(size, 1 << 16))


def test_a_member_that_does_not_fit_into_memory_is_named():
    archive = Small(pack([("a.txt", b"x"), ("b.bin", bytes(900_000))]) + END)
    members = read_members(archive, url="u.tar")
    assert next(members).name == "a.txt"
    with pytest.raises(MemoryError, match=r"^u\.tar: offset 1024: b\.bin, 900,000 bytes, does not fit into memory$"):
        next(members)
