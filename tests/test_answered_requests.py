"""The table of requests to webdataset in docs/migrating.md: the code in it runs."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from with_torch import needs_torch

import tarshards
from tests.test_pages import blocks

pytestmark = pytest.mark.docs

ROOT = Path(__file__).parents[1]
SECTION = (ROOT / "docs/migrating.md").read_text().partition("## Requests to webdataset")[2].partition("\n## ")[0]
ROWS = re.findall(r"^\| (.+) \| (#.+) \| (.+) \|$", SECTION, re.MULTILINE)
TOOLS = {path.name for path in (ROOT / "bin").iterdir()}


def make(number):
    return {"__key__": f"{number:06d}", "cls": number}


def caption(samples):
    for sample in samples:
        yield {**sample, "caption.txt": "a caption"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the shards of the page."""
    folder = tmp_path_factory.mktemp("answers")
    before = Path.cwd()
    os.chdir(folder)
    exec(blocks("migrating.md")[0], {})
    os.chdir(before)
    return folder


def test_there_are_rows_and_each_answers_with_code_or_a_guide():
    assert len(ROWS) >= 25
    for request, numbers, answer in ROWS:
        assert re.fullmatch(r"#\d+(, #\d+)*", numbers), request
        assert "`" in answer or "](guides/" in answer, request


@needs_torch
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize(("request_", "answer"), [(row[0], row[2]) for row in ROWS], ids=[row[1] for row in ROWS])
def test_what_to_type_runs(request_, answer, folder, monkeypatch, path_with_tools):
    monkeypatch.chdir(folder)
    names = {name: getattr(tarshards, name) for name in tarshards.__all__} | {"make": make, "caption": caption}
    names["ShardDataset"] = tarshards.ShardDataset
    names["urls"] = "pairs-{000000..000007}.tar"
    names["dataset"] = tarshards.ShardDataset(names["urls"], shuffle=True)
    names["loader"] = tarshards.ShardLoader(names["dataset"], 16)
    for code in re.findall(r"`([^`]+)`", answer):
        words = shlex.split(code)
        if words[0] in TOOLS and len(words) > 1:
            environment = {**os.environ, "PATH": path_with_tools}
            subprocess.run(code, shell=True, env=environment, check=True)
        elif words[0] not in TOOLS:
            result = run(code.replace("s3://bucket/", ""), names)
            if isinstance(result, tarshards.ShardLoader):
                assert len(next(iter(result))) > 0
            elif isinstance(result, tarshards.Stream):
                assert "__key__" in next(iter(result))


def run(code, names):
    """Run a statement, or return the value of an expression."""
    try:
        compile(code, "the table", "eval")
    except SyntaxError:
        exec(code, names)
        return None
    return eval(code, names)
