"""http: the right bytes or an OpenError, whatever the server and the network do."""

import base64
import gzip
import random
import subprocess
import time
from collections.abc import Callable
from contextlib import closing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import need

from tarshards.errors import OpenError, UrlError
from tarshards.index.inventory import has_index
from tarshards.storage import requests, tuning
from tarshards.storage.compression import zstd_library
from tarshards.storage.expressions import find_shards
from tarshards.storage.location import Location
from tarshards.storage.opening import open_shard, open_url
from tarshards.storage.remote import Remote
from tarshards.storage.requests import Address
from tarshards.storage.servers import Origin
from tarshards.storage.transfer import RemoteFile, Transfer
from tarshards.storage.wire import Steps, run
from tarshards.testing.faulty_server import Answer, Server, serving

BODY = random.Random(0).randbytes(200_000)
HEADERS = 200  # bytes of headers, at most


@pytest.fixture(scope="module")
def server():
    with serving() as running:
        yield running


@pytest.fixture(autouse=True, scope="module")
def _no_pauses():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "PAUSE_SECONDS", 0.001)
        yield


def fetch(url: str, **options) -> bytes:
    with open_url(url, remote=Remote(**({"timeout": 5} | options))) as stream:
        return stream.read()


def ranges(server: Server) -> list[str | None]:
    return [headers.get("range") for _, _, headers, _ in server.requests]


def test_a_body_of_known_length(server):
    assert fetch(server.play(body=BODY)) == BODY
    assert server.requests[0][2]["accept-encoding"] == "identity"


def test_the_size_of_a_file(server):
    packed = gzip.compress(BODY)
    encoded = Answer(headers=(("Content-Encoding", "gzip"),), body=packed)
    for answer, size in (
        (Answer(), len(BODY)),
        (Answer(ranges=False), len(BODY)),
        (Answer(etag=None), len(BODY)),
        (Answer(framing="chunked", ranges=False), None),
        (encoded, None),  # that of the encoded bytes is not its own
    ):
        assert Location.of(server.play(body=BODY, default=answer)).size() == size
    assert Location.of(server.play(body=b"")).size() == 0
    with pytest.raises(OpenError, match="404 Not Found"):
        Location.of(server.play(body=BODY, default=Answer(status="404 Not Found"))).size()


def test_an_empty_body(server):
    assert fetch(server.play(body=b"")) == b""


@pytest.mark.parametrize("end", ["close", "reset"])
def test_what_breaks_off_goes_on_at_the_exact_byte(server, end):
    cuts = [Answer(cut=HEADERS + 50_000, end=end), Answer(cut=HEADERS + 70_000, end=end)]
    assert fetch(server.play(*cuts, body=BODY)) == BODY
    first, *resumed = ranges(server)
    assert first == f"bytes=0-{tuning.FIRST_BYTES - 1}"
    assert resumed
    assert all(0 < int(each[6:].partition("-")[0]) < len(BODY) for each in resumed)


def test_a_whole_file_that_breaks_off_goes_on_where_it_is_the_same(server):
    cuts = [Answer(cut=50_000, ranges=False), Answer(cut=70_000)]
    assert fetch(server.play(*cuts, body=BODY)) == BODY
    assert server.requests[-1][2]["if-range"] == '"v1"'


def test_the_time_of_the_last_change_serves_where_there_is_no_strong_etag(server):
    morning, noon = "Sat, 21 Nov 2026 08:00:00 GMT", "Sat, 21 Nov 2026 12:00:00 GMT"
    whole = Answer(etag='W/"1"', modified=morning)
    cut = Answer(etag='W/"1"', modified=morning, cut=50_000, ranges=False)
    assert fetch(server.play(cut, body=BODY, default=whole)) == BODY
    assert server.requests[-1][2]["if-range"] == morning
    with pytest.raises(OpenError, match="changed while it was read"):
        fetch(server.play(cut, body=BODY, default=Answer(etag='W/"1"', modified=noon)))


def test_a_stall_is_a_break(server):
    assert fetch(server.play(Answer(cut=50_000, end="stall"), body=BODY), timeout=1) == BODY


def test_a_server_that_always_stalls(server):
    url = server.play(body=BODY, default=Answer(cut=0, end="stall"))
    with pytest.raises(OpenError, match=r"timed out \(attempt 3\)"):
        fetch(url, timeout=0.1, retries=2)


