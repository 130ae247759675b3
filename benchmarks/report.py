"""Write the report of the suite: tables in RESULTS.md, with the ratios to ours, and plots."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

import charts
import faults
from figures import (
    FORMS,
    OURS,
    PEERS,
    PROCESSES,
    TIMES,
    UNINDEXED,
    YES,
    Row,
    bests,
    groups,
    load,
    mine,
    named,
    ratio,
    settings,
    speed,
)
from measure import RESULTS, SCATTER, about, put
from results import glance
from sets import CHECKED, LINKED, PART
from suite import FRESH, LEAST, PARTS, ROOT
from tables import why

TITLES = {
    "stream": "Raw iteration by every peer",
    "arrays": "Batches of arrays by every peer",
    "decode": "JPEG decoded by every peer",
    "crop": "JPEG decoded, random resized crop to 224 and flip, by every peer",
    "train": "Training a small CNN on crops of JPEGs",
    "random": "Random access to 10,000 samples by every peer",
    "write": "Writing by every peer",
    "index": "Indexing by every peer",
    "first": "First sample after opening by every peer",
    "resume": "Resume in mid-epoch by every peer",
    "cold": "Raw iteration by every peer, page cache dropped",
}


ABSENT = {  # what was tried -> why it is not among the peers
    "torchvision.io.decode_jpeg": "its library of images does not load beside torch's CPU build, as it needs CUDA's; "
    "`torchvision` is measured with Pillow and simplejpeg",
    "torchcodec": "its library of images does not load beside torch's CPU build either",
    "obstore": "reads objects, no samples; measured with them below, in Remote",
}


OUTSIDE = 0.02  # of the CPU time of the rounds: more than that spent between them is reported


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}" if value < 2 else f"{value:.1f}" if value < 20 else f"{value:,.0f}"


def shown(row: Row, task: str) -> list[float]:
    """Return the rounds of a row as the tables show them: milliseconds, or samples per second."""
    return [1000 * seconds if task in TIMES else row["samples"] / seconds for seconds in row["seconds"]]


def marked(row: Row, rows: list[Row], task: str) -> str:
    """Return the ratio as a cell, in bold if ours is slower."""
    times = ratio(row, rows, task)
    behind = times is not None and times < 1 and not row["peer"].startswith(OURS)
    return f"**behind: {number(times)}**" if behind else number(times)


def table(rows: list[Row], task: str) -> list[str]:
    """Return a setting's table: each peer's best number of workers."""
    times, ours = task in TIMES, bests(rows, task)
    unit = "ms" if times else "samples/s"
    heads = ["peer", *["decoder"] * any("decoder" in row for row in ours)]
    heads += [*["workers"] * ("workers" in ours[0]), unit, "from .. to"]
    heads += ["MB/s"] * (task == "write") + ["first round, s", "CPU s / 1,000"] * (not times and task != "cold")
    heads += ["peak MiB"] * ("peak" in ours[0]) + ["right"] * (task not in ("first", "cold")) + ["ours / this"]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for row in ours:
        values = shown(row, task)
        form = "{:,.1f}" if times else "{:,.0f}"
        cells = {
            "peer": row["peer"],
            "decoder": row.get("decoder", ""),
            "workers": row.get("workers"),
            unit: about(values) + form.format(median(values)),
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
    task, peers = part["task"], list(dict.fromkeys(map(named, part["rows"])))
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
        own = {(settings(row), row.get("workers")): row for row in part["rows"] if named(row) == peer}
        cells = [cell(own[column], task) if column in own else "" for column in columns]
        lines.append(f"| {peer} | {' | '.join(cells)} |")
    return [*lines, ""]


def cell(row: Row, task: str) -> str:
    if not row["seconds"] or "failed" in row:
        return "failed" if "failed" in row else "cannot"
    value = f"{1000 * median(row['seconds']):,.1f} ms" if task in TIMES else f"{speed(row, task):,.0f}"
    value = about(shown(row, task)) + value
    return value if row.get("checked", "yes") in YES else f"{value} (wrong)"


def outside(rows: list[Row]) -> list[str]:
    """Return a line on the peers that worked while the clock did not run, on samples that they delivered later."""
    shares = {named(row): sum(row.get("outside", [])) / (sum(row["cpu"]) or 1) for row in rows}
    told = [f"{name} {100 * share:.0f} %" for name, share in shares.items() if share > OUTSIDE]
    if not told:
        return []
    return [f"CPU time spent between the rounds, in percent of that in them: {', '.join(told)}.", ""]


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


def summary(parts: list[dict[str, Any]], page: Path) -> list[str]:
    """Return the summary of all tasks and peers; the rows of parts that were not measured now stay as in *page*."""
    table, versions = glance(page), known_versions(page)
    for part in parts:
        task, day = part["task"], part["machine"].rpartition("; ")[2]
        table = {name: cells for name, cells in table.items() if name.split(", ")[:2] != [task, part["set"]]}
        for setting, view, rows in groups(part):
            cells = {"measured": day, OURS: cell(mine(rows, task), task)}
            for row in reversed(bests(rows, task)):  # the best decoder is the last to be set
                if row["peer"] not in FORMS:
                    wrong = "" if row.get("checked", "yes") in YES else " (wrong)"
                    times = marked(row, rows, task).replace("behind: ", "")
                    cells[row["peer"]] = re.sub(r"(?=\d)", about(shown(row, task)), times, count=1) + wrong
            table[line_name(part, setting, view)] = cells
        versions |= {peer: ", ".join(packages) for peer, packages in part["versions"].items() if packages}
    order = [f"{task}, {name}" for task, name in PARTS]
    names = sorted(table, key=lambda name: order.index(", ".join(name.split(", ")[:2])))
    used = {peer for cells in table.values() for peer in cells}
    columns = ["measured", OURS, *(name for name in PEERS if name in used and name not in FORMS)]
    lines = [f"{parts[0]['machine']}.", "", *HOW, ""] if parts else []
    lines += [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    lines += [f"| {name} | {' | '.join(table[name].get(column, '·') for column in columns)} |" for name in names]
    return [*lines, "", "Versions:", "", *(f"- {peer}: {versions[peer]}" for peer in sorted(versions))]


def line_name(part: dict[str, Any], setting: str, view: str) -> str:
    return ", ".join(filter(None, [part["task"], part["set"], setting, view]))


def known_versions(page: Path) -> dict[str, str]:
    text = page.read_text() if page.exists() else ""
    told = text.partition("Versions:\n\n")[2].partition("\n\n")[0]
    return dict(line.removeprefix("- ").split(": ", 1) for line in told.splitlines())


HOW = [
    "Each cell says how many times as fast as this peer tarshards is, each with its best number of workers. Like is "
    "compared with like: samples (dicts, tuples) with samples, *rows* (the bytes of a batch in one array) with rows; "
    "*un-indexed* is a stream of plain tars without indexes; *2 processes*: each with two worker processes; of "
    "decoders, a peer's best. **Bold**: tarshards is slower. ·: the peer cannot do this, failed (the tables say why) "
    f"or was not measured. (wrong): the peer delivered wrong samples. ~: a round differs from the median by more than "
    f"{100 * SCATTER:.0f} %.",
    "",
    "Every peer runs in its own process and environment, in its best configuration (`benchmarks/peers`). In "
    "each setting, the first epoch includes opening the loader and is reported separately. Then follow 5 rounds (3 if "
    "an epoch takes 0.3 s or more, 2 from 1.2 s on) in which the peers take turns; a round has enough epochs to last "
    f"{LEAST} s. A round begins and ends with empty queues; a line under a table names the peers that work between "
    "rounds. The tables give medians, and the slowest and fastest round. CPU seconds include all processes of a "
    "peer. One more epoch is compared with the set sample by sample; the peak is the maximum of anonymous and shared "
    "memory during this epoch, above that after the imports. The page cache is warm unless dropped; writing reuses "
    f"pages that were in use just before. First sample, resume and the dropped page cache: {FRESH} rounds in fresh "
    "processes.",
]


def ranking(now: list[dict[str, Any]], before: list[dict[str, Any]]) -> list[str]:
    """Return how the order of the peers in this run compares with the run before."""
    earlier = {line_name(part, setting, view): rows for part in before for setting, view, rows in groups(part)}
    lines = ["Pairs of peers that two runs of the suite ranked in the same order, by the medians of the tables.", ""]
    lines += ["| | pairs | in the same order | in the other (how far apart in this run) |", "|---|---|---|---|"]
    for part in now:
        for setting, view, rows in groups(part):
            task, name = part["task"], line_name(part, setting, view)
            was = {named(row): speed(row, task) for row in bests(earlier.get(name, []), task)}
            here = {named(row): speed(row, task) for row in bests(rows, task) if named(row) in was}
            pairs = list(combinations(sorted(here, key=here.__getitem__, reverse=True), 2))
            turned = [(a, b) for a, b in pairs if was[a] < was[b]]
            told = ", ".join(f"{a} and {b} ({number(here[a] / here[b])} x)" for a, b in turned)
            lines.append(f"| {name} | {len(pairs)} | {len(pairs) - len(turned)} | {told} |")
    return lines


def sections(parts: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Return the sections of the report, one per part."""
    made: dict[str, list[str]] = {}
    for part in parts:
        task = part["task"]
        lines = made[title(task, part["set"])] = [f"![{task}](plots/{task}-{part['set']}.png)", ""]
        lines += [f"{part['count']:,} samples of {part['set']}. {part['machine']}.", ""]
        if seconds := PART.get(part["set"]):
            told = f"Rounds last {seconds:g} s, whatever part of an epoch that is"
            lines += [f"{told}; the first {CHECKED:,} samples are compared with the set.", ""]
        if part["set"] in LINKED:
            lines += ["The shards are hard links to those of {}, each {} times.".format(*LINKED[part["set"]]), ""]
        if apart := part.get("apart"):
            lines += [f"Measured later, in a separate run: {', '.join(apart)}.", ""]
        if resident := max((row.get("resident", 0) for row in part["rows"]), default=0):
            lines += [f"Bytes of the files still in the page cache: at most {100 * resident:.1f} %.", ""]
        for setting, view, rows in groups(part):
            if view not in (UNINDEXED, PROCESSES):  # whose rows are in the other tables
                written = table(rows, task)
                lines += [
                    f"**{', '.join(filter(None, [part['set'], setting, view]))}**",
                    "",
                    *written,
                    *outside(bests(rows, task)),
                ]
                if any("behind" in line for line in written):
                    lines += [f"Why tarshards is slower: {why(line_name(part, setting, view))}", ""]
        lines += [*by_workers(part), *reasons(part)]
    return made


def title(task: str, name: str) -> str:
    return f"{TITLES[task]}: {name}"


def main(root: Path = ROOT, page: Path = RESULTS) -> None:
    """Make the report from the results below *root*: sections at the top of *page*, and plots beside it."""
    parts, before = load(root), load(root, "previous")
    report = {"The suite at a glance": summary(parts, page), **sections(parts)}
    report["What could not be had"] = [f"- {what}: {reason}." for what, reason in ABSENT.items()]
    if faults.RESULTS.exists() or not page.exists():
        report["What faults do"] = faults.lines()
    if before:
        report["The ranking of two runs"] = ranking(parts, before)
    put(report, page, first=True)
    charts.main(parts, page.parent / "plots")
