"""Compression: found by its first bytes, checked to its end, bounded, and the same bytes every time."""

import bz2
import gzip
import lzma
import os
import random
import re
import subprocess
import sys
import tracemalloc
from functools import partial
from importlib.util import find_spec
from itertools import cycle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import need
from soak import SOAK
from with_torch import webdataset

from tarshards import ShardWriter, Stream, TarWriter, read_samples, write_samples
from tarshards.errors import OpenError, UrlError
from tarshards.storage import compression
from tarshards.storage.compression import COMPRESSIONS, zstd_library
from tarshards.storage.opening import open_shard
from tarshards.storage.streams import COMPRESSING
from tarshards.verbs.check import check_shards

zstd = zstd_library()
PROGRAMS = {"gz": "gzip", "bz2": "bzip2", "xz": "xz", "lzma": "lzma", "zst": "zstd", "lz4": "lz4"}
MAGIC = {"gz": 2, "bz2": 4, "xz": 6, "lzma": 4, "zst": 4, "lz4": 4}  # bytes by which it is known
SMALL = b"".join(b"%d bottles of beer\n" % number for number in range(60)) + os.urandom(40)
LARGE = random.Random(0).randbytes(300_000) + SMALL * 300 + bytes(100_000)

python = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "lzma": lambda data: lzma.compress(data, lzma.FORMAT_ALONE),
    "zst": partial(zstd.compress, options={zstd.CompressionParameter.checksum_flag: 1}),
}
if find_spec("lz4"):
    from lz4.frame import compress as compress_lz4

    python["lz4"] = lambda data: compress_lz4(data, content_checksum=True)


def program(suffix: str):
    """Return what compresses by the external program."""
    name = PROGRAMS[suffix]
    need(name)
    return lambda data: subprocess.run([name, "-c"], input=data, capture_output=True, check=True).stdout


def read(path, size: int = -1, **options) -> bytes:
    with open_shard(str(path), **options) as stream:
        return stream.read() if size < 0 else b"".join(iter(lambda: stream.read(size), b""))


def read_bytes(tmp_path, data: bytes, **options) -> bytes:
    (tmp_path / "shard").write_bytes(data)
    return read(tmp_path / "shard", **options)


@pytest.fixture(params=PROGRAMS)
def suffix(request) -> str:
    if request.param == "lz4":
        pytest.importorskip("lz4.frame", reason="python-lz4 is not installed")
    return request.param


def test_every_compression_may_be_an_encoding():
    assert {*COMPRESSING} == {*COMPRESSIONS, "x-gzip"}


def test_what_the_programs_make(tmp_path, suffix):
    compress = program(suffix)
    for data in b"", b"x", SMALL, LARGE:
        # The name says nothing, or the wrong thing.
        (tmp_path / "shard.bz2").write_bytes(compress(data))
        assert read(tmp_path / "shard.bz2") == data
        assert read(tmp_path / "shard.bz2", size=100_000) == data


def test_what_python_makes(tmp_path, suffix):
    for data in b"", b"x", SMALL, LARGE:
        assert read_bytes(tmp_path, python[suffix](data)) == data


def test_members_one_after_the_other(tmp_path, suffix):
    compress, other = program(suffix), python[suffix]
    joined = compress(SMALL) + other(b"") + other(LARGE) + compress(b"x") + compress(b"")
    assert read_bytes(tmp_path, joined) == SMALL + LARGE + b"x"
    assert read_bytes(tmp_path, other(b"a") * 500) == b"a" * 500


def test_streams_that_cannot_be_rewound(tmp_path, suffix):
    for data in python[suffix](LARGE), LARGE, b"", b"BZ", b"\x1f":
        (tmp_path / "shard").write_bytes(data)
        url = f"pipe:cat {tmp_path}/shard"
        expected = LARGE if len(data) > 2 else data
        assert read(url, allow_pipe=True) == expected
        assert read(url, size=9_999, allow_pipe=True) == expected
    with pytest.raises(OpenError, match="status 3"):
        read(f"pipe:cat {tmp_path}/shard; exit 3", allow_pipe=True)


def test_bytes_that_drip(tmp_path, suffix):
    url = (
        f'pipe:exec python3 -uc \'import os; [os.write(1, bytes([b])) for b in open("{tmp_path}/shard", "rb").read()]\''
    )
    (tmp_path / "shard").write_bytes(python[suffix](SMALL) * 2)
    assert read(url, allow_pipe=True) == SMALL * 2


