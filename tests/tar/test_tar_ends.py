"""Ends of archives, concatenated archives, and files that are not archives."""

import gzip
import io
import re
import struct
import zipfile
import zlib

import pytest
from tar_corpus import Drip, entry, header, pack, read, read_whole

from tarshards.tar.read import BLOCK, END, MAX_END, NO_END, most_end, not_an_archive

ONE, TWO = pack([("a.txt", b"1")]), pack([("b.txt", b"2" * 600)])


def assert_has_both(archive, **options):
    members = read_whole(archive, **options)
    assert [(member.name, len(member.data)) for member in members] == [("a.txt", 1), ("b.txt", 600)]
    assert [archive[member.offset : member.offset + 5] for member in members] == [b"a.txt", b"b.txt"]


@pytest.mark.parametrize("zeros", [BLOCK, 2 * BLOCK - 1, 2 * BLOCK, 10240, 1 << 16, MAX_END])
def test_zeros_must_stand_at_the_end(zeros):
    assert_has_both(ONE + TWO + bytes(zeros))
    assert_has_both(ONE + TWO + bytes(zeros), concatenated=True)


@pytest.mark.parametrize(
    ("archive", "place", "joined"),
    [
        (ONE + bytes(BLOCK) + TWO + END, len(ONE), 1),
        (ONE + END + TWO + END, len(ONE), 1),
        (ONE + bytes(1 << 20) + TWO + END * 500, len(ONE), 1),
        (bytes(BLOCK) + ONE + TWO + END, 0, 1),
        (bytes(BLOCK) + ONE + END * 9 + TWO + END, 0, 2),
    ],
)
@pytest.mark.parametrize("end", ["required", "optional"])
def test_members_after_zeros_are_an_error_unless_archives_were_concatenated(archive, place, joined, end):
    reading = read(archive, url="a.tar", end=end)
    assert [member.name for member in reading.members] == ["a.txt"] * (place > 0)
    behind = archive.index(b"a" if place == 0 else b"b.txt")
    assert str(reading.error) == (
        f"a.tar: offset {behind}: members after the end of the archive at offset {place}: the archive was damaged, "
        "or archives were concatenated; `--ignore-zeros` (concatenated=True) reads them as one"
    )
    assert_has_both(archive, end=end, concatenated=True)
    assert read(archive, end=end, concatenated=True).joined == joined


@pytest.mark.parametrize("more", [{"kind": b"5"}, {"kind": b"?"}, {"kind": b"g"}, {"kind": b"S"}])
def test_any_header_after_zeros_is_an_error(more):
    assert "members after the end" in read(ONE + END + entry(**more) + END).error.reason


def test_more_zeros_at_the_end_than_writers_leave_are_an_error():
    archive = ONE + bytes(MAX_END + 1)
    reading = read(archive)
    assert (len(reading.members), reading.error.offset) == (1, len(ONE))
    assert reading.error.reason == (
        f"{MAX_END + 1} bytes of zeros at the end, more than the {MAX_END} that writers leave: "
        "members were overwritten, or the file is padded; `--ignore-zeros` (concatenated=True) reads it"
    )
    assert read(archive, concatenated=True).error is None
    junk = read(archive + bytes(511) + b"j", concatenated=True)
    assert junk.error.reason == "junk after the end of the archive"


@pytest.mark.parametrize("record", [1 << 17, 1 << 18, 1 << 19, 1 << 20])
@pytest.mark.parametrize("records", [1, 3])
def test_zeros_that_fill_the_last_record_of_an_archive_are_its_end(record, records):
    """`tar -b2048` writes records of 1 MiB; in an archive that its record does not divide, members were overwritten."""
    size = records * record - record - BLOCK
    archive = header(b"a.bin", size=b"%011o" % size) + bytes(size + -size % BLOCK) if size > 0 else ONE
    whole = archive + bytes(records * record - len(archive))
    assert len(whole) - len(archive) > MAX_END
    assert most_end(len(whole)) == record + BLOCK or records == 1
    for stream in (whole, Drip(whole)):
        assert read(stream).error is None
    for other in (whole[:-BLOCK], whole + bytes(BLOCK)):
        assert "of zeros at the end, more than the" in read(other).error.reason
        assert read(other, concatenated=True).error is None
    huge = ONE + bytes((1 << 21) - len(ONE))
    assert read(huge).error.reason.startswith(
        f"{len(huge) - len(ONE)} bytes of zeros at the end, more than the 1049088"
    )


