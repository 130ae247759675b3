"""The loaders that a trainer is tried with."""

from __future__ import annotations

from typing import Any

from tarshards import ArrayLoader, ShardDataset, ShardLoader, Stream, readers


def shard_loader(urls: str, size: int, **options: Any) -> ShardLoader:
    return ShardLoader(ShardDataset(urls, shuffle=True, **options).decode(), size)


def with_workers(urls: str, size: int, **options: Any) -> ShardLoader:
    return ShardLoader(ShardDataset(urls, shuffle=True, **options).decode(), size, num_workers=2)


def array_loader(urls: str, size: int, **options: Any) -> ArrayLoader:
    data = Stream.from_shards(urls, shuffle=True, **options)
    return ArrayLoader(data, size, fields={"cls": readers.integer()}, device="cpu")


OURS = [shard_loader, with_workers, array_loader]
