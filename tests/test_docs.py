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
