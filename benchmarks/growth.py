"""What grows with a dataset: opening, first batch, rate and memory of each loader, and the CPU of the tools.

Sets of 10,000 to 100,000,000 samples of 200 B, and of 10 to 100,000 shards, most of them hard links; on this disk, and
behind a link of packets with a round trip of 50 ms (`tests/rigs`). Each case has a process of its own, and is ended
after LIMIT seconds. ``growth.py [samples] [shards] [link] [tools]`` measures some parts, as
``make bench ONLY=growth,tools`` does; ``--most N`` is a quick look at small sets, which records nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from environments import ENVIRONMENTS, Peer, all_peers, is_here
from growth_case import BATCH, LOADERS
from measure import DATA, RESULTS, machine, record
from processes import mebibytes, session

sys.path.append(str(Path(__file__).parents[1] / "tests"))

import programs
from rigs.slow_link import Link, Site, needs

PARTS = ("samples", "shards", "link", "tools")
ROOT = DATA / "growth"
BIN = Path(__file__).parents[1] / "bin"
CASE = Path(__file__).with_name("growth_case.py")
PLOT = RESULTS.parent / "plots" / "growth.png"
SIZE = 200  # bytes of a sample
DISTINCT = 10**6  # samples of a base set; larger ones are links to its shards
MOST_LINKS = 100  # to one file; ext4 allows 65,000
SAMPLES = tuple(10**power for power in range(4, 9))
SHARDS = tuple(10**power for power in range(1, 6))
SHARD, LARGE_SHARD = 10_000, 100_000  # samples of a shard; of those behind the link
RATE = 80.0  # MB/s of the link
TRIP = 0.05  # seconds
LIMIT = 60.0  # seconds of a case after its start, at most
WINDOW = 2.0  # seconds in which a rate is measured
FEWEST = (
    1000  # samples in them, of a peer on this disk; fewer are no rate, such as of one that unpacks a chunk meanwhile
)
WARM = {  # seconds before that, at most: of many shards a whole epoch, over the link until a set that fits has come
    "samples": 20.0,
    "shards": 15.0,
    "link": 15.0,
}
PEERS = ("webdataset_", "litdata_", "streaming_", "lance_", "grain_")
TOOLS = {  # their arguments before the shards
    "tarindex": "--index-dir {out}",
    "tarcheck": "",
    "tarsort": "--no-sync -o {out}/o.tar",
    "tarsort --shuffle": "--no-sync -o {out}/o.tar",
    "tarcat": "--no-sync -o {out}/o.tar",
    "tarreshard": f"--no-sync -n {SHARD} -o {{out}}/o-%06d.tar",
    "tarsplit": f"--no-sync -n {SHARD} -o {{out}}/o-%06d.tar",
    "targrep": "--no-sync -F a -o {out}/o.tar",
    "tarshow": "",
}
TOOL_SIZES = {10**4: 3, 10**5: 3, 10**6: 2}  # samples -> rounds
INDEXED = ("Stream", "ShardLoader, 0 workers", "ArrayLoader")  # which read nothing but indexes by calls
LEAST = 0.7  # of the rate of a million samples
LEAST_TINY = 0.5  # of the rate without indexes, of shards of two samples
MOST_OPENING = {  # ms of CPU to the first sample, by shards
    "Stream, manifest": {10**4: 30, 10**5: 250},
    "Stream, braces": {10**4: 60, 10**5: 500},
    "Stream, glob": {10**4: 60},
}
MOST_CPU = 11  # times the CPU for ten times the samples

Row = dict[str, Any]


def name_of(number: int) -> str:
    """Return a number as it is named in paths and tables, such as 1e6.

    >>> name_of(100_000)
    '1e5'
    """
    return f"1e{len(str(number)) - 1}"


# The sets.


def make_base(name: str, samples: int, per_shard: int) -> Path:
    """Write the shards, indexes and manifest that other sets link to."""
    from tarshards import ShardWriter

    folder, part = ROOT / name, ROOT / f"{name}.part"
    if not folder.exists():
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        rng = random.Random(name)
        with ShardWriter(f"{part}/s-%06d.tar", max_samples=per_shard, sync=False) as writer:
            for number in range(samples):
                writer.write({"__key__": f"{number:09d}", "bin": rng.randbytes(SIZE)})
        part.rename(folder)
    return folder


def make_set(name: str, base: Path, shards: int) -> Path:
    """Link *shards* shards of a base, and their indexes, into a new set with a manifest; return the set."""
    from tarshards.index.manifests import read_manifest, write_manifest
    from tarshards.storage.location import Location

    folder, part = ROOT / name, ROOT / f"{name}.part"
    if not folder.exists():
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        entries = read_manifest(f"{base}/s.shards.json")
        made = []
        for number in range(shards):
            entry, url = entries[number % len(entries)], f"{part}/s-{number:06d}.tar"
            for end in ("", ".index"):
                os.link(f"{entry.url}{end}", f"{url}{end}")
            made.append(entry._replace(url=url))
        write_manifest(Location(f"{part}/s.shards.json", sync=False), made)
        part.rename(folder)
    return folder / "s.shards.json"


def samples_set(samples: int) -> Path:
    return make_set(f"samples-{name_of(samples)}", make_base("base", DISTINCT, SHARD), samples // SHARD)


def large_set(samples: int) -> Path:
    """The same in shards of 100,000, as they are made for networks."""
    if samples < LARGE_SHARD:
        return samples_set(samples)
    return make_set(f"large-{name_of(samples)}", make_base("large", DISTINCT, LARGE_SHARD), samples // LARGE_SHARD)


def shards_set(shards: int) -> Path:
    base = make_base("tiny", 2 * SHARDS[-1] // MOST_LINKS, 2)
    return make_set(f"shards-{name_of(shards)}", base, shards)


# Cases.


def run_case(python: str, request: Row, limit: float = LIMIT) -> Row:
    """Return what a case printed; `failed` says why it did not come to its end."""
    process = subprocess.Popen(
        [python, str(CASE)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "no_proxy": "*"},
    )
    try:
        output, errors = process.communicate(json.dumps(request), timeout=limit)
        failed = ""
    except subprocess.TimeoutExpired:
        failed = f"not done in {limit:.0f} s"
    finally:
        for folder in session(process.pid):  # workers that a killed case has left, too
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(folder.name), signal.SIGKILL)
    if failed:
        output, errors = process.communicate()
    elif process.returncode:
        lines = [line for line in errors.splitlines() if "Error" in line] or [f"exit status {process.returncode}"]
        failed = " ".join(lines[-1].split())[:200]
    row: Row = {"failed": failed} if failed else {}
    for line in output.splitlines():
        with contextlib.suppress(ValueError):
            row |= json.loads(line)
    return row


def ours(loader: str, spec: Path | str, part: str, small: Path, *, window: float = WINDOW) -> Row:
    request = {"do": "ours", "loader": loader, "spec": str(spec), "small": str(small)}
    return run_case(sys.executable, request | {"warm": WARM[part], "window": window})


def say(*words: Any) -> None:
    print(*words, file=sys.stderr, flush=True)


def told(row: Row) -> str:
    """Return a case as a line of progress."""
    rate = f"{row['rate']:,.0f}/s" if "rate" in row else "no rate"
    first = f"first batch after {1000 * row['first']:,.0f} ms" if "first" in row else "no batch"
    return f"  {row['loader']}, {name_of(row['size'])}: {row.get('failed') or f'{rate}, {first}'}"


def loaders(part: str, sizes: tuple[int, ...], spec_of: Callable[[int], Path | str]) -> Iterator[Row]:
    """Measure each of our loaders on sets of all sizes."""
    small = samples_set(SAMPLES[0]) if part != "shards" else shards_set(SHARDS[0])
    for size in sizes:
        spec = spec_of(size)
        for loader in LOADERS:
            row = {"part": part, "loader": loader, "size": size, **ours(loader, spec, part, small)}
            say(told(row))
            yield row


def openings(sizes: tuple[int, ...]) -> Iterator[Row]:
    """Measure the first sample of shards that are named in other ways."""
    small = shards_set(SHARDS[0])
    for size in sizes:
        folder = shards_set(size).parent
        specs = {"manifest": folder / "s.shards.json", "braces": f"{folder}/s-{{000000..{size - 1:06d}}}.tar"}
        for words, spec in (specs | {"glob": f"{folder}/s-*.tar"}).items():
            for loader in ("Stream", "Stream, un-indexed"):
                row = ours(loader, spec, "shards", small, window=0)
                yield {"part": "openings", "loader": f"{loader}, {words}", "size": size, **row}
                say(f"  {loader}, {words}, {name_of(size)}: {1000 * row.get('first_cpu', 0):,.0f} ms of CPU")


def python_of(peer: Peer) -> str | None:
    """Return the Python that has a peer: of its environment in the suite, else this one; None if none has."""
    python = ENVIRONMENTS / peer.file / "bin" / "python"
    return str(python) if python.exists() else sys.executable if is_here(peer) else None


def peers(part: str, sizes: tuple[int, ...], spec_of: Callable[[int], Path]) -> Iterator[Row]:
    """Measure the peers: those that read tars on all sizes, others up to what their formats are made of in memory."""
    for peer in all_peers():
        if peer.file not in PEERS or (peer.own and part == "shards"):
            continue
        python, begun = python_of(peer), time.monotonic()
        for size in sizes if python else sizes[:1]:
            if peer.own and size > DISTINCT:
                continue
            row: Row = {"part": part, "loader": peer.name, "size": size, "peer": True}
            if python is None:
                row["failed"] = "no environment has it; `make bench ONLY=suite` makes those of the suite"
            elif peer.own:
                try:
                    made = [prepared(peer, python, each) for each in (size, SAMPLES[0])]
                    row |= foreign(peer, python, part, *made)
                except OSError as error:
                    row["failed"] = str(error)
            else:
                small = spec_of(sizes[0])
                row |= foreign(peer, python, part, plain(size, spec_of(size)), plain(sizes[0], small))
            say(told(row))
            yield row
        say(f"  {peer.name}: {time.monotonic() - begun:.0f} s")


def plain(size: int, manifest: Path) -> Row:
    return {"urls": sorted(map(str, manifest.parent.glob("*.tar"))), "folder": str(manifest.parent), "count": size}


def prepared(peer: Peer, python: str, size: int) -> Row:
    """Make a peer's own format of a set, once; raise OSError if that fails."""
    folder = ROOT / "peers" / peer.file / name_of(size)
    part = folder.with_name(f"{folder.name}.part")
    data = plain(size, samples_set(size))
    if not folder.exists():
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        made = run_case(python, {"do": "write", "peer": peer.file, **data, "folder": str(part)}, 300)
        if "failed" in made:
            raise OSError(f"cannot write its format: {made['failed']}")
        part.rename(folder)
    return data | {"folder": str(folder)}


