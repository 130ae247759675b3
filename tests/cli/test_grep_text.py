"""Samples that cannot contain a plain text are not searched: targrep writes and says what it does if all are."""

from __future__ import annotations

import os
import subprocess

import pytest

from tarshards import write_samples
from tarshards.storage.streams import PIECE

SAMPLES = [
    {"__key__": "a", "cls": b"needle", "txt": "hay"},
    {"__key__": "b", "txt": "hay needl", "z": b"e, no needl"},
    {"__key__": "needle", "txt": "hay"},
    {"__key__": "c", "txt": "a needle".encode("utf-16")},
    {"__key__": "c2", "txt": "a needle".encode("utf-32-be"), "big": bytes(3 * PIECE)},
    {"__key__": "c3", "txt": b"\0\0\xfe\xff" + "a needle".encode("utf-32-be")},
    {"__key__": "d", "big": bytes(2 * PIECE) + b"needle", "cls": b"1"},
    {"__key__": "e", "big": b"needle" + bytes(2 * PIECE), "cls": b"1"},
    {"__key__": "f", "a": b"1" * 300_000, "b": b"2" * 300_000, "c": b"needle"},
    {"__key__": "g", **{f"{number:03d}": b"" for number in range(70)}},
    {"__key__": "h", "txt": b"\xff a needle"},
]


@pytest.mark.parametrize(
    "line",
    [
        "targrep needle a.tar",
        "targrep -F needle a.tar",
        "targrep -l needle - < a.tar",
        "targrep -l needle b.tar.gz",
        "targrep -l needle pipe:'cat a.tar' a.tar",
        "targrep -l -F '(' a.tar",
        "targrep -l . a.tar",
        "targrep -f txt needle a.tar",
        "targrep -l -f 'z;TXT' -f cls needle a.tar",
        "targrep -l -f __key__ needle a.tar",
        "targrep -l -f none needle a.tar",
        "targrep -l -f txt -f big nothing a.tar",
        "targrep -l nothing a.tar",
        "targrep -l nothing empty.tar",
        "targrep -l --allow-empty nothing empty.tar",
        "targrep -l needle cut.tar",
        "targrep needle a.tar a.tar --on-error skip",
        "targrep -l needle a.tar cut.tar a.tar --on-error skip",
        "targrep -l needle a.tar cut.tar --on-error quarantine=q.tar",
    ],
)
def test_what_the_tool_writes_and_says(tmp_path, path_with_tools, line):
    write_samples(SAMPLES, tmp_path / "a.tar")
    write_samples(SAMPLES, tmp_path / "b.tar.gz")
    write_samples([], tmp_path / "empty.tar")
    (tmp_path / "cut.tar").write_bytes((tmp_path / "a.tar").read_bytes()[:3_000_000])

    def run(line: str):
        environment = {**os.environ, "PATH": path_with_tools}
        done = subprocess.run(["bash", "-c", line], cwd=tmp_path, env=environment, capture_output=True)
        return done.returncode, done.stdout, done.stderr

    assert run(line) == run(line.replace("targrep", "targrep -m 1000", 1))  # which searches all samples
