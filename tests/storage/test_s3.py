"""Objects of s3, read through s3fs from moto's server."""

from __future__ import annotations

import errno
import gzip
import logging
import random

import fsspec
import pytest

from tarshards import Remote, Stream, TarWriter
from tarshards.errors import OpenError
from tarshards.index.build import build_index
from tarshards.storage import tuning
from tarshards.storage.expressions import expand_urls
from tarshards.storage.location import Location
from tarshards.storage.opening import open_shard, open_url

pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
DATA = bytes(range(256)) * 1000
NOISE = random.Random(0).randbytes(300_000)


@pytest.fixture(scope="module")
def server():
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server.start()
    yield "http://{}:{}".format(*server.get_host_and_port())
    server.stop()


@pytest.fixture
def store(server, monkeypatch):
    """An empty bucket `s3://bucket`, as s3fs sees it."""
    s3fs, fsspec = pytest.importorskip("s3fs"), pytest.importorskip("fsspec")
    options = {"key": "me", "secret": "s3cret", "endpoint_url": server}
    monkeypatch.setitem(fsspec.config.conf, "s3", options)
    store = s3fs.S3FileSystem(**options)
    if store.exists("bucket"):
        store.rm("bucket", recursive=True)
    store.mkdir("bucket")
    return store


@pytest.fixture
def shard(store, tmp_path):
    """`s3://bucket/a.tar`, an indexed shard of 1,000 samples of class 0; b.tar has class 1 under equal headers."""
    for name, value in ("a.tar", 0), ("b.tar", 1):
        with TarWriter(str(tmp_path / name)) as writer:
            for i in range(1000):
                writer.write({"__key__": f"{i:03d}", "cls": value})
        build_index(str(tmp_path / name)).save(str(tmp_path / name))
    for path in tmp_path.iterdir():
        store.put_file(str(path), f"bucket/{path.name}")
    return "s3://bucket/a.tar"


def test_ranges_belong_to_one_version(store):
    store.pipe_file("bucket/a.tar", DATA)
    with Location.of("s3://bucket/a.tar").ranges() as ranges:
        assert (ranges.size, ranges.read(100, 1000), ranges.read(5, 0)) == (len(DATA), DATA[100:1100], b"")
        store.pipe_file("bucket/a.tar", DATA)
        assert ranges.read(200, 1000) == DATA[200:1200], "the same bytes are the same version"
        store.pipe_file("bucket/a.tar", DATA[::-1])
        with pytest.raises(OpenError, match=r"^s3://bucket/a\.tar: offset 2000: changed while it was read$"):
            ranges.read(2000, 1000)
    with Location.of("s3://bucket/a.tar").ranges() as ranges:
        assert ranges.read(300, 1000) == DATA[::-1][300:1300]


def test_a_listing_from_before_does_not_count(store):
    store.pipe_file("bucket/a.tar", DATA)
    store.ls("bucket")
    import s3fs

    s3fs.S3FileSystem(**store.storage_options, skip_instance_cache=True).pipe_file("bucket/a.tar", DATA[::-1] + b"x")
    with Location.of("s3://bucket/a.tar").ranges() as ranges:
        assert ranges.read(0, len(DATA) + 1) == DATA[::-1] + b"x"
    assert Location.of("s3://bucket/a.tar").size() == len(DATA) + 1
    store.ls("bucket")
    with open_url("s3://bucket/a.tar") as stream:
        assert stream.read() == DATA[::-1] + b"x"


def test_a_stream_is_one_version(store, monkeypatch):
    monkeypatch.setattr(tuning, "FIRST_BYTES", 1 << 14)
    store.pipe_file("bucket/a.tar", DATA)
    came = []
    with open_url("s3://bucket/a.tar", remote=Remote(ahead=1 << 14)) as stream:
        came.append(stream.read(5000))
        store.pipe_file("bucket/a.tar", DATA[::-1])
        with pytest.raises(OpenError, match="changed while it was read") as caught:
            came.extend(iter(lambda: stream.read(1000), b""))
    assert b"".join(came) == DATA[: sum(map(len, came))]
    assert caught.value.url == "s3://bucket/a.tar"


@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize("prefix", ["", "simplecache::"])
def test_shards_are_read(store, shard, index, prefix):
    stream = Stream.from_shards(prefix + shard, index=index, shuffle=index).decode().take(100)
    assert [sample["cls"] for sample in stream] == [0] * 100


@pytest.mark.parametrize("index", [True, False])
def test_a_shard_replaced_while_it_is_read(store, shard, index, monkeypatch):
    monkeypatch.setattr(tuning, "FIRST_BYTES", 1 << 14)
    came, small = [], Remote(1, ahead=1 << 14)

    def consume():
        for sample in Stream.from_shards(shard, index=index, shuffle=index, remote=small).decode():
            came.append(sample["cls"])
            if len(came) == 10:
                store.cp_file("bucket/b.tar", "bucket/a.tar")

    with pytest.raises(OpenError, match=r"s3://bucket/a\.tar: .*changed while it was read"):
        consume()
    assert 10 <= len(came) < 1000
    assert set(came) == {0}


