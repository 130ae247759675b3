"""The examples on the documentation pages run as printed."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from programs import warnings_of
from with_torch import needs_torch

pytestmark = pytest.mark.docs

DOCS = Path(__file__).parents[1] / "docs"


def blocks(page: str, language: str = "python") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


@pytest.fixture
def run(tmp_path, python_with_torch) -> Callable[..., str]:
    """Return a function that runs a program of these blocks, without warnings, and returns its output."""

    def run(*blocks: str) -> str:
        (tmp_path / "program.py").write_text("\n".join(blocks))
        command = [python_with_torch, "-W", "error", "-W", "ignore:This DataLoader will create", "program.py"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert (done.returncode, warnings_of(done.stderr)) == (0, "")
        return done.stdout

    return run


def test_array_loader(run):
    assert "samples/s" in run(*blocks("array-loader.md"))


@pytest.mark.interop
def test_columns(run):
    assert run(*blocks("columns.md")) == ""


def test_media(run):
    (program,) = [block for block in blocks("media.md") if block.startswith("# part.py\n")]
    assert run(program) == ""


@needs_torch
def test_migrating(run):
    run(*blocks("migrating.md"))


@needs_torch
def test_migrating_with_the_import_changed(run):
    theirs = blocks("migrating.md", "py")
    assert len(theirs) == 7  # the first example, and six pipelines
    run(blocks("migrating.md")[0])  # which writes the shards
    run(*(text.replace("import webdataset as", "import tarshards.webdataset as") for text in theirs))


def test_packing(run):
    assert float(re.search("filled to ([0-9.]+)", run(*blocks("packing.md")))[1]) > 0.95


def test_testing(run):
    run(*blocks("testing.md"))
