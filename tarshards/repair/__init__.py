"""Damaged shards -> their whole samples, and an account of every byte: reading goes on at the next sound header.

Names are loaded when they are first used: a sound shard needs few of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tarshards.late import importer

if TYPE_CHECKING:
    from tarshards.repair.grouping import FoundSample, group_found
    from tarshards.repair.plain import PlainFile, open_plain
    from tarshards.repair.reading import explain, read_resyncing
    from tarshards.repair.survey import Survey, survey_file, survey_shard
    from tarshards.repair.walking import Gap, Piece, Zeros, walk

_ROOM_OF = {
    "FoundSample": "grouping",
    "Gap": "walking",
    "Piece": "walking",
    "PlainFile": "plain",
    "Survey": "survey",
    "Zeros": "walking",
    "explain": "reading",
    "group_found": "grouping",
    "open_plain": "plain",
    "read_resyncing": "reading",
    "survey_file": "survey",
    "survey_shard": "survey",
    "walk": "walking",
}

__all__ = [
    "FoundSample",
    "Gap",
    "Piece",
    "PlainFile",
    "Survey",
    "Zeros",
    "explain",
    "group_found",
    "open_plain",
    "read_resyncing",
    "survey_file",
    "survey_shard",
    "walk",
]

__getattr__ = importer(__name__, _ROOM_OF)
