"""No work on what an archive, a list, a catalog or a server says of itself grows faster than its length.

Each case makes an input of n, 2n and 4n parts, and counts steps: lines of Python that run, also those of standard
modules, and blocks of bytes that are read, copied or stored. Seconds are not measured.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import math
import struct
import sys
import tracemalloc
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from unittest.mock import patch

import msgpack
import pytest
from programs import load_kernel
from tar_corpus import entry, header, pax, seal
from with_torch import tariterators

from tarshards import IndexedShards, Ledger, read_msgpack, read_samples
from tarshards.epoch.proportions import Mixture
from tarshards.errors import DecodeError, TarshardsError, UrlError
from tarshards.formats import pieces
from tarshards.formats.catalog import Catalog, DatasetVersion, Split
from tarshards.formats.tfrecord import parse_example
from tarshards.index import header_checks
from tarshards.index.build import build_index
from tarshards.index.header_checks import check_header, first_header
from tarshards.run.samples.journal import Journal, SampleResult
from tarshards.samples.codecs.image_headers import PNG, PNG_END, icon_images
from tarshards.samples.conditions import Condition
from tarshards.samples.keys import split_name
from tarshards.samples.resync import judging
from tarshards.samples.resync.judging import judge
from tarshards.samples.resync.reading import survey_file
from tarshards.samples.resync.walking import FoundSample, Zeros
from tarshards.storage.compression import decompressed, zstd_library
from tarshards.storage.expressions import _OTHER_RANGES, _missing_numbers, _parts, expand_urls, find_shards
from tarshards.storage.location import Location
from tarshards.storage.manifest import parse_manifest, series_url
from tarshards.storage.opening import open_plain, open_url
from tarshards.storage.redaction import redacted
from tarshards.tar import elsewhere
from tarshards.tar.elsewhere import SpecialMembers, UnresolvedError, expand, link_target, member_at
from tarshards.tar.read import BLOCK, END, MEMBER_LIMIT, _Members, read_archive, read_members, scan
from tarshards.testing.faulty_server import Answer, serving

STEEPEST = 1.2  # the exponent
LONGEST = 10  # links in a chain here, not 40, so that shorter inputs show the growth


class Steps:
    """Counts the steps of a with-block: lines in this thread, and what ``add`` adds."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, size: int) -> None:
        self.count += 1 + size // BLOCK

    def __enter__(self) -> Steps:
        def trace(frame: Any, event: str, _: Any) -> Any:
            self.count += event == "line"
            return trace

        self._before = sys.gettrace()
        sys.settrace(trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)


class Copied(bytes):
    """Bytes whose slices are counted."""

    steps: Steps

    def __getitem__(self, at: Any) -> Any:
        part = super().__getitem__(at)
        return counted(part, self.steps) if isinstance(part, bytes) else part


def counted(data: bytes, steps: Steps) -> Copied:
    steps.add(len(data))
    copied = Copied(data)
    copied.steps = steps
    return copied


# Archives.


def reader_of(archive: bytes, steps: Steps) -> Callable[[int, int], bytes]:
    def read(offset: int, size: int) -> bytes:
        data = archive[offset : offset + size]
        steps.add(len(data))
        return data

    return read


def file_of(name: str, data: bytes = b"x") -> bytes:
    return entry(data, name=name.encode())


def link(name: str, target: str, kind: bytes = b"2") -> bytes:
    block = bytearray(header(name=name.encode(), kind=kind))
    block[157 : 157 + len(target)] = target.encode()
    return seal(block)


def chain(n: int) -> bytes:
    links = (link(f"{i}.txt", f"{i - 1}.txt" if i else "f.txt") for i in range(n))
    return file_of("f.txt") + b"".join(links) + END


def to_a_chain(n: int, links: int = LONGEST) -> bytes:
    """Links to the beginning of the longest chain that is followed."""
    names = (f"l{i}.txt" for i in range(n))
    return chain(links - 1)[: -len(END)] + b"".join(link(name, f"{links - 2}.txt") for name in names) + END


def to_one_of_many(n: int) -> bytes:
    return file_of("f.txt") * n + b"".join(link(f"{i}.txt", "f.txt", b"1") for i in range(n)) + END


def to_many_records(n: int) -> bytes:
    target = pax(*[b"a=" + b"1" * 200] * n) + file_of("f.txt")
    return target + b"".join(link(f"{i}.txt", "f.txt") for i in range(n)) + END