def test_every_truncation_is_found(tmp_path, suffix):
    whole = python[suffix](SMALL)
    # What is shorter than its magic is handed on as it is, for the tar reader to refuse.
    magic = MAGIC[suffix]
    for length in range(magic):
        assert read_bytes(tmp_path, whole[:length]) == whole[:length]
    for length in range(magic, len(whole)):
        with pytest.raises(OpenError, match=f"truncated {PROGRAMS[suffix]} data") as caught:
            read_bytes(tmp_path, whole[:length])
        assert caught.value.offset == length
        assert caught.value.url == str(tmp_path / "shard")


def test_truncations_of_the_second_member_are_found(tmp_path, suffix):
    whole = python[suffix](SMALL)
    for length in range(len(whole) + 1, 2 * len(whole), 7):
        with pytest.raises(OpenError, match=r"truncated|junk"):
            read_bytes(tmp_path, (whole * 2)[:length])


@pytest.mark.soak
def test_no_flipped_bit_gives_other_data(tmp_path, suffix):
    if suffix == "lzma":  # which has no checksums
        return
    data = SMALL[:300]
    whole = python[suffix](data)
    # With its magic damaged it is plain data, whole and untouched, which no tar begins with.
    magic = 10 if suffix == "bz2" else MAGIC[suffix]
    for place in range(len(whole)):
        for bit in range(8) if SOAK > 1 else [place % 8]:
            damaged = bytes([*whole[:place], whole[place] ^ 1 << bit, *whole[place + 1 :]])
            try:
                assert read_bytes(tmp_path, damaged) in ([data, damaged] if place < magic else [data])
            except OpenError as exc:
                error = str(exc)
            else:
                continue
            assert f"{PROGRAMS[suffix]} data" in error
            assert ": offset " in error


def test_junk_after_the_last_member(tmp_path, suffix):
    whole = python[suffix](SMALL)
    for junk in b"junk", b"x" * 100_000, whole[:1], python["gz" if suffix == "xz" else "xz"](SMALL):
        with pytest.raises(OpenError, match=f"offset {len(whole)}: junk after the {PROGRAMS[suffix]} data"):
            read_bytes(tmp_path, whole + junk)


@pytest.mark.parametrize("zeros", [4, 512, 300_000])
def test_zeros_after_gzip_and_xz_are_padding(tmp_path, suffix, zeros):
    padded = python[suffix](SMALL) + bytes(zeros)
    if suffix in ("gz", "xz"):
        assert read_bytes(tmp_path, padded) == SMALL
        assert read_bytes(tmp_path, padded + python[suffix](b"x")) == SMALL + b"x"
    else:
        with pytest.raises(OpenError, match="junk after"):
            read_bytes(tmp_path, padded)


@pytest.fixture
def held(monkeypatch) -> int:
    """The bytes that may be held whatever their ratio, fewer than usual."""
    monkeypatch.setattr(compression, "MAX_HELD", 1 << 20)
    return 1 << 20


def test_what_passes_through_may_expand_by_any_ratio(tmp_path, suffix, held):
    (tmp_path / "shard").write_bytes(python[suffix](bytes(20 * held)))
    with open_shard(str(tmp_path / "shard")) as stream:
        tracemalloc.start()
        assert sum(map(len, iter(lambda: stream.read(1 << 16), b""))) == 20 * held
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 12 * held  # a window of xz has 8 MiB


def test_bombs_are_refused_before_they_are_held(tmp_path, suffix, held):
    (tmp_path / "shard").write_bytes(python[suffix](bytes(30 * held)))
    for url in str(tmp_path / "shard"), f"pipe:cat {tmp_path}/shard":
        with open_shard(url, allow_pipe=True) as stream:
            tracemalloc.start()
            with pytest.raises(OpenError, match=r"more than 1 MiB, and more than 200 times .*\(max_ratio=, "):
                stream.read()
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peak < 200 * os.path.getsize(tmp_path / "shard") + 12 * held
        assert read(url, max_ratio=1e9, allow_pipe=True) == bytes(30 * held)


