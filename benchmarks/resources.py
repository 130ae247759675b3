"""What five runs take of the machine: memory, threads, descriptors, connections, requests, bytes, page faults.

Each run has a process of its own, which reads a small set in a session of its own. ``resources.py`` measures this tree;
``resources.py CHECKOUT`` also measures another checkout whose kernels are built, in turns, and exits with 1 if this
tree takes over 5 % more. It records nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from processes import session

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from range_server import serving

SHARDS, SAMPLES, SIZE = 8, 200, 20_000  # bytes of a sample
COMMANDS = 100  # samples of tarproc, which starts a process for each
ROUNDS = 3
TOLERANCE = 1.05  # times what another checkout takes
LOOK = 0.004  # seconds between two looks at the processes of a run

Row = dict[str, float]


# The runs: each opens its shards, and returns what reads them.


def unindexed(folder: str) -> Callable[[], Any]:
    from tarshards import Stream

    return partial(exhaust, Stream.from_shards(f"{folder}/s.shards.json", index=False))


def planned(folder: str) -> Callable[[], Any]:
    from tarshards import Stream

    return partial(exhaust, Stream.from_shards(f"{folder}/s.shards.json", index=True))


def workers(folder: str) -> Callable[[], Any]:
    from tarshards import ShardDataset, ShardLoader

    dataset = ShardDataset(f"{folder}/s.shards.json", shuffle=True)
    return partial(exhaust, ShardLoader(dataset, 64, num_workers=2))


def remote(folder: str) -> Callable[[], Any]:
    from tarshards import Remote, Stream
    from tarshards.storage import tuning

    tuning.LATE_SECONDS = (
        60.0  # seconds; parts of requests that a busy machine makes late would come from other connections
    )
    url, cache = f"{os.environ['SITE']}/s.shards.json", tempfile.mkdtemp(dir=folder)
    stream = Stream.from_shards(url, index=True, shuffle=True, remote=Remote(cache_dir=cache))
    return lambda: [exhaust(stream) for _ in range(2)]


def tarproc(folder: str) -> Callable[[], Any]:
    tool = "from tarshards.cli.tarproc import main; main()"
    shards = [f"{folder}/s-{number:03d}.tar" for number in range(SHARDS)]
    options = ["-q", "--no-sync", "-p2", "--count", str(COMMANDS), "-c", "true"]
    return partial(
        subprocess.run, [sys.executable, "-c", tool, *options, *shards], check=True, stdout=subprocess.DEVNULL
    )


def exhaust(samples: Any) -> None:
    for _ in samples:
        pass


RUNS = {
    "un-indexed": unindexed,
    "planned": planned,
    "shuffled, two workers": workers,
    "remote, with a cache, two epochs": remote,
    "tarproc": tarproc,
}


def run(name: str, folder: str) -> None:
    """Make a run in this process, and print what it and the processes that it started took since the imports."""
    read = RUNS[name](folder)
    before = faults_and_bytes()
    read()
    faults, read_bytes = (after - earlier for after, earlier in zip(faults_and_bytes(), before))
    print(json.dumps({"memory": peak(Path("/proc/self")), "faults": faults, "read": read_bytes / 1e6}))


def faults_and_bytes() -> tuple[int, int]:
    """Return the page faults of this process and its ended children so far, and the bytes that read() returned."""
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    faults = sum(each.ru_minflt + each.ru_majflt for each in usage)
    return faults, int(re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())[1])


def peak(process: Path) -> float:
    """Return the most memory that a process has had, in MB; 0 for one that has ended."""
    found = re.search(r"^VmHWM:\s+(\d+)", (process / "status").read_text(), re.MULTILINE)
    return int(found[1]) * 1024 / 1e6 if found else 0.0


# What is measured from outside.


def measure(name: str, checkout: Path, folder: Path) -> Row:
    """Make a run of a checkout in a process of its own."""
    with serving(folder) as site:
        given = {"PYTHONPATH": str(checkout), "PYTHONHASHSEED": "0", "SITE": site.url, "no_proxy": "*"}
        process = subprocess.Popen(
            [sys.executable, __file__, "run", name, str(folder)],
            stdout=subprocess.PIPE,
            env={**os.environ, **given},
            cwd=folder,
            start_new_session=True,
        )
        most = {"a child's": 0.0, "threads": 0.0, "descriptors": 0.0}
        while process.poll() is None:
            for one in session(process.pid):
                for what, value in look(one, is_child=one.name != str(process.pid)).items():
                    most[what] = max(most[what], value)
            time.sleep(LOOK)
        output = process.stdout.read()
        if process.returncode:
            raise SystemExit(f"{name}: exit status {process.returncode} in {checkout}")
        sent = {"connections": site.connections, "requests": len(site.requests), "received": site.bytes / 1e6}
    return json.loads(output) | most | sent


def look(process: Path, *, is_child: bool) -> Row:
    """Return what a process of Python takes now; nothing for a command, and for one that has ended."""
    with contextlib.suppress(OSError):
        if "python" in os.readlink(process / "exe"):
            held = {
                name: len(os.listdir(process / folder)) for name, folder in (("threads", "task"), ("descriptors", "fd"))
            }
            return held | ({"a child's": peak(process)} if is_child else {})
    return {}


def make(folder: Path) -> None:
    from tarshards import ShardWriter

    rng = random.Random(0)
    with ShardWriter(f"{folder}/s-%03d.tar", max_samples=SAMPLES, index=True) as writer:
        for number in range(SHARDS * SAMPLES):
            writer.write({"__key__": f"{number:06d}", "bin": rng.randbytes(SIZE), "cls": number % 100})


UNITS = {
    "memory": "MB, of the process at its largest",
    "a child's": "MB, the same of a process that it started",
    "threads": "of a process, at once",
    "descriptors": "of a process, at once",
    "connections": "that the server accepted",
    "requests": "to the server",
    "received": "MB, of bodies",
    "read": "MB, by read()",
    "faults": "pages",
}


def table(rows: dict[str, dict[Path, list[Row]]]) -> tuple[list[str], int]:
    """Return the table of the medians with their spread, and how many of the first checkout are over 5 % more."""
    lines = ["| run | | this tree | the other | ratio |", "|---|---|---|---|---|"]
    over = 0
    for name, taken in rows.items():
        for what, unit in UNITS.items():
            values = [[row[what] for row in each] for each in taken.values()]
            if not any(map(any, values)):
                continue
            cells = [f"{median(each):,.5g} ({min(each):,.5g} to {max(each):,.5g})" for each in values]
            ratio = ""
            if len(values) > 1:
                mine, theirs = map(median, values)
                # More, beyond what the rounds differ by.
                is_more = mine > TOLERANCE * theirs and min(values[0]) > max(values[1])
                over += is_more
                ratio = f"{mine / theirs if theirs else 1:.3f}" + (" **more**" if is_more else "")
            lines.append(f"| {name} | {what}, {unit} | {' | '.join([*cells, ratio])} |")
    return lines, over


def main(checkouts: list[Path]) -> None:
    rows: dict[str, dict[Path, list[Row]]] = {name: {each: [] for each in checkouts} for name in RUNS}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "set"
        folder.mkdir()
        make(folder)
        for _ in range(ROUNDS):
            for name, taken in rows.items():
                for checkout, each in taken.items():
                    each.append(measure(name, checkout, folder))
    lines, over = table(rows)
    print("\n".join(lines))
    raise SystemExit(f"{over} of these are over 5 % more" if over else 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"]:
        run(*sys.argv[2:])
    else:
        main([Path(__file__).parents[1], *(Path(each).resolve() for each in sys.argv[1:])])
