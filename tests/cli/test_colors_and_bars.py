"""What a terminal gets besides plain text: colours, progress bars, and tables that fit."""

from __future__ import annotations

import os
import re
import subprocess
import tarfile
import termios
import threading
from contextlib import suppress
from typing import NamedTuple

import pytest

from tarshards import write_samples

RED, YELLOW, CYAN, END = "\x1b[1;31m", "\x1b[33m", "\x1b[36m", "\x1b[m"
CODES = re.compile(r"\x1b\[[\d;]*m")


class Shown(NamedTuple):
    """What a terminal got from a program, and how that ended."""

    text: str
    code: int

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()


@pytest.fixture
def terminal(tmp_path, path_with_tools):
    """Return a function that runs a line of bash in a terminal, of some columns and lines."""

    def run(line: str, columns: int = 100, lines: int = 24, **environment: str) -> Shown:
        primary, secondary = os.openpty()
        termios.tcsetwinsize(secondary, (lines, columns))
        variables = {**os.environ, "PATH": path_with_tools, "TERM": "xterm", **environment}
        for name in ("NO_COLOR", "COLUMNS", "LINES"):
            variables.pop(name, None) if name not in environment else None
        process = subprocess.Popen(
            ["bash", "-c", line], cwd=tmp_path, env=variables, stdin=secondary, stdout=secondary, stderr=secondary
        )
        os.close(secondary)
        shown = b""
        stop = threading.Timer(60, process.kill)
        stop.start()
        with suppress(OSError):  # the end of what a terminal shows
            while chunk := os.read(primary, 4096):
                shown += chunk
        os.close(primary)
        code = process.wait()
        stop.cancel()
        return Shown(shown.decode().replace("\r\n", "\n"), code)

    return run


@pytest.fixture(autouse=True)
def _shards(tmp_path):
    """Write a.tar, of twelve samples, and damaged.tar, whose second sample has no header."""
    text = "a dog on a skateboard jumps over two red benches near the old harbour"
    samples = [{"__key__": f"{i:06d}", "cls": i, "txt": " ".join(text.split()[: i + 2])} for i in range(12)]
    write_samples(samples, str(tmp_path / "a.tar"))
    data = (tmp_path / "a.tar").read_bytes()
    (tmp_path / "damaged.tar").write_bytes(data[:2048] + b"x" * 512 + data[2560:])


@pytest.mark.parametrize(
    ("line", "code", "part"),
    [
        ("tarcat none.tar | cat", 0, f"{RED}tarcat:{END} none.tar: No such file"),
        ("tarshards cat none.tar | cat", 0, f"{RED}tarshards cat:{END} none.tar: No such file"),
        ("tarcat --interleave x", 2, f"{RED}Error:{END} "),
        ("tarcheck -q damaged.tar", 1, f"{RED}error:{END} damaged.tar: "),
        ("tarcheck -q damaged.tar --json", 1, '"severity": "error"'),
        ("tarcheck damaged.tar", 1, f"{RED}damaged.tar: 11 samples are whole"),
        ("targrep -q -l benches a.tar; targrep -l near a.tar", 0, f"{CYAN}000009{END}\n{CYAN}000010{END}"),
        ("tarshow -c 1 a.tar", 0, f"\n{CYAN}000000 {END}  0"),
        ("tarindex -q damaged.tar", 1, f"{RED}tarindex:{END} damaged.tar: "),
    ],
)
def test_colors(terminal, line, code, part):
    shown = terminal(line)
    assert part in shown.text
    assert shown.code == code
    assert CODES.search(terminal(line, NO_COLOR="1").text) is None
    assert CODES.search(terminal(line, TERM="dumb").text) is None
    assert CODES.search(terminal(f"({line}) 2>&1 | cat").text) is None
    never = re.sub(r"\b(tarshards cat|tar\w+)\b(?! *[:.]| --j)", r"\1 --color never", line)
    assert CODES.search(terminal(never).text) is None


def test_colors_in_a_pipe_on_demand(terminal):
    assert f"{RED}error:{END}" in terminal("tarcheck --color always damaged.tar | cat", NO_COLOR="1").text
    assert f"{CYAN}000000" in terminal("tarshow --color always --table a.tar | cat").text


def bars(text: str) -> list[str]:
    """Return the lines of *text* that show a bar, each as it was last."""
    last = [line.rpartition("\r")[2] for line in text.split("\n")]
    return [line for line in last if "samples/s" in line or "shards/s" in line]


def test_an_error_is_printed_below_the_bar(terminal):
    shown = terminal("tarsort --sort txt:int a.tar -o out.tar")
    *_, bar, error = shown.lines
    assert re.fullmatch(rf"{re.escape(RED)}tarsort:{re.escape(END)} a\.tar: 000000\.txt: .*", error)
    assert "reading: " in bar
    assert shown.code == 1