def test_either_limit_alone_is_no_bomb(tmp_path, suffix, held):
    assert read_bytes(tmp_path, python[suffix](bytes(held))) == bytes(held)
    data = bytes(5 * held) + random.Random(0).randbytes(held // 30)
    assert read_bytes(tmp_path, python[suffix](data)) == data, "zeros first: the whole shard counts, not what was read"


def test_archives_of_small_members_of_every_suffix(tmp_path, suffix):
    texts = {
        "label": lambda number: {"cls": b"%d" % (number % 10)},
        "caption": lambda number: {"cls": b"%d" % (number % 1000), "txt": b"a photo of a cat"},
    }
    for name, fields in texts.items():
        with ShardWriter(str(tmp_path / f"{name}-%d.tar.{suffix}")) as writer:
            for number in range(1200):
                writer.write({"__key__": f"{number:07d}", **fields(number)})
        url = f"{tmp_path}/{name}-0.tar.{suffix}"
        assert sum(1 for _ in read_samples(url)) == 1200
        assert sum(1 for _ in Stream.from_shards(url, index=False)) == 1200
        report = check_shards([url])
        assert (report.samples, report.lost, report.total("error")) == (1200, 0, 0)


def test_windows_that_are_too_large_are_refused(tmp_path):
    encoder = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: 28})
    frame = encoder.compress(SMALL) + encoder.flush()
    with pytest.raises(OpenError, match=r"window .* limit of 128 MiB \(--long=27\); 'pipe:zstd -dc --long=31 FILE'"):
        read_bytes(tmp_path, frame)
    filters = [{"id": lzma.FILTER_LZMA2, "dict_size": 1 << 29}]
    dictionary = lzma.compress(SMALL, filters=filters)
    with pytest.raises(OpenError, match=r"window .* limit of 256 MiB; 'pipe:xz -dc FILE' reads it"):
        read_bytes(tmp_path, dictionary)


@pytest.mark.parametrize("window", [27, 28, 31])
def test_long_windows_of_zstd(tmp_path, window):
    """The program's --long: up to its own default limit as any file, beyond it through the command of the error."""
    need("zstd")
    with open(tmp_path / "a.tar.zst", "wb") as file:  # of a pipe, whose length it does not know
        subprocess.run(
            ["zstd", "-cq", "--ultra", "-20", f"--long={window}"], input=LARGE[:9_000], stdout=file, check=True
        )
    if window > 27:
        with pytest.raises(OpenError, match="zstd data that need a window beyond the limit") as caught:
            read(tmp_path / "a.tar.zst")
        command = re.search("'(.*)'", str(caught.value))[1].replace("FILE", str(tmp_path / "a.tar.zst"))
        assert read(command, allow_pipe=True) == LARGE[:9_000]
    else:
        assert read(tmp_path / "a.tar.zst") == LARGE[:9_000]


def test_skippable_frames_of_zstd(tmp_path):
    skippable = b"\x5a\x2a\x4d\x18\x04\0\0\0abcd"
    frame = python["zst"](SMALL)
    assert read_bytes(tmp_path, skippable + frame + skippable + frame + skippable) == SMALL * 2


def zstd_of(data: bytes, level: int, checksum: bool, sized: bool) -> bytes:
    chosen = zstd.CompressionParameter
    options = {chosen.compression_level: level, chosen.checksum_flag: checksum, chosen.content_size_flag: sized}
    return zstd.compress(data, options=options)