def test_retries_count_failures_in_a_row_without_progress(server):
    drips = [Answer(cut=HEADERS + 9_000, end="reset")] * 20
    assert fetch(server.play(*drips, body=BODY), retries=1) == BODY
    url = server.play(Answer(cut=50_000), *[Answer(cut=0)] * 3, body=BODY)
    with pytest.raises(OpenError, match=r"offset \d+: .*attempt 3") as caught:
        fetch(url, retries=2)
    assert 0 < caught.value.offset < 50_000
    assert caught.value.url == url


def test_a_changed_body_is_not_spliced(server):
    url = server.play(Answer(cut=50_000), body=BODY, default=Answer(etag='"v2"'))
    with pytest.raises(OpenError, match="changed while it was read"):
        fetch(url)


def test_a_range_of_a_changed_body_is_not_spliced_either(server):
    # A server that heeds no If-Range: the ETag of its 206 tells.
    with pytest.raises(OpenError, match="changed while it was read"):
        fetch(server.play(Answer(cut=50_000, ranges=False), body=BODY, default=Answer(etag='"v2"')))


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("answer", [Answer(shift=1), Answer(shift=-1), Answer(body=BODY + b"x")])
def test_a_wrong_content_range(server, answer, ranges):
    with pytest.raises(OpenError, match=r"wrong Content-Range 'bytes|changed"):
        fetch(server.play(Answer(cut=50_000, ranges=ranges), answer, body=BODY))


@pytest.mark.parametrize("ranges", [True, False])
def test_a_range_without_content_range(server, ranges):
    bare = Answer(status="206 Partial Content", body=BODY[10_000:])
    with pytest.raises(OpenError, match="wrong Content-Range ''"):
        fetch(server.play(Answer(cut=50_000, ranges=ranges), bare, body=BODY))


def test_a_server_without_ranges_sends_everything_again(server):
    whole = Answer(ranges=False)
    cuts = Answer(cut=50_000, end="reset", ranges=False), Answer(cut=20_000, ranges=False)
    assert fetch(server.play(*cuts, body=BODY, default=whole)) == BODY
    with pytest.raises(OpenError, match="changed while it was read"):
        fetch(server.play(cuts[0], body=BODY, default=Answer(ranges=False, body=BODY[:-1])))
    with pytest.raises(OpenError, match="serves no ranges"):  # it did before
        fetch(server.play(Answer(cut=50_000), body=BODY, default=whole))


def test_without_a_validator_nothing_is_resumed(server):
    cut = Answer(etag=None, cut=50_000)
    assert fetch(server.play(cut, body=BODY, default=Answer(etag=None))) == BODY  # nothing of the first was read
    url = server.play(cut, cut, body=BODY, default=Answer(etag=None))
    with pytest.raises(OpenError, match=r"offset \d+: broke off, and cannot be resumed: the server sent no ETag"):
        fetch(url)


def test_what_breaks_before_its_first_byte_just_starts_again(server):
    url = server.play(Answer(etag=None, cut=10), Answer(etag=None, cut=0, end="reset"), body=BODY)
    assert fetch(url) == BODY


def test_credentials_are_renewed_each_time_that_they_expire(server):
    """Of a long file, after progress; credentials that are refused at once end it."""
    expired, renewed = Answer(status="401 No"), []

    class Renewable(Address):
        renews = True

        def renew(self, is_expired: bool) -> None:
            renewed.append(is_expired)

    url = server.play(*[expired, Answer(cut=20_000, etag='"v1"')] * 3, body=BODY, default=Answer(etag='"v1"'))
    with closing(Transfer(RemoteFile(Renewable(Location(url, Remote(retries=1)))))) as transfer:
        run(transfer.open())
        assert b"".join(iter(lambda: transfer.read(1 << 20), b"")) == BODY
    assert len(renewed) == 3
    transfer = Transfer(RemoteFile(Renewable(Location(server.play(body=BODY, default=expired), Remote()))))
    with closing(transfer), pytest.raises(OpenError, match="401 No"):
        run(transfer.open())
    assert len(renewed) == 4


