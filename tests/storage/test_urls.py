"""Shard expressions name exactly the URLs that bash, the list and the file system say."""

import json
import os
import pickle
import re
import subprocess
from glob import glob
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path

import pytest
from braceexpand import braceexpand
from hypothesis import example, given, settings
from hypothesis import strategies as st
from range_server import serving
from with_torch import webdataset

from tarshards.errors import OpenError, UrlError
from tarshards.storage import expressions
from tarshards.storage.expressions import Shard, _count, expand_urls, find_shards, shards_in, spec_name
from tarshards.storage.location import Location
from tarshards.storage.manifest import Shards, dump_manifest, parse_manifest
from tarshards.storage.remote import Remote


def make(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("spec", "urls"),
    [
        ("a.tar", ["a.tar"]),
        ("data-{000..002}.tar", ["data-000.tar", "data-001.tar", "data-002.tar"]),
        ("data-{8..10}.tar", ["data-8.tar", "data-9.tar", "data-10.tar"]),
        ("{b,a,b}.tar", ["b.tar", "a.tar", "b.tar"]),
        ("{train-{0..1},val}.tar", ["train-0.tar", "train-1.tar", "val.tar"]),
        ("{a..c}{1,2}", ["a1", "a2", "b1", "b2", "c1", "c2"]),
        (r"a\{1,2\}.tar", ["a{1,2}.tar"]),
        (r"a\b.tar", [r"a\b.tar"]),
        ("out-{}.tar", ["out-{}.tar"]),
        ("a.tar::b-{0..1}.tar", ["a.tar", "b-0.tar", "b-1.tar"]),
        ("-", ["-"]),
        ("http://host/a.tar?x=*&y=[1]", ["http://host/a.tar?x=*&y=[1]"]),
        ("http://[::1]:80/a?.tar", ["http://[::1]:80/a?.tar"]),
        ("http://[::1]:80/{0..1}.tar::b.tar", ["http://[::1]:80/0.tar", "http://[::1]:80/1.tar", "b.tar"]),
        ("pipe:curl -s http://x/{0..1}.tar", ["pipe:curl -s http://x/0.tar", "pipe:curl -s http://x/1.tar"]),
        ("a.tar::pipe:ssh ::1 'cat *.tar'", ["a.tar", "pipe:ssh ::1 'cat *.tar'"]),
        (r"pipe:tr '\n' ' ' < a.tar", [r"pipe:tr '\n' ' ' < a.tar"]),
        (r"pipe:awk '\{print $1,$2\}' {a,b}", ["pipe:awk '{print $1,$2}' a", "pipe:awk '{print $1,$2}' b"]),
        ("simplecache::http://h/{0..1}.tar", ["simplecache::http://h/0.tar", "simplecache::http://h/1.tar"]),
        ("a.tar::filecache::s3://b/a.tar::b.tar", ["a.tar", "filecache::s3://b/a.tar", "b.tar"]),
        (
            "zip://{a,b}.tar::blockcache::http://[::1]:80/{0..1}.zip::c.tar",
            [f"zip://{a}.tar::blockcache::http://[::1]:80/{n}.zip" for a in "ab" for n in "01"] + ["c.tar"],
        ),
        ("tar://a.tar::b.tar::tar://a.tar::c.tar", ["tar://a.tar::b.tar", "tar://a.tar::c.tar"]),
        ("memory://a.tar::zip.tar::simplecache", ["memory://a.tar", "zip.tar", "simplecache"]),
        ("cached::memory:a.tar::pipe:ssh ::1 cat", ["cached::memory:a.tar", "pipe:ssh ::1 cat"]),
        (["b.tar", "a-{0..1}.tar", ["c.tar"]], ["b.tar", "a-0.tar", "a-1.tar", "c.tar"]),
        (Path("data/a-{0..1}.tar"), ["data/a-0.tar", "data/a-1.tar"]),
        (("a.tar", Path("b.tar")), ["a.tar", "b.tar"]),
    ],
    ids=str,
)
def test_expressions(spec, urls):
    assert expand_urls(spec) == urls


