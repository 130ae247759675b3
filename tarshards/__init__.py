"""Datasets in plain tar shards: streamed into training, piped through Unix tools, nothing lost silently.

Names are loaded when they are first used: ``import tarshards`` imports no torch, numpy, Pillow or fsspec.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tarshards.codecs import decoder, encoder
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
    from tarshards.ledger import Ledger
    from tarshards.openers import open_shard, open_url
    from tarshards.samples import group_members, read_samples
    from tarshards.stream import Stream
    from tarshards.tar import Member, read_members
    from tarshards.torch_data import ShardDataset
    from tarshards.urls import expand_urls
    from tarshards.world import World
    from tarshards.writer import ShardWriter, TarWriter, write_samples

__version__ = "0.1.0"

_ROOM_OF = {
    "decoder": "codecs",
    "encoder": "codecs",
    "AuditError": "errors",
    "ShardIndexError": "errors",
    "StateError": "errors",
    "DecodeError": "errors",
    "EncodeError": "errors",
    "OpenError": "errors",
    "OpError": "errors",
    "SampleError": "errors",
    "TarError": "errors",
    "TarshardsError": "errors",
    "UrlError": "errors",
    "WorldError": "errors",
    "Ledger": "ledger",
    "open_shard": "openers",
    "open_url": "openers",
    "group_members": "samples",
    "read_samples": "samples",
    "Stream": "stream",
    "Member": "tar",
    "read_members": "tar",
    "ShardDataset": "torch_data",
    "expand_urls": "urls",
    "World": "world",
    "ShardWriter": "writer",
    "TarWriter": "writer",
    "write_samples": "writer",
}

__all__ = [
    "AuditError",
    "DecodeError",
    "EncodeError",
    "Ledger",
    "Member",
    "OpError",
    "OpenError",
    "SampleError",
    "ShardDataset",
    "ShardIndexError",
    "ShardWriter",
    "StateError",
    "Stream",
    "TarError",
    "TarWriter",
    "TarshardsError",
    "UrlError",
    "World",
    "WorldError",
    "decoder",
    "encoder",
    "expand_urls",
    "group_members",
    "open_shard",
    "open_url",
    "read_members",
    "read_samples",
    "write_samples",
]


def __getattr__(name: str) -> Any:
    if name not in _ROOM_OF:
        raise AttributeError(f"module 'tarshards' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"tarshards.{_ROOM_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_ROOM_OF})
