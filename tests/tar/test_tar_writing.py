"""GNU tar, bsdtar and Python's tarfile read our archives with equal names and bytes."""

import os
import tarfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tar_corpus import pack, program, read_whole, tarfile_members

from tarshards.errors import SampleError, visible
from tarshards.tar.read import BLOCK, END, LARGE, pack_header, pack_members, padding

# Any bytes that a Unix file system takes for a name, as Python shows them, and any text.
NAMES = st.one_of(
    st.binary(min_size=1, max_size=300).map(os.fsdecode),
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=200),
    st.text("nü/", min_size=90, max_size=260),
    st.text("n/", min_size=98, max_size=102),
).filter(lambda name: "\0" not in name and not name.endswith("/"))
SIZES = st.sampled_from([0, 1, 511, 512, 513, 5000])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("written")


@settings(max_examples=100, deadline=None)
@given(pairs=st.lists(st.tuples(NAMES, SIZES.map(bytes)), max_size=5))
def test_names_and_bytes_read_back_as_they_were_and_by_tarfile_too(folder, pairs):
    archive = pack(pairs) + END
    members = read_whole(archive)
    assert [(member.name, member.data) for member in members] == pairs
    path = folder / "a.tar"
    path.write_bytes(archive)
    assert tarfile_members(path) == members


@settings(max_examples=25, deadline=None)
@given(names=st.lists(NAMES.filter(lambda name: "\n" not in name), min_size=1, max_size=50))
def test_gnu_tar_reads_any_name(folder, names):
    path = folder / "a.tar"
    path.write_bytes(pack([(name, b"%d," % i) for i, name in enumerate(names)]) + END)
    listing = program("tar")("-tf", path, "--quoting-style=literal")
    assert listing == b"".join(os.fsencode(name) + b"\n" for name in names)
    assert program("tar")("-xOf", path) == b"".join(b"%d," % i for i in range(len(names)))


@settings(max_examples=25, deadline=None)
@given(names=st.lists(NAMES.filter(lambda name: name.isprintable() and "\\" not in name), min_size=1, max_size=50))
def test_bsdtar_reads_any_name(folder, names):
    path = folder / "a.tar"
    path.write_bytes(pack([(name, b"%d," % i) for i, name in enumerate(names)]) + END)
    listing = program("bsdtar")("-tf", path)
    assert listing == b"".join(os.fsencode(name) + b"\n" for name in names)
    assert program("bsdtar")("-xOf", path) == b"".join(b"%d," % i for i in range(len(names)))


@pytest.mark.parametrize("size", [0, 1, 511, 512, 513, 100_000])
@pytest.mark.parametrize("name", ["a.txt", "long/" * 60 + "a.txt", "é.txt", "\udce9.txt"])
@pytest.mark.parametrize("reader", ["tar", "bsdtar"])
def test_every_size_extracts_to_the_same_bytes(tmp_path, reader, name, size):
    data = (b"0123456789" * (size // 10 + 1))[:size]
    (tmp_path / "a.tar").write_bytes(pack([(name, data)]) + END)
    program(reader)("-xf", "a.tar", cwd=tmp_path)
    assert (tmp_path / name).read_bytes() == data
    assert (tmp_path / name).stat().st_mtime == 0
    assert (tmp_path / name).stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("size", [(1 << 33) - 1, 1 << 33, 10 << 30, 1 << 40])
@pytest.mark.parametrize("name", ["a.bin", "long/" * 60 + "a.bin"])
def test_sizes_beyond_what_octal_digits_can_say(tmp_path, name, size):
    path = tmp_path / "a.tar"
    with open(path, "wb") as file:
        file.write(pack_header(name, size))
        file.seek(size + padding(size), 1)
        file.write(pack([("b.txt", b"1")]) + END)
    for reader, column in (("tar", 2), ("bsdtar", 4)):
        lines = [line.split() for line in program(reader)("-tvf", path).splitlines()]
        assert [(int(line[column]), line[-1]) for line in lines] == [(size, name.encode()), (1, b"b.txt")]
    with tarfile.open(path) as archive:
        assert [(info.name, info.size) for info in archive] == [(name, size), ("b.txt", 1)]


@pytest.mark.parametrize("name", ["a.txt", "n" * 100, "\x7f" * 100, "n" * 101, "é", "\udce9", "p/" * 200 + "n"])
def test_a_header_is_the_same_for_the_same_name_and_size_and_says_no_more(name):
    packed = pack_header(name, 1000)
    assert packed == pack_header(name, 1000)
    info = tarfile.TarInfo.frombuf(packed[-BLOCK:], "utf-8", "strict")
    assert (info.mode, info.uid, info.gid, info.uname, info.gname, info.mtime) == (0o644, 0, 0, "", "", 0)
    assert (info.size, info.type, len(packed) % BLOCK) == (1000, tarfile.REGTYPE, 0)
    assert (len(packed) == BLOCK) == (len(name) <= 100 and name.isascii())


def test_large_members_are_not_copied_to_be_packed():
    large = bytes(LARGE)
    assert any(piece is large for piece in pack_members("a", ("bin", "cls"), [large, b"7"]))


@pytest.mark.parametrize("name", ["\u00e9.txt", "n" * 101 + ".txt", "a.txt"])
def test_members_that_are_not_packed_in_one_come_in_pieces(name):
    key, value = name.removesuffix(".txt"), bytes(LARGE if name == "a.txt" else 3)
    assert pack_members(key, ("txt",), [value]) == [pack_header(name, len(value)), value, bytes(-len(value) % BLOCK)]


@pytest.mark.parametrize(("key", "field"), [("a\n\ud800", "txt"), ("a\n", "\ud800")])
def test_a_name_that_is_not_text_is_refused(key, field):
    reason = r"a name with a lone surrogate, '\ud800', which UTF-8 cannot encode"
    with pytest.raises(SampleError) as raised:
        pack_members(key, (field,), [b""])
    assert (raised.value.reason, raised.value.key) == (reason, visible(key))
