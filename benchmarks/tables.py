"""The tables of docs/benchmarks.md and the figure of the README, from the summary in RESULTS.md.

Run as a program, it rewrites them.
"""

from __future__ import annotations

import re
from pathlib import Path

from charts import THEMES, overview
from measure import RESULTS

ROOT = RESULTS.parents[1]
PAGE, IMAGES = ROOT / "docs/benchmarks.md", ROOT / "docs/images"
OURS = "tarshards"
COLUMNS = {  # what the page says -> peers, of whom the first that was measured is shown
    "webdataset": ("webdataset",),
    "FFCV": ("ffcv",),
    "litdata": ("litdata",),
    "DALI": ("dali",),
    "MDS": ("streaming",),
    "torch, files": ("torch_files", "torchvision"),
    "Grain": ("grain",),
    "Lance": ("lance",),
}
ROWS = {  # what the page says -> a row of the summary
    "2 KB, in order": "stream, raw-2k, in order",
    "2 KB, in order, un-indexed": "stream, raw-2k, in order, un-indexed",
    "2 KB, shuffled": "stream, raw-2k, shuffled",
    "2 KB, shuffled, 2 worker processes": "stream, raw-2k, shuffled, 2 processes",
    "2 KB, in order, rows": "stream, raw-2k, in order, rows",
    "2 KB, shuffled, rows": "stream, raw-2k, shuffled, rows",
    "200,000 of 2 KB, in order": "stream, raw-2k-200k, in order",
    "200,000 of 2 KB, shuffled": "stream, raw-2k-200k, shuffled",
    "200,000 of 2 KB, in order, rows": "stream, raw-2k-200k, in order, rows",
    "200,000 of 2 KB, shuffled, rows": "stream, raw-2k-200k, shuffled, rows",
    "5,000,000 of 2 KB, in order": "stream, raw-2k-5m, in order",
    "5,000,000 of 2 KB, in order, un-indexed": "stream, raw-2k-5m, in order, un-indexed",
    "5,000,000 of 2 KB, shuffled": "stream, raw-2k-5m, shuffled",
    "five fields, 2.3 KB, in order": "stream, five, in order",
    "five fields, 2.3 KB, in order, rows": "stream, five, in order, rows",
    "200,000 of five fields, in order": "stream, five-200k, in order",
    "200,000 of five fields, shuffled": "stream, five-200k, shuffled",
    "110 KB, in order": "stream, raw-110k-10k, in order",
    "110 KB, shuffled": "stream, raw-110k-10k, shuffled",
    "110 KB, shuffled, 2 worker processes": "stream, raw-110k-10k, shuffled, 2 processes",
    "110 KB, in order, rows": "stream, raw-110k-10k, in order, rows",
    "110 KB, shuffled, rows": "stream, raw-110k-10k, shuffled, rows",
    "1 MB, in order": "stream, raw-1m, in order",
    "1 MB, in order, un-indexed": "stream, raw-1m, in order, un-indexed",
    "1 MB, shuffled": "stream, raw-1m, shuffled",
    "1 MB, shuffled, rows": "stream, raw-1m, shuffled, rows",
    "93 float32, shuffled batches of 1,024": "arrays, otto, batches of 1,024",
    "200,000 of these": "arrays, otto-200k, batches of 1,024",
    "32 x 32 x 3, shuffled batches of 128": "arrays, cifar, batches of 128",
    "200,000 of these images": "arrays, cifar-200k, batches of 128",
    "JPEG 256 x 256, decoded": "decode, photos256",
    "JPEG 500 x 375, decoded": "decode, photos500",
    "JPEG 256 x 256, random resized crop to 224": "crop, photos256",
    "training on these crops, ArrayLoader": "train, photos256-1k",
    "training on these crops, ShardLoader, crops in Python": "train, photos256-1k, transforms in Python",
    "2 KB, random access": "random, raw-2k",
    "writing 2 KB": "write, raw-2k",
    "indexing 2 KB": "index, raw-2k",
    "first of 10,000 shuffled samples": "first, raw-2k",
    "first of 20,000 in 10,000 shards": "first, shards-10k",
    "the same, un-indexed": "first, shards-10k, un-indexed",
    "next batch after resuming in mid-epoch": "resume, raw-2k",
}
COLD = {
    "in order": "cold, raw-110k, in order",
    "in order, un-indexed": "cold, raw-110k, in order, un-indexed",
    "in order, rows": "cold, raw-110k, in order, rows",
    "shuffled": "cold, raw-110k, shuffled",
    "shuffled, un-indexed": "cold, raw-110k, shuffled, un-indexed",
    "shuffled, rows": "cold, raw-110k, shuffled, rows",
}
PANELS = {  # what the figure says -> a row of the summary
    "2 KB samples, shuffled": "stream, raw-2k, shuffled",
    "110 KB samples, shuffled, 2 worker processes": "stream, raw-110k-10k, shuffled, 2 processes",
    "93 float32, shuffled batches of 1,024": "arrays, otto, batches of 1,024",
    "JPEG 256 x 256, random resized crop to 224": "crop, photos256",
}
WHY = {  # a pattern of rows of the summary -> why tarshards may be slower there; the first that fits
    "decode, .*": "Decoding takes most of the time, and simplejpeg is a decoder alone.",
    "write, .*": "A tar has a header and padding for each member: a sample of 2 KB takes 3,584 bytes, where columns "
    "and records take 2,056.",
    "cold, .*": "The disk takes most of the time, and varies more between rounds than between peers. Shards are "
    "mapped; pages that were not read ahead are read one by one.",
    "stream, .*, 2 processes": "Batches cost more to hand over than to read: without workers each is faster.",
    "stream, .*, rows": "Members of a tar have headers and padding between them, so more pages are touched than in "
    "files of bare records.",
    "stream, raw-(110k.*|1m), shuffled, un-indexed": "The buffer holds all samples of this small set, in memory whose "
    "pages the system zeroes again in every epoch; larger sets reuse it.",
    "stream, raw-(110k.*|1m), .*": "litdata and SPDL give views of mapped files or of a whole shard, and copy nothing; "
    "ours are copies.",
    "stream, .*": "Each sample is a dict with a key and a URL, made in Python; rows avoid these.",
    "arrays, .*": "Labels are decimal text, which is parsed; FFCV's are binary.",
    "first, shards-10k.*": "The order covers all shards, so all are inspected before the first sample; "
    "webdataset opens one shard.",
    "train, .*": "The model takes most of the time; the loader's threads share the cores with it.",
}
BEHIND = "where tarshards is slower"  # the head of their table
TABLES = {  # the first cell of a table's head -> its columns and rows
    "samples per second": (COLUMNS, ROWS),
    "110 KB samples per second, page cache dropped": (
        {name: COLUMNS[name] for name in ("webdataset", "FFCV", "litdata", "MDS", "torch, files")} | {"cat": ("cat",)},
        COLD,
    ),
}
GPU = {  # the first cell of a table's head -> the section of the results that has its table
    "on one H100, 16 cores: JPEGs of 500 x 375, cropped to 224 x 224": "Images on a GPU",
    "on one H100, 16 cores: a ResNet-50 that trains on these": "Training a ResNet-50 on a GPU",
}


