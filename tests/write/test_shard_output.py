"""Shards that many tasks write: each sample counts once, and no job loses a shard of another."""

from __future__ import annotations

import errno
import os
import pickle
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tarshards import IndexedShards, OpenError, ShardWriter, read_samples
from tarshards.storage.claims import Claims
from tarshards.storage.location import Location
from tarshards.write import shard_output
from tarshards.write.shard_output import ShardOutput


def stripped(samples) -> list[dict]:
    return [{name: value for name, value in sample.items() if name != "__url__"} for sample in samples]


def content(samples) -> Counter:
    return Counter(tuple(sorted(sample.items())) for sample in stripped(samples))


def ragged(folder: Path) -> str:
    """60 samples with fields that not all of them have, in shards of 25; return their expression."""
    with ShardWriter(str(folder / "ragged-%04d.tar"), max_samples=25) as writer:
        for i in range(60):
            extra = {"bin": bytes(i)} if i % 3 else {}
            writer.write({"__key__": f"{i:06d}", "txt": f"text {i}", **extra})
    return str(folder / "ragged-*.tar")


def parts_of(urls: str, tasks: int) -> list[list[dict]]:
    """Return the samples that each of *tasks* writes."""
    samples, each = [*IndexedShards(urls)], 60 // tasks
    return [samples[begin : begin + each] for begin in range(0, 60, each)]


def dying(samples: list[dict]):
    yield from samples[:5]
    raise ZeroDivisionError


def write_twice(folder: Path, urls: str, **limits: Any) -> tuple[ShardOutput, list]:
    """Let each task write, every other one twice, and one die halfway; return the output and what was reported."""
    output = ShardOutput(str(folder / "out-{shard:03d}.tar"), **limits)
    written = []
    for number, part in enumerate(parts_of(urls, 5)):
        own = pickle.loads(pickle.dumps(output))
        if number % 2:
            own.write(part)
        if number == 3:
            with pytest.raises(ZeroDivisionError):
                own.write(dying(part))
        written.append(own.write(part))
    return output, written


def test_a_task_that_runs_twice_or_dies_leaves_each_sample_once(tmp_path):
    urls = ragged(tmp_path)
    output, written = write_twice(tmp_path / "copy", urls, max_samples=10)
    assert not [*(tmp_path / "copy").glob("*.tar")], "nothing has its name before all is written"
    shards = output.commit(written)
    assert [Path(shard.url).name for shard in shards] == [f"out-{number:03d}.tar" for number in range(10)]
    names = {path.name for path in (tmp_path / "copy").iterdir()}
    expected = {f"out-{number:03d}.tar{end}" for number in range(10) for end in ("", ".index")}
    assert names == expected | {"out.shards.json"}
    copies = IndexedShards(str(tmp_path / "copy/out.shards.json"))
    assert content(copies) == content(IndexedShards(urls))
    assert stripped(copies) == stripped(IndexedShards(urls)), "in the order of the tasks"


def test_an_output_that_is_given_up_leaves_nothing(tmp_path):
    output, _ = write_twice(tmp_path / "copy", ragged(tmp_path))
    output.abort()
    assert os.listdir(tmp_path / "copy") == []


def test_a_new_output_replaces_shards_of_its_names_or_follows_the_last(tmp_path, caplog):
    urls = ragged(tmp_path)
    for limit in (10, 30):
        output, written = write_twice(tmp_path / "copy", urls, mode="overwrite", max_samples=limit)
        output.commit(written)
    assert "left by an earlier run" in caplog.text
    manifest = str(tmp_path / "copy/out.shards.json")
    assert len(IndexedShards(manifest)) == 60, "the manifest names the new shards alone"
    for path in (tmp_path / "copy").glob("out-00[5-9].tar*"):
        path.unlink()
    output, written = write_twice(tmp_path / "copy", urls, mode="append")
    shards = output.commit(written)
    assert [Path(shard.url).name for shard in shards] == [f"out-{number:03d}.tar" for number in range(5, 10)]
    assert len(IndexedShards(manifest)) == 120


def append(pattern: str, name: str, count: int = 3) -> list[str]:
    """Write *count* shards of one sample each, as a job of its own, and return their URLs."""
    output = ShardOutput(pattern, mode="append")
    samples = [{"__key__": f"{name}{number}", "txt": b"text"} for number in range(count)]
    return [shard.url for shard in output.commit([output.write([sample]) for sample in samples])]


def check_all_there(pattern: str, names: str) -> None:
    keys = [f"{name}{number}" for name in names for number in range(3)]
    urls = Location.of(pattern.replace("{shard:03d}", "*")).glob()
    assert sorted(sample["__key__"] for sample in read_samples(urls)) == sorted(keys)
    manifest = read_samples(pattern.replace("-{shard:03d}.tar", ".shards.json"))
    assert sorted(sample["__key__"] for sample in manifest) == sorted(keys)


STEPS = [(Location, "exists"), (Claims, "take"), (Location, "rename"), (shard_output, "add_to_manifests")]


