"""An index says what reading says: the same keys, fields and bytes, and for damage the same error."""

from __future__ import annotations

import io
import lzma
import os
import shutil
import subprocess
import tarfile
import zlib
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import need
from range_server import serving

from tarshards import IndexedShards, read_samples, write_samples
from tarshards.errors import OpenError, SampleError, ShardIndexError, TarError, TarshardsError
from tarshards.index import build, members
from tarshards.index.build import build_index
from tarshards.index.refresh import refresh_indexes, verify_indexes
from tarshards.index.sidecar import Index
from tarshards.storage.expressions import find_shards
from tarshards.storage.location import Location
from tarshards.storage.ranges import Ranges
from tarshards.tar.read import pack_header
from tarshards.verbs.check import check_shards

SAMPLES = [{"__key__": f"d/{i:03d}", "bin": os.urandom(i * 100), "cls": i, "seg.png": b"x"} for i in range(40)]


def by_index(index: Index, path) -> list[dict]:
    """The samples that *index* finds in the file *path*."""
    data = Path(path).read_bytes()
    samples = [{"__key__": key, "__url__": str(path)} for key in index.keys]
    for sample, field, offset, size in zip(index.sample, index.field, index.offset, index.size):
        samples[sample][index.fields[field]] = data[offset : offset + size]
    return samples


def by_reading(url: str, **options) -> object:
    """The samples that are read and the errors of those at fault, or the error of the shard."""
    errors: list[Exception] = []
    samples = list(read_samples(url, on_error=errors.append, **options))
    damage = [(type(error), str(error)) for error in errors if not isinstance(error, SampleError)]
    return damage[0] if damage else (samples, list(map(str, errors)))


def assert_index_says_what_reading_says(path, **options) -> None:
    url = str(path)
    try:
        index = build_index(url, **options)
    except TarshardsError as error:
        found: object = type(error), str(error)
    else:
        assert Index.unpack(index.pack()) == index
        sound = [sample for number, sample in enumerate(by_index(index, path)) if number not in index.faults]
        found = sound, [str(index.fault(number, url)) for number in index.faults]
    assert found == by_reading(url, **options)


@pytest.fixture
def shard(tmp_path) -> str:
    write_samples(SAMPLES, str(tmp_path / "a.tar"))
    return str(tmp_path / "a.tar")


def test_what_is_written_is_indexed(shard):
    index = build_index(shard)
    assert by_index(index, shard) == list(read_samples(shard))
    assert len(index) == 40
    assert index.fields == ["bin", "cls", "seg.png"]
    assert index.shard_size == os.path.getsize(shard)
    assert index.first.tolist() == list(range(0, 121, 3))
    assert index.crc32 is None


def test_checksums(shard, monkeypatch):
    plain = build_index(shard)
    for size in (1 << 10, 1 << 12, 1 << 22):
        monkeypatch.setattr(build, "READS", (1 << 10, size, 1 << 15))
        index = build_index(shard, crc=True)
        expected = [zlib.crc32(value) for sample in by_index(plain, shard) for value in list(sample.values())[2:]]
        assert index.crc32.tolist() == expected
        assert index.offset.tolist() == plain.offset.tolist()


def test_the_fingerprint_is_of_the_blocks_before_the_first_and_the_last_data(tmp_path):
    long = [{"__key__": "n" * 200 + str(i), "txt": "x" * 600} for i in range(3)]  # with pax headers
    write_samples(long, str(tmp_path / "a.tar"))
    data = (tmp_path / "a.tar").read_bytes()
    first, last = (data.index(b"x" * 600), data.rindex(b"x" * 600))
    index = build_index(str(tmp_path / "a.tar"))
    assert index.offset[[0, -1]].tolist() == [first, last]
    assert index.fingerprint == zlib.crc32(data[first - 512 : first] + data[last - 512 : last])
    for block in (first - 512, last - 512):
        assert data[block + 257 : block + 262] == b"ustar"


