"""Scanning headers: the results for any bytes, and for single headers."""

import ctypes
import random
import tarfile

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from soak import rounds
from tar_corpus import Drip, entry, header, pack, pax, read, seal, tarfile_archive
from twins import Pair

from tarshards.kernels import _tar_py
from tarshards.tar.read import AFTER_END, BLOCK, END, MEMBER_LIMIT, Member

PAIRS = [("a.cls", b"7"), ("a.jpg", bytes(range(256)) * 3), ("d/" * 60 + "é.txt", b"\n"), ("e.txt", b"")]
LONG = b"n" * 120
ARCHIVES = [
    pack(PAIRS) + END,
    *(tarfile_archive(PAIRS, format=format)[:12288] for format in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)),
    tarfile_archive(PAIRS[:2], format=tarfile.USTAR_FORMAT)[:4096],
    tarfile_archive(PAIRS, format=tarfile.PAX_FORMAT, mtime=0.5, pax_headers={"comment": "é"})[:14336],
    b"".join(entry(kind=bytes([kind])) for kind in range(256)),
    entry(b"a/b", kind=b"L") + entry(b"c", kind=b"K") + entry(b"data") + END,
    pax(b"path=" + LONG, b"size=3") + entry(b"xyz") + pax(b"comment=1", kind=b"g") + pax(b"mtime=1.5") + entry() + END,
    pax(b"path=a", b"size=5", kind=b"g") + entry(b"12345") + pax(b"GNU.sparse.major=1") + entry() + END,
    pax(b"path=a", b"GNU.sparse.name=b.x", b"GNU.sparse.size=3") + entry() + entry(b"12", kind=b"S", name=b"c.x") + END,
    seal(header(kind=b"S")[:482] + b"\1" + bytes(29)) + bytes(504) + b"\1" + bytes(7 + 512) + entry(b"1") + END,
    pax(b"size=3") + pax(b"path=b") + entry(LONG + b"\0", kind=b"L") + entry(b"123", name=b"") + END,
    entry(b"x" * 600, prefix=b"p" * 155, name=b"n" * 100) + entry(prefix=b"p", magic=b"ustar  \0") + END,
    entry(b"12345", size=b"\x80" + bytes(10) + b"\5") + entry(size=b"\x80" + b"\xff" * 11) + entry(size=b"\xff" * 12),
]
RANDOM = st.binary(max_size=4 * BLOCK)


