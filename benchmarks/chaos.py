"""Chaos for our loaders and those of peers: what each loses, repeats or says when things go wrong.

`make bench ONLY=chaos` runs the same rounds for every loader, each in its environment, and writes the table of
docs/chaos.md; `make bench ONLY=chaos,NAME` runs those of one, and keeps the lines of the others. `chaos.py NAME ROUNDS`
only prints the report of some rounds, such as 3 or 0-9. The loaders are the functions `load` in `readers/`.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from environments import READERS, make_for_reader
from measure import DATA, kept_lines, record

from tarshards.testing.chaos import BAD, FAULTS, NEMESES

ROOT = Path(__file__).parents[1]
PAGE, TITLE = ROOT / "docs" / "chaos.md", "What loaders make of it"
SEED, ROUNDS = 1, "0-17"
SHARDS, EACH = 4, 36  # samples divide evenly among one to three ranks, in batches of 8
LOCAL, OWN = "processes,shards,machine", "processes,machine"
OUTCOMES = ("exact", "reported", "silent", "hung", "died")
WORDS = 150  # characters of an error that are shown
ABOUT = f"""\
Each loader runs the rounds {ROUNDS} of seed {SEED}; our four loaders together run four times as many. The dataset has
{SHARDS} shards of {EACH} samples. It is read on one to three ranks, with one worker process if the loader has workers,
and stopped, killed and resumed. A loader without a state restarts. *faults* are the kinds that apply: readers of local
files get no network faults; formats into which the shards are converted get no damaged shards; for Ray and Daft, the
work of one task is tested, without a cluster. *lost*, *repeated* and *wrong* count samples without an error; a log
message is not an error. `make bench ONLY=chaos,NAME` repeats a line.
"""


@dataclass(frozen=True)
class Tried:
    """A line of the table: the file in `readers/` ("": ours), the loader, the packages for versions, and the faults."""

    file: str
    about: str
    distributions: tuple[str, ...]
    faults: str = ",".join(FAULTS)
    rounds: str = ROUNDS


LOADERS = {
    "tarshards": Tried("", "`Stream`, un-indexed and planned, `ArrayLoader`, `ShardLoader`", (), rounds="0-71"),
    "tarfile": Tried("tarfile_", "Python's `tarfile`, grouped by the rule", (), LOCAL),
    "webdataset": Tried("webdataset_", "`WebLoader`", ("webdataset",)),
    "stateful": Tried("stateful", "`StatefulDataLoader` over `WebDataset`", ("torchdata", "webdataset")),
    "datasets": Tried("datasets_", "streamed tars in `StatefulDataLoader`", ("datasets", "torchdata")),
    "dali": Tried("dali", "`fn.readers.webdataset` on the CPU, checkpoints", ("nvidia-dali-cuda120",), LOCAL),
    "energon": Tried("energon", "`get_savable_loader` over `CrudeWebdataset`", ("megatron-energon",), LOCAL),
    "spdl": Tried("spdl_", "a pipeline over `iter_tarfile`", ("spdl",), LOCAL),
    "ray": Tried("ray_", "`read_webdataset`, the work of a task", ("ray",), "shards,machine"),
    "daft": Tried("daft_", "`read_webdataset`, the work of a task", ("daft",), "shards,machine"),
    "grain": Tried("grain_", "`MapDataset` over ArrayRecord files", ("grain",), OWN),
    "litdata": Tried("litdata_", "`StreamingDataLoader` over its chunks", ("litdata",), OWN),
    "streaming": Tried("streaming_", "`StreamingDataLoader` over MDS", ("mosaicml-streaming",), OWN),
    "squirrel": Tried("squirrel_", "`MessagepackDriver`", ("squirrel-core",), OWN),
}


def shards() -> list[str]:
    """Return shards, written at first, whose labels are the numbers of the samples, as their keys are."""
    from tarshards import ShardWriter

    folder = DATA / "chaos" / f"shards-{EACH}"
    if not folder.exists():
        folder.mkdir(parents=True)
        rng = random.Random(SEED)
        with ShardWriter(folder / "shard-%d.tar", max_samples=EACH, index=True) as writer:
            for number in range(SHARDS * EACH):
                writer.write({"__key__": f"{number:08d}", "bin": rng.randbytes(2000), "cls": number})
    return [str(path) for path in sorted(folder.glob("*.tar"))]


def run(name: str, rounds: str, urls: list[str], report: Path) -> str:
    """Run rounds in a loader's environment, write their report, and return the versions."""
    tried = LOADERS[name]
    python, _ = make_for_reader(tried.file) if tried.file else (sys.executable, ())
    scratch = Path(tempfile.mkdtemp(dir=report.parent))
    # The peer's Python finds what this program needs after its own packages.
    (scratch / "sitecustomize.py").write_text(f"import sys\nsys.path.append({sysconfig.get_path('purelib')!r})\n")
    places = os.pathsep.join(map(str, (scratch, ROOT, READERS, READERS.parent)))
    environment = {**os.environ, "PYTHONPATH": places, "TMPDIR": str(scratch)}
    command = [python, "-m", "tarshards", "chaos", *urls, "--seed", str(SEED), "--round", rounds]
    command += ["--faults", tried.faults, "--report", str(report)]
    command += ["--loader", f"{tried.file}:load"] if tried.file else []
    subprocess.run(command, env=environment, stdout=subprocess.DEVNULL)
    asked = f"from importlib import metadata\nfor name in {tried.distributions}:\n  print(name, metadata.version(name))"
    answer = subprocess.check_output([python, "-c", asked], env=environment, text=True)
    return ", ".join(answer.splitlines())


