"""The package installs with and without a compiler, and the files of a release install on each Python that is found."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from email import message_from_string
from pathlib import Path
from zipfile import ZipFile

import pytest
from programs import COMPILER, need

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / ".ci"))
import release  # noqa: E402

pytestmark = pytest.mark.interop
PACKAGES = sysconfig.get_path("purelib")
PYTHONS = [python for python in release.pythons().values() if python]
#: Reads samples, with only the standard library and the kernels loaded, and prints by which module.
PROGRAM = """if True:
    import sys
    import tarshards
    from tarshards.tar import read
    print(tarshards.__file__, read.scan.__module__, len(list(tarshards.read_samples(sys.argv[1]))))
"""


def copy_sources(folder: Path) -> None:
    for name in ("setup.py", "setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for name in ("tarshards", "bin"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))


@pytest.mark.parametrize(
    ("compiler", "module"), [("cc", "tarshards.kernels._tar"), ("false", "tarshards.kernels._tar_py")]
)
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


@pytest.mark.parametrize("url", ["", "https://github.com/Owner/name"])
def test_metadata_lead_to_the_address_of_the_project_if_it_has_one(tmp_path, url):
    for path in ROOT.iterdir():
        if not path.name.startswith(".") and path.suffix != ".egg-info":
            (tmp_path / path.name).symlink_to(path)
    setup = tmp_path / "setup.cfg"
    text = setup.read_text()
    setup.unlink()
    setup.write_text(re.sub("^url =.*", f"url = {url}", text, flags=re.MULTILINE))
    command = [sys.executable, tmp_path / "setup.py", "-q", "egg_info", "--egg-base", tmp_path]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    told = message_from_string((tmp_path / "tarshards.egg-info/PKG-INFO").read_text())
    urls = ["Documentation, https://owner.github.io/name/"] if url else None
    assert (told["Home-page"], told.get_all("Project-URL")) == (url, urls)
    assert told["License-Expression"] == "Apache-2.0"
    relative = re.findall(r"\]\((?!https?:|#)[^)]*\)|src(?:set)?=\"(?!https?:)", told.get_payload())
    assert bool(relative) is not bool(url), relative


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
    assert len(kernels) == 8
    assert ("-cp311-abi3-" in wheel.name) is not free_threaded
    for name in kernels:
        assert name.endswith(".abi3.so") is not free_threaded
    # What the kernels do does not depend on the API that they were compiled for.
    ZipFile(wheel).extractall(tmp_path / "lib")
    program = "from tarshards.cli.tarshards import report\nprint(*report(), sep='\\n')"
    command = [sys.executable, "-c", program]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "lib")}
    done = subprocess.run(command, cwd=tmp_path / "lib", env=environment, capture_output=True, text=True, check=True)
    assert "kernels   8 of 8 compiled" in done.stdout


def test_a_release_needs_all_kernels(tmp_path):
    copy_sources(tmp_path)
    build = [sys.executable, "setup.py", "-q", "build", "--build-lib", "lib"]
    environment = {**os.environ, "CC": "false", "TARSHARDS_REQUIRE_KERNELS": "1"}
    done = subprocess.run(build, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode != 0
    assert "kernels/_tar.c" in done.stderr


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> Path:
    """The source distribution, with the wheels beside it; the checkers have accepted all."""
    need("git")
    pytest.importorskip("ziglang", reason="ziglang is not installed")
    found = release.build(tmp_path_factory.mktemp("dist"))
    rows = release.check(found)
    wheels = {row.split()[0]: row for row in rows[1:]}
    assert {wheel.rpartition("-")[2] for wheel in wheels} == {f"{tag}.whl" for tag in release.TARGETS}
    assert all(" 8 kernels, glibc 2." in row for row in wheels.values())
    return found


def wheel_for(machine: str, sdist: Path) -> Path:
    (wheel,) = sdist.parent.glob(f"*-abi3-*_{machine}.whl")
    return wheel


class Installed:
    """A new environment of *python* with *package*, the source distribution or a wheel, and this Python's packages."""

    def __init__(self, folder: Path, python: str, package: Path, **environment: str):
        self.folder, self.variables = folder / "env", {**os.environ, "PYTHONPATH": PACKAGES, **environment}
        subprocess.run([python, "-m", "venv", "--without-pip", self.folder], check=True)
        command = [
            sys.executable,
            "-m",
            "pip",
            "--python",
            self.folder,
            "install",
            "--quiet",
            "--no-index",
            "--no-deps",
        ]
        self.run(*command, "--no-build-isolation", package)

    def run(self, *command: object) -> list[str]:
        """Run a command in an empty folder, and return its lines."""
        done = subprocess.run(
            list(map(str, command)), cwd=self.folder, env=self.variables, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    def check(self, kernels: str, module: str, shards: str) -> None:
        python = self.folder / "bin/python"
        assert self.run(python, "-m", "tarshards")[1].endswith(kernels)
        ((file, found, samples),) = (line.split() for line in self.run(python, "-c", PROGRAM, shards))
        assert (found, samples) == (module, "6")
        assert Path(file).is_relative_to(self.folder)
        assert self.run(self.folder / "bin/tarcat", "--help")[0].startswith("Usage: tarcat ")
        assert self.run("sh", "-c", f"{self.folder}/bin/tarcat '{shards}' | tar -t")[0] == "000000.cls"


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the wheel of another machine")
@pytest.mark.parametrize("python", PYTHONS, ids=lambda python: Path(python).parts[-3:][0])
def test_the_wheel(sdist, python, tmp_path, make_shards):
    installed = Installed(tmp_path, python, wheel_for("x86_64", sdist))
    installed.check("8 of 8 compiled", "tarshards.kernels._tar", make_shards(2))


def test_the_source_distribution_without_a_compiler(sdist, tmp_path, make_shards):
    installed = Installed(tmp_path, sys.executable, sdist, CC="no-such-compiler")
    installed.check("0 of 8 compiled", "tarshards.kernels._tar_py", make_shards(2))
    _, _, _, cure, *_ = installed.run(installed.folder / "bin/python", "-m", "tarshards")
    assert cure.strip() == "reinstall tarshards where a C compiler is found"


def test_the_other_wheel_is_for_the_other_machine(sdist, tmp_path):
    """What its kernels need of glibc has been checked with the rest."""
    with ZipFile(wheel_for("aarch64", sdist)) as wheel:
        kernels = [wheel.read(name) for name in wheel.namelist() if name.endswith(".so")]
    assert [int.from_bytes(kernel[18:20], "little") for kernel in kernels] == [183] * 8, "EM_AARCH64"


def test_the_source_distribution_has_what_compiles(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "tarshards").rglob("*.[chp]*") if path.suffix != ".pyc"}
    assert names >= sources