def test_any_iterable_of_specs():
    assert expand_urls(f"{name}-{{0..1}}.tar" for name in "ab") == ["a-0.tar", "a-1.tar", "b-0.tar", "b-1.tar"]


plain = st.text("abcXYZ019_/.-", min_size=1, max_size=4).filter(lambda text: text.strip("-."))
ends = st.integers(95, 103) | st.integers(0, 6)
numbers = st.tuples(ends, st.integers(-6, 6), st.sampled_from(["{{{}..{}}}", "{{{:03}..{:03}}}"]))
braces = st.recursive(
    st.one_of(
        plain,
        numbers.map(lambda each: each[2].format(each[0], max(0, each[0] + each[1]))),
        st.tuples(st.sampled_from("abcxyz"), st.sampled_from("abcxyz")).map(lambda ends: "{%s..%s}" % ends),  # noqa: UP031
    ),
    lambda inner: st.one_of(
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: "{" + ",".join(parts) + "}"),
        st.lists(inner, min_size=2, max_size=2).map("".join),
    ),
    max_leaves=4,
)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(plain, braces).map("".join), min_size=1, max_size=10))
def test_braces_are_those_of_bash(specs):
    # The dash before each word keeps printf from reading it as an option; every spec is on a separate line.
    script = "\n".join(f"printf '%s\\n' x{spec}" for spec in specs)
    oracle = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.splitlines()
    assert expand_urls([f"x{spec}" for spec in specs]) == oracle


@pytest.mark.parametrize("spec", ["a{0..3.tar", "a}.tar", "x{{1,2}.tar"])
def test_unbalanced_braces_name_the_spec(spec):
    with pytest.raises(UrlError, match="unbalanced braces") as caught:
        expand_urls(["good.tar", spec])
    assert caught.value.url == spec


ENDLESS = {
    "a-" + "{0..9}" * 8 + ".tar": "100,000,000 names",
    "{00..99999999}": "100,000,000 names",
    "a{b,{c,d{0..99999999}}}": "100,000,002 names",
    "{0..9}" * 50_000: "1,000,000,000,000,000,000 names or more",
    "{0..99999999999999999999999}": "1,000,000,000,000,000,000 names or more",
    "{0..%s}" % ("9" * 5000): "1,000,000,000,000,000,000 names or more",
    "}{{0..99999999}": "100,000,000 names",
    "{" + "0" * 4000 + "..99999}": "names of more than 268,435,456 characters together",
    "{" * 2000 + "}" * 2000: "braces are nested too deeply",
}


@pytest.mark.parametrize("spec", ENDLESS)
def test_braces_for_too_many_names_are_refused_before_they_expand(here, spec):
    reason = ENDLESS[spec]
    if "names of" not in reason and "names" in reason:
        reason += "; an expression names at most 3,000,000 shards"
    with pytest.raises(UrlError) as caught:
        expand_urls(["good.tar", spec])
    assert caught.value.reason == reason
    assert caught.value.url in (spec, f"{spec[:500]}...")
    (here / "list").write_text(f"good.tar\n{spec}\n")
    with pytest.raises(UrlError) as caught:
        expand_urls("@list")
    assert caught.value.reason.endswith(f": {reason}")
    assert caught.value.url == f"@{here / 'list'}"


@settings(max_examples=200, deadline=None)
@given(braces | st.text("ab01.,{}\\-"))
@example("{}}{,{}")
def test_names_are_counted_as_they_expand(spec):
    try:
        expanded = list(braceexpand(spec))
    except ValueError:
        return
    assert _count(spec)[0] >= len(expanded)
    depths = list(accumulate((letter == "{") - (letter == "}") for letter in spec))
    if "\\" not in spec and min(depths, default=0) >= 0 and depths[-1:] in ([], [0]):  # all braces are closed
        assert _count(spec)[0] == len(expanded)


