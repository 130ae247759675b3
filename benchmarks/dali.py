"""Images through DALI on the processor: our sources beside its own reader and beside a plain iterator."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import webdataset
from measure import DATA, interleave, machine, rates, record
from nvidia.dali import Pipeline, fn
from PIL import Image

from tarshards import ShardDataset, ShardWriter
from tarshards.loaders.dali import batch_source, dali_loader, indexed_source, native_loader, sample_source

SAMPLES, SHARD, BATCH, SIDE, CROP, RUNS = 4000, 500, 64, 256, 256, 7
THREADS = os.cpu_count() or 1

OURS = "`batch_source` in a pipeline by hand"
NATIVE = "`native_loader` (DALI's `fn.readers.webdataset`)"
PLAIN = "a plain iterator over `webdataset.WebDataset`, `external_source(batch=False)`"


def write_photos() -> str:
    """Write crops of scikit-learn's two photographs, and return their expression."""
    from sklearn.datasets import load_sample_images

    folder = DATA / f"dali-{SAMPLES}-{SIDE}"
    urls = f"{folder}/photos-{{0000..{SAMPLES // SHARD - 1:04d}}}.tar"
    if folder.exists():
        return urls
    photos, rng = load_sample_images().images, np.random.default_rng(0)
    part = Path(f"{folder}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    with ShardWriter(f"{part}/photos-{{shard:04d}}.tar", max_samples=SHARD) as writer:
        for number in range(SAMPLES):
            label = number % len(photos)
            top, left = (int(rng.integers(0, side - SIDE + 1)) for side in photos[label].shape[:2])
            stream = BytesIO()
            Image.fromarray(photos[label][top : top + SIDE, left : left + SIDE]).save(stream, "JPEG", quality=90)
            writer.write({"__key__": f"{number:06d}", "jpg": stream.getvalue(), "cls": label})
    part.rename(folder)
    return urls


def decode_and_crop(jpg: Any, cls: Any) -> tuple[Any, Any]:
    return fn.crop(fn.decoders.image(jpg), crop=[CROP, CROP]), cls


def pass_on(jpg: Any, cls: Any) -> tuple[Any, Any]:
    return jpg, cls


def by_hand(graph: Callable[..., Any], source: Any, **options: Any) -> Pipeline:
    """A pipeline as it is written by hand around any source."""
    pipe = Pipeline(batch_size=BATCH, num_threads=THREADS, device_id=None, py_num_workers=1, py_start_method="spawn")
    with pipe:
        jpg, cls, *valid = fn.external_source(source, **options)
        pipe.set_outputs(*graph(jpg, cls), *valid)
    if options.get("parallel"):
        pipe.start_py_workers()
    pipe.build()
    return pipe


def run(pipe: Pipeline, least: int = SAMPLES) -> None:
    """Run an epoch of a pipeline that says itself where it ends."""
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
    """What one writes without knowing more: a sample at a time, by an iterator over Python objects."""

    def __init__(self, samples: Callable[[], Iterator[tuple[bytes, bytes]]]):
        self.samples = samples

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for jpg, cls in self.samples():
            yield np.frombuffer(jpg, np.uint8), np.array(int(cls))


def webdataset_samples(urls: str) -> Callable[[], Iterator[tuple[bytes, bytes]]]:
    def samples() -> Iterator[tuple[bytes, bytes]]:
        yield from webdataset.WebDataset(urls, shardshuffle=False).to_tuple("jpg", "cls")

    return samples


def sources(graph: Callable[..., Any], urls: str) -> dict[str, Callable[[], object]]:
    """An epoch of each source in a pipeline by hand."""
    dataset = ShardDataset(urls, fields="jpg cls", shuffle=True)
    batches, samples = batch_source(dataset, BATCH), sample_source(dataset)
    ours = by_hand(graph, batches, num_outputs=batches.num_outputs)
    single = by_hand(graph, samples, num_outputs=samples.num_outputs, batch=False)
    plain = by_hand(graph, PlainIterator(webdataset_samples(urls)), num_outputs=2, batch=False, cycle="raise")
    whole = SAMPLES // BATCH * BATCH  # the rest of its samples DALI throws away
    return {OURS: lambda: run(ours), "`sample_source`": lambda: run(single), PLAIN: lambda: run(plain, whole)}


def loaders(urls: str) -> dict[str, Callable[[], object]]:
    """An epoch of each loader, and of the source that has a worker process."""
    dataset = ShardDataset(urls, fields="jpg cls", shuffle=True)
    indexed = indexed_source(dataset)
    workers = {"batch": False, "parallel": True, "bytes_per_sample_hint": 1 << 16}
    parallel = by_hand(decode_and_crop, indexed, num_outputs=indexed.num_outputs, **workers)
    options = {"batch_size": BATCH, "device": "cpu", "num_threads": THREADS}
    native = native_loader(urls, decode_and_crop, **options)
    loader = dali_loader(dataset, decode_and_crop, **options)
    return {
        "`dali_loader`": lambda: run_loader(loader),
        NATIVE: lambda: run_loader(native),
        "`indexed_source`, 1 worker process": lambda: run(parallel),
    }


def table(seconds: dict[str, list[float]]) -> list[str]:
    return ["| | images/s | range | ours / this |", "|---|---|---|---|", *rates(seconds, SAMPLES, OURS), ""]


def ratio(seconds: dict[str, list[float]], other: str) -> str:
    """How many times as fast ours is: the median of the rounds."""
    return f"{median(theirs / mine for theirs, mine in zip(seconds[other], seconds[OURS], strict=True)):.2f}"


def processor_time(works: dict[str, Callable[[], object]], names: list[str]) -> str:
    """Say what an image takes of all threads of this process, which other load on the machine hardly changes."""
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(RUNS):
        for name in names:
            begun = time.process_time()
            works[name]()
            times[name].append(time.process_time() - begun)
    return ", ".join(f"{1e6 * median(spent) / SAMPLES:.0f} µs {name}" for name, spent in times.items())


def main() -> None:
    urls = write_photos()
    decoding, passing = sources(decode_and_crop, urls) | loaders(urls), sources(pass_on, urls)
    decoded = interleave(decoding, runs=RUNS)
    passed = interleave(passing, runs=RUNS)
    lines = [
        machine("nvidia-dali-cuda120", "webdataset", "numpy"),
        "",
        f"{SAMPLES:,} JPEGs of {SIDE} x {SIDE}, decoded and cropped to {CROP} x {CROP} on {THREADS} threads "
        f"(`device_id=None`), batches of {BATCH}. Images a second: median, slowest and fastest of {RUNS} runs in turn; "
        "how many times as fast `batch_source` is.",
        "",
        *table(decoded),
        f"`batch_source` has {ratio(decoded, NATIVE)} times the rate of DALI's own reader (0.8 is asked), and "
        f"{ratio(decoded, PLAIN)} times that of a plain iterator (1.3 is asked).",
        "",
        f"Processor time an image, over all threads: {processor_time(decoding, [OURS, NATIVE, PLAIN])}.",
        "",
        "The same without decoding: what DALI could be fed.",
        "",
        *table(passed),
        f"Processor time: {processor_time(passing, [OURS, PLAIN])}.",
        "",
        "Nothing of this has been run on a GPU.",
    ]
    record("DALI", lines)


if __name__ == "__main__":
    main()
