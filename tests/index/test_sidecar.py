"""A sidecar is read as it was written, or refused with the reason."""

from __future__ import annotations

import os
import random
import re
import shutil
import threading
import time
from functools import partial
from pathlib import Path
from zlib import crc32

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from programs import load_kernel
from range_server import serving

from tarshards import IndexedShards, Stream, write_samples
from tarshards.errors import OpenError, ShardIndexError
from tarshards.index import open as opening
from tarshards.index import sidecar
from tarshards.index.build import build_index
from tarshards.index.inventory import count_samples, for_each_shard
from tarshards.index.refresh import refresh_indexes, verify_indexes
from tarshards.index.sidecar import MISSING, Index, index_location
from tarshards.samples.fields import parse_terms
from tarshards.storage.location import Location
from tarshards.storage.manifest import Shards
from tarshards.storage.ranges import LocalRanges

SAMPLES = [{"__key__": f"{i:03d}", "bin": os.urandom(i * 100), "cls": i} for i in range(20)]


@pytest.fixture
def shard(tmp_path) -> str:
    """A shard that has its index."""
    url = str(tmp_path / "a.tar")
    write_samples(SAMPLES, url)
    build_index(url, crc=True).save(url)
    return url


@pytest.mark.parametrize("crc", [False, True])
def test_what_is_saved_is_loaded(shard, crc):
    index = build_index(shard, crc=crc)
    index.save(shard)
    loaded = Index.load(shard)
    assert loaded == index
    for name in ("shard_size", "fingerprint", "keys", "fields"):
        assert getattr(loaded, name) == getattr(index, name)
    for name in ("sample", "field", "offset", "size", "first"):
        assert getattr(loaded, name).tolist() == getattr(index, name).tolist()
    assert (loaded.crc32 is None) == (not crc)
    assert [path.name for path in Path(shard).parent.iterdir() if ".tmp" in path.name] == []


def test_the_file_is_one_msgpack_map(shard):
    """Read as docs/index-format.md says, without our code."""
    packed = Path(f"{shard}.index").read_bytes()
    found = msgpack.unpackb(packed)
    assert list(found)[:5] == ["format", "version", "shard", "keys", "fields"]
    assert (found["format"], found["version"]) == ("tarshards-index", 1)
    assert found["shard"]["size"] == os.path.getsize(shard)
    assert found["keys"] == [sample["__key__"] for sample in SAMPLES]
    data = Path(shard).read_bytes()
    for member in range(40):
        sample, field, offset, size, crc = (
            int.from_bytes(found[name][width * member : width * (member + 1)], "little")
            for name, width in (("sample", 4), ("field", 2), ("offset", 8), ("size", 8), ("crc32", 4))
        )
        value = SAMPLES[sample][found["fields"][field]]
        content = data[offset : offset + size]
        assert content == (value if isinstance(value, bytes) else str(value).encode())
        assert crc == crc32(content)
    assert found["checksum"] == crc32(packed[:-4])


@pytest.mark.parametrize(
    ("shard_url", "url"),
    [
        ("a.tar", "a.tar.index"),
        ("what?.tar", "what?.tar.index"),
        ("file:///d/a%20b.tar", "file:///d/a%20b.tar.index"),
        ("http://h:80/a.tar", "http://h:80/a.tar.index"),
        ("HTTPS://h/a.tar?x=/b.tar", "HTTPS://h/a.tar.index?x=/b.tar"),
        ("s3://b/a.tar", "s3://b/a.tar.index"),
    ],
)
def test_where_it_lies(shard_url, url):
    assert index_location(shard_url).url == url


@pytest.mark.parametrize("url", ["-", "pipe:cat a.tar"])
def test_streams_have_none(url):
    with pytest.raises(ShardIndexError, match="streams have no index"):
        index_location(url)


def test_missing(tmp_path):
    write_samples(SAMPLES, str(tmp_path / "a.tar"))
    with pytest.raises(ShardIndexError, match=r"a\.tar\.index: no index found; create one with `tarindex`") as caught:
        Index.load(str(tmp_path / "a.tar"))
    assert caught.value.reason == MISSING


