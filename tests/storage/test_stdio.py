"""`-`: the standard streams, which stay open."""

import fcntl
import gzip
import io
import os
import socket
import subprocess
import sys
import termios
import threading
import time
from array import array
from contextlib import suppress

import pytest
from failing_close import fail_to_close

from tarshards import OpenError
from tarshards.storage import streams
from tarshards.storage.compression import decompressed
from tarshards.storage.opening import open_url
from tarshards.storage.streams import InheritedFile, LastingFile, passed_on, read_at_most

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


def feed(descriptor: int, pieces: list[bytes]) -> None:
    """Write each piece when the last one has been read."""
    for piece in pieces:
        while unread(descriptor):
            time.sleep(0.0005)
        os.write(descriptor, piece)
    os.close(descriptor)


def unread(descriptor: int) -> int:
    """Return how many bytes are in a pipe."""
    count = array("i", [0])
    fcntl.ioctl(descriptor, termios.FIONREAD, count)
    return count[0]


@pytest.fixture
def pipe():
    """The two ends of a pipe, neither of which blocks."""
    ends = os.pipe()
    for end in ends:
        os.set_blocking(end, False)
    yield ends
    for end in ends:
        with suppress(OSError):
            os.close(end)


@pytest.fixture
def waits(monkeypatch):
    """Functions to call, one each time that a stream waits, instead of waiting."""
    calls: list = []
    monkeypatch.setattr(streams, "_wait", lambda file, event, seconds=None: calls.pop(0)() or True)
    return calls


@pytest.mark.parametrize("way", ["read", "readall", "readinto", "buffered", "lines", "read_at_most"])
def test_a_pipe_that_is_not_ready_is_waited_for(pipe, waits, way):
    reader, writer = pipe
    waits += [lambda piece=piece: os.write(writer, piece) and None for piece in (b"one\n", b"two\n", b"three\n")]
    waits.append(lambda: os.close(writer))
    file = InheritedFile(reader, closefd=False)
    data = b""
    if way == "read":
        while piece := file.read(6):
            data += piece
    elif way == "readall":
        data = file.read()
    elif way == "readinto":
        buffer = bytearray(6)
        while count := file.readinto(buffer):
            data += buffer[:count]
    elif way == "buffered":
        data = io.BufferedReader(file).read()
    elif way == "lines":
        data = b"".join(io.BufferedReader(file))
    else:
        data = read_at_most(file, 1 << 20, 1 << 10)
    assert (data, waits) == (b"one\ntwo\nthree\n", [])


def test_a_stream_that_has_nothing_yet_and_no_descriptor_to_wait_for_is_an_error():
    class Slow(io.RawIOBase):
        name = "slow"
        reads = 0

        def readable(self) -> bool:
            return True

        def read(self, size: int = -1) -> bytes | None:
            self.reads += 1
            return None if self.reads == 3 else gzip.compress(b"x" * 100)[8 * self.reads - 8 : 8 * self.reads]

    with pytest.raises(OpenError, match="slow: the stream is non-blocking and has no bytes yet"):
        read_at_most(Slow(), 100, 100)
    stream = decompressed(Slow(), "a.tar.gz", 100)
    with pytest.raises(OpenError, match="the stream is non-blocking and has no bytes yet"):
        read_at_most(stream, 1000, 1000)


def filled(descriptor: int) -> int:
    """Fill a pipe, and return how many bytes it took."""
    count = 0
    with suppress(BlockingIOError):
        while True:
            count += os.write(descriptor, bytes(1 << 16))
    return count


@pytest.mark.parametrize("sizes", [[10], [70_000], [1, 300_000, 5, 65536, 65537], [1000] * 300])
@pytest.mark.parametrize("way", ["lasting", "raw"])
def test_a_pipe_that_is_full_is_waited_for(pipe, monkeypatch, sizes, way):
    reader, writer = pipe
    full, taken, waited = filled(writer), [], []

    def take(file, event, seconds=None) -> bool:
        waited.append(file)
        taken.append(os.read(reader, 5000))
        return True

    monkeypatch.setattr(streams, "_wait", take)
    raw = io.FileIO(writer, "wb", closefd=False)
    file = LastingFile(raw) if way == "lasting" else passed_on(raw)
    pieces = [os.urandom(size) for size in sizes]
    for piece in pieces:
        assert file.write(piece) == len(piece)
    file.close()
    os.close(writer)
    while data := os.read(reader, 1 << 20):
        taken.append(data)
    assert waited
    assert b"".join(taken)[full:] == b"".join(pieces)


def test_a_descriptor_that_does_not_block_from_end_to_end():
    stdin, stdout = os.pipe(), os.pipe()
    os.set_blocking(stdin[0], False)
    os.set_blocking(stdout[1], False)
    pieces = [DATA[at : at + 7001] for at in range(0, len(DATA), 7001)]
    feeding = threading.Thread(target=feed, args=(stdin[1], pieces))
    program = f"import os, sys\nfrom tarshards.storage.opening import open_shard, open_url\n{COPY}"
    child = subprocess.Popen([sys.executable, "-W", "error", "-c", program], stdin=stdin[0], stdout=stdout[1])
    os.close(stdin[0])
    os.close(stdout[1])
    feeding.start()
    with open(stdout[0], "rb") as out:
        assert out.read() == DATA + b"still open"
    feeding.join()
    assert child.wait() == 0
