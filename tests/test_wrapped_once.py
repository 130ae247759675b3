"""Our errors are also OSErrors and ValueErrors; handlers of Python's errors neither wrap nor swallow ours."""

from __future__ import annotations

import gzip
import io
import tarfile

import click
import msgpack
import pytest
from range_server import serving

from tarshards import IndexedShards, read_samples
from tarshards.cli.tarjob import main as tarjob
from tarshards.errors import DecodeError, OpenError, ShardIndexError, StateError, TarshardsError, UrlError
from tarshards.index.build import build_index
from tarshards.index.sidecar import Index
from tarshards.samples.codecs import decode_field
from tarshards.samples.ledger import Ledger
from tarshards.storage import requests
from tarshards.storage.expressions import find_shards
from tarshards.storage.location import Location
from tarshards.storage.manifest import Shard, dump_manifest
from tarshards.storage.markers import Marker
from tarshards.storage.opening import open_plain, open_shard, open_url
from tarshards.verbs.mix import read_sources
from tarshards.verbs.sort import read_loose_members


def tar_of(count: int = 3, size: int = 3) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for number in range(count):
            info = tarfile.TarInfo(f"k{number}.txt")
            info.size = size
            tar.addfile(info, io.BytesIO(b"x" * size))
    return file.getvalue()


def only(error: TarshardsError, name: str) -> None:
    """Check that *error* names its origin once, and that none of its causes is our error with the same origin."""
    assert str(error).count(name) == 1, str(error)
    assert error.reason.count(name) == 0
    cause = error.__cause__
    assert cause is not error
    assert not (isinstance(cause, OpenError) and cause.url == error.url), "wrapped twice"