def pixz_index(start, *names):
    """The index of pixz 1.0.7's write.c, appended to a tar of *start* bytes."""
    entries = [(name, 512 * number) for number, name in enumerate(names)] + [(b"", start)]
    return bytes.fromhex("a64c322ed614aedb") + b"".join(name + b"\0" + struct.pack("<Q", at) for name, at in entries)


@pytest.mark.parametrize(
    "names", [[], [b"a.txt"], [b"a.txt", b"n" * 300, b"x" * 3000], [b"m%d" % i for i in range(40_000)]]
)
@pytest.mark.parametrize("concatenated", [False, True])
def test_the_index_that_pixz_appends_is_passed_over(names, concatenated):
    archive = ONE + END
    index = pixz_index(len(archive), *names)
    for stream in (archive + index, Drip(archive + index)) if len(index) < 1 << 16 else (archive + index,):
        reading = read(stream, concatenated=concatenated)
        assert ([member.name for member in reading.members], reading.error) == (["a.txt"], None)
    for other in (index[:-1], index + b"\0", index + ONE, index + archive + index, b"\0" + index[1:], index[:8]):
        error = read(archive + other, concatenated=concatenated).error
        assert (error.reason, error.offset) == ("junk after the end of the archive", len(archive))
    assert read(ONE + index).error is not None, "an archive without an end"


@pytest.mark.parametrize("zeros", [2 * BLOCK + 1, 10240 - BLOCK, 10240 + BLOCK, 1 << 20])
@pytest.mark.parametrize("options", [{}, {"concatenated": True}, {"end": "optional"}])
def test_a_shard_of_zeros_is_an_error(zeros, options):
    error = read(bytes(zeros), url="a.tar", **options).error
    assert (
        str(error) == f"a.tar: offset 0: only zeros, {zeros} bytes: overwritten, or an empty archive of another program"
    )
    assert read(Drip(bytes(zeros)), url="a.tar", **options).error is not None
    assert read(END, **options) == ([], {}, None, 0)
    assert read(bytes(10240), **options) == ([], {}, None, 0), "GNU tar's and tarfile's archive without members"
    assert read(Drip(bytes(10240)), **options) == ([], {}, None, 0)


@pytest.mark.parametrize(("archive", "options"), [(ONE + TWO, {}), (ONE + END + TWO, {"concatenated": True})])
def test_an_archive_without_an_end_is_truncated_unless_the_end_is_optional(archive, options):
    reading = read(archive, **options)
    assert (len(reading.members), reading.error.offset) == (2, len(archive))
    assert reading.error.reason == NO_END
    assert NO_END.endswith('`--end optional` (end="optional") accepts it')
    assert read(archive, end="optional", **options).error is None
    assert read(archive, end="typing error", **options).error is not None


@pytest.mark.parametrize("zeros", [1, 100, BLOCK - 1])
@pytest.mark.parametrize("end", ["required", "optional"])
def test_less_than_a_block_of_zeros_is_no_end(zeros, end):
    assert read(ONE + bytes(zeros), end=end).error.offset == len(ONE)


@pytest.mark.parametrize("junk", [b"j", b"junk" * 100, b"junk" * 128, b"junk" * 1000, b"\0" * 511 + b"j"])
@pytest.mark.parametrize("end", ["required", "optional"])
def test_junk_after_the_end_is_refused(junk, end):
    reading = read(ONE + END + junk, end=end)
    assert len(reading.members) == 1
    assert (reading.error.reason, reading.error.offset) == ("junk after the end of the archive", len(ONE + END))


