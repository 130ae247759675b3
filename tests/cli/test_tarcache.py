"""tarcache manages a cache while programs use it, and touches nothing else."""

from __future__ import annotations

import os
import pty
import random
import subprocess
import termios
from contextlib import suppress

import pytest
from range_server import serving

from tarshards import write_samples
from tarshards.storage import cache as module
from tarshards.storage.cache import Block, BlockCache, CacheFolder
from tarshards.storage.remote import LEAST_CACHE, Remote
from tarshards.storage.wire import calling, run

NASTY = "\x1b]0;owned\x07\x9b31m\u202e\rb"


def block_of(number: int, url: str = "http://host/a.tar", length: int = 5000) -> Block:
    return Block(url, '"v1"', 1 << 30, number * length, length)


def data_of(block: Block) -> bytes:
    return random.Random(block.offset).randbytes(block.length)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache in the folder cache, with five blocks of a.tar and two of b.tar."""
    monkeypatch.setattr(module, "_caches", {})
    cache = BlockCache.of(Remote(cache_dir=tmp_path / "cache", cache_bytes=LEAST_CACHE))
    for block in [block_of(i) for i in range(5)] + [block_of(i, "http://host/b.tar") for i in range(2)]:
        run(cache.fill(block, lambda block=block: calling(data_of, block)))
    yield cache
    module._leave_all()


@pytest.fixture
def shell(tmp_path, path_with_tools):
    """Return a function that runs a line of bash in tmp_path."""

    def run(line: str) -> subprocess.CompletedProcess:
        environment = {**os.environ, "PATH": path_with_tools, "PYTHONUTF8": "1"}
        command = ["bash", "-uo", "pipefail", "-c", line]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)

    return run


def test_list(cache, shell):
    expected = (
        f"5\t40960\thttp://host/a.tar\n2\t16384\thttp://host/b.tar\n7\t57344\ttotal, of a budget of {LEAST_CACHE}\n"
    )
    assert shell("tarcache list cache").stdout == expected


def test_a_damaged_block_is_removed_and_fetched_again(cache, shell, tmp_path):
    paths = {stored.block: stored.path for stored in cache.folder.entries()}
    cut, flipped, emptied, headless = (paths[block_of(i)] for i in range(4))
    os.truncate(cut, 4000)
    os.truncate(emptied, 0)
    for path, place in (flipped, 3000), (headless, 3):
        with open(path, "r+b") as file:
            file.seek(place)
            byte = file.read(1)
            file.seek(place)
            file.write(bytes([byte[0] ^ 4]))
    done = shell("tarcache verify cache")
    assert (done.returncode, done.stdout) == (1, "7 blocks, 4 damaged\n")
    named = {str(tmp_path / line.split(": ")[1]) for line in done.stderr.splitlines()}
    assert named == {cut, flipped, emptied, headless}
    assert not any(map(os.path.exists, [cut, flipped, emptied, headless]))
    assert cache.folder.read_counts()["pinned"] == 3 * 8192
    assert shell("tarcache verify cache").stdout == "3 blocks, 0 damaged\n"
    for number in range(4):
        block = block_of(number)
        assert run(cache.fill(block, lambda block=block: calling(data_of, block))) == data_of(block)
    assert shell("tarcache verify cache").stdout == "7 blocks, 0 damaged\n"


def test_a_purge_leaves_a_cache_that_goes_on(cache, shell):
    assert shell("tarcache purge cache --url 'http://host/[b]*'").stdout == "removed 2 blocks, 16384 bytes\n"
    assert shell("tarcache purge cache").stdout == "removed 5 blocks, 40960 bytes\n"
    assert cache.folder.read_counts()["pinned"] == 0
    fetched = []
    for _ in range(2):
        run(cache.fill(block_of(0), lambda: calling(lambda: fetched.append(1) or data_of(block_of(0)))))
    assert fetched == [1]


def test_terminals_obey_nothing(cache, shell, tmp_path):
    block = block_of(0, f"http://host/{NASTY}.tar")
    run(cache.fill(block, lambda: calling(data_of, block)))
    (stored,) = (stored for stored in cache.folder.entries() if stored.block == block)
    (tmp_path / f"cache/{NASTY}").write_text("precious")
    told = [shell("tarcache list cache")]
    with open(stored.path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(bytes([data_of(block)[-1] ^ 1]))
    told += [shell(f"tarcache {verb} cache") for verb in ("verify", "purge")]
    assert all("host/" in done.stdout + done.stderr for done in told[:2])
    text = "".join(done.stdout + done.stderr for done in told)
    assert all(c.isprintable() or c in "\n\t" for c in text)
    assert (tmp_path / f"cache/{NASTY}").read_text() == "precious"


def test_looking_at_blocks_is_no_use_of_them(cache, shell):
    paths = [stored.path for stored in cache.folder.entries()]
    for path in paths:
        os.utime(path, (10**9, 10**9))
    assert shell("tarcache list cache; tarcache verify cache").returncode == 0
    assert {os.stat(path).st_atime for path in paths} == {10**9}


@pytest.fixture
def site(tmp_path):
    (tmp_path / "site").mkdir()
    for name in "a", "b":
        samples = [{"__key__": f"{i}", "txt": random.Random(i).randbytes(100_000)} for i in range(100)]
        write_samples(samples, str(tmp_path / f"site/{name}.tar"))
    with serving(tmp_path / "site") as site:
        yield site


def test_warming_reads_the_shards_whole(tmp_path, site, shell):
    size = sum(path.stat().st_size for path in site.folder.iterdir())
    fetched = []
    for _ in range(2):
        done = shell(f"tarcache warm cache '{site.url}/{{a,b}}.tar?token=secret'")
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        fetched.append(site.bytes)
    assert size <= fetched[0] < 2 * size, "a range that stalls on a busy machine is asked for again"
    assert fetched[1] - fetched[0] < 0.001 * size
    folder = CacheFolder.existing(str(tmp_path / "cache"))
    for name in "a", "b":
        found = [each.block for each in folder.entries() if each.block.url == f"{site.url}/{name}.tar"]
        assert sum(block.length for block in found) == found[0].size == (site.folder / f"{name}.tar").stat().st_size
    assert subprocess.run(["grep", "-r", "secret", str(tmp_path / "cache")], capture_output=True).stdout == b""


def test_warming_takes_lists_and_fails_where_a_shard_is_missing(tmp_path, site, shell):
    (tmp_path / "list").write_text(f"{site.url}/a.tar\n{site.url}/none.tar\n")
    done = shell("tarcache warm cache -T list --cache-bytes 1GB")
    assert done.returncode == 1
    assert done.stderr.startswith(f"tarcache: {site.url}/none.tar: 404")
    assert CacheFolder.existing(str(tmp_path / "cache")).read_counts()["budget"] == 10**9


def test_warming_says_what_the_budget_leaves_out(site, shell):
    done = shell(f"tarcache warm cache --cache-bytes 16MiB '{site.url}/{{a,b}}.tar'")
    told = "not all blocks are stored: the budget of 16777216 bytes is used up; --cache-bytes sets it"
    assert (done.returncode, done.stderr) == (0, f"tarcache: {told}\n")


def test_a_folder_that_cannot_be_made(tmp_path, site, shell):
    (tmp_path / "file").write_text("")
    site.clear()
    done = shell(f"tarcache warm file/cache {site.url}/a.tar")
    assert (done.returncode, done.stderr) == (1, f"tarcache: {tmp_path}/file/cache: Not a directory\n")
    assert site.requests == []


@pytest.mark.parametrize(("quiet", "bar"), [("", "2/2"), ("-q", "")])
def test_warming_shows_a_bar_of_shards(tmp_path, site, path_with_tools, quiet, bar):
    terminal, secondary = pty.openpty()
    termios.tcsetwinsize(secondary, (24, 100))
    command = ["bash", "-c", f"tarcache warm {quiet} cache '{site.url}/{{a,b}}.tar'"]
    process = subprocess.Popen(
        command, cwd=tmp_path, env={**os.environ, "PATH": path_with_tools}, stdin=subprocess.DEVNULL, stderr=secondary
    )
    os.close(secondary)
    shown = b""
    with suppress(OSError):  # the end of what a terminal shows
        while chunk := os.read(terminal, 4096):
            shown += chunk
    os.close(terminal)
    assert process.wait(60) == 0
    assert bar.encode() in shown if bar else shown == b""
