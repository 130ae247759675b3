"""Stores of fsspec: whole files under their names, and errors that say what to install."""

import io
import pickle
import sys
import zipfile
from collections import defaultdict
from datetime import UTC, datetime, timedelta

import fsspec
import pytest
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem
from range_server import serving

from tarshards import ShardWriter, Stream, TarWriter
from tarshards.errors import OpenError, UrlError
from tarshards.index.build import build_index
from tarshards.storage import tuning
from tarshards.storage.expressions import expand_urls
from tarshards.storage.location import Location
from tarshards.storage.opening import open_shard, open_url
from tarshards.storage.remote import Remote, with_options

DATA = bytes(range(256)) * 1000


def write(url: str, *pieces: bytes) -> None:
    with open_shard(url, "wb") as stream:
        for piece in pieces:
            stream.write(piece)


def write_and_fail(url: str) -> None:
    with open_shard(url, "wb") as stream:
        stream.write(DATA)
        raise KeyError


def read(url: str) -> bytes:
    with open_shard(url) as stream:
        return stream.read()


@pytest.mark.parametrize("url", ["memory://folder/a.tar", "memory:folder/a.tar", "MEMORY://folder/a.tar.gz"])
def test_there_and_back(memory, url):
    write(url, DATA, b"end")
    assert read(url) == DATA + b"end"
    write(url, b"shorter")
    assert read(url) == b"shorter"


def test_nothing_stands_in_the_store_before_it_is_whole(memory):
    write("memory://a.tar", b"old")
    stream = open_url("memory://a.tar", "wb")
    stream.write(DATA)
    assert read("memory://a.tar") == b"old"
    stream.abort()
    stream.close()
    assert read("memory://a.tar") == b"old"
    for url in "memory://b.tar", "memory://b.tar.gz":
        with pytest.raises(KeyError):
            write_and_fail(url)
    assert list(memory.store) == ["/a.tar"]


def test_two_readers_of_one_file(memory):
    write("memory://a.tar", DATA)
    with open_url("memory://a.tar") as one, open_url("memory://a.tar") as two:
        assert one.seekable()
        assert one.read(1000) + two.read(1000) + one.read(1000) == DATA[:1000] + DATA[:2000]
        assert one.tell() == 2000
        assert one.seek(5) == 5
        assert one.read(1) == DATA[5:6]
        assert one.name == "memory://a.tar"
    assert read("memory://a.tar") == DATA


@pytest.mark.parametrize("spec", ["memory://d/x-*.tar", "memory:d/x-[12].tar", "simplecache::memory://d/x-*.tar"])
def test_patterns_list_a_store(memory, spec):
    for name in "x-2.tar", "x-1.tar", "x-1.tar.index", "y-1.tar":
        write(f"memory://d/{name}", b"data")
    first = spec.partition("d/")[0]
    assert expand_urls(spec) == [f"{first}d/x-1.tar", f"{first}d/x-2.tar"]
    assert [read(url) for url in expand_urls(spec)] == [b"data", b"data"]


def test_patterns_in_an_archive_and_none(memory, tmp_path):
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.writestr("x-1.tar", b"data")
    assert expand_urls(f"zip://x-*.tar::{tmp_path}/all.zip") == [f"zip://x-1.tar::{tmp_path}/all.zip"]
    write("memory://a[1].tar", b"data")
    assert expand_urls("memory://a[1].tar") == ["memory://a[1].tar"]
    with pytest.raises(UrlError, match=r"memory://x-\*\.tar: no file matches"):
        expand_urls("memory://x-*.tar")


def test_a_missing_file(memory):
    with pytest.raises(OpenError) as caught:
        open_url("memory://none.tar")
    assert str(caught.value) == "memory://none.tar: No such file or directory"


@pytest.mark.parametrize(
    ("scheme", "extra", "package"), [("s3", "s3", "s3fs"), ("gs", "gcs", "gcsfs"), ("gcs", "gcs", "gcsfs")]
)
def test_a_missing_extra_names_its_installation(monkeypatch, scheme, extra, package):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, scheme, raising=False)
    for mode in "rb", "wb":
        with pytest.raises(OpenError) as caught:
            open_url(f"{scheme}://bucket/a.tar", mode)
        assert f"pip install 'tarshards[{extra}]'" in str(caught.value)


def test_other_missing_packages_are_those_that_fsspec_names(monkeypatch):
    monkeypatch.setitem(sys.modules, "adlfs", None)
    with pytest.raises(OpenError, match="Install adlfs"):
        open_url("az://bucket/a.tar")


