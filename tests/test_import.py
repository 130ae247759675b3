"""``import tarshards`` is light, so are the tools, and its names are all there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from programs import load_kernel

import tarshards

BIN = Path(__file__).parents[1] / "bin"
HEAVY = {"torch", "numpy", "PIL", "fsspec", "simplejpeg", "msgpack", "zstandard", "tqdm", "click"}


def imported_by(code: str) -> set[str]:
    command = [sys.executable, "-X", "importtime", "-c", code]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return {line.split("|")[-1].strip().split(".")[0] for line in report.splitlines()}


def test_import_loads_nothing_heavy():
    assert not imported_by("import tarshards") & HEAVY


def test_reading_local_shards_loads_nothing_heavy(make_shards):
    code = f"import tarshards; list(tarshards.read_samples({make_shards(1)!r}))"
    assert not imported_by(code) & HEAVY


def test_public_names():
    assert set(tarshards.__all__) == {*tarshards._MODULE_OF, *tarshards._NAMESPACES} - {"dali"}  # which needs an extra
    for name in tarshards.__all__:
        assert getattr(tarshards, name).__doc__, f"{name} has a docstring"
    assert set(tarshards.__all__) <= set(dir(tarshards))


def test_unknown_name():
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = tarshards.nonsense


def test_native_parser_is_the_one_in_use():
    load_kernel("tarshards.tar._tar")
    from tarshards.tar import read as tar

    assert tar.scan.__module__ == "tarshards.tar._tar"


@pytest.mark.parametrize("tool", sorted(path.name for path in BIN.iterdir()))
def test_help_loads_nothing_heavy(tool):
    command = [sys.executable, "-X", "importtime", str(BIN / tool), "--help"]
    report = subprocess.run(command, capture_output=True, text=True, check=True)
    assert report.stdout.startswith("Usage: ")
    loaded = {line.split("|")[-1].strip().split(".")[0] for line in report.stderr.splitlines()}
    assert not loaded & (HEAVY - {"click"})
