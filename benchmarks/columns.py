"""Benchmark selecting by columns against copying, and against filters that read everything.

A million samples as in CommonPool: 300 bytes of an image, a caption, and a JSON object with a score, width and height.
An epoch reads what `where` selects. The peers are a copy of the selected samples, written first by webdataset's
TarWriter and then read; webdataset's `select`, and Energon's cookers that skip samples, which both read all shards
every epoch. Energon runs where the suite has made its environment, on shards that it has prepared. Each work has a
process of its own, in turn, and begins with a cold cache of pages; bytes are those of the disk.
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
from typing import Any, ClassVar

from measure import DATA, drop_pages, machine, record

FOLDER = DATA / "columns"
SHARDS, EACH = 100, 10_000
WHERE = {  # by the part of samples that it selects
    "1 %": "width >= 256 and height >= 256 and score > 0.9873",
    "10 %": "width >= 256 and height >= 256 and score > 0.873",
    "50 %": "width >= 256 and score > 0.4286",
}
ENERGON = "Energon, skipping"
COLUMNS = "json.width, json.height, json.score"
ROUNDS = 1


def make() -> None:
    from tarshards.formats.naming import rows_batch
    from tarshards.index.manifests import Writing, update_manifests
    from tarshards.index.refresh import refresh_indexes
    from tarshards.samples.payloads import Payloads
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
            columns = {name: Payloads.joined(data) for name, data in fields.items()}
            batch = rows_batch(keys, columns, {}, range(EACH), names[-1])
            for sample in writer.write_batch(batch):
                writer.write(sample)
    found = [outcome.shard for outcome in refresh_indexes(names, jobs=2, how=Writing(sync=False))]
    list(update_manifests(found, f"{FOLDER}/pool.shards.json", how=Writing(sync=False)))


def wanted_by(where: str) -> Callable[[bytes], bool]:
    """Return a condition on the JSON object, written in Python as users of filters do."""
    low, high = (1 if "height" in where else 0), float(where.rpartition(" ")[2])

    def is_wanted(text: bytes) -> bool:
        about = json.loads(text)
        return bool(about["width"] >= 256 and about["height"] >= 256 * low and about["score"] > high)

    return is_wanted


def selected(where: str) -> tuple[float, int]:
    """Return the seconds that selecting takes, and the samples of an epoch."""
    from tarshards import Stream

    dataset = Stream.from_shards(f"{FOLDER}/pool.shards.json", shuffle=True)
    begun = time.perf_counter()
    chosen = dataset.select(where)
    seconds = time.perf_counter() - begun
    return seconds, sum(1 for _ in chosen)


def by_webdataset(where: str) -> Any:
    """Return webdataset's pipeline of the samples that meet a condition."""
    import webdataset as wds

    wanted = wanted_by(where)
    dataset = wds.WebDataset(f"{FOLDER}/pool-{{000..{SHARDS - 1:03d}}}.tar", shardshuffle=False)
    return dataset.select(lambda sample: wanted(sample["json"]))


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


def prepared(_: str) -> tuple[float, int]:
    """Let Energon make its indexes, as `energon prepare` does."""
    from peers import _torchvision  # noqa: F401 - before what imports torchvision
    from megatron.energon.flavors.webdataset.prepare import WebdatasetPreparator  # isort: skip

    names = sorted(path.name for path in FOLDER.glob("*.tar"))
    WebdatasetPreparator.prepare_dataset(
        FOLDER, names, split_parts_ratio=[("train", 1.0)], shuffle_seed=None, workers=2
    )
    (FOLDER / ".nv-meta" / "dataset.yaml").write_text("__module__: megatron.energon\n__class__: CrudeWebdataset\n")
    return 0.0, 0


def skipped(where: str) -> tuple[float, int]:
    """An epoch of Energon whose cooker skips unwanted samples, without worker processes, like the others."""
    from peers import _torchvision  # noqa: F401
    from megatron import energon  # isort: skip

    wanted = wanted_by(where)

    @energon.stateless
    def cook(sample: dict[str, Any]) -> Any:
        if not wanted(sample["json"]):
            raise energon.SkipSample
        return energon.CrudeSample(sample)

    class Encoder(energon.DefaultTaskEncoder):
        cookers: ClassVar = [energon.Cooker(cook)]
        decoder = None

        @energon.stateless
        def batch(self, samples: list[Any]) -> list[Any]:
            return samples

    dataset = energon.get_train_dataset(
        FOLDER,
        split_part="train",
        worker_config=energon.WorkerConfig(rank=0, world_size=1, num_workers=0),
        batch_size=64,
        task_encoder=Encoder(),
        shuffle_buffer_size=1000,
        max_samples_per_sequence=100,
        repeat=False,
    )
    return 0.0, sum(len(batch) for batch in energon.get_loader(dataset))


WORKS: dict[str, Callable[[str], tuple[float, int]]] = {
    "tarshards, columns": selected,
    "webdataset, copied first": copied,
    "webdataset, select": filtered,
    ENERGON: skipped,
}
OTHERS = {"prepare": prepared, **WORKS}


def work(name: str, where: str) -> None:
    """Do a work in this process, and print seconds before and of the epoch, samples and bytes."""
    begun = time.perf_counter()
    before, count = OTHERS[name](where)
    seconds = time.perf_counter() - begun
    files = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    print(json.dumps([before, seconds - before, count, int(files["read_bytes"]), int(files["write_bytes"])]))


def run(name: str, where: str = "") -> list[float]:
    """Run a function in a separate process, and return its output."""
    folder = DATA / "environments" / "energon"
    python = folder / "bin" / "python" if name in (ENERGON, "prepare") else sys.executable
    done = subprocess.run([python, __file__, name, where], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr}")
    return [float(each) for each in json.loads(done.stdout.splitlines()[-1])]


def main() -> None:
    from tarshards import build_columns
    from tarshards.parallel.process_pool import ProcessPool

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
    works = [name for name in WORKS if name != ENERGON or (DATA / "environments" / "energon").exists()]
    if ENERGON in works:
        run("prepare")
    for part, where in WHERE.items():
        if part != "1 %":  # Energon takes about as long whatever is selected: minutes
            works = [name for name in works if name != ENERGON]
        found: dict[str, list[list[float]]] = {name: [] for name in works}
        for _ in range(ROUNDS):
            for name in works:
                drop_pages(FOLDER)
                found[name].append(run(name, where))
        ours = median(before + epoch for before, epoch, *_ in found["tarshards, columns"])
        counts = {int(each[2]) for rounds in found.values() for each in rounds}
        if len(counts) > 1:
            raise SystemExit(f"{where}: {counts} samples")
        for name, rounds in found.items():
            before, epoch, count, read, written = (median(each) for each in zip(*rounds))
            ratio = (before + epoch) / ours
            lines.append(
                f"| {part} | {name} | {before:.2f} | {epoch:.2f} | {count:,.0f} | {ratio:.1f} | {read / 1e6:.0f} | "
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
