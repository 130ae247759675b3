"""``tarshards --version`` and ``python -m tarshards`` describe the installation."""

from __future__ import annotations

import re
import subprocess
import sys
from configparser import ConfigParser
from importlib import import_module
from pathlib import Path

import pytest
from click import Command
from click.testing import CliRunner

import tarshards
from tarshards import __main__ as program
from tarshards import kernels
from tarshards.samples.codecs import jpeg

ROOT = Path(__file__).parents[1]


def run(*arguments: str) -> str:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True).stdout


def test_version():
    assert run("-m", "tarshards", "--version") == f"tarshards {tarshards.__version__}\n"


def test_report_names_kernels_and_extras():
    text = run("-m", "tarshards")
    assert text.startswith(f"tarshards {tarshards.__version__}, Python {sys.version.split()[0]}")
    assert f"of {len(kernels.__all__)} compiled" in text
    assert f"\nJPEG      decoded by {jpeg.library()}\n" in text
    assert "  torch       torch " in text
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    there = re.findall(r"^  (\w+)", text, re.MULTILINE)
    others = re.search(r"^others    (.*): pip install 'tarshards\[NAME\]'$", text, re.MULTILINE)
    assert sorted([*there, *(others[1].split(", ") if others else ())]) == sorted(setup["options.extras_require"])


def test_report_covers_every_kernel():
    sources = {path.relative_to(ROOT / "tarshards") for path in (ROOT / "tarshards").rglob("*.c")}
    assert {f"kernels/_{name}.c" for name in kernels.__all__} == {*map(str, sources)}


def test_report_without_kernels(monkeypatch):
    monkeypatch.setattr(kernels, "MISSING", kernels.__all__)
    lines = list(program.report())
    assert lines[1] == f"kernels   0 of {len(kernels.__all__)} compiled"
    assert all(name in lines[2] for name in kernels.__all__)
    monkeypatch.setattr(kernels, "MISSING", ["rows"])
    assert "without rows all run in Python" in [*program.report()][2]
    monkeypatch.setattr(jpeg, "library", lambda: None)
    assert "JPEG      decoded by Pillow, image by image: no libjpeg-turbo is found" in program.report()


def test_a_check_where_the_checks_are_removed(monkeypatch):
    monkeypatch.setattr(program.main, "verbs", {})
    done = CliRunner().invoke(program.main, ["chaos"])
    assert done.exit_code == 2
    assert "the first word is an option, not 'chaos'" in done.stderr


def entry_points() -> dict[str, str]:
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    lines = setup["options.entry_points"]["console_scripts"].strip().splitlines()
    return dict(line.split(" = ") for line in lines)


def test_every_tool_is_an_entry_point_and_runs_from_a_checkout():
    assert {path.name for path in (ROOT / "bin").iterdir()} == set(entry_points()) - {"tarshards"}


@pytest.mark.parametrize("name", sorted(entry_points()))
def test_entry_points_are_commands(name):
    module, _, function = entry_points()[name].partition(":")
    assert isinstance(getattr(import_module(module), function), Command)


def test_chaos_is_a_verb():
    assert "--minutes" in run("-m", "tarshards", "chaos", "--help")
    done = subprocess.run([sys.executable, "-m", "tarshards", "peace"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "the first word is chaos, conformance, demo, epoch, resume or shuffle, not 'peace'" in done.stderr
