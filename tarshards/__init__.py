"""Datasets in plain tar shards: streamed into training, piped through Unix tools, with no silent data loss.

The packages, each importing only from those before it: ``storage`` (URLs to bytes), ``tar`` (bytes to members),
``samples`` (members to samples), ``index``, ``epoch``, ``stream``, ``loaders``, ``write``, ``verbs``, ``run``,
``formats``, ``feed``, ``view``, ``engines``, ``testing``, ``cli``, ``webdataset``.

Names are loaded at first use: ``import tarshards`` imports no torch, numpy, Pillow or fsspec.
"""

from __future__ import annotations

from importlib import import_module
from importlib.machinery import ModuleSpec
from sys import meta_path, modules, platform
from types import ModuleType
from typing import TYPE_CHECKING, Any

if platform == "win32":
    raise ImportError("tarshards does not run on Windows; use WSL 2")

if TYPE_CHECKING:  # the same names; a test compares them
    from tarshards import view as view
    from tarshards import webdataset as webdataset
    from tarshards.epoch.packing import bucket as bucket
    from tarshards.epoch.packing import pack as pack
    from tarshards.epoch.plan import EpochPlan as EpochPlan
    from tarshards.epoch.proportions import Mixture as Mixture
    from tarshards.epoch.proportions import stepwise as stepwise
    from tarshards.epoch.world import World as World
    from tarshards.errors import AuditError as AuditError
    from tarshards.errors import DecodeError as DecodeError
    from tarshards.errors import EncodeError as EncodeError
    from tarshards.errors import OpenError as OpenError
    from tarshards.errors import OpError as OpError
    from tarshards.errors import SampleError as SampleError
    from tarshards.errors import ShardIndexError as ShardIndexError
    from tarshards.errors import StateError as StateError
    from tarshards.errors import TarError as TarError
    from tarshards.errors import TarshardsError as TarshardsError
    from tarshards.errors import UrlError as UrlError
    from tarshards.errors import WorldError as WorldError
    from tarshards.feed.remote_loader import RemoteLoader as RemoteLoader
    from tarshards.formats.catalog import Catalog as Catalog
    from tarshards.formats.exporting import export_dataset as export_dataset
    from tarshards.formats.importing import import_dataset as import_dataset
    from tarshards.formats.msgpack_shards import read_msgpack as read_msgpack
    from tarshards.formats.msgpack_shards import write_msgpack as write_msgpack
    from tarshards.formats.row_stream import read_rows as read_rows
    from tarshards.index.build import build_index as build_index
    from tarshards.index.columns import attach_columns as attach_columns
    from tarshards.index.columns import build_columns as build_columns
    from tarshards.index.sidecar import Index as Index
    from tarshards.loaders import dali as dali
    from tarshards.loaders.arrays import augment as augment
    from tarshards.loaders.arrays import readers as readers
    from tarshards.loaders.arrays.array_loader import ArrayLoader as ArrayLoader
    from tarshards.loaders.torch.shard_dataset import ShardDataset as ShardDataset
    from tarshards.loaders.torch.shard_dataset import torch_iterable as torch_iterable
    from tarshards.loaders.torch.shard_loader import ShardLoader as ShardLoader
    from tarshards.samples.codecs.registry import decoder as decoder
    from tarshards.samples.codecs.registry import encoder as encoder
    from tarshards.samples.grouping import group_members as group_members
    from tarshards.samples.grouping import read_samples as read_samples
    from tarshards.samples.ledger import Ledger as Ledger
    from tarshards.samples.member_file import MemberFile as MemberFile
    from tarshards.storage.expressions import expand_urls as expand_urls
    from tarshards.storage.opening import open_shard as open_shard
    from tarshards.storage.opening import open_url as open_url
    from tarshards.storage.remote import Remote as Remote
    from tarshards.stream import ops as ops
    from tarshards.stream.collate import collate as collate
    from tarshards.stream.indexed_shards import IndexedShards as IndexedShards
    from tarshards.stream.mixed import mix as mix
    from tarshards.stream.stream import Stream as Stream
    from tarshards.tar.read import Member as Member
    from tarshards.tar.read import read_members as read_members
    from tarshards.write.dataset import write_dataset as write_dataset
    from tarshards.write.map import map_shards as map_shards
    from tarshards.write.reshard import reshard as reshard
    from tarshards.write.shards import ShardWriter as ShardWriter
    from tarshards.write.shards import TarWriter as TarWriter
    from tarshards.write.shards import write_samples as write_samples

