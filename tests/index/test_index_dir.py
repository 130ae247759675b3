"""Indexes in a folder of their own, for shards beside which nothing can be written."""

from __future__ import annotations

import os
import pickle
import subprocess
from pathlib import Path

import pytest
from range_server import serving

from tarshards import IndexedShards, Stream, TarWriter, build_index
from tarshards.errors import ShardIndexError
from tarshards.index.opening_options import Opening
from tarshards.storage.expressions import find_shards
from tarshards.storage.location import Location

TRAIN = "t-{0..1}.tar"


@pytest.fixture
def shards(tmp_path) -> Path:
    """Two folders with shards of the same names, beside which nothing can be written."""
    folder = tmp_path / "shards"
    for name in "a", "b":
        (folder / name).mkdir(parents=True)
        for shard in range(2):
            with TarWriter(str(folder / name / f"t-{shard}.tar")) as writer:
                for i in range(3):
                    writer.write({"__key__": f"{shard}{i}", "txt": f"{name}{shard}{i}"})
    return folder


@pytest.fixture
def tool(path_with_tools, tmp_path):
    """Return a function that runs a command line in tmp_path, and returns what it prints."""

    def run(line: str, code: int = 0) -> str:
        environment = {**os.environ, "PATH": path_with_tools, "no_proxy": "*"}
        done = subprocess.run(["bash", "-c", line], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    return run


def texts(samples) -> list[str]:
    return [sample["txt"].decode() for sample in samples]


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_indexes_of_shards_of_one_name_stay_apart(shards, tool, tmp_path):
    before = files(shards)
    tool(f"tarindex -q --index-dir idx --key-index 'shards/{{a,b}}/{TRAIN}'")
    assert files(shards) == before
    for name in "a", "b":
        wanted = [f"{name}{shard}{i}" for shard in range(2) for i in range(3)]
        urls = f"{shards}/{name}/{TRAIN}"
        indexed = IndexedShards(urls, index_dir=tmp_path / "idx")
        assert texts(indexed) == wanted
        assert indexed["12"]["txt"].decode() == f"{name}12"
        assert indexed.shards.key_index is not None
        for index in "auto", True:
            stream = Stream.from_shards(urls, index=index, index_dir=str(tmp_path / "idx"), shuffle=True)
            assert sorted(texts(stream)) == wanted
            assert len(stream) == 6
        with pytest.raises(ShardIndexError, match="no index found"):
            IndexedShards(urls)
        manifest = f"{tmp_path}/idx{shards}/{name}/t.shards.json"
        assert texts(IndexedShards(manifest, index_dir=tmp_path / "idx")) == wanted


def test_each_shard_has_its_own_folder(shards, tool, tmp_path):
    for name in "ab":
        tool(f"tarindex -q --index-dir idx-{name} 'shards/{name}/{TRAIN}'")
    parts = [find_shards(f"{shards}/{name}/{TRAIN}", index_dir=tmp_path / f"idx-{name}") for name in "ab"]
    both = [shard for shards in zip(*parts) for shard in shards]
    wanted = [f"{name}{shard}{i}" for shard in range(2) for name in "ab" for i in range(3)]
    assert texts(IndexedShards(both)) == wanted
    assert texts(pickle.loads(pickle.dumps(Stream.from_shards(both, index=True)))) == wanted
    with pytest.raises(ShardIndexError, match=f"no index found in {tmp_path}/idx-a"):
        Stream.from_shards([shard._replace(index_dir=f"{tmp_path}/idx-a") for shard in parts[1]])


def test_a_dataset_and_its_workers_read_by_an_index_dir(shards, tool, tmp_path):
    torch_data = pytest.importorskip("torch.utils.data", reason="torch is not installed")
    from tarshards import ShardDataset

    tool(f"tarindex -q --index-dir idx 'shards/a/{TRAIN}'")
    dataset = ShardDataset(f"{shards}/a/{TRAIN}", index_dir=tmp_path / "idx", shuffle=True)
    loader = torch_data.DataLoader(dataset, batch_size=None, num_workers=2)
    assert len(dataset) == 6
    assert sorted(texts(loader)) == [f"a{shard}{i}" for shard in range(2) for i in range(3)]


def test_shards_joined_to_others_have_their_indexes_there_too(shards, tool, tmp_path):
    for shard in range(2):
        with TarWriter(str(shards / f"b/t-{shard}.tar")) as writer:
            for i in range(3):
                writer.write({"__key__": f"{shard}{i}", "cls": i})
    tool(f"tarindex -q --index-dir idx 'shards/{{a,b}}/{TRAIN}'")
    stream = Stream.from_shards(f"{shards}/a/{TRAIN}", index_dir=tmp_path / "idx")
    assert [sample["cls"] for sample in stream.join(f"{shards}/b/{TRAIN}")] == [b"0", b"1", b"2"] * 2


@pytest.mark.interop
def test_tools_find_indexes_columns_and_key_indexes(shards, tool):
    before = files(shards)
    tool(f"tarindex -q -j 2 --index-dir idx --key-index --columns length:txt 'shards/a/{TRAIN}'")
    assert tool(f"tarcat -q --index-dir idx --keys <(echo 12) 'shards/a/{TRAIN}' | tar xO") == "a12"
    assert tool(f"tarcat -q --index-dir idx --where 'length > 2' 'shards/a/{TRAIN}' | tar t").count("txt") == 6
    assert tool(f"targrep --index-dir idx --where 'length > 2' -l 'shards/a/{TRAIN}'").split()[0] == "00"
    assert "no such" not in tool(f"tarindex --check --index-dir idx 'shards/a/{TRAIN}'")
    assert "no index found" in tool(f"tarindex --check 'shards/a/{TRAIN}'", 1)
    assert files(shards) == before


def test_a_stale_index_in_a_folder_is_told_and_renewed(shards, tool, tmp_path):
    tool(f"tarindex -q --index-dir idx 'shards/a/{TRAIN}'")
    with TarWriter(str(shards / "a/t-1.tar")) as writer:
        writer.write({"__key__": "new", "txt": "a" * 600})
    with pytest.raises(ShardIndexError, match=r"idx/.*/a/t-1.tar.index: stale"):
        texts(IndexedShards(f"{shards}/a/{TRAIN}", index_dir=tmp_path / "idx"))
    assert "t-1.tar.index: stale" in tool(f"tarcheck -q --index-dir idx 'shards/a/{TRAIN}'", 1)
    tool(f"tarindex -q --index-dir idx 'shards/a/{TRAIN}'")
    assert len(IndexedShards(f"{shards}/a/{TRAIN}", index_dir=tmp_path / "idx")) == 4


def test_what_a_tool_writes_has_its_index_beside_it(shards, tool, tmp_path):
    tool(f"tarindex -q --index-dir idx 'shards/a/{TRAIN}'")
    (tmp_path / "out").mkdir()
    tool(f"tarsplit -q --index-dir idx -n 2 -o out/t-%d.tar --index 'shards/a/{TRAIN}'")
    assert {"t-0.tar", "t-0.tar.index", "t.shards.json"} <= set(files(tmp_path / "out"))
    assert len(IndexedShards(f"{tmp_path}/out/t.shards.json")) == 6


def test_indexes_of_remote_shards(shards, tool, tmp_path):
    """Of files that a query names, too."""
    with serving(shards) as site:
        site.find = lambda path, login: path.partition("?f=")[2] or path
        tool(f"tarindex -q --index-dir idx '{site.url}/a/{TRAIN}' '{site.url}/get.tar?f={{a,b}}/t-0.tar'")
        assert texts(Stream.from_shards(f"{site.url}/a/{TRAIN}", index_dir=tmp_path / "idx"))[0] == "a00"
        for name in "a", "b":
            url = f"{site.url}/get.tar?f={name}/t-0.tar"
            assert texts(IndexedShards(url, index_dir=tmp_path / "idx"))[0] == f"{name}00"
        assert site.asked(".index") == 0
        site.refusal = 405
        assert "405 Method Not Allowed; `--index-dir FOLDER`" in tool(f"tarindex -q '{site.url}/a/t-0.tar'", 1)


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("http://host:8000/d/a.tar?X-Amz-Signature=1", "http/host:8000/d/a.tar"),
        ("http://me:secret@host/d/a.tar", "http/host/d/a.tar"),
        ("http://host/../../d/a.tar", "http/host/%2E%2E/%2E%2E/d/a.tar"),
        ("s3://bucket/d//a.tar", "s3/bucket/d/%/a.tar"),
        ("simplecache::s3://bucket/a.tar", "simplecache::s3/bucket/a.tar"),
        ("file:///d/a%20b.tar", "d/a b.tar"),
        ("/d/../e/a.tar", "e/a.tar"),
    ],
)
def test_where_the_index_of_a_shard_lies(url, path):
    described = Location(url, index_dir="/i").described
    assert (described.url, described.path) == (f"/i/{path}", f"/i/{path}")
    assert described.described is described


