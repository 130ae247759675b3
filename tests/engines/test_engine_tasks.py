"""What tasks of engines read and write, without an engine: ranges that are all samples, and rows that are samples."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

pa = pytest.importorskip("pyarrow", reason="needs pyarrow")

pytestmark = pytest.mark.interop

from tarshards import IndexedShards, SampleError, ShardIndexError, ShardWriter  # noqa: E402
from tarshards.engines.tasks import ShardTable, samples_of  # noqa: E402
from tarshards.index.refresh import refresh_indexes  # noqa: E402
from tarshards.storage.expressions import find_shards  # noqa: E402
from tarshards.write.shard_output import ShardOutput  # noqa: E402


def rows_of(table: ShardTable, tasks: int) -> list[dict]:
    parts = [pickle.loads(pickle.dumps(part)) for part in table.ranges(tasks)]
    return [row for part in parts for each in part.read() for row in each.to_pylist()]


def stripped(samples) -> list[dict]:
    return [{name: value for name, value in sample.items() if name != "__url__"} for sample in samples]


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
    assert [len(table) for table in part.read()] == [2] * 20


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
    back = list(samples_of([read]))
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


def test_a_task_that_runs_twice_leaves_each_row_once(tmp_path):
    urls = ragged(tmp_path)
    output = ShardOutput(str(tmp_path / "copy/out-{shard:03d}.tar"))
    written = []
    for part in ShardTable(urls).ranges(5):
        own = pickle.loads(pickle.dumps(output))
        own.write(samples_of(part.read()))
        written.append(own.write(samples_of(part.read())))
    output.commit(written)
    assert stripped(IndexedShards(str(tmp_path / "copy/out.shards.json"))) == stripped(IndexedShards(urls))


def test_rows_need_a_key():
    with pytest.raises(SampleError, match="a row needs a column __key__; there are txt, cls"):
        list(samples_of([pa.table({"txt": [b"a"], "cls": [1]})]))
