"""Objects of gs and hf, which gcsfs and huggingface_hub find, are read over our own connections with their tokens."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from hashlib import md5
from urllib.parse import quote, unquote, urlsplit

import pytest
from with_torch import ShardDataset, ShardLoader

from tarshards import Remote, Stream
from tarshards.errors import OpenError
from tarshards.storage import fsspec_, requests, tuning
from tarshards.storage.location import Location
from tarshards.storage.opening import open_url
from tarshards.testing.faulty_server import Answer, Server, serving
from tarshards.write.shards import ShardWriter

pytestmark = pytest.mark.interop
DATA = bytes(range(256)) * 1000
TOKEN = "t0ken"
NONE = Answer(status="404 Not Found", end="keep"), b""


def found(data: bytes) -> tuple[Answer, bytes]:
    """The answer with an object, or a range of it."""
    return Answer(etag=f'"{md5(data).hexdigest()}"', end="keep"), data


def as_json(value: object) -> tuple[Answer, bytes]:
    return Answer(headers=(("Content-Type", "application/json"),), ranges=False, end="keep"), json.dumps(value).encode()


@dataclass(repr=False)
class Objects(Server):
    """A server of *objects* to who shows its *token*."""

    objects: dict[str, bytes] = field(default_factory=dict)
    token: str | None = TOKEN

    def asked(self, pattern: str) -> list[dict[str, str]]:
        """Return the headers of the requests for paths that match."""
        return [headers for _, path, headers, _ in self.requests if re.search(pattern, path)]

    def is_allowed(self, headers: dict[str, str]) -> bool:
        return headers.get("authorization") == (None if self.token is None else f"Bearer {self.token}")


class Gs(Objects):
    """Google Cloud Storage with one bucket: its XML API, the metadata of its JSON API, and new tokens."""

    def choose(self, method, path, headers, body):
        place = unquote(urlsplit(path).path)
        if place == "/token":
            return as_json({"access_token": self.token, "expires_in": 3600})
        if not self.is_allowed(headers):
            return Answer(status="401 Unauthorized", end="keep"), b""
        _, is_told, name = place.partition("/storage/v1/b/bucket/o/")
        name = name or place.removeprefix("/bucket/")
        data = self.objects.get(name)
        if data is None:
            return NONE
        told = {
            "name": name,
            "bucket": "bucket",
            "size": len(data),
            "generation": "1",
            "updated": "2026-01-01T00:00:00Z",
        }
        return as_json(told) if is_told else found(data)


class Hub(Objects):
    """The Hugging Face Hub with one dataset, whose files lie on the server *files*."""

    files: Objects
    busy = 0  # how many requests are refused

    def choose(self, method, path, headers, body):
        place = unquote(urlsplit(path).path)
        if self.busy:
            self.busy -= 1
            return Answer(status="503 Service Unavailable", end="keep"), b""
        if not self.is_allowed(headers):
            return Answer(status="401 Unauthorized", end="keep"), b""
        if place.startswith("/api/datasets/me/data/tree/"):
            return as_json(
                [
                    {"type": "file", "path": name, "size": len(data), "oid": "0"}
                    for name, data in self.files.objects.items()
                ]
            )
        if place.startswith("/api/datasets/me/data"):
            return as_json({"id": "me/data", "sha": "0" * 40, "private": True})
        name = place.removeprefix("/datasets/me/data/resolve/main/")
        if name not in self.files.objects:
            return NONE
        target = f"{self.files.url}/{quote(name)}?signature=s3cret{len(self.requests)}"
        return Answer(status="302 Found", headers=(("Location", target),), end="keep"), b""


class Files(Objects):
    def choose(self, method, path, headers, body):
        assert "authorization" not in headers
        data = self.objects.get(unquote(urlsplit(path).path)[1:])
        return NONE if data is None else found(data)


@pytest.fixture
def gs(monkeypatch):
    """gcsfs's store of the bucket `gs://bucket`."""
    monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # it would ask Google for the kind of the bucket
    gcsfs = pytest.importorskip("gcsfs", reason="gcsfs is not installed")
    import fsspec
    from google.oauth2.credentials import Credentials

    with serving(Gs()) as server:
        options = {"endpoint_url": server.url, "token": Credentials(TOKEN), "project": "p"}
        monkeypatch.setitem(fsspec.config.conf, "gs", options)
        yield server
        gcsfs.GCSFileSystem.clear_instance_cache()


