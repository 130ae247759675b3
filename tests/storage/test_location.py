"""A URL is parsed once; its name shows no credentials, and what follows from it stays a URL."""

from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from range_server import serving

from tarshards.errors import OpenError, UrlError
from tarshards.index import sidecar
from tarshards.index.sidecar import Index
from tarshards.storage import expressions, markers
from tarshards.storage.location import FAMILIES, Location, look_up
from tarshards.storage.remote import Remote

words = st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1, max_size=8)
secrets = words.map("s3cr3t".__add__)
encoded = st.text(max_size=8).map(lambda text: quote(f"s3cr3t{text}", safe="s3cr3t"))
schemes = st.sampled_from(["http", "HTTPS", "s3", "gs", "ftp", "memory", "hf"])
EXAMPLES = ["a.tar", "d/a b.tar", "file:d/a.tar", "file:///d/a%20b.tar", "http://h/d/a.tar?x=1&y=2", "HTTPS://h:1/a#f"]
CHAINS = ["simplecache::http://h/d/a.tar?x=1", "zip://d/a.tar::memory://b.zip", "filecache::tar://a.tar::/d/b.tar"]
EXAMPLES += ["s3://b/d/a.tar", "memory:a.tar", "-", "pipe:cat d/a.tar", "http://h", "12:30.tar", "what?.tar"]


@pytest.mark.parametrize(
    ("url", "scheme", "family", "path"),
    [
        ("a.tar", "", "local", "a.tar"),
        ("a%20b?.tar", "", "local", "a%20b?.tar"),
        ("12:30.tar", "", "local", "12:30.tar"),
        ("./run-a:30.tar", "", "local", "./run-a:30.tar"),
        ("file:c%20d.tar", "file", "local", "c%20d.tar"),
        ("FILE:///c%20d.tar", "file", "local", "/c d.tar"),
        ("file://localhost/d/a.tar", "file", "local", "/d/a.tar"),
        ("-", "-", "stdio", None),
        ("pipe:cat a.tar", "pipe", "pipe", None),
        ("HTTP://host/a.tar", "http", "http", None),
        ("https://host/a.tar", "https", "http", None),
        ("s3://bucket/a.tar", "s3", "fsspec_", None),
        ("memory:a.tar", "memory", "fsspec_", None),
    ],
)
def test_what_the_letters_say(url, scheme, family, path):
    location = Location.of(url)
    assert (location.url, location.scheme, location.family, location.path) == (url, scheme, family, path)
    assert location.is_local == (path is not None)
    assert location.is_stream == (family in ("stdio", "pipe"))
    assert location.is_remote == (family in ("http", "fsspec_"))


def test_an_unknown_scheme_is_a_file_of_that_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UrlError, match="unknown scheme 'run-a'"):
        _ = Location.of("run-a:30.tar").is_local
    Path("run-a:30.tar").touch()
    assert Location.of("run-a:30.tar").path == "run-a:30.tar"


def test_an_unknown_scheme_shows_no_password():
    with pytest.raises(UrlError) as caught:
        Location.of("htp://me:secret@host/a.tar?sig=secret").open()
    assert "secret" not in str(caught.value)


def test_a_location_is_a_value():
    location = Location.of(Path("d/a.tar"))
    assert Location.of(location) is location
    assert location == Location.of("d/a.tar") != Location.of("d/b.tar")
    assert len({location, Location.of("d/a.tar")}) == 1
    assert pickle.loads(pickle.dumps(location)) == copy.copy(location) == location
    assert location != "d/a.tar"
    for name in "url", "path", "other":
        with pytest.raises(AttributeError, match="immutable"):
            setattr(location, name, "x")


def test_what_derives_from_a_location_is_written_as_it_is():
    scratch = Location("d/a.tar", sync=False, index_dir="/i")
    derived = [scratch.sibling(".index"), scratch.described, scratch.with_base("b"), scratch.at("c")]
    derived += [scratch.beside("b"), scratch.absolute(), Location.of(scratch), pickle.loads(pickle.dumps(scratch))]
    derived += [Location.of(scratch, sync=True), Location.of(scratch, Remote()), Location("~/a.tar", sync=False)]
    derived += [Location("~/a.tar", sync=False).expanduser()]
    assert [location.sync for location in derived] == [False] * len(derived)
    lasting = Location.of("a.tar")
    assert lasting.sync
    assert lasting.sibling(".index").sync
    assert not Location.of(lasting, sync=False).sync


