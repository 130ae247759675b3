"""Damaged shards -> their whole samples, and an account of every byte: reading goes on at the next sound header."""

from tarshards.repair.grouping import FoundSample, group_found
from tarshards.repair.plain import PlainFile, open_plain
from tarshards.repair.reading import explain, read_resyncing
from tarshards.repair.survey import Survey, survey_file, survey_shard
from tarshards.repair.walking import Gap, Piece, Zeros, walk

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