def test_chunks(server):
    chunked = Answer(framing="chunked")
    for ranges in True, False:
        assert fetch(server.play(body=b"", default=Answer(framing="chunked", ranges=ranges)), retries=0) == b""
    assert fetch(server.play(body=BODY, default=chunked)) == BODY
    cut = Answer(framing="chunked", cut=50_000)
    assert fetch(server.play(cut, body=BODY)) == BODY
    assert fetch(server.play(cut, body=BODY, default=chunked)) == BODY
    with pytest.raises(OpenError, match="cannot be resumed"):
        fetch(server.play(*[Answer(framing="chunked", cut=50_000, etag=None)] * 2, body=BODY))


def test_a_body_that_ends_with_its_connection(server):
    assert fetch(server.play(body=BODY, default=Answer(framing="none"))) == BODY


@pytest.mark.parametrize("status", ["404 Not Found", "403 Forbidden", "401 Unauthorized", "410 Gone"])
def test_lasting_statuses_fail_at_once(server, status):
    url = server.play(body=BODY, default=Answer(status=status))
    with pytest.raises(OpenError) as caught:
        fetch(url)
    assert str(caught.value) == f"{url}: {status}"
    assert len(server.requests) == 1


@pytest.mark.parametrize("status", ["204 No Content", "206 Partial Content", "203 Non-Authoritative Information"])
def test_an_unexpected_success_is_none(server, status):
    with pytest.raises(OpenError, match="unexpected status"):
        fetch(server.play(body=BODY, default=Answer(status=status)))


@pytest.mark.parametrize("status", ["500 Oops", "502 Bad Gateway", "503 Busy", "504 Late", "429 Slow Down"])
def test_passing_statuses_are_tried_again(server, status):
    assert fetch(server.play(Answer(status=status), Answer(cut=50_000), Answer(status=status), body=BODY)) == BODY
    with pytest.raises(OpenError, match=status[:3]):
        fetch(server.play(body=BODY, default=Answer(status=status)), retries=2)
    assert len(server.requests) == 3


def noted(pauses: list[float]) -> Callable[[float], Steps[None]]:
    """Return what notes each pause instead of making it."""

    def pausing(seconds: float) -> Steps[None]:
        yield from ()
        pauses.append(seconds)

    return pausing


def test_retry_after_is_heeded(server, monkeypatch):
    pauses = []
    monkeypatch.setattr(requests, "pausing", noted(pauses))
    date = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + 20))
    waits = [("Retry-After", "7")], [("Retry-After", date)], [("Retry-After", "86400")], [("Retry-After", "soon")]
    busy = [Answer(status="503 Busy", headers=tuple(headers)) for headers in waits]
    assert fetch(server.play(*busy, body=BODY)) == BODY
    assert pauses[0] == 7
    assert 15 < pauses[1] <= 20
    assert pauses[2] == tuning.LONGEST_SECONDS
    assert pauses[3] < 1


def test_pauses_grow(server, monkeypatch):
    pauses = []
    monkeypatch.setattr(requests, "pausing", noted(pauses))
    monkeypatch.setattr(tuning, "PAUSE_SECONDS", 1.0)
    with pytest.raises(OpenError):
        fetch(server.play(body=BODY, default=Answer(cut=0)), retries=9)
    assert all(0.5 * 2**n <= pause <= 2**n for n, pause in enumerate(pauses[:6]))
    assert pauses[-1] == tuning.LONGEST_SECONDS


def test_nobody_listens():
    with pytest.raises(OpenError, match=r"Connection refused \(attempt 2\)"):
        fetch("http://127.0.0.1:1/a.tar", retries=1)


def test_content_encoding_is_refused(server):
    answer = Answer(headers=(("Content-Encoding", "gzip"),))
    with pytest.raises(OpenError, match="Content-Encoding gzip"):
        fetch(server.play(body=BODY, default=answer))


def test_a_shard_is_read_with_its_content_encoding(server, tmp_path):
    """As curl, and so webdataset, gets it: the bytes as they are stored, whose beginning tells their compression."""
    webdataset = pytest.importorskip("tarshards.webdataset", exc_type=ImportError)  # which needs torch
    for encoding, body in [("gzip", gzip.compress(BODY)), ("X-Gzip", BODY), ("zstd", zstd_library().compress(BODY))]:
        for ranges, framing in [(True, "length"), (False, "length"), (False, "chunked")]:
            answer = Answer(headers=(("Content-Encoding", encoding),), ranges=ranges, framing=framing)
            url = server.play(body=body, default=answer)
            need("curl")
            assert subprocess.run(["curl", "-s", url], capture_output=True, check=True).stdout == body
            for options in {}, {"cache_dir": str(tmp_path / "cache")}:
                with open_shard(Location.of(url, Remote(**options))) as stream:
                    assert stream.read() == BODY
            with webdataset.gopen(url) as stream:
                assert stream.read() == body
            with pytest.raises(
                OpenError, match=f"Content-Encoding {encoding}, .* asked for; store the file without it$"
            ):
                fetch(url)
            if ranges:
                with pytest.raises(OpenError, match=r"without it, or stream a shard \(index=False\)$"):
                    read_all(url)
            with pytest.raises(OpenError, match="Content-Encoding"):
                Location.of(url).read()