__version__ = "0.2.0"

#: The modules that are public namespaces.
_NAMESPACES = {
    "augment": "loaders.arrays.augment",
    "dali": "loaders.dali",
    "ops": "stream.ops",
    "readers": "loaders.arrays.readers",
    "view": "view",
    "webdataset": "webdataset",
}
#: The other names, by their modules.
_MODULES = {
    "epoch.packing": "bucket pack",
    "epoch.plan": "EpochPlan",
    "epoch.proportions": "Mixture stepwise",
    "epoch.world": "World",
    "errors": (
        "AuditError DecodeError EncodeError OpenError OpError SampleError ShardIndexError StateError TarError "
        "TarshardsError UrlError WorldError"
    ),
    "formats.catalog": "Catalog",
    "formats.exporting": "export_dataset",
    "formats.importing": "import_dataset",
    "formats.msgpack_shards": "read_msgpack write_msgpack",
    "formats.row_stream": "read_rows",
    "index.build": "build_index",
    "index.columns": "attach_columns build_columns",
    "index.sidecar": "Index",
    "feed.remote_loader": "RemoteLoader",
    "loaders.arrays.array_loader": "ArrayLoader",
    "loaders.torch.shard_dataset": "ShardDataset torch_iterable",
    "loaders.torch.shard_loader": "ShardLoader",
    "samples.codecs.registry": "decoder encoder",
    "samples.ledger": "Ledger",
    "samples.member_file": "MemberFile",
    "samples.grouping": "group_members read_samples",
    "storage.expressions": "expand_urls",
    "storage.opening": "open_shard open_url",
    "storage.remote": "Remote",
    "stream.collate": "collate",
    "stream.indexed_shards": "IndexedShards",
    "stream.mixed": "mix",
    "stream.stream": "Stream",
    "tar.read": "Member read_members",
    "write.dataset": "write_dataset",
    "write.map": "map_shards",
    "write.reshard": "reshard",
    "write.shards": "ShardWriter TarWriter write_samples",
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}
#: Optional packages that some of these names need.
_NEEDED = {"dali": "nvidia.dali"}
_NEEDED |= dict.fromkeys(("ShardDataset", "ShardLoader", "torch_iterable", "webdataset"), "torch")


def __getattr__(name: str) -> Any:
    if name == "__all__":  # the names for `import *`; these two are also those of other packages
        return [each for each in _found() if each not in ("dali", "webdataset")]
    if name in _NAMESPACES:
        value: Any = import_module(f"tarshards.{_NAMESPACES[name]}")
    elif name in _MODULE_OF:
        value = getattr(import_module(f"tarshards.{_MODULE_OF[name]}"), name)
    else:
        from tarshards.stream.other_names import not_here

        words = f"module 'tarshards' has no attribute {name!r}{not_here(__name__, name)}"
        raise AttributeError(words, name=name, obj=modules[__name__])
    globals()[name] = value
    return value


class _Namespaces:
    """Imports the namespaces by their names, as ``import tarshards.readers``; names of other libraries are errors."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        package, _, last = name.rpartition(".")
        if package == __name__ and last in _NAMESPACES:
            return ModuleSpec(name, self)  # type: ignore[arg-type]
        if package in (__name__, f"{__name__}.webdataset"):
            from tarshards.stream.other_names import not_here

            if instead := not_here(package, last):
                raise ImportError(f"{package} has no {last}{instead}", name=name)
        return None

    def create_module(self, spec: ModuleSpec) -> None:
        """Have an empty module made, which ``exec_module`` replaces."""

    def exec_module(self, module: ModuleType) -> None:
        modules[module.__name__] = __getattr__(module.__name__.rpartition(".")[2])


meta_path.append(_Namespaces())


def __dir__() -> list[str]:
    return sorted({*globals(), *_found()})


def _found() -> list[str]:
    """The public names whose packages and dependencies are installed, so that help() and `import *` work."""
    from importlib.util import find_spec

    def is_there(module: str) -> bool:
        try:
            return find_spec(module) is not None
        except ImportError:  # the parent package is missing
            return False

    packages = {name: f"{__name__}.{module.split('.')[0]}" for name, module in {**_MODULE_OF, **_NAMESPACES}.items()}
    there = {module: is_there(module) for module in {*packages.values(), *_NEEDED.values()}}
    return sorted(name for name, own in packages.items() if there[own] and there[_NEEDED.get(name, own)])
