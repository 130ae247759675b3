"""Reading shards over a slow network, against curl and other libraries on the same link in the same run.

A link of packets leads into a network namespace, where nginx serves the shards (`tests/rigs`): handshakes, slow start
and retransmission are the kernel's own. Needs root, /dev/net/tun, a C compiler and nginx. Every round of a work has a
process of its own, and begins where the first request is made: after the imports.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import remote_peers
from environments import python_with
from measure import machine, record
from processes import cpu_seconds

from tarshards.epoch.plan import block_size

sys.path.append(str(Path(__file__).parents[1] / "tests"))

import programs
from rigs.slow_link import Link, Site, needs

ROOT, CACHE = remote_peers.ROOT, remote_peers.CACHE
RATE = 80.0  # MB/s of the link
ROUNDS = 3
SETS = {  # shards, samples of a shard, bytes of a sample
    "large": (8, 710, 110 * 1024),
    "small": (4, 13_000, 2048),
    "many": (500, 20, 1000),
}
FEW = 1000  # samples that are read at random
BATCH = 64


def make(name: str) -> None:
    """Generate a set, with indexes and a manifest."""
    from tarshards import ShardWriter

    shards, samples, size = SETS[name]
    folder, part = ROOT / name, ROOT / f"{name}.part"
    if folder.exists():
        return
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    rng = random.Random(name)
    with ShardWriter(f"{part}/s-%03d.tar", max_samples=samples, index=True) as writer:
        for number in range(shards * samples):
            writer.write({"__key__": f"{number:07d}", "bin": rng.randbytes(size), "cls": number % 1000})
    part.rename(folder)


def shards_of(name: str) -> list[str]:
    return [f"{name}/s-{number:03d}.tar" for number in range(SETS[name][0])]


def size_of(name: str) -> int:
    """Return the bytes of a set's shards."""
    return sum((ROOT / shard).stat().st_size for shard in shards_of(name))


# The work of our processes: each function takes the URL of the manifest and options, and yields samples.


def iterated(url: str, remote: Any, *, epoch: int = 0, again: bool = False, **options: Any) -> Iterator[Any]:
    """Yield the samples of an epoch; *again*: not before this process has read the one before."""
    from tarshards import Stream

    stream = Stream.from_shards(url, remote=remote, **options)
    stream.epochs.set(epoch - again)
    for _ in stream if again else ():
        pass
    yield None  # the time is taken from here on
    yield from stream


def batches(url: str, remote: Any, **options: Any) -> Iterator[Any]:
    from tarshards import ArrayLoader, Stream, readers

    stream = Stream.from_shards(url, remote=remote, index=True, **options)
    fields = {"bin": readers.bytes_(), "cls": readers.integer()}
    return (key for batch in ArrayLoader(stream, BATCH, fields=fields) for key in batch["__key__"])


def at_random(url: str, remote: Any) -> Iterator[Any]:
    from tarshards import IndexedShards

    samples = IndexedShards(url, remote=remote)
    yield from samples.__getitems__(random.Random(0).sample(range(len(samples)), FEW))


def first_batch(url: str, remote: Any) -> Iterator[Any]:
    from itertools import islice

    return islice(iterated(url, remote, index=True, shuffle=True), BATCH + 1)


def opened(url: str, remote: Any) -> Iterator[Any]:
    from tarshards import IndexedShards

    return iter([len(IndexedShards(url, remote=remote))])


def sidecars(url: str, remote: Any) -> Iterator[Any]:
    from tarshards import IndexedShards

    return iter(IndexedShards(url, remote=remote).keys)


WORKS: dict[str, Callable[..., Iterator[Any]]] = {
    work.__name__: work for work in (iterated, batches, at_random, first_batch, opened, sidecars)
}


