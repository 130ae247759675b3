"""All faults of external input (files, servers, indexes, states) raise errors of our error tree."""

from __future__ import annotations

import copy
import gzip
import io
import json
import os
import random
import re
import socket
import struct
import tarfile
import threading
import tracemalloc
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice, product
from typing import Any
from zlib import crc32

import msgpack
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from soak import SOAK
from with_torch import ShardDataset, ShardLoader, tariterators, webdataset

from tarshards import (
    ArrayLoader,
    IndexedShards,
    Ledger,
    ShardWriter,
    Stream,
    mix,
    read_members,
    read_msgpack,
    read_samples,
    readers,
)
from tarshards.cli import tarcat, tarcheck, tarsort, tarsplit
from tarshards.errors import DecodeError, OpenError, SampleError, StateError, TarError, TarshardsError, UrlError
from tarshards.formats.tfrecord import masked, read_records
from tarshards.index.build import build_index
from tarshards.index.sidecar import Index
from tarshards.run.jobs.job_folder import JobFolder
from tarshards.run.jobs.job_plan import JobPlan, make_plan
from tarshards.run.jobs.scheduler import log_of, options_of, status_of
from tarshards.samples.codecs import decode_field
from tarshards.samples.codecs.npy import parse_header
from tarshards.samples.lines import numbered_lines
from tarshards.storage import compression, requests
from tarshards.storage.expressions import find_shards
from tarshards.storage.location import Location
from tarshards.storage.manifest import parse_manifest
from tarshards.storage.markers import Marker
from tarshards.storage.opening import open_shard, open_url
from tarshards.storage.remote import Remote
from tarshards.verbs.check import check_shards
from tarshards.verbs.repair import repair_shards

NUMBERS = [-1, 1, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64, 10**30, -(2**70), 1.5, float("inf"), float("nan")]
VALUES = [*NUMBERS, None, True, "", "x", "\0", "\ud800", "9" * 50, [], [1], [[]], [None], ["a"], [[0, 1]], {}, {"a": 1}]
VALUES += [[2**64, 1], [[1, -1]], [1, 2, 3], [{}]]

DIGITS = "9" * 5000  # more than int() takes


def of_the_tree(action: Callable[[], object]) -> TarshardsError | None:
    """Call *action*, and return the error of the tree that it raises; any other fails the test."""
    try:
        action()
    except TarshardsError as error:
        return error
    return None


def write_tar(path, fields: dict[str, bytes]) -> str:
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for name, data in fields.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    (path.parent / f"{path.name}.index").write_bytes(build_index(str(path)).pack())
    return str(path)


@pytest.fixture
def shard(tmp_path) -> str:
    return write_tar(tmp_path / "a.tar", {f"k{number}.txt": b"abc" for number in range(3)})


def variants(value: object, places: tuple = ()) -> Iterator[object]:
    """Yield copies of *value*, JSON of any depth, with one part of it replaced, and with one left out."""

    def put(holder, keys, new):
        holder = copy.deepcopy(holder)
        last = holder
        for key in keys[:-1]:
            last = last[key]
        if new is put:
            del last[keys[-1]]
        else:
            last[keys[-1]] = new
        return holder

    def walk(part, keys):
        if keys:
            for new in (*VALUES, put):
                yield put(value, keys, new)
        if isinstance(part, dict):
            for key in part:
                yield from walk(part[key], (*keys, key))
        elif isinstance(part, list):
            for place in range(len(part)):
                yield from walk(part[place], (*keys, place))

    yield from VALUES
    yield from walk(value, ())


# Names.