@pytest.fixture
def hub(monkeypatch):
    huggingface_hub = pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
    import fsspec

    with serving(Hub()) as server, serving(Files()) as server.files:
        monkeypatch.setitem(fsspec.config.conf, "hf", {"endpoint": server.url, "token": TOKEN})
        yield server
        huggingface_hub.HfFileSystem.clear_instance_cache()


@pytest.fixture(params=["gs", "hf"])
def store(request):
    """A server with *objects*, the address that they have on it, and what reading them asks for there."""
    server = request.getfixturevalue("gs" if request.param == "gs" else "hub")
    if request.param == "gs":
        return server.objects, "gs://bucket", lambda: server.asked("^/bucket/")
    return server.files.objects, "hf://datasets/me/data", lambda: server.files.asked("")


def put_shards(objects: dict[str, bytes], folder, count: int = 300) -> list[str]:
    """Store 3 indexed shards of *count* samples each; return their keys."""
    with ShardWriter(f"{folder}/s-%d.tar", max_samples=count, index=True) as writer:
        for number in range(3 * count):
            writer.write({"__key__": f"{number:04d}", "bin": bytes([number % 256]) * 3000})
    for path in folder.iterdir():
        objects[path.name] = path.read_bytes()
    return [f"{number:04d}" for number in range(3 * count)]


def test_whole_files_and_ranges_at_any_place(store):
    objects, url, asked = store
    objects["d/a b#c.tar"] = DATA
    with open_url(f"{url}/d/a b#c.tar") as stream:
        assert stream.read() == DATA
    with Location.of(f"{url}/d/a b#c.tar").ranges() as ranges:
        assert (ranges.size, ranges.read(2000, 3000)) == (len(DATA), DATA[2000:5000])
    assert all("range" in headers for headers in asked())
    assert Location.of(f"{url}/d/a b#c.tar").size() == len(DATA)
    with pytest.raises(OpenError, match=rf"^{url}/none\.tar: 404 Not Found$"):
        open_url(f"{url}/none.tar")


@pytest.mark.parametrize("options", [{"index": False}, {"index": True, "shuffle": True}])
def test_epochs_are_read_by_blocks(store, tmp_path, options):
    objects, url, asked = store
    keys = put_shards(objects, tmp_path)
    samples = list(Stream.from_shards(f"{url}/s.shards.json", **options))
    assert sorted(sample["__key__"] for sample in samples) == keys
    assert all(sample["bin"] == bytes([int(sample["__key__"]) % 256]) * 3000 for sample in samples)
    assert len(asked()) < 60, "not one request a sample"


def test_a_changed_object_is_an_error(store):
    objects, url, _ = store
    objects["a.tar"] = DATA
    with Location.of(f"{url}/a.tar").ranges() as ranges:
        objects["a.tar"] = DATA[::-1]
        with pytest.raises(OpenError, match=rf"^{url}/a\.tar: offset 2000: changed while it was read$"):
            ranges.read(2000, 1000)


def test_a_refused_token_is_told_in_no_message(store, request):
    objects, url, _ = store
    objects["a.tar"] = DATA
    request.getfixturevalue("gs" if url.startswith("gs") else "hub").token = "other"
    with pytest.raises(OpenError, match=rf"^{url}/a\.tar: .*401 Unauthorized") as caught:
        open_url(f"{url}/a.tar")
    chain = caught.value
    assert "\n" not in str(chain)
    while chain is not None:
        assert TOKEN not in str(chain)
        chain = chain.__cause__


def test_a_token_of_gs_is_renewed(gs):
    """By google-auth, at the server that the credentials name."""
    from google.oauth2.credentials import Credentials

    gs.objects["a.tar"], gs.token = DATA, "new"
    login = {"refresh_token": "r", "token_uri": f"{gs.url}/token", "client_id": "me", "client_secret": "s3cret"}
    expired = Credentials(TOKEN, **login, expiry=datetime.now() - timedelta(days=1))
    remote = Remote(storage_options={"endpoint_url": gs.url, "token": expired, "project": "p"})
    with open_url("gs://bucket/a.tar", remote=remote) as stream:
        assert stream.read() == DATA
    assert len(gs.asked("^/token")) == 1


def test_who_pays_for_requests_to_gs(gs):
    from google.oauth2.credentials import Credentials

    gs.objects["a.tar"] = DATA
    options = {"endpoint_url": gs.url, "token": Credentials(TOKEN), "project": "p"}
    for requester_pays, payer in (False, None), (True, "p"), ("q", "q"):
        gs.requests.clear()
        remote = Remote(storage_options={**options, "requester_pays": requester_pays})
        with Location.of("gs://bucket/a.tar", remote).ranges() as ranges:
            ranges.read(0, len(DATA))
        assert {headers.get("x-goog-user-project") for headers in gs.asked("^/bucket/")} == {payer}


