"""The resume matrix: what each loader does when it is stopped at any batch and resumed, by `tarshards.testing`.

`resumes.py` tests all peers, each in its environment, and writes the table of docs/testing.md. `resumes.py PEER` tests
one, in the environment that it is called in, and prints its cells as JSON.
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
from measure import DATA, record  # noqa: E402

import tarshards  # noqa: E402
from tarshards.testing import LoaderFault, Setup, Tested  # noqa: E402
from tarshards.testing.chains import Trial  # noqa: E402
from tarshards.testing.resume import explore  # noqa: E402

PAGE, TITLE = ROOT / "docs" / "testing.md", "Who resumes what"
RESULTS = DATA / "suite" / "resume.json"
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
What some loaders do when they are stopped after any batch of an epoch, before its first and after its end, and resumed.
Every loader is made as its documentation recommends, and shuffles if it needs no buffer for that. It reads four shards
of four samples on 2 ranks with 2 workers in batches of 2, and is resumed

- *same*: on the same ranks and workers; *twice*: and again from every stop after that;
- *workers*, *ranks*, *batch size*: on 1 worker, on 1 rank, in batches of 1;
- on the same with a *filter* that leaves out every third sample, in a *mixture* with a second dataset, and *shuffled*,
  also by a buffer where the loader has one.

"yes": every sample of the epoch comes once, then the next epoch, in the same order where the setup is the same. Other
words are the kinds of faults above, of the first that was found: an error is "refused" or "raised", the others are
silent. A stop is given as whole epochs + batches. `make bench ONLY=resumes` repeats all.
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
        return {"versions": [], "cells": {}, "error": str(error)}
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([python, __file__, peer], stdout=subprocess.PIPE, text=True, env=variables)
    if done.returncode:
        return {"versions": [], "cells": {}, "error": f"exit code {done.returncode}"}
    return json.loads(done.stdout.splitlines()[-1])


def lines(found: dict[str, dict[str, Any]]) -> list[str]:
    """Return the section of the page."""
    rows = ["| loader | " + " | ".join(CELLS) + " |", "|---|" + "---|" * len(CELLS)]
    notes = []
    for peer, tried in PEERS.items():
        if not (result := found.get(peer)) or "error" in result:
            continue
        name = ", ".join(result["versions"])
        cells = [result["cells"].get(column, {"found": "not run", "words": ""}) for column in CELLS]
        rows.append(f"| {name} | " + " | ".join(cell["found"] for cell in cells) + " |")
        issues = f"; known: {tried.issues}" if tried.issues else ""
        notes.append(f"- {name} ({result['date']}): {tried.about}{issues}. `benchmarks/resumes.py {peer}`")
        for column, cell in zip(CELLS, cells):
            if cell["found"] not in ("yes", "not run"):
                notes.append(f"  - {column}: {first_lines(cell)}")
    return [ABOUT, *rows, "", *notes]


def first_lines(cell: dict[str, str]) -> str:
    """What a cell says, on one line, and at which stops."""
    words = "; ".join(cell["words"].split("chain: ")[0].strip().split("\n"))
    words = words.removeprefix(f"{cell['found']}: ").replace("|", "/").replace("`", "'").replace("*", "")
    stops = " then ".join(re.findall(r"stop=(\S+)", cell.get("chain", "")))
    at = f" at stop {stops}" if stops else ""
    return f"{cell['found']}{at}: {words[:WORDS]}{'…' if len(words) > WORDS else ''}"


def main() -> None:
    """Test all peers, save what was found, and write it into the page."""
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for peer in PEERS:
        kept[peer] = in_environment(peer)
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        RESULTS.write_text(json.dumps(kept, indent=1))
    record(TITLE, lines(kept), PAGE)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        with os.fdopen(os.dup(1), "w") as answer:
            os.dup2(2, 1)  # peers print
            answer.write(json.dumps(test(sys.argv[1])))
    else:
        main()