def glance(page: Path) -> dict[str, dict[str, str]]:
    """Return the summary in a page of results: the cells of each row, by the names of their columns."""
    text = page.read_text() if page.exists() else ""
    found = re.search(
        r"^## The suite at a glance\n.*?^\| \| ([^\n]*) \|\n\|[-|]+\n((?:\|[^\n]*\n)*)", text, re.M | re.S
    )
    if found is None:
        return {}
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in found[2].splitlines()]
    return {name: dict(zip(found[1].split(" | "), cells, strict=True)) for name, *cells in rows}


def table(head: str, summary: dict[str, dict[str, str]]) -> list[str]:
    """Return the lines of one of TABLES; rows that were not measured are left out."""
    columns, rows = TABLES[head]
    lines = [f"| {head} | {OURS} | {' | '.join(columns)} |", "|---" * (len(columns) + 2) + "|"]
    for words, name in rows.items():
        if cells := summary.get(name):
            shown = [next((times(cells[peer]) for peer in peers if peer in cells), "") for peers in columns.values()]
            lines.append(f"| {words} | {cells[OURS]} | {' | '.join(shown)} |")
    return lines


def on_gpu(head: str, results: Path) -> list[str]:
    """Return the lines of one of the tables of GPU: those of the section of the results, with this head."""
    text = results.read_text() if results.exists() else ""
    found = re.search(rf"^## {GPU[head]}\n.*?^\|[^|\n]*(\|[^\n]*\n(?:\|[^\n]*\n)*)", text, re.MULTILINE | re.DOTALL)
    return [] if found is None else f"| {head} {found[1]}".splitlines()


