"""No error shows a password, a signature or a token, nor does any of its causes, whatever fails and wherever.

Nor does a file that is written, a manifest, marker, report or page, nor its name, nor what a tool prints.
"""

from __future__ import annotations

import base64
import logging
import re
import shutil
import socket
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from urllib.parse import quote

import fsspec
import pytest
from fsspec.spec import AbstractFileSystem
from inline import Inline
from range_server import serving as serving_files
from tool_lines import WRITING, command_of, make_inputs

from tarshards import (
    IndexedShards,
    Ledger,
    ShardWriter,
    Stream,
    export_dataset,
    import_dataset,
    map_shards,
    write_dataset,
)
from tarshards.errors import TarshardsError
from tarshards.formats import importing
from tarshards.index.manifests import write_manifest
from tarshards.index.sidecar import Index
from tarshards.run.jobs.job_folder import JobFolder
from tarshards.run.jobs.job_options import Options
from tarshards.run.jobs.job_plan import Item, JobPlan, make_plan
from tarshards.run.jobs.kubernetes_objects import make_objects
from tarshards.storage.expressions import expand_urls, find_shards
from tarshards.storage.location import Location
from tarshards.storage.manifest import Shard, parse_manifest
from tarshards.storage.markers import Marker
from tarshards.storage.opening import open_shard
from tarshards.storage.redaction import redacted
from tarshards.storage.remote import Remote
from tarshards.testing.faulty_server import Answer, serving
from tarshards.write import dataset
from tarshards.write.reshard import reshard

pytestmark = [pytest.mark.usefixtures("no_pauses"), pytest.mark.filterwarnings("ignore::DeprecationWarning")]

SIGNATURE, PASSWORD, TOKEN = "s1gn/ture+4b=c5", "p4ss/w0rd%41", "t0k3n.4b5c6d7e8f"
QUERY = f"X-Amz-Expires=60&X-Amz-Signature={quote(SIGNATURE, safe='')}"
LOGIN = f"user99:{quote(PASSWORD, safe='')}"
BASIC = base64.b64encode(f"user99:{PASSWORD}".encode()).decode()
SECRETS = [SIGNATURE, quote(SIGNATURE, safe=""), PASSWORD, quote(PASSWORD, safe=""), TOKEN, BASIC, "user99"]
SIGNED_PATH = f"/shard.tar?{QUERY}"
BODY = bytes(range(256)) * 800
SAMPLES = [{"__key__": f"{i}", "txt": "text"} for i in range(6)]


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
    "write": lambda url: Marker(url).write({}),
    "exists": lambda url: Location.of(url).exists(),
    "index": lambda url: Index.load(url),
    "marker": lambda url: Marker(url).read(),
    "manifest": lambda url: find_shards(url.replace(".tar", ".json")),
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


def test_names_of_outputs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_dataset(SAMPLES, "a-%d.tar", executor=Inline())
    output = f"http://{LOGIN}@127.0.0.1:1/x.what?{QUERY}"
    shows_nothing(lambda: export_dataset("a-0.tar", output), "cannot tell the format")
    for function in (
        lambda: ShardWriter(output),
        lambda: map_shards(copied, "a-0.tar::a-0.tar", f"{output}::{output}", executor=Inline()),
        lambda: reshard("a-0.tar", output, executor=Inline(), max_samples=1),
    ):
        with pytest.raises((ValueError, OSError)) as caught:
            function()
        assert not [secret for secret in SECRETS if secret in f"{caught.value}"]


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


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    make_inputs(folder)
    return folder


@pytest.fixture
def signed(inputs, tmp_path, monkeypatch):
    """Return a function that returns the URL of a name on a server with the inputs, with a login and a signature."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(inputs, tmp_path / "site")
    with serving_files(tmp_path / "site") as site:
        yield lambda name: f"{site.url}/{name}?{QUERY}".replace("http://", f"http://{LOGIN}@")


def show_nothing(folder: Path, printed: str = "", *, private: tuple[str, ...] = ()) -> None:
    """Look at what was printed, and at each file in *folder*, its name too, apart from those that are *private*."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    texts = {str(path.relative_to(folder)): path.read_bytes() for path in files}
    shown = [
        (name, secret)
        for name, data in texts.items()
        for secret in SECRETS
        if secret in name or (secret.encode() in data and not name.startswith(private))
    ]
    assert not shown
    assert not [secret for secret in SECRETS if secret in printed], printed


def run(line: str, *urls: str) -> None:
    tool, *words = line.split()
    command_of(tool).main([*words, *urls] if urls else words, standalone_mode=False)


