"""Where a shard is damaged: the findings of `tarcheck` by offset, and the bytes that belong to no member."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tarshards.storage.manifest import Shard
from tarshards.verbs.check import check_shards

if TYPE_CHECKING:
    from tarshards.samples.resync.reading import Survey
    from tarshards.storage.opening import PlainFile


def damage_map(shard: Shard) -> dict[str, Any]:
    """Return the size of a shard, its gaps and its findings; a remote shard is copied first."""
    about: dict[str, Any] = {"size": 0, "gaps": []}

    def note(file: PlainFile, survey: Survey) -> None:
        about["size"] = file.size
        about["gaps"] = [{"begin": gap.start, "end": gap.end, "reason": gap.reason} for gap in survey.gaps]

    report = check_shards([shard], allow_empty=True, on_survey=note)
    about["findings"] = [finding._asdict() for finding in report.findings]
    about["whole"], about["lost"] = report.samples, report.lost
    return about
