"""Measure the ratios that must not get worse, each against one peer, in five minutes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import planning
import start
import tools
from contenders import Contender, Run
from environments import all_peers, make_all
from measure import about, machine, record
from suite import ROOT, Suite


class Part(NamedTuple):
    """A task on a set, measured for all peers of its laws."""

    task: str
    set: str
    settings: dict[str, Any]
    laws: tuple[tuple[str, str, float], ...]  # ours, theirs, how many times as fast ours must be


class Line(NamedTuple):
    """A law and its measurement: ours was *times* as fast, and must be at least *least*."""

    work: str
    beside: str
    least: float
    times: float
    spread: str = ""

    @property
    def holds(self) -> bool:
        return self.times >= self.least


IN_ORDER = {"shuffled": False, "workers": 0}
PARTS = (
    Part(
        "stream",
        "raw-2k",
        IN_ORDER,
        (
            ("tarshards_unindexed", "webdataset", 30),
            ("tarshards", "webdataset", 30),
            ("tarshards_rows", "webdataset", 90),
            ("tarshards_python", "webdataset", 4),
        ),
    ),
    Part(
        "stream",
        "raw-110k",
        IN_ORDER,
        (
            ("tarshards_unindexed", "webdataset", 5),
            ("tarshards", "webdataset", 10),
            ("tarshards", "litdata", 1),
        ),
    ),
    Part("stream", "raw-110k", {"shuffled": False, "workers": 2}, (("tarshards", "webdataset", 4),)),
    Part("arrays", "otto", {"size": 1024, "workers": 1}, (("tarshards", "ffcv", 1.5),)),
    Part("arrays", "cifar", {"size": 128, "workers": 1}, (("tarshards", "ffcv", 1),)),
    Part("arrays", "cifar", {"size": 1024, "workers": 1}, (("tarshards", "ffcv", 1),)),
    Part("decode", "photos256", {"workers": 2}, (("tarshards", "simplejpeg", 0.9),)),
    Part("crop", "photos256", {"workers": 2}, (("tarshards", "ffcv", 1.9),)),
    Part("crop", "photos500", {"workers": 2}, (("tarshards", "ffcv", 1.9),)),
    Part("index", "raw-2k", {}, (("tarshards", "gnu_tar", 2), ("tarshards", "tarfile", 20))),
)
TOOLS = ("tarcat", "tarcreate", "tarjob", "tarproc", "tarshow", "tarsplit")  # whose start is measured
ROUNDS = 7


class Core(Suite):
    """A suite whose runs have one setting each."""

    def __init__(self, settings: dict[str, Any], *arguments: Any):
        super().__init__(*arguments, smoke=False)
        self.settings = settings

    def runs(self, task: str, contenders: list[Contender]) -> Iterator[list[Run]]:
        self.say(f"{task} {contenders[0].data.name} {self.settings or ''}")
        yield [Run(contender, task, self.settings) for contender in contenders]


def measured(part: Part, root: Path = ROOT) -> Iterator[Line]:
    """Yield the measurement of each law of a part; raise SystemExit if a peer fails or delivers wrong samples."""
    names = {name for law in part.laws for name in law[:2]}
    peers = [peer for peer in all_peers() if peer.name in names]
    suite = Core(part.settings, root, peers, make_all(peers, lambda words: None))
    kept = suite.measure(part.task, part.set)
    rows = {row["peer"]: row for row in kept["rows"]}
    for name, row in rows.items():
        if (told := row.get("failed") or row.get("cannot") or row.get("checked", "")) not in (
            "",
            "yes",
            "not read back",
        ):
            raise SystemExit(f"{part.task} {part.set}: {name}: {told}")
    if missing := names - rows.keys():
        raise SystemExit(f"{part.task} {part.set}: {kept['failed'] or ', '.join(missing)}")
    details = f", batches of {part.settings['size']:,}" if "size" in part.settings else ""
    if part.settings.get("workers", 1) > 1:
        details += f", {part.settings['workers']} workers"
    for ours, theirs, least in part.laws:
        rates = [[rows[name]["samples"] / each for each in rows[name]["seconds"]] for name in (ours, theirs)]
        times = median(rates[0]) / median(rates[1])
        low, high = (reach(rates[0]) / other(rates[1]) for reach, other in ((min, max), (max, min)))
        work = f"{part.task} {part.set}{details}: {ours}"
        spread = f"{max(map(about, rates))}{low:.2f} to {high:.2f}"
        yield Line(work, f"{theirs} ({median(rates[1]):,.0f}/s)", least, times, spread)


def others() -> Iterator[Line]:
    """Yield the laws of the tools and of planning."""
    works = tools.per_sample()
    ratios = tools.times(works, "xargs", tools.seconds_of(works, 5))
    yield Line("tarproc -c true", "xargs -P", 0.7, ratios["tarproc -c true"])
    yield Line("tarproc --server", "xargs -P", 8, ratios["tarproc --server"])
    longer = start.ratios(start.measure(list(TOOLS), ROUNDS))
    slowest = max(longer, key=lambda name: longer[name])
    yield Line(f"start: {slowest}, the slowest of {len(TOOLS)}", "6 x the interpreter", 1, 6 / longer[slowest])
    figures = planning.measure()
    yield Line("plan of 1e9 samples, first batch", "5 s", 1, 5 / figures["first"])
    yield Line("its memory", "500 MB", 1, 500e6 / (figures["peak"] * 2**20))
    yield Line("its positions, in batches of 256", "1,000,000/s", 1, min(figures["1"], figures["8"]) / 1e6)


def main(root: Path = ROOT) -> None:
    lines = [line for part in PARTS for line in measured(part, root)] + list(others())
    rows = [
        f"| {line.work} | {line.beside} | {line.least:g} | {'' if line.holds else '**short:** '}{line.times:.2f} "
        f"| {line.spread} |"
        for line in lines
    ]
    head = ["| work | compared with | at least | times as fast | slowest to fastest |", "|---|---|---|---|---|"]
    record("Core", [machine("tarshards", "numpy"), "", *head, *rows])
    short = [
        f"{line.work}: {line.times:.2f} x {line.beside}, {line.least:g} required" for line in lines if not line.holds
    ]
    raise SystemExit("\n".join(["fell short:", *short]) if short else 0)


if __name__ == "__main__":
    main()
