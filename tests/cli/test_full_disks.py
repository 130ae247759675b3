"""Full disks, and full or closed standard streams: one line, exit code 1, and nothing left behind."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from failing_close import fail_to_close
from tool_lines import OTHERS, WRITING, command_of, make_inputs

from tarshards import TarWriter

# What the tools write to stdout.
PRINTING = {
    "lines2tar": "{0}lines.txt",
    "tar2json": "{0}in-0.tar",
    "tar2tsv": "{0}in-0.tar",
    "tarcard": "{0}in-0.tar --name x",
    "tarcat": "{0}in-0.tar",
    "tarcheck": "{0}in-0.tar",
    "tarcreate": "--dir {0}tree",
    "tarfirst": "-f txt {0}in-0.tar",
    "targrep": "-l text {0}in-0.tar",
    "tarindex": "--dry-run --format dali {0}in-0.tar",
    "tarmerge": "{0}in-0.tar {0}in-0.tar --conflict first",
    "tarmix": "{0}in-0.tar {0}in-1.tar",
    "tarpcat": "{0}in-0.tar",
    "tarproc": "-c true {0}in-0.tar",
    "tarscat": "{0}in-0.tar",
    "tarshow": "{0}in-0.tar",
    "tarshow --summary": "{0}in-0.tar",
    "tarsort": "{0}in-0.tar",
    "tarsplit": "--dry-run {0}in-0.tar -o out",
}
TOOLS = sorted(WRITING.keys() | OTHERS)


class Outcome(NamedTuple):
    """The result of a command line: its exit code, the files that it left, and its stderr."""

    code: int
    left: list[str]
    errors: str


@pytest.fixture
def run_all(path_with_tools):
    """Return a function that runs lines in a folder, each a tool, its arguments and how a shell redirects a stream."""
    environment = {**os.environ, "PATH": path_with_tools}

    def run_all(folder: Path, cases: list[tuple[str, list[str], str]]) -> Iterator[Outcome]:
        before = {*folder.iterdir()}
        for tool, arguments, redirected in cases:
            command = ["bash", "-c", f"{shlex.join([tool, *arguments])} {redirected}"]
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)
            left = sorted({*folder.iterdir()} - before)
            yield Outcome(done.returncode, [path.name for path in left], done.stderr)
            for path in left:
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    return run_all


def check(tool: str, outcome: Outcome, words: str) -> None:
    assert outcome.errors.count("\n") == 1, (tool, outcome)
    assert outcome.errors.startswith(f"{tool}: "), (tool, outcome)
    assert words in outcome.errors, (tool, outcome)
    assert outcome.code == 1, (tool, outcome)
    assert [name for name in outcome.left if not name.endswith(RESUMES_FROM)] == [], tool


PRINTS_NOTHING = {"tarconvert", "tarexport", "tarimport", "tarreshard"}
RESUMES_FROM = (".reshard", ".begun", ".done")


def test_no_tool_is_forgotten():
    assert {line.split()[0] for line in PRINTING} == set(TOOLS) - OTHERS - PRINTS_NOTHING


FULL = ">/dev/full", "No space left on device"
CLOSED = ">&-", "Bad file descriptor"


@pytest.mark.parametrize(("redirected", "words"), [FULL, CLOSED], ids=["full", "closed"])
def test_stdout_that_takes_nothing(tmp_path, run_all, redirected, words):
    make_inputs(tmp_path, size=20_000)  # so that tars are larger than what is buffered
    cases = [(tool, ["--help"], redirected) for tool in TOOLS]
    for name, line in PRINTING.items():
        tool, *arguments = f"{name} {line.format('')}".split()
        cases.append((tool, arguments, redirected))
    for (tool, _, _), outcome in zip(cases, run_all(tmp_path, cases), strict=True):
        check(tool, outcome, words)


def test_stderr_that_takes_nothing(tmp_path, run_all):
    make_inputs(tmp_path)
    cases = [(tool, line.format("").split(), "2>&-") for tool, line in WRITING.items()]
    cases += [("tarcat", ["missing.tar"], "2>&-"), ("tarcat", ["--nope"], "2>&-")]
    assert [outcome.code for outcome in run_all(tmp_path, cases)] == [0] * len(WRITING) + [1, 2]


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root can mount a file system of 1 MiB")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_disk_that_is_full(tmp_path, small_disk, run_all):
    make_inputs(tmp_path, size=2_000_000)
    (small_disk / "filler").write_bytes(bytes((1 << 20) - 4096))
    cases = [(tool, line.format(f"{tmp_path}/").split(), "") for tool, line in WRITING.items()]
    for (tool, _, _), outcome in zip(cases, run_all(small_disk, cases), strict=True):
        if tool not in ("tarindex", "tarshow"):  # whose files are small
            check(tool, outcome, "No space left on device")


@pytest.mark.parametrize(
    "line",
    [
        "tarcheck {0}in.tar.gz",
        "tarsort -M 1MB {0}in.tar -o out.tar",
        "tarmerge -M 1MB {0}in.tar {0}reversed.tar -o out.tar --conflict first",
        "tarcat {0}in.tar -o memory://host/out.tar",
        "tarindex {0}in.tar --format energon",
    ],
)
def test_a_folder_for_temporary_files_that_is_full(tmp_path, small_disk, path_with_tools, line):
    """It is named, and no shard is said to be damaged."""
    with TarWriter(tmp_path / "in.tar") as writer, TarWriter(tmp_path / "reversed.tar") as other:
        for i in range(9_000):
            writer.write({"__key__": f"{i:040d}", "txt": f"text {i}"})
            other.write({"__key__": f"{8_999 - i:040d}", "txt": f"text {i}"})
    subprocess.run(["gzip", "-k", "in.tar"], cwd=tmp_path, check=True)
    if "index" in line:
        subprocess.run(
            ["tarindex", "-q", "in.tar"], cwd=tmp_path, env={**os.environ, "PATH": path_with_tools}, check=True
        )
    (small_disk / "filler").write_bytes(bytes((1 << 20) - 4096))
    environment = {**os.environ, "PATH": path_with_tools, "TMPDIR": str(small_disk)}
    before = sorted(os.listdir(tmp_path))
    command = ["bash", "-c", line.format(f"{tmp_path}/")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    told = f"(error|tar\\w+): {small_disk}[^:]*: cannot write a temporary file: .*; set TMPDIR to another folder"
    first, *others = (done.stdout + done.stderr).splitlines()
    assert re.fullmatch(told, first), done
    assert not others or (line.startswith("tarcheck") and not done.stdout.count("in.tar.gz: offset")), done
    assert (done.returncode, sorted(os.listdir(tmp_path))) == (1, before)


@pytest.mark.parametrize("line", ["tarshow in-0.tar", "tarcat in-0.tar", "tarcat --help"])
def test_a_stdout_that_fails_at_its_close(tmp_path, monkeypatch, capfd, line):
    """The shell, which opened the file, does not see its error: without ours, the exit code would be 0."""
    make_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    tool, *arguments = line.split()
    monkeypatch.setattr(sys, "argv", [tool, *arguments])
    stdout = os.readlink("/proc/self/fd/1")
    with monkeypatch.context() as patched:
        fail_to_close(patched, stdout)
        with pytest.raises(SystemExit) as ended:
            command_of(tool).main()
    assert (ended.value.code, capfd.readouterr().err) == (1, f"{tool}: stdout: Disk quota exceeded\n")


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("tarshow in-0.tar >/dev/full", 1),
        ("tarcat --help >/dev/full", 1),
        ("tarcat in-0.tar >&-", 1),
        ("tarcat -o out.tar in-0.tar >&-", 0),
        ("tarcat missing.tar 2>&-", 1),
        ("tarcat -o out.tar in-0.tar <&- >&- 2>&-", 0),
    ],
)
def test_by_a_shell(tmp_path, path_with_tools, line, code):
    make_inputs(tmp_path)
    environment = {**os.environ, "PATH": path_with_tools}
    done = subprocess.run(
        ["bash", "-c", line], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    assert done.stderr.count("\n") == (code == 1 and "2>&-" not in line)