def foreign(peer: Peer, python: str, part: str, data: Row, small: Row) -> Row:
    request = {"do": "foreign", "peer": peer.file, "small": small, "workers": int(peer.threaded("stream")), **data}
    row = run_case(python, request | {"warm": WARM[part], "window": WINDOW})
    if "rate" in row and row["rate"] * WINDOW < FEWEST:
        del row["rate"]
        row["failed"] = f"fewer than {FEWEST:,} samples in {WINDOW:.0f} s"
    return row


# The tools.


def run_tool(name: str, shards: list[str], out: Path) -> Row:
    """Run a tool; return the CPU seconds of its processes, and the most anonymous memory they had together, in MB."""
    tool, *options = name.split()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    # Pages that were in use just before: a virtual machine may need longer to get others than a tool to fill them.
    for copy in range(2):
        with open(out / f"copy-{copy}", "wb") as file:
            for shard in shards:
                file.write(Path(shard).read_bytes())
    for copy in out.iterdir():
        copy.unlink()
    command = [sys.executable, str(BIN / tool), "-q", *options, *TOOLS[name].format(out=out).split(), *shards]
    with open(out.with_name("errors"), "wb") as errors:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True)
    most, begun = 0.0, time.monotonic()
    while True:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if pid:
            break
        with contextlib.suppress(OSError):
            most = max(most, mebibytes(process.pid))
        if time.monotonic() - begun > 5 * LIMIT:
            os.killpg(process.pid, signal.SIGKILL)
        time.sleep(0.05)
    shutil.rmtree(out)
    if status:
        said = out.with_name("errors").read_text().splitlines() or [f"status {status}"]
        return {"failed": said[-1][:200]}
    return {"cpu": usage.ru_utime + usage.ru_stime, "anonymous": most * 2**20 / 1e6}


