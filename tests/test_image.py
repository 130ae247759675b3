"""The Dockerfile builds an image in which the command of a Job runs; tested without Docker."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from configparser import ConfigParser
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tarshards.run.jobs.kubernetes_objects import WORKER

ROOT = Path(__file__).parents[1]
TEXT = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", "")
#: The instructions of each stage; the last stage is the image.
STAGES = [
    [tuple(line.split(None, 1)) for line in stage.splitlines() if line]
    for stage in re.split(r"^(?=FROM )", TEXT, flags=re.M)[1:]
]
SETUP = ConfigParser()
SETUP.read(ROOT / "setup.cfg")
PROGRAMS = re.findall(r"^(\S+) =", SETUP["options.entry_points"]["console_scripts"], re.MULTILINE)


def instructions(word: str, stages: list = STAGES) -> list[str]:
    return [rest for stage in stages for found, rest in stage if found == word]


def ignored(path: str) -> bool:
    """Whether .dockerignore keeps *path*, or a folder above it, from the build; the last rule that fits counts."""
    parts = path.split("/")
    above = ["/".join(parts[:count]) for count in range(1, len(parts) + 1)]
    result = False
    for rule in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = rule.removeprefix("!")
        if rule.startswith("#"):
            continue
        if pattern.startswith("**/"):
            fits = any(fnmatch(part, pattern[3:]) for part in parts)
        else:
            fits = any(each.count("/") == pattern.count("/") and fnmatch(each, pattern) for each in above)
        if fits:
            result = not rule.startswith("!")
    return result


@pytest.fixture
def checkout(tmp_path) -> Path:
    """The files that the Dockerfile copies from this checkout, at their targets."""
    for words in map(str.split, instructions("COPY")):
        *sources, target = words
        for source in sources if not words[0].startswith("--from=") else ():
            places = [ROOT / source, *(ROOT / source).rglob("*")]
            found = [str(place.relative_to(ROOT)) for place in places if place.is_file()]
            found = [file for file in found if not ignored(file)]
            assert found, f"COPY {source}: there is none, or .dockerignore names it"
            for file in found:
                inside = Path(file).name if file == source else Path(file).relative_to(source)
                place = tmp_path / target.strip("/") / inside
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / file, place)
    return tmp_path / "checkout"


@pytest.mark.interop
def test_what_is_copied_is_enough_to_build_the_package(checkout):
    build = [sys.executable, "setup.py", "-q", "build", "--build-lib", "lib"]
    done = subprocess.run(build, cwd=checkout, env={**os.environ, "CC": "cc"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    modules = {path.relative_to(ROOT) for path in ROOT.glob("tarshards/**/*.py")}
    built = {path.relative_to(checkout / "lib") for path in (checkout / "lib").glob("tarshards/**/*.py")}
    assert built == modules
    built = [path.relative_to(checkout / "lib") for path in (checkout / "lib").glob("tarshards/**/*.so")]
    kernels = {".".join([*path.parent.parts, path.name.split(".")[0]]) for path in built}
    assert kernels == (imported() if shutil.which("cc") else set())


def imported() -> set[str]:
    """The modules that the build imports, so that it fails where one was not compiled."""
    (install,) = [run for run in instructions("RUN") if "pip install" in run]
    (program,) = re.findall(r'python -c "([^"]*)"', install)
    (statement,) = ast.parse(program).body
    assert isinstance(statement, ast.ImportFrom)
    return {f"{statement.module}.{alias.name}" for alias in statement.names}


def test_the_extras_exist():
    (argument,) = instructions("ARG")
    name, _, extras = argument.partition("=")
    assert {"s3", "gcs", "http"} == set(extras.split(",")) <= set(SETUP["options.extras_require"])
    assert f'"/checkout[${name}]"' in TEXT
    for text in re.findall(r"--build-arg EXTRAS=(\S+)", (ROOT / "Dockerfile").read_text()):
        assert set(text.split(",")) <= set(SETUP["options.extras_require"])


def test_the_command_of_a_job_is_a_program_of_the_image():
    image = STAGES[-1:]
    (installed,) = re.findall(r"python -m venv (\S+)", TEXT)
    assert f"--from=build {installed} {installed}" in instructions("COPY", image)
    assert instructions("ENV", image) == [f"PATH={installed}/bin:$PATH"]
    (entry,), (command,) = (map(json.loads, instructions(word, image)) for word in ("ENTRYPOINT", "CMD"))
    assert f"install -y --no-install-recommends {entry[0]} " in " ".join(instructions("RUN", image))
    assert {WORKER[0], command[0]} <= set(PROGRAMS)


def test_the_image_follows_the_rules():
    bases = [rest.split(" AS ")[0] for rest in instructions("FROM")]
    assert len(set(bases)) == 1, "what is compiled in one must run in the other"
    assert all(re.fullmatch(r"python:3\.\d+-slim-\w+", base) for base in bases), "a pinned Python and Debian"
    least = tuple(map(int, SETUP["options"]["python_requires"].removeprefix(">=").split(".")))
    assert tuple(map(int, bases[0].split(":")[1].split("-")[0].split("."))) >= least
    for run in instructions("RUN"):
        if "apt-get" in run:
            assert re.fullmatch(
                r"apt-get update +&& apt-get install -y --no-install-recommends .* +&& rm -rf /var/lib/apt/lists/\*",
                run,
            )
        assert "pip install" not in run or "--no-cache-dir" in run
        assert ";" not in run.split('-c "')[0], "a command that fails must end the build"
    assert not instructions("ADD")
    users = instructions("USER")
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", users[-1]), "runAsNonRoot wants the number"
    assert f"--uid {users[-1].split(':')[0]} " in TEXT
    assert "gcc" not in " ".join(instructions("RUN", STAGES[-1:]))


@pytest.mark.parametrize(
    ("path", "is_ignored"),
    [
        ("setup.py", False),
        ("tarshards/kernels/_tar.c", False),
        ("tarshards/kernels/_tar.abi3.so", True),
        ("tarshards/tar/__pycache__/read.cpython-311.pyc", True),
        (".git/config", True),
        (".venv/bin/python", True),
        ("data/digits-00.tar", True),
        ("tests/test_image.py", True),
    ],
)
def test_what_the_build_sees(path, is_ignored):
    assert ignored(path) is is_ignored
