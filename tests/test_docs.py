"""Every tool has help, a documentation page, an entry point and an entry in the changelog."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOOLS = sorted(path.name for path in (ROOT / "bin").iterdir())


@pytest.mark.parametrize("tool", TOOLS)
def test_every_tool_has_help_and_a_page(tool, path_with_tools):
    page = (ROOT / "docs/tools" / f"{tool}.md").read_text()
    if tool == "tarscat":  # another name of tarcat
        assert "[tarcat](tarcat.md)" in page
        page += (ROOT / "docs/tools/tarcat.md").read_text()
    environment = {**os.environ, "PATH": path_with_tools}
    told = subprocess.run([tool, "--help"], capture_output=True, text=True, check=True, env=environment).stdout
    assert told.startswith(f"Usage: {tool} ")
    for option in set(re.findall(r"--[a-z0-9-]+", told)) - {"--help", "--version"}:
        assert option in page, f"docs/tools/{tool}.md does not tell of {option}"
    assert "xit" in page, "the page tells the exit codes"


@pytest.mark.parametrize("tool", TOOLS)
def test_every_tool_is_in_the_index_the_changes_and_the_setup(tool):
    assert tool in (ROOT / "docs/tools/index.md").read_text()
    assert f"`{tool}`" in (ROOT / "CHANGELOG.md").read_text()
    assert f"\n    {tool} = tarshards.cli." in (ROOT / "setup.cfg").read_text()


def test_pages_count_and_name_all_tools():
    readme = (ROOT / "README.md").read_text()
    assert re.findall(r"the (\S+) tools\b", readme) == [str(len(TOOLS))]


@pytest.mark.parametrize("page", ["README.md", "docs/architecture.md"])
def test_pages_describe_each_package(page):
    text = (ROOT / page).read_text()
    rows = re.findall(r"^\| `(\w+)` \|", text[text.index("## Packages") :], re.MULTILINE)
    folder = ROOT / "tarshards"
    packages = {path.parent.name for path in folder.glob("*/__init__.py")}
    modules = {path.stem for path in folder.glob("*.py") if not path.stem.startswith("_")}
    assert sorted(rows) == sorted(packages | modules)


def test_each_law_names_tests_that_exist():
    page = (ROOT / "docs/invariants.md").read_text()
    laws = re.split(r"^\d+\. ", page[: page.index("## Where")], flags=re.MULTILINE)[1:]
    assert len(laws) == 10
    for law in laws:
        tests = re.findall(r"`(tests/\S+\.py)::(\w+)`", law)
        assert tests, law
        for path, name in tests:
            assert f"\ndef {name}(" in (ROOT / path).read_text(), (path, name)
