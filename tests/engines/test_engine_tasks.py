"""What tasks of engines read and write, without an engine: ranges that are all samples, and shards that count once."""

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

import numpy as np
import pytest

pa = pytest.importorskip("pyarrow", reason="needs pyarrow")

pytestmark = pytest.mark.interop

from tarshards import IndexedShards, OpenError, SampleError, ShardIndexError, ShardWriter, read_samples  # noqa: E402
from tarshards.engines import tasks  # noqa: E402
from tarshards.engines.tasks import ShardOutput, ShardTable, samples_of  # noqa: E402
from tarshards.index.refresh import refresh_indexes  # noqa: E402
from tarshards.storage.claims import Claims  # noqa: E402
from tarshards.storage.expressions import find_shards  # noqa: E402
from tarshards.storage.location import Location  # noqa: E402


def rows_of(table: ShardTable, tasks: int) -> list[dict]:
    parts = [pickle.loads(pickle.dumps(part)) for part in table.ranges(tasks)]
    return [row for part in parts for each in part.read() for row in each.to_pylist()]


def stripped(samples) -> list[dict]:
    return [{name: value for name, value in sample.items() if name != "__url__"} for sample in samples]


def content(samples) -> Counter:
    return Counter(tuple(sorted(sample.items())) for sample in stripped(samples))


def ragged(folder: Path, count: int = 60, each: int = 25, name: str = "ragged") -> str:
    """Samples with fields that not all of them have, in shards of 25; return their expression."""
    with ShardWriter(str(folder / f"{name}-%04d.tar"), max_samples=each) as writer:
        for i in range(count):
            extra = {"bin": bytes(i)} if i % 3 else {}
            writer.write({"__key__": f"{i:06d}", "txt": f"text {i}", **extra})
    return str(folder / f"{name}-*.tar")


@pytest.mark.parametrize("tasks", [1, 2, 7, 59, 60, 1000])
def test_ranges_are_all_samples_in_their_order_with_true_counts(tmp_path, tasks):
    urls = ragged(tmp_path)
    table = ShardTable(urls)
    parts = table.ranges(tasks)
    assert len(parts) == min(tasks, 60)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    expected = stripped(IndexedShards(urls))
    assert [{k: v for k, v in row.items() if v is not None} for row in rows_of(table, tasks)] == expected
    begin = 0
    for part in parts:
        own = expected[begin : (begin := begin + len(part))]
        assert part.size == sum(len(value) for sample in own for name, value in sample.items() if name != "__key__")
    assert sum(part.size for part in parts) == table.size


def test_a_large_shard_is_read_by_many_tasks_and_small_ones_by_one(tmp_path):
    table = ShardTable(ragged(tmp_path, each=60))
    assert [len(part.shards) for part in table.ranges(4)] == [1, 1, 1, 1]
    table = ShardTable(ragged(tmp_path, each=5, name="small"))
    assert [len(part.shards) for part in table.ranges(2)] == [6, 6]


def test_only_the_fields_that_are_named_are_read_and_counted(tmp_path):
    table = ShardTable(ragged(tmp_path), fields="txt")
    assert table.schema.names == ["__key__", "txt"]
    assert table.size == sum(len(f"text {i}") for i in range(60))
    assert set(rows_of(table, 3)[0]) == {"__key__", "txt"}


def test_tables_are_of_mebibytes(tmp_path):
    with ShardWriter(str(tmp_path / "large-%d.tar")) as writer:
        for i in range(40):
            writer.write({"__key__": f"{i}", "bin": bytes(1 << 20)})
    (part,) = ShardTable(str(tmp_path / "large-0.tar")).ranges(1)
    assert [len(table) for table in part.read()] == [16, 16, 8]


def test_links_count_with_the_content_that_they_stand_for(tmp_path):
    import tarfile
    from io import BytesIO

    with tarfile.open(tmp_path / "links.tar", "w") as tar:
        first = tarfile.TarInfo("a.bin")
        first.size = 1000
        tar.addfile(first, BytesIO(bytes(1000)))
        link = tarfile.TarInfo("b.bin")
        link.type, link.linkname = tarfile.LNKTYPE, "a.bin"
        tar.addfile(link)
    list(refresh_indexes([str(tmp_path / "links.tar")]))
    table = ShardTable(str(tmp_path / "links.tar"))
    assert [part.size for part in table.ranges(2)] == [1000, 1000]
    assert [len(row["bin"]) for row in rows_of(table, 2)] == [1000, 1000]


def test_decoded_columns_have_the_types_of_their_values(tmp_path):
    with ShardWriter(str(tmp_path / "typed-%d.tar")) as writer:
        for i in range(30):
            array = np.full((2, 3), i, np.int16)
            writer.write({"__key__": f"{i}", "cls": i, "txt": f"text {i}", "x.npy": array, "jpg": b"\xff\xd8"})
    table = ShardTable(str(tmp_path / "typed-0.tar"), decoded=True)
    kinds = {field.name: field.type for field in table.schema}
    assert (kinds["cls"], kinds["txt"], kinds["jpg"]) == (pa.int64(), pa.string(), pa.binary())
    (part,) = table.ranges(1)
    (read,) = part.read()
    assert read.schema == table.schema
    assert read.column("cls").to_pylist() == list(range(30))
    back = list(samples_of(read))
    assert (back[7]["x.npy"] == np.full((2, 3), 7)).all()
    assert back[7]["x.npy"].dtype == np.int16


def test_a_shard_that_is_replaced_meanwhile_is_an_error_not_data(tmp_path):
    table = ShardTable(ragged(tmp_path))
    parts = table.ranges(2)
    with ShardWriter(str(tmp_path / "ragged-%04d.tar"), max_samples=25) as writer:
        for i in range(60):
            writer.write({"__key__": f"{59 - i:06d}", "txt": "other"})
    with pytest.raises(ShardIndexError):
        list(parts[0].read())


