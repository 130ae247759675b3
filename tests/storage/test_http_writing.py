"""Writing to web servers: the whole file is stored by one PUT, or an error says why it may not be."""

from __future__ import annotations

import pytest

from tarshards.errors import OpenError
from tarshards.storage.location import Location
from tarshards.storage.opening import open_url
from tarshards.storage.remote import Remote
from tarshards.testing.faulty_server import Answer, Server, serving

pytestmark = pytest.mark.usefixtures("no_pauses")

BODY = bytes(range(256)) * 60_000  # 15 MB: more than sockets buffer
SMALL = BODY[:300_000]
CREATED = Answer(status="201 Created")
BUSY = Answer(status="503 Busy", headers=(("Retry-After", "0"),))


def write(url: str, data: bytes = BODY, **options) -> None:
    with open_url(url, "wb", remote=Remote(**({"timeout": 5, "retries": 2} | options))) as stream:
        stream.write(data)


def stored(server: Server) -> list[bytes]:
    """What the PUTs brought that were answered with success; the server had read it before."""
    return [body for method, _, _, body in server.requests if method == "PUT"]


def elsewhere(url: str, status: str = "307 Temporary Redirect", **options) -> Answer:
    return Answer(status=status, headers=(("Location", url),), **options)


PASSING = {
    "busy": BUSY,
    "busy before the body was read": Answer(status="503 Busy", taken=0, end="drain"),
    "bad gateway, then a reset": Answer(status="502 Bad Gateway", taken=100_000, end="reset"),
    "reset at once": Answer(taken=0, cut=0, end="reset"),
    "reset in the middle": Answer(taken=8_000_000, cut=0, end="reset"),
    "reset after the whole body": Answer(cut=0, end="reset"),
    "closed in the middle": Answer(taken=8_000_000, cut=0),
    "stalled": Answer(cut=0, end="stall"),
    "stalled in the middle": Answer(taken=1_000_000, cut=0, end="stall"),
    "success before the body was read": Answer(taken=0, end="drain"),
    "success in the middle": Answer(taken=2_000_000, end="drain"),
    "success in the middle, then a reset": Answer(taken=2_000_000, end="reset"),
    "success in the middle, and closed": Answer(taken=2_000_000),
    "half an answer": Answer(cut=10),
}


@pytest.mark.parametrize("fault", PASSING)
def test_what_passes_is_sent_again_as_a_whole(server, fault):
    url = server.play(PASSING[fault], PASSING[fault], body=b"", default=CREATED)
    write(url, timeout=1)
    assert len(stored(server)) == 3
    assert stored(server)[-1] == BODY


@pytest.mark.parametrize("fault", PASSING)
def test_what_stays_is_an_error_that_names_the_url(server, fault):
    url = server.play(body=b"", default=PASSING[fault]) + "?signature=s3cr3t-t0ken"
    with pytest.raises(OpenError, match=r"attempt 2") as caught:
        write(url.replace("http://", "http://me:passw0rd@"), retries=1, timeout=1)
    assert str(caught.value).startswith(f"{server.url}/shard.tar?signature=...: ")
    assert len(server.requests) == 2
    shown = f"{caught.value} {caught.value.__cause__!r}"
    assert not [secret for secret in ("s3cr3t", "passw0rd", "bWU6c") if secret in shown]


@pytest.mark.parametrize("status", ["403 Forbidden", "413 Content Too Large", "405 Method Not Allowed", "507 Full"])
@pytest.mark.parametrize("taken", [None, 0, 2_000_000])
def test_a_refusal_is_said_at_once(server, status, taken):
    """Not after the rest of the body was sent, if it comes before."""
    end = "close" if taken is None else "drain"
    url = server.play(body=b"no", default=Answer(status=status, taken=taken, end=end))
    with pytest.raises(OpenError, match=rf"shard\.tar: {status}$"):
        write(url)
    assert len(server.requests) == 1


def test_a_status_that_is_no_success_of_a_put(server):
    with pytest.raises(OpenError, match="unexpected status 207"):
        write(server.play(body=b"", default=Answer(status="207 Multi-Status")))


@pytest.mark.parametrize("status", ["307 Temporary Redirect", "308 Permanent Redirect"])
@pytest.mark.parametrize("taken", [None, 0])
def test_a_redirect_gets_the_body_again(server, status, taken):
    """As AIStore's proxy, which redirects a PUT to the target that stores it, before it has read the body."""
    with serving() as target:
        there = target.play(BUSY, body=b"", default=CREATED) + "?uuid=1"
        end = "close" if taken is None else "drain"
        url = server.play(body=b"", default=elsewhere(there, status, taken=taken, end=end))
        write(url.replace("http://", "http://me:passw0rd@"))
        assert [path for _, path, *_ in target.requests] == ["/shard.tar?uuid=1"] * 2
        assert stored(target) == [BODY, BODY]
        assert len(server.requests) == 2, "a retry asks again where to"
        assert all("authorization" in headers for _, _, headers, _ in server.requests)
        assert not any("authorization" in headers for _, _, headers, _ in target.requests)


def test_a_redirect_on_the_same_origin_keeps_the_password(server):
    url = server.play(elsewhere("/b.tar"), body=b"", default=CREATED)
    write(url.replace("http://", "http://me:passw0rd@"))
    assert [path for _, path, *_ in server.requests] == ["/shard.tar", "/b.tar"]
    assert all("authorization" in headers for _, _, headers, _ in server.requests)


@pytest.mark.parametrize("status", ["301 Moved Permanently", "302 Found", "303 See Other"])
def test_other_redirects_are_an_error(server, status):
    """They are for GET, and what was written would be lost."""
    url = server.play(body=b"", default=elsewhere("/b.tar?signature=s3cr3t", status))
    with pytest.raises(OpenError, match=rf"{status}, which redirects no PUT; only 307 and 308 do$"):
        write(url)
    assert len(server.requests) == 1


def test_a_loop_of_redirects(server):
    with pytest.raises(OpenError, match="a loop of redirects"):
        write(server.play(body=b"", default=elsewhere("/shard.tar")))


def test_removing_follows_redirects_and_endures_faults(server):
    with serving() as target:
        there = target.play(BUSY, body=b"", default=Answer(status="204 No Content", framing="none"))
        url = server.play(body=b"", default=elsewhere(there))
        Location.of(url).remove()
        assert [method for method, *_ in target.requests] == ["DELETE", "DELETE"]
    Location.of(server.play(body=b"", default=Answer(status="404 Not Found"))).remove()


def test_a_kept_connection_that_the_server_closed_is_replaced(server):
    """A PUT on it fails, and is sent again on a new one: no failure, so no retry is counted."""
    url = server.play(body=b"", default=CREATED)
    for _ in range(3):
        write(url, SMALL, retries=0)
    assert stored(server) == [SMALL] * 3


def test_interim_answers_do_not_stop_a_body(server):
    """Some servers send 100 Continue to every request with a body, asked or not."""
    interim = Answer(status="201 Created", interim=b"HTTP/1.1 100 Continue\r\n\r\n")
    write(server.play(interim, body=b""), retries=0)
    assert stored(server) == [BODY]
