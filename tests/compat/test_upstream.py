"""webdataset's own tests pass with ``tarshards.webdataset``, except for unsupported features."""

from __future__ import annotations

import subprocess
import sys

import pytest
from run_upstream import SDIST

pytestmark = pytest.mark.interop


def test_the_tests_of_webdataset_pass():
    if not SDIST.exists():
        pytest.skip(f"needs data/{SDIST.name}: `make test-interop` downloads it")
    program = sys.modules["run_upstream"].__file__
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith(" 0 fail unexplained\n")
