"""pipe: commands are started only when allowed, must end well, and never outlive their stream."""

import os
import subprocess
import time

import pytest

from tarshards.errors import OpenError
from tarshards.storage.opening import open_shard, open_url


def read(command: str) -> bytes:
    with open_shard(f"pipe:{command}", allow_pipe=True) as stream:
        return stream.read()


def write(command: str, data: bytes) -> None:
    with open_shard(f"pipe:{command}", "wb", allow_pipe=True) as stream:
        stream.write(data)


def is_running(pid: int) -> bool:
    """Whether *pid* lives; the dead wait for init for a moment."""
    for _ in range(3000):
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return False
        except FileNotFoundError:
            return False
        time.sleep(0.02)
    return True


OTHERS: set[str] = set()  # children of this process that earlier tests have left for good, such as multiprocessing's


def children() -> list[str]:
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return [child for child in file.read().split() if child not in OTHERS]


@pytest.fixture(autouse=True)
def know_others():
    OTHERS.clear()
    OTHERS.update(children())


@pytest.mark.parametrize("mode", ["rb", "wb"])
@pytest.mark.parametrize("open_", [open_url, open_shard])
def test_nothing_runs_unless_allowed(tmp_path, mode, open_):
    with pytest.raises(OpenError, match="allow_pipe=True"):
        open_(f"pipe:touch {tmp_path}/trace", mode)
    assert os.listdir(tmp_path) == []


def test_the_output_of_a_command(tmp_path):
    assert read("echo hello; printf '%s' \"$((6 * 7))\"") == b"hello\n42"
    assert read("true") == b""
    data = os.urandom(3_000_000)
    (tmp_path / "a").write_bytes(data)
    assert read(f"cat {tmp_path}/a") == data
    assert read(f"gzip -c {tmp_path}/a") == data


@pytest.mark.parametrize("command", ["echo data; exit 3", "exit 3", "cat | (cat; exit 3)", "(exit 3) | cat"])
def test_a_status_other_than_zero_is_an_error(command):
    with pytest.raises(OpenError) as caught:
        read(command)
    assert str(caught.value) == f"pipe:{command}: the command ended with status 3"


def test_the_error_comes_after_the_last_byte():
    with open_url("pipe:echo data; exit 3", allow_pipe=True) as stream:
        assert stream.read(5) == b"data\n"
        for _ in range(2):
            with pytest.raises(OpenError, match="status 3"):
                stream.read(5)


def test_a_killed_command_and_one_that_does_not_exist():
    with pytest.raises(OpenError, match="was killed by signal 9"):
        read("kill -9 $$")
    with pytest.raises(OpenError, match="status 127"):
        read("no-such-command 2> /dev/null")


def test_closing_early_kills_the_whole_group():
    stream = open_url("pipe:sleep 1000 & echo $$ $!; yes", allow_pipe=True)
    pids = [int(pid) for pid in stream.read(1 << 16).split(b"\n")[0].split()]
    assert len(pids) == 2
    stream.close()
    stream.close()
    assert not any(map(is_running, pids))
    assert not children()


def test_a_forgotten_stream_leaves_no_child():
    stream = open_url("pipe:echo $$; sleep 1000", allow_pipe=True)
    pid = int(stream.read(100))
    del stream
    assert not is_running(pid)
    assert not children()


def test_reading_to_the_end_leaves_no_child():
    assert read("echo x") == b"x\n"
    assert not children()


def test_a_command_has_no_stdin():
    assert read("cat") == b""


def test_without_bash_sh_runs_it(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "sh").symlink_to("/bin/sh")
    assert read("echo hello") == b"hello\n"


def test_writing_into_a_command(tmp_path):
    data = os.urandom(3_000_000)
    write(f"sleep 0.2; cat > {tmp_path}/a", data)
    assert (tmp_path / "a").read_bytes() == data
    write(f"gzip > {tmp_path}/a.gz", data)
    assert subprocess.run(["gzip", "-dc", tmp_path / "a.gz"], capture_output=True, check=True).stdout == data


@pytest.mark.parametrize("size", [5, 3_000_000])
@pytest.mark.parametrize("command", ["cat > /dev/null; exit 3", "exit 3", "false | (cat > /dev/null; exit 3)"])
def test_writing_into_a_command_that_fails(command, size):
    with pytest.raises(OpenError, match="status 3"):
        write(command, bytes(size))
    assert not children()


def test_writing_into_a_command_that_stops_reading():
    with pytest.raises(OpenError, match="stopped reading before the end"):
        write("head -c 10 > /dev/null", bytes(3_000_000))


def test_abort_kills_the_command(tmp_path):
    stream = open_url(
        f"pipe:echo $$ > {tmp_path}/pid; cat > {tmp_path}/a; touch {tmp_path}/done", "wb", allow_pipe=True
    )
    stream.write(b"half")
    stream.abort()
    stream.abort()
    stream.close()
    assert not children()
    assert not (tmp_path / "done").exists()
