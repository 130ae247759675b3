"""After `pip install`: the start page works, man finds the manual, and bash, zsh and fish complete command lines."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from programs import BASH_COMPLETION, find, need
from test_guides import steps
from test_install import copy_sources
from test_site import build_site

pytestmark = pytest.mark.interop

ROOT = Path(__file__).parents[1]
TOOLS = sorted(path.name for path in (ROOT / "bin").iterdir())


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A virtual environment into which pip has installed a wheel of the package, without its kernels."""
    folder = tmp_path_factory.mktemp("installed")
    sources = folder / "sources"
    sources.mkdir()
    copy_sources(sources)
    build = [sys.executable, "setup.py", "-q", "bdist_wheel"]
    subprocess.run(build, cwd=sources, env={**os.environ, "CC": "false"}, capture_output=True, check=True)
    (wheel,) = (sources / "dist").iterdir()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    pip = [sys.executable, "-m", "pip", "--python", folder / "venv/bin/python", "install", "-q"]
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # which may lead to a checkout
    subprocess.run([*pip, "--no-deps", "--no-index", "--no-warn-script-location", wheel], env=alone, check=True)
    (packages,) = (folder / "venv/lib").glob("python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return folder / "venv"


@pytest.fixture
def environment(installed, tmp_path) -> dict[str, str]:
    """The environment of a shell in which the virtual environment is active, as docs/tools/index.md sets it."""
    ours = {name: value for name, value in os.environ.items() if name not in ("MANPATH", "PYTHONPATH", "LC_ALL")}
    data = f"{installed}/share:/usr/local/share:/usr/share"
    path = f"{installed}/bin:{os.environ['PATH']}"
    return {**ours, "PATH": path, "XDG_DATA_DIRS": data, "HOME": str(tmp_path), "TERM": "dumb", "MANPAGER": "cat"}


def test_the_first_ten_minutes_of_a_newcomer(environment, tmp_path, tmp_path_factory):
    """The blocks of the start page, as the site has it, in order, in an empty folder."""
    pytest.importorskip("torch", reason="needs torch")
    page = tmp_path_factory.mktemp("site") / "start.md"
    page.write_text(build_site.text_of(ROOT / "docs/start.md", "start.md"))
    printed = ""
    for kind, text in steps(str(page)):
        if kind.endswith(".py"):
            (tmp_path / kind).write_text(text)
            continue
        command = {"bash": ["bash", "-euo", "pipefail", "-c", text], "python": ["python", "-c", text]}[kind]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{text}\n{done.stderr}"
        printed += done.stdout
    assert "kernels   0 of 8 compiled" in printed
    assert re.findall(r"^begins at sample (\d+)", printed, re.MULTILINE) == ["0", "96", "192"]


@pytest.mark.parametrize("tool", [*TOOLS, "tarshards"])
def test_man_finds_the_page_of_each_program(tool, installed, environment):
    need("man")
    found = subprocess.run(["man", "-w", tool], env=environment, capture_output=True, text=True)
    assert found.stdout.strip() == f"{installed}/share/man/man1/{tool}.1", found.stderr
    shown = subprocess.run(["man", "--warnings", tool], env=environment, capture_output=True, text=True)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert f"{tool} - " in shown.stdout
    assert "--version" in shown.stdout


def type_in(shell: list[str], setup: str, keys: bytes, folder: Path, environment: dict[str, str]) -> str:
    """Return what a terminal shows in which *shell* runs *setup* and gets *keys*."""
    primary, secondary = os.openpty()
    streams = {"stdin": secondary, "stdout": secondary, "stderr": secondary}
    process = subprocess.Popen(shell, cwd=folder, env=environment, start_new_session=True, **streams)
    os.close(secondary)

    def read_until(end: bytes) -> Iterator[bytes]:
        shown = b""
        while end not in shown:
            chunk = os.read(primary, 4096)
            shown += chunk
            yield chunk

    os.write(primary, f"{setup}; echo rea''dy\n".encode())
    b"".join(read_until(b"ready"))
    os.write(primary, keys)
    shown = b""
    with suppress(OSError):  # the end of what a terminal shows
        shown = b"".join(read_until(b"never"))
    os.close(primary)
    process.wait(60)
    return shown.decode()


def test_bash_completes(installed, environment, tmp_path):
    need(BASH_COMPLETION)
    (tmp_path / "images-000.tar").touch()
    setup = '. /usr/share/bash-completion/bash_completion; tar2tsv() { echo "<$*>" >shown; }'
    type_in(["bash", "--norc", "-i"], setup, b"tar2tsv --nohea\t ima\t\nexit\n", tmp_path, environment)
    assert (tmp_path / "shown").read_text() == "<--noheader images-000.tar>\n"


def test_zsh_completes(installed, environment, tmp_path):
    need("zsh")
    (tmp_path / "images-000.tar").touch()
    setup = f"fpath+=({installed}/share/zsh/site-functions); autoload -Uz compinit; compinit -u; "
    setup += 'tar2tsv() { echo "<$*>" >shown }'
    type_in(["zsh", "-f", "-i"], setup, b"tar2tsv --nohea\t ima\t\nexit\n", tmp_path, environment)
    assert (tmp_path / "shown").read_text() == "<--noheader images-000.tar>\n"


def test_fish_completes(installed, environment, tmp_path):
    need("fish")
    (tmp_path / "images-000.tar").touch()
    for line, expected in (
        ("tar2tsv --nohea", "--noheader"),
        ("tar2tsv ima", "images-000.tar"),
        ("tarcache ve", "verify"),
    ):
        command = [find("fish"), "-c", f"complete -C '{line}'"]
        found = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
        assert found.stdout.split("\t")[0].strip() == expected