def test_the_shards_of_all_parts_are_counted_together(monkeypatch, here):
    monkeypatch.setattr(expressions, "MOST_SHARDS", 10)
    assert len(expand_urls(["a-{0..4}.tar", "b-{0..4}.tar"])) == 10
    with pytest.raises(UrlError, match=r"at most 3,000,000"):
        expand_urls("a-{0..4}.tar::b-{0..5}.tar")
    (here / "list").write_text("a-{0..4}.tar\n")
    (here / "lists").write_text("@list\n" * 3)
    with pytest.raises(UrlError, match=r"at most 3,000,000"):
        expand_urls("@lists")


def test_a_list_has_an_end(monkeypatch):
    monkeypatch.setattr(expressions, "MAX_BYTES", 1 << 20)
    with pytest.raises(UrlError, match=r"^@/dev/zero: more than 1,048,576 characters, the limit for such a file$"):
        expand_urls("@/dev/zero")


@pytest.mark.parametrize("spec", ["", [], "a.tar::", "::a.tar", "{,a}.tar::{,}", [[], ()]])
def test_nothing_is_an_error(spec):
    with pytest.raises(UrlError):
        expand_urls(spec)


@pytest.mark.parametrize("spec", [None, 3, b"a.tar", ["a.tar", None]])
def test_what_is_no_expression_is_a_type_error(spec):
    with pytest.raises(TypeError, match="a shard expression is"):
        expand_urls(spec)


@pytest.mark.parametrize(
    ("spec", "urls"),
    [
        ("d/a::b.tar", ["d/a::b.tar"]),
        ("d/a::b.tar::c.tar", ["d/a::b.tar", "c.tar"]),
        ("c.tar::d/a::b.tar::c.tar", ["c.tar", "d/a::b.tar", "c.tar"]),
        ("v::1/x-{0..1}.tar", ["./v::1/x-0.tar", "./v::1/x-1.tar"]),
        ("v::1/x-*.tar::c.tar", ["./v::1/x-0.tar", "./v::1/x-1.tar", "c.tar"]),
        ("{d/a::b,c}.tar", ["d/a::b.tar", "c.tar"]),
        ("e::f::g.tar", ["./e::f::g.tar"]),
        ("e::f::g.tar::e::f.tar", ["./e::f::g.tar", "e", "f.tar"]),
        ("zip::a.tar", ["./zip::a.tar"]),
        ("k:l.tar", ["./k:l.tar"]),
        ("?:l.tar", ["./k:l.tar"]),
        ("m{1,2}.tar", ["m{1,2}.tar"]),
        (Path("d/a::b.tar"), ["d/a::b.tar"]),
        ("@list", ["d/a::b.tar", "c.tar"]),
        ("http://host/d/a::b.tar", ["http://host/d/a", "b.tar"]),
        ("pipe:cat d/a::b.tar", ["pipe:cat d/a::b.tar"]),
    ],
)
def test_a_file_of_exactly_that_name_takes_precedence(here, spec, urls):
    names = "d/a::b.tar", "v::1/x-0.tar", "v::1/x-1.tar", "e::f::g.tar", "zip::a.tar", "k:l.tar", "m{1,2}.tar", "c.tar"
    make(here, *names)
    (here / "list").write_text("d/a::b.tar::c.tar\n")
    assert expand_urls(spec) == urls


@pytest.mark.parametrize("folder", ["", "d/", "http://host/", "*"])
def test_of_many_names_few_combinations_are_looked_for(here, monkeypatch, folder):
    count = 250
    make(here, *(f"{folder}t-{i}.tar" for i in range(count)))
    looks = []
    lexists = os.path.lexists
    monkeypatch.setattr(os.path, "lexists", lambda path: looks.append(path) or lexists(path))
    assert len(expand_urls("::".join(f"{folder}t-{i}.tar" for i in range(count)))) == count
    assert len(looks) < 40 * count


def test_names_of_a_catalog_are_relative_to_it(here):
    make(here, "sets/a::b.tar")
    file = Location("sets/catalog.yaml")
    assert [shard.url for shard in shards_in(file, ["a::b.tar::c.tar"])] == ["sets/a::b.tar", "sets/c.tar"]
    assert spec_name("sets/a::b.tar::c.tar", file.relative) == "./a::b.tar::../c.tar"


