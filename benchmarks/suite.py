"""Run the tasks in all settings for every peer, with rounds interleaved over the peers; results are saved as JSON."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from checks import judge, make, reference
from contenders import Contender, Run, empty
from environments import Peer, all_peers, is_here, make_all
from measure import DATA, machine
from sets import Data

ROOT = DATA / "suite"
PARTS = (  # a task and a set, measured together and saved in one file
    ("stream", "raw-2k"),
    ("stream", "raw-2k-200k"),
    ("stream", "raw-2k-5m"),
    ("stream", "raw-110k"),
    ("stream", "raw-110k-10k"),
    ("stream", "raw-1m"),
    ("stream", "five"),
    ("stream", "five-200k"),
    ("stream", "text"),
    ("arrays", "otto"),
    ("arrays", "otto-200k"),
    ("arrays", "cifar"),
    ("arrays", "cifar-200k"),
    ("decode", "photos256"),
    ("decode", "photos500"),
    ("crop", "photos256"),
    ("crop", "photos500"),
    ("train", "photos256-1k"),
    ("random", "raw-2k"),
    ("random", "raw-110k"),
    ("write", "raw-2k"),
    ("write", "raw-110k"),
    ("index", "raw-2k"),
    ("index", "raw-110k"),
    ("first", "raw-2k"),
    ("first", "shards-10k"),
    ("resume", "raw-2k"),
    ("cold", "raw-110k"),
)
SMOKE = ("raw-2k", "five", "otto", "photos256", "photos256-1k")  # the sets of a smoke run
TARS = {"tarshards", "tarshards_rows", "tarshards_unindexed", "webdataset", "dali"}  # which read plain tars
FORMATS = {"ffcv", "litdata", "streaming", "grain", "lance"}
FEW = {  # tasks and sets that only some peers are measured on
    "train": {"tarshards", "tarshards_loader", "ffcv", "litdata", "streaming", "torchvision", "webdataset"},
    "raw-2k-200k": TARS | FORMATS,
    "raw-2k-5m": TARS,
    "raw-110k-10k": TARS | FORMATS | {"torch_files"},
    "five-200k": TARS | FORMATS,
    "otto-200k": TARS | FORMATS,
    "cifar-200k": TARS | FORMATS,
    "raw-1m": TARS | FORMATS | {"torch_files"},
    "five": TARS | FORMATS | {"torch_files"},
    "shards-10k": TARS,
}
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "stream": [{"shuffled": False}, {"shuffled": True}],
    "otto": [{"size": 1024}],
    "otto-200k": [{"size": 1024}],
    "cifar": [{"size": 128}, {"size": 1024}],
    "cifar-200k": [{"size": 128}],
    "cold": [{"shuffled": False}, {"shuffled": True}],
}
WORKERS = {"stream": (0, 1, 2), "arrays": (0, 1, 2), "decode": (0, 1, 2), "crop": (0, 1, 2), "train": (2,)}
WORKERS |= {"raw-2k-5m": (0,), "five-200k": (0,), "otto-200k": (0,), "cifar-200k": (0,)}
WORKERS |= {"raw-2k-200k": (0,), "raw-110k-10k": (0, 2), "raw-1m": (0, 2), "five": (0,), "shards-10k": (0,)}
WORKERS |= {"first": (0,), "resume": (0, 2), "cold": (0, 2), "text": (0, 2), "cifar": (0, 2), "photos500": (0, 2)}
LEAST = 0.2  # minimum seconds of a round
ROUNDS = {0.3: 5, 1.2: 3, float("inf"): 2}  # if an epoch takes less than this many seconds
FRESH = 3  # rounds for measurements in fresh processes


class Suite:
    """One run over some parts, on some peers."""

    def __init__(self, root: Path, peers: list[Peer], pythons: dict[str, str | OSError], *, smoke: bool):
        self.root, self.peers, self.pythons, self.smoke = root, peers, pythons, smoke
        self.begun = time.monotonic()

    def say(self, words: str) -> None:
        minutes, seconds = divmod(int(time.monotonic() - self.begun), 60)
        print(f"[{minutes:02d}:{seconds:02d}] {words}", file=sys.stderr, flush=True)

    def measure(self, task: str, name: str) -> dict[str, Any]:
        """Measure one part; return what is saved."""
        make(name, self.root, smoke=self.smoke)
        asked = [peer for peer in self.peers if peer.name in FEW.get(task, FEW.get(name, {peer.name}))]
        cannot = {peer.name: reason for peer in asked if (reason := peer.reason(task))}
        able = [peer for peer in asked if not peer.reason(task)]
        failed = {peer.name: str(error) for peer in able if isinstance(error := self.pythons[peer.file], OSError)}
        contenders = [Contender(p, str(self.pythons[p.file]), name, self.root) for p in able if p.name not in failed]
        try:
            rows = KINDS.get(task, Suite.steady)(self, task, contenders)
        finally:
            for contender in contenders:
                contender.end()
        versions = {peer.name: list(peer.packages) for peer in asked}
        kept = {"task": task, "set": name, "count": contenders[0].data.count if contenders else 0, "rows": rows}
        return kept | {
            "cannot": cannot,
            "failed": failed,
            "versions": versions,
            "machine": machine("tarshards", "numpy"),
        }

    def runs(self, task: str, contenders: list[Contender]) -> Iterable[list[Run]]:
        """Yield the runs of each setting, which are measured together."""
        name = contenders[0].data.name if contenders else ""
        numbers = WORKERS.get(name) or WORKERS.get(task, (None,))
        for settings in SETTINGS.get(task) or SETTINGS.get(name) or [{}]:
            for workers in numbers:
                if self.smoke and not smoke_has(task, workers, settings.get("shuffled")):
                    continue
                runs = []
                for contender in contenders:
                    own = workers
                    if workers == 0 and contender.peer.threaded(task):  # threads: there is no 0
                        own = None if 1 in numbers else 1
                    if workers is None or own is not None:
                        chosen = settings if own is None else {**settings, "workers": own}
                        runs += [Run(contender, task, chosen, decoder) for decoder in contender.peer.decoders_of(task)]
                words = [f"{key}={value}" for key, value in settings.items()]
                words += [f"workers={workers}"] * (workers is not None)
                self.say(" ".join([task, name, *words, f"({len(runs)} peers)"]))
                yield runs

    def steady(self, task: str, contenders: list[Contender]) -> list[dict[str, Any]]:
        """Epochs of loaders that stay open; the first one is reported separately."""
        rows = []
        for runs in self.runs(task, contenders):
            for contender in contenders:
                contender.start()
            for step in Run.ready, Run.first_epoch:
                for run in runs:
                    run.step(step)
            self.rounds(runs, lambda run: run.steady_epochs(0 if self.smoke else LEAST))
            for step in Run.check, Run.close:
                for run in runs:
                    run.step(step)
            rows += [run.row for run in runs]
        return rows

    def rounds(self, runs: list[Run], step: Callable[[Run], None]) -> None:
        for round_ in range(1 if self.smoke else max(ROUNDS.values())):
            for run in runs:
                if round_ < next(rounds for seconds, rounds in ROUNDS.items() if run.last < seconds):
                    run.step(step)

    def making(self, task: str, contenders: list[Contender]) -> list[dict[str, Any]]:
        """Tasks that write files: the first result is read back; each round has an empty folder, which is removed.

        So no peer waits for the disk to write the files of others. Before a round the set is copied and removed, since
        a virtual machine may need longer to get fresh pages from its host than a peer needs to fill them.
        """
        (runs,) = self.runs(task, contenders)
        for contender in contenders:
            contender.start()

        def begin(run: Run) -> None:
            empty(folder(run))
            run.contender.ready(folder(run))
            load(run)
            run.row["first"] = run.last = run.ask(task)["seconds"]
            run.row["checked"] = self.read_back(task, run, folder(run))
            run.close()
            load(run)
            empty(folder(run))

        def folder(run: Run) -> Path:
            return self.root / "made" / run.contender.peer.file / run.contender.data.name

        def load(run: Run) -> None:
            if task == "write":
                run.row["bytes"] = run.ask("load")

        def once(run: Run) -> None:
            for url in run.contender.data.urls:
                shutil.copy(url, folder(run))
            empty(folder(run))
            run.keep(run.ask(task))
            run.last = run.row["seconds"][-1]
            empty(folder(run))

        for run in runs:
            run.step(begin)
        self.rounds(runs, once)
        return [run.row for run in runs]

    def read_back(self, task: str, run: Run, folder: Path) -> str:
        """Check the result: tars by Python's tarfile, the peer's own format by the peer's reader."""
        contender, data = run.contender, run.contender.data
        tars = tuple(map(str, sorted(folder.rglob("*.tar"))))
        if task == "write" and tars and not contender.peer.own:
            return judge("stream", reference(Data(data.name, data.kind, data.count, tars, folder)), contender.entries)
        run.task = "random" if task == "index" else "stream"
        if contender.peer.reason(run.task):
            return "not read back"
        in_order = {"shuffled": False, "workers": int(contender.peer.threaded("stream"))}
        run.ask("open", task=run.task, **({} if task == "index" else in_order))
        run.check()
        return run.row["checked"]

    def fresh(self, task: str, contenders: list[Contender]) -> list[dict[str, Any]]:
        """Tasks that a process does once: each round starts new processes together, and measures one after another."""
        rows = []
        for runs in self.runs(task, contenders):
            for round_ in range(1 if self.smoke else FRESH):
                able = [run for run in runs if not run.over]
                for run in able:
                    run.contender.start()
                for run in able:
                    run.step(Run.ready)
                for run in able:
                    run.step(lambda run, round_=round_: ONCE[task](run, round_))
                    run.contender.end()
            rows += [run.row for run in runs]
        return rows