def test_what_is_not_there_and_what_is_written(store):
    assert not Location.of("s3://bucket/a.tar").exists()
    with open_shard("s3://bucket/a.tar.gz", "wb") as stream:
        stream.write(DATA)
    with open_shard("s3://bucket/a.tar.gz") as stream:
        assert stream.read(100) == DATA[:100]
    for action in Location.open, Location.ranges, Location.size:
        with pytest.raises(OpenError, match=r"s3://bucket/none\.tar: (404|No such file)") as caught:
            action(Location.of("s3://bucket/none.tar"))
        assert "s3cret" not in str(caught.value)


def test_patterns_list_a_bucket(store):
    for name in "x-1.tar", "x-0.tar", "x-0.tar.index", "y-0.tar":
        with open_shard(f"s3://bucket/d/{name}", "wb") as stream:
            stream.write(DATA)
    assert expand_urls("s3://bucket/d/x-*.tar") == ["s3://bucket/d/x-0.tar", "s3://bucket/d/x-1.tar"]


def test_patterns_list_more_than_a_page(s3):
    for i in range(1005):
        s3.put(f"d/x-{i:04d}.tar", b"")
    assert expand_urls("s3://bucket/d/x-*.tar") == [f"s3://bucket/d/x-{i:04d}.tar" for i in range(1005)]
    s3.put("d/x-9999.tar", b"")
    assert len(expand_urls("s3://bucket/d/x-*.tar")) == 1006, "a listing from before does not count"
    assert len(expand_urls("s3://bucket/*/x-1*.tar")) == 5
    assert expand_urls("s3://bucket/d/x-000[1-3].tar") == [f"s3://bucket/d/x-000{i}.tar" for i in (1, 2, 3)]


@pytest.mark.parametrize("prefix", ["", "simplecache::"])
def test_storage_options_make_the_store(s3, monkeypatch, prefix):
    """They are for reading, listing, writing and removing; and other options are another store."""
    monkeypatch.delitem(fsspec.config.conf, "s3")
    remote = Remote(storage_options=s3.options)
    location = Location.of(f"{prefix}s3://bucket/d/a.tar", remote)
    with location.open("wb") as stream:
        stream.write(DATA)
    assert location.read() == DATA
    assert location.size() == len(DATA)
    assert Location.of(f"{prefix}s3://bucket/d/*.tar", remote).glob() == [location.url]
    with location.ranges() as ranges:
        assert ranges.read(5, 10) == DATA[5:15]
    elsewhere = Remote(storage_options=s3.options | {"endpoint_url": "http://127.0.0.1:9"}, retries=0)
    with pytest.raises(OpenError, match="connect"):
        Location.of(location, elsewhere).size()
    assert location.size() == len(DATA)
    if not prefix:
        location.remove()
        assert s3.objects() == {}


def test_urls_are_signed_for_the_region_of_the_bucket(s3, monkeypatch):
    """A store that an option names knows its region by itself; that of AWS refuses what is signed for another."""
    monkeypatch.delitem(fsspec.config.conf, "s3")
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3.url)
    s3.client.create_bucket(Bucket="far", CreateBucketConfiguration={"LocationConstraint": "eu-west-1"})
    options = {"key": "me", "secret": "s3cret"}
    url, _ = Location.of("s3://far/a.tar", Remote(storage_options=options)).address().target
    assert "%2Feu-west-1%2Fs3%2Faws4_request" in url
    with Location.of("s3://far/a.tar", Remote(storage_options=options)).open("wb") as stream:
        stream.write(DATA)
    assert Location.of("s3://far/a.tar", Remote(storage_options=options)).read() == DATA
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-west-2")
    url, _ = Location.of("s3://far/a.tar", Remote(storage_options=options)).address().target
    assert "%2Fus-west-2%2Fs3%2Faws4_request" in url


def test_an_object_that_is_stored_with_a_content_encoding(store):
    """Its bytes are streamed as they are stored; ranges are of these."""
    store.pipe_file("bucket/a.tar.gz", gzip.compress(NOISE), ContentEncoding="gzip")
    for url in "s3://bucket/a.tar.gz", "s3://bucket/a.tar":
        store.pipe_file("bucket/a.tar", gzip.compress(NOISE), ContentEncoding="gzip")
        with open_shard(url) as stream:
            assert stream.read() == NOISE
        with pytest.raises(OpenError, match=r"Content-Encoding gzip, .*; store the file without it, or stream a shard"):
            Location.of(url).ranges().read(5000, 10)
    store.pipe_file("bucket/b.tar", DATA, ContentEncoding="aws-chunked")
    with open_url("s3://bucket/b.tar") as stream:
        assert stream.read() == DATA
    assert Location.of("s3://bucket/b.tar").ranges().read(5000, 10) == DATA[5000:5010]


def test_an_object_is_renamed_to_a_name_that_only_one_writer_gets(store):
    for name in ("one", "two"):
        store.pipe_file(f"bucket/{name}", name.encode())
    target = Location("s3://bucket/new")
    store.pipe_file("bucket/new.claim", b"of another writer")
    with pytest.raises(OpenError, match=r"new\.claim says that another writer makes it") as caught:
        Location("s3://bucket/one").rename(target, replace=False)
    assert caught.value.errno == errno.EEXIST
    target.sibling(".claim").remove()
    Location("s3://bucket/one").rename(target, replace=False)
    with pytest.raises(OpenError, match="File exists"):
        Location("s3://bucket/two").rename(target, replace=False)
    assert target.read() == b"one"
    assert not target.sibling(".claim").exists()
    assert not Location("s3://bucket/one").exists()
