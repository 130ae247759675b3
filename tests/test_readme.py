"""The examples in the README run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from programs import warnings_of
from with_torch import needs_torch

import tarshards

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def blocks(language: str) -> list[str]:
    return [text for name, text in BLOCKS if name == language]


@needs_torch
def test_reading_is_three_lines(make_shards):
    (three_lines, _) = blocks("python")
    body = "".join(f"    {line}\n" for line in three_lines.splitlines())
    body = body.replace('"train-{000..146}.tar"', repr(make_shards(2)))
    space = {name: getattr(tarshards, name) for name in tarshards.__all__}
    exec(f"def read():\n{body}", space)
    assert [sample["cls"] for sample in space["read"]()] == [b"0", b"1", b"2", b"3", b"4", b"5"]


@needs_torch
def test_one_screen_of_python(tmp_path):
    program = tmp_path / "screen.py"
    program.write_text(blocks("python")[1])
    done = subprocess.run([sys.executable, "-W", "error", program], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, warnings_of(done.stderr)) == (0, "")
    assert re.search(r"planned +15680 samples, \d+ not taken \(\d broken off: unaudited\)", done.stdout)
    assert "quarantined      0" in done.stdout


@needs_torch
def test_the_page_on_training(tmp_path):
    page = (ROOT / "docs" / "training.md").read_text()
    program = tmp_path / "training.py"
    program.write_text("\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)))
    command = [sys.executable, "-W", "error", "-W", "ignore:This DataLoader will create", program]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, warnings_of(done.stderr)) == (0, "")


def test_one_screen_of_shell(tmp_path, path_with_tools):
    environment = {**os.environ, "PATH": path_with_tools}
    command = ["bash", "-eu", "-c", blocks("bash")[0]]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0] == './001\tcls:4=1\ttxt:9="text 001\\n"'


def test_every_package_is_in_the_table():
    text = (ROOT / "README.md").read_text()
    packages = {path.stem for path in (ROOT / "tarshards").iterdir() if not path.stem.startswith("_")} - {"py"}
    for package in packages:
        assert f"| `{package}`" in text
