"""Untrusted names, in keys, fields, files and command output, reach a terminal without escape sequences."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import tarfile

import pytest

from tarshards.samples.lines import unescape

# A title, a colour by C1, a line written from right to left, and one written over.
NASTY = "\x1b]0;owned\x07\x9b31m\u202e\rb"
NAME = f"in-{NASTY}.tar"

LINES = [
    'tarcat "missing-$NASTY.tar" >/dev/null',
    'tarcat "$NAME" "$NAME" -o out.tar',
    'tarcat "$NAME" -f missing -o out.tar',
    'tarcat "$NAME" -f missing --on-error skip -o out.tar',
    'tarcat "$NAME" -v --on-error skip -f missing -o out.tar',
    'tarcat "--$NASTY"',
    'tarcat --count "$NASTY"',
    "tarcat damaged.tar -o out.tar",
    'tarcat "$NAME" -o replaced.tar --overwrite',
    'tarcheck "$NAME" damaged.tar',
    'tarcheck "$NAME" --decode --repair "out-$NASTY.tar"',
    "tarcreate --lines nasty.lines -o out.tar",
    'tarfirst -f missing "$NAME"',
    'targrep --where "cls > 3" "$NAME" -o out.tar',
    'targrep --keys nasty.keys "$NAME" -o out.tar',
    'tarindex "$NAME" --check',
    "tarindex twice.tar",
    'tarjob --retries 0 -s "$NASTY" -- "printf %s {}; exit 42"',
    "tarjob logs",
    "tarjob status",
    'tarmerge "$NAME" empty.tar -o out.tar',
    'tarmix "$NAME:x" -o out.tar',
    'tarproc -c "printf \'$NASTY\' >&2; exit 3" --failed skip "$NAME" -o out.tar',
    'tarshow "$NAME"',
    'tarshow --summary "$NAME"',
    "tarshow twice.tar",
    "tarsort --unique error twice.tar -o out.tar",
    'tarsplit --by txt "$NAME" -o "out-{txt}-%d.tar"',
    'tar2tsv -f missing "$NAME" -o out.tsv',
    'tar2json "$NAME" -f missing -o out.json',
]
# These write text for other programs as it is, except to a terminal.
TEXTS = [
    'tar2tsv "$NAME" --nokey -f txt -q',
    'tar2tsv "$NAME" -q',
    'tar2json "$NAME" -f txt -q',
    'targrep -l "" "$NAME"',
    'tarcard "$NAME" --name x',
    'tarindex "$NAME" --dry-run -q',
    'tarsplit --dry-run -o "out-$NASTY-%d.tar" "$NAME" -q',
]
# What a command itself prints goes to stderr, or is its log, as it is.
RAW = {"tarproc": 2, "tarjob logs": 1}


def add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    archive.addfile(member, io.BytesIO(data))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nasty")
    with tarfile.open(folder / NAME, "w") as archive:
        add(archive, f"{NASTY}.txt", NASTY.encode())
        add(archive, f"{NASTY}.{NASTY}", b"7")
        add(archive, f"{NASTY}.json", b'{"a": ' + NASTY.encode())
    with tarfile.open(folder / "twice.tar", "w") as archive:
        for key in NASTY, "other", NASTY:
            add(archive, f"{key}.txt", NASTY.encode())
    with tarfile.open(folder / "empty.tar", "w") as archive:
        add(archive, "other.txt", b"")
    data = (folder / NAME).read_bytes()
    (folder / "damaged.tar").write_bytes(data[:1024] + b"x" * 512 + data[1536:])
    (folder / "replaced.tar").write_bytes(data)
    (folder / "replaced.idx").write_text("of another program")
    (folder / "nasty.lines").write_text(f"{NASTY}\n")
    (folder / "nasty.keys").write_text(f"{NASTY}\nno{NASTY}\n".replace("\r", ""))
    return folder


@pytest.mark.parametrize("line", LINES)
def test_terminals_obey_nothing(folder, path_with_tools, line):
    environment = {**os.environ, "PATH": path_with_tools, "NASTY": NASTY, "NAME": NAME, "PYTHONUTF8": "1"}
    done = subprocess.run(
        ["bash", "-c", line], cwd=folder, env=environment, capture_output=True, check=False, timeout=60
    )
    assert b"Traceback" not in done.stderr
    for stream, output in (1, done.stdout), (2, done.stderr):
        text = output.decode()
        if RAW.get(line) == stream or RAW.get(line.split()[0]) == stream:
            text = text.replace(NASTY, "").replace(NASTY.replace("\r", "\n"), "")
        assert all(c.isprintable() or c in "\n\t" for c in text), (stream, text)
    assert done.stdout or done.stderr, "it says something"


@pytest.mark.parametrize("line", TEXTS)
def test_terminals_obey_nothing_of_texts_for_other_programs(folder, path_with_tools, line):
    environment = {
        **os.environ,
        "PATH": path_with_tools,
        "NASTY": NASTY,
        "NAME": NAME,
        "PYTHONUTF8": "1",
        "NO_COLOR": "1",
    }
    ours, theirs = pty.openpty()
    with open(ours, "rb", buffering=0) as terminal:
        command = ["bash", "-c", line]
        options = {"cwd": folder, "env": environment, "stderr": subprocess.PIPE, "timeout": 60}
        done = subprocess.run(command, stdout=theirs, **options)
        os.close(theirs)
        output = b""
        try:
            while data := terminal.read(65_536):
                output += data
        except OSError:  # how the end of a terminal reads
            pass
    assert done.returncode == 0, done.stderr
    text = output.decode().replace("\r\n", "\n")
    assert text
    assert all(c.isprintable() or c in "\n\t" for c in text), text
    piped = subprocess.run(command, stdout=subprocess.PIPE, **options).stdout.decode()
    if line.startswith("tar2json"):
        assert [*map(json.loads, text.splitlines())] == [*map(json.loads, piped.split("\n")[:-1])]
    elif line.startswith("tarcard"):
        assert json.loads(text).keys() == json.loads(piped).keys()
    elif not line.startswith(("tarindex", "tarsplit")):
        assert [*map(unescape, text.splitlines())] == [*map(unescape, piped.split("\n")[:-1])]
        assert text != piped, "a pipe gets the characters as they are"