@pytest.mark.parametrize("pattern", ["{folder}/out-{{shard:03d}}.tar", "memory://two/out-{{shard:03d}}.tar"])
@pytest.mark.parametrize(("owner", "step"), STEPS)
@pytest.mark.parametrize("when", [0, 1, 2, 5])
def test_a_job_that_appends_between_two_steps_of_another_loses_no_shard(
    tmp_path, memory, monkeypatch, pattern, owner, step, when
):
    pattern = pattern.format(folder=tmp_path)
    append(pattern, "a")
    plain, steps = getattr(owner, step), count()

    def interrupted(*given: Any, **options: Any) -> Any:
        if next(steps) == when:
            append(pattern, "c")
        return plain(*given, **options)

    monkeypatch.setattr(owner, step, interrupted)
    append(pattern, "b")
    if next(steps) > when:
        check_all_there(pattern, "abc")


def test_jobs_that_append_at_once_lose_no_shard(tmp_path):
    pattern = str(tmp_path / "out-{shard:03d}.tar")
    with ThreadPoolExecutor(4) as threads:
        found = [*threads.map(partial(append, pattern), "abcd")]
    assert len({url for urls in found for url in urls}) == 12
    check_all_there(pattern, "abcd")
    assert not [*tmp_path.glob(".*")]


def test_appending_fills_gaps_and_passes_what_others_are_writing(tmp_path):
    pattern = str(tmp_path / "out-{shard:03d}.tar")
    append(pattern, "a")
    (tmp_path / "out-001.tar").unlink()
    with ShardWriter(pattern, start=3) as writer:
        writer.write({"__key__": "w", "txt": "written"})
        assert [Path(url).name for url in append(pattern, "b", 2)] == ["out-001.tar", "out-004.tar"]
    keys = [sample["__key__"] for sample in read_samples(str(tmp_path / "*.tar"))]
    assert sorted(keys) == ["a0", "a2", "b0", "b1", "w"]


@pytest.mark.parametrize("folder", ["{tmp_path}/", "memory://new/"])
def test_by_default_no_shard_is_replaced(tmp_path, memory, folder):
    pattern = f"{folder.format(tmp_path=tmp_path)}out-{{shard:03d}}.tar"
    late = ShardOutput(pattern)
    written = [late.write([{"__key__": "late", "txt": b"text"}])]
    append(pattern, "a")
    for begin in (lambda: ShardOutput(pattern), lambda: late.commit(written)):
        with pytest.raises(OpenError, match=r'out-000\.tar: the shard exists; mode="overwrite" replaces it'):
            begin()
    check_all_there(pattern, "a")
    with pytest.raises(ValueError, match="mode= is one of error, append, overwrite, not 'insert'"):
        ShardOutput(pattern, mode="insert")


def test_compressed_shards_have_no_index(tmp_path):
    parts = parts_of(ragged(tmp_path), 2)
    output = ShardOutput(str(tmp_path / "out-{shard:03d}.tar.gz"))
    output.commit([output.write(part) for part in parts])
    assert content(read_samples(str(tmp_path / "out.shards.json"))) == content(IndexedShards(str(tmp_path / "r*.tar")))


def test_an_output_needs_a_number_and_a_place_to_rename(tmp_path):
    with pytest.raises(ValueError, match="shard number"):
        ShardOutput(str(tmp_path / "out.tar"))
    with pytest.raises(OpenError, match="cannot be renamed"):
        ShardOutput("http://127.0.0.1:1/out-{shard}.tar")


def test_outputs_in_a_store_are_renamed_there(tmp_path, memory):
    urls = ragged(tmp_path)
    output = ShardOutput("memory://copy/out-{shard:03d}.tar", max_samples=20)
    output.write(parts_of(urls, 2)[0])
    output.commit([output.write(part) for part in parts_of(urls, 2)])
    assert content(read_samples("memory://copy/out.shards.json")) == content(IndexedShards(urls))
    names = {Path(name).name for name in memory.store}
    expected = {f"out-{number:03d}.tar{end}" for number in range(4) for end in ("", ".index")}
    assert names == expected | {"out.shards.json"}


def test_renaming_replaces_a_file(tmp_path, memory):
    for folder in (f"{tmp_path}/", "memory://renamed/"):
        for name, data in (("a", b"new"), ("b", b"old")):
            with Location(folder + name).open("wb") as stream:
                stream.write(data)
        Location(f"{folder}a").rename(Location(f"{folder}b"))
        assert Location(f"{folder}b").read() == b"new"
        assert not Location(f"{folder}a").exists()
        Location(f"{folder}b").rename(Location(f"{folder}c"), replace=False)
        with Location(f"{folder}b").open("wb") as stream:
            stream.write(b"newer")
        with pytest.raises(OpenError, match="File exists") as caught:
            Location(f"{folder}b").rename(Location(f"{folder}c"), replace=False)
        assert caught.value.errno == errno.EEXIST
        assert (Location(f"{folder}b").read(), Location(f"{folder}c").read()) == (b"newer", b"new")
    with Location("memory://renamed/d.claim").open("wb") as stream:
        stream.write(b"of a writer that was killed")
    with pytest.raises(OpenError, match=r"renamed/d: d\.claim says that another writer makes it, or was killed"):
        Location("memory://renamed/b").rename(Location("memory://renamed/d"), replace=False)
    with pytest.raises(OpenError, match="cannot be renamed"):
        Location("http://127.0.0.1:1/a").rename(Location("http://127.0.0.1:1/b"))
    with pytest.raises(OpenError, match="No such file"):
        Location(f"{tmp_path}/none").rename(Location(f"{tmp_path}/b"))