def test_an_encoding_that_is_not_undone_is_refused_by_name(server):
    answer = Answer(headers=(("Content-Encoding", "br"),))
    with pytest.raises(OpenError, match=r"Content-Encoding br, which was not asked for; store the file without it$"):
        open_shard(server.play(body=b"brotli", default=answer))


def test_an_encoding_of_one_answer_only_is_never_mixed_in(server):
    packed, encoding = gzip.compress(BODY), (("Content-Encoding", "gzip"),)
    for first, later in [((), encoding), (encoding, ())]:
        answers = [Answer(headers=first, cut=50_000)]
        url = server.play(*answers, body=packed, default=Answer(headers=later))
        with (
            pytest.raises(OpenError, match=r"Content-Encoding gzip|changed while it was read"),
            open_shard(url) as stream,
        ):
            stream.read()


def test_a_range_that_is_encoded_by_itself_is_not_taken(server):
    """As a proxy does that compresses what passes through it: the whole file, compressed once, is."""
    head = gzip.compress(BODY[: tuning.FIRST_BYTES])
    part = (
        f'HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 0-{tuning.FIRST_BYTES - 1}/{len(BODY)}\r\nETag: "v1"\r\n'
    )
    part += f"Content-Encoding: gzip\r\nContent-Length: {len(head)}\r\n\r\n"
    whole = Answer(headers=(("Content-Encoding", "gzip"),), ranges=False)
    url = server.play(Answer(raw=part.encode() + head), body=gzip.compress(BODY), default=whole)
    with open_shard(url) as stream:
        assert stream.read() == BODY


def test_encodings_that_change_no_byte(server):
    """The data that a store keeps from the requests of an S3 client."""
    for encoding in "aws-chunked", "UTF-8", "identity, aws-chunked":
        url = server.play(body=BODY, default=Answer(headers=(("Content-Encoding", encoding),)))
        assert fetch(url) == read_all(url) == BODY


@pytest.mark.parametrize("is_remembered", [True, False])
def test_redirects_are_followed_also_when_resuming(server, monkeypatch, is_remembered):
    """What breaks off is asked for where the file was; after a minute, the redirect is asked for again."""
    monkeypatch.setattr(tuning, "LONGEST_SECONDS", 60 if is_remembered else 0)
    moved = Answer(status="302 Found", headers=(("Location", "/elsewhere.tar"),))
    url = server.play(moved, Answer(cut=50_000), *[moved] * (not is_remembered), body=BODY)
    assert fetch(url) == BODY
    paths = [path for _, path, _, _ in server.requests]
    assert paths == ["/shard.tar", "/elsewhere.tar"] + ["/shard.tar"] * (not is_remembered) + ["/elsewhere.tar"]
    assert ranges(server)[-1].startswith("bytes=")


@pytest.mark.parametrize("failure", [Answer(status="403 Forbidden"), Answer(raw=b"HTT", end="reset")])
def test_where_the_target_of_a_redirect_fails_the_redirect_is_asked_for_again(server, failure):
    first, other = redirect("/a.tar"), redirect("/b.tar")
    with Location.of(server.play(first, body=BODY)).ranges() as ranges:
        server.answers[:] = failure, other
        assert ranges.read(2000, 1000) == BODY[2000:3000]
        assert ranges.read(4000, 1000) == BODY[4000:5000]
    paths = [path for _, path, _, _ in server.requests]
    assert paths == ["/shard.tar", "/a.tar", "/a.tar", "/shard.tar", "/b.tar", "/b.tar"]


