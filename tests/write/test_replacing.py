"""Replacing a shard removes everything that describes the old one: its index, and its counts in manifests."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import range_server
from leftovers import wait_until
from soak import SOAK

from tarshards import (
    OpenError,
    ShardWriter,
    TarWriter,
    map_shards,
    open_shard,
    read_samples,
    reshard,
    write_dataset,
    write_samples,
)
from tarshards.errors import SampleError, ShardIndexError
from tarshards.index.build import build_index
from tarshards.index.key_index import build_key_index
from tarshards.index.manifests import read_manifest
from tarshards.index.refresh import export_indexes
from tarshards.index.sidecar import Index
from tarshards.storage import locks
from tarshards.storage.location import Location
from tarshards.storage.manifest import Shard
from tarshards.verbs.repair import repair_shards
from tarshards.write.split import split_samples

COUNT = 6
OUT = "out-000000.tar"
DERIVED = {"out.shards.keys", f"{OUT}.columns.parquet", f"{OUT}.idx", "out-000000.idx"}  # by others than writers


def samples(cls: int, count: int = COUNT):
    """Samples; those in the middle have the class *cls*, and the archive has one size for classes 0 to 999."""
    return [{"__key__": f"{i:06d}", "cls": cls if 0 < i < count - 1 else 1, "txt": "text"} for i in range(count)]


def the_new():
    return samples(10)


def two_a_record():
    return ({**sample, "bin": bytes(2048)} for sample in the_new())


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The dataset of one old shard with its index, listed by two manifests; and new.tar, to replace it."""
    monkeypatch.chdir(tmp_path)
    with ShardWriter("out-%06d.tar") as writer:
        for sample in samples(9):
            writer.write(sample)
    write_samples(the_new(), "new.tar")
    other = json.loads(Path("out.shards.json").read_text())
    other["shardlist"].append({"url": "new.tar", "nsamples": COUNT})
    Path("all.shards.json").write_text(json.dumps(other | {"name": "of two"}))
    build_key_index(read_manifest("out.shards.json"))
    for format in "dali", "tar.idx":
        list(export_indexes([OUT], format))
    Path(f"{OUT}.columns.parquet").touch()
    assert {*os.listdir()} >= DERIVED
    assert honest() == {OUT: 9, "new.tar": 10}
    return tmp_path


def honest() -> dict[str, int]:
    """Check the files beside the shards in the current folder, and return the highest class in each."""
    classes = {}
    for path in sorted(Path().glob("*.tar")):
        url = str(path)
        classes[url] = max(int(sample["cls"]) for sample in read_samples(url))
        if os.path.exists(f"{url}.index"):
            assert Index.load(url).difference(build_index(url)) is None, url
    for path in Path().glob("*.shards.json"):
        for shard in read_manifest(str(path)):
            if os.path.exists(shard.url):
                index = build_index(shard.url)
                assert shard.samples in (None, len(index)), (path, shard)
                assert shard.size in (None, index.shard_size), (path, shard)
    if classes[OUT] == 10:
        assert not DERIVED & {*os.listdir()}
    return classes


def same(samples):
    yield from samples


def by_shard_writer(**options):
    with ShardWriter("out-%06d.tar", **options) as writer:
        for sample in the_new():
            writer.write(sample)


def by_tar_writer():
    with TarWriter(OUT) as writer:
        for sample in the_new():
            writer.write(sample)


def by_open_shard():
    with open_shard(OUT, "wb") as stream:
        stream.write(Path("new.tar").read_bytes())


def by_executor(function, *arguments, **options):
    with ThreadPoolExecutor(1) as executor:
        function(*arguments, executor=executor, **options)


WRITERS = {
    "TarWriter": by_tar_writer,
    "write_samples": lambda: write_samples(the_new(), OUT),
    "open_shard": by_open_shard,
    "ShardWriter": by_shard_writer,
    "ShardWriter(index=False)": lambda: by_shard_writer(index=False),
    "write_dataset": lambda: by_executor(write_dataset, the_new(), "out-%06d.tar"),
    "map_shards": lambda: by_executor(map_shards, same, "new.tar", OUT, progress=False),
    "reshard": lambda: by_executor(reshard, "new.tar", "out-%06d.tar", shuffle=False),
    "split_samples": lambda: split_samples(the_new(), "out-%06d.tar", overwrite=True),
    "split_samples(index=True)": lambda: split_samples(the_new(), "out-%06d.tar", overwrite=True, index=True),
    "repair_shards": lambda: repair_shards(["new.tar"], OUT),
}
INDEXED = {"ShardWriter", "write_dataset", "map_shards", "reshard", "split_samples(index=True)"}

