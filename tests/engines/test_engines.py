"""Ray, Spark and Daft read, map and write 4,000 samples; each is there once, though a worker is killed."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

import pytest
from engine_programs import MORE, SAMPLES
from programs import need

from tarshards import IndexedShards, ShardWriter

pytestmark = pytest.mark.interop

PROGRAM = Path(__file__).with_name("engine_programs.py")
ENGINES = {"ray": "ray", "spark": "pyspark", "daft": "daft"}


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> str:
    """Return the expression of two shards, a large one and a small one."""
    folder = tmp_path_factory.mktemp("set")
    with ShardWriter(str(folder / "set-%d.tar"), max_samples=SAMPLES - 500) as writer:
        for i in range(SAMPLES):
            extra = {"txt": "one of the first shard"} if i == 7 else {}
            writer.write({"__key__": f"{i:06d}", "bin": f"{i}".encode() * (1 + i % 50), "cls": i % 10, **extra})
    return str(folder / "set-{0..1}.tar")


def digests(samples, *, backwards: bool = False) -> Counter:
    return Counter(
        (each["__key__"], sha256(each["bin"][:: -1 if backwards else 1] + b"\0" + each["cls"]).hexdigest())
        for each in samples
    )


@pytest.mark.parametrize("engine", ENGINES)
def test_each_sample_is_read_and_written_once_though_a_worker_is_killed(engine, shards, tmp_path, daft):
    if find_spec(ENGINES[engine]) is None:
        pytest.skip(f"needs {ENGINES[engine]}")
    if engine == "spark":
        need("java")
    command = [sys.executable, PROGRAM, engine, shards, tmp_path / "copy/out-{shard:03d}.tar"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=500)
    if engine == "daft":  # it runs in the process that was killed, and begins again
        assert done.returncode == -9
        assert not [*tmp_path.glob("copy/*.tar")]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "killed").exists()
    source = digests(IndexedShards(shards))
    assert Counter(tuple(line.split()) for line in (tmp_path / "read").read_text().splitlines()) == source
    copies = IndexedShards(str(tmp_path / "copy/out.shards.json"))
    assert digests(copies, backwards=True) == source + digests([MORE], backwards=True)
    assert [(each["__key__"], each["txt"]) for each in copies if "txt" in each] == [
        ("000007", b"one of the first shard")
    ]
    written = sorted(path.name for path in tmp_path.glob("copy/*.tar"))
    assert written == [f"out-{number:03d}.tar" for number in range(len(written))]
    assert len(written) >= SAMPLES / 150
