"""No error shows a password, a signature or a token, nor does any of its causes, whatever fails and wherever."""

from __future__ import annotations

import base64
import logging
import socket
import traceback
from collections.abc import Callable
from urllib.parse import quote

import fsspec
import pytest
from fsspec.spec import AbstractFileSystem

from tarshards import Ledger, Stream
from tarshards.errors import TarshardsError
from tarshards.index.sidecar import Index
from tarshards.storage.expressions import expand_shards, expand_urls
from tarshards.storage.location import Location
from tarshards.storage.markers import read_marker, write_marker
from tarshards.storage.opening import open_shard
from tarshards.storage.redaction import redacted
from tarshards.storage.remote import Remote
from tarshards.testing.faulty_server import Answer, serving

pytestmark = pytest.mark.usefixtures("no_pauses")

SIGNATURE, PASSWORD, TOKEN = "s1gn/ture+4b=c5", "p4ss/w0rd%41", "t0k3n.4b5c6d7e8f"
QUERY = f"X-Amz-Expires=60&X-Amz-Signature={quote(SIGNATURE, safe='')}"
LOGIN = f"user99:{quote(PASSWORD, safe='')}"
BASIC = base64.b64encode(f"user99:{PASSWORD}".encode()).decode()
SECRETS = [SIGNATURE, quote(SIGNATURE, safe=""), PASSWORD, quote(PASSWORD, safe=""), TOKEN, BASIC, "user99"]
SIGNED_PATH = f"/shard.tar?{QUERY}"
BODY = bytes(range(256)) * 800


@pytest.fixture(scope="module")
def server():
    with serving() as running:
        yield running


def shows_nothing(action: Callable[[], object], reason: str | None = None) -> TarshardsError:
    """Run *action*, which fails, and look at all that is printed of its error."""
    with pytest.raises(TarshardsError, match=reason) as caught:
        action()
    text = "".join(traceback.format_exception(caught.value))
    error: BaseException | None = caught.value
    while error is not None:
        text += f"\n{error} {error!r} {getattr(error, '__notes__', '')}"
        error = error.__cause__
    assert not [secret for secret in SECRETS if secret in text], text
    return caught.value


def read(url: str) -> bytes:
    with Location(url, Remote(timeout=0.2, retries=1)).open() as stream:
        return stream.read()


def read_ranges(url: str) -> None:
    with Location.of(url).ranges() as ranges:
        ranges.read(50_000, 10)


USES = {
    "open": read,
    "shard": lambda url: open_shard(url).read(),
    "ranges": read_ranges,
    "write": lambda url: write_marker(url, {}),
    "exists": lambda url: Location.of(url).exists(),
    "index": lambda url: Index.load(url),
    "marker": read_marker,
    "manifest": lambda url: expand_shards(url.replace(".tar", ".json")),
    "stream": lambda url: Stream.from_shards(url, index=False).collect(),
}

ECHO = f"http://{LOGIN}@127.0.0.1{SIGNED_PATH} Authorization: Basic {BASIC} GET {SIGNED_PATH}"
ANSWERS = {
    "refused": Answer(status=f"403 {ECHO}"),
    "missing": Answer(status=f"404 {ECHO}"),
    "busy": Answer(status=f"503 {ECHO}"),
    "no status": Answer(raw=f"{ECHO}\r\n\r\n".encode()),
    "no http": Answer(raw=f"HTTP/9 {ECHO}\r\n\r\n".encode()),
    "broken off": Answer(cut=60_000, etag=None, end="reset"),
    "encoded": Answer(headers=(("Content-Encoding", "gzip"),)),
    "odd range": Answer(shift=1),
    "elsewhere": Answer(status=f"302 {ECHO}", headers=(("Location", f"ftp://{LOGIN}@host{SIGNED_PATH}"),)),
    "nowhere": Answer(status="302 Found", headers=(("Location", f"http://{LOGIN}@127.0.0.1:1{SIGNED_PATH}"),)),
    "malformed": Answer(status="302 Found", headers=(("Location", f"http://[{LOGIN}@x{SIGNED_PATH}"),)),
    "loop": Answer(status="302 Found", headers=(("Location", SIGNED_PATH),)),
}
#: What some uses do not notice, or take for an answer.
FINE = {("exists", "missing"), ("exists", "broken off"), ("exists", "odd range"), ("ranges", "broken off")}
FINE |= {("marker", "missing"), ("exists", "encoded"), ("shard", "encoded")}
FINE |= {("write", name) for name in ("broken off", "encoded", "odd range")}
FINE |= {(use, "odd range") for use in ("open", "shard", "index", "marker", "manifest", "stream")}


