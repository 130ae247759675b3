"""Damage never silently changes or shortens an archive: it raises an error with the offset."""

import gzip
import tarfile
from io import BytesIO

import pytest
from soak import SOAK
from tar_corpus import Drip, blocks, pack, program, read, tarfile_archive, write_files

from tarshards.errors import OpenError, TarError
from tarshards.samples.grouping import group_members
from tarshards.storage.opening import open_shard
from tarshards.tar.read import BLOCK, END, padding, read_members

MASKS = (0x01, 0x20, 0x80, 0xFF)
LONG = "long/" + "n" * 100
SAMPLES = {
    "ours": {"a": ("cls", "jpg", "txt"), LONG + "é": ("cls", "jpg", "txt")},
    "gnu": {"a": ("cls", "jpg"), LONG: ("cls", "jpg")},
    "pax": {"é": ("cls", "jpg"), LONG + "ü": ("cls", "jpg")},
    "tarfile": {"a": ("cls", "jpg"), LONG: ("cls", "jpg")},
}
DATA = {"cls": b"7", "jpg": bytes(range(256)) * 2 + b"!", "txt": b""}


def members_of(name):
    return [(f"{key}.{field}", DATA[field]) for key, fields in SAMPLES[name].items() for field in fields]


@pytest.fixture(scope="module", params=SAMPLES)
def archive(request, tmp_path_factory):
    """An archive of two samples, written by one of four writers."""
    members = members_of(request.param)
    if request.param == "ours":
        return pack(members) + END
    if request.param == "tarfile":
        return trim(tarfile_archive(members, format=tarfile.PAX_FORMAT, mtime=1234567890.25))
    folder = tmp_path_factory.mktemp(request.param)
    write_files(folder, members)
    names = [name for name, _ in members]
    return program("tar")("-c", "-b1", f"--format={request.param}", "-f-", *names, cwd=folder)


def trim(archive):
    """Cut the zeros that fill the last record down to the two blocks of the end."""
    content = [block.offset for block in blocks(archive) if block.role != "end"]
    return archive[: content[-1] + BLOCK + len(END)]


@pytest.fixture(scope="module")
def right(archive):
    """The result of reading the intact archive."""
    reading = read(archive)
    names = {(member.name, member.data) for member in reading.members}
    assert any(names == set(members_of(name)) for name in SAMPLES)
    assert [member.offset for member in reading.members] == member_starts(archive)
    assert reading.error is None
    return reading


def member_starts(archive):
    return sorted({block.chain for block in blocks(archive) if block.role != "end"})


def content_end(archive):
    return min(block.offset for block in blocks(archive) if block.role == "end")


FEW = 7  # bytes from one that is changed, or the last that is left, to the next; a block's 512 are no multiple
STEP = FEW if SOAK == 1 else 1
DELIVERIES = {"whole": lambda data: data, "dripping": Drip}
#: And what only `make soak` does, at length.
EACH = [*DELIVERIES, *[pytest.param(f"{name} at length", marks=pytest.mark.soak) for name in DELIVERIES] * (SOAK > 1)]


def delivered(data, delivery):
    return DELIVERIES[delivery.removesuffix(" at length")](data)


@pytest.mark.soak
@pytest.mark.parametrize("delivery", EACH)
def test_every_truncation_raises_unless_a_block_of_zeros_is_left(archive, right, delivery):
    starts = [*member_starts(archive), content_end(archive)]
    for length in {*range(0, len(archive), FEW if delivery == "dripping" else STEP), *starts}:
        reading = read(delivered(archive[:length], delivery))
        if length >= content_end(archive) + BLOCK:
            assert reading == right
        else:
            assert_raised_in_the_member_that_is_cut(reading, right, length, starts)


@pytest.mark.soak
def test_every_truncation_inside_a_member_raises_even_where_the_end_is_optional(archive, right):
    starts = [*member_starts(archive), content_end(archive)]
    for length in {*range(0, len(archive), STEP), *starts}:
        reading = read(archive[:length], end="optional")
        if length >= content_end(archive) + BLOCK:
            assert reading == right
        elif length in starts[1:]:
            assert reading == (right.members[: starts.index(length)], {}, None, 0)
        elif reading.error is None:  # cut in the padding of a member
            count = len(reading.members)
            assert (reading.members, starts[count]) == (right.members[:count], length + -length % BLOCK)
        else:
            assert_raised_in_the_member_that_is_cut(reading, right, length, starts)


