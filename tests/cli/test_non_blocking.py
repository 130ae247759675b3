"""Standard streams that a parent, such as node, has set to non-blocking: tools wait, and do as they do otherwise."""

from __future__ import annotations

import fcntl
import os
import select
import subprocess
import termios
import threading
import time
from array import array
from pathlib import Path

import pytest

from tarshards import ShardWriter

SMALL = 1 << 12  # bytes of a pipe
PIECES = 12

#: What a tool reads from stdin, and its line.
LINES = {
    "two.tar.gz": [
        "tarcat -i -",
        "tarsplit -i - -o out-%d.tar",
        "tarshow -i -",
        "tar2json -i -f txt -",
        "targrep --ignore-zeros --where 'cls > 3' -",
        "tarsort -i -",
        "tarfirst -i -f txt -",
        "tarcheck -i -",
    ],
    "two.tar": ["tarcat -i", "tarpcat -i -", "tarcheck -i -", "tarsplit -i -o out-%d.tar", "tarproc -i -c true -"],
    "list.txt": ["tarcat -T -", "tarcat @-", "tarshow -T -", "tarsplit -T - -o out-%d.tar", "tarindex @-"],
    "keys.txt": ["targrep --keys - a.tar"],
    "words.txt": ["lines2tar -", "lines2tar"],
    "plan.tsv": ["tarcreate -", "tarcreate"],
    "rows.jsonl": ["tarcreate --jsonl -"],
    "nothing": ["tarcat --help", "tarcat a.tar b.tar", "tarshow a.tar", "tar2tsv a.tar"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("input")
    for name in "ab":
        with ShardWriter(str(folder / f"{name}-%d.tar")) as writer:
            for number in range(10):
                txt = os.urandom(300).hex()
                writer.write({"__key__": f"{name}{number}", "txt": txt, "cls": number})
        (folder / f"{name}-0.tar").rename(folder / f"{name}.tar")
        (folder / f"{name}-0.tar.index").unlink(missing_ok=True)
        (folder / f"{name}.shards.json").unlink(missing_ok=True)
    whole = [(folder / f"{name}.tar").read_bytes() for name in "ab"]
    (folder / "two.tar").write_bytes(b"".join(whole))
    packed = [subprocess.run(["gzip", "-n"], input=data, capture_output=True, check=True).stdout for data in whole]
    (folder / "two.tar.gz").write_bytes(b"".join(packed))
    (folder / "list.txt").write_text("# two shards\n\na.tar\nb.tar\n")
    (folder / "keys.txt").write_text("a3\na7\na9\n")
    (folder / "words.txt").write_text("".join(f"{number} {'word ' * 40}\n" for number in range(60)))
    rows = "".join(f"p{number}\ttext:{'word ' * 30}\n" for number in range(60))
    (folder / "plan.tsv").write_text(f"__key__\ttxt\n{rows}")
    (folder / "rows.jsonl").write_text("".join(f'{{"__key__": "r{number}", "txt": "word"}}\n' for number in range(200)))
    (folder / "nothing").touch()
    return folder


def unread(pipe: int) -> int:
    """Return how many bytes are in a pipe."""
    count = array("i", [0])
    fcntl.ioctl(pipe, termios.FIONREAD, count)
    return count[0]


def small_pipe(end: int) -> tuple[int, int]:
    """Return the ends of a small pipe; one of them does not block."""
    ends = os.pipe()
    fcntl.fcntl(ends[1], fcntl.F_SETPIPE_SZ, SMALL)
    os.set_blocking(ends[end], False)
    return ends


def feed(pipe: int, data: bytes) -> None:
    """Write pieces of *data*, each when the one before it has been read."""
    size, unheard = -(-len(data) // PIECES), select.poll()
    unheard.register(pipe, 0)  # for POLLERR: nobody reads
    try:
        for begin in range(0, len(data), size or 1):
            while unread(pipe) and not unheard.poll(0):
                time.sleep(0.0002)
            os.write(pipe, data[begin : begin + size])
    except BrokenPipeError:  # the tool has what it needs
        pass
    finally:
        os.close(pipe)


def drain(pipe: int, into: list[bytes]) -> None:
    """Read a pipe more slowly than a tool writes it."""
    while data := os.read(pipe, 700):
        into.append(data)
        time.sleep(0.0005)
    os.close(pipe)


def run(line: str, folder: Path, path: str, data: bytes, into: Path, *, blocks: bool) -> tuple:
    """Return what a line prints on stdout and stderr, its exit status, and the files that it makes."""
    into.mkdir()
    for name in "a.tar", "b.tar":
        (into / name).symlink_to(folder / name)
    environment = {**os.environ, "PATH": path, "COLUMNS": "80"}
    command = ["bash", "-c", line]
    if blocks:
        done = subprocess.run(command, input=data, capture_output=True, cwd=into, env=environment)
        printed, status = [done.stdout, done.stderr], done.returncode
    else:
        stdin, stdout, stderr = small_pipe(0), small_pipe(1), small_pipe(1)
        child = subprocess.Popen(command, stdin=stdin[0], stdout=stdout[1], stderr=stderr[1], cwd=into, env=environment)
        for end in stdin[0], stdout[1], stderr[1]:
            os.close(end)
        found: list[list[bytes]] = [[], []]
        threads = [threading.Thread(target=feed, args=(stdin[1], data))]
        threads += [
            threading.Thread(target=drain, args=(ends[0], pieces)) for ends, pieces in zip((stdout, stderr), found)
        ]
        for thread in threads:
            thread.start()
        status = child.wait()
        for thread in threads:
            thread.join()
        printed = [b"".join(pieces) for pieces in found]
    files = {file.name: file.read_bytes() for file in sorted(into.iterdir()) if not file.is_symlink()}
    return printed, status, files


@pytest.mark.parametrize(("name", "line"), [(name, line) for name, lines in LINES.items() for line in lines])
def test_a_tool_does_as_it_does_otherwise(folder, tmp_path, path_with_tools, name, line):
    data = (folder / name).read_bytes()
    expected = run(line, folder, path_with_tools, data, tmp_path / "blocking", blocks=True)
    assert expected[1] == 0, expected[0]
    assert run(line, folder, path_with_tools, data, tmp_path / "not blocking", blocks=False) == expected