READS = {
    "stream": lambda url: open_shard(url, allow_pipe=True).read(),
    "samples": lambda url: list(read_samples(url, allow_pipe=True)),
    "members": lambda url: list(read_loose_members(find_shards(url, allow_pipe=True), ledger=Ledger())),
    "plain": lambda url: [file.read(0, 10) for file in [open_plain(Shard(url, allow_pipe=True)).__enter__()]],
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_command_that_fails_before_its_first_byte(read):
    with pytest.raises(OpenError, match="ended with status 3") as caught:
        read("pipe:exit 3")
    only(caught.value, "pipe:")


@pytest.mark.parametrize(
    "read", [READS["stream"], READS["samples"], READS["members"]], ids=["stream", "samples", "members"]
)
@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz"])
def test_a_command_that_fails_after_its_first_bytes(tmp_path, read, name):
    data = tar_of(3, 100_000)
    (tmp_path / name).write_bytes(gzip.compress(data, 0) if name.endswith("gz") else data)
    with pytest.raises(OpenError, match="ended with status 3") as caught:
        read(f"pipe:head -c 200000 {tmp_path / name}; exit 3")
    only(caught.value, name)


@pytest.mark.parametrize("name", ["out.tar", "out.tar.gz"])
def test_writing_into_a_shard_whose_index_cannot_be_removed(tmp_path, name):
    (tmp_path / f"{name}.index").mkdir()
    with pytest.raises(OpenError, match="Is a directory") as caught, open_shard(tmp_path / name, "wb") as stream:
        stream.write(b"x")
    only(caught.value, name)
    assert caught.value.url == str(tmp_path / f"{name}.index")


@pytest.mark.parametrize("name", ["out.tar", "out.tar.gz"])
def test_writing_into_a_store_that_fails(memory, monkeypatch, name):
    def full(self, *_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(memory), "put_file", full)
    with pytest.raises(OpenError, match="No space left") as caught, open_shard(f"memory://d/{name}", "wb") as stream:
        stream.write(b"x")
    only(caught.value, name)
    assert caught.value.errno == 28


@pytest.mark.parametrize("command", ["exit 3", "head -c 1 >/dev/null; exit 3"])
def test_writing_into_a_command_that_fails(command):
    def write() -> None:
        with open_url(f"pipe:{command}", "wb", allow_pipe=True) as stream:
            for _ in range(100):
                stream.write(bytes(1 << 16))

    with pytest.raises(OpenError, match="ended with status 3") as caught:
        write()
    only(caught.value, "pipe:")


def test_what_a_server_means_is_not_asked_for_again(tmp_path, monkeypatch):
    """An error that we raise of an answer will not pass; only those of the connection are tried again."""
    monkeypatch.setattr(requests, "pausing", lambda seconds: pytest.fail("retried"))
    (tmp_path / "a.tar").write_bytes(tar_of(3, 5000))
    with serving(tmp_path) as site:
        ranges = Location(f"{site.url}/a.tar").ranges()
        site.etag = '"v2"'
        site.clear()
        with pytest.raises(OpenError, match="changed while it was read") as caught:
            ranges.read(4096, 512)
        assert site.asked("a.tar") == 1
        only(caught.value, "a.tar")
        assert "attempt" not in str(caught.value)
        site.ranges = False
        site.clear()
        with pytest.raises(OpenError, match="serves no ranges"):
            Location(f"{site.url}/a.tar").ranges()
        assert site.asked("a.tar") == 1


def test_indexing_a_shard_of_a_store_that_fails(memory, monkeypatch):
    memory.pipe_file("d/a.tar", tar_of(3, 5000))
    seen = []

    def fail(self, path, start=None, end=None, **_):
        seen.append(start)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(type(memory), "cat_file", fail)
    with pytest.raises(OpenError, match="Input/output error") as caught:
        build_index("memory://d/a.tar")
    only(caught.value, "a.tar")
    assert seen
    assert caught.value.errno == 5


def test_reading_an_indexed_sample_of_a_store_that_fails(memory, monkeypatch):
    memory.pipe_file("d/a.tar", tar_of())
    memory.pipe_file("d/a.tar.index", build_index("memory://d/a.tar").pack())
    samples = IndexedShards("memory://d/a.tar")
    assert samples[0]["txt"] == b"xxx"

    def fail(self, path, start=None, end=None, **_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(type(memory), "cat_file", fail)
    with pytest.raises(OSError, match="Input/output error") as caught:
        samples[1]
    error = caught.value
    assert (str(error).count("a.tar"), error.url, error.key, error.errno) == (1, "memory://d/a.tar", "k1", 5)


def indexed(folder) -> str:
    url = str(folder / "a.tar")
    (folder / "a.tar").write_bytes(tar_of())
    (folder / "a.tar.index").write_bytes(build_index(url).pack())
    return url


def test_an_index_of_another_version_is_not_called_damaged(tmp_path):
    from zlib import crc32

    packed = (tmp_path / indexed(tmp_path)).with_suffix(".tar.index").read_bytes()
    found = msgpack.unpackb(packed)
    found["version"] = 99
    *parts, checksum = found
    body = msgpack.packb({name: found[name] for name in parts})
    body = bytes([body[0] + 1]) + body[1:] + msgpack.packb(checksum) + b"\xce"
    body += crc32(body).to_bytes(4, "big")
    with pytest.raises(ShardIndexError, match="version 99 is not supported") as caught:
        Index.unpack(body, url="a.tar.index")
    assert "damaged" not in str(caught.value)
    only(caught.value, "a.tar.index")


def test_a_damaged_index_is_not_a_missing_key(tmp_path):
    url = indexed(tmp_path)
    manifest = tmp_path / "all.shards.json"
    manifest.write_text(dump_manifest([Index.load(url).shard("a.tar")]))
    samples = IndexedShards(manifest)  # which loads no index yet
    (tmp_path / "a.tar.index").write_bytes(b"nothing")
    with pytest.raises(ShardIndexError, match="not an index"):
        samples.find("k1")


def test_a_job_that_runs_already_is_no_wrong_command_line(tmp_path, monkeypatch):
    def submit(*_, **__):
        raise StateError("words is already running")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tarshards.run.jobs.scheduler.submit", submit)
    line = ["-b", "slurm", "-s", "{0..2}", "--state", "state", "--name", "words", "--", "true {}"]
    with pytest.raises(StateError, match="already running"):
        tarjob.main(line, standalone_mode=False)
    line[3] = "{0..2"
    with pytest.raises(click.UsageError, match="unbalanced braces"):
        tarjob.main(line, standalone_mode=False)


def test_a_marker_that_cannot_be_read_is_not_one_that_is_missing(tmp_path):
    with pytest.raises(UrlError, match="unknown scheme"):
        Marker("nosuch://host/a.done").read()
    with pytest.raises(OpenError, match="Is a directory"):
        Marker(tmp_path).read()
    (tmp_path / "half").write_text('{"digest": ')
    assert Marker(tmp_path / "half").read() is None
    assert Marker(tmp_path / "none").read() is None


def test_a_mixture_that_is_missing(tmp_path):
    with pytest.raises(OpenError, match="No such file") as caught:
        read_sources(str(tmp_path / "mix.yaml"))
    only(caught.value, "mix.yaml")


def test_a_field_that_does_not_decode():
    for field, data in [("cls.gz", gzip.compress(b"x")[:-5]), ("cls.gz", b"x"), ("npy", b"x"), ("json", b"{")]:
        with pytest.raises(DecodeError) as caught:
            decode_field(field, data)
        only(caught.value, f"{field}: ")