def told_by(name: str, versions: str, report: dict[str, Any]) -> list[str]:
    """Return the lines of a loader: its row of the table, and a line for each round that is bad."""
    tried, rounds = LOADERS[name], report["rounds"]
    outcomes = Counter("silent" if each["outcome"] == "audit" else each["outcome"] for each in rounds)
    sums = [sum(each[of] for each in rounds) for of in ("lost", "repeated", "wrong")]
    cells = [str(outcomes[outcome] or "") for outcome in OUTCOMES]
    cells[2:] = [f"**{cell}**" if cell else "" for cell in cells[2:]]
    cells += [str(count or "") for count in sums]
    faults = "all" if tried.faults == ",".join(FAULTS) else tried.faults.replace(",", ", ")
    versions = versions or (f"tarshards {report['version']}" if not tried.file else f"Python {sys.version.split()[0]}")
    cells = [f"{versions}: {tried.about}", faults, str(len(rounds)), *cells, time.strftime("%Y-%m-%d")]
    return [f"| {name} | {' | '.join(cells)} |", *(bad_round(name, each) for each in rounds if each["outcome"] in BAD)]


def bad_round(name: str, played: dict[str, Any]) -> str:
    counts = ", ".join(f"{played[of]} {of}" for of in ("lost", "repeated", "wrong") if played[of])
    words = "; ".join(filter(None, [counts, played["words"].strip().split("\n")[0][:WORDS].replace("|", "/")]))
    where = {"copy": "copies", "http": "http", "storage": "the files themselves"}[played["source"]]
    return (
        f"- {name}, round {played['number']}: {played['nemesis']}, {where}: {played['outcome']}, {words}. "
        f"`.venv/bin/python benchmarks/chaos.py {name} {played['number']}`"
    )


def page(told: dict[str, list[str]]) -> list[str]:
    met = [name for name, each in NEMESES.items() if not each.readers or "user" in each.readers]
    return [
        ABOUT,
        f"| name | version: loader | faults | rounds | {' | '.join(OUTCOMES)} | lost | repeated | wrong | date |",
        "|---" * (len(OUTCOMES) + 8) + "|",
        *[lines[0] for lines in told.values()],
        "",
        *[f"- *{fault}*: {', '.join(name for name in met if NEMESES[name].fault == fault)}" for fault in FAULTS],
        "",
        "Each round that was silent, hung or died:",
        "",
        *[line for lines in told.values() for line in lines[1:]],
    ]


def kept() -> dict[str, list[str]]:
    """Return the lines of each loader that the page has."""
    return kept_lines(PAGE, TITLE, LOADERS, ", round")


def main(name: str | None = None, rounds: str | None = None) -> None:
    if name and name not in LOADERS:
        raise SystemExit(f"no loader {name}; there are: {', '.join(LOADERS)}")
    urls, failed = shards(), []
    for each in [name] if name else LOADERS:
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder, "report")
            try:
                versions = run(each, rounds or LOADERS[each].rounds, urls, report)
                result = json.loads(report.with_suffix(".json").read_text())
            except (OSError, subprocess.SubprocessError) as error:
                failed.append(f"{each}: {error}")
                continue
            if rounds:
                print(report.with_suffix(".md").read_text())
                continue
        told = kept() | {each: told_by(each, versions, result)}
        record(TITLE, page({name: told[name] for name in LOADERS if name in told}), PAGE)
    raise SystemExit("\n".join(failed) or 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
