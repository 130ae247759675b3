"""Samples of indexed shards by number, under the names of ``wids``, webdataset's companion for random access."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import Dataset, Sampler

from tarshards.epoch.world import World
from tarshards.samples.keys import is_reserved
from tarshards.storage.manifest import Shard
from tarshards.stream.indexed_shards import IndexedShards
from tarshards.webdataset.autodecode import Decoder


class ShardListDataset(Dataset):
    """The samples of shards that have an index, decoded; their fields have names with a dot, ``sample[".jpg"]``.

    *shards* is a shard expression, such as a manifest, or the entries of one. *transformations* are functions of a
    sample, or an imagespec; None leaves bytes. The options for the *cache* of ``wids`` are accepted and have no effect:
    local shards are mapped, and ``tarshards.Remote`` controls how remote ones are read.
    """

    def __init__(self, shards: Any, *, dataset_name: str | None = None, transformations: Any = "pil", **cache: Any):
        if isinstance(shards, list) and all(isinstance(each, dict) for each in shards):
            shards = [Shard(each["url"], each.get("nsamples"), each.get("filesize")) for each in shards]
        self.shards: IndexedShards = IndexedShards(shards)
        self.dataset_name = dataset_name
        given = transformations if isinstance(transformations, list | tuple) else [transformations]
        self.transformations: list[Decoder | Any | Any] = [
            Decoder([each]) if isinstance(each, str) else each for each in given if each
        ]

    def add_transform(self, transform: Callable[[Any], Any]) -> ShardListDataset:
        """Apply *transform* to every sample, after the others."""
        self.transformations.append(transform)
        return self

    def __len__(self) -> int:
        return len(self.shards)

    def __getitem__(self, index: int) -> Any:
        sample: Any = self.shards[index]
        result: Any = {name if is_reserved(name) else f".{name}": value for name, value in sample.items()}
        result |= {"__dataset__": self.dataset_name, "__index__": index, "__shard__": sample["__url__"]}
        for transform in self.transformations:
            result = transform(result)
        return result


class ChunkedSampler(Sampler):
    """Numbers of samples in chunks of *chunksize*: if *shuffle*, the chunks are permuted, and the samples in each.

    *num_samples* is the number of samples, or their (begin, end). The order depends on *seed* and the epoch, which
    increases with each iteration.
    """

    def __init__(
        self, dataset: Any, *, num_samples: Any = None, chunksize: int = 2000, seed: int = 0, shuffle: bool = True
    ):
        total = len(dataset) if num_samples is None else num_samples
        self.range: range = range(*total) if isinstance(total, tuple) else range(total)
        self.chunksize = chunksize
        self.seed = seed
        self.shuffle = shuffle
        self.epoch: int = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.range)

    def __iter__(self) -> Iterator[int]:
        rng = random.Random(f"{self.seed}/{self.epoch}")
        self.epoch += 1
        starts = range(0, len(self.range), self.chunksize)
        for start in rng.sample(starts, len(starts)) if self.shuffle else starts:
            chunk = self.range[start : start + self.chunksize]
            yield from rng.sample(chunk, len(chunk)) if self.shuffle else chunk


def DistributedChunkedSampler(
    dataset: Any,
    *,
    num_replicas: int | None = None,
    num_samples: int | None = None,
    rank: int | None = None,
    chunksize: int = 1_000_000,
    **options: Any,
) -> ChunkedSampler:
    """Return the sampler of one rank: ranks have parts of equal length, which overlap by a sample at most."""
    world = World.detect()
    if num_replicas is None:
        world.check_announced(0)
    ranks, number = num_replicas or world.world_size, world.rank if rank is None else rank
    total = len(dataset) if num_samples is None else num_samples
    each = -(-total // ranks)
    begin = number * (total - each) // max(1, ranks - 1)
    return ChunkedSampler(dataset, num_samples=(begin, begin + each), chunksize=chunksize, **options)