def test_it_is_parsed_once():
    location = Location.of("http://me:secret@host/d/a.tar?x=1")
    for name in "scheme", "family", "path", "name", "folder", "base", "query":
        assert getattr(location, name) is getattr(location, name)


@given(schemes, words, encoded, words, st.dictionaries(words, secrets, min_size=1))
def test_no_name_shows_credentials(scheme, user, password, base, query):
    values = "&".join(f"{key}={value}" for key, value in query.items())
    for login in f"{user}:{password}@", f"{password}@", "":
        location = Location.of(f"{scheme}://{login}host/{base}.tar?{values}")
        dots = "&".join(f"{key}=..." for key in query)
        assert location.name == f"{scheme}://host/{base}.tar?{dots}"
        assert "s3cr3t" not in f"{location} {location!r} {location.sibling('.index')} {location.beside('b.tar')}"


@given(st.text("a:@/?#=&[] %.;", max_size=20), st.text("a:@/?#=&[] %.;", max_size=20))
def test_no_malformed_url_shows_credentials(before, after):
    assert "s3cr3t" not in Location.of(f"http://me:s3cr3t{before}@{after}").name
    assert "s3cr3t" not in Location.of(f"http://host/a?{before}=s3cr3t{after}").name


@pytest.mark.parametrize(
    ("query", "shown"),
    [
        ("X-Amz-Signature=abc", "X-Amz-Signature=..."),
        ("X-Amz-Expires=60&X-Amz-Signature=a/b==&partNumber=1", "X-Amz-Expires=...&X-Amz-Signature=...&partNumber=..."),
        ("token", "..."),
        ("dG9rZW4=", "..."),
        ("dG9rZW4==", "..."),
        ("a=1;b=2", "a=..."),
        ("a=1#b=2", "a=..."),
        ("a=1?b=2&c=3", "a=...&c=..."),
        ("a b=1&=2", "...&..."),
        ("", ""),
        ("a=1&", "a=...&"),
    ],
)
def test_the_form_of_a_query(query, shown):
    assert Location.of(f"https://host/a.tar?{query}").name == f"https://host/a.tar?{shown}"


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("what?x=1.tar", "what?x=1.tar"),
        ("file:what?x=1.tar", "file:what?x=1.tar"),
        ("a@b.tar", "a@b.tar"),
        ("s3://bucket/a@b.tar", "s3://bucket/a@b.tar"),
        ("http://host/a@b.tar", "http://host/a@b.tar"),
        ("http://[::1]:80/a@b.tar", "http://[::1]:80/a@b.tar"),
        ("http://me:se/cret@host/a.tar", "http://..."),
        ("http://me:se#cret@host/a.tar", "http://..."),
        ("zip://a.tar::http://me:secret@host/b.zip?x=1", "zip://a.tar::http://host/b.zip?x=..."),
        ("simplecache::http://me:secret@host/a.tar?x=1", "simplecache::http://host/a.tar?x=..."),
        ("simplecache::http://me:se/cret@host/a.tar", "simplecache::http://..."),
        ("tar://a.tar::simplecache::s3://me:pw@b/c.tar?x=1", "tar://a.tar::simplecache::s3://b/c.tar?x=..."),
        ("pipe:cat a?.tar | grep x=1", "pipe:cat a?.tar | grep x=1"),
        ("pipe:curl 'http://me:pw@h/a?sig=1&y=2' | zcat", "pipe:curl 'http://h/a?sig=...&y=...' | zcat"),
        (
            "pipe:curl http://h/a?sig=1|zcat; curl https://h/b?t=2",
            "pipe:curl http://h/a?sig=...|zcat; curl https://h/b?t=...",
        ),
    ],
)
def test_names(url, name):
    assert Location.of(url).name == name


def test_errors_show_names():
    for url in "memory://me:secret@host/a.tar?sig=secret", "pipe:curl http://me:secret@h/a?sig=secret":
        with pytest.raises(OpenError) as caught:
            Location.of(url).open()
        assert caught.value.url == Location.of(url).name
        assert "secret" not in f"{caught.value} {caught.value!r}"