def test_a_member_of_an_archive(tmp_path):
    import zipfile

    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.writestr("a.tar", DATA)
    assert read(f"zip://a.tar::{tmp_path}/all.zip") == DATA


OVER_HTTP = [pytest.param(f"{cache}::http:", marks=pytest.mark.interop) for cache in ("simplecache", "filecache")]


@pytest.fixture(params=["simplecache::path", "filecache::file:", "simplecache::memory:", "zip:", *OVER_HTTP])
def chained(request, tmp_path, memory):
    """The expression of two shards of three samples each, read through a chain."""
    cache = request.param.partition("::")[0]
    with ShardWriter(str(tmp_path / "a-%d.tar"), max_samples=3, index=True) as writer:
        for i in range(6):
            writer.write({"__key__": f"{i}", "cls": i})
    if request.param == "zip:":
        import zipfile

        with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
            for path in tmp_path.glob("a-*"):
                archive.write(path, path.name)
        yield f"zip://a-{{0..1}}.tar::simplecache::{tmp_path}/all.zip"
    elif request.param.endswith("http:"):
        pytest.importorskip("aiohttp")
        with serving(tmp_path) as site:
            yield f"{cache}::{site.url}/a-{{0..1}}.tar?token=1"
            assert site.asked("tar?token=1")
    elif request.param.endswith("memory:"):
        for path in tmp_path.glob("a-*"):
            memory.pipe_file(f"/{path.name}", path.read_bytes())
        yield f"{cache}::memory://a-{{0..1}}.tar"
    else:
        name = f"file://{tmp_path}" if "file:" in request.param else tmp_path
        yield f"{cache}::{name}/a-{{0..1}}.tar"


@pytest.mark.parametrize("index", [True, False])
def test_chains_are_read_streamed_and_in_any_order(chained, index):
    stream = Stream.from_shards(chained, index=index, shuffle=index).decode()
    assert sorted(sample["cls"] for sample in stream) == list(range(6))
    assert stream.ledger.shards == (0 if index else 2), "read one after the other"
    (first, _), data = expand_urls(chained), open_url(expand_urls(chained)[0]).read()
    assert Location.of(first).size() == len(data)
    assert Location.of(first).exists()
    assert not Location.of(first).sibling(".nobody").exists()
    with Location.of(first).ranges() as ranges:
        assert (ranges.size, ranges.read(512, 1000)) == (len(data), data[512:1512])


def test_chains_are_written(memory, tmp_path):
    for url in "simplecache::memory://b.tar", f"simplecache::{tmp_path}/b.tar":
        write(url, DATA, b"end")
        assert read(url) == read(url.removeprefix("simplecache::")) == DATA + b"end"
        with pytest.raises(KeyError):
            write_and_fail(url.replace("b.tar", "c.tar"))
        assert not Location.of(url.replace("b.tar", "c.tar")).exists()


@pytest.mark.parametrize("url", ["simplecache::pipe:echo x", "simplecache::-", "zip://a.tar::pipe:cat b.zip"])
def test_a_chain_runs_no_command(url):
    with pytest.raises(OpenError, match="fsspec cannot read"):
        open_url(url, allow_pipe=True)


class Bucket(AbstractFileSystem):
    """A store of whole files; *lost* bytes are never sent back."""

    protocol = "bucket"
    cachable = False
    objects: dict[str, bytes] = {}  # noqa: RUF012
    versions: dict[str, dict] = {}  # noqa: RUF012
    lost = 0

    def info(self, path, **options):
        if path not in self.objects:
            raise FileNotFoundError(path)
        return {"name": path, "size": len(self.objects[path]), "type": "file", **self.versions.get(path, {})}

    def _open(self, path, mode="rb", block_size=None, autocommit=True, **options):
        return BucketFile(self, path, mode, block_size=1000, autocommit=autocommit, cache_type="none")


class BucketFile(AbstractBufferedFile):
    def _initiate_upload(self):
        self.parts = []

    def _upload_chunk(self, final=False):
        if self.path.endswith("broken"):
            raise ConnectionError("the store is gone")
        self.parts.append(self.buffer.getvalue())
        if final and self.autocommit:
            self.commit()
        return True

    def commit(self):
        self.fs.objects[self.path] = b"".join(self.parts)

    def _fetch_range(self, start, end):
        whole = self.fs.objects[self.path]
        return whole[: len(whole) - self.fs.lost][start:end]