def why(name: str) -> str:
    """Return why tarshards may be slower in a row of the summary."""
    return next((words for pattern, words in WHY.items() if re.fullmatch(pattern, name)), "Not profiled yet.")


def behind(summary: dict[str, dict[str, str]]) -> list[str]:
    """Return the lines of the table of all rows in which a peer is faster."""
    lines = [f"| {BEHIND} | times as fast as | why |", "|---|---|---|"]
    for name, cells in summary.items():
        slower = [f"{cell.strip('*')} {peer}" for peer, cell in cells.items() if cell.startswith("**")]
        if slower:
            lines.append(f"| {name} | {', '.join(slower)} | {why(name)} |")
    return lines


def parts() -> list[tuple[str, str]]:
    """Return the tasks and sets of the tables."""
    names = [name.split(", ")[:2] for _, rows in TABLES.values() for name in rows.values()]
    return list(dict.fromkeys((task, data) for task, data in names))


def peers() -> set[str]:
    """Return the peers in the tables."""
    return {peer for columns, _ in TABLES.values() for each in columns.values() for peer in each}


def times(cell: str) -> str:
    """Return a ratio as "1.5 x", and a bold one as "**~0.5 x**" if it scatters; of wrong or missing ones nothing."""
    found = re.fullmatch(r"(\**)(~?[\d,.]+)(\**)", cell)
    return f"{found[1]}{found[2]} x{found[3]}" if found else ""


def bars(cells: dict[str, str]) -> list[tuple[str, float, str]]:
    """Return the rates in a row of the summary, the fastest first: peer, samples a second, words for the bar."""
    ours = float(cells[OURS].strip("~").replace(",", ""))
    found = [(OURS, ours, f"{cells[OURS]}/s")]
    for name, peers in COLUMNS.items():
        told = next((times(cells[peer]) for peer in peers if peer in cells), "")
        if told:
            found.append((name, ours / float(told.strip("*~ x").replace(",", "")), told.strip("*")))
    return sorted(found, key=lambda bar: -bar[1])


def figure(summary: dict[str, dict[str, str]], theme: str) -> str:
    """Return the figure of the README, an SVG."""
    rows = {words: summary[name] for words, name in PANELS.items() if name in summary}
    days = sorted({cells["measured"] for cells in rows.values()})
    note = (
        "Samples a second, each library at its best on two cores, page cache warm. N x: tarshards is N times as fast. "
        f"Measured {' to '.join(dict.fromkeys((days[0], days[-1])))}."
    )
    return overview({words: bars(cells) for words, cells in rows.items()}, note, theme)


def main(results: Path = RESULTS, page: Path = PAGE, images: Path = IMAGES) -> None:
    """Write the tables of the page, and the figure."""
    summary, text = glance(results), page.read_text()
    tables = {head: table(head, summary) for head in TABLES} | {BEHIND: behind(summary)}
    tables |= {head: on_gpu(head, results) for head in GPU}
    for head, written in tables.items():
        lines = "\n".join(written) + "\n"
        text, found = re.subn(
            rf"^\| {re.escape(head)} \|.*\n(?:\|.*\n)*", lambda found, lines=lines: lines, text, flags=re.MULTILINE
        )
        if found != 1:
            raise SystemExit(f"{page.name} has {found} tables of {head!r}, not one")
    page.write_text(text)
    for theme in THEMES:
        (images / f"speed-{theme}.svg").write_text(figure(summary, theme))


if __name__ == "__main__":
    main()
