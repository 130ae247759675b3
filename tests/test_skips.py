"""A missing program skips tests, and the last lines say so; in CI it fails them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from soak import some

HERE = Path(__file__).parent


def run_without_programs(folder: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a test that compares with bsdtar where there is none."""
    test = HERE / "tar" / "test_tar_writing.py::test_every_size_extracts_to_the_same_bytes[bsdtar-a.txt-0]"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options, str(test)]
    ours = {name: value for name, value in os.environ.items() if name != "CI" and not name.startswith("PYTEST_")}
    variables = {**ours, "PATH": str(folder), **environment}
    return subprocess.run(command, cwd=HERE.parent, env=variables, capture_output=True, text=True)


@pytest.mark.soak
@pytest.mark.parametrize("options", some([["-n", "1"], []], 2))
def test_the_last_lines_say_what_is_missing_and_what_installs_it(tmp_path, options):
    done = run_without_programs(tmp_path, *options)
    assert done.returncode == 0, done.stdout
    *_, told, summary = done.stdout.splitlines()
    assert told == "Tests were skipped that need bsdtar (1): `make programs` installs programs with apt."
    assert " 1 skipped in " in summary


@pytest.mark.soak
@pytest.mark.parametrize("options", some([[], ["-n", "1"]], 2))
def test_in_ci_nothing_may_be_missing(tmp_path, options):
    done = run_without_programs(tmp_path, *options, CI="true")
    assert done.returncode == 1
    assert "[bsdtar-a.txt-0]: skipped in CI: Skipped: needs bsdtar" in done.stdout
