"""The loops over bytes, headers, pixels, sockets: kernels in C, and for each a twin in Python with identical results.

- ``tar``: parse and create tar headers, group members by key (``_tar.c``, ``_tar_py.py``)
- ``mapped``: map files and read from them safely; replace words of shared memory (``_mapped.c``, ...)
- ``sidecars``: read the beginnings of many sidecars
- ``headers``: the members that sidecars list, compared with their headers
- ``rows``: gather, compare and parse the fields of a batch
- ``pixels``: resize the images of a batch
- ``wire``: receive from many sockets into their places
- ``jpeg``: decode and resize the JPEGs of a batch by libjpeg-turbo; the twin takes none

This module alone chooses: ``kernels.tar`` is the kernel if all are compiled, and otherwise the twin. They are chosen
together because compiled kernels alone may touch the files that ``mapped`` maps.
"""

from __future__ import annotations

import os
from functools import cache
from importlib import import_module
from importlib.machinery import PathFinder
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tarshards.kernels import _headers as headers
    from tarshards.kernels import _jpeg as jpeg
    from tarshards.kernels import _mapped as mapped
    from tarshards.kernels import _pixels as pixels
    from tarshards.kernels import _rows as rows
    from tarshards.kernels import _sidecars as sidecars
    from tarshards.kernels import _tar as tar
    from tarshards.kernels import _wire as wire

__all__ = ["headers", "jpeg", "mapped", "pixels", "rows", "sidecars", "tar", "wire"]

#: The kernels that are not compiled.
MISSING = [name for name in __all__ if PathFinder.find_spec(f"{__name__}._{name}", __path__) is None]
IS_COMPILED = not MISSING


def __getattr__(name: str) -> ModuleType:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = globals()[name] = import_module(f"{__name__}._{name}{'' if IS_COMPILED else '_py'}")
    return module


@cache
def warn_if_missing() -> None:
    """Log, once per process, that kernels are missing, what that costs, and the cure."""
    if not IS_COMPILED:
        import logging

        logging.getLogger("tarshards").warning(
            "the native kernels are not compiled, so small samples are read several times more slowly; %s", cure()
        )


def cure() -> str:
    """Return how to get the missing kernels."""
    source = os.path.abspath(f"{__path__[0]}/../..")
    if os.path.exists(f"{source}/setup.py"):
        return (
            f"tarshards is imported from its source, {source}: run `pip install -e .` there, or move your program to "
            "another folder, where it imports the installed package"
        )
    return "reinstall tarshards where a C compiler is found"