@pytest.mark.parametrize("url", EXAMPLES + CHAINS)
def test_parts_make_the_url(url):
    location = Location.of(url)
    assert location.folder + location.base + location.query == url
    assert location.with_base(location.base) == location


@pytest.mark.parametrize(
    ("url", "sibling"),
    [
        ("a.tar", "a.tar.index"),
        ("what?.tar", "what?.tar.index"),
        ("file:///d/a%20b.tar", "file:///d/a%20b.tar.index"),
        ("HTTPS://h/a.tar?x=/b.tar", "HTTPS://h/a.tar.index?x=/b.tar"),
        ("http://h/a.tar#f?x", "http://h/a.tar.index#f?x"),
        ("s3://b/a.tar?versionId=1", "s3://b/a.tar?versionId=1.index"),
        ("simplecache::http://h/a.tar?x=/b.tar", "simplecache::http://h/a.tar.index?x=/b.tar"),
        ("blockcache::memory:a.tar", "blockcache::memory:a.tar.index"),
        ("zip://d/a.tar::http://h/b.zip?x=1", "zip://d/a.tar.index::http://h/b.zip?x=1"),
        ("filecache::tar://a.tar::/d/b.tar", "filecache::tar://a.tar.index::/d/b.tar"),
    ],
)
def test_siblings(url, sibling):
    assert Location.of(url).sibling(".index").url == sibling


@pytest.mark.parametrize("url", ["-", "pipe:cat a.tar"])
def test_streams_have_nothing_beside_them(url):
    with pytest.raises(OpenError, match=r"a stream has no \.done file beside it"):
        Location.of(url).sibling(".done")


@pytest.mark.parametrize("url", [url for url in EXAMPLES + CHAINS if not Location.of(url).is_stream])
@pytest.mark.parametrize("name", ["b.tar", "b 1.tar", "e/b.tar", "12:30.tar"])
def test_relative_names_are_those_that_beside_takes(url, name):
    location = Location.of(url)
    other = location.beside(name)
    assert location.relative(other).removeprefix("./") == name
    assert location.beside(location.relative(other)).url.replace("/./", "/").replace(":./", ":").removeprefix("./") in (
        other.url,
        f"./{other.url}",
    )


@given(st.lists(st.sampled_from(EXAMPLES + [f"d/{i}.tar?k={i}" for i in range(5)])))
def test_the_identity_is_the_end_of_the_name_without_a_query(urls):
    # As states have it since their first version: the URL without user, up to the first "?", after the last "/".
    assert [Location.of(url).identity for url in urls] == [url.partition("?")[0].rpartition("/")[2] for url in urls]


@pytest.mark.parametrize("url", CHAINS)
def test_a_chain_is_a_remote_file_of_the_name_that_it_reads(url):
    location = Location.of(url)
    assert (location.family, location.path, location.identity, location.base) == ("fsspec_", None, "a.tar", "a.tar")
    assert location.is_remote
    assert location.glob() == [url]
    assert location.expanduser() == location


def test_globs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in "b 1.tar", "a1.tar", "a[1].tar":
        Path(name).touch()
    assert Location.of("*1*.tar").glob() == ["a1.tar", "a[1].tar", "b 1.tar"]
    assert Location.of(f"file://{tmp_path}/b%20*").glob() == [f"file://{tmp_path}/b%201.tar"]
    assert Location.of("file:b*").glob() == ["file:b 1.tar"]
    assert Location.of("none*").glob() == []
    for url in "a[1].tar", "none.tar", "http://h/a.tar?x=*", "pipe:cat *.tar", "http://[::1]:80/[1].tar":
        assert Location.of(url).glob() == [url]
    with pytest.raises(UrlError, match="unknown scheme"):
        Location.of("unknown:*.tar").glob()


def test_sizes_and_what_exists(tmp_path):
    (tmp_path / "a.tar").write_bytes(b"data")
    here, gone = Location.of(tmp_path / "a.tar"), Location.of(tmp_path / "b.tar")
    assert list(look_up(Location.exists, [here, gone.url])) == [True, False]
    assert here.size() == len(here.read()) == 4
    for action in Location.size, Location.read, Location.ranges:
        with pytest.raises(OpenError, match=r"b\.tar: No such file"):
            action(gone)
    assert Location.of("-").exists()
    assert Location.of("-").size() is None


