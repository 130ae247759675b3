"""torch, and our names that need it, for test modules whose other tests run without torch.

Where torch is missing, each name is a stand-in, and a test that calls one is skipped.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest


class Missing:
    """Stands for all of torch: its attributes are stand-ins too."""

    def __getattr__(self, name: str) -> Missing:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **options: Any) -> Any:
        pytest.skip("needs torch")


if find_spec("torch"):
    import torch
    from torch.utils.data import DataLoader, Subset

    from tarshards import ShardDataset, ShardLoader, webdataset
    from tarshards.webdataset import tariterators
else:
    torch = DataLoader = Subset = ShardDataset = ShardLoader = webdataset = tariterators = Missing()

needs_torch = pytest.mark.skipif(not find_spec("torch"), reason="needs torch")

__all__ = [
    "DataLoader",
    "ShardDataset",
    "ShardLoader",
    "Subset",
    "needs_torch",
    "tariterators",
    "torch",
    "webdataset",
]