@pytest.mark.parametrize(("use", "answer"), [(u, a) for u in USES for a in ANSWERS if (u, a) not in FINE])
def test_web_servers(server, use, answer):
    server.play(body=BODY, default=ANSWERS[answer])
    url = f"{server.url}{SIGNED_PATH}".replace("http://", f"http://{LOGIN}@")
    assert shows_nothing(lambda: USES[use](url)).url
    assert server.requests


@pytest.mark.parametrize("use", USES)
def test_hosts_that_are_not_there(use, monkeypatch):
    shows_nothing(lambda: USES[use](f"http://{LOGIN}@127.0.0.1:1{SIGNED_PATH}"), "Connection refused")

    def unknown(host, *_, **__):
        raise socket.gaierror(socket.EAI_NONAME, f"no address for {ECHO}")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    shows_nothing(lambda: USES[use](f"http://{LOGIN}@nobody.invalid{SIGNED_PATH}"), "no address for http://127")


def test_a_server_that_stalls(server):
    server.play(body=BODY, default=Answer(cut=60_000, end="stall", etag=None))
    shows_nothing(lambda: read(f"{server.url}{SIGNED_PATH}"), "cannot be resumed")
    server.play(body=BODY, default=Answer(cut=0, end="stall"))
    shows_nothing(lambda: read(f"{server.url}{SIGNED_PATH}"), "timed out")


class Telling(AbstractFileSystem):
    """A store that fails with all that it knows."""

    protocol = "telling"
    cachable = False
    error: Exception = OSError()
    fails = ""

    def _fail(self, action: str) -> None:
        if self.fails == action:
            try:
                raise LookupError(f"credentials {ECHO}")
            except LookupError as cause:
                raise self.error from cause

    def info(self, path, **_):
        self._fail("info")
        return {"name": path, "size": 1000, "type": "file"}

    def _open(self, path, mode="rb", **_):
        self._fail("open")
        return fsspec.filesystem("memory").open("/telling", mode)

    def cat_file(self, path, **_):
        self._fail("cat")
        return b""

    def put_file(self, *_, **__):
        self._fail("put")


ERRORS = [
    PermissionError(f"403, message='Forbidden', url='http://{LOGIN}@host{SIGNED_PATH}'"),
    PermissionError(13, f"no access to {SIGNED_PATH}"),
    FileNotFoundError(f"http://host{SIGNED_PATH}"),
    ValueError(f"Invalid header value b'Bearer {TOKEN}\\n'"),
    ValueError(f"Authorization: Basic {BASIC}"),
    KeyError(SIGNED_PATH),
    RuntimeError(SIGNATURE, LOGIN),
]
FAILS = {
    "info": ("ranges", "exists", "open", "shard", "marker", "stream"),
    "open": ("open", "shard", "marker", "stream"),
    "cat": ("ranges",),
    "put": ("write",),
}


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize(("fails", "use"), [(fails, use) for fails, uses in FAILS.items() for use in uses])
def test_stores(monkeypatch, error, fails, use):
    fsspec.register_implementation("telling", Telling, clobber=True)
    monkeypatch.setattr(Telling, "error", error)
    monkeypatch.setattr(Telling, "fails", fails)
    fsspec.filesystem("memory").pipe_file("/telling", b"x" * 1000)
    if isinstance(error, FileNotFoundError) and use in ("exists", "marker"):
        assert not USES[use](f"telling://{LOGIN}@host{SIGNED_PATH}")
    else:
        shows_nothing(lambda: USES[use](f"telling://{LOGIN}@host{SIGNED_PATH}"))
    fsspec.filesystem("memory").rm("/telling")


