"""Map commands over samples: each sample becomes files in a scratch directory, and what is left of them its result.

Names are loaded when they are first used, since a slot's process starts quickly and needs neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tarshards.late import importer

if TYPE_CHECKING:
    from tarshards.shell.halt import Halt
    from tarshards.shell.run import map_command

__all__ = ["Halt", "map_command"]

__getattr__ = importer(__name__, {"Halt": "halt", "map_command": "run"})
