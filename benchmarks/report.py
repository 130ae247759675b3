"""Write the report of the suite: tables in RESULTS.md, with the ratios to ours, and plots."""

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
    "random": "Random access to 10,000 samples by every peer",
    "write": "Writing by every peer",
    "index": "Indexing by every peer",
    "first": "First sample after opening by every peer",
    "resume": "Resume in mid-epoch by every peer",
    "cold": "Raw iteration by every peer, page cache dropped",
}

WHY = {  # why ours may be slower
    "decode photos500": "Decoding takes most of the time; the row `simplejpeg` is our decoder alone. DALI's own build "
    "of libjpeg-turbo decodes pictures of this size to the same pixels in less time.",
    "write raw-2k": "A tar needs 512 bytes and padding for each member: 3,584 bytes per sample here, where columns and "
    "records take 2,056.",
    "cold raw-110k": "The disk takes most of the time, and varies more between rounds than between peers.",
}


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}" if value < 2 else f"{value:.1f}" if value < 20 else f"{value:,.0f}"


def marked(row: Row, rows: list[Row], task: str) -> str:
    """Return the ratio as a cell, in bold if ours is slower."""
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
    """Return the peers missing from the tables, with settings and reasons."""
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
    """Return the summary table of all tasks and peers, and how it was made."""
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
    "Each cell says how many times as fast as this peer tarshards is, each with its best number of workers, and "
    "tarshards with the faster of single samples and rows of arrays. **Bold**: tarshards is slower. "
    "·: the peer cannot do this or failed; the tables say why. (wrong): the peer delivered wrong samples.",
    "",
    "Every peer runs in a process and an environment of its own, in its best configuration (`benchmarks/peers`). In "
    "each setting, the first epoch includes opening the loader and is reported separately. Then follow 5 rounds (3 if "
    "an epoch takes 0.3 s or more, 2 from 1.2 s on) in which the peers take turns; a round has enough epochs to last "
    f"{LEAST} s. The tables give medians, and the slowest and fastest round. CPU seconds include all processes of a "
    "peer. One more epoch is compared with the set sample by sample; the peak is the maximum of anonymous and shared "
    "memory during this epoch, above that after the imports. The page cache is warm unless dropped; writing reuses "
    f"pages that were in use just before. First sample, resume and the dropped page cache: {FRESH} rounds in fresh "
    "processes.",
]


def ranking(now: list[dict[str, Any]], before: list[dict[str, Any]]) -> list[str]:
    """Return how the order of the peers in this run compares with the run before."""
    earlier = {(part["task"], part["set"], setting): rows for part in before for setting, rows in groups(part)}
    lines = ["Pairs of peers that two runs of the suite ranked in the same order, by the medians of the tables.", ""]
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
    """Return the sections of the report, one per task."""
    made: dict[str, list[str]] = {}
    for part in parts:
        lines = made.setdefault(TITLES[part["task"]], [f"![{part['task']}](plots/{part['task']}.png)", ""])
        lines += [f"{part['count']:,} samples of {part['set']}. {part['machine']}.", ""]
        if apart := part.get("apart"):
            lines += [f"Measured later, in a separate run: {', '.join(apart)}.", ""]
        if resident := max((row.get("resident", 0) for row in part["rows"]), default=0):
            lines += [f"Bytes of the files still in the page cache: at most {100 * resident:.1f} %.", ""]
        for setting, rows in groups(part):
            if rows:
                shown = table(rows, part["task"])
                lines += [heading(part, setting), "", *shown]
                why = WHY.get(f"{part['task']} {part['set']}")
                if why and any("behind" in line for line in shown):
                    lines += [f"Why tarshards is slower: {why}", ""]
        lines += [*by_workers(part), *reasons(part)]
    return made


def main(root: Path = ROOT, page: Path = RESULTS) -> None:
    """Make the report from the results below *root*: sections at the top of *page*, and plots beside it."""
    parts, before = load(root), load(root, "previous")
    report = {"The suite at a glance": summary(parts), **sections(parts), "What faults do": faults.lines()}
    if before:
        report["The ranking of two runs"] = ranking(parts, before)
    put(report, page, first=True)
    charts.main(parts, page.parent / "plots")