def tools(sizes: dict[int, int]) -> list[Row]:
    """Measure the tools, in rounds over all of them."""
    rows = {
        (name, size): {"part": "tools", "loader": name, "size": size, "cpu": []} for name in TOOLS for size in sizes
    }
    for round_ in range(max(sizes.values())):
        for (name, size), row in rows.items():
            if round_ < sizes[size] and "failed" not in row:
                shards = sorted(map(str, samples_set(size).parent.glob("*.tar")))
                done = run_tool(name, shards, ROOT / "out")
                if "failed" in done:
                    row["failed"] = done["failed"]
                else:
                    row["cpu"].append(done["cpu"])
                    row["anonymous"] = max(row.get("anonymous", 0), done["anonymous"])
                say(f"  {name}, {name_of(size)}: {done.get('failed') or format(done['cpu'], '.2f')}")
    return list(rows.values())


# What is written.


def number(value: float | None, form: str = ",.0f") -> str:
    return "" if value is None else format(value, form)


def milliseconds(row: Row, what: str) -> str:
    """Return seconds as "12 (cpu 10)" in ms; ">" where the case was ended before."""
    if what not in row:
        return ""
    return f"{1000 * row[what]:,.0f} ({1000 * row[f'{what}_cpu']:,.0f})"


HEAD = (
    "| | {what} | open, ms (CPU) | first batch, ms (CPU) | samples/s | x {base} | epoch "
    "| read again, samples/s (x {base}) | CPU us/sample | private MB "
    "| a worker MB | mapped MB | index MB |"
)


