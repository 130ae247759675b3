"""Processes without compiled kernels: they read and write the same, and say once what that costs and how to mend it."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import tarshards
from tarshards import ShardWriter


def digest_of(folder):
    """Read a dataset in each way, write a shard, and return a digest of all that came."""
    from hashlib import sha256

    from tarshards import ArrayLoader, IndexedShards, ShardWriter, Stream, read_samples, readers

    digest, url = sha256(), f"{folder}/set-{{00..19}}.tar"
    shuffled = Stream.from_shards(url, shuffle=True, seed=1)
    for way in read_samples(url), shuffled, Stream.from_shards(url, index=False), IndexedShards(url):
        for sample in way:
            digest.update(repr(sorted(sample.items())).encode())
    fields = {"cls": readers.integer(), "x.npy": readers.array(), "png": readers.image((5, 6))}
    for batch in ArrayLoader(shuffled, 4, fields=fields):
        digest.update(batch["cls"].tobytes() + batch["x.npy"].tobytes() + batch["png"].tobytes())
    with ShardWriter(f"{folder}/out-%d.tar", index=True) as writer:
        for sample in IndexedShards(url):
            writer.write(sample)
    for end in "", ".index":
        with open(f"{folder}/out-0.tar{end}", "rb") as file:
            digest.update(file.read())
    return digest.hexdigest()


#: With no more open files than there are shards: without kernels each takes a descriptor.
READING = f"""
import resource, sys
from tarshards import kernels
resource.setrlimit(resource.RLIMIT_NOFILE, (20, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
{inspect.getsource(digest_of)}
print(kernels.IS_COMPILED, digest_of(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    from io import BytesIO

    from PIL import Image

    folder = tmp_path_factory.mktemp("dataset")
    png, npy = BytesIO(), BytesIO()
    Image.fromarray(np.arange(600, dtype=np.uint8).reshape(10, 20, 3)).save(png, "png")
    np.save(npy, np.arange(5))
    with ShardWriter(str(folder / "set-%02d.tar"), max_samples=2, index=True) as writer:
        for i in range(40):
            sample = {"__key__": f"{i:03d}", "cls": i, "x.npy": npy.getvalue(), "png": png.getvalue()}
            writer.write(sample)
    return folder


@pytest.fixture(scope="module")
def package(tmp_path_factory) -> Path:
    """A folder with the package as a compiler was not there: links to all but the compiled kernels."""
    folder = tmp_path_factory.mktemp("path")
    real, made = Path(tarshards.__file__).parent, folder / "tarshards"
    (made / "kernels").mkdir(parents=True)
    for path in [*real.iterdir(), *(real / "kernels").glob("*.py")]:
        if path.name not in ("kernels", "__pycache__"):
            (made / path.relative_to(real)).symlink_to(path)
    return folder


def run(path: Path, *command: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(path)}
    line = [sys.executable, *map(str, command)]
    done = subprocess.run(line, env=environment, cwd=path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done


def test_all_reads_and_writes_give_the_same_and_the_lack_is_told_of_once(dataset, package):
    slow = run(package, "-c", READING, dataset)
    assert slow.stdout.split() == ["False", digest_of(dataset)]
    assert slow.stderr.count("\n") == 1
    assert "several times more slowly; reinstall tarshards where a C compiler is found" in slow.stderr


#: Reads in several ways, and writes a line to stderr after each.
PROGRAM = """
import sys
from tarshards import IndexedShards, Stream, kernels, read_samples

for read in read_samples, IndexedShards, Stream.from_shards:
    list(read(sys.argv[1]))
    print("read", file=sys.stderr)
    kernels.warn_if_missing.cache_clear()
"""


def test_a_program_beside_the_source_is_told_that_it_imports_it(dataset, package, tmp_path):
    (tmp_path / "tarshards").symlink_to(package / "tarshards")
    (tmp_path / "setup.py").touch()
    (tmp_path / "program.py").write_text(PROGRAM)
    told = run(tmp_path, "program.py", dataset / "set-0{0..1}.tar").stderr.split("read\n")
    assert len(told) == 4
    assert not told.pop()
    for lines in told:
        assert lines.count("\n") == 1, lines
        assert f"imported from its source, {tmp_path}: run `pip install -e .` there, or move" in lines


def test_a_tool_works(dataset, package):
    listed = run(package, "-c", "from tarshards.cli.tar2json import main; main()", dataset / "set-07.tar")
    assert [json.loads(line)["__key__"] for line in listed.stdout.splitlines()] == ["014", "015"]
