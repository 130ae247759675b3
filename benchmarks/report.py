"""The report of the suite: its figures as tables in RESULTS.md, with the ratios to ours, and as plots."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

import charts
import faults
from environments import all_peers
from figures import FORMS, OURS, TIMES, YES, Row, bests, groups, load, mine, ratio, settings, speed
from measure import RESULTS, put
from suite import FRESH, LEAST, ROOT

TITLES = {
    "stream": "Raw iteration by every peer",
    "arrays": "Batches of arrays by every peer",
    "decode": "JPEG decoded by every peer",
    "crop": "JPEG decoded, random resized crop to 224 and flip, by every peer",
    "random": "10,000 samples at random places by every peer",
    "write": "Writing by every peer",
    "index": "Indexing by every peer",
    "first": "First sample after open by every peer",
    "resume": "Resume in mid-epoch by every peer",
    "cold": "Raw iteration by every peer, page cache dropped",
}

WHY = {  # ours may be behind
    "decode photos500": "The decoder is most of the time: `simplejpeg` is ours alone. DALI's own build of "
    "libjpeg-turbo makes the same pixels of pictures of this size in less time.",
    "write raw-2k": "A tar has 512 bytes and padding for each member: 3,584 bytes a sample here, where columns and "
    "records take 2,056.",
    "cold raw-110k": "The disk is most of the time, and differs more from round to round than peers from one another.",
}


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}" if value < 2 else f"{value:.1f}" if value < 20 else f"{value:,.0f}"


def marked(row: Row, rows: list[Row], task: str) -> str:
    """Return the ratio as a cell, where ours is behind in bold."""
    times = ratio(row, rows, task)
    behind = times is not None and times < 1 and not row["peer"].startswith(OURS)
    return f"**behind: {number(times)}**" if behind else number(times)


def table(rows: list[Row], task: str) -> list[str]:
    """Return a setting's table: each peer's best number of workers."""
    times, ours = task in TIMES, bests(rows, task)
    unit = "ms" if times else "samples/s"
    heads = ["peer", *["workers"] * ("workers" in ours[0]), unit, "from .. to"]
    heads += ["MB/s"] * (task == "write") + ["first round, s", "CPU s / 1,000"] * (not times and task != "cold")
    heads += ["peak MiB"] * ("peak" in ours[0]) + ["right"] * (task not in ("first", "cold")) + ["ours / this"]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for row in ours:
        values = [(1000 * s if times else row["samples"] / s) for s in row["seconds"]]
        form = "{:,.1f}" if times else "{:,.0f}"
        cells = {
            "peer": row["peer"],
            "workers": row.get("workers"),
            unit: form.format(median(values)),
            "from .. to": " .. ".join(map(form.format, (min(values), max(values)))),
            "MB/s": f"{row.get('bytes', 0) / median(row['seconds']) / 1e6:,.0f}",
            "first round, s": f"{row.get('first', 0):.2f}",
            "CPU s / 1,000": f"{1000 * sum(row['cpu']) / max(1, len(row['cpu'])) / row.get('samples', 1):.4f}",
            "peak MiB": f"{row.get('peak', 0):,.0f}",
            "right": row.get("checked", ""),
            "ours / this": marked(row, ours, task),
        }
        lines.append(f"| {' | '.join(str(cells[head]) for head in heads)} |")
    return [*lines, ""]


def by_workers(part: dict[str, Any]) -> list[str]:
    """Return the compact table of every setting and number of workers."""
    task, peers = part["task"], list(dict.fromkeys(row["peer"] for row in part["rows"]))
    columns = list(dict.fromkeys((settings(row), row.get("workers")) for row in part["rows"]))
    if len(columns) < 2:
        return []
    lines = [
        "All settings, 0, 1 and 2 workers (or threads):",
        "",
        "| peer | " + " | ".join(f"{setting}, {workers}".strip(", ") for setting, workers in columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for peer in peers:
        own = {(settings(row), row.get("workers")): row for row in part["rows"] if row["peer"] == peer}
        cells = [cell(own[column], task) if column in own else "" for column in columns]
        lines.append(f"| {peer} | {' | '.join(cells)} |")
    return [*lines, ""]


def cell(row: Row, task: str) -> str:
    if not row["seconds"] or "failed" in row:
        return "failed" if "failed" in row else "cannot"
    value = f"{1000 * median(row['seconds']):,.1f} ms" if task in TIMES else f"{speed(row, task):,.0f}"
    return value if row.get("checked", "yes") in YES else f"{value} (wrong)"


def reasons(part: dict[str, Any]) -> list[str]:
    """Return who is not in the tables, under which settings, and why."""
    told: dict[str, dict[str, list[str]]] = {}
    for peer, reason in part["cannot"].items():
        told.setdefault(f"cannot, {reason}", {})[peer] = []
    for peer, reason in part["failed"].items():
        told.setdefault(reason, {})[peer] = []
    for row in part["rows"]:
        for kind in {"cannot", "failed"} & row.keys():
            where = [settings(row)] * bool(settings(row))
            where += [f"{row['workers']} workers"] if "workers" in row else []
            words = row[kind].partition(" Original Traceback")[0].replace(f"{RESULTS.parents[1]}/", "")
            told.setdefault(f"{kind}, {words}", {}).setdefault(row["peer"], []).append(", ".join(where))
    lines = ["Not in the tables:", ""] if told else []
    for reason, peers in told.items():
        names = [f"{peer} ({'; '.join(where)})" if any(where) else peer for peer, where in peers.items()]
        lines.append(f"- {', '.join(names)}: {reason}")
    return [*lines, ""]


def heading(part: dict[str, Any], setting: str) -> str:
    return f"**{part['set']}{', ' * bool(setting)}{setting}**"


def summary(parts: list[dict[str, Any]]) -> list[str]:
    """Return the table of all tasks and peers at one glance, and how it was made."""
    asked = {peer for part in parts for peer in part["versions"]}
    peers = [peer.name for peer in all_peers() if peer.name in asked.difference(FORMS)]
    lines = [f"{parts[0]['machine']}.", "", *HOW, ""] if parts else []
    lines += [f"| | {OURS} | {' | '.join(peers)} |", "|---" * (len(peers) + 2) + "|"]
    for part in parts:
        for setting, rows in groups(part):
            chosen = {row["peer"]: row for row in bests(rows, part["task"])}
            own = mine(rows, part["task"])
            cells = [cell(own, part["task"]) if own else ""]
            for peer in peers:
                right = peer in chosen and chosen[peer].get("checked", "yes") in YES
                told = marked(chosen[peer], list(chosen.values()), part["task"]) if peer in chosen else "·"
                cells.append(told if right or told == "·" else f"{told} (wrong)")
            name = ", ".join(filter(None, [part["task"], part["set"], setting]))
            lines.append(f"| {name} | {' | '.join(cells)} |".replace("behind: ", ""))
    versions = {peer: packages for part in parts for peer, packages in part["versions"].items() if packages}
    return [*lines, "", "Versions:", "", *(f"- {peer}: {', '.join(each)}" for peer, each in versions.items())]


HOW = [
    "How many times as fast as each peer ours is, each with its best number of workers, ours with the better of single "
    "samples and rows of arrays; **bold: ours is behind**; "
    "· the peer cannot or failed, the tables say why; (wrong): what it delivered is not the set.",
    "",
    "Every peer has a process in an environment of its own, and its own best configuration in `benchmarks/peers`. "
    "Under each setting the loader is opened and a first epoch is kept apart, which includes the opening; then "
    "5 rounds (3 where an epoch takes 0.3 s or more, 2 from 1.2 s on) go round the peers in turn, each of as many "
    f"epochs as last {LEAST} s: medians, and the slowest and fastest round. CPU seconds are those of all of a peer's "
    "processes. One more epoch is compared sample by sample with the set; the peak is that of the anonymous and shared "
    "memory meanwhile, above the imports. The page cache is warm except where dropped; what is written takes pages "
    "that were in use just before. First sample, resume and the dropped page cache: "
    f"{FRESH} rounds in fresh processes.",
]


def ranking(now: list[dict[str, Any]], before: list[dict[str, Any]]) -> list[str]:
    """Return how the order of the peers in this run compares with the run before."""
    earlier = {(part["task"], part["set"], setting): rows for part in before for setting, rows in groups(part)}
    lines = ["Pairs of peers that two runs of the suite put in the same order, by the medians of the tables.", ""]
    lines += ["| | pairs | in the same order | in the other (how far apart in this run) |", "|---|---|---|---|"]
    for part in now:
        for setting, rows in groups(part):
            task, old = part["task"], earlier.get((part["task"], part["set"], setting), [])
            was = {row["peer"]: speed(row, task) for row in bests(old, task)}
            here = {row["peer"]: speed(row, task) for row in bests(rows, task) if row["peer"] in was}
            pairs = list(combinations(sorted(here, key=here.__getitem__, reverse=True), 2))
            turned = [(a, b) for a, b in pairs if was[a] < was[b]]
            told = ", ".join(f"{a} and {b} ({number(here[a] / here[b])} x)" for a, b in turned)
            name = ", ".join(filter(None, [task, part["set"], setting]))
            lines.append(f"| {name} | {len(pairs)} | {len(pairs) - len(turned)} | {told} |")
    return lines


def sections(parts: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Return the report's sections on what was measured, a task each."""
    made: dict[str, list[str]] = {}
    for part in parts:
        lines = made.setdefault(TITLES[part["task"]], [f"![{part['task']}](plots/{part['task']}.png)", ""])
        lines += [f"{part['count']:,} samples of {part['set']}. {part['machine']}.", ""]
        if apart := part.get("apart"):
            lines += [f"Measured in a run of their own, later: {', '.join(apart)}.", ""]
        if resident := max((row.get("resident", 0) for row in part["rows"]), default=0):
            lines += [f"Of the files' bytes, at most {100 * resident:.1f} % were still in the page cache.", ""]
        for setting, rows in groups(part):
            if rows:
                shown = table(rows, part["task"])
                lines += [heading(part, setting), "", *shown]
                why = WHY.get(f"{part['task']} {part['set']}")
                if why and any("behind" in line for line in shown):
                    lines += [f"Why ours is behind: {why}", ""]
        lines += [*by_workers(part), *reasons(part)]
    return made


def main(root: Path = ROOT, page: Path = RESULTS) -> None:
    """Make the report from the figures below *root*: sections at the top of *page*, and plots beside it."""
    parts, before = load(root), load(root, "previous")
    report = {"The suite at a glance": summary(parts), **sections(parts), "What faults do": faults.lines()}
    if before:
        report["The ranking of two runs"] = ranking(parts, before)
    put(report, page, first=True)
    charts.main(parts, page.parent / "plots")
