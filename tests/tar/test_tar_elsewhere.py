"""Links and sparse members: targets of links, and faults of maps."""

import io
import tarfile
from contextlib import suppress

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tar_corpus import Drip, entry, header, pack, pax, read, read_whole, seal

from tarshards.errors import TarError
from tarshards.storage import compression
from tarshards.storage.streams import PIECE
from tarshards.tar.elsewhere import SpecialMembers, UnresolvedError, expand
from tarshards.tar.read import BLOCK, END, read_members

NAMES = ["a", "b.x", "d/a", "d/b.x", "./a", "d/e/c", "d", "../a", "d/../a"]  # no absolute ones, which tarfile joins
TYPES = [tarfile.REGTYPE, tarfile.REGTYPE, tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE]
FORMATS = [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]


def archive_of(members, format=tarfile.PAX_FORMAT):
    """Write an archive of (name, type, link target); the content of a file is its number."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=format) as archive:
        for number, (name, kind, link) in enumerate(members):
            info = tarfile.TarInfo(name)
            data = b"%d" % number if kind == tarfile.REGTYPE else b""
            info.type, info.linkname, info.size = kind, link, len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def by_tarfile(archive):
    """The content of each file and link according to tarfile, or None."""
    found = []
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
        for info in opened:
            if info.isreg() or info.islnk() or info.issym():
                data = None
                with suppress(KeyError, RecursionError):
                    if (file := opened.extractfile(info)) is not None:
                        data = file.read()
                found.append((info.name, data))
    return found


def by_us(archive):
    """The same as we read it."""
    contents = SpecialMembers(lambda offset, size: archive[offset : offset + size])
    found = []
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
        for info in opened:
            if info.isreg() or info.islnk() or info.issym():
                data = None
                with suppress(UnresolvedError):
                    steps = contents.find(info.offset)
                    data = contents.read(steps) if steps else None
                found.append((info.name, data))
    return found


@example([("a", tarfile.REGTYPE, ""), ("a", tarfile.LNKTYPE, "a")], tarfile.PAX_FORMAT)
@example([("a", tarfile.SYMTYPE, "b.x"), ("b.x", tarfile.SYMTYPE, "a")], tarfile.PAX_FORMAT)
@settings(max_examples=250, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(TYPES), st.sampled_from(NAMES)), max_size=7),
    st.sampled_from(FORMATS),
)
def test_links_lead_where_tarfile_follows_them(members, format):
    archive = archive_of(members, format)
    assert by_us(archive) == by_tarfile(archive)


def test_an_absolute_link_leads_to_a_member_of_that_name():
    members = [("/s/a", tarfile.REGTYPE, ""), ("a", tarfile.REGTYPE, ""), ("d/b", tarfile.SYMTYPE, "/s/a")]
    assert by_us(archive_of(members))[-1] == ("d/b", b"0")


LONG = "n" * 150 + ".txt"


@pytest.mark.parametrize("format", FORMATS[1:])
@pytest.mark.parametrize("kind", [tarfile.LNKTYPE, tarfile.SYMTYPE])
def test_targets_with_long_names_are_found(format, kind):
    archive = archive_of([(LONG, tarfile.REGTYPE, ""), ("é" * 80 + ".txt", kind, LONG)], format)
    assert [member.data for member in read_whole(archive)] == [b"0", b"0"]


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ([("b", tarfile.LNKTYPE, "a")], "hard link to 'a', which is not in the archive"),
        (
            [("b", tarfile.LNKTYPE, "a"), ("a", tarfile.REGTYPE, "")],
            "hard link to 'a', which is not in the archive before it",
        ),
        ([("b", tarfile.SYMTYPE, "../a")], "symbolic link to '../a', which is not in the archive"),
        ([("b", tarfile.SYMTYPE, "/etc/passwd")], "symbolic link to '/etc/passwd', which is not in the archive"),
        ([("b", tarfile.SYMTYPE, "b")], "symbolic link to 'b', which leads back to it"),
        ([("p", tarfile.FIFOTYPE, ""), ("b", tarfile.SYMTYPE, "p")], "a link to a fifo"),
    ],
)
def test_why_a_link_has_no_content_is_said(members, reason):
    error = read(archive_of(members), url="a.tar").error
    assert error.reason == f"'b': {reason}"


def test_links_lead_to_members_of_later_archives_too():
    """Without *concatenated* the later archive is an error, after the members before it."""
    archives = archive_of([("b", tarfile.SYMTYPE, "a")]) + archive_of(
        [("", tarfile.DIRTYPE, ""), ("a", tarfile.REGTYPE, "")]
    )
    expected = [("b", b"1"), ("a", b"1")]
    assert [(member.name, member.data) for member in read(archives, concatenated=True).members] == expected
    reading = read(archives)
    assert [(member.name, member.data) for member in reading.members] == expected[:1]
    assert "members after the end of the archive" in reading.error.reason


def test_links_of_streams_that_cannot_go_back_name_the_cure():
    archive = archive_of([("a", tarfile.REGTYPE, ""), ("b", tarfile.LNKTYPE, "a")])
    reading = read(Drip(archive))
    assert [member.name for member in reading.members] == ["a"]
    assert "`tar --hard-dereference --dereference`" in reading.error.reason
    assert reading.error.offset == 2 * BLOCK


def test_a_large_target_is_read_by_its_place():
    data = bytes(range(256)) * 4096
    archive = pack([("a.bin", data), ("b.bin", b"x" * 100_000)]) + entry(name=b"c.bin", kind=b"1") + END
    archive = archive.replace(header(name=b"c.bin", kind=b"1"), link(b"c.bin", b"a.bin"))
    assert [member.data == data for member in read_whole(archive)] == [True, False, True]


def link(name, target):
    """Return the header of a hard link."""
    block = bytearray(header(name=name, kind=b"1"))
    block[157 : 157 + len(target)] = target
    return seal(block)


def sparse_1_0(lines, data, size=b"100"):
    """Return a sparse member as PAX 1.0 has it, with these lines as its map."""
    text = b"".join(line + b"\n" for line in lines)
    body = text + bytes(-len(text) % BLOCK) + data
    return pax(
        b"GNU.sparse.major=1", b"GNU.sparse.minor=0", b"GNU.sparse.realsize=" + size, b"GNU.sparse.name=a.x"
    ) + entry(body, name=b"GNUSparseFile.0/a.x")


def test_a_sparse_member_with_less_stored_is_read_with_an_option(monkeypatch):
    monkeypatch.setattr(compression, "MAX_HELD", 1 << 20)
    archive = sparse_1_0([b"1", b"10", b"3"], b"abc", size=b"%d" % (1 << 21)) + END
    with pytest.raises(TarError, match="of which 515 are stored: more than 1 MiB, and more than 200 times"):
        list(read_members(io.BytesIO(archive)))
    [member] = read_members(io.BytesIO(archive), max_ratio=1e4)
    assert member.data == bytes(10) + b"abc" + bytes((1 << 21) - 13)


def test_a_sparse_member_has_its_real_name_and_content():
    archive = sparse_1_0([b"2", b"10", b"3", b"100", b"0"], b"abc") + END
    assert [(name, data) for name, data, _ in read_whole(archive)] == [("a.x", bytes(10) + b"abc" + bytes(87))]


def test_a_sparse_member_is_the_same_wherever_a_read_ends():
    archive = sparse_1_0([b"2", b"10", b"3", b"100", b"0"], b"abc") + pack([("b.x", b"1")]) + END
    expected = read_whole(archive)
    assert [member.name for member in expected] == ["a.x", "b.x"]
    for first in range(1, len(archive), 50):
        assert read_whole(Drip(archive, (first, PIECE))) == expected


DAMAGED = "a sparse member whose map is damaged"


@pytest.mark.parametrize(
    ("archive", "reason"),
    [
        (sparse_1_0([b"1", b"10", b"3"], b"abcd"), "a sparse member with more data than its map says"),
        (sparse_1_0([b"1", b"10", b"3"], b"ab"), DAMAGED),
        (sparse_1_0([b"1", b"98", b"3"], b"abc"), DAMAGED),
        (sparse_1_0([b"2", b"10", b"3", b"12", b"1"], b"abcd"), DAMAGED),
        (sparse_1_0([b"2", b"10", b"3", b"5", b"1"], b"abcd"), DAMAGED),
        (sparse_1_0([b"9", b"10", b"3"], b"abc"), DAMAGED),
        (sparse_1_0([b"-1"], b""), DAMAGED),
        (sparse_1_0([b"x"], b""), DAMAGED),
        (sparse_1_0([b"9" * 30], b""), DAMAGED),
        (sparse_1_0([b"0"], b"", size=b"x"), DAMAGED),
        (sparse_1_0([b"0"], b"", size=b"99999999999999"), "a sparse member larger than the limit"),
        (
            sparse_1_0([b"0"], b"", size=b"9999999999"),
            "a sparse member of 9999999999 bytes, of which 512 are stored: more than 256 MiB, and more than 200 times "
            "the compressed size, would be held in memory (max_ratio=, --max-ratio)",
        ),
        (pax(b"GNU.sparse.map=1,2,3", b"GNU.sparse.size=9") + entry(b"12", name=b"a.x"), DAMAGED),
        (pax(b"GNU.sparse.map=1,y", b"GNU.sparse.size=9") + entry(b"12", name=b"a.x"), DAMAGED),
        (pax(b"GNU.sparse.offset=1", b"GNU.sparse.size=9") + entry(b"12", name=b"a.x"), DAMAGED),
        (pax(b"GNU.sparse.major=1") + entry(b"12", name=b"a.x"), DAMAGED),
        (entry(b"12", name=b"a.x", kind=b"S"), DAMAGED),
    ],
)
def test_what_is_wrong_with_a_sparse_member_is_said(archive, reason):
    reading = read(pack([("0.x", b"1")]) + archive + END, url="a.tar")
    assert reading.error.reason == f"'a.x': {reason}"
    assert reading.error.offset == 2 * BLOCK
    assert [member.name for member in reading.members] == ["0.x"]


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=600), st.binary(max_size=600))
def test_no_map_is_misread_silently(body, stored):
    head = pax(b"GNU.sparse.major=1", b"GNU.sparse.realsize=100") + header()
    with suppress(UnresolvedError):
        assert len(expand(head, body + stored)) == 100
    with suppress(UnresolvedError):
        assert (
            len(expand(pax(b"GNU.sparse.size=50", b"GNU.sparse.map=" + body.hex().encode()) + header(), stored)) == 50
        )


def test_an_old_map_that_has_no_end_in_the_archive_is_truncation():
    block = bytearray(header(name=b"a.x", kind=b"S"))
    block[482] = 1
    error = read(seal(block) + b"\1" * BLOCK, url="a.tar").error
    assert isinstance(error, TarError)
    assert error.reason == "truncated in a header or its padding"
