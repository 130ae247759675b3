"""Loaders of a small dataset in the folder FEED_DATA, as feeders are given them."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np

from tarshards import ArrayLoader, Ledger, ShardWriter, Stream, mix, readers

COUNTS = [17, 1, 40, 23]  # of the samples of the shards
SIZE = 4
DATA = "FEED_DATA"


def make(folder: str) -> None:
    """Write the dataset to *folder*."""
    rng = np.random.default_rng(0)
    for number, count in enumerate(COUNTS):
        os.mkdir(f"{folder}/{number}")
        with ShardWriter(f"{folder}/{number}/%d.tar", max_samples=count) as writer:
            for i in range(count):
                numbers = rng.integers(0, 1000, 5000, dtype=np.int64)
                sample = {"__key__": f"{number}-{i:03d}", "npy": numbers, "cls": i, "txt": f"text {i} é" * (i % 5)}
                writer.write(sample)


def urls() -> list[str]:
    return [f"{os.environ[DATA]}/{number}/0.tar" for number in range(len(COUNTS))]


def stream(**options: Any) -> Stream:
    return Stream.from_shards(urls(), seed=5, shuffle=True, pool=16, **options)


def add_noise(batch: Any, rng: np.random.Generator) -> Any:
    return {**batch, "noise": rng.integers(1000, size=len(batch["cls"]))}


FIELDS = {"npy": readers.array(), "cls": readers.integer(), "txt": readers.ragged("u1")}
FIELDS["rows:npy"] = readers.ragged("<i8")


def arrays() -> ArrayLoader:
    return ArrayLoader(stream(), SIZE, fields=FIELDS, transforms=[add_noise])


def in_turn() -> ArrayLoader:
    """A loader that reuses its buffers in turn."""
    return ArrayLoader(stream(), SIZE, fields=FIELDS, reuse=True, drop_last=True)


def slowly(batch: Any, rng: np.random.Generator) -> Any:
    time.sleep(0.02)
    return batch


def slow() -> ArrayLoader:
    return ArrayLoader(stream(), SIZE, fields=FIELDS, transforms=[slowly, add_noise])


TRAP: Any = None  # of the tests; what ``spring()`` does happens when sample 5 of a shard is made into a batch


def trapped(batch: Any, rng: np.random.Generator) -> Any:
    if 5 in batch["cls"]:
        TRAP.spring()
    return batch


def trapped_arrays() -> ArrayLoader:
    return ArrayLoader(stream(), SIZE, fields={"cls": readers.integer()}, transforms=[trapped])


def trap_sample(sample: Any) -> Any:
    if sample["cls"] == 5:
        TRAP.spring()
    return sample


def trapped_tensors() -> Any:
    from tarshards import ShardLoader

    return ShardLoader(torch_dataset().decode().map(trap_sample), SIZE)


def kill(batch: Any, rng: np.random.Generator) -> Any:
    if 5 in batch["cls"]:
        os.kill(os.getpid(), signal.SIGKILL)
    return batch


def deadly() -> ArrayLoader:
    return ArrayLoader(stream(), SIZE, fields={"cls": readers.integer()}, transforms=[kill])


LARGE = 4 << 20  # bytes


def grow(batch: Any, rng: np.random.Generator) -> Any:
    return {**batch, "large": np.full(LARGE, rng.integers(256), np.uint8)}


def large() -> ArrayLoader:
    """A loader of large batches; an epoch of them would fill 400 MiB."""
    return ArrayLoader(stream(), SIZE, fields=FIELDS, transforms=[grow], steps=100)


def steps() -> ArrayLoader:
    return ArrayLoader(stream(), SIZE, fields=FIELDS, steps=7)


def no_eights(data: bytes) -> int:
    if int(data) % 8 == 0:
        raise ValueError("an eight")
    return int(data)


def mixture() -> ArrayLoader:
    """A loader of batches that are filled with samples of a part of its datasets."""
    halves = {"a": Stream.from_shards(urls()[:2], seed=1), "b": Stream.from_shards(urls()[2:], seed=2)}
    mixed = mix(halves, until=60, on_error=Ledger(max_errors=100))
    return ArrayLoader(mixed, SIZE, fields=FIELDS | {"cls": no_eights}, fill=True)


def torch_dataset(**options: Any) -> Any:
    from tarshards import ShardDataset

    return ShardDataset(urls(), seed=5, shuffle=True, pool=16, **options)


def odd(sample: Any) -> bool:
    return int(sample["cls"]) % 2 == 1


def no_fives(sample: Any) -> bool:
    return int(sample["cls"]) % 5 > 0


def refuse_sevens(sample: Any) -> Any:
    if sample["cls"] % 7 == 0:
        raise ValueError("a seven")
    return sample


def tensors() -> Any:
    from tarshards import ShardLoader

    return ShardLoader(torch_dataset().filter(odd).decode(), SIZE)


def filled() -> Any:
    from tarshards import ShardLoader

    return ShardLoader(torch_dataset().filter(no_fives).decode(), SIZE, fill=True)


def fields() -> Any:
    from tarshards import ShardLoader

    given = {"npy": readers.array(), "cls": readers.integer()}
    return ShardLoader(torch_dataset(), SIZE, fields=given, transforms=[add_noise])


def failing() -> Any:
    from tarshards import ShardLoader

    return ShardLoader(torch_dataset(on_error=Ledger(max_errors=100)).decode().map(refuse_sevens), SIZE)


def strict() -> Any:
    from tarshards import ShardLoader

    return ShardLoader(torch_dataset().decode().map(refuse_sevens), SIZE)


def objects() -> Any:
    from tarshards import ShardLoader

    return ShardLoader(torch_dataset(), SIZE, collate_fn=lambda samples: {"these": object()})


def encoded() -> ArrayLoader:
    """A loader of photos as they are stored, for a pipeline that decodes them; bad ones are for its ledger."""
    data = Stream.from_shards(f"{os.environ[DATA]}/set-*.tar", seed=3, shuffle=True, on_error=Ledger(max_errors=100))
    return ArrayLoader(data, 8, fields={"jpg": readers.ragged("u1"), "cls": readers.integer()})


def encoded_objects() -> Any:
    """The same as lists of bytes, from a ShardLoader."""
    from tarshards import ShardDataset, ShardLoader

    data = ShardDataset(f"{os.environ[DATA]}/set-*.tar", seed=3, shuffle=True, on_error=Ledger(max_errors=100))
    return ShardLoader(data.decode(only="cls"), 8)


def without_indexes() -> ArrayLoader:
    return ArrayLoader(Stream.from_shards(urls(), index=False), SIZE, fields=FIELDS)
