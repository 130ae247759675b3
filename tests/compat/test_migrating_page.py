"""What the page on migrating shows does run: ours as it stands, webdataset's with its import changed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from programs import warnings_of

PAGE = Path(__file__).parents[2] / "docs" / "migrating.md"
BLOCKS = re.findall(r"```(python|py)\n(.*?)```", PAGE.read_text(), re.DOTALL)


def run(text: str, folder: Path) -> None:
    program = folder / "program.py"
    program.write_text(text)
    command = [sys.executable, "-W", "error", "-W", "ignore:This DataLoader will create", program]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert (done.returncode, warnings_of(done.stderr)) == (0, "")


def test_our_side_runs(tmp_path):
    run("\n".join(text for kind, text in BLOCKS if kind == "python"), tmp_path)


def test_their_side_runs_with_its_import_changed(tmp_path):
    theirs = [text for kind, text in BLOCKS if kind == "py"]
    assert len(theirs) == 7  # the first example, and six pipelines
    run(BLOCKS[0][1], tmp_path)
    run("\n".join(text.replace("import webdataset as", "import tarshards.webdataset as") for text in theirs), tmp_path)
