"""Planned, shuffled iteration over local indexed shards, raw, in one process, beside webdataset and litdata."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path

from measure import DATA, interleave, machine, rates, record
from read import SETS, count_of, make_shards

from tarshards import Stream, read_samples
from tarshards.index import build_index, has_index
from tarshards.urls import expand_urls

# Without what it names besides: torchvision, of which there is none for our torch, is not used for bytes.
LITDATA = "litdata==0.2.76 obstore lightning-utilities boto3 botocore jmespath s3transfer python-dateutil six tifffile"


def install_litdata() -> str:
    """Install litdata into a folder of its own, once; return its version."""
    folder = DATA / "litdata"
    if not folder.exists():
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder)]
        subprocess.run([*command, *LITDATA.split()], check=True)
    sys.path.append(str(folder))
    import litdata

    return str(litdata.__version__)


def optimize(name: str, urls: str) -> Path:
    """Write the set in litdata's format, once."""
    from litdata.streaming.writer import BinaryWriter

    folder = DATA / f"litdata-{SETS[name][1]}"
    if not folder.exists():
        folder.mkdir(parents=True)
        writer = BinaryWriter(str(folder), chunk_bytes="64MB")
        for number, sample in enumerate(read_samples(urls)):
            writer.add_item(number, {"key": sample["__key__"], "bin": sample["bin"], "cls": sample["cls"]})
        writer.done()
        writer.merge(1)
    return folder


def main() -> None:
    warnings.simplefilter("ignore")
    version = install_litdata()
    from litdata import StreamingDataset
    from webdataset import WebDataset

    lines = [machine("torch", "webdataset") + f", litdata {version}", ""]
    for name, (count, size) in SETS.items():
        urls = make_shards(name)
        for url in expand_urls(urls):
            if not has_index([url])[0]:
                build_index(url).save(url)
        ours = Stream.from_shards(urls, shuffle=True)
        with contextlib.redirect_stdout(io.StringIO()):
            shuffled, in_order = (StreamingDataset(str(optimize(name, urls)), shuffle=on) for on in (True, False))
        works = {
            "tarshards, planned": lambda stream=ours: count_of(stream),
            "webdataset, in order": lambda urls=urls: count_of(WebDataset(urls, shardshuffle=False, empty_check=False)),
            "litdata, shuffled, its format": lambda dataset=shuffled: count_of(dataset),
            "litdata, in order, its format (views, no copies)": lambda dataset=in_order: count_of(dataset),
        }
        first = {}
        for label, work in works.items():
            begun = time.perf_counter()
            assert work() == count
            first[label] = count / (time.perf_counter() - begun)
        seconds = interleave(works, runs=9)
        lines += [
            f"**{name} samples** ({count:,}; members of {size:,} and 1 to 3 bytes), a second, after the first epoch:",
            "",
            "| | median | runs | tarshards is faster by |",
            "|---|---|---|---|",
            *rates(seconds, count, "tarshards, planned"),
            "",
            "First epoch: " + ", ".join(f"{label} {rate:,.0f}" for label, rate in first.items()) + ".",
            "",
        ]
    record("Planned iteration", lines[:-1])


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
