"""Patterns on web servers, listed by PROPFIND: which names match, and what a server may not make of it."""

from __future__ import annotations

import dataclasses
import subprocess
import time
import urllib.request
from socket import create_server
from xml.sax.saxutils import escape

import pytest
from programs import WEBDAV, WEBDAV_MODULE, find, need

from tarshards import Stream, TarWriter
from tarshards.errors import OpenError, UrlError
from tarshards.index.build import build_index
from tarshards.storage import webdav
from tarshards.storage.expressions import expand_urls
from tarshards.storage.location import Location
from tarshards.storage.opening import open_url
from tarshards.testing.faulty_server import Answer

pytestmark = pytest.mark.usefixtures("no_pauses")


def listed(*hrefs: str, head: str = "", prefix: str = "D:", **options) -> Answer:
    """The answer to PROPFIND that lists *hrefs*; those that end in a slash are folders."""
    name = f"xmlns{':' if prefix else ''}{prefix.rstrip(':')}"
    entries = "".join(
        f"<{prefix}response><{prefix}href>\n {escape(href)}</{prefix}href><{prefix}propstat><{prefix}prop>"
        f"<{prefix}resourcetype>{f'<{prefix}collection/>' * href.endswith('/')}</{prefix}resourcetype>"
        f"<owner xmlns='x'><{prefix}href>/not/this.tar</{prefix}href></owner></{prefix}prop>"
        f"<{prefix}status>HTTP/1.1 200 OK</{prefix}status></{prefix}propstat></{prefix}response>"
        for href in hrefs
    )
    text = f'<?xml version="1.0"?>{head}<{prefix}multistatus {name}="DAV:">{entries}</{prefix}multistatus>'
    return Answer(status="207 Multi-Status", body=text.encode(), etag=None, **options)


@pytest.mark.parametrize("framing", ["length", "chunked", "none"])
@pytest.mark.parametrize("prefix", ["D:", "", "lp1:"])
def test_the_files_of_a_folder_that_match(server, prefix, framing):
    names = ["x-2.tar", "x-10.tar", "x-1.tar", "y-1.tar", "x-9.tar/", "x-1.tar.index", "x-3.tar.gz"]
    answer = listed("/d/", *(f"/d/{name}" for name in names), prefix=prefix, framing=framing)
    server.play(body=b"", default=answer)
    assert expand_urls(f"{server.url}/d/x-*.tar") == [f"{server.url}/d/x-{i}.tar" for i in (1, 10, 2)]
    assert expand_urls(f"{server.url}/d/x-[12]*.tar") == [f"{server.url}/d/x-{i}.tar" for i in (1, 10, 2)]
    ((method, path, headers, body), *_) = server.requests
    assert (method, path, headers["depth"]) == ("PROPFIND", "/d/", "1")
    assert b"resourcetype" in body


def test_hrefs_are_urls_or_paths_and_encoded(server):
    hrefs = ["/a%20b/", f"{server.url}/a%20b/x%20%C3%A4.tar", "/a b/x{1}.tar", "x%2A%3F.tar", "/a%20b/%78-%25.tar"]
    server.play(body=b"", default=listed(*hrefs, "/a%20b/.x.tar"))
    found = Location.of(f"{server.url}/a%20b/x*.tar").glob()
    ends = ["x%20%C3%A4.tar", "x%2A%3F.tar", "x-%25.tar", "x%7B1%7D.tar"]
    assert sorted(found) == sorted(f"{server.url}/a%20b/{end}" for end in ends)
    assert Location.of(f"{server.url}/a b/x%2a*.tar").glob() == [f"{server.url}/a b/x%2A%3F.tar"]


def test_the_query_and_the_password_go_along_and_are_not_shown(server):
    server.play(listed("/d/x.tar"), body=b"", default=Answer(status="401 Unauthorized"))
    url = server.url.replace("http://", "http://me:passw0rd@")
    assert expand_urls(f"{url}/d/*.tar?token=s3cr3t-t0ken") == [f"{url}/d/x.tar?token=s3cr3t-t0ken"]
    _, path, headers, _ = server.requests[0]
    assert path == "/d/?token=s3cr3t-t0ken"
    assert headers["authorization"].startswith("Basic ")
    with pytest.raises(OpenError, match=rf"^{server.url}/d/\?token=\.\.\.: 401 Unauthorized$"):
        expand_urls(f"{url}/d/*.tar?token=s3cr3t-t0ken")