def assert_raised_in_the_member_that_is_cut(reading, right, length, starts):
    assert reading.error is not None, length
    # A member is delivered when its data is there; the padding after it may be cut, and that is the error then.
    data_ends = [start - padding(len(member.data)) for member, start in zip(right.members, starts[1:])]
    assert reading.members == right.members[: sum(data_end <= length for data_end in data_ends)]
    if length == 0:
        assert reading.error.offset is None
    else:
        assert max(start for start in starts if start <= length) <= reading.error.offset <= length


@pytest.mark.soak
def test_no_truncation_delivers_half_a_sample(archive, right):
    samples = list(group_members(right.members))
    for length in range(len(archive)):
        delivered = []
        try:
            for sample in group_members(read_members(BytesIO(archive[:length]))):
                delivered.append(sample)
        except TarError:
            assert delivered == samples[: len(delivered)]
            assert len(delivered) < len(samples)
        else:
            assert delivered == samples


def flips(archive, roles, delivery):
    """Yield the archive with one byte of a block of one of the *roles* changed, for all bytes, or each seventh."""
    step = FEW if delivery == "dripping" else 1
    for block in blocks(archive):
        if block.role in roles:
            for at in range(block.offset, block.offset + BLOCK, step):
                for mask in masks_of(at, delivery):
                    yield block, at, archive[:at] + bytes([archive[at] ^ mask]) + archive[at + 1 :]


def masks_of(at, delivery):
    """Each byte is changed in one of the ways in turn, or at length in all."""
    return MASKS if delivery.endswith("at length") else [MASKS[at % 4]]


@pytest.mark.parametrize("end", ["required", "optional"])
@pytest.mark.parametrize("delivery", EACH)
def test_every_changed_byte_of_a_header_raises_there_or_changes_nothing(archive, right, delivery, end):
    harmless = set()
    for block, at, damaged in flips(archive, ("header", "end"), delivery):
        reading = read(delivered(damaged, delivery), end=end)
        if reading.error is None:
            assert reading == right
            harmless.add(at - block.offset)
        else:
            assert reading.error.offset == block.offset
            assert reading.members == [member for member in right.members if member.offset < block.chain]
    # The checksum alone can change unseen: after its digits nothing counts, and a sum of signed bytes is right too.
    assert harmless <= set(range(148, 156))


@pytest.mark.parametrize("delivery", EACH)
def test_every_changed_byte_of_a_long_name_or_pax_header_changes_at_most_one_name(archive, right, delivery):
    # No checksum covers these blocks. What can be promised: an error in this member, or as many members as ever
    # (a name that now ends in a slash is a directory's, and counted), each with its bytes and its place; and no name
    # but this member's is another. A name that differs within the same length is beyond what the format can show.
    for block, _, damaged in flips(archive, ("x data", "L data"), delivery):
        reading = read(delivered(damaged, delivery))
        others = [member for member in right.members if member.offset != block.chain]
        if reading.error is not None:
            assert block.chain <= reading.error.offset <= len(archive)
            assert reading.members == [member for member in others if member.offset < block.chain]
            continue
        assert [member for member in reading.members if member.offset != block.chain] == others
        changed = [member for member in reading.members if member.offset == block.chain]
        if changed:
            [expected] = [member for member in right.members if member.offset == block.chain]
            assert (changed[0].data, reading.skipped) == (expected.data, {})
        else:
            assert reading.skipped == {"directory": 1}


def test_no_truncation_of_the_compressed_archive_is_taken_for_the_whole(archive, right, tmp_path):
    compressed = gzip.compress(archive, mtime=0)
    path = tmp_path / "a.tar.gz"
    for length in range(len(compressed)):
        path.write_bytes(compressed[:length])
        members = []
        with pytest.raises((OpenError, TarError)):
            read_shard(path, members.append)
        assert members == right.members[: len(members)]
    path.write_bytes(compressed)
    members = []
    read_shard(path, members.append)
    assert members == right.members


def read_shard(path, deliver):
    with open_shard(path) as stream:
        for member in read_members(stream):
            deliver(member)
