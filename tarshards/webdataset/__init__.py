"""webdataset's API over tarshards, for existing code: ``import tarshards.webdataset as wds``.

``docs/migrating.md`` lists what is the same, better, or not offered. The modules have webdataset's names, for code that
imports from them; some stand for several of webdataset's modules.

- ``handlers``: error handlers, the rank and worker; also ``utils``
- ``autodecode``: decoding by extension; also ``tenbin``
- ``filters``: the stages
- ``tariterators``: shards to samples; also ``gopen``
- ``shardlists``: shards, sampled and divided among ranks; also ``cache``
- ``pipeline``: ``DataPipeline``, ``WebDataset``, ``WebLoader``; also ``compat``, ``extradatasets``, ``mix`` and
  ``pytorch``
- ``writer``: samples to shards
- ``wids``: samples by number
"""

# ruff: noqa: E402, F403

import sys
from typing import Any

from tarshards.samples.codecs.registry import require
from tarshards.stream.other_names import not_here

require("torch", extra="torch")  # before the modules import it
from tarshards.webdataset import autodecode, filters, handlers, pipeline, shardlists, tariterators, wids, writer
from tarshards.webdataset.autodecode import *
from tarshards.webdataset.filters import *
from tarshards.webdataset.handlers import *
from tarshards.webdataset.pipeline import *
from tarshards.webdataset.shardlists import *
from tarshards.webdataset.tariterators import *
from tarshards.webdataset.writer import *

__version__ = "1.0.2"  # of webdataset, whose API this is

utils, tenbin, cache, compat, extradatasets, mix = handlers, autodecode, shardlists, pipeline, pipeline, pipeline
pytorch = pipeline


def _refuse(name: str) -> Any:
    """Raise the error for a name that is not here: ImportError with ours instead, or AttributeError."""
    if instead := not_here(__name__, name):
        raise ImportError(f"{__name__} has no {name}{instead}", name=name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)


for _name in "utils", "tenbin", "cache", "compat", "extradatasets", "mix", "pytorch":
    sys.modules[f"{__name__}.{_name}"] = globals()[_name]  # for code that imports from it
sys.modules[f"{__name__}.gopen"] = tariterators  # the attribute of this name is the function
for _module in sys.modules[__name__], autodecode, filters, handlers, pipeline, shardlists, tariterators, wids, writer:
    vars(_module)["__getattr__"] = _refuse
