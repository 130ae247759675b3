"""The figures that sentences of the README and the docs quote from RESULTS.md. Run as a program, it updates them.

A paragraph or item of a list that ends with `<!--figures:NAME-->` is written here: NAME is that of a function below,
which makes the text from the results and says when they were measured.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

from measure import RESULTS
from results import Results, number
from tables import CHARTS, ROOT

README, DOCS = ROOT / "README.md", ROOT / "docs"
WIDTH = 120
QUOTE = re.compile(
    r"(?:(?<=\n\n)|^(?=- ))(?P<lead>(?:- )?)(?:(?!\n\n|\n- ).)*?<!--figures:(?P<name>\w+)-->$", re.MULTILINE | re.DOTALL
)


def measured(results: Results) -> str:
    """When the tables of docs/benchmarks.md were measured."""
    days = sorted({cells["measured"] for cells in results.summary.values()})
    return f"Measured on {days[0]}." if len(days) == 1 else f"Measured from {days[0]} to {days[-1]}."


def shown(results: Results) -> str:
    """What the two charts of the first page show."""
    days = {results.summary[CHARTS[name][1]]["measured"] for name in ("crop-256", "read-2k")}
    return (
        "Samples per second of each library at its best on two cores, page cache warm; N x: tarshards is N times as "
        f"fast (measured {' and '.join(sorted(days))})."
    )


def tools(results: Results) -> str:
    """How fast the tools are beside Unix's."""
    sizes = re.findall(r"\*\*([\d.]+ [KM]B) samples\*\* \(", results.sections["Index"])
    times = [results.found("Index", rf"\*\*{size} samples\*\* \(.*?The program is ([\d.]+) x") for size in sizes]
    told = ", ".join(f"{float(each):.1f} on samples of {size}" for each, size in zip(times, sizes))
    samples, mebibytes = (
        number(results.found("Index", rf"\*\*2 KB samples\*\* \({pattern}"))
        for pattern in (r"([\d,]+) in one", r"[\d,]+ in one shard of (\d+) MiB")
    )
    rate = number(results.cell("Index", "tarindex, the program", "median", after="**2 KB samples**"))
    command, server = (number(results.cell("Tools", f"tarproc {name}", "x xargs")) for name in ("-c true", "--server"))
    repacked = number(results.cell("Tools", "tarcat", "x tar -xf, tar -cf", after="2 KB samples"))
    return (
        f"`tarindex` indexes a shard of {mebibytes / 1024:.1f} GiB of 2 KB samples in {samples / rate:.2f} s. As a "
        f"multiple of the rate of `tar -t` this is {told}: a shard with few members takes less time than Python needs "
        f"to start (measured {results.date('Index')}). `tarproc -c true` runs at {command:.1f} times the rate of "
        f"`xargs -P`, and at {server:.0f} times that rate with `--server`; `tarcat` is {repacked:.0f} times as fast as "
        f"unpacking and repacking 2 KB samples with GNU tar (measured {results.date('Tools')})."
    )


def dali(results: Results) -> str:
    passed = results.sections["DALI"].partition("without decoding")[2]
    spent = results.found("DALI", r"without decoding.*?time: (\d+) µs `batch_source`")
    ours, plain = (
        number(re.search(rf"^\| {name}[^|]*\| ([~\d,]+)", passed, re.MULTILINE)[1])
        for name in ("`batch_source`", "a plain iterator")
    )
    return (
        "**Feeding** copies nothing: DALI reads the encoded images where they were read to. Without decoding, reading "
        f"and feeding together take {spent} µs of CPU time per image and reach {round(ours, -3):,.0f} images per "
        f"second and process on two cores; a plain iterator over `webdataset` reaches {round(plain, -3):,.0f} "
        f"(measured {results.date('DALI')})."
    )


def nearest(cell: str, digits: int = -2) -> str:
    return f"{round(number(cell), digits):,.0f}"


