"""The tables of docs/benchmarks.md and the charts of README and docs, from RESULTS.md.

Run as a program, it rewrites them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from charts import Bar, chart
from measure import RESULTS
from results import OURS, Results, number

ROOT = RESULTS.parents[1]
PAGE, IMAGES = ROOT / "docs/benchmarks.md", ROOT / "docs/images/charts"
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
TABLES = {  # the first cell of a table's head -> its rows: what the page says, and a row of the summary
    "JPEGs, samples per second": {
        "256 x 256, decoded": "decode, photos256",
        "500 x 375, decoded": "decode, photos500",
        "256 x 256, random resized crop to 224": "crop, photos256",
        "500 x 375, the same crop": "crop, photos500",
        "training on crops of 256 x 256, ArrayLoader": "train, photos256-1k",
        "the same, ShardLoader, crops in Python": "train, photos256-1k, transforms in Python",
    },
    "110 KB and 1 MB, samples per second": {
        "110 KB, in order": "stream, raw-110k-10k, in order",
        "110 KB, shuffled": "stream, raw-110k-10k, shuffled",
        "110 KB, shuffled, 2 worker processes": "stream, raw-110k-10k, shuffled, 2 processes",
        "1 MB, in order": "stream, raw-1m, in order",
        "1 MB, in order, un-indexed": "stream, raw-1m, in order, un-indexed",
        "1 MB, shuffled": "stream, raw-1m, shuffled",
    },
    "110 KB, page cache dropped, samples per second": {
        "in order": "cold, raw-110k, in order",
        "in order, un-indexed": "cold, raw-110k, in order, un-indexed",
        "shuffled": "cold, raw-110k, shuffled",
        "shuffled, un-indexed": "cold, raw-110k, shuffled, un-indexed",
    },
    "texts, samples per second": {
        "in order": "stream, text, in order",
        "in order, un-indexed": "stream, text, in order, un-indexed",
        "shuffled": "stream, text, shuffled",
        "shuffled, 2 worker processes": "stream, text, shuffled, 2 processes",
    },
    "2 KB, samples per second": {
        "in order": "stream, raw-2k, in order",
        "in order, un-indexed": "stream, raw-2k, in order, un-indexed",
        "shuffled": "stream, raw-2k, shuffled",
        "shuffled, 2 worker processes": "stream, raw-2k, shuffled, 2 processes",
        "200,000, in order": "stream, raw-2k-200k, in order",
        "200,000, shuffled": "stream, raw-2k-200k, shuffled",
        "5,000,000, in order": "stream, raw-2k-5m, in order",
        "5,000,000, in order, un-indexed": "stream, raw-2k-5m, in order, un-indexed",
        "5,000,000, shuffled": "stream, raw-2k-5m, shuffled",
        "five fields, in order": "stream, five, in order",
        "200,000 of five fields, in order": "stream, five-200k, in order",
        "200,000 of five fields, shuffled": "stream, five-200k, shuffled",
    },
    "arrays in batches, samples per second": {
        "93 float32, batches of 1,024": "arrays, otto, batches of 1,024",
        "200,000 of these": "arrays, otto-200k, batches of 1,024",
        "32 x 32 x 3, batches of 128": "arrays, cifar, batches of 128",
        "200,000 of these images": "arrays, cifar-200k, batches of 128",
    },
    "batches as rows, samples per second": {
        "2 KB, in order": "stream, raw-2k, in order, rows",
        "2 KB, shuffled": "stream, raw-2k, shuffled, rows",
        "200,000 of 2 KB, in order": "stream, raw-2k-200k, in order, rows",
        "200,000 of 2 KB, shuffled": "stream, raw-2k-200k, shuffled, rows",
        "five fields, 2.3 KB, in order": "stream, five, in order, rows",
        "texts, in order": "stream, text, in order, rows",
        "texts, shuffled": "stream, text, shuffled, rows",
        "110 KB, in order": "stream, raw-110k-10k, in order, rows",
        "110 KB, shuffled": "stream, raw-110k-10k, shuffled, rows",
        "110 KB, in order, page cache dropped": "cold, raw-110k, in order, rows",
        "110 KB, shuffled, page cache dropped": "cold, raw-110k, shuffled, rows",
        "1 MB, shuffled": "stream, raw-1m, shuffled, rows",
    },
    "written, samples per second": {
        "2 KB": "write, raw-2k",
        "110 KB": "write, raw-110k",
    },
    "indexed, samples per second": {
        "2 KB": "index, raw-2k",
        "110 KB": "index, raw-110k",
    },
    "time to a sample or batch": {
        "first of 10,000 shuffled samples": "first, raw-2k",
        "first of 20,000 in 10,000 shards": "first, shards-10k",
        "the same, un-indexed": "first, shards-10k, un-indexed",
        "next batch after resuming in mid-epoch": "resume, raw-2k",
    },
    "random access, samples per second": {
        "2 KB": "random, raw-2k",
        "110 KB": "random, raw-110k",
    },
}
MORE_COLUMNS = {  # of tables that compare with programs that are no loaders
    "110 KB, page cache dropped, samples per second": {"cat": ("cat",)},
    "indexed, samples per second": {"GNU tar": ("gnu_tar",), "tarfile": ("tarfile",)},
}
COPIED = {  # the first cell of a table's head -> the section of the results that has it, what precedes it, columns
    "behind a link of 80 MB/s, 50 ms": ("Remote", "**Other libraries, large samples", ["MB/s", "CPU s / GB"]),
    "lengths packed into windows of 4,096": ("Packing", "", ["fill", "lengths a second"]),
    "on one H100, 16 cores: JPEGs of 500 x 375, cropped to 224 x 224": (
        "Images on a GPU",
        "",
        ["images/s", "`dali_loader` / this", "CPU us/image", "GPU memory, GiB"],
    ),
    "on one H100, 16 cores: a ResNet-50 that trains on these": (
        "Training a ResNet-50 on a GPU",
        "",
        ["images/s", "range", "of the model's own rate"],
    ),
}


class Copied(NamedTuple):
    """A chart of a column of a table of the results: what it calls the rows of tarshards, and the others."""

    title: str
    section: str
    after: str
    column: str
    ours: dict[str, str]
    theirs: dict[str, str]


CHARTS: dict[str, tuple[str, str] | Copied] = {  # a file -> a title and a row of the summary, or a table
    "crop-256": ("JPEG 256 x 256, random resized crop to 224", "crop, photos256"),
    "train": ("A small CNN that trains on such crops", "train, photos256-1k"),
    "cold-110k": ("110 KB, shuffled, page cache dropped", "cold, raw-110k, shuffled"),
    "read-110k": ("110 KB, shuffled, 2 worker processes", "stream, raw-110k-10k, shuffled, 2 processes"),
    "link-110k": Copied(
        "110 KB samples, MB/s of 80, round trip 50 ms",
        "Remote",
        "**Other libraries, large samples",
        "MB/s",
        {"tarshards, in order": "tarshards, stream", "tarshards, shuffled": "tarshards, planned, shuffled"},
        {
            "8 curls, bytes only": "8 curls",
            "obstore, bytes only": "obstore, bytes only",
            "webdataset, curl": "webdataset pipe:curl",
            "s3torchconnector": "s3torchconnector, bytes only",
            "litdata": "litdata",
            "wids": "wids",
            "HF datasets": "HF datasets",
            "MDS": "mosaic streaming",
        },
    ),
    "link-2k": Copied(
        "2 KB samples, MB/s of 80, round trip 50 ms",
        "Remote",
        "**Other libraries, small samples",
        "MB/s",
        {"tarshards, in order": "tarshards, stream", "tarshards, shuffled": "tarshards, planned, shuffled"},
        {"4 curls, bytes only": "4 curls", "webdataset, curl": "webdataset pipe:curl"},
    ),
    "text": ("Texts, shuffled", "stream, text, shuffled"),
    "packing": Copied(
        "Texts packed into rows: what is filled",
        "Packing",
        "",
        "fill",
        {"tarshards.pack": "tarshards.pack"},
        {"binpacking": "binpacking", "next fit": "next fit", "padding": "padding"},
    ),
    "read-2k": ("2 KB, shuffled", "stream, raw-2k, shuffled"),
    "arrays": ("93 float32, shuffled batches of 1,024", "arrays, otto, batches of 1,024"),
    "write-2k": ("Writing 2 KB", "write, raw-2k"),
    "write-110k": ("Writing 110 KB", "write, raw-110k"),
    "first": ("Time to the first of 10,000 shuffled samples", "first, raw-2k"),
    "resume": ("Time to the next batch after a resume", "resume, raw-2k"),
    "gpu": Copied(
        "JPEGs cropped beside one H100, images/s",
        "Images on a GPU",
        "",
        "images/s",
        {
            "dali_loader, 16 threads": "`dali_loader`, `decoders.image_random_crop`, 16 threads",
            "ShardLoader, 16 workers": "`ShardLoader`, 16 workers",
            "ArrayLoader, 16 threads": "`ArrayLoader`, 16 threads",
        },
        {"DALI's reader, 16 threads": "DALI's `fn.readers.webdataset`, `decoders.image_random_crop`, 16 threads"},
    ),
    "gpu-training": Copied(
        "A ResNet-50 that trains on these, images/s",
        "Training a ResNet-50 on a GPU",
        "",
        "images/s",
        {
            "dali_loader, 4 threads": "`dali_loader`, 4 threads",
            "ShardLoader, 16 workers": "`ShardLoader`, 16 workers",
            "ArrayLoader, 16 threads": "`ArrayLoader`, 16 threads",
        },
        {"one constant batch": "one constant batch"},
    ),
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


def table(head: str, summary: dict[str, dict[str, str]]) -> list[str]:
    """Return the lines of one of TABLES, without rows and columns that were not measured."""
    rows = {words: summary[name] for words, name in TABLES[head].items() if name in summary}
    columns = {
        name: [next((times(cells[peer]) for peer in peers if peer in cells), "") for cells in rows.values()]
        for name, peers in {**COLUMNS, **MORE_COLUMNS.get(head, {})}.items()
    }
    columns = {name: cells for name, cells in columns.items() if any(cells)}
    lines = [f"| {head} | {OURS} | {' | '.join(columns)} |", "|---" * (len(columns) + 2) + "|"]
    for place, (words, cells) in enumerate(rows.items()):
        lines.append(f"| {words} | {cells[OURS]} | {' | '.join(column[place] for column in columns.values())} |")
    return lines


def copied(head: str, results: Results) -> list[str]:
    """Return the lines of one of the tables of COPIED."""
    section, after, columns = COPIED[head]
    heads, *rows = results.table(section, after=after)
    places = [heads.index(column) for column in columns]
    lines = [f"| {head} | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    return lines + [f"| {row[0]} | {' | '.join(row[place] for place in places)} |" for row in rows]


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
    names = [name.split(", ")[:2] for rows in TABLES.values() for name in rows.values()]
    return list(dict.fromkeys((task, data) for task, data in names))


def peers() -> set[str]:
    """Return the peers in the tables."""
    return {peer for columns in (COLUMNS, *MORE_COLUMNS.values()) for each in columns.values() for peer in each}


def times(cell: str) -> str:
    """Return a ratio as "1.5 x", and a bold one as "**~0.5 x**" if it scatters; of wrong or missing ones nothing."""
    found = re.fullmatch(r"(\**)(~?[\d,.]+)(\**)", cell)
    return f"{found[1]}{found[2]} x{found[3]}" if found else ""


def bars(cells: dict[str, str]) -> list[Bar]:
    """Return the bars of a row of the summary, the best first: of rates the longest, of times the shortest."""
    takes_time = cells[OURS].endswith(" ms")
    ours = number(cells[OURS].removesuffix(" ms"))
    found = [Bar(OURS, ours, cells[OURS] if takes_time else f"{cells[OURS]}/s", True)]
    for name, peers in {**COLUMNS, "cat": ("cat",)}.items():
        if told := next((times(cells[peer]) for peer in peers if peer in cells), ""):
            ratio = float(told.strip("*~ x").replace(",", ""))
            found.append(Bar(name, ours * ratio if takes_time else ours / ratio, told.strip("*"), False))
    return sorted(found, key=lambda bar: bar.length if takes_time else -bar.length)


def figure(name: str, results: Results) -> str:
    """Return one of CHARTS, an SVG."""
    if isinstance(drawn := CHARTS[name], Copied):
        bars_ = [
            Bar(words, number(cell), cell, names is drawn.ours)
            for names in (drawn.ours, drawn.theirs)
            for words, row in names.items()
            for cell in [results.cell(drawn.section, row, drawn.column, after=drawn.after)]
            if cell  # else that peer failed
        ]
        note = f"Measured {results.date(drawn.section)}."
        return chart(drawn.title, sorted(bars_, key=lambda bar: -bar.length), note)
    title, row = drawn
    note = f"N x: tarshards is N times as fast. Measured {results.summary[row]['measured']}."
    return chart(title, bars(results.summary[row]), note)


def main(page: Path = PAGE, images: Path = IMAGES) -> None:
    """Write the tables of the page, and the charts."""
    results, text = Results(), page.read_text()
    tables = {head: table(head, results.summary) for head in TABLES} | {BEHIND: behind(results.summary)}
    tables |= {head: copied(head, results) for head in COPIED}
    for head, written in tables.items():
        lines = "\n".join(written) + "\n"
        text, found = re.subn(
            rf"^\| {re.escape(head)} \|.*\n(?:\|.*\n)*", lambda found, lines=lines: lines, text, flags=re.MULTILINE
        )
        if found != 1:
            raise SystemExit(f"{page.name} has {found} tables of {head!r}, not one")
    page.write_text(text)
    images.mkdir(parents=True, exist_ok=True)
    for name in CHARTS:
        (images / f"{name}.svg").write_text(figure(name, results))


if __name__ == "__main__":
    main()
