"""Where a shard is damaged: the findings of `tarcheck` by offset, and the bytes that belong to no member."""

from __future__ import annotations

from typing import Any

from tarshards.storage.manifest import Shard
from tarshards.verbs.check import check_shards


def damage_map(shard: Shard) -> dict[str, Any]:
    """Return the size of a shard, its gaps and its findings; a remote shard is copied first."""
    surveys: list[Any] = []
    report = check_shards([shard], allow_empty=True, on_survey=lambda _, survey: surveys.append(survey))
    gaps = [gap for survey in surveys for gap in survey.gaps]
    return {
        "size": sum(survey.size for survey in surveys),
        "gaps": [{"begin": gap.start, "end": gap.end, "reason": gap.reason} for gap in gaps],
        "findings": [finding._asdict() for finding in report.findings],
        "whole": report.samples,
        "lost": report.lost,
    }