def test_a_shard_without_samples(tmp_path):
    (tmp_path / "a.tar").write_bytes(bytes(1024))
    index = build_index(str(tmp_path / "a.tar"), crc=True)
    assert (len(index), index.fingerprint, index.first.tolist()) == (0, 0, [0])
    assert Index.unpack(index.pack()) == index


names = st.one_of(
    st.text("ab._/é", min_size=1, max_size=6),
    st.sampled_from("ab").flatmap(
        lambda key: st.sampled_from(["x", "Y", "z.w", "__key__", "u__"]).map(f"{key}.{{}}".format)
    ),
    st.sampled_from(["a", "a.", "__x__.b", "__a.u__", "d/a.x", "d/.x", "d.e/a.x", "d/__e__/a.x", "n" * 120 + ".x"]),
).filter(lambda name: not name.endswith("/"))


@given(st.lists(st.tuples(names, st.integers(0, 1500)), max_size=12), st.sampled_from([0, 1, 2]))
@settings(max_examples=200)
def test_any_names_in_any_order(tmp_path_factory, content, format):
    path = tmp_path_factory.mktemp("law") / "a.tar"
    with tarfile.open(path, "w", format=format) as archive:
        for name, size in content:
            info = tarfile.TarInfo(name)
            info.size = size
            with suppress(ValueError):  # too long for ustar
                archive.addfile(info, io.BytesIO(os.urandom(size)))
    assert_index_says_what_reading_says(path)
    shutil.rmtree(path.parent)


PROGRAMS = ["tar --format=gnu", "tar --format=pax", "tar --format=ustar", "bsdtar --format=gnutar", "bsdtar"]


def archive(program: str, folder: Path, names: list[str]) -> Path:
    """Let a program make an archive of *names* in *folder*, but those that its format cannot hold."""
    (folder.parent / "names").write_text("".join(f"{name}\n" for name in names))
    command = [*program.split(), "--no-recursion", "-cf", "../a.tar", "-T", "../names"]
    need("GNU tar" if command[0] == "tar" else command[0])
    subprocess.run(command, cwd=folder, check=False, stderr=subprocess.DEVNULL, env={**os.environ, "LC_ALL": "C.UTF-8"})
    return folder.parent / "a.tar"


@pytest.mark.parametrize("program", PROGRAMS)
def test_archives_of_other_programs(tmp_path, program):
    folder = tmp_path / "files"
    for key in ("a", "d.e/b", "d.e/" + "n" * 90 + "/c", "é"):
        for field in ("cls", "JPG", "seg.png"):
            path = folder / f"{key}.{field}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(os.urandom(len(key) * 100))
    (folder / "README").write_text("no extension")
    (folder / "link.txt").symlink_to("a.cls")
    path = archive(program, folder, sorted(str(path.relative_to(folder)) for path in folder.rglob("*")))
    index = build_index(str(path))
    assert len(index) == 5
    index.save(str(path))
    samples = list(IndexedShards(str(path)))
    assert samples == list(read_samples(path))
    assert samples[-2]["txt"] == (folder / "a.cls").read_bytes()


parts = st.one_of(st.text("ab_é ", min_size=1, max_size=3), st.sampled_from(["n" * 60, "m" * 120, "__x__", "d.e"]))
paths = st.tuples(
    st.lists(parts, max_size=2).map("/d".join), parts, st.sampled_from(["", ".x", ".Y", ".y.z", ".", "." + "f" * 90])
)