def to_a_map(n: int) -> bytes:
    pieces = b",".join(b"%d,1" % (2 * i) for i in range(n))
    target = pax(b"GNU.sparse.size=%d" % (2 * n), b"GNU.sparse.map=" + pieces) + entry(bytes(n), name=b"f.txt")
    return target + b"".join(link(f"{i}.txt", "f.txt") for i in range(n)) + END


def to_a_damaged_map(n: int) -> bytes:
    target = pax(b"GNU.sparse.size=0", b"GNU.sparse.map=" + b"0,0," * n + b"0,0") + header(name=b"f.txt")
    return target + b"".join(link(f"{i}.txt", "f.txt") for i in range(n)) + END


def to_nothing(n: int) -> bytes:
    """Links to one whose name and target are long."""
    target = pax(b"path=" + b"d/../" * 80 * n + b"f.txt", b"linkpath=" + b"m" * 400 * n) + link("x", "y")
    return target + b"".join(link(f"{i}.txt", "f.txt") for i in range(n)) + END


ARCHIVES = {chain: 25, to_a_chain: 20, to_one_of_many: 30, to_many_records: 40, to_a_map: 30, to_a_damaged_map: 50}
ARCHIVES |= {to_nothing: 30}


def saved(archive: bytes, folder: Any, name: str = "a.tar") -> str:
    (folder / name).write_bytes(archive)
    return str(folder / name)


def index_of(archive: bytes, steps: Steps, folder: Any) -> None:
    steps.add(len(build_index(saved(archive, folder)).pack()))


def streamed(archive: bytes, steps: Steps, folder: Any) -> None:
    deque(read_samples(saved(archive, folder), on_error=Ledger(max_errors=1 << 30)), 0)


def surveyed(archive: bytes, steps: Steps, folder: Any) -> None:
    with open_plain(saved(archive, folder)) as file:
        survey_file(file)


def by_steps(archive: bytes, steps: Steps, folder: Any) -> None:
    contents = SpecialMembers(reader_of(archive, steps))
    for _, at, _, _, kind in scan(archive, 0, 0, MEMBER_LIMIT)[0]:
        if kind:
            with suppress(UnresolvedError):
                contents.find(at, whole=True)


def growth(count: Callable[[int], int], n: int) -> float:
    """Return the greatest exponent between inputs of n, 2n and 4n parts."""
    small, middle, large = count(n), count(2 * n), count(4 * n)
    return max(math.log2(middle / small), math.log2(large / middle))


@pytest.mark.parametrize("way", [index_of, streamed, surveyed, by_steps], ids=lambda way: way.__name__)
@pytest.mark.parametrize("make", ARCHIVES, ids=lambda make: make.__name__)
def test_links(tmp_path, monkeypatch, make, way):
    monkeypatch.setattr(elsewhere, "MOST_LINKS", LONGEST)
    if (make, way) == (to_a_map, streamed):
        return  # each link delivers as many bytes as there are pieces

    def count(n: int) -> int:
        archive = make(n)
        with Steps() as steps:
            way(archive, steps, tmp_path)
        return steps.count

    assert growth(count, ARCHIVES[make]) <= STEEPEST


def many_headers(n: int, steps: Steps, folder: Any) -> None:
    archive = pax(b"a=1") * n + file_of("f.txt") + END
    assert member_at(reader_of(archive, steps), 0)[0] == "f.txt"


def walked(twin: str) -> Callable[[int, Steps, Any], None]:
    def run(n: int, steps: Steps, folder: Any) -> None:
        archive = pax(b"a=1") * n + file_of("f.txt") + END
        reads = 2 << 10, 1 << 14, 1 << 15
        walk = load_kernel(f"tarshards.kernels.{twin}").walk
        assert walk(reader_of(archive, steps), len(archive), reads, MEMBER_LIMIT, split_name)

    return run


def long_names(n: int, steps: Steps, folder: Any) -> None:
    archive = entry(b"f.txt\0", name=b"././@LongLink", kind=b"L") * n + file_of("x") + END
    assert member_at(reader_of(archive, steps), 0)[0] == "f.txt"


