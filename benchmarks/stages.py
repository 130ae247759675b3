"""Where the time of our own hot paths goes, in nanoseconds a sample by stage, beside the physical limit: PROFILE.md."""

from __future__ import annotations

from itertools import pairwise
from statistics import median

from hot_paths import Path, batched, planned, streamed
from measure import DATA, RESULTS, interleave, machine, record
from sets import data_of, make

from tarshards.loaders.arrays.readers.arrays import array, ragged
from tarshards.loaders.arrays.readers.images import image
from tarshards.loaders.arrays.readers.parsed import integer

PAGE, ROOT = RESULTS.with_name("PROFILE.md"), DATA / "suite"
RUNS, RUNS_JPEG, THREADS, IMAGES = 31, 21, 2, 64
HOW = (
    "A path is run up to each of its stages in turn, by the functions that it is made of; a stage takes what that is "
    "more than up to the stage before. Medians of interleaved rounds, page cache warm, mappings and memory as after "
    "the first epoch. Beside a stage stands what no program can beat that does the same: the bytes copied once, or "
    "decoded, in the same order and at places known beforehand, into memory that is used again."
)
OBJECTS = (
    "What bounds it is Python's objects, not bytes: a dict and its bytes objects a sample, and the calls between them. "
    "What helps is fewer of them: the rows of an ArrayLoader."
)
NAMES = (
    "What bounds it is Python, not the disk or the headers: each member's name is split, its field put into a dict. "
    "What helps is an index, with which names were split once and for all."
)
MEMORY = (
    "What bounds it is memory: each byte is copied once, at the rate of a memcpy. "
    "What helps is to copy less: fields=, or smaller members."
)
CALLS = (
    "The copy is as fast as a memcpy; the rest is the plan and what each batch takes whatever its size. "
    "What helps is larger batches."
)
DECODER = "What bounds it is the decoder. What helps is a quicker one, or smaller pictures in the shards."
CROP = (
    "What bounds it is the decoder, which makes pixels that the crop leaves out, and after it the resize. "
    "What helps is to decode no more than the rows and columns of the crop."
)
RAW = ("raw-2k", "2 KB", 1024, OBJECTS, CALLS), ("raw-110k", "110 KB", 64, MEMORY, MEMORY)


def table(path: Path, samples: int, runs: int) -> list[str]:
    """Rows of stages, beside their limits."""
    limits = {name: work for name, (_, work) in path.limits.items()}
    seconds = interleave(path.stages | limits, runs=runs)
    spent = {name: median(times) / samples * 1e9 for name, times in seconds.items()}
    ends = [0.0, *(spent[name] for name in path.stages)]
    rows = ["| | ns a sample | of the whole | limit |", "|---|---|---|---|"]
    for stage, (begin, end) in zip(path.stages, pairwise(ends)):
        beside = "; ".join(f"{name}: {spent[name]:,.0f}" for name, (place, _) in path.limits.items() if place == stage)
        rows.append(f"| {stage} | {max(0, end - begin):,.0f} | {max(0, end - begin) / ends[-1]:.0%} | {beside} |")
    beside = "; ".join(f"{ends[-1] / spent[name]:.1f} x {name}" for name in limits)
    return [*rows, f"| **the whole** | **{ends[-1]:,.0f}** | | {beside} |"]


def profile(title: str, name: str, path: Path, advice: str) -> None:
    data, _ = data_of(name, ROOT, "tarshards")
    runs = RUNS_JPEG if data.kind == "jpeg" else RUNS
    record(title, [*table(path, data.count, runs), "", advice], PAGE)


def main() -> None:
    data = {}
    for name in ("raw-2k", "raw-110k", "otto", "photos256"):
        make(name, ROOT)
        data[name], _ = data_of(name, ROOT, "tarshards")
    record("How", [HOW, "", machine("numpy", "simplejpeg")], PAGE)
    numbers = {"cls": integer()}
    for name, words, size, each, rows in RAW:
        for order in "in order", "shuffled":
            shuffled = order == "shuffled"
            profile(f"{words} samples, {order}", name, planned(data[name], shuffled=shuffled), each)
            path = batched(data[name], {"bin": ragged(), **numbers}, size, shuffled=shuffled)
            profile(f"{words} samples as rows, batches of {size}, {order}", name, path, rows)
    profile("2 KB samples, streamed without index", "raw-2k", streamed(data["raw-2k"]), NAMES)
    otto = batched(data["otto"], {"x.npy": array(), **numbers}, 1024, shuffled=True)
    profile("Otto, batches of 1024, shuffled", "otto", otto, CALLS)
    whole, crop = image((256, 256)), image(224, crop="random_resized", flip=0.5)
    for words, reader, advice in ("decoded", whole, DECODER), ("random resized crop", crop, CROP):
        path = batched(data["photos256"], {"jpg": reader, **numbers}, IMAGES, shuffled=True, threads=THREADS)
        profile(f"JPEG 256x256, {words}, batches of {IMAGES}, {THREADS} threads", "photos256", path, advice)


if __name__ == "__main__":
    main()
