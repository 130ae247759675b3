"""The results of the suite, as the report and plots use them: groups of rows, best rows, ratios to ours."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from environments import TASKS, all_peers
from results import OURS
from suite import PARTS

Row = dict[str, Any]
PYTHON, ROWS, UNINDEXED, PROCESSES = "transforms in Python", "rows", "un-indexed", "2 processes"
FORMS = {OURS: "", "tarshards_rows": ROWS, "tarshards_loader": PYTHON, "tarshards_unindexed": UNINDEXED}
PEERS = {peer.name: peer for peer in all_peers()}
TIMES = ("first", "resume")  # reported in milliseconds; the others in samples per second
YES = ("", "yes", "not read back")


def load(root: Path, folder: str = "measured") -> list[dict[str, Any]]:
    """Return the parts that were measured, in the suite's order."""
    paths = [root / folder / f"{task}-{name}.json" for task, name in PARTS]
    return [json.loads(path.read_text()) for path in paths if path.exists()]


def wrong(root: Path) -> list[str]:
    """Return a line for each measurement that failed or whose check failed."""
    rows = [(part, row) for part in load(root) for row in part["rows"]]
    told = [(part, row, row.get("failed") or row.get("checked", "")) for part, row in rows]
    return [f"{part['task']} {part['set']}: {row['peer']}: {what}" for part, row, what in told if what not in YES]


def settings(row: Row) -> str:
    """Return a row's setting without its workers, in words."""
    words = {True: "shuffled", False: "in order"}.get(row.get("shuffled"), "")
    return words or (f"batches of {row['size']:,}" if "size" in row else "")


def speed(row: Row, task: str) -> float:
    """Return samples per second, or the reciprocal of seconds: higher is better."""
    return (1 if task in TIMES else row["samples"]) / median(row["seconds"])


def views(row: Row, task: str) -> list[str]:
    """Return the comparisons that a row takes part in: like with like.

    Samples, each a dict or the like, are compared with samples, and rows of a batch in one array with rows; where
    shards are read in order, plain tars also without our indexes; of samples, those of two worker processes too.
    Transforms in Python are compared with ours in Python, and with ours in threads; cat, of bytes, with all.
    """
    if row["peer"] == "cat":
        return ["", ROWS, UNINDEXED]
    peer, function = PEERS[row["peer"]], TASKS[task]
    form = peer.form.get(function, "")
    if form == PYTHON:
        return ([] if peer.ours else [""]) + [PYTHON] * (task == "train")
    if form or function != "stream":
        return [form]
    if row["peer"] == "tarshards_unindexed":
        return ["", UNINDEXED]
    same = [UNINDEXED] * (not peer.own and not peer.ours)
    return ["", *same, *[PROCESSES] * (row.get("workers") == 2 and not peer.threaded(task) and task == "stream")]


def groups(part: dict[str, Any]) -> Iterator[tuple[str, str, list[Row]]]:
    """Yield each setting of a part, each view of it, and the rows that were measured, for any number of workers."""
    task, done = part["task"], [row for row in part["rows"] if row["seconds"] and "failed" not in row]
    for setting in dict.fromkeys(map(settings, part["rows"])):
        for view in ("", ROWS, UNINDEXED, PROCESSES, PYTHON):
            rows = [row for row in done if settings(row) == setting and view in views(row, task)]
            if any(row["peer"].startswith(OURS) for row in rows) and len({row["peer"] for row in rows}) > 1:
                yield setting, view, rows


def named(row: Row) -> str:
    """Return a row's peer, with its decoder if it has more than one."""
    several = "decoder" in row and len(PEERS[row["peer"]].decoders) > 1
    return f"{row['peer']} ({row['decoder']})" if several else row["peer"]


def bests(rows: list[Row], task: str) -> list[Row]:
    """Return the best row of each peer and decoder, right ones before wrong ones; ours first, then by speed."""
    order = sorted(rows, key=lambda row: (row.get("checked", "yes") in YES, speed(row, task)), reverse=True)
    best = {named(row): row for row in reversed(order)}
    return sorted(best.values(), key=lambda row: (not row["peer"].startswith(OURS), -speed(row, task)))


def mine(rows: list[Row], task: str) -> Row | None:
    """Return our row that others are compared with: the fastest of the first form that was measured."""
    own = [[row for row in rows if row["peer"] == name] for name in FORMS]
    return max(next(filter(None, own), []), key=lambda row: speed(row, task), default=None)


def ratio(row: Row, rows: list[Row], task: str) -> float | None:
    """Return how many times as fast ours is as this row."""
    own = mine(rows, task)
    return None if own is None else speed(own, task) / speed(row, task)
