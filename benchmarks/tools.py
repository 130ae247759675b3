"""Benchmark the tools on local shards against cat, GNU tar and xargs doing the same work on the same disk.

None waits until what it writes is on the disk: ours run with --no-sync, and the others have no such option.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from statistics import median

from measure import DATA, about, interleave, machine, record

from tarshards import TarWriter, read_samples

BIN = Path(__file__).parents[1] / "bin"
FOLDER = DATA / "tools"
OUT = FOLDER / "out"
CORES = os.cpu_count() or 1
SERVER = """import sys
for line in sys.stdin:
    print("{}", flush=True)
"""


def make_shard(name: str, count: int, size: int) -> Path:
    path = FOLDER / f"{name}.tar"
    if not path.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        rng = random.Random(0)
        with TarWriter(str(path)) as writer:
            for i in range(count):
                writer.write({"__key__": f"{i:08d}", "bin": rng.randbytes(size), "cls": i % 1000})
    return path


def make_tree(shard: Path) -> Path:
    """Unpack the shard with one directory per sample, as tarproc does for a command."""
    tree = FOLDER / shard.stem
    if not tree.exists():
        for sample in read_samples(str(shard)):
            folder = tree / sample["__key__"]
            folder.mkdir(parents=True)
            for field in ("bin", "cls"):
                (folder / f"sample.{field}").write_bytes(sample[field])
    return tree


def shell(command: str) -> None:
    """Run a bash line in an emptied folder, with the tools of this tree."""
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    subprocess.run(["bash", "-euo", "pipefail", "-c", command], check=True, cwd=OUT, stdout=subprocess.DEVNULL)


def tool(name: str, arguments: str) -> str:
    return f"{sys.executable} {BIN / name} -q --no-sync {arguments}"


def table(works: dict[str, tuple[str, int]], peer: str, runs: int = 5) -> list[str]:
    """Return rows with samples per second, and how many times as fast as *peer* each command is."""
    seconds = seconds_of(works, runs)
    ratios = times(works, peer, seconds)
    rows = [f"| | samples a second, median of {runs} | x {peer} |", "|---|---|---|"]
    for name, taken in seconds.items():
        mark = about([1 / each for each in taken])
        rows.append(f"| {name} | {mark}{works[name][1] / median(taken):,.0f} | {ratios[name]:.2f} |")
    return [*rows, ""]


def per_sample() -> dict[str, tuple[str, int]]:
    """Return the lines that run `true` for each of 1,000 samples, or ask a server for each of 20,000."""
    few, many = make_shard("few", 1000, 2048), make_shard("many", 20_000, 2048)
    server = FOLDER / "server.py"
    server.write_text(SERVER)
    tree = make_tree(few)
    directories = f"find {tree} -mindepth 1 -type d -print0"
    with_server = f"-p {CORES} --server '{sys.executable} {server}' {many} -o a.tar"
    return {
        "xargs": (f"{directories} | xargs -0 -P {CORES} -I{{}} bash -c 'cd {{}} && true'", 1000),
        "tarproc -c true": (tool("tarproc", f"-p {CORES} -c true {few} -o a.tar"), 1000),
        "tarproc --server": (tool("tarproc", with_server), 20_000),
    }


def seconds_of(works: dict[str, tuple[str, int]], runs: int) -> dict[str, list[float]]:
    return interleave({name: partial(shell, command) for name, (command, _) in works.items()}, runs=runs)


def times(works: dict[str, tuple[str, int]], peer: str, seconds: dict[str, list[float]]) -> dict[str, float]:
    """Return how many times as fast as *peer* each command is."""
    return {
        name: median(works[name][1] / works[peer][1] * theirs / ours for theirs, ours in zip(seconds[peer], taken))
        for name, taken in seconds.items()
    }


def main() -> None:
    large, small = make_shard("large", 5000, 110 * 1024), make_shard("small", 5000, 2048)
    lines = [
        f"{machine('click')}. Nothing waits for the disk (--no-sync).",
        "",
        f"**One shard of {large.stat().st_size / 1e6:.0f} MB, 110 KB samples**",
        "",
    ]
    works = {
        "cat": f"cat {large} >a.tar",
        "tarcat": tool("tarcat", f"{large} -o a.tar"),
        "tarsplit": tool("tarsplit", f"-s 200MB -o a-%06d.tar {large}"),
    }
    lines += table({name: (command, 5000) for name, command in works.items()}, "cat")
    lines += [f"**One shard of {small.stat().st_size / 1e6:.0f} MB, 2 KB samples**", ""]
    works = {
        "tar -xf, tar -cf": f"mkdir x; tar -xf {small} -C x; tar -cf a.tar --sort=name -C x .",
        "tarcat": tool("tarcat", f"{small} -o a.tar"),
        "tarsplit": tool("tarsplit", f"-s 5MB -o a-%06d.tar {small}"),
    }
    lines += table({name: (command, 5000) for name, command in works.items()}, "tar -xf, tar -cf")
    lines += [
        "**true in a directory for each of 1,000 samples** (the server: 20,000), one at a time per core",
        "",
    ]
    lines += table(per_sample(), "xargs")
    record("Tools", lines[:-1])


if __name__ == "__main__":
    main()