def global_headers(n: int, steps: Steps, folder: Any) -> None:
    archive = pax(b"comment=x", kind=b"g") * n + file_of("f.txt") + END
    assert [member.name for member in read_members(io.BytesIO(archive))] == ["f.txt"]


def records(n: int, steps: Steps, folder: Any) -> None:
    head = pax(*[b"a=1"] * n, b"linkpath=f.txt") + link("l.txt", "x")
    assert link_target(counted(head, steps)) == "f.txt"


def in_small_pieces(n: int, steps: Steps, folder: Any) -> None:
    class Pieces(io.BytesIO):
        def seekable(self) -> bool:
            return False

        def read(self, size: Any = -1, /) -> bytes:
            return super().read(min(size, 64))

    class Taker(_Members):
        def take(self, buffer: bytes, *arguments: Any) -> Any:
            steps.add(len(buffer))
            return super().take(buffer, *arguments)

    archive = pax(b"a=" + b"1" * 64 * n) + file_of("f.txt") + END
    assert len(list(read_archive(Pieces(archive), Taker(None, False)))) == 1


def old_map(n: int, steps: Steps, folder: Any) -> None:
    block = bytearray(header(name=b"f.txt", kind=b"S"))
    block[482], block[483:495] = 1, b"%011o\0" % 0
    more = bytearray(BLOCK)
    more[504] = 1
    archive = seal(block) + bytes(more) * (n - 1) + bytes(BLOCK) + END
    assert member_at(reader_of(archive, steps), 0)[4] == "sparse member"
    expand(counted(archive[: -len(END)], steps), b"")


def map_0_0(n: int, steps: Steps, folder: Any) -> None:
    pieces = [part for i in range(n) for part in (b"GNU.sparse.offset=%d" % (2 * i), b"GNU.sparse.numbytes=1")]
    expand(counted(pax(b"GNU.sparse.size=%d" % (2 * n), *pieces) + header(), steps), counted(bytes(n), steps))


def map_0_1(n: int, steps: Steps, folder: Any) -> None:
    pieces = b",".join(b"%d,1" % (2 * i) for i in range(n))
    head = pax(b"GNU.sparse.size=%d" % (2 * n), b"GNU.sparse.map=" + pieces) + header()
    expand(counted(head, steps), counted(bytes(n), steps))


def map_1_0(n: int, steps: Steps, folder: Any) -> None:
    head = pax(b"GNU.sparse.major=1", b"GNU.sparse.minor=0", b"GNU.sparse.realsize=%d" % (2 * n)) + header()
    text = b"".join([b"%d\n" % n, *[b"%d\n1\n" % (2 * i) for i in range(n)]])
    expand(counted(head, steps), counted(text + bytes(-len(text) % BLOCK) + bytes(n), steps))


def folders(n: int, steps: Steps, folder: Any) -> None:
    """The folders of a name with many slashes were listed, each whole."""
    archive = pax(b"path=" + b"a/" * n + b"b.txt") + file_of("x") + link("l.txt", "a") + END
    contents = SpecialMembers(reader_of(archive, steps))
    tracemalloc.start()
    assert contents.find(len(archive) - len(END) - BLOCK) == []
    steps.add(tracemalloc.get_traced_memory()[1])
    tracemalloc.stop()


def duplicates(twin: str) -> Callable[[int, Steps, Any], None]:
    def run(n: int, steps: Steps, folder: Any) -> None:
        grouper = load_kernel(f"tarshards.kernels.{twin}").Grouper("a.tar", split_name, False)
        members = iter([(f"{i}.txt", b"", 0) for i in range(n) for _ in "ab"])
        while grouper.next(members) is not None:
            steps.add(_size_of(grouper))
            _forget(grouper)

    return run


def _size_of(grouper: Any) -> int:
    """Return the keys that the twin in Python has copied: a set that is replaced was copied."""
    earlier = getattr(grouper, "_earlier", None)
    copied = isinstance(earlier, set) and id(earlier) != getattr(grouper, "_before", id(earlier))
    return BLOCK * len(earlier) if copied and earlier is not None else 0


def _forget(grouper: Any) -> None:
    if hasattr(grouper, "_earlier"):
        grouper._before = id(grouper._earlier)
        grouper._kept = grouper._earlier  # so that no other set gets its address