def test_an_index_without_its_shard(shard):
    os.unlink(shard)
    with pytest.raises(OpenError, match=r"a\.tar: No such file"):
        Index.load(shard)


def repacked(packed: bytes, **changes) -> bytes:
    """The index *packed* with other entries, and the right checksum; None leaves one out."""
    found = {**msgpack.unpackb(packed), **changes}
    del found["checksum"]
    found = {name: value for name, value in found.items() if value is not None}
    packer = msgpack.Packer(autoreset=False)
    packer.pack_map_header(len(found) + 1)
    for name, value in found.items():
        packer.pack(name)
        packer.pack(value)
    start = packer.bytes() + b"\xa8checksum\xce"
    return start + crc32(start).to_bytes(4, "big")


def u4(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(4, "little") for number in numbers)


def u8(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(8, "little") for number in numbers)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"version": 3}, "index version 3 is not supported, only versions 1 and 2"),
        ({"faults": [[20, "odd", 0, None]]}, "damaged: a fault without a sample, reason or offset"),
        ({"faults": [[0, "odd", "here", None]]}, "damaged: a fault without a sample, reason or offset"),
        ({"faults": [[0, "odd"]]}, "damaged: TypeError"),
        ({"faults": 7}, "damaged: TypeError"),
        ({"format": "squirrel"}, "not an index of tarshards"),
        ({"keys": None}, "damaged: no keys"),
        ({"shard": 7}, "damaged: TypeError"),
        ({"sample": None}, "damaged: no sample"),
        ({"field": b"\0"}, "damaged: arrays of different lengths"),
        ({"field": b"\0\0"}, "damaged: arrays of different lengths"),
        ({"crc32": u4(1)}, "damaged: arrays of different lengths"),
        ({"keys": ["a", 7]}, "damaged: a key or a field that is not a string"),
        ({"keys": ["a"]}, "damaged: samples out of order"),
        ({"sample": u4(*[0] * 38, 1, 3)}, "damaged: samples out of order"),
        ({"sample": u4(*[19] * 40)}, "damaged: samples out of order"),
        ({"fields": ["bin"]}, "damaged: a field without a name"),
        ({"offset": u8(*range(512, 512 + 39), 1 << 40)}, "damaged: a member beyond the shard's end"),
        ({"size": u8(*[0] * 39, 2**64 - 1)}, "damaged: a member beyond the shard's end"),
        ({"offset": u8(*[512] * 40)}, "damaged: members that overlap"),
        ({"offset": u8(*range(40)), "size": u8(*[0] * 40)}, "damaged: members that overlap or lie beyond"),
    ],
)
def test_what_no_shard_can_be_like_is_refused(shard, changes, reason):
    path = Path(f"{shard}.index")
    path.write_bytes(repacked(path.read_bytes(), **changes))
    with pytest.raises(ShardIndexError) as caught:
        Index.load(shard)
    assert str(caught.value).startswith(f"{shard}.index: {reason}")


def test_every_truncation_is_refused(shard):
    packed = Path(f"{shard}.index").read_bytes()
    for length in range(len(packed)):
        with pytest.raises(ShardIndexError, match=r"damaged|not an index"):
            Index.unpack(packed[:length], url="a.tar.index")


def test_every_flipped_bit_is_refused(shard):
    packed = bytearray(Path(f"{shard}.index").read_bytes())
    rng = random.Random(0)
    for at in range(len(packed)):
        bit = 1 << rng.randrange(8)
        packed[at] ^= bit
        with pytest.raises(ShardIndexError):
            Index.unpack(bytes(packed), url="a.tar.index")
        packed[at] ^= bit


