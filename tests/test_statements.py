"""Statements of the documentation about tools and loaders, each beside a run that shows it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from with_torch import ShardDataset, ShardLoader, needs_torch

from tarshards import ShardWriter, World
from tarshards.errors import WorldError
from tarshards.tar.read import CUT

pytestmark = pytest.mark.docs

ROOT = Path(__file__).parents[1]


def says(page: str, words: str) -> bool:
    """Return whether a page has these words, wherever its lines break."""
    return words in " ".join((ROOT / page).read_text().split())


@needs_torch
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_ranks_need_a_shard_and_workers_do_not(tmp_path):
    assert says(
        "docs/training.md", "ranks, each of which needs at least one, and their workers, some of which may have none"
    )
    with ShardWriter(str(tmp_path / "s-{shard}.tar"), index=False) as writer:
        for i in range(6):
            writer.write({"__key__": f"{i}", "cls": i})
    url = str(tmp_path / "s-0.tar")
    loader = ShardLoader(ShardDataset(url, index=False).decode(), 2, num_workers=3)
    assert [number for batch in loader for number in batch["cls"].tolist()] == list(range(6))
    with pytest.raises(WorldError, match="every rank needs at least one"):
        list(ShardDataset(url, index=False, world=World(0, 2)))


def test_the_exit_code_in_the_notebook_of_the_tools():
    cells = json.loads((ROOT / "notebooks/tools.ipynb").read_text())["cells"]
    (number,) = [at for at, cell in enumerate(cells) if "the exit code is" in "".join(cell["source"])]
    assert "the exit code is 0 as long as `--failed` and `--max-errors` allow" in "".join(cells[number]["source"])
    shown = "".join("".join(output.get("text", "")) for output in cells[number + 1]["outputs"])
    assert "failed           2 samples" in shown
    assert "exit 0" in shown


def test_the_mark_of_a_tool_that_failed():
    """tests/cli/test_failed_producers.py shows that every reader reports it."""
    name = CUT[:100].rstrip(b"\0").decode()
    assert says("docs/tools/tarproc.md", f"the header of a member `{name}` without its data, which makes every reader")


def test_what_a_signal_leaves_behind(tmp_path, path_with_started_tools):
    words = "next to the unfinished shard, which the next writer of NAME removes, and `.tarshards.lock`"
    words = f"Only `kill -9` and a power cut leave something behind: a file `.NAME.0.tmp` {words}"
    assert says("docs/tools/tarsplit.md", words)
    with ShardWriter(str(tmp_path / "s-{shard}.tar"), index=False) as writer:
        for i in range(6):
            writer.write({"__key__": f"{i}", "cls": i})
    environment = {**os.environ, "PATH": path_with_started_tools}
    left = {}
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        folder = tmp_path / number.name
        folder.mkdir()
        tool = subprocess.Popen(
            ["tarsplit", "-q", "-o", "out-%d.tar"], cwd=folder, env=environment, stdin=subprocess.PIPE
        )
        tool.stdin.write((tmp_path / "s-0.tar").read_bytes()[:4096])
        tool.stdin.flush()
        deadline = time.monotonic() + 60
        while not list(folder.glob(".out-0.tar.0.tmp")) and time.monotonic() < deadline:
            time.sleep(0.01)
        tool.send_signal(number)
        tool.stdin.close()
        assert tool.wait(60) == (-9 if number == signal.SIGKILL else 128 + number)
        left[number.name] = sorted(path.name for path in folder.iterdir())
    assert left == {name: [] for name in ("SIGHUP", "SIGINT", "SIGTERM")} | {
        "SIGKILL": [".out-0.tar.0.tmp", ".tarshards.lock"]
    }
    subprocess.run(["tarsplit", "-q", "-o", "out-%d.tar", "../s-0.tar"], cwd=folder, env=environment, check=True)
    assert [path.name for path in folder.iterdir()] == ["out-0.tar"]