def dots(n: int, steps: Steps, folder: Any) -> None:
    archive = b"".join(pax(b"path=a" + b"." * i + b"txt") + file_of("x") for i in (n, n + 1)) + END
    saved(archive, folder)
    deque(read_samples(str(folder / "a.tar"), on_error=Ledger(max_errors=1 << 30)), 0)


def extended(n: int, steps: Steps, folder: Any) -> None:
    archive = pax(b"a=1") * n + file_of("f.txt")
    header = len(archive) - 2 * BLOCK

    def scanning(buffer: bytes, position: int, *arguments: Any) -> Any:
        steps.add(len(buffer) - position)
        return scan(buffer, position, *arguments)

    with patch.object(header_checks, "scan", scanning):
        assert first_header(lambda at, size: archive[at : at + size], header, 0) == 0


def checked_header(n: int, steps: Steps, folder: Any) -> None:
    archive = pax(b"a=1") * n + file_of("f.txt") + END
    index = build_index(saved(archive, folder))
    check_header(reader_of(archive, steps), index, 0, url="a.tar")


def holes(n: int, steps: Steps, folder: Any) -> None:
    """Each of many blocks that look like headers leads to the same zeros."""
    fakes = [entry(b"", name=b"f%d.txt" % i, size=b"%011o\0" % (BLOCK * (n - i))) for i in range(n)]
    archive = file_of("a.txt") + b"\1" * BLOCK + b"".join(fakes) + bytes(BLOCK * 20 * n) + b"\1" * BLOCK
    with open_plain(saved(archive, folder)) as file:
        read = file.read
        file.read = lambda at, size: counted(read(at, size), steps)  # type: ignore[method-assign]
        survey_file(file)


def fake_headers(n: int, steps: Steps, folder: Any) -> None:
    """Each of many blocks that look like extended headers claims all that follow."""
    fakes = [entry(b"", name=b"9 a=b", kind=b"x", size=b"%011o\0" % (BLOCK * (n - i))) for i in range(n)]
    archive = file_of("a.txt") + b"\1" * BLOCK + b"".join(fakes) + b"\1" * 4 * BLOCK
    with open_plain(saved(archive, folder)) as file:
        read = file.read
        file.read = lambda at, size: counted(read(at, size), steps)  # type: ignore[method-assign]
        survey_file(file)


class Nothing:
    """A file of zeros."""

    size = 1

    def read(self, offset: int, size: int) -> bytes:
        return bytes(size)


def kinds(n: int, steps: Steps, folder: Any) -> None:
    """Each of many samples has its own field, as another one next to damage."""
    samples = [FoundSample(f"{key}{i}", i, 0, key == "b", [(f"f{i}", 0, 1)]) for key in "ab" for i in range(n)]
    with patch.object(judging, "MOST_KINDS", 64):
        judge(samples, [], Nothing())  # type: ignore[arg-type]


def ends(n: int, steps: Steps, folder: Any) -> None:
    """The first members of a field were looked for again for each sample next to damage."""
    samples = [FoundSample(f"a{i}", i, 0, False, [("a", 0, 1)]) for i in range(n)]
    samples.append(FoundSample("c", n, 0, False, [("c", 0, 1)]))
    breaks: list[Any] = [(0, Zeros(BLOCK, 2 * BLOCK))]
    samples += [FoundSample(f"b{i}", i, 0, True, [("c", 0, 1)], breaks=breaks) for i in range(n)]
    judge(samples, [], Nothing())  # type: ignore[arg-type]


def compressed(compress: Callable[[bytes], bytes]) -> Callable[[int, Steps, Any], None]:
    def run(n: int, steps: Steps, folder: Any) -> None:
        stream = decompressed(io.BytesIO(compress(b"") * n + compress(b"x")), "a.tar", None)
        assert stream.read(1) == b"x"

    return run


# Expressions, lists, manifests, catalogs.


def refused(spec: str) -> None:
    with pytest.raises(UrlError):
        expand_urls(spec)


def nested_lists(n: int, steps: Steps, folder: Any) -> None:
    """Lists that each name the next one twice."""
    for i in range(n):
        (folder / f"{i}").write_text(f"@{folder}/{i + 1}\n" * 2)
    (folder / f"{n}").write_text("#\n")
    refused(f"@{folder}/0")


