"""The first mistakes: each is an error of one line that says what to do, and writes nothing."""

from __future__ import annotations

import os
import subprocess

import pytest
from range_server import serving
from with_torch import ShardDataset, ShardLoader

from tarshards import ArrayLoader, IndexedShards, Stream, readers, write_samples
from tarshards.errors import OpenError, TarshardsError, UrlError
from tarshards.index.refresh import refresh_indexes, verify_indexes
from tarshards.verbs.mix import Source, parse_sources
from tarshards.verbs.repair import repair_shards

SAMPLES = [{"__key__": f"s{i}", "cls": i, "txt": f"text {i}\n"} for i in range(4)]
MISSING = "No such file or directory|404"


@pytest.fixture
def shell(tmp_path, path_with_tools):
    """Return a function that runs a line of bash in a folder with a.tar, the empty folder d, and photo.jpg."""
    write_samples(SAMPLES, str(tmp_path / "a.tar"))
    (tmp_path / "d").mkdir()
    (tmp_path / "photo.jpg").write_bytes(b"\xff\xd8" * 1000)

    def run(line: str) -> subprocess.CompletedProcess:
        environment = {**os.environ, "PATH": path_with_tools}
        command = ["bash", "-uo", "pipefail", "-c", line]
        options = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
        return subprocess.run(command, cwd=tmp_path, env=environment, **options)

    return run


FOLDER = "d: Is a directory; name the shards in it, as 'd/*.tar'"


@pytest.mark.parametrize(
    ("line", "code", "error"),
    [
        ("tarcreate d -o o.tar", 2, "d is a folder: read the files in it with --dir d"),
        ("tarmix a.tar:x -o o.tar", 2, "the weight 'x' is not a number: write SHARDS:WEIGHT, such as a.tar:0.7"),
        ("tarmix 'a-{0..2}.tar:x' a.tar:1 -o o.tar", 2, "the weight 'x' is not a number"),
        ("tarmix a.tar: -o o.tar", 2, "the weight '' is not a number"),
        ("tarmix a.tar:-1 -o o.tar", 2, "the weight '-1' is not a number"),
        ("tarshow d", 1, FOLDER),
        ("tarcat d -o o.tar", 1, FOLDER),
        ("tarsort d -o o.tar", 1, FOLDER),
        ("tarmix d -o o.tar", 1, FOLDER),
        ("tarcheck d", 1, FOLDER),
        ("tarindex d", 1, FOLDER),
        ("lines2tar d -o o.tar", 1, FOLDER),
        ("tarcat a.tar -o d", 2, "d is a folder; name a file in it"),
        ("tarcat a.tar --overwrite -o d", 2, "d is a folder; name a file in it"),
        ("tarsort a.tar -o a.tar", 2, "a.tar exists; --overwrite replaces it"),
        ("tarcat photo.jpg -o o.tar", 1, "photo.jpg: offset 0: an image, not a tar archive"),
        (
            "tarcat missing-{0..3}.tar -o o.tar",
            1,
            "missing-0.tar: No such file or directory; none of the 4 shards is there",
        ),
        ("tarcat 'missing-{0..3}.tar' -o o.tar", 1, "none of the 4 shards is there"),
        ("tarcat a.tar missing.tar -o o.tar", 1, "missing.tar: No such file or directory"),
        ("tarcat 'missing/*.tar' -o o.tar", 1, "missing/*.tar: no file matches: there is no folder missing"),
        ("tarcat 'missing-*.tar' -o o.tar", 1, "missing-*.tar: no file matches"),
        ("targrep a.tar -o o.tar", 2, "a.tar is taken as the PATTERN, and a tar read from stdin: write PATTERN a.tar"),
        ("tarsplit a.tar", 2, "Missing option '-o' / '--output'"),
        ("tarindex --check missing.tar", 1, "missing.tar: No such file or directory"),
        ("tarcheck --repair o.tar missing.tar", 1, "missing.tar: no such file, so o.tar is not written"),
        ("tarcheck --repair o.tar a.tar missing.tar", 1, "missing.tar: no such file, so o.tar is not written"),
        ("tarcheck --repair - a.tar", 2, "neither SHARDS nor FILE can be -"),
    ],
)
def test_a_first_mistake_is_told_in_one_line(shell, tmp_path, line, code, error):
    done = shell(line)
    assert done.returncode == code, done.stderr
    told = (done.stderr + done.stdout if "tarcheck" in line else done.stderr).splitlines()
    assert sum(error in text for text in told) == 1, done.stderr
    assert not any(text.startswith("Traceback") for text in told)
    assert sorted(os.listdir(tmp_path)) == ["a.tar", "d", "photo.jpg"]


