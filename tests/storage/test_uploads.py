"""Objects written to s3 and gs: parts go up at once, and the object appears whole or not at all."""

from __future__ import annotations

import base64
import hashlib
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from urllib.parse import quote, urlencode

import pytest
from object_store import RESET

from tarshards.errors import OpenError
from tarshards.storage import fsspec_, tuning
from tarshards.storage.location import Location
from tarshards.storage.opening import open_url
from tarshards.storage.remote import Remote

pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
PART = 5 << 20  # the least that S3 takes
URL = "s3://bucket/d/a.tar"


@pytest.fixture(autouse=True)
def _small_and_impatient(monkeypatch):
    monkeypatch.setattr(fsspec_, "PART", PART)
    monkeypatch.setattr(tuning, "PAUSE_SECONDS", 0.001)


class FakeGcs:
    """What we use of gcsfs, over moto's XML, which is that of Google Cloud Storage."""

    def __init__(self, url: str):
        self.base = f"{url}/storage/v1/"

    def split_path(self, path):
        return *path.split("/", 1), None

    def call(self, method, url, headers=None, data=None, **params):
        if headers:
            assert headers == {"Content-MD5": base64.b64encode(hashlib.md5(data).digest()).decode()}
        headers = {"Content-Type": "application/octet-stream"} | (headers or {})
        request = urllib.request.Request(f"{url}?{urlencode(params)}", method=method, data=data, headers=headers)
        try:
            with urllib.request.urlopen(request) as answer:
                return answer.headers, answer.read()
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == 404:
                raise FileNotFoundError(url) from None
            raise

    def pipe_file(self, path, data):
        self.call("PUT", f"{self.base.removesuffix('/storage/v1/')}/{quote(path)}", data=data)

    def invalidate_cache(self, path):
        pass


@pytest.fixture(params=["s3", "gs"])
def scheme(request, s3, monkeypatch):
    if request.param == "gs":
        store = FakeGcs(s3.url)
        monkeypatch.setattr(fsspec_, "find_store", lambda location: (store, location.url.partition("://")[2]))
    return request.param


