"""What a tool that fails leaves on stdout: every reader of tars reports it, and reads the samples that were done."""

from __future__ import annotations

import io
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time

import pytest

from tarshards import Stream, TarError, group_members, read_members, write_samples
from tarshards.tar.read import CUT

READERS = ["tar tf out.tar", "tar tf - <out.tar", "cat out.tar | tar tf -"]
READERS += ["bsdtar tf out.tar", "cat out.tar | bsdtar tf -"] if shutil.which("bsdtar") else []
MEMBERS = [f"{i:03d}.{field}" for i in range(25) for field in ("cls", "txt")]
#: Lines that fail, and how many samples they have written by then.
FAILING = {
    "tarproc -c 'test $TAR_INDEX -lt 8' s.tar": 8,
    "cat s.tar s.tar | tarcat": 25,
    "tar cf - 0*.* | cat - s.tar | tarcat": 25,  # the end completes a record of 20 blocks
    "cat s.tar s.tar | tarproc -c true": 25,
    "cat s.tar s.tar | tarcat --rekey '{index}'": 25,
    "tarpcat s.tar junk.tar -p 1": 25,
    "tarcat s.tar junk.tar": 25,
    "tarcat --rekey '{index}' s.tar junk.tar": 25,
    "tarcat s.tar junk.tar --overwrite -o /dev/stdout": 25,
    "tarscat -c 30 s.tar junk.tar": 25,
    "targrep . s.tar junk.tar": 25,
    "tarmix s.tar junk.tar --until 99": 1,
    "tarsort s.tar junk.tar": 0,
    "tarcat junk.tar": 0,
    "tarcat missing.tar": 0,
    "tarcat 'missing-*.tar'": 0,
    "tarcat --where 'cls == 99' s.tar": 0,
    "tarproc -c false s.tar": 0,
}


@pytest.fixture
def shell(tmp_path, path_with_tools):
    samples = [{"__key__": f"{i:03d}", "cls": i, "txt": "x" * 1000} for i in range(25)]
    write_samples(samples, tmp_path / "s.tar")
    with tarfile.open(tmp_path / "s.tar") as archive:
        archive.extractall(tmp_path, filter="data")
    (tmp_path / "junk.tar").write_bytes(b"junk" * 1000)
    environment = {**os.environ, "PATH": path_with_tools}

    def shell(line: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", "-o", "pipefail", "-c", line]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)

    return shell


def test_a_wrong_command_line_writes_nothing(shell):
    done = shell("tarsort --sort cls:date s.tar")
    assert (done.returncode, done.stdout) == (2, "")


@pytest.mark.parametrize("line", FAILING)
def test_every_reader_reports_it_and_gets_what_was_done(shell, tmp_path, line):
    assert shell(f"{line} >out.tar").returncode == 1
    for reader in READERS:
        done = shell(reader)
        assert done.returncode != 0, reader
        names = [name for name in done.stdout.split() if name != "truncated.here"]  # GNU tar lists it from a pipe
        if "--rekey" not in line:
            assert names[: 2 * FAILING[line]] == MEMBERS[: 2 * FAILING[line]]
        assert len(names) == 2 * FAILING[line]
    for mode in ("r:", "r|"):
        with tarfile.open(tmp_path / "out.tar", mode) as archive, pytest.raises(tarfile.ReadError):
            list(archive)
    with pytest.raises(TarError, match="truncated"):
        list(Stream.from_shards(str(tmp_path / "out.tar")))


@pytest.mark.interop
def test_webdataset_reports_it_and_gets_what_was_done(shell, tmp_path):
    """webdataset runs apart, since it leaves files open."""
    script = """
import sys, webdataset
for name in sys.argv[1:]:
    errors = []
    handler = lambda error: errors.append(error) or True
    samples = list(webdataset.WebDataset(name, shardshuffle=False, empty_check=False, handler=handler))
    print(len(samples), {type(error).__name__ for error in errors})
"""
    (tmp_path / "script.py").write_text(script)
    for number, line in enumerate(FAILING):
        shell(f"{line} >out-{number:02d}.tar")
    done = shell(f"{sys.executable} script.py out-??.tar")
    lines = [f"{samples} {{'ReadError'}}" for samples in FAILING.values()]
    assert (done.returncode, done.stdout.splitlines()) == (0, lines)


@pytest.mark.parametrize("line", ["tarcat s.tar", "tarcat --rekey '{index:06d}' s.tar", "tarcat big.tar"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_while_the_reader_is_slow(tmp_path, path_with_started_tools, line, number):
    """The pipe is full then, and the signal interrupts a write: the tar that comes out is as after another error."""
    write_samples(({"__key__": f"{i:06d}", "cls": i, "txt": "x" * 400} for i in range(2000)), tmp_path / "s.tar")
    write_samples([{"__key__": f"{i}", "bin": bytes(300_000), "cls": i} for i in range(9)], tmp_path / "big.tar.gz")
    environment = {**os.environ, "PATH": path_with_started_tools}
    line = line.replace("big.tar", "big.tar.gz")
    tool = subprocess.Popen(["bash", "-c", f"exec {line}"], cwd=tmp_path, env=environment, stdout=-1, stderr=-1)
    head = tool.stdout.read(100_000)
    time.sleep(0.3)
    tool.send_signal(number)
    time.sleep(0.2)
    data = head + tool.stdout.read()
    assert (tool.wait(), tool.stderr.read()) == (128 + number, b"")
    tool.stdout.close(), tool.stderr.close()
    assert data.endswith(CUT)
    with tarfile.open(fileobj=io.BytesIO(data)) as archive, pytest.raises(tarfile.ReadError):
        list(archive)
    whole = list(group_members(read_members(io.BytesIO(data[: -len(CUT)]), end="optional")))
    assert all(len(sample) == 4 for sample in whole)
    done = subprocess.run(["tar", "tf", "-"], input=data, capture_output=True)
    assert done.returncode == 2


def test_a_reader_that_takes_nothing_does_not_hold_up_the_end(tmp_path, path_with_started_tools):
    write_samples(({"__key__": f"{i:06d}", "cls": i, "txt": "x" * 400} for i in range(2000)), tmp_path / "s.tar")
    environment = {**os.environ, "PATH": path_with_started_tools}
    tool = subprocess.Popen(["tarcat", "s.tar"], cwd=tmp_path, env=environment, stdout=subprocess.PIPE)
    tool.stdout.read(1)
    time.sleep(0.3)
    tool.send_signal(signal.SIGTERM)
    assert tool.wait(60) == 143
    tool.stdout.close()
