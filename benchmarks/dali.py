"""Images through DALI on the CPU: our sources compared with DALI's own reader and with a plain iterator."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import numpy as np
import webdataset
from measure import DATA, interleave, machine, rates, record
from nvidia.dali import Pipeline, fn
from peers.dali import Loader
from photos import write_photos

from tarshards import ShardDataset, build_index, dali, expand_urls
from tarshards.index.exports import write_dali

SAMPLES, SHARD, BATCH, SIDE, CROP, RUNS = 4000, 500, 64, 256, 256, 7
THREADS = os.cpu_count() or 1

OURS = "`batch_source`"
SINGLE = "`ShardDataset`, sample by sample, `external_source(batch=False)`"
READER = "DALI's `fn.readers.webdataset`"
PLAIN = "a plain iterator over `webdataset.WebDataset`, `external_source(batch=False)`"


def decode_and_crop(jpg: Any, cls: Any) -> tuple[Any, Any]:
    return fn.crop(fn.decoders.image(jpg), crop=[CROP, CROP]), cls


def pass_on(jpg: Any, cls: Any) -> tuple[Any, Any]:
    return jpg, cls


def by_hand(graph: Callable[..., Any], source: Any, **options: Any) -> Pipeline:
    """Build a pipeline around any source."""
    pipe = Pipeline(batch_size=BATCH, num_threads=THREADS, device_id=None)
    with pipe:
        pipe.set_outputs(*graph(*fn.external_source(source, num_outputs=2, **options)))
    pipe.build()
    return pipe


def by_reader(graph: Callable[..., Any], urls: str) -> Loader:
    """Build a pipeline around DALI's own reader, with the indexes that it needs; its items count the images."""
    shards = list(expand_urls(urls))
    indexes = [write_dali(build_index(url), url, None) for url in shards]
    pipe = Pipeline(batch_size=BATCH, num_threads=THREADS, device_id=None)
    with pipe:
        reader = fn.readers.webdataset(paths=shards, index_paths=indexes, ext=["jpg", "cls"], name="shards")
        pipe.set_outputs(*graph(*reader))
    pipe.build()
    return Loader(pipe, (0, 1), lambda count, *outputs: count)


def run(pipe: Pipeline, least: int = SAMPLES) -> None:
    """Run one epoch of a pipeline whose source ends it."""
    count = 0
    while True:
        try:
            images, *_ = pipe.run()
        except StopIteration:
            break
        count += len(images)
    pipe.reset()
    check(count, least)


def check(count: int, least: int = SAMPLES) -> None:
    if count < least:
        raise RuntimeError(f"{count} images instead of {least}")


def run_loader(loader: Any) -> None:
    check(sum(len(batch["cls"]) for batch in loader))


class PlainIterator:
    """The obvious source: an iterator over single samples."""

    def __init__(self, samples: Callable[[], Iterator[tuple[bytes, bytes]]]):
        self.samples = samples

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for jpg, cls in self.samples():
            yield np.frombuffer(jpg, np.uint8), np.array(int(cls))


def our_samples(dataset: ShardDataset) -> Callable[[], Iterator[tuple[bytes, bytes]]]:
    def samples() -> Iterator[tuple[bytes, bytes]]:
        for sample in dataset:
            yield sample["jpg"], sample["cls"]

    return samples


def webdataset_samples(urls: str) -> Callable[[], Iterator[tuple[bytes, bytes]]]:
    def samples() -> Iterator[tuple[bytes, bytes]]:
        yield from webdataset.WebDataset(urls, shardshuffle=False).to_tuple("jpg", "cls")

    return samples


def sources(graph: Callable[..., Any], urls: str) -> dict[str, Callable[[], object]]:
    """One epoch of each source in a pipeline around it."""
    dataset = ShardDataset(urls, fields="jpg cls", shuffle=True)
    ours = by_hand(graph, dali.batch_source(dataset, BATCH), no_copy=True)
    single = by_hand(graph, PlainIterator(our_samples(dataset)), batch=False, cycle="raise")
    plain = by_hand(graph, PlainIterator(webdataset_samples(urls)), batch=False, cycle="raise")
    whole = SAMPLES // BATCH * BATCH  # DALI discards a last batch that is not full
    return {OURS: lambda: run(ours), SINGLE: lambda: run(single, whole), PLAIN: lambda: run(plain, whole)}


def loaders(urls: str) -> dict[str, Callable[[], object]]:
    """One epoch of our loader and of DALI's reader."""
    dataset = ShardDataset(urls, fields="jpg cls", shuffle=True)
    loader = dali.dali_loader(dataset, decode_and_crop, batch_size=BATCH, device="cpu", num_threads=THREADS)
    reader = by_reader(decode_and_crop, urls)
    return {"`dali_loader`": lambda: run_loader(loader), READER: lambda: check(sum(reader))}


def table(seconds: dict[str, list[float]]) -> list[str]:
    return ["| | images/s | range | ours / this |", "|---|---|---|---|", *rates(seconds, SAMPLES, OURS), ""]


def ratio(seconds: dict[str, list[float]], other: str) -> str:
    """Return how many times as fast ours is: the median over the rounds."""
    return f"{median(theirs / mine for theirs, mine in zip(seconds[other], seconds[OURS], strict=True)):.2f}"


def cpu_time(works: dict[str, Callable[[], object]], names: list[str]) -> str:
    """Return the CPU time per image over all threads of this process, which other load hardly changes."""
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(RUNS):
        for name in names:
            begun = time.process_time()
            works[name]()
            times[name].append(time.process_time() - begun)
    return ", ".join(f"{1e6 * median(spent) / SAMPLES:.0f} µs {name}" for name, spent in times.items())


def main() -> None:
    urls = write_photos(DATA / f"dali-{SAMPLES}-{SIDE}", SAMPLES, SHARD, SIDE, SIDE, classes=2)
    decoding, passing = sources(decode_and_crop, urls) | loaders(urls), sources(pass_on, urls)
    decoded = interleave(decoding, runs=RUNS)
    passed = interleave(passing, runs=RUNS)
    lines = [
        machine("nvidia-dali-cuda120", "webdataset", "numpy"),
        "",
        f"{SAMPLES:,} JPEGs of {SIDE} x {SIDE}, decoded and cropped to {CROP} x {CROP} on {THREADS} threads "
        f"(`device_id=None`), batches of {BATCH}. Images per second: median, slowest and fastest of {RUNS} runs, "
        "and how many times as fast `batch_source` is.",
        "",
        *table(decoded),
        f"`batch_source` has {ratio(decoded, READER)} times the rate of DALI's own reader (required: 0.8), and "
        f"{ratio(decoded, PLAIN)} times that of a plain iterator (required: 1.3).",
        "",
        f"CPU time per image, over all threads: {cpu_time(decoding, [OURS, READER, PLAIN])}.",
        "",
        "The same without decoding: the rate at which DALI could be fed.",
        "",
        *table(passed),
        f"CPU time: {cpu_time(passing, [OURS, PLAIN])}.",
    ]
    record("DALI", lines)


if __name__ == "__main__":
    main()