@pytest.mark.parametrize(
    "line", ["tarcat -o o.tar", "tarshow", "targrep x -l", "tarcheck", "tarproc -c true -o o.tar", "tarshow -"]
)
def test_no_tar_is_read_from_a_terminal(shell, line):
    done = shell(f"timeout 20 script -qec '{line}' /dev/null")
    assert done.returncode == 2
    assert "stdin is a terminal: name SHARDS, or pipe a tar into it" in done.stdout


def test_a_pattern_may_look_like_a_name(shell):
    assert shell("echo a.tar >x.txt; tar cf b.tar x.txt; targrep -l -e a.tar <b.tar").stdout == "x\n"
    assert shell("targrep -l missing.tar <b.tar").returncode == 1


def test_weights_and_urls():
    for text in ("s3://bucket/a.tar", "a.tar::b.tar", "pipe:cat a.tar", "http://host:80/a.tar", "file:a.tar", "a:b"):
        assert parse_sources([text]) == [Source(text)]


def indexed(folder) -> None:
    for number in 0, 2:
        write_samples(SAMPLES, f"{folder}/a-{number}.tar")
    list(refresh_indexes([f"{folder}/a-{number}.tar" for number in (0, 2)]))


@pytest.fixture(params=["local", "http"])
def place(request, tmp_path):
    """Where a-0.tar and a-2.tar lie, with their indexes."""
    indexed(tmp_path)
    if request.param == "local":
        yield str(tmp_path)
    else:
        with serving(tmp_path) as server:
            yield server.url


READ = {
    "streamed": lambda urls: list(Stream.from_shards(urls, index=False)),
    "auto": lambda urls: list(Stream.from_shards(urls)),
    "planned": lambda urls: list(Stream.from_shards(urls, index=True)),
    "tail": lambda urls: list(Stream.from_shards(urls, tail="exact")),
    "IndexedShards": IndexedShards,
    "ShardLoader": lambda urls: list(ShardLoader(ShardDataset(urls), 2)),
    "ArrayLoader": lambda urls: list(ArrayLoader(ShardDataset(urls), 2, fields={"cls": readers.integer()})),
}


@pytest.mark.parametrize("shards", ["a-{0..2}.tar", "none-{0..2}.tar"])
@pytest.mark.parametrize("reading", READ)
def test_a_missing_shard_is_said_to_be_missing(place, reading, shards):
    gone = "a-1" if shards.startswith("a") else "none-0"
    with pytest.raises(OpenError, match=MISSING) as caught:
        READ[reading](f"{place}/{shards}")
    assert caught.value.url == f"{place}/{gone}.tar"


@pytest.mark.parametrize("work", [refresh_indexes, verify_indexes])
def test_the_index_of_a_missing_shard_is_not_what_is_missing(place, work):
    (outcome,) = work([f"{place}/a-1.tar"])
    assert isinstance(outcome.error, OpenError)
    assert outcome.error.url == f"{place}/a-1.tar"


def test_an_index_without_its_shard(tmp_path):
    indexed(tmp_path)
    (tmp_path / "a-2.tar").unlink()
    for reading in READ:
        with pytest.raises(OpenError, match=r"a-2\.tar: No such file"):
            READ[reading](f"{tmp_path}/a-{{0,2}}.tar")


def test_repairing_what_is_missing_leaves_nothing(tmp_path):
    write_samples(SAMPLES, str(tmp_path / "a.tar"))
    with pytest.raises(OpenError, match="no such file"):
        repair_shards([str(tmp_path / "a.tar"), str(tmp_path / "b.tar")], str(tmp_path / "out.tar"))
    assert os.listdir(tmp_path) == ["a.tar"]


def test_a_pattern_of_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(UrlError, match="no file matches: there is no folder"):
        list(Stream.from_shards(f"{tmp_path}/none/*.tar"))
    with pytest.raises(TarshardsError, match=r"no file matches$"):
        list(Stream.from_shards(f"{tmp_path}/*.tar"))
