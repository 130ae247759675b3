"""The tool: interrupted or killed it leaves whole files, and no process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

import pytest
from leftovers import processes_with, wait_until
from soak import SOAK, some

from tarshards import write_samples
from tarshards.index.build import build_index
from tarshards.index.sidecar import Index


@pytest.fixture(scope="module")
def shard(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("shard") / "a.tar"
    write_samples(({"__key__": f"{j:06d}", "txt": "x" * 3500} for j in range(3000)), path)
    return path


@pytest.fixture
def start(tmp_path, shard, path_with_started_tools):
    """Return a function that starts a line of bash in tmp_path, where shards wait to be indexed."""
    for i in range(6):
        os.link(shard, tmp_path / f"a-{i}.tar")

    def start(line: str) -> subprocess.Popen:
        environment = {**os.environ, "PATH": path_with_started_tools, "MARK": str(tmp_path)}
        command = ["bash", "-c", f"exec {line}"]
        return subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)

    return start


@pytest.mark.soak
@pytest.mark.parametrize(
    ("options", "number"),
    some([*product(["", "-j 2", "-j 2 --crc"], [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])], 2),
)
def test_interrupted_at_any_moment(tmp_path, start, number, options):
    line = f"tarindex -q {options} 'a-0.tar' a-1.tar a-2.tar a-3.tar a-4.tar a-5.tar"
    for delay in some((0.05, 0.1, 0.15, 0.3), 2):
        process = start(line)
        time.sleep(delay)
        process.send_signal(number)
        _, errors = process.communicate(timeout=100)
        assert "module.main" not in errors  # before that it only begins: Python imports
        wait_until(lambda: not processes_with(str(tmp_path)))
        names = [path.name for path in tmp_path.iterdir()]
        if number != signal.SIGKILL:
            assert [name for name in names if name.startswith(".")] == []
        for name in names:
            if name.endswith(".index") and not name.startswith("."):
                Index.load(str(tmp_path / name.removesuffix(".index")))
    process = start(line)
    assert process.communicate(timeout=100)[1] == ""
    keys = build_index(str(tmp_path / "a-0.tar")).keys
    assert all(Index.load(str(tmp_path / f"a-{i}.tar")).keys == keys for i in range(6))


def test_a_signal_while_processes_start(tmp_path, start):
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal\n"
        "from multiprocessing.process import BaseProcess\n"
        "begin = BaseProcess.start\n"
        "def start(self):\n"
        "    begin(self)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "BaseProcess.start = start\n"
    )
    process = start(f"env PYTHONPATH={tmp_path} tarindex -q -j 2 a-0.tar a-1.tar a-2.tar a-3.tar a-4.tar a-5.tar")
    assert "Traceback" not in process.communicate(timeout=60)[1]
    assert process.returncode == 128 + signal.SIGTERM
    wait_until(lambda: not processes_with(str(tmp_path)))


@pytest.mark.soak
@pytest.mark.parametrize(
    ("method", "number"),
    [
        *product(["fork", "spawn", "forkserver"], [None, signal.SIGINT, signal.SIGTERM, signal.SIGKILL]),
    ]
    if SOAK > 1
    else [
        *product(["fork", "forkserver"], [signal.SIGKILL]),
        *product(["spawn"], [None, signal.SIGINT, signal.SIGKILL]),
    ],
)
def test_processes_may_begin_in_any_way(tmp_path, start, method, number):
    (tmp_path / "sitecustomize.py").write_text(f"import multiprocessing\nmultiprocessing.set_start_method({method!r})")
    process = start(f"env PYTHONPATH={tmp_path} tarindex -q -j 2 --crc a-0.tar a-1.tar a-2.tar a-3.tar a-4.tar a-5.tar")
    if number is not None:
        wait_until(lambda: list(tmp_path.glob("a-*.index")))
        process.send_signal(number)
    _, errors = process.communicate(timeout=100)
    assert "Traceback" not in errors
    wait_until(lambda: not processes_with(str(tmp_path)))
    indexed = [path for path in tmp_path.iterdir() if path.name.endswith(".index")]
    if number is None:
        assert (process.returncode, len(indexed)) == (0, 6)
    for path in indexed:
        Index.load(str(path).removesuffix(".index"))


def test_numpy_is_not_waited_for(tmp_path):
    write_samples([{"__key__": "a", "txt": "x"}], str(tmp_path / "a.tar"))
    code = "import sys; from tarshards.cli import tarindex; tarindex.main(sys.argv[1:], standalone_mode=False)"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; print(*sys.modules)", "a.tar"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    )
    assert not {"numpy", "multiprocessing", "concurrent.futures", "fsspec"} & set(done.stdout.split())
    assert Index.load(str(tmp_path / "a.tar")).keys == ["a"]
