"""The results of the suite, as the report and plots use them: groups of rows, best rows, ratios to ours."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from suite import PARTS

Row = dict[str, Any]
OURS = "tarshards"
FORMS = (OURS, "tarshards_rows")  # others are compared with the faster one
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


def groups(part: dict[str, Any]) -> Iterator[tuple[str, list[Row]]]:
    """Yield each setting of a part with its measured rows, for any number of workers."""
    done = [row for row in part["rows"] if row["seconds"] and "failed" not in row]
    for setting in dict.fromkeys(map(settings, part["rows"])):
        yield setting, [row for row in done if settings(row) == setting]


def bests(rows: list[Row], task: str) -> list[Row]:
    """Return each peer's best row, right ones before wrong ones; ours first, then by speed."""
    order = sorted(rows, key=lambda row: (row.get("checked", "yes") in YES, speed(row, task)), reverse=True)
    best = {row["peer"]: row for row in reversed(order)}
    return sorted(best.values(), key=lambda row: (not row["peer"].startswith(OURS), -speed(row, task)))


def mine(rows: list[Row], task: str) -> Row | None:
    """Return our fastest row."""
    return max((row for row in rows if row["peer"] in FORMS), key=lambda row: speed(row, task), default=None)


def ratio(row: Row, rows: list[Row], task: str) -> float | None:
    """Return how many times as fast ours is as this row."""
    own = mine(rows, task)
    return None if own is None else speed(own, task) / speed(row, task)
