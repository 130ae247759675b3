"""What the tests of jobs share: tarjob as a process, shards to work on, and a real Slurm."""

from __future__ import annotations

import os
import shutil
import subprocess
from importlib.util import find_spec

import pytest
from running import start_slurm

from tarshards import TarWriter

collect_ignore = (
    []
    if find_spec("kubernetes_validate")
    else ["api_server.py", "test_kubernetes.py", "test_kubernetes_objects.py", "test_training_manifests.py"]
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory, empty."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def tarjob(folder, path_with_tools):
    """Return a function that runs tarjob to its end and returns its exit code, stdout and stderr."""

    def run(*arguments: object, **environment: str) -> tuple[int, str, str]:
        ours = {name: value for name, value in os.environ.items() if name != "TARJOB_IMAGE"}
        variables = {**ours, "PATH": path_with_tools, "XDG_CONFIG_HOME": str(folder / "config"), **environment}
        command = [shutil.which("tarjob", path=path_with_tools), *map(str, arguments)]
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)
        assert "Traceback" not in done.stderr, done.stderr
        return done.returncode, done.stdout, done.stderr

    return run


@pytest.fixture
def shards(folder):
    """Return a function that writes *count* small shards, in-00.tar and so on."""

    def make(count: int, samples: int = 3) -> None:
        for number in range(count):
            with TarWriter(f"in-{number:02d}.tar") as writer:
                for i in range(samples):
                    writer.write({"__key__": f"{number:02d}-{i}", "txt": f"text {number} {i}"})

    return make


@pytest.fixture(scope="session")
def slurm(tmp_path_factory):
    running = start_slurm(tmp_path_factory)
    yield running
    running.stop()