def test_globs_are_sorted_and_stay_in_their_place(here):
    make(here, "b-1.tar", "b-0.tar", "a.tar", ".b-2.tar", "b-3.txt", "sub/c.tar")
    assert expand_urls("b-*.tar") == ["b-0.tar", "b-1.tar"]
    assert expand_urls("z.tar::b-?.tar::a.tar") == ["z.tar", "b-0.tar", "b-1.tar", "a.tar"]
    assert expand_urls("b-[1-9].tar") == ["b-1.tar"]
    assert expand_urls("{b,a}*.tar") == ["b-0.tar", "b-1.tar", "a.tar"]
    assert expand_urls("*/c.tar") == ["sub/c.tar"]
    assert expand_urls(here / "a*.tar") == [str(here / "a.tar")]


PATTERNS = ["*", "*.tar", "a*", "a*.tar", "?*", "[!a]*", "a[*", "[ab]*r", "*a*", "aa*aa", ".*", ".*r", "a?", "**"]


@pytest.mark.parametrize("folder", ["", "d/", "./", "d//", "no/", "[d]/"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_globs_find_what_pythons_find(here, pattern, folder):
    (here / "d").mkdir()
    for name in "a.tar", "b.tar", ".a.tar", "aa", "aaa", "aaaa", "a[", "b", "a.tar.index", "c\nd.tar":
        (here / name).touch()
        (here / "d" / name).touch()
    assert Location(folder + pattern).glob() == sorted(glob(folder + pattern))


def test_a_name_that_exists_is_no_glob(here):
    make(here, "a[1].tar", "a1.tar", "what?.tar", "whats.tar")
    assert expand_urls("a[1].tar") == ["a[1].tar"]
    assert expand_urls("what?.tar") == ["what?.tar"]


def test_globs_of_file_urls(here):
    make(here, "a b.tar", "a-c.tar")
    assert expand_urls("file:a*.tar") == ["file:a b.tar", "file:a-c.tar"]
    assert expand_urls(f"file://{here}/a*b.tar") == [f"file://{here}/a%20b.tar"]
    assert expand_urls(f"file://{here}/a%20*.tar") == [f"file://{here}/a%20b.tar"]


def test_a_glob_without_a_match_is_an_error(here):
    with pytest.raises(UrlError, match=r"x-\*\.tar: no file matches"):
        expand_urls("x-*.tar")


def test_a_glob_that_skips_shards_of_a_run_says_so_once(here, caplog):
    make(here, *(f"a_{number}.tar" for number in range(13)), *(f"b-{number:02d}.tar.zst" for number in (8, 9, 10, 12)))
    make(here, *(f"y{year}.tar" for year in (2001, 2015)), *(f"c-{i:05d}-of-00004.tar" for i in (0, 1, 3)))
    make(here, *(f"d-{number}.tar" for number in range(0, 100, 5)), *(f"e-{number:03d}.tar" for number in range(60)))
    for pattern in (
        "a_*.tar",
        "a_[0-2].tar",
        "y*.tar",
        "d-*.tar",
        "e-*.tar",
        "e-0[0-9]*.tar",
        "a_{0..2}.tar",
        "a_0*.tar",
    ):
        assert expand_urls(pattern)
    assert not caplog.messages
    skips = {
        "a_[124-7].tar": "matches 6 shards, and not a_3.tar; braces",
        "b-*": "matches 4 shards, and not b-11.tar.zst; braces",
        "c-*.tar": "matches 3 shards, and not c-00002-of-00004.tar; braces",
        "e-0[024]*.tar": "matches 30 shards, and not e-010.tar, e-011.tar, e-012.tar, e-013.tar, e-014.tar and 15",
    }
    for pattern, words in skips.items():
        for _ in range(2):
            expand_urls(pattern)
        assert [message for message in caplog.messages if message.startswith(f"{pattern} {words}")] == caplog.messages
        assert len(caplog.messages) == 1
        caplog.clear()


RANGES = ["[0..3]", "[0..12]", "[a..d]", "(0..3)", "<0..3>", "_OP_0..3_CL_", "_OP_-1..8..2_CL_", "[000..012]"]


@pytest.mark.parametrize("words", [*RANGES, "[{0..3}]", "[{0..12}]", "[!{a..d}]"])
def test_ranges_of_other_tools_say_ours(here, words):
    make(here, *(f"a_{number}.tar" for number in range(13)))
    inner = words.strip("[]()<>{}!").removeprefix("_OP_").removesuffix("_CL_")
    name = f"a_{words}.tar"
    (here / "list").write_text(f"a_0.tar\n{name}\n")
    reason = re.escape(f"{words} is not a range here; write {{{inner}}}")
    for spec in name, f"http://host/{name}", [name, "b.tar"], "@list", f"b.tar::{name}":
        with pytest.raises(UrlError, match=reason):
            expand_urls(spec)
    with pytest.raises(UrlError, match=reason):
        shards_in(Location("sets.yaml"), [name])
    if find_spec("torch"):
        with pytest.raises(UrlError, match=reason):
            webdataset.WebDataset(f"a_{words}.tar")


def test_names_with_such_letters_are_names(here):
    make(here, "run(1..2)/a-0.tar", "run(1..2)/a-1.tar", "b[0..3].tar", "c_OP_0..1_CL_.tar")
    assert expand_urls("run(1..2)/a-*.tar") == ["run(1..2)/a-0.tar", "run(1..2)/a-1.tar"]
    for name in "b[0..3].tar", "c_OP_0..1_CL_.tar", "pipe:cat [0..3]", "../x/(a).tar", "http://host/a?b=[1]&c=..":
        assert expand_urls(name) == [name]


def test_the_home_directory(here, monkeypatch):
    monkeypatch.setenv("HOME", str(here))
    make(here, "d/a.tar", "d/b.tar", "list.txt")
    (here / "list.txt").write_text("~/c.tar\n")
    assert expand_urls("~/d/*.tar") == [f"{here}/d/a.tar", f"{here}/d/b.tar"]
    assert expand_urls("~/x-{0..1}.tar") == [f"{here}/x-0.tar", f"{here}/x-1.tar"]
    assert expand_urls("@~/list.txt") == [f"{here}/c.tar"]


def test_lists(here):
    make(here, "data/g-1.tar", "data/g-0.tar")
    (here / "inner.txt").write_text("x.tar\r\n")
    (here / "data/list.txt").write_text(
        "\ufeff# shards\n\n  a-{0..1}.tar \ndata/g-*.tar\n@inner.txt\nb.tar::c.tar\n#d.tar"
    )
    expected = ["a-0.tar", "a-1.tar", "data/g-0.tar", "data/g-1.tar", "x.tar", "b.tar", "c.tar"]
    assert expand_urls("@data/list.txt") == expected
    assert expand_urls("first.tar::@inner.txt::@inner.txt") == ["first.tar", "x.tar", "x.tar"]
    assert expand_urls("@{inner,data/list}.txt") == ["x.tar", *expected]


def test_names_in_a_list_that_end_with_nul_are_taken_as_they_are(here):
    names = ["a b.tar", "./#c.tar", "{d,e}.tar", "f-{0..9}.tar", "g*.tar", "h\ni.tar", "j\r\n.tar", " k ", "d/x::y.tar"]
    (here / "list.txt").write_bytes("\0".join(names).encode() + b"\0")
    assert expand_urls("@list.txt") == names
    assert expand_urls("first.tar::@list.txt")[1:] == names
    (here / "list.txt").write_bytes(b"a.tar\0pipe:echo\0")
    with pytest.raises(UrlError, match="may not name a command"):
        expand_urls("@list.txt")


def test_a_list_that_contains_itself(here):
    (here / "a.txt").write_text("x.tar\n@b.txt\n")
    (here / "b.txt").write_text("@./a.txt\n")
    with pytest.raises(UrlError, match=r"@\./a\.txt: a list file that contains itself"):
        expand_urls("@a.txt")


def test_lists_that_cannot_be_read(here):
    with pytest.raises(OpenError, match=r"@none\.txt: No such file or directory"):
        expand_urls("@none.txt")
    (here / "shard.tar").write_bytes(b"\xff\xfe")
    with pytest.raises(UrlError, match=r"@shard\.tar: a list file is UTF-8 text"):
        expand_urls("@shard.tar")
    (here / "empty.txt").write_text("# nothing\n")
    with pytest.raises(UrlError, match="empty"):
        expand_urls("@empty.txt")


def test_an_expanded_list_expands_to_itself(here):
    make(here, "a [1].tar", r"b\c.tar")
    urls = expand_urls(["*.tar", "x-{0..3}.tar", "http://h/?a=*"])
    assert len(urls) == 7
    assert expand_urls(urls) == urls


def test_globs_for_shards_match_no_indexes_and_manifests(here):
    shards = ["train-0.tar", "train-1.tar"]
    make(
        here,
        *shards,
        *(f"{shard}.index" for shard in shards),
        "train.shards.json",
        "shards.json",
        "train-0.idx",
        "train-0.tar.columns.parquet",
    )
    make(here, "train-0.tar.idx")
    assert expand_urls("train*") == expand_urls("*") == shards
    for spec in ("*.index", "*.shards.json"):
        with pytest.raises(UrlError, match="no file matches"):
            expand_urls(spec)


def write(path: Path, *shards: Shard) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dump_manifest(shards))


def test_manifests(here):
    write(
        here / "d/a.shards.json",
        Shard("x-[1].tar", 7, 1024),
        Shard("../y.tar"),
        Shard("/z.tar", concatenated=True),
        Shard("http://h/w"),
    )
    expected = [
        Shard("d/x-[1].tar", 7, 1024),
        Shard("d/../y.tar"),
        Shard("/z.tar", concatenated=True),
        Shard("http://h/w"),
    ]
    assert find_shards("d/a.shards.json") == expected
    assert expand_urls("d/a.shards.json") == [url for url, *_ in expected]
    assert find_shards(here / "d/a.shards.json")[0].url == f"{here}/d/x-[1].tar"
    assert expand_urls("b.tar::d/{a,a}.shards.json")[:2] == ["b.tar", "d/x-[1].tar"]
    (here / "list").write_text("c.tar\nd/a.shards.json\n")
    assert find_shards("@list")[:2] == [Shard("c.tar"), expected[0]]
    write(here / "other.json", Shard("q.tar", 1))
    write(here / "what[1].json", Shard("r.tar", 2))
    assert find_shards("other.json::what[1].json") == [Shard("q.tar", 1), Shard("r.tar", 2)]


def test_manifests_by_url(here, monkeypatch):
    write(here / "d/a b.json", Shard("x y.tar", 7))
    assert expand_urls(f"file://{here}/d/a%20b.json") == [f"file://{here}/d/x%20y.tar"]
    assert expand_urls("file:d/a b.json") == ["file:d/x y.tar"]
    monkeypatch.setenv("HOME", str(here))
    assert expand_urls("~/d/a b.json") == [f"{here}/d/x y.tar"]


def test_remote_manifests():
    import fsspec

    fsspec.filesystem("memory").pipe("/set/a.shards.json", dump_manifest([Shard("x.tar", 3, 9)]).encode())
    assert find_shards("memory://set/a.shards.json") == [Shard("memory://set/x.tar", 3, 9)]
    chained = "simplecache::memory://set"
    assert find_shards(f"{chained}/a.shards.json") == [Shard(f"{chained}/x.tar", 3, 9)]
    fsspec.filesystem("memory").rm("/set", recursive=True)


def test_manifests_of_web_servers(tmp_path):
    write(tmp_path / "d/a.shards.json", Shard("x y.tar", 3), Shard("z.tar"))
    with serving(tmp_path) as site:
        base = f"{site.url}/d"
        assert expand_urls(f"{base}/a.shards.json") == [f"{base}/x%20y.tar", f"{base}/z.tar"]
        assert expand_urls(f"{base}/a.shards.json?token=1") == [f"{base}/x%20y.tar?token=1", f"{base}/z.tar?token=1"]
        with pytest.raises(OpenError, match=r"none\.json: 404"):
            expand_urls(f"{base}/none.json")


@pytest.mark.parametrize("name", ["pipe:rm -rf /", "PIPE:x", "-"])
def test_a_manifest_runs_no_commands(here, name):
    write(here / "a.json", Shard(name))
    with pytest.raises(UrlError, match=r"a\.json: a manifest may not name"):
        expand_urls("a.json")


@pytest.mark.parametrize(
    "name",
    [
        "/etc/passwd",
        "file:///etc/passwd",
        "pipe:id",
        "simplecache::/etc/passwd",
        "simplecache::file:///etc/passwd",
        "zip://a.tar::local:///b.zip",
        "zip://a.tar::b.zip",
        "simplecache::pipe:id",
    ],
)
def test_a_remote_manifest_names_no_local_files(name):
    import fsspec

    fsspec.filesystem("memory").pipe("/bad/a.json", dump_manifest([Shard(name)]).encode())
    with pytest.raises(UrlError, match="a manifest may not name"):
        expand_urls("memory://bad/a.json")
    fsspec.filesystem("memory").rm("/bad", recursive=True)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not JSON"),
        ("[]", "no shardlist"),
        ('{"wids_version": 1}', "no shardlist"),
        ('{"shardlist": []}', "wids_version None"),
        ('{"wids_version": 2, "shardlist": []}', "wids_version 2"),
        ('{"wids_version": 1, "shardlist": [], "datasets": [1]}', "a manifest of other datasets"),
        ('{"wids_version": 1, "shardlist": [{"url": "a"}, {"nsamples": 3}]}', "entry 1 of the manifest has no url"),
        ('{"wids_version": 1, "shardlist": [{"url": "a", "nsamples": -1}]}', "a has nsamples -1"),
        ('{"wids_version": 1, "shardlist": [{"url": "a", "sha256": "12"}]}', "a has sha256 '12' in the manifest"),
        ('{"wids_version": 1, "shardlist": [{"url": "a", "digest": 12}]}', "a has digest 12 in the manifest"),
        ('{"wids_version": 1, "shardlist": [{"url": "a", "filesize": 1.5}]}', "a has filesize 1.5"),
        ('{"wids_version": 1, "shardlist": [{"url": "a"}, {"url": "a"}]}', "names a shard twice"),
    ],
)
def test_what_is_no_manifest(here, text, reason):
    (here / "a.shards.json").write_text(text)
    with pytest.raises(UrlError, match=rf"a\.shards\.json: .*{reason}"):
        expand_urls("a.shards.json")


