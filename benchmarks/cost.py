"""What a loader costs the trainer: CPU time, private memory, processes, threads and wake-ups, beside other loaders.

Counts and CPU time depend little on what else the machine does. Each case has a process of its own, which reads an
epoch, then goes on for some seconds in shuffled order, and then leaves the loader open without taking a batch.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import NamedTuple

from checks import make
from contenders import Contender
from environments import Peer, all_peers, make_all
from measure import SCATTER, about, machine, record
from processes import CannotError, FailedError, session
from suite import ROOT

CASE = Path(__file__).with_name("cost_case.py")
SETS = {"raw-2k": "2 KB", "raw-110k": "110 KB"}
SECONDS, ROUNDS, LIMIT = 1.0, 3, 120.0  # of reading; of each case; seconds after which a case is ended


class Case(NamedTuple):
    """A row of the table."""

    peer: str  # whose file opens the loader
    workers: int
    loader: str = ""  # of ours

    def title(self, peer: Peer) -> str:
        kind = "thread" if peer.threaded("stream") or self.peer == "spdl" else "worker"
        return self.loader or f"{peer.name}, {self.workers} {kind}{'s' * (self.workers != 1)}"


CASES = (
    Case("tarshards", 0, "Stream"),
    Case("tarshards_rows", 1, "ArrayLoader"),
    Case("tarshards", 0, "ShardLoader, 0 workers"),
    Case("tarshards", 2, "ShardLoader, 2 workers"),
    Case("webdataset", 0),
    Case("webdataset", 2),
    Case("litdata", 0),
    Case("litdata", 2),
    Case("ffcv", 1),
    Case("ffcv", 2),
    Case("grain", 0),
    Case("grain", 2),
    Case("spdl", 0),
    Case("spdl", 2),
)
COLUMNS = {  # the head of a column -> the figure, what it is multiplied by, its form
    "CPU us/sample": ("cpu", 1e6, "{:,.2f}"),
    "of it in the trainer's process": ("parent", 1e6, "{:,.2f}"),
    "wake-ups per 1,000 samples": ("waits", 1e3, "{:,.1f}"),
    "processes": ("processes", 1, "{:.0f}"),
    "threads": ("threads", 1, "{:.0f}"),
    "private MB": ("private", 1, "{:,.0f}"),
    "private MB of a worker": ("worker", 1, "{:,.0f}"),
    "CPU ms/s, idle": ("idle_cpu", 1e3, "{:,.0f}"),
    "wake-ups/s, idle": ("idle_waits", 1, "{:,.1f}"),
    "samples/s": ("rate", 1, "{:,.0f}"),
}


def measure(case: Case, contender: Contender) -> dict[str, float]:
    """Run a case in a separate process; raise OSError if it fails."""
    data = asdict(contender.data) | {"folder": str(contender.data.folder)}
    request = {"peer": contender.peer.file, "loader": case.loader, "workers": case.workers, "data": data}
    log = contender.root / "logs" / f"cost-{contender.peer.file}.log"
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [contender.python, CASE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )
        try:
            answer, _ = process.communicate(json.dumps(request | {"seconds": SECONDS}).encode(), LIMIT)
        except subprocess.TimeoutExpired:
            raise OSError(f"no answer within {LIMIT:.0f} s") from None
        finally:
            for folder in session(process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(folder.name), signal.SIGKILL)
            process.wait()
    if not answer:
        words = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        raise OSError(f"failed: {' '.join(words[-1:])[:200]}")
    return json.loads(answer)


def prepared(peer: Peer, python: str | OSError, name: str, root: Path) -> Contender | str:
    """Return a peer on a set, converted to the peer's format, or the reason why that is not possible."""
    if isinstance(python, OSError):
        return str(python)
    contender = Contender(peer, python, name, root)
    try:
        contender.ready()
    except (CannotError, FailedError) as exc:
        return str(exc)
    finally:
        contender.end()
    return contender


def row(title: str, rounds: list[dict[str, float]]) -> str:
    cells = []
    for figure, factor, form in COLUMNS.values():
        values = [factor * each[figure] for each in rounds]
        mark = about(values) if figure in ("cpu", "parent", "rate") else ""
        cells.append(mark + form.format(median(values)))
    return f"| {title} | {' | '.join(cells)} |"


def table(name: str, peers: dict[str, Peer], pythons: dict[str, str | OSError], root: Path) -> list[str]:
    """Return the table of a set; each round runs every case."""
    make(name, root)
    here = {case.peer: prepared(peers[case.peer], pythons[peers[case.peer].file], name, root) for case in CASES}
    failed = {case: contender for case in CASES if isinstance(contender := here[case.peer], str)}
    spent: dict[Case, list[dict[str, float]]] = {case: [] for case in CASES}
    for _ in range(ROUNDS):
        for case, rounds in spent.items():
            if case not in failed:
                print(f"{name}: {case.title(peers[case.peer])}", file=sys.stderr, flush=True)
                try:
                    rounds.append(measure(case, here[case.peer]))
                except OSError as exc:
                    failed[case] = str(exc)
    lines = [f"**{SETS[name]} samples**", "", f"| | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for case, rounds in spent.items():
        title = case.title(peers[case.peer])
        told = f"| {title} | {failed.get(case)} |{' |' * (len(COLUMNS) - 1)}"
        lines.append(told if case in failed else row(title, rounds))
    return [*lines, ""]


def main() -> None:
    wanted = {case.peer for case in CASES}
    peers = {peer.name: peer for peer in all_peers() if peer.name in wanted}
    pythons = make_all(list(peers.values()), lambda words: print(words, file=sys.stderr))
    lines = [
        machine("tarshards", "numpy", "torch"),
        "",
        f"Shuffled reading of sets in the page cache, batches of 64 (Stream, and others without workers or threads: "
        f"single samples; FFCV: 256 of 2 KB), for {SECONDS:.0f} s after one epoch; medians of {ROUNDS} rounds in which "
        f"the cases take turns; ~: a round differs from it by more than {100 * SCATTER:.0f} %. CPU time and wake-ups "
        "(voluntary context switches) are those of all processes. Processes and threads are those that the loader "
        "started; threads include the main thread of each worker. Private memory is the anonymous memory added since "
        "the imports; a worker's is all that it shares with no other process (`Private_Dirty`). Idle: the loader is "
        "open in mid-epoch, its queues are full, and nobody takes a batch. samples/s are of this machine, whatever "
        "else it did.",
        "",
    ]
    for name in SETS:
        lines += table(name, peers, pythons, ROOT)
    record("What a loader costs the trainer", lines[:-1])


if __name__ == "__main__":
    main()
