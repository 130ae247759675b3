"""Benchmark imports of parquet, a Hugging Face dataset and Squirrel's msgpack shards against the formats' own readers.

The readers give every row as Python values; an import also writes shards with their indexes. Both run in one process,
and the import also in two. What an import takes at least is shown by the reader, followed by a copy of finished shards.
"""

from __future__ import annotations

import itertools
import random
import shutil
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
from measure import interleave, machine, rates, record
from squirrel.driver import MessagepackDriver

from tarshards import import_dataset, read_samples
from tarshards.parallel.process_pool import ProcessPool

FILES = 4
SETS = {"2 KB of text-like bytes": (2_000, 20_000), "50 KB of noise, as JPEG": (50_000, 2_000)}  # size, rows


class Inline(Executor):
    """Runs each call in this process."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(function(*args, **options))
        return future


def rows_of(size: int, count: int) -> list[dict[str, Any]]:
    rng = random.Random(0)
    words = [rng.randbytes(50) for _ in range(64)]

    def data() -> bytes:
        return rng.randbytes(size) if size > 10_000 else b"".join(rng.choices(words, k=size // 50))

    return [{"image": data(), "label": number % 10, "text": f"caption {number}"} for number in range(count)]


def count(rows: Iterable[Any]) -> int:
    return sum(1 for _ in rows)


def sources(folder: Path, rows: list[dict[str, Any]]) -> dict[str, tuple[Any, str | None, Callable[[], int]]]:
    """Write *rows* in each format; return for each the import's source, its format, and a reader by its own library."""
    for name in ("parquet", "store"):
        (folder / name).mkdir()
    each = len(rows) // FILES
    driver = MessagepackDriver(str(folder / "store"))
    for number in range(FILES):
        part = rows[number * each : (number + 1) * each]
        pq.write_table(pa.Table.from_pylist(part), folder / f"parquet/{number}.parquet", row_group_size=each // 4)
        driver.store.set(part, key=f"{number:06d}")
    datasets.Dataset.from_list(rows).save_to_disk(folder / "saved")
    saved = datasets.load_from_disk(folder / "saved")

    def read_parquet() -> int:
        files = [pq.ParquetFile(folder / f"parquet/{number}.parquet") for number in range(FILES)]
        return sum(len(batch.to_pylist()) for file in files for batch in file.iter_batches(1024, use_threads=False))

    return {
        "parquet": (str(folder / "parquet/*.parquet"), None, read_parquet),
        "Hugging Face, on disk": (saved, None, lambda: count(saved)),
        "Squirrel's msgpack": (
            str(folder / "store/*.gz"),
            "msgpack",
            lambda: count(driver.get_iter(sorted(driver.keys()), max_workers=0)),
        ),
    }


def compare(title: str, size: int, rows: int, runs: int) -> list[str]:
    """Return the rows of the table for one set."""
    lines = []
    with tempfile.TemporaryDirectory() as name, ProcessPool(2) as pool:
        folder, numbers = Path(name), itertools.count()  # each import writes new files, as imports do
        for kind, (source, form, read) in sources(folder, rows_of(size, rows)).items():

            def run(executor: Executor, source: Any = source, form: str | None = form) -> list[str]:
                options: dict[str, Any] = {"max_bytes": size * rows // FILES, "executor": executor, "sync": False}
                return import_dataset(source, folder / f"out/{next(numbers)}/%03d.tar", format=form, **options)

            made = run(Inline())
            if {count(read_samples(made)), read()} != {rows}:
                raise SystemExit(f"{kind}: not all of {rows} rows were read and imported")

            def read_and_copy(read: Callable[[], int] = read, made: list[str] = made) -> None:
                read()
                target = folder / f"out/{next(numbers)}"
                target.mkdir()
                for shard in made:
                    shutil.copy(shard, target)

            works = {
                "its own reader": read,
                "its own reader, then a copy of the shards": read_and_copy,
                "import": lambda: run(Inline()),
                "import, 2 processes": lambda: run(pool),
            }
            found = rates(interleave(works, runs=runs), rows, "its own reader")
            shutil.rmtree(folder / "out")
            lines += [f"| {title}, {kind}: {row.removeprefix('| ')}" for row in found]
    return lines


def main() -> None:
    datasets.disable_progress_bars()
    lines = [line for title, (size, rows) in SETS.items() for line in compare(title, size, rows, 5)]
    about = machine("pyarrow", "datasets", "squirrel-core")
    head = ["| | rows/s, median of 5 | slowest to fastest | x as long as the reader |", "|---|---|---|---|"]
    record("Imports against the formats' own readers", [about, "", *head, *lines])


if __name__ == "__main__":
    main()
