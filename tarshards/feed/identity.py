"""The loader that feeders and consumers name, and the properties that must be equal on both sides."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from tarshards.errors import UrlError, shortened
from tarshards.loaders.passes import ResumableLoader
from tarshards.run.samples.runners import load

PACKAGES = ("tarshards", "numpy", "pillow", "torch")  # packages whose versions may change a batch


def loader_of(spec: str) -> ResumableLoader:
    """Return the loader that *spec*, ``module:function``, makes: its function is called without arguments.

    The module is imported from the current folder or from Python's path. Raises UrlError for a malformed spec, a
    missing function, and a function that does not return a ``ShardLoader`` or ``ArrayLoader`` of indexed shards.
    """
    module, _, name = spec.partition(":")
    if not module or not name:
        raise UrlError("a loader is named module:function", url=spec)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        function = load(spec)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise UrlError(f"there is no module {error.name}", url=spec) from error
    except AttributeError as error:
        raise UrlError(f"module {module} has no function {name}", url=spec) from error
    loader = function()
    if not isinstance(loader, ResumableLoader):
        raise UrlError(f"it returns {shortened(loader)}, not a ShardLoader or an ArrayLoader", url=spec)
    if not loader.passes.maker.is_planned:
        raise UrlError("feeding requires indexed shards; run `tarindex` first", url=spec)
    return loader


def identity(spec: str, loader: ResumableLoader) -> dict[str, str]:
    """Return the values that must be equal at feeder and consumer, by the names that errors use.

    They cover the source file of the spec's module, the dataset and its order, the batch size, and the versions of
    Python and of the packages that make batches, but not other modules that the spec imports.
    """
    module = sys.modules[spec.partition(":")[0]]
    path = getattr(module, "__file__", None)
    source = b""
    if path is not None:
        with open(path, "rb") as file:
            source = file.read()
    maker = loader.passes.maker
    return {
        f"source of {module.__name__}": blake2b(source, digest_size=16).hexdigest(),
        "function": spec.partition(":")[2],
        "data": maker.stream.source.digest,
        "order": repr(maker.stream.source.order),
        "batches": repr((type(maker).__name__, maker.size, maker.fill, maker.drop_last)),
        "Python": platform.python_version(),
    } | {name: _version(name) for name in PACKAGES}


def differences(ours: Mapping[str, str], theirs: Mapping[str, Any]) -> str:
    """Describe how the identities of a consumer and a feeder differ; return "" if they are equal.

    >>> differences({"data": "1f", "torch": "2.13.0"}, {"data": "1f", "torch": "2.12.0"})
    'torch (2.12.0, here 2.13.0)'
    """
    names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    return ", ".join(f"{name} ({theirs.get(name, 'none')}, here {ours.get(name, 'none')})" for name in names)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
