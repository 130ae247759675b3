"""The server of the page: who may ask, ranges, and headers under which nothing of a sample runs."""

from __future__ import annotations

import http.client
import json
import re
from urllib.parse import urlsplit

import pytest
from shard_rig import get, get_json, sample, serving, write_set


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(write_set(tmp_path_factory.mktemp("set"))) as server:
        yield server


def test_the_page_runs_its_own_modules_only(server):
    status, headers, body = get(server.url)
    assert status == 200
    policy = headers["Content-Security-Policy"]
    (nonce,) = set(re.findall(r"'nonce-([^']+)'", policy))
    assert set(re.findall(rb'nonce="([^"]+)"', body)) == {nonce.encode()}
    assert re.findall(r"(?:script|default|connect)-src [^;]*", policy) == [
        "default-src 'none'", f"script-src 'nonce-{nonce}'", "connect-src 'self'",
    ]  # fmt: skip
    assert "unsafe" not in policy
    assert nonce not in get(server.url)[1]["Content-Security-Policy"]


@pytest.mark.parametrize("path", ["", "main.js", "about", "field?number=0&field=html", "none"])
def test_without_the_token_everything_is_forbidden(server, path):
    root = f"http://127.0.0.1:{server.server_port}"
    for prefix in ("/", "//", "/x/", f"/{server.token[:-1]}/", f"/{server.token.lower()}x/"):
        assert get(f"{root}{prefix}{path}")[0] == 403


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "localhost:9000"}, 200),  # ssh -L
        ({"Host": "localhost:9000", "Origin": "http://localhost:9000"}, 200),
        ({"Host": "example.com"}, 403),
        ({"Host": "127.0.0.1.example.com:80"}, 403),
        ({"Host": "user@example.com"}, 403),
        ({"Host": "[::1"}, 403),
        ({"Host": ""}, 403),
        ({"Origin": "http://example.com"}, 403),
        ({"Origin": "null"}, 403),
        ({"Host": "localhost:9000", "Origin": "http://localhost:9001"}, 403),
    ],
)
def test_foreign_hosts_and_origins_are_forbidden(server, headers, status):
    assert get(server.url + "about", **headers)[0] == status


def test_only_reading_is_possible(server):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port)
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        connection.request(method, urlsplit(server.url).path + "about")
        answer = connection.getresponse()
        answer.read()
        assert answer.status == 501
        connection.close()


def test_it_listens_on_this_machine_only(server):
    assert server.socket.getsockname()[0] == "127.0.0.1"


@pytest.mark.parametrize("field", ["jpg", "svg", "html", "txt", "json", "raw", "npy"])
def test_no_field_is_sent_as_what_a_browser_runs(server, field):
    status, headers, body = get(f"{server.url}field?number=7&field={field}")
    kind = headers["Content-Type"]
    assert (status, kind) == (200, "image/jpeg" if field == "jpg" else "application/octet-stream")
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Content-Security-Policy"].startswith("sandbox; default-src 'none'")
    assert headers["Content-Disposition"].startswith("attachment; filename*=UTF-8''")
    assert len(body) == int(headers["Content-Length"])


RAW = sample(7)["raw"]


@pytest.mark.parametrize(
    ("asked", "status", "expected"),
    [
        ("bytes=0-9", 206, RAW[:10]),
        ("bytes=5-", 206, RAW[5:]),
        ("bytes=-7", 206, RAW[-7:]),
        ("bytes=100-99999", 206, RAW[100:]),
        ("bytes=0-1,5-6", 200, RAW),
        ("bytes=-", 200, RAW),
    ],
)
def test_ranges(server, asked, status, expected):
    found, headers, body = get(f"{server.url}field?number=7&field=raw", Range=asked)
    assert (found, body) == (status, expected)
    if status == 206:
        begin = RAW.index(expected)
        assert headers["Content-Range"] == f"bytes {begin}-{begin + len(expected) - 1}/{len(RAW)}"


def test_a_range_outside_is_an_error(server):
    assert get(f"{server.url}field?number=7&field=raw", Range=f"bytes={len(RAW)}-")[0] == 416


@pytest.mark.parametrize(
    "path",
    [
        "rows?begin=x&count=1",
        "sample?number=60",
        "sample?number=-1",
        "field?number=0&field=none",
        "picture?number=0",
        "picture?number=0&field=txt",
        "rows?begin=0&count=1&where=__import__('os')",
        "histogram?of=none",
        "damage?shard=99",
    ],
)
def test_what_cannot_be_answered_says_why(server, path):
    status, headers, body = get(server.url + path)
    assert status == 400
    assert json.loads(body)["error"]
    assert headers["Content-Type"] == "application/json"


def test_a_field_that_cannot_be_read_is_an_error_and_not_bytes(tmp_path):
    urls = write_set(tmp_path, 20)
    with serving(urls) as server:
        offset = get_json(f"{server.url}sample?number=3")["fields"][0]["offset"]
        with open(tmp_path / "set-000.tar", "r+b") as file:
            file.seek(offset - 512)
            file.write(b"other.name")
        name = get_json(f"{server.url}sample?number=3")["fields"][0]["name"]
        status, _, body = get(f"{server.url}field?number=3&field={name}", Range="bytes=0-1")
        assert status == 400
        assert "stale index" in json.loads(body)["error"]


def test_no_file_of_the_machine_is_served(server):
    for path in ("../server.py", "%2e%2e/server.py", "/etc/passwd", "main.py", "page/main.js"):
        assert get(server.url + path)[0] == 404
    assert get(server.url + "style.css")[1]["Content-Type"] == "text/css; charset=utf-8"


def test_rows_have_the_first_bytes_of_what_can_be_read(server):
    (row,) = get_json(f"{server.url}rows?begin=7&count=1")["rows"]
    heads = {field["name"] for field in row["fields"] if "head" in field}
    assert heads == {"cls", "json", "txt", "npy", "mp", "raw", "svg", "html"}