def data_of(size: int) -> bytes:
    return (b"".join(i.to_bytes(4, "big") for i in range(1 << 16)) * (size // (1 << 18) + 1))[:size]


def write(data: bytes, url: str = URL, remote: Remote | None = None) -> None:
    with open_url(url, "wb", remote=remote) as stream:
        for at in range(0, len(data), 1_000_001):
            stream.write(data[at : at + 1_000_001])


@pytest.mark.parametrize("size", [0, 1, PART, PART + 1, 3 * PART, 3 * PART + 12345])
def test_objects_of_any_size(s3, scheme, size):
    write(data_of(size), f"{scheme}://bucket/d/a b.tar")
    assert s3.objects() == {"d/a b.tar": data_of(size)}
    assert s3.uploads() == []
    assert s3.asked("PUT", "partNumber") == (-(-size // PART) if size > PART else 0), "small objects are one PUT"


def test_options_that_no_signed_url_holds(s3):
    """s3fs sends them as headers; it gets the whole object."""
    options = s3.options | {"s3_additional_kwargs": {"StorageClass": "STANDARD_IA"}}
    write(data_of(2 * PART), remote=Remote(storage_options=options))
    assert s3.objects() == {"d/a.tar": data_of(2 * PART)}
    assert s3.client.head_object(Bucket="bucket", Key="d/a.tar")["StorageClass"] == "STANDARD_IA"
    stream = open_url(URL, "wb", remote=Remote(storage_options=options))
    stream.write(b"other")
    stream.abort()
    assert s3.objects() == {"d/a.tar": data_of(2 * PART)}


def test_parts_go_up_at_once(s3, scheme):
    """Each of the first four waits until all four have come."""
    together = threading.Barrier(4)

    def look(method, path, query):
        if method == "PUT" and "partNumber" in query and s3.asked("PUT", "partNumber") <= 4:
            together.wait(10)

    s3.look = look
    write(data_of(4 * PART), f"{scheme}://bucket/d/a.tar")
    assert not together.broken
    assert s3.objects() == {"d/a.tar": data_of(4 * PART)}


@pytest.mark.parametrize("connections", [1, 2, 32])
def test_memory_and_connections_are_bounded(s3, monkeypatch, connections):
    """The writer waits while as many parts as may be are held back, and goes on when they have been stored."""
    monkeypatch.setattr(fsspec_, "MEMORY", 3 * PART)
    held, may_go, most = [], threading.Event(), min(connections, 3)

    def look(method, path, query):
        if method == "PUT" and "partNumber" in query:
            held.append(query)
            may_go.wait(20)

    s3.look = look
    data, written = data_of(6 * PART), []

    def run():
        with open_url(URL, "wb", remote=Remote(connections=connections)) as stream:
            for at in range(0, len(data), PART):
                stream.write(data[at : at + PART])
                written.append(at)

    thread = threading.Thread(target=run)
    thread.start()
    while len(held) < most:
        thread.join(0.01)
    thread.join(0.3)  # in which nothing more may come
    assert len(held) == most
    assert len(written) <= most + 1
    may_go.set()
    thread.join()
    assert s3.objects() == {"d/a.tar": data}


def test_parts_grow_so_that_ten_thousand_suffice(monkeypatch):
    monkeypatch.setattr(fsspec_, "PART", 1 << 23)
    sizes = [fsspec_.size_of_part(number) for number in range(1, 10_001)]
    assert sum(sizes) > 5 << 40
    assert max(sizes) <= 5 << 30
    assert min(sizes) == 1 << 23


FAULTS = {
    "busy": ("503 Slow Down", b"<Error><Code>SlowDown</Code><Message>slow</Message></Error>"),
    "broken": ("500 Oops", b"<Error><Code>InternalError</Code><Message>oops</Message></Error>"),
    "reset": RESET,
    "torn": ("400 Bad Request", b"<Error><Code>BadDigest</Code><Message>the MD5 differs</Message></Error>"),
}


def fail(s3, count: int, answer, *, method: str = "PUT", word: str = "partNumber=2") -> None:
    """Let *answer* be that to the next *count* such requests."""
    left = [answer] * count

    def look(asked, path, query):
        return left.pop() if asked == method and word in query and left else None

    s3.look = look


REQUESTS = [("PUT", "partNumber=2"), ("POST", "uploads"), ("POST", "uploadId"), ("PUT", "")]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(("method", "word"), REQUESTS)
def test_what_passes_is_tried_again(s3, fault, method, word):
    fail(s3, 3, FAULTS[fault], method=method, word=word)
    data = data_of(3 * PART if word else 1000)
    write(data, remote=Remote(retries=3))
    assert s3.objects() == {"d/a.tar": data}
    assert s3.uploads() == []
    assert s3.asked(method, word) >= 4, "each by itself"


def test_a_stall_ends_after_the_timeout_of_remote(s3):
    may_go = threading.Event()

    def look(method, path, query):
        if "partNumber=2" in query and s3.asked("PUT", "partNumber=2") == 1:
            may_go.wait(30)
            return FAULTS["busy"]
        return None

    s3.look = look
    write(data_of(3 * PART), remote=Remote(timeout=1, retries=1))
    assert not may_go.is_set()
    may_go.set()
    assert s3.asked("PUT", "partNumber=2") == 2
    assert s3.objects() == {"d/a.tar": data_of(3 * PART)}


def test_what_else_is_asked_of_a_store_is_tried_again(s3):
    s3.put("d/a.tar", b"data")
    location = Location.of(URL, Remote(retries=3))
    for method, word, action in (
        ("HEAD", "", location.size),
        ("GET", "list-type", Location.of("s3://bucket/d/*.tar", Remote(retries=3)).glob),
        ("DELETE", "", location.remove),
    ):
        s3.requests.clear()
        fail(s3, 3, FAULTS["busy"], method=method, word=word)
        assert action() in (4, [location.url], None)
        assert s3.asked(method, word) >= 4
    assert s3.objects() == {}


DENIED = (
    "403 Forbidden",
    b"<Error><Code>AccessDenied</Code><Message>no s3cr3t-t0ken ?uploadId=hidden</Message></Error>",
)
LARGE = ("413 Too Large", b"<Error><Code>EntityTooLarge</Code><Message>too large</Message></Error>")


@pytest.mark.parametrize(("fault", "tries"), [("busy", 3), ("broken", 3), ("reset", 3), (DENIED, 1), (LARGE, 1)])
@pytest.mark.parametrize(("method", "word"), REQUESTS)
def test_what_stays_is_an_error_and_leaves_nothing(s3, fault, tries, method, word):
    """Not even the parts of the upload, and the object that was there before is as it was."""
    write(b"before")
    fail(s3, 99, FAULTS.get(fault, fault), method=method, word=word)
    s3.requests.clear()
    with pytest.raises(OpenError, match=r"^s3://bucket/d/a\.tar: ") as caught:
        write(data_of(3 * PART if word else 1000), remote=Remote(retries=2))
    assert s3.objects() == {"d/a.tar": b"before"}
    assert s3.uploads() == []
    assert ("(attempt 3)" in str(caught.value)) == (tries == 3)
    renewed = fault is DENIED and method == "PUT"  # another signature is tried once
    if fault != "reset":  # aiohttp sends a request again where a kept connection broke
        assert s3.asked(method, word) == tries + renewed
    assert "hidden" not in str(caught.value)


def test_an_error_of_the_writer_aborts(s3, scheme):
    def break_off():
        with open_url(f"{scheme}://bucket/d/a.tar", "wb") as stream:
            stream.write(data_of(4 * PART))
            raise KeyError

    with pytest.raises(KeyError):
        break_off()
    assert s3.asked("POST", "uploads") == 1
    assert (s3.objects(), s3.uploads()) == ({}, [])


def test_an_abort_waits_for_parts_under_way(s3):
    """A part that comes after the abort would be stored and paid for."""
    held, may_go = threading.Event(), threading.Event()

    def look(method, path, query):
        if method == "PUT" and "partNumber=1" in query:
            held.set()
            may_go.wait(20)

    s3.look = look
    stream = open_url(URL, "wb")
    stream.write(data_of(2 * PART))
    held.wait(20)
    thread = threading.Thread(target=stream.abort)
    thread.start()
    thread.join(0.2)
    assert not s3.asked("DELETE")
    may_go.set()
    thread.join()
    methods = [method for method, *_ in s3.requests]
    assert methods.index("DELETE") > methods.index("PUT")
    assert (s3.objects(), s3.uploads()) == ({}, [])


def test_an_abort_ends_retries(s3, monkeypatch):
    """Nobody waits out the pauses of an upload that was given up."""
    monkeypatch.setattr(tuning, "PAUSE_SECONDS", 60)
    fail(s3, 99, FAULTS["broken"])
    stream = open_url(URL, "wb", remote=Remote(retries=9))
    stream.write(data_of(3 * PART))
    while not s3.asked("PUT", "partNumber=2"):
        threading.Event().wait(0.01)
    thread = threading.Thread(target=stream.abort, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    assert (s3.objects(), s3.uploads()) == ({}, [])


def test_a_failed_part_is_not_forgotten(s3):
    """Who goes on after an error of write() cannot complete an object without what was lost."""
    fail(s3, 99, DENIED)
    stream = open_url(URL, "wb", remote=Remote(retries=0))
    stream.write(data_of(2 * PART + 1))
    for _ in range(2):
        with pytest.raises(OpenError, match="403 Forbidden"):
            stream.write(data_of(20 * PART))
    with pytest.raises(OpenError, match="403 Forbidden"):
        stream.close()
    assert (s3.objects(), s3.uploads()) == ({}, [])


def test_a_killed_writer_leaves_no_object(s3):
    """What was sent is an upload that no listing shows, and that the store can expire."""
    code = """
import sys
from tarshards import open_url
from tarshards.storage import fsspec_
from tarshards.storage.remote import Remote
fsspec_.PART = 5 << 20
stream = open_url("s3://bucket/d/a.tar", "wb", remote=Remote(storage_options=eval(sys.argv[1])))
while True:
    stream.write(bytes(1 << 20))
"""
    with subprocess.Popen([sys.executable, "-c", code, repr(s3.options)], stderr=subprocess.PIPE) as writer:
        while s3.asked("PUT", "partNumber") < 3 and writer.poll() is None:
            pass
        writer.kill()
    assert s3.objects() == {}
    assert s3.uploads() == ["d/a.tar"]
    write(b"again")
    assert s3.objects() == {"d/a.tar": b"again"}


def test_credentials_of_options_are_not_shown(s3):
    remote = Remote(storage_options=s3.options | {"secret": "s3cr3t-t0ken"}, retries=0)
    fail(s3, 1, DENIED, method="POST", word="uploads")
    with pytest.raises(OpenError, match=r"no \.\.\. \?uploadId=\.\.\.$") as caught:
        write(data_of(2 * PART), remote=remote)
    assert "s3cr3t" not in repr(caught.value.__cause__)