def test_a_password_goes_where_a_redirect_of_its_origin_leads(server):
    url = server.play(redirect("/a.tar"), Answer(), redirect("/a.tar"), body=BODY).replace("//", "//me:secret@")
    with Location.of(url).ranges() as ranges:
        assert ranges.read(2000, 1000) == BODY[2000:3000]
    assert ["authorization" in headers for _, _, headers, _ in server.requests] == [True] * 4


def redirect(to: str, status: str = "302 Found") -> Answer:
    return Answer(status=status, headers=(("Location", to),))


@pytest.mark.parametrize(
    "target",
    ["ftp://127.0.0.1:1/a.tar", "file:///etc/passwd", "gopher://h/a", "data:,x", "http://[::1/a.tar"],
)
@pytest.mark.parametrize("random_access", [True, False])
def test_a_redirect_leads_to_http_and_https_only(server, target, random_access):
    url = server.play(body=BODY, default=redirect(target))
    with pytest.raises(OpenError, match=r"redirected to .*, which is neither http nor https") as caught:
        Location.of(url).ranges() if random_access else fetch(url)
    assert str(caught.value).startswith(f"{url}: redirected to {target if '[' not in target else 'a malformed URL'}")
    assert len(server.requests) == 1


def test_redirects_are_bounded(server):
    hops = [redirect(f"/{number}.tar?signature=s3cret") for number in range(requests.MOST_REDIRECTS)]
    assert fetch(server.play(*hops, body=BODY)) == BODY
    url = server.play(*hops, redirect("/last.tar?signature=s3cret"), body=BODY)
    with pytest.raises(
        OpenError, match=rf"302 Found: more than {requests.MOST_REDIRECTS} redirects, the last to "
    ) as caught:
        fetch(url)
    assert str(caught.value).endswith("/last.tar?signature=...")
    assert len(server.requests) == requests.MOST_REDIRECTS + 1


def test_the_body_of_a_redirect_is_not_read(server):
    endless = Answer(
        status="302 Found", headers=(("Location", "/a.tar"),), body=b"x" * 100, framing="none", end="stall"
    )
    assert fetch(server.play(endless, body=BODY), timeout=4) == BODY


@pytest.mark.parametrize("status", ["301 Moved", "302 Found", "303 See Other", "307 Temporary", "308 Permanent"])
def test_what_fails_at_the_target_of_a_redirect_names_both(server, status):
    url = server.play(redirect("/b.tar?sig=s3cret", status), body=BODY, default=Answer(status="403 Forbidden"))
    with pytest.raises(OpenError) as caught:
        fetch(url)
    assert str(caught.value) == f"{url}: 403 Forbidden, redirected to {server.url}/b.tar?sig=..."
    server.play(body=BODY, default=redirect("http://127.0.0.1:1/b.tar?sig=s3cret", status))
    with pytest.raises(
        OpenError, match=r"refused, redirected to http://127\.0\.0\.1:1/b\.tar\?sig=\.\.\. \(attempt 2\)"
    ):
        fetch(url, retries=1)


def test_redirects_that_change_the_method_of_what_is_written_are_not_followed(server):
    server.play(body=b"", default=redirect("/b.tar", "302 Found"))
    stream = open_url(f"{server.url}/a.tar", "wb")
    with pytest.raises(OpenError, match="302 Found"):
        stream.close()
    assert len(server.requests) == 1


def test_a_password_that_left_its_host_does_not_come_back(server):
    with serving() as other:
        url = server.play(redirect(other.url + "/b.tar"), body=BODY).replace("http://", "http://me:secret@")
        other.play(redirect(f"{server.url}/c.tar"), body=BODY)
        assert fetch(url) == BODY
        assert ["authorization" in headers for _, _, headers, _ in server.requests] == [True, False]
        assert "authorization" not in other.requests[0][2]


def test_credentials_belong_to_scheme_host_and_port():
    origin = Origin.of("http://host/a.tar")
    assert origin == Origin.of("http://HOST:80/b?c") == Origin.of("http://me:x@host")
    for other in "https://host/a.tar", "http://host:81/a.tar", "http://host.evil/a.tar", "http://evil/host":
        assert Origin.of(other) != origin


def read_all(url: str, size: int = 50_000) -> bytes:
    with Location.of(url).ranges() as ranges:
        return b"".join(ranges.read(at, min(size, ranges.size - at)) for at in range(0, ranges.size, size))


