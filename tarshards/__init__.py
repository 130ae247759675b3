"""Datasets in plain tar shards: streamed into training, piped through Unix tools, nothing lost silently.

The packages, each importing only from those before it: ``storage`` (URLs to bytes), ``tar`` (bytes to members),
``samples`` (members to samples), ``index``, ``epoch``, ``stream``, ``loaders``, ``write``, ``verbs``, ``run``,
``formats``, ``catalog``, ``cli``, ``webdataset``.

Names are loaded at first use: ``import tarshards`` imports no torch, numpy, Pillow or fsspec.
"""

from __future__ import annotations

from importlib import import_module
from sys import modules
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tarshards import webdataset
    from tarshards.catalog import Catalog
    from tarshards.epoch.packing import bucket, pack
    from tarshards.epoch.plan import EpochPlan
    from tarshards.epoch.proportions import Mixture, stepwise
    from tarshards.epoch.world import World
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
    from tarshards.formats.exporting import export_dataset
    from tarshards.formats.importing import import_dataset
    from tarshards.formats.msgpack_shards import read_msgpack, write_msgpack
    from tarshards.index.access import IndexedShards
    from tarshards.index.build import build_index
    from tarshards.index.columns import attach_columns, build_columns
    from tarshards.index.sidecar import Index
    from tarshards.loaders import dali as dali
    from tarshards.loaders.arrays import augment, readers
    from tarshards.loaders.arrays.loader import ArrayLoader
    from tarshards.loaders.torch.dataset import ShardDataset, torch_iterable
    from tarshards.loaders.torch.loader import ShardLoader
    from tarshards.samples.codecs.registry import decoder, encoder
    from tarshards.samples.ledger import Ledger
    from tarshards.samples.member_file import MemberFile
    from tarshards.samples.read import group_members, read_samples
    from tarshards.storage.expressions import expand_urls
    from tarshards.storage.opening import open_shard, open_url
    from tarshards.storage.remote import Remote
    from tarshards.stream import ops
    from tarshards.stream.collate import collate
    from tarshards.stream.mix import mix
    from tarshards.stream.stream import Stream
    from tarshards.tar.read import Member, read_members
    from tarshards.write.dataset import write_dataset
    from tarshards.write.map import map_shards
    from tarshards.write.reshard import reshard
    from tarshards.write.shards import ShardWriter, TarWriter, write_samples

    __all__ = [
        "ArrayLoader",
        "AuditError",
        "Catalog",
        "DecodeError",
        "EncodeError",
        "EpochPlan",
        "Index",
        "IndexedShards",
        "Ledger",
        "Member",
        "MemberFile",
        "Mixture",
        "OpError",
        "OpenError",
        "Remote",
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
        "attach_columns",
        "augment",
        "bucket",
        "build_columns",
        "build_index",
        "collate",
        "decoder",
        "encoder",
        "expand_urls",
        "export_dataset",
        "group_members",
        "import_dataset",
        "map_shards",
        "mix",
        "open_shard",
        "open_url",
        "ops",
        "pack",
        "read_members",
        "read_msgpack",
        "read_samples",
        "readers",
        "reshard",
        "stepwise",
        "torch_iterable",
        "webdataset",
        "write_dataset",
        "write_msgpack",
        "write_samples",
    ]

__version__ = "0.1.0"

#: The modules that are namespaces of their own.
_NAMESPACES = {
    "augment": "loaders.arrays.augment",
    "dali": "loaders.dali",
    "ops": "stream.ops",
    "readers": "loaders.arrays.readers",
    "webdataset": "webdataset",
}
_MODULE_OF = {
    "Catalog": "catalog",
    "bucket": "epoch.packing",
    "pack": "epoch.packing",
    "EpochPlan": "epoch.plan",
    "Mixture": "epoch.proportions",
    "stepwise": "epoch.proportions",
    "World": "epoch.world",
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
    "export_dataset": "formats.exporting",
    "import_dataset": "formats.importing",
    "read_msgpack": "formats.msgpack_shards",
    "write_msgpack": "formats.msgpack_shards",
    "IndexedShards": "index.access",
    "build_index": "index.build",
    "attach_columns": "index.columns",
    "build_columns": "index.columns",
    "Index": "index.sidecar",
    "ArrayLoader": "loaders.arrays.loader",
    "ShardDataset": "loaders.torch.dataset",
    "torch_iterable": "loaders.torch.dataset",
    "ShardLoader": "loaders.torch.loader",
    "decoder": "samples.codecs.registry",
    "encoder": "samples.codecs.registry",
    "Ledger": "samples.ledger",
    "MemberFile": "samples.member_file",
    "group_members": "samples.read",
    "read_samples": "samples.read",
    "expand_urls": "storage.expressions",
    "open_shard": "storage.opening",
    "open_url": "storage.opening",
    "Remote": "storage.remote",
    "collate": "stream.collate",
    "mix": "stream.mix",
    "Stream": "stream.stream",
    "Member": "tar.read",
    "read_members": "tar.read",
    "write_dataset": "write.dataset",
    "map_shards": "write.map",
    "reshard": "write.reshard",
    "ShardWriter": "write.shards",
    "TarWriter": "write.shards",
    "write_samples": "write.shards",
}
#: What some of these names need that may not be installed.
_NEEDED = {"dali": "nvidia.dali"}
_NEEDED |= dict.fromkeys(("ShardDataset", "ShardLoader", "torch_iterable", "webdataset"), "torch")


def __getattr__(name: str) -> Any:
    if name == "__all__":  # what `import *` gives here; dali's name is too common for it
        return [each for each in _found() if each != "dali"]
    if name in _NAMESPACES:
        value: Any = import_module(f"tarshards.{_NAMESPACES[name]}")
    elif name in _MODULE_OF:
        value = getattr(import_module(f"tarshards.{_MODULE_OF[name]}"), name)
    else:
        raise AttributeError(f"module 'tarshards' has no attribute {name!r}", name=name, obj=modules[__name__])
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_found()})


def _found() -> list[str]:
    """The public names, without those whose needs are not installed, so that help() and `import *` work."""
    from importlib.util import find_spec

    def is_there(module: str) -> bool:
        try:
            return find_spec(module) is not None
        except ImportError:  # of the package that it is in
            return False

    there = {module: is_there(module) for module in set(_NEEDED.values())}
    return sorted(name for name in (*_MODULE_OF, *_NAMESPACES) if there.get(_NEEDED.get(name, ""), True))
