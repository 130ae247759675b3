"""The archives in tests/cases, as the programs made them: read as tarfile, GNU tar and bsdtar extract them.

``tests/cases/make.sh`` says how each was made.
"""

from __future__ import annotations

import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from programs import need

from tarshards import IndexedShards, Ledger, read_samples
from tarshards.errors import TarshardsError
from tarshards.index.build import build_index
from tarshards.samples.keys import split_name

CASES = Path(__file__).with_name("cases")
LINKS = ["links-gnu", "links-pax", "links-bsdtar"]
SPARSE = ["sparse-0.0", "sparse-0.1", "sparse-1.0", "sparse-old", "sparse-bsdtar"]


def by_tarfile(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as archive:
        found = [(info.name, archive.extractfile(info)) for info in archive if not info.issym() or info.linkname != "d"]
        return {name: file.read() for name, file in found if file is not None}


def extracted(command: list[str], path: Path, folder: Path) -> dict[str, bytes]:
    """The files that a program extracts, read through the links that it makes."""
    folder.mkdir()
    subprocess.run([*command, str(path)], cwd=folder, check=True)
    files = (file for file in folder.rglob("*") if file.is_file())
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in files if "v1.0" not in file.parts}


def members(samples) -> dict[tuple[str, str], bytes]:
    return {
        (sample["__key__"], field): data
        for sample in samples
        for field, data in sample.items()
        if not field.startswith("__")
    }


@pytest.mark.parametrize("name", LINKS + SPARSE)
@pytest.mark.parametrize("program", ["tarfile", "GNU tar", "bsdtar"])
def test_links_and_sparse_members(tmp_path, name, program):
    path = tmp_path / "a.tar"
    shutil.copy(CASES / f"{name}.tar", path)
    if program == "tarfile":
        files = by_tarfile(path)
    else:
        need(program)
        files = extracted([program.rpartition(" ")[2], "-xf"], path, tmp_path / "out")
    wanted = {split_name(file): data for file, data in files.items()}
    assert len(wanted) == (8 if name in LINKS else 2)
    assert members(read_samples(path)) == wanted
    ledger = Ledger(max_errors=9)
    assert members(read_samples(path, on_damage="resync", on_error=ledger)) == wanted
    index = build_index(str(path))
    index.save(str(path))
    assert members(IndexedShards(str(path))) == wanted
    assert len(index.elsewhere) == (4 if name in LINKS else 1)
    assert not ledger.quarantined


def test_dots_in_names_are_told_and_split_last(caplog):
    path = CASES / "dots.tar.gz"
    assert [len(sample) - 2 for sample in read_samples(path)] == [70]
    assert "--split last" in caplog.text
    with tarfile.open(path) as archive:
        files = {info.name: archive.extractfile(info).read() for info in archive if info.isreg()}
    assert {f"{key}.{field}": data for (key, field), data in members(read_samples(path, split="last")).items()} == files


@pytest.mark.parametrize(
    ("name", "package"),
    [("plain.tar.lzma", None), ("plain.tar.lz4", "lz4.frame"), ("long-28.tar.zst", None), ("long-31.tar.zst", None)],
)
def test_compressed_archives(name, package):
    if package is not None:
        pytest.importorskip(package)
    if name.startswith("long"):
        with pytest.raises(TarshardsError, match=rf"{name}: .*--long=31"):
            list(read_samples(CASES / name))
        return
    assert members(read_samples(CASES / name)) == {("a", "txt"): b"text", ("a", "cls"): b"7"}


@pytest.mark.parametrize(("name", "told"), [("plain.tar.Z", "bsdtar|uncompress|gzip"), ("pointer.tar", "git lfs pull")])
def test_what_is_no_archive_is_told_with_its_cure(name, told):
    with pytest.raises(TarshardsError, match=told):
        list(read_samples(CASES / name))
