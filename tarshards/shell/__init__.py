"""Map commands over samples: each sample becomes files in a scratch directory, and what is left of them its result.

Names are loaded when they are first used, since a slot's process starts quickly and needs neither.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tarshards.shell.halt import Halt
    from tarshards.shell.run import map_command

__all__ = ["Halt", "map_command"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{'halt' if name == 'Halt' else 'run'}"), name)
