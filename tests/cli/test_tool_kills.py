"""Killed at any moment, a tool leaves whole shards or none; run again, it gives the same output as without the kill."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import time
from itertools import product
from pathlib import Path

import pytest
from leftovers import processes_with, wait_until
from soak import SOAK

from tarshards import write_samples

pytestmark = pytest.mark.soak

IMPORT = 'module = import_module("tarshards.cli."'  # the line of bin/ that imports a tool
COUNT = 4000 if SOAK > 1 else 1000
LINES = {
    "tarsort": "tarsort -q -M 100KB --tmpdir spill all.tar -o out/sorted.tar --overwrite",
    "tarsort --shuffle": "tarsort -q --shuffle -M 100KB --tmpdir spill all.tar -o out/sorted.tar --overwrite",
    "tarsort --regroup": "tarsort -q --regroup --sort txt -M 100KB --tmpdir spill all.tar -o out/a.tar --overwrite",
    "tarsplit": "tarsplit -q -n 150 -o out/a all.tar --overwrite",
    "tarsplit --ratios": "tarsplit -q -s 250KB --ratios x=.5,y=.5 -o out/a all.tar --overwrite --post 'cp {} {}.copy'",
    "targrep": "targrep -q '[0-4]$' all.tar -o out/a.tar --overwrite",
    "tarmerge": (
        "tarmerge -q -M 100KB --tmpdir spill all.tar 'pipe:tarsort -q -r all.tar' --conflict first "
        "-o out/a.tar --overwrite"
    ),
    "tarmix": "tarmix -q all.tar:2 all.tar:1 --until 2500 --rekey '{index}' -o out/a.tar --overwrite",
    "tar2json": "tar2json -q all.tar -o out/a.json --overwrite",
}


@pytest.fixture(scope="module")
def shard(tmp_path_factory) -> Path:
    path, rng = tmp_path_factory.mktemp("shard") / "all.tar", random.Random(0)
    samples = ({"__key__": f"{i * 7919 % COUNT:06d}", "txt": rng.randbytes(450).hex()} for i in range(COUNT))
    write_samples(samples, path)
    return path


@pytest.fixture
def start(tmp_path, shard, path_with_started_tools):
    """Return a function that starts a line of bash in tmp_path, in which all.tar waits to be worked on."""
    shutil.copy(shard, tmp_path)
    for folder in ("out", "spill"):
        (tmp_path / folder).mkdir()

    def start(line: str) -> subprocess.Popen:
        environment = {**os.environ, "PATH": path_with_started_tools, "MARK": str(tmp_path)}
        command = ["bash", "-c", f"exec {line}"]
        return subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)

    return start


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def undisturbed(start, line: str, out: Path) -> tuple[dict[str, bytes], float]:
    """Return the files that the line writes, and its duration; empty *out* again."""
    begun = time.monotonic()
    process = start(line)
    _, errors = process.communicate()
    seconds = time.monotonic() - begun
    assert (process.returncode, errors) == (0, "")
    result = contents(out)
    for path in out.iterdir():
        path.unlink()
    return result, seconds


# Of the tools that sort in files, write several outputs, read from a tool, and write text.
ONE_OF_A_KIND = ["tarsort", "tarsplit --ratios", "tarmerge", "tar2json"]


@pytest.mark.parametrize("tool", LINES if SOAK > 1 else ONE_OF_A_KIND)
def test_killed_and_run_again(tmp_path, start, tool):
    out = tmp_path / "out"
    whole, seconds = undisturbed(start, LINES[tool], out)
    rng = random.Random(tool)
    for _ in range(SOAK):
        process = start(LINES[tool])
        time.sleep(rng.uniform(0, seconds))
        process.kill()
        process.communicate()
        assert list((tmp_path / "spill").iterdir()) == []
        left = {name: data for name, data in contents(out).items() if not name.startswith(".")}
        assert {name: whole[name] for name in left if name.endswith(".tar")} == {
            name: data for name, data in left.items() if name.endswith(".tar")
        }
    wait_until(lambda: not processes_with(str(tmp_path)))  # copies outlive their tool
    process = start(LINES[tool])
    assert process.communicate() == (None, "")
    assert contents(out) == whole, "no temporary file of those killed is left"


EACH = list(product(LINES, [signal.SIGINT, signal.SIGTERM]))
INTERRUPTED = [("tarmerge", signal.SIGINT), ("tarsort", signal.SIGTERM)]


@pytest.mark.parametrize(("tool", "number"), EACH if SOAK > 1 else INTERRUPTED)
def test_interrupted_at_any_moment(tmp_path, start, tool, number):
    out = tmp_path / "out"
    whole, seconds = undisturbed(start, LINES[tool], out)
    rng = random.Random(f"{tool}{number}")
    for _ in range(SOAK):
        process = start(LINES[tool])
        time.sleep(rng.uniform(0.2, 1) * seconds)
        process.send_signal(number)
        _, errors = process.communicate(timeout=100)
        codes = 0, -number, {signal.SIGINT: 130, signal.SIGTERM: 143}[number]
        # While Python itself and the tool are imported, no handler of ours is there.
        imports = "init_import_site" in errors or IMPORT in errors or errors == "KeyboardInterrupt\n"
        assert process.returncode in codes or imports, errors
        assert list((tmp_path / "spill").iterdir()) == []
        left = contents(out)
        assert not [name for name in left if name.startswith(".")]
        assert {name: whole[name] for name in left if name.endswith(".tar")} == {
            name: data for name, data in left.items() if name.endswith(".tar")
        }
