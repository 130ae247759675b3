"""Benchmark finding samples by key: the key index, against a dict of all keys and sqlite3.

The shards have one empty member a sample, so that 10 million samples fit on a disk. A process of its own opens the
dataset and finds 2,000 keys at random, first with a cold cache of pages, then again.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from measure import DATA, drop_pages, machine, record

FOLDER = DATA / "keys"
SIZES = {100_000: 100, 1_000_000: 1000, 10_000_000: 1000}  # samples, and shards
LOOKED_UP = 2_000


def make(total: int) -> Path:
    """Write a set, its indexes and manifest; return the manifest."""
    from tarshards.formats.naming import rows_batch
    from tarshards.index.manifests import Writing, update_manifests
    from tarshards.index.refresh import refresh_indexes
    from tarshards.samples.payloads import Payloads
    from tarshards.write.shards import TarWriter

    folder = FOLDER / str(total)
    manifest = folder / "k.shards.json"
    if manifest.exists():
        return manifest
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    each = total // SIZES[total]
    names = [f"{folder}/k-{number:04d}.tar" for number in range(SIZES[total])]
    for number, name in enumerate(names):
        with TarWriter(name, sync=False) as writer:
            keys = [f"{i:09d}" for i in range(number * each, (number + 1) * each)]
            batch = rows_batch(keys, {"e": Payloads.joined([b""] * each)}, {}, range(each), name)
            for sample in writer.write_batch(batch):
                writer.write(sample)
    found = [outcome.shard for outcome in refresh_indexes(names, jobs=os.cpu_count() or 1, how=Writing(sync=False))]
    list(update_manifests(found, str(manifest), how=Writing(sync=False)))
    return manifest


def peers(manifest: str, total: int) -> dict[str, Callable[[], Callable[[str], int]]]:
    """Return what opens each peer, and gives the function that finds a key."""

    def ours() -> Callable[[str], int]:
        from tarshards import IndexedShards

        return IndexedShards(manifest).find

    def dictionary() -> Callable[[str], int]:
        from tarshards import IndexedShards

        return {key: place for place, key in enumerate(IndexedShards(manifest).keys)}.__getitem__

    def sqlite() -> Callable[[str], int]:
        connection = sqlite3.connect(f"file:{Path(manifest).parent}/keys.sqlite?mode=ro", uri=True)
        return lambda key: connection.execute("select place from keys where key = ?", (key,)).fetchone()[0]

    return {"key index": ours, "dict": dictionary, "sqlite3": sqlite}


def measure(peer: str, manifest: str, total: int) -> None:
    """Find keys in this process, and print seconds and bytes."""
    import tarshards  # noqa: F401

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begun = time.perf_counter()
    find = peers(manifest, total)[peer]()
    numbers = random.Random(0).sample(range(total), LOOKED_UP)
    assert find(f"{numbers[0]:09d}") == numbers[0]
    opened, rounds = time.perf_counter() - begun, []
    for _ in range(2):
        taken = []
        for number in numbers:
            key = f"{number:09d}"
            start = time.perf_counter()
            place = find(key)
            taken.append(time.perf_counter() - start)
            assert place == number
        rounds.append(sorted(taken))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(json.dumps({"opened": opened, "rounds": rounds, "peak": peak << 10}))


def build(manifest: Path) -> tuple[float, float]:
    """Build the key index and sqlite's; return the seconds that each took."""
    from tarshards import IndexedShards
    from tarshards.index.key_index import build_key_index
    from tarshards.index.manifests import read_manifest
    from tarshards.parallel.process_pool import ProcessPool

    begun = time.perf_counter()
    with ProcessPool(os.cpu_count() or 1) as pool:
        build_key_index(read_manifest(str(manifest)), executor=pool, sync=False)
    ours = time.perf_counter() - begun
    path = manifest.parent / "keys.sqlite"
    path.unlink(missing_ok=True)
    keys = IndexedShards(str(manifest)).keys
    begun = time.perf_counter()
    connection = sqlite3.connect(path)
    connection.execute("create table keys (key text primary key, place integer) without rowid")
    connection.executemany("insert into keys values (?, ?)", ((key, place) for place, key in enumerate(keys)))
    connection.commit()
    connection.close()
    return ours, time.perf_counter() - begun


def main() -> None:
    lines = [
        "| samples | | built, s | bytes a key | opened and first key, ms | cold: median, 99 %, us | warm: median, "
        "99 %, us | memory, MB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for total in SIZES:
        manifest = make(total)
        seconds = dict(zip(("key index", "sqlite3"), build(manifest)))
        files = {"key index": manifest.parent / "k.shards.keys", "sqlite3": manifest.parent / "keys.sqlite"}
        for peer in peers(str(manifest), total):
            drop_pages(manifest.parent)
            command = [sys.executable, __file__, peer, str(manifest), str(total)]
            found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
            size = f"{files[peer].stat().st_size / total:.1f}" if peer in files else ""
            built = f"{seconds[peer]:.1f}" if peer in seconds else ""
            cells = [f"{total:,}", peer, built, size, f"{1e3 * found['opened']:.0f}"]
            for taken in found["rounds"]:
                cells.append(f"{1e6 * median(taken):.0f}, {1e6 * taken[99 * len(taken) // 100]:.0f}")
            lines.append(f"| {' | '.join(cells)} | {found['peak'] / 1e6:.0f} |")
            print(lines[-1], file=sys.stderr, flush=True)
        shutil.rmtree(manifest.parent)
    record("Finding samples by key", [machine("numpy"), "", *lines])


if __name__ == "__main__":
    if len(sys.argv) > 1:
        measure(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    else:
        main()