def named_often(n: int, steps: Steps, folder: Any) -> None:
    """A list that names one manifest, one pattern and one list many times."""
    names = [f"{folder}/m.json", f"{folder}/s*.tar", f"@{folder}/other"]
    (folder / "list").write_text("\n".join(names * n))
    (folder / "other").write_text("#\n" * n + "a.tar\n")
    (folder / "m.json").write_text(json.dumps({"wids_version": 1, "shardlist": [{"url": "a.tar"}], "x": [1] * n}))
    for i in range(n):
        (folder / f"x{i}.tar").touch()
    (folder / "s.tar").touch()
    read = Location.read

    def counting(location: Location, *arguments: Any) -> bytes:
        steps.add(BLOCK * n)  # it has n parts
        return read(location, *arguments)

    with patch.object(Location, "read", counting):
        assert len(find_shards(f"@{folder}/list")) == 3 * n


def open_braces(n: int, steps: Steps, folder: Any) -> None:
    refused("{::" * n)


def nested_braces(n: int, steps: Steps, folder: Any) -> None:
    refused("{a," * n + "b" + "}" * n)


def many_braces(n: int, steps: Steps, folder: Any) -> None:
    assert expand_urls("{a}" * n + "{0..1}" + "{0..0}" * n) == ["{a}" * n + f"{i}" + "0" * n for i in range(2)]


def alternatives(n: int, steps: Steps, folder: Any) -> None:
    assert len(expand_urls("{" + "a," * n + "a}")) == n + 1


def paths(n: int, steps: Steps, folder: Any) -> None:
    assert len(expand_urls("d/a.tar::" * n + "b.tar")) == n + 1


def manifest(n: int, steps: Steps, folder: Any) -> None:
    entries: list[Any] = [{"url": f"{i}.tar", **({"nsamples": 1} if i % 2 else {})} for i in range(n)]
    assert len(parse_manifest(json.dumps({"wids_version": 1, "shardlist": entries}), "m.json")) == n


def versions(n: int, steps: Steps, folder: Any) -> None:
    catalog = Catalog("a.yaml")
    catalog.versions["a"] = {f"{i}": DatasetVersion("a", f"{i}", {"b": Split(("a.tar",))}) for i in range(n)}
    for name in catalog.entries():
        assert catalog.shards(name).urls == ["a.tar"]


def catalog_entries(n: int, steps: Steps, folder: Any) -> None:
    names = "".join(f"    '{i}': {{splits: {{a: a.tar}}}}\n" for i in range(n))
    (folder / "a.yaml").write_text(f"tarshards_catalog: 1\ndatasets:\n  a:\n{names}")
    assert len(Catalog.load(folder / "a.yaml").versions["a"]) == n


# Servers.


def answered(raw: bytes) -> bytes:
    with serving() as server:
        return open_url(server.play(body=b"", default=Answer(raw=raw))).read()


def chunks(n: int, steps: Steps, folder: Any) -> None:
    raw = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1;a=b\r\nx\r\n" * n + b"0\r\n\r\n"
    assert answered(raw) == b"x" * n


def trailers(n: int, steps: Steps, folder: Any) -> None:
    raw = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n" + b"a: b\r\n" * n + b"\r\n"
    assert answered(raw) == b"x"


def headers(n: int, steps: Steps, folder: Any) -> None:
    """Cookies: a server may set a hundred, and they may be long."""
    raw = b"HTTP/1.1 200 OK\r\n" + b"Set-Cookie: %b\r\n" % (b"a=b;" * 100) * min(n, 90) + b"Content-Length: 1\r\n\r\nx"
    assert answered(raw) == b"x"


def interim(n: int, steps: Steps, folder: Any) -> None:
    raw = b"HTTP/1.1 103 Early Hints\r\nLink: a\r\n\r\n" * n + b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx"
    assert answered(raw) == b"x"


# Samples, records, states.


def objects(n: int, steps: Steps, folder: Any) -> None:
    (folder / "a.msgpack").write_bytes(msgpack.packb({"x": [1] * 9 * n}) + msgpack.packb({"x": [[[1]]]}) * n)
    assert len(list(read_msgpack(folder / "a.msgpack"))) == n + 1