def test_junk_between_members_is_refused():
    reading = read(ONE + b"junk".ljust(BLOCK) + TWO + END)
    assert len(reading.members) == 1
    assert (reading.error.reason, reading.error.offset) == ("bad header checksum", len(ONE))


@pytest.mark.parametrize("end", ["required", "optional"])
def test_an_empty_input_is_no_archive(end):
    assert str(read(b"", url="a.tar", end=end).error) == "a.tar: empty input, not a tar archive"


def zip_of(data):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("a.txt", data)
    return buffer.getvalue()


@pytest.mark.parametrize("size", [1, 100, 511, 512, 10000])
def test_what_is_no_archive_is_named_so(size):
    text = b"Nothing is ever lost silently.\n" * (size // 31 + 1)
    for junk in (text[:size], zip_of(text)[:size], gzip.compress(bytes(size))):
        error = read(junk, url="a.tar", end="optional").error
        assert re.fullmatch("a.tar: offset 0: .*not a tar archive", str(error))


def test_an_archive_that_begins_badly_says_what_is_bad():
    assert read(header(kind=b"M") + END).error.reason == "continued members of multi-volume archives are not supported"
    assert read(entry(b"12345") + END, limit=4).error.reason == "a member larger than the limit"


@pytest.mark.parametrize(
    ("head", "kind"),
    [
        (b"\n <!DOCTYPE HTML>", "an HTML page"),
        (b"PK\3\4" + bytes(BLOCK), "a zip file ('pipe:bsdtar -cf - @FILE' reads it)"),
        (b'{"wids_version": 1}', "JSON (the name of a manifest ends in .json; `tarimport` takes JSON lines)"),
        (b"a-0.tar\na-1.tar\n", "a list of names, to be read as @FILE"),
        (b"A-0.TAR", "a list of names, to be read as @FILE"),
        (b"LRZI\0\6", "an lrzip file ('pipe:bsdtar -cf - @FILE' reads it)"),
        (b"7kSt\xa01\x83\xd3", "a zpaq file"),
        (zlib.compress(b"a"), "zlib data ('pipe:pigz -dcz FILE' reads it)"),
        (zlib.compress(b"a", 1), "zlib data ('pipe:pigz -dcz FILE' reads it)"),
        (b"!<arch>\n", "an ar archive ('pipe:bsdtar -cf - @FILE' reads it)"),
    ],
)
def test_another_file_is_recognized(head, kind):
    assert not_an_archive(head) == f"{kind}, not a tar archive"


@pytest.mark.parametrize("url", ["a.tar.br", "http://host/A.TAR.BR?key=..."])
@pytest.mark.parametrize("size", [10, 5000])
def test_a_format_without_a_magic_is_recognized_by_its_name(url, size):
    error = read(b"\xf1\xf8" * size, url=url).error
    assert error.reason == "brotli data ('pipe:brotli -dc FILE' reads it) by its name, not a tar archive"
    assert read(pack([("a.txt", b"1")]) + END, url=url).error is None
    assert not_an_archive(b"\xf1" * 600, "a.tar.deflate") == (
        "data of deflate without a header by its name, not a tar archive"
    )
    assert not_an_archive(b"\xf1" * 600, "br") == "not a tar archive"


def test_only_the_first_line_and_block_tell_what_a_file_is():
    for head in (b"", b"a.txt\nb.tar\n", b"a.tar\0", bytes(BLOCK - 1)):
        assert not_an_archive(head) == "shorter than a header, not a tar archive"
    for head in (b" " * BLOCK + b"{", b"x" * BLOCK + b".tar\n", bytes(BLOCK)):
        assert not_an_archive(head) == "not a tar archive"
