"""Benchmark selecting by columns against copying, and against filters that read everything.

A million samples as in CommonPool: 300 bytes of an image, a caption, and a JSON object with a score, width and height.
An epoch reads what `where` selects. The peers are a copy of the selected samples, written first by webdataset's
TarWriter and then read, and webdataset's `select`, which reads all shards every epoch. Each work has a process of its
own, in turn, and begins with a cold cache of pages; bytes are those of the disk.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from measure import DATA, drop_pages, machine, record

FOLDER = DATA / "columns"
SHARDS, EACH = 100, 10_000
WHERE = {  # by the part of samples that it selects
    "1 %": "width >= 256 and height >= 256 and score > 0.9873",
    "10 %": "width >= 256 and height >= 256 and score > 0.873",
    "50 %": "width >= 256 and score > 0.4286",
}
COLUMNS = "json.width, json.height, json.score"
ROUNDS = 1


def make() -> None:
    from tarshards.index.manifests import update_manifests
    from tarshards.index.refresh import refresh_indexes
    from tarshards.samples.batch import FieldColumn, SampleBatch
    from tarshards.write.shards import TarWriter

    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    rng, names = random.Random(0), []
    for shard in range(SHARDS):
        names.append(f"{FOLDER}/pool-{shard:03d}.tar")
        keys = [f"{shard:03d}{i:06d}" for i in range(EACH)]
        about = [
            {"score": round(rng.random(), 6), "width": rng.randint(0, 2047), "height": rng.randint(0, 2047)}
            for _ in range(EACH)
        ]
        fields = {
            "jpg": [rng.randbytes(300) for _ in range(EACH)],
            "json": [json.dumps(each).encode() for each in about],
            "txt": [f"a photo of thing {rng.randrange(1000)}".encode() for _ in range(EACH)],
        }
        with TarWriter(names[-1], sync=False) as writer:
            batch = SampleBatch(keys, names[-1], [FieldColumn.of(*field) for field in fields.items()])
            for sample in writer.write_batch(batch):
                writer.write(sample)
    found = [outcome.shard for outcome in refresh_indexes(names, jobs=2, sync=False)]
    list(update_manifests(found, f"{FOLDER}/pool.shards.json", sync=False))


def selected(where: str) -> tuple[float, int]:
    """Return the seconds that selecting takes, and the samples of an epoch."""
    from tarshards import Stream

    dataset = Stream.from_shards(f"{FOLDER}/pool.shards.json", shuffle=True)
    begun = time.perf_counter()
    chosen = dataset.select(where)
    seconds = time.perf_counter() - begun
    return seconds, sum(1 for _ in chosen)


def by_webdataset(where: str) -> Any:
    """Return webdataset's pipeline of the samples that meet a condition, written in Python as its users do."""
    import webdataset as wds

    low, high = (1 if "height" in where else 0), float(where.rpartition(" ")[2])

    def wanted(sample: dict[str, Any]) -> bool:
        about = json.loads(sample["json"])
        return about["width"] >= 256 and about["height"] >= 256 * low and about["score"] > high

    return wds.WebDataset(f"{FOLDER}/pool-{{000..{SHARDS - 1:03d}}}.tar", shardshuffle=False).select(wanted)


def filtered(where: str) -> tuple[float, int]:
    return 0.0, sum(1 for _ in by_webdataset(where))


def copied(where: str) -> tuple[float, int]:
    """Copy what is selected, and read the copy."""
    import webdataset as wds

    folder = FOLDER / "copy"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    begun = time.perf_counter()
    with wds.ShardWriter(f"{folder}/c-%03d.tar", maxcount=EACH, verbose=0) as writer:
        for sample in by_webdataset(where):
            writer.write({name: value for name, value in sample.items() if name == "__key__" or name[:2] != "__"})
    seconds = time.perf_counter() - begun
    urls = sorted(map(str, folder.glob("*.tar")))
    return seconds, sum(1 for _ in wds.WebDataset(urls, shardshuffle=False))


WORKS: dict[str, Callable[[str], tuple[float, int]]] = {
    "tarshards, columns": selected,
    "webdataset, copied first": copied,
    "webdataset, select": filtered,
}


def work(name: str, where: str) -> None:
    """Do a work in this process, and print seconds before and of the epoch, samples and bytes."""
    import webdataset  # noqa: F401

    import tarshards.index.where  # noqa: F401

    begun = time.perf_counter()
    before, count = WORKS[name](where)
    seconds = time.perf_counter() - begun
    files = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    print(json.dumps([before, seconds - before, count, int(files["read_bytes"]), int(files["write_bytes"])]))


def main() -> None:
    from tarshards import build_columns
    from tarshards.parallel import ProcessPool

    make()
    manifest = f"{FOLDER}/pool.shards.json"
    begun = time.perf_counter()
    build_columns(manifest, COLUMNS, sync=False)
    alone = time.perf_counter() - begun
    begun = time.perf_counter()
    with ProcessPool(2) as pool:
        build_columns(manifest, COLUMNS, executor=pool, overwrite=True, sync=False)
    lines = [
        machine("pyarrow", "webdataset"),
        "",
        f"Columns of {SHARDS * EACH:,} samples (`{COLUMNS}`): {alone:.1f} s, with 2 processes "
        f"{time.perf_counter() - begun:.1f} s; "
        f"{sum(path.stat().st_size for path in FOLDER.glob('*.parquet')) / 1e6:.1f} MB beside "
        f"{sum(path.stat().st_size for path in FOLDER.glob('*.tar')) / 1e6:,.0f} MB of shards.",
        "",
        "| selected | | before the epoch, s | epoch, s | samples | x as long as tarshards | read, MB | written, MB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for part, where in WHERE.items():
        found: dict[str, list[list[float]]] = {name: [] for name in WORKS}
        for _ in range(ROUNDS):
            for name in WORKS:
                drop_pages(FOLDER)
                command = [sys.executable, __file__, name, where]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                found[name].append(json.loads(done.stdout))
        ours = median(before + epoch for before, epoch, *_ in found["tarshards, columns"])
        counts = {int(each[2]) for rounds in found.values() for each in rounds}
        if len(counts) > 1:
            raise SystemExit(f"{where}: {counts} samples")
        for name, rounds in found.items():
            before, epoch, count, read, written = (median(each) for each in zip(*rounds))
            ratio = (before + epoch) / ours
            lines.append(
                f"| {part} | {name} | {before:.2f} | {epoch:.2f} | {count:,} | {ratio:.1f} | {read / 1e6:.0f} | "
                f"{written / 1e6:.0f} |"
            )
            print(lines[-1], file=sys.stderr, flush=True)
    shutil.rmtree(FOLDER)
    record("Selecting by columns", lines)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        work(sys.argv[1], sys.argv[2])
    else:
        main()