def test_folders_in_the_middle(server):
    server.play(
        listed("/d/", "/d/b/", "/d/a/", "/d/c.tar"),
        listed("/d/a/x", "/d/a/x/1.tar"),
        listed("/d/b/x/2.tar", "/d/b/x/3.tar", "/d/b/x/"),
        body=b"",
    )
    assert expand_urls(f"{server.url}/d/*/x/*.tar") == [
        f"{server.url}/d/{name}.tar" for name in ("a/x/1", "b/x/2", "b/x/3")
    ]
    assert [path for _, path, *_ in server.requests] == ["/d/", "/d/a/x/", "/d/b/x/"]


def test_through_a_chain(server):
    server.play(body=b"", default=listed("/d/x.tar"))
    assert expand_urls(f"simplecache::{server.url}/d/*.tar") == [f"simplecache::{server.url}/d/x.tar"]


@pytest.mark.parametrize("status", ["405 Method Not Allowed", "501 Unsupported", "403 Forbidden", "404 None", "200 OK"])
@pytest.mark.parametrize("chain", ["", "simplecache::"])
def test_a_server_without_webdav(server, status, chain):
    server.play(body=b"<html>", default=Answer(status=status))
    words = rf"x-\*\.tar: a web server does not list .* \(it answered PROPFIND with {status}\): name them by braces"
    with pytest.raises(UrlError, match=words):
        expand_urls(f"{chain}{server.url}/x-*.tar")
    assert len(server.requests) == 1


def test_nothing_matches(server):
    server.play(body=b"", default=listed("/d/", "/d/y.tar"))
    with pytest.raises(UrlError, match="no file matches"):
        expand_urls(f"{server.url}/d/x-*.tar")


@pytest.mark.parametrize(
    "href",
    ["http://elsewhere/d/x.tar", "/e/x.tar", "https://127.0.0.1/d/x.tar", "ftp://x/d/x.tar", "../x.tar", "http://[/"],
)
def test_a_list_of_another_folder_is_refused(server, href):
    server.play(body=b"", default=listed(href))
    with pytest.raises(OpenError, match="which is elsewhere"):
        expand_urls(f"{server.url}/d/*.tar")


ENTITIES = "<!DOCTYPE x [<!ENTITY a 'aaaaaaaaaa'><!ENTITY b '&a;&a;&a;&a;&a;&a;&a;&a;'>]>"
FOREIGN = "<!DOCTYPE x SYSTEM 'file:///etc/passwd'>"