def icon(n: int, steps: Steps, folder: Any) -> None:
    """Each entry of the directory names the same bytes, or some that overlap."""
    png = PNG + b"\0\0\0\rIHDR" + struct.pack(">II", 16, 16) + bytes(9 + 100 * n) + PNG_END
    for shift in 0, 1:
        at = 6 + 16 * n
        entries = [bytes([16, 16, 0, 0, 0, 0, 0, 0]) + struct.pack("<II", len(png) - shift * i, at) for i in range(n)]
        data = b"\0\0\1\0" + struct.pack("<H", n) + b"".join(entries) + png
        with suppress(DecodeError):
            for begin, end in icon_images(data):
                steps.add(end - begin)


def quoted_head(n: int, steps: Steps, folder: Any) -> None:
    """A quote in the first row of a CSV that is never closed."""
    (folder / "a.csv").write_text('a,"b\n' + "c,d\n" * n)

    class Counted(bytes):
        def count(self, *arguments: Any) -> int:  # type: ignore[override]
            steps.add(BLOCK * len(self))
            return super().count(*arguments)

        def __radd__(self, before: bytes) -> bytes:
            return Counted(before + bytes(self))

        def __add__(self, after: bytes) -> bytes:
            return Counted(bytes(self) + bytes(after))

    opened = pieces.open_text

    @contextmanager
    def counting(url: Any) -> Iterator[Any]:
        with opened(url) as text:
            yield map(Counted, text)

    with patch.object(pieces, "open_text", counting), suppress(TarshardsError):
        pieces._csv_head(str(folder / "a.csv"))


def proto(number: int, data: bytes) -> bytes:
    length, size = b"", len(data)
    while size > 127:
        length, size = length + bytes([size & 127 | 128]), size >> 7
    return bytes([number << 3 | 2]) + length + bytes([size]) + data


def features(n: int, steps: Steps, folder: Any) -> None:
    """Each feature has the same name."""
    entries = [proto(1, proto(1, b"a") + proto(2, proto(1, proto(1, b"x") * 2))) for _ in range(n)]
    assert parse_example(counted(proto(1, b"".join(entries)), steps)) == {"a": [b"x", b"x"]}


def conditions(n: int, steps: Steps, folder: Any) -> None:
    condition = Condition("not " * min(n, 80) + "cls > 3")
    assert condition({"__key__": "a", "cls": b"7"}) == (n % 2 == 0)


def mixture(n: int, steps: Steps, folder: Any) -> None:
    mixed = Mixture([1] * n, seed=0)
    mixed.take(9)
    assert len(Mixture([1] * n, 0, mixed.counts).take(9)) == 9


def journal(n: int, steps: Steps, folder: Any) -> None:
    path = str(folder / f"journal{n}")
    written = Journal(path)
    for i in range(n):
        written.add(f"{i % 7}", SampleResult([], None))
    written.close()
    Journal(path).close()


