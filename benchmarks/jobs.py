"""Benchmark tarjob on this machine against xargs -P with the same commands, and the memory of reshard."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path
from statistics import median

from measure import DATA, interleave, machine, record

from tarshards import ShardWriter, read_samples

BIN = Path(__file__).parents[1] / "bin"
FOLDER = DATA / "jobs"
CORES = os.cpu_count() or 1
SHARDS, SIZE = 64, 100 << 20


SHM = Path("/dev/shm/tarshards-jobs")  # without a disk


def make_shards() -> None:
    folder = SHM / "in"
    if not folder.exists():
        folder.mkdir(parents=True)
        (folder / "00.tar").write_bytes(random.Random(0).randbytes(SIZE))
        for number in range(1, SHARDS):  # one file under many names, so that memory is left for the copies
            os.link(folder / "00.tar", folder / f"{number:02d}.tar")


def shell(command: str) -> None:
    for name in ("out", ".tarjob"):
        shutil.rmtree(SHM / name, ignore_errors=True)
    (SHM / "out").mkdir()
    subprocess.run(["bash", "-euo", "pipefail", "-c", command], check=True, cwd=SHM, stdout=subprocess.DEVNULL)


def copies() -> list[str]:
    """Return the seconds of 64 copies."""
    tarjob = f"{sys.executable} {BIN / 'tarjob'} -q -j {CORES} -s '{{00..{SHARDS - 1}}}'"
    works = {
        "tarjob": f"{tarjob} -- 'cat in/{{}}.tar >out/{{}}.tar'",
        "xargs -P": f"seq -w 0 {SHARDS - 1} | xargs -P {CORES} -I{{}} bash -c 'cat in/{{}}.tar >out/{{}}.tar'",
    }
    seconds = interleave({name: partial(shell, command) for name, command in works.items()}, runs=7)
    rows = ["| | seconds, median of 7 | x xargs |", "|---|---|---|"]
    for name, times in seconds.items():
        ratio = median(ours / theirs for ours, theirs in zip(times, seconds["xargs -P"]))
        rows.append(f"| {name} | {median(times):.2f} | {ratio:.2f} |")
    return [f"**{SHARDS} commands that copy a shard of {SIZE >> 20} MiB in memory, {CORES} at once**", "", *rows, ""]


def anonymous(root: int) -> int:
    """Return the anonymous memory of a process and its descendants, in bytes."""
    total, todo = 0, [root]
    while todo:
        process = todo.pop()
        try:
            lines = Path(f"/proc/{process}/status").read_text().splitlines()
            todo += map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split())
        except OSError:
            continue
        total += sum(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))
    return total


def reshards(shards: int = 40, size: int = 50_000_000) -> list[str]:
    """Return the seconds and peak memory of a shuffle of 2 GB by 1 and by 4 processes."""
    source = FOLDER / "source"
    if not source.exists():
        source.mkdir(parents=True)
        rng = random.Random(0)
        with ShardWriter(str(source / "in-%03d.tar"), max_bytes=size) as writer:
            while len(writer.shards) < shards:
                writer.write(
                    {"__key__": f"{writer.samples:07d}", "bin": rng.randbytes(rng.randrange(40_000)), "cls": 1}
                )
    rows = ["| processes | seconds | most RssAnon of all, MB |", "|---|---|---|"]
    made: list[Counter] = []
    for jobs in (1, 2, 4):
        out = FOLDER / "resharded"
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        command = [
            sys.executable,
            BIN / "tarreshard",
            "-q",
            "--no-sync",
            source / "in.shards.json",
            "-o",
            out / "out-%03d.tar",
        ]
        begun = time.perf_counter()
        process = subprocess.Popen([*map(str, command), "-s", str(size), "-j", str(jobs), "--seed", "1"])
        most = 0
        done = threading.Event()
        while process.poll() is None:
            most = max(most, anonymous(process.pid))
            done.wait(0.02)
        if process.returncode:
            raise SystemExit("tarreshard failed")
        rows.append(f"| {jobs} | {time.perf_counter() - begun:.1f} | {most / 1e6:.0f} |")
        made.append(Counter((path.name, hash(path.read_bytes())) for path in sorted(out.glob("*.tar*"))))
    if not made[0] == made[1] == made[2]:
        raise SystemExit("the bytes depend on the number of processes")
    if contents(source) != contents(out):
        raise SystemExit("samples were lost or changed")
    total = sum(path.stat().st_size for path in source.glob("*.tar"))
    return [f"**tarreshard of {total / 1e9:.1f} GB in {len(list(source.glob('*.tar')))} shards**", "", *rows, ""]


def contents(folder: Path) -> Counter:
    shards = sorted(map(str, folder.glob("*.tar")))
    return Counter((sample["__key__"], hash(sample["bin"])) for sample in read_samples(shards))


def main() -> None:
    try:
        make_shards()
        lines = copies()
    finally:
        shutil.rmtree(SHM, ignore_errors=True)
    record("Jobs", [machine("click"), "", *lines, *reshards()])
    shutil.rmtree(FOLDER)


if __name__ == "__main__":
    main()
