"""The package installs with and without a compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from zipfile import ZipFile

import pytest
from programs import COMPILER, need

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.interop


def copy_sources(folder: Path) -> None:
    for name in ("setup.py", "setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for name in ("tarshards", "bin"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))


@pytest.mark.parametrize(("compiler", "module"), [("cc", "tarshards.tar._tar"), ("false", "tarshards.tar._tar_py")])
def test_build(tmp_path, compiler, module, make_shards):
    if compiler == "cc":
        need(COMPILER)
    copy_sources(tmp_path)
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
    assert {path.suffix for path in (tmp_path / "lib/tarshards/view/page").iterdir()} == {".js", ".css"}


@pytest.mark.parametrize("free_threaded", [False, True])
def test_a_wheel_is_for_all_pythons_but_those_that_are_free_threaded(tmp_path, free_threaded):
    """A free-threaded Python has no limited API: setuptools refuses to build for it there."""
    need(COMPILER)
    copy_sources(tmp_path)
    program = "import runpy, sys, sysconfig\nsysconfig.get_config_vars()['Py_GIL_DISABLED'] = int(sys.argv.pop())\n"
    program += "sys.argv[0] = 'setup.py'\nrunpy.run_path('setup.py', run_name='__main__')"
    command = [sys.executable, "-c", program, "-q", "bdist_wheel", str(int(free_threaded))]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = (tmp_path / "dist").iterdir()
    kernels = sorted(name for name in ZipFile(wheel).namelist() if name.endswith(".so"))
    assert len(kernels) == 6
    assert ("-cp311-abi3-" in wheel.name) is not free_threaded
    for name in kernels:
        assert name.endswith(".abi3.so") is not free_threaded
    # What the kernels do does not depend on the API that they were compiled for.
    ZipFile(wheel).extractall(tmp_path / "lib")
    program = "from tarshards.__main__ import report\nprint(*report(), sep='\\n')"
    command = [sys.executable, "-c", program]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "lib")}
    done = subprocess.run(command, cwd=tmp_path / "lib", env=environment, capture_output=True, text=True, check=True)
    assert "kernels   6 of 6 compiled" in done.stdout