@given(st.binary(max_size=200))
def test_anything_else_is_refused(data):
    with pytest.raises(ShardIndexError):
        Index.unpack(data)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda samples: samples[:-4], "stale: the shard has .* bytes, but had"),
        (lambda samples: [{**samples[0], "__key__": "other"}, *samples[1:]], "stale: the shard's headers have changed"),
        (lambda samples: [*samples[:-1], {**samples[-1], "cls": 123}], "stale: the shard's headers have changed"),
    ],
)
def test_a_rewritten_shard_makes_it_stale(shard, change, reason):
    index = Index.load(shard)
    write_samples(change(SAMPLES), shard)
    index.save(shard)  # as if another program had written the shard
    with pytest.raises(ShardIndexError, match=reason) as caught:
        Index.load(shard)
    assert caught.value.url == f"{shard}.index"
    Index.load(shard, check=False)


def test_a_copied_shard_keeps_its_index(shard, tmp_path):
    for name in ("", ".index"):
        shutil.copy(shard + name, str(tmp_path / "copy.tar") + name)
    assert Index.load(str(tmp_path / "copy.tar")) == Index.load(shard)


def test_an_open_shard_is_checked(shard):
    index = Index.load(shard, check=False)
    with Location.of(shard).ranges() as ranges:
        index.check(ranges)
        index.shard_size += 512
        with pytest.raises(ShardIndexError, match=r"a\.tar\.index: stale"):
            index.check(ranges)


def test_many_come_in_order(tmp_path):
    urls = [str(tmp_path / f"{i}.tar") for i in range(50)]
    for i, url in enumerate(urls):
        write_samples([{"__key__": str(i), "cls": i}], url)
        build_index(url).save(url)
    locations = Shards(urls).locations()
    assert [index.keys for index in for_each_shard(Index.load, locations)] == [[str(i)] for i in range(50)]
    os.unlink(f"{urls[7]}.index")
    with pytest.raises(ShardIndexError, match=r"7\.tar\.index: no index found"):
        list(for_each_shard(Index.load, locations))


def test_remote_sidecars(tmp_path):
    import fsspec

    url = "memory://index/a.tar"
    write_samples(SAMPLES, url)
    with pytest.raises(ShardIndexError, match="no index found"):
        Index.load(url)
    build_index(url, crc=True).save(url)
    assert [len(index) for index in for_each_shard(Index.load, [Location(url)] * 3)] == [20] * 3
    fsspec.filesystem("memory").rm("/index", recursive=True)


def test_sidecars_of_web_servers(shard):
    with serving(Path(shard).parent) as site:
        indexes = list(for_each_shard(partial(Index.load, check=False), [Location(f"{site.url}/a.tar?token=1")] * 40))
        assert indexes == [Index.load(shard)] * 40
        with pytest.raises(ShardIndexError, match=r"none\.tar\.index: no index found"):
            Index.load(f"{site.url}/none.tar")


def test_differences_are_named(shard, tmp_path):
    index = build_index(shard, crc=True)
    other = str(tmp_path / "b.tar")
    write_samples([*SAMPLES[:9], {**SAMPLES[9], "bin": bytes(900)}, *SAMPLES[10:]], other)
    assert index.difference(build_index(other, crc=True)).startswith("009.bin has changed since")
    write_samples(SAMPLES[:7], other)
    assert "the shard has 7 samples, but had 20" in index.difference(build_index(other, crc=True))


def test_the_head_of_a_sidecar_counts_samples(shard, tmp_path):
    assert count_samples(Location(shard)) == len(SAMPLES)
    (tmp_path / "b.tar").write_bytes(b"another")
    shutil.copy(f"{shard}.index", tmp_path / "b.tar.index")
    for url in (str(tmp_path / "b.tar"), str(tmp_path / "none.tar"), "-", "http://127.0.0.1:1/a.tar"):
        assert count_samples(Location(url)) is None


def test_the_head_of_a_damaged_sidecar_counts_none_or_some(shard):
    path, rng = Path(f"{shard}.index"), random.Random(0)
    packed = path.read_bytes()
    for at in range(0, len(packed), 7):
        path.write_bytes(packed[:at])
        assert count_samples(Location(shard)) in (None, len(SAMPLES))
        path.write_bytes(packed[:at] + rng.randbytes(3) + packed[at + 3 :])
        assert count_samples(Location(shard)) is None or count_samples(Location(shard)) >= 0