CASES: dict[str, tuple[Callable[[int, Steps, Any], None], int]] = {
    "small extended headers": (many_headers, 250),
    **{f"small extended headers, {twin}": (walked(twin), 250) for twin in ("_tar", "_tar_py")},
    "long names of GNU": (long_names, 250),
    "global headers": (global_headers, 100),
    "records of a link": (records, 700),
    "a header in small pieces": (in_small_pieces, 500),
    "map of GNU": (old_map, 100),
    "map 0.0": (map_0_0, 150),
    "map 0.1": (map_0_1, 150),
    "map 1.0": (map_1_0, 150),
    "folders of a name": (folders, 1000),
    **{f"duplicate fields, {twin}": (duplicates(twin), 500) for twin in ("_tar", "_tar_py")},
    "dots in a name": (dots, 500),
    "extended headers of an indexed member": (extended, 200),
    "headers of an indexed member": (checked_header, 250),
    "zeros in a damaged shard": (holes, 50),
    "headers in a damaged shard": (fake_headers, 500),
    "kinds of samples in a damaged shard": (kinds, 100),
    "ends of fields in a damaged shard": (ends, 300),
    "members of gzip": (compressed(gzip.compress), 100),
    "streams of bzip2": (compressed(bz2.compress), 100),
    "streams of xz": (compressed(lzma.compress), 100),
    "frames of zstd": (compressed(zstd_library().compress), 100),
    "lists that name lists": (nested_lists, 3),
    "names in a list": (named_often, 20),
    "open braces": (open_braces, 100),
    "nested braces": (nested_braces, 50),
    "many braces": (many_braces, 50),
    "alternatives": (alternatives, 200),
    "paths": (paths, 100),
    "manifest": (manifest, 300),
    "versions in a catalog": (versions, 50),
    "entries of a catalog": (catalog_entries, 5),
    "chunks of a body": (chunks, 100),
    "trailers": (trailers, 20),
    "headers of a response": (headers, 22),
    "interim responses": (interim, 30),
    "objects of msgpack": (objects, 300),
    "quotes in a CSV": (quoted_head, 50),
    "images of an icon": (icon, 100),
    "features of an Example": (features, 100),
    "a condition": (conditions, 20),
    "datasets of a mixture": (mixture, 20),
    "a journal": (journal, 50),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_steps(tmp_path, monkeypatch, case):
    monkeypatch.chdir(tmp_path)
    run, n = CASES[case]

    def count(n: int) -> int:
        folder = tmp_path / f"{n}"
        folder.mkdir()
        with Steps() as steps:
            run(n, steps, folder)
        return steps.count

    assert growth(count, n) <= STEEPEST


MANY = 50_000  # parts of a text that took minutes, or hours, where each was compared with all that follow

TEXTS: dict[str, Callable[[], object]] = {
    "separators": lambda: deque(_parts("a::" * MANY), 0),
    "links of a chain": lambda: Location("zip://a::" + "b::" * MANY).links,
    "braces in each other": lambda: refused("{" * MANY + "}" * MANY),
    "other brackets": lambda: _OTHER_RANGES.search("_OP_" * MANY + ".."),
    "classes": lambda: _OTHER_RANGES.search("[{" + "." * 20 * MANY),
    "numbers in a name": lambda: _missing_numbers(list(map(Location, ["1" * MANY + "a1.tar", "2.tar"]))),
    "series": lambda: series_url("1" * MANY + "a1.tar"),
    "names of members": lambda: tariterators.base_plus_ext("a/" * MANY + "b"),
    "queries": lambda: redacted("? " + "://" * MANY),
    "numbers of base 60": lambda: Catalog("a.yaml")._parse(b"tarshards_catalog: 1" + b":1" * MANY),
    "numbers of base 60 with a point": lambda: Catalog("a.yaml")._parse(b"tarshards_catalog: 1" + b":1" * MANY + b".5"),
}


@pytest.mark.parametrize("text", TEXTS)
def test_texts_are_searched_once(text):
    """Regular expressions, and the arithmetic of integers, show no steps."""
    with suppress(TarshardsError):
        TEXTS[text]()


# Chains of links.


def test_forty_links_are_followed(tmp_path):
    """GNU's libc and Linux follow as many; each reader says the same of the next one."""
    shard = saved(chain(43), tmp_path)
    ledger = Ledger(max_errors=9)
    keys = [sample["__key__"] for sample in read_samples(shard, on_error=ledger)]
    assert keys == ["f", *(f"{i}" for i in range(40))]
    build_index(shard).save(shard)
    indexed = IndexedShards(shard)
    assert [indexed[i]["txt"] for i in range(41)] == [b"x"] * 41
    reasons = []
    for i in (41, 42, 43):
        with pytest.raises(TarshardsError) as caught:
            indexed[i]
        reasons.append(caught.value.reason)
    assert reasons == [entry[4] for entry in ledger.quarantined]
    assert reasons[0] == "incomplete: symbolic link to '39.txt', which leads through more than 40 links"


def test_links_that_lead_through_long_names_make_no_large_index(tmp_path):
    names = [f"{'d/../' * 300}{i}.txt" for i in range(5)]
    archive = file_of("f.txt")
    for i, name in enumerate(names):
        archive += pax(f"path={name}".encode()) + link("x", f"{i - 1}.txt" if i else "f.txt")
    archive += b"".join(link(f"l{i}.txt", "4.txt") for i in range(50)) + END
    index = build_index(saved(archive, tmp_path))
    assert len(index.pack()) < len(archive)
    reason = "incomplete: symbolic link to '4.txt', which leads through more than 4096 bytes of names"
    assert {fault.reason for fault in index.faults.values()} > {reason}


@pytest.mark.parametrize("make", ARCHIVES, ids=lambda make: make.__name__)
def test_an_index_is_not_much_larger_than_its_archive(tmp_path, make):
    archive = to_a_chain(1000, 40) if make is to_a_chain else make(1000)
    assert len(build_index(saved(archive, tmp_path)).pack()) < 3 * len(archive)