CHANGES = [
    (Answer(etag='W/"v1"'), Answer(etag='W/"v2"')),
    (Answer(etag='W/"v1"'), Answer(etag='"v1"')),
    (Answer(etag='W/"v1"'), Answer(etag=None)),
    (Answer(etag='"v1"'), Answer(etag='W/"v1"')),
    (Answer(etag='"v1"'), Answer(etag=None)),
    (Answer(etag=None), Answer(etag='"v1"')),
    (Answer(etag='W/"v1"', modified="Sat, 21 Nov 2026 08:00:00 GMT"), Answer(etag='W/"v1"', modified="later")),
    (Answer(etag=None, modified="Sat, 21 Nov 2026 08:00:00 GMT"), Answer(etag=None, modified="later")),
]


@pytest.mark.parametrize(("then", "now"), CHANGES)
def test_ranges_of_another_version_are_refused(server, then, now):
    assert read_all(server.play(body=BODY, default=then)) == BODY
    url = server.play(then, then, body=BODY, default=now)
    with pytest.raises(OpenError, match=r"shard\.tar: offset 50000: changed while it was read"):
        read_all(url)


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("now", ['W/"v2"', '"v1"', None])
def test_a_weak_etag_that_changes_is_no_resumption(server, now, ranges):
    morning = "Sat, 21 Nov 2026 08:00:00 GMT"
    then = Answer(etag='W/"v1"', modified=morning, cut=50_000, ranges=ranges)
    url = server.play(then, body=BODY, default=Answer(etag=now, modified=morning, ranges=ranges))
    with pytest.raises(OpenError, match="changed while it was read"):
        fetch(url)


def test_a_weak_etag_alone_resumes_nothing(server):
    with pytest.raises(OpenError, match="cannot be resumed"):
        fetch(server.play(*[Answer(etag='W/"v1"', cut=50_000)] * 2, body=BODY, default=Answer(etag='W/"v1"')))
    ranges = Location.of(server.play(body=BODY, default=Answer(etag='W/"v1"'))).ranges()
    assert not ranges.is_current()


@pytest.mark.parametrize(
    "header",
    [("Content-Encoding", "gzip"), ("Content-Encoding", " ZSTD"), ("Transfer-Encoding", "gzip, chunked")],
)
@pytest.mark.parametrize("body", [BODY, gzip.compress(BODY)])
def test_an_encoded_range_is_refused(server, header, body):
    encoded = Answer(headers=(header,))
    for answers in [], [Answer()], [Answer()] * 2:
        url = server.play(*answers, body=body, default=encoded)
        with pytest.raises(
            OpenError, match=f"the server sent {header[0]} {header[1].strip()}, which was not asked for"
        ):
            read_all(url)
        with pytest.raises(OpenError, match=f"the server sent {header[0]} {header[1].strip()}"):
            fetch(server.play(*[Answer(cut=50_000)] * len(answers), body=body, default=encoded))
    assert server.requests[0][2]["accept-encoding"] == "identity"
    assert read_all(server.play(body=BODY, default=Answer(headers=(("Content-Encoding", "Identity"),)))) == BODY


def test_redirects_in_a_circle(server):
    url = server.play(body=BODY, default=Answer(status="302 Found", headers=(("Location", "/shard.tar"),)))
    with pytest.raises(OpenError, match=r"302 .*loop") as caught:
        fetch(url)
    assert "\n" not in str(caught.value)


def test_a_signature_is_sent_and_never_shown(server):
    url = server.play(body=BODY) + "?expires=60&signature=s3cret"
    with open_url(url) as stream:
        assert stream.read() == BODY
        assert stream.name == server.url + "/shard.tar?expires=...&signature=..."
    assert server.requests[0][1] == "/shard.tar?expires=60&signature=s3cret"
    elsewhere = Answer(status="302 Found", headers=(("Location", "gopher://me:s3cret@host/a.tar?sig=s3cret"),))
    for answer in Answer(status="403 No"), Answer(cut=300, etag=None), elsewhere:
        server.play(body=BODY, default=answer)
        with pytest.raises(OpenError) as caught, open_shard(url) as stream:
            stream.read()
        assert "s3cret" not in f"{caught.value} {caught.value.url}"