def decoded(results: Results) -> str:
    """What a GPU decodes, behind our loader and behind DALI's own reader."""
    section, reader = "Images on a GPU", "DALI's `fn.readers.webdataset`"
    ours, few, many, theirs, least = (
        nearest(results.cell(section, f"{row} threads", "images/s"))
        for row in (
            "`dali_loader`, `decoders.image`, 16",
            "`dali_loader`, `decoders.image`, 4",
            f"{reader}, `decoders.image_random_crop`, 16",
            f"{reader}, `decoders.image`, 16",
            f"{reader}, `decoders.image`, 4",
        )
    )
    card = results.found(section, r"NVIDIA (\w+)")
    return (
        f"**Decoding**, nearly always. `num_threads` is the number of DALI's threads, on the CPU one per core. With "
        f'`device="mixed"` the CPU does a part of the work too, so more than the default of 4 help where cores are '
        f"free: on an {card} beside 16 cores, `dali_loader` delivers random crops of JPEGs of 500 x 375 at {few} "
        f"images per second with 4 threads and at {ours} with 16. DALI's own reader reaches {least} and {theirs}, "
        f"and {many} with `image_random_crop`: with many threads it is faster, for it reads without Python (measured "
        f"{results.date(section)})."
    )


def fed(results: Results) -> str:
    """How fast a GPU's pipeline is fed."""
    section = "Feeding a GPU's pipeline"
    ours, hand, theirs = (
        nearest(results.cell(section, row, "images/s"), -3)
        for row in ("`dali_loader`", "`batch_source`", "DALI's `fn.readers.webdataset`")
    )
    kilobytes = results.found(section, r"\((\d+) KB each")
    return (
        f"For JPEGs of {kilobytes} KB and a pipeline on a GPU these are {ours} images per second with `dali_loader`, "
        f"{hand} with `batch_source`, and {theirs} with DALI's own reader, which neither checks images nor counts them "
        f"in a ledger (16 cores, measured {results.date(section)})."
    )


def trained(results: Results) -> str:
    """Which share of its own rate a model reaches."""
    section = "Training a ResNet-50 on a GPU"
    ours, workers, threads = (
        results.cell(section, row, "of the model's own rate")
        for row in ("`dali_loader`, 4 threads", "`ShardLoader`, 16 workers", "`ArrayLoader`, 16 threads")
    )
    rate = nearest(results.cell(section, "one constant batch", "images/s"))
    return (
        f"**The model**, with enough threads. A ResNet-50 in bfloat16 trains on a constant batch at {rate} images per "
        f"second on that GPU. It reaches {ours} of this rate with `dali_loader` (4 threads). With loaders that decode "
        f"on the CPU it reaches less: {workers} with a `ShardLoader` of 16 workers, {threads} with an `ArrayLoader` of "
        f"16 threads (measured {results.date(section)})."
    )


def mapped(results: Results) -> str:
    """What shuffled reading of more shards than stay mapped costs."""
    many, few = "Growing numbers of shards", "Growing numbers of samples"
    opening, reading = (
        number(results.cell(section, f"Stream | {count}", "CPU us/sample"))
        for section, count in ((many, "1e5"), (few, "1e7"))
    )
    return (
        f"The number of shards matters more. A process keeps at most 24,000 shards mapped. Shuffled reading of more "
        f"shards opens one for nearly every sample, which takes {opening:.0f} microseconds of CPU time instead of "
        f"{reading:.0f} (shards of two samples on a local disk, measured {results.date(many)}; on a network file "
        f"system each opening is a round trip). Shards of 100 MB to 1 GB avoid this cost; `tarreshard` makes them."
    )


def grown(results: Results) -> str:
    """What the figure of growing numbers of samples shows."""
    section, column = "Growing numbers of samples", "read again, samples/s (x 1e6)"
    loaders = ("Stream", "ShardLoader, 0 workers", "ShardLoader, 2 workers", "ArrayLoader")
    cells = [results.cell(section, f"{loader} | 1e8", column) for loader in loaders]
    times = sorted(number(cell.partition("(")[2].strip(")")) for cell in cells)
    return (
        f"The figure shows the rates of shuffled samples of 200 B; both axes are logarithmic. The rate at 100 million "
        f"samples is that of the first epoch, which still maps pages and compares headers; later epochs reach "
        f"{times[0]:.2f} to {times[-1]:.2f} of the rate at a million (measured {results.date(section)}). "
        f"[RESULTS.md](../benchmarks/RESULTS.md) has the numbers, with the memory of each process and worker. `make "
        f"bench ONLY=growth` repeats them, and also measures datasets of 10 to 100,000 shards and remote datasets with "
        f"a round trip of 50 ms; `make bench ONLY=growth,shards` runs a part."
    )


