"""Tools that the fork server starts are as those that start by themselves."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fork_server import BIN
from leftovers import wait_until
from programs import need


@pytest.fixture(params=["forked", "started"])
def shell(request, tmp_path, path_with_tools, path_with_started_tools):
    """Return a function that runs a line of bash, in which `tarproc -c` shows what a tool was given."""
    if request.param == "forked":
        need("a C compiler")
    (tmp_path / "a").write_text("x")
    subprocess.run(["tar", "-cf", "a.tar", "a"], cwd=tmp_path, check=True)

