"""Where an archive ends, where several follow one another, and what is no archive at all."""

import gzip
import io
import re
import zipfile

import pytest
from tar_corpus import entry, header, pack, read, read_whole

from tarshards.tar.read import BLOCK, END

pytestmark = pytest.mark.usefixtures("twin")

ONE, TWO = pack([("a.txt", b"1")]), pack([("b.txt", b"2" * 600)])


@pytest.mark.parametrize(
    "archive",
    [
        ONE + TWO + END,
        ONE + TWO + bytes(BLOCK),
        ONE + TWO + END * 20,
        ONE + TWO + bytes(BLOCK + 1),
        ONE + TWO + bytes(2 * BLOCK - 1),
        ONE + bytes(BLOCK) + TWO + END,
        ONE + END + TWO + END,
        bytes(BLOCK) + ONE + END * 9 + TWO + END,
    ],
)
def test_zeros_may_stand_between_members_and_must_stand_at_the_end(archive):
    assert [(member.name, len(member.data)) for member in read_whole(archive)] == [("a.txt", 1), ("b.txt", 600)]
    assert [archive[member.offset : member.offset + 5] for member in read_whole(archive)] == [b"a.txt", b"b.txt"]


@pytest.mark.parametrize("archive", [ONE + TWO, ONE + END + TWO])
def test_an_archive_without_an_end_is_truncated_unless_the_end_is_optional(archive):
    reading = read(archive)
    assert (len(reading.members), reading.error.offset) == (2, len(archive))
    assert reading.error.reason == "truncated: no block of zeros at the end of the archive"
    assert read(archive, end="optional").error is None
    assert read(archive, end="typing error").error is not None


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
    assert read(header(kind=b"S") + END).error.reason == "sparse members are not supported"
    assert read(entry(b"12345") + END, limit=4).error.reason == "a member larger than the limit"