@given(data=st.binary(max_size=200))
def test_the_head_of_anything_else_counts_none_or_some(data, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "any.tar"
    path.touch()
    Path(f"{path}.index").write_bytes(data)
    assert count_samples(Location(str(path))) is None or count_samples(Location(str(path))) >= 0


def test_threads_look_for_many_shards_only_where_that_has_to_wait():
    shards = [Location(f"set-{i}.tar") for i in range(3000)]
    threads: list[int] = []

    def find(shard: Location, *, waits: bool) -> Location:
        threads.append(threading.get_ident())
        if waits:
            time.sleep(1e-5)
        return shard

    assert list(for_each_shard(partial(find, waits=False), shards)) == shards
    assert set(threads) == {threading.get_ident()}
    threads.clear()
    assert list(for_each_shard(partial(find, waits=True), shards)) == shards
    assert len(set(threads)) > 2
    assert 0 < threads.count(threading.get_ident()) < 1500


@pytest.fixture(scope="module")
def long(tmp_path_factory) -> str:
    """A shard whose index has several pages, in which no sample has more fields than others."""
    url = str(tmp_path_factory.mktemp("long") / "a.tar")
    write_samples(({"__key__": f"{i:06d}", "txt": str(i), "cls": i} for i in range(1500)), url)
    build_index(url).save(url)
    return url


def wrong_page(url: str, entry: str, number: int) -> None:
    """Change a byte of an entry of the index of the shard *url*: the one at *number*."""
    path = Path(f"{url}.index")
    packed = bytearray(path.read_bytes())
    packed[msgpack.unpackb(packed)["pages"]["entries"][entry][0] + number] ^= 1
    path.unlink()
    path.write_bytes(packed)


@pytest.fixture
def large(monkeypatch) -> None:
    """Let any shards be a large set, whose indexes are checked where they are used."""
    load_kernel("tarshards.kernels._mapped")
    monkeypatch.setattr(opening, "MOST_WHOLE", 0)


@pytest.fixture
def copied(long, tmp_path) -> str:
    for end in ("", ".index"):
        shutil.copy(long + end, tmp_path / f"a.tar{end}")
    return str(tmp_path / "a.tar")


def test_a_long_index_has_checksums_of_its_pages(long):
    """Read as docs/index-format.md says, without our code."""
    packed = Path(f"{long}.index").read_bytes()
    found = msgpack.unpackb(packed)
    assert list(found)[-3:] == ["pages", "at", "checksum"]
    pages, (at, checksum) = found["pages"], found["at"]
    value = packed[at : packed.index(b"\xa2at\x92", at)]
    assert msgpack.unpackb(value) == pages
    assert crc32(value) == checksum
    sums = [crc32(packed[begin : min(begin + 4096, at)]) for begin in range(0, at, 4096)]
    assert pages["crc32"] == b"".join(value.to_bytes(4, "little") for value in sums)
    assert {*pages["entries"]} == {*found} - {"pages", "at", "checksum"}
    for name, (begin, end) in pages["entries"].items():
        value = found[name]
        assert packed[begin:end] == (value if isinstance(value, bytes) else msgpack.packb(value))
    assert pages["each"] == 2
    first = pages["entries"]["keys"][0] + 3
    for number in range(0, 1500, 64):
        mark = int.from_bytes(pages["marks"][number // 64 * 4 :][:4], "little")
        assert packed[first + mark :].startswith(msgpack.packb(f"{number:06d}"))


def test_an_index_without_pages_is_read_alike(copied):
    packed = Path(f"{copied}.index").read_bytes()
    earlier = Index.unpack(repacked(packed, pages=None, at=None))
    assert earlier == Index.unpack(packed)
    Path(f"{copied}.index").write_bytes(repacked(packed, pages=None, at=None))
    assert Index.load(copied, whole=False) == earlier
    assert IndexedShards(copied)[1499]["txt"] == b"1499"


@pytest.mark.usefixtures("large")
def test_a_page_of_an_index_is_read_where_it_is_used(copied):
    """Of an index in which all other pages are wrong, a sample is found; what reads all of it tells of that."""
    path = Path(f"{copied}.index")
    packed = path.read_bytes()
    found = msgpack.unpackb(packed)
    entries, (at, _) = found["pages"]["entries"], found["at"]
    kept = {0, entries["fields"][0] // 4096, *(entries[name][0] // 4096 for name in ("offset", "size", "field"))}
    kept |= {(entries[name][1] - width) // 4096 for name, width in (("offset", 8), ("size", 8), ("field", 2))}
    kept |= {(entries[name][1] - 1) // 4096 for name in ("sample",)}
    wrong = bytearray(packed)
    for page in {*range(at // 4096)} - kept - {(entries["fields"][1] - 1) // 4096}:
        wrong[page * 4096 : (page + 1) * 4096] = bytes(4096)
    path.unlink()
    path.write_bytes(wrong)
    shards = IndexedShards(copied)
    assert shards[0] == {"__key__": "000000", "__url__": copied, "txt": b"0", "cls": b"0"}
    with pytest.raises(ShardIndexError, match=r"a\.tar\.index: damaged: truncated, or wrong checksum"):
        list(shards.keys)
    with pytest.raises(ShardIndexError, match=r"a\.tar\.index: damaged: truncated, or wrong checksum"):
        Index.load(copied)


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize(("entry", "width"), [("offset", 16), ("size", 16), ("field", 4), ("keys", 7)])
def test_samples_of_a_damaged_page_fail_and_others_are_read(copied, entry, width):
    wrong_page(copied, entry, 3 + width * 700)
    reason = r"a\.tar\.index: damaged: truncated, or wrong checksum; rebuild it with `tarindex`"
    shards, errors = IndexedShards(copied), []
    with pytest.raises(ShardIndexError, match=reason):
        shards[700]
    read = [sample["txt"] for sample in Stream.from_shards(copied, index=True, on_error=errors.append)]
    assert {*map(int, read)} | {*range(1500)} == {*range(1500)}
    assert len(read) + len(errors) == 1500
    assert 0 < len(errors) <= 4096 // width * 2 + 4
    assert all(type(error) is ShardIndexError for error in errors)
    found = shards.mapped(parse_terms("txt")).find(np.zeros(1500, np.int64), *2 * [np.arange(1500)])
    failures = {**found.failures, **found.check()}
    assert {*failures}.isdisjoint(map(int, read))
    assert len(failures) >= len(errors) - 2  # the page may have what only the other field needs
    assert all(re.search(reason, str(error)) for error in failures.values())


@pytest.mark.parametrize("entry", ["keys", "fields", "offset", "crc32"])
def test_tarindex_tells_of_any_damaged_page(copied, entry):
    build_index(copied, crc=True).save(copied)
    list(refresh_indexes([copied]))
    before = Path(f"{copied}.index").read_bytes()
    wrong_page(copied, entry, 1)
    (checked,) = verify_indexes([copied])
    assert isinstance(checked.error, ShardIndexError)
    assert "damaged: truncated, or wrong checksum" in str(checked.error)
    (rebuilt,) = refresh_indexes([copied], crc=True)
    assert rebuilt.written == f"{copied}.index"
    assert Path(f"{copied}.index").read_bytes() == before


def test_what_is_read_to_open_an_index_does_not_grow_with_it(tmp_path, monkeypatch):
    load_kernel("tarshards.kernels._mapped")
    read = []
    for samples in 3000, 9000:
        url = str(tmp_path / f"{samples}.tar")
        write_samples(({"__key__": f"{i:06d}", "txt": "x"} for i in range(samples)), url)
        build_index(url).save(url)
        sizes: list[int] = []

        class Ranges(LocalRanges):
            def read(self, offset: int, size: int, sizes: list[int] = sizes) -> bytes:
                sizes.append(size)
                return super().read(offset, size)

        monkeypatch.setattr(sidecar, "LocalRanges", Ranges)
        assert len(Index.load(url, check=False, whole=False)) == samples
        read.append(sum(sizes))
    pages = os.path.getsize(f"{url}.index") // 4096
    assert read[0] < 5 * 4096
    assert read[1] - read[0] < 8 * pages + 4 * 9000 // 64
