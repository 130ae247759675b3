"""Benchmark indexing a local shard (also by `tar -t` and tarfile), loading an index, and expanding a manifest."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tarfile
import warnings
from pathlib import Path
from statistics import median

from measure import DATA, interleave, machine, rates, record

from tarshards import write_samples
from tarshards.index.build import build_index
from tarshards.index.manifests import write_manifest
from tarshards.index.sidecar import Index
from tarshards.storage.expressions import Shard, find_shards

SETS = {  # samples, bytes of the larger of two members
    "2 KB": (300_000, 2048),
    "110 KB": (9_500, 110 * 1024),
    "1 MB": (1_000, 1 << 20),
}
SEVERAL = (60_000, 2048)
LINKS = 8
TOOL = [sys.executable, str(Path(__file__).parents[1] / "bin/tarindex"), "-q", "--no-sync"]  # `tar -t` writes nothing


def make_shard(count: int, size: int) -> str:
    path = DATA / f"index-{count}x{size}.tar"
    if not path.exists():
        DATA.mkdir(parents=True, exist_ok=True)
        rng = random.Random(0)
        samples = ({"__key__": f"{i:08d}", "bin": rng.randbytes(size), "cls": i % 1000} for i in range(count))
        write_samples(samples, str(path))
    return str(path)


def tar_list(url: str) -> None:
    with open(os.devnull, "w") as nowhere:
        subprocess.run(["tar", "-tf", url], stdout=nowhere, check=True)


def python_tarfile(url: str) -> None:
    with tarfile.open(url) as tar:
        tar.getmembers()


def tool(url: str) -> None:
    """The whole program, which writes the index."""
    Path(f"{url}.index").unlink(missing_ok=True)
    subprocess.run([*TOOL, "--no-manifest", url], check=True)


def times_as_fast(seconds: dict[str, list[float]]) -> float:
    """Return how many times as fast as `tar -t` the program is (median of the rounds)."""
    ours, theirs = seconds["tarindex, the program"], seconds["tar -t > /dev/null, the program"]
    return median(their / mine for their, mine in zip(theirs, ours))


def headers() -> list[str]:
    lines = []
    for name, (count, size) in SETS.items():
        url = make_shard(count, size)
        assert len(build_index(url)) == count
        works = {
            "tarshards, build_index": lambda url=url: build_index(url),
            "tarindex, the program": lambda url=url: tool(url),
            "tar -t > /dev/null, the program": lambda url=url: tar_list(url),
            "Python tarfile, getmembers": lambda url=url: python_tarfile(url),
        }
        seconds = interleave(works, runs=5)
        lines += [
            f"**{name} samples** ({count:,} in one shard of {os.path.getsize(url) / 2**20:.0f} MiB), samples a second:",
            "",
            "| | median | runs | build_index is faster by |",
            "|---|---|---|---|",
            *rates(seconds, count, "tarshards, build_index"),
            "",
            f"The program is {times_as_fast(seconds):.2f} x `tar -t`.",
            "",
        ]
    return lines


def programs() -> list[str]:
    """Both programs on several shards, which are links to one, so that the page cache holds them."""
    count, size = SEVERAL
    url = make_shard(count, size)
    links = [url.replace(".tar", f"-{i}.tar") for i in range(LINKS)]
    for link in links:
        if not os.path.exists(link):
            os.link(url, link)

    def index(*options: str) -> None:
        for link in links:
            Path(f"{link}.index").unlink(missing_ok=True)
        subprocess.run([*TOOL, *options, "--no-manifest", *links], check=True)

    works = {
        "tarindex -j 0": lambda: index("-j", "0"),
        "tarindex": index,
        "tar -t > /dev/null, one after the other": lambda: [tar_list(link) for link in links],
    }
    return [
        f"**The programs on {LINKS} shards of {count:,} samples of 2 KB**, samples a second:",
        "",
        "| | median | runs | tarindex -j 0 is faster by |",
        "|---|---|---|---|",
        *rates(interleave(works, runs=5), count * LINKS, "tarindex -j 0"),
        "",
    ]


def loading() -> list[str]:
    url = make_shard(1000, 2048)
    build_index(url).save(url)
    manifest = str(DATA / "index-1281.shards.json")
    write_manifest(manifest, [Shard(f"{DATA}/train-{i:06d}.tar", 1000, 112_640_512) for i in range(1281)])
    rounds = 200
    seconds = interleave(
        {
            "check": lambda: [Index.load(url) for _ in range(rounds)],
            "load": lambda: [Index.load(url, check=False) for _ in range(rounds)],
            "expand": lambda: find_shards(manifest),
        }
    )
    check, load, expand = (median(seconds[name]) for name in ("check", "load", "expand"))
    return [
        f"An index of 1,000 samples x 2 members loads in {load / rounds * 1e6:.0f} us, {check / rounds * 1e6:.0f} us "
        f"with the check of its shard. A manifest of 1,281 shards expands in {expand * 1e3:.1f} ms."
    ]


def main() -> None:
    warnings.simplefilter("ignore")
    record("Index", [machine("numpy", "msgpack"), "", *headers(), *programs(), *loading()])


if __name__ == "__main__":
    main()