TOOLS = {
    "tarcat": f"tarcat -q new.tar -o {OUT} --overwrite",
    "tarpcat": f"tarpcat -q new.tar -o {OUT} --overwrite",
    "tarsort": f"tarsort -q new.tar -o {OUT} --overwrite",
    "tarmix": f"tarmix -q new.tar:1 --until {COUNT} -o {OUT} --overwrite",
    "tarmerge": f"tarmerge -q new.tar 'pipe:tarcat -q -f txt new.tar' --conflict first -o {OUT} --overwrite",
    "targrep": f"targrep -q . new.tar -o {OUT} --overwrite",
    "tarproc": f"tarproc -q -c true new.tar -o {OUT} --overwrite",
    "tarproc --resume": f"tarproc -q -c true --resume new.tar -o {OUT} --overwrite",
    "tarcreate": f"tarcreate -q plan.tsv -o {OUT} --overwrite",
    "tarcreate --lines": f"tarcreate -q --lines lines.txt -o {OUT} --overwrite",
    "lines2tar": f"lines2tar -q -k '{{record:06d}}' --field cls classes.txt -o {OUT} --overwrite",
    "tarsplit": "tarsplit -q new.tar -o out --overwrite",
    "tarsplit --index": "tarsplit -q new.tar -o out --overwrite --index",
    "tarreshard": "tarreshard -q -j 1 --keep-order new.tar -o out-%06d.tar --overwrite",
    "tarcheck --repair": f"tarcheck -q new.tar --repair {OUT} --overwrite",
    "quarantine": f"tarcat -q -f missing --on-error quarantine={OUT} new.tar -o /dev/null --overwrite; true",
    "tarjob": f"tarjob --inputs new.tar --outputs {OUT} -- tarcat -q {{1}} -o {{2}} --overwrite",
    "tarfirst": f"tarfirst -q --tar --slice 1: new.tar -o {OUT} --overwrite",
}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_writer_leaves_nothing_of_the_old_shard(writer):
    WRITERS[writer]()
    assert honest()[OUT] == 10
    assert os.path.exists(f"{OUT}.index") == (writer in INDEXED)


@pytest.mark.parametrize("tool", TOOLS)
def test_a_tool_leaves_nothing_of_the_old_shard(tool, path_with_tools):
    rows = ["__key__\tcls\ttxt", *(f"{each['__key__']}\t{each['cls']}\ttext" for each in the_new())]
    Path("plan.tsv").write_text("\n".join(rows) + "\n")
    Path("classes.txt").write_text("".join(f"{each['cls']}\n" for each in the_new()))
    members = [f"{each['__key__']}.cls text:{each['cls']}\n" for each in the_new()]
    Path("lines.txt").write_text("".join(members))
    environment = {**os.environ, "PATH": path_with_tools}
    subprocess.run(["bash", "-c", TOOLS[tool]], check=True, env=environment, timeout=60)
    assert honest()[OUT] == 10
    assert os.path.exists(f"{OUT}.index") == (tool in ("tarsplit --index", "tarreshard"))


@pytest.mark.soak
@pytest.mark.parametrize("writer", WRITERS)
def test_killed_at_any_step_nothing_describes_another_shard(writer, tmp_path, kill_at):
    old = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    # Before a change the files are as after the last one.
    for place in ("before", "after") if SOAK > 1 else ("before",):
        seen = set()
        for step in range(0, 1000, 1 if SOAK > 1 else 3):
            status = kill_at(WRITERS[writer], step, place)
            seen.add(honest()[OUT])
            shutil.rmtree(tmp_path / f"{OUT}.reshard", ignore_errors=True)
            for path in tmp_path.iterdir():
                path.unlink()
            for name, data in old.items():
                (tmp_path / name).write_bytes(data)
            if status == 0:
                break
        assert step >= 2
        assert seen == {9, 10}


def test_a_write_that_fails_keeps_the_index_of_the_old_shard():
    before = {path.name: path.read_bytes() for path in Path().iterdir()}
    writer = TarWriter(OUT)
    writer.write(the_new()[0])
    writer.abort()
    stream = open_shard(OUT, "wb")
    stream.write(b"x")
    stream.abort()
    assert {path.name: path.read_bytes() for path in Path().iterdir()} == before