@st.composite
def buffers(draw):
    """Archives cut and spliced, some of their bytes changed, mostly with the checksum repaired after it."""
    pieces = []
    for _ in range(draw(st.integers(1, 3))):
        piece = draw(st.one_of(st.sampled_from(ARCHIVES), st.sampled_from(ARCHIVES), RANDOM))
        start, stop = draw(st.integers(0, 8)) * BLOCK, draw(st.integers(0, len(piece)))
        pieces.append(piece[start : stop if draw(st.booleans()) else None])
    buffer = bytearray(b"".join(pieces))
    for _ in range(draw(st.integers(0, 4)) if buffer else 0):
        # Mostly in the fields that steer the parser: name, size, checksum, kind, magic, prefix, and any.
        block = draw(st.integers(0, len(buffer) // BLOCK)) * BLOCK
        starts = st.sampled_from([0, 124, 135, 148, 156, 257, 345, 482, 504])
        at = block + draw(st.one_of(starts, st.integers(0, BLOCK - 1)))
        new = draw(
            st.one_of(st.sampled_from([b"\0", b" ", b"7", b"x", b"L", b"\x80", b"/", b"="]), st.binary(max_size=12))
        )
        buffer[at : at + len(new)] = new[: max(0, len(buffer) - at)]
        if draw(st.integers(0, 3)) and block + BLOCK <= len(buffer):
            buffer[block : block + BLOCK] = seal(buffer[block : block + BLOCK])
    return bytes(buffer)


POSITIONS = st.one_of(st.integers(0, 40).map(lambda n: n * BLOCK), st.integers(0, 1 << 62), st.just((1 << 63) - 1))
LIMITS = st.sampled_from([0, 4, 1 << 20, MEMBER_LIMIT, (1 << 63) - 1])


# Bodies that fill their last block: what is read beyond them is read beyond the buffer.
FULL = [
    entry(b"505 path=" + b"p" * 495 + b"\n" + b"1234567", kind=b"x"),
    entry(b"512 path=" + b"p" * 502 + b"\n", kind=b"x"),
    entry(b"513 path=" + b"p" * 503, kind=b"x"),
    entry(b"512 comment" + b"c" * 500 + b"\n", kind=b"x"),
    entry(b"n" * 512, kind=b"L"),
]


@example(buffer=FULL[0], position=0, zeros=0, limit=0)
@example(buffer=FULL[1], position=0, zeros=0, limit=0)
@example(buffer=FULL[2], position=0, zeros=0, limit=0)
@example(buffer=FULL[3], position=0, zeros=0, limit=0)
@example(buffer=FULL[4], position=0, zeros=0, limit=0)
@settings(max_examples=400, deadline=None)
@given(buffer=buffers(), position=st.one_of(st.just(0), POSITIONS), zeros=st.sampled_from([0, 0, 1, 7]), limit=LIMITS)
def test_scan_and_cut_any_buffer(tar, buffer, position, zeros, limit):
    # In a buffer that ends where its memory ends, a sanitizer sees the first byte read too far.
    exact = Pair((ctypes.c_char * len(buffer)).from_buffer_copy(buffer), buffer)
    result = tar.scan(exact, position, zeros, limit)
    assert result == tar.scan(buffer, position, zeros, limit)
    assert [type(part) for part in result] == [list, int, int, int, type(result[4])]
    stopped = tar.scan(buffer, position, zeros, limit, True)
    assert result[0][: len(stopped[0])] == stopped[0]
    assert all(member[4] not in _tar_py.ELSEWHERE for member in stopped[0][:-1])

    whole = [member for member in result[0] if member[3] <= len(buffer)]
    tar.cut(exact, whole, 7, Member)
    if any(not kind for *_, stop, kind in result[0] if stop > len(buffer)):
        with pytest.raises(ValueError, match="lies outside"):
            tar.cut(exact, result[0], 7, Member)

    members, reached, need, _, problem = result
    assert reached >= position
    # Without a problem, reading goes on only with bytes that were not there.
    assert problem or reached + need > len(buffer)
    places = [place for _, header, start, stop, _ in members for place in (header, start, stop)]
    assert places == sorted(places)
    assert all(0 <= stop - start <= limit for _, _, start, stop, _ in members)


SOUND = [
    b"path=a.x",
    b"path=b/",
    b"path=",
    b"path=\xff=\n",
    b"size=3",
    b"size=9" + b"9" * 17,
    b"comment=",
    b"mtime=1.5",
]
SOUND += [b"GNU.sparse.name=e.x", b"GNU.sparse.major=1"]
FAULTY = [
    b"path=c\0d",
    b"size=0x1",
    b"size=",
    b"GNU.sparse.name=f\0",
    b"GNU.volume.offset=7",
    b"linkpath=g",
    b"comment",
]


def any_chain(rng):
    """Up to four extended headers of a member, mostly sound, whose sizes may be wrong, and the member."""
    chain = b""
    for _ in range(rng.randrange(5)):
        kind = rng.choice([b"x", b"x", b"X", b"g", b"L", b"K"])
        if kind in b"LK":
            body = rng.choice([b"long.x", b"long.x\0rest", b"", b"l" * 512])
        else:
            records = rng.choices(SOUND, k=rng.choice([0, 1, 1, 2, 3])) + [rng.choice(FAULTY)] * (rng.random() < 0.1)
            body = bytearray(pax(*records)[BLOCK:].rstrip(b"\0"))
            if body and rng.random() < 0.1:
                at = rng.randrange(len(body))
                body[at : at + rng.randrange(2)] = rng.choice([b"0", b"9", b" ", b"=", b"\n", b"\0", b"99999999"])
        size = len(body) + (rng.choice([-1, 1, 600, 1 << 20]) if rng.random() < 0.1 else 0)
        chain += entry(bytes(body), kind=kind, size=b"%011o\0" % max(size, 0))
    kind = rng.choice([b"0", b"0", b"7", b"S", b"5", b"1", b"M", b"?"])
    member = bytearray(header(name=rng.choice([b"a.x", b"", b"d/"]), kind=kind, size=b"%011o\0" % rng.randrange(600)))
    blocks = rng.choice([0, 0, 1, 3, 2047, 2048]) if kind == b"S" else 0
    member[482] = blocks > 0
    return chain + seal(member) + (bytes(504) + b"\1" + bytes(7)) * (blocks - 1) + bytes(rng.randrange(3) * BLOCK)


def test_any_chain_of_extended_headers(tar):
    for seed in range(rounds(3000)):
        rng = random.Random(seed)
        chain = any_chain(rng) + rng.choice([b"", b"", any_chain(rng)])
        if rng.random() < 0.2:
            chain = chain[: rng.randrange(len(chain))]
        tar.scan(chain, 0, 0, rng.choice([400, MEMBER_LIMIT]), rng.random() < 0.3)


@settings(max_examples=200, deadline=None)
@given(
    buffer=buffers(),
    sizes=st.lists(st.integers(1, 1500), min_size=1, max_size=5),
    end=st.sampled_from(["required", "optional"]),
    concatenated=st.booleans(),
)
def test_how_the_bytes_come_changes_nothing(buffer, sizes, end, concatenated):
    options = {"end": end, "concatenated": concatenated}
    together = Drip(buffer, [len(buffer) + 1])  # which cannot seek either, so that links are errors in both
    whole, dripped = read(together, **options), read(Drip(buffer, sizes), **options)
    assert (whole[:2], whole.joined) == (dripped[:2], dripped.joined)
    assert (whole.error is None) == (dripped.error is None)
    if whole.error:
        assert whole.error.offset == dripped.error.offset
        assert whole.error.offset is None or 0 <= whole.error.offset <= len(buffer)


@pytest.fixture
def scan(tar):
    """Both for a whole buffer."""
    return lambda buffer, limit=MEMBER_LIMIT: tar.scan(buffer, 0, 0, limit)


def problem_of(result):
    return result[1], result[4]


def test_a_member_is_its_name_its_places_and_its_kind(scan):
    assert scan(entry(b"123") + entry(name=b"d/", kind=b"5") + END) == (
        [("a.txt", 0, 512, 515, ""), ("d/", 1024, 1536, 1536, "directory")],
        2560,
        512,
        2,
        None,
    )


def test_data_and_position_may_lie_beyond_the_buffer(scan):
    assert scan(header(size=b"00000002001\0")) == ([("a.txt", 0, 512, 1537, "")], 2048, 512, 0, None)


def test_an_incomplete_chain_says_how_much_it_needs(scan):
    archive = pax(b"path=" + b"p" * 600) + entry(b"1")
    assert [scan(archive[: n * BLOCK])[:3] for n in range(4)] == [
        ([], 0, 512),
        ([], 0, 1536),
        ([], 0, 1536),
        ([], 0, 2048),
    ]
    assert scan(archive)[0][0][1:] == (0, 2048, 2049, "")


@pytest.mark.parametrize(
    ("size", "value"),
    [
        (b"00000000013\0", 11),
        (b"000000000013", 11),
        (b"         13 ", 11),
        (b"13\0junk", 11),
        (b"13 junk", 11),
        (b"777777777777", (1 << 36) - 1),
        (b"\x80" + bytes(10) + b"\x0b", 11),
        (b"\x80" + bytes(3) + b"\x1f" + b"\xff" * 7, (1 << 61) - 1),
    ],
)
def test_sizes_are_octal_or_base_256(scan, size, value):
    [(_, _, start, stop, _)] = scan(header(size=size), limit=1 << 62)[0]
    assert stop - start == value


@pytest.mark.parametrize(
    "size",
    [
        bytes(12),
        b" " * 12,
        b"-0000000001\0",
        b"8\0",
        b"1x\0",
        b"0x10\0",
        b"\t1\0",
        b"\x80" + bytes(3) + b"\x20" + bytes(7),
        b"\x80\1" + bytes(10),
        b"\xff" * 12,
        b"\x81" + bytes(11),
    ],
)
def test_a_size_that_is_none_is_refused(scan, size):
    assert problem_of(scan(header(size=size.ljust(12, b"\0")), limit=1 << 62)) == (0, "a size that is not a number")


def test_a_checksum_may_add_signed_bytes_as_old_programs_did(scan):
    block = bytearray(header(name=b"\xe9.txt"))
    block[148:154] = b"%06o" % (int(block[148:154], 8) - 256)
    assert scan(bytes(block))[0][0][0] == "\udce9.txt"


def test_a_checksum_that_is_no_number_is_wrong_even_where_the_signed_sum_is_minus_one(scan):
    block = bytearray(header())
    block[148:156] = b" " * 8
    excess = sum(block) + 1
    block[400 : 400 + excess // 128] = b"\x80" * (excess // 128)
    block[500] = -(excess % 128) % 256
    assert sum(byte - (byte & 0x80) * 2 for byte in block) == -1
    assert problem_of(scan(bytes(block))) == (0, "bad header checksum")


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"name": b"n" * 100}, "n" * 100),
        ({"name": b"n" * 100, "prefix": b"p" * 155}, "p" * 155 + "/" + "n" * 100),
        ({"name": b"n" * 100, "prefix": b"p" * 155 + b"padding"}, "p" * 155 + "/" + "n" * 100),
        ({"name": b"n", "prefix": b"p"}, "p/n"),
        ({"name": b"n", "prefix": b"p", "magic": b"ustar  \0"}, "n"),
        ({"name": b"n", "prefix": b"p", "magic": b""}, "n"),
        ({"name": b"n\0junk"}, "n"),
        ({"name": "é".encode()}, "é"),
        ({"name": b"\xe9"}, "\udce9"),
    ],
)
def test_the_name_stands_in_the_header(scan, fields, name):
    assert scan(header(**fields))[0][0][0] == name