@pytest.mark.parametrize("head", [ENTITIES, FOREIGN, "<!DOCTYPE html>"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_document_types_are_refused(server, head, encoding):
    text = listed("/d/x.tar", head=head).body.decode().replace("?>", f" encoding='{encoding}'?>", 1)
    server.play(body=b"", default=Answer(status="207 Multi-Status", body=text.encode(encoding)))
    with pytest.raises(OpenError, match="document type"):
        expand_urls(f"{server.url}/d/*.tar")


def test_what_is_no_list(server, monkeypatch):
    server.play(body=b"", default=Answer(status="207 Multi-Status", body=b"<a><b></a>"))
    with pytest.raises(OpenError, match="is not XML: mismatched tag"):
        expand_urls(f"{server.url}/d/*.tar")
    monkeypatch.setattr(webdav, "MAX_BYTES", 1000)
    server.play(body=b"", default=listed(*(f"/d/{i}.tar" for i in range(100))))
    with pytest.raises(OpenError, match="more than 1,000 bytes"):
        expand_urls(f"{server.url}/d/*.tar")


@pytest.mark.parametrize("framing", ["length", "chunked", "none"])
def test_what_breaks_off_is_asked_for_again(server, framing):
    """A part of a list is never taken for the whole."""
    whole = listed(*(f"/d/{i}.tar" for i in range(5)), framing=framing)
    size = len(whole.build(b"", None))
    for missing in range(20, size, 97):
        cut = dataclasses.replace(whole, cut=size - missing)
        server.play(cut, Answer(status="503 Busy"), body=b"", default=whole)
        assert len(expand_urls(f"{server.url}/d/*.tar")) == 5
        assert len(server.requests) == 3, missing


@pytest.fixture
def nginx(tmp_path):
    """A WebDAV server that we did not write: its folder and URL."""
    need(WEBDAV)
    (tmp_path / "files").mkdir()
    with create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (tmp_path / "nginx.conf").write_text(f"""
        load_module {WEBDAV_MODULE};
        daemon off; master_process off; pid {tmp_path}/pid; error_log {tmp_path}/error.log;
        events {{}}
        http {{
            access_log off; client_body_temp_path {tmp_path}/body; client_max_body_size 0; tcp_nopush off;
            proxy_temp_path {tmp_path}/1; fastcgi_temp_path {tmp_path}/2; uwsgi_temp_path {tmp_path}/3;
            scgi_temp_path {tmp_path}/4;
            server {{
                listen 127.0.0.1:{port}; root {tmp_path}/files;
                location / {{
                    dav_methods PUT DELETE MKCOL; dav_ext_methods PROPFIND OPTIONS; create_full_put_path on;
                }}
            }}
        }}""")
    command = [find("nginx"), "-e", f"{tmp_path}/error.log", "-c", f"{tmp_path}/nginx.conf"]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        url = f"http://127.0.0.1:{port}"
        while process.poll() is None:
            try:
                urllib.request.urlopen(f"{url}/nothing").close()
            except urllib.error.HTTPError as error:
                error.close()
                break
            except OSError:
                time.sleep(0.01)
        try:
            yield tmp_path / "files", url
        finally:
            process.terminate()


@pytest.mark.interop
def test_nginx_stores_lists_and_removes(nginx):
    folder, url = nginx
    for i in range(3):
        with TarWriter(f"{url}/d {i % 2}/x-{i}.tar") as writer:
            writer.write({"__key__": f"{i}", "cls": i})
        build_index(f"{url}/d {i % 2}/x-{i}.tar").save(f"{url}/d {i % 2}/x-{i}.tar")
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("x*")) == [
        "d 0/x-0.tar",
        "d 0/x-0.tar.index",
        "d 0/x-2.tar",
        "d 0/x-2.tar.index",
        "d 1/x-1.tar",
        "d 1/x-1.tar.index",
    ]
    assert expand_urls(f"{url}/d%200/*.tar") == [f"{url}/d%200/x-{i}.tar" for i in (0, 2)]
    assert expand_urls(f"{url}/d*/x-*.tar") == [f"{url}/d%20{i % 2}/x-{i}.tar" for i in (0, 2, 1)]
    for index in True, False:
        stream = Stream.from_shards(f"{url}/d*/x-*.tar", index=index).decode()
        assert sorted(sample["cls"] for sample in stream) == [0, 1, 2]
    Location.of(f"{url}/d 0/x-2.tar").remove()
    assert expand_urls(f"{url}/d%200/*.tar") == [f"{url}/d%200/x-0.tar"]
    with open_url(f"{url}/new/folder/a b.tar", "wb") as stream:
        stream.write(b"data" * 1_000_000)
    assert (folder / "new/folder/a b.tar").read_bytes() == b"data" * 1_000_000


@pytest.mark.parametrize(
    "text", ["<D:response><D:href>" + "&#65;" * (1 << 20) + "a</D:href></D:response>", f"<a b='{'x' * (2 << 20)}'/>"]
)
def test_a_name_in_a_list_has_a_limit(server, text):
    """The parser reads a name or tag again from its beginning for each block that arrives."""
    answer = Answer(status="207 Multi-Status", body=f"<D:multistatus xmlns:D='DAV:'>{text}</D:multistatus>".encode())
    server.play(body=b"", default=dataclasses.replace(answer, etag=None))
    with pytest.raises(OpenError, match="more than 1,048,576 bytes, the limit for a name in a list"):
        expand_urls(f"{server.url}/d/x-*.tar")