ZSTD_DATA = {
    "random": random.Random(1).randbytes(700_000),
    "zeros": bytes(40_000_000),
    "text": SMALL * 2_000,
    "small": b"x",
    "none": b"",
    "mixed": bytes(3_000_000) + random.Random(2).randbytes(300_000) + bytes(3_000_000),
}


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(ZSTD_DATA)),
    options=st.tuples(st.sampled_from([1, 3, 9]), st.booleans(), st.booleans()),
    steps=st.lists(st.sampled_from([1, 2, 3, 5, 17, 4096, 65536, 1 << 20]), min_size=1, max_size=4),
    most=st.sampled_from([1, 1 << 18, 1 << 20]),
)
def test_zstd_gives_a_bounded_piece_of_any_data(name, options, steps, most):
    """However the data come, a call gives little more than it was asked for."""
    data, packed = ZSTD_DATA[name], zstd_of(ZSTD_DATA[name], *options)
    if len(packed) > 10_000:
        steps = [step * 500 if step < 100 else step for step in steps]
    most = max(most, len(data) // 10_000)  # a call for each byte of 40 MB takes a minute
    packed, decoder, at = packed + b"rest", COMPRESSIONS["zstd"].decoder(), 0
    pieces, step = [], cycle(steps)
    while not decoder.eof:
        fed = b""
        if decoder.needs_input:
            assert at < len(packed)
            fed = packed[at : at + next(step)]
            at += len(fed)
        pieces.append(decoder.decompress(fed, most))
        assert len(pieces[-1]) <= max(most, 2 << 17) + (1 << 17)
    assert b"".join(pieces) == data
    assert (decoder.unused_data + packed[at:]) == b"rest"


def test_a_tar_whose_first_name_looks_like_bzip2(tmp_path):
    tar = b"BZh9.jpg".ljust(1024, b"\0")
    assert read_bytes(tmp_path, tar) == tar


@pytest.mark.parametrize(
    ("name", "program_"),
    [
        ("a.tar.gz", "gzip"),
        ("a.TGZ", "gzip"),
        ("a.tar.bz2", "bzip2"),
        ("a.tbz2", "bzip2"),
        ("a.tar.xz", "xz"),
        ("a.txz", "xz"),
        ("a.tar.zst", "zstd"),
        ("a.tzst", "zstd"),
        ("a.tar.zstd", "zstd"),
        ("a.taz", "gzip"),
        ("a.tar.bz", "bzip2"),
        ("a.tbz", "bzip2"),
        ("a.tb2", "bzip2"),
        ("a.tz2", "bzip2"),
        ("a.tar.lzma", "lzma"),
        ("a.tlz", "lzma"),
        ("a.tar.lz4", "lz4"),
        ("a.TLZ4", "lz4"),
    ],
)
def test_writing_compresses_by_the_suffix(tmp_path, name, program_):
    if program_ == "lz4":
        pytest.importorskip("lz4.frame", reason="python-lz4 is not installed")
    files = []
    data = LARGE if name.removeprefix("a.tar.") in PROGRAMS else SMALL * 100
    for _ in range(2):
        with open_shard(str(tmp_path / name), "wb") as stream:
            for start in range(0, len(data), 99_999):
                stream.write(memoryview(data)[start : start + 99_999])
        files.append((tmp_path / name).read_bytes())
    assert files[0] == files[1]
    assert len(files[0]) < len(data)
    assert read(tmp_path / name) == data
    need(program_)
    done = subprocess.run([program_, "-dc"], input=files[0], capture_output=True, check=True)
    assert done.stdout == data


def test_an_empty_compressed_file_is_whole(tmp_path, suffix):
    open_shard(str(tmp_path / f"a.{suffix}"), "wb").close()
    assert (tmp_path / f"a.{suffix}").stat().st_size
    assert read(tmp_path / f"a.{suffix}") == b""


def test_other_suffixes_stay_plain(tmp_path):
    with open_shard(str(tmp_path / "a.gz.tar"), "wb") as stream:
        stream.write(SMALL)
    assert (tmp_path / "a.gz.tar").read_bytes() == SMALL


@pytest.mark.parametrize(
    "name",
    [
        *("a.tar.Z", "a.taZ", "a.tZ", "a.tar.br", "a.tar.lz", "a.tar.lzo", "a.tar.zip", "a.ZIP", "a.7z", "a.tar.sz"),
        *("a.tar.gzip", "a.tar.GZIP", "a.tgz2", "a.tar.gz2", "a.tar.bzip2", "a.tar.zstandard", "a.tar.lzip", "a.tzip"),
        *("a.tar.brotli", "a.tar.snappy", "a.tar.zz", "a.tar.lz77", "a.tz", "w-0.parquet", "a.jsonl.gzip", "a.h5"),
    ],
)
def test_a_name_that_promises_another_format_is_refused(tmp_path, name):
    refusal = rf"{re.escape(name)}: the suffix \.\w+ is not .* \.gz \.tgz .* \.lz4 \.tlz4$"
    actions = [lambda: open_shard(str(tmp_path / name), "wb"), lambda: TarWriter(tmp_path / name)]
    actions += [lambda: write_samples([{"__key__": "a", "txt": "a"}], tmp_path / name)]
    actions += [lambda: ShardWriter(tmp_path / f"%d{name}")]
    if find_spec("torch"):
        actions += [lambda: webdataset.TarWriter(str(tmp_path / name))]
    for action in actions:
        with pytest.raises(UrlError, match=refusal):
            action()
    with pytest.raises(UrlError, match=r"the suffix \.gz-%d is not"):
        ShardWriter(tmp_path / "a.tar.gz-%d")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "name", ["a.tar.tmp", "a.tar.1", "a.tar.part", "a.zh", "a.brain", "a.tsv", "a.tar.new", "a.zebra"]
)
def test_any_other_name_is_one_of_a_plain_tar(tmp_path, name):
    write_samples([{"__key__": "a", "txt": "a"}], tmp_path / name)
    assert compression.find_compression((tmp_path / name).read_bytes()) is None


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "lz4.frame", None)
    monkeypatch.setitem(sys.modules, "lz4", None)
    (tmp_path / "a").write_bytes(b"\x04\x22\x4d\x18" + bytes(100))
    for action in lambda: read(tmp_path / "a"), lambda: open_shard(str(tmp_path / "b.lz4"), "wb"):
        with pytest.raises(OpenError, match=r"/[ab](\.lz4)?: lz4 is missing: pip install 'tarshards\[lz4\]'"):
            action()
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("name", [b"]", b"]\0\0\0", b"^", b"?", b"\0", b"l\0", b"d/", b"]\x80\x80\x80\x80"])
def test_a_tar_whose_first_name_is_how_lzma_begins(tmp_path, name):
    tar = name.ljust(1024, b"\0")
    assert read_bytes(tmp_path, tar) == tar