@pytest.mark.parametrize("program", PROGRAMS)
@given(st.dictionaries(paths, st.integers(0, 1500), max_size=8))
@settings(max_examples=15, deadline=None)
def test_any_archive_of_other_programs(tmp_path_factory, program, content):
    folder = tmp_path_factory.mktemp("program") / "files"
    folder.mkdir()
    for (folders, stem, field), size in content.items():
        path = folder / f"d{folders}" / (stem + field)
        with suppress(FileExistsError, IsADirectoryError, NotADirectoryError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(os.urandom(size))
    listed = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
    assert_index_says_what_reading_says(archive(program, folder, listed))
    shutil.rmtree(folder.parent)


def test_names_that_are_no_utf8(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.GNU_FORMAT) as archive:
        archive.addfile(tarfile.TarInfo(os.fsdecode(b"\xff.txt")))
    index = build_index(str(tmp_path / "a.tar"))
    assert index.keys == ["\udcff"]
    assert Index.unpack(index.pack()) == index


def test_concatenated_archives(tmp_path, shard):
    other = tmp_path / "b.tar"
    write_samples([{"__key__": "z", "txt": "last"}], str(other))
    both = tmp_path / "both.tar"
    both.write_bytes(Path(shard).read_bytes() + bytes(10240) + other.read_bytes() + bytes(5))
    assert_index_says_what_reading_says(both)
    with pytest.raises(TarError, match="members after the end of the archive"):
        build_index(str(both))
    index = build_index(str(both), concatenated=True)
    assert (len(index), index.archives) == (41, 2)
    assert_index_says_what_reading_says(both, concatenated=True)
    assert Index.unpack(index.pack()).archives == 2
    build_index(str(both), crc=True, concatenated=True).save(str(both))
    assert [sample["__key__"] for sample in IndexedShards(str(both))] == index.keys
    assert [outcome.error for outcome in verify_indexes([str(both)], crc=True)] == [None]
    assert index.difference(build_index(str(both), concatenated=True)) is None


@pytest.mark.parametrize("cut", [0, 100])
@pytest.mark.parametrize("is_remote", [False, True])
def test_an_archive_without_an_end_is_read_through_its_index(tmp_path, is_remote, cut):
    samples = [{"__key__": str(number), "txt": "x" * (512 - cut), "cls": b"7"} for number in range(9)]
    url = str(tmp_path / "a.tar")
    write_samples(samples, url)
    data = Path(url).read_bytes()
    end = 9 * 4 * 512
    Path(url).write_bytes(data[: end - cut])
    assert_index_says_what_reading_says(url)
    assert_index_says_what_reading_says(url, end="optional")
    with pytest.raises(TarError, match=r"truncated: no block of zeros .*`--end optional`"):
        build_index(url)
    with pytest.raises(ValueError, match='end is "required" or "optional", not \'maybe\''):
        build_index(url, end="maybe")
    [made] = refresh_indexes(find_shards(url, end="optional"), crc=True)
    assert (made.error, made.written) == (None, f"{url}.index")
    index = Index.load(url)
    assert (len(index), index.end, index.archives) == (9, end - cut, 1)
    assert [outcome.error for outcome in verify_indexes([url], crc=True)] == [None]  # the index says how it ends
    assert [outcome.written for outcome in refresh_indexes([url])] == [None]
    wanted = [sample | {"__url__": ""} for sample in read_samples(url, end="optional")]
    with serving(tmp_path) as site:
        shards = IndexedShards(f"{site.url}/a.tar" if is_remote else url)
        assert [shards[number] | {"__url__": ""} for number in (8, 0, 7)] == [wanted[number] for number in (8, 0, 7)]
    Path(url).write_bytes(data[: end - cut - 2048])  # another whole sample is lost
    with pytest.raises(ShardIndexError, match="stale: the shard has"):
        list(IndexedShards(url))


@pytest.mark.parametrize("program", ["pixz", "tar", "bsdtar"])
@pytest.mark.parametrize("is_remote", [False, True])
def test_what_pixz_and_large_records_leave_at_the_end(tmp_path, monkeypatch, program, is_remote):
    """Both as a stream and by index, plain and compressed; tarcheck finds nothing."""
    need("GNU tar" if program == "tar" else program)
    (tmp_path / "files").mkdir()
    for sample in SAMPLES:
        (tmp_path / f"files/{sample['__key__'].replace('/', '-')}.txt").write_bytes(b"text")
    blocks = 20 if program == "pixz" else 2048
    create = ["bsdtar" if program == "bsdtar" else "tar", f"-b{blocks}", "-cf", "-", "files"]
    tar = subprocess.run(create, cwd=tmp_path, capture_output=True, check=True).stdout
    path = tmp_path / "a.tar"
    path.write_bytes(tar)
    assert len(tar) % (blocks * 512) == 0
    if program == "pixz":
        subprocess.run(["pixz", "a.tar", "a.tpxz"], cwd=tmp_path, check=True)
        path.write_bytes(lzma.decompress((tmp_path / "a.tpxz").read_bytes()))
        assert path.stat().st_size > len(tar)
    else:
        (tmp_path / "a.tpxz").write_bytes(lzma.compress(tar, preset=0))
    with tarfile.open(path) as archive:
        names = {info.name: archive.extractfile(info).read() for info in archive if info.isreg()}
    index = build_index(str(path))
    index.save(str(path))
    assert (index.shard_size, index.end) == (
        path.stat().st_size,
        len(tar.rstrip(b"\0")) + -len(tar.rstrip(b"\0")) % 512,
    )
    assert [outcome.error for outcome in verify_indexes([str(path)])] == [None]
    assert_index_says_what_reading_says(path)
    with serving(tmp_path) as site:
        for shard in (path, tmp_path / "a.tpxz", f"{site.url}/a.tpxz"):
            found = {f"{sample['__key__']}.txt": sample["txt"] for sample in read_samples(shard)}
            assert found == names
            assert not check_shards([str(shard)]).findings
        where = f"{site.url}/a.tar" if is_remote else str(path)
        assert {f"{sample['__key__']}.txt": sample["txt"] for sample in IndexedShards(where)} == names


def test_an_index_of_one_archive_does_not_count_it(shard):
    index = build_index(shard, concatenated=True)
    assert index.archives == 1
    assert index.pack() == build_index(shard).pack()
    assert b"archives" not in index.pack()


@given(st.data())
@settings(max_examples=150)
def test_damage_is_the_same_error(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("damage") / "a.tar"
    samples = [{"__key__": f"{'n' * 99}{i}" if i % 3 else str(i), "x": b"1" * (i * 300), "y": b""} for i in range(6)]
    write_samples(samples, str(path))
    archive = bytearray(path.read_bytes())
    kind = data.draw(st.sampled_from(["cut", "flip", "append", "swap", "repeat", "zero"]))
    block = data.draw(st.integers(0, len(archive) // 512 - 2)) * 512
    if kind == "cut":
        del archive[data.draw(st.integers(0, len(archive))) :]
    elif kind == "flip":
        archive[block + data.draw(st.integers(0, 511))] ^= data.draw(st.sampled_from([1, 0x20, 0x80]))
    elif kind == "append":
        archive += data.draw(st.sampled_from([b"x", bytes(100) + b"x", b"junk" * 200, bytes(512 * 40) + b"x"]))
    elif kind == "swap":
        archive[block : block + 1024] = archive[block + 512 : block + 1024] + archive[block : block + 512]
    elif kind == "repeat":
        archive[:0] = archive[block:]
    else:
        archive[block : block + 512] = bytes(512)
    path.write_bytes(archive)
    assert_index_says_what_reading_says(path, concatenated=data.draw(st.booleans()))
    shutil.rmtree(path.parent)


@pytest.mark.parametrize("content", [b"", b"x", b"this is no tar\n" * 200, bytes(100), bytes(512)])
def test_what_is_no_shard(tmp_path, content):
    (tmp_path / "a.tar").write_bytes(content)
    assert_index_says_what_reading_says(tmp_path / "a.tar")


@pytest.mark.parametrize("names", ["a.x b.x a.y", "a.x a.x", "a.x a.X", "b.x c.x c.x", "a.__url__"])
def test_members_that_are_no_samples_are_marked(tmp_path, names):
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name in names.split():
            archive.addfile(tarfile.TarInfo(name))
    index = build_index(str(tmp_path / "a.tar"))
    (fault,) = index.faults.values()
    assert (fault.offset, fault.reason) == (
        512 * (len(names.split()) - 1),
        "members of this key are not adjacent" if names == "a.x b.x a.y" else "duplicate field",
    )
    assert_index_says_what_reading_says(tmp_path / "a.tar")


def test_a_field_that_comes_again_as_a_link_without_a_target(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name, target in (("a.txt", ""), ("a.TXT", "gone"), ("b.txt", ""), ("a.txt", ""), ("c.__key__", "gone")):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = (tarfile.SYMTYPE, target) if target else (tarfile.REGTYPE, "")
            archive.addfile(info)
    assert_index_says_what_reading_says(tmp_path / "a.tar")


@pytest.mark.parametrize("suffix", ["gz", "bz2", "xz", "zst"])
def test_compressed_shards_are_refused_with_a_hint(tmp_path, suffix):
    path = str(tmp_path / f"a.tar.{suffix}")
    write_samples(SAMPLES, path)
    with pytest.raises(ShardIndexError, match=f"a.tar.{suffix}: compressed .*tarcat") as caught:
        build_index(path)
    assert caught.value.url == path


@pytest.mark.parametrize("url", ["-", "pipe:cat a.tar"])
def test_streams_have_no_index(url):
    with pytest.raises((OpenError, ShardIndexError)):
        build_index(url)


def test_a_shard_that_is_missing(tmp_path):
    with pytest.raises(OpenError, match=r"none\.tar: No such file"):
        build_index(str(tmp_path / "none.tar"))


class Counting(Ranges):
    """Ranges that count what is read of them."""

    def __init__(self, ranges: Ranges, remote: bool):
        self.ranges, self.name, self.size, self.remote = ranges, ranges.name, ranges.size, remote
        self.reads = self.bytes = 0

    def read(self, offset, size):
        self.reads += 1
        self.bytes += size
        return self.ranges.read(offset, size)


@pytest.fixture
def counted(monkeypatch):
    """Return a function that builds the index of a file and returns it with what was read."""

    def count(path: str, *, remote: bool = False) -> tuple[Index, Counting]:
        counting = Counting(Location.of(path).ranges(), remote)
        with monkeypatch.context() as patch:
            patch.setattr(Location, "is_local", False)
            patch.setattr(Location, "ranges", lambda location: counting)
            return build_index(path), counting

    return count


def test_only_headers_are_read_of_large_members(tmp_path, counted):
    write_samples(
        ({"__key__": f"{i:03d}", "cls": i, "jpg": bytes(110_000)} for i in range(200)), str(tmp_path / "a.tar")
    )
    index, counting = counted(str(tmp_path / "a.tar"))
    assert by_index(index, tmp_path / "a.tar") == list(read_samples(tmp_path / "a.tar"))
    assert counting.bytes < 200 * 2500  # of 200 x 112,128
    assert counting.reads < 250


def bytes_read() -> int:
    """The bytes that this process has asked the kernel for so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_only_headers_are_read_of_large_members_in_a_local_file(tmp_path):
    path = str(tmp_path / "a.tar")
    write_samples(({"__key__": f"{i:03d}", "cls": i, "jpg": bytes(110_000)} for i in range(200)), path)
    before = bytes_read()
    index = build_index(path)
    assert bytes_read() - before < 200 * 2500 + 100_000  # of 200 x 112,128
    assert len(index) == 200


def test_small_members_are_read_in_large_pieces(tmp_path, counted):
    write_samples(({"__key__": f"{i:04d}", "bin": bytes(2048), "cls": i} for i in range(2000)), str(tmp_path / "a.tar"))
    size = os.path.getsize(tmp_path / "a.tar")
    _, counting = counted(str(tmp_path / "a.tar"))
    assert counting.reads < 2 * size / (1 << 19) + 20
    assert counting.bytes < 1.01 * size + 4096


def test_a_network_is_asked_seldom(tmp_path, counted):
    write_samples(({"__key__": f"{i:03d}", "bin": bytes(100_000)} for i in range(200)), str(tmp_path / "a.tar"))
    _, counting = counted(str(tmp_path / "a.tar"), remote=True)
    assert counting.reads < 16


def test_a_file_that_changes_meanwhile_is_told(shard, monkeypatch):
    monkeypatch.setattr(build, "_index", lambda *_: None)
    with pytest.raises(TarError, match=r"a\.tar: changed while it was being indexed"):
        build_index(shard)


def test_more_fields_than_an_index_holds(tmp_path, monkeypatch):
    monkeypatch.setattr(members, "MAX_FIELDS", 2)
    write_samples(SAMPLES, str(tmp_path / "a.tar"))
    with pytest.raises(ShardIndexError, match=r"a\.tar: 3 different fields, but an index holds at most 2"):
        build_index(str(tmp_path / "a.tar"))


def test_arrays_have_the_types_of_the_format(shard):
    index = build_index(shard, crc=True)
    kinds = {name: getattr(index, name).dtype for name in ("sample", "field", "offset", "size", "crc32")}
    assert kinds == {"sample": "<u4", "field": "<u2", "offset": "<u8", "size": "<u8", "crc32": "<u4"}
    assert isinstance(index.first, np.ndarray)


def test_all_headers_are_compared_with_an_index(tmp_path):
    url = str(tmp_path / "a.tar")
    samples = [{"__key__": f"{i}", "cls": i, "txt": "t"} for i in range(20)]
    write_samples(samples, url)
    index = build_index(url, crc=True)
    assert index.difference(build_index(url)) is None, "though only one of the two has checksums"
    data = bytearray(Path(url).read_bytes())
    os.utime(url, ns=(0, 0))
    assert index.difference(build_index(url)) is None
    cut = int(index.offset[18])
    data[cut - 512 : cut] = pack_header("9.cls", 2)
    data[cut : cut + 2] = b"10"
    Path(url).write_bytes(data)
    assert index.difference(build_index(url)) == "9.cls has changed since the shard was indexed"
    write_samples(samples[:7], url)
    assert index.difference(build_index(url)) == "the shard has 7 samples, but had 20 when it was indexed"
    write_samples([samples[1], samples[0]], url)
    assert index.difference(build_index(url)) == "0 has changed since the shard was indexed"


@pytest.mark.parametrize("is_remote", [False, True])
def test_concatenated_archives_are_read_through_their_index(tmp_path, is_remote):
    parts = [[{"__key__": key, "txt": key[:9], "x.txt": "x"}] for key in ("a", "é" * 70, "d/" * 70 + "b", "c")]
    for number, samples in enumerate(parts):
        write_samples(samples, str(tmp_path / f"{number}.tar"))
    pads = [b"", bytes(10240), bytes(512 * 3), bytes(1)]
    data = b"".join((tmp_path / f"{number}.tar").read_bytes() + pad for number, pad in enumerate(pads))
    (tmp_path / "all.tar").write_bytes(data)
    build_index(str(tmp_path / "all.tar"), concatenated=True).save(str(tmp_path / "all.tar"))
    wanted = [sample | {"__url__": ""} for sample in read_samples(tmp_path / "all.tar", concatenated=True)]
    with serving(tmp_path) as site:
        shards = IndexedShards(f"{site.url}/all.tar" if is_remote else str(tmp_path / "all.tar"))
        for number in (3, 1, 0, 2):
            assert shards[number] | {"__url__": ""} == wanted[number]
