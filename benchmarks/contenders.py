"""A peer being measured: its process on one set, and its results in one setting."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from checks import judge, judge_part
from environments import PEERS, Peer
from processes import CannotError, FailedError, Process
from sets import CHECKED, PART, data_of, drawn_places

PREPARE = 300  # seconds for a peer to write a set in its own format


class Contender:
    """A peer on one set; its process is restarted if it dies."""

    def __init__(self, peer: Peer, python: str, name: str, root: Path):
        self.peer, self.python, self.root = peer, python, root
        self.data, self.entries = data_of(name, root, peer.file)
        self.process: Process | None = None

    def start(self) -> None:
        """Start the process; its imports run in parallel with others' until `ready`."""
        if self.process is None or not self.process.alive:
            self.process = Process(self.peer.file, self.python, self.root / "logs" / f"{self.peer.file}.log")
            self._fresh = True

    def ready(self, folder: Path | None = None) -> None:
        """Wait for the process, and pass it the set; results go to *folder* instead of the peer's own."""
        self.start()
        if self._fresh:
            self.process.ready()
            self._fresh = False
        data = asdict(self.data) | {"folder": str(folder or self.data.folder)}
        self.process.ask("use", **data)
        if folder is None:
            self._prepare()

    def _prepare(self) -> None:
        """Have the peer make its own format or index of this set, once per version of its code."""
        folder = self.data.folder
        made, code = folder.with_name(f"{folder.name}.made"), (PEERS / f"{self.peer.file}.py").read_text()
        code = f"{self.data.count} samples, by\n{code}"
        if made.exists() and made.read_text() == code:
            return
        empty(folder)
        if self.peer.own or "index" in self.peer.functions:
            self.process.ask("prepare", PREPARE)
        made.write_text(code)

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process = None

    def cool(self) -> float:
        """Drop this set's files from the page cache; return the fraction of their bytes that remains in it."""
        paths = [path for url in self.data.urls for path in Path(url).parent.iterdir() if path.is_file()]
        paths = sorted({*paths, *(path for path in self.data.folder.rglob("*") if path.is_file())})
        for path in paths:
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
        if not shutil.which("fincore"):
            return math.nan
        command = ["fincore", "--bytes", "--noheadings", "--raw", "--output", "RES", *map(str, paths)]
        resident = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        return sum(map(int, resident.split())) / sum(path.stat().st_size for path in paths)


def empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


class Run:
    """A peer in one setting. After a step fails, further steps are skipped, and the row names the step."""

    def __init__(self, contender: Contender, task: str, settings: dict[str, Any], decoder: str = ""):
        self.contender, self.task = contender, task
        self.settings = settings | ({"decoder": decoder} if len(contender.peer.decoders) > 1 and decoder else {})
        self.last = 0.0  # seconds of the latest epoch
        self.row: dict[str, Any] = {"peer": contender.peer.name, "seconds": [], "cpu": [], **settings}
        if decoder:
            self.row["decoder"] = decoder

    @property
    def over(self) -> bool:
        return "failed" in self.row or "cannot" in self.row

    def step(self, work: Callable[[Run], None]) -> None:
        if self.over:
            return
        try:
            work(self)
        except CannotError as exc:
            self.row["cannot"] = str(exc)
        except FailedError as exc:
            self.row["failed"] = str(exc)

    def ask(self, call: str, limit: float = 120, **arguments: Any) -> Any:
        return self.contender.process.ask(call, limit, **arguments)

    def keep(self, figures: dict[str, float], repeats: int = 1) -> None:
        """Add the results of a round."""
        if not figures["samples"]:
            raise FailedError("delivered nothing")
        self.row["samples"] = figures["samples"] / repeats
        self.row["seconds"].append(figures["seconds"] / repeats)
        self.row["cpu"].append(figures["cpu"] / repeats)
        self.row.setdefault("outside", []).append(figures.get("outside", 0) / repeats)

    def ready(self) -> None:
        self.contender.ready()

    def first_epoch(self) -> None:
        """Open the loader and run one epoch, timed separately."""
        opened = self.ask("open", task=self.task, **self.settings)
        epoch = self.ask("epoch", most=PART.get(self.contender.data.name, 0))
        if not epoch["samples"]:
            raise FailedError("delivered nothing")
        self.row["first"], self.last = opened + epoch["seconds"], epoch["seconds"]

    def steady_epochs(self, least: float) -> None:
        """Run one round: enough epochs to last *least* seconds, or a part of one of large sets."""
        if most := PART.get(self.contender.data.name, 0):
            self.keep(self.ask("epoch", most=most))
            self.last = self.row["seconds"][-1]
            return
        share = 1 if self.row["seconds"] else 2  # the first epoch opened files, so it took longer than the next ones
        repeats = max(1, math.ceil(least / self.last / share))
        self.keep(self.ask("epoch", repeats=repeats), repeats)
        self.last = self.row["seconds"][-1]

    def check(self) -> None:
        """Compare what one more epoch delivers with the set, and measure the peer's memory meanwhile."""
        process, expected = self.contender.process, self.contender.entries
        if self.task == "random":
            expected = [expected[place] for place in drawn_places(len(expected))]
        process.peak = 0
        if self.contender.data.name in PART:
            self.row["checked"] = judge_part(self.ask("check", watch=True, most=CHECKED), expected)
        else:
            self.row["checked"] = judge(self.task, self.ask("check", watch=True), expected)
        self.row["peak"] = process.peak

    def close(self) -> None:
        if self.contender.process.alive:
            self.ask("close")