@pytest.mark.parametrize(
    ("chain", "name"),
    [
        (entry(b"long\0", kind=b"L"), "long"),
        (entry(b"long", kind=b"L"), "long"),
        (entry(b"link\0", kind=b"K"), "a.txt"),
        (entry(b"link\0", kind=b"K") + entry(b"long\0", kind=b"L"), "long"),
        (entry(b"first\0", kind=b"L") + entry(b"second\0", kind=b"L"), "first"),
        (pax(b"path=pax"), "pax"),
        (pax(b"path=pax", kind=b"X"), "pax"),
        (pax(b"path=one", b"path=two"), "two"),
        (pax(b"path=one") + pax(b"path=two"), "two"),
        (pax(b"path=pax") + entry(b"long\0", kind=b"L"), "pax"),
        (entry(b"long\0", kind=b"L") + pax(b"path=pax"), "pax"),
        (pax(b"path=a=b\nc"), "a=b\nc"),
        (pax(b"hdrcharset=BINARY", b"path=\xe9"), "\udce9"),
        (pax(b"comment=1", kind=b"g") + pax(b"path=pax"), "pax"),
        (pax(b"path=pax") + pax(b"comment=1", kind=b"g"), "pax"),
        (pax(b"mtime=1.5"), "a.txt"),
        (pax(), "a.txt"),
    ],
)
def test_extended_headers_name_the_next_member_alone(scan, chain, name):
    first, second = scan(chain + header() + header(name=b"b.txt"))[0]
    assert (first[0], second[0]) == (name, "b.txt")
    assert second[1] == len(chain) + BLOCK


