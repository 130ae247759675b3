"""The command ``tarshards``, also as ``python -m tarshards``: all tools, checks, and a report of the installation."""

from __future__ import annotations

import os
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
from tarshards import kernels
from tarshards.cli import tarshards as program
from tarshards.samples.codecs import jpeg

ROOT = Path(__file__).parents[2]


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
    assert lines[3].strip() == kernels.cure()
    monkeypatch.setattr(kernels, "MISSING", ["rows"])
    assert "without rows all run in Python" in [*program.report()][2]
    monkeypatch.setattr(jpeg, "library", lambda: None)
    for is_compiled, reason in (True, "no libjpeg-turbo is found"), (False, "its kernel is not compiled"):
        monkeypatch.setattr(kernels, "IS_COMPILED", is_compiled)
        assert f"JPEG      decoded by Pillow, image by image: {reason}" in program.report()


def test_commands_of_a_removed_part_are_unknown(monkeypatch):
    monkeypatch.setattr(program, "find_spec", lambda name: None if name.endswith(("tarfeed", "chaos_check")) else name)
    told = CliRunner().invoke(program.main, ["--help"]).stdout
    assert "  epoch " in told
    for name in "chaos", "feed":
        assert f"  {name} " not in told
        done = CliRunner().invoke(program.main, [name])
        assert done.exit_code == 2
        assert f"there is no command {name!r}" in done.stderr


def test_commands_of_other_programs_name_commands_that_there_are():
    names = {name for rows in program.TASKS.values() for name in rows}
    assert not program.OTHERS.keys() & names
    assert {meant.split()[0] for meant in program.OTHERS.values()} <= names | {"--help", "--version"}


def tool_of(name: str) -> str:
    return program.MODULES.get(name, f"tar{name}")


def test_every_tool_is_a_command_in_the_groups_of_the_site():
    menu = re.search(r"\n  - Tools:\n(.*?)\n  - ", (ROOT / "mkdocs.yml").read_text(), re.DOTALL)[1]
    found = {}
    for line in menu.splitlines():
        if heading := re.match(r"      - (\w.*):", line):
            found[heading[1]] = names = []
        elif page := re.match(r"          - tools/(\w+)\.md", line):
            names.append(page[1])
    others = {"tarscat", "kujob"}
    tasks = {task: {tool_of(name) for name in rows} for task, rows in program.TASKS.items() if task != program.CHECKS}
    assert tasks == {task: {*names} - others for task, names in found.items()}
    assert set().union(*tasks.values()) == entry_points().keys() - others - {"tarshards"}


@pytest.mark.parametrize(
    "name", [name for task, rows in program.TASKS.items() if task != program.CHECKS for name in rows]
)
def test_a_command_is_its_tool(name, path_with_tools):
    """Its help differs only by the name of the program."""
    environment = {**os.environ, "PATH": path_with_tools}

    def told(*words: str) -> list[str]:
        done = subprocess.run(
            [*words, "--help"], env=environment, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL
        )
        return done.stdout.partition("\n\n")[2].split("\n")

    assert told("tarshards", name) == told(tool_of(name))


def test_help_imports_no_tool():
    command = [sys.executable, "-X", "importtime", str(ROOT / "bin/tarshards"), "--help"]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    loaded = {line.split("|")[-1].strip() for line in report.splitlines()}
    ours = {name for name in loaded if name.startswith("tarshards.cli.")}
    assert ours == {"tarshards.cli.program", "tarshards.cli.terminal"}


def entry_points() -> dict[str, str]:
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    lines = setup["options.entry_points"]["console_scripts"].strip().splitlines()
    return dict(line.split(" = ") for line in lines)


def test_every_tool_is_an_entry_point_and_runs_from_a_checkout():
    assert {path.name for path in (ROOT / "bin").iterdir()} == set(entry_points())


@pytest.mark.parametrize("name", sorted(entry_points()))
def test_entry_points_are_commands(name):
    module, _, function = entry_points()[name].partition(":")
    assert isinstance(getattr(import_module(module), function), Command)


def test_chaos_is_a_verb():
    assert "--minutes" in run("-m", "tarshards", "chaos", "--help")
    done = subprocess.run([sys.executable, "-m", "tarshards", "peace"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "there is no command 'peace'" in done.stderr
