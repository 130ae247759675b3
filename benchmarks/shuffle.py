"""How well orders mix: classes within the batches of a class-sorted dataset; and what planning a large one takes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from functools import cache
from itertools import islice

import numpy as np
from measure import machine, record
from webdataset import shuffle as webdataset_shuffle

from tarshards.epoch.plan import EpochPlan, block_size

CLASSES, CLASS, SHARD, BATCH = 1000, 1281, 1000, 256
TOTAL = CLASSES * CLASS
COUNTS = np.full(TOTAL // SHARD, SHARD)
SIZES = {"2 KB": 2048, "110 KB": 110 * 1024}
TOPOLOGIES = [(1, 1), (1, 8), (8, 4), (64, 3)]  # ranks, workers
PAGE = 8 * 2**20

Streams = list[list[np.ndarray]]  # the samples that each worker of each rank batches, by number in storage order


def every_rank(order: np.ndarray, ranks: int) -> Streams:
    """Rank r takes every ranks-th sample of one order; its workers make its batches in turn."""
    return [[order[rank::ranks]] for rank in range(ranks)]


@cache
def plan_order(size: int, ranks: int, pool: int) -> np.ndarray:
    block = block_size(COUNTS, COUNTS * size)
    shards, samples = EpochPlan(COUNTS, seed=0, epoch=0, ranks=ranks, unit=block, pool=pool)[:]
    return shards * SHARD + samples


def plan(size: int, ranks: int, workers: int, *, pool: int = 2**18) -> Streams:
    return every_rank(plan_order(size, ranks, pool), ranks)


@cache
def permutation_order() -> np.ndarray:
    return np.random.default_rng(0).permutation(TOTAL)


def permutation(size: int, ranks: int, workers: int) -> Streams:
    return every_rank(permutation_order(), ranks)


def numbers(shards: Iterable[int]) -> Iterable[int]:
    return (shard * SHARD + i for shard in shards for i in range(SHARD))


@cache
def webdataset_streams(ranks: int, workers: int) -> Streams:
    """webdataset's own buffers over sample numbers: shards are split, then shuffled, then their samples."""
    shuffle_shards = webdataset_shuffle(len(COUNTS), initial=len(COUNTS), seed=0)
    streams: Streams = []
    for rank in range(ranks):
        streams.append([])
        for worker in range(workers):
            shards = islice(range(rank, len(COUNTS), ranks), worker, None, workers)
            samples = webdataset_shuffle(1000, seed=0)(numbers(shuffle_shards(shards)))
            streams[-1].append(np.array(list(samples), np.int64))
    return streams


def webdataset(size: int, ranks: int, workers: int) -> Streams:
    return webdataset_streams(ranks, workers)


@cache
def quasi_random_order(size: int) -> np.ndarray:
    """FFCV's rule, from its source: samples come from a random one of 2 x batch open pages, each of them shuffled."""
    rng = random.Random(0)
    page = PAGE // size
    pages = [list(range(first, min(first + page, TOTAL))) for first in range(0, TOTAL, page)]
    rng.shuffle(pages)
    order, current = [], []
    while pages or current:
        while pages and len(current) < 2 * BATCH:
            rng.shuffle(pages[-1])
            current.append(pages.pop())
        chosen = rng.randrange(len(current))
        order.append(current[chosen].pop())
        if not current[chosen]:
            del current[chosen]
    return np.array(order)


def quasi_random(size: int, ranks: int, workers: int) -> Streams:
    return [[part] for part in np.array_split(quasi_random_order(size), ranks)]


ORDERS: dict[str, Callable[[int, int, int], Streams]] = {
    "true permutation": permutation,
    "tarshards": plan,
    "tarshards, `pool=2**20`": lambda *args: plan(*args, pool=2**20),
    "webdataset `shuffle(1000)`": webdataset,
    "FFCV quasi-random": quasi_random,
}


def classes_of_batches(streams: Streams) -> np.ndarray:
    """Return the number of distinct classes in every full batch."""
    whole = [stream[: len(stream) // BATCH * BATCH].reshape(-1, BATCH) for rank in streams for stream in rank]
    classes = np.sort(np.concatenate(whole) // CLASS, axis=1)
    return 1 + (np.diff(classes, axis=1) != 0).sum(axis=1)


def correlation(streams: Streams) -> float:
    """Return Spearman's rank correlation of a rank's delivered order with storage order: the largest of all ranks."""
    largest = 0.0
    for workers in streams:
        batches = [np.array_split(stream, range(BATCH, len(stream), BATCH)) for stream in workers]
        turns = range(max(len(worker) for worker in batches))
        delivered = np.concatenate([worker[turn] for turn in turns for worker in batches if turn < len(worker)])
        largest = max(largest, abs(np.corrcoef(delivered.argsort(), np.arange(len(delivered)))[0, 1]))
    return largest


def main() -> None:
    lines = [
        machine("webdataset", "numpy"),
        "",
        f"{CLASSES:,} classes of {CLASS:,} samples in storage order, {len(COUNTS):,} shards of {SHARD:,} (the shape of "
        f"ImageNet). Distinct classes in the delivered batches of {BATCH}: mean and worst batch; in brackets the rank "
        "correlation of the delivered order with storage order, the largest of all ranks.",
        "",
        "webdataset is its own `shuffle(1000)` over shards that are split over ranks and workers and then permuted as "
        "a whole (`shardshuffle=100` would mix less). FFCV is its rule, reimplemented in Python: pages of 8 MiB in "
        f"random order, each shuffled, every sample from a random one of the {2 * BATCH} in use (4 GiB of memory), "
        "ranks take stretches of that.",
        "",
    ]
    worst = {}
    for name, size in SIZES.items():
        lines += [
            f"**{name} samples** (blocks of {block_size(COUNTS, COUNTS * size)}), ranks x workers:",
            "",
            "| | " + " | ".join(f"{ranks} x {workers}" for ranks, workers in TOPOLOGIES) + " |",
            "|---|" + "---|" * len(TOPOLOGIES),
        ]
        means = {}
        for label, order in ORDERS.items():
            cells = []
            for topology in TOPOLOGIES:
                streams = order(size, *topology)
                classes = classes_of_batches(streams)
                means[label, topology] = classes.mean()
                cells.append(f"{classes.mean():.0f}, {classes.min()} ({correlation(streams):.3f})")
            lines.append(f"| {label} | " + " | ".join(cells) + " |")
        lines.append("")
        for topology in TOPOLOGIES:
            worst[name, topology] = means["tarshards", topology] / means["true permutation", topology]
    few = min(share for (_, (ranks, _)), share in worst.items() if ranks <= 8)
    many = min(share for (_, (ranks, _)), share in worst.items() if ranks > 8)
    lines += [
        f"Batches of tarshards have at least {few:.0%} of the classes in those of a true permutation on up to 8 ranks "
        f"(required: 90%), and {many:.0%} on 64 (required: 60%)."
    ]
    record("Shuffle quality", lines)


if __name__ == "__main__":
    main()