@pytest.fixture
def bucket(monkeypatch):
    fsspec.register_implementation("bucket", Bucket, clobber=True)
    monkeypatch.setattr(tuning, "PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(Bucket, "objects", {})
    monkeypatch.setattr(Bucket, "versions", defaultdict(dict))
    return Bucket


def test_a_store_that_sends_too_little(bucket, monkeypatch):
    write("bucket://a.tar", DATA)
    monkeypatch.setattr(bucket, "lost", 100)
    with pytest.raises(
        OpenError, match=f"offset {len(DATA) - 100}: read {len(DATA) - 100} bytes instead of {len(DATA)}"
    ):
        read("bucket://a.tar")


def test_a_store_gets_whole_files(bucket):
    with pytest.raises(KeyError):
        write_and_fail("bucket://a.tar")
    assert bucket.objects == {}
    stream = open_url("bucket://a.tar", "wb")
    stream.write(DATA)
    assert bucket.objects == {}
    stream.close()
    assert bucket.objects == {"a.tar": DATA}
    assert read("bucket://a.tar") == DATA
    stream = open_url("bucket://broken", "wb", remote=Remote(retries=2))
    stream.write(DATA)
    with pytest.raises(OpenError, match=r"bucket://broken: the store is gone \(attempt 3\)"):
        stream.close()
    assert list(bucket.objects) == ["a.tar"]


def test_a_password_is_not_shown(bucket):
    with pytest.raises(OpenError) as caught:
        open_url("bucket://me:secret@host/a.tar")
    assert "secret" not in str(caught.value)


def test_what_a_store_says_shows_no_signature(bucket, monkeypatch):
    def refuse(store, path, **options):
        raise PermissionError(f"403 Forbidden for https://me:secret@cdn/{path}?X-Signature=secret")

    monkeypatch.setattr(bucket, "info", refuse)
    for action in Location.open, Location.ranges, Location.size, Location.exists:
        with pytest.raises(OpenError, match=r"403 Forbidden for https://cdn/\S+\?X-Signature=\.\.\.$") as caught:
            action(Location("bucket://host/a.tar"))
        assert "secret" not in str(caught.value)


def test_readers_are_buffered_as_io_wants(memory):
    write("memory://a.tar", DATA)
    with io.BufferedReader(open_url("memory://a.tar")) as stream:
        assert stream.read(10) == DATA[:10]


VALIDATORS = [
    {"generation": 7},
    {"ETag": '"v1"'},
    {"etag": 'W/"v1"', "mtime": 5},
    {"LastModified": datetime(2026, 11, 22, tzinfo=UTC)},
    {"mtime": 1763769600.25},
    {"created": datetime(2026, 11, 22, tzinfo=UTC)},
]


def renew(bucket, data: bytes = DATA[::-1], name: str = "a.tar") -> None:
    """Replace an object by another version."""
    bucket.objects[name] = data
    bucket.versions[name] = {key: _next(value) for key, value in bucket.versions[name].items()}


def _next(value):
    if isinstance(value, str):
        return value.replace("v1", "v2")
    return value + (timedelta(seconds=1) if isinstance(value, datetime) else 1)


@pytest.mark.parametrize("validators", VALIDATORS, ids=str)
def test_ranges_belong_to_one_version(bucket, validators):
    bucket.objects["a.tar"], bucket.versions["a.tar"] = DATA, validators
    with Location.of("bucket://a.tar").ranges() as ranges:
        assert ranges.read(100, 1000) == DATA[100:1100]
        ranges._opened.renew()  # as in a forked process, which connects again
        assert ranges.read(200, 1000) == DATA[200:1200]
        renew(bucket)
        for _ in range(2):
            with pytest.raises(OpenError, match=r"^bucket://a\.tar: offset 300: changed while it was read$"):
                ranges.read(300, 1000)
            ranges._opened.renew()
    with Location.of("bucket://a.tar").ranges() as ranges:
        assert ranges.read(300, 1000) == DATA[::-1][300:1300]


def test_a_version_that_comes_while_a_range_is_read(bucket, monkeypatch):
    bucket.objects["a.tar"], bucket.versions["a.tar"] = DATA, {"etag": "v1"}
    fetch = BucketFile._fetch_range

    def fetch_slowly(file, start, end):
        half = fetch(file, start, (start + end) // 2)
        renew(bucket)
        return half + fetch(file, (start + end) // 2, end)

    monkeypatch.setattr(BucketFile, "_fetch_range", fetch_slowly)
    with Location.of("bucket://a.tar").ranges() as ranges, open_url("bucket://a.tar") as stream:
        with pytest.raises(OpenError, match="changed while it was read"):
            ranges.read(0, 1000)
        bucket.versions["a.tar"] = {"etag": "v1"}
        with pytest.raises(OpenError, match="offset 0: changed while it was read"):
            stream.read(1000)


def test_a_store_that_tells_no_version_tells_a_size(bucket):
    bucket.objects["a.tar"] = DATA
    with Location.of("bucket://a.tar").ranges() as ranges:
        renew(bucket, DATA + b"more")
        with pytest.raises(OpenError, match="changed while it was read"):
            ranges.read(300, 1000)


@pytest.mark.parametrize("validators", VALIDATORS, ids=str)
@pytest.mark.parametrize("read_first", [0, 1, 5_000, len(DATA) - 1])
def test_a_stream_is_one_version(bucket, validators, read_first):
    bucket.objects["a.tar"], bucket.versions["a.tar"] = DATA, validators
    came = []

    def consume(stream):
        while sum(map(len, came)) < read_first:
            came.append(stream.read(read_first - sum(map(len, came))))
        renew(bucket)
        came.extend(iter(lambda: stream.read(1000), b""))

    with open_url("bucket://a.tar") as stream, pytest.raises(OpenError, match="changed while it was read") as caught:
        consume(stream)
    assert b"".join(came) == DATA[: sum(map(len, came))]
    assert caught.value.url == "bucket://a.tar"
    assert str(caught.value).count("bucket://a.tar") == 1


def test_a_changed_object_of_memory(memory):
    write("memory://a.tar", DATA)
    with Location.of("memory://a.tar").ranges() as ranges:
        assert ranges.read(0, 10) == DATA[:10]
        write("memory://a.tar", DATA[::-1])
        with pytest.raises(OpenError, match="changed while it was read"):
            ranges.read(0, 10)


@pytest.mark.parametrize("index", [True, False])
def test_a_shard_replaced_while_it_is_streamed(bucket, tmp_path, index):
    """The new shard has other contents under headers that are equal."""
    for name, value in ("a.tar", 0), ("b.tar", 1):
        with TarWriter(str(tmp_path / name)) as writer:
            for i in range(1000):
                writer.write({"__key__": f"{i:03d}", "cls": value})
        build_index(str(tmp_path / name)).save(str(tmp_path / name))
    for path in tmp_path.iterdir():
        bucket.objects[path.name] = path.read_bytes()
    bucket.versions["a.tar"] = {"etag": "v1"}
    small = Remote(1, ahead=1 << 14)  # else all of it is read at once
    stream = Stream.from_shards("bucket://a.tar", index=index, shuffle=index, remote=small).decode()
    came = []

    def consume():
        for sample in stream:
            came.append(sample["cls"])
            if len(came) == 10:
                renew(bucket, bucket.objects["b.tar"])

    with pytest.raises(OpenError, match=r"bucket://a\.tar: .*changed while it was read"):
        consume()
    assert 10 <= len(came) < 1000
    assert set(came) == {0}


def test_the_environment_has_defaults(monkeypatch, tmp_path):
    before = Location("http://host/a.tar").remote
    assert (before.connections, before.cache_dir) == (32, None)
    assert Location("http://host/b.tar").remote is before
    monkeypatch.setenv("TARSHARDS_CONNECTIONS", "4")
    monkeypatch.setenv("TARSHARDS_CACHE_DIR", "~/cache")
    monkeypatch.setenv("HOME", str(tmp_path))
    for remote in Remote(), Location("http://host/a.tar").remote, with_options(None, max_ratio=9):
        assert (remote.connections, remote.cache_dir) == (4, str(tmp_path / "cache"))
    assert Remote(cache_bytes=1 << 30).cache_dir == str(tmp_path / "cache")
    passed = Remote(connections=2, cache_dir=None)
    assert (passed.connections, passed.cache_dir) == (2, None)
    assert Location("http://host/a.tar", passed).remote is passed
    assert pickle.loads(pickle.dumps(Location("http://host/a.tar", passed))).remote == passed
    monkeypatch.delenv("TARSHARDS_CACHE_DIR")
    monkeypatch.setenv("TARSHARDS_CONNECTIONS", "")
    assert Remote() == before


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("TARSHARDS_CONNECTIONS", "4.5", "must be a whole number of at least 1, not '4.5'"),
        ("TARSHARDS_CONNECTIONS", "0", "must be a whole number of at least 1, not '0'"),
        ("TARSHARDS_CACHE_DIR", __file__, "must name a folder, not "),
    ],
)
def test_a_wrong_variable_is_named(monkeypatch, name, value, reason):
    monkeypatch.setenv(name, value)
    for make in Remote, lambda: Location("a.tar").remote, lambda: read("http://127.0.0.1:9/a.tar"):
        with pytest.raises(ValueError, match=f"the variable {name} {reason}"):
            make()
