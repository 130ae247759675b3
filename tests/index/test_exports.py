"""Exports are read by those they are for as we read the shards."""

from __future__ import annotations

import os
import re
import sqlite3
import struct
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tarshards import read_samples, write_samples
from tarshards.errors import ShardIndexError, UrlError
from tarshards.index.build import build_index
from tarshards.index.energon import export_energon
from tarshards.index.exports import pack_dali, write_dali, write_offsets
from tarshards.index.manifests import Writing, update_manifests
from tarshards.storage.manifest import Shard

PARTS = """SELECT part_name, content_byte_offset, content_byte_size FROM sample_parts
    WHERE tar_file_id = ? AND sample_index = ?"""


def sample(i: int, key: str = "s") -> dict:
    return {"__key__": f"{key}{i:03d}", "bin": os.urandom(i * 37), "cls": i}


@pytest.fixture
def shards(tmp_path) -> list[str]:
    """Three shards: plain ones, and one of names that need pax headers."""
    urls = [str(tmp_path / f"{name}.tar") for name in ("a-0", "a-1", "long")]
    for number, url in enumerate(urls):
        key = "n" * 150 if url.endswith("long.tar") else f"s{number}-"
        write_samples((sample(i, key) for i in range(1, 11)), url)
    return urls


@pytest.mark.interop
def test_dali_reads_the_same_samples(shards):
    """Long names too, which its own wds2idx gets wrong."""
    pytest.importorskip("nvidia.dali", reason="nvidia-dali-cuda120 is not installed")
    import numpy as np
    from nvidia.dali import fn, pipeline_def

    indexes = [write_dali(build_index(url), url, None) for url in shards]
    assert indexes == [url.replace(".tar", ".idx") for url in shards]

    @pipeline_def(batch_size=10, num_threads=1, device_id=None)
    def pipeline():
        options = {"ext": ["cls", "bin"], "missing_component_behavior": "error"}
        return tuple(fn.readers.webdataset(paths=shards, index_paths=indexes, **options))

    pipe = pipeline()
    pipe.build()
    read = []
    for _ in shards:
        columns = [[np.array(value).tobytes() for value in column] for column in pipe.run()]
        read += list(zip(*columns))
    assert read == [(sample["cls"], sample["bin"]) for sample in read_samples(shards)]


@pytest.mark.interop
def test_the_dali_index_is_that_of_wds2idx(shards, tmp_path):
    pytest.importorskip("nvidia.dali", reason="nvidia-dali-cuda120 is not installed")
    program = Path(sys.executable).with_name("wds2idx")
    for url in shards[:2]:
        subprocess.run([program, url, str(tmp_path / "theirs")], check=True, capture_output=True)
        assert pack_dali(build_index(url), url) == (tmp_path / "theirs").read_text()


def test_the_dali_index_in_full(tmp_path):
    url = str(tmp_path / "a.tar")
    write_samples([{"__key__": "d/a", "jpg": b"12345", "seg.png": b""}, {"__key__": "b", "jpg": b"1"}], url)
    text = "v1.2 2\njpg 512 5 d/a.jpg seg.png 1536 0 d/a.seg.png\njpg 2048 1 b.jpg\n"
    assert pack_dali(build_index(url), url) == text


@pytest.mark.parametrize("name", ["a b.txt", "a\tb.txt", "a.t xt", "a\nb.txt", "a."])
def test_names_that_break_a_dali_index_are_refused(tmp_path, name):
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        archive.addfile(tarfile.TarInfo(name))
    url = str(tmp_path / "a.tar")
    with pytest.raises(ShardIndexError, match=r"DALI misreads names with white space.*rekey") as caught:
        pack_dali(build_index(url), url)
    assert caught.value.key == name.partition(".")[0]