def resident() -> tuple[int, int]:
    """Return the bytes of memory that this process has, and the most it has had since the last reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines if line.startswith(("VmHWM", "VmRSS"))}
    return found["VmRSS"], found["VmHWM"]


def work(name: str, url: str, options: dict[str, Any], remote: dict[str, Any]) -> None:
    """Run one of our functions in this process, and print its cost."""
    from tarshards import ArrayLoader, IndexedShards, Remote, Stream, readers  # noqa: F401
    from tarshards.stream import sources  # noqa: F401

    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    if url.startswith("s3:"):
        import s3fs  # noqa: F401
    before = resident()[0]
    begun, cpu = time.perf_counter(), cpu_seconds()
    samples = WORKS[name](url, Remote(**remote), **options)
    if options.get("again"):
        next(samples)
        begun, cpu = time.perf_counter(), cpu_seconds()
    count = sum(sample is not None for sample in samples)
    seconds = time.perf_counter() - begun
    print(
        json.dumps({"samples": count, "seconds": seconds, "cpu": cpu_seconds() - cpu, "peak": resident()[1] - before})
    )


@dataclass
class Times:
    """The rounds of one work: seconds, CPU seconds, samples, peak bytes; and what the server saw of each round."""

    name: str
    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    peak: list[int] = field(default_factory=list)
    samples: int = 0
    requests: list[int] = field(default_factory=list)
    connections: list[int] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)
    failure: str = ""

    def add(self, taken: dict[str, Any], site: Site | None) -> None:
        self.seconds.append(taken["seconds"])
        self.cpu.append(taken["cpu"])
        self.peak.append(taken.get("peak", 0))
        self.samples = taken.get("samples", 0)
        if site is not None:
            requests = site.taken()
            self.requests.append(len(requests))
            self.connections.append(len({request.connection for request in requests}))
            self.bytes.append(sum(request.bytes for request in requests))


Work = Callable[[], dict[str, Any]]

INTRODUCTION = [
    f"nginx serves the shards over a link of packets of {RATE:.0f} MB/s and a buffer of 4 MB; a round trip takes 50 or "
    "200 ms (`tests/rigs`); both ends, the link and the server share the cores. x is how many times as fast as curl in "
    f"the same round, the median of {ROUNDS} rounds in which the works take turns; every round is a process of its own "
    "and begins after the imports, with no connection. Seconds include opening the dataset. Requests, connections and "
    "bytes are those in the server's log; the peak is of resident memory, above that after the imports, and with "
    "`ahead=64MiB` may be 64 MiB and 100 MB.",
]


def ours(
    name: str, url: str, *, site: Site | None = None, remote: dict[str, Any] | None = None, **options: Any
) -> Work:
    """Return one of our functions, run in a separate process."""

    def run() -> dict[str, Any]:
        request = json.dumps({"name": name, "url": url, "options": options, "remote": remote or {}})
        return measured([sys.executable, __file__, request], site)

    return run


def peer(name: str, site: Site, part: str) -> Work:
    module, environments, _ = remote_peers.PEERS[name]
    python = python_with(module, *environments)

    def run() -> dict[str, Any]:
        if python is None:
            raise OSError(f"no environment has {module}; `make bench ONLY=suite` makes those of the suite")
        program = Path(remote_peers.__file__)
        if name in remote_peers.MAKE:
            made = subprocess.run([python, program, name], capture_output=True, text=True, timeout=300)
            if made.returncode:
                raise OSError(f"cannot write its own format: {' '.join(made.stderr.splitlines()[-1:])}")
        return measured([python, program, name, site.url, *shards_of(part)], None)

    return run


def measured(command: list[str], site: Site | None) -> dict[str, Any]:
    """Run a program that prints what its work took."""
    variables = {**os.environ, "no_proxy": "*", "AWS_EC2_METADATA_DISABLED": "true"}
    variables |= {"SSL_CERT_FILE": str(site.certificate)} if site is not None else {}
    done = subprocess.run(
        command,
        env=variables,
        capture_output=True,
        text=True,
        start_new_session=True,
        timeout=180,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if "Error" in line] or [f"exit status {done.returncode}"]
        raise OSError(said[-1])
    taken: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return taken


def curls(urls: list[str], site: Site) -> Work:
    """Return a download by as many curls."""
    quiet = ["curl", "-sSf", "--cacert", str(site.certificate), "-o", "/dev/null"]
    return lambda: timed(lambda: [subprocess.Popen([*quiet, url]) for url in urls])


def curl_many(wanted: list[tuple[str, str | None]], at_once: int) -> Work:
    """Return a download of many files, or ranges of them, by one curl over connections that it keeps."""
    lines = []
    for url, span in wanted:
        lines += [f'url = "{url}"', 'output = "/dev/null"', *([f"range = {span}"] if span else []), "next"]

    def start() -> list[subprocess.Popen[Any]]:
        with tempfile.NamedTemporaryFile("w", suffix=".curl") as file:
            file.write("\n".join(lines[:-1]))
            file.flush()
            process = subprocess.Popen(
                ["curl", "-sSf", "--no-progress-meter", "-Z", "--parallel-max", str(at_once), "-K", file.name]
            )
            process.wait()
        return [process]

    return lambda: timed(start)


def timed(start: Callable[[], list[subprocess.Popen[Any]]]) -> dict[str, Any]:
    begun, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    statuses = [process.wait() for process in start()]
    if any(statuses):
        raise OSError("curl failed")
    seconds, after = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
    return {"seconds": seconds, "cpu": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime}


def rounds(
    works: dict[str, Work], site: Site | None, count: int = ROUNDS, before: Callable[[], None] = lambda: None
) -> dict[str, Times]:
    """Run every work once a round, each after *before*; one that fails is not tried again."""
    times = {name: Times(name) for name in works}
    for _ in range(count):
        for name, do in works.items():
            if times[name].failure:
                continue
            before()
            if site is not None:
                site.taken()
            try:
                times[name].add(do(), site)
            except (OSError, subprocess.SubprocessError) as error:
                times[name].failure = " ".join(str(error).split()).replace(f"{ROOT.parent}/", "")[:200]
            print(f"  {name}: {times[name].failure or f'{times[name].seconds[-1]:.2f} s'}", file=sys.stderr, flush=True)
    return times


HEAD = [
    "| | x | from .. to | at least | MB/s | CPU s / GB | requests | connections | bytes / data | peak, MB |",
    "|---|---|---|---|---|---|---|---|---|---|",
]


def table(times: dict[str, Times], base: str, data: int, least: dict[str, float], share: float = 1) -> list[str]:
    """Return the rows of works that all read *data* bytes, beside *base*; *share* is how much of them is sent."""
    rows = []
    for name, taken in times.items():
        if taken.failure:
            rows.append(f"| {name} | failed: {taken.failure} |" + " |" * 8)
            continue
        pairs = list(zip(times[base].seconds, taken.seconds))
        ratios = sorted(theirs / mine for theirs, mine in pairs)
        cells = [f"{median(ratios):.2f}", f"{ratios[0]:.2f} .. {ratios[-1]:.2f}", ""]
        if name in least:
            short = "" if median(ratios) >= least[name] else "**short**, "
            cells[2] = f"{short}{least[name]:.2g}"
        cells += [f"{data / 1e6 / median(taken.seconds):.1f}", f"{median(taken.cpu) / data * 1e9:.1f}"]
        cells += [f"{median(each):.0f}" for each in (taken.requests, taken.connections)] if taken.requests else ["", ""]
        cells += [f"{median(taken.bytes) / data:.2f}"] if taken.bytes else [""]
        cells += [f"{max(taken.peak) / 1e6:.0f}"] if any(taken.peak) else [""]
        rows.append(f"| {name} | " + " | ".join(cells) + " |")
    return [*HEAD, *rows, ""]


def forget() -> None:
    shutil.rmtree(CACHE, ignore_errors=True)


@contextmanager
def network(milliseconds: float) -> Iterator[tuple[Link, Site]]:
    print(f"{milliseconds:g} ms", file=sys.stderr)
    with Link(milliseconds / 2, RATE) as link, link.serving(ROOT) as site:
        yield link, site


def large_samples(site: Site, *, tls: bool = False) -> dict[str, Work]:
    base = site.tls_url if tls else site.url
    url = f"{base}/large/s.shards.json"
    return {
        "8 curls": curls([f"{base}/{shard}" for shard in shards_of("large")], site),
        "stream": ours("iterated", url, site=site, index=False),
        "planned, in order": ours("iterated", url, site=site, index=True),
        "planned, shuffled": ours("iterated", url, site=site, index=True, shuffle=True),
    }


def through(site: Site) -> list[str]:
    """110 KB samples at a round trip of 50 ms: all ways to read them, and stores."""
    s3 = {"storage_options": {"anon": True, "client_kwargs": {"endpoint_url": site.url}}}
    works = large_samples(site)
    url = f"{site.url}/large/s.shards.json"
    works |= {
        "ArrayLoader, shuffled": ours("batches", url, shuffle=True),
        "stream, `ahead=64MiB`": ours("iterated", url, index=False, remote={"ahead": 1 << 26}),
        "s3://, stream": ours("iterated", "s3://large/s.shards.json", index=False, remote=s3),
        "s3://, planned, shuffled": ours("iterated", "s3://large/s.shards.json", index=True, shuffle=True, remote=s3),
    }
    times = rounds(works, site, before=forget)
    least = dict.fromkeys(("stream", "planned, in order", "planned, shuffled"), 0.9)
    lines = ["**110 KB samples, 50 ms**", "", *table(times, "8 curls", size_of("large"), least)]
    for name in ("stream", "planned, shuffled"):
        if not times[f"s3://, {name}"].failure and not times[name].failure:
            pairs = zip(times[name].seconds, times[f"s3://, {name}"].seconds)
            lines.append(f"s3:// is {median(http / s3 for http, s3 in pairs):.2f} x http ({name}); at least 0.95.")
    counts = np.full(SETS["large"][0], SETS["large"][1])
    sizes = np.array([(ROOT / shard).stat().st_size for shard in shards_of("large")])
    blocks = int((-(-counts // block_size(counts, sizes))).sum())
    return [*lines, f"The plan has {blocks} blocks; at most 1.05 requests each.", ""]


def farther(site: Site) -> list[str]:
    times = rounds(large_samples(site), site)
    least = dict.fromkeys(("stream", "planned, in order", "planned, shuffled"), 0.85)
    return ["**110 KB samples, 200 ms**", "", *table(times, "8 curls", size_of("large"), least)]


def encrypted(site: Site) -> list[str]:
    works = large_samples(site, tls=True)
    del works["planned, in order"]
    times = rounds(works, site)
    least = dict.fromkeys(("stream", "planned, shuffled"), 0.9)
    return ["**110 KB samples, 50 ms, TLS**", "", *table(times, "8 curls", size_of("large"), least)]


def small_samples(site: Site) -> list[str]:
    url, cached = f"{site.url}/small/s.shards.json", {"ahead": 1 << 26, "cache_dir": str(CACHE / "small")}
    shuffled = {"index": True, "shuffle": True}
    works = {
        "4 curls": curls([f"{site.url}/{shard}" for shard in shards_of("small")], site),
        "stream": ours("iterated", url, index=False),
        "planned, shuffled, `block=256`": ours("iterated", url, **shuffled, block=256),
        "planned, shuffled": ours("iterated", url, **shuffled),
        "`block=256`, `ahead=64MiB`, cache": ours("iterated", url, **shuffled, block=256, remote=cached),
        "`ahead=64MiB`, cache": ours("iterated", url, **shuffled, remote=cached),
    }
    times = rounds(works, site, before=forget)
    least = dict(zip(list(works)[2:], (0.8, 0.5, 0.7, 0.4)))
    return ["**2 KB samples, 50 ms**", "", *table(times, "4 curls", size_of("small"), least)]


def few_samples(site: Site) -> list[str]:
    """1,000 samples at random, against curl over as many connections."""
    from tarshards.index.sidecar import Index

    shards = shards_of("large")
    indexes = [Index.load(f"{ROOT}/{shard}") for shard in shards]
    wanted: list[tuple[str, str | None]] = []
    sent = 0
    for place in random.Random(0).sample(range(sum(map(len, indexes))), FEW):
        shard, number = divmod(place, SETS["large"][1])
        index = indexes[shard]
        first, after = index.first[number], index.first[number + 1]
        begin, end = int(index.offset[first]), int(index.offset[after - 1] + index.size[after - 1])
        wanted.append((f"{site.url}/{shards[shard]}", f"{begin}-{end - 1}"))
        sent += end - begin
    works = {"curl -Z": curl_many(wanted, 32), "IndexedShards": ours("at_random", f"{site.url}/large/s.shards.json")}
    return [
        f"**{FEW:,} of the 110 KB samples at random, 50 ms**",
        "",
        *table(rounds(works, site), "curl -Z", sent, {"IndexedShards": 0.9}),
    ]


def opening(site: Site) -> list[str]:
    """500 shards with a manifest: what is asked to open them, and to load all sidecars."""
    url = f"{site.url}/many/s.shards.json"
    indexes: list[tuple[str, str | None]] = [(f"{site.url}/{shard}.index", None) for shard in shards_of("many")]
    size = sum((ROOT / f"{shard}.index").stat().st_size for shard in shards_of("many"))
    works = {
        "curl -Z, all sidecars": curl_many(indexes, 32),
        "all sidecars": ours("sidecars", url),
        "opened": ours("opened", url),
    }
    times = rounds(works, site)
    lines = ["**500 shards with a manifest, 50 ms**: only the manifest is needed to open them", ""]
    return lines + table(times, "curl -Z, all sidecars", size, {"all sidecars": 1 / 1.2})


def beginning(site: Site, seconds: float) -> list[str]:
    """The first batch, in round trips of *seconds* each."""
    rows = ["| | s | round trips, connecting among them | requests |", "|---|---|---|---|"]
    for name, (shards, _, size) in SETS.items():
        label = f"{shards} shards of {size:,} B samples"
        work = ours("first_batch", f"{site.url}/{name}/s.shards.json")
        times = rounds({label: work}, site)[label]
        taken = median(times.seconds) if times.seconds else float("nan")
        requests = f"{median(times.requests):.0f}" if times.requests else times.failure
        rows.append(f"| {label} | {taken:.2f} | {taken / seconds:.1f} | {requests} |")
    title = (
        f"**First batch of {BATCH} after opening a manifest, {1000 * seconds:.0f} ms**: 4 round trips and connecting"
    )
    return [title, "", *rows, ""]


def later_epochs(site: Site) -> list[str]:
    """A cache that holds all, beside the same shards on this disk; and one that holds a quarter."""
    url, data = f"{site.url}/large/s.shards.json", size_of("large")
    shuffled = {"index": True, "shuffle": True}
    forget()
    whole = {"cache_dir": str(CACHE / "whole")}
    filling = rounds({"first epoch, fills the cache": ours("iterated", url, **shuffled, remote=whole)}, site, 1)
    works = {
        "local shards": ours("iterated", f"{ROOT}/large/s.shards.json", **shuffled, epoch=1, again=True),
        "second epoch, cached": ours("iterated", url, **shuffled, epoch=1, again=True, remote=whole),
        "the same in a new process": ours("iterated", url, **shuffled, epoch=1, remote=whole),
    }
    lines = [
        "**A cache that holds all data**",
        "",
        *table(rounds(works, site), "local shards", data, {"second epoch, cached": 0.8}),
    ]
    lines[-1:] = [row for row in table(filling, next(iter(filling)), data, {}) if row.startswith("| first")] + [""]
    quarter = {"cache_dir": str(CACHE / "quarter"), "cache_bytes": data // 4}
    epochs = {f"epoch {epoch}": ours("iterated", url, **shuffled, epoch=epoch, remote=quarter) for epoch in range(3)}
    times = rounds(epochs, site, 1)
    lines += ["**A cache of a quarter of the data**: bytes sent at most 0.8 x the data from the second epoch on", ""]
    lines += table(times, "epoch 0", data, {})
    forget()
    return lines


def peers(site: Site) -> list[str]:
    lines = []
    for part, base, names in (("large", "8 curls", remote_peers.PEERS), ("small", "4 curls", ["webdataset pipe:curl"])):
        works = {base: curls([f"{site.url}/{shard}" for shard in shards_of(part)], site)}
        works["tarshards, stream"] = ours("iterated", f"{site.url}/{part}/s.shards.json", index=False)
        works["tarshards, planned, shuffled"] = ours(
            "iterated", f"{site.url}/{part}/s.shards.json", index=True, shuffle=True
        )
        works |= {name: peer(name, site, part) for name in names}
        times = rounds(works, site, 1, before=forget)
        lines += [f"**Other libraries, {part} samples, 50 ms, one round**", "", *table(times, base, size_of(part), {})]
    forget()
    return lines


def behind(lines: list[str]) -> list[str]:
    """Return a line that names the rows below their requirements."""
    short, title = [], ""
    for line in lines:
        if line.startswith("**"):
            title = line.strip("*")
        elif "**short**" in line:
            short.append(f"{title}: {line.split('|')[1].strip()} ({line.split('|')[2].strip()})")
    return ["Behind what is required: " + ("; ".join(short) or "nothing") + ".", ""]


def main() -> None:
    missing = [name for name in needs if not programs.is_installed(name)]
    if missing:
        print(f"remote: not measured, needs {', '.join(missing)}")
        return
    for name in SETS:
        make(name)
    lines: list[str] = []
    with network(50) as (_, site):
        for part in (through, encrypted, small_samples, few_samples, opening, later_epochs, peers):
            begun = time.monotonic()
            lines += part(site)
            print(f"{part.__name__}: {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
    with network(200) as (_, site):
        lines += farther(site) + beginning(site, 0.2)
    record("Remote", [machine("tarshards", "numpy"), "", *INTRODUCTION, "", *behind(lines), *lines[:-1]])


if __name__ == "__main__":
    if len(sys.argv) > 1:
        work(**json.loads(sys.argv[1]))
    else:
        main()
