"""Each part can be removed: a copy without its files imports, shows the help of every tool, and passes tests.

``make test`` removes all parts at once; ``make soak`` also removes each part alone.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from parts import PARTS, ROOT, PartFiles, needed
from programs import need
from soak import SOAK

EACH = ["all", *[pytest.param(part, marks=pytest.mark.soak) for part in PARTS] * (SOAK > 1)]
#: Tests of the core that take a second each.
TESTS = [f"tests/{name}.py" for name in ("tar/test_tar_reading", "samples/test_samples", "index/test_sidecar")]
#: Imports all modules whose dependencies are installed, and shows the help of each program and its verbs.
PROGRAM = """
from configparser import ConfigParser
from importlib import import_module
from importlib.util import find_spec
from pkgutil import walk_packages

from click.testing import CliRunner

import tarshards

for module in walk_packages(tarshards.__path__, "tarshards."):
    if not module.name.endswith(".__main__"):
        try:
            import_module(module.name)
        except ModuleNotFoundError as error:
            if f"{error.name}.".startswith("tarshards."):
                raise
exec("from tarshards import *")
if not find_spec("tarshards.samples.codecs.media"):
    for word in "audio", "video":
        assert not hasattr(tarshards.readers, word)
        try:
            tarshards.ops.decode([], word)
        except ValueError as error:
            assert str(error).startswith(f"unknown imagespec {word!r}; known: l8 "), error
        else:
            raise AssertionError(word)
setup = ConfigParser()
setup.read("setup.cfg")
for line in setup["options.entry_points"]["console_scripts"].strip().splitlines():
    module, function = line.partition(" = ")[2].split(":")
    program = getattr(import_module(module), function)
    for words in ([], *([verb] for verb in getattr(program, "verbs", ()))):
        shown = CliRunner().invoke(program, [*words, "--help"])
        assert shown.exit_code == 0, (line, words, shown.output, shown.exception)
"""


@pytest.mark.parametrize("part", EACH)
def test_a_part_is_removed(part, tmp_path):
    need("git")
    if not (ROOT / ".git").exists():
        pytest.skip("this is no checkout")
    removed = [files for name, files in PARTS.items() if part in ("all", name) or part in needed(name)]
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True)
    kernels = [str(path.relative_to(ROOT)) for path in ROOT.glob("tarshards/kernels/*.so")]
    for name in [*listed.stdout.decode().split("\n"), *kernels]:
        if name and (ROOT / name).is_file() and not any(files.has(name) for files in removed):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            link(ROOT / name, tmp_path / name)
    lines = (ROOT / "setup.cfg").read_text().splitlines(keepends=True)
    (tmp_path / "setup.cfg").unlink()
    (tmp_path / "setup.cfg").write_text("".join(line for line in lines if not is_of(line, removed)))
    run(tmp_path, "-c", PROGRAM)
    if SOAK > 1:
        run(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not soak", *TESTS)


def link(path: Path, copy: Path) -> None:
    try:
        os.link(path, copy)
    except OSError:  # another file system
        shutil.copy(path, copy)


def is_of(line: str, removed: list[PartFiles]) -> bool:
    """Return whether a line of setup.cfg names a command of a removed part."""
    entry = re.match(r"\s+[\w-]+ = ([\w.]+):", line)
    return entry is not None and any(files.has(f"{entry[1].replace('.', '/')}.py") for files in removed)


def run(folder: Path, *arguments: str) -> None:
    done = subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
