"""Where every member of a shard lies: built from its headers, kept in a sidecar file, exported for others."""

from tarshards.index.build import build_index
from tarshards.index.joining import JoinedShards
from tarshards.index.members import Members
from tarshards.index.shards import IndexedShards, SampleReader, has_index
from tarshards.index.sidecar import MISSING, Index, index_url, load_indexes

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