def test_a_member_begins_with_its_first_extended_header_but_not_with_a_global_one(scan):
    glob, chain = pax(b"comment=1", kind=b"g"), pax(b"path=a") + entry(b"b\0", kind=b"K")
    assert scan(glob + chain + header())[0][0][1] == len(glob)
    assert scan(glob)[1] == len(glob)


def test_a_pax_size_counts_rather_than_the_header_s(scan):
    archive = pax(b"size=3") + header(size=b"%011o\0" % 0) + b"abc" + bytes(509) + header(name=b"b.txt")
    assert scan(archive)[0] == [("a.txt", 0, 1536, 1539, ""), ("b.txt", 2048, 2560, 2560, "")]


@pytest.mark.parametrize(
    ("kind", "word"),
    [
        (b"\0", ""),
        (b"0", ""),
        (b"7", ""),
        (b"1", "hard link"),
        (b"2", "symbolic link"),
        (b"3", "character device"),
        (b"4", "block device"),
        (b"5", "directory"),
        (b"6", "fifo"),
        (b"D", "directory"),
        (b"V", "volume label"),
    ],
)
def test_kinds(scan, kind, word):
    [(_, _, start, stop, found)] = scan(header(kind=kind, size=b"%011o\0" % 5))[0]
    assert found == word
    assert stop - start == (5 if kind in b"\x0007D" else 0)


@pytest.mark.parametrize(("kind", "word"), [(b"\0", "directory"), (b"0", "directory"), (b"7", "")])
def test_a_name_with_a_slash_at_its_end_is_a_directory_s(scan, kind, word):
    assert scan(header(name=b"d/", kind=kind))[0][0][4] == word


CONTINUED = "continued members of multi-volume archives are not supported"


