"""Build the files of a release, check them, and install them.

    python .ci/release.py [FOLDER]

`make release` runs it with the tools of the dependency group "release", and writes to dist/: the source distribution
and, made of it, a wheel for each platform. One wheel of the limited API serves all Pythons of a platform. Zig compiles
the kernels for each, against the glibc that the platform names. Where there is a python3.14t, a wheel for free-threaded
Pythons is added. A kernel that does not compile is an error, and so is a complaint of any checker. Each Python that is
found installs the wheel with its dependencies in an environment of its own.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from zipfile import ZipFile

ROOT = Path(__file__).parents[1]
TARGETS = {"manylinux_2_17_x86_64": "x86_64-linux-gnu.2.17", "manylinux_2_17_aarch64": "aarch64-linux-gnu.2.17"}
FREE_THREADED = "python3.14t"


def run(*command: object, **environment: str) -> str:
    """Run a command and return what it prints; end with that if it fails."""
    words = list(map(str, command))
    variables = {**os.environ, **environment}
    done = subprocess.run(words, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(words)}\n{done.stdout}")
    return done.stdout


def git(*arguments: str) -> str:
    return run("git", "-c", "safe.directory=*", "-C", ROOT, *arguments)


def build_sdist(folder: Path) -> Path:
    """Build the source distribution of the files that git knows, as they are now."""
    with TemporaryDirectory() as copy:
        for name in git("ls-files", "-z").split("\0"):
            if (ROOT / name).is_file():
                (copied := Path(copy, name)).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, copied, follow_symlinks=False)
        run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", folder, copy, **settled())
    (sdist,) = folder.glob("*.tar.gz")
    return sdist


def build_wheel(python: str | Path, sdist: Path, tag: str) -> None:
    """Build a wheel of *sdist* beside it; *python* has setuptools."""
    zig = f"{sys.executable} -m ziglang cc -target {TARGETS[tag]}"
    command = [python, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-cache-dir", "--no-deps"]
    command += ["--no-build-isolation", "--wheel-dir", sdist.parent, f"-C--build-option=--plat-name={tag}", sdist]
    run(*command, **settled(), CC=zig, LDSHARED=f"{zig} -shared -s", TARSHARDS_REQUIRE_KERNELS="1")


def settled() -> dict[str, str]:
    """Return variables with which the same commit gives the same files."""
    return {"SOURCE_DATE_EPOCH": git("log", "-1", "--format=%ct").strip()}


def build_free_threaded(sdist: Path) -> None:
    tag = f"manylinux_2_17_{platform.machine()}"
    if (found := shutil.which(FREE_THREADED)) is None or tag not in TARGETS:
        print(f"{FREE_THREADED} is not installed: no wheel for free-threaded Pythons")
        return
    with TemporaryDirectory() as folder:
        run(found, "-m", "venv", folder)
        python = Path(folder, "bin/python")
        run(python, "-m", "pip", "install", "--quiet", f"setuptools=={version('setuptools')}")
        build_wheel(python, sdist, tag)


def kernels_of(names: list[str], ending: str) -> list[str]:
    """List the kernels among *names*, as _tar."""
    return sorted(found[1] for name in names if (found := re.search(rf"tarshards/kernels/(_\w+)\S*{ending}$", name)))


def row_of(wheel: Path, kernels: list[str]) -> str:
    """Return the table's row of *wheel*; end unless it has all *kernels*, and they need no newer glibc than its tag."""
    found = kernels_of(ZipFile(wheel).namelist(), r"\.so")
    if found != kernels:
        sys.exit(f"{wheel.name} has the kernels {found}, not {kernels}")
    report = " ".join(run(sys.executable, "-m", "auditwheel", "show", wheel).split())
    allowed = re.search(r'following platform tag: "manylinux_(\d+)_(\d+)_(\w+)"', report)
    promised = re.search(r"manylinux_(\d+)_(\d+)_(\w+)\.whl", wheel.name)
    if not allowed or not promised or allowed[3] != promised[3]:
        sys.exit(f"{wheel.name}: {report}")
    if (needed := tuple(map(int, allowed.groups()[:2]))) > tuple(map(int, promised.groups()[:2])):
        sys.exit(f"{wheel.name}: the kernels need glibc {needed}")
    return f"{wheel.name:62} {wheel.stat().st_size >> 10:5} KiB  {len(found)} kernels, glibc {needed[0]}.{needed[1]}"