def test_a_password_is_sent_and_never_shown(server):
    url = server.play(body=BODY).replace("http://", "http://me:s%40cret@")
    with open_url(url) as stream:
        assert stream.read() == BODY
        assert stream.name == server.url + "/shard.tar"
    expected = base64.b64encode(b"me:s@cret").decode()
    assert server.requests[0][2]["authorization"] == f"Basic {expected}"
    for answer in Answer(status="403 No"), Answer(cut=300, etag=None), Answer(etag=None, framing="chunked", cut=500):
        server.play(body=b"\x1f\x8b" + BODY, default=answer)
        with pytest.raises(OpenError) as caught, open_shard(url) as stream:
            stream.read()
        assert "cret" not in f"{caught.value} {caught.value.__cause__!r} {caught.value.url}"


@pytest.mark.parametrize("url", ["http://me:se/cret@host/a.tar", "http://me:secret@host:port/", "http:///a", "http:a"])
def test_a_malformed_address_shows_no_password_either(url):
    with pytest.raises(UrlError) as caught:
        open_url(url)
    assert "cret" not in f"{caught.value}"
    assert caught.value.__cause__ is None


def test_a_password_stays_on_its_own_host(server):
    with serving() as other:
        other.play(body=BODY)
        here = server.play(
            Answer(status="302 Found", headers=(("Location", "/b.tar"),)),
            Answer(status="302 Found", headers=(("Location", other.url + "/c.tar"),)),
            body=BODY,
        )
        assert fetch(here.replace("http://", "http://me:secret@")) == BODY
        assert ["authorization" in headers for _, _, headers, _ in server.requests] == [True, True]
        assert "authorization" not in other.requests[0][2]


def test_spaces_and_umlauts_are_quoted(server):
    server.play(body=BODY)
    assert fetch(f"{server.url}/ä b%20c.tar?x=1&y=%2F") == BODY
    assert server.requests[0][1] == "/%C3%A4%20b%20c.tar?x=1&y=%2F"


def test_reading_in_pieces_and_closing_early(server):
    stream = open_url(server.play(body=BODY))
    data = bytearray(1000)
    count = stream.readinto(data)
    assert data[:count] == BODY[:count]
    assert stream.read(0) == b""
    stream.close()
    stream.close()
    with pytest.raises(ValueError, match="closed"):
        stream.read(1)


def test_writing_puts_the_whole(server):
    created = Answer(status="201 Created")
    url = server.play(body=b"", default=created)
    with open_url(url, "wb") as stream:
        stream.write(BODY)
        stream.write(b"end")
        assert not server.requests
    assert [(method, body) for method, _, _, body in server.requests] == [("PUT", BODY + b"end")]
    server.play(Answer(status="404 Not Found"), Answer(status="503 Busy"), body=b"", default=created)
    with open_shard(url + ".gz", "wb") as stream:
        stream.write(BODY)
    assert [method for method, *_ in server.requests] == ["GET", "PUT", "PUT"]  # GET looks for an index to remove
    assert len({body for _, _, _, body in server.requests[1:]}) == 1


def test_writing_that_fails(server):
    url = server.play(body=b"", default=Answer(status="403 Forbidden"))
    stream = open_url(url, "wb")
    stream.write(BODY)
    with pytest.raises(OpenError, match="403 Forbidden"):
        stream.close()
    assert stream.closed
    server.requests.clear()
    stream = open_url(url, "wb")
    stream.write(BODY)
    stream.abort()
    assert server.requests == []


faults = st.builds(
    Answer,
    status=st.sampled_from(["200 OK"] * 8 + ["503 Busy", "404 Not Found"]),
    headers=st.sampled_from([()] * 8 + [(("Content-Encoding", "gzip"),)]),
    etag=st.sampled_from(['"v1"'] * 6 + [None, 'W/"v1"', '"v2"']),
    modified=st.sampled_from([None, "Sat, 21 Nov 2026 08:00:00 GMT"]),
    framing=st.sampled_from(["length", "length", "chunked"]),
    ranges=st.booleans(),
    shift=st.sampled_from([0] * 6 + [1, -7]),
    cut=st.none() | st.integers(0, 6_000),
    end=st.sampled_from(["close", "close", "reset", "reset", "stall"]),
)


@settings(max_examples=75, deadline=None)
@given(st.lists(faults, max_size=5))
def test_the_right_bytes_or_an_error(server, answers):
    body = BODY[:5_000]
    try:
        data = fetch(server.play(*answers, body=body), timeout=0.05, retries=2)
    except OpenError:
        return
    assert data == body


