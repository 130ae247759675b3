"""The progress bar has a total if a manifest, an index, --count or --slice gives it."""

from __future__ import annotations

import os
import re
import subprocess
import termios
from contextlib import suppress

import pytest
from range_server import serving

from tarshards import write_samples
from tarshards.index.build import build_index
from tarshards.storage.manifest import Shard, dump_manifest


@pytest.fixture
def bar(tmp_path, path_with_tools):
    """Return a function that runs a line of bash with a terminal as stderr, and returns the last state of the bar."""

    def run(line: str) -> str:
        terminal, secondary = os.openpty()
        termios.tcsetwinsize(secondary, (24, 100))
        process = subprocess.Popen(
            ["bash", "-uc", line],
            cwd=tmp_path,
            env={**os.environ, "PATH": path_with_tools},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=secondary,
        )
        os.close(secondary)
        shown = b""
        with suppress(OSError):  # the end of what a terminal shows
            while chunk := os.read(terminal, 4096):
                shown += chunk
        os.close(terminal)
        assert process.wait(60) == 0, shown
        states = re.findall(r"(\d+/\d+|\d+ samples) \[", shown.decode())
        return states[-1] if states else shown.decode()

    return run


@pytest.fixture
def shards(tmp_path):
    """Write plain.tar, indexed.tar and stale.tar of eight samples each, and a manifest of plain.tar."""
    samples = [{"__key__": f"s{i}", "cls": i} for i in range(8)]
    for name in ("plain", "indexed", "stale"):
        write_samples(samples, str(tmp_path / f"{name}.tar"))
    for name in ("indexed", "stale"):
        build_index(str(tmp_path / f"{name}.tar")).save(str(tmp_path / f"{name}.tar"))
    with open(tmp_path / "stale.tar", "ab") as file:
        file.write(bytes(10240))
    (tmp_path / "set.shards.json").write_text(dump_manifest([Shard("plain.tar", 8)]))


TOTALS = {
    "tarcat indexed.tar": "8/8",
    "tarcat indexed.tar indexed.tar --rekey '{index}'": "16/16",
    "tarcat set.shards.json": "8/8",
    "tarcat 'set.shards.json::indexed.tar' --rekey '{index}'": "16/16",
    "tarcat --skip 3 indexed.tar": "5/5",
    "tarcat --skip 3 --shuffle 4 -c 2 indexed.tar": "2/2",
    "tarpcat --skip 3 set.shards.json": "5/5",
    "tarcat -c 3 plain.tar": "3/3",
    "tarcat --slice 2:5 plain.tar": "3/3",
    "tarcat --slice ::3 indexed.tar": "3/3",
    "tarcat --slice 1:100 -c 100 indexed.tar": "7/7",
    "tarcat -c 100 indexed.tar": "8/8",
    "tarsort indexed.tar": "8 samples",
    "tarsort --sort cls:int indexed.tar": "8/8",
    "tarsplit indexed.tar -o out": "8/8",
    "tarproc -c true indexed.tar": "8/8",
    "targrep 7 indexed.tar": "8/8",
    "tarshow --summary indexed.tar": "8/8",
    "tar2tsv set.shards.json": "8/8",
    "tarmix --until 4 indexed.tar plain.tar --rekey '{index}'": "4/4",
    "tarcheck indexed.tar": "1/1",
    "tarreshard -j 1 -n 8 -o out-%d.tar indexed.tar": "1/1",
    "tarcat plain.tar": "8 samples",
    "cat indexed.tar | tarcat -": "8 samples",
    "tarcat plain.tar indexed.tar --rekey '{index}'": "16 samples",
    "tarcat stale.tar": "8 samples",
}


@pytest.mark.parametrize("line", TOTALS)
def test_totals(bar, shards, line):
    assert bar(f"{line} {'' if line.startswith(('tarsh', 'tarch', 'tarspl', 'tarres')) else '| cat'}") == TOTALS[line]


def test_nothing_is_shown_if_quiet_or_without_a_terminal(bar, shards):
    assert bar("tarcat -q indexed.tar") == ""
    assert bar("tarcat indexed.tar 2>errors; cat errors >&2") == ""


def test_no_request_is_made_for_the_sake_of_a_total(bar, shards, tmp_path):
    with serving(tmp_path) as site:
        assert bar(f"tarcat {site.url}/indexed.tar") == "8 samples"
        assert site.asked("indexed.tar") == 1
        assert site.asked(".index") == 0
        assert bar(f"tarcat {site.url}/set.shards.json") == "8/8"
        assert site.asked("set.shards.json") == 1
