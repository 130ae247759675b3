"""Datasets in plain tar shards: streamed into training, piped through Unix tools, nothing lost silently.

Names are loaded when they are first used: ``import tarshards`` imports no torch, numpy, Pillow or fsspec.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tarshards.late import importer

if TYPE_CHECKING:
    from tarshards.array_loader import ArrayLoader
    from tarshards.codecs import decoder, encoder
    from tarshards.dataset_writer import write_dataset
    from tarshards.errors import (
        AuditError,
        DecodeError,
        EncodeError,
        OpenError,
        OpError,
        SampleError,
        ShardIndexError,
        StateError,
        TarError,
        TarshardsError,
        UrlError,
        WorldError,
    )
    from tarshards.index import Index, IndexedShards, build_index
    from tarshards.ledger import Ledger
    from tarshards.mapping import map_shards
    from tarshards.mixing import mix
    from tarshards.mixture import Mixture
    from tarshards.openers import open_shard, open_url
    from tarshards.plan import EpochPlan
    from tarshards.resharding import reshard
    from tarshards.samples import group_members, read_samples
    from tarshards.stream import Stream
    from tarshards.tar import Member, read_members
    from tarshards.torch_data import ShardDataset
    from tarshards.torch_loader import ShardLoader
    from tarshards.urls import expand_urls
    from tarshards.world import World
    from tarshards.writer import ShardWriter, TarWriter, write_samples

__version__ = "0.1.0"

_ROOM_OF = {
    "ArrayLoader": "array_loader",
    "decoder": "codecs",
    "encoder": "codecs",
    "write_dataset": "dataset_writer",
    "AuditError": "errors",
    "DecodeError": "errors",
    "EncodeError": "errors",
    "OpError": "errors",
    "OpenError": "errors",
    "SampleError": "errors",
    "ShardIndexError": "errors",
    "StateError": "errors",
    "TarError": "errors",
    "TarshardsError": "errors",
    "UrlError": "errors",
    "WorldError": "errors",
    "Index": "index",
    "IndexedShards": "index",
    "build_index": "index",
    "Ledger": "ledger",
    "map_shards": "mapping",
    "mix": "mixing",
    "Mixture": "mixture",
    "open_shard": "openers",
    "open_url": "openers",
    "EpochPlan": "plan",
    "reshard": "resharding",
    "group_members": "samples",
    "read_samples": "samples",
    "Stream": "stream",
    "Member": "tar",
    "read_members": "tar",
    "ShardDataset": "torch_data",
    "ShardLoader": "torch_loader",
    "expand_urls": "urls",
    "World": "world",
    "ShardWriter": "writer",
    "TarWriter": "writer",
    "write_samples": "writer",
}

__all__ = [
    "ArrayLoader",
    "AuditError",
    "DecodeError",
    "EncodeError",
    "EpochPlan",
    "Index",
    "IndexedShards",
    "Ledger",
    "Member",
    "Mixture",
    "OpError",
    "OpenError",
    "SampleError",
    "ShardDataset",
    "ShardIndexError",
    "ShardLoader",
    "ShardWriter",
    "StateError",
    "Stream",
    "TarError",
    "TarWriter",
    "TarshardsError",
    "UrlError",
    "World",
    "WorldError",
    "build_index",
    "decoder",
    "encoder",
    "expand_urls",
    "group_members",
    "map_shards",
    "mix",
    "open_shard",
    "open_url",
    "read_members",
    "read_samples",
    "reshard",
    "write_dataset",
    "write_samples",
]

__getattr__ = importer(__name__, _ROOM_OF)


def __dir__() -> list[str]:
    return sorted({*globals(), *_ROOM_OF})