NAMES = [
    "a\0b",
    "\ud800.tar",
    "a\0*",
    "*\ud800",
    "~\0/a",
    "@a\0b",
    "@\ud800",
    "@~\0",
    "file:///a\0b",
    "file:////\ud800",
]
NAMES += ["http://[::1", "http://[::1/a.tar", "http://[zz]/x", "http://a..b/x.tar", "http://" + "a" * 70 + "/x.tar"]
NAMES += ["http://h:99999/x", "http://h:port/x", "http://\ud800/x", "http://127.0.0.1:1/\ud800", "http://u\ud800@h/x"]
NAMES += [
    "http://127.0.0.1:1/a\0b",
    "http:///x",
    "http://user:p@[::1/x",
    "memory://\ud800",
    f"{{{DIGITS}..1}}",
    "{0..1..0}",
]
NAMES += ["zip://\0::a.tar", "data:;base64,!!!", "ftp://[::1", "nosuch://x"]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_names(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(requests, "pausing", lambda seconds: ())
    (tmp_path / "a.tar").write_bytes(bytes(100))
    actions = [open_url, open_shard, build_index, find_shards, lambda name: Marker(name).read()]
    actions += [lambda name: open_url(name, "wb").close(), lambda name: Marker(name).write({})]
    actions += [lambda name: list(read_samples(name)), IndexedShards, lambda name: list(Stream.from_shards(name))]
    for method in ("ranges", "exists", "size", "remove", "make_folder", "glob", "expanduser"):
        actions.append(lambda name, method=method: getattr(Location(name), method)())
    for action in actions:
        of_the_tree(partial(action, name))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # fsspec leaves the cache's file open
def test_a_cache_that_cannot_close_its_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.tar").write_bytes(b"x" * 1000)
    assert isinstance(of_the_tree(lambda: list(read_samples("cached::a.tar"))), TarError)


def test_lists_and_manifests_of_such_names(tmp_path):
    (tmp_path / "list").write_bytes(b"a\0b\n~\0\n@\0\n")
    assert [shard.url for shard in find_shards(f"@{tmp_path}/list")] == ["a", "b\n~", "\n@", "\n"]  # of find -print0
    assert of_the_tree(lambda: list(read_samples(f"@{tmp_path}/list"))) is not None
    for name in ["\ud800.tar", "a\0b.tar", "http://[::1", "http://a..b/x", "http://127.0.0.1:1/\ud800"]:
        (tmp_path / "m.shards.json").write_text(json.dumps({"wids_version": 1, "shardlist": [{"url": name}]}))
        assert of_the_tree(lambda: list(read_samples(tmp_path / "m.shards.json"))) is not None


# Manifests.


@pytest.mark.parametrize("word", ["nsamples", "filesize"])
@pytest.mark.parametrize("number", NUMBERS)
def test_the_numbers_of_a_manifest(tmp_path, shard, word, number):
    entry = {"url": "a.tar", "nsamples": 3, "filesize": 10240, word: number}
    manifest = tmp_path / "m.shards.json"
    manifest.write_text(json.dumps({"wids_version": 1, "shardlist": [entry, {**entry, "url": "b.tar"}]}))
    errors = [
        of_the_tree(lambda: IndexedShards(manifest)[0]),
        of_the_tree(lambda: list(Stream.from_shards(manifest, shuffle=True))),
        of_the_tree(lambda: next(iter(ArrayLoader(Stream.from_shards(manifest), 2, fields={"txt": readers.bytes_()})))),
    ]
    assert None not in errors
    if number not in (1, 2**31):  # which a shard may have
        assert all(isinstance(error, UrlError) and word in str(error) for error in errors if number != 2**32)


def test_any_manifest():
    whole = {"wids_version": 1, "shardlist": [{"url": "a.tar", "nsamples": 3, "filesize": 9, "concatenated": True}]}
    for value in variants(whole):
        error = of_the_tree(lambda value=value: parse_manifest(json.dumps(value), "m.shards.json"))
        assert error is None or isinstance(error, UrlError)
    for text in ["", "{", "[" * 100_000, f'{{"wids_version": {DIGITS}}}', "\ud800"]:
        assert isinstance(of_the_tree(lambda text=text: parse_manifest(text, "m.shards.json")), UrlError)


# Servers.

DATA = bytes(range(256)) * 40


@contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """Serve *answer* to every request."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection = server.accept()[0]
                except OSError:
                    return
                with connection:
                    connection.settimeout(10)
                    try:
                        while b"\r\n\r\n" not in connection.recv(1 << 16):
                            pass
                        connection.sendall(answer)
                    except OSError:
                        pass

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}/a.tar"
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def head(status: str, **headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items()), "", ""]
    return "\r\n".join(lines).encode("latin-1")


PLACES = [
    "http://[::1",
    "http://[::1/a",
    "//[",
    "http://a..b/",
    "http://" + "a" * 70 + "/",
    "http://h:99999/",
    "http://h:x/",
]
PLACES += [
    "http://\xff/",
    "http://\xe4..\xe4/",
    "/\xff\xfe",
    "http://[v1.x]/",
    "http:// /",
    "ftp://x/",
    "?" * 60_000,
    "#",
]
RANGES = [f"bytes 0-1023/{total}" for total in (DIGITS, 2**63, 2**70, "*", 0, 5)]
RANGES += [f"bytes {'0' * 5000}-1/10", f"bytes 0-{DIGITS}/{len(DATA)}", "bytes \xb2-\xb3/\xb9", "x"]
LENGTHS = [DIGITS, "-1", "abc", str(2**63), str(2**70), "1e3", "\xb2"]
WAITS = [DIGITS, "-1", "abc", "\xb2", "nan", f"Mon, 01 Jan {'9' * 50} 00:00:00 GMT", "Mon, 01 Jan 0001 00:00:00 -0000"]
WAITS += ["Mon, 01 Jan 2020 00:00:00 +99999999999999", "Mon, 01 Jan 9999 23:59:59 -2359", "Mon, 01 Jan 1 00:00:00"]
ANSWERS = {
    **{f"to {place[:20]!r}": head("302 Found", Location=place, Content_Length="0") for place in PLACES},
    **{
        f"range {part[:40]}": head("206 Part", Content_Range=part, Content_Length="1024") + DATA[:1024]
        for part in RANGES
    },
    **{f"length {size[:20]}": head("200 OK", Content_Length=size) + DATA for size in LENGTHS},
    **{f"wait {wait[:40]}": head("503 Busy", Retry_After=wait, Content_Length="0") for wait in WAITS},
    "chunk beyond 64 bits": head("200 OK", Transfer_Encoding="chunked") + b"f" * 5000 + b"\r\nabc",
    "chunk below 0": head("200 OK", Transfer_Encoding="chunked") + b"-5\r\nabc\r\n0\r\n\r\n",
    "chunk without size": head("200 OK", Transfer_Encoding="chunked") + b"zz\r\nabc",
    "nothing": b"",
    "junk": b"\xff\xfe\0" * 10,
    "status": b"HTTP/1.1 99999999999 X\r\n\r\n",
    "many headers": b"HTTP/1.1 200 X\r\n" + b"a: b\r\n" * 200 + b"\r\n",
    "a long line": b"HTTP/" + b"1" * 100_000 + b"\r\n",
    "reason": b"HTTP/1.1 404 \xff\0\x1b[31m\r\n\r\n",
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=map(ascii, ANSWERS))
def test_answers(monkeypatch, answer):
    monkeypatch.setattr(requests, "pausing", lambda seconds: ())
    remote = Remote(retries=1)
    with answering(answer) as url:
        actions: list[Callable[[], object]] = [
            lambda: open_url(url, remote=remote).read(),
            lambda: Location(url, remote).ranges().read(512, 1024),
            lambda: Location(url, remote).ranges().read(0, 10),
            lambda: build_index(url) if b" 206 " in answer[:16] else None,
            lambda: Location(url).exists(),
        ]
        errors = [error for action in actions if (error := of_the_tree(action)) is not None]
    for error in errors:
        assert isinstance(error, TarshardsError)
        assert len(str(error)) < 1000
        assert str(error).count("a.tar") == 1 or "redirects" in str(error)
        assert "\n" not in str(error)


def test_a_malformed_redirect_is_not_repeated(monkeypatch):
    monkeypatch.setattr(requests, "pausing", lambda seconds: pytest.fail("repeated"))
    for place in ("http://[::1", "http://a..b/"):
        with answering(head("302 Found", Location=place, Content_Length="0")) as url:
            assert isinstance(of_the_tree(lambda url=url: open_url(url)), OpenError)


# Indexes.


def repack(found: dict[str, object]) -> bytes:
    """Return the sidecar of these entries, with the right checksum."""
    body = msgpack.packb(
        {name: value for name, value in found.items() if name != "checksum"}, unicode_errors="surrogatepass"
    )
    body = bytes([body[0] + 1]) + body[1:] + msgpack.packb("checksum") + b"\xce"
    return body + crc32(body).to_bytes(4, "big")


def use(shard: str, packed: bytes) -> None:
    """Read a shard in every way through the index *packed*; entries that an index lacks may be missing."""
    with open(f"{shard}.index", "wb") as file:
        file.write(packed)
    samples = IndexedShards(shard)
    list(samples)
    samples.locate(["k0", "no"])
    list(Stream.from_shards(shard, shuffle=True))
    next(iter(ArrayLoader(Stream.from_shards(shard), 2, fields={"txt": readers.bytes_()})))


def test_an_index_with_a_wrong_entry(shard):
    with open(f"{shard}.index", "rb") as file:
        packed = file.read()
    found = msgpack.unpackb(packed)
    assert repack(found) == packed
    more = [b"", b"\0" * 12, b"\xff" * 24, b"\x7f" * 24, ["a"] * 3, ["a", "b", "\udc80"], msgpack.Timestamp(1)]
    for name in found:
        for value in (*VALUES, *more):
            if name != "checksum" and value not in (10**30, 2**64, -(2**70), [2**64, 1]):  # which msgpack does not hold
                of_the_tree(lambda name=name, value=value: use(shard, repack({**found, name: value})))
    for name in found["shard"]:
        for value in VALUES:
            if value not in (10**30, 2**64, -(2**70), [2**64, 1]):
                of_the_tree(
                    lambda name=name, value=value: use(
                        shard, repack({**found, "shard": {**found["shard"], name: value}})
                    )
                )
    for fault in (
        [],
        [0],
        [0, 1, 2, 3],
        [0, "r", 1, "f"],
        [-1, "r", 1, "f"],
        [2**63, "r", 1, "f"],
        [0, "r", 2**63, "f"],
    ):
        of_the_tree(lambda fault=fault: use(shard, repack({**found, "version": 2, "faults": [fault]})))


def test_an_index_with_changed_bytes(shard):
    chance = random.Random(0)
    with open(f"{shard}.index", "rb") as file:
        packed = file.read()
    for _ in range(200):
        changed = bytearray(packed)
        for _ in range(chance.randint(1, 6)):
            changed[chance.randrange(len(changed) - 4)] = chance.choice([0, 1, 127, 128, 255, chance.randrange(256)])
        changed[-4:] = crc32(changed[:-4]).to_bytes(4, "big")
        of_the_tree(lambda changed=changed: use(shard, bytes(changed)))


@given(st.binary(max_size=80))
def test_any_bytes_as_an_index(data):
    assert of_the_tree(lambda: Index.unpack(data, url="a.tar.index")) is not None


# Decompression bombs.

HELD = 1 << 22  # bytes that may be held, fewer than usual
REASON = r"more than 4 MiB, and more than 200 times the compressed size, would be held .*\(max_ratio=, --max-ratio\)"


@pytest.fixture
def bombed(request, tmp_path, monkeypatch) -> str:
    """A compressed shard of three samples; that in the middle has a member of many zeros."""
    monkeypatch.setattr(compression, "MAX_HELD", HELD)
    with ShardWriter(str(tmp_path / f"a-%d.tar.{request.param}")) as writer:
        for key, size in [("a", 3), ("b", 12 * HELD), ("c", 3)]:
            writer.write({"__key__": key, "txt": bytes(size)})
    return str(tmp_path / f"a-0.tar.{request.param}")


def skipping(read: Callable[..., Any]) -> Callable[[str], list[str]]:
    return lambda url: [sample["__key__"] for sample in read(url, on_error=Ledger(max_errors=1))]


def in_batches(url: str) -> list[str]:
    loader = ShardLoader(ShardDataset(url, on_error=Ledger(max_errors=1)), batch_size=1, num_workers=0)
    return [key for batch in loader for key in batch["__key__"]]


def by_facade(url: str) -> list[str]:
    dataset = webdataset.WebDataset(url, shardshuffle=False, handler=webdataset.warn_and_continue)
    return [sample["__key__"] for sample in dataset]


def repaired(url: str) -> list[str]:
    report, samples = repair_shards([url], f"{url}.repaired.tar")
    assert (report.samples, report.lost, report.total("error"), samples) == (2, 1, 1, 2)
    return skipping(read_samples)(f"{url}.repaired.tar")


def checked(url: str) -> list[str]:
    report = check_shards([url], decode=True)
    assert (report.samples, report.lost, report.total("error")) == (2, 1, 1)
    return ["a", "c"]


READERS = {
    "read_samples": skipping(read_samples),
    "resync": skipping(partial(read_samples, on_damage="resync")),
    "Stream": skipping(partial(Stream.from_shards, index=False)),
    "ShardDataset": skipping(ShardDataset),
    "ShardLoader": in_batches,
    "check": checked,
    "repair": repaired,
    "webdataset": by_facade,
}


#: Each reader, and each compression; in `make soak` all pairs.
BOMBS = [*product(["zst", "gz", "bz2", "xz"], READERS)]
FEW_BOMBS = [(suffix, reader) for suffix, reader in BOMBS if suffix == "zst" or reader == "read_samples"]


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("bombed", "reader"), BOMBS if SOAK > 1 else FEW_BOMBS, indirect=["bombed"])
def test_a_bomb_costs_its_sample_and_little_memory(bombed, reader):
    READERS[reader](bombed)  # imports, and caches
    tracemalloc.start()
    keys = READERS[reader](bombed)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert keys == ["a", "c"]
    assert peak < 200 * os.path.getsize(bombed) + 5 * HELD


@pytest.mark.parametrize("bombed", ["zst"], indirect=True)
def test_each_reader_names_the_option_that_reads_a_bomb(bombed):
    with pytest.raises(SampleError, match=rf": b\.txt: incomplete: {REASON}"):
        list(read_samples(bombed))
    with open_shard(bombed) as stream, pytest.raises(TarError, match=f"'b.txt': {REASON}"):
        list(read_members(stream))
    with pytest.raises(TarError, match=f"'b.txt': {REASON}"):
        list(tariterators.tar_file_expander(tariterators.url_opener([{"url": bombed}])))
    sizes = [3, 12 * HELD, 3]
    with open_shard(bombed) as stream:
        assert [len(member.data) for member in read_members(stream, max_ratio=1e9)] == sizes
    with open_shard(bombed, max_ratio=1e9) as stream:
        assert [len(member.data) for member in read_members(stream)] == sizes
    resync = partial(read_samples, on_error=Ledger(), on_damage="resync")
    for read in read_samples, resync, partial(Stream.from_shards, index=False), ShardDataset:
        for options in {"max_ratio": 1e9}, {"remote": Remote(max_ratio=1e9)}:
            assert [len(sample["txt"]) for sample in read(bombed, **options)] == sizes
        with pytest.raises(ValueError, match="max_ratio must be a number of at least 1, not 0"):
            list(read(bombed, max_ratio=0))


@pytest.mark.parametrize("bombed", ["zst"], indirect=True)
@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        (tarcat, "-q {} -o {}.made.tar"),
        (tarsort, "-q {} -o {}.made.tar"),
        (tarsplit, "-q {} -o {}.made-%d.tar"),
        (tarcheck, "-q --decode {}"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_each_tool_has_the_option_that_reads_a_bomb(bombed, monkeypatch, tool, arguments):
    monkeypatch.setattr(compression, "_accepted", compression.MAX_RATIO)
    words = [word.replace("{}", bombed) for word in arguments.split()]
    done = CliRunner().invoke(tool.main, words)
    assert done.exit_code == 1
    assert re.search(REASON, done.output)
    done = CliRunner().invoke(tool.main, ["--max-ratio", "1e9", *words])
    assert (done.exit_code, done.output) == (0, "")
    done = CliRunner().invoke(tool.main, ["--max-ratio", "0.5", *words])
    assert done.exit_code == 2
    assert "max_ratio must be a number of at least 1, not 0.5" in done.output


LINE = 1 << 20  # bytes of a line or record that may be held


@pytest.mark.parametrize("piece", [0, LINE // 2])
def test_lines_and_records_that_are_bombs(tmp_path, monkeypatch, piece):
    monkeypatch.setattr(compression, "MAX_HELD", LINE)
    line = bytes(12 * LINE) if not piece else (bytes(piece) + b"\n") * 10
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(line))
    records = [bytes(12 * LINE)] if not piece else [bytes(piece)] * 10
    data = [struct.pack("<QI", len(each), masked(struct.pack("<Q", len(each)))) for each in records]
    data = [head + each + struct.pack("<I", masked(each)) for head, each in zip(data, records)]
    (tmp_path / "a.tfrecord.gz").write_bytes(gzip.compress(b"".join(data)))
    (tmp_path / "a.msgpack.gz").write_bytes(gzip.compress(b"".join(msgpack.packb({"x": each}) for each in records)))

    def read_tfrecord() -> None:
        with open_shard(str(tmp_path / "a.tfrecord.gz")) as stream:
            deque(read_records(stream), 0)

    actions = [
        lambda: deque(numbered_lines(str(tmp_path / "a.jsonl.gz")), 0),
        read_tfrecord,
        lambda: deque(read_msgpack(str(tmp_path / "a.msgpack.gz")), 0),
    ]
    for action in actions:
        tracemalloc.start()
        error = of_the_tree(action)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert piece or re.search(REASON.replace("4 MiB", "1 MiB"), str(error))
        assert not piece or error is None or "max_ratio" not in str(error)
        assert peak < 200 * len(line) // 1000 + 5 * LINE


# Arrays.


def npy(header: str, elements: bytes = bytes(12), version: int = 1) -> bytes:
    text = header.encode("latin-1", "replace")
    return b"\x93NUMPY" + bytes([version, 0]) + struct.pack("<H" if version == 1 else "<I", len(text)) + text + elements


SHAPES = [
    "()",
    "(3,)",
    "(-1,)",
    "(-1, -3)",
    "(True,)",
    "(1.5,)",
    "('x',)",
    "None",
    "(0, -5)",
    f"(0, {2**63})",
    f"({2**63},)",
]
SHAPES += [f"({10**30},)", f"({2**32}, {2**32})", f"({2**40},)", f"(0, {2**60}, {2**60})", f"({DIGITS},)", "(1,)" * 9]
TYPES = [
    "'<f4'",
    "'|O'",
    "'S0'",
    "'<U0'",
    "'|V0'",
    "[]",
    "[('a', '<f4', (2, 3))]",
    "'x'",
    "None",
    "'<U99999999999'",
    "'M8[ns]'",
]
HEADERS = [f"{{'descr': {kind}, 'fortran_order': False, 'shape': {shape}, }}" for kind in TYPES for shape in SHAPES]
HEADERS += [
    "",
    "{",
    "{}",
    "x" * 10_000,
    "'''''",
    "(" * 3000,
    "-" * 5000 + "1",
    "{'a':" * 200,
    "\t\t x\n y",
    "\0" * 20,
    "lambda: 0",
]


@pytest.mark.parametrize("version", [1, 2])
def test_headers_of_arrays(version):
    for header in HEADERS:
        data = npy(header, version=version)
        error = of_the_tree(lambda data=data: parse_header(data))
        assert error is None or isinstance(error, DecodeError)
        of_the_tree(lambda data=data: decode_field("npy", data))


def test_headers_of_arrays_with_changed_bytes():
    chance = random.Random(0)
    whole = npy("{'descr': '<f4', 'fortran_order': False, 'shape': (3,), }")
    assert parse_header(whole).shape == (3,)
    for _ in range(1000):
        changed = bytearray(whole)
        for _ in range(chance.randint(1, 5)):
            changed[chance.randrange(len(changed))] = chance.choice([*b"()'-0\xff\0", chance.randrange(256)])
        of_the_tree(lambda changed=changed: parse_header(bytes(changed)))


@pytest.mark.parametrize("kind", ["S0", "<U0", "|V0", "<f4"])
@pytest.mark.parametrize("shape", ["(300_000_000,)", f"({2**32}, {2**32})", "(3,)"])
def test_arrays_that_have_fewer_bytes_than_elements(tmp_path, kind, shape):
    """Elements of no size become elements of one byte in a batch, which would be read from behind the file."""
    data = npy(f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}", b"")
    shard = write_tar(tmp_path / "a.tar", {"a.npy": data, "b.npy": data})
    loader = ArrayLoader(Stream.from_shards(shard), 2, fields={"npy": readers.array()})
    assert isinstance(of_the_tree(lambda: next(iter(loader))), DecodeError)
    assert isinstance(of_the_tree(lambda: np.asarray(IndexedShards(shard).column("npy")[:])), DecodeError)


@pytest.mark.parametrize("kind", ["S", "U", "V", "O", []])
def test_an_array_must_have_a_size(kind):
    with pytest.raises(TypeError, match="no safe form in bytes"):
        readers.array(kind, (3,))


# States, plans, records.


def streams(shard: str) -> dict[str, Callable[[], object]]:
    return {
        "planned": lambda: Stream.from_shards(shard, shuffle=True),
        "streamed": lambda: Stream.from_shards(shard, index=False),
        "arrays": lambda: ArrayLoader(Stream.from_shards(shard, shuffle=True), 1, fields={"txt": readers.bytes_()}),
        "batches": lambda: ShardLoader(ShardDataset(shard, shuffle=True), 1),
        "batches, streamed": lambda: ShardLoader(ShardDataset(shard, index=False), 1),
        "mixture": lambda: mix({name: ShardDataset(shard, shuffle=True) for name in "ab"}, weights={"a": 1, "b": 2}),
    }


@pytest.mark.parametrize("name", ["planned", "streamed", "arrays", "batches", "batches, streamed", "mixture"])
def test_states(shard, name):
    make = streams(shard)[name]
    begun = make()
    next(iter(begun))
    state = begun.state_dict()

    def resume(found: object) -> None:
        stream = make()
        stream.load_state_dict(found)
        list(islice(stream, 10))

    assert of_the_tree(lambda: resume(json.loads(json.dumps(state)))) is None
    for found in variants(state):
        error = of_the_tree(lambda found=found: resume(found))
        assert error is None or isinstance(error, StateError)


def test_plans_of_jobs():
    plan = json.loads(make_plan(["cat", "{}", "-o", "out-{}"], ["{a,b}"]).dumps())

    def load(found: object) -> None:
        loaded = JobPlan.loads(json.dumps(found))
        for item in loaded.items:
            loaded.arguments(item)
            of_the_tree(partial(loaded.marker, item))
        loaded.only({0}).dumps()

    assert of_the_tree(lambda: load(plan)) is None
    for found in variants(plan):
        error = of_the_tree(lambda found=found: load(found))
        assert error is None or isinstance(error, StateError)
    for text in ["", "{", "[" * 100_000, DIGITS, "\ud800"]:
        assert isinstance(of_the_tree(lambda text=text: JobPlan.loads(text)), StateError)


def test_records_of_jobs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = make_plan(["cat", "{}", "-o", "out-{}"], ["{a,b}"])
    folder = JobFolder(plan.name)
    folder.save(plan, engine="local", options={}, parts=[])

    def use_record() -> None:
        _, record = folder.load()
        options_of(record)
        status_of(folder)
        log_of(folder, plan.items[0])

    assert of_the_tree(use_record) is None
    for name in ("engine", "options", "parts"):
        for value in VALUES:
            record = {"engine": "local", "options": {}, "parts": [], name: value}
            (tmp_path / f"{folder.path}/job.json").write_text(json.dumps(record))
            of_the_tree(use_record)
    for damage in (b"", b"\0" * 100, b"\xff"):
        folder.save(plan, engine="local", options={}, parts=[])
        (tmp_path / folder.plan_path).write_bytes(damage)
        assert of_the_tree(use_record) is not None
    (tmp_path / folder.plan_path).unlink()
    assert isinstance(of_the_tree(use_record), OpenError)
