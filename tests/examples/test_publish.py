"""Shards are published on a server that takes the requests of huggingface_hub, and read there by datasets."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hub_server import NAME, Hub

from tarshards import IndexedShards, ShardWriter
from tarshards.testing.faulty_server import serving

pytestmark = pytest.mark.interop

ROOT = Path(__file__).parents[2]
OURS, TWIN = ROOT / "examples/publish.py", Path(__file__).with_name("twins") / "publish.py"
README = "---\nlicense: cc-by-4.0\n---\n\n# Digits\n"
LOAD = """
import json, sys
from datasets import load_dataset
for place in sys.argv[1:]:
    for streaming in False, True:
        splits = load_dataset(place, streaming=streaming)
        found = {name: [(row["__key__"], row["cls"], row["png"].size) for row in rows] for name, rows in splits.items()}
        print(json.dumps(found))
"""
READ = "import sys, tarshards; print(tarshards.IndexedShards(sys.argv[1]).decode()[89]['cls'])"
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def hub():
    pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
    with serving(Hub()) as server:
        yield server


@pytest.fixture
def run(hub, tmp_path, path_with_tools) -> Run:
    """Return a function that runs a program with the server as the Hub."""
    environment = os.environ | hub.environment | {"PATH": path_with_tools, "HF_HOME": str(tmp_path / "cache")}

    def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *map(str, words)]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)

    return run


@pytest.fixture
def folder(tmp_path) -> Path:
    """The folder of a dataset of two splits: handwritten digits that scikit-learn contains."""
    digits = pytest.importorskip("sklearn.datasets").load_digits()
    (tmp_path / "digits").mkdir()
    for split, rows in ("train", range(90)), ("test", range(90, 120)):
        with ShardWriter(tmp_path / f"digits/{split}-{{shard:03d}}.tar", max_samples=30, sha256=True) as writer:
            for row in rows:
                pixels = (digits.images[row] * 15).astype(np.uint8)
                writer.write({"__key__": f"{row:04d}", "png": pixels, "cls": int(digits.target[row])})
    (tmp_path / "digits/README.md").write_text(README)
    return tmp_path / "digits"


def test_a_folder_is_published_once(hub, run, folder):
    done = run(OURS, "digits", NAME)
    assert done.returncode == 0, done.stderr
    assert hub.files == {path.name: path.read_bytes() for path in folder.iterdir()}
    assert hub.files.keys() > {"croissant.json", "index.html", "test.shards.json", "train-002.tar.index"}
    assert (hub.created["name"], hub.created["visibility"]) == ("digits", "private")
    readme = (folder / "README.md").read_text()
    assert readme.startswith("---\nlicense: cc-by-4.0\nconfigs:\n")
    assert readme.endswith("---\n\n# Digits\n")
    assert json.loads(hub.files["croissant.json"])["license"] == "cc-by-4.0"
    stored = len(hub.stored)
    assert run(OURS, "digits", NAME).returncode == 0
    assert (hub.commits, len(hub.stored)) == (1, stored)


@pytest.mark.parametrize("program", [OURS, TWIN], ids=["ours", "by hand"])
def test_datasets_and_tarshards_read_what_is_published(hub, run, folder, program, monkeypatch):
    pytest.importorskip("datasets", reason="datasets is not installed")
    if program == TWIN:
        pytest.importorskip("mlcroissant", reason="mlcroissant is not installed")
    done = run(program, "digits", NAME, *(["train", "test"] if program == TWIN else []))
    assert done.returncode == 0, done.stderr
    wanted = {}
    for split in "train", "test":
        samples = IndexedShards(str(folder / f"{split}.shards.json")).decode("l8")
        wanted[split] = [[sample["__key__"], sample["cls"], [*sample["png"].shape]] for sample in samples]
    done = run("-c", LOAD, "./digits", NAME)
    assert done.returncode == 0, done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines()] == [wanted] * 4
    assert "Ignoring" not in done.stderr  # of the header
    done = run("-c", READ, f"hf://datasets/{NAME}/train.shards.json")
    assert done.stdout == f"{wanted['train'][89][1]}\n", done.stderr


def test_datasets_notices_that_a_shard_is_missing(run, folder, tmp_path):
    pytest.importorskip("datasets", reason="datasets is not installed")
    assert run(OURS, "digits", NAME).returncode == 0
    shutil.move(folder / "train-001.tar", tmp_path)
    assert "NonMatchingSplitsSizesError" in run("-c", LOAD, "./digits").stderr
    done = run(OURS, "digits", NAME)
    assert done.returncode == 1
    assert done.stderr == "digits/train.shards.json does not list the same shards as train-*.tar\n"