def test_a_file_that_is_written_to_has_another_version(tmp_path):
    (tmp_path / "folder/inner").mkdir(parents=True)
    files = tmp_path / "a.tar", tmp_path / "folder/inner/chunk"
    for path in files:
        path.write_bytes(b"data")
    with serving(tmp_path) as site:
        names = files[0], tmp_path / "folder", f"{site.url}/a.tar", "memory://v/a.tar"
        places = [Location.of(name) for name in names]
        fsspec.filesystem("memory").pipe("/v/a.tar", b"data")
        first = [place.version() for place in places]
        assert [place.version() for place in places] == first == json.loads(json.dumps(first))
        for path in files:
            path.write_bytes(b"DATA")
            os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
        site.etag = '"v2"'
        fsspec.filesystem("memory").pipe("/v/a.tar", b"DATA")
        assert [place.version() == before for place, before in zip(places, first)] == [False] * 4
        assert Location.of("-").version() == []
        for gone in (tmp_path / "b.tar", f"{site.url}/b.tar", "memory://v/b.tar"):
            with pytest.raises(OpenError, match=r"b\.tar"):
                Location.of(gone).version()


def test_folders(tmp_path):
    Location.of(f"file://{tmp_path}/a%20b/c/x.tar").make_folder()
    assert (tmp_path / "a b/c").is_dir()
    Location.of("s3://bucket/folder/x.tar").make_folder()
    (tmp_path / "file").touch()
    with pytest.raises(OpenError, match="Not a directory"):
        Location.of(tmp_path / "file/c/x.tar").make_folder()


def test_the_common_schemes_are_known_without_fsspec():
    urls = [f"{scheme}://h/a.tar" if scheme not in ("", "-") else "a.tar" for scheme in FAMILIES if scheme != "file"]
    code = "import sys; from tarshards.storage.location import Location\n"
    code += f"print([Location(url).family for url in {urls}], 'fsspec' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("False\n")


def test_what_is_read_whole_has_a_limit(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * 1000)
    location = Location.of(tmp_path / "a")
    assert location.read(1000) == location.read() == b"x" * 1000
    with pytest.raises(OpenError, match=r"/a: more than 999 bytes, the limit for such a file$"):
        location.read(999)
    with pytest.raises(OpenError, match=r"^pipe:yes: more than 100,000 bytes, the limit for such a file$"):
        Location.of("pipe:yes", allow_pipe=True).read(100_000)


READERS = {
    "index": (sidecar, "MOST_READ", "a.tar.index", lambda url: Index.load(url.removesuffix(".index"))),
    "manifest": (expressions, "MAX_BYTES", "a.json", expressions.find_shards),
    "marker": (markers, "MAX_BYTES", "a.done", lambda url: markers.Marker(url).read()),
}


@pytest.mark.parametrize("what", READERS)
@pytest.mark.parametrize("place", ["path", "memory", "http"])
def test_indexes_manifests_and_markers_without_an_end(tmp_path, monkeypatch, what, place):
    module, limit, name, read = READERS[what]
    assert 1 << 20 < getattr(module, limit) <= 1 << 30
    monkeypatch.setattr(module, limit, 1 << 20)
    if place == "path":
        (tmp_path / name).symlink_to("/dev/zero")
        url = str(tmp_path / name)
    elif place == "memory":
        store = fsspec.filesystem("memory")
        store.pipe_file(f"/{name}", bytes(2 << 20))
        url = f"memory://{name}"
    else:
        (tmp_path / name).write_bytes(bytes(2 << 20))
    with serving(tmp_path) as site:
        url = f"{site.url}/{name}" if place == "http" else url
        reason = "more than 1,048,576 bytes, the limit for such a file"
        if what == "index" and place == "path":
            reason = "(No such device|more than 1,048,576 bytes)"  # what can be mapped is
        with pytest.raises(OpenError, match=reason) as caught:
            read(url)
    assert caught.value.url == url
    if place == "memory":
        store.rm(f"/{name}")


def test_json_that_nests_too_deeply_is_none(tmp_path):
    for name in "a.json", "a.done":
        (tmp_path / name).write_text("[" * 200_000)
    with pytest.raises(UrlError, match=r"a\.json: a manifest that is not JSON"):
        expressions.find_shards(str(tmp_path / "a.json"))
    assert markers.Marker(tmp_path / "a.done").read() is None