def table(rows: list[Row], what: str, base: int | str, least: float) -> list[str]:
    """Return the lines of loaders on growing sets, and how many times the rate at size, or of loader, *base* each has.

    What falls short of *least* there, on the largest sets or on more than *base*, is marked.
    """
    rates = {(row["loader"], row["size"]): row["rate"] for row in rows if "rate" in row}
    lines = [HEAD.format(what=what, base=base if isinstance(base, str) else name_of(base)), "|---" * 13 + "|"]
    order = list(dict.fromkeys(row["loader"] for row in rows))
    for row in sorted(rows, key=lambda row: order.index(row["loader"])):
        cells = [row["loader"], name_of(row["size"]), milliseconds(row, "open"), milliseconds(row, "first")]
        if "rate" not in row:
            lines.append(f"| {' | '.join(cells)} | {row['failed']} |" + " |" * 8)
            continue
        beside = rates.get((base, row["size"]) if isinstance(base, str) else (row["loader"], base))
        times = row["rate"] / beside if beside else None
        judged = row["size"] == SHARDS[-1] and row["loader"] in INDEXED if isinstance(base, str) else row["size"] > base
        short = times is not None and times < least and judged and not row.get("peer")
        cells += [number(row["rate"]), ("**short**, " if short else "") + number(times, ".2f"), str(1 + row["epoch"])]
        again = f" ({number(row['again'] / beside if beside else None, '.2f')})" if "again" in row else ""
        cells += [number(row.get("again")) + again]
        cells += [number(1e6 * row["cpu"], ".2f"), number(row["private"])]
        cells += [number(row["worker"] or None), number(max(0, row["shared"]))]
        has_index = not row.get("peer") and ("requests" in row or row["loader"] in INDEXED)
        cells += [number(row["read"] / 1e6 if has_index else None, ",.1f")]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def opening_table(rows: list[Row]) -> list[str]:
    sizes = sorted({row["size"] for row in rows})
    lines = [f"| first sample, ms of CPU | {' | '.join(map(name_of, sizes))} |", "|---" * (len(sizes) + 1) + "|"]
    for loader in dict.fromkeys(row["loader"] for row in rows):
        cells = []
        for row in sorted((row for row in rows if row["loader"] == loader), key=lambda row: row["size"]):
            most = MOST_OPENING.get(loader, {}).get(row["size"])
            taken = 1000 * row["first_cpu"] if "first_cpu" in row else None
            over = taken is not None and most is not None and taken > most
            words = f", at most {most}" if most is not None else ""
            cells.append(("**over**, " if over else "") + (number(taken) or row["failed"]) + words)
        lines.append(f"| {loader} | {' | '.join(cells)} |")
    return [*lines, ""]