def test_an_empty_manifest_is_an_empty_expression(here):
    write(here / "a.json")
    with pytest.raises(UrlError, match="empty"):
        expand_urls("a.json")


@given(
    st.lists(
        st.builds(
            Shard,
            st.text(min_size=1),
            st.none() | st.integers(0, 2**32 - 1),
            st.none() | st.integers(0, 2**53 - 1),
            sha256=st.none() | st.text("0123456789abcdef", min_size=64, max_size=64),
            digest=st.none() | st.text("0123456789abcdef", min_size=32, max_size=32),
            split=st.none(),
            remote=st.none(),
            index_dir=st.none(),
        ),
        unique_by=lambda shard: shard.url,
    )
)
def test_what_is_dumped_is_parsed(shards):
    assert parse_manifest(dump_manifest(shards), "a.json") == [
        shard._replace(allow_pipe=False, keep_headers=False, end="required", adjacent=True) for shard in shards
    ]


@given(st.lists(st.sampled_from([*"{},.-%0189ab\\", "{0..1}", "{08..11}", "{7..9}", "..", ".tar"]), max_size=12))
def test_ranges_are_those_of_braceexpand(parts):
    found = expressions._ranges(pattern) if "{" in (pattern := "".join(parts)) else None
    assert found is None or list(found) == list(braceexpand(pattern))


