"""Every tool and function that writes shards writes them to web servers and to s3 as it does to a folder."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import click
import pytest
from range_server import serving
from tool_lines import WRITING, command_of, make_inputs

from tarshards import ShardWriter, Stream, TarWriter, map_shards, read_samples, write_dataset
from tarshards.errors import OpenError
from tarshards.parallel.process_pool import ProcessPool
from tarshards.storage import tuning
from tarshards.write.reshard import reshard

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
#: These lines write no files of a name that is given: dali's format is of local indexes.
REMOTE = {tool: line.replace("out", "{1}out") for tool, line in WRITING.items() if tool != "tarindex"}
REMOTE["tarreshard"] += " --tmpdir {0}."
REMOTE["tarpcat"] += " --keep-order"


class Place(NamedTuple):
    """A target of writing: its URL, its contents, and how to make it refuse."""

    url: str
    files: Callable[[], dict[str, bytes]]
    refuse: Callable[[], None]
    unfinished: Callable[[], list[str]] = list


@pytest.fixture(params=["http", pytest.param("s3", marks=pytest.mark.interop)])
def place(request, tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "PAUSE_SECONDS", 0.001)
    monkeypatch.chdir(tmp_path)
    if request.param == "s3":
        store = request.getfixturevalue("s3")
        denied = "403 Forbidden", b"<Error><Code>AccessDenied</Code><Message>Forbidden</Message></Error>"

        def look(method, path, query):
            return denied if method in ("PUT", "POST") else None

        yield Place("s3://bucket/", store.objects, lambda: setattr(store, "look", look), store.uploads)
        return
    (folder := tmp_path / "site").mkdir()
    with serving(folder) as site:

        def files():
            return {path.name: path.read_bytes() for path in folder.iterdir()}

        yield Place(f"{site.url}/", files, lambda: setattr(site, "refusal", 403))


def run(tool: str, *arguments: str) -> None:
    command_of(tool).main([*arguments], standalone_mode=False)


def local_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize("tool", REMOTE)
def test_tools_write_what_they_write_locally(place, tmp_path, tool):
    make_inputs(tmp_path)
    (tmp_path / "here").mkdir()
    line = REMOTE[tool]
    run(tool, *line.format("", "here/").split())
    assert (expected := local_files(tmp_path / "here"))
    run(tool, *line.format("", place.url).split())
    if tool in ("tarcard", "tarshow"):  # which print URLs
        assert place.files().keys() == expected.keys()
    else:
        assert place.files() == expected
    assert place.unfinished() == []

    before = place.files()
    with pytest.raises((click.UsageError, OpenError), match="exists; --overwrite replaces it"):
        run(tool, *line.format("", place.url).split())
    assert place.files() == before
    run(tool, *line.format("", place.url).split(), "--overwrite")
    assert place.files().keys() == before.keys()


@pytest.mark.interop
def test_a_tool_that_is_ended_removes_its_parts(s3, tmp_path):
    """SIGTERM, which schedulers send; the parts that were stored would be paid for."""
    with TarWriter(str(tmp_path / "in.tar")) as writer:
        for i in range(40):
            writer.write({"__key__": f"{i:02d}", "bin": bytes(500_000)})
    code = """
