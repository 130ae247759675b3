"""What the tests of commands share: tarproc as a process, its samples, and a look at what it leaves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tarshards import write_samples

TARPROC = [sys.executable, str(Path(__file__).parents[3] / "bin/tarproc"), "-q"]


@pytest.fixture
def make_tar(tmp_path):
    """Return a function that writes *count* samples to in.tar and returns its path."""

    def make(count: int) -> str:
        path = str(tmp_path / "in.tar")
        write_samples(({"__key__": f"{i:04d}", "txt": f"text {i}\n", "cls": i} for i in range(count)), path)
        return path

    return make


@pytest.fixture
def scratch(tmp_path):
    folder = tmp_path / "scratch"
    folder.mkdir()
    return folder


@pytest.fixture
def start(tmp_path, scratch):
    """Return a function that starts tarproc in tmp_path."""

    def run(*arguments: object, **options) -> subprocess.Popen:
        command = [*TARPROC, "--tmpdir", str(scratch), *map(str, arguments)]
        return subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)

    return run


@pytest.fixture
def tarproc(tmp_path, scratch, path_with_tools):
    """Return a function that runs tarproc to its end and returns its exit code and stderr."""

    def run(*arguments: object, **options) -> tuple[int, str]:
        command = ["tarproc", "-q", "--tmpdir", str(scratch), *map(str, arguments)]
        environment = {**os.environ, "PATH": path_with_tools}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, timeout=100, **options)
        return done.returncode, done.stderr.decode()

    return run