@pytest.mark.interop
@pytest.mark.parametrize("answer", ["refused", "missing", "broken off", "no status"])
@pytest.mark.parametrize("use", ["open", "shard", "ranges", "index", "manifest", "stream"])
def test_chains_over_http(server, use, answer, tmp_path, monkeypatch):
    pytest.importorskip("aiohttp")
    monkeypatch.setitem(fsspec.config.conf, "filecache", {"cache_storage": str(tmp_path)})
    server.play(body=BODY, default=ANSWERS[answer])
    shows_nothing(lambda: USES[use](f"filecache::{server.url}/{use}-{answer.replace(' ', '')}{SIGNED_PATH}"))


def test_specs_lists_and_manifests(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    signed = f"http://{LOGIN}@127.0.0.1:1{SIGNED_PATH}"
    shows_nothing(lambda: expand_urls(f"http://host/{{a{SIGNED_PATH}"), "unbalanced braces")
    shows_nothing(lambda: expand_urls(signed.replace(".tar", ".json")), "refused")
    shows_nothing(lambda: open_shard(f"htp://{LOGIN}@host{SIGNED_PATH}"), "unknown scheme")
    shows_nothing(lambda: open_shard(f"http://{LOGIN}@host:port{SIGNED_PATH}"), "an http URL is")
    (tmp_path / "list").write_text(f"{signed}\nhttp://host/{{a{SIGNED_PATH}\n")
    shows_nothing(lambda: expand_urls("@list"), "unbalanced braces")
    (tmp_path / "list").write_text(f"{signed}\n{signed.replace('.tar', '.json')}")
    shows_nothing(lambda: expand_urls("@list"), "refused")
    (tmp_path / "list").write_text(signed)
    shows_nothing(lambda: Stream.from_shards("@list", index=True).collect(), "refused")
    shows_nothing(lambda: Stream.from_shards("@list", index=False).collect(), "refused")
    (tmp_path / "a.json").write_text(f'{{"wids_version": 1, "shardlist": [{{"url": "{signed}", "nsamples": -1}}]}}')
    shows_nothing(lambda: expand_urls("a.json"), "nsamples")


def test_commands():
    command = f"pipe:curl -s http://{LOGIN}@127.0.0.1:1{SIGNED_PATH} -H 'Authorization: Bearer {TOKEN}' || exit 3"
    shows_nothing(lambda: Location.of(command, allow_pipe=True).read(), "status 3")
    shows_nothing(lambda: Location.of(command).read(), "allow_pipe=True")
    shows_nothing(lambda: Location.of(f"simplecache::{command}").read(), "fsspec cannot read")


def test_ledgers_and_logs(server, caplog):
    caplog.set_level(logging.DEBUG, "tarshards")
    server.play(body=BODY, default=ANSWERS["refused"])
    ledger = Ledger(max_errors=10)
    url = f"{server.url}{SIGNED_PATH}"
    assert Stream.from_shards(url, index=False, on_error=ledger).collect() == []
    text = f"{ledger.quarantined} {ledger} {caplog.text} {Stream.from_shards(url, index=False).state_dict()}"
    assert "403" in text
    assert not [secret for secret in SECRETS if secret in text], text


@pytest.mark.parametrize(
    "text",
    [
        "403 Forbidden",
        "Basic authentication required",
        "what? no x=1",
        "a bearer certificate",
        "read 5 bytes at a/b.tar",
        "http://host:80/a@b.tar",
    ],
)
def test_what_is_no_credential_stays(text):
    assert redacted(text) == text