@pytest.mark.parametrize("window", [1 << 12, 1 << 16, 3 << 15, 1 << 23, 3 << 25])
def test_lzma_with_any_properties(tmp_path, window):
    """Those of `xz --format=lzma --lzma1=lc=..,lp=..,pb=..,dict=..`; GNU tar and others call xz or lzma."""
    for lc, lp, pb in ((3, 0, 2), (4, 0, 0), (0, 4, 4), (0, 0, 0), (0, 2, 1)):
        filters = [{"id": lzma.FILTER_LZMA1, "lc": lc, "lp": lp, "pb": pb, "dict_size": window}]
        data = lzma.compress(SMALL, lzma.FORMAT_ALONE, filters=filters)
        assert read_bytes(tmp_path, data) == SMALL, (lc, lp, pb)
        assert read_bytes(tmp_path, data[:5] + len(SMALL).to_bytes(8, "little") + data[13:]) == SMALL
        with pytest.raises(OpenError, match="truncated lzma data"):
            read_bytes(tmp_path, data[:-9])
    need("xz")
    options = f"--lzma1=lc=1,lp=3,pb=4,dict={max(window, 1 << 12)}"
    made = subprocess.run(["xz", "--format=lzma", options], input=SMALL, capture_output=True, check=True).stdout
    assert read_bytes(tmp_path, made) == SMALL


def test_commands_compress_for_themselves(tmp_path):
    with open_shard(f"pipe:cat > {tmp_path}/a.gz", "wb", allow_pipe=True) as stream:
        stream.write(SMALL)
    assert (tmp_path / "a.gz").read_bytes() == SMALL


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([b"", b"a", SMALL, bytes(70_000)]), st.integers(1, 3)), min_size=1, max_size=4),
    st.sampled_from(sorted(python)),
    st.integers(1, 100_000),
)
def test_any_members_read_by_any_size(tmp_path_factory, parts, suffix, size):
    path = tmp_path_factory.getbasetemp() / f"members.{suffix}"
    path.write_bytes(b"".join(python[suffix](data * times) for data, times in parts))
    assert read(path, size=size if size > 50 else 1000 * size) == b"".join(data * times for data, times in parts)


def test_closing_closes_what_lies_below(tmp_path):
    (tmp_path / "a").write_bytes(python["gz"](LARGE))
    before = len(os.listdir("/proc/self/fd"))
    stream = open_shard(str(tmp_path / "a"))
    stream.read(10)
    stream.close()
    assert len(os.listdir("/proc/self/fd")) <= before
    with pytest.raises(ValueError, match="closed"):
        stream.read(1)