@pytest.mark.parametrize("resumed", [False, True])
def test_headers_cut_anywhere_are_no_empty_body(server, resumed):
    body = BODY[:500]
    for cut in range(230):
        answers = [Answer(cut=300)] * resumed + [Answer(cut=cut)]
        assert fetch(server.play(*answers, body=body)) == body


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6_000), st.sampled_from(["close", "reset"])), max_size=5))
def test_an_honest_server_on_a_bad_network_gives_the_right_bytes(server, cuts):
    body = BODY[:5_000]
    answers = [Answer(cut=cut, end=end) for cut, end in cuts]
    assert fetch(server.play(*answers, body=body)) == body


def test_a_senseless_length_is_none(server):
    answer = Answer(headers=(("Content-Length", "-1"),), framing="none")
    assert fetch(server.play(body=BODY, default=answer)) == BODY


SIGNED = "?X-Amz-Expires=60&X-Amz-Credential=AKIAEXAMPLE&X-Amz-Signature=5ecre7c0de"
SAID = {
    "S3": (
        "<?xml version='1.0'?>\n<Error><Code>AccessDenied</Code><Message>Request has expired</Message>"
        "<X-Amz-Expires>60</X-Amz-Expires><StringToSign>5ecre7c0de</StringToSign></Error>",
        "AccessDenied: Request has expired",
    ),
    "Google": (
        "<Error><Code>ExpiredToken</Code><Message>Invalid argument.</Message>"
        "<Details>Request signature expired at: 2026-01-01</Details></Error>",
        "ExpiredToken: Invalid argument: Request signature expired at: 2026-01-01",
    ),
    "Azure": (
        "\ufeff<Error><Code>AuthenticationFailed</Code><Message>No access.\nRequestId:1</Message>"
        "<AuthenticationErrorDetail>Signature not valid in this time frame</AuthenticationErrorDetail></Error>",
        "AuthenticationFailed: No access. RequestId:1: Signature not valid in this time frame",
    ),
    "Google's JSON": ('{"error": {"code": 403, "message": "no access to the object"}}', "no access to the object"),
    "a hub": ('{"error": "Invalid credentials"}', "Invalid credentials"),
    "an API": ('{"detail": "expired &\\n\\u001b[31m"}', "expired & \\x1b[31m"),
    "the signature": ("<Error><Code>Bad</Code><Message>not 5ecre7c0de</Message></Error>", "Bad: not ..."),
    "a long text": (f"<Error><Code>A</Code><Message>{'x' * 1000}</Message></Error>", f"A: {'x' * 297}"),
}


@pytest.mark.parametrize("framing", ["length", "chunked", "none"])
@pytest.mark.parametrize("store", SAID)
def test_the_reason_that_a_refusal_gives_is_in_the_error_without_credentials(server, store, framing):
    body, words = SAID[store]
    url = server.play(body=body.encode(), default=Answer(status="403 Forbidden", framing=framing, ranges=False))
    with pytest.raises(OpenError) as caught:
        fetch(url + SIGNED)
    assert caught.value.reason == f"403 Forbidden, {words}"
    assert "5ecre7c0de" not in str(caught.value)


@pytest.mark.parametrize(
    "body", [b"", b"<html><h1>403</h1>", b"{", b"[1]", b'{"error": 5}', b'{"error": {}}', b"no", b"\xff<"]
)
def test_a_refusal_whose_body_gives_no_reason(server, body):
    url = server.play(body=body, default=Answer(status="403 Forbidden", ranges=False))
    with pytest.raises(OpenError) as caught:
        fetch(url)
    assert caught.value.reason == "403 Forbidden"


@pytest.mark.parametrize("end", ["close", "stall"])
def test_a_refusal_whose_body_breaks_off(server, end):
    url = server.play(body=b"<Error>" + bytes(3000), default=Answer(status="403 Forbidden", cut=HEADERS + 100, end=end))
    with pytest.raises(OpenError, match=r"403 Forbidden$"):
        fetch(url, timeout=0.2, retries=0)


@pytest.mark.parametrize("ranges", [True, False])
def test_a_page_that_begins_with_an_empty_line_is_no_index(server, ranges):
    server.play(body=b"\r\n<!DOCTYPE html>" + bytes(5000), default=Answer(ranges=ranges))
    shard = f"{server.url}/shard.tar"
    assert not Location(f"{shard}.index").exists()
    assert has_index(find_shards(shard)) == [False]