INDEXING = {
    "manifest": "tarindex --index-dir idx --key-index",
    "named": "tarindex --index-dir idx --manifest m.json",
    "beside": "tarindex --key-index",
    "wids": "tarindex --format wids -o w.json",
    "dali": "tarindex --format dali -o d",
    "dry": "tarindex --dry-run",
    "elsewhere": "tarindex --dry-run --index-dir idx",
    "dali, dry": "tarindex --dry-run --format dali",
    "card": "tarcard --name x -o card.json",
    "cache": "tarcat --cache-dir c -o x.tar",
    "check": "tarcheck --json",
}


@pytest.mark.parametrize("line", INDEXING.values(), ids=INDEXING)
def test_files_of_an_index(signed, tmp_path, capfd, line):
    with suppress(SystemExit):
        run(line, signed("in-{0..2}.tar"))
    show_nothing(tmp_path, "".join(capfd.readouterr()))
    for manifest in tmp_path.rglob("*.json"):
        if manifest.name != "card.json":
            assert [shard.samples for shard in parse_manifest(manifest.read_bytes(), "")] == [4, 4, 1]


@pytest.mark.parametrize("tool", WRITING)
def test_files_of_tools(signed, tmp_path, capfd, tool):
    line = re.sub(r"\{0\}(\S+)", lambda name: signed(name[1]), WRITING[tool]).replace("{{", "{").replace("}}", "}")
    line = line.replace(signed("tree"), f"{tmp_path}/site/tree")
    if tool == "tarindex":
        line = line.replace(" -o .", "")
    run(f"{tool} {line}")
    show_nothing(tmp_path, "".join(capfd.readouterr()))


def copied(samples):
    """A function that other processes could import."""
    return samples


def test_records_of_written_shards(signed, tmp_path):
    (report, _, _) = map_shards(
        copied, signed("in-{0..2}.tar"), signed("map-{0..2}.tar"), executor=Inline(), progress=False
    )
    assert report.output == signed("map-0.tar")
    again = map_shards(copied, signed("in-{0..2}.tar"), signed("map-{0..2}.tar"), executor=Inline(), progress=False)
    assert [(each.output, each.resumed) for each in again] == [(signed(f"map-{i}.tar"), True) for i in range(3)]
    assert Marker(signed("map-0.tar.done")).read()


@pytest.mark.parametrize("recorded", [None, "set-%d.tar", "set-{shard}.tar"])
def test_journals_of_interrupted_writing(signed, tmp_path, caplog, monkeypatch, recorded):
    def die(_):
        raise KeyboardInterrupt

    samples = [{**sample, "txt": "text" * 750} for sample in SAMPLES]
    written = partial(write_dataset, samples, signed("set-%d.tar"), max_bytes=20_480)
    with monkeypatch.context() as patch:
        patch.setattr(dataset._Journal, "remove", die)
        with pytest.raises(KeyboardInterrupt):
            written(executor=Inline())
    journal = Marker(signed("set-0.tar.writing")).read()
    assert journal is not None
    show_nothing(tmp_path)
    if recorded is not None:  # by an earlier version
        Marker(signed("set-0.tar.writing")).write({**journal, "pattern": signed(recorded)})
    names = written(executor=Inline())
    assert names == [signed(f"set-{i}.tar") for i in range(2)]
    assert "start over" not in caplog.text
    assert len(Stream.from_shards(signed("set-{0..1}.tar")).collect()) == 6


def test_records_of_killed_imports(signed, tmp_path, monkeypatch):
    def die(*_, **__):
        raise KeyboardInterrupt

    imported = partial(import_dataset, signed("rows.jsonl"), signed("imported-%d.tar"), progress=False)
    with monkeypatch.context() as patch:
        patch.setattr(importing, "_columns", die)
        with pytest.raises(KeyboardInterrupt):
            imported(executor=Inline())
    assert Marker(signed("imported-0.tar.done")).read()
    show_nothing(tmp_path)
    assert imported(executor=Inline()) == [signed("imported-0.tar")]
    show_nothing(tmp_path)


def test_an_index_dir_finds_the_same_shards_with_new_credentials(signed, tmp_path):
    for _ in range(2):
        run("tarindex --index-dir idx --key-index", signed("in-{0..2}.tar"))
        signed_again = signed("in-{0..2}.tar").replace("Expires=60", "Expires=61").replace("user99", "user98")
        run("tarindex --index-dir idx", signed_again)
    (manifest,) = tmp_path.glob("idx/**/in.shards.json")
    assert [shard.samples for shard in parse_manifest(manifest.read_bytes(), "")] == [4, 4, 1]
    assert IndexedShards(signed("in-{0..2}.tar"), index_dir="idx")["008"]["txt"] == b"text"


