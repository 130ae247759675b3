"""The resume matrix: what each loader does when it is stopped at any batch and resumed, by `tarshards.testing`.

`make bench ONLY=resumes` tests all peers, each in its environment, and writes the table of docs/testing.md;
`make bench ONLY=resumes,PEER` tests one, and keeps the lines of the others.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from environments import PEERS as ENVIRONMENTS_OF  # noqa: E402
from environments import make, read_peer  # noqa: E402
from measure import record  # noqa: E402

import tarshards  # noqa: E402
from tarshards.testing import LoaderFault, Setup, Tested  # noqa: E402
from tarshards.testing.chains import Trial  # noqa: E402
from tarshards.testing.resume import explore  # noqa: E402

PAGE, TITLE = ROOT / "docs" / "testing.md", "Who resumes what"
HERE = "--here"  # before the peer that is tested in the running environment, which prints its cells as JSON
WORDS = 300  # characters of a note
BEFORE = Setup((4, 4, 4, 4), ranks=2, workers=2, batch_size=2, seed=1)
#: Column -> the kind of loader, what the setup after the resume is, and how often the loader is resumed in a row.
CELLS: dict[str, tuple[str, dict[str, int], int]] = {
    "same": ("plain", {}, 1),
    "twice": ("plain", {}, 2),
    "workers": ("plain", {"workers": 1}, 1),
    "ranks": ("plain", {"ranks": 1}, 1),
    "batch size": ("plain", {"batch_size": 1}, 1),
    "filter": ("filter", {}, 1),
    "mixture": ("mixture", {}, 1),
    "shuffled": ("shuffled", {}, 1),
}


@dataclass(frozen=True)
class Tried:
    """A peer: the file in peers/ with its environment ("": ours), its distributions, what is said of it, its issues."""

    file: str
    distributions: tuple[str, ...]
    about: str
    issues: str = ""


PEERS = {
    "tarshards_": Tried("", ("tarshards",), '`ShardLoader` over indexed shards, `tail="exact"`'),
    "webdataset": Tried("", ("webdataset", "torchdata"), "`WebDataset` in `StatefulDataLoader`, which replays it"),
    "datasets": Tried(
        "datasets_",
        ("datasets", "torchdata"),
        "streamed tars in `StatefulDataLoader`",
        "huggingface/datasets#8308, #8360, #8669",
    ),
    "energon": Tried("energon", ("megatron-energon",), "`get_savable_loader`, the state of each rank"),
    "grain": Tried(
        "grain_",
        ("grain",),
        "`ElasticIterator`, which refuses filters; with one a `MapDataset`'s iterator; threads for workers",
    ),
    "litdata": Tried("litdata_", ("litdata",), "`StreamingDataLoader`", "Lightning-AI/litData#878"),
    "streaming": Tried("streaming_", ("mosaicml-streaming",), "`StreamingDataLoader`, one canonical node"),
}
LIMIT = 180  # seconds of a run: processes begin slowly on a busy machine
ABOUT = """\
This table shows how loaders resume after a stop at any batch of an epoch, before its first batch and after its end.
Every loader is set up as its documentation recommends, and shuffles if that needs no buffer. It reads four shards of
four samples on 2 ranks with 2 workers in batches of 2, and is resumed

- *same*: on the same ranks and workers; *twice*: then again from every later stop;
- *workers*, *ranks*, *batch size*: on 1 worker, on 1 rank, in batches of 1;
- in the same setup with a *filter* that leaves out every third sample, in a *mixture* with a second dataset, and
  *shuffled*, with a buffer if the loader has one.

