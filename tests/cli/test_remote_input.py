"""Remote shards in the tools: data read, connections used, and the cache."""

from __future__ import annotations

import os
import subprocess

import pytest
from range_server import serving

from tarshards import TarWriter
from tarshards.index.build import build_index


@pytest.fixture
def site(tmp_path):
    folder = tmp_path / "site"
    folder.mkdir()
    for shard in range(3):
        path = str(folder / f"{shard}.tar")
        with TarWriter(path) as writer:
            for i in range(20):
                writer.write({"__key__": f"{shard}-{i:02d}", "txt": "x" * 5000})
        build_index(path).save(path)
    with serving(folder) as site:
        yield site


@pytest.fixture
def run(path_with_tools):
    """Return a function that runs a tool."""

    def run(*line: object) -> subprocess.CompletedProcess[bytes]:
        environment = {**os.environ, "PATH": path_with_tools}
        return subprocess.run([*map(str, line)], env=environment, capture_output=True, timeout=100)

    return run


def test_with_a_cache_the_second_run_fetches_nothing(site, tmp_path, run):
    line = ["tarcat", f"{site.url}/{{0..2}}.tar", "--connections", 2, "--cache-dir", tmp_path / "cache"]
    first = run(*line)
    assert (first.returncode, first.stderr) == (0, b"")
    site.clear()
    assert run(*line).stdout == first.stdout
    assert site.bytes < 100
    assert first.stdout == run("tarcat", *sorted((tmp_path / "site").glob("*.tar"))).stdout


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--connections", 0], "--connections"),
        (["--ahead", "much"], "--ahead"),
        (["--cache-bytes", "1G"], "cache_bytes= requires cache_dir="),
        (["--cache-bytes", "1k", "--cache-dir", "x"], "cache_bytes must be at least"),
    ],
)
def test_wrong_options_are_refused(words, reason, run):
    done = run("tarcat", "a.tar", *words)
    assert done.returncode == 2
    assert reason in done.stderr.decode()
