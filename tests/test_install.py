"""The package installs with and without a compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(("compiler", "module"), [("cc", "tarshards.tar._tar"), ("false", "tarshards.tar._tar_py")])
def test_build(tmp_path, compiler, module, make_shards):
    for name in ("setup.py", "setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("tarshards", "bin"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    build = [sys.executable, "setup.py", "-q", "build", "--build-lib", "lib"]
    done = subprocess.run(build, cwd=tmp_path, env={**os.environ, "CC": compiler}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    program = "import sys\nfrom tarshards import read_samples\nfrom tarshards.tar import read\n"
    program += "print(read.scan.__module__, len(list(read_samples(sys.argv[1]))))"
    run = [sys.executable, "-S", "-c", program, make_shards(2)]  # -S: no editable install to fall back on
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path / 'lib'}:{sysconfig.get_path('purelib')}"}
    done = subprocess.run(run, cwd=tmp_path / "lib", env=environment, capture_output=True, text=True)
    assert done.stdout.split() == [module, "6"], done.stderr
    assert (tmp_path / "lib/tarshards/py.typed").exists()