def test_the_folder_is_found_from_everywhere(shards, tool, tmp_path, monkeypatch):
    """By whatever name the shards are called: relative, or through a link."""
    tool("cd shards/a; tarindex -q --index-dir ../../idx t-0.tar")
    (tmp_path / "link").symlink_to(shards / "a")
    assert texts(IndexedShards(f"{tmp_path}/link/t-0.tar", index_dir=tmp_path / "idx"))[0] == "a00"
    monkeypatch.chdir(shards)
    monkeypatch.setenv("HOME", str(tmp_path))
    for folder in "../idx", "~/idx":
        assert texts(IndexedShards("a/t-0.tar", index_dir=folder))[0] == "a00"
        assert texts(Stream.from_shards("a/t-0.tar", index_dir=folder))[0] == "a00"


def test_a_folder_without_the_indexes_is_an_error(shards, tmp_path):
    with pytest.raises(ShardIndexError, match=r"no index found in .*typo; create it with `tarindex --index-dir`"):
        Stream.from_shards(f"{shards}/a/{TRAIN}", index_dir=tmp_path / "typo")
    with pytest.raises(ValueError, match="index=False"):
        Opening(index=False, index_dir=tmp_path)
    with pytest.raises(ShardIndexError, match="no index found in ; create it with `tarindex --index-dir`"):
        Stream.from_shards(f"{shards}/a/{TRAIN}", index_dir="")
    beside, elsewhere = find_shards(f"{shards}/a/{TRAIN}")
    with pytest.raises(ShardIndexError, match=r"t-1.tar: no index found in /typo"):
        Stream.from_shards([beside, elsewhere._replace(index_dir="/typo")])


def test_a_read_only_mount(shards, tool, tmp_path):
    if os.geteuid() or subprocess.run(["mount", "--bind", "-o", "ro", shards, shards]).returncode:
        pytest.skip("only root can mount a folder read-only")
    try:
        assert "`--index-dir FOLDER` puts indexes elsewhere" in tool(f"tarindex -q 'shards/a/{TRAIN}'", 1)
        tool(f"tarindex -q --index-dir idx 'shards/a/{TRAIN}'")
        assert len(IndexedShards(f"{shards}/a/{TRAIN}", index_dir=tmp_path / "idx")) == 6
    finally:
        subprocess.run(["umount", shards], check=True)


def test_build_index_saves_beside_the_shard(shards):
    url = str(shards / "a/t-0.tar")
    build_index(url).save(url)
    assert os.path.exists(f"{url}.index")
