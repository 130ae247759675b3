"""Raw iteration over local shards in one process, page cache warm: ours, its pure-Python twin, webdataset, tarfile."""

from __future__ import annotations

import multiprocessing
import os
import random
import re
import tarfile
import warnings
from collections import deque
from functools import partial
from pathlib import Path
from statistics import median

from measure import DATA, interleave, machine, rates, record

from tarshards import ShardWriter

SETS = {"2 KB": (60_000, 2048), "110 KB": (4_000, 110 * 1024)}  # samples, bytes of the larger of two members
SHARDS = 4


def make_shards(name: str) -> str:
    """Write the set's shards once; return their expression."""
    count, size = SETS[name]
    folder = DATA / f"read-{size}"
    if not folder.exists():
        folder.mkdir(parents=True)
        rng = random.Random(0)
        with ShardWriter(f"{folder}/a-{{shard}}.tar", max_samples=count // SHARDS) as writer:
            for i in range(count):
                writer.write({"__key__": f"{i:08d}", "bin": rng.randbytes(size), "cls": i % 1000})
    return f"{folder}/a-{{0..{SHARDS - 1}}}.tar"


def count_of(samples) -> int:
    counter = enumerate(samples, 1)
    return deque(counter, maxlen=1)[0][0]


def ours(urls: str) -> int:
    from tarshards import ShardDataset

    return count_of(ShardDataset(urls))


def twin(urls: str) -> int:
    from tarshards import _tar_py, tar

    native = tar.scan, tar.cut
    tar.scan, tar.cut = _tar_py.scan, _tar_py.cut
    try:
        return ours(urls)
    finally:
        tar.scan, tar.cut = native


def webdataset(urls: str) -> int:
    from webdataset import WebDataset

    return count_of(WebDataset(urls, shardshuffle=False, empty_check=False))


def python_tarfile(urls: str) -> int:
    samples = 0
    for url in sorted(Path(urls).parent.glob("*.tar")):
        with tarfile.open(url) as tar:
            key = None
            sample: dict[str, bytes] = {}
            for member in tar:
                name, _, field = member.name.partition(".")
                if name != key:
                    key, sample = name, {}
                    samples += 1
                sample[field] = tar.extractfile(member).read()
    return samples


WORKS = {"tarshards": ours, "tarshards, pure Python": twin, "webdataset": webdataset, "tarfile": python_tarfile}


def anonymous_kib() -> int:
    return int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def peak_memory(work: str, urls: str) -> float:
    """MiB of anonymous memory that one pass takes above the imports, looked at 100 times or more."""
    from tarshards import ShardDataset, _tar_py, tar

    if work != "tarshards":
        tar.scan, tar.cut = _tar_py.scan, _tar_py.cut
    dataset = iter(ShardDataset(urls))
    before = peak = anonymous_kib()
    for i, _ in enumerate(dataset):
        if i % 40 == 0:
            peak = max(peak, anonymous_kib())
    return (peak - before) / 1024


def main() -> None:
    warnings.simplefilter("ignore")
    lines = [machine("torch", "webdataset"), ""]
    for name, (count, size) in SETS.items():
        urls = make_shards(name)
        for work in WORKS.values():
            assert work(urls) == count
        seconds = interleave({label: partial(work, urls) for label, work in WORKS.items()})
        lines += [
            f"**{name} samples** ({count:,} in {SHARDS} shards; members of {size:,} and 1 to 3 bytes), a second:",
            "",
            "| | median | runs | tarshards is faster by |",
            "|---|---|---|---|",
            *rates(seconds, count, "tarshards"),
            "",
        ]
        twice = [theirs / mine for theirs, mine in zip(seconds["webdataset"], seconds["tarshards, pure Python"])]
        lines += [f"The pure-Python twin is {median(twice):.1f} x webdataset.", ""]
        with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
            peaks = {work: pool.apply(peak_memory, (work, urls)) for work in ("tarshards", "tarshards, pure Python")}
        lines += [
            "Anonymous memory above the imports, at most: " + ", ".join(f"{w} {p:.0f} MiB" for w, p in peaks.items())
        ]
        lines += [""]
    record("Raw iteration", lines[:-1])


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
