"""Killed at any moment, tarproc leaves nothing running, and resumes to the bytes of an undisturbed run."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import time
from collections import Counter
from itertools import product
from pathlib import Path

import pytest
from leftovers import processes_with, wait_until
from soak import SOAK, some

pytestmark = pytest.mark.soak

COMMAND = 'echo "$TAR_KEY" >>{runs}; sleep 0.04; tr a-z A-Z <sample.txt >sample.up; echo "$TAR_INDEX" >sample-b.n'


def leftovers(scratch) -> list[str]:
    return [*os.listdir(scratch), *processes_with(str(scratch))]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_killed_and_resumed_is_as_undisturbed(tmp_path, scratch, make_tar, start, tarproc, number):
    count = 60 if SOAK > 1 else 16
    tar = make_tar(count)
    rng = random.Random(int(number))
    runs = tmp_path / "runs"
    command = COMMAND.format(runs=runs)
    assert tarproc("-c", command, "-p", 2, tar, "-o", "whole.tar") == (0, "")
    assert Counter(runs.read_text().split()) == Counter(f"{i:04d}" for i in range(count))
    runs.write_text("")
    options = ("-c", command, "-p", 2, tar, "-o", "out.tar", "--resume", "--joblog", "log")
    killed = 0
    for _ in range(5 * SOAK if SOAK > 1 else 1):
        process, begun = start(*options), len(runs.read_text())
        if SOAK == 1 or rng.random() < 0.5:
            wait_until(lambda begun=begun: len(runs.read_text()) > begun)  # so that a resume has something to keep
        time.sleep(rng.uniform(0.05, 0.3))
        process.send_signal(number)
        process.communicate(timeout=100)
        killed += process.returncode != 0
        wait_until(lambda: leftovers(scratch) == [])
        if process.returncode == 0:
            break
        assert not (tmp_path / "out.tar").exists()
    assert killed >= min(SOAK, 2)
    if process.returncode:
        code, words = tarproc(*options)
        assert code == 0
        assert re.fullmatch(rf"(results of \d+ of {count} samples kept from an earlier run\n)?", words)
    assert (tmp_path / "out.tar").read_bytes() == (tmp_path / "whole.tar").read_bytes()
    counts = Counter(runs.read_text().split())
    assert sorted(counts) == [f"{i:04d}" for i in range(count)]
    assert sum(counts.values()) <= count + 2 * killed, "only the samples that were running begin again"
    assert not (tmp_path / "out.tar.tarproc").exists()


def test_the_next_run_removes_what_a_killed_one_left(tmp_path, scratch, make_tar, start, tarproc):
    """Its temporary file; and its scratch directory and commands where its guard was killed too."""
    tar = make_tar(4)
    line = ("-p", 2, tar, "-o", "out.tar", "-c", f"touch {tmp_path}/begun; test -e {tmp_path}/again || sleep 100")
    process = start(*line)
    wait_until(lambda: (tmp_path / "begun").exists() and list(tmp_path.glob(".out.tar.*.tmp")))
    process.send_signal(signal.SIGSTOP)
    (guard,) = (path for path in Path("/proc").glob("[0-9]*") if is_guard(path, scratch))
    os.kill(int(guard.name), signal.SIGKILL)
    process.kill()
    process.wait(20)
    assert leftovers(scratch)
    (tmp_path / "again").touch()
    assert tarproc(*line) == (0, "")
    process.communicate(timeout=20)
    assert leftovers(scratch) == []
    assert list(tmp_path.glob(".out.tar.*")) == []


def is_guard(path: Path, scratch: Path) -> bool:
    try:
        line = (path / "cmdline").read_bytes()
    except OSError:
        return False
    return b"guard.py" in line and str(scratch).encode() in line


def test_a_run_leaves_the_scratch_directories_of_others_alone(tmp_path, scratch, make_tar, start, tarproc):
    tar = make_tar(2)
    process = start(
        "-c", f"touch {tmp_path}/begun; until test -e {tmp_path}/go-on; do sleep 0.05; done", tar, "-o", "a"
    )
    wait_until((tmp_path / "begun").exists)
    assert tarproc("-c", "true", tar, "-o", "b") == (0, "")
    (tmp_path / "go-on").touch()
    process.communicate(timeout=20)
    assert process.returncode == 0
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


# Every signal, and every way, both when it dies at once and when it cleans up.
ENDS = [
    *product(["-c"], [signal.SIGKILL, signal.SIGINT, signal.SIGTERM, signal.SIGHUP]),
    *product(["--server", "--python"], some([signal.SIGKILL, signal.SIGHUP, signal.SIGINT, signal.SIGTERM], 2)),
]


@pytest.mark.parametrize(("way", "number"), ENDS)
def test_no_child_outlives_it(tmp_path, scratch, make_tar, start, number, way):
    (tmp_path / "slow.py").write_text("import time\ndef nap(sample):\n    open('begun', 'w')\n    time.sleep(200)\n")
    line = {"-c": f"touch {tmp_path}/begun; sleep 200 & setsid sleep 200; wait", "--python": "slow:nap"}
    process = start(
        way, line.get(way, f"touch {tmp_path}/begun; sleep 200 & sleep 200"), "-p", 2, make_tar(9), "-o", "out.tar"
    )
    wait_until(lambda: (tmp_path / "begun").exists())
    process.send_signal(number)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == {signal.SIGHUP: 129, signal.SIGINT: 130, signal.SIGTERM: 143}.get(number, -number)
    assert errors == b""
    if number in (signal.SIGINT, signal.SIGTERM):
        assert os.listdir(scratch) == []
        names = {"begun", "in.tar", "scratch", "slow.py", "__pycache__"}
        assert set(os.listdir(tmp_path)) <= names
    else:
        wait_until(lambda: leftovers(scratch) == [])


HALTS = [("", 1), ("--halt soon,fail=2", 3), ("--halt now,fail=1", 2)]


@pytest.mark.parametrize(
    ("source", "options", "lines"),
    [("-", *halt) for halt in HALTS] + [("pipe:cat {} - </dev/ptmx", *halt) for halt in some(HALTS, 3)],
)
def test_a_halted_run_waits_for_no_input(tmp_path, scratch, make_tar, start, options, lines, source):
    tar = make_tar(4)
    process = start(
        "-c", "test $TAR_INDEX -ge 2", *options.split(), source.format(tar), "-o", "out.tar", stdin=subprocess.PIPE
    )
    with process:  # its stdin is kept open, as by a program that has stalled
        process.stdin.write(Path(tar).read_bytes())
        process.stdin.flush()
        assert process.wait(timeout=100) == 1
        errors = process.stderr.read().decode()
    assert len(errors.splitlines()) == lines, errors
    assert "Traceback" not in errors
    assert sorted(os.listdir(tmp_path)) == ["in.tar", "scratch"]
    assert leftovers(scratch) == []
    assert processes_with(f"{tar}\0-") == []


def test_a_closed_pipe_ends_it_quietly(tmp_path, scratch, make_tar, start):
    process = start(
        "-c", "head -c 100000 /dev/zero >sample.big; test $TAR_INDEX -lt 20 || sleep 200", "-p", 2, make_tar(99)
    )
    process.stdout.read(100)
    process.stdout.close()
    assert process.wait(timeout=100) == -signal.SIGPIPE
    assert process.stderr.read() == b""
    process.stderr.close()
    assert leftovers(scratch) == []