def smoke_has(task: str, workers: int | None, shuffled: bool | None) -> bool:
    """Whether a smoke run measures this setting: each value of a setting occurs, but not with each of the others."""
    if workers == 0:
        return task not in ("decode", "crop") and not shuffled
    return workers is None or (workers == 2 and shuffled is not False)


def first(run: Run, round_: int) -> None:
    run.row["seconds"].append(run.ask("first", workers=run.settings["workers"]))


def cold(run: Run, round_: int) -> None:
    run.row["resident"] = max(run.row.get("resident", 0), run.contender.cool())
    opened = run.ask("open", task="stream", **run.settings)
    figures = run.ask("epoch")
    run.keep(figures | {"seconds": figures["seconds"] + opened})


def resume(run: Run, round_: int) -> None:
    if not round_:  # the process that is stopped; those of the next rounds resume
        run.reference = run.ask("start", **run.settings)
        run.contender.end()
        run.contender.ready()
    got = run.ask("restore", state=run.reference["state"], **run.settings)
    run.row["seconds"].append(got["seconds"])
    batch, rest = (judge("stream", got[part], run.reference[part]) for part in ("next", "rest"))
    right = "wrong: another batch" if batch != "yes" else f"{rest} after it" if rest != "yes" else "yes"
    if run.row.get("checked", "yes") == "yes":
        run.row["checked"] = right


