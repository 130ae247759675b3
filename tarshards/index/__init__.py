"""Where every member of a shard lies: built from its headers, kept in a sidecar file, exported for others.

Names are loaded when they are first used: building and saving an index takes no numpy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tarshards.late import importer

if TYPE_CHECKING:
    from tarshards.index.build import build_index
    from tarshards.index.joining import JoinedShards
    from tarshards.index.members import Members
    from tarshards.index.shards import IndexedShards, SampleReader, has_index
    from tarshards.index.sidecar import MISSING, Index, index_url, load_indexes

_ROOM_OF = {
    "MISSING": "sidecar",
    "Index": "sidecar",
    "IndexedShards": "shards",
    "JoinedShards": "joining",
    "Members": "members",
    "SampleReader": "shards",
    "build_index": "build",
    "has_index": "shards",
    "index_url": "sidecar",
    "load_indexes": "sidecar",
}

__all__ = [
    "MISSING",
    "Index",
    "IndexedShards",
    "JoinedShards",
    "Members",
    "SampleReader",
    "build_index",
    "has_index",
    "index_url",
    "load_indexes",
]

__getattr__ = importer(__name__, _ROOM_OF)