from tarshards.cli import tarcat
from tarshards.storage import fsspec_
fsspec_.PART = 5 << 20
tarcat.main.main(["-o", "s3://bucket/out.tar"])
"""
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as tool:
        tool.stdin.write((tmp_path / "in.tar").read_bytes()[:15_000_000])
        tool.stdin.flush()
        while s3.asked("PUT", "partNumber") < 2 and tool.poll() is None:
            time.sleep(0.01)
        tool.terminate()
        assert tool.wait(60) == 143
    assert (s3.objects(), s3.uploads()) == ({}, [])
    assert s3.asked("DELETE", "uploadId") == 1


@pytest.mark.parametrize("tool", REMOTE)
def test_a_refusal_leaves_nothing_and_names_the_url(place, tmp_path, tool):
    make_inputs(tmp_path)
    place.refuse()
    with pytest.raises(OpenError, match=r"403|Forbidden") as caught:
        run(tool, *REMOTE[tool].format("", place.url).split())
    assert caught.value.url.startswith(f"{place.url}out")
    assert (place.files(), place.unfinished()) == ({}, [])


#: tarcheck repairs, tarfirst reads no further than it must, and the others keep what they go on from.
PARTLY = ("tarcheck", "tarfirst", "tarexport", "tarconvert")
READING = [tool for tool, line in REMOTE.items() if "in-" in line and tool not in PARTLY]


@pytest.mark.parametrize("tool", READING)
def test_a_damaged_input_leaves_nothing(place, tmp_path, tool):
    make_inputs(tmp_path, size=2000)
    data = (tmp_path / "in-0.tar").read_bytes()
    (tmp_path / "in-0.tar").write_bytes(data[: len(data) // 2])
    for index in tmp_path.glob("*.index"):
        index.unlink()
    with pytest.raises((ValueError, OSError, SystemExit)):
        run(tool, *REMOTE[tool].format("", place.url).split())
    assert (place.files(), place.unfinished()) == ({}, [])


def test_tarindex_writes_sidecars_and_a_manifest(place, tmp_path):
    make_inputs(tmp_path)
    for i in range(3):
        with TarWriter(f"{place.url}in-{i}.tar") as writer:
            for sample in read_samples(f"in-{i}.tar"):
                writer.write(sample)
    run("tarindex", "-q", f"{place.url}in-{{0..2}}.tar")
    names = {f"in-{i}.tar" for i in range(3)} | {f"in-{i}.tar.index" for i in range(3)} | {"in.shards.json"}
    assert place.files().keys() == names
    assert place.files() == {name: (tmp_path / name).read_bytes() for name in names}
    stream = Stream.from_shards(f"{place.url}in.shards.json", shuffle=True)
    assert len(stream.collect()) == 9
    run("tarcheck", "-q", f"{place.url}in-{{0..2}}.tar")


def double(sample):
    return {**sample, "txt": sample["txt"] * 2}


def break_at_5(samples):
    for sample in samples:
        if sample["__key__"] == "005":
            raise KeyError("five")
        yield sample


def test_functions_write_what_they_write_locally(place, tmp_path):
    make_inputs(tmp_path)
    samples = list(read_samples("in-{0..2}.tar"))
    for target in f"{tmp_path}/here/", place.url:
        os.makedirs(tmp_path / "here", exist_ok=True)
        with ShardWriter(f"{target}a-%d.tar", max_samples=5) as writer:
            for sample in samples:
                writer.write(sample)
        write_dataset([{"txt": f"{i}"} for i in range(20)], f"{target}b-%d.tar", max_bytes=8192)
        map_shards(double, "in-{0..2}.tar", f"{target}c-%d.tar", per_sample=True)
        with ProcessPool(1) as pool:
            reshard("in-{0..2}.tar", f"{target}d-%d.tar", shards=2, executor=pool, tmpdir=str(tmp_path))
    expected, found = local_files(tmp_path / "here"), place.files()
    assert found.keys() == expected.keys()
    assert place.unfinished() == []
    differing = {name for name in found if found[name] != expected[name]}
    assert all(name.endswith((".done", ".report.jsonl")) for name in differing), differing
    rows = map_shards(double, "in-{0..2}.tar", f"{place.url}c-%d.tar", per_sample=True, resume=True)
    assert [row.resumed for row in rows] == [True] * 3


def test_functions_that_fail_leave_whole_shards_only(place, tmp_path):
    make_inputs(tmp_path)
    samples = list(read_samples("in-{0..2}.tar"))

    def write():
        with ShardWriter(f"{place.url}a-%d.tar", max_samples=4, index=False) as writer:
            for sample in break_at_5(samples):
                writer.write(sample)

    with pytest.raises(KeyError):
        write()
    assert list(place.files()) == ["a-0.tar"]
    rows = map_shards(break_at_5, "in-{0..2}.tar", f"{place.url}c-%d.tar", on_error="skip")
    assert ["five" in str(row.error) for row in rows] == [False, True, False]
    assert {name for name in place.files() if name.endswith(".tar")} == {"a-0.tar", "c-0.tar", "c-2.tar"}
    assert place.unfinished() == []


def test_an_interrupted_dataset_resumes_there(place):
    def items(broken):
        for i in range(400):
            if broken and i == 300:
                raise KeyError("broken")
            yield {"txt": f"{i}"}

    for broken in True, False:

        class Items:
            def __iter__(self, broken=broken):
                return items(broken)

        Items.__qualname__ = "Items"
        if broken:
            with pytest.raises(KeyError):
                write_dataset(Items(), f"{place.url}b-%d.tar", max_bytes=1 << 16)
            assert "b-0.tar.writing" in place.files()
            before = {name: data for name, data in place.files().items() if name.endswith(".tar")}
            assert before
        else:
            write_dataset(Items(), f"{place.url}b-%d.tar", max_bytes=1 << 16)
    after = place.files()
    assert before.items() <= after.items()
    assert "b-0.tar.writing" not in after
    assert [sample["txt"] for sample in Stream.from_shards(f"{place.url}b.shards.json").decode()] == [
        f"{i}" for i in range(400)
    ]