def tool_table(rows: list[Row]) -> list[str]:
    sizes = sorted({row["size"] for row in rows})
    heads = [f"{name_of(size)}: CPU s (anonymous MB)" for size in sizes]
    heads += [f"x at {name_of(size)}, at most {MOST_CPU}" for size in sizes[1:]]
    lines = [f"| | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for name in TOOLS:
        found = {row["size"]: row for row in rows if row["loader"] == name}
        cpu = {size: median(row["cpu"]) for size, row in found.items() if row["cpu"] and "failed" not in row}
        cells = [
            f"{cpu[size]:.2f} ({found[size]['anonymous']:.0f})" if size in cpu else found[size].get("failed", "")
            for size in sizes
        ]
        for less, more in pairwise(sizes):
            times = cpu[more] / cpu[less] if {less, more} <= cpu.keys() else None
            cells.append("" if times is None else f"{'**over**, ' if times > MOST_CPU else ''}{times:.1f}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def draw(kept: dict[str, list[Row]]) -> None:
    """Draw rates over samples, and what comes before the first batch over shards, if both were measured.

    Both axes are logarithmic.
    """
    import matplotlib
    from charts import BLUE, GREY, INK, LIGHT, PALE

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = (
        ("samples", "rate", 1, "samples", "samples a second"),
        ("shards", "first", 1000, "shards of 2 samples", "open and first batch, ms"),
    )
    if not all(any(row_key in row for row in kept.get(part, [])) for part, row_key, *_ in panels):
        return
    styles = dict(zip(LOADERS, ((BLUE, "-"), (BLUE, ":"), (LIGHT, "-"), (LIGHT, "--"), (INK, "-"))))
    with pyplot.rc_context({"font.size": 8.5, "font.family": "DejaVu Sans"}):
        figure, grid = pyplot.subplots(1, len(panels), figsize=(10.4, 4), layout="constrained")
        for axes, (part, what, factor, across, up) in zip(grid, panels):
            rows = [row for row in kept.get(part, []) if what in row]
            for loader in dict.fromkeys(row["loader"] for row in rows):
                found = sorted((row["size"], factor * row[what]) for row in rows if row["loader"] == loader)
                colour, line = styles.get(loader, (GREY, "-"))
                axes.plot(*zip(*found), line, color=colour, marker="o", markersize=3, label=loader)
                if loader not in styles:
                    axes.annotate(loader, found[-1], (4, 0), textcoords="offset points", va="center", color=GREY)
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.set_xlabel(across, color=INK)
            axes.set_title(up, loc="left", fontsize=9.5, color=INK)
            axes.grid(color=PALE, linewidth=0.5)
            axes.tick_params(labelcolor=INK, color=PALE)
            for side in axes.spines.values():
                side.set_color(PALE)
        handles, labels = grid[0].get_legend_handles_labels()
        chosen = [(handle, label) for handle, label in zip(handles, labels) if label in styles]
        if chosen:
            grid[0].legend(*zip(*chosen), frameon=False, fontsize=8)
        figure.savefig(PLOT, dpi=110)
        pyplot.close(figure)


ABOUT = [
    f"Samples of {SIZE} B, one member each; sets above {DISTINCT:,} samples, and of 2 samples a shard above "
    f"{SHARDS[-1] // MOST_LINKS:,} shards, are hard links of shards and their indexes. Each case is a process of its "
    "own that has imported all it needs, torch too, and has read a small set. It opens the shards by their manifest; "
    f"the first batch, counted from before the opening, is {BATCH} samples; the rate is that of {WINDOW:.0f} s after "
    f"the end of the first epoch or after {WARM['samples']:.0f} s ({WARM['shards']:.0f} s in the table of shards), "
    "whatever comes first; *epoch* is where that ended. In a first epoch, as of the largest sets, pages are mapped and "
    "headers compared for the first time meanwhile; *read again* is the rate of the same samples after that, as in a "
    "later epoch. Private memory (`Anonymous`) and the mapped memory of all "
    "processes (`Pss_File`, `Pss_Shmem`: shards, indexes, batches) are what was added since the imports; a worker's is "
    "all that it shares with no other process (`Private_Dirty`). Index MB are the bytes that were read by calls, and "
    "the pages of mapped indexes in memory.",
    "",
]


def behind_a_link(sizes: tuple[int, ...]) -> list[Row]:
    """Measure our loaders over the link; the bytes of indexes are those that the server sent."""
    manifests = {size: large_set(size) for size in sizes}
    rows = []
    with Link(1000 * TRIP / 2, RATE) as link, link.serving(ROOT) as site:
        for row in loaders("link", sizes, lambda size: f"{site.url}/{manifests[size].relative_to(ROOT)}"):
            rows.append(row | served(site))
    return rows


def served(site: Site) -> Row:
    sent = [request for request in site.taken() if request.path.endswith(".index")]
    return {"read": sum(request.bytes for request in sent), "requests": len(sent)}


def main(parts: list[str], most: float | None) -> None:
    begun = time.monotonic()
    kept_at = ROOT / "measured.json"
    kept: dict[str, list[Row]] = json.loads(kept_at.read_text()) if kept_at.exists() else {}
    about = [machine("tarshards", "numpy", "torch"), "", *ABOUT]
    samples, shards = (tuple(size for size in sizes if size <= (most or size)) for sizes in (SAMPLES, SHARDS))
    sections: dict[str, list[str]] = {}
    for part in parts:
        say(f"{part}:")
        if part == "samples":
            rows = [*loaders(part, samples, samples_set), *peers(part, samples, samples_set)]
            lines = [f"![growth](plots/{PLOT.name})", "", *table(rows, "samples", min(10**6, samples[-1]), LEAST)]
            sections["Growing numbers of samples"] = [*about, *lines]
        elif part == "shards":
            rows = [*loaders(part, shards, shards_set), *peers(part, shards, shards_set)]
            kept["openings"] = list(openings(shards))
            lines = [*table(rows, "shards", "Stream, un-indexed", LEAST_TINY), *opening_table(kept["openings"])]
            sections["Growing numbers of shards"] = [*about, "Two samples a shard.", "", *lines]
        elif part == "link":
            if missing := [name for name in needs if not programs.is_installed(name)]:
                say(f"not measured, needs {', '.join(missing)}")
                continue
            rows = behind_a_link(samples)
            words = f"{RATE:.0f} MB/s, a round trip of {1000 * TRIP:.0f} ms; shards of {LARGE_SHARD:,} samples from "
            words += f"{LARGE_SHARD:,} on. Index MB are those that the server sent."
            sections["Growing numbers of samples behind a link"] = [
                *about,
                words,
                "",
                *table(rows, "samples", min(10**6, samples[-1]), LEAST),
            ]
        else:
            rows = tools({size: rounds for size, rounds in TOOL_SIZES.items() if size <= (most or size)})
            words = f"Shards of {SHARD:,} samples of {SIZE} B. CPU seconds of all processes of a tool (median of "
            words += f"{min(TOOL_SIZES.values())} or {max(TOOL_SIZES.values())} runs), start-up included."
            sections["Tools on growing sets"] = [machine("click"), "", words, "", *tool_table(rows)]
        kept[part] = rows
        say(f"{part}: {time.monotonic() - begun:.0f} s since the start")
    if most is not None:
        for title, lines in sections.items():
            print("\n".join([f"## {title}", "", *lines, ""]))
        return
    kept_at.write_text(json.dumps(kept))
    for title, lines in sections.items():
        record(title, lines)
    if {"samples", "shards"} & {*parts}:
        draw(kept)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="of these only")
    parser.add_argument("--most", type=float, help="the largest set, in samples or shards; nothing is recorded")
    options = parser.parse_args()
    main(options.parts or list(PARTS), options.most)