def test_manifests_of_urls_that_only_credentials_tell_apart(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shards = [Shard(f"http://{LOGIN}@host/get?key={i}", 1, 1024) for i in range(2)]
    shows_nothing(lambda: write_manifest("a.json", shards), "two shards are named http://host/get: a manifest leaves")
    write_manifest("a.json", [shard._replace(url=shard.url.replace("key", "file")) for shard in shards])
    assert [shard.url for shard in find_shards("a.json")] == [f"http://host/get?file={i}" for i in range(2)]


def test_manifests_of_an_earlier_version_lose_their_credentials(signed, tmp_path):
    run("tarindex --index-dir idx", signed("in-{0..2}.tar"))
    (manifest,) = tmp_path.glob("idx/**/in.shards.json")
    site = signed("").partition("@")[2].partition("/")[0]
    text = manifest.read_text().replace(f"http://{site}/in-0.tar", signed("in-0.tar"))
    manifest.write_text(text)
    assert find_shards(str(manifest))[0].url == signed("in-0.tar")
    run("tarindex --index-dir idx", signed("in-1.tar"))
    assert len(find_shards(str(manifest))) == 3
    show_nothing(tmp_path)


def test_catalogs(signed, tmp_path):
    run("tarindex", signed("in-{0..2}.tar"))
    add = f"train={signed('in.shards.json')}"
    shows_nothing(lambda: run("tarcatalog add c.yaml x@1", add), "a catalog keeps no credentials, and the URL of this")
    assert not (tmp_path / "c.yaml").exists()


def test_jobs(signed, tmp_path, capfd, monkeypatch):
    """A plan has what the command needs, in a folder that only its owner reads; all else shows nothing."""
    sources = ["-s", signed("in-{0..2}.tar"), "--"]
    for command in (["sort", "--compress-program", "{}", "-o", "{#}.tar", "/dev/null"], ["echo failed {} >&2; exit 3"]):
        with suppress(SystemExit):
            command_of("tarjob").main([*sources[:2], "--dry-run", "--", *command], standalone_mode=False)
        with suppress(SystemExit):
            command_of("tarjob").main([*sources, *command], standalone_mode=False)
    assert (tmp_path / "3.tar.done").exists()
    folders = [*tmp_path.glob(".tarjob/*")]
    assert [folder.stat().st_mode & 0o777 for folder in folders] == [0o700] * 2
    private = [f".tarjob/{folder.name}/{name}" for folder in folders for name in ("plan.json", "logs/")]
    show_nothing(tmp_path, printed := "".join(capfd.readouterr()), private=tuple(private))
    assert "failed http://127.0.0.1:" in printed
    first = signed("in-0.tar").partition("?")[0].replace(f"{LOGIN}@", "")
    with suppress(SystemExit):
        command_of("tarjob").main(["logs", folders[0].name, first], standalone_mode=False)
    assert first in capfd.readouterr().err, "as the status shows it"
    for folder in folders:
        plan, _ = JobFolder(folder.name).load()
        with pytest.raises(ValueError, match="a ConfigMap would show the credentials"):
            make_objects(plan, Options(image="a/b:1"))


@pytest.mark.parametrize("scheme", ["http", "HTTPS", "s3", "git+ssh", "file", "my_db", "7z", "zip", "pipe"])
def test_a_command_s_url_of_any_scheme_may_have_credentials(scheme):
    assert JobPlan("a", (f"get {scheme}://me:secret@host/a.tar",), None, None, ()).has_credentials
    assert not JobPlan("a", (f"get {scheme}://host/a.tar?f=a",), None, None, ()).has_credentials


def test_what_a_command_wrote_shows_no_credentials_of_its_item():
    """The password of one value begins that of another."""
    item = Item(0, ("http://host/a.tar?sig=secret1", "http://me:secret1234@host/b.tar", "plain"))
    assert item.redacted("secret1234 refused by host; plain secret1") == "... refused by host; plain ..."


def test_jobs_whose_command_has_variables_for_credentials(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = make_plan(["curl http://$LOGIN@host/{}?sig=${SIG} -o {}.txt"], ["{a,b}"], state="s")
    assert not plan.has_credentials
    JobFolder("a").save(plan, engine="local", options={}, parts=[])
    assert JobFolder("a").load()[0] == plan
    assert (tmp_path / ".tarjob/a").stat().st_mode & 0o077
    assert make_objects(plan, Options(image="a/b:1"))


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