def columns(results: Results) -> str:
    section = "Selecting by columns"
    samples = results.found(section, r"Columns of ([\d,]+) samples")
    seconds = number(results.cell(section, "1 % | tarshards, columns", "before the epoch, s"))
    return (
        f"Opening a dataset of {samples} samples and selecting 1 % of them by a condition takes {seconds:.1f} s "
        f"(measured {results.date(section)})."
    )


def viewed(results: Results) -> str:
    """How long tarview takes to show samples."""
    section = "Looking at shards in a browser"

    def times(row: str) -> list[str]:
        columns = ("the address", "first paint", "samples in sight", "the middle")
        return [results.cell(section, row, column).split()[0] for column in columns]

    near, far = (times(f"1e6 samples with images, {where}") for where in ("this disk", "50 ms away"))
    huge = times("1e9 samples of 200 B, this disk")
    return (
        f"With 1,000,000 samples of an image, a class and a text on a local disk, `tarview` prints its address after "
        f"{near[0]} s; then the first paint takes {near[1]} s, the samples in sight are there after {near[2]} s, and "
        f"those in the middle {near[3]} s after a jump. From a web server 50 ms away these are {far[0]}, {far[1]}, "
        f"{far[2]} and {far[3]} s, and with 1,000,000,000 small local samples {huge[0]}, {huge[1]}, {huge[2]} and "
        f"{huge[3]} s (measured on two cores {results.date(section)}, `make bench ONLY=view`)."
    )


def wired(results: Results) -> str:
    """What a process and a host read from a server without a limit, and what a GB takes."""

    def cell(row: str, column: str, protocol: str, processes: str = "1 process") -> str:
        return results.cell("Wire", row, column, after=f"**{processes}, {protocol}**").strip("~")

    def both(row: str, column: str) -> str:
        return f"{cell(row, column, 'http')} ({cell(row, column, 'https')})"

    whole, ranges = "tarshards, `open_url`", "obstore, ranges"
    large, small = (f"tarshards, `Stream`, shuffled, {size} samples" for size in ("110 KB", "2 KB"))
    cores = results.found("Wire", r"read: here \d+ and (\d+)")
    spent = [8 * number(cell(large, "CPU s/GB", protocol)) for protocol in ("http", "https")]
    together = [cell(large, "GB/s", protocol, "16 processes") for protocol in ("http", "https")]
    return (
        f"Over http (over https in parentheses), one process that may use {cores} core{'s' * (cores != '1')} reads "
        f"{both(whole, 'GB/s')} GB/s of whole shards by `open_url`, {both(large, 'GB/s')} GB/s of shuffled samples of "
        f"110 KB, and {both(small, 'GB/s')} of 2 KB. A GB takes {both(whole, 'CPU s/GB')} s of CPU time as bytes, and "
        f"{both(large, 'CPU s/GB')} or {both(small, 'CPU s/GB')} s as these samples; ranges take curl "
        f"{both('curl -Z, ranges', 'CPU s/GB')} s and obstore {both(ranges, 'CPU s/GB')} s. So a host that reads 8 "
        f"GB/s for its GPUs spends {spent[0]:.0f} cores ({spent[1]:.0f}) on receiving large samples. Sixteen processes "
        f"on the same cores together read {together[0]} GB/s ({together[1]}) of them (measured "
        f"{results.date('Wire')})."
    )


QUOTES: dict[str, Callable[[Results], str]] = {
    each.__name__: each
    for each in (measured, shown, tools, dali, decoded, fed, trained, mapped, grown, columns, viewed, wired)
}


def pages() -> Iterator[Path]:
    """Yield the pages that may quote figures."""
    yield README
    yield from sorted(DOCS.rglob("*.md"))


def quoted(text: str, results: Results) -> str:
    """Return a page's text with its quotes updated."""

    def written(found: re.Match[str]) -> str:
        lead, name = found["lead"], found["name"]
        words = f"{QUOTES[name](results)}<!--figures:{name}-->"
        return textwrap.fill(
            words, WIDTH, initial_indent=lead, subsequent_indent=" " * len(lead), break_on_hyphens=False
        )

    return QUOTE.sub(written, text)


def main(page: Path = RESULTS) -> None:
    """Update all quotes of the README and the docs."""
    results = Results(page)
    for path in pages():
        text = path.read_text()
        if (new := quoted(text, results)) != text:
            path.write_text(new)


if __name__ == "__main__":
    main()
