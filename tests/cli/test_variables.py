"""The tools obey TARSHARDS_CACHE_DIR, TARSHARDS_CONNECTIONS and TARSHARDS_LOG, and name them when they are wrong."""

from __future__ import annotations

import os
import subprocess

import pytest
from range_server import serving

from tarshards import write_samples
from tarshards.index.build import build_index


@pytest.fixture
def run(tmp_path, path_with_tools):
    """Return a function that runs a tool in a folder with a.tar, with variables, and returns how it ended."""
    write_samples([{"__key__": f"s{i}", "cls": i} for i in range(8)], str(tmp_path / "a.tar"))

    def run(*words: str, **variables: str) -> subprocess.CompletedProcess:
        environment = {**os.environ, "PATH": path_with_tools, **variables}
        return subprocess.run(
            words, cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )

    return run


@pytest.mark.parametrize(
    "tool", [["tarcat", "a.tar"], ["tarindex", "a.tar"], ["lines2tar", "a.txt"], ["tarcache", "list", "x"]]
)
@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("TARSHARDS_CONNECTIONS", "many", "must be a whole number of at least 1, not 'many'"),
        ("TARSHARDS_CONNECTIONS", "0", "must be a whole number of at least 1, not '0'"),
        ("TARSHARDS_CONNECTIONS", "-4", "must be a whole number of at least 1, not '-4'"),
        ("TARSHARDS_CACHE_DIR", "a.tar", "must name a folder, not 'a.tar'"),
        ("TARSHARDS_LOG", "loud", "must be one of debug, info, warning, error, not 'loud'"),
    ],
)
def test_a_wrong_value_names_the_variable(run, tool, name, value, reason):
    done = run(*tool, **{name: value})
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"Error: the variable {name} {reason}\n"


def test_an_empty_variable_counts_as_not_set(run):
    done = run("tarcat", "a.tar", "-o", "b.tar", TARSHARDS_CONNECTIONS="", TARSHARDS_CACHE_DIR="", TARSHARDS_LOG="")
    assert (done.returncode, done.stderr) == (0, "")


def test_the_folder_of_the_cache(run, tmp_path):
    build_index(str(tmp_path / "a.tar")).save(str(tmp_path / "a.tar"))
    with serving(tmp_path) as site:
        for words in (["tarcat", f"{site.url}/a.tar", "-o", "b.tar"], ["targrep", "-c", "7", f"{site.url}/a.tar"]):
            assert run(*words, TARSHARDS_CACHE_DIR="cache").returncode == 0
            sent = site.bytes
        assert run("tarcat", f"{site.url}/a.tar", "-o", "c.tar", TARSHARDS_CACHE_DIR="cache").returncode == 0
        assert site.bytes <= sent + 1, "the version was asked for, and no data"
        told = run("tarcache", "list", "cache").stdout
        assert f"{site.url}/a.tar" in told
        assert run("tarcat", "--cache-dir", "other", f"{site.url}/a.tar", "-o", "d.tar", TARSHARDS_CACHE_DIR="cache")
        assert f"{site.url}/a.tar" in run("tarcache", "list", "other").stdout


def test_connections(run, tmp_path):
    for i in range(12):
        write_samples([{"__key__": f"{i}-{j}", "bin": bytes(400_000)} for j in range(4)], str(tmp_path / f"l-{i}.tar"))
    with serving(tmp_path) as site:
        used = {}
        for words, number in ((), ""), ((), "1"), (("--connections", "9"), "1"):
            site.connections = 0
            shards = f"{site.url}/l-{{0..11}}.tar"
            assert (
                run("tarcat", *words, shards, "-o", "o.tar", "--overwrite", TARSHARDS_CONNECTIONS=number).returncode
                == 0
            )
            used[words, number] = site.connections
        assert used[(), "1"] <= 2 < min(used[(), ""], used[("--connections", "9"), "1"])


@pytest.mark.parametrize(
    ("level", "is_told"), [("", True), ("warning", True), ("INFO", True), ("debug", True), ("error", False)]
)
def test_the_log(run, tmp_path, level, is_told):
    for number in 0, 1, 3:
        (tmp_path / f"a-{number}.tar").write_bytes((tmp_path / "a.tar").read_bytes())
    done = run("targrep", "-c", "", "a-*.tar", TARSHARDS_LOG=level)
    assert done.stdout == "24\n"
    assert bool(done.stderr) == is_told, done.stderr
