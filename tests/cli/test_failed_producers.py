"""What a tool that fails leaves on stdout: every reader of tars reports it, and reads the samples that were done."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile

import pytest

from tarshards import Stream, TarError, write_samples

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
