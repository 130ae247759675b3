"""Write PROFILE.md: the time of our hot paths by stage, in nanoseconds per sample, and the physical limit of each."""

from __future__ import annotations

from itertools import pairwise
from statistics import median

from checks import make
from hot_paths import Path, batched, handed_over, planned, streamed
from measure import DATA, RESULTS, interleave, machine, record
from sets import data_of

from tarshards.loaders.arrays.readers.arrays import array, ragged
from tarshards.loaders.arrays.readers.images import image
from tarshards.loaders.arrays.readers.parsed import integer

PAGE, ROOT = RESULTS.with_name("PROFILE.md"), DATA / "suite"
RUNS, RUNS_JPEG, THREADS, IMAGES = 31, 21, 2, 64
HOW = (
    "A path is run up to each of its stages in turn, with the functions that it consists of; the time of a stage is "
    "the difference to the stage before. Times are medians of interleaved rounds with a warm page cache, and mappings "
    "and memory as after the first epoch. The limit of a stage is the minimum time for the same work: the bytes "
    "copied or decoded once, in the same order and from known offsets, into reused buffers."
)
OBJECTS = (
    "The bottleneck is Python objects, not bytes: each sample needs a dict, bytes objects and function calls. "
    "The rows of an ArrayLoader avoid them."
)
NAMES = (
    "Half is the copy out of the page cache. The kernel groups the members as it finds them, so that a sample costs "
    "its dict, its bytes objects and its key besides. An index avoids reading the headers again."
)
MEMORY = (
    "The bottleneck is memory: each byte is copied once, at the rate of a memcpy. "
    "Copying less helps: fields=, or smaller members."
)
CALLS = (
    "The copy is as fast as a memcpy; the rest is the plan and the constant overhead of each batch. "
    "Larger batches help."
)
DECODER = "The bottleneck is the decoder. A faster decoder or smaller pictures in the shards would help."
CROP = "The bottleneck is the decoder, followed by resizing. Decoding only the rows and columns of the crop would help."
PROCESSES = (
    "Each byte is copied three times: out of the page cache, into shared memory, and out of it; without workers once. "
    "The stages overlap where there are cores for them; what two workers take beyond half "
    "of their sum is messages, waiting, and memory that was written by another core."
)
RAW = ("raw-2k", "2 KB", 1024, OBJECTS, CALLS), ("raw-110k", "110 KB", 64, MEMORY, MEMORY)


def table(path: Path, samples: int, runs: int) -> list[str]:
    """Return the rows of the stages, with their limits."""
    limits = {name: work for name, (_, work) in path.limits.items()}
    seconds = interleave(path.stages | limits, runs=runs)
    spent = {name: median(times) / samples * 1e9 for name, times in seconds.items()}
    ends = [0.0, *(spent[name] for name in path.stages)]
    rows = ["| | ns per sample | share | limit |", "|---|---|---|---|"]
    for stage, (begin, end) in zip(path.stages, pairwise(ends)):
        beside = "; ".join(f"{name}: {spent[name]:,.0f}" for name, (place, _) in path.limits.items() if place == stage)
        rows.append(f"| {stage} | {max(0, end - begin):,.0f} | {max(0, end - begin) / ends[-1]:.0%} | {beside} |")
    beside = "; ".join(f"{ends[-1] / spent[name]:.1f} x {name}" for name in limits)
    return [*rows, f"| **total** | **{ends[-1]:,.0f}** | | {beside} |"]


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
    for name, words, size, *_ in RAW:
        path = handed_over(data[name], size)
        profile(f"{words} samples from worker processes, batches of {size}, in order", name, path, PROCESSES)
    profile("2 KB samples, streamed without index", "raw-2k", streamed(data["raw-2k"]), NAMES)
    otto = batched(data["otto"], {"x.npy": array(), **numbers}, 1024, shuffled=True)
    profile("Otto, batches of 1024, shuffled", "otto", otto, CALLS)
    whole, crop = image((256, 256)), image(224, crop="random_resized", flip=0.5)
    for words, reader, advice in ("decoded", whole, DECODER), ("random resized crop", crop, CROP):
        path = batched(data["photos256"], {"jpg": reader, **numbers}, IMAGES, shuffled=True, threads=THREADS)
        profile(f"JPEG 256x256, {words}, batches of {IMAGES}, {THREADS} threads", "photos256", path, advice)


if __name__ == "__main__":
    main()