def test_messages_are_printed_above_the_bar(terminal):
    shown = terminal("tarproc -c '[ $TAR_INDEX != 1 ]' --failed skip a.tar -o out.tar")
    (message,) = [line for line in shown.text.replace("\r", "\n").split("\n") if "tarproc:" in line]
    assert CODES.sub("", message).startswith("tarproc: a.tar: 000001: ")
    (bar,) = bars(shown.text)
    assert "12 samples" in bar


@pytest.mark.parametrize("options", ["", "--verbose"])
def test_the_log_is_printed_above_the_bar(terminal, tmp_path, options):
    with tarfile.open(tmp_path / "dots.tar", "w") as archive:
        for i in range(80):
            archive.addfile(tarfile.TarInfo(f"a.{i}.cls"))
    shown = terminal(f"tarcat {options} dots.tar -o out.tar", 200)
    (message,) = [line for line in shown.text.replace("\r", "\n").split("\n") if "dots.tar" in line]
    assert message.startswith("dots.tar: a: 80 fields, such as ")
    assert "1 samples" in bars(shown.text)[-1]


@pytest.mark.parametrize(
    ("line", "phases"),
    [
        ("tarsort --sort cls:int a.tar -o out.tar", ["reading: 12 samples", "writing: 100%"]),
        ("tarsort --unique first a.tar -o out.tar", ["reading: 12 samples", "writing: 12 samples"]),
        ("tarreshard -j 1 -n 8 -o out-%d.tar a.tar", ["reading: 100%", "writing: 100%"]),
        ("tarcat a.tar -o out.tar", ["12 samples"]),
        ("tarcreate --dir . -o out.tar --exts idx --allow-empty", ["0 samples"]),
    ],
)
def test_phases_and_rates(terminal, line, phases):
    shown = bars(terminal(line, 120).text)
    assert [bar[: len(phase)] for bar, phase in zip(shown, phases, strict=True)] == phases
    assert all(re.search(r", [\d.]+[kM]?B/s\]$", bar) for bar in shown if "12 samples" in bar)


def test_a_bar_fits_a_narrow_terminal(terminal):
    shown = terminal("tarsort --sort cls:int a.tar -o out.tar", 40)
    assert all(len(line) <= 40 for line in shown.text.replace("\r", "\n").split("\n"))


@pytest.mark.parametrize("columns", [12, 20, 40, 80, 200])
def test_a_table_fits(terminal, columns):
    shown = terminal("tarshow a.tar", columns)
    lines = [CODES.sub("", line) for line in shown.lines]
    assert len(lines) == 13
    assert all(len(line) <= columns for line in lines)
    assert lines[0].startswith("__key")
    if columns >= 20:
        assert lines[-1].startswith("000011   11" if columns >= 40 else "000011")
    if columns == 40:
        assert lines[0] == "__key__  cls  txt"
        assert lines[-1] == '000011   11   "a dog on a skateboard…'
    if columns == 12:
        assert lines[0].endswith("+2")
    if columns == 200:
        assert lines[-1].endswith('near the ol"…')


def test_the_header_comes_again_on_each_screen(terminal):
    lines = terminal("tarshow a.tar", lines=8).lines
    assert [number for number, line in enumerate(lines) if "__key__" in line] == [0, 7]


def test_a_table_of_samples_with_other_fields(terminal, tmp_path):
    write_samples(
        [{"__key__": "a", "cls": 1}, {"__key__": "b", "日本": b"x", "txt": "日本語の文 です"}], str(tmp_path / "b.tar")
    )
    lines = [CODES.sub("", line) for line in terminal("tarshow b.tar").lines]
    assert lines == ["__key__  cls  txt                日本", "a        1", 'b             "日本語の文 です"  "x"']


def test_a_table_in_a_pipe_is_not_cut(terminal):
    piped = terminal("tarshow -q --table a.tar | cat", 30).lines
    assert piped[0] == "__key__  cls  txt"
    assert len(piped) == 13
    assert piped[-1].endswith('near the ol"…')
    assert terminal("tarshow -q -c 1 a.tar | cat").lines == ['000000\tcls:1=0\ttxt:5="a dog"']


def test_tarview_says_what_it_shows_and_how_it_ends(terminal):
    shown = terminal("timeout -s INT 3 tarview a.tar")
    address, told = shown.lines[:2]
    assert address.startswith("http://127.0.0.1:")
    assert (
        told
        == "tarview: a: 1 shard, indexed as you scroll; open this address in a browser, and end it here with Ctrl-C"
    )