WRONG = [{"nsamples": -1}, {"nsamples": True}, {"nsamples": 1.0}, {"nsamples": 1 << 32}, {"filesize": "1"}]
WRONG += [{"indexed": 1}, {"indexed": None}, {"concatenated": "yes"}, {"digest": "0" * 31}, {"digest": "G" * 32}]
WRONG += [{"digest": 7}, {"digest": "\ud800" * 32}, {"sha256": "0" * 32}, {"sha256": ""}, {"url": ""}, {"url": 7}]


@pytest.mark.parametrize("wrong", WRONG, ids=ascii)
def test_one_wrong_entry_of_many_is_named(wrong):
    entries = [{"url": f"{i}.tar", "nsamples": i, "digest": "0" * 32} for i in range(9)]
    assert parse_manifest(json.dumps({"wids_version": 1, "shardlist": entries}), "a.json")[8].samples == 8
    entries[7] |= wrong
    name = "entry 7" if "url" in wrong else "7.tar"
    with pytest.raises(UrlError, match=f"a.json: {name} .*{next(iter(wrong))}"):
        parse_manifest(json.dumps({"wids_version": 1, "shardlist": entries}), "a.json")


def test_shards_are_columns_that_read_as_a_list():
    one, two = Shard("a.tar", 0, 512, indexed=True), Shard("b.tar", split="last")
    shards = Shards.joined([Shards.of([one, two]), Shards(["c.tar"], samples=[0])])
    assert list(shards) == shards == [one, two, Shard("c.tar", 0)]
    alike = [Shard(f"{name}.tar", size=3, indexed=True, remote=Remote(retries=1)) for name in "abc"]
    assert Shards.joined([Shards.of(alike[:2]), Shards.of(alike[2:])]) == alike
    assert Shards.joined([Shards.of(alike), Shards(["d.tar"])]) == [*alike, Shard("d.tar")]
    assert [shards[-1], *shards[:2]] == [Shard("c.tar", 0), one, two]
    assert shards.take([2, 0]).urls == ["c.tar", "a.tar"]
    assert shards.column("samples") == [0, None, 0]
    assert list(shards.uncounted) == [1, 2]
    assert shards.replace(size=[1, 2, 3])[1] == two._replace(size=2)
    assert Shards.of([]) == Shards([]) == []


