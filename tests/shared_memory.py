"""What this process has mapped of the memory through which batches come from workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest


def mapped() -> list[tuple[range, str]]:
    """The addresses at which unnamed files are mapped, and the files."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    found = [line.split() for line in lines if "memfd:tarshards" in line]
    return [(range(*(int(part, 16) for part in words[0].split("-"))), words[4]) for words in found]


def files() -> set[str]:
    """The unnamed files that are mapped."""
    return {file for _, file in mapped()}


def is_lent(array: Any) -> bool:
    """Say whether an array or tensor is where a worker wrote it."""
    return any(np.asarray(array).__array_interface__["data"][0] in addresses for addresses, _ in mapped())


def lend(patch: pytest.MonkeyPatch) -> None:
    """Lend all arrays, however small, also in forked workers."""
    from tarshards.loaders.torch import handover

    patch.setattr(handover, "LITTLE", 0)
    patch.setattr(handover, "LARGE", 0)
