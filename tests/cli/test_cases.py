"""The golden shell pipes: cases/<tool>/<case>/cmd prints expout, and experr on stderr (no file: nothing).

A file ``needs`` beside them names the programs without which the case is skipped.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from programs import need

CASES = Path(__file__).with_name("cases")
BIN = Path(__file__).parents[2] / "bin"


FOREIGN = ("kujob/places", "tarimport/types")  # cases that need kubernetes or pyarrow


def _param(case: Path):
    name = str(case.relative_to(CASES))
    return pytest.param(case, id=name, marks=pytest.mark.interop if name in FOREIGN else ())


@pytest.mark.parametrize("case", [_param(case) for case in sorted(CASES.glob("*/*"))])
def test_case(case, tmp_path, path_with_tools):
    if (case / "needs").exists():
        need(*(case / "needs").read_text().split())
    environment = {**os.environ, "PATH": path_with_tools, "LC_ALL": "C.UTF-8"}
    command = ["bash", "-euo", "pipefail", str(case / "cmd")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, stdin=subprocess.DEVNULL)
    expected = [(case / name).read_bytes() if (case / name).exists() else b"" for name in ("expout", "experr")]
    assert [done.stdout, done.stderr] == expected
    assert done.returncode == 0, "a failing tool is written as: tool ... || echo $?"


@pytest.mark.parametrize("tool", sorted(tool.name for tool in BIN.iterdir()))
def test_every_tool_has_cases(tool):
    assert len(list((CASES / tool).iterdir())) >= 6