def test_what_only_gcsfs_can_read_is_left_to_it(gs, monkeypatch):
    """Zonal buckets, a generation, and client certificates."""
    store = fsspec_.find_store(Location.of("gs://bucket/a.tar"))[0]
    assert fsspec_.address_of(Location.of("gs://bucket/a.tar")) is not None
    monkeypatch.setattr(store, "_use_client_cert", True)
    assert fsspec_.address_of(Location.of("gs://bucket/a.tar")) is None
    monkeypatch.setattr(store, "_use_client_cert", False)
    monkeypatch.setattr(store, "version_aware", True)
    assert fsspec_.address_of(Location.of("gs://bucket/a.tar#1")) is None
    monkeypatch.setattr(store, "version_aware", False)
    monkeypatch.setattr(fsspec_, "_is_zonal", lambda store, bucket: bucket == "bucket")
    assert fsspec_.address_of(Location.of("gs://bucket/a.tar")) is None
    gs.objects["a.tar"] = DATA
    with Location.of("gs://bucket/a.tar").ranges() as ranges:
        assert ranges.size == len(DATA)


@pytest.mark.parametrize(
    ("base", "kind", "is_zonal"),
    [
        ("https://storage.googleapis.com/storage/v1/", "ZONAL_HIERARCHICAL", True),
        ("https://storage.googleapis.com/storage/v1/", "UNKNOWN", False),
        ("http://127.0.0.1:1/storage/v1/", "ZONAL_HIERARCHICAL", False),
    ],
)
def test_which_buckets_are_zonal(base, kind, is_zonal):
    kinds = pytest.importorskip("gcsfs.extended_gcsfs", reason="gcsfs is not installed").BucketType

    class Store:
        def _sync_lookup_bucket_type(self, bucket):
            return kinds[kind]

    store = Store()
    store.base = base
    assert fsspec_._is_zonal(store, "bucket") == is_zonal


@pytest.mark.usefixtures("quick_spawn")
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_worker_processes_read_shards_of_google(gs, tmp_path, start):
    keys = put_shards(gs.objects, tmp_path)
    options = {"endpoint_url": gs.url, "token": "anon", "project": "p"}
    gs.token = None
    dataset = ShardDataset("gs://bucket/s.shards.json", shuffle=True, remote=Remote(storage_options=options))
    loader = ShardLoader(dataset, batch_size=32, num_workers=2, multiprocessing_context=start)
    assert sorted(key for batch in loader for key in batch["__key__"]) == keys


def test_the_hub_is_asked_once_for_a_file_and_a_minute(hub, monkeypatch):
    hub.files.objects["a.tar"] = DATA
    with Location.of("hf://datasets/me/data/a.tar").ranges() as ranges:
        for begin in range(0, len(DATA), 10_000):
            ranges.read(begin, 1000)
        assert len(hub.asked("/resolve/")) == 1
        monkeypatch.setattr(requests, "monotonic", lambda: 1e12)
        ranges.read(3000, 1000)
        assert len(hub.asked("/resolve/")) == 2


def test_the_hub_is_asked_again_where_its_file_server_refuses(hub):
    hub.files.objects["a.tar"] = DATA
    with Location.of("hf://datasets/me/data/a.tar").ranges() as ranges:
        hub.files.answers += [Answer(status="403 Forbidden", end="keep")]
        choose, hub.files.choose = (
            hub.files.choose,
            lambda *_: (hub.files.answers.pop(0), b"") if hub.files.answers else choose(*_),
        )
        assert ranges.read(3000, 1000) == DATA[3000:4000]
    assert len(hub.asked("/resolve/")) == 2


def test_a_hub_that_is_busy_is_asked_again(hub, monkeypatch):
    monkeypatch.setattr(tuning, "PAUSE_SECONDS", 0.001)
    hub.files.objects["a.tar"] = DATA
    hub.busy = 2
    with open_url("hf://datasets/me/data/a.tar") as stream:
        assert stream.read() == DATA
    assert hub.busy == 0


def test_a_dataset_of_the_hub_is_listed(hub, tmp_path):
    keys = put_shards(hub.files.objects, tmp_path, 5)
    assert [sample["__key__"] for sample in Stream.from_shards("hf://datasets/me/data/s-*.tar", index=False)] == keys
