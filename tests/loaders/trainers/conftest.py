"""Real trainers, each where it is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

collect_ignore_glob = [
    pattern
    for package, pattern in {"pytorch_lightning": "*lightning*.py", "accelerate": "*accelerate*.py"}.items()
    if not find_spec(package)
]


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