KINDS = {"write": Suite.making, "index": Suite.making, "first": Suite.fresh, "resume": Suite.fresh, "cold": Suite.fresh}
ONCE = {"first": first, "resume": resume, "cold": cold}


def keep(measured: dict[str, Any], root: Path, apart: Iterable[str] = ()) -> None:
    """Save the results of a part, and the last run's as `previous`; or only the results of peers *apart*."""
    path = root / "measured" / f"{measured['task']}-{measured['set']}.json"
    previous = root / "previous" / path.name
    for folder in path.parent, previous.parent:
        folder.mkdir(parents=True, exist_ok=True)
    if path.exists() and apart:
        old = json.loads(path.read_text())
        measured["rows"] = [row for row in old["rows"] if row["peer"] not in apart] + measured["rows"]
        for key in "cannot", "failed":
            measured[key] = {peer: told for peer, told in old[key].items() if peer not in apart} | measured[key]
        measured["versions"] = old["versions"] | measured["versions"]
        measured["apart"] = sorted({*old.get("apart", []), *apart})
    elif path.exists():
        path.replace(previous)
    path.write_text(json.dumps(measured, indent=1))


def main(
    parts: Iterable[tuple[str, str]] = PARTS, names: Iterable[str] = (), *, smoke: bool = False, root: Path = ROOT
) -> None:
    """Measure these parts for these peers (default: all), and save the results below *root*."""
    names = set(names)
    peers = [peer for peer in all_peers() if (not names or peer.name in names) and (not smoke or is_here(peer))]
    suite = Suite(root, peers, {}, smoke=smoke)
    here = {peer.file: sys.executable for peer in peers}
    suite.pythons = here if smoke else make_all(peers, suite.say)
    for task, name in parts:
        if not smoke or name in SMOKE:
            keep(suite.measure(task, name), root, names)
    suite.say("measured")


def attempt(peer: str, task: str, name: str = "", root: str = "") -> None:
    """Print what a peer does in a task on a small set, to develop its file."""
    peers = [each for each in all_peers() if peer in (each.name, each.file)]
    suite = Suite(Path(root or DATA / "smoke"), peers, make_all(peers), smoke=True)
    sets = [part[1] for part in PARTS if part[0] == task and name in ("", part[1])]
    for each in sets:
        measured = suite.measure(task, each)
        print(json.dumps({key: measured[key] for key in ("task", "set", "rows", "cannot", "failed")}, indent=1))
    raise SystemExit(os.EX_OK if sets else f"no set {name} in task {task}")