def test_a_full_disk_at_the_end_keeps_the_index_of_the_old_shard(monkeypatch):
    writer = TarWriter(OUT)
    writer.write(the_new()[0])

    def full() -> None:
        raise OSError(28, "No space left on device")

    writer._stream._finish = full
    with pytest.raises(OpenError, match="No space"):
        writer.close()
    assert honest()[OUT] == 9
    assert os.path.exists(f"{OUT}.index")


def test_what_stands_beside_and_is_not_ours_stays(caplog):
    write_samples(the_new(), "a.tar")
    Path("a.tar.index").write_bytes(b"mine")
    Path("a.idx").write_text("mine")
    Path("b.shards.json").write_text("not a manifest")
    Path("c.shards.json").mkdir()
    with caplog.at_level(logging.WARNING):
        write_samples(samples(11), "a.tar")
    assert Path("a.tar.index").read_bytes() == Path("a.idx").read_bytes() == b"mine"
    assert Path("b.shards.json").read_text() == "not a manifest"
    assert [record.getMessage() for record in caplog.records] == [
        "a.idx: may be of the shard that is replaced; write it again with `tarindex --format`"
    ]


def test_a_manifest_keeps_everything_else():
    text = Path("all.shards.json").read_text()
    Path("all.shards.json").write_text(text.replace('"nsamples"', '"concatenated": true, "mine": 1, "nsamples"'))
    by_tar_writer()
    found = json.loads(Path("all.shards.json").read_text())
    assert found["name"] == "of two"
    others = {"concatenated": True, "mine": 1, "nsamples": COUNT}
    assert found["shardlist"] == [{"url": OUT, "mine": 1}, {"url": "new.tar", **others}]


def test_a_shard_under_a_link_is_replaced_too():
    os.symlink(OUT, "link.tar")
    os.symlink(f"{OUT}.index", "link.tar.index")
    write_samples(the_new(), "link.tar")
    assert honest() == {OUT: 10, "link.tar": 10, "new.tar": 10}
    assert not os.path.lexists("link.tar.index")


@pytest.mark.forks
def test_many_processes_replace_shards_of_one_manifest(tmp_path):
    with ShardWriter("many-%02d.tar", max_samples=3) as writer:
        for sample in samples(9, 24):
            writer.write(sample)
    children = []
    for number in range(8):
        if not (child := os.fork()):
            try:
                write_samples(the_new(), f"many-{number:02d}.tar")
                os._exit(0)
            finally:
                os._exit(1)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 8
    assert all(shard == Shard(shard.url) for shard in read_manifest("many.shards.json"))


