"""A plain text is looked for in the bytes that are read: targrep writes and says what it does with all samples made."""

from __future__ import annotations

import os
import random
import subprocess
from pathlib import Path

import pytest
from dirty_shards import any_members, write_tar

from tarshards import write_samples
from tarshards.errors import TarshardsError
from tarshards.samples.grouping import read_shard
from tarshards.samples.ledger import Ledger
from tarshards.storage.manifest import Shard
from tarshards.tar.read import CHUNK
from tarshards.verbs.grep import Pattern

CASES = Path(__file__).parents[1] / "cases"


def reading(samples, text: str, ledger: Ledger, errors: list[str]):
    """All that reading gave: the samples that match, the counts, the errors."""
    found = []
    try:
        found += filter(Pattern([text], fixed=True), samples)
    except TarshardsError as error:
        errors.append(repr(error))
    return found, errors, (ledger.samples, ledger.members, ledger.shards, ledger.skipped)


def assert_the_same(path, text: str, **marks) -> None:
    shard = Shard(str(path), **marks)
    for on_error in (False, True):
        results = []
        for given in (text.encode(), None):
            errors: list[str] = []
            lose = (lambda error: errors.append(repr(error))) if on_error else None  # noqa: B023
            ledger = Ledger(max_errors=99 if on_error else 0, on_error=lose)
            results.append(reading(read_shard(shard, ledger=ledger, text=given), text, ledger, errors))
        compared = slice(None if on_error else 2)  # a run that an error ended shows no counts
        assert results[0][compared] == results[1][compared]


@pytest.mark.parametrize("name", sorted(path.name for path in CASES.glob("*.tar*")))
def test_archives_of_other_programs(name):
    for text in ("a", "1", "\0\0", "ustar"):
        assert_the_same(CASES / name, text)


@pytest.mark.parametrize("seed", range(30))
def test_dirty_and_damaged_shards(tmp_path, seed):
    rng = random.Random(seed)
    path = tmp_path / "a.tar"
    write_tar(path, any_members(rng))
    assert_the_same(path, rng.choice("ab1\0é"))
    assert_the_same(path, "a", samples=7)
    whole = path.read_bytes()
    path.write_bytes(whole[: rng.randrange(len(whole))])
    assert_the_same(path, "a", samples=7)
    at = rng.randrange(len(whole))
    path.write_bytes(whole[:at] + rng.randbytes(600) + whole[at + 600 :])
    assert_the_same(path, "a")
    path.write_bytes(whole + whole)
    assert_the_same(path, "a", concatenated=True)


SAMPLES = [
    {"__key__": "a", "cls": b"needle", "txt": "hay"},
    {"__key__": "b", "txt": "hay needl", "z": b"e, no needl"},
    {"__key__": "needle", "txt": "hay"},
    {"__key__": "c", "txt": "a needle".encode("utf-16")},
    {"__key__": "c2", "txt": "a needle".encode("utf-32-be"), "big": bytes(3 * CHUNK)},
    {"__key__": "c3", "txt": b"\0\0\xfe\xff" + "a needle".encode("utf-32-be")},
    {"__key__": "d", "big": bytes(2 * CHUNK) + b"needle", "cls": b"1"},
    {"__key__": "e", "big": b"needle" + bytes(2 * CHUNK), "cls": b"1"},
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

    assert run(line) == run(line.replace("targrep", "targrep -m 1000", 1))  # which makes all samples
