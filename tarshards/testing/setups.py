"""A small dataset, and the setup of a loader over it: a rank, its workers, the size of its batches."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement, product
from pathlib import Path
from typing import Any

#: Names of the entry that contains a sample's number, in the order in which they are tried.
ENTRIES = ("number", "cls", "label", "y", "id", "__key__")


@dataclass(frozen=True)
class Setup:
    """The setup that a loader is made for.

    *shards* are the numbers of samples in the shards; samples are numbered from 0 over all shards. A loader delivers to
    rank *rank* of *ranks* its batches of *batch_size* samples, made by *workers* processes or threads (0: the caller),
    in an order determined by *seed* and the epoch.

    >>> Setup((2, 1)).numbers
    [[0, 1], [2]]
    """

    shards: tuple[int, ...]
    ranks: int = 1
    workers: int = 0
    batch_size: int = 1
    seed: int = 0
    rank: int = 0

    @property
    def numbers(self) -> list[list[int]]:
        """The numbers of the samples of each shard."""
        ends = [sum(self.shards[: i + 1]) for i in range(len(self.shards))]
        return [list(range(end - size, end)) for size, end in zip(self.shards, ends)]

    @property
    def total(self) -> int:
        return sum(self.shards)

    def with_entry(self, name: str, value: int) -> Setup:
        """Return the same setup with one entry replaced."""
        changed: dict[str, Any] = {name: value}
        return replace(self, **changed)

    def __str__(self) -> str:
        return f"ranks={self.ranks} workers={self.workers} batch_size={self.batch_size}"


def small_setups(shards: int = 3, samples: int = 4, ranks: int = 3, workers: int = 3, size: int = 3) -> Iterator[Setup]:
    """Yield every setup with at most these numbers of shards, samples per shard, ranks, workers and samples per batch.

    Of setups that differ only in the order of shards, only the one with the larger shards first is included.
    """
    for count in range(1, shards + 1):
        for sizes in combinations_with_replacement(range(samples, -1, -1), count):
            if sum(sizes):
                for each in product(range(1, ranks + 1), range(workers + 1), range(1, size + 1)):
                    yield Setup(sizes, *each)


def spread(items: list[Any], count: int) -> list[Any]:
    """Return *count* of *items*, evenly spaced.

    >>> spread(list(range(10)), 3)
    [0, 3, 6]
    """
    count = min(count, len(items))
    return [items[i * len(items) // count] for i in range(count)]


def numbers_of(batch: Any) -> list[int]:
    """Return the numbers of the samples in a batch: whole numbers, digits, or arrays and collections of them.

    In a mapping, this is the entry "number", else "cls", "label", "y", "id" or "__key__", else its only entry.

    >>> numbers_of({"__key__": ["000001", "000002"], "jpg": [b"", b""]})
    [1, 2]
    """
    if hasattr(batch, "tolist"):
        batch = batch.tolist()
    if isinstance(batch, bytes):
        batch = batch.decode()
    if isinstance(batch, int) and not isinstance(batch, bool):
        return [batch]
    if isinstance(batch, str) and re.fullmatch(r"\s*\d+\s*", batch):
        return [int(batch)]
    if isinstance(batch, Mapping):
        names = [name for name in ENTRIES if name in batch] or list(batch)
        if len(names) == 1 or names[0] in ENTRIES:
            return numbers_of(batch[names[0]])
    elif isinstance(batch, Iterable) and not isinstance(batch, str):
        return [number for part in batch for number in numbers_of(part)]
    raise TypeError(f"no number of a sample in {batch!r}; pass a function from batches to numbers as read=")


def write_shards(folder: str | Path, shards: Iterable[int], *, index: bool = True) -> list[str]:
    """Write tar shards with these numbers of samples below *folder* unless they exist; return their paths.

    Each sample has its number as key and in the field "cls".
    """
    from tarshards.index.build import build_index
    from tarshards.storage.location import Location
    from tarshards.write.shards import TarWriter

    numbers = Setup(tuple(shards)).numbers
    below = Path(folder) / f"{'-'.join(str(len(each)) for each in numbers)}{'' if index else '-bare'}"
    names = [f"{shard:02d}.tar" for shard in range(len(numbers))]
    if not below.exists():
        Path(folder).mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(dir=folder))
        for name, own in zip(names, numbers):
            url = str(part / name)
            with TarWriter(url, sync=False) as writer:
                for number in own:
                    writer.write({"__key__": f"{number:06d}", "cls": number})
            if index:
                build_index(url).save(Location.of(url, sync=False))
        try:
            part.rename(below)
        except OSError:  # another process has made it first
            shutil.rmtree(part)
    return [str(below / name) for name in names]