def build(folder: Path) -> Path:
    """Build all files in an empty *folder*; return the source distribution."""
    sdist = build_sdist(folder)
    for tag in TARGETS:
        build_wheel(sys.executable, sdist, tag)
    build_free_threaded(sdist)
    return sdist


def check(sdist: Path) -> list[str]:
    """Run the checkers over *sdist* and the wheels beside it; return a row about each."""
    wheels = sorted(sdist.parent.glob("*.whl"))
    run(sys.executable, "-m", "twine", "check", "--strict", sdist, *wheels)
    run(sys.executable, "-m", "check_wheel_contents", *wheels)
    run(sys.executable, "-m", "abi3audit", "--strict", *(wheel for wheel in wheels if "-abi3-" in wheel.name))
    with tarfile.open(sdist) as archive:
        kernels = kernels_of(archive.getnames(), r"\.c")
    row = f"{sdist.name:62} {sdist.stat().st_size >> 10:5} KiB  {len(kernels)} kernels in C"
    return [row, *(row_of(wheel, kernels) for wheel in wheels)]


def try_source(sdist: Path) -> str:
    """Run the tests and build the documentation from *sdist*, as a packager would; return the row about it."""
    with TemporaryDirectory() as folder, tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
        (source,) = Path(folder).iterdir()
        begun = monotonic()
        run("make", "-C", source, "test", "docs", CI="")
        return f"{sdist.name}: make test docs in {monotonic() - begun:.0f} s"


def pythons() -> dict[int, str | None]:
    """Return a Python of each minor version that tarshards supports, on PATH or by pyenv; None where there is none."""
    found: dict[int, str | None] = dict.fromkeys(range(11, 15))
    for minor in found:
        names = [f"python3.{minor}", *map(str, Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python"))]
        for name in names:
            if shutil.which(name) and not subprocess.run([name, "-c", ""], capture_output=True).returncode:
                found[minor] = found[minor] or name
    return found


def install(python: str, wheel: Path) -> str:
    """Install *wheel* in a new environment, start a tool, and return the row about it."""
    with TemporaryDirectory() as folder:
        run(python, "-m", "venv", folder)
        inner, before = Path(folder, "bin/python"), bytes_in(folder)
        begun = monotonic()
        run(inner, "-I", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-cache-dir", wheel)
        seconds = monotonic() - begun
        run(inner, "-I", Path(folder, "bin/tarcat"), "--help")
        first, kernels, *_ = run(inner, "-I", "-m", "tarshards").splitlines()
        if not re.fullmatch(r"kernels +(\d+) of \1 compiled", kernels):
            sys.exit(f"{first}: {kernels}")
        return f"{first}: {kernels}; {(bytes_in(folder) - before) / 1e6:.0f} MB in {seconds:.0f} s"


def bytes_in(folder: str) -> int:
    return sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file() and not path.is_symlink())


def main(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    sdist = build(folder)
    print(*check(sdist), sep="\n")
    if not re.search(r"^url = \S", (ROOT / "setup.cfg").read_text(), re.MULTILINE):
        print("setup.cfg has no url: the links and pictures of README.md will be dead where it is shown")
    print(try_source(sdist))
    (wheel,) = folder.glob(f"*-abi3-*_{platform.machine()}.whl")
    for minor, python in pythons().items():
        print(install(python, wheel) if python else f"Python 3.{minor}: not found, not tried")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "dist"))