def test_shards_that_earlier_releases_have_pickled():
    shards = Shards.__new__(Shards)
    vars(shards).update(urls=["a.tar", "b.tar"], _columns={"samples": [7, 8], "split": ["last", None]})
    loaded = pickle.loads(pickle.dumps(shards))
    assert loaded == [Shard("a.tar", 7, split="last"), Shard("b.tar", 8)]
    assert Shards.joined([loaded, Shards(["c.tar"])])[2] == Shard("c.tar")
    assert loaded.replace(size=[1, 2])[0] == Shard("a.tar", 7, 1, split="last")


def test_shards_name_themselves():
    shard = Shard("{0..1}.tar", 7)  # a name, no expression
    assert find_shards([shard, "b.tar"]) == [shard, Shard("b.tar")]
    assert find_shards(shard) == [shard]


@pytest.mark.parametrize("pattern", ["a{0000..9999}%d", "{00998..03001}", "{000..999}", "%s{1990..3990}-{0..1}"])
def test_long_ranges_are_those_of_braceexpand(pattern):
    assert expand_urls(pattern) == list(braceexpand(pattern))


@pytest.mark.parametrize(
    "others",
    [[{}, {"nsamples": 3, "filesize": 9}], [{"nsamples": None}], [{"filesize": 9, "sha256": "0" * 64}], [{"x": 1}]],
)
def test_entries_of_a_manifest_may_have_different_words(others):
    entries = [{"url": "0.tar", "nsamples": 7}, *({"url": f"{i}.tar"} | other for i, other in enumerate(others, 1))]
    found = parse_manifest(json.dumps({"wids_version": 1, "shardlist": entries}), "x.shards.json")
    assert [(shard.url, shard.samples, shard.size, shard.sha256) for shard in found] == [
        tuple(entry.get(word) for word in ("url", "nsamples", "filesize", "sha256")) for entry in entries
    ]