@pytest.mark.parametrize(
    ("archive", "problem"),
    [
        (header(kind=b"M"), CONTINUED),
        (header(kind=b"?"), "a member of an unknown type"),
        (header(kind=b"N"), "a member of an unknown type"),
        (header(name=b""), "a member without a name"),
        (header(size=b"%011o\0" % 101), "a member larger than the limit"),
        (header(kind=b"x", size=b"x"), "an extended header with a bad size"),
        (header(kind=b"L", size=b"%011o\0" % ((1 << 20) + 1)), "an extended header with a bad size"),
    ],
)
def test_what_is_wrong_with_a_header(scan, archive, problem):
    first = header(name=b"first")
    assert problem_of(scan(first + archive, limit=100)) == (BLOCK, problem)
    # The place named is that of the bad block, not of the first one of its member.
    chain = pax(b"mtime=1")
    assert problem_of(scan(chain + archive, limit=100)) == (len(chain), problem)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"11 path=ab", "bad pax header"),
        (b"12 path=ab\n", "bad pax header"),
        (b"10 path=ab\n", "bad pax header"),
        (b"11 path=ab ", "bad pax header"),
        (b"x1 path=ab\n", "bad pax header"),
        (b" 11 path=a\n", "bad pax header"),
        (b"11path=abc\n", "bad pax header"),
        (b"0 \n", "bad pax header"),
        (b"2 \n", "bad pax header"),
        (b"3 \n", "bad pax header"),
        (b"11", "bad pax header"),
        (b"11 ", "bad pax header"),
        (b"99999999 path=ab\n", "bad pax header"),
        (b"9" * 30 + b" path=ab\n", "bad pax header"),
        (b"11 path ab\n", "bad pax header"),
        (b"12 path=a\0b\n", "bad pax header"),
        (b"8 size=\n", "bad pax header"),
        (b"10 size=-1\n", "bad pax header"),
        (b"11 size=1.5\n", "bad pax header"),
        (b"27 size=1000000000000000000\n", "bad pax header"),
        (b"11 path=ab\n\0", "bad pax header"),
        (b"23 GNU.volume.offset=9\n", CONTINUED),
        (b"23 GNU.sparse.name=a\0b\n", "bad pax header"),
        (b"8 path=\n", "a member without a name"),
    ],
)
def test_what_is_wrong_with_a_pax_header(scan, body, problem):
    first, extended = header(name=b"first"), entry(body, kind=b"x")
    result = scan(first + extended + header())
    assert result[4] == problem
    assert result[1] == BLOCK + (len(extended) if "name" in problem else 0)
    assert len(result[0]) == 1


@pytest.mark.parametrize("size", [10, 11, 13])
def test_a_pax_record_ends_with_its_header_s_data(scan, size):
    # The padding is no part of it, whatever it holds.
    extended = entry(b"12 path=abc\n1 ", kind=b"x", size=b"%011o\0" % size)
    assert problem_of(scan(extended + header())) == (0, "bad pax header")


@pytest.mark.parametrize("record", [b"path=a", b"size=1"])
def test_a_global_name_or_size_is_refused(scan, record):
    assert scan(pax(record, kind=b"g"))[4] == _tar_py.GLOBAL_PLACE


def test_extended_headers_without_a_member_are_refused(scan):
    assert problem_of(scan(pax(b"path=a") + END)) == (1024, "an extended header without a member")
    assert problem_of(scan(pax(b"comment=a", kind=b"g") + END)) == (2048, None)


def test_extended_headers_of_one_member_are_bounded_together(scan):
    half = entry(bytes(1 << 19), kind=b"K")
    assert problem_of(scan(half + header())) == (len(half) + BLOCK, None)
    assert problem_of(scan(half + half + header())) == (len(half), "an extended header with a bad size")


def test_a_block_of_zeros_ends_an_archive(scan):
    assert [scan(bytes(length))[3] for length in (0, BLOCK, 9 * BLOCK + 1)] == [0, 1, 9]
    for more in header(), header(kind=b"5"), header(kind=b"?"), pax(b"comment=1", kind=b"g"), pax(b"path=a"):
        assert scan(bytes(BLOCK) + more) == ([], BLOCK, BLOCK, 1, AFTER_END)
        assert len(scan(header() + bytes(2 * BLOCK) + more)[0]) == 1
    assert problem_of(scan(bytes(BLOCK) + b"junk".ljust(BLOCK))) == (BLOCK, "junk after the end of the archive")


def test_negative_arguments_are_refused(tar):
    for position, zeros, limit in [(-1, 0, 0), (0, -1, 0), (0, 0, -1)]:
        with pytest.raises(ValueError, match="must not be negative"):
            tar.scan(b"", position, zeros, limit)
