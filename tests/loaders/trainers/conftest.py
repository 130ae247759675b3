"""Real trainers, each where it is installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

GUIDE = Path(__file__).parents[3] / "docs/guides/trainers.md"
PACKAGES = ("accelerate", "grain", "pytorch_lightning", "megatron")

collect_ignore_glob = [f"*{package.removeprefix('pytorch_')}*.py" for package in PACKAGES if not find_spec(package)]


@pytest.fixture
def run_program() -> Callable[..., None]:
    """Return a function that runs a program of this folder with arguments, without rank variables of ours."""

    def run(name: str, *arguments: Any, **environment: str) -> None:
        ours = {key: value for key, value in os.environ.items() if key not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
        command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name(name)), *map(str, arguments)]
        everywhere = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, env=ours | everywhere | environment, capture_output=True, text=True, timeout=500, check=False
        )
        assert done.returncode == 0, done.stderr[-4000:]

    return run


@pytest.fixture
def from_guide(tmp_path, monkeypatch) -> Callable[[str], ModuleType]:
    """Return a function that imports a file of the guide to trainers, in a folder with its pairs."""
    files = dict(re.findall(r"^```python\n# (\w+)\.py\n(.*?)^```", GUIDE.read_text(), re.DOTALL | re.MULTILINE))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)

    def load(name: str) -> ModuleType:
        Path(f"{name}.py").write_text(files[name])
        monkeypatch.delitem(sys.modules, name, raising=False)
        return import_module(name)

    load("pairs")
    return load


@pytest.fixture
def torchtitan(monkeypatch) -> None:
    """torchtitan's package, which `make test-interop` installs in a separate folder."""
    monkeypatch.syspath_prepend(Path(sys.prefix, "torchtitan"))
    pytest.importorskip("torchtitan", reason="torchtitan is not installed")