def test_shards_without_index_are_refused(make_shards):
    with pytest.raises(ShardIndexError, match="tarindex"):
        ShardTable(make_shards(2))


def test_workers_in_another_folder_find_the_shards_and_their_index_dir(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with ShardWriter("plain-%04d.tar", max_samples=5, index=False) as writer:
        for i in range(10):
            writer.write({"__key__": f"{i}", "txt": f"{i}"})
    list(refresh_indexes(find_shards("plain-*.tar", index_dir="idx")))
    (part,) = ShardTable("plain-*.tar", index_dir="idx").ranges(1)
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert [row["txt"] for each in part.read() for row in each.to_pylist()] == [b"%d" % i for i in range(10)]


def write_twice(folder: Path, table: ShardTable, **limits: Any) -> tuple[ShardOutput, list]:
    """Let each task write, every other one twice, and one die halfway; return the output and what was reported."""
    output = ShardOutput(str(folder / "out-{shard:03d}.tar"), **limits)
    written = []
    for number, part in enumerate(table.ranges(5)):
        own = pickle.loads(pickle.dumps(output))
        if number % 2:
            own.write(part.read())
        if number == 3:
            with pytest.raises(ZeroDivisionError):
                own.write(1 / 0 if row == 5 else each.slice(row, 1) for each in part.read() for row in range(6))
        written.append(own.write(part.read()))
    return output, written


def test_a_task_that_runs_twice_or_dies_leaves_each_sample_once(tmp_path):
    urls = ragged(tmp_path)
    output, written = write_twice(tmp_path / "copy", ShardTable(urls), max_samples=10)
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
    output, _ = write_twice(tmp_path / "copy", ShardTable(ragged(tmp_path)))
    output.abort()
    assert os.listdir(tmp_path / "copy") == []


def test_a_new_output_replaces_shards_of_its_names_or_follows_the_last(tmp_path, caplog):
    table = ShardTable(ragged(tmp_path))
    for limit in (10, 30):
        output, written = write_twice(tmp_path / "copy", table, mode="overwrite", max_samples=limit)
        output.commit(written)
    assert "left by an earlier run" in caplog.text
    manifest = str(tmp_path / "copy/out.shards.json")
    assert len(IndexedShards(manifest)) == 60, "the manifest names the new shards alone"
    for path in (tmp_path / "copy").glob("out-00[5-9].tar*"):
        path.unlink()
    output, written = write_twice(tmp_path / "copy", table, mode="append")
    shards = output.commit(written)
    assert [Path(shard.url).name for shard in shards] == [f"out-{number:03d}.tar" for number in range(5, 10)]
    assert len(IndexedShards(manifest)) == 120


def append(pattern: str, name: str, count: int = 3) -> list[str]:
    """Write *count* shards of one sample each, as a job of its own, and return their URLs."""
    output = ShardOutput(pattern, mode="append")
    tables = [pa.table({"__key__": [f"{name}{number}"], "txt": [b"text"]}) for number in range(count)]
    return [shard.url for shard in output.commit([output.write([table]) for table in tables])]


def check_all_there(pattern: str, names: str) -> None:
    keys = [f"{name}{number}" for name in names for number in range(3)]
    urls = Location.of(pattern.replace("{shard:03d}", "*")).glob()
    assert sorted(sample["__key__"] for sample in read_samples(urls)) == sorted(keys)
    manifest = read_samples(pattern.replace("-{shard:03d}.tar", ".shards.json"))
    assert sorted(sample["__key__"] for sample in manifest) == sorted(keys)


STEPS = [(Location, "exists"), (Claims, "take"), (Location, "rename"), (tasks, "add_to_manifests")]


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
    written = [late.write([pa.table({"__key__": ["late"], "txt": [b"text"]})])]
    append(pattern, "a")
    for begin in (lambda: ShardOutput(pattern), lambda: late.commit(written)):
        with pytest.raises(OpenError, match=r'out-000\.tar: the shard exists; mode="overwrite" replaces it'):
            begin()
    check_all_there(pattern, "a")
    with pytest.raises(ValueError, match="mode= is one of error, append, overwrite, not 'insert'"):
        ShardOutput(pattern, mode="insert")


def test_compressed_shards_have_no_index(tmp_path):
    table = ShardTable(ragged(tmp_path))
    output = ShardOutput(str(tmp_path / "out-{shard:03d}.tar.gz"))
    output.commit([output.write(part.read()) for part in table.ranges(2)])
    assert content(read_samples(str(tmp_path / "out.shards.json"))) == content(IndexedShards(str(tmp_path / "r*.tar")))


def test_rows_need_a_key_and_outputs_a_number_and_a_place_to_rename(tmp_path):
    with pytest.raises(SampleError, match="a row needs a column __key__; there are txt, cls"):
        list(samples_of(pa.table({"txt": [b"a"], "cls": [1]})))
    with pytest.raises(ValueError, match="shard number"):
        ShardOutput(str(tmp_path / "out.tar"))
    with pytest.raises(OpenError, match="cannot be renamed"):
        ShardOutput("http://127.0.0.1:1/out-{shard}.tar")


def test_outputs_in_a_store_are_renamed_there(tmp_path, memory):
    urls = ragged(tmp_path)
    output = ShardOutput("memory://copy/out-{shard:03d}.tar", max_samples=20)
    output.write(ShardTable(urls).ranges(2)[0].read())
    output.commit([output.write(part.read()) for part in ShardTable(urls).ranges(2)])
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