"yes": every sample of the epoch comes once, then the next epoch, in the same order if the setup is the same. Other
words are the kind (see above) of the first fault that was found: "refused" and "raised" are errors, the others are
silent. A stop is given as whole epochs + batches. `make bench ONLY=resumes,NAME` repeats a line, without NAME all.
"""


def test(peer: str) -> dict[str, Any]:
    """Return the peer's cells: what was found, and the chain that shows it."""
    import resume_loaders

    cells = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (kind, change, times) in CELLS.items():
            try:
                make = getattr(resume_loaders, peer)(Path(folder), kind)
                tested = Tested(make, processes=peer == "streaming", limit=LIMIT)
                trial = Trial(tested)
                explore(trial, BEFORE, replace(BEFORE, **change), times)
                cells[name] = {"found": "yes", "words": f"{trial.resumes} resumes"}
            except LoaderFault as fault:
                words = fault.words.strip().split("\n")[-1] if fault.kind in ("refused", "raised") else str(fault)
                cells[name] = {"found": fault.kind, "words": words, "chain": str(fault.chain)}
            except NotImplementedError as reason:
                cells[name] = {"found": "cannot", "words": str(reason)}
            print(f"{peer}, {name}: {cells[name]}", file=sys.stderr, flush=True)
    versions = [f"{name} {metadata.version(name)}" for name in PEERS[peer].distributions if name != "tarshards"]
    return {"versions": versions or [f"tarshards {tarshards.__version__}"], "cells": cells, "date": str(date.today())}


def in_environment(peer: str) -> dict[str, Any]:
    """Test a peer in its environment."""
    file = PEERS[peer].file
    try:
        python = make(read_peer(ENVIRONMENTS_OF / f"{file}.py")) if file else sys.executable
    except OSError as error:
        raise SystemExit(f"{peer}: {error}") from error
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([python, __file__, HERE, peer], stdout=subprocess.PIPE, text=True, env=variables, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def told_by(peer: str, result: dict[str, Any]) -> list[str]:
    """Return the lines of a peer: its row of the table, and its notes."""
    tried, name, cells = PEERS[peer], ", ".join(result["versions"]), result["cells"]
    row = f"| {name} | " + " | ".join(cells[column]["found"] for column in CELLS) + " |"
    issues = f"; known: {tried.issues}" if tried.issues else ""
    notes = [f"- {name} ({result['date']}): {tried.about}{issues}. `make bench ONLY=resumes,{peer}`"]
    notes += [f"  - {column}: {first_lines(cells[column])}" for column in CELLS if cells[column]["found"] != "yes"]
    return [row, *notes]


def page(told: dict[str, list[str]]) -> list[str]:
    """Return the section's lines from those of each peer."""
    head = ["| loader | " + " | ".join(CELLS) + " |", "|---|" + "---|" * len(CELLS)]
    return [
        ABOUT,
        *head,
        *[lines[0] for lines in told.values()],
        "",
        *[line for lines in told.values() for line in lines[1:]],
    ]


def kept() -> dict[str, list[str]]:
    """Return the lines of each peer that the page has."""
    section = PAGE.read_text().partition(f"## {TITLE}")[2]
    found = {}
    for peer, tried in PEERS.items():
        name = re.escape(tried.distributions[0])
        if match := re.search(rf"^\| {name} .*\n(?:.*\n)*?(- {name} .*(?:\n  - .*)*)", section, re.MULTILINE):
            found[peer] = [match[0].partition("\n")[0], *match[1].split("\n")]
    return found


def first_lines(cell: dict[str, str]) -> str:
    """What a cell says, on one line, and at which stops."""
    words = "; ".join(cell["words"].split("chain: ")[0].strip().split("\n"))
    words = words.removeprefix(f"{cell['found']}: ").replace("|", "/").replace("`", "'").replace("*", "")
    stops = " then ".join(re.findall(r"stop=(\S+)", cell.get("chain", "")))
    at = f" at stop {stops}" if stops else ""
    return f"{cell['found']}{at}: {words[:WORDS]}{'…' if len(words) > WORDS else ''}"


def main(names: list[str]) -> None:
    """Test peers, and write what was found into the page."""
    for peer in names or PEERS:
        told = kept() | {peer: told_by(peer, in_environment(peer))}
        record(TITLE, page({name: told[name] for name in PEERS if name in told}), PAGE)


if __name__ == "__main__":
    if sys.argv[1:2] == [HERE]:
        with os.fdopen(os.dup(1), "w") as answer:
            os.dup2(2, 1)  # peers print
            answer.write(json.dumps(test(sys.argv[2])))
    else:
        main(sys.argv[1:])
