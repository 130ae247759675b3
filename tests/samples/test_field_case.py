"""Fields are in lower case; requests may use any case."""

from __future__ import annotations

import io
import subprocess
import tarfile

import numpy as np
import pytest
from with_torch import ShardDataset

from tarshards import ArrayLoader, IndexedShards, Stream, readers
from tarshards.samples.conditions import Condition
from tarshards.samples.fields import FieldNames, find_field
from tarshards.samples.tree import FileTree

ARRAY = io.BytesIO()
np.save(ARRAY, np.arange(3))


@pytest.fixture
def tar(tmp_path, monkeypatch):
    """A shard whose members have extensions in capitals; its folder is the current one."""
    monkeypatch.chdir(tmp_path)
    with tarfile.open("a.tar", "w") as file:
        for key in "ab":
            for name, data in (f"{key}.CLS", b"7"), (f"{key}.Vec.NPY", ARRAY.getvalue()), (f"{key}.txt", b"text"):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                file.addfile(member, io.BytesIO(data))
    return "a.tar"


@pytest.fixture
def indexed(tar, path_with_tools):
    subprocess.run(["tarindex", "-q", tar], env={"PATH": path_with_tools}, check=True)
    return tar


def test_the_rule():
    assert find_field(["jpg"], ["JPG"]) == "jpg"
    assert find_field(["JPG", "jpg"], ["JPG"]) == "JPG"  # of a user's own split=, or of an op
    assert find_field(["jpeg"], ["jpg"]) is None
    assert "jpg" in FieldNames.of("JPG;png CLS")
    assert FieldNames.of("JPG;png").lacking({"jpg"}) is None


def test_ops_take_any_case(tar):
    stream = Stream.from_shards(tar, index=False)
    assert next(iter(stream.to_tuple("CLS", "PNG;Txt"))) == (b"7", b"text")
    assert set(next(iter(stream.keep_fields("CLS")))) == {"__key__", "__url__", "cls"}
    assert next(iter(stream.map_fields({"CLS": int})))["cls"] == 7
    assert set(next(iter(stream.rename_fields({"label": "Cls"})))) == {"__key__", "__url__", "label", "vec.npy", "txt"}


@pytest.mark.parametrize("index", [False, True])
def test_readers_take_any_case(indexed, index):
    samples = list(Stream.from_shards(indexed, index=index, shuffle=False, fields=["CLS", "TXT"]))
    assert [set(sample) for sample in samples] == [{"__key__", "__url__", "cls", "txt"}] * 2


@pytest.mark.parametrize("index", [False, True])
def test_array_loaders_take_any_case(indexed, index):
    fields = {"CLS": readers.integer(), "Vec.NPY": readers.array()}
    (batch,) = ArrayLoader(ShardDataset(indexed, index=index), 2, fields=fields, threads=1)
    assert batch["CLS"].tolist() == [7, 7]
    assert batch["Vec.NPY"].tolist() == [[0, 1, 2]] * 2


def test_columns_take_any_case(indexed):
    assert np.asarray(IndexedShards(indexed).column("VEC.npy")).tolist() == [[0, 1, 2]] * 2


def test_conditions_take_any_case():
    sample = {"__key__": "a", "cls": b"7"}
    assert Condition('CLS == 7 and has("Cls") and fields["CLS"] == 7')(sample)


@pytest.mark.parametrize(
    ("line", "out"),
    [
        ("tarcat -f 'CLS new:Txt' a.tar | tar t", "a.cls\na.new\nb.cls\nb.new\n"),
        ("tarfirst -f TXT a.tar", "text"),
        ("tarsort -r --sort CLS:int --sort TXT a.tar | tar t | sed -n 1p", "a.cls\n"),
        ("tar2tsv -f 'CLS' --fill x a.tar | tail -n 1", "b\t7\n"),
        ("tar2tsv -f 'TXT *' a.tar | sed -n 1p | cut -f 1-3", "__key__\tTXT\tcls\n"),
        ("tar2json -f CLS a.tar | tail -n 1", '{"__key__": "b", "cls": 7}\n'),
        ("targrep -l -f TXT ex a.tar", "a\nb\n"),
        ("targrep -l --where 'CLS == 7' a.tar", "a\nb\n"),
        ("tarsplit --by CLS -o '{CLS}-%d.tar' a.tar; ls 7-*", "7-0.tar\n"),
        ("mkdir d; echo 1 >d/x.CLS; tarcreate --dir d --exts 'Cls' | tar t", "x.cls\n"),
    ],
)
def test_tools_take_any_case(tar, path_with_tools, line, out):
    command = ["bash", "-euo", "pipefail", "-c", line]
    done = subprocess.run(command, env={"PATH": path_with_tools}, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, out), done.stderr


def test_jpg_and_jpeg_are_two_fields(tmp_path):
    (tmp_path / "a.JPEG").write_bytes(b"x")
    assert list(FileTree(str(tmp_path)).read(fields="jpg")) == []
    assert [set(sample) for sample in FileTree(str(tmp_path)).read(fields="jpg;JPEG")] == [
        {"__key__", "__url__", "jpeg"}
    ]
