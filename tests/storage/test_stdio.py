"""`-`: the standard streams, which stay open."""

import os
import socket
import subprocess
import sys

import pytest
from failing_close import fail_to_close

from tarshards.errors import OpenError
from tarshards.storage.opening import open_url

DATA = os.urandom(300_000)


def run(program: str, **options) -> subprocess.CompletedProcess[bytes]:
    program = "import os, sys\nfrom tarshards.storage.opening import open_shard, open_url\n" + program
    return subprocess.run([sys.executable, "-W", "error", "-c", program], stderr=subprocess.PIPE, **options)


COPY = """
with open_shard("-") as stdin, open_url("-", "wb") as stdout:
    while data := stdin.read(1 << 20):
        stdout.write(data)
os.fstat(0), os.write(1, b"still open")
"""


def test_stdin_to_stdout_through_pipes():
    done = run(COPY, input=DATA, stdout=subprocess.PIPE)
    assert (done.returncode, done.stdout, done.stderr) == (0, DATA + b"still open", b"")


def test_stdin_that_is_a_file_in_its_middle(tmp_path):
    (tmp_path / "a").write_bytes(DATA)
    with open(tmp_path / "a", "rb") as file:
        file.seek(1000)
        done = run(COPY, stdin=file, stdout=subprocess.PIPE)
    assert done.stdout == DATA[1000:] + b"still open"


def test_what_is_aborted_is_not_flushed():
    done = run("out = open_url('-', 'wb'); out.write(b'half'); out.abort(); os.write(1, b'.')", stdout=subprocess.PIPE)
    assert (done.returncode, done.stdout, done.stderr) == (0, b".", b"")


def test_a_closed_pipe_is_a_broken_pipe_error():
    program = """
try:
    with open_url("-", "wb") as out:
        while True:
            out.write(bytes(100_000))
except BrokenPipeError:
    sys.exit(7)
"""
    reader, writer = os.pipe()
    os.close(reader)
    done = run(program, stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (7, b"")


def test_a_closed_pipe_noticed_at_the_end_is_one_too():
    program = """
out = open_url("-", "wb")
out.write(b"small")
try:
    out.close()
except BrokenPipeError:
    sys.exit(7)
"""
    reader, writer = os.pipe()
    os.close(reader)
    done = run(program, stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (7, b"")


def test_a_file_that_fails_at_its_close_is_an_error(capfd, monkeypatch):
    """Nobody sees the error of the close at the end of the process."""
    path = os.readlink("/proc/self/fd/1")
    with monkeypatch.context() as patched:
        fail_to_close(patched, path)
        with pytest.raises(OpenError, match="-: Disk quota exceeded"), open_url("-", "wb") as stdout:
            stdout.write(b"data")
    os.write(1, b"still open")


def test_no_stdin_at_all():
    done = run("os.close(0); open_url('-')", stdin=subprocess.DEVNULL)
    assert done.stderr.endswith(b"tarshards.errors.OpenError: -: Bad file descriptor\n")


def test_small_writes_to_stdout_go_out_together():
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # keeps each write by itself
    with near, far:
        code = "out = open_url('-', 'wb'); [out.write(bytes(700)) for _ in range(200)]; out.close()"
        run(code, stdout=far.fileno())
        far.close()
        sizes = list(iter(lambda: len(near.recv(1 << 20)), 0))
    assert sum(sizes) == 200 * 700
    assert len(sizes) <= 5