def test_who_waits_for_a_stopped_process_that_changes_a_manifest_says_so_and_gives_up(monkeypatch, caplog):
    monkeypatch.setattr(locks, "LONG_WAIT", 0.1)
    descriptor = os.open(".", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with ThreadPoolExecutor(1) as executor:
        writing = executor.submit(by_tar_writer)
        waiting = (
            ": locked by a program that changes a manifest or catalog in it, or has been stopped meanwhile; waiting"
        )
        wait_until(lambda: any(record.getMessage().endswith(waiting) for record in list(caplog.records)))
        os.close(descriptor)
        writing.result(60)
    assert honest()[OUT] == 10
    monkeypatch.setattr(locks, "MOST_WAIT", 0.2)
    descriptor = os.open(".", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    for write in by_tar_writer, by_shard_writer:
        with pytest.raises(OpenError, match=r"given up after 0\.2 s"):
            write()
    os.close(descriptor)


def test_a_remote_index_is_removed():
    url = "memory://replacing/a.tar"
    write_samples(samples(9), url)
    build_index(url).save(url)
    write_samples(the_new(), url)
    with pytest.raises(ShardIndexError, match="no index found"):
        Index.load(url)
    write_samples(the_new(), url)  # nothing to remove is no error


def shard_writer(pattern: str):
    with ShardWriter(pattern, max_samples=2) as writer:
        for number, sample in enumerate(the_new()):
            if number == 4:
                raise KeyError
            writer.write(sample)


def broken_reshard(pattern: str):
    write_samples(the_new(), "again.tar")  # with the same keys, which is found when the new shards are written
    with ThreadPoolExecutor(1) as executor:
        reshard("new.tar::again.tar", pattern, executor=executor, shuffle=False, max_samples=6 + 1, tmpdir=".")


@pytest.mark.parametrize("write", [shard_writer, broken_reshard])
@pytest.mark.parametrize("folder_of", ["memory://replaced/", ""])
def test_the_manifest_of_a_run_that_fails_is_not_the_old_one(write, folder_of):
    pattern = f"{folder_of}set-%d.tar"
    with ShardWriter(pattern, max_samples=2) as writer:
        for sample in samples(9):
            writer.write(sample)
    assert len(read_manifest(f"{folder_of}set.shards.json")) == 3
    with pytest.raises((KeyError, SampleError)):
        write(pattern)
    assert read_manifest(f"{folder_of}set.shards.json") == []


@pytest.fixture
def site(tmp_path):
    with range_server.serving(tmp_path / "site") as site:
        yield site


def stored(site: range_server.Site) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in site.folder.iterdir()}


@pytest.mark.parametrize("missing", [404, 403])
def test_an_index_on_a_web_server_is_removed(site, missing):
    site.missing = missing  # of an object that we may not see, a store says 403
    url = f"{site.url}/a.tar"
    write_samples(samples(9), url)
    Index.load(OUT).save(url)
    assert sorted(stored(site)) == ["a.tar", "a.tar.index"]
    write_samples(the_new(), url)
    assert stored(site) == {"a.tar": Path("new.tar").read_bytes()}


def test_an_index_that_a_web_server_keeps_is_an_error_before_the_shard_is_replaced(site):
    url = f"{site.url}/a.tar"
    write_samples(samples(9), url)
    Index.load(OUT).save(url)
    before, site.refusal = stored(site), 405
    with pytest.raises(OpenError, match=r"a\.tar\.index: .*405"):
        write_samples(the_new(), url)
    assert stored(site) == before


def test_a_location_is_removed_once(tmp_path):
    for url in (str(tmp_path / "x"), "memory://replacing/x"):
        location = Location.of(url)
        location.remove()
        with location.open("wb") as stream:
            stream.write(b"x")
        location.remove()
        assert not location.exists()
    with pytest.raises(OpenError, match="cannot be removed"):
        Location.of("pipe:cat").remove()


def test_names_are_taken_as_they_are():
    for name in ("a b%20.tar", "ü.tar", "x'y.tar"):
        shutil.copy(OUT, name)
        build_index(name).save(name)
        write_samples(the_new(), name)
        assert not os.path.exists(f"{name}.index")


def by_pattern(**options):
    with ShardWriter("many-%02d.tar", max_samples=2, **options) as writer:
        for sample in the_new():
            writer.write(sample)


@pytest.mark.parametrize(
    "write",
    [
        by_pattern,
        lambda: by_pattern(index=False),
        lambda: by_executor(write_dataset, two_a_record(), "many-%02d.tar", max_bytes=10240),
        lambda: by_executor(reshard, "new.tar", "many-%02d.tar", max_samples=2),
        lambda: by_executor(map_shards, same, ["new.tar"] * 3, "many-%02d.tar", progress=False),
        lambda: split_samples(the_new(), "many-%02d.tar", max_samples=2, overwrite=True),
        lambda: subprocess.run(
            ["tarsplit", "-q", "-n", "2", "new.tar", "-o", "many-%02d.tar", "--overwrite"], check=True
        ),
    ],
)
def test_shards_beyond_the_last_are_named_and_kept(write, caplog, capfd, monkeypatch, path_with_tools):
    monkeypatch.setenv("PATH", path_with_tools)
    with ShardWriter("many-%02d.tar", max_samples=2) as writer:
        for sample in samples(9, 10):
            writer.write(sample)
    assert caplog.records == []
    write()
    told = [record.getMessage() for record in caplog.records] or capfd.readouterr().err.splitlines()
    assert told == [
        "many-03.tar to many-04.tar: left by an earlier run, beyond the last shard that is written now; remove what is "
        "not of this dataset"
    ]
    assert [path.name for path in sorted(Path().glob("many-*.tar"))] == [f"many-0{number}.tar" for number in range(5)]
    assert {name: cls for name, cls in honest().items() if name.startswith("many")} == {
        **{f"many-0{number}.tar": 10 for number in range(3)},
        **{f"many-0{number}.tar": 9 for number in (3, 4)},
    }


def test_without_samples_all_old_shards_are_left(caplog):
    with ShardWriter("out-%06d.tar"):
        pass
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [OUT]
    for name in DERIVED:
        os.unlink(name)
    caplog.clear()
    writer = ShardWriter("out-%06d.tar")
    writer.write(the_new()[0])
    writer.close()
    writer.close()
    assert caplog.records == []
