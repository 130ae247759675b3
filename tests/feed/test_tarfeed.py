"""`tarfeed serve -p`: several processes, which are replaced and end together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import feed_specs
import pytest
from soak import SOAK
from test_feeder_faults import free_port
from test_remote_loader import batches

from tarshards import RemoteLoader
from tarshards.feed.feeders import Feeders, ask_status

pytest.importorskip("zmq")

TOOL = str(Path(__file__).parents[2] / "bin/tarfeed")


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_there(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


def until(condition) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, *[signal.SIGINT] * (SOAK > 1)])
def test_processes_are_replaced_and_end_together(number, monkeypatch):
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    )
    port = free_port() % 12000 + 20000  # below those of connections, as one could take it during a restart
    command = [sys.executable, TOOL, "serve", "feed_specs:arrays", "--bind", f"tcp://127.0.0.1:{port}", "-p", "2"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    loader = RemoteLoader("feed_specs:arrays", f"tcp://127.0.0.1:{{{port}..{port + 1}}}", patience=1, timeout=60)
    expected = batches(feed_specs.arrays())
    assert batches(loader) == batches(feed_specs.arrays())
    first = children(process.pid)
    assert len(first) == 2
    os.kill(first[0], signal.SIGKILL)
    until(lambda: len(set(children(process.pid)) - {first[0]}) == 2)
    loader.set_epoch(0)
    assert batches(loader) == expected
    last = children(process.pid)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == (-9 if number == signal.SIGKILL else 128 + number)
    assert f"the feeder at tcp://127.0.0.1:{port} was killed by signal 9; it is replaced" in said
    assert "Traceback" not in said
    until(lambda: not any(map(is_there, last)))
    loader.close()


def test_status_sleeps_while_it_waits(monkeypatch):
    """The events of connections that fail are read; otherwise none of the waits would last."""
    active, waits = Feeders.active, []
    monkeypatch.setattr(Feeders, "active", lambda self, seconds: waits.append(seconds) or active(self, seconds))
    silent = f"tcp://127.0.0.1:{free_port()}"
    assert ask_status([silent], keys=None, encrypted=False, seconds=0.5) == {silent: None}
    assert sum(seconds > 0.01 for seconds in waits) < 50, "but the last, which are shorter than a poll can be"