def first_headers(path: str) -> tuple[list[int], int]:
    """Where the first headers of the samples lie by Python's tarfile, and where the last member ends."""
    starts, key = [], None
    with tarfile.open(path) as archive:
        for member in archive:
            if member.isreg() and "." in member.name:
                if member.name.partition(".")[0] != key:
                    starts.append(member.offset)
                    key = member.name.partition(".")[0]
                end = member.offset_data + -(-member.size // 512) * 512
    return starts, end


@pytest.fixture
def mixed(tmp_path) -> str:
    """A shard of GNU tar with long names, folders, and a file that is in no sample."""
    folder = tmp_path / "files"
    for name in ("a.txt", "a.cls", "n" * 120 + ".txt", "noext", "z.txt", "z.cls"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name * 30)
    listed = ["a.txt", "a.cls", ".", "n" * 120 + ".txt", "noext", ".", "z.txt", "z.cls", "."]
    command = ["tar", "--no-recursion", "--format=gnu", "-cf", "../mixed.tar", *listed]
    subprocess.run(command, cwd=folder, check=True)
    return str(tmp_path / "mixed.tar")


def test_offsets_are_those_of_the_first_headers(shards, mixed):
    for url in (*shards, mixed):
        name = write_offsets(build_index(url), url, None)
        assert name == f"{url}.idx"
        starts, end = first_headers(url)
        assert Path(name).read_bytes() == struct.pack(f"<{len(starts) + 1}Q", *starts, end)


def test_offsets_of_a_shard_without_samples(tmp_path):
    (tmp_path / "a.tar").write_bytes(bytes(1024))
    url = str(tmp_path / "a.tar")
    assert Path(write_offsets(build_index(url), url, None)).read_bytes() == bytes(8)


def test_exports_into_another_folder(shards, tmp_path):
    (tmp_path / "out").mkdir()
    index = build_index(shards[0])
    assert write_dali(index, shards[0], f"{tmp_path}/out") == f"{tmp_path}/out/a-0.idx"
    assert write_offsets(index, shards[0], f"{tmp_path}/out/") == f"{tmp_path}/out/a-0.tar.idx"
    name = write_offsets(index, shards[0], f"{tmp_path}/none", Writing(dry_run=True))
    assert name == f"{tmp_path}/none/a-0.tar.idx"
    assert sorted(os.listdir(tmp_path / "out")) == ["a-0.idx", "a-0.tar.idx"]


def test_energons_tables_give_the_same_samples(shards, mixed, tmp_path):
    """What megatron-energon does with them: a part by its number, a sample by reading its range as a tar."""
    urls = [*shards, mixed]
    written = list(export_energon(urls))
    meta = tmp_path / ".nv-meta"
    names = ["index.sqlite", "index.uuid", ".info.json", "split.yaml", "dataset.yaml"]
    assert written == [*(f"{url}.idx" for url in urls), *(str(meta / name) for name in names)]
    expected = [(number, sample) for number, url in enumerate(urls) for sample in read_samples(url)]
    with sqlite3.connect(meta / "index.sqlite") as database:
        rows = database.execute("SELECT * FROM samples ORDER BY tar_file_id, sample_index").fetchall()
        assert len(rows) == len(expected)
        for (number, key, index, offset, size), (shard, sample) in zip(rows, expected):
            assert (number, key) == (shard, sample["__key__"])
            data = Path(urls[number]).read_bytes()
            parts = {name: data[at : at + length] for name, at, length in database.execute(PARTS, (number, index))}
            assert parts == {field: value for field, value in sample.items() if not field.startswith("__")}
            with tarfile.open(urls[number]) as archive:
                archive.offset = offset
                archive.fileobj.seek(offset)
                member = archive.tarinfo.fromtarfile(archive)
            assert member.name.partition(".")[0] == key
            assert offset < member.offset_data + member.size <= offset + size
    database.close()
    info = (meta / ".info.json").read_text()
    assert [int(count) for count in re.findall(r'\.tar": (\d+)', info)] == [10, 10, 10, 3]
    assert '  train:\n  - "a-0.tar"\n  - "a-1.tar"\n  - "long.tar"' in (meta / "split.yaml").read_text()


def test_energon_again_gives_the_same_bytes_and_keeps_what_people_wrote(shards, tmp_path):
    list(export_energon(shards))
    meta = tmp_path / ".nv-meta"
    before = {path.name: path.read_bytes() for path in meta.iterdir()}
    (meta / "split.yaml").write_text("mine")
    list(export_energon(shards))
    assert {path.name: path.read_bytes() for path in meta.iterdir()} == {**before, "split.yaml": b"mine"}


def test_what_energon_cannot_have(shards, tmp_path):
    write_samples([{"__key__": "s0-001", "txt": "again"}], str(tmp_path / "again.tar"))
    with pytest.raises(ShardIndexError, match=r"again\.tar: s0-001: Energon requires unique keys"):
        list(export_energon([*shards, str(tmp_path / "again.tar")]))
    with tarfile.open(tmp_path / "latin.tar", "w") as archive:
        archive.addfile(tarfile.TarInfo("\udcff.txt"))
    with pytest.raises(ShardIndexError, match=r"latin\.tar: .*UTF-8"):
        list(export_energon([str(tmp_path / "latin.tar")]))
    with pytest.raises(UrlError, match="not in the dataset's folder"):
        list(export_energon(shards, str(tmp_path / "elsewhere")))
    with pytest.raises(UrlError, match="local shards"):
        list(export_energon(["memory://a.tar"]))
    assert not (tmp_path / ".nv-meta").exists()


def test_energon_dry(shards, tmp_path):
    assert len(list(export_energon(shards, how=Writing(dry_run=True)))) == 8
    assert sorted(os.listdir(tmp_path)) == sorted(Path(url).name for url in shards)


@pytest.mark.filterwarnings("ignore:String specifications")
def test_wids_reads_a_manifest_and_its_shards(shards, tmp_path, capsys):
    wids = pytest.importorskip("wids", reason="wids is not installed")
    shards = shards[:2]  # for it knows no long names
    counts = [Shard(url, 10, os.path.getsize(url), concatenated=True) for url in shards]  # a word of ours
    (name,) = update_manifests(counts, str(tmp_path / "all.shards.json"))
    dataset = wids.ShardListDataset(
        name, base=str(tmp_path), cache_dir=str(tmp_path / "cache"), transformations=[lambda sample: sample]
    )
    assert len(dataset) == 20
    for number, sample in enumerate(read_samples(shards)):
        found = dataset[number]
        assert found["__key__"] == sample["__key__"]
        assert [found[f".{field}"].read() for field in ("bin", "cls")] == [sample["bin"], sample["cls"]]
